"""Benchmark bundles with plans of made-up weights, built on the double of TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorrt_rig
from device_bundles import write_stubs
from host_driver import HostDriver
from tensorrt_subjects import SMALL
from ull.bundle import Bundle, Manifest, Precision, Target, open_bundle
from ull.errors import BuildError
from ull_build import benchmark_bundle as random_bundle
from ull_build.benchmark_bundle import RandomSettings, build_random
from ull_build.code import kernels
from ull_build.local_gpu import LocalGpu
from ull_build.recipe import ForwardRecipe
from ull_build.tensorrt import check, trial
from ull_build.tensorrt.random_weights import RandomCheckpoint
from ull_build.tensorrt.staged import Tools
from ull_build.tensorrt.weights import SegmentWeights

TRUE = np.random.default_rng(0).standard_normal((128, 300)).astype(np.float32)
Build = Callable[..., Manifest]


class Program:
    """The graph program of a bundle, of which only the logits are played: our kernels' are TRUE."""

    resident_bytes = 7

    def __init__(self, bundle: Bundle, error: float) -> None:
        assert (bundle.path / "weights.safetensors").exists() and not bundle.manifest.random_weights
        assert "layers.1.down.weight" in bundle.tensors
        self._logits = TRUE
        if (plans := bundle.manifest.forward.plans) is not None:
            assert all((bundle.path / name).exists() for name in plans.files)
            self._logits = TRUE * np.float32(1.0 + error)

    def replay(self) -> Program:
        return self

    def logits(self, tokens: Sequence[int], start: int = 0, size: int = 64) -> Any:
        return self._logits[start : start + len(tokens)]

    def close(self) -> None: ...


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """build(ForwardRecipe(...), error): the manifest; the plans' logits are off by that fraction, in turn."""
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))
    monkeypatch.setattr(random_bundle, "shape_model", lambda *_: SMALL)
    monkeypatch.setattr(random_bundle, "preflight", lambda *_: None)
    monkeypatch.setattr(trial, "Driver", HostDriver)

    def run(forward: ForwardRecipe, *errors: float, target: Target = "sm_90a") -> Manifest:
        tools = Tools(tensorrt_rig.load(), LocalGpu("NVIDIA H200", "9.0"), target)
        monkeypatch.setattr(random_bundle, "find_tools", lambda target: tools)
        turns = list(errors)

        def opened(bundle: Bundle) -> Program:
            with_plans = bundle.manifest.forward.plans is not None
            return Program(bundle, turns.pop(0) if with_plans else 0.0)

        monkeypatch.setattr(check, "_open", opened)
        build_random(RandomSettings("qwen3-8b", tmp_path / "x.ull", target=target, forward=forward))
        assert not turns
        return open_bundle(tmp_path / "x.ull", verify="hashes").manifest

    return run


PAGED = ForwardRecipe(prefill="tensorrt", decode="tensorrt")


@pytest.mark.parametrize("attention", ["paged", "native"])
def test_made_up_weights_become_plans(attention: Any, build: Build, tmp_path: Path) -> None:
    manifest = build(ForwardRecipe(prefill="tensorrt", decode="tensorrt", attention=attention), 0.01)
    plans = manifest.forward.plans
    assert manifest.random_weights and plans is not None and plans.attention == attention
    assert len(plans.files) == (4 if attention == "paged" else 2)
    assert (tmp_path / "x.ull.timing-cache").exists()
    assert not (tmp_path / "x.ull/reference").exists() and not (tmp_path / "x.ull/weights.safetensors").exists()
    assert plans.check is not None and plans.check.cpu_error is None
    assert plans.check.fused_error == pytest.approx(0.01, rel=0.01)


def test_made_up_weights_whose_logits_are_off_are_built_again(build: Build) -> None:
    """Level 3 and level 1 are wrong, level 0 is right."""
    manifest = build(PAGED, 0.9, 0.7, 0.1)
    assert manifest.forward.plans is not None and manifest.forward.plans.check is not None
    assert manifest.forward.plans.check.fused_error == pytest.approx(0.1, rel=0.01)
    first, second = manifest.forward.notes
    assert first.startswith("built again, because with optimisation level 3 the TensorRT plans' logits are 90.0% off")
    assert second.startswith("built again, because with optimisation level 1 ") and "70.0% off our kernels'" in second


def test_sixteen_bits_everywhere_come_before_our_own_kernels(build: Build) -> None:
    manifest = build(PAGED, 0.9, 0.9, 0.9, 0.1)
    assert manifest.forward.plans is not None
    assert sorted(manifest.forward.plans.sixteen_bits) == sorted(
        f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "o", "gate_up", "down")
    )


def test_made_up_weights_without_a_right_plan_are_our_kernels(build: Build, tmp_path: Path) -> None:
    manifest = build(PAGED, 0.9, 0.9, 0.9, 0.9)
    assert manifest.forward.plans is None and manifest.random_weights
    assert "by our own kernels" in manifest.forward.notes[-1]
    assert not (tmp_path / "x.ull/weights.safetensors").exists()
    assert not (tmp_path / "x.ull.timing-cache").exists()


def test_where_our_kernels_do_not_run_there_is_nothing_to_fall_back_on(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an sm_89 nothing is compared; plans that do not repeat themselves are wrong by themselves."""
    monkeypatch.setattr(Program, "logits", lambda self, tokens, start=0, size=64: np.random.default_rng().random(9))
    native = ForwardRecipe(prefill="tensorrt", decode="tensorrt", attention="native")
    with pytest.raises(BuildError, match="other logits each time; our own kernels do not run on this GPU"):
        build(native, 0.0, 0.0, 0.0, 0.0, target="sm_89")
    assert not (tmp_path / "x.ull").exists()


@pytest.mark.parametrize("stored", ["fp8", "bf16"])
def test_made_up_weights_keep_the_size_of_what_they_multiply(stored: Any) -> None:
    linear = SegmentWeights(RandomCheckpoint(SMALL), Precision(weights=stored)).linear("layers.0.gate_up")
    rows = linear.rows.astype(np.float32) * (1.0 if linear.scales is None else linear.scales[:, None])
    assert np.isfinite(rows).all() and rows.shape == (192, 64)
    assert 0.8 < float(np.sqrt((rows**2).sum(axis=1).mean())) < 1.2
    again = SegmentWeights(RandomCheckpoint(SMALL), Precision(weights=stored)).linear("layers.0.gate_up")
    np.testing.assert_array_equal(again.rows, linear.rows)
