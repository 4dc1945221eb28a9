"""Geometry of the linear layers' kernels (`ull/kernels/linear.cuh`) and of RMSNorm.

The results do not depend on the grid: one block per multiprocessor shares the weights evenly, and leaves room for a block
of the next kernel, which fills its ring meanwhile.
"""

from __future__ import annotations

from ull.gpu.launch import TILES

Geometry = tuple[tuple[int, int], int, int]  # grid, threads, bytes of shared memory

LINEAR_TILES = (1, *TILES)  # one token has a variant of its own
THREADS = 256
NARROW_BYTES = 112 * 1024  # two blocks on a multiprocessor
WIDE_BYTES = 224 * 1024
STAGED_LIMIT = 64 * 1024  # most activations that a narrow block keeps beside its ring


def tile_of(tokens: int) -> int:
    """The smallest variant of a linear kernel for a tree of `tokens` (1 to 64)."""
    return next(tile for tile in LINEAR_TILES if tile >= tokens)


def norm(tile: int) -> Geometry:
    """`ull_norm_{tile}`, for tiles of 16 and more: a block per token."""
    return (tile, 1), THREADS, 128


def qkv(hidden: int, width: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_qkv_{tile}`: `width` rows of queries, keys and values."""
    return _linear(width, hidden, tile, multiprocessors, norms=True)


def o(hidden: int, attention_width: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_o_{tile}`."""
    return _linear(hidden, attention_width, tile, multiprocessors)


def gate_up(hidden: int, intermediate: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_gate_up_{tile}`: a row tile is eight gate and eight up rows."""
    return _linear(2 * _round_up(intermediate, 8), hidden, tile, multiprocessors, norms=True)


def down(hidden: int, intermediate: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_down_{tile}`."""
    return _linear(hidden, intermediate, tile, multiprocessors)


def head(hidden: int, vocabulary: int, tile: int, multiprocessors: int) -> Geometry:
    """`ull_head_{tile}`."""
    return _linear(vocabulary, hidden, tile, multiprocessors, norms=True)


def _linear(rows: int, columns: int, tile: int, multiprocessors: int, norms: bool = False) -> Geometry:
    """`LinearPlan` of linear.cuh."""
    staged = _round_up(columns, 32) * 2 * tile
    narrow = tile <= 8 and (staged <= STAGED_LIMIT or not norms)
    return (min(multiprocessors, _round_up(rows, 16) // 16), 1), THREADS, NARROW_BYTES if narrow else WIDE_BYTES


def _round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit
