"""The waits of the kernel of all layers: without any one of them, or its fence, the emulator sees a race."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import emulation
from layer_rig import Layers, model_of
from ull.bundle import Precision

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(emulation.SANITIZE or emulation.ON_DEVICE, reason="the emulator alone sees it"),
]
AWAIT, FENCE = "arch::await_device(", "arch::fence_device();"
SWITCH = 'extern "C" __attribute__((visibility("default"))) int ull_fault;\nint ull_fault = 0;\n'
FAULTS = {  # what is left out, and how many blocks it takes to show
    1: ("qkv does not wait for down", 3),
    2: ("attention does not wait for qkv", 3),
    3: ("gate_up does not wait for o", 3),
    4: ("a block's wait has no fence", 3),
    5: ("o does not wait for attention", 3),
    6: ("o's wait has no fence", 3),
    7: ("down does not wait for gate_up", 3),
    8: ("down's wait has no fence", 3),
    9: ("a block tells before all of its threads are done", 3),
}


def replaced(text: str, old: str, *new: str) -> str:
    """`text` with the n-th occurrence of `old` replaced by new[n]."""
    parts = text.split(old)
    assert len(parts) == len(new) + 1, old
    return "".join(part + by for part, by in zip(parts, (*new, ""), strict=True))


def faulty_source() -> str:
    """layers.cu with a switch for each fault."""
    steps = emulation.source_of("layer_steps.cuh").read_text().replace("#pragma once\n", SWITCH)
    no_wait = "if ({}) arch::await_device("
    parts = ((1, "index == kDownAt"), (2, "index < kAttentionAt"), (3, "index == kOutputAt"))
    with_block = " && ".join(f"!(ull_fault == {fault} && {which})" for fault, which in parts)
    steps = replaced(steps, AWAIT, *map(no_wait.format, ("ull_fault != 5", "ull_fault != 7", with_block)))
    steps = replaced(steps, FENCE, *(f"if (ull_fault != {fault}) {FENCE}" for fault in (6, 8, 4)))
    barrier = "arch::block_barrier();"
    steps = replaced(steps, barrier, f"if (ull_fault != 9) {barrier}", barrier)
    layers = emulation.source_of("layers.cu").read_text()
    return replaced(layers, '#include "persistent/layer_steps.cuh"\n', steps)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    source: Path = tmp_path_factory.mktemp("faulty") / "layers.cu"
    source.write_text(faulty_source())
    return Layers(model_of(), Precision(), reports=True, sources=[source])


def test_with_all_waits_nothing_races(layers: Layers) -> None:
    for blocks in (3, 20):
        layers.run(300, blocks, persistent=True, seed=5, draws=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: FAULTS[fault][0])
def test_without_one_of_them_there_is_a_race(layers: Layers, fault: int) -> None:
    switch = ctypes.c_int.in_dll(ctypes.CDLL(str(layers.kernels.path)), "ull_fault")
    switch.value = fault
    try:
        with pytest.raises(emulation.KernelError, match=r"ull_layers_1.*a race at"):
            layers.run(300, FAULTS[fault][1], persistent=True, seed=5, draws=False)
    finally:
        switch.value = 0
