"""Runs models over texts: perplexity and top-1 agreement against the original weights, and what runs through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.errors import BuildError
from ull_build.source.vocabulary import CheckpointTokenizer

WINDOW = 512  # tokens that are evaluated together; each window starts from an empty context
DEFAULT_TEXT = "ull-build's default text"
DEFAULT_CALIBRATION_TEXT = "ull-build's default calibration text"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TextPurpose:
    """What a text is for: the recipe's key, what people call it, and the one that comes with ull."""

    field: str
    noun: str
    default_name: str
    default_file: str


EVALUATION = TextPurpose("eval_text", "evaluation text", DEFAULT_TEXT, "eval.txt")
CALIBRATION = TextPurpose("calibration_text", "calibration text", DEFAULT_CALIBRATION_TEXT, "calibration.txt")


@dataclass(frozen=True)
class EvaluationText:
    """Tokens cut into windows: `tokens` [windows * window] int32, every window begins with the sequence's prefix."""

    name: str
    tokens: NDArray[np.int32]
    window: int
    field: str = EVALUATION.field  # of the recipe

    @property
    def first_window(self) -> list[int]:
        return [int(token) for token in self.tokens[: self.window]]

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


@dataclass(frozen=True)
class Observation:
    """What ran through a model. By linear (see `quantised_inputs`, and lm_head): `histograms` uint64 [32768] of its
    inputs' |x|, by the upper 15 bits of float32, and the `largest`. By layer, "layers.N.kv": `keys_values`
    float32 [2 * kv_heads], each head's largest |key| as it is cached, then |value|.
    """

    histograms: Mapping[str, NDArray[np.uint64]]
    largest: Mapping[str, float]
    keys_values: Mapping[str, NDArray[np.float32]]


def read_text(
    path: Path | None, tokenizer: CheckpointTokenizer, max_tokens: int, context: int, purpose: TextPurpose = EVALUATION
) -> EvaluationText:
    """Tokenizes the text at `path` (None: the default one), at most `max_tokens` tokens in windows of equal length.

    Raises BuildError when the text cannot be read or is shorter than two tokens.
    """
    name = purpose.default_name if path is None else path.name
    try:
        source = resources.files("ull_build") / "data" / purpose.default_file if path is None else path
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{purpose.noun} {path} cannot be read as UTF-8: {error}", field=purpose.field) from error
    prefix = tokenizer.sequence_prefix()
    ids = tokenizer.encode(text)
    window = min(WINDOW, context, len(prefix) + len(ids))
    body = window - len(prefix)
    if body < 1 or window < 2:
        raise BuildError(
            f"{purpose.noun} {name} gives {len(ids)} tokens in windows of {window}, too few to measure anything; "
            "use a longer text, or skip the measurement with --no-eval",
            field=purpose.field,
        )
    windows = max(1, min(len(ids) // body, max_tokens // window))
    rows = np.array(ids[: windows * body], dtype=np.int32).reshape(windows, body)
    heads = np.tile(np.array(prefix, dtype=np.int32), (windows, 1))
    return EvaluationText(name, np.concatenate([heads, rows], axis=1).reshape(-1), window, purpose.field)


def predict(
    spec: dict[str, Any],
    text: EvaluationText,
    threads: int,
    progress: Progress | None = None,
    input_scales: Mapping[str, float] | None = None,
    token_scales: bool = False,
) -> Predictions:
    """Runs the model that `spec` describes over the text, layer by layer, by the native core.

    The inputs of the linears in `input_scales` are rounded to E4M3 times their scale; with `token_scales` those of all
    but the lm_head, times one for each token. Raises BuildError when the core refuses the model or its logits are not
    finite.
    """
    scales = None if input_scales is None else dict(input_scales)
    nll, argmax = _run("evaluate", text, spec, text.tokens, text.window, threads, progress, scales, token_scales)
    return Predictions(np.asarray(nll, np.float32), np.asarray(argmax, np.int32))


def observe(spec: dict[str, Any], text: EvaluationText, threads: int, progress: Progress | None = None) -> Observation:
    """Looks at what runs through the model that `spec` describes. Raises BuildError as `predict` does."""
    return Observation(*_run("observe", text, spec, text.tokens, text.window, threads, progress))


def logits(
    spec: dict[str, Any], tokens: Sequence[int], threads: int, input_scales: Mapping[str, float] | None = None
) -> NDArray[np.float32]:
    """The logits after each of a few tokens, [tokens, V], with all weights in memory; `input_scales` as in `predict`.

    Raises BuildError.
    """
    try:
        from ull import _native

        scales = None if input_scales is None else dict(input_scales)
        model = _native.CpuModel(spec, threads=threads, input_scales=scales)
        return np.asarray(model.logits(np.array(tokens, np.int32)), np.float32)
    except ImportError as error:
        raise BuildError("the native core is not built; install ull") from error
    except (ValueError, RuntimeError, MemoryError) as error:
        raise BuildError(f"the model cannot be evaluated: {error}") from error


def _run(name: str, text: EvaluationText, *arguments: Any) -> Any:
    """Calls a function of the native core."""
    try:
        from ull import _native  # late: conversion works where the core is not built

        return getattr(_native, name)(*arguments)
    except ImportError as error:
        raise BuildError("the native core is not built; install ull, or skip the measurement with --no-eval") from error
    except (ValueError, RuntimeError) as error:
        raise BuildError(f"the model cannot be evaluated: {error}", field=text.field) from error


def check_quality(
    original: Predictions,
    quantised: Predictions,
    limit: float,
    what: str = "perplexity",
    remedy: str = "",
    instead: str = 'precision = "bf16"',
) -> float:
    """The increase of perplexity as a fraction, negative when it fell.

    Raises BuildError above the `limit`; the message begins with `what`, `remedy` is one besides the usual ones, and
    `instead` a setting that loses less.
    """
    before, after = original.perplexity, quantised.perplexity
    increase = after / before - 1.0
    if not increase <= limit:
        raise BuildError(
            f"{what} rises from {before:.4f} to {after:.4f}, by {increase:.2%}; the limit is {limit:.2%}. "
            f"{remedy}Use {instead}, or raise max_perplexity_increase if the loss is acceptable",
            field="max_perplexity_increase",
        )
    return increase
