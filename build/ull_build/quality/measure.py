"""What a build loses: the checkpoint's weights and the bundle's, run over texts by the CPU executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import FastPrefill, Model, Precision, Quality, TensorError, native_spec, read_tensor_file
from ull_build.progress import Reporter
from ull_build.quality.evaluate import EvaluationText, Observation, Predictions, check_quality, logits, observe, predict
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.convert import convert_stage, plan_weights
from ull_build.weights.pack_cpu import ORIGINAL_BF16, ORIGINAL_F32, CpuPacker


def original_precision(checkpoint: Checkpoint) -> Precision:
    """A format that holds the checkpoint's weights without loss."""
    return ORIGINAL_BF16 if checkpoint.is_bf16 else ORIGINAL_F32


def evaluation_bytes(checkpoint: Checkpoint, precision: Precision, on_cpu: bool) -> int:
    """Disk space that an Evaluator takes."""
    plans = [plan_weights(checkpoint, CpuPacker(original_precision(checkpoint)))]
    if not on_cpu:
        plans.append(plan_weights(checkpoint, CpuPacker(precision)))
    return sum(shape.nbytes for plan in plans for shape in plan.values())


class Evaluator:
    """Runs the original and the quantised weights of a checkpoint over texts.

    Each is converted when it is first needed, into `directory`, and removed at the end of the context. `weights` are
    the bundle's own where the CPU executor takes them: complete before the first run of the quantised ones. None: the
    bundle is packed for a GPU, and the same codes are packed once more, or bf16 for f16; FP8 pages get the scales of
    what was observed before. Every method raises BuildError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Model,
        precision: Precision,
        directory: Path,
        weights: Path | None,
        threads: int,
        reporter: Reporter,
    ) -> None:
        self._checkpoint, self._model, self._precision = checkpoint, model, precision
        self._weights, self._reporter = weights, reporter
        self._threads = threads or len(os.sched_getaffinity(0))
        self._original_path = directory / "original.safetensors"
        self._packed_path = directory / "evaluated.safetensors"
        self._keys_values: Mapping[str, NDArray[np.float32]] | None = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in (self._original_path, self._packed_path):
            path.unlink(missing_ok=True)

    def original(self, text: EvaluationText) -> Predictions:
        """What the unquantised model predicts."""
        return self._predict("evaluate original", self._original, text)

    def quantised(
        self, text: EvaluationText, title: str = "evaluate quantised", input_scales: Mapping[str, float] | None = None
    ) -> Predictions:
        """What the quantised weights predict, with FP8 activations where `input_scales` names the linear."""
        return self._predict(title, self._quantised, text, input_scales)

    def read_fast(self, text: EvaluationText) -> Predictions:
        """What the quantised weights predict where every token is read fast."""
        spec, title = self._quantised, "evaluate fast prefill"
        with self._reporter.stage(title, len(text.tokens), "tokens") as advance:
            return predict(spec, text, self._threads, _steps(len(text.tokens), advance), token_scales=True)

    def observe(self, text: EvaluationText) -> Observation:
        """What runs through the unquantised model."""
        spec = self._original  # converted, where need be, in a stage of its own
        with self._reporter.stage("observe activations", len(text.tokens), "tokens") as advance:
            observation = observe(spec, text, self._threads, _steps(len(text.tokens), advance))
        self._keys_values = observation.keys_values
        return observation

    def logits(self, tokens: Sequence[int], input_scales: Mapping[str, float] | None = None) -> NDArray[np.float32]:
        """The quantised weights' logits after each token, [tokens, V], with FP8 activations as in `quantised`."""
        with self._reporter.stage("logits on the cpu", len(tokens), "tokens") as advance:
            found = logits(self._quantised, tokens, self._threads, input_scales)
            advance(len(tokens))
        return found

    @cached_property
    def _original(self) -> dict[str, Any]:
        precision = original_precision(self._checkpoint)
        packer = CpuPacker(precision)
        convert_stage("original, for comparison", self._reporter, self._checkpoint, packer, self._original_path)
        return self._spec(self._original_path, precision.kv)

    @cached_property
    def _quantised(self) -> dict[str, Any]:
        if self._weights is not None:
            return self._spec(self._weights, self._precision.kv)
        packer = CpuPacker(self._precision, self._keys_values)
        convert_stage("packed for the cpu", self._reporter, self._checkpoint, packer, self._packed_path)
        return self._spec(self._packed_path, self._precision.kv)

    def _spec(self, path: Path, kv: str) -> dict[str, Any]:
        return native_spec(self._model, path, read_tensor_file(path), self._model.context, kv)

    def _predict(
        self,
        title: str,
        spec: dict[str, Any],
        text: EvaluationText,
        input_scales: Mapping[str, float] | None = None,
    ) -> Predictions:
        with self._reporter.stage(title, len(text.tokens), "tokens") as advance:
            return predict(spec, text, self._threads, _steps(len(text.tokens), advance), input_scales)


class Predictor(Protocol):
    """Runs a bundle's quantised weights over a text."""

    def quantised(self, text: EvaluationText) -> Predictions:
        """What they predict."""

    def read_fast(self, text: EvaluationText) -> Predictions:
        """What they predict behind text that is read fast: see `ull.bundle.FastPrefill`."""


def measure_quality(
    evaluator: Predictor,
    text: EvaluationText,
    original: Predictions,
    errors: list[TensorError],
    limit: float,
    precision: Precision,
    fast_prefill: bool = False,
) -> Quality:
    """Compares the quantised weights with the `original` ones' predictions. Raises BuildError above the `limit`.

    `precision`: the evaluator's. `fast_prefill`: of prompts that are read fast, too.
    """
    quantised = evaluator.quantised(text)
    increase = check_quality(original, quantised, limit, instead=_what_loses_less(precision))
    quality = Quality(
        eval_text=text.name,
        eval_tokens=text.predictions,
        window=text.window,
        perplexity_original=original.perplexity,
        perplexity_quantised=quantised.perplexity,
        perplexity_increase=increase,
        top1_agreement=original.agreement(quantised),
        limit=limit,
        tensors=errors,
    )
    if not fast_prefill:
        return quality
    read_fast = evaluator.read_fast(text)
    what, instead = "with fast prefill, perplexity", 'forward.prefill = "exact"'
    increase = check_quality(original, read_fast, limit, what, instead=instead)
    loss = FastPrefill(read_fast.perplexity, increase, original.agreement(read_fast))
    return msgspec.structs.replace(quality, fast_prefill=loss)


def _what_loses_less(precision: Precision) -> str:
    """The keys of a recipe that would, of those that it has chosen FP8 for; of none, what always loses least."""
    keys = {"kv": precision.kv, "lm_head": precision.lm_head, "precision": precision.weights}
    chosen = [f'{key} = "bf16"' for key, stored in keys.items() if stored == "fp8"]
    return " or ".join(chosen or ['precision = "bf16"'])


def _steps(total: int, advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """Turns the core's (done, of all) in its own units into advances out of `total`."""
    reported = 0

    def progress(done: int, of_all: int) -> None:
        nonlocal reported
        now = total * done // max(1, of_all)
        advance(now - reported)
        reported = now

    return progress
