"""The kernel tests' other machine, without a GPU: its predecessor kernel, and its launches on the driver double."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import device_kernels
import driver_double
import emulation
from compilers import disassembles
from conftest import ROOT
from early_reader import COUNT, read
from emulation import aligned, pointer
from round_rig import Device
from ull.gpu.params import PREFILL, TAKE
from ull_build.code.kernels import compile_file

sys.path.append(str(ROOT / "bench"))

import sass


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_predecessor_compiles(target: Any) -> None:
    compiled = compile_file(device_kernels.PREDECESSOR, {}, target)
    assert set(compiled.kernels) == {"ull_predecessor", "ull_reader"}
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())


@disassembles
def test_the_assembler_leaves_an_early_read_before_the_wait() -> None:
    """It may put a wait before a load that nothing uses until then: on an H100 the reader then was never early."""
    code = sass.disassemble(compile_file(device_kernels.PREDECESSOR, {}).cubin)["ull_reader"]
    names = [one.name for one in code.instructions]
    loads = [at for at, name in enumerate(names) if name.startswith("LDG")]
    assert len(loads) == 2 and loads[0] < names.index("ACQBULK") < loads[1]


def test_the_predecessor_writes_every_region() -> None:
    kernels = emulation.build([device_kernels.PREDECESSOR])
    params = device_kernels._PredecessorParams(spin_ns=1000)
    arrays = [(aligned(size, np.uint8), aligned(size, np.uint8)) for size in (1, 255, 4096, 70_001)]
    for index, (source, target) in enumerate(arrays):
        source[...] = np.random.default_rng(index).integers(0, 255, source.shape)
        params.regions[index] = (pointer(source), pointer(target), source.nbytes)
    params.count = len(arrays)
    grid, threads = device_kernels.PREDECESSOR_GRID, device_kernels.PREDECESSOR_THREADS
    kernels.run("ull_predecessor", grid=grid, threads=threads, params=params)
    for source, target in arrays:
        np.testing.assert_array_equal(target, source)


def test_reading_before_the_wait_shows_on_the_emulator() -> None:
    """As it does on the chip (tests/h200/test_dependent_launch.py), where the predecessor above makes it show."""
    kernels = emulation.build([device_kernels.PREDECESSOR])
    expected, found = read(kernels, early=False)
    np.testing.assert_array_equal(found, expected)
    _, found = read(kernels, early=True)
    assert (found == 0xFFFFFFFF).any()  # not all: a block's threads wait one after another


def scenario_launches() -> None:
    """Under the double, where launches run one after another: all that the device gets and gives back."""
    kernels: Any = emulation.build([device_kernels.PREDECESSOR])
    assert isinstance(kernels, device_kernels.DeviceKernels)
    expected, found = read(kernels, early=False)
    np.testing.assert_array_equal(found, expected)
    # The same without a predecessor that writes: nothing but the copies is left.
    real = device_kernels._launch_predecessor
    device_kernels._launch_predecessor = lambda params: None
    _, poisoned = read(kernels, early=False)
    device_kernels._launch_predecessor = real
    print(json.dumps([int((poisoned == 0xFFFFFFFF).sum()), len(found)]))


def on_the_double(scenario: str, *sources: Any) -> Any:
    library = emulation.build_library(sources)
    environment = {**driver_double.environment(library), "ULL_KERNELS": "device"}
    program = f"import test_device_kernels as t; t.{scenario}()"
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_inputs_are_poisoned_until_the_predecessor_has_written_them() -> None:
    assert on_the_double("scenario_launches", device_kernels.PREDECESSOR) == [COUNT, COUNT]


ROUND = ("begin.cu", "accept.cu")


def scenario_round() -> None:
    """What the host and a round's kernels share, all of which the device must be given."""
    device = Device(emulation.build(ROUND))
    device.ask(TAKE, [7], pages=[2])
    result = device.draw([9])
    device.ask(PREFILL, range(100), pages=[2, 3], chunk=True)
    print(json.dumps([result.count, result.tokens[0].token, device.chunk.count]))


def test_a_round_finds_all_that_it_shares_with_the_host() -> None:
    assert on_the_double("scenario_round", *ROUND, device_kernels.PREDECESSOR) == [1, 9, 100]
