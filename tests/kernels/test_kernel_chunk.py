"""The kernels of a chunk of a prompt against those of rounds, bit for bit, and against NumPy, in the emulator."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulation
from attention_rig import Cache, Shape, text
from chunk_rig import (
    ATTENTION_SOURCES,
    NAMES,
    ChunkLayer,
    Prompt,
    attended_by_rounds,
    attended_in_a_chunk,
)
from emulation import aligned, pointer
from layer_rig import model_of
from linear_rig import MODELS
from ull.bundle import Precision
from ull.gpu.geometry import chunk
from ull.gpu.memory import CHUNK
from ull.gpu.params import CHUNK_TILE, OK, PAGE_TOKENS, SKIPPED, SPLIT_TOKENS, ChunkProbeParams


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_has_the_bits_of_rounds(name: str, model: str) -> None:
    layer = ChunkLayer(name, model, seed=1, with_bias=name == "qkv" or model == "odd")
    count = 133
    rows = layer.run(count, seed=2)
    np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
    assert layer.is_unwritten(rows[count:]), "rows beyond the chunk's tokens were written"


SHAPES: dict[str, tuple[dict[str, Any], Precision, bool, tuple[int, ...]]] = {
    "small": ({}, Precision(), False, ()),
    "fp8 pages, a window, QK norm, biases": (
        {"qk_norm": True, "windows": [0, 70, 300], "head_dim": 64, "heads": 6},
        Precision(kv="fp8"),
        True,
        (),
    ),
    "16 bits, with taps": ({"hidden": 96, "intermediate": 200}, Precision(weights="bf16"), False, (0, 2, 3)),
}


@functools.cache
def prompt(name: str, reports: bool = False, context: int = 1024) -> Prompt:
    changes, precision, biases, taps = SHAPES[name]
    return Prompt(model_of(**changes, context=context), precision, biases, taps, reports)


TOKENS = [int(token) for token in np.random.default_rng(9).integers(0, 112, 512)]


@pytest.mark.parametrize("count", [205, 70])
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_leaves_the_same_bits_in_chunks_and_in_rounds(name: str, count: int) -> None:
    """Behind positions that are there, from the middle of a page on: keys, values and taps of every layer.

    Of 70 tokens o and down leave sums of slices.
    """
    rig = prompt(name)
    tokens, base = TOKENS[:count], 331
    rig.begin()
    rig.read(tokens, base, whole=False)
    expected = rig.left()
    rig.begin()
    untouched = rig.left()
    rig.read(tokens, base, whole=True, seed=3)
    assert rig.left() == expected != untouched
    assert (rig.result().sequence, rig.result().status, rig.result().count) == (1, OK, 0)


@pytest.mark.parametrize("count", [205, 70, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_a_chunk_draws_what_a_round_of_its_last_token_would(name: str, count: int) -> None:
    """Token and log-probabilities, logits, and what goes on behind them. Of 70 tokens down leaves sums of slices."""
    rig = prompt(name)
    found = []
    for whole in (False, True):
        rig.begin()
        rig.draw(TOKENS[:count], 331, whole, seed=5)
        found.append((rig.drawn(), rig.left()))
    assert found[1] == found[0]
    assert any(found[0][0]["logits"]) and any(found[0][0]["residual"])


@pytest.mark.parametrize("name", SHAPES)
def test_a_chunk_that_is_skipped_draws_nothing(name: str) -> None:
    rig = prompt(name)
    rig.begin()
    rig.cancel()
    before = {region: memory.tobytes() for region, memory in rig.memory.items()}
    rig.draw(TOKENS[:70], 331, whole=True)
    assert (rig.result().status, rig.result().count) == (SKIPPED, 0)
    changed = {region for region, memory in rig.memory.items() if memory.tobytes() != before[region]}
    assert changed <= {"round", "state", CHUNK}  # what begin and the end of a round write


@pytest.mark.parametrize("name", SHAPES)
def test_behind_a_long_cache_chunks_and_rounds_leave_the_same_bits(name: str) -> None:
    """There rounds have a kernel of their own for what lies in the pages, and blocks of a chunk share it out."""
    rig, left = prompt(name, context=1536), []
    for whole, multiprocessors in ((False, 3), (True, 3), (True, 12)):
        rig.begin()
        parts = rig.memory["attention parts"].tobytes()
        rig.read(TOKENS[:90], 1131, whole, multiprocessors=multiprocessors)
        left.append(rig.left())
        assert (rig.memory["attention parts"].tobytes() == parts) == (whole and multiprocessors == 3)
    assert left[0] == left[1] == left[2]
    assert rig.launched["ull_attention_pages"] == 2 * rig.model.layers


@pytest.mark.parametrize(("base", "count"), [(0, 21), (2, 1), (3, 3), (13, 7), (15, 18), (61, 4), (64, 16)])
@pytest.mark.parametrize("name", ["small", "fp8 pages, a window, QK norm, biases"])
def test_keys_and_values_of_any_place_go_to_the_pages(name: str, base: int, count: int) -> None:
    """By fours and sixteens of positions, which begin before the chunk's or end behind them."""
    rig = prompt(name)
    left = []
    for whole in (False, True):
        rig.begin()
        rig.read(TOKENS[:count], base, whole, seed=count)
        left.append(rig.left())
    assert left[0] == left[1]


@pytest.mark.parametrize("count", [1, 64, 128, 129, 512])
def test_a_chunk_of_any_length_has_the_bits_of_rounds(count: int) -> None:
    layer = ChunkLayer("down", "even", seed=3, with_bias=True)
    rows = layer.run(count)
    np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
    assert layer.is_unwritten(rows[count:])


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_that_is_skipped_is_not_multiplied(name: str) -> None:
    layer = ChunkLayer(name, "even", seed=3, with_bias=False)
    assert all(layer.is_unwritten(layer.run(0, multiprocessors=chip)) for chip in (3, 132))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["o", "down"])
def test_few_tokens_are_multiplied_by_all_blocks(name: str, model: str) -> None:
    """Each takes a part of the slices, and the norm behind them adds these: the same bits."""
    layer = ChunkLayer(name, model, seed=8, with_bias=model == "odd")
    for seed, count in enumerate((1, 70, 128, 129)):
        rows = layer.run(count, seed, apart=True)
        np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
        assert layer.is_unwritten(rows[count:])


@pytest.mark.parametrize("flaw", [0, 1])
def test_the_probe_sees_products_that_do_not_add_alike(flaw: int) -> None:
    differences = aligned(1, np.uint32, 0)
    params = ChunkProbeParams(differences=pointer(differences), seed=5, rounds=3, flaw=flaw)
    grid, threads, shared_bytes = chunk.probe(2)
    kernels = emulation.build(["chunk_probe.cu"])
    kernels.run("ull_chunk_probe", grid=grid, threads=threads, shared_bytes=shared_bytes, params=params)
    flawed = 2 * 2 * 3 * 32 * (8 + 128)  # outputs, of both kinds of chains, of the rows whose operand is another
    assert differences[0] == 0 if flaw == 0 else flawed / 2 < differences[0] <= flawed


# ---- attention -------------------------------------------------------------------------------------------------------

SMALL = Shape(sources=ATTENTION_SOURCES)
ATTENTION_SHAPES = {
    "nine query heads": replace(SMALL, heads=9, kv_heads=1),
    "three query heads, e4m3, norms": replace(SMALL, heads=6, head_dim=64, kv_bits=8, qk_norm=True),
    "96, e4m3, six query heads": replace(SMALL, heads=6, kv_heads=1, head_dim=96, kv_bits=8),
    "128, one query head, norms": replace(SMALL, heads=2, head_dim=128, qk_norm=True),
    "128, e4m3, five query heads": replace(SMALL, heads=5, kv_heads=1, head_dim=128, kv_bits=8),
}
WATCHED_SHAPES = {
    "16 bits": replace(SMALL, heads=3, kv_heads=1, reports=True),
    "e4m3": replace(SMALL, heads=4, kv_heads=1, kv_bits=8, reports=True),
}
if emulation.SANITIZE:  # compiling a model's kernels with sanitizers takes long
    ATTENTION_SHAPES = {name: ATTENTION_SHAPES[name] for name in ("96, e4m3, six query heads",)}


def cache_of(shape: Shape, base: int, count: int, window: int = 0) -> tuple[Cache, Any]:
    """A cache of `base` positions on shuffled pages, and the rows of the tokens up to `base` + `count`.

    What lies before the window of all tokens is no number: nobody may read it.
    """
    context = -(-(base + count) // SPLIT_TOKENS) * SPLIT_TOKENS
    table = np.random.default_rng(3).permutation(context // PAGE_TOKENS)
    cache, rows = Cache(shape, context, window, table=[int(page) for page in table]), text(shape, base + count)
    cache.fill(rows[:base])
    if window > 0:
        cache.pool[cache.table[: max(0, base - window + 1) // PAGE_TOKENS]] = np.nan
    return cache, rows


CHUNKS = [  # base, tokens, window
    *((0, 1, 0), (0, 70, 0), (1, 64, 0), (63, 65, 17), (64, 130, 100), (255, 3, 0), (256, 129, 0)),
    *((331, 205, 300), (300, 512, 0), (2100, 150, 0), (2300, 20, 2200), (4097, 70, 0)),
]


@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_attention_of_a_chunk_has_the_bits_of_rounds(name: str) -> None:
    """At borders of pages, splits and spans of splits."""
    for seed, (base, count, window) in enumerate(CHUNKS):
        cache, rows = cache_of(ATTENTION_SHAPES[name], base, count, window)
        expected = attended_by_rounds(cache, rows[base:], base)
        output = attended_in_a_chunk(cache, rows[base:], base, seed)
        assert np.array_equal(output[:count].view(np.uint16), expected.view(np.uint16)), (base, count, window)
        assert np.isnan(output[count:]).all(), "rows beyond the chunk's tokens were written"


SHARED = [  # base, tokens, window, blocks that each part of the rows may have
    *((766, 2, 0, 2), (768, 40, 0, 2), (1000, 70, 0, 3), (1023, 1, 0, 4), (2100, 20, 0, 3), (2048, 65, 2000, 4)),
    *((2303, 150, 0, 2), (1900, 30, 1100, 3), (3000, 100, 0, 2), (4600, 24, 0, 4), (700, 100, 0, 2)),
]


def parts_of(shape: Shape, count: int) -> int:
    """Of a kv head's rows, each of as many as a block has."""
    return -(-count * (shape.heads // shape.kv_heads) // chunk.ATTENTION_ROWS)


@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_blocks_that_share_a_chunks_splits_out_leave_the_bits_of_rounds(name: str) -> None:
    """Of lanes that begin within a span or with one, of rows that look at nothing of a lane's, beside parts of one."""
    shape = ATTENTION_SHAPES[name]
    most, _ = chunk.attention(shape.heads, shape.kv_heads, shape.head_dim)[0]
    for seed, (base, count, window, lanes) in enumerate(SHARED):
        cache, rows = cache_of(shape, base, count, window)
        expected = attended_by_rounds(cache, rows[base:], base)
        blocks = min(lanes * parts_of(shape, count), most)
        assert blocks >= 2 * parts_of(shape, count)
        multiprocessors, is_shared = blocks * shape.kv_heads, base + count > 3 * SPLIT_TOKENS
        output = attended_in_a_chunk(cache, rows[base:], base, seed, multiprocessors, is_shared)
        assert np.array_equal(output[:count].view(np.uint16), expected.view(np.uint16)), (base, count, window, lanes)
        assert np.isnan(output[count:]).all(), "rows beyond the chunk's tokens were written"


@pytest.mark.parametrize(("base", "window"), [(0, 0), (331, 0), (331, 290)])
@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_attention_of_a_chunk_matches_the_reference(name: str, base: int, window: int) -> None:
    count = 40
    cache, rows = cache_of(ATTENTION_SHAPES[name], base, count, window)
    cache.fill(rows)
    output = attended_in_a_chunk(cache, rows[base:], base)
    for i in range(0, count, 13):
        np.testing.assert_allclose(output[i], cache.reference(rows[: base + i + 1]), atol=6e-3, rtol=2e-3)


@pytest.mark.parametrize("name", WATCHED_SHAPES)
def test_attention_of_a_chunk_is_the_same_in_every_order_of_threads(name: str) -> None:
    """Where the kernel reports its loads and stores, and nothing of the predecessor's is read early."""
    if emulation.ON_DEVICE or emulation.SANITIZE:
        pytest.skip("the emulator alone sees it, and not beside AddressSanitizer")
    for base, count, window, lanes in ((0, 70, 0, 1), (200, 100, 30, 1), (800, 50, 0, 2)):
        shape = WATCHED_SHAPES[name]
        cache, rows = cache_of(shape, base, count, window)
        expected = attended_by_rounds(cache, rows[base:], base)
        blocks = lanes * parts_of(shape, count) * shape.kv_heads
        for seed in range(5):
            output = attended_in_a_chunk(cache, rows[base:], base, seed, blocks, is_shared=lanes > 1)
            assert np.array_equal(output[:count].view(np.uint16), expected.view(np.uint16)), (base, seed)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_token_that_is_no_number_spoils_those_that_see_it_alone(kv_bits: int) -> None:
    """It shares tiles with tokens before it and with some behind its window. Behind the chunk pages hold no numbers."""
    base, count, window, spoilt = 70, 90, 40, 11
    cache, rows = cache_of(replace(SMALL, kv_bits=kv_bits), base, count, window)
    clean = cache.copy()
    clean.fill(rows)
    expected = attended_in_a_chunk(clean, rows[base:], base)[:count]
    rows[base + spoilt] = np.nan
    cache.fill(rows)
    output = attended_in_a_chunk(cache, rows[base:], base)[:count]
    sees = np.zeros(count, bool)
    sees[spoilt : spoilt + window] = True
    assert np.isnan(output[sees]).all()
    assert np.array_equal(output[~sees].view(np.uint16), expected[~sees].view(np.uint16))


def test_a_chunk_that_is_skipped_is_not_attended() -> None:
    cache, rows = cache_of(SMALL, 10, 1)
    assert np.isnan(attended_in_a_chunk(cache, rows[:0], 10)).all()


# ---- clusters of two blocks of rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "model", "blocks"), [("gate_up", "held", 1), ("o", "long", 9)])
def test_a_block_without_rows_brings_its_half_of_the_activations(name: str, model: str, blocks: int) -> None:
    """The last cluster's second one, where the blocks of rows are odd in number."""
    layer = ChunkLayer(name, model, seed=5, with_bias=False)
    assert -(-layer.packed_rows // chunk.BLOCK_ROWS) == blocks
    assert chunk.product(layer.packed_rows, 3)[0][1] == blocks + 1
    count = 130
    rows = layer.run(count, seed=6)
    np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
    assert layer.is_unwritten(rows[count:])


HALVED = [
    *[(name, model, 133, False, "all") for name in NAMES for model in MODELS],
    *[(*layer, 133, False, "last") for layer in (("qkv", "even"), ("o", "long"), ("gate_up", "odd"))],
    ("o", "long", 300, False, "last"),
    ("o", "long", 100, True, "last"),
    ("down", "even", 128, True, "all"),
]


@pytest.mark.parametrize(("name", "model", "count", "apart", "which"), HALVED)
def test_blocks_of_64_rows_have_the_bits_of_rounds(name: str, model: str, count: int, apart: bool, which: str) -> None:
    """They take the place of half as many that would leave half of the chip idle: of all blocks, or of the last."""
    layer = ChunkLayer(name, model, seed=4, with_bias=name == "qkv" or model == "odd")
    clusters, tiles = -(-layer.packed_rows // (chunk.CLUSTER * chunk.BLOCK_ROWS)), -(-count // CHUNK_TILE)
    expected = range(1) if which == "all" else range(1, clusters)
    # By the multiprocessors of a chip.
    whole = {chip: chunk.whole_clusters(layer.packed_rows, chip, apart)[tiles - 1] for chip in range(2, 300)}
    rows = layer.run(count, 5, apart, next(chip for chip, found in whole.items() if found in expected))
    np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
    assert layer.is_unwritten(rows[count:])


def test_a_cluster_takes_turns_in_every_order_of_threads() -> None:
    """Where the kernel reports its loads and stores: a stage is filled anew when both blocks have read it."""
    if emulation.ON_DEVICE or emulation.SANITIZE:
        pytest.skip("the emulator alone sees it, and not beside AddressSanitizer")
    expected = ChunkLayer("gate_up", "held", seed=7, with_bias=False).run(9)
    watched = ChunkLayer("gate_up", "held", seed=7, with_bias=False, reports=True)
    for seed in range(2):
        np.testing.assert_array_equal(watched.run(9, seed), expected)
    np.testing.assert_array_equal(watched.run(9, multiprocessors=4), expected)  # in blocks of 64 rows
    apart = ChunkLayer("down", "even", seed=7, with_bias=False, reports=True)
    np.testing.assert_array_equal(apart.run(9, apart=True), ChunkLayer("down", "even", seed=7, with_bias=False).run(9))
