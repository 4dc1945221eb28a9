"""Tries the plan of one segment on made-up inputs, as soon as it is built, against the same segment in NumPy.

TensorRT is known to choose unstable FP8 kernels: such a plan's outputs are off by their own size. To find that here
costs one segment's build; the logits of the whole model are compared later.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ull.bundle import ENTRY_SEGMENT, EXIT_SEGMENT, HEAD_SEGMENT, STEP_SEGMENT, Model, Profile, profile_of
from ull.errors import GpuError
from ull.gpu.driver import Driver
from ull.wire import MAX_TREE
from ull_build.tensorrt.network import ATTENTION_COLUMNS, LayerNetwork
from ull_build.tensorrt.weights import F8, F16, HEAD, Linear, activation_scale
from ull_build.weights.quantise import FP8_MAX

Array = NDArray[Any]
_ALIGNMENT = 256  # bytes
_BLOCK_ROWS = 4096  # of a weight that are widened at a time
_DEVIATIONS = 4.0  # of a normal distribution's, that made-up inputs have their range be


class Runner(Protocol):
    """Runs plans on the GPU that they are built for."""

    def __call__(self, trt: Any, engine: Any, profile: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The float32 outputs of a plan, by name."""


class DeviceRunner:
    """A Runner with memory and a stream of its own on GPU 0. A context manager. Raises GpuError."""

    def __init__(self) -> None:
        self._driver = Driver(0)
        self._exit = ExitStack()
        self._driver.open()
        self._exit.callback(self._driver.close)
        self._stream = self._driver.create_stream()
        self._exit.callback(self._driver.destroy_stream, self._stream)

    def __enter__(self) -> DeviceRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def __call__(self, trt: Any, engine: Any, profile: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        driver, stream = self._driver, self._stream
        outputs: dict[str, tuple[int, Array]] = {}
        with ExitStack() as memory:

            def allocate(nbytes: int) -> int:
                address = driver.allocate(max(_ALIGNMENT, nbytes))
                memory.callback(driver.free, address)
                return address

            context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise GpuError("gpu_failed", f"TensorRT makes no execution context for {engine.name}")
            context.set_optimization_profile_async(profile, stream)
            driver.synchronise(stream)
            context.set_device_memory(allocate(engine.device_memory_size_v2), max(0, engine.device_memory_size_v2))
            for name, values in inputs.items():
                address, array = allocate(values.nbytes), np.ascontiguousarray(values)
                driver.copy_to_device(address, array.ctypes.data, array.nbytes, stream)
                driver.synchronise(stream)
                context.set_input_shape(name, array.shape)
                context.set_tensor_address(name, address)
            for index in range(engine.num_io_tensors):
                name = engine.get_tensor_name(index)
                if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
                    found = np.zeros(tuple(context.get_tensor_shape(name)), np.float32)
                    outputs[name] = allocate(found.nbytes), found
                    context.set_tensor_address(name, outputs[name][0])
            if not context.execute_async_v3(stream):
                raise GpuError("gpu_failed", f"TensorRT's plan of {engine.name} cannot be enqueued")
            for address, found in outputs.values():
                driver.copy_to_host(found.ctypes.data, address, found.nbytes, stream)
            driver.synchronise(stream)
            del context  # before the memory that it was given
        return {name: found for name, (_, found) in outputs.items()}


def segment_error(
    runner: Runner, trt: Any, engine: Any, trial: Trial, token_counts: Sequence[int], profiles: Sequence[Profile]
) -> float:
    """How far a plan is off for any of these numbers of tokens: |difference| / |reference|, the worst output's."""
    worst = 0.0
    inputs, expected = trial.inputs, trial.outputs
    for tokens in token_counts:
        given = {name: values[:tokens] if name == "residual" else values for name, values in inputs.items()}
        found = runner(trt, engine, profile_of(tokens, profiles), given)
        for name, reference in expected.items():
            rows, wanted = found[name], reference[:tokens]
            if not np.isfinite(rows).all():
                return float("inf")
            # What a segment adds to the residual is what it computes.
            base = inputs["residual"][:tokens] if name == "residual_out" else np.float32(0.0)
            worst = max(worst, float(np.linalg.norm(rows - wanted) / np.linalg.norm(wanted - base)))
    return worst


class Trial:
    """Made-up inputs of a segment for 64 tokens and what NumPy makes of them. `linears` as the plan has them."""

    def __init__(
        self, network: LayerNetwork, segment: str, linears: Mapping[str, Linear], amax: Mapping[str, float]
    ) -> None:
        self._network, self._linears, self._amax = network, linears, amax
        self._model: Model = network.model
        random = np.random.default_rng(zlib.crc32(segment.encode()))
        residual = random.standard_normal((MAX_TREE, self._model.hidden)).astype(np.float32)
        self.inputs: dict[str, Array] = {"residual": residual}
        self.outputs: dict[str, Array] = {}
        if segment == HEAD_SEGMENT:
            self.outputs["logits"] = self._linear(HEAD, self._norm("norm", residual))
            return
        layer = -1
        if segment != ENTRY_SEGMENT:
            layer = self._model.layers - 1 if segment == EXIT_SEGMENT else int(segment.rpartition(".")[2])
            name = f"layers.{layer}"
            attention = random.standard_normal((MAX_TREE, network.attention_width)).astype(np.float32)
            attention = (attention * (amax.get(f"{name}.o", _DEVIATIONS) / _DEVIATIONS)).astype(F16)
            pieces = attention.reshape(MAX_TREE, -1, ATTENTION_COLUMNS)
            self.inputs["attention"] = np.ascontiguousarray(pieces.transpose(1, 0, 2))
            residual = residual + self._linear(f"{name}.o", attention.astype(np.float32))
            gate, up = np.split(self._linear(f"{name}.gate_up", self._norm(f"{name}.mlp_norm", residual)), 2, 1)
            residual = residual + self._linear(f"{name}.down", gate / (1.0 + np.exp(-gate)) * up)
            self.outputs["residual_out"] = residual
        if segment != EXIT_SEGMENT:
            name = f"layers.{layer + 1}"
            self.outputs["qkv"] = self._linear(f"{name}.qkv", self._norm(f"{name}.attn_norm", residual))

    def _norm(self, name: str, rows: Array) -> Array:
        mean = np.square(rows, dtype=np.float64).mean(axis=1, keepdims=True)
        weight = self._network.weights.norm(name)
        return np.asarray(rows / np.sqrt(mean + self._model.rms_epsilon) * weight, np.float32)

    def _linear(self, name: str, rows: Array) -> Array:
        linear = self._linears[name]
        if linear.is_fp8:
            scale = np.float32(activation_scale(self._amax[name], linear.compute))
            rows = np.clip(rows / scale, -FP8_MAX, FP8_MAX).astype(F8).astype(np.float32) * scale
        blocks = range(0, len(linear.rows), _BLOCK_ROWS)
        parts = [rows @ linear.rows[start : start + _BLOCK_ROWS].astype(np.float32).T for start in blocks]
        result = np.concatenate(parts, axis=1)
        if linear.scales is not None:
            result = result * linear.scales
        return np.asarray(result if linear.bias is None else result + linear.bias, np.float32)


def can_be_tried(segment: str) -> bool:
    """TensorRT's own attention is tried with the whole model only: its caches would have to be filled."""
    return segment != STEP_SEGMENT
