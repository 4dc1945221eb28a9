"""What a machine brings for a build of plans, said before it begins: one line each, with the command that mends it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ull.bundle import Model, Precision, device_tensors
from ull.errors import BuildError
from ull.gpu.driver import Driver
from ull.gpu.tensorrt import library as tensorrt_library
from ull_build.progress import Reporter

OLD_WHEELS = "tensorrt tensorrt-cu13 tensorrt-cu13-bindings tensorrt-cu13-libs"
TO_CUDA_12 = f"`pip uninstall -y {OLD_WHEELS} && pip install 'ull[tensorrt-cu12]'`, or update the driver to r580"
TO_CUDA_13 = "`pip install 'ull[tensorrt]'`, which is for CUDA 13"
_BUILDER_BYTES = 4 << 30  # of the device and of the host, that TensorRT takes for itself: an estimate
_SEGMENT_COPIES = 6  # of a segment's weights on the host: read, in the network, folded, serialised, written, tried


@dataclass(frozen=True)
class Machine:
    """What is there. Bytes; `driver`: the CUDA version that it speaks; `wheel`: the CUDA version that it is for."""

    driver: tuple[int, int]
    release: str
    tensorrt: str
    wheel: int | None
    device_free: int
    host_free: int | None
    disk_free: int


@dataclass(frozen=True)
class Needs:
    """What a build takes, in bytes, as far as that can be told before."""

    device: int
    host: int
    disk: int


def read_machine(trt: Any, folder: Path) -> Machine:
    """Raises GpuError."""
    driver = Driver(0)
    driver.open()
    try:
        free, _ = driver.memory_info()
    finally:
        driver.close()
    return Machine(
        driver=driver.info.driver,
        release=_first(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version")) or "unknown",
        tensorrt=str(trt.__version__),
        wheel=tensorrt_library.cuda_of_wheel(),
        device_free=free,
        host_free=_available(Path("/proc/meminfo")),
        disk_free=shutil.disk_usage(folder).free,
    )


def estimate(model: Model, precision: Precision) -> Needs:
    """Device and disk hold plans and our own kernels' weights, to compare them with; the host one segment at a time."""
    sizes = {name: shape.nbytes for name, shape in device_tensors(model, precision).items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    largest = max(layer, sizes.get("lm_head.weight", 0))
    both = 2 * sum(sizes.values())
    return Needs(device=both + _BUILDER_BYTES, host=_SEGMENT_COPIES * largest + _BUILDER_BYTES, disk=both)


def remarks(machine: Machine, needs: Needs) -> list[str]:
    """A line on each. Raises BuildError for a driver that the installed TensorRT cannot run on."""
    spoken = f"{machine.driver[0]}.{machine.driver[1]}"
    flavour = "not from pip" if machine.wheel is None else f"wheel for CUDA {machine.wheel}"
    driver = f"driver: release {machine.release}, speaks CUDA {spoken}"
    wheel = f"TensorRT: {machine.tensorrt}, {flavour}"
    if machine.wheel is not None and machine.driver[0] < machine.wheel:
        mend = TO_CUDA_12 if machine.driver[0] == 12 else "update the driver to r580"
        raise BuildError(f"{driver}; {wheel}, which it does not run: {mend}", field="forward")
    lines = [driver, wheel]
    if machine.wheel is not None and machine.driver[0] > machine.wheel:
        lines[1] += f"; runs here; {TO_CUDA_13}, may choose newer kernels"
    for what, free, needed, mend in (
        (
            "device memory",
            machine.device_free,
            needs.device,
            "end what `nvidia-smi` lists",
        ),
        ("host memory", machine.host_free, needs.host, "end what `top -o %MEM` lists"),
        ("disk", machine.disk_free, needs.disk, "free some, or choose another --output"),
    ):
        if free is None:
            lines.append(f"{what}: not known here; the build takes about {needed / 1e9:.0f} GB")
            continue
        line = f"{what}: {free / 1e9:.0f} GB free, the build takes about {needed / 1e9:.0f} GB"
        lines.append(line if free >= needed else f"{line}: TOO LITTLE, {mend}")
    return lines


def preflight(trt: Any, model: Model, precision: Precision, folder: Path, reporter: Reporter) -> None:
    """Says what is there. Raises BuildError where a build cannot begin, GpuError without a GPU."""
    for line in remarks(read_machine(trt, folder), estimate(model, precision)):
        reporter.note(line)


def _first(pattern: str, path: Path) -> str | None:
    """The first group of a pattern in a file; None without the file or the pattern."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return found and found[1]


def _available(path: Path) -> int | None:
    """Bytes of host memory that programs may still take."""
    found = _first(r"MemAvailable:\s+(\d+) kB", path)
    return None if found is None else int(found) * 1024
