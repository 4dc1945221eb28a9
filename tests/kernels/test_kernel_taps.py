"""The residual of tapped layers, which the kernels of the layers keep for heads that draft from it, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from layer_rig import COMPARED, SOURCES, Layers, model_of
from ull.bundle import Precision
from ull.gpu.geometry import attention, linear
from ull.gpu.launch import Launch
from ull.gpu.memory import TAP_RING, TAP_ROWS
from ull.gpu.params import TAP_SLOTS, CommitParams, Round

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(emulation.ON_DEVICE, reason="parameters point to parameters; tests/h200 compares whole engines"),
]
TAPS = (0, 2, 3)  # with what enters the first layer and what leaves the last
SHAPES = {
    "small": (model_of(), Precision(lm_head_scan=True), False),
    "rows that end within a tile": (model_of(hidden=100, intermediate=76, vocabulary=77), Precision(), True),
    "norms apart": (model_of(hidden=2336, intermediate=64), Precision(), False),
}
ALL_SOURCES = [*SOURCES, "norm.cu", "head_scan.cu"]


@functools.cache
def layers(name: str, taps: tuple[int, ...] = TAPS) -> Layers:
    model, precision, biases = SHAPES[name]
    scans = ["head_rescore.cu"] if precision.lm_head_scan else []
    sources = [*ALL_SOURCES, *scans] if scans else [source for source in ALL_SOURCES if source != "head_scan.cu"]
    return Layers(model, precision, biases, sources=sources, taps=taps)


def rows_of(rig: Layers, name: str) -> NDArray[np.uint32]:
    """[rows, taps, H] of the ring or of the scratch; words nobody has written are 0xFFFFFFFF."""
    return rig.memory[name].view(np.uint32).reshape(-1, len(TAPS), rig.sizes.tap_bytes // 4)[..., : rig.model.hidden]


class Residuals:
    """What enters each layer and leaves the last: the residual when the kernel that first normalises it has ended."""

    def __init__(self, rig: Layers) -> None:
        self._rig, self.found = rig, list[NDArray[np.uint32]]()
        self._norms = 0

    def __call__(self, launch: Launch) -> None:
        """A layer has two norms, the second before gate_up; each is a launch of its own or part of the linear's."""
        norms = bool(getattr(launch.params, "norm_weight", None))
        tile = int(launch.kernel.rsplit("_", 1)[1])
        if not norms or (linear.norms_apart(self._rig.model.hidden, tile) and "norm" not in launch.kernel):
            return
        if self._norms % 2 == 0:
            residual = self._rig.memory["residual"].view(np.uint32).reshape(64, -1)
            self.found.append(residual[:, : self._rig.model.hidden].copy())
        self._norms += 1


def check(name: str, tokens: int, count: int, position: int, draws: bool = True, scans: bool = False) -> None:
    rig = layers(name)
    heard = Residuals(rig)
    tapped = rig.run(position, 3, False, tokens + count, count, draws, tokens, scans, heard)
    assert len(heard.found) == rig.model.layers + 1
    kept, other = (TAP_RING, TAP_ROWS) if tokens == 1 else (TAP_ROWS, TAP_RING)
    first = position % TAP_SLOTS if tokens == 1 else 0
    rows = rows_of(rig, kept)
    for tap, layer in enumerate(TAPS):
        expected = heard.found[layer][:count]
        assert expected.any()
        assert np.array_equal(rows[first : first + count, tap], expected), layer
    rest = np.delete(rows, range(first, first + count), axis=0)
    assert (rest == 0xFFFFFFFF).all() and (rig.memory[other] == 0xFF).all()
    plain = layers(name, ()).run(position, 3, False, tokens + count, count, draws, tokens, scans)
    # Where nothing is drawn the last layer's sums would stay as they are.
    same = [region for region in COMPARED if draws or region != "residual"]
    assert all(tapped[region] == plain[region] for region in same), "the round itself knows nothing of it"


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (2, 2), (4, 3), (8, 7), (16, 9), (32, 32), (64, 61)])
@pytest.mark.parametrize("name", ["small", "rows that end within a tile"])
def test_every_tile_keeps_what_enters_the_tapped_layers(name: str, tokens: int, count: int) -> None:
    check(name, tokens, count, position=700)


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (8, 3)])
def test_a_norm_of_its_own_keeps_it_too(tokens: int, count: int) -> None:
    check("norms apart", tokens, count, position=5)


@pytest.mark.parametrize("tokens", [8, 64])
def test_a_round_that_only_fills_the_cache_keeps_what_leaves_the_last_layer(tokens: int) -> None:
    check("small", tokens, 6, position=0, draws=False)


def test_a_scan_of_the_lm_head_keeps_what_leaves_the_last_layer() -> None:
    check("small", 1, 1, position=TAP_SLOTS - 1, scans=True)


@pytest.mark.parametrize("multiprocessors", [1, 3, 30])
def test_one_kernel_of_all_layers_keeps_the_same(multiprocessors: int) -> None:
    """30: more blocks than most layers have row tiles."""
    rig = layers("small")
    rig.run(700, multiprocessors, False)
    expected = rig.memory[TAP_RING].copy()
    rig.run(700, multiprocessors, True, seed=multiprocessors)
    assert np.array_equal(rig.memory[TAP_RING], expected)


def test_a_skipped_round_keeps_nothing() -> None:
    rig = layers("small")
    for tokens, persistent in ((1, False), (1, True), (8, False), (64, False)):
        rig.run(700, 3, persistent, count=0, tokens=tokens)
        assert (rig.memory[TAP_RING] == 0xFF).all() and (rig.memory[TAP_ROWS] == 0xFF).all()


def test_all_accesses_are_ordered() -> None:
    model, precision, biases = SHAPES["small"]
    watched = Layers(model, precision, biases, reports=True, sources=[*SOURCES, "norm.cu"], taps=TAPS)
    for tokens, persistent in ((1, False), (1, True), (4, False), (16, False)):
        watched.run(300, 3, persistent, seed=7, count=tokens, tokens=tokens)


@pytest.mark.parametrize("position", [0, TAP_SLOTS - 3])
@pytest.mark.parametrize("accepted", [[0], [0, 3, 4, 9, 63], []])
def test_a_commit_brings_the_accepted_nodes_rows_into_the_ring(accepted: list[int], position: int) -> None:
    """Across the ring's end as well; other positions' rows stay."""
    rng = np.random.default_rng(len(accepted))
    kernels = emulation.build(["commit.cu"], {"HIDDEN": 100, "TAPS": 2}, reports=True)
    tapped, ring = (aligned((rows, 2, 112), np.float32) for rows in (64, TAP_SLOTS))
    for array in (tapped, ring):
        array[...] = rng.standard_normal(array.shape)
    before = ring.copy()
    memory = {name: aligned(1 << 20, np.uint8, 0) for name in ("round", "pages", "pool", "keys", "values", "results")}
    round_ = Round.from_buffer(memory["round"])
    round_.count, round_.base, round_.accepted_count = 64, position, len(accepted)
    round_.accepted[: len(accepted)] = accepted
    counters = aligned(1, np.uint32, 0)
    names = ("round", "pages", "pool", "keys", "values", "results")
    params = CommitParams(*(pointer(memory[name]) for name in names), *map(pointer, (counters, tapped, ring)), 0)
    grid, threads, shared = attention.commit(2, 2)
    written = [memory["round"], tapped]
    kernels.run(
        "ull_commit", grid=grid, threads=threads, shared_bytes=shared, params=params, predecessor_writes=written
    )
    for index, node in enumerate(accepted):
        slot = (position + index) % TAP_SLOTS
        assert np.array_equal(ring[slot], tapped[node])
        before[slot] = tapped[node]
    assert np.array_equal(ring, before)
