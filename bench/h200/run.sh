#!/usr/bin/env bash
# Everything that only an H200 can tell, in one go: installs into .cache/h200, runs the GPU tests and the benchmark, prints
# a table and writes one JSON report (default: .cache/h200/report.json; or the first argument). Reaches no package
# registry: what the machine's Python lacks comes from .wheels/ (`make h200-wheels` on a machine that reaches one).
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
report=${1:-.cache/h200/report.json}
site=$PWD/.cache/h200/site
build=$PWD/.cache/h200/native
mkdir -p "$site" "$(dirname "$report")"

seconds() { echo "== $1 took $((SECONDS - started)) s"; }

started=$SECONDS
if compgen -G '.wheels/*.whl' > /dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" .wheels/*.whl
fi
export PYTHONPATH=$site:$PWD:$PWD/build:${PYTHONPATH:-} PYTHONUNBUFFERED=1
"$python" - <<'PY'
import importlib.util
needed = "cuda.bindings jinja2 ml_dtypes msgspec nanobind numpy pytest rich safetensors tokenizers torch uvloop zmq".split()
missing = [name for name in needed if importlib.util.find_spec(name.split(".")[0]) is None]
if missing:
    raise SystemExit(f"this Python lacks {', '.join(missing)}: run `make h200-wheels` where a registry is reached and copy .wheels/")
PY
cmake -S ull/native -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" > /dev/null
cmake --build "$build"
for module in "$build"/_native*.so; do
  cp "$module" "ull/.$(basename "$module")" && mv "ull/.$(basename "$module")" "ull/$(basename "$module")"
done
seconds install

started=$SECONDS
tests=0
ULL_KERNELS=device timeout "${ULL_H200_TEST_SECONDS:-180}" "$python" -m pytest -q -x --no-header -p no:cacheprovider tests/h200 \
  --ignore=tests/h200/test_plans.py --ignore=tests/h200/test_persistent.py \
  tests/test_kernel_linear.py tests/test_kernel_attention.py tests/test_kernel_sampling.py tests/test_kernel_medusa.py || tests=$?
timeout 60 "$python" -m pytest -q --no-header -p no:cacheprovider tests/h200/test_persistent.py || tests=$?
if command -v compute-sanitizer > /dev/null; then
  ULL_KERNELS=device timeout 90 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -x --no-header -p no:cacheprovider \
    tests/h200/test_small.py || tests=$?
else
  echo "compute-sanitizer is not on this machine: memory checks were not run"
fi
if "$python" -c 'import tensorrt' 2> /dev/null; then
  timeout 300 "$python" -m pytest -q --no-header -p no:cacheprovider tests/h200/test_plans.py || tests=$?
else
  echo "TensorRT is not on this machine: its plans were not tried"
fi
seconds tests

started=$SECONDS
"$python" bench/h200/measure.py --json "$report" --tests-status "$tests"
seconds benchmark
exit "$tests"
