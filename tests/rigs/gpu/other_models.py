"""Models of other kinds than engines/tiny, and what a daemon of each is asked: on the driver double and on a chip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import Tensors, write_checkpoint
from double_daemons import complete
from ull.bundle import Precision
from ull.client.sync import Client
from ull_build.settings import Settings

TEXT = (Path(__file__).parents[3] / "engines/tiny/train.py").read_text()
PROMPTS = (TEXT[:330], TEXT[:330] + TEXT[600:790], "x = 1\n" * 20)  # the second behind the cache of the first
DRAFTED: dict[str, Any] = {"speculate": "suffix", "temperature": 0.4, "max_tree": 16}
CASES: list[dict[str, Any]] = [
    {"speculate": "none"},
    {"speculate": "none", "temperature": 0.8, "top_p": 0.9},
    DRAFTED,
]
_SHAPE = {
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


def settings_of(kind: str, directory: Path, target: str) -> Settings:
    """Of an engine of the model for `target`; its checkpoint of random weights is written where it is missing."""
    architecture, shape, precision = MODELS[kind]
    model = directory / "model"
    if not model.exists():
        write_checkpoint(model, architecture, config=_SHAPE | shape, tensors=_decide)
    limits = {"eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0}
    return Settings(*(model, directory / f"{target}.ull", "x", target), precision=precision, **limits)


def _decide(tensors: Tensors) -> None:
    """Lets logits lie so far apart that 16-bit activations seldom change which one wins."""
    tensors["lm_head.weight"] *= 4.0


def said_by(client: Client) -> list[list[int]]:
    """Its completions, of every case and prompt: behind chunks and the cache, in rounds of one token and of trees."""
    return [complete(client, prompt, **case) for case in CASES for prompt in PROMPTS]


def likelihoods(client: Client) -> np.ndarray:
    """Logprobs of the second prompt's tokens but the first."""
    found = client.generate(PROMPTS[1], max_tokens=0, prompt_logprobs=True).result()
    assert found.prompt_logprobs is not None and found.usage.prompt_tokens > 4 * 64
    return np.array(found.prompt_logprobs[1:], np.float64)


def accepted_drafts(client: Client) -> int:
    """How many drafted tokens a completion of the last prompt took."""
    done = client.generate(PROMPTS[2], max_tokens=30, ignore_eos=True, **DRAFTED).result().speculation
    return 0 if done is None else done.accepted_tokens
