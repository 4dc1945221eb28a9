"""GPU bundles for tests: of engines/tiny or a random checkpoint, with kernels that do nothing, compiled in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import emulation
from ull.bundle import (
    CHUNK_KERNELS,
    DEVICE_KERNELS,
    DFLASH_CHUNK_KERNELS,
    DFLASH_KERNELS,
    EAGLE_CHUNK_KERNELS,
    EAGLE_KERNELS,
    HEAD_SCAN_KERNELS,
    MEDUSA_KERNELS,
    PAGES_KERNELS,
    DeviceCode,
    Speculation,
    open_bundle,
)
from ull_build.build import build
from ull_build.code import kernels
from ull_build.settings import Settings

STUB = """#include "params.h"
#if defined(ULL_EAGLE_TAPS)
extern "C" __device__ int {eagle};
#define BODY {{ {eagle} = 1; }}
#elif defined(ULL_DFLASH_TAPS)
extern "C" __device__ int {dflash};
#define BODY {{ {dflash} = 1; }}
#else
#define BODY {{}}
#endif
{kernels}
"""
OF_EAGLE, OF_DFLASH = "ull_of_eagle", "ull_of_dflash"  # of all cubins of a head, by which the driver double knows them

_PRODUCTS = frozenset(f"ull_chunk_{name}" for name in ("qkv", "o", "gate_up", "down"))

ROOMS = {  # files that only some bundles need
    "attention_pages": PAGES_KERNELS,
    **{name.removeprefix("ull_"): frozenset([name]) for name in CHUNK_KERNELS - {"ull_begin_chunk"} - _PRODUCTS},
    "chunk_linear": _PRODUCTS,
    "medusa": MEDUSA_KERNELS,
    "head_scan": HEAD_SCAN_KERNELS,
    "eagle": EAGLE_KERNELS,
    "eagle_chunk": EAGLE_CHUNK_KERNELS,
    "dflash": DFLASH_KERNELS,
    "dflash_chunk": DFLASH_CHUNK_KERNELS,
}


ALL_KERNELS = DEVICE_KERNELS.union(*ROOMS.values(), CHUNK_KERNELS)


def write_stubs(directory: Path, names: Any = ALL_KERNELS) -> Path:
    """A folder of kernel sources in which every kernel exists and none does anything."""
    always = sorted(set(names).difference(*ROOMS.values()))
    files = {f"{room}/{room}.cu": sorted(kernels & set(names)) for room, kernels in ROOMS.items()}
    files |= {"round/first.cu": always[::2], "round/second.cu": always[1::2]}
    for file, chosen in files.items():
        lines = [f'extern "C" __global__ void {name}(ull::gpu::SampleParams) BODY' for name in chosen]
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(STUB.format(kernels="\n".join(lines), eagle=OF_EAGLE, dflash=OF_DFLASH))
    return directory


def build_with_stubs(monkeypatch: pytest.MonkeyPatch, sources: Path, settings: Settings) -> Path:
    """Builds a bundle with the stubs in place of the real kernels."""
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(sources))
    return build(settings).path


def emulated_kernels(bundle: Path, *more: Path) -> str:
    """Every kernel of ull, compiled for the emulator with the bundle's macros, and those of `more`: for the double.

    Those of heads are libraries of their own.
    """
    manifest = open_bundle(bundle).manifest
    assert manifest.code is not None
    speculation = manifest.speculation or Speculation()
    libraries = [str(_library(manifest.code, *more))]
    for symbol, head in ((OF_EAGLE, speculation.eagle), (OF_DFLASH, speculation.dflash)):
        if head is not None and head.code is not None:
            libraries.append(f"{symbol}={_library(head.code)}")
    return ":".join(libraries)


def _library(code: DeviceCode, *more: Path) -> Path:
    macros = {name.removeprefix("ULL_"): float(value.rstrip("F")) for name, value in code.macros.items()}
    model = {name: value if name == "RMS_EPSILON" else int(value) for name, value in macros.items()}
    needed = frozenset(code.kernels())
    sources = [*(source.name for source in kernels.kernel_sources(needed)), *more]
    return emulation.build_library(sources, model, level=emulation.ENGINE_LEVEL)


PROMPT = [0, 306, 903, 10, 1617, 14, 2480, 294, 271, 323]  # engines/tiny: "def add(first, second):\n    return"
