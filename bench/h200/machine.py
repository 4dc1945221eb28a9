"""Whether this machine can run `make h200`, and what is on it: for the log and the report.

python bench/h200/machine.py REPORT    # status 1 and one clear line where something is missing
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from journal import Report

NEEDED = (
    *("cuda.bindings.driver", "cuda.bindings.nvrtc", "hypothesis", "jinja2", "ml_dtypes", "msgspec", "nanobind"),
    *("numpy", "pytest", "rich", "safetensors", "tokenizers", "uvloop", "zmq"),
)
WANTED = ("pytest_timeout", "tensorrt", "torch", "transformers", "xdist")  # some tests do without


def missing_modules() -> list[str]:
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def describe() -> dict[str, str]:
    """Versions of what compiles and runs kernels. Raises RuntimeError where there is no GPU."""
    from cuda.bindings import driver, nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    status, *_ = driver.cuInit(0)  # cuda.bindings raises RuntimeError where it finds no libcuda
    if int(status) != 0 or int(driver.cuDeviceGetCount()[1]) == 0:
        raise RuntimeError(f"the driver sees no GPU ({status.name})")
    spoken = int(driver.cuDriverGetVersion()[1])
    return {
        "nvrtc": f"{major}.{minor}",
        "driver": f"CUDA {spoken // 1000}.{spoken % 1000 // 10}, {_release()}",
        "cuda_bindings": version("cuda-bindings"),
        "g++": compiler,
        "python": sys.version.split()[0],
        "absent": ", ".join(name for name in WANTED if importlib.util.find_spec(name) is None) or "nothing",
    }


def _release() -> str:
    """The driver's own version, as NVML tells it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "release unknown"
    text = ctypes.create_string_buffer(80)
    failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text))
    return "release unknown" if failed else text.value.decode()


def main() -> int:
    report = Report(Path(sys.argv[1]))
    if missing := missing_modules():
        wheels = "run `make h200-wheels` where a registry is reached and copy .wheels/"
        report.note("failures", f"this Python lacks {', '.join(missing)}: {wheels}")
        return 1
    try:
        report.found["machine"] = describe()
    except (RuntimeError, OSError) as error:
        report.note("failures", f"no GPU on this machine: {error}")
        return 1
    report.save()
    print(*(f"{name}: {value}" for name, value in report.found["machine"].items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
