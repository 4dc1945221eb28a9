"""Geometry of attention (`ull/kernels/attention/attention_plan.cuh`) and of the KV commit, and the scratch
that they share.

The results do not depend on the grid: the blocks of a kv head divide rows and positions among themselves by what a
round turns out to need.
"""

from __future__ import annotations

from ull.gpu.geometry.linear import ALONE_BYTES, everywhere
from ull.gpu.launch import tile_of as _tile_of
from ull.gpu.params import PAGE_TOKENS, SPLIT_TOKENS, TREE_TOKENS

Geometry = tuple[tuple[int, int], int, int]  # grid, threads, bytes of shared memory

THREADS = 256
COMMIT_THREADS = 128
PAGE_ROWS = 64  # `kPageRows` and `kFewestPageSplits` of attention_plan.cuh
FEWEST_PAGE_SPLITS = 4
SPAN_SPLITS = 8  # `kSpanSplits`
_MOST_WIDE = 8  # the largest tile of which two blocks fit; wider rounds have `ull_attention_pages`
_M_TILE = 16  # rows of a tensor core product


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_bits: int,
    context: int,
    tile: int,
    multiprocessors: int,
    wide: bool = False,
    warpgroups: bool = False,
) -> Geometry:
    """`ull_attention_{tile}`: one wave of blocks, at least as many per kv head as its rows need.

    `wide`: two of them on each multiprocessor. Behind a long cache each has half as many splits to take one after
    another, and while one computes the other's are on their way. `warpgroups`: `Forward.tree_products`.
    """
    most = (2 if wide else 1) * multiprocessors // kv_heads
    if tile == 1:
        blocks = max(1, min(splits(context), most))
        return (blocks, kv_heads), THREADS, _bytes_of_one(heads // kv_heads, head_dim, kv_bits)
    rows = tile * (heads // kv_heads)
    few = warpgroups and 16 <= tile <= 32 and kv_heads * _parts(rows, _M_TILE) <= 132  # `AttentionShared::kFewRows`
    part_rows = 16 if rows <= 16 or few else 32 if rows <= 32 or tile == 8 else 64
    step_rows = 16 if few or tile == 8 else 32
    useful = splits(context) * _parts(rows, _M_TILE)
    blocks = max(_parts(rows, part_rows), min(useful, most))
    nbytes = _shared_bytes(part_rows, step_rows, head_dim, kv_bits, tile)
    if few:
        nbytes = max(nbytes, ALONE_BYTES)
    if few or (tile == 8 and not wide):  # on every multiprocessor: see linear.py
        return (everywhere(blocks * kv_heads, multiprocessors), 1), THREADS, nbytes
    return (blocks, kv_heads), THREADS, nbytes


def tile_of(tokens: int) -> int:
    """The variant of `ull_attention_{tile}` for up to so many tokens."""
    return 1 if tokens == 1 else _tile_of(tokens)


def wide_from(kv_heads: int, multiprocessors: int) -> int:
    """Positions before a round from which on a lane of one wave has more than one split, so that more lanes help."""
    return SPLIT_TOKENS * max(1, multiprocessors // kv_heads)


def may_be_wide(
    heads: int, kv_heads: int, head_dim: int, kv_bits: int, context: int, tile: int, multiprocessors: int
) -> bool:
    """Whether rounds of `tile` get that far within the context, and two blocks fit on a multiprocessor."""
    _, _, nbytes = attention(heads, kv_heads, head_dim, kv_bits, context, tile, multiprocessors)
    fits = tile <= _MOST_WIDE and nbytes < ALONE_BYTES
    return fits and context > wide_from(kv_heads, multiprocessors)


def of_pages(
    heads: int, kv_heads: int, head_dim: int, kv_bits: int, context: int, tile: int, multiprocessors: int
) -> Geometry | None:
    """`ull_attention_pages` before `ull_attention_{tile}`: two blocks on each multiprocessor, at least as many per kv
    head as its rows need. None where no round leaves it enough splits.
    """
    parts, most = _parts(tile * (heads // kv_heads), PAGE_ROWS), (context - 1) // SPLIT_TOKENS
    if most < FEWEST_PAGE_SPLITS:
        return None
    blocks = max(parts, min(parts * most, 2 * multiprocessors // kv_heads))
    return (blocks, kv_heads), THREADS, tile_ring_bytes(head_dim) + PAGE_ROWS * _head_row_bytes(head_dim, kv_bits)


def tile_ring_bytes(head_dim: int) -> int:
    """`TileRing` of tiles.cuh: four slots for the keys or the values of a tile, f16, and two barriers of each."""
    return 4 * (2 * PAGE_TOKENS * head_dim + 2 * 8)


def commit(kv_heads: int, layers: int) -> Geometry:
    """`ull_commit`: a block per kv head and layer."""
    return (kv_heads, layers), COMMIT_THREADS, 80  # the accepted nodes


def splits(context: int) -> int:
    """Most splits of positions: `AttentionParams.splits`."""
    return _parts(context, SPLIT_TOKENS)


def table_pages(context: int) -> int:
    """Entries of the page table on the device: it is read by whole splits."""
    return splits(context) * (SPLIT_TOKENS // PAGE_TOKENS)


def partial_bytes(heads: int, head_dim: int, context: int) -> int:
    """`AttentionParams.partial`: what splits yield before they are merged; one buffer serves all layers."""
    return 4 * heads * splits(context) * TREE_TOKENS * (head_dim + 2)


def counter_count(heads: int) -> int:
    """`AttentionParams.counters` of 32 bits; zero before the first launch, and left so by each."""
    return heads * TREE_TOKENS // _M_TILE


def tree_bytes(kv_heads: int, head_dim: int, kv_bits: int) -> int:
    """One layer's `tree_keys`, and as much for its `tree_values`."""
    return kv_heads * TREE_TOKENS * head_dim * kv_bits // 8


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def _row_bytes(elements: int, products: int) -> int:
    """`padded_row_bytes` of kv_format.cuh."""
    wanted = 64 if products == 2 else 16
    return _parts(2 * elements - wanted, 128) * 128 + wanted


def _head_row_bytes(head_dim: int, kv_bits: int) -> int:
    """A query, key or value as f16, in the steps in which keys are taken."""
    return _row_bytes(head_dim, 2 if head_dim % 64 != 0 else 32 // kv_bits)


def _shared_bytes(part_rows: int, step_rows: int, head_dim: int, kv_bits: int, tile: int) -> int:
    """`AttentionShared` of attention_plan.cuh: of a block's rows so many, of those under way together so many."""
    products = 32 // kv_bits
    head_row = _head_row_bytes(head_dim, kv_bits)
    tree_scores = 4 * (tile + (8 if tile % 16 == 0 else 0))
    row_statistics = 8 * 4 + 8 * 4 + 4 * 4 + 4  # maxima and sums of 8 halves, corrections of 4 tiles, maximum
    return (
        SPLIT_TOKENS * head_dim * kv_bits // 8  # a split's values
        + (part_rows + 2 * tile) * head_row
        + step_rows * (_row_bytes(SPLIT_TOKENS, products) + tree_scores + row_statistics)
        + part_rows * (2 * 8 + 4 * head_dim)
        + tile * TREE_TOKENS
        + 4 * (tile + 16)
        + 8 * 4  # a barrier for each page of values
        + 8
        + 76  # whether this block merges; its plan and share
    )


def _bytes_of_one(group: int, head_dim: int, kv_bits: int) -> int:
    """`AttentionShared<1>` of attention_one.cuh."""
    products = 32 // kv_bits
    step_rows = 8 if group <= 8 else 16
    rows = _parts(group, step_rows) * step_rows
    row_statistics = 8 * 4 + 8 * 4 + 4 * 4 + 4  # as below
    before_values = (
        2 * head_dim * kv_bits // 8  # the token's own key and value
        + rows * (_head_row_bytes(head_dim, kv_bits) + 2 * 8 + 4 * head_dim)
        + step_rows * (_row_bytes(SPLIT_TOKENS, products) + row_statistics)
        + 8 * 4  # a barrier for each page of values
        + 8  # whether this block merges
    )
    return _parts(before_values, 128) * 128 + SPLIT_TOKENS * head_dim * kv_bits // 8
