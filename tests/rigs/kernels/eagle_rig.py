"""An EAGLE-3 head on the emulated kernels, by the launches that an engine would capture, and NumPy's side of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from layer_rig import model_of, numbers_of, random_tensors
from linear_layers import normed, product, unpack_activations
from ull import _native
from ull.bundle import EagleHead, Model, Precision, device_eagle_macros, device_eagle_tensors
from ull.gpu.eagle import FIRST_ENTRIES, EaglePasses
from ull.gpu.launch import Launch
from ull.gpu.memory import (
    CHUNK,
    CHUNK_INPUT,
    CHUNK_NORMED,
    CHUNK_QKV,
    CHUNK_STATES,
    CHUNK_TAPS,
    EAGLE_INPUT,
    EAGLE_STATES,
    EAGLE_TAPS,
    TAP_RING,
    TAP_ROWS,
    EagleShape,
    Sizes,
    plan_memory,
    rope_table,
)
from ull.gpu.params import (
    CHUNK_TOKENS,
    EAGLE,
    GENERATED,
    MEDUSA_RANKS,
    MLP_SCALE,
    OK,
    PREFILL,
    ROUND_SLOTS,
    TAP_SLOTS,
    HostControl,
    LogitBias,
    Round,
    RoundRequest,
    RoundResult,
    State,
)
from ull.gpu.places import HostBlocks, Places
from ull_build.weights.pack_gpu import unpack_blocks

SEED = 2**40 + 9
SOURCES = [
    f"{name}.cu"
    for name in (
        *("begin", "eagle", "attention", "output", "gate_up", "down", "head", "norm", "qkv"),
        *("eagle_rank", "accept", "commit", "eagle_chunk", "chunk_store"),
    )
]
CHUNK_REGIONS = (CHUNK_TAPS, CHUNK_STATES, CHUNK_INPUT, CHUNK_NORMED, CHUNK_QKV)  # a head has some of them
TARGET_TAPS = (1, 2, 5, 6)  # what the ring holds: also taps that another head reads
Row = NDArray[np.float32]


@dataclass
class Wish:
    """What the target's state says of the request."""

    temperature: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    counted: int = 0  # tokens of the text that the counts hold, from position 0
    text: tuple[int, ...] = ()  # of these, some


@dataclass
class Left:
    """What the target's last round has left: a tree, which of its nodes were accepted, and what was drawn last."""

    base: int
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    drawn: int
    stopped: bool = False

    def write(self, memory: dict[str, NDArray[Any]]) -> None:
        """Into the target's `round` and `state`."""
        target, state = Round.from_buffer(memory["round"]), State.from_buffer(memory["state"])
        target.base, target.accepted_count = self.base, len(self.accepted)
        target.tokens[: len(self.tokens)] = list(self.tokens)
        target.accepted[: len(self.accepted)] = list(self.accepted)
        state.token, state.position, state.stopped = self.drawn, self.base + len(self.accepted), int(self.stopped)


def read_chunk(head: Any, tokens: Sequence[int], position: int, cancelled: bool = False, seed: int = 0) -> RoundResult:
    """A head's entries of positions from `position` on, by one chunk's graph.

    Nothing that stood in the chunk's regions before may matter.
    """
    sequence = State.from_buffer(head.memory["state"]).sequence
    slot = sequence % ROUND_SLOTS
    request = head.requests[slot]
    request.sequence, request.mode, request.count, request.position = sequence, PREFILL, len(tokens), position
    request.max_tokens = request.forced = request.first = 0
    request.setting, request.page_count = 1, head.sizes.table_pages
    head.chunks[slot, : len(tokens)] = tokens
    head.control.cancelled_through = sequence if cancelled else 0
    written = [head.memory[name] for name in CHUNK_REGIONS if name in head.memory]
    for area in written:
        area[...] = 0xFF
    begin, *others = head.passes.chunk()
    constants = [*head.own.values(), *head.targets.values(), *head.requested, head.memory["rope"]]
    pages = [head.memory[name] for name in ("KV pages", "page table")]
    begun, written = [head.memory[name] for name in ("round", CHUNK)], [*written, head.memory["state"]]
    emulation.run_launches(head.kernels, [begin], seed * 100, [*written, *begun], constants, pages)
    emulation.run_launches(head.kernels, others, seed * 100 + 1, written, constants, [*pages, *begun])
    result = RoundResult.from_buffer_copy(head.results[slot])
    assert (result.sequence, result.count) == (sequence, 0)
    return result


class Head:
    """A random head beside a ring of random taps. `run` plays a pass; what it leaves stays for the next one."""

    def __init__(self, head: EagleHead, target: Model, reports: bool = False, multiprocessors: int = 3) -> None:
        self.head, self.model, self.target = head, head.model, target
        self.sizes = Sizes(
            head.model,
            head.precision,
            target.context,
            taps=(1,),
            eagle=EagleShape(len(head.taps), target.hidden),
            chunks=True,
        )
        target_sizes = Sizes(target, Precision(), target.context, taps=TARGET_TAPS)
        self.kernels = emulation.build(SOURCES, numbers_of(device_eagle_macros(head, target.hidden)), reports=reports)
        rng = np.random.default_rng(23)
        shapes = device_eagle_tensors(head, target)
        names = shapes.pop("d2t", None)
        self.tensors = random_tensors(shapes, rng)
        self.embedding = rng.standard_normal((target.vocabulary, head.model.hidden)).astype(ml_dtypes.bfloat16)
        table = aligned(self.embedding.shape, ml_dtypes.bfloat16)
        table[...] = self.embedding
        self.own = {**self.tensors, "embed.weight": table} if head.own_embedding else dict(self.tensors)
        self.targets = {} if head.own_embedding else {"embed.weight": table}
        self.names = np.arange(head.model.vocabulary, dtype=np.int32)
        if names is not None:
            self.names = rng.permutation(target.vocabulary)[: head.model.vocabulary].astype(np.int32)
            stored = aligned(names.shape, np.int32, 0)
            stored[: len(self.names)] = self.names
            self.own["d2t"] = stored
        self.memory = self._reserve(self.sizes)
        wanted = (TAP_RING, "round", "state", "text counts")
        self.target_memory = {name: area for name, area in self._reserve(target_sizes).items() if name in wanted}
        self.ring = rng.standard_normal((TAP_SLOTS, len(TARGET_TAPS), target.hidden)).astype(np.float32) * 30
        self.target_memory[TAP_RING].view(np.float32)[...] = self.ring.reshape(-1)
        self.memory["rope"].view(np.float32)[...] = rope_table(head.model, target.context).reshape(-1)
        self.requested: list[NDArray[np.uint8]] = []
        self.requests = self._block(RoundRequest * ROUND_SLOTS)
        self.results = self._block(RoundResult * ROUND_SLOTS)
        self.control = self._block(HostControl)
        self.pages = aligned(self.sizes.table_pages + 1, np.int32, 0)
        self.pages[: self.sizes.table_pages] = np.random.default_rng(3).permutation(self.sizes.page_count)
        self._text, self._mask = aligned(target.context, np.int32, 0), aligned(self.sizes.mask_bytes, np.uint8, 0)
        self.chunks = aligned((ROUND_SLOTS, CHUNK_TOKENS), np.int32, 0)
        self.requested.append(self.chunks)
        state = State.from_buffer(self.memory["state"])
        state.sequence = 1
        self.logits: NDArray[np.float32] = np.zeros(0, np.float32)
        self.passes = EaglePasses(
            head, self.sizes, self._places(), target_sizes, self._target_places(), multiprocessors
        )

    @staticmethod
    def _reserve(sizes: Sizes) -> dict[str, NDArray[Any]]:
        return {name: aligned(region.nbytes, np.uint8, 0) for name, region in plan_memory(sizes, 0).regions.items()}

    def _block(self, kind: Any) -> Any:
        memory = aligned(ctypes.sizeof(kind), np.uint8, 0)
        if kind in (RoundRequest * ROUND_SLOTS, HostControl):
            self.requested.append(memory)
        return kind.from_buffer(memory)

    def _places(self) -> Places:
        blocks = map(ctypes.addressof, (self.requests, self.results, self.control))
        host = HostBlocks(*blocks, *map(pointer, (self.pages, self._text, self._mask, self.chunks)))
        return Places(lambda name: pointer(self.memory[name]), lambda name: self._tensor(self.own, name), host)

    def _target_places(self) -> Places:
        return Places(
            lambda name: pointer(self.target_memory[name]),
            lambda name: self._tensor(self.targets, name),
            HostBlocks(0, 0, 0, 0, 0, 0),
        )

    @staticmethod
    def _tensor(tensors: dict[str, NDArray[Any]], name: str) -> int | None:
        return pointer(tensors[name]) if name in tensors else None

    def rows(self, name: str) -> Row:
        """[64, H] of an f32 region."""
        return self.memory[name].view(np.float32).reshape(64, -1)[:, : self.model.hidden]

    def run(
        self,
        launches: Sequence[Launch],
        tokens: Sequence[int],
        parents: Sequence[int],
        position: int,
        taken: int,
        ranked: int,
        wish: Wish | None = None,
        cancelled: bool = False,
        seed: int = 0,
        first: int = 0,
        left: Left | None = None,
    ) -> RoundResult:
        """One pass. `taken`: entries with taps; `ranked`: the last ones, whose candidates are wanted.

        `first`: the pages lack positions before it. `left`: what it goes by instead of its tokens.
        """
        wish = wish or Wish()
        own = State.from_buffer(self.memory["state"])
        sequence = own.sequence
        state = State.from_buffer(self.target_memory["state"])
        ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
        state.sampling.temperature, state.sampling.seed, state.sampling.top_p = wish.temperature, SEED, 0.5
        state.sampling.bias_count, state.sampling.repetition_penalty = len(wish.bias), 1.0
        state.sampling.presence_penalty = wish.presence_penalty
        state.sampling.penalises, state.counted = int(wish.presence_penalty != 0), wish.counted
        for i, (token, bias) in enumerate(wish.bias):
            state.biases[i] = LogitBias(token, bias)
        counts = self.target_memory["text counts"].view(np.uint32)
        counts[...] = 0
        np.add.at(counts, list(wish.text), GENERATED)
        request = self.requests[sequence % ROUND_SLOTS]
        request.sequence, request.mode, request.count = sequence, EAGLE, len(tokens)
        request.position, request.forced, request.max_tokens, request.first = position, taken, ranked, first
        request.setting, request.page_count = 1, self.sizes.table_pages
        if left is not None:
            left.write(self.target_memory)
            request.position, request.count, request.forced = -1, FIRST_ENTRIES, 0
        request.tokens[: len(tokens)] = list(tokens)
        request.parents[: len(parents)] = list(parents)
        self.control.cancelled_through = sequence if cancelled else 0
        for name in ("sampler", "logits", "normed", "qkv", "attention", "mlp", "partial sums"):
            self.memory[name][...] = 0xFF  # nothing that an earlier pass has left there may matter
        names = ("round", "state", "residual", "normed", "qkv", "attention", "mlp", "partial sums", "logits")
        reads_taps = any(launch.kernel == "ull_eagle_taps" for launch in launches)
        own_names = (EAGLE_INPUT, *((EAGLE_TAPS, EAGLE_STATES) if reads_taps else ()))
        written = [self.memory[name] for name in (*names, *own_names)]
        constants = [*self.own.values(), *self.targets.values(), *self.requested, self.memory["rope"]]
        pages = [self.memory[name] for name in ("KV pages", "page table")]
        # What begin has written, kernels behind the first that waits for its end may read before they wait.
        first, *others = launches
        emulation.run_launches(self.kernels, [first], seed * 100, written, constants, pages)
        earlier = [*pages, self.memory["round"]]
        written = [area for area in written if area is not self.memory["round"]]
        emulation.run_launches(self.kernels, others, seed * 100 + 1, written, constants, earlier)
        after = State.from_buffer(self.memory["state"])
        assert (after.sequence, after.token, after.position) == (sequence + 1, 0, 0)
        result: RoundResult = self.results[sequence % ROUND_SLOTS]
        assert result.sequence == sequence
        row = -(-self.model.vocabulary // 16) * 16
        logits = self.memory["logits"].view(np.float32).reshape(64, row)
        self.logits = logits[:, : self.model.vocabulary].copy()
        return RoundResult.from_buffer_copy(result)

    # ---- what NumPy says ----

    def _matrix(self, name: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
        rows = unpack_blocks(self.tensors[f"{name}.weight"])
        return rows, self.tensors[f"{name}.scale"][: len(rows)]

    def _norm(self, x: Row, name: str) -> NDArray[np.float16]:
        return normed(np.ascontiguousarray(x), self.tensors[name][: self.model.hidden], self.model.rms_epsilon)

    def _exactly_normed(self, x: Row, name: str) -> NDArray[np.float64]:
        x64 = x.astype(np.float64)
        rms = np.sqrt((x64**2).mean(axis=1, keepdims=True) + self.model.rms_epsilon)
        return np.asarray(x64 / rms * self.tensors[name][: self.model.hidden], np.float64)

    def check_taps(self, position: int, taken: int) -> None:
        """The f16 activations of the taps, then the hidden states that fc makes of those."""
        width = len(self.head.taps) * self.target.hidden
        read = [TARGET_TAPS.index(layer) for layer in self.head.taps]
        slots = (position + np.arange(taken)) % TAP_SLOTS
        taps = self.ring[slots][:, read].astype(np.float64)
        epsilon = self.model.rms_epsilon
        if self.head.tap_norm == "each":
            taps /= np.sqrt((taps**2).mean(axis=2, keepdims=True) + epsilon)
        elif self.head.tap_norm == "all":
            taps /= np.sqrt((taps**2).mean(axis=(1, 2), keepdims=True) + epsilon)
        expected = taps.reshape(taken, width)
        if self.head.tap_norm != "none":
            expected = expected * self.tensors["tap_norm"][:width]
        expected = expected * MLP_SCALE
        found = unpack_activations(self.memory[EAGLE_TAPS].view(np.float16).reshape(-1, 64, 32), width)[:taken]
        assert (np.abs(found - expected) <= np.abs(expected) * 2**-10 + 1e-6).all()
        weights, scale = self._matrix("fc")
        exact, tolerance = product(weights[: self.model.hidden], scale[: self.model.hidden] / MLP_SCALE, None, found)
        assert (np.abs(self.rows(EAGLE_STATES)[:taken] - exact) <= tolerance / MLP_SCALE).all()

    def check_input(self, tokens: Sequence[int], states: Row) -> None:
        """The layer's input of all entries, made of `states`, and the queries, keys and values of that."""
        width, count = self.model.hidden, len(tokens)
        found = unpack_activations(self.memory[EAGLE_INPUT].view(np.float16).reshape(-1, 64, 32), 2 * width)[:count]
        embedded = self.embedding[list(tokens)].astype(np.float32)
        left = self._norm(embedded, "layers.0.attn_norm")
        assert np.array_equal(found[:, :width].view(np.uint16), left.view(np.uint16))
        right = self._exactly_normed(states, "layers.0.hidden_norm")
        assert (np.abs(found[:, width:] - right) <= np.abs(right) * 2**-10 + 1e-5).all()
        weights, scale = self._matrix("layers.0.qkv")
        exact, tolerance = product(weights[: self.sizes.qkv_width], scale[: self.sizes.qkv_width], None, found)
        qkv = self.memory["qkv"].view(np.float32).reshape(64, -1)[:count, : self.sizes.qkv_width]
        assert (np.abs(qkv - exact) <= tolerance).all()

    def check_logits(self, entries: Sequence[int]) -> None:
        """Of the residual that has left the layer, which is kept for the next pass."""
        states = self._norm(self.rows(TAP_ROWS)[list(entries)], "norm")
        weights, scale = self._matrix("lm_head")
        vocabulary = self.model.vocabulary
        exact, tolerance = product(weights[:vocabulary], scale[:vocabulary], None, states)
        assert (np.abs(self.logits[list(entries)] - exact) <= tolerance).all()

    def check_ranks(
        self, result: RoundResult, tokens: Sequence[int], parents: Sequence[int], position: int, ranked: int, wish: Wish
    ) -> None:
        """The best candidates of the device's own logits, by the rule that accepts them and the target's names."""
        assert (result.status, result.count, result.stopped) == (OK, ranked, 0)
        kept = min(MEDUSA_RANKS, self.model.vocabulary)
        for index in range(ranked):
            entry = len(tokens) - ranked + index
            way = [entry]
            while way[0] > 0:
                way.insert(0, parents[way[0]])
            scores = self.logits[entry].copy()
            behind = {tokens[node] for depth, node in enumerate(way) if position + 1 + depth >= wish.counted}
            said = np.isin(self.names, list(behind | set(wish.text)))
            scores[said] -= np.float32(wish.presence_penalty)
            for token, bias in wish.bias:
                scores[self.names == token] += np.float32(bias)
            if wish.temperature > 0:
                noise = _native.gumbel(SEED, position + len(way) + 1, self.names)
                scores = scores * (np.float32(1) / np.float32(wish.temperature)) + noise
            best = np.lexsort((self.names, -scores.astype(np.float64)))[:kept]
            drawn = result.tokens[index]
            assert (drawn.node, drawn.top_count) == (entry, kept)
            assert [drawn.top[rank].token for rank in range(kept)] == self.names[best].tolist()
            assert [drawn.top[rank].logprob for rank in range(kept)] == scores[best].tolist()


def head_of(target: Model, weights: Any = "fp8", reports: bool = False, **changes: Any) -> Head:
    """A small head of the target, but for `changes`: fields of EagleHead, or of its Model."""
    fields = {name: changes.pop(name) for name in list(changes) if name in EagleHead.__struct_fields__}
    own = {
        "layers": 1,
        "hidden": target.hidden,
        "vocabulary": 1003,
        "tokenizer_vocabulary": 64,
        "context": target.context,
    }
    model = model_of(**(own | changes))
    precision = Precision(weights=weights)
    return Head(EagleHead(**{"model": model, "precision": precision, "taps": [1, 2, 6], **fields}), target, reports)
