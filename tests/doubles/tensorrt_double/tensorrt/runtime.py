"""Runtime, ICudaEngine, IExecutionContext and EngineInspector: a context runs its plan on memory at host addresses.

The driver double's device memory is plain host memory, so addresses of tensors are read and written as they are.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from .behaviour import options
from .bindings import real
from .builder import ALIGNMENT, PLAN_MAGIC, Plan, Severity
from .evaluation import fold, run
from .fusion import fp8_products, inspect
from .graph import NUMPY, Refused, Shape, Tensor
from .signatures import StandIn, check_call

POISON = 0xFF  # a byte of not-a-numbers


def enqueue(stream: int, function: Callable[[], None]) -> None:
    """Puts the run of a context onto a stream. At once here; a test may replace it to capture the run instead."""
    function()


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured: nothing that is enqueued on it runs now. A test may replace it."""
    return False


class Runtime(StandIn, real=real.Runtime):
    def __init__(self, logger: Any) -> None:
        check_call(real.Runtime, "__init__", (logger,), {})
        self._logger = logger

    @property
    def logger(self) -> Any:
        return self._logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        data = bytes(serialized_engine)
        try:
            if not data.startswith(PLAN_MAGIC):
                raise ValueError("magic tag does not match")
            plan = pickle.loads(data.removeprefix(PLAN_MAGIC))
            if plan.version != real.__version__:
                raise ValueError(f"the engine plan was built by version {plan.version}")
        except Exception as error:
            self._logger.log(Severity.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: Serialization ({error})")
            return None
        return ICudaEngine(plan, self._logger.log)


class ICudaEngine(StandIn, real=real.ICudaEngine):
    def __init__(self, plan: Plan, log: Callable[[Any, str], None]) -> None:
        self._plan, self._log = plan, log
        self._folded = fold(plan.graph)
        self._names = plan.graph.input_names() + plan.graph.output_names()

    @property
    def name(self) -> str:
        return self._plan.name

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def num_layers(self) -> int:
        return len(self._plan.graph.nodes)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._plan.profiles)

    @property
    def num_aux_streams(self) -> int:
        return self._plan.aux_streams

    @property
    def device_memory_size_v2(self) -> int:
        return max(self._plan.memory) + ALIGNMENT  # more than any profile says by itself

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self._plan.memory[profile_index]

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> Any:
        if name not in self._names:
            return real.TensorIOMode.NONE
        is_input = name in self._plan.graph.input_names()
        return real.TensorIOMode.INPUT if is_input else real.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self._plan.graph.tensor(name).dtype

    def get_tensor_shape(self, name: str) -> Any:
        return real.Dims(self._plan.graph.tensor(name).shape or ())

    def get_tensor_location(self, name: str) -> Any:
        return real.TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        static = self._plan.graph.tensor(name).shape or ()
        shapes = self._plan.profiles[profile_index].get(name, (static,) * 3)
        return [real.Dims(shape) for shape in shapes]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._plan.graph.aliases().get(name)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)

    def create_execution_context(
        self, strategy: Any = real.ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext:
        return IExecutionContext(self, strategy == real.ExecutionContextAllocationStrategy.USER_MANAGED)


class EngineInspector(StandIn, real=real.EngineInspector):
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine

    def get_engine_information(self, format: Any) -> str:
        graph = self._engine._plan.graph
        layers: list[Any] = [node.name for node in graph.nodes]
        if self._engine._plan.detailed and format == real.LayerInformationFormat.JSON:
            layers = inspect(graph)
        if format != real.LayerInformationFormat.JSON:
            return "\n".join(layers)
        return json.dumps({"Layers": layers, "Bindings": self._engine._names}, indent=2)


class IExecutionContext(StandIn, real=real.IExecutionContext):
    """Keeps the addresses and shapes that it is given; `execute_async_v3` fixes them for that run.

    A profile is in force once the stream has come to the change. What has been changed since the last run is made ready
    by the next one, which cannot be captured.
    """

    def __init__(self, engine: ICudaEngine, user_managed: bool) -> None:
        self._engine, self._user_managed = engine, user_managed
        self._profile = 0
        self._changes = self._changes_seen = 0  # of the profile: asked for, and come to by the stream
        self._is_ready = False  # nothing has been changed since it last ran
        self._memory, self._memory_address = 0, 0  # bytes that the user has given, and where
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    @property
    def engine(self) -> ICudaEngine:
        return self._engine

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    @property
    def all_binding_shapes_specified(self) -> bool:
        return not self.infer_shapes()

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            self._refuse(f"setOptimizationProfileAsync: there is no profile {profile_index}")
            raise RuntimeError("Error in set optimization profile async.")
        self._profile, self._shapes, self._is_ready = profile_index, {}, False
        self._changes += 1
        number = self._changes
        enqueue(stream_handle, lambda: self._come_to(number))
        return True

    def _come_to(self, number: int) -> None:
        self._changes_seen = number

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if self._engine.get_tensor_mode(name) != real.TensorIOMode.INPUT:
            return self._refuse(f"setInputShape: {name} is no input")
        if self._changes_seen != self._changes:
            return self._refuse("setInputShape: the stream has not come to the change of the profile: synchronize it")
        least, _, largest = self._engine.get_tensor_profile_shape(name, self._profile)
        sizes = list(zip(tuple(least), tuple(shape), tuple(largest), strict=False))
        if len(shape) != len(least) or any(not a <= b <= c for a, b, c in sizes):
            return self._refuse(
                f"setInputShape: {tuple(shape)} of {name} is outside of profile {self._profile}: "
                f"{tuple(least)} to {tuple(largest)}"
            )
        self._is_ready &= self._shapes.get(name) == tuple(shape)
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> Any:
        tensor = self._tensor(name)
        if name in self._shapes:
            return real.Dims(self._shapes[name])
        if self._is_input(name) or self.infer_shapes():
            return real.Dims(tensor.shape or ())
        graph, zeros = self._engine._plan.graph, {key: np.zeros(*self._form(key)) for key in self._inputs()}
        found = run(graph, zeros, self._engine._folded)
        index = graph.tensors.index(tensor)
        return real.Dims(found[index].shape)

    def infer_shapes(self) -> list[str]:
        return [name for name in self._inputs() if -1 in self._form(name)[0]]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._names:
            return self._refuse(f"setTensorAddress: there is no tensor {name}")
        if memory == 0 or memory % ALIGNMENT:
            return self._refuse(f"setTensorAddress: {memory:#x} of {name} is not aligned to {ALIGNMENT} bytes")
        self._addresses[name] = memory
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % ALIGNMENT:
            self._refuse(f"setDeviceMemoryV2: {memory:#x} is not aligned to {ALIGNMENT} bytes")
            return
        self._memory, self._memory_address, self._is_ready = size, memory, False

    def execute_async_v3(self, stream_handle: int) -> bool:
        unspecified = self.infer_shapes()
        unaddressed = [name for name in self._engine._names if name not in self._addresses]
        needed = self._engine.device_memory_size_v2
        aliases = self._engine._plan.graph.aliases()
        apart = [name for name, of in aliases.items() if self.get_tensor_address(name) != self.get_tensor_address(of)]
        for wrong, message in (
            (unspecified, f"the shapes of {unspecified} are not specified"),
            (unaddressed, f"addresses of {unaddressed} are not set"),
            (self._user_managed and self._memory < needed, f"{self._memory} bytes of device memory, {needed} needed"),
            (apart, f"{apart} must lie at the addresses of their inputs"),
            (
                is_capturing(stream_handle) and not self._is_ready,
                "the stream is being captured, and the context has not run since its profile, shapes or memory changed",
            ),
        ):
            if wrong:
                return self._refuse(f"enqueueV3: Error Code 3: API Usage Error ({message})")
        forms = {name: (self._addresses[name], *self._form(name)) for name in self._inputs()}
        outputs = {name: self._addresses[name] for name in self._engine._plan.graph.output_names()}
        scratch = (self._memory_address, self._memory) if self._user_managed else (0, 0)
        profile = self._profile
        enqueue(stream_handle, lambda: self._run(forms, outputs, scratch, profile))
        self._is_ready = True
        return True

    def _run(
        self,
        inputs: dict[str, tuple[int, Shape, Any]],
        outputs: dict[str, int],
        scratch: tuple[int, int],
        profile: int,
    ) -> None:
        """Reads the inputs where they lie, evaluates, writes the outputs. What was in the scratch is gone."""
        plan = self._engine._plan
        graph = plan.graph
        if scratch[0]:
            ctypes.memset(scratch[0], POISON, scratch[1])
        arrays = {name: _at(address, shape, dtype) for name, (address, shape, dtype) in inputs.items()}
        try:
            found = run(graph, arrays, self._engine._folded, profile if options.profile_bits else 0)
        except Refused as error:
            self._refuse(f"enqueueV3: Error Code 1: Cuda Runtime ({error})")
            raise
        is_unstable = options.unstable and options.is_unstable(plan.name, plan.level, fp8_products(graph))
        for index in graph.outputs:
            name, result = graph.tensors[index].name, np.ascontiguousarray(found[index])
            if is_unstable:
                result = np.roll(result, 1, axis=-1)
            if name not in graph.aliases():
                _at(outputs[name], result.shape, result.dtype)[...] = result

    def _inputs(self) -> list[str]:
        return self._engine._plan.graph.input_names()

    def _is_input(self, name: str) -> bool:
        return name in self._inputs()

    def _tensor(self, name: str) -> Tensor:
        return self._engine._plan.graph.tensor(name)

    def _form(self, name: str) -> tuple[Shape, Any]:
        tensor = self._tensor(name)
        return self._shapes.get(name, tensor.shape or ()), NUMPY[tensor.dtype]

    def _refuse(self, message: str) -> bool:
        self._engine._log(Severity.ERROR, f"IExecutionContext::{message}")
        return False


def _at(address: int, shape: Shape, dtype: Any) -> Any:
    """The memory at an address as an array."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
