"""Rounds that draw again from the logits of the round before: under a mask, and for the log-probabilities of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from logit_rows import KINDS, rows_of
from round_rig import SINGLE, Device, emitted
from ull import _native
from ull.gpu import params as layout
from ull.gpu.geometry import sampling as launches

SOURCES = ["begin.cu", "sample.cu", "filter.cu", "accept.cu"]
SMALL, LARGE = 1003, 70001  # neither is a multiple of what a word of the mask, or a load of it, holds
MULTIPROCESSORS = 132
POSITION = 30  # of the node that is drawn behind, where there is no text


@pytest.fixture(scope="module")
def small() -> emulation.Kernels:
    return emulation.build(SOURCES, {"VOCABULARY": SMALL})


@pytest.fixture(scope="module")
def large() -> emulation.Kernels:
    return emulation.build(SOURCES, {"VOCABULARY": LARGE})


def mask_of(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """[V rounded up to MASK_TOKENS / 32]: the mask as the host writes it."""
    bits = np.zeros(-(-allowed.size // layout.MASK_TOKENS) * layout.MASK_TOKENS, np.uint8)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


class Redrawer(Device):
    """A device on which a round has left rows of logits."""

    def __init__(self, kernels: emulation.Kernels, logits: NDArray[np.float32], slices: int = 0, seed: int = 0) -> None:
        super().__init__(kernels)
        self.vocabulary, self.slices, self.seed = logits.shape[1], slices, seed
        self.logits = aligned((layout.TREE_TOKENS, -(-self.vocabulary // 16) * 16), np.float32)
        self.logits[: len(logits), : self.vocabulary] = logits
        self.scratch = aligned(launches.SCRATCH_BYTES, np.uint8)
        self.text_counts = aligned(-(-self.vocabulary // 16) * 16, np.uint32)
        words = -(-self.vocabulary // layout.MASK_TOKENS) * layout.MASK_TOKENS // 32
        self.host_mask, self.mask = aligned(words, np.uint32), aligned(words, np.uint32)
        self.device_memory += [memory.view(np.uint8) for memory in (self.logits, self.text_counts, self.mask)]

    def sample(self, draws: int) -> Any:
        """What the sampler draws for the round under way, in a graph of so many `draws`; -> the result."""
        before = self.logits.view(np.uint32).copy()
        params = layout.SampleParams(
            *(pointer(memory) for memory in self.device_memory[:2]),
            *map(pointer, (self.logits, self.scratch, self.text_counts, self.mask)),
        )
        for kernel in launches.SAMPLING:
            grid, threads, shared = launches.sample(kernel, self.vocabulary, draws, MULTIPROCESSORS)
            self._run(kernel, ((self.slices or grid[0], draws), threads, shared), params)
        assert np.array_equal(self.logits.view(np.uint32), before), "logits are read only"
        return self.accept()

    def redraw(self, row: int, allowed: NDArray[np.bool_], sampling: dict[str, Any], **fields: Any) -> Any:
        """A draw under a mask behind the node of a row, at `position`."""
        self.host_mask[...] = mask_of(allowed)
        fields = {"position": POSITION, "sampling": sampling_of(sampling)} | fields
        self.ask(layout.REDRAW, [-1], [row], biases=list(sampling.get("logit_bias", {}).items()), **fields)
        return self.sample(1)

    def want(self, tokens: Sequence[int], rows: Sequence[int], **fields: Any) -> Any:
        """The log-probabilities of tokens, each in the logits of a row."""
        fields = {"position": POSITION, "sampling": sampling_of({})} | fields
        self.ask(layout.REDRAW, tokens, rows, **fields)
        return self.sample(layout.TREE_TOKENS)


def sampling_of(sampling: dict[str, Any]) -> layout.Sampling:
    wished = {"top_p": 1.0, "repetition_penalty": 1.0, "top_logprobs": -1, **sampling}
    penalises = any(name.endswith("_penalty") for name in sampling)
    wished.pop("logit_bias", None)
    return layout.Sampling(**wished, penalises=int(penalises))


def expected(logits: NDArray[np.float32], allowed: NDArray[np.bool_], position: int, sampling: Any, **text: Any) -> int:
    """What the CPU sampler draws behind `position` where all that is not allowed is banned by its bias; -1: nothing."""
    bias = {**sampling.get("logit_bias", {}), **{int(token): -math.inf for token in np.flatnonzero(~allowed)}}
    wished = {name: value for name, value in sampling.items() if name != "top_logprobs"}
    try:
        return _native.sample(logits, position + 1, {**wished, "logit_bias": bias}, **text)
    except ValueError:
        return -1


def logprobs_of(row: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    return wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())


@st.composite
def masks(draw: st.DrawFn, logits: NDArray[np.float32]) -> NDArray[np.bool_]:
    """One token, few, the best ones banned, about half, or all."""
    vocabulary = logits.size
    kind = draw(st.sampled_from(["one", "few", "not the best", "half", "all"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    allowed = np.zeros(vocabulary, np.bool_)
    if kind in ("one", "few"):
        allowed[rng.permutation(vocabulary)[: 1 if kind == "one" else 9]] = True
    elif kind == "half":
        allowed = rng.random(vocabulary) < 0.5
    else:
        allowed[:] = True
        if kind == "not the best":
            allowed[np.argsort(-logits)[: draw(st.integers(1, 200))]] = False
    return allowed


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    optional = {
        "top_k": st.integers(1, 60),
        "top_p": st.floats(0.0, 1.0, exclude_min=True, width=32),
        "min_p": st.floats(0.0, 1.0, width=32),
        "logit_bias": st.dictionaries(st.integers(0, SMALL - 1), st.floats(-20, 20, width=32), max_size=9),
        "repetition_penalty": st.floats(0.5, 2.0, width=32),
        "frequency_penalty": st.floats(-2.0, 2.0, width=32),
        "presence_penalty": st.floats(-2.0, 2.0, width=32),
    }
    always = {
        "temperature": st.sampled_from([0.0, 1.0, 0.7, 0.1, 100.0]),
        "seed": st.integers(0, 2**64 - 1),
        "top_logprobs": st.integers(-1, 20),
    }
    return draw(st.fixed_dictionaries(always, optional=optional))


@settings(max_examples=120, deadline=None)
@given(data=st.data(), sampling=samplings(), kind=st.sampled_from(KINDS), random=st.integers(0, 2**32 - 1))
def test_draws_under_a_mask_are_the_cpu_samplers(
    small: emulation.Kernels, data: st.DataObject, sampling: dict[str, Any], kind: str, random: int
) -> None:
    """From any row of the round before, with the text up to its node; what is reported is the model's own."""
    rng = np.random.default_rng(random)
    logits = rows_of(rng, kind, 5, SMALL)
    row = data.draw(st.integers(0, 4))
    allowed = data.draw(masks(logits[row]))
    text = rng.integers(0, 20, 40).tolist()
    device = Redrawer(small, logits, slices=data.draw(st.integers(0, 3)), seed=random % 1000)
    device.host_text[: len(text)] = text
    result = device.redraw(row, allowed, sampling, position=len(text) - 1, text=3, prompt_tokens=25)
    history = {"history": np.array(text, np.int32), "prompt_tokens": 25} if device.state.sampling.penalises else {}
    token = expected(logits[row], allowed, len(text) - 1, sampling, **history)
    assert token >= 0 and (result.status, emitted(result)) == (layout.OK, [token]) and allowed[token]
    if sampling["top_logprobs"] < 0:
        assert (result.tokens[0].logprob, result.tokens[0].top_count) == (0.0, 0)
        return
    logprobs = logprobs_of(logits[row])
    assert result.tokens[0].logprob == pytest.approx(logprobs[token], rel=1e-6, abs=1e-5)
    best = np.lexsort((np.arange(SMALL), -logits[row].astype(np.float64)))[: sampling["top_logprobs"]]
    top = result.tokens[0].top[: result.tokens[0].top_count]
    assert [one.token for one in top] == best.tolist()  # banned ones too
    assert [one.logprob for one in top] == pytest.approx(logprobs[best], rel=1e-6, abs=1e-5)


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 40, "seed": 2},
    {"temperature": 1.0, "top_p": 0.95, "seed": 3, "top_logprobs": 3},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "seed": 4, "top_logprobs": 0},
    {"temperature": 5.0, "top_k": 60000, "top_p": 0.99, "seed": 6, "logit_bias": {5: 2.0, 69999: 7.0}},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_large_vocabulary(large: emulation.Kernels, sampling: dict[str, Any]) -> None:
    """Slices of several loads, words of the mask in each of them."""
    rng = np.random.default_rng(8)
    logits = rows_of(rng, "normal", 2, LARGE)
    for chance in (0.001, 0.5):
        allowed = rng.random(LARGE) < chance
        allowed[logits[1].argmax()] = False
        tokens = set()
        for slices, seed in ((0, 0), (1, 1), (9, 2)):
            result = Redrawer(large, logits, slices, seed).redraw(1, allowed, sampling)
            tokens.update(emitted(result))
        hopeless = np.where(allowed, logits[1], np.float32(-1e30))  # more bans than the CPU sampler takes
        assert tokens == {expected(hopeless, np.ones(LARGE, np.bool_), POSITION, sampling)}


def test_a_mask_of_one_token_leaves_no_choice(large: emulation.Kernels) -> None:
    logits = rows_of(np.random.default_rng(9), "normal", 1, LARGE)
    for token in (0, 31, 128, 2048, LARGE - 1):
        allowed = np.zeros(LARGE, np.bool_)
        allowed[token] = True
        for sampling in (SAMPLINGS[0], SAMPLINGS[4]):
            assert emitted(Redrawer(large, logits).redraw(0, allowed, sampling)) == [token]


def test_filters_look_at_what_is_allowed_alone(small: emulation.Kernels) -> None:
    """The best 50 tokens are banned; top-k, top-p and min-p keep the 51st, of which nothing was left without a mask."""
    logits = np.zeros((1, SMALL), np.float32)
    logits[0] = -np.arange(SMALL) * 0.5
    allowed = np.arange(SMALL) >= 50
    for filters in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.2}):
        for seed in range(4):
            sampling = {"temperature": 1.0, "seed": seed, **filters}
            assert emitted(Redrawer(small, logits).redraw(0, allowed, sampling)) == [50]


def test_nothing_allowed_is_nothing_drawn(small: emulation.Kernels) -> None:
    """Neither by the mask, nor by it and the request's own bans together."""
    logits = rows_of(np.random.default_rng(3), "normal", 1, SMALL)
    allowed = np.zeros(SMALL, np.bool_)
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9}, {"logit_bias": {7: -math.inf}}):
        allowed[7] = "logit_bias" in sampling
        device = Redrawer(small, logits)
        result = device.redraw(0, allowed, sampling)
        assert (result.status, result.count, device.state.stopped) == (layout.NOT_FINITE, 0, 1)


def test_wanted_tokens_of_several_rows(small: emulation.Kernels, large: emulation.Kernels) -> None:
    """64 of them, some twice, in no order: each with its log-probability, whatever the request's sampling is.

    And with as many of the likeliest tokens of its row as log-probabilities are asked for.
    """
    rng = np.random.default_rng(12)
    for kernels, vocabulary, counts in ((small, SMALL, (1, 2, 64)), (large, LARGE, (5,))):
        logits = rows_of(rng, "normal", 40, vocabulary)
        rows = rng.integers(0, 40, 64).tolist()
        tokens = rng.integers(0, vocabulary, 64).tolist()
        tokens[:4], rows[:4] = [0, vocabulary - 1, 5, 5], [39, 39, 3, 3]
        for count, slices, top in itertools.product(counts, (0, 3), (-1, 5)):
            sampling = sampling_of({"temperature": 0.9, "top_k": 3, "top_logprobs": top, "logit_bias": {}})
            device = Redrawer(kernels, logits, slices, seed=count)
            result = device.want(tokens[:count], rows[:count], sampling=sampling, biases=[(5, -math.inf)])
            assert (result.status, emitted(result)) == (layout.OK, tokens[:count])
            found = [result.tokens[i].logprob for i in range(count)]
            logprobs = [logprobs_of(logits[row]) for row in rows[:count]]
            wanted = [row[token] for row, token in zip(logprobs, tokens[:count], strict=True)]
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-5)
            for i, row in enumerate(logprobs):
                told = [(entry.token, entry.logprob) for entry in result.tokens[i].top[: result.tokens[i].top_count]]
                best = np.lexsort((np.arange(vocabulary), -logits[rows[i]].astype(np.float64)))[: max(top, 0)]
                assert [token for token, _ in told] == best.tolist()
                assert [logprob for _, logprob in told] == pytest.approx(row[best], rel=1e-6, abs=1e-5)


def test_a_row_that_is_not_finite_is_told(small: emulation.Kernels) -> None:
    """Only if something is wanted of it."""
    logits = rows_of(np.random.default_rng(3), "normal", 3, SMALL)
    logits[1, 1000] = math.inf
    assert Redrawer(small, logits).want([5, 6], [0, 2]).status == layout.OK
    result = Redrawer(small, logits).want([5, 5], [0, 1])
    assert (result.status, result.count) == (layout.NOT_FINITE, 0)


def test_what_is_left_behind(small: emulation.Kernels) -> None:
    """The token that was drawn, where it stands and whose row it came from; wanted tokens leave nothing."""
    logits = rows_of(np.random.default_rng(4), "normal", 8, SMALL)
    allowed = np.arange(SMALL) % 3 == 0
    device = Redrawer(small, logits)
    (token,) = emitted(device.redraw(6, allowed, {}))
    for _ in range(2):
        state = device.state
        assert (state.token, state.position, state.node, state.stopped) == (token, POSITION + 1, 6, 1)
        assert device.go_on(5).status == layout.SKIPPED  # nothing continues it
        assert device.want([9], [2]).status == layout.OK
    device.control.cancelled_through = device.sequence + 1
    assert device.redraw(1, allowed, {}).status == layout.SKIPPED
    assert device.state.token == token


def test_a_draw_behind_a_cut_tree_sees_its_own_text(small: emulation.Kernels) -> None:
    """With penalties: the text as the tree's round has left it up to the node, and the next round finds what came."""
    rng = np.random.default_rng(5)
    logits = rows_of(rng, "normal", 4, SMALL)
    logits[:, :30] += 5
    sampling = {"temperature": 0.8, "seed": 4, "presence_penalty": 2.0, "frequency_penalty": 0.5}
    wished, fields = sampling_of(sampling), {"text": 8, "prompt_tokens": 12}
    text = rng.integers(0, 30, 16).tolist()
    for cut in range(4):
        device = Redrawer(small, logits, seed=cut)
        device.host_text[:16] = text
        chain = [text[-1], 3, 4, 3]
        draws = [3, 4, 3, 21]
        device.take(chain, [0, 0, 1, 2], draws, position=15, sampling=wished, **fields)
        whole = [*text, *draws]
        allowed = np.arange(SMALL) != draws[cut]
        result = device.redraw(cut, allowed, sampling, position=15 + cut, **fields)
        history = np.array(whole[: 16 + cut], np.int32)
        token = expected(logits[cut], allowed, 15 + cut, sampling, history=history, prompt_tokens=12)
        assert emitted(result) == [token]
        text_now = [*whole[: 16 + cut], token]
        round_ = device.ask(layout.TAKE, [token], SINGLE, position=16 + cut, sampling=wished, **fields)
        device.logits[0, :SMALL] = logits[3]
        result = device.sample(1)
        assert round_.count == 1
        after = _native.sample(logits[3], 17 + cut, sampling, np.array(text_now, np.int32), 12)
        assert emitted(result) == [after]


@pytest.mark.skipif(emulation.ON_DEVICE, reason="the emulator sees what is not ordered")
@pytest.mark.parametrize("slices", [1, 3])
def test_all_accesses_are_ordered(slices: int) -> None:
    kernels = emulation.build(SOURCES, {"VOCABULARY": SMALL}, reports=True)
    rng = np.random.default_rng(10)
    logits = rows_of(rng, "normal", 3, SMALL)
    allowed = rng.random(SMALL) < 0.3
    penalised = {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": {5: 1.0}, "top_logprobs": 2}
    for sampling in (*SAMPLINGS[:5], penalised):
        device = Redrawer(kernels, logits, slices, seed=slices)
        device.host_text[: POSITION + 1] = 9
        assert device.redraw(2, allowed, sampling, text=1, prompt_tokens=4).status == layout.OK
    result = Redrawer(kernels, logits, slices, seed=slices).want(range(64), [i % 3 for i in range(64)])
    assert emitted(result) == list(range(64))
