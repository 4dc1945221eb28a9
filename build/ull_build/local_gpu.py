"""The GPU of the machine that builds, where a build needs one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from ull.bundle import ARCHITECTURES, Target
from ull.errors import BuildError


@dataclass(frozen=True)
class LocalGpu:
    """`capability` as "9.0"."""

    name: str
    capability: str


def find_gpu(target: Target, purpose: str) -> LocalGpu:
    """GPU 0, on which `purpose` is to happen. Raises GpuError without one, BuildError where it is not the target's."""
    found = importlib.import_module("ull.gpu.driver").describe_device(0)
    gpu = LocalGpu(found["name"], found["capability"])
    architecture = ARCHITECTURES[target]
    if gpu.capability != "{}.{}".format(*architecture.capability):
        raise BuildError(
            f"{purpose} on the GPU at hand, {gpu.name} (compute capability {gpu.capability}), which is not a {target}: "
            f"build on {architecture.machines}",
            field="target",
        )
    return gpu
