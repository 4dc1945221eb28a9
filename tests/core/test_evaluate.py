"""Evaluation and observation by the native core, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packing import FP8, Dims, RandomModel
from ull import _native


def small(tmp_path: Path, **dims: Any) -> dict[str, Any]:
    return RandomModel(Dims(**dims)).save(tmp_path / "weights.safetensors")


def random_tokens(count: int, vocabulary: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


Tap = Callable[[str, np.ndarray], np.ndarray]


def untouched(name: str, values: np.ndarray) -> np.ndarray:
    return values


def predictions(
    model: RandomModel, tokens: np.ndarray, window: int, tap: Tap = untouched
) -> tuple[list[float], list[int]]:
    """What evaluate returns, by the reference."""
    nll: list[float] = []
    best: list[int] = []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        logits = model.reference(part, tap)
        peak = logits.max(axis=1, keepdims=True)
        log_probabilities = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
        nll += list(-log_probabilities[np.arange(len(part) - 1), part[1:]])
        best += list(logits[:-1].argmax(axis=1))
    return nll, best


@pytest.mark.parametrize(("count", "window"), [(300, 100), (301, 100), (90, 128), (640, 320)])
def test_evaluate_agrees_with_the_reference(tmp_path: Path, count: int, window: int) -> None:
    model = RandomModel(Dims(weights="bf16", lm_head="bf16", kv="f32", windows=(0, 50), tied=False, bias=True))
    spec = model.save(tmp_path / "w.safetensors")
    tokens = random_tokens(count, 100)
    seen: list[tuple[int, int]] = []
    nll, best = _native.evaluate(
        spec, tokens, window, threads=2, progress=lambda done, total: seen.append((done, total))
    )
    expected_nll, expected_best = predictions(model, tokens, window)
    np.testing.assert_allclose(nll, expected_nll, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(best, expected_best)
    assert nll.dtype == np.float32 and best.dtype == np.int32
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


def linear_names(layers: int) -> list[str]:
    return [f"layers.{layer}.{name}" for layer in range(layers) for name in ("qkv", "o", "gate_up", "down")] + [
        "lm_head"
    ]


@pytest.mark.parametrize("name", linear_names(1))
@pytest.mark.parametrize("weights", ["f32", "fp8"])  # FP8 weights see their inputs times 2^64
def test_inputs_are_rounded_to_e4m3(tmp_path: Path, weights: str, name: str) -> None:
    model = RandomModel(Dims(layers=1, weights=weights, lm_head="f32" if weights == "f32" else "bf16", bias=True))
    spec = model.save(tmp_path / "w.safetensors")
    tokens = random_tokens(120, 100)
    scale = np.float32(2.5 / 448)  # larger inputs saturate, small ones are subnormal

    def rounded(linear: str, values: np.ndarray) -> np.ndarray:
        if linear != name:
            return values
        quotients = np.clip(values.astype(np.float32) / scale, -448, 448)
        return (quotients.astype(FP8).astype(np.float32) * scale).astype(np.float64)

    nll, best = _native.evaluate(spec, tokens, 60, input_scales={name: float(scale)})
    expected_nll, expected_best = predictions(model, tokens, 60, rounded)
    # An input that lies between two values may be rounded up by one and down by the other: rarely, and not by much.
    difference = np.abs(nll - expected_nll)
    assert np.mean(difference <= 1e-4) > 0.9 and difference.max() < 3e-3
    assert np.mean(best == expected_best) > 0.97
    plain, _ = predictions(model, tokens, 60)
    assert np.abs(np.array(plain) - expected_nll).max() > 5e-3  # it makes a difference
    again, _ = _native.evaluate(spec, tokens, 60, threads=2, input_scales={name: float(scale)})
    np.testing.assert_array_equal(again, nll)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_inputs_are_rounded_token_by_token(tmp_path: Path, weights: str) -> None:
    """Of all linears but the lm_head: what prompts that are read fast are made of."""
    model = RandomModel(Dims(layers=2, weights=weights, lm_head="bf16", bias=True))
    spec, tokens = model.save(tmp_path / "w.safetensors"), random_tokens(120, 100)

    def rounded(linear: str, values: np.ndarray) -> np.ndarray:
        if linear.rpartition(".")[2] not in ("qkv", "o", "gate_up", "down"):
            return values
        scales = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32) / np.float32(448)
        return ((values.astype(np.float32) / scales).astype(FP8).astype(np.float32) * scales).astype(np.float64)

    nll, best = _native.evaluate(spec, tokens, 60, token_scales=True)
    expected_nll, expected_best = predictions(model, tokens, 60, rounded)
    plain, _ = predictions(model, tokens, 60)
    difference = np.abs(nll - expected_nll)  # of few more: rounded the other way, see above
    assert np.median(difference) < 1e-5 and np.median(np.abs(np.array(plain) - expected_nll)) > 1e-2
    same = difference < 1e-4
    assert np.mean(best[same] == np.array(expected_best)[same]) > 0.97
    with pytest.raises(ValueError, match="token_scales: not beside input_scales"):
        _native.evaluate(spec, tokens, 60, input_scales={"lm_head": 1.0}, token_scales=True)


def test_unknown_scales_are_named(tmp_path: Path) -> None:
    spec, tokens = small(tmp_path), random_tokens(20, 100)
    with pytest.raises(ValueError, match=r"input_scales: the model has no linear named layers\.2\.o, qkv$"):
        _native.evaluate(spec, tokens, 10, input_scales={"layers.1.o": 1.0, "layers.2.o": 1.0, "qkv": 1.0})
    with pytest.raises(ValueError, match=r"input_scales: that of lm_head must be positive and finite"):
        _native.evaluate(spec, tokens, 10, input_scales={"lm_head": 0.0})


@pytest.mark.parametrize("weights", ["f32", "fp8"])
def test_observe_agrees_with_the_reference(tmp_path: Path, weights: str) -> None:
    model = RandomModel(Dims(weights=weights, lm_head="f32" if weights == "f32" else "bf16", qk_norm=True, kv="f32"))
    spec = model.save(tmp_path / "w.safetensors")
    tokens = random_tokens(150, 100)
    met: dict[str, list[np.ndarray]] = {}

    def keep(name: str, values: np.ndarray) -> np.ndarray:
        met.setdefault(name, []).append(np.abs(values.astype(np.float32)))
        return values

    predictions(model, tokens, 60, keep)
    histograms, largest, keys_values = _native.observe(spec | {"kv_dtype": "bf16"}, tokens, 60, threads=2)
    assert list(histograms) == list(largest) == linear_names(2)
    for name, histogram in histograms.items():
        values = np.concatenate(met[name]).ravel()
        assert histogram.dtype == np.uint64 and histogram.shape == (32768,)
        assert largest[name] == pytest.approx(values.max(), rel=1e-5)
        expected = np.bincount(values.view(np.uint32) >> 16, minlength=32768)
        # An input that the two round to different sides of a bin's edge is counted beside it.
        assert histogram.sum() == values.size
        assert np.abs(np.cumsum(histogram).astype(np.int64) - np.cumsum(expected)).max() <= 2 + values.size // 1000
    assert list(keys_values) == ["layers.0.kv", "layers.1.kv"]
    for layer in range(2):
        parts = [np.concatenate(met[f"layers.{layer}.{part}"]).max(axis=(0, 2)) for part in ("keys", "values")]
        np.testing.assert_allclose(keys_values[f"layers.{layer}.kv"], np.concatenate(parts), rtol=1e-5)


def test_observe_stops_and_refuses_as_evaluate_does(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    spec = small(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        _native.observe(spec, random_tokens(200, 100), 50, progress=stop)
    with pytest.raises(ValueError, match="window"):
        _native.observe(spec, random_tokens(10, 100), 1)
    with pytest.raises(ValueError, match="hidden"):
        _native.observe(spec | {"hidden": 0}, random_tokens(10, 100), 8)
    model = RandomModel(Dims())
    model.tensors["layers.1.mlp_norm"][0] = np.inf
    with pytest.raises(RuntimeError, match=r"observe: an input of layers\.1\.gate_up is not finite"):
        _native.observe(model.save(tmp_path / "inf.safetensors"), random_tokens(10, 100), 8)


def test_evaluate_stops_when_progress_raises(tmp_path: Path) -> None:
    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _native.evaluate(small(tmp_path), random_tokens(200, 100), 50, progress=stop)
    assert len(calls) == 1


def test_evaluate_refuses_bad_arguments(tmp_path: Path) -> None:
    spec = small(tmp_path)
    with pytest.raises(ValueError, match="window"):
        _native.evaluate(spec, random_tokens(10, 100), 1)
    with pytest.raises(ValueError, match="at least 2"):
        _native.evaluate(spec, random_tokens(1, 100), 8)
    with pytest.raises(ValueError, match="vocabulary"):
        _native.evaluate(spec, np.array([1, 100], np.int32), 8)
    model = RandomModel(Dims(tied=False))
    model.tensors["norm"][0] = np.nan
    with pytest.raises(RuntimeError, match="not finite"):
        _native.evaluate(model.save(tmp_path / "nan.safetensors"), random_tokens(10, 100), 8)
