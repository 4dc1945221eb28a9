"""The double of TensorRT itself: that it refuses what the real bindings and a strongly typed network refuse."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensorrt_rig

trt = tensorrt_rig.load()
import tensorrt.runtime  # noqa: E402
from tensorrt.behaviour import options  # noqa: E402
from tensorrt.bindings import real  # noqa: E402
from tensorrt.evaluation import evaluate, kv_cache_update, matrix_multiply  # noqa: E402
from tensorrt.graph import Node, Refused  # noqa: E402
from tensorrt.signatures import overloads  # noqa: E402

Op, Matrix = trt.ElementWiseOperation, trt.MatrixOperation


class Logger(trt.ILogger):
    """Remembers errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: Any, msg: str) -> None:
        if severity == trt.ILogger.Severity.ERROR:
            self.errors.append(msg)


LOGGER = Logger()
BUILDER = trt.Builder(LOGGER)


class Net:
    """A network with an input x [-1, 4] f32, and short words to add to it."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []
        self.network = BUILDER.create_network()
        self.x = self.network.add_input("x", trt.float32, (-1, 4))

    def constant(self, values: Any, dtype: Any, stored: Any) -> Any:
        array = np.array(values).astype(stored)
        self.kept.append(array)
        weights = trt.Weights(dtype, array.ctypes.data, array.size)
        return self.network.add_constant(array.shape, weights).get_output(0)

    def floats(self, *shape: int) -> Any:
        return self.constant(np.ones(shape), trt.float32, np.float32)

    def evaluate(self, tensor: Any, x: Any = None) -> np.ndarray:
        self.network.mark_output(tensor)
        tensor.name = "y"
        return evaluate(self.network, {"x": np.zeros((2, 4), np.float32) if x is None else x})["y"]


@pytest.fixture
def net() -> Net:
    return Net()


# Signatures


def test_what_needs_no_library_is_the_real_thing() -> None:
    assert trt.__version__.startswith("11.")
    for name in ("DataType", "Dims", "ILogger", "IProgressMonitor", "Permutation", "BuilderFlag", "ICudaEngine"):
        assert getattr(trt, name) is getattr(real, name)
    assert issubclass(trt.Weights, real.Weights)


USES: dict[str, tuple[type[Exception], Callable[[Net], Any]]] = {
    "misspelt method": (AttributeError, lambda net: net.network.add_elementwize(net.x, net.x, Op.SUM)),
    "misspelt property": (AttributeError, lambda net: net.x.shapes),
    "misspelt property set": (AttributeError, lambda net: setattr(BUILDER.create_builder_config(), "aux_streams", 0)),
    "wrong keyword": (TypeError, lambda net: net.network.add_elementwise(net.x, net.x, operation=Op.SUM)),
    "missing argument": (TypeError, lambda net: net.network.add_quantize(net.x, net.floats())),
    "one argument too many": (TypeError, lambda net: net.network.add_shape(net.x, 0)),
    "argument of another class": (TypeError, lambda net: net.network.add_unary(net.x, Op.SUM)),
    "a number for a tensor": (TypeError, lambda net: net.network.add_elementwise(net.x, 2.0, Op.PROD)),
    "a number for a truth value": (TypeError, lambda net: net.network.add_reduce(net.x, trt.ReduceOperation.AVG, 2, 1)),
    "a float for dimensions": (TypeError, lambda net: net.network.add_input("z", trt.float32, (1.5, 2))),
    "a NumPy type for a DataType": (TypeError, lambda net: net.network.add_input("z", np.float32, (1, 2))),
    "a property of another class": (TypeError, lambda net: setattr(net.x, "name", 3)),
    "a read-only property": (AttributeError, lambda net: setattr(net.x, "dtype", trt.float16)),
    "a logger that is none": (TypeError, lambda net: trt.Builder(print)),
    "removed: BuilderFlag.FP16": (AttributeError, lambda net: trt.BuilderFlag.FP16),
    "removed: platform_has_fast_fp16": (AttributeError, lambda net: BUILDER.platform_has_fast_fp16),
    "removed: build_engine": (AttributeError, lambda net: BUILDER.build_engine(net.network)),
    "removed: max_workspace_size": (
        AttributeError,
        lambda net: setattr(BUILDER.create_builder_config(), "max_workspace_size", 1 << 30),
    ),
    "removed: set_precision": (AttributeError, lambda net: net.network.add_shape(net.x).set_output_type(0, trt.int8)),
    "removed: device_memory_size": (AttributeError, lambda net: engine_of(net).device_memory_size),
    "removed: execute_async_v2": (
        AttributeError,
        lambda net: engine_of(net).create_execution_context().execute_async_v2([], 0),
    ),
    "a strategy that is none": (TypeError, lambda net: engine_of(net).create_execution_context(strategy=2)),
    "an address that is none": (
        TypeError,
        lambda net: engine_of(net).create_execution_context().set_tensor_address("x", "0x100"),
    ),
    "real, but not played": (NotImplementedError, lambda net: net.network.add_topk),
}


@pytest.mark.parametrize("kind", USES)
def test_wrong_uses_are_refused(kind: str, net: Net) -> None:
    error, use = USES[kind]
    with pytest.raises(error):
        use(net)


def test_right_uses_pass_in_every_form(net: Net) -> None:
    network = net.network
    network.add_elementwise(input1=net.x, input2=net.x, op=Op.SUM)
    network.add_elementwise(net.x, net.x, op=Op.SUM)
    network.add_slice(net.x, trt.Dims((0, 0)), [1, 1], (1, 1))
    network.add_constant((2,), np.ones(2, np.float32))
    network.add_concatenation([net.x, net.x]).axis = 1
    config = BUILDER.create_builder_config()
    config.max_aux_streams = 0
    assert config.max_aux_streams == 0
    assert config.get_flag(trt.BuilderFlag.TF32)


def test_every_played_method_has_a_readable_signature() -> None:
    """What the checker reads from the docstrings; a new version of the bindings may write them otherwise."""
    methods = [
        (real.INetworkDefinition, "add_attention_v2", 1, 5),
        (real.ICudaEngine, "create_execution_context", 2, 1),
        (real.IExecutionContext, "set_input_shape", 3, 2),
        (real.Runtime, "deserialize_cuda_engine", 2, 1),
        (real.Builder, "create_network", 1, 1),
    ]
    for owner, name, count, parameters in methods:
        found = overloads(getattr(owner, name).__doc__)
        assert len(found) == count and len(found[0]) == parameters, name
    [[flags]] = overloads(real.Builder.create_network.__doc__)
    assert (flags.name, flags.annotation, flags.optional) == ("flags", "typing.SupportsInt", True)


# Networks


def half(net: Net, tensor: Any) -> Any:
    return net.network.add_cast(tensor, trt.float16).get_output(0)


def product(net: Net, one: Any, other: Any) -> Any:
    return net.network.add_matrix_multiply(one, Matrix.NONE, other, Matrix.NONE).get_output(0)


def quantized(net: Net, tensor: Any, scale: Any) -> Any:
    return net.network.add_quantize(tensor, scale, trt.fp8).get_output(0)


def dequantized_rows(net: Net, scales: int, axis: int | None) -> Any:
    rows = net.constant(np.ones((6, 4)), trt.fp8, ml_dtypes.float8_e4m3fn)
    layer = net.network.add_dequantize(rows, net.floats(scales), trt.float32)
    if axis is not None:
        layer.axis = axis
    return layer.get_output(0)


def sliced(net: Net, start: Any, shape: Any) -> Any:
    return net.network.add_slice(net.floats(3, 4), start, shape, (1, 1)).get_output(0)


def reshaped(net: Net, shape: Any) -> Any:
    layer = net.network.add_shuffle(net.floats(3, 4))
    layer.reshape_dims = trt.Dims(shape)
    return layer.get_output(0)


REFUSED: dict[str, tuple[str, Callable[[Net], Any]]] = {
    "elementwise of different types": (
        "same type",
        lambda net: net.network.add_elementwise(net.x, half(net, net.x), Op.SUM).get_output(0),
    ),
    "elementwise of different ranks": (
        "different ranks",
        lambda net: net.network.add_elementwise(net.x, net.floats(4), Op.SUM).get_output(0),
    ),
    "elementwise that cannot broadcast": (
        "cannot be broadcast",
        lambda net: net.network.add_elementwise(net.x, net.floats(1, 3), Op.SUM).get_output(0),
    ),
    "logic on numbers": ("takes BOOL", lambda net: net.network.add_elementwise(net.x, net.x, Op.AND).get_output(0)),
    "matmul of different types": ("same type", lambda net: product(net, net.x, half(net, net.floats(4, 4)))),
    "matmul of other inner dimensions": ("inner dimensions", lambda net: product(net, net.x, net.floats(3, 4))),
    "matmul of fp8": (
        "does not take",
        lambda net: product(net, *(quantized(net, tensor, net.floats()) for tensor in (net.x, net.floats(4, 4)))),
    ),
    "cast to fp8": ("FP8 cannot be cast", lambda net: net.network.add_cast(net.x, trt.fp8).get_output(0)),
    "a scale of another type than the input": (
        "the scale is",
        lambda net: quantized(net, half(net, net.x), net.floats()),
    ),
    "a scale that is computed": ("build-time constant", lambda net: quantized(net, net.x, net.x)),
    "activations quantised per channel": (
        "per tensor only",
        lambda net: axis_one(net.network.add_quantize(net.x, net.floats(4), trt.fp8)),
    ),
    "a scale of another type than the output": (
        "the scale is",
        lambda net: net.network.add_dequantize(
            quantized(net, net.x, net.floats()), net.floats(), trt.float16
        ).get_output(0),
    ),
    "scales without an axis": ("needs `axis`", lambda net: dequantized_rows(net, 6, None)),
    "scales of another number than rows": ("scales for axis 0", lambda net: dequantized_rows(net, 5, 0)),
    "a slice out of range": ("out of range", lambda net: sliced(net, (2, 0), (2, 4))),
    "a slice of another rank": ("rank", lambda net: sliced(net, (0,), (1,))),
    "a reshape of another volume": ("cannot be reshaped", lambda net: reshaped(net, (5, -1))),
    "constants of the wrong count": (
        "weights for a constant",
        lambda net: net.network.add_constant((3,), np.ones(2, np.float32)).get_output(0),
    ),
    "a reduction without axes": (
        "axes",
        lambda net: net.network.add_reduce(net.x, trt.ReduceOperation.SUM, 0, True).get_output(0),
    ),
    "a truth value's square root": (
        "does not take",
        lambda net: net.network.add_unary(
            net.network.add_elementwise(net.x, net.x, Op.LESS).get_output(0), trt.UnaryOperation.SQRT
        ).get_output(0),
    ),
}


def axis_one(layer: Any) -> Any:
    layer.axis = 1
    return layer.get_output(0)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_strongly_typed_network_refuses(kind: str, net: Net) -> None:
    reason, make = REFUSED[kind]
    with pytest.raises(Refused, match=reason):
        net.evaluate(make(net))


def test_names_must_be_distinct(net: Net) -> None:
    one, two = net.network.add_shape(net.x), net.network.add_shape(net.x)
    one.name = two.name = "same"
    two.get_output(0).name = "x"
    net.network.mark_output(two.get_output(0))
    with pytest.raises(Refused, match=r"Repeated tensor name: x "):
        evaluate(net.network, {"x": np.zeros((1, 4), np.float32)})
    two.get_output(0).name = "shape"
    with pytest.raises(Refused, match="Repeated layer name: same"):
        evaluate(net.network, {"x": np.zeros((1, 4), np.float32)})


def test_inputs_must_be_what_they_were_declared(net: Net) -> None:
    net.evaluate(net.floats(1))
    for wrong in (np.zeros((2, 4)), np.zeros((2, 5), np.float32)):
        with pytest.raises(Refused, match="input x is"):
            evaluate(net.network, {"x": wrong})
    with pytest.raises(Refused, match="missing or unknown"):
        evaluate(net.network, {})


def test_a_change_of_a_layer_changes_what_follows(net: Net) -> None:
    layer = net.network.add_shuffle(net.floats(3, 4))
    after = net.network.add_shape(layer.get_output(0)).get_output(0)
    assert tuple(after.shape) == (2,)
    layer.reshape_dims = trt.Dims((2, 3, 2))
    assert tuple(layer.get_output(0).shape) == (2, 3, 2)
    assert tuple(after.shape) == (3,)


def test_layers_run_in_the_order_of_their_adding(net: Net) -> None:
    """The real library sorts them; the double says so instead of computing something else."""
    layer = net.network.add_slice(net.x, (0, 0), (1, 4), (1, 1))
    later = net.constant([1, 2], trt.int64, np.int64)
    with pytest.raises(NotImplementedError, match="order"):
        layer.set_input(2, later)


def test_values_are_rounded_to_their_types(net: Net) -> None:
    x = np.array([[1.0009765625, 448.0, 500.0, 0.001], [-1e9, 1e-9, 17.0, 3.14159]], np.float32)
    bf16 = net.network.add_cast(net.x, trt.bfloat16).get_output(0)
    doubled = net.network.add_elementwise(bf16, bf16, Op.SUM).get_output(0)
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(net.evaluate(doubled, x), expected + expected)
    other = Net()
    scale = other.constant(2.0, trt.float32, np.float32)
    codes = other.network.add_quantize(other.x, scale, trt.fp8).get_output(0)
    back = other.network.add_dequantize(codes, scale, trt.float32).get_output(0)
    # Halves: 0.5 exact, 224 exact, 250 -> 256, subnormals of 2^-9, saturation at 448, 8.5 -> 8 (ties to even), 1.5708.
    np.testing.assert_array_equal(other.evaluate(back, x), [[1.0, 448.0, 512.0, 0.0], [-896.0, 0.0, 16.0, 3.25]])


def test_sums_do_not_lose_what_their_type_would(net: Net) -> None:
    """A product of 16-bit operands is accumulated wide and rounded once."""
    left = net.constant(np.full((1, 4096), 1.0), trt.bfloat16, ml_dtypes.bfloat16)
    product = net.network.add_matrix_multiply(left, Matrix.NONE, left, Matrix.TRANSPOSE).get_output(0)
    assert product.dtype == trt.bfloat16
    assert net.evaluate(product) == 4096


# Plans and contexts


def engine_of(net: Net, tokens: tuple[int, ...] = (1, 3)) -> Any:
    """An engine that squares x and adds 1, with a profile for each number of rows."""
    square = net.network.add_elementwise(net.x, net.x, Op.PROD).get_output(0)
    result = net.network.add_elementwise(square, net.floats(1, 4), Op.SUM).get_output(0)
    result.name = "y"
    net.network.mark_output(result)
    plan = BUILDER.build_serialized_network(net.network, config_of(tokens))
    assert plan is not None, LOGGER.errors
    net.kept[0][:] = 7  # the plan has its own copy of the weights
    return trt.Runtime(LOGGER).deserialize_cuda_engine(plan)


def config_of(tokens: tuple[int, ...]) -> Any:
    config = BUILDER.create_builder_config()
    for count in tokens:
        profile = BUILDER.create_optimization_profile()
        profile.set_shape("x", (count, 4), (count, 4), (count, 4))
        assert config.add_optimization_profile(profile) >= 0
    return config


class Memory:
    """Host memory aligned to 256 bytes."""

    def __init__(self, nbytes: int) -> None:
        self._raw = ctypes.create_string_buffer(nbytes + 256)
        self.address = -(-ctypes.addressof(self._raw) // 256) * 256
        self._nbytes = nbytes

    def floats(self) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * self._nbytes).from_address(self.address), np.float32)


def ready_context(engine: Any, profile: int, x: Memory, y: Memory, scratch: Memory) -> Any:
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    rows = engine.get_tensor_profile_shape("x", profile)[1][0]
    assert context.set_optimization_profile_async(profile, 5)
    assert context.set_input_shape("x", (rows, 4))
    assert context.set_tensor_address("x", x.address)
    assert context.set_tensor_address("y", y.address)
    context.set_device_memory(scratch.address, 1024)
    return context


def test_a_context_reads_and_writes_at_its_addresses(net: Net) -> None:
    engine = engine_of(net)
    x, y, scratch = Memory(48), Memory(64), Memory(1024)
    context = ready_context(engine, 1, x, y, scratch)
    assert tuple(context.get_tensor_shape("y")) == (3, 4)
    x.floats()[:] = np.arange(12)
    y.floats()[:] = -1
    assert context.execute_async_v3(5)
    np.testing.assert_array_equal(y.floats(), [*(np.arange(12.0) ** 2 + 1), *[-1] * 4])


def test_a_run_can_be_captured_and_replayed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[int, Callable[[], None]]] = []
    x, y, scratch, elsewhere = Memory(16), Memory(16), Memory(1024), Memory(16)
    context = ready_context(engine_of(net), 0, x, y, scratch)
    monkeypatch.setattr(tensorrt.runtime, "enqueue", lambda stream, function: captured.append((stream, function)))
    y.floats()[:] = 0
    captured.clear()
    assert context.execute_async_v3(9)
    context.set_tensor_address("y", elsewhere.address)  # changes what is enqueued next, not what was captured
    [(stream, function)] = captured
    assert stream == 9 and not y.floats().any()
    for value in (2, 3):
        x.floats()[:] = value
        function()
        np.testing.assert_array_equal(y.floats(), value**2 + 1)


def test_engines_describe_themselves(net: Net) -> None:
    engine = engine_of(net)
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    assert names == ["x", "y"]
    assert [engine.get_tensor_mode(name) for name in names] == [trt.TensorIOMode.INPUT, trt.TensorIOMode.OUTPUT]
    assert engine.get_tensor_dtype("y") == trt.float32
    assert tuple(engine.get_tensor_shape("y")) == (-1, 4)
    assert engine.num_optimization_profiles == 2
    needed = [engine.get_device_memory_size_for_profile_v2(profile) for profile in range(2)]
    assert engine.device_memory_size_v2 > max(needed) > 0
    assert engine.get_aliased_input_tensor("y") is None


def test_contexts_refuse_as_the_real_ones(net: Net) -> None:
    engine = engine_of(net)
    x, y, scratch = Memory(48), Memory(48), Memory(1024)
    LOGGER.errors.clear()
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    with pytest.raises(RuntimeError, match="set optimization profile"):
        context.set_optimization_profile_async(2, 5)
    assert not context.set_input_shape("x", (3, 4))  # of profile 1, but 0 is set
    assert not context.set_input_shape("y", (1, 4))
    assert not context.set_tensor_address("z", x.address)
    assert not context.set_tensor_address("x", x.address + 16)
    assert len(LOGGER.errors) == 5
    for step, reason in (
        (lambda: None, "shapes of ['x']"),
        (lambda: context.set_input_shape("x", (1, 4)), "addresses of ['x', 'y']"),
        (lambda: context.set_tensor_address("x", x.address), "addresses of ['y']"),
        (lambda: context.set_tensor_address("y", y.address), "0 bytes of device memory"),
    ):
        step()
        assert not context.execute_async_v3(5)
        assert reason in LOGGER.errors[-1]
    context.set_device_memory(scratch.address, 1024)
    assert context.execute_async_v3(5)
    assert context.set_optimization_profile_async(1, 5)  # forgets the shapes
    assert not context.execute_async_v3(5)


def test_a_context_can_be_captured_once_it_has_run(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it allocates and loads for a profile, its shapes and its memory it does in the next run."""
    x, y, scratch = Memory(48), Memory(48), Memory(1024)
    context = ready_context(engine_of(net, (1, 3)), 0, x, y, scratch)

    def captures() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(tensorrt.runtime, "is_capturing", lambda stream: True)
            patch.setattr(tensorrt.runtime, "enqueue", lambda stream, function: None)
            return bool(context.execute_async_v3(5))

    def change_profile() -> None:
        context.set_optimization_profile_async(1, 5)
        context.set_input_shape("x", (3, 4))

    for change in (
        lambda: None,
        lambda: context.set_device_memory(scratch.address, 768),
        change_profile,
    ):
        change()
        assert not captures()
        assert "has not run since" in LOGGER.errors[-1]
        assert context.execute_async_v3(5)
        assert captures()


def test_shapes_wait_for_the_profile(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[Callable[[], None]] = []
    context = engine_of(net).create_execution_context()
    monkeypatch.setattr(tensorrt.runtime, "enqueue", lambda stream, function: later.append(function))
    assert context.set_optimization_profile_async(1, 5)
    assert not context.set_input_shape("x", (3, 4))
    assert "synchronize it" in LOGGER.errors[-1]
    later.pop()()
    assert context.set_input_shape("x", (3, 4))


def test_scratch_is_as_large_as_the_engine_says_and_keeps_nothing(net: Net) -> None:
    engine = engine_of(net)
    x, y, scratch = Memory(48), Memory(48), Memory(1024)
    context = ready_context(engine, 1, x, y, scratch)
    needed = engine.get_device_memory_size_for_profile_v2(1)
    context.set_device_memory(scratch.address, needed)
    assert not context.execute_async_v3(5)  # what a profile needs is not what a context asks for
    context.set_device_memory(scratch.address, engine.device_memory_size_v2)
    scratch.floats()[:] = 7.0
    assert context.execute_async_v3(5)
    used = engine.device_memory_size_v2 // 4
    assert np.isnan(scratch.floats()[:used]).all() and (scratch.floats()[used:] == 7.0).all()


def multiplied(net: Net, scales: tuple[int, ...], axis: int | None, transposed: bool = True) -> list[str]:
    """The operands of a product of FP8 codes, as the inspector says."""
    network, one = net.network, net.floats()
    rows = net.constant(np.ones((4, 4)), trt.fp8, ml_dtypes.float8_e4m3fn)
    weight = network.add_dequantize(rows, net.floats(*scales), trt.float32)
    if axis is not None:
        weight.axis = axis
    left = network.add_dequantize(quantized(net, net.x, one), one, trt.float32).get_output(0)
    op = Matrix.TRANSPOSE if transposed else Matrix.NONE
    product = network.add_matrix_multiply(left, Matrix.NONE, weight.get_output(0), op)
    product.name = "it.matmul"
    network.mark_output(product.get_output(0))
    config = config_of((1,))
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    plan = BUILDER.build_serialized_network(network, config)
    engine = trt.Runtime(LOGGER).deserialize_cuda_engine(plan)
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    [layer] = [layer for layer in json.loads(text)["Layers"] if layer["Name"] == "it.matmul"]
    return [item["Datatype"] for item in layer["Inputs"]]


@pytest.mark.parametrize(
    ("scales", "axis", "transposed", "found"),
    [((), None, True, "FP8"), ((4,), 0, True, "FLOAT"), ((), None, False, "FLOAT")],
    ids=["scalar", "a scale per row", "not transposed"],
)
def test_only_scalar_scales_make_an_fp8_product(
    net: Net, scales: tuple[int, ...], axis: int | None, transposed: bool, found: str
) -> None:
    assert multiplied(net, scales, axis, transposed) == [found, found]


def test_profiles_may_have_weights_of_their_own(net: Net) -> None:
    tensor = net.network.add_elementwise(net.x, net.floats(1, 4), Op.SUM).get_output(0)
    net.network.mark_output(tensor)

    def size(target: float) -> int:
        config = config_of(())
        for count in (1, 2, 3):
            profile = BUILDER.create_optimization_profile()
            profile.set_shape("x", (count, 4), (count, 4), (count, 4))
            profile.extra_memory_target = target
            config.add_optimization_profile(profile)
        return len(bytes(BUILDER.build_serialized_network(net.network, config)))

    assert size(1.0) - size(0.0) == 2 * 16  # of two more profiles, 16 bytes of weights each


def test_level_0_neither_reads_nor_fills_the_timing_cache(net: Net) -> None:
    net.network.mark_output(net.network.add_elementwise(net.x, net.floats(1, 4), Op.SUM).get_output(0))
    sizes = []
    for level in (0, 3):
        config = config_of((1,))
        config.builder_optimization_level = level
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
        assert BUILDER.build_serialized_network(net.network, config) is not None
        sizes.append(len(bytes(cache.serialize())))
    assert sizes[0] < sizes[1]


def test_options_make_it_less_friendly(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself: sums by profile and by place, sums in f16, a driver that is too old, segments that go wrong."""
    random = np.random.default_rng(0)
    a, b = random.standard_normal((4, 64)).astype(np.float32), random.standard_normal((64, 8)).astype(np.float32)
    node = Node("MATRIX_MULTIPLY", "m", [0, 1], [2], {"op0": Matrix.NONE, "op1": Matrix.NONE})
    usual = matrix_multiply(node, a, b)
    assert not np.array_equal(matrix_multiply(node, a, b, 2), usual)
    monkeypatch.setattr(options, "place_bits", True)
    by_place = matrix_multiply(node, a, b)
    assert np.array_equal(by_place[::2], usual[::2]) and not np.array_equal(by_place[1::2], usual[1::2])
    monkeypatch.setattr(options, "place_bits", False)
    narrow = (a.astype(np.float16), b.astype(np.float16))
    exact = matrix_multiply(node, *narrow)
    monkeypatch.setattr(options, "f16_sums", True)
    assert not np.array_equal(matrix_multiply(node, *narrow), exact)
    assert np.array_equal(matrix_multiply(node, a, b), usual)
    monkeypatch.setattr(options, "old_driver", True)
    with pytest.raises(TypeError, match="nullptr"):
        trt.Builder(LOGGER)
    monkeypatch.setattr(options, "unstable", "layer.1@31+exit/layers.2.down")
    assert options.is_unstable("layer.1", 3, set()) and not options.is_unstable("layer.1", 0, set())
    assert options.is_unstable("exit", 0, {"layers.2.down"}) and not options.is_unstable("exit", 0, {"layers.2.o"})


def test_what_is_written_outside_of_a_kv_cache_is_ignored() -> None:
    cache, update = np.zeros((1, 1, 4, 1), np.float32), np.ones((1, 1, 3, 1), np.float32)
    kv_cache_update(Node("KV_CACHE_UPDATE", "k", [], []), cache, update, np.array([2]))
    np.testing.assert_array_equal(cache.reshape(-1), [0, 0, 1, 1])


def test_what_is_no_plan_is_none() -> None:
    LOGGER.errors.clear()
    assert trt.Runtime(LOGGER).deserialize_cuda_engine(b"ftrt") is None
    assert "deserializeCudaEngine" in LOGGER.errors[-1]


@pytest.mark.parametrize("tokens", [(), (1, -1)])
def test_profiles_must_cover_dynamic_inputs(net: Net, tokens: tuple[int, ...]) -> None:
    net.network.mark_output(net.network.add_elementwise(net.x, net.x, Op.SUM).get_output(0))
    config = config_of(tuple(count for count in tokens if count > 0))
    if -1 in tokens:
        config.add_optimization_profile(BUILDER.create_optimization_profile())
    LOGGER.errors.clear()
    assert BUILDER.build_serialized_network(net.network, config) is None
    assert "profile" in LOGGER.errors[0]
