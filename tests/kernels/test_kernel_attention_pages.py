"""Attention of trees behind a long cache, by warpgroups: bit for bit what the kernels without it make of the round,
whoever takes which splits."""

from dataclasses import replace

import numpy as np
import pytest

from attention_rig import SHAPES, Array, Cache, Shape, Tree, text
from emulation import ON_DEVICE, SANITIZE, KernelError
from ull.gpu.geometry import attention

ONE_HEAD = {bits: Shape(heads=4, kv_heads=1, kv_bits=bits) for bits in (16, 8)}
FEWEST = attention.FEWEST_PAGE_SPLITS * 256  # positions before a round from which on the kernel takes part


def random_tree(count: int, seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return Tree([0, *(int(rng.integers(max(0, i - 5), i)) for i in range(1, count))])


def pair(shape: Shape, context: int, rows: Array, window: int = 0) -> tuple[Cache, Cache]:
    """A cache that holds `rows`, twice: for the kernels without this one, and with it."""
    without = Cache(shape, context=context, window=window)
    without.fill(rows)
    beside = Cache(replace(shape, together=True), context=context, window=window)
    beside.pool[...] = without.pool
    return without, beside


def check(without: Cache, beside: Cache, nodes: Array, base: int, tree: Tree, tile: int) -> None:
    expected = without.round(nodes, base, tree, accept=(), tile=tile)
    beside.partial[...] = np.nan
    np.testing.assert_array_equal(beside.round(nodes, base, tree, accept=(), tile=tile), expected)
    assert np.isfinite(expected.astype(np.float32)).all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("base", [FEWEST - 1, FEWEST, 1500, 2047, 2500])
def test_a_tree_says_the_same(name: str, base: int) -> None:
    shape = SHAPES[name]
    without, beside = pair(shape, 3072, text(shape, base))
    for tile, count in ((64, 64), (64, 33), (32, 32), (16, 16), (16, 9)):
        nodes = text(shape, count, seed=tile)
        check(without, beside, nodes, base, random_tree(count, tile), tile)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("base", [1100, 2048, 2303, 3900, 5000, 17000])
def test_the_grid_does_not_matter(base: int, kv_bits: int) -> None:
    """A lane may have one split or several, spans as a whole or in part; the other kernel's share of the last span."""
    shape = ONE_HEAD[kv_bits]
    without, beside = pair(shape, 17408, text(shape, base))
    nodes, tree = text(shape, 20, seed=3), random_tree(20, base)
    expected = without.copy().round(nodes, base, tree, accept=())
    for page_blocks in (2, 3, 4, 7, 8, 16, 40, 100):
        for blocks in (2, 5, 30):
            cache = beside.copy(page_blocks=page_blocks, blocks=blocks, seed=page_blocks)
            np.testing.assert_array_equal(cache.round(nodes, base, tree, accept=()), expected)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("window", [1, 64, 1000, 1061, 1300, 1900, 2400])
def test_a_sliding_window(window: int, kv_bits: int) -> None:
    """Of which a span, a split or a tile may have a part; what lies before it is not read."""
    shape = ONE_HEAD[kv_bits]
    for base in (1024, 2100, 2290, 2500):
        without, beside = pair(shape, 3072, text(shape, base), window)
        gone = max(0, base - window + 1) // 64
        for cache in (without, beside):
            cache.pool[cache.table[:gone]] = np.nan
        for page_blocks, blocks in ((1, 1), (3, 8), (16, 2)):
            for tile, count in ((16, 16), (64, 50)):
                cache = beside.copy(page_blocks=page_blocks, blocks=blocks)
                check(without, cache, text(shape, count, seed=5), base, random_tree(count, window), tile)


def test_pages_may_lie_anywhere() -> None:
    shape = ONE_HEAD[16]
    without, beside = pair(shape, 2048, text(shape, 1700))
    table = np.random.default_rng(1).permutation(40)[:32].tolist()
    for tile, count in ((16, 12), (64, 64)):
        check(without, beside.copy(table=table), text(shape, count, seed=2), 1700, random_tree(count, 3), tile)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_node_that_is_not_a_number_harms_only_its_descendants(kv_bits: int) -> None:
    shape = ONE_HEAD[kv_bits]
    _, beside = pair(shape, 2048, text(shape, 1300))
    nodes, tree = text(shape, 30, seed=4), random_tree(30, 8)
    expected = beside.copy().round(nodes, 1300, tree, accept=())
    nodes[7] = np.nan
    output = beside.copy().round(nodes, 1300, tree, accept=())
    for node, path in enumerate(tree.paths):
        if 7 in path:
            assert np.isnan(output[node]).all()
        else:
            assert np.array_equal(output[node], expected[node])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SHAPES)
def test_thread_order_does_not_matter(name: str, seed: int) -> None:
    shape = SHAPES[name]
    without, beside = pair(shape, 2048, text(shape, 1400))
    check(without, beside.copy(seed=seed + 1), text(shape, 24, seed=6), 1400, random_tree(24, 1), 32)


@pytest.mark.skipif(ON_DEVICE, reason="the emulator sees what is not ordered")
@pytest.mark.parametrize("base", [1100, 5000])
@pytest.mark.parametrize("name", [name for name in ("tiny", "tiny-e4m3") if name in SHAPES])
def test_all_accesses_are_ordered(name: str, base: int) -> None:
    """Of lanes with one split, and of such that merge a span as they go."""
    shape = replace(SHAPES[name], reports=True)
    without, beside = pair(shape, 5120, text(shape, base))
    for tile, page_blocks in ((16, 8), (64, 4)):
        cache = beside.copy(page_blocks=page_blocks, seed=tile)
        check(without, cache, text(shape, tile, seed=7), base, random_tree(tile, 2), tile)


def test_an_empty_round_does_nothing() -> None:
    _, beside = pair(ONE_HEAD[16], 2048, text(ONE_HEAD[16], 1500))
    before = beside.snapshot()
    beside.round(text(ONE_HEAD[16], 0), 1500, Tree([]), tile=16)
    assert beside.snapshot() == before


@pytest.mark.skipif(SANITIZE or ON_DEVICE, reason="only the emulator raises; the sanitizer ends the process there")
@pytest.mark.parametrize("name", SHAPES)
def test_the_geometry_is_what_the_kernel_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[name]
    _, beside = pair(shape, 2048, text(shape, 1500))
    exact = attention.of_pages

    def short(*arguments: int) -> attention.Geometry | None:
        geometry = exact(*arguments)
        assert geometry is not None
        grid, threads, shared_bytes = geometry
        return grid, threads, shared_bytes - 16

    monkeypatch.setattr(attention, "of_pages", short)
    with pytest.raises(KernelError):
        beside.round(text(shape, 16), 1500, tile=16)


@pytest.mark.parametrize("kv_heads,group", [(8, 4), (8, 8), (1, 8), (8, 1), (1, 128)])
def test_the_grid_has_room_for_all_rows(kv_heads: int, group: int) -> None:
    for kv_bits in (16, 8):
        for tile in (16, 32, 64):
            geometry = attention.of_pages(kv_heads * group, kv_heads, 128, kv_bits, 32768, tile, 132)
            assert geometry is not None
            (x, y), _, shared_bytes = geometry
            assert y == kv_heads and x * attention.PAGE_ROWS >= tile * group
            assert x * y <= max(264, tile * group * kv_heads // 64)
            assert 2 * (shared_bytes + 1024) <= 228 * 1024  # two blocks, and what the system takes of each
            assert attention.of_pages(kv_heads * group, kv_heads, 128, kv_bits, 1024, tile, 132) is None
