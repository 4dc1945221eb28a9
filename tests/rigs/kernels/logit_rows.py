"""Rows of logits that samplers may get wrong: ties, zeros of either sign, extremes."""

import numpy as np
from numpy.typing import NDArray

KINDS = ("normal", "wide", "narrow", "ties", "few", "zeros", "equal", "rising", "peak", "huge")


def rows_of(rng: np.random.Generator, kind: str, rows: int, vocabulary: int) -> NDArray[np.float32]:
    """[rows, vocabulary] of one of the KINDS."""
    normal = rng.standard_normal((rows, vocabulary))
    logits = {
        "normal": lambda: normal * 2,
        "wide": lambda: normal * 20,
        "narrow": lambda: normal * 0.01,
        "ties": lambda: np.round(normal * 2),
        "few": lambda: rng.choice([-3.0, -0.0, 0.0, 1.0], (rows, vocabulary)),
        "zeros": lambda: rng.choice([-0.0, 0.0], (rows, vocabulary)),
        "equal": lambda: np.full((rows, vocabulary), -7.25),
        "rising": lambda: np.sort(normal * 3),
        "peak": lambda: normal - 100 * (np.arange(vocabulary) != rng.integers(vocabulary)),
        "huge": lambda: normal * 1e30,
    }[kind]()
    return logits.astype(np.float32)
