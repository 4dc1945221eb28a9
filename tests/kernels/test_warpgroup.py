"""Products of warpgroups: they are mma()'s bit for bit, and the emulator tells the faults of who uses them."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
from compilers import compiles, disassembles
from conftest import ROOT
from emulation import EMULATOR, KernelError, aligned, pointer
from ull.bundle import Target
from ull_build.code.kernels import compile_file

sys.path.append(str(ROOT / "bench"))

import sass

SEEDS = range(4)
GROUPS, ROWS = 4, 128  # of columns of warpgroup_faults.cu; of its ring's sums
STAGE_BYTES = 2 * GROUPS * 128
on_the_emulator = pytest.mark.skipif(emulation.ON_DEVICE, reason="the emulator alone sees it")
with_reports = pytest.mark.skipif(
    emulation.SANITIZE or emulation.ON_DEVICE, reason="the emulator alone sees it, and not beside AddressSanitizer"
)


TRAP = """
#include "arch.cuh"
namespace arch = ull::arch;
struct Params { float* output; };
ULL_KERNEL(sample, Params, 128, 1) {
  float c[1][4] = {};
  const uint32_t a[4] = {};
  arch::warpgroup_fence();
  arch::warpgroup_mma(c, a, arch::core_matrices(arch::shared_memory(), 128, 256));
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(c);
  params.output[arch::thread()] = c[0][0];
}
"""


class Products(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "by_warps", "by_warpgroup")),
        *((name, ctypes.c_int32) for name in ("steps", "k_stride", "n_stride")),
    ]


class Swizzled(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "image", "sums")),
        ("layout", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("pieces", "steps", "step_bytes", "overwritten")),
    ]


class Fault(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_int32) for name in ("steps", "fault")),
    ]


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build([EMULATOR / "warpgroup.cu"])


@pytest.fixture(scope="module")
def faulty() -> emulation.Kernels:
    return emulation.build([EMULATOR / "warpgroup_faults.cu"])


@pytest.fixture(scope="module")
def reporting() -> emulation.Kernels:
    return emulation.build([EMULATOR / f"{name}.cu" for name in ("warpgroup", "warpgroup_faults")], reports=True)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def strides(groups: int) -> dict[str, tuple[int, int]]:
    """Bytes between core matrices along k and n."""
    return {
        "one half of k behind the other": (128 * groups, 128),
        "halves of k side by side": (128, 256),
        "apart": (208 * groups + 16, 208),
    }


def operands(groups: int, warpgroups: int, steps: int, seed: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """a [steps, rows, 16] and the transpose of b [steps, columns, 16], of very different sizes by row."""
    generator = np.random.default_rng(seed)
    a = aligned((steps, 64 * warpgroups, 16), np.float16)
    b = aligned((steps, 8 * groups, 16), np.float16)
    a[...] = generator.standard_normal(a.shape) * 2.0 ** generator.integers(-12, 8, (1, 64 * warpgroups, 1))
    b[...] = generator.standard_normal(b.shape)
    return a, b


def multiplied(
    kernels: emulation.Kernels, a: NDArray[np.float16], b: NDArray[np.float16], layout: str, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """1 + the products' sum [rows, columns], by warps and by warpgroups."""
    steps, rows, _ = a.shape
    groups = b.shape[1] // 8
    by_warps, by_warpgroup = (aligned((rows, 8 * groups), np.float32, 1.0) for _ in range(2))
    k_stride, n_stride = strides(groups)[layout]
    kernels.run(
        f"products_{groups}",
        grid=(1, 1),
        threads=2 * rows,
        shared_bytes=2 * (k_stride + (groups - 1) * n_stride + 128),
        params=Products(*map(pointer, (a, b, by_warps, by_warpgroup)), steps, k_stride, n_stride),
        seed=seed,
    )
    return by_warps, by_warpgroup


@pytest.mark.parametrize("layout", strides(1))
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16, 32])
def test_a_warpgroup_computes_what_warps_do_bit_for_bit(
    kernels: emulation.Kernels, groups: int, warpgroups: int, layout: str
) -> None:
    """On the chip too (MMA-Sim, arXiv 2511.10909: both add the 16 products and c at once, alike)."""
    a, b = operands(groups, warpgroups, 6, seed=groups)
    by_warps, by_warpgroup = multiplied(kernels, a, b, layout)
    np.testing.assert_array_equal(by_warpgroup.view(np.uint32), by_warps.view(np.uint32))
    products = np.abs(np.einsum("srk,sck->srck", a.astype(np.float64), b.astype(np.float64)))
    exact = 1 + np.einsum("srk,sck->rc", a.astype(np.float64), b.astype(np.float64))
    assert (np.abs(by_warpgroup - exact) <= 1e-5 * (1 + products.sum(axis=(0, 3)))).all()


def test_products_of_what_is_no_number_are_the_same_too(kernels: emulation.Kernels) -> None:
    a, b = operands(4, 1, 2, seed=1)
    a[0, 3, 4], a[0, 20, 5], a[1, 33, 6], a[1, 40] = np.nan, np.inf, -np.inf, 6e-8
    b[0, 7, 4], b[1, 9, 9] = np.inf, np.nan
    by_warps, by_warpgroup = multiplied(kernels, a, b, "apart")
    assert np.isnan(by_warps).sum() > 32 and np.isinf(by_warps).sum() > 16
    np.testing.assert_array_equal(by_warpgroup.view(np.uint32), by_warps.view(np.uint32))


@pytest.mark.parametrize("start", [1.0, np.nan])
def test_a_product_that_begins_sums_is_the_same_as_one_added_to_zeros(kernels: emulation.Kernels, start: float) -> None:
    a, b = operands(8, 2, 2, seed=3)
    added, by_warps = (aligned((128, 64), np.float32, 0.0) for _ in range(2))
    begun = aligned((128, 64), np.float32, start)
    layout = strides(8)["apart"]
    for kernel, sums in (("products_8", added), ("begun_products_8", begun)):
        kernels.run(
            kernel,
            grid=(1, 1),
            threads=256,
            shared_bytes=2 * (layout[0] + 7 * layout[1] + 128),
            params=Products(pointer(a), pointer(b), pointer(by_warps), pointer(sums), 2, *layout),
        )
    np.testing.assert_array_equal(begun, added)


@pytest.mark.parametrize("layout", strides(1))
@pytest.mark.parametrize("groups", [1, 16])
def test_products_of_e4m3(kernels: emulation.Kernels, groups: int, layout: str) -> None:
    """A chip adds them with 13 bits behind the largest term's, so much may be off there."""
    generator = np.random.default_rng(groups)
    steps, (k_stride, n_stride) = 3, strides(groups)[layout]
    a = aligned((steps, 64, 32), ml_dtypes.float8_e4m3fn)
    b = aligned((steps, 8 * groups, 32), ml_dtypes.float8_e4m3fn)
    a[...] = generator.standard_normal(a.shape) * 2.0 ** generator.integers(-8, 6, (1, 64, 1))
    b[...] = generator.standard_normal(b.shape)
    sums = aligned((64, 8 * groups), np.float32, 1.0)
    kernels.run(
        f"e4m3_products_{groups}",
        grid=(1, 1),
        threads=128,
        shared_bytes=2 * (k_stride + (groups - 1) * n_stride + 128),
        params=Products(pointer(a), pointer(b), None, pointer(sums), steps, k_stride, n_stride),
    )
    products = np.einsum("srk,sck->srck", a.astype(np.float64), b.astype(np.float64))
    off = 33 * 2.0**-13 if emulation.ON_DEVICE else 1e-6
    largest = 1 + np.abs(products).sum(axis=(0, 3))
    assert (np.abs(sums - 1 - products.sum(axis=(0, 3))) <= off * largest).all()


def test_products_of_e4m3_that_is_no_number(kernels: emulation.Kernels) -> None:
    a, b = (aligned((1, rows, 32), ml_dtypes.float8_e4m3fn, 1.0) for rows in (64, 8))
    a[0, 3, 4], b[0, 7, 30] = np.nan, np.nan
    sums = aligned((64, 8), np.float32, 0.0)
    params = Products(pointer(a), pointer(b), None, pointer(sums), 1, *strides(1)["apart"])
    kernels.run("e4m3_products_1", grid=(1, 1), threads=128, shared_bytes=2 * (224 + 128), params=params)
    expected = np.full((64, 8), 32.0)
    expected[3], expected[:, 7] = np.nan, np.nan
    np.testing.assert_array_equal(sums, expected)


@on_the_emulator
def test_the_order_of_threads_changes_nothing(kernels: emulation.Kernels) -> None:
    a, b = operands(16, 2, 4, seed=2)
    assert len({multiplied(kernels, a, b, "apart", seed)[1].tobytes() for seed in SEEDS}) == 1


# ---- swizzles --------------------------------------------------------------------------------------------------------

SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes of a row: the descriptor's bits 62 and 63


def places(columns: int, row_bytes: int) -> NDArray[np.intp]:
    """Where the 16-byte pieces of swizzled rows lie, in pieces: [column, piece], from the pictures of the PTX ISA.

    Of 8 columns in a line of 128 bytes each, a column's pieces are exchanged by its number; of shorter rows two or four
    columns share a line, and it is the line's number, of as many bits as a row's pieces need.
    """
    pieces, lines = row_bytes // 16, 128 // row_bytes
    column, piece = np.indices((columns, pieces))
    return np.asarray(column * pieces + (piece ^ column // lines % pieces), np.intp)


def swizzled_sums(
    kernels: emulation.Kernels,
    a: NDArray[np.float16],
    b: NDArray[np.float16],
    row_bytes: int,
    overwritten: tuple[int, int] | None = None,
) -> NDArray[np.float32]:
    """1 + the products' sum, of b in swizzled rows, or for 0 in core matrices; `overwritten`: column and piece."""
    steps, columns, _ = b.shape
    if row_bytes:
        assert row_bytes == 32 * steps
        at = places(columns, row_bytes)
        image = aligned((at.size, 8), np.float16)
        image[at] = b.transpose(1, 0, 2).reshape(columns, -1, 8)
        k_stride, n_stride, step_bytes = 16, 8 * row_bytes, 32  # the first is not looked at
    else:
        image = aligned((2 * steps * columns, 8), np.float16)
        image[...] = b.reshape(steps, columns, 2, 8).transpose(0, 2, 1, 3).reshape(-1, 8)
        k_stride, n_stride, step_bytes = 16 * columns, 128, 32 * columns
    sums = aligned((64, columns), np.float32, 1.0)
    layout = k_stride >> 4 << 16 | n_stride >> 4 << 32 | SWIZZLES.get(row_bytes, 0) << 62
    piece = -1 if overwritten is None else int(places(columns, row_bytes)[overwritten])
    kernels.run(
        "swizzled_products_4",
        grid=(1, 1),
        threads=128,
        shared_bytes=image.nbytes + 1024,
        params=Swizzled(*map(pointer, (a, image, sums)), layout, len(image), steps, step_bytes, piece),
    )
    return sums


@pytest.mark.parametrize("row_bytes", SWIZZLES)
def test_swizzled_operands_are_read_as_others(kernels: emulation.Kernels, row_bytes: int) -> None:
    """No kernel of ull has them; whoever writes one finds them here as the chip takes them."""
    a, b = operands(4, 1, row_bytes // 32, seed=row_bytes)
    expected = swizzled_sums(kernels, a, b, 0)
    exact = 1 + np.einsum("srk,sck->rc", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(expected, exact, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(swizzled_sums(kernels, a, b, row_bytes).view(np.uint32), expected.view(np.uint32))


@on_the_emulator
@pytest.mark.parametrize("row_bytes", SWIZZLES)
def test_a_swizzled_operand_must_not_change_in_flight(kernels: emulation.Kernels, row_bytes: int) -> None:
    """The first product reads each row's first two pieces, wherever they lie, and none of the others."""
    a, b = operands(4, 1, row_bytes // 32, seed=1)
    for piece in range(row_bytes // 16):
        if piece < 2:
            with pytest.raises(KernelError, match=r"b of the product at .*, which was in flight until here"):
                swizzled_sums(kernels, a, b, row_bytes, overwritten=(13, piece))
        else:
            swizzled_sums(kernels, a, b, row_bytes, overwritten=(13, piece))


# ---- faults ----------------------------------------------------------------------------------------------------------


def small_integers(shape: tuple[int, ...], seed: int) -> NDArray[np.float16]:
    values: NDArray[np.float16] = aligned(shape, np.float16)
    values[...] = np.random.default_rng(seed).integers(-3, 4, shape)
    return values


def run_fault(kernels: emulation.Kernels, kernel: str, fault: int, seed: int, blocks: int = 1) -> bool | None:
    """Whether the sums are right, of several blocks those of the last; None: none of them is a number."""
    rows, steps = (ROWS, 7) if kernel == "ring_products" else (64, 1)
    a = small_integers((steps, rows, 16), seed)
    b = small_integers((steps, GROUPS, 2, 8, 8), seed + 1)  # [group][half of k][column][k]
    c = aligned((rows, 8 * GROUPS), np.float32)
    threads = 2 * rows + (32 if kernel == "ring_products" else 0)
    kernels.run(
        kernel,
        grid=(blocks, 1),
        threads=threads,
        shared_bytes=3 * STAGE_BYTES + 48 if kernel == "ring_products" else STAGE_BYTES + 16,
        params=Fault(*map(pointer, (a, b, c)), steps, fault),
        seed=seed,
    )
    columns = b.transpose(0, 1, 3, 2, 4).reshape(steps, 8 * GROUPS, 16)
    if np.isnan(c).all():
        return None
    return np.array_equal(c, np.einsum("srk,sck->rc", a.astype(np.float32), columns.astype(np.float32)))


def fault_of(fault: int, message: str) -> Any:
    return pytest.param(fault, message, id=f"fault {fault}")


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", ["ring_products", "stored_product"])
def test_products_in_flight_are_right(faulty: emulation.Kernels, kernel: str, seed: int) -> None:
    assert run_fault(faulty, kernel, 0, seed, blocks=2)


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
def test_right_kernels_are_right_where_they_report(reporting: emulation.Kernels, seed: int) -> None:
    assert run_fault(reporting, "ring_products", 0, seed)
    assert run_fault(reporting, "stored_product", 0, seed)
    a, b = operands(16, 2, 2, seed)
    by_warps, by_warpgroup = multiplied(reporting, a, b, "halves of k side by side", seed)
    np.testing.assert_array_equal(by_warpgroup.view(np.uint32), by_warps.view(np.uint32))
    a, b = operands(4, 1, 2, seed)
    np.testing.assert_array_equal(swizzled_sums(reporting, a, b, 64), swizzled_sums(reporting, a, b, 0))


def told_fault(kernels: emulation.Kernels, kernel: str, fault: int, seed: int) -> str:
    """What the launch ends with."""
    with pytest.raises(KernelError) as error:
        run_fault(kernels, kernel, fault, seed)
    return str(error.value)


PRODUCT = r"the product at warpgroup_faults\.cu:\d+"
IN_FLIGHT = f"{PRODUCT}, which is in flight"


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"warpgroup_commit, but thread \d+ of the warpgroup was in warpgroup_mma at warpgroup_faults\.cu"),
        fault_of(2, r"warpgroup_mma without warpgroup_fence\(\) before it"),
        fault_of(3, r"warpgroup_mma without warpgroup_fence\(\) since the last warpgroup_commit\(\)"),
        fault_of(5, f"lane 0 has changed a of {PRODUCT}, which was in flight until here"),
        fault_of(6, f"a race at shared .*a bulk copy there has begun, and {IN_FLIGHT}, reads it"),
        fault_of(7, r"thread \d+ ends, and nobody has committed the product"),
        fault_of(8, r"thread \d+ ends, and nobody has waited for the product"),
        fault_of(9, f"(a bulk copy there has begun, and {IN_FLIGHT}|nobody has waited for it|deadlock)"),
        fault_of(10, rf"lane 0 has changed c of {PRODUCT} before a warpgroup_wait\(\) brought it back"),
        fault_of(11, r"thread \d+ ends, and no warpgroup_wait\(\) was called with c of the product"),
        fault_of(12, r"(was in warpgroup_fence at|without warpgroup_fence\(\) since the last warpgroup_commit)"),
        fault_of(13, r"warpgroup_fence, but thread \d+ of the warpgroup has ended"),
        fault_of(14, r"lane 9, .*warpgroup_fence, but thread \d+ of the warpgroup was in warpgroup_wait"),
        fault_of(15, r"(with another descriptor than thread \d+ of the warpgroup|nobody has waited for it)"),
        fault_of(16, "c overlaps c of the product of another shape at .*, which is in flight"),
        fault_of(17, r"lane \d+ has other registers for c than its warp at"),
        fault_of(18, r"(nobody has waited for the product|has not come to this warpgroup_fence)"),
    ],
)
def test_faults_of_a_ring_are_told(faulty: emulation.Kernels, seed: int, fault: int, message: str) -> None:
    told = told_fault(faulty, "ring_products", fault, seed)
    assert re.search(rf"^ring_products, .*{message}", told), told


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_that_are_read_before_the_wait_are_no_numbers(faulty: emulation.Kernels, seed: int) -> None:
    assert run_fault(faulty, "ring_products", 0, seed)
    assert run_fault(faulty, "ring_products", 4, seed) is None


@on_the_emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(2, f"b of {PRODUCT}, which was in flight until here, has changed: at shared"),
        fault_of(4, f"b of {PRODUCT}, which was in flight until here, has changed: at shared"),
        fault_of(7, f"lane 0 has changed a of {PRODUCT}, which was in flight until here"),
        fault_of(11, f"a race at shared .*a bulk copy there has begun, and {IN_FLIGHT}, reads it"),
        fault_of(12, r"reads shared \+ 0, where the bulk copy begun at .* writes: nobody has waited for it"),
    ],
)
def test_operands_that_change_in_flight_are_told(
    faulty: emulation.Kernels, seed: int, fault: int, message: str
) -> None:
    told = told_fault(faulty, "stored_product", fault, seed)
    assert re.search(rf"^stored_product, .*{message}", told), told


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"a product reads shared .*without fence_bulk_copies\(\) after the store by thread"),
        fault_of(
            2, f"a race at shared .*(the store by .*{IN_FLIGHT}, reads it|the store by .* not happened before it)"
        ),
        fault_of(3, r"a product reads shared .*without fence_bulk_copies\(\) after the store by thread"),
        fault_of(4, f"a race at shared .*the store by thread 40 .*({IN_FLIGHT}|neither happens before)"),
        fault_of(5, f"a race at shared .*the store by thread 40 .*({IN_FLIGHT}|neither happens before)"),
        fault_of(6, f"the load by thread .*, of c of {IN_FLIGHT}"),
        fault_of(7, f"the store by thread .*, of a of {IN_FLIGHT}"),
        fault_of(8, r"warpgroup_mma, but thread \d+ has accessed a since warpgroup_fence\(\)"),
        fault_of(9, r"warpgroup_mma, but thread \d+ has accessed c since warpgroup_fence\(\)"),
        fault_of(10, f"a bulk copy there has begun, and ({IN_FLIGHT}|a product that warp .*neither happens before)"),
        fault_of(11, f"a bulk copy there has begun, and {IN_FLIGHT}"),
        fault_of(12, "nobody has waited for it"),
    ],
)
def test_operands_out_of_order_are_told_where_kernels_report(
    reporting: emulation.Kernels, seed: int, fault: int, message: str
) -> None:
    told = told_fault(reporting, "stored_product", fault, seed)
    assert re.search(rf"^stored_product, .*{message}", told), told


@with_reports
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stage_that_is_refilled_too_early_is_told_in_every_order(reporting: emulation.Kernels, seed: int) -> None:
    told = told_fault(reporting, "ring_products", 6, seed)
    assert re.search(f"a bulk copy there has begun, and ({IN_FLIGHT}|a product that warp .*neither happens)", told)


@on_the_emulator
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        fault_of(1, r"core matrices every 136 bytes along k and 256 along n: must be multiples of 16 below 2\^18"),
        fault_of(2, r"core matrices every 128 bytes along k and 262144 along n: must be multiples of 16 below"),
        fault_of(3, r"core matrices at shared \+ 8: must be aligned to 16"),
        fault_of(4, r"core matrices at shared \+ -16: .*within the block's 1040 bytes"),
        fault_of(5, "core matrices every 64 bytes along k and 256 along n overlap"),
        fault_of(6, "core matrices every 128 bytes along k and 0 along n overlap"),
        fault_of(7, r"reads shared \+ 0 to shared \+ 1072, outside the block's 1040 bytes"),
        fault_of(8, "rows of 128 bytes, swizzled, every 256 bytes along n: must be a multiple of 1024"),
        fault_of(9, "the descriptor 0x00040.*must be 0"),
        fault_of(10, "the descriptor 0x00000.*8000: .*must be 0"),
        fault_of(11, r"rows of 32 bytes, swizzled, at shared \+ 32: their first 8 must begin at a multiple of 256"),
        fault_of(12, r"reads shared \+ 0 to shared \+ 2048, outside the block's 1040 bytes"),
    ],
)
def test_operands_that_cannot_be_described_are_told(faulty: emulation.Kernels, fault: int, message: str) -> None:
    told = told_fault(faulty, "described_product", fault, 0)
    assert re.search(rf"^described_product, .*warpgroup_faults\.cu:\d+: .*{message}", told), told


@on_the_emulator
@pytest.mark.parametrize(
    ("threads", "come", "message"),
    [
        (192, 192, r"by thread \d+: of its warpgroup, threads 128 to 255, the block of 192 lacks some"),
        (128, 96, r"(of the warpgroup has ended|thread \d+ ends, and has not come to this warpgroup_fence as thread)"),
        (192, 128, ""),
        (128, 128, ""),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_all_threads_of_a_warpgroup_come(
    faulty: emulation.Kernels, threads: int, come: int, message: str, seed: int
) -> None:
    launch: dict[str, Any] = {"grid": (1, 1), "threads": threads, "params": Fault(steps=come), "seed": seed}
    if message:
        with pytest.raises(KernelError, match=message):
            faulty.run("fenced_warps", **launch)
    else:
        faulty.run("fenced_warps", **launch)


# ---- the compiler ----------------------------------------------------------------------------------------------------


@disassembles
def test_the_compiler_makes_products_of_warpgroups_that_do_not_wait_for_each_other() -> None:
    """Where it cannot keep them in flight, it says in its log that it serializes them."""
    compiled = compile_file(EMULATOR / "warpgroup.cu", {})
    assert len(compiled.functions) == 10
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert "serialized" not in compiled.log
    for name, code in sass.disassemble(compiled.cubin).items():
        unit, k = ("QGMMA.", 32) if "e4m3" in name else ("HGMMA.", 16)
        shapes = {one.name.split(".")[1] for one in code.instructions if one.name.startswith(unit)}
        assert shapes == {f"64x{8 * int(name.rpartition('_')[2])}x{k}"}, name


@compiles
@pytest.mark.parametrize("target", ["sm_89", "sm_100a"])
def test_other_architectures_trap(target: Target, tmp_path: Path) -> None:
    """They have no such products: a kernel that stands before no `#if ULL_WARPGROUP_MMA` compiles."""
    source = tmp_path / "trap.cu"
    source.write_text(TRAP)
    assert "trap;" in compile_file(source, {}, target).ptx
    assert "trap;" not in compile_file(source, {}).ptx
