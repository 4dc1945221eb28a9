"""bench/occupancy.py: which blocks find room on a multiprocessor together."""

from __future__ import annotations

import sys

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "bench"))

from occupancy import Free, fit_together, needs

KIB = 1024


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [
        (69, 256, 112 * KIB, 2),  # by shared memory, as all below it but for the third
        (128, 256, 107 * KIB, 2),
        (129, 256, 0, 1),  # 136 registers of 64 threads in each quarter
        (16, 256, 75 * KIB, 3),
        (16, 256, 75 * KIB + 1, 2),  # 128 bytes more for each of three
        (16, 1024, 0, 2),  # by warps
        (16, 32, 0, 32),  # by blocks
    ],
)
def test_blocks_of_one_kernel(registers: int, threads: int, shared_bytes: int, blocks: int) -> None:
    assert Free().room(needs(registers, threads, shared_bytes)) == blocks


def test_registers_are_those_of_a_quarter() -> None:
    large, other = needs(96, 256, 0), needs(120, 256, 0)
    assert 256 * 96 + 64 * 128 + 256 * 120 <= 65536, "all of them are not too many"
    assert fit_together(large, other) and not fit_together(large, needs(128, 64, 0), other)
    small = needs(80, 64, 0)  # two warps, in two quarters
    assert fit_together(large, small, small, other)
    assert not fit_together(large, small, small, small, other)


def test_what_has_ended_leaves_what_it_took() -> None:
    block = needs(80, 96, 1000)  # three warps
    shares = Free().shares(block)
    assert shares == (1, 1, 1, 0)
    free = Free().without(block, shares)
    assert free.registers == (13824, 13824, 13824, 16384) and free.shared_bytes == 233472 - 2048
    assert free.shares(block) == (1, 1, 0, 1), "where the most registers are left"
    assert free.without(block, shares, -1) == Free()
