"""Types and shapes that each layer makes of its inputs in a strongly typed network, and what it refuses.

Follows the operator pages of docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators. A dimension of -1 is known
only at run time and agrees with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from .bindings import real
from .graph import DataType, Node, Refused, Shape, Tensor, volume

FLOATS = (DataType.FLOAT, DataType.HALF, DataType.BF16)
INTEGERS = (DataType.INT32, DataType.INT64)
Result = tuple[Any, Shape, Shape | None]  # type, shape, content of a shape tensor
Inputs = Sequence[Tensor | None]

Op = real.ElementWiseOperation
COMPARISONS = (Op.EQUAL, Op.GREATER, Op.LESS)
LOGICAL = (Op.AND, Op.OR, Op.XOR)


def need(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(message)


def same_types(*tensors: Tensor) -> Any:
    names = [str(tensor.dtype) for tensor in tensors]
    need(len(set(names)) == 1, f"inputs must have the same type, they have {names}")
    return tensors[0].dtype


def same_dimension(one: int, other: int, what: str = "dimensions") -> int:
    need(-1 in (one, other) or one == other, f"{what} {one} and {other} differ")
    return max(one, other)


def broadcast(one: Shape, other: Shape) -> Shape:
    need(len(one) == len(other), f"shapes {one} and {other} have different ranks")
    shape = []
    for a, b in zip(one, other, strict=True):
        need(a == b or 1 in (a, b) or -1 in (a, b), f"shapes {one} and {other} cannot be broadcast")
        shape.append(b if a == 1 else a if b in (1, -1) else b)
    return tuple(shape)


def given(tensor: Tensor | None, what: str) -> Tensor:
    need(tensor is not None, f"{what} is missing")
    assert tensor is not None
    return tensor


def shape_of(tensor: Tensor) -> Shape:
    assert tensor.shape is not None
    return tensor.shape


def constant(node: Node, inputs: Inputs) -> list[Result]:
    memory, shape = node.attributes["weights"], node.attributes["shape"]
    need(memory.dtype not in (DataType.BOOL, DataType.UINT8), f"a constant cannot be {memory.dtype}")
    need(memory.count == volume(shape), f"{memory.count} weights for a constant of shape {shape}")
    small = memory.dtype in INTEGERS and memory.count <= 16
    return [(memory.dtype, shape, tuple(memory.array().tolist()) if small else None)]


def elementwise(node: Node, inputs: Inputs) -> list[Result]:
    one, other = given(inputs[0], "input 0"), given(inputs[1], "input 1")
    op, dtype = node.attributes["op"], same_types(one, other)
    if op in LOGICAL:
        need(dtype == DataType.BOOL, f"{op} takes BOOL, not {dtype}")
    else:
        need(dtype in FLOATS + INTEGERS, f"{op} takes numbers, not {dtype}")
    return [(DataType.BOOL if op in COMPARISONS else dtype, broadcast(shape_of(one), shape_of(other)), None)]


def unary(node: Node, inputs: Inputs) -> list[Result]:
    tensor, op = given(inputs[0], "input 0"), node.attributes["op"]
    wanted = (DataType.BOOL,) if op == real.UnaryOperation.NOT else FLOATS
    need(tensor.dtype in wanted, f"{op} does not take {tensor.dtype}")
    return [(tensor.dtype, shape_of(tensor), None)]


def activation(node: Node, inputs: Inputs) -> list[Result]:
    tensor = given(inputs[0], "input 0")
    need(tensor.dtype in FLOATS, f"an activation does not take {tensor.dtype}")
    return [(tensor.dtype, shape_of(tensor), None)]


def reduce(node: Node, inputs: Inputs) -> list[Result]:
    tensor, axes = given(inputs[0], "input 0"), node.attributes["axes"]
    shape = shape_of(tensor)
    need(tensor.dtype in FLOATS + INTEGERS, f"a reduction does not take {tensor.dtype}")
    need(0 < axes < 1 << len(shape), f"axes {axes:#b} of a tensor of rank {len(shape)}")
    if node.attributes["keep_dims"]:
        kept = tuple(1 if axes >> place & 1 else size for place, size in enumerate(shape))
    else:
        kept = tuple(size for place, size in enumerate(shape) if not axes >> place & 1)
    return [(tensor.dtype, kept, None)]


def matrix_multiply(node: Node, inputs: Inputs) -> list[Result]:
    one, other = given(inputs[0], "input 0"), given(inputs[1], "input 1")
    dtype = same_types(one, other)
    need(dtype in FLOATS, f"a matrix multiplication does not take {dtype}")
    shapes = []
    for tensor, op in ((one, node.attributes["op0"]), (other, node.attributes["op1"])):
        shape = shape_of(tensor)
        need(op != real.MatrixOperation.VECTOR, "the double does not play MatrixOperation.VECTOR")
        need(len(shape) >= 2, f"a matrix of shape {shape}")
        swapped = op == real.MatrixOperation.TRANSPOSE
        shapes.append((*shape[:-2], shape[-1], shape[-2]) if swapped else shape)
    need(len(shapes[0]) == len(shapes[1]), f"matrices of different ranks: {shapes}")
    same_dimension(shapes[0][-1], shapes[1][-2], "inner dimensions")
    batch = broadcast(shapes[0][:-2], shapes[1][:-2])
    return [(dtype, (*batch, shapes[0][-2], shapes[1][-1]), None)]


def cast(node: Node, inputs: Inputs) -> list[Result]:
    tensor, to_type = given(inputs[0], "input 0"), node.attributes["to_type"]
    need(DataType.FP8 not in (tensor.dtype, to_type), "FP8 cannot be cast; use Quantize and Dequantize")
    return [(to_type, shape_of(tensor), tensor.value if to_type in INTEGERS else None)]


def _check_scale(node: Node, data: Tensor, scale: Tensor, dtype: Any) -> None:
    need(scale.constant, "the scale must be a build-time constant")
    need(dtype in FLOATS and scale.dtype == dtype, f"the scale is {scale.dtype}, it must be {dtype}")
    shape, axis = shape_of(scale), node.attributes["axis"]
    need(len(shape) <= 1, f"a scale of shape {shape}")
    if len(shape) == 1 and shape != (1,):
        rank = len(shape_of(data))
        need(0 <= axis < rank, f"axis {axis} of a tensor of rank {rank}: a scale per channel needs `axis`")
        need(shape_of(data)[axis] == shape[0], f"{shape[0]} scales for axis {axis} of {shape_of(data)}")


def quantize(node: Node, inputs: Inputs) -> list[Result]:
    data, scale = given(inputs[0], "input 0"), given(inputs[1], "the scale")
    need(node.attributes["to_type"] == DataType.FP8, f"the double quantizes to FP8, not {node.attributes['to_type']}")
    _check_scale(node, data, scale, data.dtype)
    need(data.constant or volume(shape_of(scale)) == 1, "activations are quantised to FP8 per tensor only")
    return [(DataType.FP8, shape_of(data), None)]


def dequantize(node: Node, inputs: Inputs) -> list[Result]:
    data, scale = given(inputs[0], "input 0"), given(inputs[1], "the scale")
    need(data.dtype == DataType.FP8, f"the double dequantizes FP8, not {data.dtype}")
    _check_scale(node, data, scale, node.attributes["to_type"])
    return [(node.attributes["to_type"], shape_of(data), None)]


def concatenation(node: Node, inputs: Inputs) -> list[Result]:
    tensors = [given(tensor, "an input") for tensor in inputs]
    dtype, axis, first = same_types(*tensors), node.attributes["axis"], shape_of(tensors[0])
    need(0 <= axis < len(first), f"axis {axis} of a tensor of rank {len(first)}")
    shape = list(first)
    for tensor in tensors[1:]:
        other = shape_of(tensor)
        need(len(other) == len(first), f"shapes {first} and {other} have different ranks")
        for place, size in enumerate(other):
            if place != axis:
                shape[place] = same_dimension(shape[place], size)
            else:
                shape[place] = -1 if -1 in (shape[place], size) else shape[place] + size
    values = [tensor.value for tensor in tensors]
    joined = None if None in values else tuple(item for value in values for item in value or ())
    return [(dtype, tuple(shape), joined)]


def slice_layer(node: Node, inputs: Inputs) -> list[Result]:
    data = given(inputs[0], "input 0")
    shape = shape_of(data)
    parts = []
    for place, name in enumerate(("start", "shape", "stride"), 1):
        tensor = inputs[place] if place < len(inputs) else None
        if tensor is not None:
            need(tensor.value is not None, f"input {place} of a slice must be a shape tensor")
        parts.append(node.attributes[name] if tensor is None else tensor.value)
    start, size, stride = parts
    need(node.attributes["mode"] == real.SampleMode.STRICT_BOUNDS, "the double plays STRICT_BOUNDS only")
    for part in parts:
        need(len(part) == len(shape), f"start, size and stride {parts} for a tensor of rank {len(shape)}")
    for extent, begin, count, step in zip(shape, start, size, stride, strict=True):
        if -1 not in (extent, count) and count:
            last = begin + (count - 1) * step
            need(0 <= begin < extent and 0 <= last < extent, f"slice {start} + {size} of shape {shape} is out of range")
    value = None
    if data.value is not None and -1 not in size:
        value = tuple(data.value[start[0] + index * stride[0]] for index in range(size[0]))
    return [(data.dtype, tuple(size), value)]


def reshaped(shape: Shape, wanted: Shape, zero_is_placeholder: bool) -> Shape:
    """The shape that reshape dimensions with their special values 0 and -1 mean."""
    result = [shape[place] if size == 0 and zero_is_placeholder else size for place, size in enumerate(wanted)]
    need(wanted.count(-1) <= 1, f"reshape to {wanted}: only one dimension may be -1")
    if -1 not in shape:
        if -1 in wanted:
            rest = volume(tuple(size for size in result if size != -1))
            need(rest > 0 and volume(shape) % rest == 0, f"{shape} cannot be reshaped to {wanted}")
            result[wanted.index(-1)] = volume(shape) // rest
        need(volume(tuple(result)) == volume(shape), f"{shape} cannot be reshaped to {wanted}")
    return tuple(result)


def shuffle(node: Node, inputs: Inputs) -> list[Result]:
    data, shape = given(inputs[0], "input 0"), shape_of(given(inputs[0], "input 0"))
    for name in ("first_transpose", "second_transpose"):
        order = node.attributes[name]
        if order is not None:
            order = order[: len(shape)]
            need(sorted(order) == list(range(len(shape))), f"{name} {order} of a tensor of rank {len(shape)}")
            shape = tuple(shape[place] for place in order)
        if name == "first_transpose" and node.attributes["reshape_dims"] is not None:
            shape = reshaped(shape, node.attributes["reshape_dims"], node.attributes["zero_is_placeholder"])
    return [(data.dtype, shape, data.value)]


def shape_layer(node: Node, inputs: Inputs) -> list[Result]:
    shape = shape_of(given(inputs[0], "input 0"))
    return [(DataType.INT64, (len(shape),), shape)]


def gather(node: Node, inputs: Inputs) -> list[Result]:
    data, indices = given(inputs[0], "input 0"), given(inputs[1], "the indices")
    shape, axis = shape_of(data), node.attributes["axis"]
    need(indices.dtype in INTEGERS, f"indices of type {indices.dtype}")
    need(0 <= axis < len(shape), f"axis {axis} of a tensor of rank {len(shape)}")
    return [(data.dtype, (*shape[:axis], *shape_of(indices), *shape[axis + 1 :]), None)]


def select(node: Node, inputs: Inputs) -> list[Result]:
    condition, one, other = (given(tensor, "an input") for tensor in inputs)
    need(condition.dtype == DataType.BOOL, f"a condition of type {condition.dtype}")
    shape = broadcast(shape_of(condition), broadcast(shape_of(one), shape_of(other)))
    return [(same_types(one, other), shape, None)]


def rotary_embedding(node: Node, inputs: Inputs) -> list[Result]:
    data, cosine, sine = (given(tensor, "an input") for tensor in inputs[:3])
    positions = inputs[3] if len(inputs) > 3 else None
    dtype, shape = same_types(data, cosine, sine), shape_of(data)
    need(dtype in FLOATS and len(shape) == 4, f"a rotary embedding of {dtype} {shape}")
    width = (node.attributes["rotary_embedding_dim"] or shape[3]) // 2
    for table in (cosine, sine):
        found = shape_of(table)
        if positions is None:
            broadcast(found, (shape[0], shape[2], width))
        else:
            need(len(found) == 2 and found[1] == width, f"a table of shape {found} for {width} pairs")
    if positions is not None:
        # The operator's page asks for int64.
        need(positions.dtype == DataType.INT64, f"position ids of type {positions.dtype}, not INT64")
        broadcast(shape_of(positions), (shape[0], shape[2]))
    return [(dtype, shape, None)]


def kv_cache_update(node: Node, inputs: Inputs) -> list[Result]:
    cache, update, indices = (given(tensor, "an input") for tensor in inputs)
    dtype, shape, new = same_types(cache, update), shape_of(cache), shape_of(update)
    need(dtype in FLOATS, f"a KV cache of type {dtype}")
    need(indices.dtype in INTEGERS, f"write indices of type {indices.dtype}")
    need(len(shape) == len(new) == 4 and -1 not in shape, f"a cache of shape {shape}: it must be static")
    for place in (0, 1, 3):
        same_dimension(shape[place], new[place])
    need(new[2] <= shape[2], f"{new[2]} tokens for a cache of {shape[2]}")
    need(shape_of(indices) == shape[:1], f"write indices of shape {shape_of(indices)}")
    return [(dtype, shape, None)]


def attention(node: Node, inputs: Inputs) -> list[Result]:
    query, key, value = (given(tensor, "an input") for tensor in inputs[:3])
    mask = inputs[3] if len(inputs) > 3 else None
    dtype = same_types(query, key, value)
    shapes = [shape_of(tensor) for tensor in (query, key, value)]
    need(dtype in FLOATS and all(len(shape) == 4 for shape in shapes), f"attention of {dtype} {shapes}")
    need(shapes[1] == shapes[2] and shapes[0][3] == shapes[1][3], f"query, key and value of {shapes}")
    need(shapes[0][1] % shapes[1][1] == 0, f"{shapes[0][1]} heads on {shapes[1][1]}")
    if mask is not None:
        need(node.attributes["causal_kind"] == real.CausalMaskKind.NONE, "a mask excludes a causal kind")
        need(mask.dtype in (DataType.BOOL, dtype), f"a mask of type {mask.dtype}")
        wanted = (*shapes[0][:3], shapes[1][2])
        broadcast(shape_of(mask), wanted)
        need(shape_of(mask)[2:] == wanted[2:], f"a mask of shape {shape_of(mask)} for {wanted}")
    return [(dtype, shapes[0], None)]


RULES: dict[str, Callable[[Node, Inputs], list[Result]]] = {
    "ACTIVATION": activation,
    "ATTENTION": attention,
    "CAST": cast,
    "CONCATENATION": concatenation,
    "CONSTANT": constant,
    "DEQUANTIZE": dequantize,
    "ELEMENTWISE": elementwise,
    "GATHER": gather,
    "KV_CACHE_UPDATE": kv_cache_update,
    "MATRIX_MULTIPLY": matrix_multiply,
    "QUANTIZE": quantize,
    "REDUCE": reduce,
    "ROTARY_EMBEDDING": rotary_embedding,
    "SELECT": select,
    "SHAPE": shape_layer,
    "SHUFFLE": shuffle,
    "SLICE": slice_layer,
    "UNARY": unary,
}


def agrees(inferred: Shape, found: Shape) -> bool:
    """Whether a shape at run time is one that was inferred before."""
    return all(one in (-1, other) for one, other in zip_longest(inferred, found))
