"""begin() and accept(): requests become rounds, draws become results; and the embedding between them."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from ull.gpu import params as layout
from ull.gpu.launches import sampling as launches

CHAIN = (0, *range(63))  # parents
PAGES = 9
SINGLE = (0,)  # the root alone


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build(["begin.cu", "accept.cu", "embed.cu"])


class Device:
    """The memory that a round's kernels share with the host, and what the host does with it."""

    def __init__(self, kernels: emulation.Kernels) -> None:
        self.kernels = kernels
        self.device_memory: list[NDArray[np.uint8]] = []
        self.requests: Any = self._memory(layout.RoundRequest * layout.ROUND_SLOTS)
        self.results: Any = self._memory(layout.RoundResult * layout.ROUND_SLOTS)
        self.control: Any = self._memory(layout.HostControl)
        self.round: Any = self._memory(layout.Round)
        self.state: Any = self._memory(layout.State)
        self.host_pages = aligned(PAGES + PAGES % 2, np.int32)
        self.pages = aligned(PAGES, np.int32, -1)
        self.counters = aligned(777, np.uint32)
        self.control.cancelled_through = 0
        ctypes.memset(ctypes.addressof(self.state), 0, ctypes.sizeof(layout.State))
        self.state.sequence = 1
        self.sequence = 0
        self.seed = 0

    def _memory(self, kind: type[Any]) -> Any:
        memory = aligned(ctypes.sizeof(kind), np.uint8)
        if kind in (layout.Round, layout.State):
            self.device_memory.append(memory)
        return kind.from_buffer(memory)

    def ask(
        self,
        mode: int,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = SINGLE,
        *,
        stops: Sequence[int] = (),
        biases: Sequence[tuple[int, float]] = (),
        pages: Sequence[int] = (),
        **fields: Any,
    ) -> Any:
        """Writes the next request and runs begin(); -> the round."""
        self.sequence += 1
        request = self.requests[self.sequence % layout.ROUND_SLOTS]
        ctypes.memset(ctypes.addressof(request), 0xFF, ctypes.sizeof(request))  # what a mode does not need
        request.sequence, request.mode = self.sequence, mode
        request.max_tokens, request.setting = 65, 1
        if mode != layout.CONTINUE:
            request.count, request.position = len(tokens), 0
            request.tokens[: len(tokens)] = tokens
        if mode == layout.TAKE:
            request.parents[: len(tokens)] = parents[: len(tokens)]
        request.page_count, request.stop_count = len(pages), len(stops)
        self.host_pages[: len(pages)] = pages
        request.stops[: len(stops)] = stops
        for name, value in fields.items():
            setattr(request, name, value)
        request.sampling.bias_count = len(biases)
        for i, (token, bias) in enumerate(biases):
            request.biases[i] = layout.LogitBias(token, bias)
        self.counters[...] = 5
        ctypes.memset(ctypes.addressof(self.round), 0xFF, ctypes.sizeof(layout.Round))
        self._run("ull_begin", launches.begin(), self._begin_params())
        assert not self.counters.any()
        return self.round

    def _begin_params(self) -> layout.BeginParams:
        return layout.BeginParams(
            *map(ctypes.addressof, (self.round, self.state, self.requests, self.control)),
            *(pointer(self.host_pages), pointer(self.pages), pointer(self.counters), self.counters.size, PAGES),
        )

    def draw(self, draws: Sequence[int]) -> Any:
        """Plays the sampler, runs accept(); -> the result."""
        for node, token in enumerate(draws):
            self.round.drawn[node] = layout.EmittedToken(token, -float(node), 0, node)
        slot = self.round.sequence % layout.ROUND_SLOTS
        ctypes.memset(ctypes.addressof(self.results[slot]), 0xFF, ctypes.sizeof(layout.RoundResult))
        addresses = map(ctypes.addressof, (self.round, self.state, self.results))
        self._run("ull_accept", launches.accept(), layout.AcceptParams(*addresses))
        result = self.results[slot]
        assert (result.sequence, result.begin_ns) == (self.round.sequence, self.round.begin_ns)
        return result

    def _run(self, kernel: str, geometry: launches.Geometry, params: ctypes.Structure) -> None:
        grid, threads, shared = geometry
        self.seed += 1
        self.kernels.run(
            kernel,
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=self.seed,
            predecessor_writes=self.device_memory,
        )

    def take(self, tokens: Sequence[int], parents: Sequence[int], draws: Sequence[int], **fields: Any) -> Any:
        self.ask(layout.TAKE, tokens, parents, **fields)
        return self.draw(draws)

    def go_on(self, draw: int, **fields: Any) -> Any:
        """A round that continues the last one; `draw` is used if it is not skipped."""
        round_ = self.ask(layout.CONTINUE, **fields)
        return self.draw([draw] * round_.count)


@pytest.fixture
def device(kernels: emulation.Kernels) -> Device:
    return Device(kernels)


def emitted(result: Any) -> list[int]:
    assert result.count >= 0
    return [result.tokens[i].token for i in range(result.count)]


def accepted(device: Device) -> list[int]:
    return list(device.round.accepted[: device.round.accepted_count])


# ---- begin ---------------------------------------------------------------------------------------------------------


def way(parents: Sequence[int], node: int) -> list[int]:
    """From the root to the node."""
    return [*way(parents, parents[node]), node] if node > 0 else [0]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of 1 to 64 nodes; the root's is 0."""
    count = draw(st.integers(1, 64))
    reach = draw(st.sampled_from([1, 2, 5, 64]))  # 1: a chain
    return [0, *(draw(st.integers(max(0, node - reach), node - 1)) for node in range(1, count))]


@settings(max_examples=60, deadline=None)
@given(parents=trees(), position=st.integers(0, 2**30))
def test_depths_and_paths(kernels: emulation.Kernels, parents: list[int], position: int) -> None:
    tokens = [100 + node for node in range(len(parents))]
    device = Device(kernels)
    round_ = device.ask(layout.TAKE, tokens, parents, position=position, max_tokens=9)
    assert (round_.sequence, round_.mode, round_.count, round_.base) == (1, layout.TAKE, len(parents), position)
    assert (round_.max_tokens, round_.draws) == (9, 1)
    assert list(round_.tokens[: len(parents)]) == tokens
    for node in range(len(parents)):
        path = way(parents, node)
        assert round_.depths[node] == len(path) - 1
        assert list(round_.path[node][: len(path)]) == path


@pytest.mark.parametrize("count", [1, 2, 63, 64])
def test_a_prefill_is_a_chain_whatever_the_parents_say(device: Device, count: int) -> None:
    round_ = device.ask(layout.PREFILL, range(count), position=640)
    assert (round_.count, round_.base, round_.draws) == (count, 640, 0)
    assert list(round_.depths[:count]) == list(range(count))
    assert all(list(round_.path[node][: node + 1]) == list(range(node + 1)) for node in range(count))
    result = device.draw([])
    assert (result.status, result.count) == (layout.OK, 0)
    assert accepted(device) == list(range(count))


@pytest.mark.parametrize(("bias_count", "page_count"), [(0, 0), (3, 4), (1024, 9)])
def test_settings_are_copied_when_they_change(device: Device, bias_count: int, page_count: int) -> None:
    stops, pages = list(range(40, 72))[: bias_count % 33], list(range(10, 10 + page_count))
    biases = [(5000 - i, -math.inf if i % 3 == 0 else 0.5 * i) for i in range(bias_count)]
    sampling = layout.Sampling(0.5, 3, 0.75, 0.125, 2**63 + 1, 4)
    device.take([1], SINGLE, [2], setting=7, sampling=sampling, stops=stops, biases=biases, pages=pages)
    # The same setting: nothing is read, even where the block holds something else.
    device.go_on(3, setting=7, sampling=layout.Sampling(1.0), stops=[3], pages=[99])
    state = device.state
    assert (state.setting, state.stop_count, state.stopped) == (7, len(stops), 0)
    assert list(state.stops[: len(stops)]) == stops
    found = state.sampling
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 3, 0.75, 0.125)
    assert (found.seed, found.top_logprobs, found.bias_count) == (2**63 + 1, 4, bias_count)
    assert [(entry.token, entry.bias) for entry in state.biases[:bias_count]] == biases
    assert device.pages.tolist() == pages + [-1] * (PAGES - page_count)

    device.go_on(3, setting=8, sampling=layout.Sampling(1.0), stops=[4], pages=[99])
    assert (state.setting, state.sampling.temperature, state.sampling.bias_count) == (8, 1.0, 0)
    assert (state.stop_count, state.stops[0], device.pages[0]) == (1, 4, 99)


# ---- accept --------------------------------------------------------------------------------------------------------


def walked(
    tokens: Sequence[int], parents: Sequence[int], draws: Sequence[int], stops: Sequence[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """exec/cpu/speculator.cpp's accept(), with stops -> nodes kept, tokens emitted."""
    nodes: list[int] = []
    node: int | None = 0
    while node is not None and len(nodes) < max_tokens and draws[node] >= 0:
        nodes.append(node)
        if draws[node] in stops:
            break
        children = [child for child in range(1, len(tokens)) if parents[child] == node]
        node = next((child for child in children if tokens[child] == draws[node]), None)
    return nodes, [draws[node] for node in nodes]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), parents=trees(), max_tokens=st.integers(1, 65), likely=st.sampled_from([1, 3, 20]))
def test_the_longest_path_is_accepted(
    kernels: emulation.Kernels, data: st.DataObject, parents: list[int], max_tokens: int, likely: int
) -> None:
    """Each node draws a child's token `likely` times out of `likely` + 1, else another, a stop or nothing."""
    count = len(parents)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    ranks = [parents[:node].count(parents[node]) for node in range(count)]  # siblings hold different tokens
    tokens = [10 + rank for rank in ranks]
    stops = [5, 11][: int(rng.integers(3))]
    draws = []
    for node in range(count):
        own = [tokens[child] for child in range(1, count) if parents[child] == node]
        lucky = own and rng.integers(likely + 1) > 0
        draws.append(int(rng.choice(own if lucky else [-1, 5, 9, 999])))
    device = Device(kernels)
    result = device.take(tokens, parents, draws, position=50, max_tokens=max_tokens, stops=stops)
    nodes, expected = walked(tokens, parents, draws, stops, max_tokens)
    assert emitted(result) == expected
    assert accepted(device) == nodes
    assert result.status == (layout.OK if expected else layout.NOT_FINITE)
    assert [(result.tokens[i].node, result.tokens[i].logprob) for i in range(len(nodes))] == [
        (node, -float(node)) for node in nodes
    ]
    stopped = bool(expected) and expected[-1] in stops
    assert result.stopped == stopped
    assert device.state.stopped == (stopped or not expected)
    if expected:
        assert (device.state.token, device.state.position) == (expected[-1], 50 + len(expected))


def test_a_whole_chain_is_accepted(device: Device) -> None:
    result = device.take(range(64), CHAIN, range(1, 65), position=0)
    assert emitted(result) == list(range(1, 65))
    assert accepted(device) == list(range(64))


def test_only_the_wanted_alternatives_are_sent(device: Device) -> None:
    device.ask(layout.TAKE, [1, 2], (0, 0))
    for node, count in ((0, 3), (1, 20)):
        drawn = device.round.drawn[node]
        drawn.token, drawn.logprob, drawn.top_count, drawn.node = 2, -0.5, count, node
        for i in range(20):
            drawn.top[i] = layout.TokenLogprob(100 * node + i, -i)
    result = device.draw([])
    assert result.count == 2
    for node, count in ((0, 3), (1, 20)):
        token = result.tokens[node]
        assert (token.token, token.logprob, token.top_count, token.node) == (2, -0.5, count, node)
        assert [(entry.token, entry.logprob) for entry in token.top[:count]] == [
            (100 * node + i, -i) for i in range(count)
        ]
    assert result.tokens[0].top[4].token == -1  # 16 bytes, two alternatives, go at once
    assert result.tokens[2].token == -1


# ---- rounds one after another --------------------------------------------------------------------------------------


def test_rounds_continue_from_the_state(device: Device) -> None:
    assert emitted(device.take([5, 6], (0, 0), [6, 7], position=10)) == [6, 7]
    for step in range(10):  # the slots come round
        round_ = device.ask(layout.CONTINUE)
        assert (round_.sequence, round_.count, round_.base, round_.tokens[0]) == (2 + step, 1, 12 + step, 7 + step)
        assert (round_.depths[0], round_.path[0][0], round_.draws) == (0, 0, 1)
        assert emitted(device.draw([8 + step])) == [8 + step]
        assert accepted(device) == [0]


def outcome(result: Any) -> tuple[int, list[int]]:
    return result.status, emitted(result)


SKIPPED = (layout.SKIPPED, [])


def test_a_stop_token_ends_the_request(device: Device) -> None:
    device.take([1], SINGLE, [2], stops=[9, 4])
    assert device.go_on(3).stopped == 0
    result = device.go_on(4)
    assert outcome(result) == (layout.OK, [4])
    assert result.stopped == 1
    for _ in range(3):
        result = device.go_on(5)
        assert outcome(result) == SKIPPED
        assert result.stopped == 0
        assert (device.round.count, device.round.accepted_count) == (0, 0)
    assert (device.state.token, device.state.position) == (4, 3)
    assert outcome(device.take([6], SINGLE, [7], setting=2)) == (layout.OK, [7])
    assert outcome(device.go_on(8, setting=2)) == (layout.OK, [8])


def test_a_cancelled_round_takes_those_that_continue_it_along(device: Device) -> None:
    device.take([1], SINGLE, [2])
    device.control.cancelled_through = 3
    before = bytes(device.state)
    assert outcome(device.go_on(3, setting=2)) == SKIPPED
    assert outcome(device.take([4], SINGLE, [5], setting=3)) == SKIPPED  # also one that does not continue
    assert outcome(device.go_on(6, setting=3)) == SKIPPED  # was never cancelled itself
    after = layout.State.from_buffer_copy(bytes(device.state))
    assert (after.sequence, after.stopped) == (5, 1)
    after.sequence, after.stopped = 2, 0
    assert bytes(after) == before
    assert outcome(device.take([4], SINGLE, [5], setting=3)) == (layout.OK, [5])


def test_a_failed_round_is_not_continued(device: Device) -> None:
    device.take([1], SINGLE, [2])
    assert outcome(device.go_on(-1)) == (layout.NOT_FINITE, [])
    assert outcome(device.go_on(3)) == SKIPPED
    assert (device.state.token, device.state.position) == (2, 1)


def test_a_prefill_is_not_continued(device: Device) -> None:
    device.take([1], SINGLE, [2])
    device.ask(layout.PREFILL, [3, 4], position=0)
    assert outcome(device.draw([])) == (layout.OK, [])
    assert outcome(device.go_on(5)) == SKIPPED
    assert outcome(device.take([4], SINGLE, [5])) == (layout.OK, [5])


def test_a_request_that_is_not_there_is_skipped(device: Device) -> None:
    """The slot holds another round's request: the result says so and keeps the count."""
    device.ask(layout.TAKE, [1], sequence=5)
    assert outcome(device.draw([2])) == SKIPPED
    assert outcome(device.take([1], SINGLE, [2])) == (layout.OK, [2])


@pytest.mark.parametrize("count", [0, -1, 65, 2**31 - 1])
def test_a_tree_of_an_impossible_size_is_skipped(device: Device, count: int) -> None:
    device.ask(layout.TAKE, [1], count=count)
    assert outcome(device.draw([2])) == SKIPPED


def test_the_limit_of_tokens_is_the_rounds_own(device: Device) -> None:
    assert emitted(device.take(range(64), CHAIN, range(1, 65), max_tokens=3)) == [1, 2, 3]
    assert accepted(device) == [0, 1, 2]
    assert (device.round.base, device.state.position) == (0, 3)


# ---- embedding -----------------------------------------------------------------------------------------------------


def test_embedding(kernels: emulation.Kernels) -> None:
    hidden, vocabulary = emulation.TINY_MODEL["HIDDEN"], 50
    table = aligned((vocabulary, int(hidden)), np.uint16)
    values = np.random.default_rng(0).standard_normal(table.shape).astype(ml_dtypes.bfloat16)
    table[...] = values.view(np.uint16)
    residual = aligned((64, int(hidden)), np.float32)
    device = Device(kernels)
    device.ask(layout.TAKE, [49, 0, 7], (0, 0, 1))
    grid, threads, shared = launches.embed(int(hidden), 4)
    params = layout.EmbedParams(ctypes.addressof(device.round), pointer(table), pointer(residual))
    kernels.run("ull_embed", grid=grid, threads=threads, shared_bytes=shared, params=params)
    assert np.array_equal(residual[:3], values[[49, 0, 7]].astype(np.float32))
    assert np.isnan(residual[3:]).all()
