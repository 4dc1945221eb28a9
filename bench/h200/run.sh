#!/usr/bin/env bash
# Everything that only an H200 can tell, in two commands that end within a quarter of an hour together:
#
#   ULL_H200_STEPS=correctness bash bench/h200/run.sh    # native build, kernels and engine against NumPy and PyTorch
#   ULL_H200_STEPS=figures bash bench/h200/run.sh        # bandwidth, rounds, prefill, client; one table
#
# On a machine that is lent by the command, name .wheels in what is carried there (`make h200-wheels` fills it where a
# package registry is reached); nothing else is needed, and no registry is reached from here. The second command finds
# in .cache/ what the first one has built, and adds to its report.
#
# ULL_H200_STEPS: groups and steps, separated by commas (steps.py lists them); empty: both commands, one behind the other.
# ULL_H200_SECONDS (330 and 450): of each of the two; what has no time left is cut, and the report says so.
# ULL_COMMIT names the commit where the tree came without its history.
# PYTHON (python3): one with PyTorch, if there is one.
#
# The first argument is where the report goes (default: report.json in $OUT or .cache/h200), with run.log, build.log,
# traces.tar and trace-chunk.tar beside it. Status 1 if anything failed, 2 for a step that there is not.
set -uo pipefail
cd "$(dirname "$0")/../.."

report=${1:-${OUT:-.cache/h200}/report.json}
case $report in /*) ;; *) report=$PWD/$report ;; esac
cache=$PWD/.cache/h200
export PYTHONPATH=$cache/site:$PWD:$PWD/build:${PYTHONPATH:-} PATH=$cache/site/bin:$PATH
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

mkdir -p "$cache/site" "$(dirname "$report")"
"${PYTHON:-python3}" bench/h200/run.py "$report" 2>&1 | tee -a "$(dirname "$report")/run.log"
exit "${PIPESTATUS[0]}"
