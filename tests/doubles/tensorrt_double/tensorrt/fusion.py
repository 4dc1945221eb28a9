"""Which operands a product has in the kernel that TensorRT makes of it, as its inspector shows them.

FP8 only where both operands are dequantised by a scalar and the second is transposed: any other scheme is legal, and
runs in 16 bits.
"""

from __future__ import annotations

from typing import Any

from .bindings import real
from .graph import DataType, Graph, Node


def operand_types(graph: Graph, node: Node) -> list[Any]:
    """The types of both operands of a MATRIX_MULTIPLY."""
    makers = {output: other for other in graph.nodes for output in other.outputs}
    tensors = [graph.tensors[index] for index in node.inputs if index is not None]
    found = [makers.get(index) for index in node.inputs if index is not None]
    is_transposed = node.attributes["op1"] == real.MatrixOperation.TRANSPOSE
    if is_transposed and all(_has_scalar_scale(graph, maker) for maker in found):
        return [DataType.FP8, DataType.FP8]
    sources = [_source(graph, maker) for maker in found]
    if all(source is not None and source.dtype == DataType.HALF for source in sources):
        return [DataType.HALF, DataType.HALF]  # widened on their way into the sums
    return [tensor.dtype for tensor in tensors]


def fp8_products(graph: Graph) -> set[str]:
    """The linears whose product has FP8 operands, by the names of their layers without ".matmul"."""
    products = [node for node in graph.nodes if node.kind == "MATRIX_MULTIPLY"]
    return {node.name.removesuffix(".matmul") for node in products if DataType.FP8 in operand_types(graph, node)}


def inspect(graph: Graph) -> list[dict[str, Any]]:
    """A layer as TensorRT 11 shows it, for each of the network's."""
    layers = []
    for node in graph.nodes:
        tensors = [graph.tensors[index] for index in node.inputs if index is not None]
        types = [tensor.dtype for tensor in tensors]
        if node.kind == "MATRIX_MULTIPLY":
            types = operand_types(graph, node)
        inputs = [
            {"Name": tensor.name, "Dimensions": list(tensor.shape or ()), "Datatype": dtype.name}
            for tensor, dtype in zip(tensors, types, strict=True)
        ]
        layers.append({"Name": node.name, "LayerType": node.kind, "Inputs": inputs})
    return layers


def _has_scalar_scale(graph: Graph, maker: Node | None) -> bool:
    if maker is None or maker.kind != "DEQUANTIZE" or maker.inputs[1] is None:
        return False
    return (graph.tensors[maker.inputs[1]].shape or ()) in ((), (1,))


def _source(graph: Graph, maker: Node | None) -> Any:
    """The tensor before a cast."""
    return None if maker is None or maker.kind != "CAST" else graph.tensors[maker.inputs[0] or 0]
