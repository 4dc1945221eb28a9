"""What the chip's own parts take that the engine is made of: probes.cu, each of its kernels proved and then timed.

python bench/h200/probes.py --json REPORT    # adds "probes" to the report

Times are differences between a long run and a short one, by CUDA events: what both have in common, such as the launch
of a graph, falls out. Nothing here is taken from a single stamp of %globaltimer, which may tick coarsely.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from journal import Report
from numpy.typing import NDArray
from rich.console import Console
from stopwatch import Stopwatch

from ull.bundle import Precision, device_macros
from ull.errors import GpuError
from ull.gpu.driver import Driver
from ull.gpu.geometry import linear
from ull_build.code.kernels import compile_file
from ull_build.shapes import shape_model

SOURCE = Path(__file__).parent / "probes.cu"
ARCH = "llama-3.1-8b"  # whose attention's grid is looked at
THREADS = 256
FEW_ROWS, ALL_ROWS, COLUMNS = 16 * 21, 1 << 20, 4096  # of ull_probe_few_weights and ull_probe_weights, one byte each
ATTENTION_GRID, ATTENTION_BYTES = (16, 8), 107 * 1024
PROVED_BARRIERS = 7
FILL_WORD = 0x01010101
PRODUCTS, PRODUCTS_BYTES = 8, 8 * 4096  # of a group, and their operands in shared memory
PROVED_PRODUCTS = 3  # groups; of random f16 operands the sums of so many are exact
PRODUCT_COLUMNS, PRODUCT_ROWS = 128, 128  # of a block's products; its depth is 16, fast 32
FAST_LOSS = 2.0**-8  # of a sum of random e4m3 products, of which the chip keeps about 13 bits: on average, at most
LONG_RUN = 10  # times as many products where operands are random: as long as the chip needs to see what they cost


class LinkParams(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint64)]


class BarrierParams(ctypes.Structure):
    _fields_ = [
        ("arrivals", ctypes.c_uint64),
        ("passed", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("count", ctypes.c_int32),
    ]


class WeightsParams(ctypes.Structure):
    _fields_ = [("weights", ctypes.c_uint64), ("sums", ctypes.c_uint64)]


class PlaceParams(ctypes.Structure):
    _fields_ = [("places", ctypes.c_uint64)]


class TimerParams(ctypes.Structure):
    _fields_ = [("samples", ctypes.c_uint64), ("count", ctypes.c_int32)]


class ProductsParams(ctypes.Structure):
    _fields_ = [("sums", ctypes.c_uint64), ("count", ctypes.c_int32), ("random", ctypes.c_int32)]


class ProbeError(Exception):
    """A probe's kernel did not do what it is timed for."""


def macros() -> dict[str, str]:
    return device_macros(shape_model(ARCH), Precision())


def passed_sums(blocks: int, count: int) -> NDArray[np.uint32]:
    """What ull_probe_barrier leaves: block b is handed i * blocks + b + 1 by its neighbour at barrier i."""
    neighbours = (np.arange(blocks) + 1) % blocks
    return (count * neighbours + blocks * (count * (count - 1) // 2)).astype(np.uint32)


def weight_sums(weights: NDArray[np.uint8], blocks: int) -> NDArray[np.uint32]:
    """What ull_probe_few_weights leaves: [blocks, 8] a warp's slice of each of its block's row tiles, word by word."""
    tiles = weights.reshape(-1, 8, 16 * COLUMNS // 8).view(np.uint32).sum(axis=2, dtype=np.uint32)
    bounds = [block * len(tiles) // blocks for block in range(blocks + 1)]
    return np.array([tiles[a:b].sum(axis=0, dtype=np.uint32) for a, b in pairwise(bounds)])


def operands(fast: bool, is_weight: bool, count: int) -> NDArray[np.float64]:
    """[count, 2 or 4] the values of ull_probe_products' random words, in order."""
    with np.errstate(over="ignore"):
        noise = (np.arange(count, dtype=np.uint32) + np.uint32(1)) * np.uint32(0x9E3779B1)
        noise = (noise ^ noise >> np.uint32(15)) * np.uint32(0x85EBCA77)
    noise ^= noise >> np.uint32(13)
    if not fast:
        kept = np.uint32(0x83808380 if is_weight else 0x83FF83FF)
        return (noise & kept | np.uint32(0x38003800)).view(np.float16).reshape(count, 2).astype(np.float64)
    octets = noise.view(np.uint8).reshape(count, 4)
    return np.where(octets & 0x80, -1.0, 1.0) * (0.5 + (octets & 7) / 16)


def products_sum(fast: bool, groups: int) -> float:
    """What a block's sums of ull_probe_products add up to with random operands."""
    weights = operands(fast, True, THREADS * PRODUCTS * 4).reshape(THREADS, PRODUCTS, 2, 2, -1)  # [.., depth, row, ..]
    by_lane = weights.sum(axis=3).reshape(-1, 4, PRODUCTS, 2, weights.shape[-1]).sum(axis=0)  # [lane % 4, ...]
    a = by_lane.transpose(1, 2, 0, 3).reshape(PRODUCTS, -1)  # [product, depth], added over rows
    tokens = operands(fast, False, PRODUCTS * 1024).reshape(PRODUCTS, 2, PRODUCT_COLUMNS, -1)
    return groups * float((a * tokens.sum(axis=2).reshape(PRODUCTS, -1)).sum())


class Probes:
    """The loaded kernels and what they run on. Raises GpuError, and ProbeError for wrong results."""

    def __init__(self, exit_stack: ExitStack, driver: Driver) -> None:
        self._driver, self._exit = driver, exit_stack
        driver.open()
        exit_stack.callback(driver.close)
        self._stream = driver.create_stream()
        exit_stack.callback(driver.destroy_stream, self._stream)
        self._module = driver.load_module(compile_file(SOURCE, macros()).cubin)
        exit_stack.callback(driver.unload_module, self._module)
        self._stopwatch = Stopwatch(self._stream)
        self._blocks = driver.info.multiprocessors

    def chain(self, lengths: tuple[int, int], repeats: int, shared_bytes: int, overlaps: bool) -> dict[str, Any]:
        """Nanoseconds for each further kernel of a chain in a graph; and where each needs what the last one left."""
        function = self._function("ull_probe_link", shared_bytes)
        count = self._allocate(4)
        self._driver.fill(count, 0, 4, self._stream)
        found: dict[str, Any] = {"blocks": self._blocks, "shared_bytes": shared_bytes, "overlaps": overlaps}
        for name, params in (("ns", LinkParams(0)), ("dependent_ns", LinkParams(count))):
            times = []
            for length in lengths:
                with self._chain_of(function, length, shared_bytes, params, overlaps) as graph:
                    times.append(self._median_ms(repeats, lambda graph=graph: self._driver.replay(graph, self._stream)))
            found[name] = (times[1] - times[0]) * 1e6 / (lengths[1] - lengths[0])
        if (links := int(self._read(count, 1, np.uint32)[0])) != (repeats + 1) * sum(lengths):
            raise ProbeError(f"the chain's kernels counted to {links}, not to {(repeats + 1) * sum(lengths)}")
        return found

    def barrier(self, counts: tuple[int, int], repeats: int) -> dict[str, Any]:
        """Nanoseconds for each further barrier of the grid."""
        function = self._function("ull_probe_barrier", 0)
        arrivals, sums = self._allocate(4), self._allocate(4 * self._blocks)
        passed = self._allocate(2 * 16 * self._blocks)

        def launch(count: int, passes: bool) -> None:
            self._driver.fill(arrivals, 0, 4, self._stream)
            params = BarrierParams(arrivals, passed if passes else 0, sums, count)
            self._launch(function, (self._blocks, 1), 0, params)

        launch(PROVED_BARRIERS, True)
        found = self._read(sums, self._blocks, np.uint32)
        if not np.array_equal(found, passed_sums(self._blocks, PROVED_BARRIERS)):
            raise ProbeError("blocks did not see what others had written before the grid's barrier")
        times = [self._median_ms(repeats, lambda count=count: launch(count, False)) for count in counts]
        return {"blocks": self._blocks, "ns": (times[1] - times[0]) * 1e6 / (counts[1] - counts[0])}

    def weights(self, repeats: int, rows: int = ALL_ROWS) -> dict[str, Any]:
        """Bytes per second of the engine's own way of reading, best of `repeats`."""
        few = np.random.default_rng(1).integers(0, 256, FEW_ROWS * COLUMNS, np.uint8)
        nbytes = rows * COLUMNS
        data, sums = self._allocate(max(nbytes, few.nbytes)), self._allocate(4 * 8 * self._blocks)
        params = WeightsParams(data, sums)
        self._driver.copy_to_device(data, few.ctypes.data, few.nbytes, self._stream)
        self._launch(self._function("ull_probe_few_weights", linear.NARROW_BYTES), *self._reading(params))
        self._expect_sums(sums, weight_sums(few, self._blocks))

        kernel = {FEW_ROWS: "ull_probe_few_weights", ALL_ROWS: "ull_probe_weights"}[rows]
        function = self._function(kernel, linear.NARROW_BYTES)
        self._driver.fill(data, FILL_WORD & 255, nbytes, self._stream)
        times = self._times_ms(repeats, lambda: self._launch(function, *self._reading(params)))
        total = int(self._read(sums, 8 * self._blocks, np.uint32).sum(dtype=np.uint32))
        if total != nbytes // 4 * FILL_WORD % (1 << 32):
            raise ProbeError("not every weight was read once")
        return {"blocks": self._blocks, "bytes": nbytes, "bytes_per_s": nbytes / (min(times) * 1e-3)}

    def products(
        self, counts: tuple[int, int], repeats: int, fast: bool = False, random: bool = False
    ) -> dict[str, Any]:
        """Operations per second of the matrix units by warpgroups' products of f16 or e4m3, and nothing else.

        Operands are ones, or random: what switches costs power, and a chip has only so much.
        """
        function = self._function("ull_probe_fast_products" if fast else "ull_probe_products", PRODUCTS_BYTES)
        columns = 32 if fast else 16
        sums = self._allocate(4 * THREADS * self._blocks)

        def launch(count: int) -> None:
            self._launch(function, (self._blocks, 1), PRODUCTS_BYTES, ProductsParams(sums, count, int(random)))

        launch(PROVED_PRODUCTS)
        found = self._read(sums, THREADS * self._blocks, np.float32).reshape(self._blocks, THREADS)
        if random:
            lost = np.abs(found.sum(axis=1, dtype=np.float64) - products_sum(fast, PROVED_PRODUCTS)).max()
            if lost > (PRODUCT_ROWS * PRODUCT_COLUMNS * FAST_LOSS if fast else 0.0):
                raise ProbeError(f"products of random operands are off by {lost}")
        elif not (found == 64 * columns * PRODUCTS * PROVED_PRODUCTS).all():
            raise ProbeError("products of ones are not as many")
        times = [self._median_ms(repeats, lambda count=count: launch(count)) for count in counts]
        operations = self._blocks * 2 * PRODUCTS * (2 * 64 * 128 * columns) * (counts[1] - counts[0])
        return {"blocks": self._blocks, "operations_per_s": operations / ((times[1] - times[0]) * 1e-3)}

    def places(self) -> dict[str, Any]:
        """How the blocks of an attention grid are dealt out to an idle device's multiprocessors."""
        blocks = ATTENTION_GRID[0] * ATTENTION_GRID[1]
        places = self._allocate(24 * blocks)
        self._launch(
            self._function("ull_probe_place", ATTENTION_BYTES), ATTENTION_GRID, ATTENTION_BYTES, PlaceParams(places)
        )
        found = self._read(places, 3 * blocks, np.uint64).reshape(blocks, 3)
        held = np.bincount(found[:, 2].astype(np.int64))
        if held.sum() != blocks or not found[:, 0].all():
            raise ProbeError("a block did not say where it was")
        return {
            "blocks": blocks,
            "multiprocessors": int((held > 0).sum()),
            "most_on_one": int(held.max()),
            "of_each_block": [int(number) for number in found[:, 2]],
        }

    def timer(self, samples: int = 8192) -> dict[str, Any]:
        """The step of %globaltimer, and how fast %clock64 ticks against it."""
        data = self._allocate(16 * samples)
        function = self._function("ull_probe_timer", 0)
        self._launch(function, (1, 1), 0, TimerParams(data, samples), threads=32)
        found = self._read(data, 2 * samples, np.uint64).reshape(samples, 2).astype(np.int64)
        steps = np.diff(found[:, 0])
        if not (steps > 0).any() or (steps < 0).any():
            raise ProbeError("%globaltimer did not go on")
        ns, ticks = found[-1] - found[0]
        return {"step_ns": int(steps[steps > 0].min()), "elapsed_ns": int(ns), "clock_mhz": float(ticks / ns * 1e3)}

    # ---- the parts ------------------------------------------------------------------------------------------------

    def _chain_of(
        self, function: int, length: int, shared_bytes: int, params: ctypes.Structure, overlaps: bool
    ) -> _Owned:
        """A context whose value is the executable graph; only the first kernel has no predecessor to overlap with."""
        self._driver.begin_capture(self._stream)
        for index in range(length):
            self._driver.launch(
                function, (self._blocks, 1), THREADS, shared_bytes, self._stream, params, overlaps and index > 0
            )
        graph = self._driver.end_capture(self._stream)
        executable = self._driver.instantiate(graph)
        self._driver.destroy_graph(graph)
        self._driver.upload(executable, self._stream)
        return _Owned(executable, self._driver.destroy_executable)

    def _function(self, name: str, shared_bytes: int) -> int:
        function = self._driver.function(self._module, name)
        self._driver.prefer_shared_memory(function)
        self._driver.allow_shared_bytes(function, shared_bytes)
        return function

    def _reading(self, params: WeightsParams) -> tuple[tuple[int, int], int, WeightsParams]:
        return (self._blocks, 1), linear.NARROW_BYTES, params

    def _launch(
        self, function: int, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, threads: int = THREADS
    ) -> None:
        self._driver.launch(function, grid, threads, shared_bytes, self._stream, params, overlaps=False)

    def _times_ms(self, repeats: int, work: Callable[[], None]) -> list[float]:
        """Of each of `repeats` runs, behind one that is not counted."""
        times = []
        for _ in range(repeats + 1):
            self._stopwatch.start()
            work()
            times.append(self._stopwatch.stop())
        return times[1:]

    def _median_ms(self, repeats: int, work: Callable[[], None]) -> float:
        return statistics.median(self._times_ms(repeats, work))

    def _expect_sums(self, address: int, expected: NDArray[np.uint32]) -> None:
        found = self._read(address, expected.size, np.uint32).reshape(expected.shape)
        if not np.array_equal(found, expected):
            wrong = int((found != expected).sum())
            raise ProbeError(f"{wrong} of {expected.size} warps read other weights than they should have")

    def _allocate(self, nbytes: int) -> int:
        address = self._driver.allocate(nbytes)
        self._exit.callback(self._driver.free, address)
        return address

    def _read(self, address: int, count: int, dtype: Any) -> NDArray[Any]:
        values = np.empty(count, dtype)
        self._driver.copy_to_host(values.ctypes.data, address, values.nbytes, self._stream)
        self._driver.synchronise(self._stream)
        return values


class _Owned:
    """A handle that is given back at the end of a `with`."""

    def __init__(self, handle: int, give_back: Callable[[int], None]) -> None:
        self._handle, self._give_back = handle, give_back

    def __enter__(self) -> int:
        return self._handle

    def __exit__(self, *error: object) -> None:
        self._give_back(self._handle)


def measure(
    driver: Driver,
    lengths: tuple[int, int] = (32, 160),
    barriers: tuple[int, int] = (100, 900),
    products: tuple[int, int] = (500, 4500),
    rows: int = ALL_ROWS,
    repeats: int = 20,
) -> Iterator[tuple[str, Any]]:
    """Each figure as soon as it is known."""
    exit_stack = ExitStack()  # closed only if all goes well: a device that has failed may never answer
    probes = Probes(exit_stack, driver)
    yield "timer", probes.timer()
    chains = [
        probes.chain(lengths, repeats, shared_bytes, overlaps)
        for shared_bytes in (linear.NARROW_BYTES, 0)
        for overlaps in (True, False)
    ]
    yield "chains", chains
    yield "weights", probes.weights(repeats, rows)
    yield "products", probes.products(products, repeats)
    yield "fast_products", probes.products(products, repeats, fast=True)
    longer = (LONG_RUN * products[0], LONG_RUN * products[1])
    yield "random_products", probes.products(longer, repeats, random=True)
    yield "random_fast_products", probes.products(longer, repeats, fast=True, random=True)
    yield "attention_blocks", probes.places()
    yield "grid_barrier", probes.barrier(barriers, repeats)  # last: it might wait for ever
    exit_stack.close()


def describe(name: str, figure: Any) -> Iterator[str]:
    """Lines about one of `measure`'s figures."""
    if name == "timer":
        yield f"%globaltimer: steps of {figure['step_ns']} ns; %clock64: {figure['clock_mhz']:.0f} MHz"
    elif name == "chains":
        for chain in figure:
            way = "that overlap" if chain["overlaps"] else "one after another"
            yield (
                f"kernels of {chain['blocks']} blocks with {chain['shared_bytes'] >> 10} KB, {way}: "
                f"{chain['ns']:.0f} ns each, {chain['dependent_ns']:.0f} ns where each needs a word of the one before"
            )
    elif name == "weights":
        yield f"read bandwidth by the engine's own streams: {figure['bytes_per_s'] / 1e12:.3f} TB/s"
    elif name.endswith("products"):
        factors = "e4m3" if "fast" in name else "f16"
        factors += " products of random numbers" if name.startswith("random") else " products of ones"
        yield f"{factors} by warpgroups alone: {figure['operations_per_s'] / 1e12:.0f} TFLOP/s"
    elif name == "attention_blocks":
        yield (
            f"an attention grid's {figure['blocks']} blocks run on {figure['multiprocessors']} multiprocessors, "
            f"at most {figure['most_on_one']} on one"
        )
    else:
        yield f"grid barrier of {figure['blocks']} blocks: {figure['ns']:.0f} ns"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the report that the figures are added to")
    report, console = Report(parser.parse_args().json), Console()
    try:
        for name, figure in measure(Driver()):
            report.found.setdefault("probes", {})[name] = figure
            report.save()
            for line in describe(name, figure):
                console.print(line, highlight=False)
    except (GpuError, ProbeError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
