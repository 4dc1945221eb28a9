"""Rows of a linear's sources as whole tiles: projections that are computed together lie in one matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Blocks = Iterable[NDArray[Any]]  # of rows [n, K], in order


def fuse(stem: str, sources: Sequence[Blocks], tile_rows: int, gate_rows: int) -> Iterator[NDArray[Any]]:
    """Whole tiles of one linear: so many rows of gate and of up in turn, anything else one source after the other."""
    if stem.endswith(".gate_up"):
        return alternate_tiles(sources[0], sources[1], gate_rows)
    return whole_tiles(chain.from_iterable(sources), tile_rows)


def exact_rows(blocks: Blocks, count: int) -> Iterator[NDArray[Any]]:
    """The first `count` rows, followed by rows of zeros where there are fewer."""
    columns = 0
    for block in blocks:
        columns = block.shape[1]
        if count:
            yield block[:count]
            count = max(0, count - len(block))
    if count:
        yield np.zeros((count, columns), np.float32)


def whole_tiles(blocks: Blocks, tile_rows: int) -> Iterator[NDArray[Any]]:
    """Cuts a stream of row blocks into blocks of whole tiles; the last one is padded with rows of zeros."""
    rest: NDArray[Any] | None = None
    for block in blocks:
        rows = block if rest is None else np.concatenate([rest, block])
        whole = len(rows) // tile_rows * tile_rows
        if whole:
            yield rows[:whole]
        rest = rows[whole:] if whole < len(rows) else None
    if rest is not None:
        yield np.pad(rest, [(0, tile_rows - len(rest)), (0, 0)])


def alternate_tiles(first: Blocks, second: Blocks, tile_rows: int) -> Iterator[NDArray[Any]]:
    """Tiles of two equally shaped streams in turn: tile 2j from `first`, tile 2j + 1 from `second`."""
    for one, two in zip(whole_tiles(first, tile_rows), whole_tiles(second, tile_rows), strict=True):
        columns = one.shape[1]
        pairs = [one.reshape(-1, tile_rows, columns), two.reshape(-1, tile_rows, columns)]
        yield np.stack(pairs, axis=1).reshape(-1, columns)
