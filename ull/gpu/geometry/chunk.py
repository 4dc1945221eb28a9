"""Geometry of the kernels that read a chunk of a prompt (`ull/kernels/chunk`), and the scratch that they share.

The grids are for chunks of any length; blocks that have nothing to do return at once. The results depend on neither.
"""

from __future__ import annotations

from functools import cache

from ull.bundle import round_up
from ull.gpu.geometry import linear
from ull.gpu.geometry.attention import SPAN_SPLITS, splits, tile_ring_bytes
from ull.gpu.params import CHUNK_PARTS, CHUNK_TILE, CHUNK_TOKENS, SLICES

Geometry = tuple[tuple[int, int], int, int]  # grid, threads, bytes of shared memory

THREADS = 256
LINEAR_THREADS = 384  # two warpgroups that multiply, and one that brings what they do
BLOCK_ROWS = 128
STORE_TOKENS = 16  # `kStoreTokens` of chunk_store.cu
CLUSTER = 2  # blocks of rows that share their activations: `kChunkCluster` of chunk_linear.cuh
ATTENTION_ROWS = 128  # of a kv head: tokens times the query heads that share it


def embed(hidden: int) -> Geometry:
    """`ull_chunk_embed`."""
    return (-(-hidden // (8 * THREADS)), CHUNK_TOKENS), THREADS, 0


def norm(hidden: int, fast: bool = False, tokens: int = CHUNK_TOKENS) -> Geometry:
    """`ull_chunk_norm`: a block per token, which fast keeps the row until it knows the largest.

    A single one is of the last token.
    """
    return (tokens, 1), THREADS, 128 + (2 * round_up(hidden, 32) if fast else 0)


def quantise() -> Geometry:
    """`ull_chunk_quantise`: a block for two tokens."""
    return (CHUNK_TOKENS // 2, 1), THREADS, 128


def store(kv_heads: int, head_dim: int) -> Geometry:
    """`ull_chunk_store`: for each 16 tokens, which may begin before the chunk's, blocks for values and for keys."""
    threads = (kv_heads * head_dim, STORE_TOKENS * kv_heads * linear.head_lanes(head_dim))
    blocks = sum(-(-count // THREADS) for count in threads)
    return (CHUNK_TOKENS // STORE_TOKENS + 1, blocks), THREADS, 0


@cache
def whole_clusters(rows: int, multiprocessors: int, apart: bool = False, fast: bool = False) -> tuple[int, ...]:
    """How many clusters, of a product of 1 .. CHUNK_PARTS tiles, have blocks of 128 rows; those behind have 64.

    A block fills a multiprocessor. Where the last clusters leave half of the chip idle or more, twice as many take
    their place, of half the work each; but not where prompts are read fast, since a warpgroup alone leaves the tensor
    cores idle while it adds up each stage. `apart`: a single tile's slices are shared out to CHUNK_PARTS columns.
    """
    clusters, at_once = -(-rows // (CLUSTER * BLOCK_ROWS)), max(multiprocessors // CLUSTER, 1)
    whole = []
    for columns in _columns(apart):
        full = clusters * columns // at_once * at_once // columns
        whole.append(full if not fast and 2 * (clusters - full) * columns <= at_once else clusters)
    return tuple(whole)


def product(rows: int, multiprocessors: int, apart: bool = False, fast: bool = False) -> Geometry:
    """The linear layers of a chunk, by the rows of their matrix; all as `whole_clusters` has it."""
    clusters = -(-rows // (CLUSTER * BLOCK_ROWS))
    wholes = whole_clusters(rows, multiprocessors, apart, fast)
    most = max(columns * (2 * clusters - whole) for columns, whole in zip(_columns(apart), wholes, strict=True))
    return (CHUNK_PARTS, CLUSTER * -(-most // CHUNK_PARTS)), LINEAR_THREADS, linear.WIDE_BYTES


def _columns(apart: bool) -> tuple[int, ...]:
    return tuple(CHUNK_PARTS if apart and tiles == 1 else tiles for tiles in range(1, CHUNK_PARTS + 1))


def attention(heads: int, kv_heads: int, head_dim: int) -> Geometry:
    """`ull_chunk_attention`: `kChunkAttentionBytes` of chunk_attention_plan.cuh."""
    kept = 2 * _rows_bytes(head_dim)  # of a span and of those before it
    return (_attention_blocks(heads // kv_heads), kv_heads), LINEAR_THREADS, tile_ring_bytes(head_dim) + kept


def shared_blocks(heads: int, kv_heads: int, multiprocessors: int) -> int:
    """`ChunkAttentionParams.blocks`: a block fills a multiprocessor."""
    return max(1, min(_attention_blocks(heads // kv_heads), multiprocessors // kv_heads))


def attention_results(context: int) -> int:
    """`ChunkAttentionParams.results`: one for each split before a whole span, and one for each span behind that."""
    most = -(-(splits(context) - 1) // 2) + 1  # splits of a lane, of at least two
    apart = min(most, SPAN_SPLITS - 1)
    return apart + -(-(most - apart) // SPAN_SPLITS)


def attention_partial_bytes(heads: int, head_dim: int, context: int) -> int:
    """`ChunkAttentionParams.partial`: outputs and statistics of each block's eight warps."""
    return _attention_blocks(heads) * attention_results(context) * _rows_bytes(head_dim)


def attention_counter_count(heads: int) -> int:
    """`ChunkAttentionParams.counters` of 32 bits; zero before the first launch, and left so by each."""
    return _attention_blocks(heads) * ATTENTION_ROWS // 16


def _rows_bytes(head_dim: int) -> int:
    """Of a block's rows: outputs, f32, and statistics, as much as eight dimensions."""
    return ATTENTION_ROWS // 16 * 512 * (head_dim // 8 + 1)


def _attention_blocks(heads: int) -> int:
    return CHUNK_TOKENS * heads // ATTENTION_ROWS


def probe(multiprocessors: int) -> Geometry:
    """`ull_chunk_probe`: a warpgroup on each multiprocessor, and the operands of eight products for a tile's tokens."""
    return (multiprocessors, 1), 128, 8 * 32 * CHUNK_TILE


def activation_bytes(width: int) -> int:
    """f16 activations of that width (`ull/kernels/linear/activations.cuh`)."""
    return 2 * CHUNK_TOKENS * round_up(width, 32)


def fast_activation_bytes(width: int) -> int:
    """e4m3 activations of that width (`ull/kernels/chunk/layout.cuh`)."""
    return CHUNK_TOKENS * round_up(width, 32)


def partial_bytes(hidden: int) -> int:
    """Slices' sums of a tile of tokens that o or down leave."""
    return 4 * SLICES * CHUNK_TILE * round_up(hidden, 16)


def row_bytes(width: int) -> int:
    """f32 rows of that width."""
    return 4 * CHUNK_TOKENS * round_up(width, 16)
