"""GPU bundles for tests: of engines/tiny or a random checkpoint, with kernels that do nothing, compiled in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import emulation
from ull.bundle import DEVICE_KERNELS, open_bundle
from ull_build import kernels
from ull_build.build import Settings, build

STUB = """#include "params.h"
{kernels}
"""


def write_stubs(directory: Path, names: Any = DEVICE_KERNELS) -> Path:
    """A folder of kernel sources in which every kernel exists and none does anything."""
    directory.mkdir(exist_ok=True)
    lines = [f'extern "C" __global__ void {name}(ull::gpu::SampleParams) {{}}' for name in sorted(names)]
    for part, start in (("first", 0), ("second", 1)):
        (directory / f"{part}.cu").write_text(STUB.format(kernels="\n".join(lines[start::2])))
    return directory


def build_with_stubs(monkeypatch: pytest.MonkeyPatch, sources: Path, settings: Settings) -> Path:
    """Builds a bundle with the stubs in place of the real kernels."""
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(sources))
    return build(settings).path


def emulated_kernels(bundle: Path, *more: Path) -> Path:
    """A library of every kernel of ull, compiled for the emulator with the bundle's macros, and those of `more`."""
    code = open_bundle(bundle).manifest.code
    assert code is not None
    macros = {name.removeprefix("ULL_"): float(value.rstrip("F")) for name, value in code.macros.items()}
    model = {name: value if name == "RMS_EPSILON" else int(value) for name, value in macros.items()}
    return emulation.build_library([*(source.name for source in kernels.kernel_sources()), *more], model)
