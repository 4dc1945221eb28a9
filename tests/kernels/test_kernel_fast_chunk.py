"""Prompts read fast, with e4m3 activations: the kernels against NumPy, and what must not change a token's bits."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
from chunk_rig import (
    NAMES,
    ChunkLayer,
    Prompt,
    kernels_of,
    normed_in_a_chunk,
    quantised_in_a_chunk,
    quantised_tokens,
)
from layer_rig import model_of
from linear_rig import Layer
from ull.bundle import Precision
from ull.gpu.params import OK

MODELS = ("odd", "even", "held")  # of FP8 weights: ragged dimensions, whole stages, an odd number of blocks


def layer_of(name: str, model: str, seed: int = 1, reports: bool = False) -> ChunkLayer:
    with_bias = name == "qkv" or model == "odd"
    return ChunkLayer(name, model, seed, with_bias, reports, fast=True)


def rows_of(count: int, columns: int, seed: int) -> NDArray[np.float16]:
    """Tokens of very different sizes."""
    generator = np.random.default_rng(seed)
    sizes = 2.0 ** generator.integers(-20, 12, (count, 1))
    return (generator.standard_normal((count, columns)) * sizes).astype(np.float16)


@pytest.mark.parametrize(("count", "columns"), [(1, 32), (2, 341), (133, 352), (512, 96)])
def test_activations_are_quantised_token_by_token(count: int, columns: int) -> None:
    rows = rows_of(count, columns, seed=count)
    rows[count // 2, :] = 0
    codes, scales = quantised_in_a_chunk(kernels_of("odd", fast=True), rows, seed=3)
    expected, expected_scales = quantised_tokens(rows)
    np.testing.assert_array_equal(codes[:count], expected)
    np.testing.assert_array_equal(scales[:count], expected_scales)
    assert (codes[count:] == 0xFF).all() and np.isnan(scales[count:]).all(), "rows beyond the tokens were written"


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_token_that_is_no_number_is_none_afterwards_and_spoils_no_other(spoilt: float) -> None:
    rows = rows_of(4, 64, seed=5)
    clean, _ = quantised_in_a_chunk(kernels_of("odd", fast=True), rows)
    rows[1, 7] = spoilt
    codes, scales = quantised_in_a_chunk(kernels_of("odd", fast=True), rows)
    assert not np.isfinite(scales[1])
    np.testing.assert_array_equal(np.delete(codes[:4], 1, axis=0), np.delete(clean[:4], 1, axis=0))


@pytest.mark.parametrize("model", MODELS)
def test_a_norm_leaves_what_it_leaves_else_quantised(model: str) -> None:
    layer, count = Layer("qkv", model, seed=2, with_bias=False), 61
    exact, _ = normed_in_a_chunk(kernels_of(model), layer, count, fast=False)
    codes, scales = normed_in_a_chunk(kernels_of(model, fast=True), layer, count, fast=True, seed=1)
    expected, expected_scales = quantised_tokens(exact[:count])
    np.testing.assert_array_equal(codes[:count], expected)
    np.testing.assert_array_equal(scales[:count], expected_scales)
    assert (codes[count:] == 0xFF).all() and np.isnan(scales[count:]).all()


@pytest.mark.parametrize(
    ("name", "model"), [(name, model) for model in ("odd", "even") for name in NAMES] + [("gate_up", "held")]
)
def test_a_layer_multiplies_what_was_quantised(name: str, model: str) -> None:
    layer, count = layer_of(name, model), 133
    rows = layer.run(count, seed=2)
    expected, tolerance = layer.expected(count)
    assert (np.abs(rows[:count] - expected) <= tolerance).all()
    assert layer.is_unwritten(rows[count:]), "rows beyond the chunk's tokens were written"


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_wherever_it_stands(name: str) -> None:
    """Alone, in another tile, and beside other tokens."""
    layer = layer_of(name, "even", seed=4)
    whole = layer.run(300)
    for first, count in ((0, 1), (70, 129), (299, 1)):
        part = layer_of(name, "even", seed=4)
        part.inputs = layer.inputs[first : first + count]
        part.residual[:count] = layer.residual[first : first + count]
        np.testing.assert_array_equal(part.run(count)[:count], whole[first : first + count])


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_layer_is_the_same_in_every_order_of_threads(name: str) -> None:
    """Where the kernel reports its loads and stores: no stage is filled anew, and no sum read, too early."""
    if emulation.ON_DEVICE or emulation.SANITIZE:
        pytest.skip("the emulator alone sees it, and not beside AddressSanitizer")
    model = "held" if name == "gate_up" else "even"
    expected = layer_of(name, model, seed=7).run(9)
    watched = layer_of(name, model, seed=7, reports=True)
    for seed in range(2):
        np.testing.assert_array_equal(watched.run(9, seed), expected)


def test_quantising_is_the_same_in_every_order_of_threads() -> None:
    if emulation.ON_DEVICE or emulation.SANITIZE:
        pytest.skip("the emulator alone sees it, and not beside AddressSanitizer")
    kernels, rows, layer = kernels_of("odd", True, fast=True), rows_of(3, 341, 8), Layer("qkv", "odd", 2, False)
    for seed in range(3):
        np.testing.assert_array_equal(quantised_in_a_chunk(kernels, rows, seed)[0][:3], quantised_tokens(rows)[0])
        normed = normed_in_a_chunk(kernels, layer, 3, fast=True, seed=seed)[0][:3]
        np.testing.assert_array_equal(normed, normed_in_a_chunk(kernels_of("odd", fast=True), layer, 3, True)[0][:3])


# ---- a whole model ---------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[dict[str, Any], Precision, bool, tuple[int, ...]]] = {
    "small": ({}, Precision(), False, ()),
    "fp8 pages, a window, QK norm, biases, taps": (
        {"qk_norm": True, "windows": [0, 70, 300], "head_dim": 64, "heads": 6},
        Precision(kv="fp8"),
        True,
        (0, 2, 3),
    ),
}
if emulation.SANITIZE:  # compiling a model's kernels with sanitizers takes long
    SHAPES = {"small": SHAPES["small"]}
TOKENS = [int(token) for token in np.random.default_rng(9).integers(0, 112, 512)]


@functools.cache
def prompt(name: str, fast: bool) -> Prompt:
    changes, precision, biases, taps = SHAPES[name]
    return Prompt(model_of(**changes), precision, biases, taps, fast=fast)


def left_by(rig: Prompt, base: int, cuts: list[int], seed: int = 0) -> dict[str, bytes]:
    """What a prompt behind `base` positions leaves, read in chunks that end there."""
    rig.begin()
    for first, end in itertools.pairwise([0, *cuts]):
        rig.read(TOKENS[first:end], base + first, whole=True, seed=seed + first)
        assert (rig.result().status, rig.result().count) == (OK, 0)
    return rig.left()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_leaves_the_same_bits_however_it_is_cut(name: str) -> None:
    """Keys, values and taps of every layer. They are near those of exact prefill, and not the same."""
    rig, base, end = prompt(name, True), 331, 205
    left = left_by(rig, base, [end])
    assert left_by(rig, base, [1, 77, 180, end], seed=3) == left
    exact = left_by(prompt(name, False), base, [end])
    assert left.keys() == exact.keys() and left != exact
    if name == "small":
        pages = [np.frombuffer(held["KV pages"], ml_dtypes.bfloat16).astype(np.float32) for held in (left, exact)]
        assert 0 < np.linalg.norm(pages[0] - pages[1]) < 0.05 * np.linalg.norm(pages[1])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_a_chunk_draws_the_same_however_its_prompt_is_cut(name: str) -> None:
    """Token, log-probabilities and logits, and what goes on behind them. They are near those behind exact prefill."""
    rig, base, end = prompt(name, True), 331, 205
    left = left_by(rig, base, [end])
    found = []
    for cuts in ([], [180], [77, end - 1]):
        left_by(rig, base, cuts)
        before = cuts[-1] if cuts else 0
        rig.draw(TOKENS[before:end], base + before, whole=True, seed=5)
        found.append(rig.drawn())
        assert rig.left() == left
    assert found[1] == found[0] and found[2] == found[0]
    exact = prompt(name, False)
    exact.begin()
    exact.draw(TOKENS[:end], base, whole=True)
    logits = [np.frombuffer(one["logits"], np.float32) for one in (found[0], exact.drawn())]
    assert 0 < np.linalg.norm(logits[0] - logits[1]) < 0.2 * np.linalg.norm(logits[1])
