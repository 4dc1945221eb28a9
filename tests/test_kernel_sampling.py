"""The sampler's kernels against the CPU sampler, and the rounds that begin() and accept() make of requests."""

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from ull import _native
from ull.gpu import params as layout
from ull.gpu.launches import sampling as launches

MULTIPROCESSORS = 132
SMALL, LARGE = 1003, 70001  # vocabularies: neither is a multiple of anything; a block loads 2048 logits at once


@pytest.fixture(scope="module")
def small() -> emulation.Kernels:
    return emulation.build(["sample.cu", "filter.cu"], {"VOCABULARY": SMALL})


@pytest.fixture(scope="module")
def large() -> emulation.Kernels:
    return emulation.build(["sample.cu", "filter.cu"], {"VOCABULARY": LARGE})


def structure(kind: type[Any], size: int | None = None) -> tuple[Any, NDArray[np.uint8]]:
    """A struct (or an array of them) of 0xFF bytes in memory that ends before an unreadable page."""
    memory = aligned(size or ctypes.sizeof(kind), np.uint8)
    return kind.from_buffer(memory), memory


@dataclass
class Wish:
    """A request's sampling. `bias` in the order in which the device gets it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = -1
    bias: dict[int, float] = field(default_factory=dict)

    def fill(self, sampling: layout.Sampling, biases: Any) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            setattr(sampling, name, getattr(self, name))
        sampling.top_logprobs = self.logprobs
        sampling.bias_count = len(self.bias)
        for i, (token, value) in enumerate(self.bias.items()):
            biases[i] = layout.LogitBias(token, value)

    def native(self) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        return {name: getattr(self, name) for name in names} | {"logit_bias": dict(self.bias)}


@dataclass
class Draw:
    token: int
    logprob: float
    top: list[tuple[int, float]]


def draw(
    kernels: emulation.Kernels, logits: NDArray[np.float32], wish: Wish, base: int = 0, slices: int = 0, seed: int = 0
) -> list[Draw]:
    """What the three kernels draw from [nodes, vocabulary] logits of a chain at `base`."""
    nodes, vocabulary = logits.shape
    rows = aligned((nodes, -(-vocabulary // 16) * 16), np.float32)
    rows[:, :vocabulary] = logits
    round_, _ = structure(layout.Round)
    round_.count, round_.base, round_.draws = nodes, base, 1
    round_.depths[:] = range(64)
    state, _ = structure(layout.State)
    wish.fill(state.sampling, state.biases)
    scratch = aligned(launches.SCRATCH_BYTES, np.uint8)
    counters = aligned(64, np.uint32, 0)
    params = layout.SampleParams(
        ctypes.addressof(round_), ctypes.addressof(state), pointer(rows), pointer(scratch), pointer(counters)
    )
    for kernel in launches.SAMPLING:
        grid, threads, shared = launches.sample(kernel, vocabulary, nodes, MULTIPROCESSORS)
        if slices:
            grid = (slices, nodes)
        kernels.run(kernel, grid=grid, threads=threads, shared_bytes=shared, params=params, seed=seed)
    assert np.array_equal(rows[:, :vocabulary].view(np.uint32), logits.view(np.uint32)), "logits are read only"
    assert [round_.drawn[i].node for i in range(nodes)] == list(range(nodes))
    return [
        Draw(drawn.token, drawn.logprob, [(drawn.top[i].token, drawn.top[i].logprob) for i in range(drawn.top_count)])
        for drawn in round_.drawn[:nodes]
    ]


def expected_token(logits: NDArray[np.float32], position: int, wish: Wish) -> int:
    try:
        return _native.sample(logits, position, wish.native())
    except ValueError:
        return -1


def check(
    kernels: emulation.Kernels, logits: NDArray[np.float32], wish: Wish, base: int = 0, slices: int = 0, seed: int = 0
) -> list[int]:
    """Draws from each row as the CPU sampler does, with exact log-probabilities; -> the tokens."""
    drawn = draw(kernels, logits, wish, base, slices, seed)
    for i, (row, result) in enumerate(zip(logits, drawn, strict=True)):
        assert result.token == expected_token(row, base + i + 1, wish), (i, wish)
        if result.token < 0:
            continue
        if wish.logprobs < 0:
            assert (result.logprob, result.top) == (0.0, [])
            continue
        wide = row.astype(np.float64)
        logprobs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        assert result.logprob == pytest.approx(logprobs[result.token], rel=1e-6, abs=1e-5)
        best = np.lexsort((np.arange(len(row)), -wide))[: min(wish.logprobs, len(row))]
        assert [token for token, _ in result.top] == best.tolist()
        assert [logprob for _, logprob in result.top] == pytest.approx(logprobs[best], rel=1e-6, abs=1e-5)
    return [result.token for result in drawn]


def rows_of(rng: np.random.Generator, kind: str, rows: int, vocabulary: int) -> NDArray[np.float32]:
    normal = rng.standard_normal((rows, vocabulary))
    logits = {
        "normal": lambda: normal * 2,
        "wide": lambda: normal * 20,
        "narrow": lambda: normal * 0.01,
        "ties": lambda: np.round(normal * 2),
        "few": lambda: rng.choice([-3.0, -0.0, 0.0, 1.0], (rows, vocabulary)),
        "equal": lambda: np.full((rows, vocabulary), -7.25),
        "rising": lambda: np.sort(normal * 3),
        "peak": lambda: normal - 100 * (np.arange(vocabulary) != rng.integers(vocabulary)),
        "huge": lambda: normal * 1e30,
    }[kind]()
    return logits.astype(np.float32)


KINDS = ("normal", "wide", "narrow", "ties", "few", "equal", "rising", "peak", "huge")


@st.composite
def wishes(draw_: st.DrawFn, vocabulary: int) -> Wish:
    ids = st.integers(0, vocabulary - 1)
    value = st.one_of(st.just(-math.inf), st.floats(-100, 100, width=32))
    return Wish(
        temperature=draw_(st.sampled_from([0.0, 1.0, 0.7, 0.1, 2.0, 1e-4, 1e-38, 100.0])),
        top_k=draw_(st.one_of(st.just(0), st.integers(1, 50), st.integers(1, 2 * vocabulary))),
        top_p=draw_(st.one_of(st.just(1.0), st.floats(0.0, 1.0, exclude_min=True, width=32))),
        min_p=draw_(st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0, width=32), st.just(1e-35))),
        seed=draw_(st.integers(0, 2**64 - 1)),
        logprobs=draw_(st.integers(-1, 20)),
        bias=draw_(st.dictionaries(ids, value, max_size=12)),
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), wish=wishes(SMALL), kind=st.sampled_from(KINDS), random=st.integers(0, 2**32 - 1))
def test_draws_are_the_cpu_samplers(
    small: emulation.Kernels, data: st.DataObject, wish: Wish, kind: str, random: int
) -> None:
    rng = np.random.default_rng(random)
    logits = rows_of(rng, kind, data.draw(st.integers(1, 3)), SMALL)
    base = data.draw(st.sampled_from([0, 17, 2**31 - 70]))
    check(small, logits, wish, base, slices=data.draw(st.integers(1, 4)), seed=random)
