"""Static figures of every kernel, without a GPU: from compiler, PTX, disassembly and the geometry of the launches.

`make kernels-report` writes them to bench/results/kernels-sm_90a.json and as tables to kernels-sm_90a.md; a test
compiles again and refuses what has got worse than the committed figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from occupancy import MULTIPROCESSORS, Free, needs
from report import ROOT
from sass import disassemble, weight_loop
from ull.bundle import CHUNK_KERNELS, DEVICE_KERNELS, PAGES_KERNELS, Precision, device_macros
from ull.gpu.chunk import Chunks
from ull.gpu.fused import FusedForward
from ull.gpu.launch import Launch
from ull.gpu.memory import Sizes
from ull.gpu.places import HostBlocks, Places
from ull.gpu.rounds import PLAIN, Rounds
from ull_build.code import nvrtc
from ull_build.code.kernels import compile_file, kernel_sources
from ull_build.recipe import ForwardRecipe
from ull_build.shapes import shape_model

TARGET = "sm_90a"
ARCHS = ("llama-3.1-8b", "llama-3.2-1b", "llama-3.3-70b")
RESULTS = ROOT / f"bench/results/kernels-{TARGET}.json"
UPDATE = "look into it, or take the new figures over by `make kernels-report`"
CONTEXT = 32768

_ENTRY = re.compile(r"\.entry (\w+)\(")
_THREADS = re.compile(r"\.maxntid (\d+)")
_RING = re.compile(r"// ring: (\d+) warps, (\d+) stages, (\d+) bytes")
_TILE = re.compile(r"_(\d+)$")


@dataclass(frozen=True)
class Figures:
    """Of one kernel. None: it has no such thing, or no round of the model launches it."""

    file: str
    registers: int  # per thread
    stack_bytes: int
    spill_bytes: int
    code_bytes: int
    before_wait: int | None  # instructions from the entry to griddepcontrol.wait
    wait_to_mma: int | None  # instructions from there to the first mma
    wait_to_mma_barriers: int | None  # of the block, among them
    loop_instructions: int | None  # of a warp, each time round the inner loop over weights
    loop_bytes: int | None  # of weights, each time round
    ring: list[int] | None  # warps, stages, bytes of weights in a stage
    bytes_in_flight: int | None  # of a block: its whole ring
    grid: list[int] | None  # of the largest tree that the kernel serves
    threads: int
    shared_bytes: int | None  # dynamic
    blocks: int | None  # that fit on a multiprocessor
    word_stores: int  # instructions that store a word or less to global memory

    @property
    def per_byte(self) -> float | None:
        return None if self.loop_instructions is None else self.loop_instructions / (self.loop_bytes or 1)


def launches_of(arch: str, fast: bool = False) -> dict[str, Launch]:
    """Every kernel that a round of the model launches, as for the largest tree it serves; `fast`: that a chunk does."""
    sizes = Sizes(shape_model(arch), Precision(), CONTEXT, chunks=fast, fast_prefill=fast, warpgroup_trees=True)
    places = Places(lambda name: 0, lambda name: None, HostBlocks(0, 0, 0, 0, 0, 0))
    chunk = {launch.kernel: launch for launch in Chunks(sizes, places, MULTIPROCESSORS).launches()}
    if fast:
        return chunk
    rounds = Rounds(sizes, places, MULTIPROCESSORS)
    found: dict[str, Launch] = {}
    for tokens in range(1, 65):
        for persistent in (False, True):
            forward = FusedForward(sizes, places, MULTIPROCESSORS, persistent)
            launches = [*rounds.opening(tokens), *forward.launches(tokens, True), *rounds.closing(tokens, True)]
            if tokens == 1:
                launches += rounds.closing(tokens, True, PLAIN)
            found |= {launch.kernel: launch for launch in launches}
    return found | chunk


def reported_sources() -> list[Path]:
    """The sources of what every model's rounds and chunks are made of."""
    return kernel_sources(DEVICE_KERNELS | PAGES_KERNELS | CHUNK_KERNELS)


def fast_sources() -> list[Path]:
    """Those whose kernels are others where prompts are read fast."""
    return [source for source in reported_sources() if source.stem in ("chunk_linear", "chunk_norm", "chunk_quantise")]


def variants() -> list[tuple[Path, bool]]:
    """Every source that is reported, and whether as prompts that are read fast have it."""
    return [(source, False) for source in reported_sources()] + [(source, True) for source in fast_sources()]


def figures_of(source: Path, arch: str, launches: dict[str, Launch], fast: bool = False) -> dict[str, Figures]:
    """The figures of one source file's kernels. Raises BuildError for one that spills.

    `fast`: those of bundles that read prompts fast, whose names then end in "_fast".
    """
    model, precision, recipe = shape_model(arch), Precision(), ForwardRecipe(prefill="fast" if fast else "exact")
    compiled = compile_file(source, device_macros(model, precision, forward=recipe.own(TARGET)), TARGET)
    codes, entries = disassemble(compiled.cubin), _entries(compiled.ptx)
    found = {}
    for kernel in compiled.kernels:
        use, code, ptx, launch = compiled.functions[kernel], codes[kernel], entries[kernel], launches.get(kernel)
        ring = [int(count) for count in match.groups()] if (match := _RING.search(ptx)) else None
        tile = int(match[1]) if (match := _TILE.search(kernel)) else 1
        loop = weight_loop(code, max(1, tile // 8)) if ring else None
        to_mma = code.from_wait_to_mma()
        threads = launch.threads if launch else int(_THREADS.findall(ptx)[0])
        found[f"{kernel}_fast" if fast else kernel] = Figures(
            file=source.name,
            registers=use.registers,
            stack_bytes=use.stack,
            spill_bytes=use.spills,
            code_bytes=code.nbytes,
            before_wait=code.index("ACQBULK"),
            wait_to_mma=to_mma and to_mma[0],
            wait_to_mma_barriers=to_mma and to_mma[1],
            loop_instructions=loop and loop.instructions,
            loop_bytes=loop and loop.weight_bytes,
            ring=ring,
            bytes_in_flight=ring and ring[0] * ring[1] * ring[2],
            grid=launch and list(launch.grid),
            threads=threads,
            shared_bytes=launch and launch.shared_bytes,
            blocks=launch and Free().room(needs(use.registers, threads, launch.shared_bytes)),
            word_stores=code.word_stores(),
        )
    return found


def _entries(ptx: str) -> dict[str, str]:
    """The PTX of each kernel."""
    starts = list(_ENTRY.finditer(ptx))
    ends = [*(match.start() for match in starts[1:]), len(ptx)]
    return {match[1]: ptx[match.start() : end] for match, end in zip(starts, ends, strict=True)}


def measure(arch: str) -> dict[str, Figures]:
    """Every kernel's figures with the dimensions of that model."""
    launches = {fast: launches_of(arch, fast) for fast in (False, True)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda one: figures_of(one[0], arch, launches[one[1]], one[1]), variants())
        figures = {kernel: one for part in found for kernel, one in part.items()}
    return {kernel: figures[kernel] for kernel in sorted(figures, key=_order)}


def _order(kernel: str) -> tuple[str, int]:
    match = _TILE.search(kernel)
    return (kernel[: match.start()], int(match[1])) if match else (kernel, 0)


# ---- against the committed figures ----------------------------------------------------------------------------------


def compiler() -> str:
    return ".".join(map(str, nvrtc.version()))


def worse(kernel: str, now: dict[str, Any], before: dict[str, Any], same_compiler: bool) -> list[str]:
    """In which figures a kernel has got worse. Another compiler may do a little worse with the same source."""
    share, few = (0.02, 4) if same_compiler else (0.10, 16)
    problems = []

    def compare(name: str, figure: Callable[[dict[str, Any]], float | None], allowed: Callable[[float], float]) -> None:
        is_now, was = figure(now), figure(before)
        if is_now is not None and was is not None and is_now > allowed(was):
            problems.append(f"{kernel}: {name} {is_now:.4g}, was {was:.4g}")

    compare("bytes of stack", lambda row: row["stack_bytes"], lambda was: was)
    compare("bytes of spilled registers", lambda row: row["spill_bytes"], lambda was: was)
    compare("registers", lambda row: row["registers"], lambda was: was + (4 if same_compiler else 16))
    compare(
        "instructions from the wait to the first mma",
        lambda row: row["wait_to_mma"],
        lambda was: was + max(few, share * was),
    )
    compare("barriers from the wait to the first mma", lambda row: row["wait_to_mma_barriers"], lambda was: was)
    compare("instructions per byte of weights", _per_byte, lambda was: was * (1 + share))
    compare("bytes of code", lambda row: row["code_bytes"], lambda was: was + max(16 * few, 2 * share * was))
    compare("bytes not in flight", lambda row: _negative(row["bytes_in_flight"]), lambda was: was)
    compare("stores of a word", lambda row: row["word_stores"], lambda was: was + (0 if same_compiler else few))
    compare("blocks that do not fit", lambda row: _negative(row["blocks"]), lambda was: was)
    return problems


def _negative(value: int | None) -> int | None:
    return None if value is None else -value


def _per_byte(row: dict[str, Any]) -> float | None:
    return row["loop_instructions"] / row["loop_bytes"] if row["loop_bytes"] else None


# ---- the tables -----------------------------------------------------------------------------------------------------

COLUMNS = (
    "kernel",
    "grid",
    "shared KB",
    "blocks/SM",
    "registers",
    "spills",
    "code KB",
    "before the wait",
    "wait to mma (barriers)",
    "ring: warps x stages x bytes",
    "KB in flight/SM",
    "loop: instr / bytes",
    "instr/byte",
)


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A Markdown table; KB are 1024 bytes."""

    def text(value: Any, form: str = "{}") -> str:
        return "" if value is None else form.format(value)

    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for kernel, row in rows.items():
        in_flight, loop = row["bytes_in_flight"], row["loop_bytes"]
        cells = (
            kernel.removeprefix("ull_"),
            row["grid"] and " x ".join(str(size) for size in row["grid"] if size > 1 or size == row["grid"][0]),
            row["shared_bytes"] and f"{row['shared_bytes'] / 1024:.4g}",
            row["blocks"],
            row["registers"],
            row["stack_bytes"] + row["spill_bytes"],
            f"{row['code_bytes'] / 1024:.1f}",
            row["before_wait"],
            row["wait_to_mma"] and f"{row['wait_to_mma']} ({row['wait_to_mma_barriers']})",
            row["ring"] and " x ".join(map(str, row["ring"])),
            in_flight and f"{in_flight / 1024:g}",
            loop and f"{row['loop_instructions']} / {loop}",
            loop and f"{_per_byte(row):.3f}",
        )
        lines.append("| " + " | ".join(text(cell) for cell in cells) + " |")
    return lines


HEADER = f"""# Kernels as compiled for {TARGET}

Written by `make kernels-report`, without a GPU: these are no measurements of speed. Weights are FP8, lm_head and KV
cache 16 bit. "Blocks/SM": how many blocks of a kernel fit on one of {MULTIPROCESSORS} multiprocessors. "In flight": the
ring of one block, asked for before the wait. Instructions are SASS in the order of addresses, those of the loop a
warp's for the bytes of weights that it multiplies each time round; where one loop holds two ways, or the end of a slice
or of a row tile as well, all of that is counted.
"""


def write(models: dict[str, dict[str, Figures]], path: Path) -> None:
    found = {arch: {kernel: asdict(one) for kernel, one in kernels.items()} for arch, kernels in models.items()}
    path.write_text(json.dumps({"compiler": compiler(), "models": found}, indent=1) + "\n")
    lines = [HEADER, f"NVRTC {compiler()}."]
    for arch, rows in found.items():
        lines += ["", f"## {arch}", "", *table(rows)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON object; the tables stand beside it")
    arguments = parser.parse_args()
    write({arch: measure(arch) for arch in ARCHS}, arguments.output)
    print(arguments.output.with_suffix(".md").read_text(), end="")


if __name__ == "__main__":
    main()
