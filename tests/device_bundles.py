"""GPU bundles for tests: of engines/tiny or a random checkpoint, with kernels that do nothing, compiled in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ull.bundle import DEVICE_KERNELS
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
