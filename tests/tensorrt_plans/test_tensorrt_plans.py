"""Building plans, on the double of TensorRT: what is written, the timing cache, progress, Ctrl-C, failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorrt_rig
from oracle.cases import CASES
from tensorrt_subjects import Recorder
from ull.bundle import TOKEN_COUNTS, Precision, profile_scheme, segment_names
from ull.errors import BuildError, GpuError
from ull.gpu.tensorrt import library as tensorrt_library
from ull_build.progress import PlainReporter, Reporter
from ull_build.source.checkpoint import Checkpoint
from ull_build.tensorrt.monitor import Phases, make_monitor
from ull_build.tensorrt.plans import INSPECTOR_FILE, LOG_FILE, TACTICS_FILE, BuiltPlans, PlanSettings, build_plans
from ull_build.tensorrt.timing_cache import require_timing_cache, save_timing_cache
from ull_build.tensorrt.trial import Runner
from ull_build.tensorrt.weights import SegmentWeights

trt = tensorrt_rig.load()
import tensorrt.builder  # noqa: E402
from tensorrt.behaviour import options  # noqa: E402

FP8 = Precision(weights="fp8", lm_head="bf16")
SEVEN = PlanSettings("paged", *profile_scheme("seven", True, "paged"))
TWO = PlanSettings("paged", *profile_scheme("two", True, "paged"))
CASE = next(case for case in CASES if case.name == "qwen2-window")  # three layers


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint(CASE.directory) as opened:
        yield opened


@pytest.fixture(scope="module")
def amax(checkpoint: Checkpoint) -> dict[str, float]:
    calibration = tensorrt_rig.Reference(checkpoint, None)
    tensorrt_rig.forward(checkpoint, calibration, np.arange(64), 64)
    return calibration.largest


@pytest.fixture
def make(checkpoint: Checkpoint, amax: dict[str, float], tmp_path: Path) -> Callable[..., BuiltPlans]:
    """make("first"): builds into tmp_path/first, the timing cache beside it."""

    def build(
        name: str,
        reporter: Reporter | None = None,
        precision: Precision = FP8,
        settings: PlanSettings = SEVEN,
        runner: Runner | None = None,
    ) -> BuiltPlans:
        cache = tmp_path / "model.timing"
        weights = SegmentWeights(checkpoint, precision)
        plans = build_plans(
            trt, checkpoint.model, weights, amax, tmp_path / name, cache, reporter or Recorder(), settings, runner
        )
        save_timing_cache(plans.timing_cache, cache)
        return plans

    return build


def timed_layers(bundle: Path) -> int:
    """How many layers were timed anew, as the double's builder says."""
    lines = (bundle / LOG_FILE).read_text().splitlines()
    return sum(int(line.split("timed ")[1].split()[0]) for line in lines if " timed " in line)


def test_everything_is_written_in_order(make: Any, checkpoint: Checkpoint, tmp_path: Path) -> None:
    reporter = Recorder()
    plans = make("bundle", reporter)
    bundle = tmp_path / "bundle"
    assert list(plans.files) == segment_names(checkpoint.model.layers, "paged")
    assert plans.files["layer.1"] == "code/plans/layer.1.plan"
    assert (plans.sixteen_bits, plans.operands, plans.notes) == ([], {}, [])
    assert plans.tensorrt == trt.__version__
    written = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert written == {*plans.files.values(), LOG_FILE, TACTICS_FILE, INSPECTOR_FILE}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "model.timing"]
    assert reporter.notes == []


def test_the_plans_are_what_a_runtime_expects(make: Any, tmp_path: Path) -> None:
    plans = make("bundle")
    runtime = trt.Runtime(tensorrt_library.make_logger(trt, lambda severity, message: None))
    needed, whole = [], []
    for segment, path in plans.files.items():
        engine = runtime.deserialize_cuda_engine((tmp_path / "bundle" / path).read_bytes())
        assert engine.name == segment
        assert engine.num_aux_streams == 0
        assert engine.num_optimization_profiles == len(TOKEN_COUNTS)
        for profile, tokens in enumerate(TOKEN_COUNTS):
            shapes = engine.get_tensor_profile_shape("residual", profile)
            assert [tuple(shape) for shape in shapes] == [(tokens, 32)] * 3
            needed.append(engine.get_device_memory_size_for_profile_v2(profile))
        whole.append(engine.device_memory_size_v2)
    assert plans.device_memory == max(whole) > max(needed) > 0  # what a context asks for is more than a profile says


def test_the_reports_say_what_each_segment_became(make: Any, tmp_path: Path) -> None:
    plans = make("bundle")
    information = json.loads((tmp_path / "bundle" / INSPECTOR_FILE).read_text())
    assert list(information) == list(plans.files)
    names = [layer["Name"] for layer in information["layer.0"]["Layers"]]
    assert {"layers.0.gate_up.matmul", "layers.1.qkv.quantize"} <= set(names)
    log = (tmp_path / "bundle" / LOG_FILE).read_text()
    # No TF32, and the timing cache may be edited.
    assert log.count("[info] Engine generation completed with the flags ['EDITABLE_TIMING_CACHE'].") == len(plans.files)
    assert "[verbose]" not in log


def test_a_second_build_times_nothing_anew(make: Any, tmp_path: Path) -> None:
    plans = make("first")
    cache = (tmp_path / "model.timing").read_bytes()
    assert timed_layers(tmp_path / "first") > 0
    assert make("second") == plans
    assert timed_layers(tmp_path / "second") == 0
    assert (tmp_path / "model.timing").read_bytes() == cache
    for path in plans.files.values():
        assert (tmp_path / "first" / path).read_bytes() == (tmp_path / "second" / path).read_bytes()


@pytest.mark.parametrize("kind", ["damaged", "foreign"])
def test_a_timing_cache_of_no_use_is_replaced(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = tmp_path / "model.timing"
    if kind == "damaged":
        cache.write_bytes(b"not a cache")
    else:
        with monkeypatch.context() as patch:
            patch.setattr(tensorrt.builder, "DEVICE", "another GPU")
            make("elsewhere")
    reporter = Recorder()
    make("bundle", reporter)
    [note] = reporter.notes
    assert "model.timing" in note and "replaced" in note
    assert timed_layers(tmp_path / "bundle") > 0
    again = Recorder()
    make("again", again)
    assert again.notes == [] and timed_layers(tmp_path / "again") == 0


def test_a_timing_cache_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        save_timing_cache(b"data", tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_timing_cache_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    require_timing_cache(tmp_path / "none")
    with pytest.raises(BuildError, match=r"cannot be read .* move it away"):
        require_timing_cache(tmp_path)


def test_an_inspector_that_writes_no_json_does_not_cost_the_build(make: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(
        tensorrt.runtime.EngineInspector, "get_engine_information", lambda self, format: '{"a": "\\x01"'
    )
    make("bundle")
    assert set(json.loads((tmp_path / "bundle" / INSPECTOR_FILE).read_text()).values()) == {'{"a": "\\x01"'}


def test_one_bar_shows_all_segments(make: Any, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Recorder()
    make("bundle", reporter)
    assert reporter.done == reporter.total == 100 * len(segment_names(checkpoint.model.layers, "paged"))
    assert "tensorrt double" in reporter.threads  # TensorRT reports from threads of its own
    make("plain", PlainReporter())
    assert capsys.readouterr().out.startswith("TensorRT engines: 500 steps in ")


def test_nested_phases_become_one_fraction() -> None:
    phases = Phases()
    assert phases.fraction() == 0
    phases.start("build", None, 4)
    phases.complete("build", 0)
    assert phases.fraction() == 0.25
    phases.start("tactics", "build", 10)
    phases.complete("tactics", 4)
    assert phases.fraction() == 0.375
    phases.start("deeper", "tactics", 2)
    phases.complete("deeper", 1)
    assert phases.fraction() == 0.4
    for name in ("deeper", "tactics", "unknown"):
        phases.finish(name)
    phases.complete("gone", 3)
    assert phases.fraction() == 0.25


def test_ctrl_c_stops_the_build_and_leaves_the_cache(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT in the middle of a segment: TensorRT is told, comes back, and nothing of it goes on."""
    cache = tmp_path / "model.timing"
    make("first")
    before = cache.read_bytes()
    sent = threading.Event()
    segments: list[threading.Event] = []  # each one's request to stop

    def watched(trt: Any, cancelled: threading.Event, report: Any) -> Any:
        segments.append(cancelled)
        return make_monitor(trt, cancelled, report)

    def interrupt() -> None:
        if reporter.done > 150 and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
            assert segments[-1].wait(60)  # the main thread may be slow to hear of it: the segment is not to end before

    monkeypatch.setattr("ull_build.tensorrt.plans.make_monitor", watched)

    reporter = Recorder(interrupt)
    with pytest.raises(KeyboardInterrupt):
        make("second", reporter)
    assert not [thread for thread in threading.enumerate() if "tensorrt" in thread.name]
    assert reporter.done < reporter.total
    assert cache.read_bytes() == before
    assert "cancelled by the progress monitor" in (tmp_path / "second" / LOG_FILE).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model.timing", "second"]


def test_a_failed_build_quotes_tensorrt(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ull_build.tensorrt.graph import Graph

    constant = Graph.constant

    def wrong(self: Graph, name: str, values: Any) -> Any:
        return constant(self, name, values[:, :-1] if name == "layers.1.o.weight" else values)

    monkeypatch.setattr(Graph, "constant", wrong)
    with pytest.raises(BuildError, match=r"not build layer\.1: .*layers\.1\.o\.matmul: inner dimensions") as caught:
        make("bundle")
    assert caught.value.field == "layer.1"
    assert not (tmp_path / "model.timing").exists()


def test_a_missing_gpu_is_an_error_of_the_build(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "old_driver", True)
    with pytest.raises(BuildError, match="cannot start on this machine: CUDA initialization failure"):
        make("bundle")


def test_a_failing_worker_is_no_mystery(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(tensorrt.builder.Builder, "build_serialized_network", lambda self, network, config: fail())
    with pytest.raises(MemoryError):
        make("bundle")


# The library


def test_missing_tensorrt_says_what_to_install() -> None:
    script = "from ull.gpu.tensorrt.library import load\ntry: load()\nexcept Exception as e: print(e.code, '|', e)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if "tensorrt" not in path)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("no_tensorrt | this machine has no TensorRT")
    assert "pip install ull[tensorrt]" in result.stdout


def test_bindings_without_their_library_are_missing_too(tmp_path: Path) -> None:
    """The real bindings, with no libnvinfer in reach."""
    (tmp_path / "tensorrt.py").write_text("from tensorrt_bindings import *\n")
    script = "from ull.gpu.tensorrt.library import load\ntry: load()\nexcept Exception as e: print(e.code, '|', e)"
    paths = [str(tmp_path), *(path for path in sys.path if "tensorrt" not in path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("no_tensorrt | TensorRT cannot be loaded: libnv")
    assert "pip install ull[tensorrt]" in result.stdout


def test_the_double_serves_a_subprocess() -> None:
    script = "from ull.gpu.tensorrt.library import load\nprint(load().Builder.__module__)"
    environment = tensorrt_rig.environment({**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "tensorrt.builder\n"


@pytest.mark.parametrize("version", ["10.13.0.35", "dev"])
def test_an_old_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert tensorrt_library.load() is trt
    monkeypatch.setattr(trt, "__version__", version)
    with pytest.raises(GpuError, match=f"TensorRT {version} is too old, ull needs 11 or later") as caught:
        tensorrt_library.load()
    assert caught.value.code == "old_tensorrt"


def test_the_logger_hands_messages_on() -> None:
    heard: list[tuple[str, str]] = []
    logger = tensorrt_library.make_logger(trt, lambda severity, message: heard.append((severity, message)))
    logger.log(trt.ILogger.Severity.WARNING, "mind")
    assert heard == [("warning", "mind")]
    assert trt.Builder(logger).logger is logger
