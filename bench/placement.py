"""How the blocks of a round's layers come to lie on the multiprocessors: a simulation, without a GPU.

Where two blocks of a linear layer lie on one multiprocessor all others wait for those. Kernels follow one another by
programmatic dependent launch: the blocks of one are dealt out when all of the kernel before have begun, each to a
multiprocessor that has room for it (registers, shared memory, threads); a kernel's blocks end, in any order, when those
of the kernel before have. Which multiprocessor gets a block stands in no document of the maker's, so there are several
ways to deal. What a kernel needs is taken from the figures of `make kernels-report`, older ones too: `--figures FILE`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kernels_report import MULTIPROCESSORS, REGISTERS, RESERVED_BYTES, RESULTS, SHARED_BYTES, THREADS, registers_of
from ull.gpu.geometry import attention
from ull.gpu.geometry.linear import LINEAR_TILES

LAYERS = 4  # one behind another, as many as it takes for them to be alike
SMALL = ("norm", "qkv_sum")  # several blocks of which may share a multiprocessor: they bring no weights


@dataclass(frozen=True)
class Kernel:
    name: str  # without "ull_"
    blocks: int
    registers: int  # of a block
    shared_bytes: int  # the system's own among them
    threads: int


@dataclass
class Multiprocessor:
    registers: int = REGISTERS  # that are free
    shared_bytes: int = SHARED_BYTES
    threads: int = THREADS
    launches: Counter[int] = field(default_factory=Counter)  # blocks that have begun, by launch

    def room(self, kernel: Kernel) -> int:
        """How many of its blocks find room."""
        by_memory = min(self.registers // kernel.registers, self.shared_bytes // kernel.shared_bytes)
        return min(by_memory, self.threads // kernel.threads)

    def hold(self, kernel: Kernel, blocks: int) -> None:
        """One more, or with -1 one less."""
        self.registers -= blocks * kernel.registers
        self.shared_bytes -= blocks * kernel.shared_bytes
        self.threads -= blocks * kernel.threads


# How much a multiprocessor with room is preferred.
Deal = Callable[[Multiprocessor, Kernel], int]
DEALS: dict[str, Deal] = {
    "the most room": Multiprocessor.room,
    "the most memory": lambda place, kernel: place.shared_bytes,
    "any": lambda place, kernel: 0,
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
        blocks, threads = math.prod(row["grid"]), row["threads"]
        registers = registers_of(row["registers"], threads)
        kernels.append(Kernel(name, blocks, registers, row["shared_bytes"] + RESERVED_BYTES, threads))
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

    def deal_out() -> None:
        nonlocal next_launch
        while next_launch < len(launches):
            kernel = launches[next_launch]
            while len(begun[next_launch]) < kernel.blocks:
                with_room = [place for place in places if place.room(kernel) > 0]
                if not with_room:
                    return
                best = max(deal(place, kernel) for place in with_room)
                place = order.choice([place for place in with_room if deal(place, kernel) == best])
                place.hold(kernel, 1)
                place.launches[next_launch] += 1
                found[kernel.name] += place.launches[next_launch] == 2
                begun[next_launch].append(place)
            next_launch += 1

    deal_out()
    for launch, kernel in enumerate(launches):
        ending = begun[launch]
        if len(ending) < kernel.blocks:
            raise ValueError(f"{kernel.name}: its blocks do not all fit, whatever ends before")
        order.shuffle(ending)
        for place in ending:
            place.hold(kernel, -1)
            deal_out()
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
