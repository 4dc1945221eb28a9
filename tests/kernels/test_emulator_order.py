"""What the emulator knows of the order of loads and stores: kernels that report them, right and with one fault each."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
from emulation import EMULATOR, KernelError, aligned, pointer
from probe import Probe

pytestmark = pytest.mark.skipif(
    emulation.SANITIZE or emulation.ON_DEVICE, reason="the emulator alone sees it, and not beside AddressSanitizer"
)
SEEDS = range(4)


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build([EMULATOR / "ordering.cu", EMULATOR / "barriers.cu"], reports=True)


def numbers(count: int, dtype: Any = np.uint32) -> NDArray[Any]:
    values: NDArray[Any] = aligned(count, dtype)
    values[...] = np.random.default_rng(count).integers(0, 1 << 20, count)
    return values


def run(
    kernels: emulation.Kernels,
    kernel: str,
    source: NDArray[Any],
    output: NDArray[Any],
    fault: int,
    seed: int,
    blocks: int = 1,
    threads: int = 64,
    **lists: list[NDArray[Any]],
) -> NDArray[Any]:
    params = Probe(pointer(source), pointer(output), 0, fault)
    kernels.run(kernel, grid=(blocks, 1), threads=threads, shared_bytes=2048, params=params, seed=seed, **lists)
    return output


def fault_of(fault: int, message: str) -> Any:
    return pytest.param(fault, message, id=f"fault {fault}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"a race at .*load by thread \d+ of .*ordering\.cu:\d+.*store by thread \d+ of .*ordering\.cu:\d+"),
        fault_of(2, "a race at .*load.*store"),
        fault_of(3, "a race at .*load.*store"),
        fault_of(4, "a race at .*load by thread 0 .*store by thread 0"),
    ],
)
def test_the_last_block_sees_what_the_others_have_fenced(
    kernels: emulation.Kernels, seed: int, fault: int, message: str
) -> None:
    source = numbers(5 * 64)
    output = run(kernels, "sum_up", source, aligned(2 + 5 * 64, np.uint32, 0), 0, seed, blocks=5)
    assert output[0] == source.sum()
    with pytest.raises(KernelError, match=message):
        run(kernels, "sum_up", source, aligned(2 + 5 * 64, np.uint32, 0), fault, seed, blocks=5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_host_sees_what_was_stored_before_it_was_told(kernels: emulation.Kernels, seed: int) -> None:
    source = numbers(64, np.uint64)
    output = aligned(65, np.uint64)
    run(kernels, "tell_host", source, output, 0, seed, host_reads=[output])
    assert output.tolist() == [7, *source]
    for fault in (1, 2):
        with pytest.raises(KernelError, match=r"store .*ordering\.cu:\d+.* has not happened before store_release_sys"):
            run(kernels, "tell_host", source, output, fault, seed, host_reads=[output])
        run(kernels, "tell_host", source, output, fault, seed)  # nobody reads it


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"ordering\.cu:\d+: a bulk copy to .* without fence_bulk_copies\(\) after the store by thread"),
        fault_of(2, "a race at shared .*a bulk copy there has begun, and the load by thread"),
        fault_of(3, r"mbarrier that fence_barrier_init\(\) has not followed"),
        fault_of(4, r"predecessor has written, without fence_bulk_sources\(\)"),
        fault_of(5, r"predecessor has written, without fence_bulk_sources\(\)"),
        fault_of(6, r"before wait_for_predecessor\(\), which is no constant"),
        fault_of(7, "nobody has waited for it"),
        fault_of(8, "without having waited for the bulk copy"),
    ],
)
def test_bulk_copies_and_threads_take_turns(kernels: emulation.Kernels, seed: int, fault: int, message: str) -> None:
    source, output = numbers(256), aligned(256, np.uint32)
    run(kernels, "stage_twice", source, output, 0, seed, threads=256, predecessor_writes=[source])
    np.testing.assert_array_equal(output, source + source[::-1][np.arange(256) ^ 1])
    if fault in (4, 5):  # nothing to fence where nobody has written, or a graph ago
        run(kernels, "stage_twice", source, output, fault, seed, threads=256)
    with pytest.raises(KernelError, match=message):
        run(kernels, "stage_twice", source, output, fault, seed, threads=256, predecessor_writes=[source])


def test_nobody_stores_where_a_bulk_copy_reads(kernels: emulation.Kernels) -> None:
    """The emulator sees it while the copy is under way: in most orders."""
    seen = 0
    for seed in range(8):
        source, output = numbers(256), aligned(256, np.uint32)
        try:
            run(kernels, "stage_twice", source, output, 9, seed, threads=256)
        except KernelError as error:
            assert re.search(r"the store by .*ordering\.cu:\d+.* a bulk copy that is under way reads", str(error))
            seen += 1
    assert seen > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_order_those_that_meet(kernels: emulation.Kernels, seed: int) -> None:
    source, output = numbers(64), aligned(64, np.uint32)
    for fault in (0, 2):
        run(kernels, "swap_lanes", source, output, fault, seed)
        np.testing.assert_array_equal(output, source[np.arange(64) ^ 1])
    for fault in (1, 3):  # a shuffle orders nothing, and neither does what only the other warp does
        with pytest.raises(KernelError, match="a race at shared"):
            run(kernels, "swap_lanes", source, output, fault, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_orders_arrivals_before_waiters(kernels: emulation.Kernels, seed: int) -> None:
    source, output = numbers(64), aligned(64, np.uint32)
    run(kernels, "hand_on", source, output, 0, seed)
    np.testing.assert_array_equal(output, np.roll(source, -33))
    with pytest.raises(KernelError, match="a race at shared"):
        run(kernels, "hand_on", source, output, 1, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"(?s)deadlock.* wait in named_barrier 1 at ordering\.cu:\d+ \(96 of 128 arrived\)"),
        fault_of(2, r"named_(barrier|arrive) 1 of (64|128) threads, but others are there for one of (128|64)"),
        fault_of(3, "a race at shared|arrives twice"),  # if a warp is two tiles ahead
        fault_of(4, "a race at shared"),
        fault_of(5, "a race at shared|arrives twice"),
        fault_of(6, r"thread \d+ arrives twice at named_barrier 1"),
        fault_of(7, "a race at shared"),
    ],
)
def test_a_warp_finishes_while_the_others_go_on(
    kernels: emulation.Kernels, seed: int, fault: int, message: str
) -> None:
    source = numbers(7 * 128)
    output = run(kernels, "sum_tiles", source, aligned(7 * 32, np.uint32), 0, seed, threads=128)
    np.testing.assert_array_equal(output.reshape(7, 32), source.reshape(7, 4, 32).sum(axis=1))
    with pytest.raises(KernelError, match=message):
        run(kernels, "sum_tiles", source, aligned(7 * 32, np.uint32), fault, seed, threads=128)


def test_bytes_of_a_word_are_apart(kernels: emulation.Kernels) -> None:
    output = aligned(64, np.uint8)
    assert run(kernels, "store_bytes", output, output, 0, 1).tolist() == list(range(64))
    with pytest.raises(KernelError, match=r"a race at .*store.*store"):
        run(kernels, "store_bytes", output, output, 1, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_constants_are_read_before_the_wait(kernels: emulation.Kernels, seed: int) -> None:
    """By each thread: that others have waited is not enough."""
    source, output = numbers(65), aligned(64, np.uint32)
    run(kernels, "load_early", source, output, 0, seed, constants=[source[:1]])
    np.testing.assert_array_equal(output, source[1:] + source[0])
    for fault, constants in ((0, []), (1, [source[:1]]), (2, [source[:1]])):
        with pytest.raises(KernelError, match=r"the load by thread .* before wait_for_predecessor\(\)"):
            run(kernels, "load_early", source, output, fault, seed, constants=constants)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clusters_barrier_orders_those_that_meet_and_its_start_does_not(
    kernels: emulation.Kernels, seed: int
) -> None:
    source, output = numbers(1), aligned(128, np.uint32)
    launch: dict[str, Any] = {"grid": (1, 2), "threads": 64, "shared_bytes": 64, "seed": seed}
    kernels.run("meet_cluster", params=Probe(pointer(source), pointer(output), 0, 0), **launch)
    assert (output == source[0]).all()
    with pytest.raises(KernelError, match="a race at shared"):
        kernels.run("meet_cluster", params=Probe(pointer(source), pointer(output), 0, 1), **launch)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_earlier_kernels_wrote_is_read_past_l1_before_the_wait(kernels: emulation.Kernels, seed: int) -> None:
    source, output = numbers(65), aligned(64, np.uint32)
    run(kernels, "load_early", source, output, 3, seed, earlier=[source[:4]])
    np.testing.assert_array_equal(output, source[1:] + source[0])
    with pytest.raises(KernelError, match=r"the load by thread .* earlier kernel wrote, but not by load_global\(\)"):
        run(kernels, "load_early", source, output, 0, seed, earlier=[source[:4]])


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_run_at_once_wait_for_each_other(kernels: emulation.Kernels, seed: int) -> None:
    source, output = numbers(5), aligned(11, np.uint32, 0)
    for fault in (0, 1, 5):  # 5: a wait orders nothing without a fence behind it
        params = Probe(pointer(source), pointer(output), 4, fault)
        launch = {"grid": (5, 1), "threads": 64, "params": params, "seed": seed}
        if fault == 0:
            kernels.run("pass_numbers", **launch)
        else:
            with pytest.raises(KernelError, match="a race at"):
                kernels.run("pass_numbers", **launch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", [0, 1], ids=["named barrier", "mbarrier"])
def test_what_a_warp_has_seen_of_another_block_passes_on(kernels: emulation.Kernels, seed: int, way: int) -> None:
    """To those whom it tells after its wait and its fence, without waiting for them."""
    source = numbers(1)
    for fault in range(4):
        output = aligned(3, np.uint32, 0)
        params = Probe(pointer(source), pointer(output), way, fault)
        launch: dict[str, Any] = {"grid": (2, 1), "threads": 64, "shared_bytes": 64, "params": params, "seed": seed}
        if fault == 0:
            kernels.run("relay", **launch)
            assert output[2] == source[0]
        else:
            with pytest.raises(KernelError, match="a race at"):
                kernels.run("relay", **launch)
