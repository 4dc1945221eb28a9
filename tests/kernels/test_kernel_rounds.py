"""begin() and accept(): requests become rounds, draws become results; and the embedding between them."""

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from round_rig import PAGES, SINGLE, Device, emitted
from ull import _native
from ull.gpu import params as layout
from ull.gpu.geometry import sampling as launches

CHAIN = (0, *range(63))  # parents


@pytest.fixture(scope="module")
def kernels() -> emulation.Kernels:
    return emulation.build(["begin.cu", "accept.cu", "embed.cu"], reports=True)


@pytest.fixture
def device(kernels: emulation.Kernels) -> Device:
    return Device(kernels)


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


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 511, 512])
def test_a_chunk_is_a_round_of_its_first_tokens_or_draws_behind_its_last(device: Device, count: int) -> None:
    tokens = [3000 - index for index in range(count)]
    for mode in (layout.PREFILL, layout.TAKE):
        draws = mode == layout.TAKE
        fields = {"position": 640, "forced": count - 1 if draws else 0, "max_tokens": draws}
        round_ = device.ask(mode, tokens, chunk=True, **fields)
        chunk = device.chunk
        assert (chunk.sequence, chunk.base, chunk.count) == (device.sequence, 640, count)
        assert list(chunk.tokens[:count]) == tokens
        assert (round_.sequence, round_.mode, round_.first_draw) == (device.sequence, mode, 0)
        if not draws:
            assert (round_.count, round_.base, round_.draws) == (min(count, 64), 640, 0)
            result = device.draw([])
            assert (result.status, result.count, device.state.stopped) == (layout.OK, 0, 1)
            continue
        assert (round_.count, round_.base, round_.draws) == (1, 640 + count - 1, 1)
        assert (round_.tokens[0], round_.depths[0], round_.path[0][0]) == (tokens[-1], 0, 0)
        assert emitted(device.draw([77])) == [77]
        # A round of one token goes on from there.
        state = device.state
        assert (state.token, state.position, state.node, state.stopped) == (77, 640 + count, 0, 0)
        assert emitted(device.go_on(78)) == [78] and device.round.base == 640 + count


@pytest.mark.parametrize("count", [0, -1, 513, 2**31 - 1])
@pytest.mark.parametrize("mode", [layout.PREFILL, layout.TAKE])
def test_a_chunk_of_an_impossible_size_is_skipped(device: Device, mode: int, count: int) -> None:
    round_ = device.ask(mode, [1], chunk=True, count=count)
    assert (round_.count, device.chunk.count) == (0, 0)
    assert device.draw([]).status == layout.SKIPPED


def test_a_chunk_that_is_cancelled_or_no_chunk_s_is_skipped(device: Device) -> None:
    device.ask(layout.CONTINUE, chunk=True)
    assert (device.chunk.count, device.draw([]).status) == (0, layout.SKIPPED)
    device.control.cancelled_through = device.sequence + 1
    device.ask(layout.TAKE, [1, 2, 3], chunk=True)
    assert (device.chunk.count, device.draw([]).status) == (0, layout.SKIPPED)


def test_the_text_of_a_chunk_that_draws_ends_with_its_last_token(device: Device) -> None:
    """To penalties its tokens are the prompt's, as those before it."""
    prompt = [7, 8, 9, 7, 300, 301]
    device.host_text[: len(prompt)] = prompt
    wish = layout.Sampling(top_p=1.0, frequency_penalty=0.5, penalises=1)
    fields = {"sampling": wish, "text": 5, "prompt_tokens": len(prompt), "max_tokens": 1}
    for _ in range(2):  # also once more, as after an abort that came too late
        device.ask(layout.TAKE, prompt[2:], chunk=True, position=2, forced=3, **fields)
        assert device.state.counted == len(prompt)
        expected = np.zeros_like(device.text_counts)
        expected[prompt] = layout.PROMPTED
        assert np.array_equal(device.text_counts, expected)
        assert emitted(device.draw([42])) == [42]
    device.ask(layout.CONTINUE, **fields)
    expected[42] = layout.GENERATED
    assert np.array_equal(device.text_counts, expected)


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
    """cpu/speculator.cpp's accept(), with stops -> nodes kept, tokens emitted."""
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
        assert device.state.node == nodes[-1]  # whose hidden state the Medusa heads read


def test_a_whole_chain_is_accepted(device: Device) -> None:
    result = device.take(range(64), CHAIN, range(1, 65), position=0)
    assert emitted(result) == list(range(1, 65))
    assert accepted(device) == list(range(64))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), forced=st.integers(1, 63), draw=st.sampled_from([-1, 5, 9]), max_tokens=st.integers(1, 9))
def test_what_is_forced_is_accepted_whatever_was_drawn(
    kernels: emulation.Kernels, data: st.DataObject, forced: int, draw: int, max_tokens: int
) -> None:
    """A chain of prompt tokens, whose draws are rubbish, and a tree behind it: mostly its root alone."""
    rubbish = data.draw(st.sampled_from([-1, 5, 9]))  # 5 is a stop
    tree = 1 if forced == 63 else data.draw(st.sampled_from([1, 2]))
    tokens = [9] * (forced + tree)  # each the draw at its parent, if that were looked at
    device = Device(kernels)
    draws = [rubbish] * forced + [draw] * tree
    chain = [max(0, node - 1) for node in range(forced + tree)]
    round_ = device.ask(layout.TAKE, tokens, chain, position=50, max_tokens=max_tokens, stops=[5], forced=forced)
    assert (round_.count, round_.draws, round_.first_draw) == (forced + tree, 1, forced)
    result = device.draw(draws)
    expected = [] if draw < 0 else [draw] * (2 if tree == 2 and draw == 9 and max_tokens > 1 else 1)
    assert emitted(result) == expected
    assert result.status == (layout.OK if expected else layout.NOT_FINITE)
    assert [result.tokens[i].node for i in range(result.count)] == [forced, forced + 1][: len(expected)]
    assert accepted(device) == list(range(forced + len(expected) if expected else 0))
    assert result.stopped == (draw == 5) and device.state.stopped == (draw != 9)
    if draw == 9:
        end = 50 + forced + len(expected)
        assert (device.state.token, device.state.position) == (9, end)
        assert device.state.node == forced + len(expected) - 1
        round_ = device.ask(layout.CONTINUE, forced=7)  # which a continuing round does not look at
        assert (round_.count, round_.base, round_.tokens[0], round_.first_draw) == (1, end, 9, 0)


def test_more_cannot_be_forced_than_there_are_nodes(device: Device) -> None:
    for forced, first in ((-1, 0), (3, 2), (2**31 - 1, 2)):
        assert device.ask(layout.TAKE, [1, 2, 3], CHAIN, forced=forced).first_draw == first
        device.draw([2, 3, 4])
    for mode in (layout.PREFILL, layout.MEDUSA):
        assert device.ask(mode, [1, 2, 3], forced=1).first_draw == 0
        device.draw([2, 3, 4])


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
        result = device.draw([8 + step])
        assert emitted(result) == [8 + step]
        assert result.end_ns >= result.begin_ns > 0  # where no commit follows, nobody else says so
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


answered = pytest.mark.skipif(emulation.ON_DEVICE, reason="there a kernel waits on a copy, which no host answers")


def ask_late(device: Device, answer: Callable[[Any], None], tokens: Sequence[int], **fields: Any) -> Any:
    """A round whose kernel waits for its request, to which the host comes with `answer` while it does; -> the round."""
    awaited = (device.sequence + 1) | layout.AWAITED
    request = device.requests[(device.sequence + 1) % layout.ROUND_SLOTS]

    def host() -> None:
        time.sleep(0.03)
        assert request.sequence == awaited
        answer(request)

    with ThreadPoolExecutor(1) as pool:
        written: list[Future[None]] = []
        round_ = device.ask(
            layout.TAKE,
            tokens,
            SINGLE,
            sequence=awaited,
            awaited=1,
            before=lambda: written.append(pool.submit(host)),
            **fields,
        )
        written[0].result()
    return round_


@answered
def test_a_round_waits_for_a_request_that_was_unknown_when_it_was_launched(device: Device) -> None:
    device.take([1], SINGLE, [2], stops=[9])
    begun = time.monotonic_ns()

    def answer(request: Any) -> None:
        request.count, request.position, request.setting, request.stop_count = 2, 7, 2, 1
        request.tokens[:2], request.parents[:2], request.stops[0] = [5, 6], [0, 0], 4
        request.sequence = device.sequence

    round_ = ask_late(device, answer, [99])
    assert (round_.count, round_.base, list(round_.tokens[:2])) == (2, 7, [5, 6])
    assert round_.begin_ns - begun >= 30_000_000  # it begins with its request
    result = device.draw([6, 4])
    assert (outcome(result), result.stopped) == ((layout.OK, [6, 4]), 1)  # the new setting's stop


@answered
def test_a_round_that_waits_is_sent_away_or_cancelled(device: Device) -> None:
    device.take([1], SINGLE, [2])

    def send_away(request: Any) -> None:
        request.sequence = 0

    def cancel(_request: Any) -> None:
        device.control.cancelled_through = device.sequence

    for answer in (send_away, cancel):
        before = bytes(device.state)
        assert ask_late(device, answer, [3]).count == 0
        assert outcome(device.draw([])) == SKIPPED
        after = layout.State.from_buffer_copy(bytes(device.state))
        assert after.stopped == 1
        after.sequence -= 1
        after.stopped = layout.State.from_buffer_copy(before).stopped
        assert bytes(after) == before
    assert outcome(device.take([4], SINGLE, [5])) == (layout.OK, [5])


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


def test_the_medusa_heads_between_two_rounds_leave_no_trace(device: Device) -> None:
    """The host gets the heads' candidates; the round after goes on as if nothing had been."""
    device.take([5, 6], (0, 0), [6, 7], position=10)
    round_ = device.ask(layout.MEDUSA, [0, 0, 0], position=12)
    assert (round_.count, round_.base, round_.draws, list(round_.depths[:3])) == (3, 12, 0, [0, 1, 2])
    for head in range(3):
        drawn = layout.EmittedToken(30 + head, 0.0, layout.MEDUSA_RANKS, head)
        drawn.top[:2] = [layout.TokenLogprob(30 + head, 2.5), layout.TokenLogprob(40 + head, -1.0)]
        round_.drawn[head] = drawn
    before = bytes(device.state)
    result = device.accept()
    assert bytes(device.state) == before
    assert outcome(result) == (layout.OK, [30, 31, 32]) and result.end_ns >= result.begin_ns
    assert [(token.top[1].token, token.top[1].logprob) for token in result.tokens[:3]] == [
        *((40, -1.0), (41, -1.0), (42, -1.0))
    ]
    assert emitted(device.go_on(8)) == [8] and device.state.position == 13


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


# ---- with the sampler ----------------------------------------------------------------------------------------------

VOCABULARY = 1003  # as in test_kernel_sampling.py, so that the kernels are compiled once


class Generator(Device):
    """Rounds of a model whose logits depend on the last token alone: row `token` of a table."""

    def __init__(self, kernels: emulation.Kernels, table: NDArray[np.float32]) -> None:
        super().__init__(kernels)
        self.table = table
        self.logits = aligned((layout.TREE_TOKENS, -(-VOCABULARY // 16) * 16), np.float32)
        self.scratch = aligned(launches.SCRATCH_BYTES, np.uint8)

    def accept(self) -> Any:
        nodes = self.round.count
        for node in range(nodes):
            forced = node < self.round.first_draw
            self.logits[node, :VOCABULARY] = math.nan if forced else self.table[self.round.tokens[node]]
        params = layout.SampleParams(
            *map(ctypes.addressof, (self.round, self.state)),
            *map(pointer, (self.logits, self.scratch, self.text_counts)),
        )
        for kernel in launches.SAMPLING:
            self._run(kernel, launches.sample(kernel, VOCABULARY, max(nodes, 1), 132), params)
        return super().accept()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.8, "seed": 12},
    ],
    ids=str,
)
def test_a_generation(sampling: dict[str, float | int]) -> None:
    """Plain rounds, and rounds with trees in between, emit what the CPU sampler draws one token after another."""
    kernels = emulation.build(["begin.cu", "sample.cu", "filter.cu", "accept.cu"], {"VOCABULARY": VOCABULARY})
    rng = np.random.default_rng(1)
    table = rng.normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)
    position, tokens = 30, [17]
    for step in range(24):
        tokens.append(_native.sample(table[tokens[-1]], position + step + 1, sampling))
    wished = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "top_logprobs": 1, **sampling}
    device = Generator(kernels, table)
    found: list[int] = []
    while len(found) < 20:
        done = len(found)
        if done % 3 == 1:
            device.ask(layout.CONTINUE)
            result = device.accept()
        else:  # the truth, two tokens deep, beside what leads nowhere
            truth = tokens[done : done + 3]
            tree, parents = [truth[0], truth[1], 1002 - truth[1], truth[2], truth[2]], [0, 0, 0, 1, 2]
            fields = {"position": position + done, "sampling": layout.Sampling(**wished), "setting": 1}
            device.ask(layout.TAKE, tree, parents, **fields)
            result = device.accept()
            assert result.count == 3
        for i, token in enumerate(emitted(result)):
            wide = table[tokens[len(found)]].astype(np.float64)
            logprobs = wide - np.log(np.exp(wide).sum())
            assert result.tokens[i].logprob == pytest.approx(logprobs[token], abs=1e-5)
            assert result.tokens[i].top[0].token == wide.argmax()
            found.append(token)
    assert found == tokens[1 : 1 + len(found)]


PENALTIES: list[dict[str, float | int]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 11, "frequency_penalty": 0.7, "presence_penalty": -0.5},
    {"temperature": 1.1, "seed": 12, "top_k": 30, "top_p": 0.9, "repetition_penalty": 0.8, "frequency_penalty": 1.5},
]


@pytest.mark.parametrize("sampling", PENALTIES, ids=str)
def test_a_generation_with_penalties(sampling: dict[str, float | int]) -> None:
    """The device counts the text by itself: from the host's, then what it emits, and not what nobody took."""
    kernels = emulation.build(["begin.cu", "sample.cu", "filter.cu", "accept.cu"], {"VOCABULARY": VOCABULARY})
    rng = np.random.default_rng(2)
    table = rng.normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)
    table[:, :9] += 6  # a text of few words
    prompt = rng.integers(0, 12, 41).tolist()
    text = [*prompt]
    for _ in range(40):
        history = np.array(text, np.int32)
        text.append(_native.sample(table[text[-1]], len(text), sampling, history, len(prompt)))
    assert text[len(prompt) :] != [int(table[token].argmax()) for token in text[len(prompt) - 1 : -1]]
    wished = {"top_p": 1.0, "repetition_penalty": 1.0, "penalises": 1, "top_logprobs": 0, **sampling}
    device = Generator(kernels, table)
    for number, length in enumerate((len(prompt), 60)):  # a request, and one that begins with another's text
        device.host_text[:length] = text[:length]
        fields = {"sampling": layout.Sampling(**wished), "text": 5 + number, "prompt_tokens": len(prompt)}
        done, turns = length - 1, 0  # position of the root
        while done < length + 14:
            turns += 1
            if turns % 5 == 4:  # rounds that nobody takes
                for _ in range(2):
                    device.ask(layout.CONTINUE, **fields)
                    device.accept()
                done -= 2 if turns > 5 else 0
            if turns % 4 == 3:  # and another request's, without penalties
                device.ask(layout.TAKE, [3], position=done - 1, setting=9, sampling=layout.Sampling(top_p=1.0))
                device.accept()
            if turns % 3 == 2 and turns % 5 != 4 and turns % 4 != 3:
                device.ask(layout.CONTINUE, **fields)
            else:
                root, first, second = text[done : done + 3]
                tree = [root, first, (first + 1) % 12, second, (second + 3) % 12, second]
                device.ask(layout.TAKE, tree, [0, 0, 0, 1, 1, 2], position=done, **fields)
            assert device.state.counted == done + 1
            expected = np.zeros(VOCABULARY, np.uint32)
            np.add.at(expected, text[len(prompt) : done + 1], layout.GENERATED)
            expected[prompt] |= layout.PROMPTED
            assert np.array_equal(device.text_counts[:VOCABULARY], expected)
            result = device.accept()
            assert emitted(result) == text[done + 1 : done + 1 + result.count]
            wide = table[text[done]].astype(np.float64)
            assert result.tokens[0].logprob == pytest.approx(
                wide[text[done + 1]] - np.log(np.exp(wide).sum()), abs=1e-5
            )
            done += result.count


@pytest.mark.parametrize("forced", [1, 30, 62])
@pytest.mark.parametrize("sampling", PENALTIES, ids=str)
def test_a_generation_begins_with_its_prompts_end(sampling: dict[str, float | int], forced: int) -> None:
    """The forced tokens are the prompt's to every penalty, in the first round and in those that follow."""
    kernels = emulation.build(["begin.cu", "sample.cu", "filter.cu", "accept.cu"], {"VOCABULARY": VOCABULARY})
    rng = np.random.default_rng(forced)
    table = rng.normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)
    table[:, :9] += 6  # a text of few words
    prompt = rng.integers(0, 12, 70).tolist()
    root = len(prompt) - 1 - forced

    def generated(count: int) -> list[int]:
        text = [*prompt]
        for _ in range(count):
            history = np.array(text, np.int32)
            text.append(_native.sample(table[text[-1]], len(text), sampling, history, len(prompt)))
        return text

    for _ in range(9):  # the root is what is drawn, as far as that can be: counted as generated it would be another
        prompt[root] = generated(1)[-1]
    text = generated(12)
    wished = {"top_p": 1.0, "repetition_penalty": 1.0, "penalises": 1, "top_logprobs": 3, **sampling}
    fields = {"sampling": layout.Sampling(**wished), "text": 5, "prompt_tokens": len(prompt)}
    device = Generator(kernels, table)
    device.host_text[: len(prompt)] = prompt
    for _ in range(2):  # also once more, as after an abort that came too late
        device.ask(layout.TAKE, prompt[root:], CHAIN, position=root, forced=forced, **fields)
        assert device.state.counted == len(prompt)
        expected = np.zeros(VOCABULARY, np.uint32)
        expected[prompt] = layout.PROMPTED
        assert np.array_equal(device.text_counts[:VOCABULARY], expected)
        result = device.accept()
        assert emitted(result) == [text[len(prompt)]] and result.tokens[0].top_count == 3
        assert [device.round.drawn[node].node for node in range(forced + 1)] == [-1] * forced + [forced]
        wide = table[prompt[-1]].astype(np.float64)
        logprob = wide[text[len(prompt)]] - np.log(np.exp(wide).sum())
        assert result.tokens[0].logprob == pytest.approx(logprob, abs=1e-5)
    for position in range(len(prompt) + 1, len(text) - 3):
        device.ask(layout.CONTINUE, **fields)
        assert emitted(device.accept()) == [text[position]]
    done = len(text) - 4
    tree = [text[done], text[done + 1], text[done + 2]]
    device.ask(layout.TAKE, tree, CHAIN, position=done, **fields)
    assert emitted(device.accept()) == text[done + 1 :]


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
    kernels.run(
        "ull_embed",
        grid=grid,
        threads=threads,
        shared_bytes=shared,
        params=params,
        predecessor_writes=device.device_memory,
    )
    assert np.array_equal(residual[:3], values[[49, 0, 7]].astype(np.float32))
    assert np.isnan(residual[3:]).all()
