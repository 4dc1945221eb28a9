"""How the blocks of a round's layers come to lie on the multiprocessors: a simulation, without a GPU.

Where two blocks of a linear layer lie on one multiprocessor all others wait for those. Kernels follow one another by
programmatic dependent launch: the blocks of one are dealt out when all of the kernel before have begun, each to a
multiprocessor that has room for it (`occupancy.py`); a kernel's blocks end, in any order, when those of the kernel
before have. Which multiprocessor gets a block stands in no document of the maker's, so there are several ways to deal.
What a kernel needs is taken from the figures of `make kernels-report`, older ones too: `--figures FILE`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kernels_report import RESULTS
from occupancy import MULTIPROCESSORS, Free, Needs, needs
from ull.gpu.geometry import attention
from ull.gpu.geometry.linear import LINEAR_TILES

LAYERS = 4  # one behind another, as many as it takes for them to be alike
NEEDS = ("registers", "threads", "shared_bytes")  # the figures that say what a block needs
SMALL = ("norm", "qkv_sum")  # several blocks of which may share a multiprocessor: they bring no weights


@dataclass(frozen=True)
class Kernel:
    name: str  # without "ull_"
    blocks: int
    needs: Needs


@dataclass(eq=False)
class Multiprocessor:
    free: Free = field(default_factory=Free)
    begun: Counter[int] = field(default_factory=Counter)  # blocks, by launch
    lies: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))  # as they lie there

    def begin(self, launch: int, block: Needs) -> None:
        shares = self.free.shares(block)
        assert shares is not None
        self.free = self.free.without(block, shares)
        self.begun[launch] += 1
        self.lies[launch].append(shares)

    def end(self, launch: int, block: Needs) -> None:
        self.free = self.free.without(block, self.lies[launch].pop(), -1)


# How much a multiprocessor with room is preferred.
Deal = Callable[[Free, Needs], int]
DEALS: dict[str, Deal] = {
    "the most room": Free.room,
    "the most memory": lambda free, block: free.shared_bytes,
    "any": lambda free, block: 0,
}


def kernels_of(rows: Mapping[str, Any], tile: int) -> list[Kernel]:
    """A layer's kernels in a round of `tile` tokens, in order. rows: the figures of one model, by kernel."""
    sums = [f"qkv_sum_{tile}"] if f"ull_qkv_sum_{tile}" in rows else []
    attended = [*sums, f"attention_{attention.tile_of(tile)}"]
    norm = [f"norm_{tile}"] if rows[f"ull_norm_{tile}"]["grid"] else []
    names = [*norm, f"qkv_{tile}", *attended, f"o_{tile}", *norm, f"gate_up_{tile}", f"down_{tile}"]
    kernels = []
    for name in names:
        row = rows[f"ull_{name}"]
        kernels.append(Kernel(name, math.prod(row["grid"]), needs(*(row[key] for key in NEEDS))))
    return kernels


def crowded(kernels: Sequence[Kernel], deal: Deal, seed: int = 0) -> dict[str, float]:
    """By kernel, on how many multiprocessors a second block of a launch began beside another: the mean of its launches.

    Of the kernels of a layer; those that have none are left out.
    """
    order = random.Random(seed)
    launches = [*kernels] * LAYERS
    places = [Multiprocessor() for _ in range(MULTIPROCESSORS)]
    begun: list[list[Multiprocessor]] = [[] for _ in launches]
    found: Counter[str] = Counter()
    next_launch = 0

    def deal_out(changed: Sequence[Multiprocessor]) -> None:
        """Until there is no room for the next block; on others than `changed` there was none for it before."""
        nonlocal next_launch
        while next_launch < len(launches):
            kernel, launch = launches[next_launch], next_launch
            preferred: dict[int, list[Multiprocessor]] = defaultdict(list)  # with room
            while True:
                for place in changed:
                    if place.free.shares(kernel.needs) is not None:
                        preferred[deal(place.free, kernel.needs)].append(place)
                if len(begun[launch]) == kernel.blocks:
                    break
                if not preferred:
                    return
                best = max(preferred)
                place = preferred[best].pop(order.randrange(len(preferred[best])))
                if not preferred[best]:
                    del preferred[best]
                place.begin(launch, kernel.needs)
                found[kernel.name] += place.begun[launch] == 2
                begun[launch].append(place)
                changed = [place]
            next_launch, changed = launch + 1, places

    deal_out(places)
    for launch, kernel in enumerate(launches):
        ending = begun[launch]
        if len(ending) < kernel.blocks:
            raise ValueError(f"{kernel.name}: its blocks do not all fit, whatever ends before")
        order.shuffle(ending)
        for place in ending:
            place.end(launch, kernel.needs)
            deal_out([place])
    return {name: count / LAYERS for name, count in found.items() if count and not name.startswith(SMALL)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--figures", type=Path, default=RESULTS, help="of `make kernels-report`; default: those committed"
    )
    arguments = parser.parse_args()
    table = Table(title="multiprocessors with two blocks of a launch, of 132, by how blocks are dealt out")
    for column in ("model", "tokens", *DEALS):
        table.add_column(column)
    for model, rows in json.loads(arguments.figures.read_text())["models"].items():
        for tile in LINEAR_TILES:
            kernels = kernels_of(rows, tile)
            cells = [crowded(kernels, deal) for deal in DEALS.values()]
            texts = (", ".join(f"{name} {count:g}" for name, count in found.items()) or "none" for found in cells)
            table.add_row(model, str(tile), *texts)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
