"""What TensorRT makes of a linear, of profiles and of capture: small networks, described by the product's own words.

Each figure is a finding, for the report of `make h200-tensorrt`. Times hold nothing in the cache: before each run more
than the L2 cache holds is overwritten, and what that takes alone is taken off.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ull.bundle import Model, Precision, Profile, profile_of, profile_scheme, segment_names
from ull.gpu.driver import Driver
from ull.gpu.tensorrt import library as tensorrt_library
from ull_build.progress import Reporter
from ull_build.shapes import shape_model
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.inspector import operand_types
from ull_build.tensorrt.plans import LEVELS, PlanSettings, Rung, build_plans
from ull_build.tensorrt.random_weights import RandomCheckpoint, random_ranges
from ull_build.tensorrt.timing_cache import open_timing_cache
from ull_build.tensorrt.weights import BF16, F8, F16, F32, HEAD, Linear, SegmentWeights, activation_scale
from ull_build.weights.quantise import FP8_MAX, quantise_rows

Finding = dict[str, Any]
SCHEMES = ("row product", "per-row DQ", "per tensor", "16 bits")
TOKENS = (1, 8, 64)
FLUSHED_BYTES = 128 << 20  # more than the L2 cache of an H200 holds
REPEATS, REPLAYS = 10, 5
COMPARED = 16  # tokens whose bits are compared with those of a round of one
AMAX = 6.0  # of inputs with a standard deviation of 1


class Shape(NamedTuple):
    name: str
    rows: int
    columns: int


def linear_shapes(model: Model) -> list[Shape]:
    width = model.heads * model.head_dim
    return [
        Shape("layers.0.qkv", width + 2 * model.kv_heads * model.head_dim, model.hidden),
        Shape("layers.0.o", model.hidden, width),
        Shape("layers.0.gate_up", 2 * model.intermediate, model.hidden),
        Shape("layers.0.down", model.hidden, model.intermediate),
        Shape(HEAD, model.vocabulary, model.hidden),
    ]


class ProbeGraph(Graph):
    """A Graph whose linear can be described as others do."""

    scheme = SCHEMES[0]

    def linear(self, name: str, tensor: Any, linear: Linear, amax: float | None) -> Any:
        if self.scheme not in ("per-row DQ", "per tensor", "f16 product"):
            return super().linear(name, tensor, linear, amax)
        self.linears[name] = linear
        operand = self.cast(f"{name}.input", tensor, linear.compute)
        rows = self.constant(f"{name}.weight", linear.rows)
        if linear.is_fp8:
            assert amax is not None and linear.scales is not None
            scale = self.constant(f"{name}.input_scale", activation_scale(amax, linear.compute))
            coded = self.named(self.network.add_quantize(operand, scale, self.trt.DataType.FP8), f"{name}.quantize")
            operand = self._dequantise(f"{name}.input", coded, scale, linear.compute)
            by_row = self.scheme == "per-row DQ"
            scales = linear.scales if by_row else linear.scales[0]
            layer = self.network.add_dequantize(
                rows, self.constant(f"{name}.weight_scale", np.asarray(scales, BF16)), self._types[linear.compute]
            )
            if by_row:
                layer.axis = 0
            rows = self.named(layer, f"{name}.weight_dequantize")
        kinds = self.trt.MatrixOperation
        product = self.network.add_matrix_multiply(operand, kinds.NONE, rows, kinds.TRANSPOSE)
        return self.cast(f"{name}.output", self.named(product, f"{name}.matmul"), np.float32)


class Bench:
    """TensorRT and a stream on GPU 0. A context manager."""

    def __init__(self) -> None:
        self.trt = tensorrt_library.load()
        self.errors: list[str] = []
        self._logger = tensorrt_library.make_logger(self.trt, self._hear)
        self.builder, self._runtime = self.trt.Builder(self._logger), self.trt.Runtime(self._logger)
        self.driver = Driver(0)
        self.driver.open()
        self._exit = ExitStack()
        self._exit.callback(self.driver.close)
        self.stream = self.driver.create_stream()
        self._exit.callback(self.driver.destroy_stream, self.stream)
        self._flushed = self.allocate(FLUSHED_BYTES)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _hear(self, severity: str, message: str) -> None:
        if severity.endswith("error"):
            self.errors.append(message)

    def allocate(self, nbytes: int) -> int:
        address = self.driver.allocate(max(256, nbytes))
        self._exit.callback(self.driver.free, address)
        return address

    def build(self, graph: Graph, profiles: Sequence[Profile], level: int) -> bytes:
        config = self.builder.create_builder_config()
        config.builder_optimization_level = level
        config.max_aux_streams = 0
        config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED
        config.clear_flag(self.trt.BuilderFlag.TF32)
        open_timing_cache(config, Path("/nonexistent"), lambda text: None)
        for least, best, most in profiles:
            profile = self.builder.create_optimization_profile()
            width = tuple(graph.network.get_input(0).shape)[1]
            profile.set_shape("x", (least, width), (best, width), (most, width))
            config.add_optimization_profile(profile)
        plan = self.builder.build_serialized_network(graph.network, config)
        if plan is None:
            raise RuntimeError(self.errors[-1] if self.errors else "TensorRT gave no reason")
        return bytes(plan)

    def load(self, plan: bytes) -> Any:
        return self._runtime.deserialize_cuda_engine(plan)

    def ready(self, engine: Any, profile: int, inputs: Mapping[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """A context with its inputs in place that has run once, and a reader of each output."""
        context = engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        context.set_optimization_profile_async(profile, self.stream)
        self.driver.synchronise(self.stream)
        context.set_device_memory(self.allocate(engine.device_memory_size_v2), engine.device_memory_size_v2)
        for name, values in inputs.items():
            array, address = np.ascontiguousarray(values), self.allocate(values.nbytes)
            self.driver.copy_to_device(address, array.ctypes.data, array.nbytes, self.stream)
            self.driver.synchronise(self.stream)
            context.set_input_shape(name, array.shape)
            context.set_tensor_address(name, address)
        readers: dict[str, Any] = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            if engine.get_tensor_mode(name) == self.trt.TensorIOMode.OUTPUT:
                shape = tuple(context.get_tensor_shape(name))
                address = self.allocate(4 * int(np.prod(shape)))
                context.set_tensor_address(name, address)
                readers[name] = lambda at=address, of=shape: self.read(at, of)
        self.enqueue(context)
        self.driver.synchronise(self.stream)
        return context, readers

    def read(self, address: int, shape: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(shape, np.float32)
        self.driver.copy_to_host(found.ctypes.data, address, found.nbytes, self.stream)
        self.driver.synchronise(self.stream)
        return found

    def enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(self.stream):
            raise RuntimeError(self.errors[-1] if self.errors else "enqueueV3 failed")

    def captured(self, work: Callable[[], None]) -> tuple[int, list[str]]:
        """An executable graph of what `work` enqueues, and the types of its nodes."""
        self.driver.begin_capture(self.stream)
        work()
        graph = self.driver.end_capture(self.stream)
        types, executable = self.driver.node_types(graph), self.driver.instantiate(graph)
        self._exit.callback(self.driver.destroy_executable, executable)
        self.driver.destroy_graph(graph)
        return executable, types

    def microseconds(self, context: Any) -> float:
        """Of one run that finds nothing in the L2 cache."""

        def flush() -> None:
            self.driver.fill(self._flushed, 0, FLUSHED_BYTES, self.stream)

        def both() -> None:
            flush()
            self.enqueue(context)

        alone, together = (
            self._time(self.captured(lambda of=work: [of() for _ in range(REPEATS)])[0]) for work in (flush, both)
        )
        return (together - alone) / REPEATS * 1e6

    def _time(self, executable: int) -> float:
        """The least seconds of a replay."""
        taken = []
        for _ in range(REPLAYS):
            started = time.perf_counter()
            self.driver.replay(executable, self.stream)
            self.driver.synchronise(self.stream)
            taken.append(time.perf_counter() - started)
        return min(taken)


def made_up_linear(shape: Shape, scheme: str) -> tuple[Linear, np.ndarray]:
    """A linear as the scheme has it, and the weights that it stands for, [N, K] float32."""
    random = np.random.default_rng(0)
    values = random.standard_normal((shape.rows, shape.columns), np.float32) / np.float32(np.sqrt(shape.columns))
    if shape.name == HEAD and scheme in ("f32 product", "f16 product"):
        return Linear(values.astype(F16), None, None, F16), values
    if scheme == "per tensor":
        scale = np.float32(np.asarray(np.abs(values).max() / FP8_MAX, BF16))
        codes = np.clip(values / scale, -FP8_MAX, FP8_MAX).astype(F8)
        return Linear(codes, np.full(shape.rows, scale, np.float32), None, BF16), codes.astype(np.float32) * scale
    bits, scales = quantise_rows(values)
    compute = F32 if shape.name == HEAD and scheme == "row product" else BF16
    linear = Linear(bits.view(F8), scales, None, compute)
    stands_for = linear.rows.astype(np.float32) * scales[:, None]
    return (linear.in_16_bits("") if scheme == "16 bits" else linear), stands_for


def probe_linear(
    arch: str, name: str, size: Mapping[str, int] | None = None, levels: Sequence[int] = LEVELS
) -> Iterator[Finding]:
    """One linear by every scheme and level: operands, kernels, time, error. `size` is in place of the model's."""
    model = shape_model(arch)
    [shape] = [shape for shape in linear_shapes(model) if shape.name == name]
    if size is not None:
        shape = Shape(name, size["rows"], size["columns"])
    schemes = (*SCHEMES, "f32 product", "f16 product") if name == HEAD else SCHEMES
    random = np.random.default_rng(1)
    inputs = random.standard_normal((max(TOKENS), shape.columns)).astype(np.float32).clip(-AMAX, AMAX)
    with Bench() as bench:
        for scheme in schemes:
            linear, weights = made_up_linear(shape, scheme)
            reference = inputs @ weights.T
            for level in levels:
                found: Finding = {"linear": name, "rows": shape.rows, "columns": shape.columns}
                found |= {"scheme": scheme, "level": level}
                try:
                    found |= _measured_linear(bench, name, linear, scheme, level, inputs, reference)
                except RuntimeError as error:  # a scheme or level that TensorRT does not build is a finding
                    found["refused"] = str(error)
                yield {"linears": found}


def _measured_linear(
    bench: Bench, name: str, linear: Linear, scheme: str, level: int, inputs: np.ndarray, reference: np.ndarray
) -> Finding:
    graph = ProbeGraph(bench.trt, bench.builder.create_network())
    graph.scheme = scheme
    x = graph.input("x", np.float32, (-1, inputs.shape[1]))
    graph.output(graph.linear(name, x, linear, AMAX), "y")
    started = time.monotonic()
    profiles = [(count, count, count) for count in TOKENS]
    plan = bench.build(graph, profiles, level)
    seconds = time.monotonic() - started
    engine = bench.load(plan)
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(bench.trt.LayerInformationFormat.JSON)
    try:
        layers = json.loads(text)
    except ValueError:
        layers = {}
    points = []
    for number, tokens in enumerate(TOKENS):
        context, readers = bench.ready(engine, number, {"x": inputs[:tokens]})
        wanted = reference[:tokens]
        error = float(np.linalg.norm(readers["y"]() - wanted) / np.linalg.norm(wanted))
        _, nodes = bench.captured(lambda of=context: bench.enqueue(of))
        us = bench.microseconds(context)
        points.append({"tokens": tokens, "us": us, "error": error, "nodes": len(nodes)})
        points[-1]["bytes_per_second"] = linear.rows.nbytes / us * 1e6 if us > 0 else None
    return {
        "build_s": seconds,
        "plan_bytes": len(plan),
        "weight_bytes": linear.rows.nbytes,
        "operands": operand_types(layers, f"{name}.matmul"),
        "inspector": layers,
        "points": points,
    }


def probe_profiles(arch: str, folder: str, shape: Model | None = None) -> Iterator[Finding]:
    """One layer's plan with two and with seven profiles: seconds, bytes, time, and which sizes agree bit for bit."""
    model = shape or shape_model(arch, 2)
    precision = Precision()
    weights, amax = SegmentWeights(RandomCheckpoint(model), precision), random_ranges(model, precision)
    random = np.random.default_rng(2)
    residual = random.standard_normal((64, model.hidden)).astype(np.float32)
    width = model.heads * model.head_dim // 32
    attention = random.standard_normal((width, 64, 32)).astype(np.float16)
    with Bench() as bench:
        for scheme in ("two", "seven"):
            counts, profiles = profile_scheme(scheme, True, "paged")  # type: ignore[arg-type]
            settings, directory = PlanSettings("paged", counts, profiles, Rung(LEVELS[0])), Path(folder) / scheme
            started = time.monotonic()
            built = build_plans(
                bench.trt, model, weights, amax, directory, Path(folder) / "cache", Reporter(), settings
            )
            found: Finding = {"scheme": scheme, "build_s": time.monotonic() - started, "operands": built.operands}
            plan = (directory / built.files["layer.0"]).read_bytes()
            free = bench.driver.memory_info()[0]
            engine = bench.load(plan)
            found |= {"plan_bytes": len(plan), "device_bytes": max(0, free - bench.driver.memory_info()[0])}

            def run(
                start: int, tokens: int, on: Any = engine, of: Sequence[Profile] = profiles
            ) -> tuple[Any, np.ndarray]:
                rows = np.roll(attention, -start, axis=1)
                given = {"attention": rows, "residual": residual[start : start + tokens]}
                context, readers = bench.ready(on, profile_of(tokens, of), given)
                return context, np.concatenate([read() for read in readers.values()], axis=1)

            plain = np.concatenate([run(token, 1)[1] for token in range(COMPARED)])
            us, found["exact"] = {}, []
            for tokens in counts:
                context, outputs = run(0, tokens)
                us[tokens] = bench.microseconds(context)
                if np.array_equal(outputs[:COMPARED], plain[:tokens]):
                    found["exact"].append(tokens)
            yield {"profiles": {**found, "us": us}}


def probe_capture(arch: str, folder: str, shape: Model | None = None, replays: int = 1000) -> Iterator[Finding]:
    """The plans of a layer one after the other in a graph, on one scratch: its replays against an eager run."""
    model = shape or shape_model(arch, 2)
    directory = Path(folder) / "two"
    _, profiles = profile_scheme("two", True, "paged")
    names = segment_names(model.layers, "paged")
    residual = np.random.default_rng(3).standard_normal((1, model.hidden)).astype(np.float32)
    attention = np.zeros((model.heads * model.head_dim // 32, 64, 32), np.float16)
    with Bench() as bench:
        contexts, readers = [], []
        for name in names:
            engine = bench.load((directory / f"code/plans/{name}.plan").read_bytes())
            given = {"residual": residual}
            if name not in ("entry", "head"):
                given["attention"] = attention
            context, read = bench.ready(engine, profile_of(1, profiles), given)
            contexts.append((context, engine))
            readers.append(read)
        scratch = max(engine.device_memory_size_v2 for _, engine in contexts)
        shared = bench.allocate(scratch)
        for context, _ in contexts:
            context.set_device_memory(shared, scratch)
            bench.enqueue(context)
        bench.driver.synchronise(bench.stream)

        def outputs() -> list[np.ndarray]:
            return [read() for of in readers for read in of.values()]

        eager = outputs()
        executable, nodes = bench.captured(lambda: [bench.enqueue(context) for context, _ in contexts])
        same = 0
        for _ in range(replays):
            bench.driver.fill(shared, 0xFF, scratch, bench.stream)  # nobody may find what he left there
            bench.driver.replay(executable, bench.stream)
            same += all(np.array_equal(one, other) for one, other in zip(outputs(), eager, strict=True))
        kinds = {kind: nodes.count(kind) for kind in sorted(set(nodes))}
        yield {"capture": {"plans": len(names), "nodes": kinds, "replays": replays, "same_bits": same}}
