"""One kernel launch: what is captured into a graph, and what the emulator runs in tests."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

TILES = (8, 16, 32, 64)  # tokens that one variant of a kernel handles at once


@dataclass(frozen=True)
class Launch:
    """`kernel` with its one parameter struct. `shared_bytes` is dynamic shared memory.

    `overlaps`: whether it may begin before the launch before it has ended. `meets`: its blocks wait for each other, so
    all of them must run at once.
    """

    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    params: ctypes.Structure
    overlaps: bool = True
    meets: bool = False


def tile_of(tokens: int) -> int:
    """The smallest kernel variant for a tree of `tokens` (1 to 64)."""
    return next(tile for tile in TILES if tile >= tokens)
