"""The second way to run a model's layers with TensorRT: its own KV cache and attention, all layers in one plan.

    step  residual [T, H] f32, base [1] int32, depths [T] int32,
          key_cache.N and value_cache.N [1, kv_heads, S, head_dim] bf16
          -> residual_out [T, H] f32, key_cache_out.N and value_cache_out.N, which lie where their inputs do
    head  as with the other attention

Token t stands at position base + depths[t], and its key goes to row base + t of the cache: this serves chunks and
single tokens, no trees. S is the context and one step more, and attention reads all of it each time, behind a mask: a
length for keys and values makes TensorRT's fused kernels answer wrong tokens (issue 1048 of
NVIDIA/TensorRT-Model-Connect). It is here to be compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import HEAD_SEGMENT, Model, attention_factor, cache_positions, inverse_frequencies, segment_names
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.network import LayerNetwork
from ull_build.tensorrt.weights import BF16


class NativeNetwork(LayerNetwork):
    """Describes the one step of all layers, and the head."""

    def segments(self) -> list[str]:
        return segment_names(self.model.layers, "native")

    def add(self, graph: Graph, segment: str) -> None:
        """Describes one plan. Raises BuildError where TensorRT refuses a layer, or a scale is missing."""
        if segment == HEAD_SEGMENT:
            self.add_head(graph)
            return
        residual = self.residual_input(graph)
        tokens = graph.token_count("residual", residual)
        attention = _Attention(self, graph, tokens)
        for layer in range(self.model.layers):
            rows = attention.add(layer, self.qkv(graph, layer, residual))
            residual = self.rest_of_layer(graph, layer, rows, residual, tokens)
        graph.output(residual, "residual_out")


class _Attention:
    """Attention of every layer of one network; positions, RoPE tables and masks are shared."""

    def __init__(self, network: LayerNetwork, graph: Graph, tokens: Any) -> None:
        self._network, self._graph, self._tokens = network, graph, tokens
        self._model = model = network.model
        self._rows = cache_positions(model.context)
        self._base = graph.input("base", np.int32, (1,))
        depths = graph.input("depths", np.int32, (-1,))
        depths.set_dimension_name(0, "tokens")
        self._positions = graph.elementwise("positions", "SUM", self._base, depths)
        wide = graph.cast("positions.wide", self._positions, np.int64)
        self._ids = graph.shuffle("positions.ids", wide, shape=(1, -1))  # [1, T]
        cosine, sine = rope_tables(model, self._rows)
        self._cosine, self._sine = graph.constant("rope.cosine", cosine), graph.constant("rope.sine", sine)
        self._masks: dict[int, Any] = {}
        width, kv_width = network.attention_width, model.kv_heads * model.head_dim
        self._query_size = graph.shape_with("query", (), tokens, (width,))
        self._key_size = graph.shape_with("key", (), tokens, (kv_width,))

    def add(self, layer: int, qkv: Any) -> Any:
        """qkv [T, Q] f32 -> attention [T, A] bf16."""
        graph, model, name = self._graph, self._model, f"layers.{layer}.attention"
        width, kv_width = self._network.attention_width, model.kv_heads * model.head_dim
        query = graph.slice(f"{name}.query", qkv, (0, 0), (1, width), self._query_size)
        key = graph.slice(f"{name}.key", qkv, (0, width), (1, kv_width), self._key_size)
        value = graph.slice(f"{name}.value", qkv, (0, width + kv_width), (1, kv_width), self._key_size)
        query = self._rotated(f"{name}.query", self._heads(f"{name}.query", query, model.heads), layer, "q_norm")
        # TensorRT wants the query scaled before.
        factor = graph.constant(f"{name}.factor", np.full((1, 1, 1, 1), model.head_dim**-0.5, np.float32))
        query = graph.elementwise(f"{name}.query.scaled", "PROD", query, factor)
        key = self._rotated(f"{name}.key", self._heads(f"{name}.key", key, model.kv_heads), layer, "k_norm")
        keys = self._cached("key", layer, key)
        values = self._cached("value", layer, self._heads(f"{name}.value", value, model.kv_heads))
        trt, mask = graph.trt, self._mask(model.windows[layer])
        attention = graph.network.add_attention_v2(
            graph.cast(f"{name}.query.narrow", query, BF16),
            keys,
            values,
            trt.AttentionNormalizationOp.SOFTMAX,
            trt.CausalMaskKind.NONE,
        )
        if attention is not None:
            attention.mask = mask
            attention.decomposable = True  # where there is no fused kernel, several will do
        heads = graph.named(attention, name)
        return graph.shuffle(f"{name}.joined", heads, shape=(-1, width), before=(0, 2, 1, 3))

    def _heads(self, name: str, rows: Any, heads: int) -> Any:
        """[T, heads * head_dim] -> [1, heads, T, head_dim]."""
        shape = (1, -1, heads, self._model.head_dim)
        return self._graph.shuffle(f"{name}.heads", rows, shape=shape, after=(0, 2, 1, 3))

    def _rotated(self, name: str, heads: Any, layer: int, norm: str) -> Any:
        """The norm of q or k, where the model has one, and RoPE; float32."""
        graph, model = self._graph, self._model
        if model.qk_norm:
            weight = self._network.weights.norm(f"layers.{layer}.{norm}")
            heads = graph.rms_norm(f"layers.{layer}.{norm}", heads, weight, model.rms_epsilon, rank=4)
        rotation = graph.network.add_rotary_embedding(heads, self._cosine, self._sine, False, 0)
        if rotation is not None:
            rotation.set_input(3, self._ids)
        return graph.named(rotation, f"{name}.rotated")

    def _cached(self, kind: str, layer: int, update: Any) -> Any:
        """Writes [1, kv_heads, T, head_dim] into a layer's cache at row `base`; returns the whole cache.

        `kind`: key or value.
        """
        graph, model, name = self._graph, self._model, f"layers.{layer}.attention.{kind}"
        shape = (1, model.kv_heads, self._rows, model.head_dim)
        cache = graph.input(f"{kind}_cache.{layer}", BF16, shape)
        narrow = graph.cast(f"{name}.narrow", update, BF16)
        mode = graph.trt.KVCacheMode.LINEAR
        updated = graph.named(graph.network.add_kv_cache_update(cache, narrow, self._base, mode), f"{name}.cached")
        graph.output(updated, f"{kind}_cache_out.{layer}")
        return updated

    def _mask(self, window: int) -> Any:
        """[1, 1, T, S] bool: the keys that each token sees, up to itself and no further back than the window."""
        if window not in self._masks:
            self._masks[window] = self._new_mask(f"mask.{window}", window)
        return self._masks[window]

    def _new_mask(self, name: str, window: int) -> Any:
        graph = self._graph
        keys = graph.constant(f"{name}.keys", np.arange(self._rows, dtype=np.int32).reshape(1, 1, 1, -1))
        positions = graph.shuffle(f"{name}.positions", self._positions, shape=(1, 1, -1, 1))
        later = graph.elementwise(f"{name}.later", "GREATER", keys, positions)
        mask = graph.unary(f"{name}.seen", "NOT", later)
        if not window:
            return mask
        length = graph.constant(f"{name}.length", np.full((1, 1, 1, 1), window, np.int32))
        before = graph.elementwise(f"{name}.before", "SUB", positions, length)
        near = graph.elementwise(f"{name}.near", "GREATER", keys, before)
        return graph.elementwise(f"{name}.both", "AND", mask, near)


def rope_tables(model: Model, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [rows, head_dim / 2]; angles are rounded to float32 first, as transformers does."""
    frequencies = inverse_frequencies(model.rope, model.head_dim)
    angles = (np.arange(rows, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    factor = np.float32(attention_factor(model.rope))
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor
