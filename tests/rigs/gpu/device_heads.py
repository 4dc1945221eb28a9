"""What tests of heads in bundles for a GPU share: stored tensors, captured launches, and damaged manifests."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from head_checkpoints import Tensors
from manifests import change_manifest, read_manifest_json, write_manifest_json
from recording_driver import Launched, RecordingDriver
from ull.bundle import Bundle, open_bundle
from ull.errors import BundleError
from ull.gpu.program import Program
from ull_build.weights.pack_cpu import unpack_tiles
from ull_build.weights.pack_gpu import unpack_blocks
from weights_files import read_weights


def of_head(bundle: Bundle, prefix: str) -> Tensors:
    """The head's tensors without their prefix."""
    tensors = read_weights(bundle.weights_path)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def dequantised(tensors: Tensors, name: str) -> NDArray[np.float32]:
    """The rows of a linear, padding included, as their kernels multiply with them."""
    weights = tensors[f"{name}.weight"]
    unpacked = unpack_tiles(weights) if weights.ndim == 3 else unpack_blocks(weights)
    rows = unpacked.astype(np.float32)
    return rows * tensors[f"{name}.scale"][: len(rows), None]


def halves(rows: NDArray[np.float32], tile: int) -> NDArray[np.float32]:
    """Rows of gate and up, `tile` of each in turn -> all of gate, then all of up."""
    return rows.reshape(-1, 2, tile, rows.shape[1]).swapaxes(0, 1).reshape(2, -1, rows.shape[1])


def without_chunks(bundle: Bundle, kind: str) -> Bundle:
    """The bundle as an older ull would have built it: its head's kernels of chunks are not there."""
    manifest = bundle.manifest
    assert manifest.speculation is not None
    head = getattr(manifest.speculation, kind)
    files = [file for file in head.code.files if "chunk" not in file.path]
    older = structs.replace(head, code=structs.replace(head.code, files=files))
    speculation = structs.replace(manifest.speculation, **{kind: older})
    return dataclasses.replace(bundle, manifest=structs.replace(manifest, speculation=speculation))


def rounds(program: Program, driver: RecordingDriver) -> list[Launched]:
    """Every launch of the target's graphs."""
    handover = program.handover
    named = [handover[name] for name in ("graphs", "singles", "bursts", "redraws")]
    executables = [executable for graphs in named for executable in graphs.values()]
    return [launch for graph in (*executables, handover["prefill"]) for launch in driver.graphs[graph]]


def touched(program: Program, launches: Sequence[Launched]) -> set[tuple[str, str]]:
    """(kernel, what it is told of: a region of the memory, or a tensor), without the blocks that the host maps."""
    regions, base = program._plan.regions, program._arena.base
    spans = {name: (base + region.offset, region.nbytes) for name, region in regions.items() if name != "weights"}
    image, weights = program._image, program._arena.address("weights")
    for name, entry in program._bundle.tensors.items():
        spans[name] = (weights + (image.offset(name) or 0), entry.nbytes)

    def owner(address: int) -> str | None:
        return next((name for name, (start, size) in spans.items() if start <= address < start + size), None)

    found = set()
    for launch in launches:
        pointers = [name for name, kind in launch.params._fields_ if kind is ctypes.c_void_p]
        owners = {owner(getattr(launch.params, name) or 0) for name in pointers}
        found |= {(launch.kernel, where) for where in owners if where is not None}
    return found


def refuse(
    bundle: Path, words: str, change: Callable[[dict[str, Any]], object], field: str | None = None, *, kind: str
) -> None:
    """Changes the head of that kind in the manifest, is refused, and puts it back."""
    good = read_manifest_json(bundle)
    change_manifest(bundle, lambda manifest: change(manifest["speculation"][kind]))
    with pytest.raises(BundleError, match=words) as caught:
        open_bundle(bundle)
    assert field is None or caught.value.field == field
    assert "rebuild it with ull-build" in caught.value.message
    write_manifest_json(bundle, good)


def compiled_with(macro: str, value: str, head: dict[str, Any]) -> None:
    """Changes what a head in a manifest is said to be compiled with."""
    head["code"]["macros"][macro] = value


def without(kernel: str, head: dict[str, Any]) -> None:
    """Takes a kernel from a head in a manifest."""
    for file in head["code"]["files"]:
        if kernel in file["kernels"]:
            file["kernels"].remove(kernel)
