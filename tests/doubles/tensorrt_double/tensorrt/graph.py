"""A recorded network as plain data, which a plan can hold: tensors by number, nodes in the order of their adding."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .bindings import real

DataType = real.DataType
NUMPY: dict[Any, np.dtype[Any]] = {
    DataType.FLOAT: np.dtype(np.float32),
    DataType.HALF: np.dtype(np.float16),
    DataType.BF16: np.dtype(ml_dtypes.bfloat16),
    DataType.FP8: np.dtype(ml_dtypes.float8_e4m3fn),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype(np.uint8),
}
Shape = tuple[int, ...]  # -1: known only at run time


class Refused(Exception):
    """What TensorRT would refuse, with the reason."""


@dataclass
class Tensor:
    """`shape` None: the node that makes it is wrong. `value`: the content, where it is a shape tensor's."""

    name: str
    dtype: Any = None
    shape: Shape | None = None
    value: Shape | None = None
    constant: bool = False


@dataclass
class Node:
    """One layer: `kind` is a name of LayerType; inputs and outputs are numbers of tensors, None an absent input."""

    kind: str
    name: str
    inputs: list[int | None]
    outputs: list[int]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Memory:
    """Weights of a constant: an address, as TensorRT keeps it (it does not copy), or in a plan the content."""

    dtype: Any
    address: int
    count: int
    content: bytes | None = None

    def array(self) -> NDArray[Any]:
        dtype = NUMPY[self.dtype]
        if self.content is not None:
            return np.frombuffer(self.content, dtype)
        return np.frombuffer(ctypes.string_at(self.address, self.count * dtype.itemsize), dtype)


@dataclass
class Graph:
    """The whole network."""

    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)  # by number of the node

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def input_names(self) -> list[str]:
        return [self.tensors[index].name for index in self.inputs]

    def output_names(self) -> list[str]:
        return [self.tensors[index].name for index in self.outputs]

    def aliases(self) -> dict[str, str]:
        """Outputs that share the memory of an input, by name."""
        return {
            self.tensors[node.outputs[0]].name: self.tensors[node.inputs[0] or 0].name
            for node in self.nodes
            if node.kind == "KV_CACHE_UPDATE"
        }


def volume(shape: Shape) -> int:
    return math.prod(shape)
