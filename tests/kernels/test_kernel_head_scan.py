"""The FP8 scan of the lm_head with exact rescoring: the token is the 16-bit head's, whatever the weights."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulation
from head_scan_rig import Draw, Head
from linear_layers import normed
from ull_build.weights.head_scan import scan_rows, sum_error
from ull_build.weights.quantise import scale_rows

VOCABULARY, HIDDEN = 901, 256  # rows: no multiple of a tile, of a slice or of a granule
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 0x1234567890}
WISHES = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "cold": {"temperature": 0.01, "seed": 5},
    "hot": {"temperature": 5.0, "seed": 6},
    "colder than single precision can tell": {"temperature": 1e-38, "seed": 7},
}


def even(rng: np.random.Generator, rows: int = VOCABULARY) -> NDArray[np.float32]:
    return rng.standard_normal((rows, HIDDEN)).astype(np.float32) / 16


def near_ties(rng: np.random.Generator) -> NDArray[np.float32]:
    """A thousand rows that differ from the one that wins in their last bits, as f16 holds them."""
    rows = even(rng)
    best = rng.standard_normal(HIDDEN).astype(np.float32)
    rows[::3] = best * (1 + rng.choice([0, 2.0**-10, -(2.0**-10)], (len(rows[::3]), HIDDEN)))
    return rows


def worst_rounding(rng: np.random.Generator) -> NDArray[np.float32]:
    """Rows whose elements lie halfway between two of e4m3, so that the FP8 copy is as wrong as it can be."""
    codes = rng.integers(0x40, 0x7D, (VOCABULARY, HIDDEN)).astype(np.uint8)
    low, high = (part.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for part in (codes, codes + np.uint8(1)))
    rows: NDArray[np.float32] = (low + high) / 2 * rng.choice([-1.0, 1.0], (VOCABULARY, HIDDEN)).astype(np.float32)
    rows[:, 0] = 448
    return rows / 1024


def scales_apart(rng: np.random.Generator) -> NDArray[np.float32]:
    return even(rng) * np.exp2(rng.integers(-40, 3, (VOCABULARY, 1))).astype(np.float32)


def one_large_element(rng: np.random.Generator) -> NDArray[np.float32]:
    """So that most of a row is below the smallest FP8 number: the copy says next to nothing of it."""
    rows = even(rng) / 100
    rows[:, 17] = rng.choice([-300.0, 300.0], VOCABULARY)
    return rows


WEIGHTS = {
    "even": even,
    "near ties": near_ties,
    "worst rounding": worst_rounding,
    "scales apart": scales_apart,
    "one large element": one_large_element,
    "equal": lambda rng: np.tile(rng.standard_normal(HIDDEN).astype(np.float32), (VOCABULARY, 1)),
    "zeros": lambda _: np.zeros((VOCABULARY, HIDDEN), np.float32),
    "half zeros": lambda rng: even(rng) * (np.arange(VOCABULARY) % 2)[:, None].astype(np.float32),
    "huge": lambda rng: even(rng) * np.float32(1e30),
    "tiny": lambda rng: even(rng) * np.float32(1e-36),
}


def head_of(name: str, seed: int = 0) -> Head:
    rng = np.random.default_rng(seed)
    return Head(WEIGHTS[name](rng), rng.standard_normal(HIDDEN).astype(np.float32))


def agree(head: Head, wish: dict[str, Any], **where: Any) -> tuple[Draw, Draw]:
    """Both ways draw the same token, and what was computed again is what the head says, bit for bit."""
    full, scan = head.draw(wish, scans=False, **where), head.draw(wish, scans=True, **where)
    tokens = np.array(list(scan.exact), np.int64)
    again = np.array(list(scan.exact.values()), np.float32)
    assert np.array_equal(again.view(np.uint32), full.logits[tokens].view(np.uint32))
    assert scan.token == full.token
    return full, scan


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_token_is_the_full_heads(weights: str, wish: str) -> None:
    full, scan = agree(head_of(weights), WISHES[wish])
    assert full.token >= 0
    if weights in ("equal", "zeros"):
        assert len(scan.exact) == VOCABULARY, "nothing tells one row from another but the exact logits and the noise"


@pytest.mark.parametrize("seed", range(4))
def test_seeds_and_positions_change_the_draw_in_both(seed: int) -> None:
    head = head_of("even", seed)
    drawn = {agree(head, SAMPLED | {"seed": seed}, position=3 + 1000 * seed + i)[0].token for i in range(6)}
    assert len(drawn) > 1


@pytest.mark.parametrize(("blocks", "seed"), [(1, 0), (3, 1), (64, 2), (200, 3)])
def test_neither_the_grid_nor_the_order_of_blocks_matters(blocks: int, seed: int) -> None:
    head = head_of("near ties")
    tokens = {agree(head, wish, blocks=blocks, seed=seed)[1].token for wish in (GREEDY, SAMPLED)}
    assert tokens == {head.draw(wish, scans=True).token for wish in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 63, 65, 1025])
def test_any_vocabulary(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    head = Head(even(rng, vocabulary), rng.standard_normal(HIDDEN).astype(np.float32))
    for wish in (GREEDY, SAMPLED):
        agree(head, wish)


@pytest.mark.parametrize("hidden", [32, 288, 1056])
def test_any_width(hidden: int) -> None:
    """Slices of unequal length, and empty ones."""
    rng = np.random.default_rng(hidden)
    rows = rng.standard_normal((515, hidden)).astype(np.float32) / 16
    head = Head(rows, rng.standard_normal(hidden).astype(np.float32))
    for wish in (GREEDY, SAMPLED):
        agree(head, wish)


def test_a_poisoned_residual_is_not_finite_in_both() -> None:
    rng = np.random.default_rng(0)
    residual = rng.standard_normal(HIDDEN).astype(np.float32)
    residual[3] = np.nan
    for wish in (GREEDY, SAMPLED):
        full, _ = agree(Head(even(rng), residual), wish)
        assert full.token == -1


def test_a_logit_that_overflows_is_not_finite_in_both() -> None:
    """Only the scale takes it out of f32's range, in the 16-bit head; all others are small."""
    rng = np.random.default_rng(0)
    rows, residual = even(rng), rng.standard_normal(HIDDEN).astype(np.float32)
    x = normed(residual[None], np.ones(HIDDEN, np.float32), 1e-5)[0].astype(np.float32)
    rows[567] = np.sign(x) * np.float32(3e38)
    head = Head(rows, residual)
    for wish in (GREEDY, SAMPLED):
        full, scan = agree(head, wish)
        assert full.token == -1 and not np.isfinite(full.logits[567]) and 567 in scan.exact


def test_few_rows_are_computed_again() -> None:
    """Of even weights: else there would be no point in it."""
    head = head_of("even")
    assert all(0 < len(head.draw(wish, scans=True).exact) < VOCABULARY // 50 for wish in (GREEDY, SAMPLED))


@pytest.mark.skipif(emulation.ON_DEVICE or emulation.SANITIZE, reason="only the emulator's own build reports accesses")
def test_no_two_blocks_race() -> None:
    """Neither for the list of candidates nor for the end of the round, which is the last block's."""
    rng = np.random.default_rng(2)
    head = Head(near_ties(rng)[:200], rng.standard_normal(HIDDEN).astype(np.float32))
    expected = head.draw(SAMPLED, scans=False).token
    for seed in range(3):
        drawn = head.draw(SAMPLED, scans=True, blocks=3, seed=seed, reports=True)
        assert drawn.token == expected and len(drawn.exact) > 3


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_bounds_that_are_too_small_are_found_out(share: float) -> None:
    """The row that wins is one that the scan underestimates, and the next one it overestimates: by almost all that the
    bounds allow, since the errors lie along the residual."""
    rng = np.random.default_rng(0)
    residual = rng.standard_normal(HIDDEN).astype(np.float32)
    x = normed(residual[None], np.ones(HIDDEN, np.float32), 1e-5)[0].astype(np.float32)
    rows = np.zeros((VOCABULARY, HIDDEN), np.float32)
    rows[:, 0] = 448  # the scale of a row's FP8 copy is 1
    # Elements of 16 and a little: e4m3 rounds 16.9 to 16 and 17.1 to 18.
    rows[700, 1:] = np.sign(x[1:]) * np.float32(16.9)
    rows[300, 1:] = np.sign(x[1:]) * np.float32(16.5)
    rows[300, 1:65] = np.sign(x[1:65]) * np.float32(17.1)
    assert agree(Head(rows, residual), GREEDY)[0].token == 700
    spoilt = Head(rows, residual, lambda bounds: bounds * np.float32(share)).draw(GREEDY, scans=True)
    assert spoilt.token == 300


def test_every_scanned_logit_is_within_its_bound() -> None:
    for name in WEIGHTS:
        head = head_of(name)
        full, scan = agree(head, GREEDY)
        norm = np.linalg.norm(head.normed.astype(np.float64))
        off = np.abs(scan.logits.astype(np.float64) - full.logits.astype(np.float64))
        assert (off <= head.bounds.astype(np.float64) * norm + 2.0**-100).all(), name


@st.composite
def rows_and_vectors(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    columns = draw(st.sampled_from([1, 16, 33, 100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.standard_normal((draw(st.integers(1, 8)), columns)) * np.exp2(rng.integers(-20, 20, columns))
    rows *= np.exp2(draw(st.integers(-60, 60)))
    return rows.astype(np.float32), rng.standard_normal(columns) * np.exp2(rng.integers(-10, 10, columns))


@given(rows_and_vectors(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_the_bound_holds_in_real_numbers(case: tuple[NDArray[np.float32], NDArray[np.float64]], aligned: bool) -> None:
    """Also for the worst vector that there is, along a row's error; and it is no larger than it has to be."""
    rows, x = case
    halves, scales = scale_rows(rows)
    exact = halves.astype(np.float64) * scales.astype(np.float64)[:, None]
    codes, code_scales, bounds = scan_rows(rows)
    scanned = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * code_scales.astype(np.float64)[:, None]
    if aligned and np.any(scanned != exact):
        x = (scanned - exact)[int(np.abs(scanned - exact).sum(axis=1).argmax())]
    norm = np.sqrt(np.square(x).sum())
    sums = sum_error(rows.shape[1]) * ((np.abs(exact) + np.abs(scanned)) @ np.abs(x))  # rounding on top
    assert (np.abs((scanned - exact) @ x) + sums <= bounds * norm * (1 + 1e-12)).all()
    least = np.sqrt(np.square(scanned - exact).sum(axis=1)) + sum_error(rows.shape[1]) * 2.1 * np.sqrt(
        np.square(exact).sum(axis=1)
    )
    assert (bounds <= least * (1 + 1e-6) + 1e-37).all()
