"""Calibration: ranges from observed activations, the better of two methods, what the manifest and the summary say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import write_checkpoint
from ull.bundle import Calibration, Manifest, Precision, open_bundle, quantised_inputs, read_manifest
from ull.commands import inspect
from ull.errors import BuildError, RecipeError
from ull_build import cli
from ull_build.build import BuildResult, build
from ull_build.progress import Advance, Reporter
from ull_build.quality.evaluate import CALIBRATION, EvaluationText, Predictions, read_text
from ull_build.recipe import load_recipe, make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.source.vocabulary import read_tokenizer
from ull_build.tensorrt.calibrate import PERCENTILE, percentile_amax
from ull_build.tensorrt.weights import BF16, activation_scale

pytest.importorskip("ull._native")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


class Stages(Reporter):
    """Notes the titles of the stages."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Advance]:
        self.titles.append(title)
        yield lambda amount: None


def calibrated(checkpoint: Path, output: Path, reporter: Reporter | None = None, **changes: Any) -> BuildResult:
    options = {"eval_tokens": 256, "calibration_tokens": 256, "max_perplexity_increase": 1.0, **changes}
    return build(Settings(checkpoint, output, "x", calibrate=True, **options), reporter)


# Scales


def scale_of(amax: float) -> float:
    return float(activation_scale(amax, BF16))


def test_an_input_without_a_range_is_left_as_it_is() -> None:
    assert scale_of(0.0) == 1.0


@given(st.floats(min_value=0.0, max_value=3.0000000054977558e38, exclude_min=True, width=32))
def test_scales_are_the_next_bf16_value(amax: float) -> None:
    scale = scale_of(amax)
    assert float(np.float32(scale).astype(ml_dtypes.bfloat16)) == scale
    assert scale * 448.0 >= amax * (1 - 2.0**-23)  # the quotient is a float32
    below = float((np.float32(scale).view(np.uint32) - np.uint32(1 << 16)).view(np.float32))
    assert below * 448.0 < amax or scale == 2.0**-126  # smaller ones have fewer bits


@pytest.mark.parametrize("amax", [448.0, 1.0 * 448, 0.5 * 448, 1.0078125 * 448])
def test_a_bf16_value_is_kept(amax: float) -> None:
    assert scale_of(amax) == amax / 448


def histogram_of(values: np.ndarray) -> np.ndarray:
    bits = np.abs(values.astype(np.float32)).view(np.uint32)
    return np.bincount(bits >> 16, minlength=32768).astype(np.uint64)


def test_the_percentile_is_a_bin_s_upper_edge() -> None:
    values = np.random.default_rng(3).standard_normal(1_000_000).astype(np.float32)
    values[:20] = 500.0  # fewer than 1 in 10,000
    amax = percentile_amax(histogram_of(values), 500.0)
    exact = np.percentile(np.abs(values), PERCENTILE)
    assert exact <= amax <= exact * (1 + 2.0**-7)
    values[:200] = 500.0
    assert percentile_amax(histogram_of(values), 500.0) == 500.0  # the edge lies above, at 502


@pytest.mark.parametrize("value", [0.0, 1.0, 3.3e38])
def test_the_percentile_never_exceeds_the_largest(value: float) -> None:
    largest = float(np.float32(value))
    assert percentile_amax(histogram_of(np.full(100, value)), largest) == largest


# Texts


def test_the_default_text_is_another_and_long_enough(checkpoint: Path) -> None:
    tokenizer = read_tokenizer(checkpoint, 330)
    text = read_text(None, tokenizer, 1 << 20, 1 << 20, CALIBRATION)
    assert len(text.tokens) > 2048 and text.field == "calibration_text"
    evaluation = read_text(None, tokenizer, 1 << 20, 1 << 20)
    assert text.name != evaluation.name
    parts = [
        {tuple(part) for part in text_.tokens[: len(text_.tokens) // 16 * 16].reshape(-1, 16)}
        for text_ in (text, evaluation)
    ]
    assert not parts[0] & parts[1]


def test_wrong_texts_name_their_key(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for name, words in (
        ("nowhere", "calibration text .*nowhere cannot be read"),
        ("empty", "calibration text empty gives"),
    ):
        with pytest.raises(BuildError, match=words) as caught:
            calibrated(checkpoint, tmp_path / "x.ull", calibration_text=tmp_path / name)
        assert caught.value.field == "calibration_text"
    assert not (tmp_path / "x.ull").exists()


def test_keys_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('model = "m"\ncalibration_text = "c.txt"\ncalibration_tokens = 512\n')
    settings = settings_from_recipe(load_recipe(path, {}))
    assert (settings.calibration_text, settings.calibration_tokens) == (tmp_path / "c.txt", 512)
    assert not settings.calibrate
    settings = settings_from_recipe(load_recipe(path, {"calibration_text": "here.txt"}))
    assert settings.calibration_text == Path("here.txt")
    default = settings_from_recipe(make_recipe({"model": "m", "name": "x"}, "here"))
    assert (default.calibration_text, default.calibration_tokens) == (None, 2048)
    with pytest.raises(RecipeError) as caught:
        make_recipe({"model": "m", "name": "x", "calibration_tokens": 1}, "here")
    assert caught.value.field == "calibration_tokens"


def test_options_of_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(checkpoint), "--output", str(tmp_path / "x.ull"), "--no-eval", "--quiet"]
    assert cli.main([*arguments, "--calibration-text", "c.txt", "--calibration-tokens", "77"]) == 0
    recipe = read_manifest(tmp_path / "x.ull").provenance.recipe
    assert (recipe["calibration_text"], recipe["calibration_tokens"]) == ("c.txt", 77)


# Builds


@pytest.mark.parametrize("lm_head", ["bf16", "fp8"])
def test_a_build_measures_and_keeps_its_calibration(checkpoint: Path, tmp_path: Path, lm_head: Any) -> None:
    stages = Stages()
    result = calibrated(checkpoint, tmp_path / "x.ull", stages, precision=Precision(lm_head=lm_head))
    manifest = open_bundle(result.path, verify="hashes").manifest
    calibration, quality = manifest.calibration, manifest.quality
    assert calibration is not None and quality is not None and manifest == result.manifest
    assert list(calibration.amax) == quantised_inputs(manifest.model, manifest.precision)
    assert ("lm_head" in calibration.amax) == (lm_head == "fp8")
    assert all(amax > 0 for amax in calibration.amax.values())
    assert calibration.losses[calibration.method] == min(calibration.losses.values())
    assert (calibration.text, calibration.tokens) == (CALIBRATION.default_name, 256)
    expected = calibration.perplexity / quality.perplexity_original - 1
    assert calibration.perplexity_increase == pytest.approx(expected, rel=1e-6)
    assert calibration.perplexity != quality.perplexity_quantised
    assert 0.5 < calibration.top1_agreement < 1.0
    assert stages.titles == [
        "original, for comparison",
        "observe activations",
        "weights to fp8",
        "evaluate original",
        "evaluate quantised",
        "calibrate by max",
        "calibrate by percentile",
        "evaluate calibrated",
    ]
    assert {path.name for path in result.path.iterdir()} == {
        "manifest.json",
        "manifest.sha256",
        "tokenizer",
        "vocab.bin",
        "weights.safetensors",
    }


def test_calibration_changes_no_weight(checkpoint: Path, tmp_path: Path) -> None:
    with_it = calibrated(checkpoint, tmp_path / "x.ull").manifest
    without = build(
        Settings(checkpoint, tmp_path / "y.ull", "y", eval_tokens=256, max_perplexity_increase=1.0)
    ).manifest
    assert with_it.files == without.files and without.calibration is None
    assert with_it.quality == without.quality


def test_bf16_weights_need_no_calibration(checkpoint: Path, tmp_path: Path) -> None:
    stages = Stages()
    bf16 = Precision(weights="bf16")
    assert calibrated(checkpoint, tmp_path / "x.ull", stages, precision=bf16).manifest.calibration is None
    assert "observe activations" not in stages.titles
    assert calibrated(checkpoint, tmp_path / "y.ull", precision=bf16, evaluate=False).manifest.quality is None
    head = Precision(weights="bf16", lm_head="fp8")
    calibration = calibrated(checkpoint, tmp_path / "z.ull", precision=head).manifest.calibration
    assert calibration is not None and list(calibration.amax) == ["lm_head"]


def test_ranges_have_to_be_measured(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"leave out --no-eval, or use precision bf16"):
        calibrated(checkpoint, tmp_path / "x.ull", evaluate=False)


def fake_predict(monkeypatch: pytest.MonkeyPatch, by_max: float, by_percentile: float) -> list[dict[str, float]]:
    """Replaces the native evaluation: what FP8 inputs add to the loss, in nats. Returns the scales of each run."""
    runs: list[dict[str, float]] = []

    def predict(spec: Any, text: EvaluationText, threads: int, progress: Any, scales: Any) -> Predictions:
        loss = 3.0
        if scales is not None:
            runs.append(scales)
            loss += by_max if scales == runs[0] else by_percentile
        return Predictions(np.full(text.predictions, loss, np.float32), np.zeros(text.predictions, np.int32))

    monkeypatch.setattr("ull_build.quality.measure.predict", predict)
    return runs


@pytest.mark.parametrize(
    ("by_max", "by_percentile", "method"), [(0.1, 0.2, "max"), (0.2, 0.1, "percentile"), (0.1, 0.1, "max")]
)
def test_the_smaller_loss_wins(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by_max: float,
    by_percentile: float,
    method: str,
) -> None:
    runs = fake_predict(monkeypatch, by_max, by_percentile)
    result = calibrated(checkpoint, tmp_path / "x.ull")
    calibration = result.manifest.calibration
    assert calibration is not None
    assert (calibration.method, calibration.percentile) == (method, None if method == "max" else PERCENTILE)
    assert calibration.losses == pytest.approx({"max": np.exp(3 + by_max), "percentile": np.exp(3 + by_percentile)})
    assert calibration.perplexity_increase == pytest.approx(np.expm1(0.1), rel=1e-5)
    assert len(runs) == 3 and runs[2] == runs[method == "percentile"]
    assert runs[2] == {name: scale_of(amax) for name, amax in calibration.amax.items()}
    assert all(runs[1][name] <= runs[0][name] for name in runs[0]) and runs[1] != runs[0]
    cli.print_summary(result)
    assert f"(+10.517%, by {method})" in capsys.readouterr().out
    assert inspect.main(result.path) == 0
    printed = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert re.search(r"with FP8 activations perplexity 22\.19(79|80) \(\+10\.517%", printed)
    assert ("99.99th percentile of |x|" in printed) == (method == "percentile")


def test_the_limit_holds_for_activations_too(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_predict(monkeypatch, 0.02, 0.02)
    words = r"with FP8 activations, perplexity rises .* by 2.02%; the limit is 1.00%. Give a calibration_text .*bf16"
    with pytest.raises(BuildError, match=words) as caught:
        calibrated(checkpoint, tmp_path / "x.ull", max_perplexity_increase=0.01)
    assert caught.value.field == "max_perplexity_increase"
    assert list(tmp_path.iterdir()) == []


# The manifest


def valid() -> dict[str, Any]:
    return {
        "text": "t",
        "tokens": 100,
        "method": "percentile",
        "percentile": 99.99,
        "losses": {"max": 8.0, "percentile": 7.9},
        "amax": {"layers.0.qkv": 3.0, "layers.1.down": 0.0},
        "perplexity": 8.0,
        "perplexity_increase": -0.001,
        "top1_agreement": 0.99,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "median"}, "median"),
        ({"percentile": None}, "'percentile' and `percentile` disagree"),
        ({"method": "max"}, "'max' and `percentile` disagree"),
        ({"percentile": 100.0}, "< 100"),
        ({"losses": {"max": 8.0}}, "lacks the method 'percentile'"),
        ({"losses": {"percentile": 8.0, "mean": 8.0}}, "by method"),
        ({"losses": {"percentile": 0.0}}, "> 0"),
        ({"losses": {"percentile": float("inf")}}, "must be finite"),
        ({"amax": {"layers.0.qkv": -1.0}}, ">= 0"),
        ({"amax": {"layers.0.qkv": float("inf")}}, "`amax` must be finite"),
        ({"perplexity": 0.0}, "> 0"),
        ({"perplexity_increase": float("inf")}, "must be finite"),
        ({"top1_agreement": 1.5}, "<= 1"),
        ({"tokens": 0}, ">= 1"),
        ({"extra": 1}, "extra"),
    ],
)
def test_damaged_calibrations_are_refused(changes: dict[str, Any], words: str) -> None:
    assert msgspec.convert(valid(), Calibration).method == "percentile"
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(valid() | changes, Calibration)


def test_only_fp8_linears_have_ranges(checkpoint: Path, tmp_path: Path) -> None:
    manifest = build(Settings(checkpoint, tmp_path / "x.ull", "x", evaluate=False)).manifest
    plain = msgspec.to_builtins(manifest)
    taken = msgspec.convert({**plain, "calibration": valid()}, Manifest)
    assert taken.calibration is not None
    for name in ("lm_head", "layers.2.qkv", "layers.0.mlp"):
        wrong = valid() | {"amax": {"layers.0.o": 1.0, name: 1.0}}
        with pytest.raises(msgspec.ValidationError, match=f"names no FP8 linear: {name}"):
            msgspec.convert({**plain, "calibration": wrong}, Manifest)
