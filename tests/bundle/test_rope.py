"""The rotary embedding's frequencies, and the tables of cosines and sines that the executors get."""

import math

import msgspec
import numpy as np
import pytest

from checkpoints import make_config
from ull.bundle import Model, Rope, attention_factor, inverse_frequencies
from ull.gpu.memory import rope_table
from ull_build.source.architecture import parse_config
from ull_build.tensorrt.native import rope_tables

YARN = Rope(10000.0, "yarn", 16.0, None, None, 64, 1.2773, 8.0, 2.0)


def reference_frequencies(rope: Rope, head_dim: int) -> list[float]:
    """The formulas of transformers' `modeling_rope_utils` in float64, one pair at a time."""
    result = []
    if rope.kind == "yarn":
        turns = [rope.original_context / (beta * 2 * math.pi) for beta in (rope.beta_fast, rope.beta_slow)]
        first, last = (head_dim * math.log(turn) / (2 * math.log(rope.theta)) for turn in turns)
        first, last = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
        last += 0.001 if first == last else 0
    for pair in range(head_dim // 2):
        frequency = rope.theta ** (-2 * pair / head_dim)
        if rope.kind == "linear":
            frequency /= rope.factor
        elif rope.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            low, high = rope.low_frequency_factor, rope.high_frequency_factor
            if wavelength > rope.original_context / low:
                frequency /= rope.factor
            elif wavelength >= rope.original_context / high:
                smooth = (rope.original_context / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        elif rope.kind == "yarn":
            kept = 1 - min(max((pair - first) / (last - first), 0), 1)
            frequency = frequency / rope.factor * (1 - kept) + frequency * kept
        result.append(frequency)
    return result


@pytest.mark.parametrize("head_dim", [2, 12, 64, 80, 128])
@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=10000.0),
        Rope(theta=1e6),
        Rope(theta=10000.0, kind="linear", factor=4.0),
        Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        Rope(10000.0, "llama3", 32.0, 1.0, 4.0, 64),
        Rope(1e6, "yarn", 4.0, None, None, 32768, 1.1386, 32.0, 1.0),
        YARN,
    ],
    ids=lambda rope: f"{rope.kind}-{rope.theta:g}",
)
def test_inverse_frequencies(rope: Rope, head_dim: int) -> None:
    got = inverse_frequencies(rope, head_dim)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference_frequencies(rope, head_dim), rtol=3e-6)


def test_the_attention_factor_is_one_but_for_yarn() -> None:
    assert attention_factor(YARN) == 1.2773
    assert attention_factor(Rope(10000.0, "linear", 4.0)) == 1.0


def test_both_tables_carry_the_attention_factor() -> None:
    plain: Model = parse_config(make_config(), {}).model
    model = msgspec.structs.replace(plain, rope=YARN)
    angles = (np.arange(40, dtype=np.float32)[:, None] * inverse_frequencies(YARN, 12)).astype(np.float64)
    cosine, sine = 1.2773 * np.cos(angles), 1.2773 * np.sin(angles)
    np.testing.assert_allclose(rope_table(model, 40), np.stack([cosine, sine], -1), atol=2e-7)
    for table, expected in zip(rope_tables(model, 40), (cosine, sine), strict=True):
        np.testing.assert_allclose(table, expected, atol=2e-7)
