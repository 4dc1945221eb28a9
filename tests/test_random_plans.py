"""Benchmark bundles with plans of made-up weights, built on the double of TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorrt_rig
from device_bundles import write_stubs
from ull.bundle import Model, Precision, Rope, open_bundle
from ull_build import kernels, random_bundle
from ull_build.local_gpu import LocalGpu
from ull_build.random_bundle import RandomSettings, build_random
from ull_build.recipe import ForwardRecipe
from ull_build.tensorrt.random_weights import RandomWeights
from ull_build.tensorrt.staged import Tools

SMALL = Model("qwen3", 64, 2, 2, 1, 32, 96, 300, 300, 128, 1e-6, False, True, Rope(10000.0), [0, 0])  # with QK norms


@pytest.mark.parametrize("attention", ["paged", "native"])
def test_made_up_weights_become_plans(attention: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(tensorrt_rig.load(), LocalGpu("NVIDIA H200", "9.0"))
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))
    monkeypatch.setattr(random_bundle, "shape_model", lambda *_: SMALL)
    monkeypatch.setattr(random_bundle, "find_tools", lambda target: tools)
    monkeypatch.setattr(random_bundle, "watch_plans", lambda bundle: bundle.manifest)  # needs a GPU
    forward = ForwardRecipe(prefill="tensorrt", decode="tensorrt", attention=attention)
    build_random(RandomSettings("qwen3-8b", tmp_path / "x.ull", forward=forward))
    manifest = open_bundle(tmp_path / "x.ull", verify="hashes").manifest
    plans = manifest.forward.plans
    assert manifest.random_weights and plans is not None and plans.attention == attention
    assert len(plans.files) == (4 if attention == "paged" else 2)
    assert (tmp_path / "x.ull.timing-cache").exists()


@pytest.mark.parametrize("stored", ["fp8", "bf16"])
def test_made_up_weights_keep_the_size_of_what_they_multiply(stored: Any) -> None:
    linear = RandomWeights(SMALL, Precision(weights=stored)).linear("layers.0.gate_up")
    rows = linear.rows.astype(np.float32) * (
        1.0 if linear.scales is None else linear.scales.astype(np.float32)[:, None]
    )
    assert np.isfinite(rows).all() and rows.shape == (192, 64)
    assert 0.3 < float(np.sqrt((rows**2).sum(axis=1).mean())) < 3.0
