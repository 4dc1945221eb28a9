"""Attention and KV commit against a float64 reference, and against themselves: bits never depend on how a token came to
be computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emulation
from attention_rig import SHAPES, Array, Cache, Shape, Tree, filled, text
from emulation import ON_DEVICE, SANITIZE, KernelError
from ull.gpu.geometry import attention

TINY = Shape()
ROWS = 300
BORDERS = (0, 1, 63, 64, 65, 191, 255, 256, 257, 290)

# A lane has one pair of dimensions, or two.
TOGETHER = {"64": Shape(head_dim=64), "96, e4m3": Shape(head_dim=96, kv_bits=8), "128": Shape(head_dim=128)}

# A tree whose longest path is 0, 2, 5, 6, 9, 10, with siblings around and between its nodes.
BRANCHING = Tree([0, 0, 0, 1, 1, 2, 5, 5, 3, 6, 9, 9, 10])
PATH = (0, 2, 5, 6, 9, 10)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


def stepwise(cache: Cache, rows: Array, base: int) -> Array:
    return np.concatenate([cache.round(rows[i : i + 1], base + i) for i in range(len(rows))])


@pytest.mark.parametrize("base", [3, 700])
@pytest.mark.parametrize("name", TOGETHER)
def test_outputs_where_warpgroups_take_them_are_the_same(name: str, base: int) -> None:
    """Of one split, and of several that are merged."""
    rows = text(TOGETHER[name], base + 64)
    start = filled(Cache(TOGETHER[name], context=1024), rows[:base])
    together = Cache(replace(TOGETHER[name], together=True), context=1024)
    together.pool[...] = start.pool
    for tile, count in ((64, 64), (64, 41), (32, 32), (32, 18), (16, 16), (16, 9), (8, 8)):
        some = rows[base : base + count]
        expected = start.copy().round(some, base, tile=tile)
        np.testing.assert_array_equal(together.round(some, base, tile=tile, accept=()), expected)


def branching_rows(shape: Shape, path_rows: Array) -> Array:
    """qkv of BRANCHING's nodes: those of PATH are given, the others tell something else."""
    rows = text(shape, len(BRANCHING.parents), seed=99)
    rows[list(PATH)] = path_rows
    return rows


def test_matches_the_reference(shape: Shape) -> None:
    rows = text(shape, ROWS)
    cache = filled(Cache(shape), rows[: ROWS - 9])
    output = cache.round(rows[ROWS - 9 :], ROWS - 9)
    for i in range(9):
        np.testing.assert_allclose(output[i], cache.reference(rows[: ROWS - 8 + i]), atol=6e-3, rtol=2e-3)


@pytest.mark.parametrize("base", BORDERS)
def test_a_token_is_the_same_alone_in_a_chain_and_in_a_tree(shape: Shape, base: int) -> None:
    rows = text(shape, base + len(PATH))
    start = filled(Cache(shape), rows[:base])
    alone = stepwise(start.copy(), rows[base:], base)
    np.testing.assert_allclose(alone[0], start.reference(rows[: base + 1]), atol=6e-3, rtol=2e-3)
    for tile in (8, 16, 32, 64):
        assert np.array_equal(alone, start.copy().round(rows[base:], base, tile=tile)), tile
    tree = start.copy()
    output = tree.round(branching_rows(shape, rows[base:]), base, BRANCHING, accept=PATH)
    assert np.array_equal(alone, output[list(PATH)])
    # What the tree left in the pages is what decoding would have left.
    following = text(shape, 1, seed=7)
    chain = start.copy()
    chain.round(rows[base:], base)
    assert np.array_equal(chain.round(following, base + 6), tree.round(following, base + 6))


def check_one(start: Cache, row: Array, base: int, **changes: Any) -> None:
    """The kernel for one token gives what the one for trees gives, and leaves the pages as that and the commit do."""
    one, tree = start.copy(**changes), start.copy(**changes)
    expected = tree.round(row, base, tile=8)
    assert np.array_equal(one.round(row, base, tile=1), expected, equal_nan=True)
    assert one.snapshot() == tree.snapshot()


@pytest.mark.parametrize("base", (*BORDERS, 511, 512, 1000, 2048))
def test_one_token_has_a_kernel_of_its_own(shape: Shape, base: int) -> None:
    rows = text(shape, base + 1)
    start = Cache(shape, context=base // 512 * 512 + 512, blocks=3, seed=base)
    start.fill(rows[:base])
    check_one(start, rows[base:], base)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("base", [200, 1000, 2047, 5000])
def test_one_token_on_any_grid(base: int, kv_bits: int) -> None:
    """Spans of splits merged here and there: a block may have one split, a few, or all."""
    shape = Shape(heads=4, kv_heads=1, kv_bits=kv_bits)
    rows = text(shape, base + 1)
    start = Cache(shape, context=5120)
    start.fill(rows[:base])
    for blocks in (1, 2, 3, 5, 7, 16, 30):
        check_one(start, rows[base:], base, blocks=blocks, seed=blocks)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize(("heads", "base"), [(4, 17000), (70, 2500)])
def test_more_splits_than_are_merged_together(heads: int, base: int, kv_bits: int) -> None:
    """And more rows; how many that is differs between the kernels."""
    shape = Shape(heads=heads, kv_heads=1, kv_bits=kv_bits)
    rows = text(shape, base + 1)
    start = Cache(shape, context=17408)
    start.fill(rows[:base])
    expected = start.reference(rows)
    for blocks, window in ((2, 0), (9, 0), (70, 0), (70, base - 400)):
        check_one(start, rows[base:], base, blocks=blocks, window=window, seed=blocks)
    np.testing.assert_allclose(start.round(rows[base:], base, tile=1)[0], expected, atol=6e-3, rtol=2e-3)


@pytest.mark.parametrize("window", [1, 7, 64, 100, 256, 257])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_one_token_with_a_sliding_window(window: int, kv_bits: int) -> None:
    shape = Shape(kv_bits=kv_bits)
    for base in (0, 5, 63, 96, 256, 330, 700):
        rows = text(shape, base + 1)
        start = Cache(shape, context=1024, window=window)
        start.fill(rows[:base])
        for blocks in (1, 3):
            check_one(start, rows[base:], base, blocks=blocks)


@pytest.mark.skipif(SANITIZE, reason="compiling a model's kernels with sanitizers takes long")
@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize(
    ("heads", "head_dim", "qk_norm"), [(8, 128, False), (9, 64, True), (20, 96, True), (70, 32, False)]
)
def test_one_token_of_many_heads_that_share(heads: int, head_dim: int, qk_norm: bool, kv_bits: int) -> None:
    """Up to 8 rows, up to 16, and more than are under way together or are prepared together."""
    shape = Shape(heads=heads, kv_heads=1, head_dim=head_dim, qk_norm=qk_norm, kv_bits=kv_bits)
    for base in (0, 70, 700, 1279):
        rows = text(shape, base + 1)
        start = Cache(shape, context=1280)
        start.fill(rows[:base])
        for blocks in (1, 3):
            check_one(start, rows[base:], base, blocks=blocks)


def test_one_token_that_is_not_a_number(shape: Shape) -> None:
    """Its page holds what it would hold; nothing before it has changed, and another token can be put in its place."""
    rows = text(shape, 71)
    start = filled(Cache(shape), rows[:70])
    check_one(start, np.full_like(rows[70:], np.nan), 70)
    failed, fresh = start.copy(), start.copy()
    failed.round(np.full_like(rows[70:], np.nan), 70, tile=1)
    assert np.array_equal(failed.round(rows[70:], 70, tile=1), fresh.round(rows[70:], 70, tile=1))
    assert failed.snapshot() == fresh.snapshot()
    huge = rows[70:] * 1e7
    check_one(start, huge, 70)


def test_one_token_in_any_order_of_threads(shape: Shape) -> None:
    rows = text(shape, 300)
    start = filled(Cache(shape), rows[:299])
    for seed in range(4):
        check_one(start, rows[299:], 299, seed=seed)


@pytest.mark.skipif(ON_DEVICE, reason="the emulator sees what is not ordered")
@pytest.mark.timeout(1800)  # kernels that report their accesses take long to compile
@pytest.mark.parametrize("name", [name for name in ("tiny", "tiny-e4m3") if name in SHAPES])
def test_one_token_reads_early_what_is_there(name: str) -> None:
    """Pages and what begin wrote, but not qkv; and nothing of it where embed does not wait for begin to end."""
    rows = text(SHAPES[name], 1021)
    sources = ("attention.cu", "commit.cu", emulation.EMULATOR / "early.cu")
    for base in (0, 31, 700, 1020):
        for reports in (False,) if SANITIZE else (True, False):
            cache = Cache(replace(SHAPES[name], reports=reports, sources=sources), context=1536, blocks=3, seed=base)
            cache.fill(rows[:base])
            expected = cache.copy().round(rows[base : base + 1], base, tile=8)
            assert np.array_equal(cache.copy().round(rows[base : base + 1], base, tile=1), expected)

            early = cache.copy()
            early.kernel_of_one = "attend_early"
            if reports:
                with pytest.raises(KernelError, match=r"before wait_for_predecessor\(\), .* which is no constant"):
                    early.round(rows[base : base + 1], base, tile=1)
            else:
                assert np.isnan(early.round(rows[base : base + 1], base, tile=1)).all()

            if reports:
                beside = cache.copy()
                beside.begin_overlaps = True
                with pytest.raises(KernelError, match=r"before wait_for_predecessor\(\), .* which is no constant"):
                    beside.round(rows[base : base + 1], base, tile=1)


@pytest.mark.skipif(ON_DEVICE or SANITIZE, reason="the emulator sees what is not ordered, without sanitizers")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in ("tiny", "tiny-e4m3") if name in SHAPES])
@pytest.mark.parametrize(("count", "tile"), [(5, 8), (12, 16), (40, 64)])
def test_several_tokens_read_early_what_is_there(name: str, count: int, tile: int) -> None:
    """The same of rounds of several nodes; and of a round that has none."""
    rows = text(SHAPES[name], 1060)
    sources = ("attention.cu", "commit.cu", emulation.EMULATOR / "early.cu")
    for base in (0, 31, 700, 1020):
        cache = Cache(replace(SHAPES[name], reports=True, sources=sources), context=1536, blocks=8, seed=base)
        cache.fill(rows[:base])
        beside = cache.copy()
        beside.begin_overlaps = True
        with pytest.raises(KernelError, match=r"before wait_for_predecessor\(\), .* which is no constant"):
            beside.round(rows[base : base + count], base, tile=tile)
        plain = Cache(replace(SHAPES[name], sources=sources), context=1536, blocks=8)
        plain.fill(rows[:base])
        expected = plain.round(rows[base : base + count], base, tile=tile)
        assert np.array_equal(cache.round(rows[base : base + count], base, tile=tile), expected)
        assert len(cache.round(rows[:0], base, tile=tile)) == 0


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("count", [1, 3, 17, 33, 64])
def test_chunks_of_any_size_give_the_same(count: int, kv_bits: int) -> None:
    shape = Shape(kv_bits=kv_bits)
    rows = text(shape, 150)
    whole = Cache(shape)
    expected = np.concatenate([whole.round(rows[i : i + 64], i) for i in range(0, 150, 64)])
    cache = Cache(shape)
    output = np.concatenate([cache.round(rows[i : i + count], i) for i in range(0, 150, count)])
    assert np.array_equal(expected, output)


@pytest.mark.parametrize("base", [60, 250, 1300])
def test_a_wide_tree(base: int) -> None:
    """64 nodes at random: each is what decoding its path gives."""
    shape = Shape(kv_bits=16)
    rng = np.random.default_rng(base)
    tree = Tree([0, *(int(rng.integers(max(0, i - 9), i)) for i in range(1, 64))])
    rows = text(shape, base)
    nodes = text(shape, 64, seed=3)
    start = Cache(shape, context=2048)
    start.fill(rows)
    output = start.copy().round(nodes, base, tree, accept=())
    for node in (0, 1, 31, 62, 63, int(np.argmax(tree.depths))):
        path = nodes[tree.paths[node]]
        assert np.array_equal(output[node], start.copy().round(path, base)[-1]), node
        np.testing.assert_allclose(output[node], start.reference(np.concatenate([rows, path])), atol=6e-3, rtol=2e-3)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("base", [200, 1000, 2047, 5000])
def test_the_grid_does_not_matter(base: int, kv_bits: int) -> None:
    """From one block for everything to more blocks than there is work; spans of splits merged here and there."""
    shape = Shape(heads=4, kv_heads=1, kv_bits=kv_bits)
    start = Cache(shape, context=5120)
    rows = text(shape, base + 20)
    start.fill(rows[:base])
    expected = start.copy().round(rows[base:], base)
    np.testing.assert_allclose(expected[-1], start.reference(rows), atol=6e-3, rtol=2e-3)
    for blocks in (1, 2, 3, 5, 7, 16, 30, 200):
        assert np.array_equal(expected, start.copy(blocks=blocks).round(rows[base:], base)), blocks
        assert np.array_equal(expected[:1], start.copy(blocks=blocks).round(rows[base : base + 1], base)), blocks


def test_pages_may_lie_anywhere(shape: Shape) -> None:
    rows = text(shape, ROWS)
    start = filled(Cache(shape), rows[:290])
    expected = start.copy().round(rows[290:], 290)
    for table in ([7, 6, 5, 4, 3, 2, 1, 0], [4, 11, 2, 9, 0, 14, 12, 1]):
        assert np.array_equal(expected, start.copy(table=table).round(rows[290:], 290))


@pytest.mark.parametrize("window", [1, 7, 64, 100, 256, 257])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_sliding_window(window: int, kv_bits: int) -> None:
    shape = Shape(kv_bits=kv_bits)
    for base in (5, 63, 256, 330, 700):
        rows = text(shape, base + len(PATH))
        start = Cache(shape, context=1024, window=window)
        start.fill(rows[:base])
        alone = stepwise(start.copy(), rows[base:], base)
        np.testing.assert_allclose(alone[-1], start.reference(rows), atol=6e-3, rtol=2e-3)
        assert np.array_equal(alone, start.copy(blocks=1).round(rows[base:], base))
        tree = start.copy().round(branching_rows(shape, rows[base:]), base, BRANCHING, accept=())
        assert np.array_equal(alone, tree[list(PATH)])


def test_pages_before_the_window_are_not_read() -> None:
    rows = text(TINY, 400)
    start = Cache(TINY, window=100)
    start.fill(rows[:390])
    expected = start.copy().round(rows[390:], 390)
    lost = start.copy()
    lost.pool[lost.table[:4]] = np.nan
    assert np.array_equal(expected, lost.round(rows[390:], 390))


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_node_that_is_not_a_number_harms_only_its_descendants(kv_bits: int) -> None:
    shape = Shape(kv_bits=kv_bits)
    rows = text(shape, 266)
    start = filled(Cache(shape), rows[:260])
    nodes = branching_rows(shape, rows[260:])
    expected = start.copy().round(nodes, 260, BRANCHING, accept=())
    bad = [node for node, path in enumerate(BRANCHING.paths) if 1 in path or 7 in path]
    nodes[[1, 7]] = np.nan
    output = start.copy().round(nodes, 260, BRANCHING, accept=())
    good = [node for node in range(len(nodes)) if node not in bad]
    assert set(PATH) <= set(good)
    assert np.array_equal(expected[good], output[good])
    assert np.isnan(output[bad]).all()


def test_large_numbers_saturate(shape: Shape) -> None:
    rows = text(shape, 70) * 1e7
    cache = filled(Cache(shape), rows[:64])
    assert np.isfinite(cache.round(rows[64:], 64).astype(np.float32)).all()


@pytest.mark.parametrize("seed", range(6))
def test_thread_order_does_not_matter(shape: Shape, seed: int) -> None:
    rows = text(shape, 261 + len(PATH))
    start = filled(Cache(shape), rows[:261])
    nodes = branching_rows(shape, rows[261:])
    expected = start.copy(seed=0).round(nodes, 261, BRANCHING, accept=PATH)
    assert np.array_equal(expected, start.copy(seed=seed + 1).round(nodes, 261, BRANCHING, accept=PATH))


@pytest.mark.skipif(ON_DEVICE, reason="the emulator sees what is not ordered")
@pytest.mark.parametrize("base", [0, 700, 1020, 7000])
@pytest.mark.parametrize("name", [name for name in ("tiny", "tiny-e4m3") if name in SHAPES])
def test_all_accesses_are_ordered(name: str, base: int) -> None:
    """Within a split, over several that blocks share or have alone, where the nodes reach into the next one, and over
    more than are merged together."""
    shape = replace(SHAPES[name], reports=True)
    rows = text(shape, base + len(PATH))
    cache = Cache(shape, context=7168, blocks=3, seed=base)
    if base > 0:
        cache.fill(rows[:base])
    nodes = branching_rows(shape, rows[base:])
    for tile in (16, 64):
        output = cache.copy(seed=tile).round(nodes, base, BRANCHING, accept=PATH, tile=tile)
        np.testing.assert_allclose(output[PATH[-1]], cache.reference(rows), atol=6e-3, rtol=2e-3)
    assert np.isfinite(cache.round(rows[base : base + 1], base).astype(np.float32)).all()


def test_an_empty_round_does_nothing() -> None:
    rows = text(TINY, 70)
    cache = filled(Cache(TINY), rows[:65])
    before = cache.snapshot()
    assert cache.end_ns() > 0
    cache.round(rows[:0], 65, Tree([]))
    assert cache.snapshot() == before
    assert cache.end_ns() > 0  # of this round, in a slot of its own
    cache.round(rows[:0], 65, Tree([]), tile=1)
    assert cache.snapshot() == before
    cache.round(rows[65:], 65, accept=())
    assert cache.snapshot() == before


def test_a_commit_changes_nothing_else(shape: Shape) -> None:
    rows = text(shape, 62 + len(PATH))
    cache = filled(Cache(shape), rows[:62])
    before = cache.pool.copy()
    cache.round(branching_rows(shape, rows[62:]), 62, BRANCHING, accept=PATH[:4])
    committed = np.zeros(before.shape[0] * 64, bool)
    committed[[int(cache.table[p // 64]) * 64 + p % 64 for p in range(62, 66)]] = True
    keys, values = cache.stored_tokens(cache.pool)
    keys_before, values_before = cache.stored_tokens(before)
    assert np.array_equal(keys[~committed], keys_before[~committed])
    assert np.array_equal(values[~committed], values_before[~committed])
    for index, node in enumerate(PATH[:4]):
        slot = int(cache.table[(62 + index) // 64]) * 64 + (62 + index) % 64
        for stored, tree in ((keys, cache.tree[0]), (values, cache.tree[1])):
            assert np.array_equal(stored[slot], tree.view(np.uint8).reshape(*tree.shape[:3], -1)[:, :, node])
    following = text(shape, 1, seed=7)
    expected = cache.reference(np.concatenate([rows[:66], following]))
    np.testing.assert_allclose(cache.round(following, 66)[0], expected, atol=6e-3, rtol=2e-3)


@pytest.mark.skipif(SANITIZE or ON_DEVICE, reason="only the emulator raises; the sanitizer ends the process there")
def test_the_geometry_is_what_the_kernel_uses(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = text(shape, 300)
    cache = Cache(shape)
    cache.fill(rows[:290])
    exact = attention._shared_bytes

    def short(*arguments: int) -> int:
        return exact(*arguments) - 16

    monkeypatch.setattr(attention, "_shared_bytes", short)
    monkeypatch.setattr(attention, "ALONE_BYTES", 0)
    exact_of_one = attention._bytes_of_one
    monkeypatch.setattr(attention, "_bytes_of_one", lambda *arguments: exact_of_one(*arguments) - 16)
    for count, tile in ((1, 1), (1, 16), (1, 64), (10, 16), (10, 64)):
        with pytest.raises(KernelError):
            cache.round(rows[290 : 290 + count], 290, tile=tile)


@pytest.mark.parametrize("kv_heads,group", [(8, 4), (8, 8), (1, 8), (8, 1), (1, 128)])
def test_the_grid_has_room_for_all_rows(kv_heads: int, group: int) -> None:
    for tile in (8, 16, 32, 64):
        (x, y), _, shared = attention.attention(kv_heads * group, kv_heads, 128, 16, 32768, tile, 132)
        blocks = x * y
        assert blocks // kv_heads * 64 >= tile * group
        assert blocks <= max(132, tile * group * kv_heads // 64) and shared <= 227 * 1024
        assert blocks == 132 if tile == 8 else blocks % kv_heads == 0  # one for each multiprocessor, or each with work
    (x, y), _, _ = attention.attention(kv_heads, kv_heads, 128, 16, 256, 8, 132)
    assert x * y == kv_heads  # no more blocks than work


def test_for_a_long_cache_two_blocks_share_a_multiprocessor() -> None:
    for tile in (1, 8):
        shape = (32, 8, 128, 16, 32768, tile, 132)
        one, _, shared = attention.attention(*shape)
        two, _, same = attention.attention(*shape, wide=True)
        assert (one, two) == ((16, 8) if tile == 1 else (132, 1), (33, 8))
        assert same == shared and 2 * (shared + 1024) <= 228 * 1024
        assert attention.may_be_wide(*shape)
    assert attention.wide_from(8, 132) == 4096
    assert not attention.may_be_wide(32, 8, 128, 16, 32768, 16, 132)  # has a kernel of its own for such a cache
    assert not attention.may_be_wide(32, 8, 128, 16, 4096, 1, 132)  # no lane ever has a second split
    assert not attention.may_be_wide(128, 1, 128, 16, 1 << 17, 1, 132)  # its rows leave room for one block alone
