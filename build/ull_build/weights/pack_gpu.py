"""Blocks of 512 bytes: the order in which the GPU's kernels read linear weights (see `ull.bundle.device_layout`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import (
    DEVICE_STEP,
    DEVICE_TILE_ROWS,
    HEAD_SCAN,
    MEDUSA,
    DflashHead,
    EagleHead,
    MedusaHeads,
    Model,
    Precision,
    TensorShape,
    device_dflash_tensors,
    device_eagle_tensors,
    device_head_precision,
    device_tensors,
)
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.head_scan import scan_rows
from ull_build.weights.kv_scale import own_kv_scales
from ull_build.weights.mlp_scale import scale_rows_of
from ull_build.weights.packer import PackedRows
from ull_build.weights.quantise import complete_rows, dequantise_rows, round_to_bf16, scale_rows, unscale_rows

# A row of a tile is 8 h + g, a column of a step 8 t + 4 j + 2 p + e. Lane 4 g + t holds both rows g of a tile and
# eight columns, which the matrix instructions j = 0 and 1 take, in the order p, h, e of their operand registers.
_ROWS = (2, 8)  # h, g
_COLUMNS = (4, 2, 2, 2)  # t, j, p, e
# Suffixes of vectors that are not rounded.
_FULL_PRECISION = (".scale", ".bound", ".kv_scale", "confidence.weight", "confidence.bias")


def pack_blocks(rows: NDArray[Any]) -> NDArray[Any]:
    """Whole tiles of rows [16 * tiles, K] -> [tiles, steps, 32, 16] of 1 byte or [tiles, steps, 2, 32, 8] of 2 bytes.

    K is padded with zeros to a multiple of 32.
    """
    padding = -rows.shape[1] % DEVICE_STEP
    padded = np.pad(rows, [(0, 0), (0, padding)]) if padding else rows
    tiles, steps = len(rows) // DEVICE_TILE_ROWS, padded.shape[1] // DEVICE_STEP
    split = padded.reshape(tiles, *_ROWS, steps, *_COLUMNS)  # tile h g step t j p e
    if rows.itemsize == 1:
        packed = split.transpose(0, 3, 2, 4, 5, 6, 1, 7).reshape(tiles, steps, 32, 16)
    else:
        packed = split.transpose(0, 3, 5, 2, 4, 6, 1, 7).reshape(tiles, steps, 2, 32, 8)
    return np.ascontiguousarray(packed)


def unpack_blocks(packed: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `pack_blocks`, padding columns included: -> [16 * tiles, 32 * steps]."""
    tiles, steps = packed.shape[:2]
    if packed.itemsize == 1:
        split = packed.reshape(tiles, steps, 8, 4, 2, 2, 2, 2).transpose(0, 6, 2, 1, 3, 4, 5, 7)
    else:
        split = packed.reshape(tiles, steps, 2, 8, 4, 2, 2, 2).transpose(0, 6, 3, 1, 4, 2, 5, 7)
    return np.ascontiguousarray(split).reshape(tiles * DEVICE_TILE_ROWS, steps * DEVICE_STEP)


class GpuPacker:
    """Stores a model as the GPU's kernels read it: a Packer.

    Not `fused`: without the linear layers, which plans hold. `keys_values`: what Observation saw, for the scales of FP8
    pages; None leaves them to the biases. `scaled`: MLPs whose activations are scaled, as check_activations says.
    """

    tile_rows = DEVICE_TILE_ROWS
    gate_rows = DEVICE_TILE_ROWS // 2

    def __init__(
        self,
        precision: Precision,
        fused: bool = True,
        keys_values: Mapping[str, NDArray[np.float32]] | None = None,
        scaled: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._precision, self._fused = precision, fused
        self._keys_values, self._scaled = keys_values, scaled

    def tensors(self, model: Model) -> dict[str, TensorShape]:
        return device_tensors(model, self._precision, self._fused)

    def medusa_tensors(self, model: Model, heads: MedusaHeads) -> dict[str, TensorShape]:
        both = device_tensors(model, self._precision, self._fused, heads)
        return {name: shape for name, shape in both.items() if name.startswith(MEDUSA)}

    def head_tensors(self, model: Model, head: EagleHead | DflashHead) -> dict[str, TensorShape]:
        stored = msgspec.structs.replace(head, precision=device_head_precision(self._precision))
        if isinstance(stored, EagleHead):
            return device_eagle_tensors(stored, model)
        return device_dflash_tensors(stored, model)

    def for_draft(self) -> GpuPacker:
        """Our own kernels compute what drafts; nobody observed it."""
        return GpuPacker(self._precision)

    def rows(
        self, stem: str, rows: NDArray[np.float32], dtype: str, stored: NDArray[np.uint8] | None = None
    ) -> PackedRows:
        if stem == HEAD_SCAN:
            codes, scales, bounds = scan_rows(rows)
            return PackedRows(pack_blocks(codes), scales, bounds)
        if dtype == "F16":
            halves, scales = scale_rows(rows)
            return PackedRows(pack_blocks(halves), scales, restored=unscale_rows(halves, scales))
        codes, scales = complete_rows(rows, stored)
        return PackedRows(pack_blocks(codes), scales, restored=dequantise_rows(codes, scales))

    def vector(self, name: str, values: NDArray[np.float32], shape: TensorShape) -> NDArray[np.float32]:
        """Norms and biases are of the CPU's precision, though stored as float32."""
        exact = values if name.endswith(_FULL_PRECISION) else round_to_bf16(values)
        return scale_rows_of(name, np.pad(exact, (0, shape.shape[0] - len(exact))), self._scaled)

    def own_values(self, checkpoint: Checkpoint, name: str) -> NDArray[np.float32] | None:
        return own_kv_scales(checkpoint, name, self._keys_values)
