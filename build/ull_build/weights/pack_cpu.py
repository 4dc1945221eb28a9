"""Row tiles: the order in which the executor reads linear weights (see `ull.bundle.layout`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle.open import TILE_ROWS

# Even positions of a 32-wide vector are rows 0..15 of the tile and odd ones rows 16..31, so that widening the even and
# the odd elements of a register yields 16 consecutive rows each.
INTERLEAVED = np.arange(TILE_ROWS).reshape(2, TILE_ROWS // 2).T.reshape(-1)


def whole_tiles(blocks: Iterable[NDArray[Any]], tile_rows: int = TILE_ROWS) -> Iterator[NDArray[Any]]:
    """Cuts a stream of row blocks [n, K] into blocks of whole tiles; the last one is padded with rows of zeros."""
    rest: NDArray[Any] | None = None
    for block in blocks:
        rows = block if rest is None else np.concatenate([rest, block])
        whole = len(rows) // tile_rows * tile_rows
        if whole:
            yield rows[:whole]
        rest = rows[whole:] if whole < len(rows) else None
    if rest is not None:
        yield np.pad(rest, [(0, tile_rows - len(rest)), (0, 0)])


def alternate_tiles(
    first: Iterable[NDArray[Any]], second: Iterable[NDArray[Any]], tile_rows: int = TILE_ROWS
) -> Iterator[NDArray[Any]]:
    """Tiles of two equally shaped streams in turn: tile 2j from `first`, tile 2j + 1 from `second`."""
    for one, two in zip(whole_tiles(first, tile_rows), whole_tiles(second, tile_rows), strict=True):
        columns = one.shape[1]
        pairs = [one.reshape(-1, tile_rows, columns), two.reshape(-1, tile_rows, columns)]
        yield np.stack(pairs, axis=1).reshape(-1, columns)


def pack_tiles(rows: NDArray[Any]) -> NDArray[Any]:
    """Whole tiles of rows [32 * tiles, K] -> [tiles, K, 32]; 1- and 2-byte items interleaved, 4-byte ones in order."""
    tiles = rows.reshape(-1, TILE_ROWS, rows.shape[1])
    if rows.itemsize < 4:
        tiles = tiles[:, INTERLEAVED, :]
    return np.ascontiguousarray(tiles.transpose(0, 2, 1))


def unpack_tiles(tiles: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `pack_tiles`: [tiles, K, 32] -> [32 * tiles, K]."""
    rows = tiles.transpose(0, 2, 1)
    if tiles.itemsize < 4:
        rows = rows[:, np.argsort(INTERLEAVED), :]
    return np.ascontiguousarray(rows).reshape(-1, tiles.shape[1])
