"""Every kernel of a layer alone, by Nsight Compute: how long it takes, what it uses, and what its warps wait for.

python bench/h200/profiled.py --json REPORT    # adds "profiled" to the report; needs ncu on the PATH

Caches are cold and no kernel overlaps with another, so the times do not add up to a round's. They say which kernel to
look at, and the stalls where.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundles import build_once
from journal import Report
from rich.console import Console
from rich.table import Table
from rounds import loaded, made_up
from sources import ROOT

from ull.bundle import open_bundle
from ull.gpu.params import CHUNK_TOKENS, PREFILL
from ull.gpu.replay import Replay
from ull.gpu.rounds import FULL, PLAIN

ARCH, CONTEXT = "llama-3.1-8b", 16384
BUNDLE = ROOT / ".cache/h200/one-layer.ull"
KERNELS = "ull_(qkv|attention|o|gate_up|down|chunk).*"
FIRST_KERNEL = re.compile(r"qkv_\d+|chunk_embed")  # of a work: there is one layer
SECTIONS = (
    *("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "SchedulerStats"),
    *("MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis"),
)
FIGURES = {  # ours -> the metric's name, and what it is divided by
    "us": ("gpu__time_duration.sum", 1e3),
    "memory": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 100.0),
    "l2": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed", 100.0),
    "tensor_cores": ("sm__pipe_shared_cycles_active.avg.pct_of_peak_sustained_elapsed", 100.0),
    "instructions_per_cycle": ("sm__inst_executed.avg.per_cycle_elapsed", 1.0),
}
SHARES = ("memory", "l2", "banks", "tensor_cores")
# What shared memory's banks do, of what they could: reads, those by the tensor cores among them, and writes. Not every
# ncu knows them.
BANKS = tuple(f"l1tex__data_bank_{what}.avg.pct_of_peak_sustained_elapsed" for what in ("reads", "writes"))
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
MOST_STALLS = 4


@dataclass(frozen=True)
class Work:
    """A round of a tree, or a chunk of a prompt, behind so many positions. `wide`: with the attention for many."""

    tokens: int
    position: int
    chunk: bool = False
    wide: bool = False

    @property
    def name(self) -> str:
        way = ", wide" if self.wide else ""
        return f"{'a chunk of ' if self.chunk else ''}{self.tokens} behind {self.position}{way}"

    def do(self, replay: Replay) -> None:
        text = made_up(self.tokens)
        if self.chunk:
            sequence = replay.launch(text, self.position, PREFILL, size=CHUNK_TOKENS)
        else:
            sampler = PLAIN if self.tokens == 1 else FULL
            sequence = replay.launch(text, self.position, sampler=sampler, wide=self.wide)
        replay.wait(sequence)
        replay.drain()


WORKS = (
    *(Work(1, 128), Work(1, 8192), Work(1, 8192, wide=True), Work(16, 8192), Work(64, 128), Work(64, 8192)),
    *(Work(512, 0, chunk=True), Work(512, 7680, chunk=True)),
    *(Work(128, 0, chunk=True), Work(128, 7680, chunk=True)),
)


def run(bundle: Path) -> None:
    """What ncu runs: each work once to warm up, then once to be profiled."""
    from cuda.bindings import driver

    with loaded(open_bundle(bundle)) as program:
        replay = program.replay()
        for work in WORKS:
            work.do(replay)
            driver.cuProfilerStart()
            work.do(replay)
            driver.cuProfilerStop()


def read_kernels(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Of what ncu has written as CSV (--page raw), a kernel a row: its name, `FIGURES`, registers and worst stalls.

    A stall is how many of a scheduler's cycles a warp has waited so, for each instruction that it issued.
    """
    rows = [row for row in csv.reader(line for line in lines if not line.startswith("==")) if row]
    if not rows:
        return []
    head, _units, *kernels = rows
    return [_kernel(dict(zip(head, row, strict=True))) for row in kernels]


def _kernel(row: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"kernel": row["Kernel Name"].split("(")[0].removeprefix("ull_"), "grid": row["Grid Size"]}
    for name, (metric, unit) in FIGURES.items():
        found[name] = _number(row[metric]) / unit
    banks = [_number(row[metric]) / 100.0 for metric in BANKS if row.get(metric, "") not in ("", "n/a")]
    found["banks"] = sum(banks) if banks else None
    found["registers"] = int(_number(row["launch__registers_per_thread"]))
    stalls = {match[1]: _number(text) for metric, text in row.items() if (match := STALL.fullmatch(metric))}
    stalls.pop("selected", None)  # it issues
    worst = sorted(stalls, key=lambda name: -stalls[name])[:MOST_STALLS]
    return found | {"stalls": {name: stalls[name] for name in worst}}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def by_work(kernels: Iterable[dict[str, Any]], works: Iterable[Work]) -> dict[str, list[dict[str, Any]]]:
    """Kernels in the order in which they ran, by the work's name. Raises ValueError for fewer works, or more."""
    found: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if FIRST_KERNEL.fullmatch(kernel["kernel"]):
            found.append([])
        if not found:
            raise ValueError(f"{kernel['kernel']} is no layer's first kernel")
        found[-1].append(kernel)
    return dict(zip((work.name for work in works), found, strict=True))


def print_profile(console: Console, found: Mapping[str, list[dict[str, Any]]]) -> None:
    table = Table(title=f"one layer of {ARCH}, each kernel alone and with cold caches: share of the chip's, by ncu")
    left = ("round", "kernel", "warps wait for")
    figures = ("us", "memory", "L2", "banks", "tensor cores", "instr/cycle", "registers")
    for column in (*left[:2], *figures, left[2]):
        table.add_column(column, justify="left" if column in left else "right")
    for work, kernels in found.items():
        for kernel in kernels:
            shares = ("-" if (share := kernel[name]) is None else f"{share:.0%}" for name in SHARES)
            stalls = ", ".join(f"{name} {value:.1f}" for name, value in kernel["stalls"].items())
            instructions = f"{kernel['instructions_per_cycle']:.2f}"
            cells = (f"{kernel['us']:.1f}", *shares, instructions, str(kernel["registers"]))
            table.add_row(work, kernel["kernel"], *cells, stalls)
    console.print(table)


def profile(ncu: str) -> dict[str, list[dict[str, Any]]]:
    """Raises SystemExit where ncu does not do it, with its reason."""
    options = ("--arch", ARCH, "--layers", "1", "--random-weights", "--target", "sm_90a", "--context", str(CONTEXT))
    build_once(BUNDLE, *options)
    log = BUNDLE.with_suffix(".csv")
    start = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--print-units", "base"]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    output = ["--csv", "--page", "raw", "--log-file", str(log), "--kernel-name", f"regex:{KERNELS}"]
    run = [*output, sys.executable, __file__, "--run", str(BUNDLE)]
    for more in (["--metrics", ",".join(BANKS)], []):  # what is not of a section an ncu may not know
        result = subprocess.run([*start, *sections, *more, *run], capture_output=True, text=True)
        if result.returncode == 0:
            break
    text = log.read_text() if log.exists() else ""
    if result.returncode != 0:
        said = [line for line in (text + result.stderr).splitlines() if line.strip()]
        raise SystemExit(f"ncu: {said[-1] if said else f'status {result.returncode}'}")
    return by_work(read_kernels(text.splitlines()), WORKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="the report that the figures are added to")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run(options.run)
    if options.json is None:
        parser.error("--json is missing")
    report = Report(options.json)
    ncu = shutil.which("ncu")
    if ncu is None:
        return report.note("skipped", "profiled", "Nsight Compute (ncu) is not on this machine")
    report.found["profiled"] = profile(ncu)
    report.save()
    print_profile(Console(width=160), report.found["profiled"])
    return None


if __name__ == "__main__":
    main()
