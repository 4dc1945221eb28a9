"""Small words over TensorRT's INetworkDefinition: each adds named layers and returns a tensor.

Every layer has a name that starts with its linear's or norm's ("layers.3.gate_up.matmul"), for TensorRT's inspector and
log. Vectors are rows [1, N]: operands of an elementwise layer must have the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull.errors import BuildError
from ull_build.tensorrt.weights import F16, Linear, activation_scale


class Graph:
    """One network being described. Keeps the arrays of its constants alive: TensorRT does not copy them."""

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt, self.network = trt, network
        self.linears: dict[str, Linear] = {}  # that it holds, by name
        self._kept: list[NDArray[Any]] = []
        self._types = {
            np.dtype(np.float32): trt.DataType.FLOAT,
            np.dtype(np.float16): trt.DataType.HALF,
            np.dtype(ml_dtypes.bfloat16): trt.DataType.BF16,
            np.dtype(ml_dtypes.float8_e4m3fn): trt.DataType.FP8,
            np.dtype(np.int32): trt.DataType.INT32,
            np.dtype(np.int64): trt.DataType.INT64,
        }

    # ---- inputs, outputs, constants -------------------------------------------------------------------------------

    def input(self, name: str, dtype: Any, shape: Sequence[int]) -> Any:
        """An input; -1 is a dimension that the optimisation profiles give."""
        return self.network.add_input(name, self._types[np.dtype(dtype)], tuple(shape))

    def output(self, tensor: Any, name: str) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, name: str, values: NDArray[Any]) -> Any:
        values = np.ascontiguousarray(values).reshape(values.shape)  # a scalar stays one
        self._kept.append(values)
        weights = self.trt.Weights(self._types[values.dtype], values.ctypes.data, values.size)
        return self.named(self.network.add_constant(values.shape, weights), name)

    def named(self, layer: Any, name: str) -> Any:
        """Names a layer that was just added, and its tensor. Raises BuildError when TensorRT did not add it."""
        if layer is None:
            raise BuildError(f"TensorRT refused the layer {name}", field=name)
        layer.name = name
        tensor = layer.get_output(0)
        tensor.name = f"{name}:0"
        return tensor

    # ---- arithmetic -----------------------------------------------------------------------------------------------

    def elementwise(self, name: str, operation: str, one: Any, other: Any) -> Any:
        """`operation`: SUM, PROD, GREATER, AND ..."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.named(self.network.add_elementwise(one, other, kind), name)

    def unary(self, name: str, operation: str, tensor: Any) -> Any:
        return self.named(self.network.add_unary(tensor, getattr(self.trt.UnaryOperation, operation)), name)

    def cast(self, name: str, tensor: Any, dtype: Any) -> Any:
        return self.named(self.network.add_cast(tensor, self._types[np.dtype(dtype)]), name)

    def rms_norm(self, name: str, tensor: Any, weight: NDArray[np.float32], epsilon: float, rank: int = 2) -> Any:
        """RMSNorm over the last dimension of a float32 tensor of that rank; `weight` has the dimension's length.

        TensorRT's own normalisation layer is a layer norm: it subtracts the mean.
        """
        operations = self.trt.ReduceOperation
        square = self.elementwise(f"{name}.square", "PROD", tensor, tensor)
        mean = self.named(self.network.add_reduce(square, operations.AVG, 1 << (rank - 1), True), f"{name}.mean")
        small = self.constant(f"{name}.epsilon", np.full((1,) * rank, epsilon, np.float32))
        root = self.unary(f"{name}.root", "SQRT", self.elementwise(f"{name}.shifted", "SUM", mean, small))
        normed = self.elementwise(f"{name}.normed", "PROD", tensor, self.unary(f"{name}.inverse", "RECIP", root))
        scale = self.constant(f"{name}.weight", weight.reshape((1,) * (rank - 1) + weight.shape))
        return self.elementwise(f"{name}.scaled", "PROD", normed, scale)

    def silu(self, name: str, tensor: Any) -> Any:
        sigmoid = self.network.add_activation(tensor, self.trt.ActivationType.SIGMOID)
        return self.elementwise(f"{name}.silu", "PROD", tensor, self.named(sigmoid, f"{name}.sigmoid"))

    def linear(self, name: str, tensor: Any, linear: Linear, amax: float | None) -> Any:
        """y = (x W^T) * s + b: [T, K] of any float type -> [T, N] float32.

        Where the weights are FP8 both operands pass through FP8, the activations with the scale of `amax`. TensorRT
        makes an FP8 GEMM of that only if both scales are scalars (TensorRT-Model-Connect, pull request 1386): so the
        codes are dequantised by 1, and what the rows were divided by is multiplied onto the product. f16 operands
        become f32 first: the product of f16 tensors may be summed in f16.
        """
        self.linears[name] = linear
        compute = linear.compute
        operand = self._as(f"{name}.input", tensor, compute)
        rows = self.constant(f"{name}.weight", linear.rows)
        if linear.is_fp8:
            if amax is None:
                raise BuildError(f"the calibration has no activation scale for {name}", field=name)
            scale = self.constant(f"{name}.input_scale", activation_scale(amax, compute))
            quantised = self.network.add_quantize(operand, scale, self.trt.DataType.FP8)
            operand = self._dequantise(f"{name}.input", self.named(quantised, f"{name}.quantize"), scale, compute)
            one = self.constant(f"{name}.weight_scale", np.ones((), compute))
            rows = self._dequantise(f"{name}.weight", rows, one, compute)
        elif compute == F16:
            operand = self.cast(f"{name}.input_wide", operand, np.float32)
            rows = self.cast(f"{name}.weight_wide", rows, np.float32)
        kinds = self.trt.MatrixOperation
        product = self.network.add_matrix_multiply(operand, kinds.NONE, rows, kinds.TRANSPOSE)
        result = self._as(f"{name}.output", self.named(product, f"{name}.matmul"), np.float32)
        if linear.scales is not None:
            scales = self.constant(f"{name}.row_scales", linear.scales[None])
            result = self.elementwise(f"{name}.scaled", "PROD", result, scales)
        if linear.bias is not None:
            bias = self.constant(f"{name}.bias", linear.bias[None])
            result = self.elementwise(f"{name}.biased", "SUM", result, bias)
        return result

    def _as(self, name: str, tensor: Any, dtype: Any) -> Any:
        """The tensor in that type."""
        return tensor if tensor.dtype == self._types[np.dtype(dtype)] else self.cast(name, tensor, dtype)

    def _dequantise(self, name: str, tensor: Any, scale: Any, compute: np.dtype[Any]) -> Any:
        return self.named(self.network.add_dequantize(tensor, scale, self._types[compute]), f"{name}_dequantize")

    # ---- shapes ---------------------------------------------------------------------------------------------------

    def token_count(self, name: str, tensor: Any) -> Any:
        """The first dimension of a tensor [T, ...] as a shape tensor [1] int64."""
        shape = self.named(self.network.add_shape(tensor), f"{name}.shape")
        return self.named(self.network.add_slice(shape, (0,), (1,), (1,)), f"{name}.tokens")

    def shape_with(self, name: str, before: Sequence[int], tokens: Any, after: Sequence[int]) -> Any:
        """The shape tensor [*before, T, *after] int64."""
        parts = []
        for place, sizes in (("before", before), ("after", after)):
            if sizes:
                parts.append(self.constant(f"{name}.{place}", np.array(sizes, np.int64)))
        parts.insert(1 if before else 0, tokens)
        layer = self.network.add_concatenation(parts)
        if layer is not None:
            layer.axis = 0
        return self.named(layer, f"{name}.size")

    def slice(self, name: str, tensor: Any, start: Sequence[int], least: Sequence[int], size: Any) -> Any:
        """A slice from `start` whose shape is the shape tensor `size`; `least` is that shape for one token."""
        layer = self.network.add_slice(tensor, tuple(start), tuple(least), (1,) * len(start))
        if layer is not None:
            layer.set_input(2, size)
        return self.named(layer, name)

    def shuffle(
        self,
        name: str,
        tensor: Any,
        shape: Sequence[int] | None = None,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
    ) -> Any:
        """Transposes by `before`, reshapes to `shape` (-1: inferred), transposes by `after`."""
        layer = self.network.add_shuffle(tensor)
        if layer is not None:
            if before is not None:
                layer.first_transpose = self.trt.Permutation(before)
            if shape is not None:
                layer.reshape_dims = self.trt.Dims(shape)
            if after is not None:
                layer.second_transpose = self.trt.Permutation(after)
        return self.named(layer, name)
