"""Clusters of blocks: they share what comes from memory, and the emulator tells the faults of who uses them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import emulation
from compilers import compiles, disassembles
from conftest import ROOT
from emulation import EMULATOR, KernelError, aligned, pointer
from probe import Probe
from ull.bundle import Target
from ull_build.code.kernels import compile_file
from ull_build.code.nvrtc import Compiled

sys.path.append(str(ROOT / "bench"))

import sass

Run = Callable[[emulation.Kernels, int, int], bool]  # of a fault and a seed; whether the numbers are right

SEEDS = range(6)
STAGES, COLUMNS, TILES, ROWS = 7, 64, 2, 4  # of share_stages: TILES x ROWS blocks, two above each other in a cluster
RING_BYTES = 2 * 4 * COLUMNS + 4 * 8
GROUPS = 4  # of 8 columns of share_operand
on_the_emulator = pytest.mark.skipif(emulation.ON_DEVICE, reason="the emulator alone sees it")
with_reports = pytest.mark.skipif(
    emulation.SANITIZE or emulation.ON_DEVICE, reason="the emulator alone sees it, and not beside AddressSanitizer"
)


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build([EMULATOR / "clusters.cu"])


@pytest.fixture(scope="module")
def reporting() -> emulation.Kernels:
    return emulation.build([EMULATOR / "clusters.cu"], reports=True)


def fault_of(fault: int, message: str) -> Any:
    return pytest.param(fault, message, id=f"fault {fault}")


def shared(kernels: emulation.Kernels, fault: int, seed: int, rows: int = ROWS) -> bool:
    """Whether each block has the sums of all stages, of which it has brought half."""
    source = aligned((TILES, STAGES, COLUMNS), np.int32)
    source[...] = np.random.default_rng(seed).integers(-1000, 1000, source.shape)
    output = aligned((rows, TILES, COLUMNS), np.int32)
    kernels.run(
        "share_stages",
        grid=(TILES, rows),
        threads=COLUMNS + 32,
        shared_bytes=RING_BYTES,
        params=Probe(pointer(source), pointer(output), STAGES, fault),
        seed=seed,
    )
    return np.array_equal(output, source.sum(axis=1) * np.arange(1, rows + 1)[:, None, None])


def told(kernels: emulation.Kernels, fault: int, seed: int, run: Run = shared) -> str:
    """What the launch ends with."""
    with pytest.raises(KernelError) as error:
        assert run(kernels, fault, seed), "wrong numbers, and no error"
    return str(error.value)


@pytest.mark.parametrize("fault", [0, 9])
@pytest.mark.parametrize("rows", [2, 4])
def test_blocks_share_what_each_has_brought(kernels: emulation.Kernels, rows: int, fault: int) -> None:
    for seed in SEEDS:
        assert shared(kernels, fault, seed, rows)


def shared_in_a_row(kernels: emulation.Kernels, columns: int, seed: int) -> bool:
    """Whether each block has what it and its neighbour have brought."""
    source = aligned((3, columns, 4), np.int32)
    source[...] = np.random.default_rng(seed).integers(-1000, 1000, source.shape)
    output = aligned((3, columns, 2, 4), np.int32)
    params = Probe(pointer(source), pointer(output), 0, 0)
    kernels.run("share_row", grid=(columns, 3), threads=32, shared_bytes=64, params=params, seed=seed)
    return np.array_equal(output, np.repeat(source.reshape(3, columns // 2, 2, 4), 2, axis=1))


@pytest.mark.parametrize("columns", [2, 6])
def test_clusters_may_lie_in_a_row(kernels: emulation.Kernels, columns: int) -> None:
    for seed in SEEDS:
        assert shared_in_a_row(kernels, columns, seed)


@on_the_emulator
def test_a_grid_that_is_not_whole_clusters_in_a_row_is_refused(kernels: emulation.Kernels) -> None:
    with pytest.raises(KernelError, match="share_row: a grid of 3 x 3 blocks: must be whole clusters of 2 x 1"):
        shared_in_a_row(kernels, 3, 0)


@on_the_emulator
@pytest.mark.parametrize("rows", [1, 3])
def test_a_grid_that_is_not_whole_clusters_is_refused(kernels: emulation.Kernels, rows: int) -> None:
    with pytest.raises(
        KernelError, match=f"share_stages: a grid of 2 x {rows} blocks: must be whole clusters of 1 x 2"
    ):
        shared(kernels, 0, 0, rows)


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(
            1, r"of block \(\d, \d\), whose initialisation no fence_barrier_init\(\) and cluster_barrier\(\) follow"
        ),
        fault_of(2, r"(and cluster_barrier\(\) follow|mbarrier that fence_barrier_init\(\) has not followed)"),
        fault_of(4, "(fewer bytes are announced than come|deadlock)"),
        fault_of(5, "arrives once more than"),
        fault_of(6, "arrives in block 2 of a cluster of 2"),
        fault_of(7, "a multicast to the blocks 0x5 of a cluster of 2"),
        fault_of(8, "(has not waited for this arrival of another block of the cluster|which has ended)"),
        fault_of(10, r"deadlock: .*wait in cluster_barrier at clusters\.cu:\d+ \(160 of 192 arrived\)"),
        fault_of(
            11, r"(ends while other lanes of warp \d wait for it in cluster_barrier|but lane 3 of the warp has ended)"
        ),
        fault_of(12, "(which has ended|deadlock)"),
        fault_of(13, "arrives once more than"),
        fault_of(14, "must be multiples of 16"),
        fault_of(15, "(ends while a bulk copy is under way: nobody has waited for it|which has ended)"),
        fault_of(18, r"deadlock: .*wait in barrier_wait at clusters\.cu:\d+"),
    ],
)
def test_faults_of_a_shared_ring_are_told(kernels: emulation.Kernels, fault: int, message: str, seed: int) -> None:
    text = told(kernels, fault, seed)
    assert re.search(rf"^share_stages, .*{message}", text, re.DOTALL), text


@on_the_emulator
def test_a_stage_that_the_other_block_still_reads_gives_wrong_numbers_or_an_error(kernels: emulation.Kernels) -> None:
    """Where kernels do not report their loads, in most orders."""
    right = 0
    for seed in SEEDS:
        try:
            right += shared(kernels, 3, seed)
        except KernelError as error:
            assert "share_stages" in str(error)
    assert right < len(SEEDS)


# ---- order -----------------------------------------------------------------------------------------------------------


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [0, 9])
def test_right_kernels_are_right_where_they_report(reporting: emulation.Kernels, fault: int, seed: int) -> None:
    assert shared(reporting, fault, seed)


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(3, "(a bulk copy there has begun, and the load by thread|fewer bytes are announced than come)"),
        fault_of(16, "where that block has stored, which the emulator cannot follow: the store by thread"),
        fault_of(17, "a race at shared .*a bulk copy there has begun, and the store by thread"),
    ],
)
def test_copies_out_of_order_are_told_where_kernels_report(
    reporting: emulation.Kernels, fault: int, message: str, seed: int
) -> None:
    text = told(reporting, fault, seed)
    assert re.search(rf"^share_stages, .*{message}", text, re.DOTALL), text


def neighbours(kernels: emulation.Kernels, fault: int, seed: int) -> bool:
    source, output = aligned(4, np.uint32), aligned(8, np.uint32)
    source[...] = np.random.default_rng(seed).integers(0, 1 << 30, 4)
    params = Probe(pointer(source), pointer(output), 0, fault)
    kernels.run("tell_neighbour", grid=(1, 4), threads=64, shared_bytes=16, params=params, seed=seed)
    return np.array_equal(output[:4], source[[1, 0, 3, 2]])


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_meet_see_what_the_others_have_stored(kernels: emulation.Kernels, seed: int) -> None:
    assert neighbours(kernels, 0, seed)


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
def test_the_meeting_of_blocks_alone_tells_of_stores(reporting: emulation.Kernels, seed: int) -> None:
    assert neighbours(reporting, 0, seed)
    for fault in (1, 2):
        with pytest.raises(KernelError, match=r"a race at .*(load.*store|store.*load)"):
            neighbours(reporting, fault, seed)


def stored_in_both(kernels: emulation.Kernels, fault: int, seed: int) -> bool:
    source, output = aligned(4, np.float32), aligned((4, 2), np.float32)
    source[...] = np.random.default_rng(seed).standard_normal(4)
    params = Probe(pointer(source), pointer(output), 0, fault)
    kernels.run("store_in_both", grid=(1, 4), threads=32, shared_bytes=16, params=params, seed=seed)
    return np.array_equal(output, source.reshape(2, 2)[[0, 0, 1, 1]])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_stores_in_others(kernels: emulation.Kernels, seed: int) -> None:
    assert stored_in_both(kernels, 0, seed)


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_stores_in_others_where_they_report(reporting: emulation.Kernels, seed: int) -> None:
    assert stored_in_both(reporting, 0, seed)


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"(and cluster_barrier\(\) follow|mbarrier that fence_barrier_init\(\) has not followed)"),
        fault_of(2, "(fewer bytes are announced than come|ends while a bulk copy is under way|which has ended)"),
        fault_of(3, "(ends while a bulk copy is under way: nobody has waited for it|which has ended)"),
        fault_of(4, "stores in block 2 of a cluster of 2"),
        fault_of(5, r"stores at shared \+ \d+: must be a multiple of 4 and within the block's 16 bytes"),
        fault_of(6, r"stores at shared \+ 32: must be a multiple of 4 and within the block's 16 bytes"),
        fault_of(7, "(which has ended|deadlock|ends while a bulk copy is under way)"),
    ],
)
def test_faults_of_stores_in_others_are_told(kernels: emulation.Kernels, fault: int, message: str, seed: int) -> None:
    text = told(kernels, fault, seed, stored_in_both)
    assert re.search(rf"^store_in_both, .*({message})", text, re.DOTALL), text


def met(kernels: emulation.Kernels, fault: int, seed: int) -> bool:
    output, count = aligned((2, 4), np.uint32), 9
    kernels.run("meet_often", grid=(1, 4), threads=64, params=Probe(None, pointer(output), count, fault), seed=seed)
    return output.tolist() == [[count, count + 1, count + 2, count + 3], [*(count + i - 1 for i in (1, 0, 3, 2))]]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_meet_often(kernels: emulation.Kernels, seed: int) -> None:
    assert met(kernels, 0, seed)


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_meet_often_where_they_report(reporting: emulation.Kernels, seed: int) -> None:
    assert met(reporting, 0, seed)


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
def test_a_meeting_that_some_do_not_come_to_is_told(kernels: emulation.Kernels, seed: int) -> None:
    with pytest.raises(
        KernelError, match=r"deadlock: .*wait in cluster_barrier at clusters\.cu:\d+ \(96 of 128 arrived"
    ):
        met(kernels, 1, seed)


# ---- products --------------------------------------------------------------------------------------------------------


def multiplied(kernels: emulation.Kernels, fault: int, seed: int) -> bool:
    """Whether both blocks' products, of what the first of them has brought, are right."""
    generator = np.random.default_rng(seed)
    source, columns = aligned(64 * 16 + GROUPS * 128, np.float16), 8 * GROUPS
    source[...] = generator.integers(-3, 4, source.shape)
    a, b = source[: 64 * 16].reshape(64, 16), source[64 * 16 :].reshape(GROUPS, 2, 8, 8)
    output = aligned((2, 64, columns), np.float32)
    kernels.run(
        "share_operand",
        grid=(1, 2),
        threads=128,
        shared_bytes=2 * GROUPS * 128 + 16,
        params=Probe(pointer(source), pointer(output), 0, fault),
        seed=seed,
    )
    expected = 2 * a.astype(np.float32) @ b.transpose(0, 2, 1, 3).reshape(columns, 16).astype(np.float32).T
    return np.array_equal(output, np.stack([expected, expected]))


@pytest.mark.parametrize("seed", SEEDS)
def test_products_take_what_another_block_has_brought(kernels: emulation.Kernels, seed: int) -> None:
    assert multiplied(kernels, 0, seed)


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [1, 2, 3])
def test_an_operand_that_is_brought_anew_too_early_is_told(reporting: emulation.Kernels, fault: int, seed: int) -> None:
    assert multiplied(reporting, 0, seed)
    text = told(reporting, fault, seed, multiplied)
    early = "a bulk copy there has begun, and (a product that .* neither happens before|the product at .* in flight)"
    assert re.search(f"^share_operand, .*({early}|nobody has waited for it)", text), text


# ---- the compiler ----------------------------------------------------------------------------------------------------

USES = """
#include "arch.cuh"
namespace arch = ull::arch;
struct Params { uint64_t* output; };
ULL_CLUSTER_KERNEL(arrive, Params, 128, 2) {
  auto* barrier = reinterpret_cast<arch::Barrier*>(arch::shared_memory());
  arch::barrier_arrive_in(arch::thread() % 2, barrier);
}
ULL_CLUSTER_KERNEL(store, Params, 128, 2) {
  auto* words = reinterpret_cast<float*>(arch::shared_memory());
  arch::store_async_in(arch::thread() % 2, words, 1.0F, reinterpret_cast<arch::Barrier*>(words + 2));
}
ULL_CLUSTER_KERNEL(describe, Params, 128, 4) {
  params.output[arch::thread()] = arch::core_matrices(arch::shared_memory() + 16 * arch::thread(), 2048, 128);
}
"""


@compiles
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_compiler_makes_clusters(target: Target) -> None:
    """A launch needs no attribute for them: their size is the kernel's."""
    compiled = compile_file(EMULATOR / "clusters.cu", {}, target)
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert compiled.ptx.count(".reqnctapercluster 1, 2, 1") == len(compiled.functions) - 1 == 5
    assert compiled.ptx.count(".reqnctapercluster 2, 1, 1") == 1


@disassembles
def test_a_multicast_is_one_instruction() -> None:
    code = sass.disassemble(compile_file(EMULATOR / "clusters.cu", {}).cubin)["share_stages"]
    names = [one.name for one in code.instructions]
    assert names.count("UBLKCP.S.G.MULTICAST") == 1 and "UBLKCP.S.G" not in names


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    source = tmp_path_factory.mktemp("clusters") / "uses.cu"
    source.write_text(USES)
    return compile_file(source, {})


@disassembles
@pytest.mark.parametrize(("kernel", "instruction"), [("arrive", "SYNCS.ARRIVE"), ("store", "STAS")])
def test_what_another_block_gets_waits_for_no_memory(uses: Compiled, kernel: str, instruction: str) -> None:
    """A release for the cluster would: it would wait for all of the device."""
    names = [one.name for one in sass.disassemble(uses.cubin)[kernel].instructions]
    assert any(name.startswith(instruction) for name in names), names
    assert not any(name.startswith(("MEMBAR", "ERRBAR", "FENCE")) for name in names)


@compiles
def test_descriptors_leave_out_the_blocks_rank(uses: Compiled) -> None:
    """It stands above the 18 bits of an address in shared memory, where a descriptor has its strides."""
    (body,) = re.findall(r"\.entry describe\(.*?\n\}", uses.ptx, re.DOTALL)
    assert re.search(r"and\.b(32|64)\s+%rd?\d+, %rd?\d+, (262143|262128|16383);|bfe\.u32", body), body
