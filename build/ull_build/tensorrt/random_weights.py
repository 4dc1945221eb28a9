"""Made-up weights for plans of a benchmark bundle: a model's shape and speed, and nothing that it could say."""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Model, Precision, quantised_inputs
from ull_build.tensorrt.weights import F8, HEAD, HEAD_ROWS, Linear, compute_type

RANGE = 16.0  # of activations: a norm's output, and what such weights make of it, stay far below
_CODES_BELOW_ONE = 0x38  # E4M3 codes 0 to 0x37 are the values in [0, 1)


class RandomWeights:
    """The `Weights` of a model whose values are drawn from its tensors' names: the same ones every time."""

    def __init__(self, model: Model, precision: Precision) -> None:
        self._precision = precision
        attention, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        rows = -(-model.vocabulary // HEAD_ROWS) * HEAD_ROWS
        self._hidden, self._head_dim = model.hidden, model.head_dim
        self._shapes = {
            "qkv": (attention + 2 * keys, model.hidden),
            "o": (model.hidden, attention),
            "gate_up": (2 * model.intermediate, model.hidden),
            "down": (model.hidden, model.intermediate),
            HEAD: (rows, model.hidden),
        }

    def storage(self, name: str) -> Literal["fp8", "bf16", "f32"]:
        return self._precision.lm_head if name == HEAD else self._precision.weights

    def norm(self, name: str) -> NDArray[np.float32]:
        is_of_heads = name.endswith((".q_norm", ".k_norm"))
        return np.ones(self._head_dim if is_of_heads else self._hidden, np.float32)

    def linear(self, name: str) -> Linear:
        """Weights that keep the size of what they are multiplied with."""
        shape, compute = self._shapes[name.rpartition(".")[2]], compute_type(name, self.storage(name))
        random = np.random.default_rng(zlib.crc32(name.encode()))
        unit = np.sqrt(3.0 / shape[1])  # of weights that are even in [-1, 1]
        if self.storage(name) == "fp8":
            codes = random.integers(0, _CODES_BELOW_ONE, shape, np.uint8)
            codes |= random.integers(0, 2, shape, np.uint8) << np.uint8(7)
            scales = np.full(shape[0], 3 * unit, np.float32)  # most codes are of small values
            return Linear(codes.view(F8), scales, None, compute)
        values = random.random(shape, np.float32)
        return Linear(((2 * values - 1) * unit).astype(compute), None, None, compute)


def random_ranges(model: Model, precision: Precision) -> dict[str, float]:
    """Ranges for the inputs of such linears: largest values by linear, as a calibration's."""
    return dict.fromkeys(quantised_inputs(model, precision), RANGE)
