"""An EAGLE-3 head's passes on the emulated kernels against NumPy, by the launches of `ull.gpu.eagle`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulation
from eagle_rig import Head, Left, Wish, head_of, read_chunk
from layer_rig import model_of
from ull.bundle import EAGLE_CHUNKS
from ull.gpu.eagle import FIRST_ENTRIES
from ull.gpu.memory import EAGLE_STATES, TAP_ROWS
from ull.gpu.params import OK, SKIPPED, TAP_SLOTS

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(emulation.ON_DEVICE, reason="parameters point to parameters; tests/h200 compares whole engines"),
]
POSITION = TAP_SLOTS - 4  # of the first entry: the ring's end lies among them
TARGET = model_of(layers=6, hidden=128, vocabulary=2000, tokenizer_vocabulary=2000, context=1024)
CASES: dict[str, dict[str, Any]] = {
    "plain, mapped": {"mapped": True},
    "eagle 3.1: a norm per tap, fed back behind the norm": {"tap_norm": "each", "norm_output": True, "mapped": True},
    "one norm for all, residual behind the norm, own narrower width": {
        "tap_norm": "all",
        "norm_before_residual": True,
        "own_embedding": True,
        "hidden": 96,
    },
    "16 bits, one tap, few tokens": {"weights": "bf16", "taps": [5], "vocabulary": 7, "tokenizer_vocabulary": 7},
}
CHAIN = [5, 17, 90, 411]  # tokens of the entries that have taps
PARENTS = [0, 0, 1, 2]


def proposal(head: Head, wish: Wish, tile: int = 16) -> tuple[list[int], list[int]]:
    """A first pass and two levels: three candidates, then two of the first and one of the third; all are checked."""
    tokens, parents = list(CHAIN), list(PARENTS)
    result = head.run(head.passes.first(), tokens, parents, POSITION, len(CHAIN), 1, wish, seed=1)
    head.check_taps(POSITION, len(CHAIN))
    states = head.rows(EAGLE_STATES)[: len(CHAIN)].copy()
    head.check_input(tokens, states)
    head.check_logits([len(CHAIN) - 1])
    head.check_ranks(result, tokens, parents, POSITION, 1, wish)
    levels = ([len(CHAIN) - 1] * 3, [len(CHAIN), len(CHAIN), len(CHAIN) + 2])
    for level, above in enumerate(levels, start=2):
        outputs = head.rows(TAP_ROWS).copy()
        ranks = dict.fromkeys(above, 0)
        known = {result.tokens[i].node: result.tokens[i] for i in range(result.count)}
        for node in above:
            tokens.append(known[node].top[ranks[node]].token)
            parents.append(node)
            ranks[node] += 1
        result = head.run(head.passes.level(tile), tokens, parents, POSITION, len(CHAIN), len(above), wish, seed=level)
        drafted = outputs[parents[len(CHAIN) :]]
        fed = head._exactly_normed(drafted, "norm").astype(np.float32) if head.head.norm_output else drafted
        head.check_input(tokens, np.concatenate([states, fed]))
        newest = range(len(tokens) - len(above), len(tokens))
        head.check_logits(newest)
        head.check_ranks(result, tokens, parents, POSITION, len(above), wish)
        # What was there before has kept its bits.
        assert np.array_equal(head.rows(TAP_ROWS)[: newest[0]], outputs[: newest[0]])
    return tokens, parents


@pytest.mark.parametrize("name", CASES)
def test_passes_say_what_numpy_says(name: str) -> None:
    head = head_of(TARGET, **CASES[name])
    proposal(head, Wish())
    own = tuple(head.names[:3].tolist())
    proposal(head, Wish(temperature=0.8, bias=((own[0], 4.0), (own[1], -100.0))))
    # The counts hold what stands before the second entry's token; what follows is on the entries' way.
    proposal(head, Wish(temperature=1.3, presence_penalty=1.5, counted=POSITION + 2, text=(CHAIN[0], own[2])))


def test_the_tile_does_not_matter() -> None:
    left = []
    for tile in (16, 32, 64):
        head = head_of(TARGET, mapped=True)
        tokens, _ = proposal(head, Wish(temperature=0.7), tile)
        left.append((tokens, head.rows(TAP_ROWS)[: len(tokens)].tobytes()))
    assert left[0] == left[1] == left[2]


def test_how_entries_came_into_the_cache_does_not_matter() -> None:
    """All by one fill and the last again by a first pass, or most by first passes: the same pages, the same answer."""
    tokens = [int(token) for token in np.random.default_rng(1).integers(2000, size=40)]
    chain = [max(entry - 1, 0) for entry in range(64)]
    answers, caches = [], []
    for steps in ([(0, 32), (32, 40)], [(0, 5), (5, 37), (37, 40)], [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]):
        head = head_of(TARGET, mapped=True)
        for begin, end in steps:
            part, parents = tokens[begin:end], chain[: end - begin]
            launches = head.passes.first() if end - begin <= FIRST_ENTRIES else head.passes.fill()
            ranked = 1 if end - begin <= FIRST_ENTRIES else 0
            result = head.run(launches, part, parents, POSITION + begin, len(part), ranked)
        answers.append(bytes(result.tokens[0].top))
        caches.append(head.memory["KV pages"].tobytes())
    assert len(set(answers)) == 1 and len(set(caches)) == 1
    assert any(caches[0])


@pytest.mark.parametrize("name", CASES)
def test_a_chunk_makes_the_entries_that_passes_of_64_do(name: str) -> None:
    """Bit for bit, and no others: tiles of 128 tokens that are whole and not, across pages and the ring's end."""
    vocabulary, caches = TARGET.vocabulary, []
    for start, count in ((POSITION - 130, 300), (POSITION, 65), (3, 512)):
        tokens = [int(token) for token in np.random.default_rng(count).integers(vocabulary, size=count)]
        by_passes, by_chunk = (head_of(TARGET, **CASES[name]) for _ in range(2))
        for begin in range(0, count, 64):
            part = tokens[begin : begin + 64]
            parents = [max(entry - 1, 0) for entry in range(len(part))]
            by_passes.run(by_passes.passes.fill(), part, parents, start + begin, len(part), 0)
        assert read_chunk(by_chunk, tokens, start, seed=count).status == OK
        assert np.array_equal(by_chunk.memory["KV pages"], by_passes.memory["KV pages"])
        caches.append(by_chunk.memory["KV pages"].tobytes())
    assert len(set(caches)) == 3


def test_a_proposal_goes_on_behind_a_chunk() -> None:
    """What a first pass says behind entries that a chunk has made, and behind those of passes of 64."""
    tokens, answers = [int(token) for token in np.random.default_rng(1).integers(2000, size=90)], []
    for in_chunk in (False, True):
        head = head_of(TARGET, mapped=True)
        if in_chunk:
            read_chunk(head, tokens, POSITION)
        else:
            for begin, end in ((0, 64), (64, 90)):
                parents = [max(entry - 1, 0) for entry in range(end - begin)]
                head.run(head.passes.fill(), tokens[begin:end], parents, POSITION + begin, end - begin, 0)
        result = head.run(head.passes.first(), CHAIN, PARENTS, POSITION + 90, len(CHAIN), 1, first=POSITION)
        answers.append(bytes(result.tokens[0].top))
    assert answers[0] == answers[1]


def test_a_pass_behind_a_round_makes_the_entries_of_what_was_accepted() -> None:
    """As one that is told; and none where the round ended the request, emitted too much, or nothing."""
    tree, accepted = (99, 5, 6, 17, 90, 8), (0, 1, 3, 4)  # whose next tokens are the chain's
    left = Left(POSITION, tree, accepted, CHAIN[-1])
    told, behind = (head_of(TARGET, mapped=True) for _ in range(2))
    wish = Wish(temperature=0.8)
    expected = told.run(told.passes.first(), CHAIN, PARENTS, POSITION, len(CHAIN), 1, wish)
    found = behind.run(behind.passes.first(), (), (), 0, 0, 1, wish, left=left)
    assert (found.status, found.count) == (OK, 1)
    assert bytes(found.tokens[0]) == bytes(expected.tokens[0])
    assert np.array_equal(told.memory["KV pages"], behind.memory["KV pages"])
    for nothing in (
        Left(POSITION, tree, accepted, CHAIN[-1], stopped=True),
        Left(POSITION, tree, (), 3),
        Left(POSITION, tuple(range(9)), tuple(range(9)), 3),
    ):
        result = behind.run(behind.passes.first(), (), (), 0, 0, 1, wish, left=nothing)
        assert (result.status, result.count) == (SKIPPED, 0)
    assert np.array_equal(told.memory["KV pages"], behind.memory["KV pages"])


def test_what_the_pages_lack_is_not_attended_to() -> None:
    """Whatever stands before the first position: of a chain across splits, and of a level behind it."""
    tokens = [int(token) for token in np.random.default_rng(1).integers(2000, size=64)]
    chain, start = [max(entry - 1, 0) for entry in range(64)], 300
    answers: dict[int, set[bytes]] = {0: set(), start - 20: set(), start + 64: set()}
    for first, given in answers.items():
        for lies in (0, 1):
            head = head_of(TARGET, mapped=True)
            pages = head.memory["KV pages"].view(ml_dtypes.bfloat16)
            pages[...] = np.random.default_rng(lies).standard_normal(pages.shape)
            for at in (start - 64, start):
                head.run(head.passes.fill(), tokens, chain, at, 64, 0, first=first)
            result = head.run(head.passes.first(), CHAIN, PARENTS, start + 64, len(CHAIN), 1, first=first)
            level = head.run(head.passes.level(16), [*CHAIN, 3], [*PARENTS, 3], start + 64, len(CHAIN), 1, first=first)
            given.add(bytes(result.tokens[0].top) + bytes(level.tokens[0].top))
    assert [len(given) for given in answers.values()] == [2, 1, 1]
    assert len(set.union(*answers.values())) == 4


def test_chunks_are_made_of_the_kernels_that_a_bundle_holds() -> None:
    launches = head_of(TARGET).passes.chunk()
    assert {launch.kernel for launch in launches} == EAGLE_CHUNKS | {"ull_accept"}
    # Kernels read the extent as begin has left it, before they wait: so the one behind it begins when it has ended.
    assert [launch.overlaps for launch in launches] == [launch.kernel != "ull_eagle_chunk_taps" for launch in launches]


def test_levels_leave_the_pages_as_they_are() -> None:
    head = head_of(TARGET, mapped=True)
    head.run(head.passes.first(), CHAIN, PARENTS, POSITION, len(CHAIN), 1)
    before = head.memory["KV pages"].copy()
    assert before.any()
    head.run(head.passes.level(16), [*CHAIN, 3], [*PARENTS, 3], POSITION, len(CHAIN), 1)
    assert np.array_equal(head.memory["KV pages"], before)


def test_a_cancelled_pass_is_skipped() -> None:
    head = head_of(TARGET, mapped=True)
    result = head.run(head.passes.first(), CHAIN, PARENTS, POSITION, len(CHAIN), 1, cancelled=True)
    assert (result.status, result.count) == (SKIPPED, 0)
    assert read_chunk(head, [5] * 200, 0, cancelled=True).status == SKIPPED
    assert not head.memory["KV pages"].any() and not head.rows(TAP_ROWS).any()


def test_all_accesses_are_ordered() -> None:
    head = head_of(TARGET, mapped=True, tap_norm="each", norm_output=True, reports=True)
    proposal(head, Wish(temperature=1.3, presence_penalty=1.5, counted=POSITION + 2, text=(CHAIN[0], 7)))
    head.run(head.passes.fill(), [*range(20)], [max(i - 1, 0) for i in range(20)], 0, 20, 0)
    read_chunk(head, [*range(150)], POSITION)
