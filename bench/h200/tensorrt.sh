#!/usr/bin/env bash
# What TensorRT makes of our networks on an H200, into one JSON report (default: tensorrt.json in $OUT or .cache/h200; or
# the first argument). `make h200` comes first: it brings packages and the native module. TensorRT itself is installed by
# hand: pip install tensorrt (tensorrt-cu12 for drivers before r580).
#
# ULL_H200_SECONDS (1500) is for everything: what has no time left is cut, and the report says so.
set -uo pipefail
cd "$(dirname "$0")/../.."
report=${1:-${OUT:-.cache/h200}/tensorrt.json}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/.cache/h200/site:$PWD:$PWD/build:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
"$python" -c 'import ull._native' || { echo 'the native module is not built here: run `make h200` first' >&2; exit 1; }
mkdir -p "$(dirname "$report")"
"$python" bench/h200/measure_plans.py --json "$report" --seconds "${ULL_H200_SECONDS:-1500}" 2>&1 |
  tee "$(dirname "$report")/tensorrt.log"
exit "${PIPESTATUS[0]}"
