"""What a multiprocessor of sm_90 has, and which blocks find room on it together, without a GPU.

As the CUDA toolkit's `cuda_occupancy.h` counts it: a warp's registers, by 256, are those of the quarter of the
multiprocessor that the warp lies in; a block's shared memory, by 128 bytes, has 1 KB of the system's own beside it. A
block's warps are shared out to the quarters evenly. Where some of them get one more, nothing says which: here those
with the most registers left.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ull.gpu.geometry.linear import MULTIPROCESSOR_BYTES, RESERVED_BYTES

MULTIPROCESSORS = 132  # of an H200
QUARTERS = 4
REGISTERS, WARPS = 65536 // QUARTERS, 64 // QUARTERS  # of a quarter
BLOCKS = 32


@dataclass(frozen=True)
class Needs:
    """What one block takes. From a kernel's registers per thread, threads and dynamic shared memory: `needs`."""

    registers: int  # of a warp
    warps: int
    shared_bytes: int


def needs(registers: int, threads: int, shared_bytes: int) -> Needs:
    return Needs(-(-registers // 8) * 256, -(-threads // 32), -(-shared_bytes // 128) * 128 + RESERVED_BYTES)


@dataclass(frozen=True)
class Free:
    """What a multiprocessor has left, by quarter. A value: what is asked of one is kept for all that are alike."""

    registers: tuple[int, ...] = (REGISTERS,) * QUARTERS
    warps: tuple[int, ...] = (WARPS,) * QUARTERS
    shared_bytes: int = MULTIPROCESSOR_BYTES
    blocks: int = BLOCKS

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def shares(self, block: Needs) -> tuple[int, ...] | None:
        """How many of the block's warps each quarter gets; None: there is no room."""
        if self.blocks == 0 or self.shared_bytes < block.shared_bytes:
            return None
        shares = [block.warps // QUARTERS] * QUARTERS
        for quarter in sorted(range(QUARTERS), key=lambda at: -self.registers[at])[: block.warps % QUARTERS]:
            shares[quarter] += 1
        fits = (
            warps * block.registers <= registers and warps <= free
            for warps, registers, free in zip(shares, self.registers, self.warps, strict=True)
        )
        return tuple(shares) if all(fits) else None

    def without(self, block: Needs, shares: tuple[int, ...], count: int = 1) -> Free:
        """Once the block lies there so; with count -1: once it has ended."""
        return Free(
            tuple(free - count * warps * block.registers for free, warps in zip(self.registers, shares, strict=True)),
            tuple(free - count * warps for free, warps in zip(self.warps, shares, strict=True)),
            self.shared_bytes - count * block.shared_bytes,
            self.blocks - count,
        )

    @functools.lru_cache(maxsize=1 << 16)  # noqa: B019
    def room(self, block: Needs) -> int:
        """How many of such blocks find room."""
        free, count = self, 0
        while (shares := free.shares(block)) is not None:
            free, count = free.without(block, shares), count + 1
        return count


def fit_together(*blocks: Needs) -> bool:
    """Whether one multiprocessor has room for all of them, which come in this order."""
    free = Free()
    for block in blocks:
        shares = free.shares(block)
        if shares is None:
            return False
        free = free.without(block, shares)
    return True
