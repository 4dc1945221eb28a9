"""Made-up weights for plans of a benchmark bundle: a model's shape and speed, and nothing that it could say."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Model, Precision, TensorEntry, quantised_inputs
from ull_build.source.checkpoint import BLOCK_ELEMENTS, Checkpoint

RANGE = 16.0  # of activations: a norm's output, and what such weights make of it, stay far below


class RandomCheckpoint(Checkpoint):
    """A checkpoint of a model's shape, without biases, whose values are drawn from its tensors' names.

    They are the same ones every time, for plans as for our own kernels: norms are 1, weights keep the size of what they
    are multiplied with.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        attention, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (model.vocabulary, model.hidden),
            "model.norm.weight": (model.hidden,),
        }
        if not model.tied_embeddings:
            self._shapes["lm_head.weight"] = (model.vocabulary, model.hidden)
        for layer in range(model.layers):
            self._shapes |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in {
                    "input_layernorm": (model.hidden,),
                    "post_attention_layernorm": (model.hidden,),
                    "self_attn.q_norm": (model.head_dim,),
                    "self_attn.k_norm": (model.head_dim,),
                    "self_attn.q_proj": (attention, model.hidden),
                    "self_attn.k_proj": (keys, model.hidden),
                    "self_attn.v_proj": (keys, model.hidden),
                    "self_attn.o_proj": (model.hidden, attention),
                    "mlp.gate_proj": (model.intermediate, model.hidden),
                    "mlp.up_proj": (model.intermediate, model.hidden),
                    "mlp.down_proj": (model.hidden, model.intermediate),
                }.items()
            }

    @property
    def model(self) -> Model:
        return self._model

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return {name: TensorEntry(0, 4 * math.prod(shape), "F32", shape) for name, shape in self._shapes.items()}

    @property
    def fp8_weights(self) -> dict[str, TensorEntry]:
        """None."""
        return {}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def blocks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """As Checkpoint.blocks."""
        shape = self._shapes[name]
        if len(shape) == 1:
            yield np.ones(shape, np.float32)
            return
        random = np.random.default_rng(zlib.crc32(name.encode()))
        # Even in [-a, a]: a variance of 1/K. An embedding's row is what a norm makes one of anyway.
        amplitude = np.float32(np.sqrt(3.0 / shape[1])) if "embed" not in name else np.float32(1.0)
        rows = max(32, BLOCK_ELEMENTS // shape[1] // 32 * 32)
        for start in range(0, shape[0], rows):
            values = random.random((min(rows, shape[0] - start), shape[1]), np.float32)
            yield (np.float32(2.0) * values - np.float32(1.0)) * amplitude

    def close(self) -> None:
        """There is nothing open."""


def random_ranges(model: Model, precision: Precision) -> dict[str, float]:
    """Ranges for the inputs of such linears: largest values by linear, as a calibration's."""
    return dict.fromkeys(quantised_inputs(model, precision), RANGE)
