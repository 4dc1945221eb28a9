"""What a build loses, measured on the GPU: for models that the CPU executor would take too long over.

The checkpoint's own weights become a bundle of 16-bit weights that lives as long as the measurement (bf16 is exact
there down to 2^-32 of a row's largest). Both bundles are run by our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import FUSED, WEIGHTS_FILE, Bundle, Manifest, Precision, device_macros
from ull.errors import BuildError
from ull_build.code.kernels import CompiledFile, write_code
from ull_build.local_gpu import open_program, staged_bundle
from ull_build.progress import Reporter
from ull_build.quality.evaluate import EvaluationText, Predictions
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.convert import convert_stage
from ull_build.weights.pack_gpu import GpuPacker

ORIGINAL = Precision(weights="bf16", lm_head="bf16", embedding="bf16", kv="bf16")

Compile = Callable[[Precision], list[CompiledFile]]


def require_bf16(checkpoint: Checkpoint) -> None:
    """Raises BuildError for a checkpoint whose own values the GPU's formats do not hold."""
    if not checkpoint.is_bf16:
        raise BuildError(
            "the GPU holds a checkpoint's own weights in bf16, and this one's are not: measure with evaluate_on cpu",
            field="evaluate_on",
        )


class DeviceEvaluator:
    """Runs the original and the staged weights of a checkpoint over a text. Every method raises GpuError or BuildError.

    `staged`: the manifest of what `staging` holds so far: weights and code of the bundle that is being built.
    """

    def __init__(
        self, checkpoint: Checkpoint, staged: Manifest, staging: Path, compile_for: Compile, reporter: Reporter
    ) -> None:
        self._checkpoint, self._staged, self._staging = checkpoint, staged, staging
        self._compile, self._reporter = compile_for, reporter

    def original(self, text: EvaluationText) -> Predictions:
        """What the unquantised model predicts."""
        directory = self._staging / "original"
        directory.mkdir()
        code, files = write_code(
            self._compile(ORIGINAL), device_macros(self._staged.model, ORIGINAL), directory, self._staged.target
        )
        path = directory / WEIGHTS_FILE
        packer = GpuPacker(ORIGINAL)
        weights, _ = convert_stage("original, for comparison", self._reporter, self._checkpoint, packer, path)
        files = self._staged.files | files | {WEIGHTS_FILE: weights}
        manifest = msgspec.structs.replace(
            self._staged, precision=ORIGINAL, code=code, files=files, speculation=None, forward=FUSED
        )
        return self._run("evaluate original", staged_bundle(directory, manifest), text)

    def quantised(self, text: EvaluationText) -> Predictions:
        """What the staged weights predict."""
        return self._run("evaluate quantised", staged_bundle(self._staging, self._staged), text)

    def read_fast(self, text: EvaluationText) -> Predictions:
        """What they predict behind text that is read fast."""
        bundle = staged_bundle(self._staging, self._staged)
        return self._run("evaluate fast prefill", bundle, text, in_chunks=True)

    def _run(self, title: str, bundle: Bundle, text: EvaluationText, in_chunks: bool = False) -> Predictions:
        program = open_program(bundle, text.window)
        nll: list[NDArray[np.float32]] = []
        argmax: list[NDArray[np.int32]] = []
        try:
            replay = program.replay()
            with self._reporter.stage(title, len(text.tokens), "tokens") as advance:
                for window in text.tokens.reshape(-1, text.window):
                    logits = replay.logits(window.tolist(), in_chunks=in_chunks)[:-1]
                    nll.append(_losses(logits, window[1:]))
                    argmax.append(logits.argmax(axis=1).astype(np.int32))
                    advance(len(window))
        finally:
            program.close()
        return Predictions(np.concatenate(nll), np.concatenate(argmax))


def _losses(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float32]:
    """Negative log-likelihood (nats) of each target under its row of logits [n, V]."""
    if not np.isfinite(logits).all():
        raise BuildError("the model cannot be evaluated on the GPU: a logit is not finite", field="evaluate_on")
    maxima = logits.max(axis=1)
    totals = np.exp(logits - maxima[:, None]).sum(axis=1, dtype=np.float64)
    losses = np.log(totals) + maxima - logits[np.arange(len(targets)), targets]
    return np.asarray(losses, np.float32)
