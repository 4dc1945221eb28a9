#!/usr/bin/env bash
# Everything that only an H200 can tell, in one go: installs into .cache/h200, runs the GPU tests and the benchmark,
# prints tables and writes one JSON report (default: report.json in $OUT or .cache/h200; or the first argument), with
# run.log and build.log beside it. Status 1 if anything failed. Reaches no package registry: what the machine's Python
# lacks comes from .wheels/ (`make h200-wheels` on a machine that reaches one).
#
# ULL_H200_SECONDS (470) is for everything: what has no time left is cut, and the report says so.
# ULL_COMMIT names the commit where the tree came without its history.
set -uo pipefail
cd "$(dirname "$0")/../.."

report=${1:-${OUT:-.cache/h200}/report.json}
folder=$(dirname "$report")
deadline=$((SECONDS + ${ULL_H200_SECONDS:-470}))
reserve=70 # seconds for what comes behind the benchmark
refused=75 # status of a step that this machine does not let run
failed=0
export refused build_log=$folder/build.log
export python=${PYTHON:-python3} build=$PWD/.cache/h200/native tiny=$PWD/.cache/h200/tiny-medusa.ull
site=$PWD/.cache/h200/site
export PYTHONPATH=$site:$PWD:$PWD/build:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

# step NAME NEEDS LIMIT COMMAND...: runs it for at most LIMIT seconds and what is left; cut where that is less than
# NEEDS. The report gets what came of it.
step() {
  local name=$1 needs=$2 limit=$3 started=$SECONDS left=$((deadline - SECONDS)) status=0 said
  shift 3
  if ((left < needs)); then
    status=$refused said=cut
  else
    timeout -k 5 $((limit < left ? limit : left)) "$@" || status=$?
    case $status in
      0) said=ok ;;
      "$refused") said=refused ;;
      124 | 137) said="ended after its time" ;;
      *) said="status $status" ;;
    esac
  fi
  ((status == 0 || status == refused)) || failed=1
  echo "== $name: $said, $((SECONDS - started)) s"
  "$python" bench/h200/journal.py "$report" "$name" "$said" $((SECONDS - started))
  ((status == 0))
}

has() { "$python" -c "import $1" 2> /dev/null; }

# tests NAME NEEDS LIMIT ARGUMENTS...: pytest, which with its plugin ends tests that hang, and says what failed in time.
tests() {
  local name=$1 needs=$2 limit=$3 left=$((deadline - SECONDS)) options=()
  shift 3
  limit=$((limit < left ? limit : left))
  if has pytest_timeout; then
    limit=$((limit > 30 ? limit : 30))
    options=(--timeout=$((limit - 20)) --timeout-method=thread --session-timeout=$((limit - 15)))
  fi
  step "$name" "$needs" "$limit" \
    "$python" -m pytest -q --no-header -p no:cacheprovider --tb=short "${options[@]}" "$@"
}

compile_module() {
  exec > "$build_log" 2>&1
  cmake -S ull/native -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build "$build"
}

check_memory() {
  local log=$build/sanitizer.log status
  ULL_H200_TINY=$tiny ULL_PATIENCE_S=120 compute-sanitizer --error-exitcode 9 \
    "$python" -m pytest -q --no-header -p no:cacheprovider --tb=short tests/h200/test_small.py 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  if grep -q 'Device not supported' "$log"; then  # as gVisor's is not
    echo "compute-sanitizer refuses this machine's device: memory checks were not run"
    return "$refused"
  fi
  return "$status"
}
export -f compile_module check_memory

main() {
  if compgen -G '.wheels/*.whl' > /dev/null; then
    step packages 5 60 \
      "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" .wheels/*.whl
  fi
  step machine 5 60 "$python" bench/h200/machine.py "$report" || return 1

  local module from=$build
  if ! step "native build" 20 180 bash -c compile_module; then
    tail -n 40 "$build_log"
    from=.wheels
    compgen -G "$from/_native*.so" > /dev/null || return 1
    echo "the native module did not compile: going on with the one in .wheels/"
  fi
  for module in "$from"/_native*.so; do
    cp "$module" "ull/.$(basename "$module")" && mv "ull/.$(basename "$module")" "ull/$(basename "$module")"
  done

  local files=() parallel=() by_file=()
  for module in linear attention sampling medusa rounds; do files+=("tests/test_kernel_$module.py"); done
  has xdist && parallel=(-n 8) by_file=(-n 3 --dist loadfile)
  ULL_KERNELS=device tests "kernel tests" 30 110 "${parallel[@]}" "${files[@]}"
  tests "engine tests" 30 120 "${by_file[@]}" tests/h200 \
    --ignore=tests/h200/test_plans.py --ignore=tests/h200/test_persistent.py

  local seconds=$((deadline - SECONDS - reserve))
  step benchmark $((reserve + 20)) $((seconds + 15)) \
    "$python" bench/h200/measure.py --json "$report" --seconds "$seconds"

  if command -v compute-sanitizer > /dev/null; then
    step "bundle to check" 20 60 "$python" -m ull_build engines/tiny-medusa.toml \
      --target sm_90a --no-eval --quiet --force --output "$tiny" && step "memory checks" 20 90 bash -c check_memory
  else
    echo "compute-sanitizer is not on this machine: memory checks were not run"
  fi
  if has tensorrt; then
    tests "TensorRT plans" 60 300 tests/h200/test_plans.py
  else
    echo "TensorRT is not on this machine: its plans were not tried"
  fi
  tests "one kernel for all layers" 20 60 tests/h200/test_persistent.py  # last: it might wait for ever
  return "$failed"
}

mkdir -p "$site" "$build" "$folder"
rm -f "$report"
main 2>&1 | tee "$folder/run.log"
exit "${PIPESTATUS[0]}"
