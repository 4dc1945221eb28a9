"""Row tiles: the order in which the CPU executor reads linear weights (see `ull.bundle.layout`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import (
    TILE_ROWS,
    DflashHead,
    EagleHead,
    MedusaHeads,
    Model,
    Precision,
    TensorShape,
    dflash_tensors,
    eagle_tensors,
    expected_tensors,
    host_head_precision,
    medusa_tensors,
)
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.kv_scale import own_kv_scales
from ull_build.weights.packer import PackedRows
from ull_build.weights.quantise import as_stored, complete_rows, dequantise_rows, from_bf16, to_bf16

ORIGINAL_F32 = Precision(weights="f32", lm_head="f32", embedding="f32", kv="f32")
ORIGINAL_BF16 = Precision(weights="bf16", lm_head="bf16", embedding="bf16", kv="f32")

# Even positions of a 32-wide vector are rows 0..15 of the tile and odd ones rows 16..31, so that widening the even and
# the odd elements of a register yields 16 consecutive rows each.
INTERLEAVED = np.arange(TILE_ROWS).reshape(2, TILE_ROWS // 2).T.reshape(-1)


def pack_tiles(rows: NDArray[Any]) -> NDArray[Any]:
    """Whole tiles of rows [32 * tiles, K] -> [tiles, K, 32]; 1- and 2-byte items interleaved, 4-byte ones in order."""
    tiles = rows.reshape(-1, TILE_ROWS, rows.shape[1])
    if rows.itemsize < 4:
        tiles = tiles[:, INTERLEAVED, :]
    return np.ascontiguousarray(tiles.transpose(0, 2, 1))


def unpack_tiles(tiles: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `pack_tiles`: [tiles, K, 32] -> [32 * tiles, K]."""
    rows = tiles.transpose(0, 2, 1)
    if tiles.itemsize < 4:
        rows = rows[:, np.argsort(INTERLEAVED), :]
    return np.ascontiguousarray(rows).reshape(-1, tiles.shape[1])


class CpuPacker:
    """Stores a model as the CPU executor reads it: a Packer. `keys_values`: as GpuPacker's."""

    tile_rows = gate_rows = TILE_ROWS

    def __init__(self, precision: Precision, keys_values: Mapping[str, NDArray[np.float32]] | None = None) -> None:
        self._precision, self._keys_values = precision, keys_values

    def tensors(self, model: Model) -> dict[str, TensorShape]:
        return expected_tensors(model, self._precision)

    def medusa_tensors(self, model: Model, heads: MedusaHeads) -> dict[str, TensorShape]:
        return medusa_tensors(model, self._precision, heads)

    def head_tensors(self, model: Model, head: EagleHead | DflashHead) -> dict[str, TensorShape]:
        stored = msgspec.structs.replace(head, precision=host_head_precision(self._precision))
        return eagle_tensors(model, stored) if isinstance(stored, EagleHead) else dflash_tensors(model, stored)

    def for_draft(self) -> CpuPacker:
        return CpuPacker(self._precision)  # nobody observed it

    def rows(
        self, stem: str, rows: NDArray[np.float32], dtype: str, stored: NDArray[np.uint8] | None = None
    ) -> PackedRows:
        if dtype == "F32":
            return PackedRows(pack_tiles(rows))
        if dtype == "BF16":
            bits = to_bf16(rows)
            return PackedRows(pack_tiles(bits), restored=from_bf16(bits))
        codes, scales = complete_rows(rows, stored)
        return PackedRows(pack_tiles(codes), scales, restored=dequantise_rows(codes, scales))

    def vector(self, name: str, values: NDArray[np.float32], shape: TensorShape) -> NDArray[Any]:
        return as_stored(np.pad(values, (0, shape.shape[0] - len(values))), shape.dtype)

    def own_values(self, checkpoint: Checkpoint, name: str) -> NDArray[np.float32] | None:
        return own_kv_scales(checkpoint, name, self._keys_values)
