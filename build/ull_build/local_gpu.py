"""The GPU of the machine that builds, where a build needs one, and bundles in the making that run there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ull.bundle import (
    GPU_ARCHITECTURES,
    WEIGHTS_FILE,
    Bundle,
    Manifest,
    Target,
    capability_text,
    digest_of,
    encode_manifest,
    read_tensor_file,
)
from ull.errors import BuildError
from ull.gpu import driver, program
from ull.log import Log


@dataclass(frozen=True)
class LocalGpu:
    """`capability` as "9.0"."""

    name: str
    capability: str


def find_gpu(target: Target, purpose: str) -> LocalGpu:
    """GPU 0, on which `purpose` is to happen. Raises GpuError without one, BuildError where it is not the target's."""
    found = driver.describe_device(0)
    gpu = LocalGpu(found["name"], found["capability"])
    architecture = GPU_ARCHITECTURES[target]
    if gpu.capability != capability_text(architecture.capability):
        raise BuildError(
            f"{purpose} on the GPU at hand, {gpu.name} (compute capability {gpu.capability}), which is not a {target}: "
            f"build on {architecture.machines}",
            field="target",
        )
    return gpu


def staged_bundle(directory: Path, manifest: Manifest) -> Bundle:
    """The bundle that `directory` would be with this manifest, which is not written yet: its weights are there."""
    tensors = read_tensor_file(directory / WEIGHTS_FILE)
    return Bundle(directory, manifest, tensors, digest_of(encode_manifest(manifest)))


def open_program(bundle: Bundle, context: int) -> Any:
    """The graph program of a bundle on GPU 0. Raises GpuError or BundleError."""
    return program.load(bundle, context=context, log=Log("warning"))
