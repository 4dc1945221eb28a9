"""Builds the plans of a model: one network per segment, one optimisation profile per number of tokens.

Needs the GPU that the plans are for. Weights of one segment are in memory at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ull.bundle import PLANS_DIRECTORY, TOKEN_COUNTS, AttentionKind, Model
from ull.errors import BuildError
from ull.gpu.tensorrt_library import make_logger
from ull_build.progress import Reporter
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.monitor import BuildLog, make_monitor, run_cancellable
from ull_build.tensorrt.native import NativeNetwork
from ull_build.tensorrt.network import SegmentNetwork
from ull_build.tensorrt.timing_cache import attach, open_timing_cache
from ull_build.tensorrt.weights import Weights

LOG_FILE = f"{PLANS_DIRECTORY}/build.log"
INSPECTOR_FILE = f"{PLANS_DIRECTORY}/inspector.json"

_NETWORKS: dict[str, type[SegmentNetwork | NativeNetwork]] = {"paged": SegmentNetwork, "native": NativeNetwork}
_STEPS = 100  # of the progress bar, for each segment


@dataclass(frozen=True)
class BuiltPlans:
    """What was built. Paths are relative to the bundle."""

    attention: AttentionKind
    files: dict[str, str]  # segment -> plan, in order of execution
    reports: tuple[str, ...]  # the builder's messages, the inspector's information on each segment
    tokens: tuple[int, ...]  # of each optimisation profile, in order
    tensorrt: str  # version
    timing_cache: bytes  # what the builder has measured
    device_memory: int  # bytes that the most demanding segment needs for its activations


def plan_path(segment: str) -> str:
    """Where the plan of a segment lies in a bundle."""
    return f"{PLANS_DIRECTORY}/{segment}.plan"


def build_plans(
    trt: Any,
    model: Model,
    weights: Weights,
    amax: Mapping[str, float],
    directory: Path,
    timing_cache: Path,
    reporter: Reporter,
    attention: AttentionKind = "paged",
    token_counts: Sequence[int] = TOKEN_COUNTS,
) -> BuiltPlans:
    """Builds every segment into `directory`, the bundle that is being made.

    `attention`: "paged" cuts the forward where our attention kernel runs, "native" makes one plan with TensorRT's own.
    `amax`: largest input of each FP8 linear. `timing_cache`: a file that is read; `save_timing_cache` replaces it once
    the plans have proved right. Raises BuildError with TensorRT's own reason; KeyboardInterrupt once TensorRT has
    stopped.
    """
    describe = _NETWORKS[attention](model, weights, amax)
    segments = describe.segments()
    counts = tuple(count for count in token_counts if count in describe.tokens)
    (directory / PLANS_DIRECTORY).mkdir(parents=True)
    with BuildLog(directory / LOG_FILE) as log:
        building = _Building(trt, log, timing_cache, reporter, counts)
        with reporter.stage("TensorRT engines", _STEPS * len(segments), "steps") as advance:
            for segment in segments:
                plan = building.build(segment, describe.add, advance)
                (directory / plan_path(segment)).write_bytes(plan)
                building.inspect(segment, plan)
        (directory / INSPECTOR_FILE).write_text(json.dumps(building.information, indent=1), encoding="utf-8")
        return BuiltPlans(
            attention=attention,
            files={segment: plan_path(segment) for segment in segments},
            reports=(LOG_FILE, INSPECTOR_FILE),
            tokens=counts,
            tensorrt=trt.__version__,
            device_memory=building.device_memory,
            timing_cache=building.timing_cache(),
        )


class _Building:
    """TensorRT's objects that all segments share, and what is learnt about the plans."""

    def __init__(self, trt: Any, log: BuildLog, timing_cache: Path, reporter: Reporter, tokens: Sequence[int]) -> None:
        self._trt, self._log, self._reporter, self._tokens = trt, log, reporter, tokens
        self._cache_path = timing_cache
        self._cache: Any = None
        self._logger = make_logger(trt, log.write)
        self.information: dict[str, Any] = {}
        self.device_memory = 0
        try:
            self._builder = trt.Builder(self._logger)
            self._runtime = trt.Runtime(self._logger)
        except TypeError as error:  # the bindings' word for a factory that fails, as it does without a GPU
            raise BuildError(f"TensorRT cannot start on this machine: {log.reason()}") from error

    def build(self, segment: str, add: Callable[[Graph, str], None], advance: Callable[[int], None]) -> memoryview[int]:
        """The serialized plan of one segment, which `add` describes."""
        graph = Graph(self._trt, self._builder.create_network())
        graph.network.name = segment
        add(graph, segment)
        shown = 0

        def show(fraction: float) -> None:
            nonlocal shown
            now = max(shown, int(fraction * _STEPS))
            advance(now - shown)
            shown = now

        cancelled = threading.Event()
        monitor = make_monitor(self._trt, cancelled, show)
        config = self._configure(graph.network, monitor)
        # `graph` holds the weights, and the closure holds `graph`: TensorRT copies neither.
        plan = run_cancellable(lambda: self._builder.build_serialized_network(graph.network, config), cancelled)
        if plan is None:
            raise BuildError(f"TensorRT could not build {segment}: {self._log.reason()}", field=segment)
        show(1.0)
        return memoryview(plan)

    def inspect(self, segment: str, plan: memoryview[int]) -> None:
        """Loads a plan as the daemon will, and notes what it consists of and the memory that it needs."""
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise BuildError(f"TensorRT cannot load its plan of {segment}: {self._log.reason()}", field=segment)
        profiles = range(engine.num_optimization_profiles)
        needed = [engine.get_device_memory_size_for_profile_v2(profile) for profile in profiles]
        self.device_memory = max(self.device_memory, *needed)
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        try:
            self.information[segment] = json.loads(text)
        except ValueError:  # its JSON is not always JSON; a report must not cost the build
            self.information[segment] = text

    def timing_cache(self) -> bytes:
        return bytes(memoryview(self._cache.serialize()))

    def _configure(self, network: Any, monitor: Any) -> Any:
        trt, config = self._trt, self._builder.create_builder_config()
        config.max_aux_streams = 0  # a captured graph is then one chain of kernels
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.clear_flag(trt.BuilderFlag.TF32)
        config.set_flag(trt.BuilderFlag.EDITABLE_TIMING_CACHE)
        config.progress_monitor = monitor
        if self._cache is None:
            self._cache = open_timing_cache(config, self._cache_path, self._reporter.note)
        elif not attach(config, self._cache):
            raise BuildError(f"TensorRT refuses its own timing cache: {self._log.reason()}")
        for count in self._tokens:
            self._add_profile(network, config, count)
        return config

    def _add_profile(self, network: Any, config: Any, tokens: int) -> None:
        """Fixes every dynamic dimension, all of which are numbers of tokens."""
        profile = self._builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            if -1 in tuple(tensor.shape):
                shape = tuple(tokens if size == -1 else size for size in tensor.shape)
                try:
                    profile.set_shape(tensor.name, shape, shape, shape)
                except ValueError as error:
                    raise BuildError(f"TensorRT refuses {shape} for {tensor.name!r}: {error}") from error
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"TensorRT refuses the profile of {tokens} tokens: {self._log.reason()}")
