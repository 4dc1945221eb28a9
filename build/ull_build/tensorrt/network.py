"""The segments of a forward that is cut at attention, as TensorRT networks.

    entry    residual [T, H] f32 -> qkv [T, Q] f32
    layer.N  attention [A/32, 64, 32] f16, residual -> residual_out [T, H] f32, qkv [T, Q] f32: the rest of layer N
             after its attention, then norm and QKV of layer N + 1
    exit     attention, residual -> residual_out: the rest of the last layer
    head     residual -> logits [T, V] f32, V the vocabulary rounded up to 16

T is dynamic. Attention itself, with RoPE and the norms of q and k, is the kernel that runs between two segments; of its
output, column c of token t lies at [c / 32][t][c % 32].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ull.bundle import ENTRY_SEGMENT, EXIT_SEGMENT, HEAD_SEGMENT, Model, segment_names
from ull.wire import MAX_TREE
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.weights import HEAD, Weights

ATTENTION_COLUMNS = 32  # of the attention's layout


class LayerNetwork:
    """The parts of a model's layers, whatever attention lies between them.

    `amax`: largest input of each FP8 linear. `sixteen_bits`: those of them whose inputs are not quantised after all.
    """

    def __init__(self, model: Model, weights: Weights, amax: Mapping[str, float]) -> None:
        self.model, self.weights, self.amax = model, weights, amax
        self.sixteen_bits: frozenset[str] = frozenset()
        self.attention_width = model.heads * model.head_dim

    def residual_input(self, graph: Graph) -> Any:
        residual = graph.input("residual", np.float32, (-1, self.model.hidden))
        residual.set_dimension_name(0, "tokens")  # one number, wherever it stands
        return residual

    def add_head(self, graph: Graph) -> None:
        """The head: the same with any attention."""
        normed = self.norm(graph, "norm", self.residual_input(graph))
        graph.output(self.linear(graph, HEAD, normed), "logits")

    def qkv(self, graph: Graph, layer: int, residual: Any) -> Any:
        """Norm and fused projection: [T, H] -> [T, Q]."""
        name = f"layers.{layer}"
        return self.linear(graph, f"{name}.qkv", self.norm(graph, f"{name}.attn_norm", residual))

    def rest_of_layer(self, graph: Graph, layer: int, attention: Any, residual: Any, tokens: Any) -> Any:
        """What follows attention [T, A]: output projection and MLP, each added to the residual [T, H]."""
        name = f"layers.{layer}"
        output = self.linear(graph, f"{name}.o", attention)
        residual = graph.elementwise(f"{name}.o.residual", "SUM", residual, output)
        normed = self.norm(graph, f"{name}.mlp_norm", residual)
        gate_up = self.linear(graph, f"{name}.gate_up", normed)
        width = self.model.intermediate
        size = graph.shape_with(f"{name}.gate_up", (), tokens, (width,))
        gate = graph.slice(f"{name}.gate", gate_up, (0, 0), (1, width), size)
        up = graph.slice(f"{name}.up", gate_up, (0, width), (1, width), size)
        product = graph.elementwise(f"{name}.gate_up.product", "PROD", graph.silu(f"{name}.gate", gate), up)
        down = self.linear(graph, f"{name}.down", product)
        return graph.elementwise(f"{name}.down.residual", "SUM", residual, down)

    def norm(self, graph: Graph, name: str, tensor: Any) -> Any:
        return graph.rms_norm(name, tensor, self.weights.norm(name), self.model.rms_epsilon)

    def linear(self, graph: Graph, name: str, tensor: Any) -> Any:
        linear = self.weights.linear(name)
        if name in self.sixteen_bits and linear.is_fp8:
            linear = linear.in_16_bits(name)
        return graph.linear(name, tensor, linear, self.amax.get(name))


class SegmentNetwork(LayerNetwork):
    """Describes the segments between which our attention kernel runs."""

    def segments(self) -> list[str]:
        return segment_names(self.model.layers, "paged")

    def add(self, graph: Graph, segment: str) -> None:
        """Describes one segment. Raises BuildError where TensorRT refuses a layer, or a scale is missing."""
        if segment == HEAD_SEGMENT:
            self.add_head(graph)
        elif segment == ENTRY_SEGMENT:
            graph.output(self.qkv(graph, 0, self.residual_input(graph)), "qkv")
        else:
            self._add_layer(graph, self.segments().index(segment) - 1, segment == EXIT_SEGMENT)

    def _add_layer(self, graph: Graph, layer: int, is_last: bool) -> None:
        residual = self.residual_input(graph)
        shape = (self.attention_width // ATTENTION_COLUMNS, MAX_TREE, ATTENTION_COLUMNS)
        attention = graph.input("attention", np.float16, shape)
        tokens = graph.token_count(f"layers.{layer}.residual", residual)
        rows = _attention_rows(graph, f"layers.{layer}.attention", attention, tokens, self.attention_width)
        residual = self.rest_of_layer(graph, layer, rows, residual, tokens)
        graph.output(residual, "residual_out")
        if not is_last:
            graph.output(self.qkv(graph, layer + 1, residual), "qkv")


def _attention_rows(graph: Graph, name: str, attention: Any, tokens: Any, width: int) -> Any:
    """[A/32, 64, 32] -> [T, A]: the rows of the first T tokens."""
    pieces = width // ATTENTION_COLUMNS
    size = graph.shape_with(name, (pieces,), tokens, (ATTENTION_COLUMNS,))
    rows = graph.slice(f"{name}.rows", attention, (0, 0, 0), (pieces, 1, ATTENTION_COLUMNS), size)
    return graph.shuffle(f"{name}.joined", rows, shape=(-1, width), before=(1, 0, 2))
