"""bench/placement.py: the simulation, and that no two blocks of a layer come to lie on one multiprocessor."""

from __future__ import annotations

import json
import sys

import pytest

from conftest import ROOT
from ull.gpu.geometry.linear import ALONE_BYTES, LINEAR_TILES

sys.path.append(str(ROOT / "bench"))

from kernels_report import ARCHS, RESULTS
from occupancy import needs
from placement import DEALS, Deal, Kernel, crowded, kernels_of

KIB = 1024
ROWS = json.loads(RESULTS.read_text())["models"]


def kernel(name: str, blocks: int, kib: int, registers: int = 80) -> Kernel:
    return Kernel(name, blocks, needs(registers, 256, (kib - 1) * KIB))


ALONE = kernel("alone", 132, 115)


each_deal = pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS)


@each_deal
def test_no_two_lie_together_where_no_two_fit_or_one_is_beside_each(deal: Deal) -> None:
    assert crowded([kernel("one", 132, 120), kernel("two", 132, 130)], deal) == {}
    assert crowded([ALONE, kernel("other", 132, 112)], deal) == {}


@each_deal
def test_what_is_in_the_way_makes_two_blocks_share(deal: Deal) -> None:
    free = crowded([kernel("alone", 128, 115), kernel("other", 132, 112)], deal)
    assert set(free) == {"other"} and 2 <= free["other"] <= 4.5  # on the four that the first one leaves
    small = kernel("norm", 16, 2, registers=16)  # beside the first it leaves the second one no room
    behind = crowded([ALONE, small, kernel("other", 132, 112)], deal)
    assert set(behind) == {"other"} and behind["other"] > 3


def test_a_kernel_that_never_fits_is_named() -> None:
    with pytest.raises(ValueError, match="large: its blocks do not all fit"):
        crowded([kernel("large", 1, 229)], DEALS["any"])


@pytest.mark.parametrize("arch", ARCHS)
@each_deal
def test_the_head_of_a_chunk_shares_no_multiprocessor_with_itself(arch: str, deal: Deal) -> None:
    """Behind down, which fills a multiprocessor's memory, and the norm of the last token."""
    down, norm, head = (ROWS[arch][f"ull_{name}"] for name in ("chunk_down", "chunk_norm", "head_1"))

    def placed(head_bytes: int) -> dict[str, float]:
        kernels = [
            Kernel("down", 128, needs(down["registers"], 384, down["shared_bytes"])),
            Kernel("norm", 1, needs(norm["registers"], 256, norm["shared_bytes"])),
            Kernel("head", 132, needs(head["registers"], 256, head_bytes)),
        ]
        return crowded(kernels, deal)

    assert not placed(max(head["shared_bytes"], ALONE_BYTES))
    assert set(placed(head["shared_bytes"])) == {"head"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", LINEAR_TILES)
def test_no_layer_shares_a_multiprocessor_with_itself(arch: str, tile: int) -> None:
    """If any multiprocessor may get a block, the first layer's does: nothing is in the way on an idle chip."""
    kernels = kernels_of(ROWS[arch], tile)
    for name, deal in DEALS.items():
        for seed in range(3):
            found = crowded(kernels, deal, seed)
            first = {one.name for one in kernels[:2]} if name == "any" and kernels[0].name == f"qkv_{tile}" else set()
            assert set(found) <= first, name
