"""Measures what quantisation costs: perplexity and top-1 agreement of the bundle against the original weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.errors import BuildError
from ull_build.vocabulary import CheckpointTokenizer

WINDOW = 512  # tokens that are evaluated together; each window starts from an empty context
DEFAULT_TEXT = "ull-build's default text"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EvaluationText:
    """Tokens cut into windows: `tokens` [windows * window] int32, every window begins with the sequence's prefix."""

    name: str
    tokens: NDArray[np.int32]
    window: int

    @property
    def predictions(self) -> int:
        return len(self.tokens) // self.window * (self.window - 1)


@dataclass(frozen=True)
class Predictions:
    """Per predicted token: negative log-likelihood (nats) of the true token, and the token held most likely."""

    nll: NDArray[np.float32]
    argmax: NDArray[np.int32]

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(self.nll, dtype=np.float64)))

    def agreement(self, other: Predictions) -> float:
        """Share of positions at which both hold the same token most likely."""
        return float(np.mean(self.argmax == other.argmax))


def read_evaluation_text(
    path: Path | None, tokenizer: CheckpointTokenizer, max_tokens: int, context: int
) -> EvaluationText:
    """Tokenizes the text at `path` (None: the default one), at most `max_tokens` tokens in windows of equal length.

    Raises BuildError when the text cannot be read or is shorter than two tokens.
    """
    name = DEFAULT_TEXT if path is None else path.name
    try:
        source = resources.files("ull_build") / "data" / "eval.txt" if path is None else path
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"evaluation text {path} cannot be read as UTF-8: {error}", field="eval_text") from error
    prefix = tokenizer.sequence_prefix()
    ids = tokenizer.encode(text)
    window = min(WINDOW, context, len(prefix) + len(ids))
    body = window - len(prefix)
    if body < 1 or window < 2:
        raise BuildError(
            f"evaluation text {name} gives {len(ids)} tokens in windows of {window}, too few to measure anything; "
            "use a longer text, or skip the measurement with --no-eval",
            field="eval_text",
        )
    windows = max(1, min(len(ids) // body, max_tokens // window))
    rows = np.array(ids[: windows * body], dtype=np.int32).reshape(windows, body)
    heads = np.tile(np.array(prefix, dtype=np.int32), (windows, 1))
    return EvaluationText(name, np.concatenate([heads, rows], axis=1).reshape(-1), window)


def predict(spec: dict[str, Any], text: EvaluationText, threads: int, progress: Progress | None = None) -> Predictions:
    """Runs the model that `spec` describes over the text, layer by layer, by the native core.

    Raises BuildError when the core refuses the model or its logits are not finite.
    """
    try:
        native: Any = importlib.import_module("ull._native")  # late: conversion works where the core is not built
        nll, argmax = native.evaluate(spec, text.tokens, text.window, threads, progress)
    except ImportError as error:
        raise BuildError("the native core is not built; install ull, or skip the measurement with --no-eval") from error
    except (ValueError, RuntimeError) as error:
        raise BuildError(f"the model cannot be evaluated: {error}", field="eval_text") from error
    return Predictions(np.asarray(nll, np.float32), np.asarray(argmax, np.int32))


def check_quality(original: Predictions, quantised: Predictions, limit: float) -> float:
    """The increase of perplexity as a fraction, negative when it fell.

    Raises BuildError above the `limit`.
    """
    before, after = original.perplexity, quantised.perplexity
    increase = after / before - 1.0
    if not increase <= limit:
        raise BuildError(
            f"perplexity rises from {before:.4f} to {after:.4f}, by {increase:.2%}; the limit is {limit:.2%}. "
            'Use precision = "bf16", or raise max_perplexity_increase if the loss is acceptable',
            field="max_perplexity_increase",
        )
    return increase
