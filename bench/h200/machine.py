"""Whether this machine can run `make h200`, and what is on it: for the log and the report.

python bench/h200/machine.py REPORT    # status 1 and one clear line where something is missing
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from journal import Report
from packages import NEEDED, Requirement, faults

IMPORTED = ("cuda.bindings.driver", "cuda.bindings.nvrtc")  # whose parts load libraries
WANTED = ("cmake", "compute-sanitizer", "g++", "ninja")  # programs; without them a step is left out or done otherwise
WANTED_MODULES = ("pytest_timeout", "tensorrt", "torch", "transformers", "xdist")  # some tests do without
MEND = "run `make h200-wheels` where a package registry is reached and carry .wheels/ to this machine"


def missing_packages() -> list[str]:
    """What cannot be imported, or is older than it may be."""
    found = {name: why for name, why in faults(NEEDED).items() if why}
    for module in (*NEEDED, *IMPORTED):
        package = Requirement(NEEDED[".".join(module.split(".")[:2])]).name
        if package not in found:
            try:
                importlib.import_module(module)
            except ImportError as error:
                found[package] = f"cannot be imported: {error}"
    return [f"{name} ({why})" for name, why in sorted(found.items())]


def describe() -> dict[str, str]:
    """Versions of what compiles and runs kernels. Raises RuntimeError where there is no GPU or no NVRTC."""
    from cuda.bindings import driver, nvrtc

    try:  # cuda.bindings raises RuntimeError where it finds no libcuda, or no libnvrtc
        status, *_ = driver.cuInit(0)
        if int(status) != 0 or int(driver.cuDeviceGetCount()[1]) == 0:
            raise RuntimeError(f"the driver sees no GPU ({status.name})")
    except RuntimeError as error:
        raise RuntimeError(f"no GPU on this machine: {error}") from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise RuntimeError(f"no NVRTC on this machine, which PyTorch for CUDA 13 brings: {error}") from error
    absent = [name for name in WANTED if shutil.which(name) is None]
    absent += [name for name in WANTED_MODULES if importlib.util.find_spec(name) is None]
    spoken = int(driver.cuDriverGetVersion()[1])
    return {
        "nvrtc": f"{major}.{minor}",
        "driver": f"CUDA {spoken // 1000}.{spoken % 1000 // 10}, {_release()}",
        "cuda_bindings": version("cuda-bindings"),
        "g++": _output("g++", "-dumpfullversion"),
        "cmake": _output("cmake", "--version").split("\n")[0].removeprefix("cmake version "),
        "nanobind": version("nanobind"),
        "glibc": platform.libc_ver()[1],
        "python": sys.version.split()[0],
        "absent": ", ".join(absent) or "nothing",
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return "none"


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
    if missing := missing_packages():
        report.note("failures", "machine", f"this Python lacks {', '.join(missing)}: {MEND}")
        return 1
    try:
        report.found["machine"] = describe()
    except RuntimeError as error:
        report.note("failures", "machine", str(error))
        return 1
    report.save()
    print(*(f"{name}: {value}" for name, value in report.found["machine"].items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
