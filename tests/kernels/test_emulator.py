"""The emulator itself: it runs right kernels right, and shows the faults that it is there to show."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
from emulation import KernelError, aligned, pointer
from probe import Probe

HERE = Path(__file__).parent
DOUBLES = HERE.parent / "doubles"
SEEDS = range(8)


class Mma(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in "abc"), ("count", ctypes.c_int32)]


class Convert(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("numbers", "f16", "bf16", "e4m3")),
        *((name, ctypes.c_void_p) for name in ("from_f16", "from_bf16", "from_e4m3")),
        ("count", ctypes.c_int32),
    ]


class Fast(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("numbers", "exp2", "reciprocal")), ("count", ctypes.c_int32)]


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build([DOUBLES / f"emulator/{name}.cu" for name in ("barriers", "arithmetic", "pipeline")])


def rotated(kernels: emulation.Kernels, seed: int, threads: int = 512, fault: int = 0, hide: bool = False) -> bool:
    """Whether `rotate` gave the right result."""
    source = aligned((3, threads), np.int32)
    source[...] = np.random.default_rng(seed).integers(0, 1 << 30, source.shape)
    output = aligned((3, threads), np.int32)
    params = Probe(pointer(source), pointer(output), 0, fault)
    kernels.run(
        "rotate",
        grid=(3, 1),
        threads=threads,
        shared_bytes=threads * 4,
        params=params,
        seed=seed,
        predecessor_writes=[source] if hide else [],
    )
    return np.array_equal(output, np.roll(source, 1, axis=1))


def test_what_launches_keep_is_given_back_for_libraries_that_run_later(kernels: emulation.Kernels) -> None:
    """A process may not have many mappings, and a process of tests loads a hundred libraries."""

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_bytes().splitlines())

    assert rotated(kernels, 0, 1024)
    kept = mappings()
    kernels._library.ull_emulator_give_back()
    assert mappings() < kept - 1024
    assert rotated(kernels, 0, 1024)


@pytest.mark.parametrize("threads", [32, 288, 512, 1024])
def test_a_block_runs(kernels: emulation.Kernels, threads: int) -> None:
    assert all(rotated(kernels, seed, threads) for seed in SEEDS)


def test_a_missing_barrier_shows(kernels: emulation.Kernels) -> None:
    assert not all(rotated(kernels, seed, fault=1) for seed in SEEDS)


def test_a_missing_warp_barrier_shows(kernels: emulation.Kernels) -> None:
    source = aligned(128, np.int32)
    source[...] = np.arange(128)
    right = []
    for fault in (0, 1):
        for seed in SEEDS:
            output = aligned(128, np.int32)
            params = Probe(pointer(source), pointer(output), 0, fault)
            kernels.run("reverse", grid=(1, 1), threads=128, shared_bytes=512, params=params, seed=seed)
            right.append(np.array_equal(output.reshape(4, 32), source.reshape(4, 32)[:, ::-1]))
    assert all(right[:8])
    assert not all(right[8:])


def test_the_seed_decides_the_order(kernels: emulation.Kernels) -> None:
    def result(seed: int) -> bytes:
        source = aligned(128, np.int32)
        source[...] = np.arange(128)
        output = aligned(128, np.int32)
        params = Probe(pointer(source), pointer(output), 0, 1)
        kernels.run("reverse", grid=(1, 1), threads=128, shared_bytes=512, params=params, seed=seed)
        return output.tobytes()

    assert len({result(seed) for seed in SEEDS}) > 1
    assert len({result(5) for _ in range(4)}) == 1


def test_a_deadlock_is_told(kernels: emulation.Kernels) -> None:
    with pytest.raises(KernelError, match=r"rotate, block .*deadlock.*480 threads.*block_barrier.*32 of 64 arrived"):
        rotated(kernels, 0, fault=2)


def test_a_missing_wait_for_the_predecessor_is_told(kernels: emulation.Kernels) -> None:
    with pytest.raises(KernelError, match=r"rotate, block .*without wait_for_predecessor"):
        rotated(kernels, 0, fault=3)


def test_reading_before_the_wait_shows(kernels: emulation.Kernels) -> None:
    assert rotated(kernels, 0, hide=True)
    assert not rotated(kernels, 0, fault=4, hide=True)


def warp_sum(kernels: emulation.Kernels, fault: int, seed: int = 0) -> bool:
    source = aligned(64, np.float32)
    source[...] = np.arange(64)
    output = aligned(64, np.float32)
    kernels.run(
        "warp_sum", grid=(1, 1), threads=64, params=Probe(pointer(source), pointer(output), 0, fault), seed=seed
    )
    return np.array_equal(output, np.repeat(source.reshape(2, 32).sum(axis=1), 32))


def test_warp_operations(kernels: emulation.Kernels) -> None:
    assert all(warp_sum(kernels, 0, seed) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"warp_sum, block \(0, 0\), warp \d.*lane 3.*(has ended|ends while other lanes)"),
        (2, r"warp_sum, .*(shuffle_xor, but lane \d+ of the warp is in shuffle|shuffle, but .* is in shuffle_xor)"),
        (3, r"warp_sum.*deadlock.*block_barrier.*shuffle_xor"),
    ],
)
def test_lanes_that_part_are_told(kernels: emulation.Kernels, fault: int, message: str, seed: int) -> None:
    with pytest.raises(KernelError, match=message):
        warp_sum(kernels, fault, seed)


@pytest.mark.parametrize("fault", [0, 1])
def test_named_barriers(kernels: emulation.Kernels, fault: int) -> None:
    source = aligned(20, np.int32)
    source[...] = np.arange(20) ** 2
    right = []
    for seed in SEEDS:
        output = aligned(128, np.int32)
        params = Probe(pointer(source), pointer(output), 20, fault)
        kernels.run("hand_over", grid=(1, 1), threads=128, shared_bytes=4, params=params, seed=seed)
        right.append(np.array_equal(output, np.repeat([0, source.sum()], [32, 96])))
    assert all(right) == (fault == 0)


@pytest.mark.parametrize("fault", [0, 1])
def test_atomics(kernels: emulation.Kernels, fault: int) -> None:
    source = aligned(6 * 64, np.uint32)
    source[...] = np.random.default_rng(0).integers(0, 1 << 20, source.shape)
    expected = [source.sum() % (1 << 32), source.max(), 1000, 6]
    right = []
    for seed in SEEDS:
        output = aligned(4, np.uint32, fill=0)
        params = Probe(pointer(source), pointer(output), 0, fault)
        kernels.run("reduce", grid=(6, 1), threads=64, params=params, seed=seed)
        right.append(output.tolist() == expected)
    assert all(right) == (fault == 0)


def passed(kernels: emulation.Kernels, fault: int, seed: int, kernel: str = "pass_numbers", blocks: int = 7) -> bool:
    source = aligned(blocks, np.uint32)
    source[...] = np.random.default_rng(seed).integers(0, 1 << 16, blocks)
    output = aligned(2 * blocks + 1, np.uint32, 0)
    kernels.run(
        kernel,
        grid=(blocks, 1),
        threads=64,
        params=Probe(pointer(source), pointer(output), 5, fault),
        seed=seed,
        predecessor_writes=[source],
    )
    expected = source.copy()
    for _ in range(5):
        expected += np.roll(expected, -1)
    return np.array_equal(output[blocks : 2 * blocks], expected) and int(output[-1]) == 5 * blocks


@pytest.mark.parametrize("blocks", [1, 2, 7, 64])
def test_blocks_wait_for_each_other(kernels: emulation.Kernels, blocks: int) -> None:
    assert all(passed(kernels, 0, seed, blocks=blocks) for seed in SEEDS)


def test_blocks_that_do_not_wait_show(kernels: emulation.Kernels) -> None:
    assert not any(passed(kernels, 1, seed) for seed in SEEDS)
    assert not any(passed(kernels, 4, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        ("pass_numbers", 2, r"deadlock: .*7 threads .* wait in await_device at barriers\.cu:\d+ \(6 of 7 arrived\)"),
        ("pass_numbers", 3, r"deadlock: 64 threads have ended; 384 .*wait_for_predecessor.*not all blocks"),
        ("pass_apart", 0, "await_device in a kernel that is no ULL_GRID_KERNEL"),
    ],
)
def test_blocks_that_wait_in_vain_are_told(kernels: emulation.Kernels, kernel: str, fault: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        passed(kernels, fault, 0, kernel)


def test_more_blocks_than_run_at_once_are_refused(kernels: emulation.Kernels) -> None:
    with pytest.raises(KernelError, match="65 blocks that wait for each other: the emulator runs 64 at once"):
        passed(kernels, 0, 0, blocks=65)


def streamed(kernels: emulation.Kernels, fault: int, seed: int) -> bool:
    source = aligned((10, 256), np.int32)
    source[...] = np.random.default_rng(seed).integers(-1000, 1000, source.shape)
    output = aligned(256, np.int32)
    kernels.run(
        "stream",
        grid=(1, 1),
        threads=288,
        shared_bytes=3 * 1024 + 48,
        params=Probe(pointer(source), pointer(output), 10, fault),
        seed=seed,
    )
    return np.array_equal(output, source.sum(axis=0))


def test_bulk_copies_through_a_ring(kernels: emulation.Kernels) -> None:
    assert all(streamed(kernels, 0, seed) for seed in SEEDS)


def ask_ahead(kernels: emulation.Kernels, source: NDArray[np.uint8], fault: int) -> None:
    kernels.run("ask_ahead", grid=(1, 1), threads=32, params=Probe(pointer(source), None, 64, fault))


def test_prefetches_are_written_down(kernels: emulation.Kernels) -> None:
    source = aligned(2 * 32 * 64, np.uint8, 0)
    ask_ahead(kernels, source, 0)
    asked = [(found.address - pointer(source), found.bytes, found.waited) for found in kernels.prefetches()]
    assert sorted(asked) == [(64 * i, 64, i % 2) for i in range(2 * 32)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            *(1, "illegal memory access"),
            marks=pytest.mark.skipif(emulation.SANITIZE, reason="AddressSanitizer ends the process"),
        ),
        (2, "a prefetch of 64 bytes from .*: size and address must be multiples of 16"),
        (3, "a prefetch of 56 bytes"),
    ],
)
def test_prefetches_stay_within_bounds(kernels: emulation.Kernels, fault: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        ask_ahead(kernels, aligned(2 * 32 * 64, np.uint8, 0), fault)


def test_not_waiting_for_a_bulk_copy_is_told(kernels: emulation.Kernels) -> None:
    for seed in SEEDS:
        with pytest.raises(KernelError, match=r"stream, .*pipeline\.cu:\d+: .*nobody has waited for it"):
            streamed(kernels, 1, seed)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (2, "arrives once more than"),
        (3, "deadlock.*mbarrier"),
        (4, "must be multiples of 16"),
        (5, "not initialised"),
        (6, "outside the block's 3120 bytes"),
        (7, "has not been invalidated"),
        (8, "invalidates an mbarrier that thread|not initialised, or was overwritten"),
        (9, "ends while a bulk copy is under way"),
    ],
)
def test_faults_of_a_ring_are_told(kernels: emulation.Kernels, fault: int, message: str) -> None:
    with pytest.raises(KernelError, match=rf"stream, .*pipeline\.cu.*{message}|stream, .*{message}"):
        for seed in SEEDS:
            assert streamed(kernels, fault, seed)


def touch(kernels: emulation.Kernels, fault: int, count: int = 64) -> bool:
    source = aligned(count, np.float32)
    source[...] = np.arange(count)
    output = aligned(count, np.float32)
    params = Probe(pointer(source), pointer(output), count, fault)
    kernels.run("touch", grid=(1, 1), threads=32, shared_bytes=count * 4, params=params)
    return np.array_equal(output, source)


@pytest.mark.skipif(emulation.SANITIZE, reason="AddressSanitizer ends the process; see the next test")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"illegal memory access at .*\(shared \+ 256\)"),
        (2, "outside its 256 bytes of shared memory"),
        (3, r"illegal memory access at .*\(shared \+ 384\)"),
        (4, "touch, block .*, thread 7: illegal memory access"),
        (5, "misaligned 16-byte access"),
        (6, "stack overflow"),
    ],
)
def test_accesses_that_a_block_may_not_make(kernels: emulation.Kernels, fault: int, message: str) -> None:
    assert touch(kernels, 0)
    with pytest.raises(KernelError, match=message):
        touch(kernels, fault)
    assert touch(kernels, 0)


@pytest.mark.parametrize(("fault", "count"), [(1, 63), (2, 63), (3, 64), (4, 63)])
def test_the_sanitizer_sees_shared_memory(fault: int, count: int) -> None:
    """One element past the end, where no page ends: only AddressSanitizer can tell."""
    libasan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "ULL_SANITIZE": "1",
        "LD_PRELOAD": libasan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    program = (
        "import test_emulator as t, emulation;"
        "kernels = emulation.build([t.DOUBLES / 'emulator/pipeline.cu'], sanitize=True);"
        f"assert t.touch(kernels, 0, {count}); print('right', flush=True); t.touch(kernels, {fault}, {count})"
    )
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "right" in result.stdout, result.stderr
    assert result.returncode != 0
    assert "AddressSanitizer" in result.stderr and "pipeline.cu" in result.stderr, result.stderr


def test_refused_launches(kernels: emulation.Kernels) -> None:
    output = aligned(4096, np.int32)
    params = Probe(pointer(output), pointer(output), 0, 0)
    for options, message in [
        ({"threads": 33}, "multiple of 32"),
        ({"threads": 1056}, "bound of 1024"),
        ({"shared_bytes": 228 * 1024}, "at most 232448"),
        ({"grid": (0, 1)}, "grid"),
    ]:
        with pytest.raises(KernelError, match=message):
            kernels.run("rotate", **{"grid": (1, 1), "threads": 32, "params": params, **options})
    with pytest.raises(KernelError, match="unknown kernel absent"):
        kernels.run("absent", grid=(1, 1), threads=32, params=params)
    with pytest.raises(KernelError, match="takes 24 bytes of parameters, not 32"):
        kernels.run("rotate", grid=(1, 1), threads=32, params=Mma())


def test_mma_is_the_product_rounded_once(kernels: emulation.Kernels) -> None:
    """Up to the rounding of a double sum, far below an f32 rounding unless the sum lies at a rounding boundary."""
    count = 200
    generator = np.random.default_rng(7)
    a = aligned((count, 16, 16), np.float16)
    b = aligned((count, 16, 8), np.float16)
    c = aligned((count, 16, 8), np.float32)
    scale = 2.0 ** generator.integers(-12, 8, (count, 1, 1))
    a[...] = generator.standard_normal(a.shape) * scale
    b[...] = generator.standard_normal(b.shape)
    c[...] = generator.standard_normal(c.shape) * scale
    a[0, 3, 4] = np.nan
    a[1, 2, 5] = np.inf
    a[2] = 6e-8  # subnormal
    products = a.astype(np.float64)[:, :, :, None] * b.astype(np.float64)[:, None]
    total = np.zeros(c.shape)
    for k in range(16):
        total += products[:, :, k]
    expected = (total + c.astype(np.float64)).astype(np.float32)
    kernels.run("multiply", grid=(count, 1), threads=32, params=Mma(pointer(a), pointer(b), pointer(c), count), seed=1)
    np.testing.assert_array_equal(c, expected)


def numbers_to_convert() -> np.ndarray:
    """Every f16 and bf16 with its neighbours and the midpoints between: all ties and all limits of all formats."""
    f16 = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    halves = (np.arange(65536, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        f16_middles = ((f16[:-1].astype(np.float64) + f16[1:]) / 2).astype(np.float32)
        e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        e4m3_middles = (e4m3[:-1] + e4m3[1:]) / 2
        base = np.concatenate([f16, bf16, halves, f16_middles, e4m3, e4m3_middles]).astype(np.float32)
        around = [base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))]
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([*around, random])
    return numbers[: len(numbers) // 2 * 2]


def equal_bits_or_nan(actual: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(np.isnan(actual.astype(np.float32)), nan)
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual[~nan].view(bits), expected[~nan].view(bits))


def test_conversions_are_exact(kernels: emulation.Kernels) -> None:
    numbers = aligned(len(numbers_to_convert()), np.float32)
    numbers[...] = numbers_to_convert()
    f16 = aligned(len(numbers), np.float16)
    bf16 = aligned(len(numbers), np.uint16)
    e4m3 = aligned(len(numbers), np.uint8)
    from_f16, from_bf16 = aligned(65536, np.float32), aligned(65536, np.float32)
    from_e4m3 = aligned(256, np.float16)
    arrays = (numbers, f16, bf16, e4m3, from_f16, from_bf16, from_e4m3)
    kernels.run("convert", grid=(1, 1), threads=32, params=Convert(*map(pointer, arrays), len(numbers)))
    with np.errstate(over="ignore", invalid="ignore"):
        equal_bits_or_nan(f16, np.clip(numbers, -65504, 65504).astype(np.float16))
        equal_bits_or_nan(bf16.view(ml_dtypes.bfloat16), numbers.astype(ml_dtypes.bfloat16))
        clipped = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        equal_bits_or_nan(e4m3.view(ml_dtypes.float8_e4m3fn), clipped)
        equal_bits_or_nan(from_f16, np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32))
        equal_bits_or_nan(from_bf16, np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32))
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        equal_bits_or_nan(from_e4m3, every.astype(np.float16))


def test_fast_functions_are_within_their_bounds(kernels: emulation.Kernels) -> None:
    """2^x and 1 / x: near the true one, 0 where that is below 2^-126, and exact where kernels count on it."""
    edges = [0.0, -0.0, 1.0, -1.0, -125.5, -126.5, -1e30, 127.5, 1e30, np.inf, -np.inf, np.nan, 2.0**-126, 2.0**-127]
    generator = np.random.default_rng(0)
    numbers = aligned(20_000, np.float32)
    numbers[...] = generator.uniform(-125, 125, numbers.shape)
    numbers[: len(edges)] = edges
    powers, reciprocals = (aligned(numbers.shape, np.float32) for _ in range(2))
    arrays = (numbers, powers, reciprocals)
    kernels.run("fast", grid=(1, 1), threads=32, params=Fast(*map(pointer, arrays), len(numbers)))

    def normal(values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) < 2.0**-126, np.copysign(0, values), values)

    with np.errstate(over="ignore", divide="ignore"):
        wide = normal(numbers.astype(np.float64))
        for found, true in ((powers, normal(np.exp2(wide))), (reciprocals, normal(1 / wide))):
            expected = np.where(np.abs(true) >= 2.0**128, np.copysign(np.inf, true), true)
            np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=0)
    assert powers[0] == powers[1] == 1 and powers[edges.index(-1e30)] == powers[edges.index(-np.inf)] == 0
    assert reciprocals[2] == 1
