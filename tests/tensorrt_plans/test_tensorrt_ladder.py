"""A segment whose plan is wrong, or cannot be built, is built with less freedom: on the double, in this process."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorrt_rig
from host_driver import HostDriver
from oracle.cases import CASES
from tensorrt_subjects import FP8_HEAD, Recorder, silent_logger
from ull.bundle import Precision, profile_scheme
from ull_build.source.checkpoint import Checkpoint
from ull_build.tensorrt import trial
from ull_build.tensorrt.plans import (
    LEVELS,
    LOG_FILE,
    TACTICS_FILE,
    BuiltPlans,
    PlanSettings,
    PlansFailed,
    Rung,
    build_plans,
    rungs,
)
from ull_build.tensorrt.weights import SegmentWeights

trt = tensorrt_rig.load()
import tensorrt.builder  # noqa: E402
from tensorrt.behaviour import options  # noqa: E402

TWO = PlanSettings("paged", *profile_scheme("two", True, "paged"))
BF16 = Precision(weights="bf16", lm_head="bf16")
Make = Callable[..., BuiltPlans]


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    case = next(case for case in CASES if case.name == "qwen2-window")  # three layers, biases
    with Checkpoint(case.directory) as opened:
        yield opened


@pytest.fixture
def make(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make("unstable=..."): builds with these options of the double, every segment tried."""
    monkeypatch.setattr(trial, "Driver", HostDriver)
    calibration = tensorrt_rig.Reference(checkpoint, None)
    tensorrt_rig.forward(checkpoint, calibration, np.arange(64), 64)

    def build(
        wanted: str = "", settings: PlanSettings = TWO, precision: Precision = FP8_HEAD, reporter: Any = None
    ) -> BuiltPlans:
        for name in vars(options):
            monkeypatch.setattr(options, name, type(getattr(options, name))())
        options.read(wanted)
        weights, folder = SegmentWeights(checkpoint, precision), tmp_path / "bundle"
        given = (folder, tmp_path / "timing", reporter or Recorder(), settings)
        with trial.DeviceRunner() as runner:
            return build_plans(trt, checkpoint.model, weights, calibration.largest, *given, runner)

    return build


def test_right_plans_are_the_first_that_are_tried(make: Make) -> None:
    for precision in (FP8_HEAD, BF16):
        plans = make(precision=precision)
        assert (plans.sixteen_bits, plans.operands, plans.notes) == ([], {}, [])


def test_the_trial_is_as_near_as_fp8_codes_are(make: Make) -> None:
    """A limit of a few percent passes: what the trial computes is the segment, with its biases and every linear."""
    make(settings=replace(TWO, limit=0.05))
    with pytest.raises(PlansFailed, match="off NumPy's"):
        make(settings=replace(TWO, limit=1e-6))


@pytest.mark.parametrize(
    ("wanted", "segment", "taken", "sixteen_bits"),
    [
        ("entry@3", "entry", "optimisation level 1,", []),
        ("exit@31", "exit", "optimisation level 0, which ignores the timing cache,", []),
        ("head@31", "head", "optimisation level 0, which ignores the timing cache,", []),
        ("layer.0/layers.0.o", "layer.0", "16-bit activations for layers.0.o,", ["layers.0.o"]),
        ("layer.1/layers.2.qkv", "layer.1", "16-bit activations for layers.2.qkv,", ["layers.2.qkv"]),
        ("head/lm_head", "head", "16-bit activations for lm_head,", ["lm_head"]),
        (
            "exit/layers.2.o+exit/layers.2.down",
            "exit",
            "16-bit activations for layers.2.down, layers.2.gate_up, layers.2.o,",
            ["layers.2.o", "layers.2.gate_up", "layers.2.down"],
        ),
    ],
)
def test_the_first_rung_that_helps_is_taken(
    make: Make, wanted: str, segment: str, taken: str, sixteen_bits: list[str]
) -> None:
    reporter = Recorder()
    plans = make(f"unstable={wanted}", reporter=reporter)
    [note] = plans.notes
    assert note.startswith(f"{segment}: built with {taken} because at first its outputs were ")
    assert note in reporter.notes
    assert plans.sixteen_bits == sixteen_bits and plans.operands == {}
    assert reporter.done == reporter.total  # one bar, however often a segment is built


def test_plans_that_are_never_right_fail(make: Make) -> None:
    with pytest.raises(
        PlansFailed, match=r"could not build layer\.1: its outputs were .*: an unstable kernel"
    ) as caught:
        make("unstable=layer.1")
    assert caught.value.field == "layer.1"


def test_a_level_that_cannot_be_built_is_no_end(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = tensorrt.builder.Builder._build

    def refuse(self: Any, network: Any, config: Any) -> Any:
        if network.name == "exit" and config.builder_optimization_level == 3:
            self._logger.log(trt.ILogger.Severity.ERROR, "Error Code 10: could not find any implementation")
            return None
        return build(self, network, config)

    monkeypatch.setattr(tensorrt.builder.Builder, "_build", refuse)
    [note] = make().notes
    assert note == (
        "exit: built with optimisation level 1, because at first Error Code 10: could not find any implementation"
    )
    assert "could not find any implementation" in (tmp_path / "bundle" / LOG_FILE).read_text()


def test_f16_sums_do_not_reach_the_logits(make: Make, checkpoint: Checkpoint) -> None:
    """TensorRT may sum a product of f16 tensors in f16: there is none."""
    graphs_with_f16 = replace(TWO, limit=0.02)
    make("f16-sums", settings=graphs_with_f16, precision=Precision(weights="fp8", lm_head="bf16"))


def test_rungs_descend_and_end_with_all_linears() -> None:
    found = list(rungs(Rung(1), ["a", "b"]))
    assert [rung.level for rung in found] == [1, 0, 1, 1, 1]
    assert [sorted(rung.sixteen_bits) for rung in found] == [[], [], ["a"], ["b"], ["a", "b"]]
    assert list(rungs(Rung(LEVELS[0]), [])) == [Rung(level) for level in LEVELS]
    everywhere = Rung(3, frozenset(["a", "b", "c"]))
    assert list(rungs(everywhere, ["a", "b"])) == [everywhere]


def test_operands_that_are_not_fp8_are_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TensorRT fused no product of the second layer: with right results, and in 16 bits."""
    from tensorrt import fusion

    fused = fusion.operand_types

    def unfused(graph: Any, node: Any) -> list[Any]:
        return [trt.bfloat16] * 2 if node.name.startswith("layers.1.") else fused(graph, node)

    monkeypatch.setattr(fusion, "operand_types", unfused)
    reporter = Recorder()
    plans = make(reporter=reporter)
    names = [f"layers.1.{name}" for name in ("qkv", "o", "gate_up", "down")]
    assert plans.operands == dict.fromkeys(names, "BF16 x BF16")
    assert reporter.notes == [f"NOT AS DESCRIBED: TensorRT multiplies BF16 x BF16 in 4 linears: {', '.join(names)}"]


def test_what_the_timing_cache_can_be_edited_by_is_kept(make: Make, tmp_path: Path) -> None:
    make()
    with gzip.open(tmp_path / "bundle" / TACTICS_FILE, "rt") as file:
        lines = file.read().splitlines()
    assert lines[0].startswith("Autotuning op ") and "(key: 0x" in lines[0]
    keys = sum(line.startswith("Autotuning op ") for line in lines)
    assert len(lines) == 4 * keys  # key, header, one tactic, the selection; nothing else that is verbose
    assert sum("(tactic hash, cost(in ms)):0x" in line for line in lines) == keys > 10
    assert "[verbose]" not in (tmp_path / "bundle" / LOG_FILE).read_text()


def test_two_profiles_take_less_than_seven(make: Make, tmp_path: Path) -> None:
    sizes = []
    for scheme in ("two", "seven"):
        plans = make(settings=PlanSettings("paged", *profile_scheme(scheme, True, "paged")))  # type: ignore[arg-type]
        sizes.append(sum((tmp_path / "bundle" / name).stat().st_size for name in plans.files.values()))
        engine = trt.Runtime(silent_logger()).deserialize_cuda_engine(
            (tmp_path / "bundle" / plans.files["entry"]).read_bytes()
        )
        shapes = [
            [shape[0] for shape in engine.get_tensor_profile_shape("residual", profile)]
            for profile in range(engine.num_optimization_profiles)
        ]
        assert shapes == [list(profile) for profile in plans.settings.profiles]
    assert sizes[1] > 2 * sizes[0]
