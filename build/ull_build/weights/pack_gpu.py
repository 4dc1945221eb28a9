"""Blocks of 512 bytes: the order in which the GPU's kernels read linear weights (see `ull.bundle.device_layout`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle.open import DEVICE_STEP, DEVICE_TILE_ROWS
from ull_build.weights.quantise import round_to_bf16

# A row of a tile is 8 h + g, a column of a step 8 t + 4 j + 2 p + e. Lane 4 g + t holds both rows g of a tile and
# eight columns, which the matrix instructions j = 0 and 1 take, in the order p, h, e of their operand registers.
_ROWS = (2, 8)  # h, g
_COLUMNS = (4, 2, 2, 2)  # t, j, p, e
_LARGEST_EXPONENT = 15  # of an f16
_LARGEST_F32 = float(np.finfo(np.float32).max)


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


def scale_rows(rows: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Finite `rows` [N, K], rounded to bf16, as f16 [N, K] times scales [N] that are powers of two.

    A row's maximum comes to lie in [2^14, 2^15], where f16 is widest: bf16 values stay exact down to 2^-32 of the
    maximum. A row of zeros has the scale 1.
    """
    rows = round_to_bf16(rows)
    maxima = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    _, exponents = np.frexp(maxima)  # maximum = m * 2^exponent, m in [0.5, 1)
    exponents = np.where(maxima > 0, exponents - _LARGEST_EXPONENT, 0)
    exponents = np.maximum(exponents, -149)  # the least power of two that a float32 scale can be
    stored = np.ldexp(rows.astype(np.float64), -exponents[:, None]).astype(np.float16)
    return stored, np.ldexp(1.0, exponents).astype(np.float32)


def unscale_rows(stored: NDArray[np.float16], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inverse: f16 [N, K], scales [N] -> float32 [N, K], saturating."""
    values = stored.astype(np.float64) * scales[:, None].astype(np.float64)
    return np.clip(values, -_LARGEST_F32, _LARGEST_F32).astype(np.float32)
