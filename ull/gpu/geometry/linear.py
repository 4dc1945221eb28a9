"""Geometry of the linear layers' kernels (`ull/kernels/linear/linear_narrow.cuh`, `linear_wide.cuh`) and of RMSNorm.

The results do not depend on the grid. One block per multiprocessor shares the weights evenly and, where its shared
memory allows, leaves room for a block of the next kernel, which fills its ring meanwhile. Two blocks of one kernel must
not come to lie on one multiprocessor, since all others would wait for it. So every second layer asks for so much that
no second block fits beside its own, which lie on every multiprocessor, though they may have no rows; and of the layer
behind it, whose blocks come when all of those are there, only one fits beside each. Those that ask for more are:

- o and down. But where a norm of its own, a small kernel, stands between o and gate_up, that one's blocks may be on any
  multiprocessor when gate_up's come, and keep one of those away from it. So
- what comes behind a norm: qkv, gate_up and the head, of a chunk that draws too; then down is behind such a layer;
- attention of 16 and 32 tokens by warpgroups, for the small kernel before it; then o is behind that.

Behind a qkv that asks for more, attention of up to 8 tokens lies as though it did: one of its blocks beside each of
qkv's, if no two fit there and its grid has one for every multiprocessor. So o is behind that, too, and leaves room for
the gate_up of a norm.

From 16 tokens on a layer of few rows (qkv, o, down) is split along K as well: it writes the sums of its slices to
`LinearParams.partial`, and `ull_qkv_sum_{tile}` or the next `ull_norm_{tile}` finishes it.
"""

from __future__ import annotations

from ull.bundle import round_up
from ull.gpu.launch import TILES
from ull.gpu.params import SLICES, TREE_TOKENS

Geometry = tuple[tuple[int, int], int, int]  # grid, threads, bytes of shared memory

LINEAR_TILES = (1, 2, 4, *TILES)  # few tokens have variants of their own
NARROW_TILE = 8  # most tokens of linear_narrow.cuh
THREADS = 256
NARROW_BYTES = 110 * 1024 + 768  # two blocks on a multiprocessor
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 * 1024, 1024  # dealt out by 128 bytes; of these the system's for each block
# One of these fits on a multiprocessor, and beside it one of NARROW_BYTES and one of a norm, or one of
# BESIDE_NORM_BYTES and two of a norm.
ALONE_BYTES = 113 * 1024 + 128
BESIDE_NORM_BYTES = NARROW_BYTES - 128
WIDE_BYTES = 224 * 1024
STAGED_LIMIT = 36 * 1024  # most activations that a block of linear_narrow.cuh keeps in shared memory
NORM_CLUSTER = 4  # `kNormCluster` of norm.cu
LINE_WORDS = 32


def tile_of(tokens: int) -> int:
    """The smallest variant of a linear kernel for a tree of `tokens` (1 to 64)."""
    return next(tile for tile in LINEAR_TILES if tile >= tokens)


def is_split(tile: int) -> bool:
    """Whether qkv, o and down leave their sums to another kernel."""
    return tile > NARROW_TILE


def norms_apart(hidden: int, tile: int) -> bool:
    """Whether qkv, gate_up and the head leave RMSNorm to `ull_norm_{tile}`: the activations are too many to stage."""
    return is_split(tile) or round_up(hidden, 32) * 2 * tile > STAGED_LIMIT


def partial_bytes(hidden: int, qkv_width: int) -> int:
    """Size of `LinearParams.partial`, which all layers share."""
    return SLICES * TREE_TOKENS * round_up(max(hidden, qkv_width), 16) * 4


def norm(tile: int) -> Geometry:
    """`ull_norm_{tile}`, where it `norms_apart`: a cluster of blocks per token."""
    return (NORM_CLUSTER * tile, 1), THREADS // NORM_CLUSTER, 64


def qkv(width: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_qkv_{tile}`: `width` rows of queries, keys and values."""
    if is_split(tile):
        return _split(width, tile, multiprocessors, BESIDE_NORM_BYTES)
    return _narrow(width, multiprocessors)


def qkv_sum(width: int, tile: int) -> Geometry:
    """`ull_qkv_sum_{tile}`, for tiles of 16 and more."""
    return (tile, round_up(width, 1024) // 1024), THREADS, 0


def o(hidden: int, tile: int, multiprocessors: int, attention_blocks: int, attention_bytes: int) -> Geometry:
    """`ull_o_{tile}`, behind attention of so many blocks with so much shared memory each."""
    beside_qkv = norms_apart(hidden, tile) and not is_split(tile) and attention_blocks == multiprocessors
    free = MULTIPROCESSOR_BYTES - (ALONE_BYTES + RESERVED_BYTES)
    if beside_qkv and free < 2 * (attention_bytes + RESERVED_BYTES) <= 2 * free:
        return _everywhere(hidden, tile, multiprocessors, NARROW_BYTES)
    return _everywhere(hidden, tile, multiprocessors, _bytes_behind(attention_bytes, tile))


def gate_up(intermediate: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_gate_up_{tile}`: a row tile is eight gate and eight up rows."""
    rows = 2 * round_up(intermediate, 8)
    if is_split(tile):
        return _wide(rows, tile, multiprocessors)
    return _narrow(rows, multiprocessors)


def down(hidden: int, tile: int, multiprocessors: int, gate_up_bytes: int) -> Geometry:
    """`ull_down_{tile}`, behind gate_up, whose blocks have so much shared memory."""
    return _everywhere(hidden, tile, multiprocessors, _bytes_behind(gate_up_bytes, tile))


def head(vocabulary: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_head_{tile}`."""
    if is_split(tile):
        return _wide(vocabulary, tile, multiprocessors)
    return _narrow(vocabulary, multiprocessors)


def medusa_block(hidden: int, heads: int, multiprocessors: int) -> Geometry:
    """`ull_medusa_block`: one layer of all Medusa heads, whose matrices stand one below the other."""
    return _narrow(heads * hidden, multiprocessors)


def medusa_head(rows: int, multiprocessors: int) -> Geometry:
    """`ull_medusa_head`: `rows` of the model's lm_head, or of all heads' own."""
    return _narrow(rows, multiprocessors)


def medusa_start() -> Geometry:
    """`ull_medusa_start`: one block."""
    return (1, 1), THREADS, 32


def eagle_row(entries: int) -> Geometry:
    """`ull_eagle_taps`, `ull_eagle_input` and `ull_dflash_taps`: a block per entry."""
    return (entries, 1), THREADS, 32


def eagle_fc(hidden: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_eagle_fc_{tile}` and `ull_dflash_fc_{tile}`, which are not split."""
    return head(hidden, tile, multiprocessors)


def dflash_kv(rows: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_dflash_kv_{tile}`: `rows` of a layer's keys and values, for tiles of 16 and more."""
    return _split(rows, tile, multiprocessors, BESIDE_NORM_BYTES)


def dflash_store(kv_heads: int, head_dim: int, entries: int) -> Geometry:
    """`ull_dflash_store`: as many threads for each key and value as attention takes."""
    return (entries, round_up(2 * kv_heads * head_lanes(head_dim), THREADS) // THREADS), THREADS, 0


def head_lanes(head_dim: int) -> int:
    """Threads that take a head together: `kHeadLanes` of attention_heads.cuh."""
    return next(lanes for lanes in (4, 8, 16) if head_dim <= 8 * lanes)


def dflash_nodes(rows: int) -> Geometry:
    """`ull_dflash_nodes`: a block per row."""
    return (rows, 1), THREADS, 32


def dflash_markov(rows: int, multiprocessors: int) -> Geometry:
    """`ull_dflash_gate` and `ull_dflash_markov`: `rows` are those of their matrix."""
    return _narrow(rows, multiprocessors)


def alone(geometry: Geometry) -> Geometry:
    """The same with so much shared memory that no two of its blocks fit on a multiprocessor."""
    grid, threads, nbytes = geometry
    return grid, threads, max(nbytes, ALONE_BYTES)


def layers(multiprocessors: int) -> Geometry:
    """`ull_layers_1`: a block on every multiprocessor, with all of its shared memory."""
    return (multiprocessors, 1), THREADS, WIDE_BYTES


def layers_counters(kv_heads: int) -> int:
    """Words of `LayersParams.arrivals`: 128 bytes for each counter (`ull/kernels/persistent/layer_steps.cuh`)."""
    return LINE_WORDS * (2 * kv_heads + SLICES + 2)


def _narrow(rows: int, multiprocessors: int) -> Geometry:
    """`NarrowPlan`."""
    return (min(multiprocessors, _row_tiles(rows)), 1), THREADS, NARROW_BYTES


def _wide(rows: int, tile: int, multiprocessors: int) -> Geometry:
    """`WidePlan` that keeps its sums in registers."""
    blocks = _in_clusters(min(multiprocessors, _row_tiles(rows)), tile)
    return (blocks, 1), THREADS, BESIDE_NORM_BYTES if tile <= 32 else WIDE_BYTES


def _bytes_behind(before: int, tile: int) -> int:
    """Of a block whose kernel comes behind one with blocks of `before`, on every multiprocessor."""
    if before != ALONE_BYTES:
        return ALONE_BYTES
    return BESIDE_NORM_BYTES if is_split(tile) else NARROW_BYTES


def everywhere(blocks: int, multiprocessors: int) -> int:
    """Blocks of a kernel that has work for so many: one on every multiprocessor, but of a tiny model no more."""
    return blocks if 4 * blocks < multiprocessors else max(blocks, multiprocessors)


def _everywhere(rows: int, tile: int, multiprocessors: int, nbytes: int) -> Geometry:
    """A layer whose blocks lie on every multiprocessor, though some may have no rows."""
    if is_split(tile):
        return _split(rows, tile, multiprocessors, nbytes)
    (blocks, _), threads, _ = _narrow(rows, multiprocessors)
    return (everywhere(blocks, multiprocessors), 1), threads, nbytes


def _split(rows: int, tile: int, multiprocessors: int, nbytes: int) -> Geometry:
    """`WidePlan` of a split layer, whose kernel knows into how many parts: a row tile and a slice for each block."""
    return (_in_clusters(min(SLICES * _row_tiles(rows), multiprocessors), tile, SLICES), 1), THREADS, nbytes


def _in_clusters(blocks: int, tile: int, least: int = 1) -> int:
    """From 32 tokens on whole clusters, which `WidePlan` may make of two neighbours, `least` of them."""
    cluster = 2 if tile >= 32 else 1
    return cluster * max(least, blocks // cluster)


def _row_tiles(rows: int) -> int:
    return round_up(rows, 16) // 16
