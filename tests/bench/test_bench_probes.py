"""bench/h200/probes: its kernels on the emulator, and its Python side under the driver double."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import driver_double
import emulation
from conftest import ROOT
from emulation import KernelError, aligned, pointer

sys.path.append(str(ROOT / "bench/h200"))

import probes

from ull_build.code.kernels import compile_file

SOURCE = probes.SOURCE
WAIT = "  arch::wait_for_predecessor();\n"
FENCE = "      arch::fence_device();\n"
AWAIT = f"      arch::await_device(params.arrivals, expected);\n{FENCE}"
SEEDS = range(4)
Mutate = Callable[[str, str], emulation.Kernels]


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build([SOURCE], reports=True)


@pytest.fixture
def mutate(tmp_path: Path) -> Mutate:
    """The probes with a part of their source replaced."""

    def mutate(old: str, new: str) -> emulation.Kernels:
        text = SOURCE.read_text()
        assert old in text
        path = tmp_path / "probes.cu"
        path.write_text(text.replace(old, new))
        return emulation.build([path], reports=True)

    return mutate


def links(kernels: emulation.Kernels, seed: int) -> int:
    count = aligned(4, np.uint32, 0)
    for turn in range(3):
        kernels.run(
            "ull_probe_link",
            grid=(3, 1),
            threads=probes.THREADS,
            params=probes.LinkParams(pointer(count)),
            seed=seed + turn,
            predecessor_writes=[count],
        )
    return int(count[0])


def handed_over(kernels: emulation.Kernels, blocks: int, seed: int) -> np.ndarray:
    arrivals, sums = aligned(4, np.uint32, 0), aligned(blocks, np.uint32)
    passed = aligned((2, blocks, 4), np.uint32)
    params = probes.BarrierParams(pointer(arrivals), pointer(passed), pointer(sums), probes.PROVED_BARRIERS)
    kernels.run(
        "ull_probe_barrier",
        grid=(blocks, 1),
        threads=probes.THREADS,
        params=params,
        seed=seed,
        predecessor_writes=[arrivals],
    )
    assert arrivals[0] == blocks * probes.PROVED_BARRIERS
    return sums


def read(kernels: emulation.Kernels, blocks: int, seed: int) -> bool:
    weights = aligned(probes.FEW_ROWS * probes.COLUMNS, np.uint8)
    weights[...] = np.random.default_rng(seed).integers(0, 256, weights.shape)
    sums = aligned((blocks, 8), np.uint32)
    kernels.run(
        "ull_probe_few_weights",
        grid=(blocks, 1),
        threads=probes.THREADS,
        shared_bytes=112 << 10,
        params=probes.WeightsParams(pointer(weights), pointer(sums)),
        seed=seed,
        constants=[weights],
    )
    return np.array_equal(sums, probes.weight_sums(weights, blocks))


def test_a_chain_counts_its_links(kernels: emulation.Kernels) -> None:
    assert [links(kernels, seed) for seed in SEEDS] == [3] * len(SEEDS)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_blocks_see_what_came_before_the_barrier(kernels: emulation.Kernels, blocks: int) -> None:
    for seed in SEEDS:
        expected = probes.passed_sums(blocks, probes.PROVED_BARRIERS)
        np.testing.assert_array_equal(handed_over(kernels, blocks, seed), expected)


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_every_weight_is_read_by_its_warp(kernels: emulation.Kernels, blocks: int) -> None:
    assert all(read(kernels, blocks, seed) for seed in SEEDS[:2])


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize(("kernel", "columns"), [("products", 16), ("fast_products", 32)])
def test_products_are_as_many_as_they_are_timed_for(
    kernels: emulation.Kernels, kernel: str, columns: int, count: int
) -> None:
    sums = aligned((2, probes.THREADS), np.float32)
    params = probes.ProductsParams(pointer(sums), count, 0)
    shared = {"threads": probes.THREADS, "shared_bytes": probes.PRODUCTS_BYTES}
    kernels.run(f"ull_probe_{kernel}", grid=(2, 1), params=params, seed=count, **shared)
    assert (sums == 64 * columns * probes.PRODUCTS * count).all()


@pytest.mark.parametrize(("kernel", "fast"), [("products", False), ("fast_products", True)])
def test_random_products_add_up(kernels: emulation.Kernels, kernel: str, fast: bool) -> None:
    sums = aligned((2, probes.THREADS), np.float32)
    params = probes.ProductsParams(pointer(sums), probes.PROVED_PRODUCTS, 1)
    shared = {"threads": probes.THREADS, "shared_bytes": probes.PRODUCTS_BYTES}
    kernels.run(f"ull_probe_{kernel}", grid=(2, 1), params=params, **shared)
    expected = probes.products_sum(fast, probes.PROVED_PRODUCTS)
    assert (sums.sum(axis=1, dtype=np.float64) == expected).all() and abs(expected) > 100
    assert len(np.unique(sums)) > 100


def test_places_and_timers(kernels: emulation.Kernels) -> None:
    found, samples = aligned((6, 3), np.uint64), aligned((50, 2), np.uint64)
    params = probes.PlaceParams(pointer(found))
    kernels.run("ull_probe_place", grid=(3, 2), threads=probes.THREADS, params=params)
    assert found[:, 2].tolist() == list(range(6)) and (found[:, :2] > 0).all()
    timer = probes.TimerParams(pointer(samples), len(samples))
    kernels.run("ull_probe_timer", grid=(1, 1), threads=32, params=timer)
    assert (np.diff(samples.astype(np.int64), axis=0) > 0).any()


def test_a_missing_wait_shows(mutate: Mutate) -> None:
    broken = mutate(WAIT, "")
    for run in (lambda: links(broken, 0), lambda: handed_over(broken, 2, 0), lambda: read(broken, 2, 0)):
        with pytest.raises(KernelError, match="wait_for_predecessor"):
            run()


def test_a_grid_barrier_that_nobody_waits_at_shows(mutate: Mutate) -> None:
    broken = mutate(AWAIT, "")
    expected = probes.passed_sums(5, probes.PROVED_BARRIERS)
    found = []
    for seed in SEEDS:
        try:
            found.append(np.array_equal(handed_over(broken, 5, seed), expected))
        except KernelError:
            found.append(False)
    assert not all(found)


def test_a_grid_barrier_without_its_fence_shows(mutate: Mutate) -> None:
    with pytest.raises(KernelError, match="a race at"):
        handed_over(mutate(FENCE, ""), 5, 0)


def test_a_stage_that_is_not_waited_for_shows(mutate: Mutate) -> None:
    broken = mutate("stream.wait(stage);", "stream.wait(stage & ~1);")
    with pytest.raises(KernelError, match="a race at shared"):
        read(broken, 4, 0)


def test_weights_that_are_read_twice_show(mutate: Mutate) -> None:
    assert not read(mutate("place + i * 512", "place + i / 2 * 512"), 4, 0)


def test_they_compile_for_the_chip() -> None:
    compiled = compile_file(SOURCE, probes.macros())  # refuses spills
    for kernel, use in compiled.functions.items():
        assert use.stack == 0 and use.registers <= (128 if kernel.endswith("_products") else 64)
    assert "serialized" not in compiled.log
    mirrors = {"link": probes.LinkParams, "barrier": probes.BarrierParams, "products": probes.ProductsParams}
    for kernel, params in mirrors.items():
        assert ctypes.sizeof(params) == emulation.build([SOURCE], reports=True).params_bytes[f"ull_probe_{kernel}"]


def scenario_measure() -> None:
    from ull.gpu.driver import Driver

    found = dict(
        probes.measure(Driver(), lengths=(2, 5), barriers=(2, 12), rows=probes.FEW_ROWS, repeats=2, products=(2, 6))
    )
    print(json.dumps([found, [line for name in found for line in probes.describe(name, found[name])]]))


def test_the_probes_measure(tmp_path: Path) -> None:
    environment = driver_double.environment(
        emulation.build_library([SOURCE], sanitize=False), imports=[ROOT / "bench/h200"], multiprocessors=4
    )
    program = "import test_bench_probes as t; t.scenario_measure()"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr
    found, lines = json.loads(result.stdout.splitlines()[-1])
    products = ["products", "fast_products", "random_products", "random_fast_products"]
    assert list(found) == ["timer", "chains", "weights", *products, "attention_blocks", "grid_barrier"]
    assert found["timer"]["step_ns"] > 0 and found["weights"]["bytes_per_s"] > 0
    assert [chain["overlaps"] for chain in found["chains"]] == [True, False] * 2
    assert found["attention_blocks"]["multiprocessors"] == 128 and found["attention_blocks"]["most_on_one"] == 1
    assert all(found[name]["operations_per_s"] > 0 for name in products)
    assert len(lines) == 12
