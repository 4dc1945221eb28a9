"""Formats of weights: FP8 E4M3 and f16 with one scale per output channel (row), weight = stored * scale, and bf16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull_build.source.quantised import split_stored

FP8_MAX = np.float32(448.0)
FP8_MIN_NORMAL = np.float32(2.0**-6)
BF16_MAX = np.float32((2.0 - 2.0**-7) * 2.0**127)
# A smaller scale would be a float32 subnormal, with too few bits of its own.
_MIN_SCALE = np.finfo(np.float32).tiny

_LARGEST_F16_EXPONENT = 15
_LARGEST_F32 = float(np.finfo(np.float32).max)

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # code -> value


def quantise_rows(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantises finite `rows` [N, K] to FP8 codes [N, K] and scales [N].

    scale = max|row| / 448 (1.0 for a row of zeros); quotients saturate at +-448 and round to nearest even. There are no
    subnormals: quotients below 2^-6 become 0 or +-2^-6, whichever is nearer, because a subnormal operand costs the CPU
    kernel a microcode assist, and the loss is under 2e-5 of the row's maximum.
    """
    maxima = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    scales = np.where(maxima > 0, np.maximum(maxima / FP8_MAX, _MIN_SCALE), np.float32(1.0))
    quotients = rows / scales[:, None]
    np.clip(quotients, -FP8_MAX, FP8_MAX, out=quotients)
    small = np.abs(quotients) < FP8_MIN_NORMAL
    values = quotients[small]
    nearer = np.abs(values) > FP8_MIN_NORMAL / 2
    quotients[small] = np.where(nearer, np.copysign(FP8_MIN_NORMAL, values), np.float32(0.0))
    return quotients.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def complete_rows(
    rows: NDArray[np.float32], stored: NDArray[np.uint8] | None
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """FP8 codes [N, K] and scales [N] of finite `rows` [N, K]: those that are `stored` already, as they are.

    `stored` [N, K + 4]: see `Fp8Scales.stored`; None: all rows are quantised. Rows that were stored may have subnormal
    codes.
    """
    if stored is None:
        return quantise_rows(rows)
    codes, scales = split_stored(stored)
    others = scales == 0
    if others.any():
        codes[others], scales[others] = quantise_rows(rows[others])
    return codes, scales


def dequantise_rows(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inverse: codes [N, K], scales [N] -> float32 [N, K]."""
    return np.take(_VALUES, codes) * scales[:, None]


def scale_rows(rows: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Finite `rows` [N, K], rounded to bf16, as f16 [N, K] times scales [N] that are powers of two.

    A row's maximum comes to lie in [2^14, 2^15], where f16 is widest: bf16 values stay exact down to 2^-32 of the
    maximum. A row of zeros has the scale 1.
    """
    rows = round_to_bf16(rows)
    maxima = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    _, exponents = np.frexp(maxima)  # maximum = m * 2^exponent, m in [0.5, 1)
    exponents = np.where(maxima > 0, exponents - _LARGEST_F16_EXPONENT, 0)
    exponents = np.maximum(exponents, -149)  # the least power of two that a float32 scale can be
    stored = np.ldexp(rows.astype(np.float64), -exponents[:, None]).astype(np.float16)
    return stored, np.ldexp(1.0, exponents).astype(np.float32)


def unscale_rows(stored: NDArray[np.float16], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inverse: f16 [N, K], scales [N] -> float32 [N, K], saturating."""
    values = stored.astype(np.float64) * scales[:, None].astype(np.float64)
    return np.clip(values, -_LARGEST_F32, _LARGEST_F32).astype(np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds finite float32 to the bits of bfloat16, nearest even, saturating."""
    return np.clip(values, -BF16_MAX, BF16_MAX).astype(ml_dtypes.bfloat16).view(np.uint16)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest bfloat16 values of finite float32, as float32; saturating. A checkpoint in bf16 stays as it is.

    Every target stores what is not FP8 (embeddings, norms, biases, lm_head by default, all linears of a bf16 bundle) as
    these values, whatever the checkpoint's own format is. So CPU and GPU hold the same model, and the loss that a build
    measures on the CPU is the GPU's. An fp16 or fp32 weight changes by up to 2^-8 of it, an FP8 one by up to 2^-4, and
    the measured loss contains both. Keeping more on the GPU alone, whose f16 with a scale has three bits to spare,
    would make the targets differ. Keeping more on both would take a third format on the CPU, or float32, which takes
    twice as long to read.
    """
    return from_bf16(to_bf16(values))


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widens the bits of bfloat16 to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Finite values as a tensor of `dtype`, BF16 or F32, holds them."""
    return to_bf16(values) if dtype == "BF16" else values


class ErrorSum:
    """Accumulates the relative error of a tensor block by block: |stored - original| / |original|, Frobenius norms."""

    def __init__(self) -> None:
        self._difference = 0.0
        self._original = 0.0

    def add(self, original: NDArray[np.float32], stored: NDArray[np.float32]) -> None:
        difference = stored - original
        self._difference += float(np.square(difference, dtype=np.float64).sum())
        self._original += float(np.square(original, dtype=np.float64).sum())

    def value(self) -> float:
        """0.0 for a tensor of zeros, which every format holds exactly."""
        return float(np.sqrt(self._difference / self._original)) if self._original > 0 else 0.0
