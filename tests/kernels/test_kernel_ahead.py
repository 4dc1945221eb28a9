"""What the kernels ask L2 for ahead of their rings: how much, of what, when; and that no bit depends on it."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import emulation
from emulation import Prefetch
from layer_rig import COMPARED, Layers, model_of
from ull.bundle import Precision
from ull.gpu.geometry.linear import NARROW_BYTES

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(emulation.ON_DEVICE, reason="the emulator alone writes down what was asked for"),
]
HIDDEN, LAYERS, KV_HEADS = 1024, 2, 2
MODEL = model_of(hidden=HIDDEN, heads=8, kv_heads=KV_HEADS, head_dim=128, intermediate=1280, layers=LAYERS)
STAGE = 2048  # bytes; a warp's slice of a row tile of 1024 columns is one stage
TILE = 8 * STAGE
BLOCKS = 8  # multiprocessors: two kv heads and four splits of attention
SETTINGS = {"none": (0, 0), "64": (64, 0), "128 of all": (128, 1)}
SHORT, LONG = ("o", "gate_up"), ("qkv", "down")
POSITION = 100  # one split of attention: one block of each kv head has something to do


@functools.cache
def layers(setting: str) -> Layers:
    kib, of_all = SETTINGS[setting]
    tuning = {"AHEAD_KIB": kib, "AHEAD_ALL": of_all}
    return Layers(MODEL, Precision(), tuning=tuning)


@functools.cache
def asked(setting: str, persistent: bool, position: int = POSITION) -> list[tuple[str, list[Prefetch]]]:
    rig = layers(setting)
    rig.run(position, BLOCKS, persistent)
    return list(rig.prefetched)


def places(setting: str, prefetches: list[Prefetch], weights: str, layer: int) -> list[tuple[int, int, int]]:
    """(block, first byte, end) in these weights of those that lie there."""
    tensor = layers(setting).tensors[f"layers.{layer}.{weights}.weight"]
    start = tensor.ctypes.data
    return [
        (found.block, found.address - start, found.address - start + found.bytes)
        for found in prefetches
        if start <= found.address < start + tensor.nbytes
    ]


def spans(ranges: list[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """By block, the one range that its ranges make up, none of them twice."""
    found: dict[int, tuple[int, int]] = {}
    for block in {block for block, _, _ in ranges}:
        own = sorted((first, end) for other, first, end in ranges if other == block)
        assert all(before[1] == behind[0] for before, behind in itertools.pairwise(own))
        found[block] = own[0][0], own[-1][1]
    return found


def expected(rows: int, columns: int, ahead: int, norms: bool) -> list[tuple[int, int, int]]:
    """(block, first byte, end) of `ahead` bytes of stages behind the ring of a layer of these sizes."""
    steps, tiles = columns // 32, rows // 16 // BLOCKS  # of a row; a block's row tiles
    stages = -(-steps // 8 // 4)  # of four steps, in each slice of a row tile
    ring = min(16, (NARROW_BYTES - steps * 64 - 1280 - 32 * norms) // (8 * (STAGE + 8)))
    behind = range(ring, min(ring + ahead // (8 * STAGE), stages * tiles))
    found = []
    for block, part, stage in itertools.product(range(BLOCKS), range(8), behind):
        two, of_two = divmod(stage, 2 * stages)  # two row tiles' stages take turns; the last one may be alone
        tile, index = (2 * two + of_two % 2, of_two // 2) if 2 * two + 1 < tiles else (2 * two, of_two)
        first, end = part * steps // 8 + 4 * index, (part + 1) * steps // 8
        start = (block * tiles + tile) * steps * 512
        if first < end:
            found.append((block, start + first * 512, start + min(first + 4, end) * 512))
    return sorted(found)


SHAPES = {"qkv": (1536, HIDDEN, True), "o": (HIDDEN, 1024, False), "gate_up": (2560, HIDDEN, True)}
SHAPES["down"] = (HIDDEN, 1280, False)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("persistent", [False, True])
def test_no_bit_depends_on_it(setting: str, persistent: bool) -> None:
    for position in (POSITION, 1000):
        plain = layers("none").run(position, BLOCKS, persistent=False)
        found = layers(setting).run(position, BLOCKS, persistent, seed=3)
        assert all(found[region] == plain[region] for region in COMPARED)
        assert np.frombuffer(plain["logits"], np.float32).any()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_layer_asks_for_what_comes_behind_its_ring(setting: str) -> None:
    """Once for each byte, before it waits, by the blocks whose weights they are."""
    kib, of_all = SETTINGS[setting]
    for name in (*SHORT, *LONG):
        launches = [found for kernel, found in asked(setting, False) if kernel == f"ull_{name}_1"]
        assert len(launches) == LAYERS
        rows, columns, norms = SHAPES[name]
        ahead = kib * 1024 if name in SHORT or of_all else 0
        for layer, prefetches in enumerate(launches):
            assert not any(found.waited for found in prefetches)
            assert sorted(places(setting, prefetches, name, layer)) == expected(rows, columns, ahead, norms)
            assert len(places(setting, prefetches, name, layer)) == len(prefetches)


def shares(rows: int, kib: int) -> dict[int, tuple[int, int]]:
    """By block of a linear layer, its first `kib`."""
    share = rows // 16 // BLOCKS * TILE
    return {block: (block * share, block * share + min(share, kib * 1024)) for block in range(BLOCKS) if kib}


@pytest.mark.parametrize("setting", SETTINGS)
def test_attention_asks_for_the_heads_of_o_and_gate_up(setting: str) -> None:
    """Of o before it waits; of gate_up only blocks without positions of their own, once they know."""
    kib, _ = SETTINGS[setting]
    for position, busy in ((POSITION, {0, 1}), (1000, set(range(8)))):  # a lane's kv heads are neighbours
        launches = [found for kernel, found in asked(setting, False, position) if kernel == "ull_attention_1"]
        assert len(launches) == LAYERS
        for layer, prefetches in enumerate(launches):
            early = [found for found in prefetches if not found.waited]
            late = [found for found in prefetches if found.waited]
            assert spans(places(setting, early, "o", layer)) == shares(HIDDEN, kib)
            idle = {block: span for block, span in shares(2560, kib).items() if block not in busy}
            assert spans(places(setting, late, "gate_up", layer)) == idle
            assert len(prefetches) == len(shares(HIDDEN, kib)) + len(idle)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_one_kernel_asks_for_what_comes_behind_its_ring_before_attention(setting: str) -> None:
    kib, _ = SETTINGS[setting]
    ((_, prefetches),) = [found for found in asked(setting, True) if found[0] == "ull_layers_1"]
    assert all(found.waited for found in prefetches)
    assert sum(found.bytes for found in prefetches) == LAYERS * BLOCKS * kib * 1024
    for layer in range(LAYERS if kib else 0):
        o, gate_up = (spans(places(setting, prefetches, name, layer)) for name in SHORT)
        in_ring = set()  # row tiles of o and gate_up: as many in every block
        for block in range(BLOCKS):
            ends = (block + 1) * 8 * TILE, block * 20 * TILE  # of o, and where gate_up begins
            first_of_o, end_of_o = o.get(block, (ends[0], ends[0]))
            first, end = gate_up[block]
            assert end_of_o == ends[0]
            assert first == ends[1] or first_of_o == end_of_o
            assert end - first + end_of_o - first_of_o == kib * 1024
            in_ring.add((first_of_o - block * 8 * TILE + first - ends[1]) // TILE)
        assert len(in_ring) == 1
        assert in_ring.pop() >= 2


@pytest.mark.skipif(emulation.SANITIZE, reason="AddressSanitizer ends the process where o's launch has no weights")
def test_weights_of_another_forward_are_not_asked_for() -> None:
    """Where a bundle's linear layers are not ours, attention's parameters name no weights."""
    rig = layers("64")
    o_weights = {name: rig.tensors.pop(name) for name in list(rig.tensors) if name.endswith((".o.weight", "up.weight"))}
    try:
        with pytest.raises(emulation.KernelError, match="ull_o_1"):  # it is ours here: its launch is not
            rig.run(POSITION, BLOCKS, persistent=False)
    finally:
        rig.tensors |= o_weights
    assert [kernel for kernel, _ in rig.prefetched] == ["ull_qkv_1", "ull_attention_1"]
    assert not any(found for _, found in rig.prefetched)
