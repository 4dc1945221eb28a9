"""Geometry of the kernels that begin a round, embed its tokens, draw from its logits and accept a path.

A round captures begin, embed, ..., then `SAMPLING` in this order, then accept; or for a request that asks for the best
score alone `PLAIN`, which does all of that. The results do not depend on the grids.
"""

from __future__ import annotations

Geometry = tuple[tuple[int, int], int, int]  # grid, threads, bytes of shared memory

SAMPLING = ("ull_sample_scan", "ull_sample_draw", "ull_sample_filter")
PLAIN = "ull_sample_plain"
SCRATCH_BYTES = 5866496  # SampleParams.scratch: the same for every model and tree; need not be cleared
MAXIMA_AT = 1024  # bytes into the scratch: what the head of one token leaves to `PLAIN`

_THREADS = 256  # of embed, sample and fill
_EMBED_PIECE = 8  # elements that a thread of embed copies at once
_ACCEPT_BYTES = 776
_SHARED_BYTES = {
    "ull_begin": 7232,
    "ull_sample_scan": 19056,
    "ull_sample_plain": 336 + _ACCEPT_BYTES,
    "ull_accept": _ACCEPT_BYTES,
}
_SAMPLE_SHARED_BYTES = 43632
_MOST_SLICES = 64
_MOST_BLOCKS = 512  # kMostBlocks of sample.cuh, also of the head
_LEAST_SLICE = 1024  # logits: four for each thread
_MOST_SLICE = 38 * 1024  # so that what best_of() of sample.cu compares fits into shared memory


def begin() -> Geometry:
    """`ull_begin`: one block."""
    return (1, 1), 512, _SHARED_BYTES["ull_begin"]


def embed(hidden: int, tokens: int) -> Geometry:
    """`ull_embed` for up to `tokens` nodes."""
    return (-(-hidden // (_THREADS * _EMBED_PIECE)), tokens), _THREADS, 0


def sample(kernel: str, vocabulary: int, tokens: int, multiprocessors: int) -> Geometry:
    """One of `SAMPLING` for up to `tokens` nodes; all three must be launched with the same grid.

    Two blocks per multiprocessor, each with a slice of one node's logits. Raises ValueError for a vocabulary that the
    kernels cannot hold.
    """
    useful = min(-(-vocabulary // _LEAST_SLICE), _MOST_SLICES)
    slices = max(min(2 * multiprocessors // tokens, useful), -(-vocabulary // _MOST_SLICE), 1)
    if slices * tokens > _MOST_BLOCKS:
        raise ValueError(f"vocabulary: {vocabulary} is too large to sample {tokens} nodes at once")
    return (slices, tokens), _THREADS, _SHARED_BYTES.get(kernel, _SAMPLE_SHARED_BYTES)


def plain(vocabulary: int, multiprocessors: int) -> Geometry:
    """`PLAIN`. Raises ValueError as `sample` does."""
    return sample(PLAIN, vocabulary, 1, multiprocessors)


def medusa_rank(vocabulary: int, heads: int, multiprocessors: int) -> Geometry:
    """`ull_medusa_rank` for `heads` rows of logits. Raises ValueError as `sample` does."""
    return sample("ull_medusa_rank", vocabulary, heads, multiprocessors)


def eagle_rank(vocabulary: int, entries: int, multiprocessors: int) -> Geometry:
    """`ull_eagle_rank` for `entries` rows of logits. Raises ValueError as `sample` does."""
    return sample("ull_eagle_rank", vocabulary, entries, multiprocessors)


def dflash_rank(vocabulary: int, rows: int, multiprocessors: int) -> Geometry:
    """`ull_dflash_rank` for `rows` of logits. Raises ValueError as `sample` does."""
    return sample("ull_dflash_rank", vocabulary, rows, multiprocessors)


def accept() -> Geometry:
    """`ull_accept`: one block."""
    return (1, 1), 128, _SHARED_BYTES["ull_accept"]


def fill(size: int, multiprocessors: int) -> Geometry:
    """`ull_fill` for `size` bytes."""
    blocks = -(-size // (_THREADS * 16))
    return (max(1, min(blocks, 16 * multiprocessors)), 1), _THREADS, 0
