"""Whether a GPU's f16 activations hold what runs through a model, and how its MLPs are scaled so that they do.

Our kernels keep what goes into a linear as f16, silu(gate) * up times MLP_SCALE, and read keys and values of the cache
as f16. What is larger than f16 holds would saturate, and the output would be wrong without a sign of it. The CPU
executor, which measures a build's loss, computes in float32 and cannot see it.

An MLP is scaled further where it has to be (see `ull_build.weights.mlp_scale`). Other activations cannot be scaled, and
a model that has too large ones is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ull.bundle import MLP_SCALE, ActivationRange
from ull.errors import BuildError
from ull_build.progress import Reporter
from ull_build.quality.evaluate import EvaluationText, Observation

F16_MAX = 65504.0
MARGIN = 4.0  # room for activations of other texts, as a factor
MOST_EXPONENT = 40  # of a scale: the row scales stay far from the ends of float32

_PLACES = {"qkv": "attention norm", "o": "attention", "gate_up": "MLP norm", "lm_head": "final norm"}


def check_activations(observation: Observation, text: EvaluationText, reporter: Reporter) -> ActivationRange:
    """What a GPU has to hold and how its MLPs are scaled to hold MARGIN times that.

    `observation` is of the `text`, by the unquantised model. Tells the `reporter` of scales, and of what has less room
    than MARGIN. Raises BuildError naming the layer where something does not fit at all.
    """
    scaled: dict[str, int] = {}
    shares: dict[str, float] = {}  # of what f16 holds
    for name, largest in _activations(observation):
        limit = F16_MAX
        if name.endswith(".down"):
            exponent = _needed_exponent(largest, F16_MAX / MLP_SCALE)
            limit *= math.ldexp(1 / MLP_SCALE, exponent)
            if exponent > 0:
                scaled[name] = exponent
                reporter.note(
                    f"{_described(name)} reach {largest:.6g}; kept as f16 in units of 2^{exponent} of the usual"
                )
        shares[name] = largest / limit
        if largest > limit:
            raise BuildError(
                f"{_described(name)} reach {largest:.6g} on {text.name}, more than the {limit:.6g} that a GPU's f16 "
                'holds, so that they would saturate; use target "cpu", which computes in float32',
                field="target",
            )
        if largest * MARGIN > limit:
            reporter.note(
                f"warning: {_described(name)} reach {largest:.6g} on {text.name}, and a GPU's f16 holds {limit:.6g}: "
                "larger ones on another text would saturate"
            )
    worst = max(shares, key=lambda name: shares[name])
    return ActivationRange(
        text=text.name, tokens=len(text.tokens), largest_share=shares[worst], largest_at=worst, scaled=scaled
    )


def _needed_exponent(largest: float, limit: float) -> int:
    """The least k from 0 to MOST_EXPONENT with MARGIN * largest <= limit * 2^k, or the most."""
    wanted = math.ceil(math.log2(MARGIN * largest / limit)) if largest > 0 else 0
    return min(max(0, wanted), MOST_EXPONENT)


def _activations(observation: Observation) -> Iterator[tuple[str, float]]:
    """Name and largest |x| of everything that our kernels keep or read as f16."""
    yield from observation.largest.items()
    for name, largest in observation.keys_values.items():
        layer = name.removesuffix(".kv")
        for kind, part in zip(("keys", "values"), np.split(largest, 2), strict=True):
            yield f"{layer}.{kind}", float(part.max())


def _described(name: str) -> str:
    """An activation in words: "layers.3: its attention values"."""
    layer, _, kind = name.rpartition(".")
    if kind in ("keys", "values"):
        return f"{layer}: attention {kind}"
    return f"{layer + ': ' if layer else ''}{_PLACES.get(kind, 'MLP')} outputs (inputs of {kind})"
