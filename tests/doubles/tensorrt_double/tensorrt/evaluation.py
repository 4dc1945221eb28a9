"""Runs a recorded network layer by layer in NumPy, every tensor rounded to its type.

16-bit operands are widened to float32 before arithmetic; sums (MatMul, Reduce, attention) are kept in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .behaviour import options
from .bindings import real
from .graph import NUMPY, DataType, Graph, Node, Refused
from .rules import agrees, need, reshaped

Array = NDArray[Any]
FP8_MAX = 448.0
F16_STEP = 16  # of K, that a tensor core sums at once
_WIDENED = (NUMPY[DataType.HALF], NUMPY[DataType.BF16], NUMPY[DataType.FP8])


def widen(values: Array) -> Array:
    """float32 for the small float types, anything else as it is."""
    return values.astype(np.float32) if values.dtype in _WIDENED else values


def elementwise(node: Node, one: Array, other: Array) -> Array:
    op = real.ElementWiseOperation
    functions: dict[Any, Callable[[Array, Array], Array]] = {
        op.SUM: np.add,
        op.PROD: np.multiply,
        op.SUB: np.subtract,
        op.DIV: np.divide,
        op.MAX: np.maximum,
        op.MIN: np.minimum,
        op.AND: np.logical_and,
        op.OR: np.logical_or,
        op.EQUAL: np.equal,
        op.GREATER: np.greater,
        op.LESS: np.less,
    }
    result = functions[node.attributes["op"]](widen(one), widen(other))
    return result if result.dtype == np.bool_ else result.astype(one.dtype)


def unary(node: Node, values: Array) -> Array:
    op = real.UnaryOperation
    functions: dict[Any, Callable[[Array], Array]] = {
        op.EXP: np.exp,
        op.SQRT: np.sqrt,
        op.RECIP: np.reciprocal,
        op.NEG: np.negative,
        op.NOT: np.logical_not,
    }
    return functions[node.attributes["op"]](widen(values)).astype(values.dtype)


def activation(node: Node, values: Array) -> Array:
    need(node.attributes["activation_type"] == real.ActivationType.SIGMOID, "the double plays SIGMOID only")
    return (1.0 / (1.0 + np.exp(-widen(values)))).astype(values.dtype)


def reduce(node: Node, values: Array) -> Array:
    op = real.ReduceOperation
    functions: dict[Any, Callable[..., Array]] = {op.SUM: np.sum, op.AVG: np.mean, op.MAX: np.max, op.MIN: np.min}
    axes = tuple(place for place in range(values.ndim) if node.attributes["axes"] >> place & 1)
    wide = values.astype(np.float64)
    return functions[node.attributes["op"]](wide, axis=axes, keepdims=node.attributes["keep_dims"]).astype(values.dtype)


def matrix_multiply(node: Node, one: Array, other: Array, order: int = 0) -> Array:
    """`order`: of the sums, see `behaviour`; 0 is that of all profiles, in float64."""
    transpose = real.MatrixOperation.TRANSPOSE
    a = one.swapaxes(-1, -2) if node.attributes["op0"] == transpose else one
    b = other.swapaxes(-1, -2) if node.attributes["op1"] == transpose else other
    if options.f16_sums and one.dtype == np.float16:
        return _summed_in_f16(a, b)
    if options.place_bits:
        result = np.empty((*a.shape[:-1], b.shape[-1]), one.dtype)
        for odd in (0, 1):
            result[..., odd::2, :] = _product(a[..., odd::2, :], b, order + odd, one.dtype)
        return result
    return _product(a, b, order, one.dtype)


def _product(a: Array, b: Array, order: int, dtype: Any) -> Array:
    """Sums of `order` + 1 parts, each rounded to the type of the product, one after the other."""
    if order == 0:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
    cuts = np.linspace(0, a.shape[-1], order + 2).astype(int)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for start, end in pairwise(cuts):
        part = a[..., start:end].astype(np.float64) @ b[..., start:end, :].astype(np.float64)
        total = (total.astype(np.float64) + part).astype(dtype)
    return total


def _summed_in_f16(a: Array, b: Array) -> Array:
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float16)
    for start in range(0, a.shape[-1], F16_STEP):
        part = a[..., start : start + F16_STEP].astype(np.float32) @ b[..., start : start + F16_STEP, :].astype(
            np.float32
        )
        total = (total.astype(np.float32) + part).astype(np.float16)
    return total


def _along(scale: Array, node: Node, rank: int) -> Array:
    """A scale, shaped so that it broadcasts along its axis; float32."""
    wide = widen(scale)
    if wide.size == 1:
        return wide.reshape(())
    return wide.reshape([-1 if place == node.attributes["axis"] else 1 for place in range(rank)])


def quantize(node: Node, values: Array, scale: Array) -> Array:
    quotients = widen(values) / _along(scale, node, values.ndim)
    return np.clip(quotients, -FP8_MAX, FP8_MAX).astype(NUMPY[DataType.FP8])


def dequantize(node: Node, values: Array, scale: Array) -> Array:
    return (widen(values) * _along(scale, node, values.ndim)).astype(scale.dtype)


def slice_layer(node: Node, values: Array, *dynamic: Array | None) -> Array:
    parts = []
    for place, name in enumerate(("start", "shape", "stride")):
        tensor = dynamic[place] if place < len(dynamic) else None
        parts.append(node.attributes[name] if tensor is None else tuple(tensor.tolist()))
    for extent, start, size, stride in zip(values.shape, *parts, strict=True):
        last = start + (size - 1) * stride
        need(size == 0 or (0 <= start < extent and 0 <= last < extent), f"slice {parts} of {values.shape}")
    index = np.ix_(*(start + stride * np.arange(size) for start, size, stride in zip(*parts, strict=True)))
    return values[index]


def shuffle(node: Node, values: Array) -> Array:
    if node.attributes["first_transpose"] is not None:
        values = values.transpose(node.attributes["first_transpose"][: values.ndim])
    if node.attributes["reshape_dims"] is not None:
        wanted = node.attributes["reshape_dims"]
        values = values.reshape(reshaped(values.shape, wanted, node.attributes["zero_is_placeholder"]))
    if node.attributes["second_transpose"] is not None:
        values = values.transpose(node.attributes["second_transpose"][: values.ndim])
    return np.ascontiguousarray(values)


def gather(node: Node, values: Array, indices: Array) -> Array:
    axis = node.attributes["axis"]
    need(bool(((indices >= 0) & (indices < values.shape[axis])).all()), f"indices {indices} of {values.shape}")
    return np.take(values, indices, axis)


def rotary_embedding(node: Node, values: Array, cosine: Array, sine: Array, positions: Array | None = None) -> Array:
    """[B, N, S, H]: the first half of a head rotates with the second, or neighbours where interleaved."""
    need(not node.attributes["interleaved"], "the double does not play interleaved heads")
    if positions is not None:
        need(bool(((positions >= 0) & (positions < len(cosine))).all()), f"positions {positions} of {len(cosine)}")
        cosine, sine = cosine[positions], sine[positions]
    width = 2 * cosine.shape[-1]
    c, s = widen(cosine)[:, None], widen(sine)[:, None]
    wide = widen(values)
    first, second, rest = wide[..., : width // 2], wide[..., width // 2 : width], wide[..., width:]
    parts = [first * c - second * s, second * c + first * s, rest]
    return np.concatenate(parts, -1).astype(values.dtype)


def kv_cache_update(node: Node, cache: Array, update: Array, indices: Array) -> Array:
    """In the memory of `cache`: the caller gives the array that lies at the address of both.

    What would lie outside of the cache is not written, and nothing is said about it, as with the real one.
    """
    for batch, index in enumerate(indices.tolist()):
        for token in range(update.shape[2]):
            if 0 <= index + token < cache.shape[2]:
                cache[batch, :, index + token] = update[batch, :, token]
    return cache


def attention(node: Node, query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    need(node.attributes["causal_kind"] == real.CausalMaskKind.NONE, "the double plays no causal kind")
    group = query.shape[1] // key.shape[1]
    q = query.astype(np.float64)
    k, v = (np.repeat(part.astype(np.float64), group, 1) for part in (key, value))
    scores = q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask.astype(np.float64)
    if node.attributes["norm_op"] == real.AttentionNormalizationOp.SOFTMAX:
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    return (scores @ v).astype(query.dtype)


RUN: dict[str, Callable[..., Array]] = {
    "ACTIVATION": activation,
    "ATTENTION": attention,
    "CAST": lambda node, values: values.astype(NUMPY[node.attributes["to_type"]]),
    "CONCATENATION": lambda node, *parts: np.concatenate(parts, node.attributes["axis"]),
    "CONSTANT": lambda node: node.attributes["weights"].array().reshape(node.attributes["shape"]),
    "DEQUANTIZE": dequantize,
    "ELEMENTWISE": elementwise,
    "GATHER": gather,
    "KV_CACHE_UPDATE": kv_cache_update,
    "MATRIX_MULTIPLY": matrix_multiply,
    "QUANTIZE": quantize,
    "REDUCE": reduce,
    "ROTARY_EMBEDDING": rotary_embedding,
    "SELECT": lambda node, condition, one, other: np.where(condition, one, other),
    "SHAPE": lambda node, values: np.array(values.shape, np.int64),
    "SHUFFLE": shuffle,
    "SLICE": slice_layer,
    "UNARY": unary,
}


def fold(graph: Graph) -> dict[int, Array]:
    """The tensors that depend on no input, by number: an engine computes them once."""
    found: dict[int, Array] = {}
    for node in graph.nodes:
        if graph.tensors[node.outputs[0]].constant:
            found[node.outputs[0]] = RUN[node.kind](node, *(found[index] for index in node.inputs if index is not None))
    return found


def run(
    graph: Graph, inputs: Mapping[str, Array], folded: Mapping[int, Array] | None = None, order: int = 0
) -> list[Array]:
    """Every tensor of the network, by number, from its inputs by name; `folded` ones are not computed again.

    `order`: of the sums of a product.

    Raises Refused where a layer cannot work.
    """
    missing = set(graph.input_names()) ^ set(inputs)
    need(not missing, f"inputs {sorted(missing)} are missing or unknown")
    known = folded or {}
    found: list[Any] = [known.get(index) for index in range(len(graph.tensors))]
    for index in graph.inputs:
        tensor = graph.tensors[index]
        array = inputs[tensor.name]
        need(array.dtype == NUMPY[tensor.dtype], f"input {tensor.name} is {array.dtype}, not {tensor.dtype}")
        need(agrees(tensor.shape or (), array.shape), f"input {tensor.name} is {array.shape}, not {tensor.shape}")
        found[index] = array
    for node in graph.nodes:
        if node.outputs[0] in known:
            continue
        more = {"order": order} if node.kind == "MATRIX_MULTIPLY" else {}
        try:
            result = RUN[node.kind](node, *(None if index is None else found[index] for index in node.inputs), **more)
        except Refused as error:
            raise Refused(f"{node.name}: {error}") from error
        tensor = graph.tensors[node.outputs[0]]
        if result.dtype != NUMPY[tensor.dtype] or not agrees(tensor.shape or (), result.shape):
            raise AssertionError(f"{node.name} made {result.dtype} {result.shape}, inferred {tensor}")
        found[node.outputs[0]] = result
    return found


def evaluate(network: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a recorded network (or of its graph) by name. Raises Refused for what TensorRT would refuse."""
    graph = network if isinstance(network, Graph) else network._graph
    for problem in problems(graph):
        raise Refused(problem)
    found = run(graph, inputs)
    return {graph.tensors[index].name: found[index] for index in graph.outputs}


def problems(graph: Graph) -> list[str]:
    """Everything that is wrong with a network before it is built."""
    wrong = [f"{graph.nodes[number].name}: {problem}" for number, problem in graph.problems.items()]
    for what, names in (
        ("tensor", [tensor.name for tensor in graph.tensors]),
        ("layer", [node.name for node in graph.nodes]),
    ):
        repeated = sorted({name for name in names if names.count(name) > 1})
        wrong += [f"Repeated {what} name: {name} ({what}s must have distinct names)" for name in repeated]
    if not graph.outputs:
        wrong.append("Network must have at least one output")
    caches = [node for node in graph.nodes if node.kind == "KV_CACHE_UPDATE"]
    for node in caches:
        if node.inputs[0] not in graph.inputs or node.outputs[0] not in graph.outputs:
            wrong.append(f"{node.name}: the cache must be a network input, the result a network output")
    return wrong
