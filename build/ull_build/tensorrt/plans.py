"""Builds the plans of a model: one network per segment, one optimisation profile per choice of kernels.

Needs the GPU that the plans are for. Weights of one segment are in memory at a time. A segment that TensorRT cannot
build, or whose plan computes something else than NumPy, is built again with less freedom: see `rungs`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ull.bundle import PLANS_DIRECTORY, AttentionKind, Model, Profile, profile_scheme
from ull.errors import BuildError
from ull.gpu.tensorrt.library import make_logger
from ull_build.progress import Reporter
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.inspector import UNSEEN, unexpected_operands
from ull_build.tensorrt.monitor import BuildLog, make_monitor, run_cancellable
from ull_build.tensorrt.native import NativeNetwork
from ull_build.tensorrt.network import SegmentNetwork
from ull_build.tensorrt.timing_cache import attach, open_timing_cache
from ull_build.tensorrt.trial import Runner, Trial, can_be_tried, segment_error
from ull_build.tensorrt.weights import Linear, Weights

LOG_FILE = f"{PLANS_DIRECTORY}/build.log"
TACTICS_FILE = f"{PLANS_DIRECTORY}/tactics.log.gz"
INSPECTOR_FILE = f"{PLANS_DIRECTORY}/inspector.json"
REPORTS = (LOG_FILE, TACTICS_FILE, INSPECTOR_FILE)

LEVELS = (3, 1, 0)  # optimisation levels: TensorRT's default, then those with fewer kernels to choose from
_NETWORKS: dict[str, type[SegmentNetwork | NativeNetwork]] = {"paged": SegmentNetwork, "native": NativeNetwork}
_STEPS = 100  # of the progress bar, for each segment
_SHOWN = 6  # linears that a line names
_PLAN_EXCESS, _PLAN_REST = 1.5, 16 << 20  # times its weights, and bytes beside them, that a plan may have unremarked


class PlansFailed(BuildError):
    """TensorRT builds no plans for this model that compute what they should, whatever it is allowed."""


@dataclass(frozen=True)
class Rung:
    """How a segment is built: at what optimisation level, and which FP8 linears take 16-bit activations."""

    level: int
    sixteen_bits: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if self.sixteen_bits:
            return f"16-bit activations for {', '.join(sorted(self.sixteen_bits))}"
        return f"optimisation level {self.level}" + (", which ignores the timing cache" if self.level == 0 else "")


def rungs(start: Rung, fp8: Sequence[str]) -> Iterator[Rung]:
    """What is tried in turn, from `start`: lower levels, each FP8 linear in 16 bits, all of them."""
    if start.sixteen_bits:
        yield start
        return
    for level in LEVELS[LEVELS.index(start.level) :]:
        yield Rung(level)
    if len(fp8) > 1:
        for name in fp8:
            yield Rung(start.level, frozenset([name]))
    if fp8:
        yield Rung(start.level, frozenset(fp8))


@dataclass(frozen=True)
class PlanSettings:
    """How plans are built.

    `attention`: "paged" cuts the forward where our attention kernel runs, "native" makes one plan with TensorRT's own.
    `start`: the first rung; with `sixteen_bits`, those are all FP8 linears. `limit`: what a segment may be off.
    """

    attention: AttentionKind = "paged"
    token_counts: Sequence[int] = field(default_factory=lambda: profile_scheme("two", True, "paged")[0])
    profiles: Sequence[Profile] = field(default_factory=lambda: profile_scheme("two", True, "paged")[1])
    start: Rung = Rung(LEVELS[0])
    limit: float = 0.25

    @property
    def extra_memory(self) -> float:
        """Of further profiles, as a fraction of what TensorRT would take for their weights. One profile for each count
        is the way to the quickest kernel for each; else the weights are there once.
        """
        return 1.0 if all(least == most for least, _, most in self.profiles) and len(self.profiles) > 2 else 0.0


@dataclass(frozen=True)
class BuiltPlans:
    """What was built. Paths are relative to the bundle."""

    settings: PlanSettings
    files: dict[str, str]  # segment -> plan, in order of execution
    tensorrt: str  # version
    timing_cache: bytes  # what the builder has measured
    device_memory: int  # bytes that the most demanding segment needs for its activations
    sixteen_bits: list[str]  # linears with FP8 weights and 16-bit activations
    operands: dict[str, str]  # linears whose product has not the operands that it was given: what instead
    notes: list[str]  # what was not built as first tried, and why


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
    settings: PlanSettings | None = None,
    runner: Runner | None = None,
) -> BuiltPlans:
    """Builds every segment into `directory`, the bundle that is being made.

    `amax`: largest input of each FP8 linear. `timing_cache`: a file that is read; `save_timing_cache` replaces it once
    the plans have proved right. `runner` None: no segment is tried by itself. Raises PlansFailed with TensorRT's own
    reason, BuildError where it cannot start; KeyboardInterrupt once TensorRT has stopped.
    """
    settings = settings or PlanSettings()
    describe = _NETWORKS[settings.attention](model, weights, amax)
    segments = describe.segments()
    (directory / PLANS_DIRECTORY).mkdir(parents=True, exist_ok=True)
    with BuildLog(directory / LOG_FILE, directory / TACTICS_FILE) as log:
        building = _Building(trt, log, timing_cache, reporter, settings, describe, runner)
        with reporter.stage("TensorRT engines", _STEPS * len(segments), "steps") as advance:
            for segment in segments:
                plan = building.build(segment, advance)
                (directory / plan_path(segment)).write_bytes(plan)
        (directory / INSPECTOR_FILE).write_text(json.dumps(building.information, indent=1), encoding="utf-8")
        _report_operands(building.operands, reporter)
        return BuiltPlans(
            settings=settings,
            files={segment: plan_path(segment) for segment in segments},
            tensorrt=trt.__version__,
            timing_cache=building.timing_cache(),
            device_memory=building.device_memory,
            sixteen_bits=building.sixteen_bits,
            operands=building.operands,
            notes=building.notes,
        )


def _report_operands(operands: Mapping[str, str], reporter: Reporter) -> None:
    """A line for each kind of operands that are not what they should be."""
    for found in sorted(set(operands.values())):
        names = [name for name, kind in operands.items() if kind == found]
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        if found == UNSEEN:
            reporter.note(f"whether TensorRT multiplies FP8 operands is not known of {len(names)} linears: {shown}")
        else:
            reporter.note(f"NOT AS DESCRIBED: TensorRT multiplies {found} in {len(names)} linears: {shown}")


@dataclass(frozen=True)
class _Plan:
    """A segment's plan that is right, or the reason why there is none."""

    data: memoryview[int] | None
    engine: Any
    linears: dict[str, Linear]
    problem: str


class _Building:
    """TensorRT's objects that all segments share, and what is learnt about the plans."""

    def __init__(
        self,
        trt: Any,
        log: BuildLog,
        timing_cache: Path,
        reporter: Reporter,
        settings: PlanSettings,
        describe: SegmentNetwork | NativeNetwork,
        runner: Runner | None,
    ) -> None:
        self._trt, self._log, self._reporter, self._settings = trt, log, reporter, settings
        self._describe, self._runner = describe, runner
        self._cache_path = timing_cache
        self._cache: Any = None
        self._logger = make_logger(trt, log.write)
        self.information: dict[str, Any] = {}
        self.operands: dict[str, str] = {}
        self.sixteen_bits: list[str] = []
        self.notes: list[str] = []
        self.device_memory = 0
        try:
            self._builder = trt.Builder(self._logger)
            self._runtime = trt.Runtime(self._logger)
        except TypeError as error:  # the bindings' word for a factory that fails, as it does without a GPU
            raise BuildError(f"TensorRT cannot start on this machine: {log.reason()}") from error

    def build(self, segment: str, advance: Callable[[int], None]) -> memoryview[int]:
        """The serialised plan of one segment, by the first rung that gives one that is right. Raises PlansFailed."""
        shown = 0

        def show(fraction: float) -> None:
            nonlocal shown
            now = max(shown, int(fraction * _STEPS))
            advance(now - shown)
            shown = now

        start = self._settings.start
        plan, taken, why = self._try(segment, start, show), start, ""
        if plan.problem:
            fp8 = [name for name, linear in plan.linears.items() if linear.scales is not None]
            for rung in list(rungs(start, fp8))[1:]:
                why = why or plan.problem
                plan, taken = self._try(segment, rung, show), rung
                if not plan.problem:
                    break
        if plan.data is None or plan.problem:
            raise PlansFailed(f"TensorRT could not build {segment}: {plan.problem}", field=segment)
        if why:
            self.notes.append(f"{segment}: built with {taken}, because at first {why}")
            self._reporter.note(self.notes[-1])
        show(1.0)
        self.sixteen_bits += [name for name in plan.linears if name in taken.sixteen_bits]
        self._inspect(segment, plan)
        return plan.data

    def _try(self, segment: str, rung: Rung, show: Callable[[float], None]) -> _Plan:
        """Builds a segment and compares what it computes."""
        graph = Graph(self._trt, self._builder.create_network())
        graph.network.name = segment
        self._describe.sixteen_bits = rung.sixteen_bits
        self._describe.add(graph, segment)
        cancelled = threading.Event()
        monitor = make_monitor(self._trt, cancelled, show)
        config = self._configure(graph.network, monitor, rung.level)
        # `graph` holds the weights, and the closure holds `graph`: TensorRT copies neither.
        data = run_cancellable(lambda: self._builder.build_serialized_network(graph.network, config), cancelled)
        if data is None:
            return _Plan(None, None, graph.linears, self._log.reason())
        # Loaded as the daemon will.
        engine = self._runtime.deserialize_cuda_engine(memoryview(data))
        if engine is None:
            return _Plan(None, None, graph.linears, f"it cannot load its own plan: {self._log.reason()}")
        problem = ""
        if self._runner is not None and can_be_tried(segment):
            settings = self._settings
            trial = Trial(self._describe, segment, graph.linears, self._describe.amax)
            error = segment_error(self._runner, self._trt, engine, trial, settings.token_counts, settings.profiles)
            if not error <= settings.limit:
                problem = f"its outputs were {error:.0%} off NumPy's (limit {settings.limit:.0%}): an unstable kernel"
        return _Plan(memoryview(data), engine, graph.linears, problem)

    def _inspect(self, segment: str, plan: _Plan) -> None:
        """Notes what a plan consists of and the memory that it needs."""
        assert plan.data is not None
        engine = plan.engine
        profiles = range(engine.num_optimization_profiles)
        needed = [engine.get_device_memory_size_for_profile_v2(profile) for profile in profiles]
        self.device_memory = max(self.device_memory, *needed, engine.device_memory_size_v2)
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        try:
            self.information[segment] = json.loads(text)
        except ValueError:  # its JSON is not always JSON; a report must not cost the build
            self.information[segment] = text
        self.operands |= unexpected_operands(self.information[segment], plan.linears)
        weights = sum(linear.rows.nbytes for linear in plan.linears.values())
        if plan.data.nbytes > _PLAN_EXCESS * weights + _PLAN_REST:
            sizes = f"{plan.data.nbytes / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"
            self._reporter.note(f"{segment}: the plan takes {sizes}: TensorRT has widened or repeated them")

    def timing_cache(self) -> bytes:
        return bytes(memoryview(self._cache.serialize()))

    def _configure(self, network: Any, monitor: Any, level: int) -> Any:
        trt, config = self._trt, self._builder.create_builder_config()
        config.builder_optimization_level = level
        config.max_aux_streams = 0  # a captured graph is then one chain of kernels
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.clear_flag(trt.BuilderFlag.TF32)
        config.set_flag(trt.BuilderFlag.EDITABLE_TIMING_CACHE)
        config.progress_monitor = monitor
        if self._cache is None:
            self._cache = open_timing_cache(config, self._cache_path, self._reporter.note)
        elif not attach(config, self._cache):
            raise BuildError(f"TensorRT refuses its own timing cache: {self._log.reason()}")
        for profile in self._settings.profiles:
            self._add_profile(network, config, profile)
        return config

    def _add_profile(self, network: Any, config: Any, tokens: Profile) -> None:
        """Gives every dynamic dimension, all of which are numbers of tokens, its range."""
        profile = self._builder.create_optimization_profile()
        profile.extra_memory_target = self._settings.extra_memory
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            if -1 in tuple(tensor.shape):
                shapes = [tuple(count if size == -1 else size for size in tensor.shape) for count in tokens]
                try:
                    profile.set_shape(tensor.name, *shapes)
                except ValueError as error:
                    raise BuildError(f"TensorRT refuses {shapes} for {tensor.name!r}: {error}") from error
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"TensorRT refuses the profile of {tokens} tokens: {self._log.reason()}")
