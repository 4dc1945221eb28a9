"""How an MLP is scaled whose activations would leave f16.

The scales and biases of the rows of up are stored times 2^-k, the scales of down times 2^k. Both are exact, so every
weight, every sum and every rounding is what it would be without, but for the range.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_UP_ROWS = np.arange(16) >= 8  # of a row tile of gate_up, the other half is gate's


def scale_rows_of(name: str, values: NDArray[np.float32], scaled: Mapping[str, int]) -> NDArray[np.float32]:
    """Row scales or biases as they are stored (tensor `name`), in the units that `scaled` (linear "layers.N.down" ->
    exponent) asks for: those of up smaller, the scales of down larger. Everything else as it is."""
    stem, _, kind = name.rpartition(".")
    layer, _, linear = stem.rpartition(".")
    exponent = scaled.get(f"{layer}.down", 0)
    if exponent == 0:
        return values
    if linear == "gate_up" and kind in ("scale", "bias"):
        exponents = np.where(np.resize(_UP_ROWS, len(values)), -exponent, 0)
    elif linear == "down" and kind == "scale":
        exponents = np.full(len(values), exponent)
    else:
        return values
    return np.ldexp(values, exponents).astype(np.float32)
