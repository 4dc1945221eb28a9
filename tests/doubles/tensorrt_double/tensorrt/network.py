"""The recording INetworkDefinition, its layers and tensors: stand-ins over a `graph.Graph`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .bindings import real
from .graph import DataType, Graph, Memory, Node, Refused, Shape, Tensor
from .rules import RULES
from .signatures import StandIn


class Weights(real.Weights):
    """The real Weights, which remembers the address: the bindings offer none for types that NumPy lacks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if args and isinstance(args[0], np.ndarray):
            self.address = args[0].ctypes.data
        else:
            self.address = int(args[1] if len(args) > 1 else kwargs.get("ptr", 0))


class ITensor(StandIn, real=real.ITensor):
    def __init__(self, network: INetworkDefinition, index: int) -> None:
        self._network, self._index = network, index

    @property
    def _tensor(self) -> Tensor:
        return self._network._graph.tensors[self._index]

    @property
    def name(self) -> str:
        return self._tensor.name

    @name.setter
    def name(self, name: str) -> None:
        self._tensor.name = name

    @property
    def dtype(self) -> Any:
        return self._tensor.dtype

    @property
    def shape(self) -> Any:
        if self._tensor.shape is None:
            raise ValueError("__len__() should return >= 0")  # what iterating over the invalid Dims comes to
        return real.Dims(self._tensor.shape)

    def set_dimension_name(self, index: int, name: str) -> None:
        if not self.is_network_input or not 0 <= index < len(self.shape):
            raise ValueError(f"dimension {index} of {self.name} cannot be named")

    @property
    def is_network_input(self) -> bool:
        return self._index in self._network._graph.inputs

    @property
    def is_network_output(self) -> bool:
        return self._index in self._network._graph.outputs


class _Layer(StandIn):
    """What all layers share. `_number` is that of its node."""

    def __init__(self, network: INetworkDefinition, number: int) -> None:
        self._network, self._number = network, number

    @property
    def _node(self) -> Node:
        return self._network._graph.nodes[self._number]

    def _set(self, name: str, value: Any) -> None:
        self._node.attributes[name] = value
        self._network._infer(self._number)

    def _set_input(self, index: int, tensor: ITensor | None) -> None:
        later = [output for node in self._network._graph.nodes[self._number :] for output in node.outputs]
        if tensor is not None and tensor._index in later:
            raise NotImplementedError("the double runs layers in the order of their adding: add this one later")
        inputs = self._node.inputs
        inputs.extend([None] * (index + 1 - len(inputs)))
        inputs[index] = None if tensor is None else self._network._index(tensor)
        self._network._infer(self._number)


def _get_name(layer: _Layer) -> str:
    return layer._node.name


def _set_name(layer: _Layer, name: str) -> None:
    layer._node.name = name


def _get_output(layer: _Layer, index: int) -> ITensor | None:
    outputs = layer._node.outputs
    return layer._network._tensors[outputs[index]] if 0 <= index < len(outputs) else None


def _get_input(layer: _Layer, index: int) -> ITensor | None:
    inputs = layer._node.inputs
    found = inputs[index] if 0 <= index < len(inputs) else None
    return None if found is None else layer._network._tensors[found]


def _attribute(name: str) -> property:
    """A plain property of a layer; sequences of numbers are read as Dims or a Permutation."""
    kind = real.Permutation if name.endswith("transpose") else real.Dims

    def read(layer: _Layer) -> Any:
        value = layer._node.attributes[name]
        return kind(value) if isinstance(value, tuple) else value

    def write(layer: _Layer, value: Any) -> None:
        if isinstance(value, (list, tuple, real.Dims, real.Permutation)):
            value = tuple(kind(value))  # a Permutation always has eight entries
        layer._set(name, value)

    return property(read, write)


def _layer_class(real_class: type, *attributes: str, **more: Any) -> type[_Layer]:
    shared: dict[str, Any] = {
        "name": property(_get_name, _set_name),
        "num_inputs": property(lambda layer: len(layer._node.inputs)),
        "num_outputs": property(lambda layer: len(layer._node.outputs)),
        "get_input": _get_input,
        "get_output": _get_output,
        "set_input": lambda layer, index, tensor: layer._set_input(index, tensor),
    }
    own = {name: _attribute(name) for name in attributes}
    members = {**shared, **own, **more}
    return type(_Layer)(real_class.__name__, (_Layer,), members, real=real_class)


_MASK = property(lambda layer: layer.get_input(3), lambda layer, tensor: layer._set_input(3, tensor))
LAYERS: dict[str, type[_Layer]] = {
    "ACTIVATION": _layer_class(real.IActivationLayer),
    "ATTENTION": _layer_class(real.IAttention, "norm_op", "causal_kind", "decomposable", mask=_MASK),
    "CAST": _layer_class(real.ICastLayer, "to_type"),
    "CONCATENATION": _layer_class(real.IConcatenationLayer, "axis"),
    "CONSTANT": _layer_class(real.IConstantLayer, "shape"),
    "DEQUANTIZE": _layer_class(real.IDequantizeLayer, "axis", "to_type"),
    "ELEMENTWISE": _layer_class(real.IElementWiseLayer, "op"),
    "GATHER": _layer_class(real.IGatherLayer, "axis"),
    "KV_CACHE_UPDATE": _layer_class(real.IKVCacheUpdateLayer, "cache_mode"),
    "MATRIX_MULTIPLY": _layer_class(real.IMatrixMultiplyLayer, "op0", "op1"),
    "QUANTIZE": _layer_class(real.IQuantizeLayer, "axis", "to_type"),
    "REDUCE": _layer_class(real.IReduceLayer, "op", "axes", "keep_dims"),
    "ROTARY_EMBEDDING": _layer_class(real.IRotaryEmbeddingLayer, "interleaved", "rotary_embedding_dim"),
    "SELECT": _layer_class(real.ISelectLayer),
    "SHAPE": _layer_class(real.IShapeLayer),
    "SHUFFLE": _layer_class(
        real.IShuffleLayer, "first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder"
    ),
    "SLICE": _layer_class(real.ISliceLayer, "start", "shape", "stride", "mode"),
    "UNARY": _layer_class(real.IUnaryLayer, "op"),
}


class INetworkDefinition(StandIn, real=real.INetworkDefinition):
    def __init__(self, log: Callable[[Any, str], None]) -> None:
        self._log = log
        self._graph = Graph()
        self._tensors: list[ITensor] = []
        self._layers: list[_Layer] = []
        self._title = "Unnamed Network 0"

    @property
    def name(self) -> str:
        return self._title

    @name.setter
    def name(self, name: str) -> None:
        self._title = name

    @property
    def num_layers(self) -> int:
        return len(self._graph.nodes)

    @property
    def num_inputs(self) -> int:
        return len(self._graph.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self._graph.outputs)

    def get_layer(self, index: int) -> _Layer:
        return self._layers[index]

    def get_input(self, index: int) -> ITensor:
        return self._tensors[self._graph.inputs[index]]

    def get_output(self, index: int) -> ITensor:
        return self._tensors[self._graph.outputs[index]]

    def add_input(self, name: str, dtype: Any, shape: Any) -> ITensor:
        self._graph.inputs.append(self._new_tensor(Tensor(name, dtype, tuple(shape))))
        return self._tensors[-1]

    def mark_output(self, tensor: ITensor) -> None:
        self._graph.outputs.append(self._index(tensor))

    def add_activation(self, input: ITensor, type: Any) -> _Layer:
        return self._add("ACTIVATION", [input], activation_type=type)

    def add_attention_v2(self, query: ITensor, key: ITensor, value: ITensor, norm_op: Any, causal_kind: Any) -> _Layer:
        return self._add("ATTENTION", [query, key, value], norm_op=norm_op, causal_kind=causal_kind, decomposable=False)

    def add_cast(self, input: ITensor, to_type: Any) -> _Layer:
        return self._add("CAST", [input], to_type=to_type)

    def add_concatenation(self, inputs: Sequence[ITensor]) -> _Layer:
        rank = len(inputs[0]._tensor.shape or ())
        return self._add("CONCATENATION", list(inputs), axis=max(0, rank - 3))

    def add_constant(self, shape: Any, weights: Any) -> _Layer:
        if isinstance(weights, np.ndarray):
            weights = Weights(weights)
        memory = Memory(weights.dtype, weights.address, weights.size)
        return self._add("CONSTANT", [], shape=tuple(shape), weights=memory)

    def add_dequantize(self, input: ITensor, scale: ITensor, output_type: Any) -> _Layer:
        return self._add("DEQUANTIZE", [input, scale], axis=-1, to_type=output_type)

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: Any) -> _Layer:
        return self._add("ELEMENTWISE", [input1, input2], op=op)

    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> _Layer:
        return self._add("GATHER", [input, indices], axis=axis)

    def add_kv_cache_update(self, cache: ITensor, update: ITensor, write_indices: ITensor, cache_mode: Any) -> _Layer:
        return self._add("KV_CACHE_UPDATE", [cache, update, write_indices], cache_mode=cache_mode)

    def add_matrix_multiply(self, input0: ITensor, op0: Any, input1: ITensor, op1: Any) -> _Layer:
        return self._add("MATRIX_MULTIPLY", [input0, input1], op0=op0, op1=op1)

    def add_quantize(self, input: ITensor, scale: ITensor, output_type: Any) -> _Layer:
        return self._add("QUANTIZE", [input, scale], axis=-1, to_type=output_type)

    def add_reduce(self, input: ITensor, op: Any, axes: int, keep_dims: bool) -> _Layer:
        return self._add("REDUCE", [input], op=op, axes=int(axes), keep_dims=keep_dims)

    def add_rotary_embedding(
        self, input: ITensor, cos_cache: ITensor, sin_cache: ITensor, interleaved: bool, rotary_embedding_dim: int
    ) -> _Layer:
        return self._add(
            "ROTARY_EMBEDDING",
            [input, cos_cache, sin_cache],
            interleaved=interleaved,
            rotary_embedding_dim=rotary_embedding_dim,
        )

    def add_select(self, condition: ITensor, then_input: ITensor, else_input: ITensor) -> _Layer:
        return self._add("SELECT", [condition, then_input, else_input])

    def add_shape(self, input: ITensor) -> _Layer:
        return self._add("SHAPE", [input])

    def add_shuffle(self, input: ITensor) -> _Layer:
        names = ("first_transpose", "reshape_dims", "second_transpose")
        return self._add("SHUFFLE", [input], zero_is_placeholder=True, **dict.fromkeys(names))

    def add_slice(self, input: ITensor, start: Any, shape: Any, stride: Any) -> _Layer:
        static = {"start": tuple(start), "shape": tuple(shape), "stride": tuple(stride)}
        return self._add("SLICE", [input], mode=real.SampleMode.STRICT_BOUNDS, **static)

    def add_unary(self, input: ITensor, op: Any) -> _Layer:
        return self._add("UNARY", [input], op=op)

    def _index(self, tensor: ITensor) -> int:
        assert tensor._network is self, f"tensor {tensor.name} belongs to another network"
        return tensor._index

    def _new_tensor(self, tensor: Tensor) -> int:
        self._graph.tensors.append(tensor)
        self._tensors.append(ITensor(self, len(self._tensors)))
        return len(self._tensors) - 1

    def _add(self, kind: str, inputs: Sequence[ITensor], **attributes: Any) -> _Layer:
        number = len(self._graph.nodes)
        name = f"(Unnamed Layer* {number}) [{kind.title()}]"
        output = self._new_tensor(Tensor(f"{name}_output[0]"))
        indices: list[int | None] = [self._index(tensor) for tensor in inputs]
        self._graph.nodes.append(Node(kind, name, indices, [output], attributes))
        self._layers.append(LAYERS[kind](self, number))
        self._infer(number)
        return self._layers[-1]

    def _infer(self, first: int) -> None:
        """Types and shapes of node `first` and of all that were added after it, which may depend on it."""
        graph = self._graph
        for number in range(first, len(graph.nodes)):
            node = graph.nodes[number]
            graph.problems.pop(number, None)
            tensors = [None if index is None else graph.tensors[index] for index in node.inputs]
            output = graph.tensors[node.outputs[0]]
            output.constant = all(tensor is None or tensor.constant for tensor in tensors)
            output.dtype, output.shape, output.value = DataType.FLOAT, None, None
            if any(tensor is not None and tensor.shape is None for tensor in tensors):
                continue  # the reason is known already
            try:
                [result] = RULES[node.kind](node, tensors)
            except Refused as error:
                graph.problems[number] = str(error)
            else:
                dtype, shape, value = result
                output.dtype, output.shape, output.value = dtype, _checked_shape(shape), value


def _checked_shape(shape: Shape) -> Shape:
    assert all(size >= -1 for size in shape), shape
    return shape
