"""Traced rounds, and a chunk of a prompt: when each block of each kernel did what, as Chrome traces, PNGs and tables.

The kernels are compiled again with ULL_TRACE, in memory (ull/kernels/trace.cuh), and leave a record of each block
behind the Round, or the Chunk. Stamps cost time, so this says where a round's time goes, not how long a round takes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from journal import Report
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rounds import made_up
from timeline import END, FIRST, LAST, MARKS, START, WAITED, Block, draw_timeline, lanes, png, write_chrome_trace

from ull.bundle import Bundle, open_bundle, round_up
from ull.errors import UllError
from ull.gpu import arena, program
from ull.gpu.driver import Driver
from ull.gpu.memory import CHUNK
from ull.gpu.params import CHUNK_TOKENS, PREFILL, TAKE, TREE_TOKENS, Chunk, Round
from ull.gpu.program import Program
from ull.gpu.rounds import FULL, PLAIN
from ull.log import Log
from ull_build.code import kernels
from ull_build.code.kernels import compile_file

BUNDLE = Path(__file__).parent.parent.parent / ".cache/h200/llama-3.1-8b.ull"  # of random weights
POSITION = 128  # of a round's tokens; a chunk's begin a prompt
SIZES = (1, 4, 16, TREE_TOKENS, CHUNK_TOKENS)  # tokens of what is traced; more than TREE_TOKENS are a chunk
WARM_UP = 5
CAPACITY = 1 << 17  # records of an area; a chunk of 8B leaves about 100,000, a round 22,000
HEADER_BYTES = 64
QKV = re.compile(r"qkv_\d+|chunk_qkv")  # the kernel that a layer has once
FINE_STEP_NS = 100  # a %globaltimer that ticks as finely as this needs no help from %clock64
RECORD = np.dtype(
    [
        *((name, np.uint32) for name in ("kernel", "block", "multiprocessor", "unused")),
        *((name, np.uint64, len(MARKS)) for name in ("ns", "ticks")),
    ]
)


class TraceError(Exception):
    """The round left no trace that makes sense."""


@dataclass(frozen=True)
class TracedBundle(Bundle):
    """A bundle some of whose cubins are others, by name."""

    cubins: Mapping[str, bytes]

    def read_verified(self, name: str, remedy: str) -> bytes:
        return self.cubins[name] if name in self.cubins else super().read_verified(name, remedy)


def stamping_cubins(bundle: Bundle) -> dict[str, bytes]:
    """The bundle's cubins of ull's own kernels, compiled anew with stamps."""
    code = bundle.manifest.code
    by_stem = {source.stem: source for source in kernels.all_sources()}
    stems = {file.path: Path(file.path).stem for file in (code.files if code else ())}
    own = {name: by_stem[stem] for name, stem in stems.items() if stem in by_stem}
    macros = {**(code.macros if code else {}), "ULL_TRACE": "1"}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = pool.map(lambda source: compile_file(source, macros), own.values())
        return {name: one.cubin for name, one in zip(own, compiled, strict=True)}


AREA_BYTES = HEADER_BYTES + CAPACITY * RECORD.itemsize
AREAS_AT = {name: round_up(ctypes.sizeof(owner), 256) for name, owner in (("round", Round), (CHUNK, Chunk))}


class TracedPlan(arena.ArenaPlan):
    """Device memory with room for records behind the Round and the Chunk, as trace.cuh says."""

    def reserve(self, name: str, nbytes: int) -> None:
        super().reserve(name, AREAS_AT[name] + AREA_BYTES if name in AREAS_AT else nbytes)


def load_traced(bundle: Bundle) -> Program:
    """The bundle's program with stamping kernels. Raises as Program does."""
    parts = {field.name: getattr(bundle, field.name) for field in fields(bundle)}
    traced = TracedBundle(**parts, cubins=stamping_cubins(bundle))
    plan_class, program.ArenaPlan = program.ArenaPlan, TracedPlan  # type: ignore[misc]
    try:
        return Program(traced, Log("warning"))
    finally:
        program.ArenaPlan = plan_class  # type: ignore[misc]


class Tracer:
    """Takes the records of single rounds, and chunks, of a traced program."""

    def __init__(self, traced: Program, driver: Driver) -> None:
        self._driver = driver
        self._stream = int(traced.handover["stream"])
        self.has_chunks = bool(traced.handover["chunk"])
        names = AREAS_AT if self.has_chunks else ["round"]
        self._areas = [traced._arena.address(name) + AREAS_AT[name] for name in names]
        self.replay = traced.replay()

    def trace(self, tokens: int, position: int) -> NDArray[Any]:
        """The records of a round of a chain of `tokens` at that position, or of a chunk where they are many.

        By area, in the order in which the blocks ended. One token's round is a plain one. Raises TraceError.
        """
        text = made_up(tokens)
        sampler = PLAIN if tokens == 1 else FULL
        mode, size = (PREFILL, CHUNK_TOKENS) if tokens > TREE_TOKENS else (TAKE, None)

        def run() -> None:
            self.replay.wait(self.replay.launch(text, position, mode, size=size, sampler=sampler))

        for _ in range(WARM_UP):
            run()
        self.replay.drain()
        for area in self._areas:
            self._set(area, CAPACITY)
        run()
        self.replay.drain()
        return np.concatenate([self._take(area) for area in self._areas])

    def _take(self, area: int) -> NDArray[Any]:
        count = int(self._read(np.uint32, 1, area)[0])
        self._set(area, 0)
        if count > CAPACITY:
            raise TraceError(f"the round left {count} records; there is room for {CAPACITY}")
        return self._read(RECORD, count, area + HEADER_BYTES)

    def _set(self, area: int, capacity: int) -> None:
        """Empties an area, and says how many records it has room for."""
        header = np.zeros(HEADER_BYTES // 4, np.uint32)
        header[1] = capacity
        self._driver.copy_to_device(area, header.ctypes.data, header.nbytes, self._stream)
        self._driver.synchronise(self._stream)

    def _read(self, dtype: Any, count: int, address: int) -> NDArray[Any]:
        values = np.empty(count, dtype)
        if count == 0:
            return values
        self._driver.copy_to_host(values.ctypes.data, address, values.nbytes, self._stream)
        self._driver.synchronise(self._stream)
        return values


def hash_of(kernel: str) -> int:
    """FNV-1a, as trace.cuh has it."""
    value = 2166136261
    for letter in kernel.encode():
        value = ((value ^ letter) * 16777619) % (1 << 32)
    return value


# ---- what the records say -------------------------------------------------------------------------------------------


def timer_step_ns(records: NDArray[Any]) -> int:
    """The smallest step of %globaltimer among all stamps; 0 where all are the same."""
    steps = np.diff(np.unique(records["ns"][records["ns"] > 0]).astype(np.int64))
    return int(steps.min()) if len(steps) else 0


def stamps_ns(records: NDArray[Any]) -> NDArray[np.float64]:
    """[records, marks] on one clock, NaN where a mark does not apply.

    Where %globaltimer is coarse, each multiprocessor's %clock64 is fitted to it: the rate is the median over them all,
    and the offset the least that no stamp contradicts, since a coarse timer only ever lags behind.
    """
    ns = records["ns"].astype(np.float64)
    ns[records["ns"] == 0] = np.nan
    if timer_step_ns(records) <= FINE_STEP_NS:
        return ns
    ticks = records["ticks"].astype(np.float64)
    held = {int(number): records["multiprocessor"] == number for number in np.unique(records["multiprocessor"])}
    rates = []
    for chosen in held.values():
        there = ~np.isnan(ns[chosen])
        x, y = ticks[chosen][there], ns[chosen][there]
        if np.ptp(x) > 0:
            rates.append(float(np.polyfit(x - x[0], y - y[0], 1)[0]))
    if not rates:
        return ns
    rate = statistics.median(rates)
    fine = ns.copy()
    for chosen in held.values():
        base = float(ticks[chosen].max())
        fitted = (ticks[chosen] - base) * rate
        fine[chosen] = np.where(np.isnan(ns[chosen]), np.nan, fitted + np.nanmax(ns[chosen] - fitted))
    return fine


def blocks_of(records: NDArray[Any], names: Sequence[str]) -> list[Block]:
    """Every block by kernel and launch: no block of a kernel's next launch ends before all of this one have."""
    kernel_of = {hash_of(name): name.removeprefix("ull_") for name in names}
    if unknown := set(records["kernel"].tolist()) - set(kernel_of):
        raise TraceError(f"records of kernels that nobody knows: {sorted(unknown)}")
    ns = stamps_ns(records)
    us = (ns - np.nanmin(ns)) / 1e3
    seen: Counter[tuple[str, int]] = Counter()
    blocks = []
    for record, times in zip(records, us, strict=True):
        kernel, block = kernel_of[int(record["kernel"])], int(record["block"])
        blocks.append(Block(kernel, seen[kernel, block], block, int(record["multiprocessor"]), tuple(times.tolist())))
        seen[kernel, block] += 1
    return blocks


def launches_of(blocks: Sequence[Block]) -> list[tuple[str, NDArray[np.float64]]]:
    """(kernel, [blocks, marks] us) of each launch, in the order in which their waits returned."""
    launches: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for block in blocks:
        launches.setdefault((block.kernel, block.launch), []).append(block.us)
    found = [(kernel, np.array(times)) for (kernel, _), times in launches.items()]
    return sorted(found, key=lambda item: (float(np.nanmin(item[1][:, WAITED])), float(item[1][:, END].max())))


def summarise(blocks: Sequence[Block]) -> dict[str, dict[str, Any]]:
    """By kernel, medians over its launches in microseconds; None for what does not apply.

    "ahead": from the first start until a wait returns; "release": from the predecessor's last end until then;
    "prepare": from the wait to the first stage used; "stream": from there to the last one; "finish": from there to the
    end; "span": from the first wait's return to the last end. "crowded": multiprocessors that ran two of the launch's
    blocks at once, where all others of a linear layer wait for those.
    """
    found: dict[str, list[dict[str, float]]] = {}
    crowds = crowded(blocks)
    before = np.nan
    for kernel, us in launches_of(blocks):
        with np.errstate(all="ignore"):
            waited, end = float(np.nanmin(us[:, WAITED])), float(us[:, END].max())
            found.setdefault(kernel, []).append(
                {
                    "ahead": waited - float(us[:, START].min()),
                    "release": waited - before,
                    "prepare": _median(us[:, FIRST] - us[:, WAITED]),
                    "stream": _median(us[:, LAST] - us[:, FIRST]),
                    "finish": _median(us[:, END] - us[:, LAST]),
                    "span": end - waited,
                }
            )
        before = end
    return {
        kernel: {
            "launches": len(rows),
            "crowded": statistics.median_low(crowds[kernel]),
            **{name: _rounded(_median(np.array([row[name] for row in rows]))) for name in rows[0]},
        }
        for kernel, rows in found.items()
    }


def crowded(blocks: Sequence[Block]) -> dict[str, list[int]]:
    """By kernel, for each launch, how many multiprocessors ran two of its blocks at once."""
    held: dict[tuple[str, int], dict[int, list[Block]]] = {}
    for block in blocks:
        places = held.setdefault((block.kernel, block.launch), {})
        places.setdefault(block.multiprocessor, []).append(block)
    found: dict[str, list[int]] = {}
    for (kernel, _), places in held.items():
        found.setdefault(kernel, []).append(sum(max(lanes(together)) > 0 for together in places.values()))
    return found


def _median(values: NDArray[np.float64]) -> float:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if len(there) else float("nan")


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 3)


def two_layers(blocks: Sequence[Block]) -> tuple[float, float]:
    """From the qkv of a layer in the middle to that of the one after the next; or the whole round."""
    starts = sorted(float(np.nanmin(us[:, WAITED])) for kernel, us in launches_of(blocks) if QKV.fullmatch(kernel))
    if len(starts) < 3:
        return 0.0, max(block.us[END] for block in blocks)
    middle = min(len(starts) // 2, len(starts) - 3)
    return starts[middle], starts[middle + 2]


def save(records: NDArray[Any], names: Sequence[str], folder: Path, label: str) -> dict[str, Any]:
    """Writes both pictures; what the report holds of the trace. Raises TraceError."""
    if not len(records):
        raise TraceError("the round left no records")
    blocks = blocks_of(records, names)
    events, picture = folder / f"trace-{label}.json.gz", folder / f"trace-{label}.png"
    write_chrome_trace(blocks, events)
    picture.write_bytes(png(draw_timeline(blocks, *two_layers(blocks))))
    step = timer_step_ns(records)
    return {
        "records": len(records),
        "multiprocessors": len(np.unique(records["multiprocessor"])),
        "timer_step_ns": step,
        "clock": "%globaltimer" if step <= FINE_STEP_NS else "%clock64, fitted to %globaltimer",
        "round_us": round(max(block.us[END] for block in blocks), 3),
        "kernels_us": summarise(blocks),
        "files": [events.name, picture.name],
    }


def print_summary(console: Console, found: dict[str, Any]) -> None:
    what = f"{found['tokens']} tokens of {found['model']} behind {found['position']}"
    table = Table(title=f"traced, {what}: medians over a kernel's launches, us (with stamps)")
    columns = ("ahead", "release", "prepare", "stream", "finish", "span")
    for column in ("kernel", "launches", "crowded", *columns):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel, row in found["kernels_us"].items():
        figures = ("" if row[column] is None else f"{row[column]:.2f}" for column in columns)
        table.add_row(kernel, str(row["launches"]), str(row["crowded"]), *figures)
    console.print(table)
    console.print(f"timer steps of {found['timer_step_ns']} ns; times by {found['clock']}; {', '.join(found['files'])}")


def trace_bundle(bundle: Bundle, folder: Path, label: str, sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Loads the bundle with stamping kernels and traces rounds of so many tokens, and chunks where it has any.

    Raises UllError, and TraceError.
    """
    traced = load_traced(bundle)
    code = bundle.manifest.code
    try:
        tracer = Tracer(traced, traced._driver)
        for tokens in sizes:
            is_chunk = tokens > TREE_TOKENS
            if is_chunk and not tracer.has_chunks:
                continue
            position = 0 if is_chunk else POSITION
            records = tracer.trace(tokens, position)
            name = f"{label}-{tokens}{'-chunk' if is_chunk else ''}"
            found = save(records, code.kernels() if code else [], folder, name)
            yield {"model": label, "tokens": tokens, "position": position, **found}
    except BaseException:
        traced.abandon()  # a device that has failed may never answer
        raise
    traced.close()


def main() -> None:
    """The command line of trace.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the report that the figures are added to")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="default: the benchmark's, which must be there")
    arguments = parser.parse_args()
    report = Report(arguments.json)
    try:
        path = arguments.bundle
        folder = arguments.json.parent
        folder.mkdir(parents=True, exist_ok=True)
        report.found["traces"] = []
        for found in trace_bundle(open_bundle(path), folder, path.stem):
            report.found["traces"].append(found)
            report.save()
            print_summary(Console(), found)
    except (UllError, TraceError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
