"""How launches and weights get to the device: what a forward launches, what may be captured, and staging."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from recording_driver import RecordingDriver
from ull.bundle import DEVICE_INTERFACE, TOKEN_COUNTS, Precision
from ull.errors import GpuError
from ull.gpu import params
from ull.gpu.capture import capture_graph
from ull.gpu.chunk import Chunks
from ull.gpu.forward import Recorder
from ull.gpu.fused import FusedForward
from ull.gpu.geometry import chunk
from ull.gpu.launch import Launch
from ull.gpu.memory import Sizes
from ull.gpu.places import HostBlocks, Places
from ull.gpu.weights import Staging
from ull_build.shapes import shape_model

LINEARS = ("norm", "qkv", "o", "gate", "down", "head")


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


# Regions lie at numbers that follow from their names.
PLACES = Places(lambda name: sum(map(ord, name)), lambda name: None, HostBlocks(0, 0, 0, 0, 0, 0))


def forward_of(
    arch: str, context: int = 4096, warpgroup_trees: bool = False, windows: Sequence[int] = (0,)
) -> FusedForward:
    """For an H200; a layer for each window."""
    model = structs.replace(shape_model(arch), layers=len(windows), windows=list(windows))
    return FusedForward(Sizes(model, Precision(), context, warpgroup_trees=warpgroup_trees), PLACES, 132)


def chunks_of(arch: str, fast: bool) -> Chunks:
    """For an H200, of one layer."""
    model = structs.replace(shape_model(arch), layers=1, windows=[0])
    return Chunks(Sizes(model, Precision(), 4096, chunks=True, fast_prefill=fast), PLACES, 132)


def test_each_layers_window_reaches_its_attention() -> None:
    forward = forward_of("llama-3.2-1b", windows=[0, 64, 1024])
    for tokens in TOKEN_COUNTS:
        launches = [launch for launch in forward.launches(tokens, True) if launch.kernel.startswith("ull_attention")]
        assert [launch.params.window for launch in launches] == [0, 64, 1024]


@pytest.mark.parametrize(("context", "warpgroup_trees"), [(4096, True), (1025, True), (1024, True), (4096, False)])
def test_a_long_cache_has_a_kernel_of_its_own(context: int, warpgroup_trees: bool) -> None:
    """Before the trees' of 16 tokens and more, whose kernel is told how many blocks share a kv head."""
    forward = forward_of("llama-3.1-8b", context, warpgroup_trees)
    for tokens in TOKEN_COUNTS:
        launches = [launch for launch in forward.launches(tokens, True) if launch.kernel.startswith("ull_attention")]
        if tokens < 16 or context <= 1024 or not warpgroup_trees:
            assert len(launches) == 1 and launches[0].params.page_blocks == 0
            continue
        pages, rest = launches
        assert (pages.kernel, rest.kernel) == ("ull_attention_pages", f"ull_attention_{tokens}")
        assert pages.grid[0] == pages.params.page_blocks == rest.params.page_blocks > 0


@pytest.mark.parametrize(("arch", "apart"), [("llama-3.2-1b", 16), ("llama-3.1-8b", 8), ("llama-3.3-70b", 4)])
def test_many_activations_are_normed_by_a_kernel_of_its_own(arch: str, apart: int) -> None:
    """From so many tokens on that a block cannot stage them beside its ring."""
    forward = forward_of(arch)
    for tokens in TOKEN_COUNTS:
        launches = [launch for launch in forward.launches(tokens, True) if launch.kernel.split("_")[1] in LINEARS]
        norms = [index for index, launch in enumerate(launches) if launch.kernel == f"ull_norm_{tokens}"]
        normed = [launches[index + 1] for index in norms]
        kernels = [f"ull_{name}_{tokens}" for name in ("qkv", "gate_up", "head")]
        assert [launch.kernel for launch in normed] == (kernels if tokens >= apart else [])
        assert all(launches[i].params.normed == launches[i + 1].params.activations for i in norms)


def time_of(clusters: list[float], at_once: int) -> float:
    """Until the last of clusters that begin in this order, each where one has ended, is done."""
    ends = [0.0] * at_once
    for cluster in clusters:
        heapq.heapreplace(ends, ends[0] + cluster)
    return max(ends)


@pytest.mark.parametrize("multiprocessors", [8, 30, 114, 132])
@pytest.mark.parametrize("apart", [False, True])
def test_smaller_blocks_at_the_end_of_a_chunks_product_never_make_it_longer(multiprocessors: int, apart: bool) -> None:
    """Of 64 rows, which take three quarters of the time of 128 at the most; and every block fits in the grid."""
    gained = 0
    for rows in range(256, 64 * 256, 256):
        grid, _, _ = chunk.product(rows, multiprocessors, apart)
        for tiles, whole in enumerate(chunk.whole_clusters(rows, multiprocessors, apart), 1):
            clusters, columns = rows // 256, 4 if apart and tiles == 1 else tiles
            halved = 2 * (clusters - whole) * columns
            expected = time_of([1.0] * clusters * columns, multiprocessors // 2)
            found = time_of([1.0] * whole * columns + [0.75] * halved, multiprocessors // 2)
            assert found <= expected and (found < expected) == (halved > 0)
            assert grid[0] * grid[1] >= 2 * (whole * columns + halved)
            gained += halved > 0
    assert gained > 0


def results_of(first: int, end: int) -> int:
    """What a block leaves of splits [first, end): each before a whole span, and the spans."""
    apart = min(-first % 8, end - first)
    return apart + -(-(end - first - apart) // 8)


def test_there_is_room_for_what_blocks_leave_that_share_a_chunks_splits_out() -> None:
    """However many they are, and whichever split a window begins in; and for little more."""
    for splits in range(4, 140):
        most = 0
        for first, lanes in itertools.product(range(min(8, splits - 3)), range(2, 33)):
            per_lane = -(-(splits - 1 - first) // lanes)
            starts = [*range(first, splits - 1, per_lane), splits]
            assert 2 < len(starts) <= lanes + 1
            most = max(most, *(results_of(start, end) for start, end in itertools.pairwise(starts)))
        assert most <= chunk.attention_results(256 * splits) <= most + 2, splits


def test_qkv_of_a_whole_chunk_takes_less_than_two_waves() -> None:
    """An 8B model's: 16 clusters of 24 for each of four tiles, of 66 at once, and 64 smaller ones, without any idle.

    Read fast, it has no smaller blocks.
    """
    assert chunk.whole_clusters(6144, 132) == (0, 24, 22, 16)
    assert chunk.product(6144, 132)[0] == (4, 64)
    assert chunk.whole_clusters(6144, 132, fast=True) == (24, 24, 24, 24)
    assert chunk.product(6144, 132, fast=True)[0] == (4, 48)


def test_a_change_of_grids_raises_the_interface() -> None:
    """Kernels of older bundles were compiled for the grids of then. Raise it unless they do with these as well."""
    launches = set()
    for warpgroup_trees, tokens in itertools.product((False, True), TOKEN_COUNTS):
        for one in forward_of("llama-3.1-8b", warpgroup_trees=warpgroup_trees).launches(tokens, True):
            launches.add((one.kernel, one.grid, one.threads, one.shared_bytes, warpgroup_trees))
    for fast in (False, True):
        for one in chunks_of("llama-3.1-8b", fast).launches(draws=True):
            whole = tuple(getattr(one.params, "whole", ()))
            launches.add((one.kernel, one.grid, one.threads, one.shared_bytes, fast, whole))
    digest = hashlib.sha256(repr(sorted(map(repr, launches))).encode()).hexdigest()[:16]
    assert (DEVICE_INTERFACE, digest) == (16, "d25df4de9bc792e0")


def test_a_kernel_behind_the_work_of_others_waits_for_all_of_it(driver: RecordingDriver) -> None:
    """What others capture does not say when what comes behind it may begin."""
    functions = {"ull_begin": driver.function(0, "ull_begin")}
    launch = Launch("ull_begin", (1, 1), 32, 0, params.BeginParams())
    apart = replace(launch, overlaps=False)
    enqueued: list[int] = []

    def record(recorder: Recorder) -> None:
        for step in (launch, launch, None, launch, launch, apart, launch):
            if step is None:
                recorder.enqueue(enqueued.append)
            else:
                recorder.launch(step)

    graph = driver.graphs[capture_graph(driver, 7, functions, record)]
    assert [one.overlaps for one in graph] == [False, True, False, True, False, True] and enqueued == [7]


@pytest.mark.parametrize("foreign", ["HOST", "EVENT_RECORD", "MEM_ALLOC"])
def test_a_round_with_the_host_in_it_is_refused(driver: RecordingDriver, foreign: str) -> None:
    driver.node_types = lambda graph: ["KERNEL", foreign, "MEMSET"]  # type: ignore[method-assign]
    with pytest.raises(GpuError, match=f"the captured round holds nodes that a round must not have: {foreign}$"):
        capture_graph(driver, 0, {}, lambda recorder: None)
    assert not any(driver.live.values())


def test_staging_copies_what_is_larger_than_its_buffers(driver: RecordingDriver) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_001, np.uint8)
    target = driver.allocate(len(data))
    with Staging(driver, 0, chunk=1024) as staging:
        staging.copy(target, data)
    np.testing.assert_array_equal(driver.device_bytes(target, len(data)), data)


class LateDriver(RecordingDriver):
    """Copies when somebody waits for them, as a device may."""

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[Callable[[], None]] = []
        self._recorded: dict[int, int] = {}  # event -> how many copies come before it

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        copy = super().copy_to_device
        self._queued.append(lambda: copy(target, source, nbytes, stream))

    def record(self, event: int, stream: int) -> None:
        self._recorded[event] = len(self._queued)

    def wait(self, event: int) -> None:
        self._run(self._recorded.get(event, 0))

    def synchronise(self, stream: int) -> None:
        self._run(len(self._queued))

    def _run(self, count: int) -> None:
        for index in range(count):
            self._queued[index]()
            self._queued[index] = lambda: None


def test_staging_holds_its_buffers_until_the_last_copy_is_done() -> None:
    driver = LateDriver()
    data = np.random.default_rng(0).integers(0, 256, 3000, np.uint8)
    target = driver.allocate(len(data))
    with Staging(driver, 0, chunk=1024) as staging:
        staging.copy(target, data)
    assert driver.live["host"] == set()
    driver.synchronise(0)  # what is copied only now finds no buffer
    np.testing.assert_array_equal(driver.device_bytes(target, len(data)), data)
