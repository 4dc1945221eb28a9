"""The sampler's kernels against the CPU sampler, and the rounds that begin() and accept() make of requests."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from logit_rows import KINDS, rows_of
from ull import _native
from ull.gpu import params as layout
from ull.gpu.geometry import sampling as launches

MULTIPROCESSORS = 132
SMALL, LARGE = 1003, 70001  # vocabularies: neither is a multiple of anything; a block loads 2048 logits at once


@pytest.fixture(scope="module")
def small() -> emulation.Kernels:
    return emulation.build(["sample.cu", "filter.cu"], {"VOCABULARY": SMALL})


@pytest.fixture(scope="module")
def large() -> emulation.Kernels:
    return emulation.build(["sample.cu", "filter.cu"], {"VOCABULARY": LARGE})


def structure(kind: type[Any]) -> tuple[Any, NDArray[np.uint8]]:
    """A struct of 0xFF bytes, and its memory."""
    memory = aligned(ctypes.sizeof(kind), np.uint8)
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
    penalties: dict[str, float] = field(default_factory=dict)  # repetition_penalty, ...
    text: list[int] = field(default_factory=list)  # what they look at, up to the root
    prompt_tokens: int = 0
    way: list[int] = field(default_factory=list)  # tokens of the nodes behind the root

    def counts(self, vocabulary: int) -> NDArray[np.uint32]:
        """The text's counts, as begin() leaves them."""
        words = aligned(-(-vocabulary // 16) * 16, np.uint32)
        words[:vocabulary] = 0
        np.add.at(words, self.text[self.prompt_tokens :], layout.GENERATED)
        words[self.text[: self.prompt_tokens]] |= layout.PROMPTED
        return words

    def history(self, node: int) -> dict[str, Any]:
        """What the CPU sampler takes for a node."""
        if not self.penalties:
            return {}
        return {
            "history": np.array(self.text + self.way[:node], np.int32),
            "prompt_tokens": self.prompt_tokens,
        }

    def fill(self, sampling: layout.Sampling, biases: Any) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            setattr(sampling, name, getattr(self, name))
        sampling.top_logprobs = self.logprobs
        sampling.bias_count = len(self.bias)
        sampling.penalises = int(bool(self.penalties))
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            setattr(sampling, name, self.penalties.get(name, float(name == "repetition_penalty")))
        for i, (token, value) in enumerate(self.bias.items()):
            biases[i] = layout.LogitBias(token, value)

    def native(self) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        return {name: getattr(self, name) for name in names} | {"logit_bias": dict(self.bias)} | self.penalties


@dataclass
class Draw:
    token: int
    logprob: float
    top: list[tuple[int, float]]


def draw(
    kernels: emulation.Kernels,
    logits: NDArray[np.float32],
    wish: Wish,
    base: int = 0,
    slices: int = 0,
    seed: int = 0,
    depths: Sequence[int] = range(64),
) -> list[Draw]:
    """What the three kernels draw from [nodes, vocabulary] logits of a tree (a chain, where no depths are given)."""
    nodes, vocabulary = logits.shape
    rows = aligned((nodes, -(-vocabulary // 16) * 16), np.float32)
    rows[:, :vocabulary] = logits
    round_, round_memory = structure(layout.Round)
    round_.count, round_.base, round_.draws, round_.first_draw = nodes, base, 1, 0
    round_.depths[: len(depths)] = depths
    round_.tokens[1 : 1 + len(wish.way)] = wish.way
    for node in range(nodes):
        round_.path[node][: node + 1] = list(range(node + 1))
    state, state_memory = structure(layout.State)
    wish.fill(state.sampling, state.biases)
    scratch = aligned(launches.SCRATCH_BYTES, np.uint8)
    addresses = (ctypes.addressof(round_), ctypes.addressof(state))
    counts = wish.counts(vocabulary)
    params = layout.SampleParams(*addresses, *map(pointer, (rows, scratch, counts)))
    for kernel in launches.SAMPLING:
        grid, threads, shared = launches.sample(kernel, vocabulary, nodes, MULTIPROCESSORS)
        if slices:
            grid = (slices, nodes)
        kernels.run(
            kernel,
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=seed,
            predecessor_writes=[rows, round_memory, state_memory, counts],
        )
    assert np.array_equal(rows[:, :vocabulary].view(np.uint32), logits.view(np.uint32)), "logits are read only"
    assert [round_.drawn[i].node for i in range(nodes)] == list(range(nodes))
    return [
        Draw(drawn.token, drawn.logprob, [(drawn.top[i].token, drawn.top[i].logprob) for i in range(drawn.top_count)])
        for drawn in round_.drawn[:nodes]
    ]


def expected_token(logits: NDArray[np.float32], position: int, wish: Wish, node: int) -> int:
    try:
        return _native.sample(logits, position, wish.native(), **wish.history(node))
    except ValueError:
        return -1


def check(
    kernels: emulation.Kernels, logits: NDArray[np.float32], wish: Wish, base: int = 0, slices: int = 0, seed: int = 0
) -> list[int]:
    """Draws from each row as the CPU sampler does, with exact log-probabilities; -> the tokens."""
    drawn = draw(kernels, logits, wish, base, slices, seed)
    for i, (row, result) in enumerate(zip(logits, drawn, strict=True)):
        assert result.token == expected_token(row, base + i + 1, wish, i), (i, wish)
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


@st.composite
def wishes(draw_: st.DrawFn, vocabulary: int) -> Wish:
    ids = st.integers(0, vocabulary - 1)
    value = st.one_of(st.just(-math.inf), st.floats(-100, 100, width=32))
    few = st.one_of(st.integers(0, 20), ids)
    text = draw_(st.lists(few, max_size=40))
    either_way = st.floats(-2, 2, width=32)
    penalties = st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.floats(np.float32(0.01).item(), 100, width=32),
            "frequency_penalty": either_way,
            "presence_penalty": either_way,
        },
    )
    return Wish(
        penalties=draw_(penalties),
        text=text,
        prompt_tokens=draw_(st.integers(0, len(text))),
        way=draw_(st.lists(few, min_size=3, max_size=3)),
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


def test_the_noise_is_the_cpus(small: emulation.Kernels) -> None:
    """Equal logits: the draw is the argmax of the noise alone."""
    logits = np.zeros((64, SMALL), np.float32)
    noise = [_native.gumbel(99, 5 + i + 1, np.arange(SMALL, dtype=np.int32)) for i in range(64)]
    tokens = check(small, logits, Wish(temperature=1.0, seed=99), base=5, slices=2)
    assert tokens == [int(row.argmax()) for row in noise]


@pytest.mark.parametrize("wish", [Wish(1.0, seed=9), Wish(1.0, top_k=SMALL - 1, seed=9)], ids=str)
def test_nodes_of_one_depth_share_their_noise(small: emulation.Kernels, wish: Wish) -> None:
    """A node's draw stands one position behind the node, wherever in the tree that is."""
    depths = [0, 1, 1, 2, 3, 3, 1]
    drawn = draw(small, np.zeros((len(depths), SMALL), np.float32), wish, base=5, slices=2, depths=depths)
    noise = [_native.gumbel(9, 5 + depth + 1, np.arange(SMALL - 1, dtype=np.int32)) for depth in depths]
    assert [result.token for result in drawn] == [int(row.argmax()) for row in noise]
    assert len({result.token for result in drawn}) == 4


FILTERS = [
    Wish(),
    Wish(temperature=0.8, seed=1),
    Wish(temperature=1.0, top_k=40, seed=2),
    Wish(temperature=1.0, top_p=0.95, seed=3),
    Wish(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05, seed=4),
    Wish(temperature=0.2, top_k=20, seed=5),
    Wish(temperature=5.0, top_k=60000, top_p=0.99, seed=6, logprobs=20),
]


@pytest.mark.parametrize("wish", FILTERS, ids=str)
def test_a_large_vocabulary(large: emulation.Kernels, wish: Wish) -> None:
    """Slices of several loads; biases that fall into some of them, in no order."""
    rng = np.random.default_rng(8)
    bias = {int(token): float(rng.normal(0, 4)) for token in rng.permutation(LARGE)[:300]}
    wish = replace(wish, bias=bias)
    logits = rows_of(rng, "normal", 2, LARGE)
    assert check(large, logits, wish, slices=9, seed=3) == check(large, logits, wish)


@pytest.mark.skipif(emulation.ON_DEVICE, reason="the emulator sees what is not ordered")
@pytest.mark.parametrize("slices", [1, 3])
def test_all_accesses_are_ordered(slices: int) -> None:
    kernels = emulation.build(["sample.cu", "filter.cu"], {"VOCABULARY": SMALL}, reports=True)
    rng = np.random.default_rng(10)
    adjusted = Wish(bias={5: 1.0, 900: -2.0}, penalties={"presence_penalty": 1.0}, text=[3, 4], way=[7, 7, 6])
    for kind in ("normal", "ties"):
        for wish in FILTERS:
            check(kernels, rows_of(rng, kind, 2, SMALL), replace(wish, logprobs=3), slices=slices, seed=slices)
            wish = replace(adjusted, temperature=wish.temperature, top_k=wish.top_k, top_p=wish.top_p)
            check(kernels, rows_of(rng, kind, 3, SMALL), wish, slices=slices, seed=slices)


def test_penalties_in_a_large_vocabulary(large: emulation.Kernels) -> None:
    """Texts and ways that fall into several loads of a slice, tokens more than once among them."""
    rng = np.random.default_rng(9)
    logits = rows_of(rng, "normal", 4, LARGE)
    favourites = rng.permutation(LARGE)[:12]
    logits[:, favourites] += 8
    text, way = rng.choice(favourites, 200).tolist(), [int(favourites[0])] * 2 + [int(favourites[1])]
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.02, "presence_penalty": 0.3}
    for wish in FILTERS[:5]:
        wish = replace(wish, penalties=penalties, text=text, way=way, prompt_tokens=60)
        assert check(large, logits, wish, slices=5, seed=3) == check(large, logits, wish)


def test_a_way_is_forgotten_with_its_load(large: emulation.Kernels) -> None:
    """The best token stands where the one that the way holds stood, 2048 tokens and one load earlier."""
    logits = np.zeros((2, LARGE), np.float32)
    logits[:, [100, 2148, 3000]] = [9, 8, 7]
    wish = Wish(penalties={"presence_penalty": 2.0}, way=[100])
    assert check(large, logits, wish, slices=1) == [100, 2148]


def test_penalties_are_rounded_as_the_cpu_rounds(small: emulation.Kernels) -> None:
    """Two tokens tie where a logit is divided, and the products are subtracted one by one; else 7 wins."""
    values = np.random.default_rng(1).uniform(1, 20, 5000).astype(np.float32)
    one, three, frequency, presence = map(np.float32, (1, 3, 0.1, 0.7))
    for penalties, right, wrong in (
        ({"repetition_penalty": 3.0}, values / three, values * (one / three)),
        (
            {"frequency_penalty": float(frequency), "presence_penalty": float(presence)},
            (values - frequency) - presence,
            values - (frequency + presence),
        ),
    ):
        index = int(np.flatnonzero(right != wrong)[0])
        held, other = (5, 7) if wrong[index] < right[index] else (7, 5)
        logits = np.zeros((1, SMALL), np.float32)
        logits[0, held], logits[0, other] = values[index], right[index]
        assert check(small, logits, Wish(penalties=penalties, text=[held])) == [5]


@pytest.mark.parametrize(
    "wish", [Wish(1.0, top_k=20000), Wish(1.0, top_p=0.3), Wish(1.0, top_k=30000, top_p=0.7)], ids=str
)
def test_more_ties_than_the_list_holds(large: emulation.Kernels, wish: Wish) -> None:
    """All tokens but a few are equal: the filters keep 20000 and more of them, by id."""
    logits = np.full((6, LARGE), -7.25, np.float32)
    wish = replace(wish, seed=6, bias={5: 1.0, 69999: 0.5, 30: -math.inf})
    tokens = check(large, logits, wish)
    assert tokens == check(large, logits, wish, slices=7, seed=1)
    assert max(tokens) > 8192


def test_what_survives_exactly(small: emulation.Kernels) -> None:
    """Of equal logits top-k and top-p keep those of the smallest ids; which of them wins varies with the seed."""
    logits = np.zeros((64, SMALL), np.float32)
    for wish, kept in [
        (Wish(top_k=7), 7),
        (Wish(top_p=0.25), 251),
        (Wish(top_k=8, top_p=0.5), 4),
        (Wish(top_k=8, top_p=0.51), 5),
        (Wish(top_p=1e-30), 1),
        (Wish(top_k=1), 1),
    ]:
        seeded = [replace(wish, temperature=1.0, seed=seed) for seed in range(2)]
        tokens = {token for wish in seeded for token in check(small, logits, wish)}
        assert max(tokens) < kept, wish
        assert len(tokens) > min(kept, 60) // 2, wish


@pytest.mark.parametrize(
    ("levels", "top_k"),
    [
        ([0, -1, -2, -3], 2),  # each in a bucket of its own: the limit lies between two buckets
        ([0, -1, -1.001, -1.002, -3], 3),  # between two tokens of a bucket
        ([0, -1, -1, -1, -3], 3),  # between two that are equal
        ([0, 0, -1, -1, -3], 2),
    ],
)
@pytest.mark.parametrize("top_p", [1.0, 0.99999], ids=["alone", "with top-p"])
def test_top_k_keeps_so_many(small: emulation.Kernels, levels: list[float], top_k: int, top_p: float) -> None:
    logits = np.full((64, SMALL), -60, np.float32)
    logits[:, 100 : 100 + len(levels)] = levels
    tokens: set[int] = set()
    for seed in range(2):
        wish = Wish(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed)
        tokens.update(check(small, logits, wish, base=64 * seed, slices=2))
    assert tokens == set(range(100, 100 + top_k))


def test_top_p_rounds_up_to_whole_tokens(small: emulation.Kernels) -> None:
    """Half of 2^44 + 2^44 + 1 units of mass: half a unit more than the first token's."""
    logits = np.full((64, SMALL), -200, np.float32)
    logits[:, :3] = [0, 0, -30.2]
    assert int(math.exp(-30.2) * 2**44) == 1
    assert set(check(small, logits, Wish(temperature=1.0, top_p=0.5, seed=3), slices=2)) == {0, 1}
    logits[:, 2] = -200
    assert set(check(small, logits, Wish(temperature=1.0, top_p=0.5, seed=3), slices=2)) == {0}


def test_top_p_that_keeps_all_of_top_k(small: emulation.Kernels) -> None:
    """Token 2 lies so close behind token 1, the last that survives, that only the last digits tell them apart."""
    logits = np.full((64, SMALL), -50, np.float32)
    logits[:, :3] = [0, -0.005, np.nextafter(np.float32(-0.005), np.float32(-1))]
    tokens = check(small, logits, Wish(temperature=1.0, top_k=2, top_p=0.9999, seed=3), slices=2)
    assert set(tokens) == {0, 1}


def test_top_p_falls_behind_the_bucket_that_bounds_suggest(small: emulation.Kernels) -> None:
    """Top-k's limit lies among the tokens from 11 on: top-p ends before token 5 without these, after it with them."""
    logits = np.full((64, SMALL), -50, np.float32)
    logits[:, :23] = [0.0] * 5 + [-0.1] * 6 + [-0.2] * 12
    tokens = check(small, logits, Wish(temperature=1.0, top_k=17, top_p=0.4, seed=3), slices=2)
    assert set(tokens) == set(range(7))


def test_masses_carry_between_their_halves(small: emulation.Kernels) -> None:
    """The masses of tokens 1 and 2 have the lower half's top bit set: without the carry top-p would drop token 2."""
    logits = np.full((64, SMALL), -100, np.float32)
    logits[:, :3] = [0, -0.4, -0.4]
    own = math.exp(-0.4)
    assert own * 2**12 % 1 > 0.5
    top_p = (1 + own + 1e-5) / (1 + 2 * own)
    assert set(check(small, logits, Wish(temperature=1.0, top_p=top_p, seed=3), slices=1)) == {0, 1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wish", [Wish(), Wish(temperature=1.0), Wish(temperature=1.0, top_k=5, logprobs=3)], ids=str)
def test_a_logit_that_is_not_finite(small: emulation.Kernels, bad: float, wish: Wish) -> None:
    """Its node draws nothing; the others are not disturbed."""
    logits = rows_of(np.random.default_rng(2), "normal", 3, SMALL)
    logits[1, SMALL - 1] = bad
    tokens = check(small, logits, wish, slices=3)
    assert [token < 0 for token in tokens] == [False, True, False]


def test_bans(small: emulation.Kernels) -> None:
    logits = rows_of(np.random.default_rng(3), "normal", 2, SMALL)
    ids = np.random.default_rng(4).permutation(SMALL)
    for wish in (
        Wish(),
        Wish(temperature=1.0, seed=1),
        Wish(temperature=1.0, top_k=9),
        Wish(temperature=2.0, top_p=0.9),
    ):
        wish.bias = dict.fromkeys(map(int, ids), -math.inf)
        assert check(small, logits, wish, slices=2) == [-1, -1]
        allowed = int(ids[77])
        del wish.bias[allowed]
        assert check(small, logits, wish, slices=2) == [allowed, allowed]


def test_the_padding_of_a_row_is_not_looked_at(small: emulation.Kernels) -> None:
    """Every other node's logits, and the columns up to a multiple of 16, hold NaN here."""
    logits = rows_of(np.random.default_rng(5), "normal", 1, SMALL)
    assert check(small, logits, Wish(logprobs=20))[0] == int(logits[0].argmax())


def test_every_tree_size_has_a_grid() -> None:
    for vocabulary in (1, 64, 4096, 128256, 151936, 262144):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            (slices, nodes), _, _ = launches.sample("ull_sample_draw", vocabulary, tokens, MULTIPROCESSORS)
            assert nodes == tokens
            assert slices * tokens <= 512
            assert -(-vocabulary // slices) <= 38 * 1024
    with pytest.raises(ValueError, match="vocabulary: 500000 is too large"):
        launches.sample("ull_sample_draw", 500_000, 64, MULTIPROCESSORS)


# ---- fill ----------------------------------------------------------------------------------------------------------

FORMATS = [ml_dtypes.float8_e4m3fn, np.float16, ml_dtypes.bfloat16, np.float32]  # by FillParams.format


def filled(size: int, kind: int, amplitude: float, seed: int, blocks: int = 3) -> NDArray[np.uint8]:
    output = aligned(size, np.uint8)
    params = layout.FillParams(pointer(output), size, seed, kind, amplitude)
    emulation.build(["fill.cu"]).run("ull_fill", grid=(blocks, 1), threads=256, params=params)
    return output


@pytest.mark.parametrize("kind", range(4))
def test_fill(kind: int) -> None:
    """Spread evenly over the amplitude, finite, the same for any grid, other for other seeds and places."""
    amplitude = 200.0 if kind == 0 else 0.02
    raw = filled(1 << 16, kind, amplitude, seed=3)
    values = raw.view(FORMATS[kind]).astype(np.float64)
    assert np.abs(values).max() <= amplitude * 1.05
    assert abs(values.mean()) < amplitude * 0.02
    assert values.std() == pytest.approx(amplitude / math.sqrt(3), rel=0.03)
    assert len(np.unique(values)) > {0: 50, 1: 8000, 2: 1500, 3: 16000}[kind]
    assert np.array_equal(filled(1 << 16, kind, amplitude, seed=3, blocks=1), raw)
    assert not np.array_equal(filled(1 << 16, kind, amplitude, seed=4), raw)
    assert len(np.unique(raw.reshape(-1, 16), axis=0)) == raw.size // 16
    assert np.array_equal(filled(1003, kind, amplitude, seed=3), raw[:1003])


def test_fill_beyond_the_range_of_e4m3() -> None:
    values = filled(4096, 0, 1e6, seed=1).view(FORMATS[0]).astype(np.float32)
    assert np.isfinite(values).all()
    assert np.abs(values).max() == 448
