"""Models of other kinds than engines/tiny on the driver double: their daemons say what the CPU executor says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
from checkpoints import Tensors, write_checkpoint
from conftest import ROOT
from device_bundles import build_with_stubs, emulated_kernels
from double_daemons import complete, daemons
from ull.bundle import Precision, open_bundle
from ull.client.sync import Client
from ull.spawn import DaemonProcess
from ull_build.build import build
from ull_build.settings import Settings

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "vocab_size": 333,
    "head_dim": 32,
    "max_position_embeddings": 640,
    "use_sliding_window": True,
    "sliding_window": 100,
    "max_window_layers": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any], Precision]] = {
    "QK norm, biases, a window, FP8 pages": ("qwen3", {"attention_bias": True, "head_dim": 64}, Precision(kv="fp8")),
    "biases, a window, an FP8 lm_head, 16-bit pages": ("qwen2", {}, Precision(lm_head="fp8")),
}
TEXT = (ROOT / "engines/tiny/train.py").read_text()
PROMPTS = (TEXT[:330], TEXT[:330] + TEXT[600:790], "x = 1\n" * 20)  # the second behind the cache of the first
CASES: list[dict[str, Any]] = [
    {"speculate": "none"},
    {"speculate": "none", "temperature": 0.8, "top_p": 0.9},
    {"speculate": "suffix", "temperature": 0.4, "max_tree": 16},
]

pytestmark = pytest.mark.timeout(1800)  # every kernel is compiled for the emulator


def decide(tensors: Tensors) -> None:
    """Lets logits lie so far apart that 16-bit activations seldom change which one wins."""
    tensors["lm_head.weight"] *= 4.0


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_says_what_the_cpu_executor_says(tmp_path: Path, kind: str) -> None:
    """Its prompts in chunks and from the cache, its rounds of one token and of trees, its likelihoods of a prompt."""
    architecture, shape, precision = MODELS[kind]
    model = write_checkpoint(tmp_path / "model", architecture, config=SHAPE | shape, tensors=decide)
    limits = {"eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0}

    def settings(target: str) -> Settings:
        return Settings(*(model, tmp_path / f"{target}.ull", "x", target), precision=precision, **limits)

    on_cpu = build(settings("cpu")).path
    assert open_bundle(on_cpu).manifest.model.windows == [0, 100]
    with DaemonProcess(on_cpu) as daemon, Client(daemon.url) as client:
        expected = [[complete(client, prompt, **case) for prompt in PROMPTS] for case in CASES]
        likely = client.generate(PROMPTS[1], max_tokens=0, prompt_logprobs=True).result().prompt_logprobs
    with pytest.MonkeyPatch.context() as patch:
        bundle = build_with_stubs(patch, tmp_path / "kernels", settings("sm_90a"))
    environment = driver_double.environment(emulated_kernels(bundle), multiprocessors=4, launch_ms=0)
    with daemons() as serve:
        daemon = serve(bundle, environment, "--set", "engine.watchdog_ms=120000", "--set", "speculation.adaptive=false")
        with Client(daemon.url) as client:
            for case, said in zip(CASES, expected, strict=True):
                assert [complete(client, prompt, **case) for prompt in PROMPTS] == said
            drafted = client.generate(PROMPTS[2], max_tokens=30, ignore_eos=True, **CASES[2]).result().speculation
            assert drafted is not None and drafted.accepted_tokens > 0
            found = client.generate(PROMPTS[1], max_tokens=0, prompt_logprobs=True).result()
            assert found.usage.prompt_tokens > 4 * 64 and found.usage.cached_tokens > 0
            assert likely is not None and found.prompt_logprobs is not None
            off = np.abs(np.subtract(found.prompt_logprobs[1:], likely[1:]))
            assert np.max(off) < 0.1 and np.median(off) < 0.02  # pages of the other format: 0.37 and 0.07
        assert daemon.stop() == 0
