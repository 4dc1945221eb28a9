"""Calibration: the range of each FP8 linear's inputs, from what runs through the unquantised model.

Two ways are tried: the largest |x| that was met, so that nothing saturates, and a percentile of |x|, so that a rare
outlier does not coarsen everything else. The smaller loss on the calibration text wins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Calibration
from ull_build.quality.evaluate import EvaluationText, Observation, Predictions, check_quality
from ull_build.quality.measure import Evaluator
from ull_build.tensorrt.weights import input_scales

PERCENTILE = 99.99


def percentile_amax(histogram: NDArray[np.uint64], largest: float, percentile: float = PERCENTILE) -> float:
    """What `percentile` percent of |x| do not exceed: the upper edge of a bin, but not above the `largest`.

    `histogram` [32768] counts |x| by the upper 15 bits of float32.
    """
    reached = np.cumsum(histogram, dtype=np.float64)
    last = int(np.searchsorted(reached, reached[-1] * (percentile / 100.0)))
    edge = np.uint32((last + 1) << 16).view(np.float32)
    return min(float(edge), largest)


def calibrate(
    evaluator: Evaluator,
    linears: list[str],
    observation: Observation,
    calibration_text: EvaluationText,
    evaluation_text: EvaluationText,
    original: Predictions,
    limit: float,
) -> Calibration:
    """Chooses the ranges of the `linears`' inputs and measures what FP8 activations cost with them.

    `observation` is of the calibration text, `original` what the unquantised model predicts on the evaluation text.
    Raises BuildError where perplexity there rises above the `limit`.
    """
    candidates = {
        "max": {name: observation.largest[name] for name in linears},
        "percentile": {
            name: percentile_amax(observation.histograms[name], observation.largest[name]) for name in linears
        },
    }
    losses = {
        method: evaluator.quantised(calibration_text, f"calibrate by {method}", input_scales(amax)).perplexity
        for method, amax in candidates.items()
    }
    method = "percentile" if losses["percentile"] < losses["max"] else "max"
    calibrated = evaluator.quantised(evaluation_text, "evaluate calibrated", input_scales(candidates[method]))
    increase = check_quality(
        original,
        calibrated,
        limit,
        what="with FP8 activations, perplexity",
        remedy="Give a calibration_text that is like what the engine will serve, or more calibration_tokens. ",
    )
    return Calibration(
        text=calibration_text.name,
        tokens=len(calibration_text.tokens),
        method="percentile" if method == "percentile" else "max",
        percentile=PERCENTILE if method == "percentile" else None,
        losses=losses,
        amax=candidates[method],
        perplexity=calibrated.perplexity,
        perplexity_increase=increase,
        top1_agreement=original.agreement(calibrated),
    )
