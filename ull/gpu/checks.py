"""Whether this machine's GPU can run a bundle: each reason why not is a GpuError with its remedy, before any work."""

from __future__ import annotations

import importlib
import os

from ull.bundle import GPU_ARCHITECTURES, Bundle, capability_text
from ull.errors import GpuError
from ull.gpu.driver import DeviceInfo


def check_device(bundle: Bundle, info: DeviceInfo) -> None:
    """Architecture and driver. Raises GpuError."""
    target, code = bundle.manifest.target, bundle.manifest.code
    if target not in GPU_ARCHITECTURES or code is None:
        raise GpuError("wrong_gpu", f"the bundle is built for target {target!r}, not for a GPU")
    architecture = GPU_ARCHITECTURES[target]
    wanted = architecture.capability
    if info.capability != wanted:
        raise GpuError(
            "wrong_gpu",
            f"the bundle is built for {target} (compute capability {capability_text(wanted)}), but {info.name} has "
            f"{capability_text(info.capability)}; {architecture.machines} is needed, or a bundle for "
            f"{_target_for(info.capability)}",
        )
    toolkit = tuple(int(part) for part in code.toolkit.split("."))
    if info.driver[0] < toolkit[0]:
        raise GpuError(
            "old_driver",
            f"the bundle's kernels were compiled by CUDA {code.toolkit}, the driver speaks CUDA "
            f"{info.driver[0]}.{info.driver[1]}; update the NVIDIA driver to one for CUDA {toolkit[0]}, or rebuild the "
            "bundle with an older nvidia-cuda-nvrtc",
        )


def _target_for(capability: tuple[int, int]) -> str:
    """The target that this GPU could run, else the cpu."""
    fitting = [name for name, architecture in GPU_ARCHITECTURES.items() if architecture.capability == capability]
    return f"target {fitting[0]}" if fitting else "target cpu"


def check_size(needed: int, info: DeviceInfo) -> None:
    """Whether the GPU, or the slice of one, could ever hold the engine. Raises GpuError."""
    if needed > info.memory_bytes:
        is_slice = "MIG" in info.name
        what = "MIG slice" if is_slice else "GPU"
        remedy = "use a larger slice or the whole GPU" if is_slice else "use a larger GPU"
        raise GpuError(
            "gpu_memory",
            f"the engine needs {needed / 1e9:.1f} GB, but this {what} ({info.name}) has {info.memory_bytes / 1e9:.1f} "
            f"GB in all; {remedy}, lower engine.context, or build with a smaller precision",
        )


def other_processes(info: DeviceInfo) -> list[int]:
    """Ids of other processes that compute on the GPU; none where that cannot be told."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
        hexes = info.uuid.hex()
        uuid = "GPU-" + "-".join([hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:]])
        running = nvml.device_get_compute_running_processes_v3(nvml.device_get_handle_by_uuid(uuid))
        return [int(item.pid) for item in running if int(item.pid) != os.getpid()]
    except Exception:  # NVML is a courtesy: whatever it lacks or refuses, the engine can run
        return []
