"""The step with TensorRT's own KV cache and attention, evaluated in NumPy, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensorrt_rig
from oracle.cases import Case
from tensorrt_subjects import BF16, FITTING, FP8, Recorder, Subject, describe_all, mean_error, silent_logger, subject
from ull.bundle import Precision, cache_positions, profile_scheme
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.native import NativeNetwork
from ull_build.tensorrt.plans import PlanSettings, build_plans
from ull_build.tensorrt.weights import SegmentWeights

trt = tensorrt_rig.load()
from tensorrt.evaluation import evaluate, problems  # noqa: E402

NATIVE = PlanSettings("native", *profile_scheme("two", True, "native"))
Step = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


class Stepper:
    """Feeds tokens through `step` and `head`, which take and give arrays by name; holds the caches."""

    def __init__(self, it: Subject, step: Step, head: Step) -> None:
        model = it.checkpoint.model
        self._embedding = np.concatenate(list(it.checkpoint.blocks("model.embed_tokens.weight")))
        self._vocabulary, self._step, self._head = model.vocabulary, step, head
        shape = (1, model.kv_heads, cache_positions(model.context), model.head_dim)
        names = [f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in range(model.layers)]
        self._caches = {name: np.zeros(shape, ml_dtypes.bfloat16) for name in names}
        self._length = 0

    def logits(self, tokens: np.ndarray, rows: int) -> np.ndarray:
        """Logits of the tokens, which follow those before; padded to `rows`."""
        padded = np.pad(tokens, (0, rows - len(tokens)))
        inputs = {
            "residual": self._embedding[padded].astype(np.float32),
            "base": np.array([self._length], np.int32),
            "depths": np.arange(rows, dtype=np.int32),
            **self._caches,
        }
        residual = self._step(inputs)["residual_out"]
        self._length += len(tokens)
        return self._head({"residual": residual})["logits"][: len(tokens), : self._vocabulary]


def networks(it: Subject, precision: Precision) -> dict[str, Graph]:
    graphs = describe_all(NativeNetwork(it.checkpoint.model, SegmentWeights(it.checkpoint, precision), it.amax))
    assert all(problems(graph.network._graph) == [] for graph in graphs.values())
    return graphs


def stepper(it: Subject, graphs: dict[str, Graph]) -> Stepper:
    return Stepper(
        it,
        lambda inputs: evaluate(graphs["step"].network, inputs),
        lambda inputs: evaluate(graphs["head"].network, inputs),
    )


def all_logits(steps: Stepper, tokens: np.ndarray, singles: int) -> np.ndarray:
    """Chunks of 64, the last one padded, then `singles` tokens one by one."""
    prompt = tokens[: len(tokens) - singles]
    parts = [steps.logits(prompt[start : start + 64], 64) for start in range(0, len(prompt), 64)]
    parts += [steps.logits(tokens[place : place + 1], 1) for place in range(len(prompt), len(tokens))]
    return np.concatenate(parts)


@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
def test_chunks_and_single_tokens_agree_with_transformers(case: Case) -> None:
    it = subject(case.name)
    logits = all_logits(stepper(it, networks(it, BF16)), it.tokens, 12)
    found, expected = logits[it.expected["positions"]], it.expected["logits"]
    assert (it.expected["positions"] >= len(it.tokens) - 12).any()
    assert mean_error(found, expected) < 0.04
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.85


@pytest.mark.parametrize("name", ["llama-bias", "qwen3-window-bias", "qwen2-window"])
def test_both_attentions_agree(name: str) -> None:
    """FP8 segments with attention between them, and the one step: the same GEMMs on almost the same numbers."""
    it = subject(name)
    tokens = it.tokens[:90]
    expected = tensorrt_rig.forward(it.checkpoint, it.networks(FP8), tokens, 64)
    found = all_logits(stepper(it, networks(it, FP8)), tokens, 6)
    assert mean_error(found, expected) < 0.15  # FP8 codes that fall on the other side cost percents
    bf16 = all_logits(stepper(it, networks(it, BF16)), tokens, 6)
    assert mean_error(bf16, tensorrt_rig.forward(it.checkpoint, it.networks(BF16), tokens, 64)) < 0.02


def test_masks_and_tables_are_shared_between_layers() -> None:
    it = subject("qwen2-window")  # three layers: two without, one with a window
    network = networks(it, BF16)["step"].network
    names = [network.get_layer(index).name for index in range(network.num_layers)]
    assert [name for name in names if name.endswith(".later")] == ["mask.0.later", "mask.24.later"]
    assert names.count("rope.cosine") == 1
    assert len([name for name in names if name.endswith(".both")]) == 1


def test_plans_run_with_caches_in_place(tmp_path: Path) -> None:
    """Built, loaded and run at addresses, as a daemon would: the caches are updated where they lie."""
    it = subject("qwen3")
    cache = tmp_path / "model.timing"
    model, weights = it.checkpoint.model, SegmentWeights(it.checkpoint, BF16)
    plans = build_plans(trt, model, weights, {}, tmp_path / "bundle", cache, Recorder(), NATIVE)
    assert list(plans.files) == ["step", "head"]
    assert plans.settings.profiles == [(1, 1, 1), (64, 64, 64)]
    runtime = trt.Runtime(silent_logger())
    engines = {
        name: runtime.deserialize_cuda_engine((tmp_path / "bundle" / path).read_bytes())
        for name, path in plans.files.items()
    }
    assert engines["step"].get_aliased_input_tensor("key_cache_out.1") == "key_cache.1"
    assert engines["step"].get_aliased_input_tensor("residual_out") is None
    memory = Arena()
    steps = Stepper(it, partial(memory.run, engines["step"]), partial(memory.run, engines["head"]))
    tokens = it.tokens[:40]
    expected = all_logits(stepper(it, networks(it, BF16)), tokens, 3)
    np.testing.assert_array_equal(all_logits(steps, tokens, 3), expected)


class Arena:
    """Runs engines on arrays that keep their place: one aligned buffer for each name of each engine."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, str], np.ndarray] = {}

    def run(self, engine: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        profile = {1: 0, 64: 1}[len(inputs["residual"])]
        assert context.set_optimization_profile_async(profile, 7)
        for name, array in inputs.items():
            assert context.set_input_shape(name, array.shape)
            is_cache = "cache" in name
            first = (engine, name) not in self._buffers
            buffer = self._place(engine, name, array.nbytes)
            if first or not is_cache:
                buffer[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            assert context.set_tensor_address(name, buffer.ctypes.data)
        outputs = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
                source = engine.get_aliased_input_tensor(name)
                shape = tuple(context.get_tensor_shape(name))
                buffer = self._place(engine, source or name, 4 * int(np.prod(shape)))
                assert context.set_tensor_address(name, buffer.ctypes.data)
                outputs[name] = (buffer, shape)
        scratch = self._place(engine, "scratch", engine.device_memory_size_v2)
        context.set_device_memory(scratch.ctypes.data, len(scratch))
        assert context.execute_async_v3(7)
        return {
            name: buffer[: 4 * int(np.prod(shape))].view(np.float32).reshape(shape).copy()
            for name, (buffer, shape) in outputs.items()
            if "cache" not in name
        }

    def _place(self, engine: Any, name: str, nbytes: int) -> np.ndarray:
        key = (engine, name)
        if key not in self._buffers:
            raw = np.zeros(max(nbytes, 1 << 20) + 256, np.uint8)
            self._buffers[key] = raw[-raw.ctypes.data % 256 :][: len(raw) - 256]
        return self._buffers[key]
