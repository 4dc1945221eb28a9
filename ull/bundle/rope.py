"""The rotary position embedding as transformers computes it (`modeling_rope_utils`): frequencies and their factor."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ull.bundle.manifest import Rope

Frequencies = NDArray[np.float32]  # [head_dim / 2] radians per position


def inverse_frequencies(rope: Rope, head_dim: int) -> Frequencies:
    """Angular frequency (radians per position) of each pair of a head, scaling applied: [head_dim / 2] float32.

    As transformers computes them, in float32; only the power itself is taken in float64 and rounded, because float32
    `pow` differs between maths libraries.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / periods
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor or 1.0)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, periods)
    return frequencies


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied by, so that queries and keys both carry it."""
    return 1.0 if rope.attention_factor is None else rope.attention_factor


def _llama3(rope: Rope, frequencies: Frequencies) -> Frequencies:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor = np.float32(rope.factor or 1.0)
    low, high = rope.low_frequency_factor or 1.0, rope.high_frequency_factor or 4.0
    context = rope.original_context or 8192
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    smoothed = (np.float32(1.0) - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelengths > np.float32(context / low), frequencies / factor, frequencies)
    is_medium = (wavelengths <= np.float32(context / low)) & (wavelengths >= np.float32(context / high))
    return np.where(is_medium, smoothed, scaled).astype(np.float32)


def _yarn(rope: Rope, periods: Frequencies) -> Frequencies:
    """YaRN (arXiv 2309.00071): pairs that turn often within the original context are kept, slow ones stretched.

    `periods` [head_dim / 2]: positions per radian of each pair.
    """
    first, last = _yarn_range(rope, 2 * len(periods))
    ramp = (np.arange(len(periods), dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    stretched = np.float32(1.0) / (np.float32(rope.factor or 1.0) * periods)
    kept_frequencies = kept * (np.float32(1.0) / periods)
    return np.asarray(stretched * (np.float32(1.0) - kept) + kept_frequencies, np.float32)


def _yarn_range(rope: Rope, head_dim: int) -> tuple[float, float]:
    """The pairs between which YaRN goes over from keeping to stretching; the second lies above the first."""
    context = rope.original_context or 1

    def pair_with(turns: float) -> float:
        """Which pair, as a real number, makes so many turns within the original context."""
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast or 32.0), pair_with(rope.beta_slow or 1.0)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return (first, last + 0.001) if first == last else (first, last)
