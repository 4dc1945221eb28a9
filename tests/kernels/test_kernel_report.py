"""`make kernels-report`: how machine code is read, and that no kernel gets worse than the committed figures."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from ull.gpu.geometry import attention
from ull.gpu.geometry.linear import LINEAR_TILES

sys.path.append(str(ROOT / "bench"))

import sass
from kernels_report import (
    ARCHS,
    RESULTS,
    UPDATE,
    Figures,
    compiler,
    fast_sources,
    figures_of,
    launches_of,
    reported_sources,
    table,
    variants,
    worse,
)
from occupancy import fit_together, needs

COMMITTED = json.loads(RESULTS.read_text())
ARCH = ARCHS[0]


@pytest.fixture(scope="module")
def launches() -> dict[bool, dict[str, Any]]:
    return {fast: launches_of(ARCH, fast) for fast in (False, True)}


@pytest.mark.parametrize(
    ("source", "fast"), variants(), ids=[f"{source.name}{', fast' if fast else ''}" for source, fast in variants()]
)
def test_no_kernel_got_worse(source: Path, fast: bool, launches: dict[bool, dict[str, Any]]) -> None:
    same_compiler = compiler() == COMMITTED["compiler"]
    problems = []
    for kernel, figures in figures_of(source, ARCH, launches[fast], fast).items():
        before = COMMITTED["models"][ARCH].get(kernel)
        assert before, f"{kernel} is not in {RESULTS.name}: {UPDATE}"
        problems += worse(kernel, asdict(figures), before, same_compiler)
    assert not problems, f"{'; '.join(problems)}: {UPDATE}"


def test_the_table_holds_the_kernels_that_there_are() -> None:
    def kernels_of(sources: list[Path]) -> list[str]:
        text = "".join(source.read_text() for source in sources)
        return re.findall(r"ULL_(?:GRID_|CLUSTER_|ROW_CLUSTER_|WIDE_)?KERNEL\((ull_\w+),", text)

    kernels = {*kernels_of(reported_sources()), *(f"{kernel}_fast" for kernel in kernels_of(fast_sources()))}
    for arch in ARCHS:
        assert set(COMMITTED["models"][arch]) == kernels, UPDATE
        lines = table(COMMITTED["models"][arch])
        assert "\n".join(lines) in RESULTS.with_suffix(".md").read_text(), UPDATE


@pytest.mark.parametrize("arch", ARCHS)
def test_the_committed_grids_are_those_of_today(arch: str) -> None:
    rows = COMMITTED["models"][arch]
    for fast, suffix in ((False, ""), (True, "_fast")):
        grids = {f"{kernel}{suffix}": list(launch.grid) for kernel, launch in launches_of(arch, fast).items()}
        committed = {kernel: rows[kernel]["grid"] for kernel in grids if kernel in rows}
        assert committed == {kernel: grids[kernel] for kernel in committed}, UPDATE


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", LINEAR_TILES)
def test_no_two_blocks_of_a_layer_lie_on_one_multiprocessor(arch: str, tile: int) -> None:
    """All others would wait for it. Whichever multiprocessor a block is given, of those that have room for it.

    Either no second one fits. Or the kernel comes right behind one that lies on every multiprocessor and leaves room
    for one of its blocks. A small kernel between the two might have taken that room somewhere.
    """
    rows = COMMITTED["models"][arch]
    attends, normed = f"attention_{attention.tile_of(tile)}", rows[f"ull_norm_{tile}"]["grid"] is not None
    for before, layer, is_behind in (
        (f"qkv_{tile}", attends, tile <= 8),
        (attends, f"o_{tile}", True),
        (f"o_{tile}", f"gate_up_{tile}", not normed),
        (f"gate_up_{tile}", f"down_{tile}", True),
        (f"down_{tile}", f"qkv_{tile}", not normed),
        (f"down_{tile}", f"head_{tile}", not normed),
    ):
        own, other = rows[f"ull_{layer}"], rows[f"ull_{before}"]
        leaves_room = other["grid"][0] * other["grid"][1] == 132 and in_one_place(other, own)
        assert own["blocks"] == 1 or (is_behind and leaves_room and not in_one_place(other, own, own)), layer


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", [tile for tile in LINEAR_TILES if tile <= 32])
def test_weights_are_on_their_way_beside_the_kernel_before(arch: str, tile: int) -> None:
    rows = COMMITTED["models"][arch]
    assert in_one_place(rows[f"ull_attention_{attention.tile_of(tile)}"], rows[f"ull_o_{tile}"])
    assert in_one_place(rows[f"ull_gate_up_{tile}"], rows[f"ull_down_{tile}"])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", [tile for tile in LINEAR_TILES if tile <= 32])
def test_a_norms_blocks_fit_between_two_layers(arch: str, tile: int) -> None:
    """Where they do not, the layer behind cannot come to where one lies before the layer before ends there."""
    rows = COMMITTED["models"][arch]
    norms = [rows[f"ull_norm_{tile}"]] * (2 if tile >= 16 else 1)
    if norms[0]["grid"] is None:
        return
    for before, behind in (("o", "gate_up"), ("down", "qkv"), ("down", "head")):
        fits = in_one_place(rows[f"ull_{before}_{tile}"], *norms, rows[f"ull_{behind}_{tile}"])
        # A row of 8192 is too long for the few registers that are left, but for those beside qkv's.
        assert fits or (arch == "llama-3.3-70b" and tile == 32), (before, behind)


@pytest.mark.parametrize("arch", ARCHS)
def test_norms_of_64_tokens_lie_beside_the_layer_behind(arch: str) -> None:
    """No two layers fit there. A norm has more blocks than there are multiprocessors: two to most of them."""
    rows = COMMITTED["models"][arch]
    norm = rows["ull_norm_64"]
    assert norm["grid"][0] > 132
    for layer in ("qkv", "gate_up", "head"):
        assert in_one_place(norm, norm, rows[f"ull_{layer}_64"]), layer


def in_one_place(*kernels: dict[str, Any]) -> bool:
    """Whether there is room for a block of each on one multiprocessor."""
    return fit_together(*(needs(kernel["registers"], kernel["threads"], kernel["shared_bytes"]) for kernel in kernels))


def test_what_only_weights_show() -> None:
    """The table's figures of one kernel, as a reading of its machine code and of its plan by hand gave them."""
    row = COMMITTED["models"][ARCH]["ull_qkv_1"]
    assert (row["loop_bytes"], row["grid"], row["threads"]) == (2 * 2048, [132, 1], 256)  # a stage of two row tiles
    warps, stages, nbytes = row["ring"]
    assert (warps, nbytes) == (8, 2048) and row["bytes_in_flight"] == warps * stages * nbytes
    assert row["ring"][1] * 8 * (2048 + 8) <= row["shared_bytes"]  # with the barriers


CODE = """
.text.ull_a:
        /*0000*/                   PREEXIT ;
        /*0010*/                   ACQBULK ;
.L_x_4:
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_1:
        /*0030*/                   F2FP.F16.E4M3.UNPACK_B R1, R2 ;
.L_x_2:
        /*0040*/                   F2FP.F16.E4M3.UNPACK_B R3, R2.H1 ;
        /*0050*/                   HMMA.16816.F32 R4, R1, R5, R4 ;
        /*0060*/              @!P0 BRA `(.L_x_3) ;
.L_x_5:
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/               @P2 BRA `(.L_x_4) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R38+URZ], R37 ;
        /*00b0*/                   BRA `(.L_x_2) ;
.L_x_6:
        /*00c0*/                   BRA `(.L_x_6);
        /*00d0*/                   NOP;
.text.ull_b:
        /*0000*/                   HMMA.16816.F32 R4, R1, R5, R4 ;
        /*0010*/                   ACQBULK ;
        /*0020*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0030*/               @P0 STG.E desc[UR4][R2.64+0x10], R8 ;
        /*0040*/                   EXIT ;
"""


def test_machine_code_is_read() -> None:
    kernels = sass.parse(CODE)
    a, b = kernels["ull_a"], kernels["ull_b"]
    assert (a.nbytes, b.nbytes) == (12 * 16, 5 * 16)
    assert (a.index("ACQBULK"), a.from_wait_to_mma(), b.from_wait_to_mma()) == (1, (3, 1), None)
    assert (a.word_stores(), b.word_stores()) == (0, 1)
    # The inner loop is that of .L_x_1: it lies within .L_x_4's, and what jumps back to .L_x_2 does so from outside.
    assert sass.weight_loop(a, 1) == sass.Loop(5, 2 * 2 * 32)
    assert sass.weight_loop(b, 1) is None


def test_the_loop_is_the_one_that_multiplies_most() -> None:
    """Of three loops: two row tiles at once; one with less to do for each byte, but fewer of them; a dearer one."""
    bodies = {"a": (4, 10), "b": (2, 3), "c": (4, 12)}  # conversions, other instructions
    lines, address = [".text.ull_a:"], 0
    for name, (conversions, others) in bodies.items():
        names = ["F2FP.F16.E4M3.UNPACK_B"] * conversions + ["HMMA.16816.F32"] + ["IADD3"] * others
        lines.append(f".L_x_{ord(name)}:")
        for instruction in (*(f"{one} R1, R2" for one in names), f"@P1 BRA `(.L_x_{ord(name)})"):
            lines.append(f"        /*{address:04x}*/                   {instruction} ;")
            address += 16
    assert sass.weight_loop(sass.parse("\n".join(lines))["ull_a"], 1) == sass.Loop(4 + 1 + 12 + 1, 4 * 2 * 32)


def test_16_bit_weights_show_by_the_mma() -> None:
    text = CODE.replace("F2FP.F16.E4M3.UNPACK_B", "IADD3")
    assert sass.weight_loop(sass.parse(text)["ull_a"], 2) == sass.Loop(5, 512 // 2)
    together = text.replace("HMMA.16816.F32 R4, R1, R5, R4", "HGMMA.64x16x16.F32 R24, R4, gdesc[UR4], R24")
    assert sass.weight_loop(sass.parse(together)["ull_a"], 2) == sass.Loop(5, 512)  # once for both groups of tokens


FIGURES = asdict(
    Figures(
        file="a.cu",
        registers=64,
        stack_bytes=0,
        spill_bytes=0,
        code_bytes=16000,
        before_wait=100,
        wait_to_mma=300,
        wait_to_mma_barriers=2,
        loop_instructions=130,
        loop_bytes=2048,
        ring=[8, 6, 2048],
        bytes_in_flight=98304,
        grid=[132, 1],
        threads=256,
        shared_bytes=114688,
        blocks=2,
        word_stores=8,
    )
)
WORSE = {
    "registers": (80, 81),
    "stack_bytes": (0, 8),
    "spill_bytes": (0, 4),
    "code_bytes": (17000, 20000),
    "wait_to_mma": (325, 340),
    "wait_to_mma_barriers": (1, 3),
    "loop_instructions": (142, 150),
    "bytes_in_flight": (98304, 81920),
    "blocks": (3, 1),
    "word_stores": (8, 25),
}


@pytest.mark.parametrize("name", WORSE)
def test_what_is_worse_is_named(name: str) -> None:
    bearable, too_much = WORSE[name]
    assert worse("ull_a", FIGURES, FIGURES, True) == []
    assert worse("ull_a", FIGURES | {name: bearable}, FIGURES, False) == []
    for same_compiler in (True, False):
        assert len(worse("ull_a", FIGURES | {name: too_much}, FIGURES, same_compiler)) == 1


def test_the_same_compiler_is_held_to_more() -> None:
    found = worse("ull_a", FIGURES | {"loop_instructions": 136, "registers": 72}, FIGURES, True)
    assert found == ["ull_a: registers 72, was 64", "ull_a: instructions per byte of weights 0.06641, was 0.06348"]
    assert worse("ull_a", FIGURES | {"loop_instructions": 136, "registers": 72}, FIGURES, False) == []
