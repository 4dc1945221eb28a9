"""The FP8 copy of an lm_head that a GPU scans before it computes a few rows exactly, and how far it may be off.

A row's bound b holds for every vector x of f16 that the head may be given: the logit that `ull_head_scan_1` computes is
within b * |x| of the one that `ull_head_1` computes, |x| the Euclidean norm. Of w, the row as stored in 16 bits, and q,
its FP8 copy, both with their scales:

    |scanned - exact| <= |q.x - w.x| + rounding of the one sum + rounding of the other
                      <= |q - w| |x| + g |q| |x| + g |w| |x|                  (Cauchy and Schwarz)

g is how far a sum may be off, relative to the sum of the magnitudes of its products. The products of f16 are exact in
single precision. A matrix instruction adds 16 of them to an accumulator, and how is not documented: we take it that it
cuts each of the 17 addends at 2^-23 of the largest, and the result once more: 18 * 2^-23, for which we write 2^-18. A
row needs K / 16 of these instructions; adding up its slices, the scale, and the arithmetic on these very bounds are
roundings of 2^-24 each, and we count 16 more instructions for all of them. No sum comes near the ends of f32's range
but by its scale, and what that may do is the kernels' business: they compute a row exactly where anything may overflow,
and no width is below 2^-100.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull_build.weights.quantise import quantise_rows, scale_rows

MMA_COLUMNS = 16  # that a matrix instruction adds up
MMA_ERROR = 2.0**-18  # relative to the sum of magnitudes
OTHER_ROUNDINGS = 16  # counted as matrix instructions

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # code -> value


def sum_error(columns: int) -> float:
    """How far a sum of `columns` products may be off, relative to the sum of their magnitudes."""
    return (-(-columns // MMA_COLUMNS) + OTHER_ROUNDINGS) * MMA_ERROR


def scan_rows(
    rows: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Rows [N, K] of an lm_head -> FP8 codes [N, K], their scales [N], bounds [N].

    They are codes of what the 16-bit head stores of the rows, which may be less than the rows.
    """
    halves, row_scales = scale_rows(rows)
    kept = halves.astype(np.float32) * row_scales[:, None]  # exact: the scales are powers of two
    codes, scales = quantise_rows(kept)
    return codes, scales, scan_bounds(halves, row_scales, codes, scales)


def scan_bounds(
    halves: NDArray[np.float16],
    row_scales: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The bounds of any rows in both forms, rounded up; infinity where f32 does not reach."""
    exact = halves.astype(np.float64) * row_scales.astype(np.float64)[:, None]
    scanned = _VALUES[codes] * scales.astype(np.float64)[:, None]
    norms = [np.sqrt(np.square(part).sum(axis=1)) for part in (scanned - exact, exact, scanned)]
    bounds = norms[0] + sum_error(halves.shape[1]) * (norms[1] + norms[2])
    with np.errstate(over="ignore"):
        narrow = (bounds * (1 + 2.0**-24)).astype(np.float32)
        return np.asarray(np.nextafter(narrow, np.float32(np.inf)), np.float32)
