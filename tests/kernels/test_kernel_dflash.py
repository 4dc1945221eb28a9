"""A DFlash head's passes on the emulated kernels against NumPy, by the launches of `ull.gpu.dflash`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulation
from dflash_rig import Head, Wish, head_of, way_of
from eagle_rig import Left, read_chunk
from layer_rig import model_of
from ull.bundle import DFLASH_CHUNKS, DFLASH_PASSES, DflashHead, Precision
from ull.gpu.dflash import BLOCK_TILES, CONTEXT_ENTRIES, DflashPasses
from ull.gpu.memory import DFLASH_LOGITS, DFLASH_STATES, DflashShape, Sizes
from ull.gpu.params import DFLASH_BLOCK, DFLASH_CONTEXT, DFLASH_NODES, OK, PAGE_TOKENS, SKIPPED, TAP_SLOTS, RoundResult
from ull.gpu.places import HostBlocks, Places

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(emulation.ON_DEVICE, reason="parameters point to parameters; tests/h200 compares whole engines"),
]
ROOT = TAP_SLOTS - 2  # the root's position: the ring's end lies before it, a split's behind it
TARGET = model_of(layers=6, hidden=128, vocabulary=2000, tokenizer_vocabulary=2000, context=1024)
CASES: dict[str, dict[str, Any]] = {
    "all of the target's": {},
    "QK norm, biases, its own lm_head, mapped, the anchor predicts": {
        "qk_norm": True,
        "biases": True,
        "own_lm_head": True,
        "mapped": True,
        "vocabulary": 1003,
        "anchor_predicts": True,
        "layers": 3,
        "windows": [0, 100, 0],
    },
    "16 bits, a narrower width of its own, one tap, few tokens": {
        "weights": "bf16",
        "taps": [5],
        "own_embedding": True,
        "own_lm_head": True,
        "hidden": 96,
        "vocabulary": 7,
        "tokenizer_vocabulary": 7,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 64,
    },
    "says how likely a draft is": {"confidence": True},
}
MARKOV_CASES: dict[str, dict[str, Any]] = {
    "plain": {"markov": 40},
    "gated, mapped, the anchor predicts": {
        "markov": 72,
        "markov_kind": "gated",
        "own_lm_head": True,
        "mapped": True,
        "vocabulary": 1003,
        "anchor_predicts": True,
    },
    "with a chance by the state": {"markov": 40, "confidence": True},
    "gated, with a chance by the token before too": {
        "markov": 33,
        "markov_kind": "gated",
        "weights": "bf16",
        "biases": True,
        "confidence": True,
        "confidence_reads_markov": True,
    },
}
CONTEXT = 200  # positions before the root
BLOCK = 8


def prepared(head: Head, root: int = ROOT, count: int = CONTEXT) -> Head:
    """The context of the positions before the root, by passes of up to 64 and of up to 8."""
    for begin in range(root - count, root, 64):
        head.read(begin, min(64, root - begin))
    return head


def penalties(result: RoundResult) -> Wish:
    """Penalties of what is best without them: the counts hold the first two tokens of the text, but not the others."""
    best = [candidate.token for candidate in result.tokens[0].top[:4]]
    return Wish(temperature=1.3, presence_penalty=1.5, counted=ROOT - 1, text=(best[3], best[0], best[1], best[2]))


def depths_of(head: Head) -> list[int]:
    """That a block of `BLOCK` predicts."""
    return list(range(1, BLOCK + 1 if head.head.anchor_predicts else BLOCK))


@pytest.mark.parametrize("name", CASES)
def test_context_is_what_numpy_says(name: str) -> None:
    head = head_of(TARGET, **CASES[name])
    head.read(ROOT - 60, 59)
    head.check_context(ROOT - 60, 59)
    head.read(ROOT - 1, 5)
    head.check_context(ROOT - 1, 5)
    untouched = head.stored(0, ROOT - 64, ROOT - 60)
    assert all((part == 100).all() for part in untouched)


@pytest.mark.parametrize("name", CASES)
def test_blocks_say_what_numpy_says(name: str) -> None:
    head = prepared(head_of(TARGET, **CASES[name]))
    depths, first = depths_of(head), ROOT - CONTEXT
    entries = [head.entry(depth) for depth in depths]
    own = tuple(head.names[:3].tolist())
    wishes = [Wish(), Wish(temperature=0.8, bias=((own[0], 4.0), (own[1], -100.0)))]
    result = head.block(9, BLOCK, ROOT, len(depths), first, wish=Wish(temperature=1.3))
    wishes.append(penalties(result))
    for wish in wishes:
        result = head.block(9, BLOCK, ROOT, len(depths), first, wish=wish)
        head.check_block(9, BLOCK, ROOT, first)
        head.check_ranks(result, head.logits[entries], depths, entries, ROOT, wish)
        for index, depth in enumerate(depths):
            head.check_chance(result.tokens[index].logprob, depth, None)


def test_fewer_depths_are_ranked_from_the_first_on() -> None:
    head = prepared(head_of(TARGET))
    result = head.block(9, BLOCK, ROOT, 3, ROOT - CONTEXT)
    head.check_ranks(result, head.logits[[1, 2, 3]], [1, 2, 3], [1, 2, 3], ROOT, Wish())


def test_neither_tile_nor_length_of_the_passes_matters() -> None:
    """Context read by eights or by 64, blocks of tiles 8, 16 and 32: the same bits."""
    left = []
    for steps, tile in (([64, 64, 64, 8], 8), ([8] * 25, 16), ([3, 61, 64, 64, 8], 32)):
        head = head_of(TARGET, qk_norm=True)
        begin = ROOT - CONTEXT
        for count in steps:
            head.read(begin, count)
            begin += count
        assert begin == ROOT
        result = head.block(9, BLOCK, ROOT, BLOCK - 1, ROOT - CONTEXT, tile)
        residual = head.rows("residual", head.model.hidden)[:BLOCK]
        tokens = [bytes(token) for token in result.tokens[: result.count]]
        left.append((tokens, residual.tobytes(), head.memory["KV pages"].tobytes()))
    assert left[0] == left[1] == left[2]


@pytest.mark.parametrize("name", CASES)
def test_a_chunk_makes_the_context_that_passes_of_64_do(name: str) -> None:
    """Bit for bit, and no other: tiles of 128 tokens that are whole and not, across pages and the ring's end."""
    caches = []
    for start, count in ((ROOT - 130, 300), (ROOT, 65), (3, 512)):
        by_passes, by_chunk = (head_of(TARGET, **CASES[name]) for _ in range(2))
        for begin in range(0, count, 64):
            by_passes.read(start + begin, min(64, count - begin))
        assert read_chunk(by_chunk, [0] * count, start, seed=count).status == OK
        assert np.array_equal(by_chunk.memory["KV pages"], by_passes.memory["KV pages"])
        caches.append(by_chunk.memory["KV pages"].tobytes())
    assert len(set(caches)) == 3


@pytest.mark.parametrize("markov", [0, 40])
def test_passes_behind_a_round_go_by_what_was_accepted(markov: int) -> None:
    """As those that are told; and none where the round ended the request, emitted too much, or nothing."""
    accepted, ranked = (0, 1, 3, 4), 0 if markov else BLOCK - 1
    left = Left(ROOT - len(accepted), (99, 5, 6, 17, 90, 8), accepted, 9)
    told, behind = (prepared(head_of(TARGET, markov=markov), left.base) for _ in range(2))
    first, wish = left.base - CONTEXT, Wish(temperature=0.8)
    told.read(left.base, len(accepted))
    expected = told.block(9, BLOCK, ROOT, ranked, first, wish=wish)
    assert behind.read(-1, 8, left=left).status == OK
    found = behind.block(0, BLOCK, -1, ranked, first, wish=wish, left=left)
    assert (found.status, found.count) == (OK, ranked)
    assert bytes(found.tokens) == bytes(expected.tokens)
    for region in ("KV pages", "residual", "logits"):
        assert np.array_equal(told.memory[region], behind.memory[region])
    for nothing, block_too in (
        (Left(left.base, left.tokens, accepted, 9, stopped=True), True),
        (Left(left.base, (99,), (), 3), False),
        (Left(left.base, tuple(range(9)), tuple(range(9)), 3), False),
    ):
        assert behind.read(-1, 8, left=nothing).status == SKIPPED
        if block_too:
            assert behind.block(0, BLOCK, -1, ranked, first, left=nothing).status == SKIPPED
    assert np.array_equal(told.memory["KV pages"], behind.memory["KV pages"])


def test_every_entry_sees_the_whole_block_and_nothing_before_the_first_position() -> None:
    head = prepared(head_of(TARGET))
    first = ROOT - CONTEXT + 37

    def residual(count: int = BLOCK) -> bytes:
        head.block(9, count, ROOT, 1, first)
        return head.rows("residual", head.model.hidden)[0].tobytes()

    alone, whole = residual(count=1), residual()
    assert alone != whole
    pool = head.memory["KV pages"].view(ml_dtypes.bfloat16).reshape(head.sizes.page_count, -1)
    page = pool[head.pages[first // PAGE_TOKENS]]
    keys = page.reshape(head.model.layers, 2, head.model.kv_heads, -1)[:, 0]
    keys = keys.reshape(head.model.layers, head.model.kv_heads, PAGE_TOKENS, head.model.head_dim)
    slot = first % PAGE_TOKENS
    assert slot > 0
    keys[:, :, slot - 1] += 50
    assert residual() == whole
    keys[:, :, slot] += 50
    assert residual() != whole


def test_a_block_leaves_the_pages_as_they_are() -> None:
    head = prepared(head_of(TARGET, markov=40))
    before = head.memory["KV pages"].copy()
    head.block(9, BLOCK, ROOT, 0, ROOT - CONTEXT)
    head.nodes([9], [0], ROOT, 1)
    assert np.array_equal(head.memory["KV pages"], before)


def check_tree(head: Head, wish: Wish) -> None:
    """A block and three levels of nodes: the root, two of its children and one of theirs, then nodes of all depths."""
    first, depths = ROOT - CONTEXT, depths_of(head)
    says_chance = head.head.confidence and not head.head.confidence_reads_markov
    result = head.block(9, BLOCK, ROOT, len(depths) if says_chance else 0, first, wish=wish)
    head.check_block(9, BLOCK, ROOT, first)
    assert result.count == (len(depths) if says_chance else 0)
    for index in range(result.count):
        head.check_chance(result.tokens[index].logprob, depths[index], None)
        assert result.tokens[index].top_count == 0
    tokens, parents = [9], [0]
    for ranked, more in ((1, (0, 0, 1)), (3, (3, 3, 2, 1, 1, 0)), (6, ())):
        result = head.nodes(tokens, parents, ROOT, ranked, wish=wish)
        rows = head.check_markov(tokens, parents, ranked)
        nodes = list(range(len(tokens) - ranked, len(tokens)))
        behind = [len(way_of(parents, node)) for node in nodes]
        head.check_ranks(result, rows, behind, nodes, ROOT, wish)
        for index, node in enumerate(nodes):
            head.check_chance(result.tokens[index].logprob, behind[index], tokens[node])
        top = result.tokens[0].top
        tokens += [top[rank].token for rank in range(len(more))]
        parents += more


@pytest.mark.parametrize("name", MARKOV_CASES)
def test_nodes_are_ranked_with_the_markov_term(name: str) -> None:
    head = prepared(head_of(TARGET, **MARKOV_CASES[name]))
    check_tree(head, Wish())
    own = tuple(head.names[:3].tolist())
    check_tree(head, Wish(temperature=0.8, bias=((own[0], 4.0), (own[1], -100.0))))
    check_tree(head, penalties(head.nodes([9], [0], ROOT, 1, wish=Wish(temperature=1.3))))


def test_the_token_before_changes_what_follows() -> None:
    head = prepared(head_of(TARGET, markov=40))
    head.block(9, BLOCK, ROOT, 0, ROOT - CONTEXT)
    tops = []
    for token in (4, 5):
        result = head.nodes([token], [0], ROOT, 1)
        tops.append([candidate.token for candidate in result.tokens[0].top[: result.tokens[0].top_count]])
    assert tops[0] != tops[1]


@pytest.mark.parametrize("hidden", [128, 4096])
def test_the_passes_are_made_of_the_kernels_that_a_bundle_holds(hidden: int) -> None:
    target = model_of(layers=6, hidden=hidden)
    gated: dict[str, Any] = {"markov": 40, "markov_kind": "gated", "confidence": True}
    model = model_of(hidden=hidden)
    head = DflashHead(model=model, precision=Precision(), taps=[1, 2], block=8, mask_token=3, **gated)
    sizes = Sizes(model, Precision(), target.context, dflash=DflashShape(2, hidden, 40, True), chunks=True)
    target_sizes = Sizes(target, Precision(), target.context, taps=(1, 2))
    nowhere = Places(lambda name: 0, lambda name: 0, HostBlocks(0, 0, 0, 0, 0, 0))
    passes = DflashPasses(head, sizes, nowhere, target_sizes, nowhere, 132)
    made = [*map(passes.context, CONTEXT_ENTRIES), *map(passes.block, BLOCK_TILES), passes.nodes()]
    assert {launch.kernel for launches in made for launch in launches} == DFLASH_PASSES
    # Kernels read the round as begin has left it, before they wait: so the one behind it begins when it has ended.
    for launches in (*made, chunk := passes.chunk()):
        assert [launch.overlaps for launch in launches[:3]] == [True, False, True]
    assert {launch.kernel for launch in chunk} == DFLASH_CHUNKS | {"ull_accept"}


@pytest.mark.parametrize("which", ["context", "block", "nodes"])
def test_a_cancelled_pass_is_skipped(which: str) -> None:
    head = head_of(TARGET, markov=40)
    before = head.memory["KV pages"].copy()
    passes = {
        "context": (head.passes.context(8), DFLASH_CONTEXT, DFLASH_STATES),
        "block": (head.passes.block(8), DFLASH_BLOCK, "residual"),
        "nodes": (head.passes.nodes(), DFLASH_NODES, DFLASH_LOGITS),
    }
    launches, mode, written = passes[which]
    result = head.run(launches, mode, [3, 3], ROOT, parents=[0, 0], ranked=1, cancelled=True)
    assert (result.status, result.count) == (SKIPPED, 0)
    assert np.array_equal(head.memory["KV pages"], before)
    assert (head.memory[written] == 0xFF).all()
    assert read_chunk(head, [0] * 200, ROOT, cancelled=True).status == SKIPPED
    assert np.array_equal(head.memory["KV pages"], before)


@pytest.mark.parametrize("markov", [0, 40])
def test_all_accesses_are_ordered(markov: int) -> None:
    more: dict[str, Any] = {"markov": markov, "markov_kind": "gated"} if markov else {}
    head = head_of(TARGET, reports=True, confidence=True, qk_norm=True, **more)
    wish = Wish(temperature=1.3, presence_penalty=1.5, counted=ROOT - 1, text=(5, 7, 7, 9))
    prepared(head, count=70)
    read_chunk(head, [0] * 150, ROOT - 150)
    if markov:
        head.block(9, BLOCK, ROOT, BLOCK - 1, ROOT - 70, 8, wish=wish)
        head.nodes([9, 4, 5], [0, 0, 1], ROOT, 2, wish=wish)
        return
    result = head.block(9, BLOCK, ROOT, BLOCK - 1, ROOT - 70, 16, wish=wish)
    entries = [head.entry(depth) for depth in depths_of(head)]
    head.check_ranks(result, head.logits[entries], depths_of(head), entries, ROOT, wish)
