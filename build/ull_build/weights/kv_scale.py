"""The units in which FP8 pages keep keys and values: one for each KV head's, the same for every target."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.names import bias_sources
from ull_build.weights.quantise import FP8_MAX


def own_kv_scales(
    checkpoint: Checkpoint, name: str, keys_values: Mapping[str, NDArray[np.float32]] | None
) -> NDArray[np.float32] | None:
    """kv_scales of the layer whose tensor `name` is theirs, of which Observation saw `keys_values`; None for others."""
    layer, _, kind = name.rpartition(".")
    if kind != "kv_scale":
        return None
    return kv_scales(checkpoint, layer, None if keys_values is None else keys_values[f"{layer}.kv"])


def kv_scales(checkpoint: Checkpoint, layer: str, observed: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Scale of each KV head's keys, then values, in FP8 pages: a power of two, [2 * kv_heads].

    Room for twice the largest ones `observed` [2 * kv_heads], the smallest power that gives it. Where nothing was
    observed: 1 reaches +-448, far beyond the keys and values of a model without biases. A projection's bias can be
    larger, and it is in every key: then the scale leaves room for twice that.
    """
    model = checkpoint.model
    if observed is not None:
        return _with_room_for_twice(np.where(observed > 0, observed, FP8_MAX / 2))
    sources = bias_sources(checkpoint, f"{layer}.qkv.bias")
    if not sources or model.qk_norm:  # a norm takes the bias's size away
        return np.ones(2 * model.kv_heads, np.float32)
    biases = np.concatenate([checkpoint.vector(source) for source in sources[1:]])
    largest = np.abs(biases).reshape(2 * model.kv_heads, model.head_dim).max(axis=1)
    return np.maximum(_with_room_for_twice(np.maximum(largest, np.float32(1.0))), np.float32(1.0))


def _with_room_for_twice(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """The smallest powers of two, float32, that reach 2 * largest (all positive) with E4M3's 448."""
    powers = np.ceil(np.log2(2.0 * largest.astype(np.float64) / FP8_MAX))
    return np.asarray(np.ldexp(1.0, np.clip(powers, -126, 127).astype(np.int64)), np.float32)
