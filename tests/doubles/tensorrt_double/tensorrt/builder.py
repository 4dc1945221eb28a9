"""Builder, IBuilderConfig, IOptimizationProfile and ITimingCache: a plan is the recorded network with its weights."""

from __future__ import annotations

import copy
import hashlib
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .behaviour import options
from .bindings import real
from .evaluation import problems, run
from .graph import NUMPY, DataType, Graph, Memory, Refused, Shape
from .network import INetworkDefinition
from .signatures import StandIn, check_call

PLAN_MAGIC = b"ftrt-double\0"
CACHE_MAGIC = b"ftrt-timing\0"
DEVICE = "the double's GPU"  # what timing caches are valid for
ALIGNMENT = 256  # bytes
Log = Callable[[Any, str], None]
Shapes = dict[str, tuple[Shape, Shape, Shape]]  # by input: least, best and largest
Severity = real.ILogger.Severity


@dataclass
class Plan:
    """What a serialized engine holds. `memory`: bytes of activations for each profile.

    `copies` stands for the weights that profiles have to themselves.
    """

    name: str
    graph: Graph
    profiles: list[Shapes]
    memory: list[int]
    detailed: bool
    aux_streams: int
    level: int
    copies: bytes
    version: str = field(default=real.__version__)


class HostMemory(StandIn, bytes, real=real.IHostMemory):
    """Bytes that the library owns."""

    @property
    def nbytes(self) -> int:
        return len(self)

    @property
    def dtype(self) -> Any:
        return DataType.INT8


class ITimingCache(StandIn, real=real.ITimingCache):
    """Which layers have been timed, by a text that tells them apart."""

    def __init__(self, device: str, timed: dict[str, int]) -> None:
        self._device, self._timed = device, timed

    def serialize(self) -> HostMemory:
        return HostMemory(CACHE_MAGIC + pickle.dumps((self._device, self._timed)))


class IOptimizationProfile(StandIn, real=real.IOptimizationProfile):
    extra_memory_target = 1.0

    def __init__(self) -> None:
        self._shapes: Shapes = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        shapes = (tuple(min), tuple(opt), tuple(max))
        if any(not 0 <= a <= b <= c for a, b, c in zip(*shapes, strict=True)):
            raise ValueError(f"set_shape for {input!r}: {shapes}")
        self._shapes[input] = shapes

    def get_shape(self, input: str) -> list[Any]:
        return [real.Dims(shape) for shape in self._shapes.get(input, ())]


class IBuilderConfig(StandIn, real=real.IBuilderConfig):
    max_aux_streams = -1
    profiling_verbosity = real.ProfilingVerbosity.LAYER_NAMES_ONLY
    progress_monitor = None
    builder_optimization_level = 3

    def __init__(self, log: Log) -> None:
        self._log = log
        self._flags = {real.BuilderFlag.TF32}
        self._profiles: list[IOptimizationProfile] = []
        self._cache: ITimingCache | None = None
        self._limits: dict[Any, int] = {}

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag)

    def get_flag(self, flag: Any) -> bool:
        return flag in self._flags

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._limits[pool] = pool_size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        data = bytes(serialized_timing_cache)
        if not data:
            return ITimingCache(DEVICE, {})
        try:
            assert data.startswith(CACHE_MAGIC)
            device, timed = pickle.loads(data.removeprefix(CACHE_MAGIC))
        except Exception:
            self._log(Severity.ERROR, "createTimingCache: the timing cache cannot be deserialized")
            return None
        return ITimingCache(device, timed)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache._device != DEVICE and not ignore_mismatch:
            self._log(Severity.ERROR, f"setTimingCache: a cache of {cache._device} on {DEVICE}")
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache


class Builder(StandIn, real=real.Builder):
    def __init__(self, logger: Any) -> None:
        check_call(real.Builder, "__init__", (logger,), {})
        if options.old_driver:
            logger.log(Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    @property
    def logger(self) -> Any:
        return self._logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(self._logger.log)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._logger.log)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> HostMemory | None:
        """As the real one: a failure is None and messages for the logger. The progress comes from another thread."""
        done: list[HostMemory | None] = []
        thread = threading.Thread(target=lambda: done.append(self._build(network, config)), name="tensorrt double")
        thread.start()
        thread.join()
        return done[0]

    def _build(self, network: INetworkDefinition, config: IBuilderConfig) -> HostMemory | None:
        graph, log = network._graph, self._logger.log
        profiles = [profile._shapes for profile in config._profiles]
        wrong = problems(graph) + _profile_problems(graph, profiles)
        for message in wrong:
            log(Severity.ERROR, f"IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error ({message})")
        if wrong:
            return None
        level = config.builder_optimization_level
        # At level 0 the cache is neither looked at nor added to.
        cache = config._cache if config._cache and level > 0 else ITimingCache(DEVICE, {})
        phases = _Phases(config.progress_monitor)
        memory: list[int] = []
        phases.start("Building Engine", None, len(profiles))
        try:
            for number, profile in enumerate(profiles):
                memory.append(self._try_profile(graph, profile, cache, phases, number))
                phases.step("Building Engine", number)
        except Refused as error:
            log(Severity.ERROR, f"IBuilder::buildSerializedNetwork: Error Code 2: Internal Error ({error})")
            return None
        finally:
            phases.finish("Building Engine")
        flags = sorted(flag.name for flag in config._flags)
        log(Severity.INFO, f"Engine generation completed with the flags {flags}.")
        detailed = config.profiling_verbosity == real.ProfilingVerbosity.DETAILED
        aux_streams = 1 if config.max_aux_streams < 0 else config.max_aux_streams  # by default TensorRT chooses
        stored = sum(node.attributes["weights"].array().nbytes for node in graph.nodes if node.kind == "CONSTANT")
        extra = sum(profile.extra_memory_target for profile in config._profiles[1:])  # the first one's is ignored
        copies = bytes(int(stored * extra))
        plan = Plan(network.name, _with_contents(graph), profiles, memory, detailed, aux_streams, level, copies)
        return HostMemory(PLAN_MAGIC + pickle.dumps(plan))

    def _try_profile(self, graph: Graph, profile: Shapes, cache: ITimingCache, phases: _Phases, number: int) -> int:
        """Runs the network on zeros of the profile's shapes; returns the bytes of its activations."""
        phase = f"Profile {number}"
        phases.start(phase, "Building Engine", len(graph.nodes))
        inputs = {}
        for index in graph.inputs:
            tensor = graph.tensors[index]
            shape = profile[tensor.name][1] if tensor.name in profile else tensor.shape
            inputs[tensor.name] = np.zeros(shape or (), NUMPY[tensor.dtype])
        found = run(graph, inputs)
        timed = 0
        for place, node in enumerate(graph.nodes):
            arrays = [found[index] for index in (*node.inputs, *node.outputs) if index is not None]
            key = f"{node.kind} {[(str(array.dtype), array.shape) for array in arrays]}"
            if key not in cache._timed:
                timed += 1
                cache._timed[key] = len(cache._timed)
                self._tell_tactics(node.name, key)
            phases.step(phase, place)
        phases.finish(phase)
        self._logger.log(
            Severity.INFO, f"{phase}: timed {timed} layers, {len(graph.nodes) - timed} from the timing cache"
        )
        own = [node.outputs[0] for node in graph.nodes if node.outputs[0] not in graph.outputs]
        return sum(
            -(-found[index].nbytes // ALIGNMENT) * ALIGNMENT for index in own if not graph.tensors[index].constant
        )

    def _tell_tactics(self, name: str, key: str) -> None:
        """What TensorRT's sample of an editable timing cache reads, and a line that it does not."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        for line in (
            f"Autotuning op {name}(key: 0x{digest[:32]}):",
            "    |       tactic_id, cost(in ms), cost/fastest_cost, prediction_correlation, kernel_name, tactic_hash",
            f"    0, 0.00520, 1.00, 0.883, double_kernel, 0x{digest[32:48]},",
            f"The selected tactic is (tactic hash, cost(in ms)):0x{digest[32:48]},0.0052",
            f"Adding reformat layer: nothing that anybody reads about {name}",
        ):
            self._logger.log(Severity.VERBOSE, line)


class _Phases:
    """Tells a progress monitor, and stops the build when it says so."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def start(self, name: str, parent: str | None, steps: int) -> None:
        if self._monitor is not None:
            self._monitor.phase_start(name, parent, steps)

    def step(self, name: str, step: int) -> None:
        if self._monitor is not None and not self._monitor.step_complete(name, step):
            raise Refused("the build was cancelled by the progress monitor")

    def finish(self, name: str) -> None:
        if self._monitor is not None:
            self._monitor.phase_finish(name)


def _profile_problems(graph: Graph, profiles: Sequence[Shapes]) -> list[str]:
    """Every input with a dimension of -1 needs shapes in every profile, and they must fit."""
    wrong = []
    dynamic = [graph.tensors[index] for index in graph.inputs if -1 in (graph.tensors[index].shape or ())]
    if dynamic and not profiles:
        wrong.append("Network has dynamic or shape inputs, but no optimization profile has been defined.")
    for number, profile in enumerate(profiles):
        for tensor in dynamic:
            if tensor.name not in profile:
                wrong.append(f"{tensor.name}: for dynamic input, optimization profile {number} is missing dimensions")
        for name, shapes in profile.items():
            if name not in graph.input_names():
                wrong.append(f"{name}: optimization profile {number} names an input that does not exist")
                continue
            static = graph.tensor(name).shape or ()
            for shape in shapes:
                if len(shape) != len(static) or any(a not in (-1, b) for a, b in zip(static, shape, strict=True)):
                    wrong.append(f"{name}: optimization profile {number} has {shape} for {static}")
    return wrong


def _with_contents(graph: Graph) -> Graph:
    """A copy in which the constants hold their content."""
    result = copy.copy(graph)
    result.nodes = []
    for node in graph.nodes:
        kept = copy.copy(node)
        if node.kind == "CONSTANT":
            memory = node.attributes["weights"]
            content = Memory(memory.dtype, 0, memory.count, memory.array().tobytes())
            kept.attributes = {**node.attributes, "weights": content}
        result.nodes.append(kept)
    return result
