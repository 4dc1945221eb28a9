"""A DFlash head on the emulated kernels, by the launches that an engine would capture, and NumPy's side of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import emulation
from eagle_rig import SEED, TARGET_TAPS, Left, Row, Wish
from emulation import aligned, pointer
from layer_rig import model_of, numbers_of, random_tensors
from linear_layers import normed, product, unpack_activations
from ull import _native
from ull.bundle import (
    FILLER,
    DflashHead,
    Model,
    Precision,
    device_dflash_macros,
    device_dflash_tensors,
    device_tensors,
)
from ull.gpu.dflash import CONTEXT_ENTRIES, DflashPasses
from ull.gpu.launch import Launch
from ull.gpu.memory import (
    DFLASH_FACTORS,
    DFLASH_GATE_INPUT,
    DFLASH_LOGITS,
    DFLASH_STATES,
    DFLASH_TAPS,
    TAP_RING,
    DflashShape,
    Sizes,
    plan_memory,
    rope_table,
)
from ull.gpu.params import (
    CHUNK_TOKENS,
    DFLASH_BLOCK,
    DFLASH_CONTEXT,
    DFLASH_NODES,
    GENERATED,
    MEDUSA_RANKS,
    MLP_SCALE,
    OK,
    PAGE_TOKENS,
    ROUND_SLOTS,
    TAP_SLOTS,
    HostControl,
    LogitBias,
    RoundRequest,
    RoundResult,
    State,
)
from ull.gpu.places import HostBlocks, Places
from ull_build.weights.pack_gpu import unpack_blocks

SOURCES = [
    f"{name}.cu"
    for name in (
        *("begin", "embed", "attention", "output", "gate_up", "down", "head", "norm", "qkv", "accept", "commit"),
        *("dflash", "dflash_nodes", "dflash_rank", "dflash_chunk", "chunk_norm", "chunk_store"),
    )
]
PASSES = {  # by mode: what a pass must write before it reads it
    DFLASH_CONTEXT: (DFLASH_TAPS, DFLASH_STATES, "normed", "partial sums", "tree keys", "tree values"),
    DFLASH_BLOCK: (
        *("residual", "normed", "qkv", "attention", "mlp", "partial sums", "logits", "sampler"),
        *("attention parts", "tree keys", "tree values"),
    ),
    DFLASH_NODES: (DFLASH_FACTORS, DFLASH_GATE_INPUT, DFLASH_LOGITS, "sampler"),
}
KEPT = ("logits", "residual")  # that a block leaves to its nodes
Array = NDArray[Any]


class Head:
    """A random head beside a ring of random taps. `run` plays a pass; what it leaves stays for the next one."""

    def __init__(
        self,
        head: DflashHead,
        target: Model,
        target_precision: Precision,
        biases: bool = False,
        reports: bool = False,
        multiprocessors: int = 3,
    ) -> None:
        self.head, self.model, self.target = head, head.model, target
        self.gated = head.markov > 0 and head.markov_kind == "gated"
        shape = DflashShape(len(head.taps), target.hidden, head.markov, self.gated)
        self.sizes = Sizes(head.model, head.precision, target.context, dflash=shape, chunks=True)
        target_sizes = Sizes(target, target_precision, target.context, taps=TARGET_TAPS)
        macros = device_dflash_macros(head, target.hidden, target_precision)
        self.kernels = emulation.build(SOURCES, numbers_of(macros), reports=reports)
        rng = np.random.default_rng(23)
        shapes = device_dflash_tensors(head, target)
        names, _ = shapes.pop("d2t", None), shapes.pop("markov.embed" + FILLER, None)
        self.own = random_tensors(shapes, rng, biases)
        lm_heads = {n: s for n, s in device_tensors(target, target_precision).items() if n.startswith("lm_head.")}
        self.targets = {} if head.own_lm_head else random_tensors(lm_heads, rng)
        self.embedding = rng.standard_normal((target.vocabulary, head.model.hidden)).astype(ml_dtypes.bfloat16)
        table = aligned(self.embedding.shape, ml_dtypes.bfloat16)
        table[...] = self.embedding
        (self.own if head.own_embedding else self.targets)["embed.weight"] = table
        if head.confidence:
            self.own["confidence.bias"] = aligned(1, np.float32, 0.25)
            self.own["confidence.weight"][...] *= 0.1
        if head.markov:
            self.own["markov.head.scale"][...] *= 4  # so that the term turns the order round
        self.names = np.arange(head.model.vocabulary, dtype=np.int32)
        if names is not None:
            self.names = rng.permutation(target.vocabulary)[: head.model.vocabulary].astype(np.int32)
            stored = aligned(names.shape, np.int32, 0)
            stored[: len(self.names)] = self.names
            self.own["d2t"] = stored
        self.memory = self._reserve(self.sizes)
        wanted = (TAP_RING, "round", "state", "text", "text counts")
        self.target_memory = {name: area for name, area in self._reserve(target_sizes).items() if name in wanted}
        self.ring = rng.standard_normal((TAP_SLOTS, len(TARGET_TAPS), target.hidden)).astype(np.float32) * 30
        self.target_memory[TAP_RING].view(np.float32)[...] = self.ring.reshape(-1)
        self.rope = rope_table(head.model, target.context)
        self.memory["rope"].view(np.float32)[...] = self.rope.reshape(-1)
        self.memory["KV pages"].view(ml_dtypes.bfloat16)[...] = 100  # finite, and far from what belongs there
        self.requested: list[NDArray[np.uint8]] = []
        self.requests = self._block(RoundRequest * ROUND_SLOTS)
        self.results = self._block(RoundResult * ROUND_SLOTS)
        self.control = self._block(HostControl)
        self.pages = aligned(self.sizes.table_pages + 1, np.int32, 0)
        self.pages[: self.sizes.table_pages] = np.random.default_rng(3).permutation(self.sizes.page_count)
        self._text, self._mask = aligned(target.context, np.int32, 0), aligned(self.sizes.mask_bytes, np.uint8, 0)
        self.chunks = aligned((ROUND_SLOTS, CHUNK_TOKENS), np.int32, 0)
        self.requested.append(self.chunks)
        State.from_buffer(self.memory["state"]).sequence = 1
        self.passes = DflashPasses(
            head, self.sizes, self._places(), target_sizes, self._target_places(), multiprocessors
        )

    @staticmethod
    def _reserve(sizes: Sizes) -> dict[str, Array]:
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
    def _tensor(tensors: dict[str, Array], name: str) -> int | None:
        return pointer(tensors[name]) if name in tensors else None

    def rows(self, name: str, width: int) -> Row:
        """[rows, width] of an f32 region."""
        stride = -(-width // 16) * 16
        return self.memory[name].view(np.float32).reshape(-1, stride)[:, :width]

    @property
    def logits(self) -> Row:
        """[64, V] of the last block."""
        return self.rows("logits", self.model.vocabulary)

    # ---- passes ----

    def read(self, position: int, count: int, entries: int | None = None, **options: Any) -> RoundResult:
        """Makes the context of positions from `position` on, by the pass for so many `entries`."""
        entries = entries or next(most for most in CONTEXT_ENTRIES if count <= most)
        return self.run(self.passes.context(entries), DFLASH_CONTEXT, [0] * count, position, **options)

    def block(
        self, root: int, count: int, position: int, ranked: int, first: int = 0, tile: int = 16, **options: Any
    ) -> RoundResult:
        """A block of `count` entries from the root on, of which so many depths are ranked."""
        tokens = [root, *[self.head.mask_token] * (count - 1)]
        launches = self.passes.block(tile)
        return self.run(launches, DFLASH_BLOCK, tokens, position, ranked=ranked, first=first, **options)

    def nodes(
        self, tokens: Sequence[int], parents: Sequence[int], position: int, ranked: int, **options: Any
    ) -> RoundResult:
        """The children of the last `ranked` nodes."""
        launches = self.passes.nodes()
        return self.run(launches, DFLASH_NODES, tokens, position, parents=parents, ranked=ranked, **options)

    def run(
        self,
        launches: Sequence[Launch],
        mode: int,
        tokens: Sequence[int],
        position: int,
        parents: Sequence[int] = (),
        ranked: int = 0,
        first: int = 0,
        wish: Wish | None = None,
        cancelled: bool = False,
        left: Left | None = None,
    ) -> RoundResult:
        """One pass. `left`: what it goes by instead of `position`, and of what it would be told of the tokens."""
        own = State.from_buffer(self.memory["state"])
        sequence = own.sequence
        self._state_wish(wish or Wish(), position)
        request = self.requests[sequence % ROUND_SLOTS]
        request.sequence, request.mode, request.count = sequence, mode, len(tokens)
        request.position, request.first, request.max_tokens = position, first, ranked
        request.setting, request.page_count = 1, self.sizes.table_pages
        if left is not None:
            left.write(self.target_memory)
            request.position = -1
        request.tokens[: len(tokens)] = list(tokens)
        request.parents[: len(parents)] = list(parents)
        self.control.cancelled_through = sequence if cancelled else 0
        names = [name for name in PASSES[mode] if name in self.memory]
        for name in names:
            self.memory[name][...] = 0xFF  # nothing that an earlier pass has left there may matter
        written = [self.memory[name] for name in ("round", "state", *dict.fromkeys((*names, *KEPT)))]
        constants = [*self.own.values(), *self.targets.values(), *self.requested, self.memory["rope"]]
        pages = [self.memory[name] for name in ("KV pages", "page table")]
        # What begin has written, kernels behind the first that waits for its end may read before they wait.
        begin, *others = launches
        emulation.run_launches(self.kernels, [begin], sequence * 100, written, constants, pages)
        earlier = [*pages, self.memory["round"]]
        written = [area for area in written if area is not self.memory["round"]]
        emulation.run_launches(self.kernels, others, sequence * 100 + 1, written, constants, earlier)
        after = State.from_buffer(self.memory["state"])
        assert (after.sequence, after.token, after.position, after.stopped) == (sequence + 1, 0, 0, 1)
        result: RoundResult = self.results[sequence % ROUND_SLOTS]
        assert result.sequence == sequence
        return RoundResult.from_buffer_copy(result)

    def _state_wish(self, wish: Wish, position: int) -> None:
        """What the target's state, its counts and its text hold: `wish.text`, of which the counts lack the end."""
        state = State.from_buffer(self.target_memory["state"])
        ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
        state.sampling.temperature, state.sampling.seed, state.sampling.top_p = wish.temperature, SEED, 0.5
        state.sampling.bias_count, state.sampling.repetition_penalty = len(wish.bias), 1.0
        state.sampling.presence_penalty = wish.presence_penalty
        state.sampling.penalises, state.counted = int(wish.presence_penalty != 0), wish.counted
        for i, (token, bias) in enumerate(wish.bias):
            state.biases[i] = LogitBias(token, bias)
        counts, text = (self.target_memory[name] for name in ("text counts", "text"))
        counts[...], text[...] = 0, 0xFF
        begin = position + 1 - len(wish.text)  # the last stands at the root
        text.view(np.int32)[begin : position + 1] = wish.text
        np.add.at(counts.view(np.uint32), list(wish.text[: max(wish.counted - begin, 0)]), GENERATED)

    # ---- what NumPy says ----

    def _matrix(self, name: str, rows: slice = slice(None)) -> tuple[Array, Row, Row | None]:
        tensors = self.own if f"{name}.weight" in self.own else self.targets
        weights, bias = unpack_blocks(tensors[f"{name}.weight"]), tensors.get(f"{name}.bias")
        scale = tensors[f"{name}.scale"][: len(weights)]
        return weights[rows], scale[rows], None if bias is None else bias[: len(weights)][rows]

    def _linear(self, name: str, x: Array, unit: float = 1.0) -> Array:
        """[T, N] in double precision, of activations in units of `unit`."""
        weights, scale, bias = self._matrix(name)
        return product(weights[:, : x.shape[1]], scale * np.float32(unit), bias, x)[0]

    def _norm(self, x: Row, name: str) -> NDArray[np.float16]:
        return normed(np.ascontiguousarray(x), self.own[name][: self.model.hidden], self.model.rms_epsilon)

    def _heads(self, rows: Array, positions: Array, norm: str | None) -> Array:
        """[T, heads, head_dim] of f64 rows: QK norm if asked for, and RoPE."""
        dim = self.model.head_dim
        heads = rows.reshape(len(rows), -1, dim)
        if norm in self.own:
            heads = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + self.model.rms_epsilon)
            heads = heads * self.own[norm][:dim]
        turn = self.rope[positions].astype(np.float64)[:, None]
        low, high, cosine, sine = heads[..., : dim // 2], heads[..., dim // 2 :], turn[..., 0], turn[..., 1]
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=2)

    def stored(self, layer: int, start: int, end: int) -> tuple[Array, Array]:
        """Keys and values [T, kv_heads, head_dim] of positions, from the pages."""
        model = self.model
        pool = self.memory["KV pages"].view(ml_dtypes.bfloat16)
        shape = (-1, model.layers, 2, model.kv_heads, PAGE_TOKENS * model.head_dim)
        pool = pool.reshape(shape)[:, layer].astype(np.float64)
        positions = np.arange(start, end)
        pages, slots = self.pages[positions // PAGE_TOKENS], positions % PAGE_TOKENS
        keys = pool[:, 0].reshape(-1, model.kv_heads, PAGE_TOKENS, model.head_dim)
        values = pool[:, 1].reshape(-1, model.kv_heads, model.head_dim, PAGE_TOKENS)
        return keys[pages, :, slots], values[pages, :, :, slots]

    def check_context(self, position: int, count: int) -> None:
        """The last context pass, from the ring to the pages."""
        width, hidden = len(self.head.taps) * self.target.hidden, self.model.hidden
        read = [TARGET_TAPS.index(layer) for layer in self.head.taps]
        taps = self.ring[(position + np.arange(count)) % TAP_SLOTS][:, read].reshape(count, width) * MLP_SCALE
        found = unpack_activations(self.memory[DFLASH_TAPS].view(np.float16).reshape(-1, 64, 32), width)[:count]
        assert np.array_equal(found, taps.astype(np.float16))
        weights, scale, bias = self._matrix("fc")
        exact, tolerance = product(weights, scale / MLP_SCALE, bias, found)
        states = self.rows(DFLASH_STATES, hidden)[:count]
        assert (np.abs(states - exact[:, :hidden]) <= tolerance[:, :hidden] / MLP_SCALE).all()
        context = unpack_activations(self.memory["normed"].view(np.float16).reshape(-1, 64, 32), hidden)[:count]
        assert np.array_equal(context, self._norm(states, "hidden_norm"))
        model = self.model
        for layer in range(model.layers):
            rows = self._linear(f"layers.{layer}.qkv", context)[:, model.heads * model.head_dim : self.sizes.qkv_width]
            keys, values = np.split(rows, 2, axis=1)
            keys = self._heads(keys, np.arange(position, position + count), f"layers.{layer}.k_norm")
            for stored, expected in zip(self.stored(layer, position, position + count), (keys, values), strict=True):
                expected = expected.reshape(stored.shape)
                assert (np.abs(stored - expected) <= np.abs(expected) * 2**-8 + 1e-4).all()

    def forward(self, tokens: Sequence[int], position: int, first: int) -> Array:
        """The residual [T, H] that leaves the layers, with what the kernels round rounded here."""
        model, count = self.model, len(tokens)
        positions = position + np.arange(count)
        x = self.embedding[list(tokens)].astype(np.float32)
        for layer in range(model.layers):
            name = f"layers.{layer}"
            rows = self._linear(f"{name}.qkv", self._norm(x, f"{name}.attn_norm"))[:, : self.sizes.qkv_width]
            width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
            queries, keys, values = np.split(rows, [width, width + kv_width], axis=1)
            queries = self._heads(queries, positions, f"{name}.q_norm") * model.head_dim**-0.5
            queries = queries.astype(np.float16).astype(np.float64)
            keys = self._heads(keys, positions, f"{name}.k_norm").astype(ml_dtypes.bfloat16).astype(np.float64)
            values = values.reshape(keys.shape).astype(ml_dtypes.bfloat16).astype(np.float64)
            old_keys, old_values = self.stored(layer, first, position)
            keys, values = np.concatenate([old_keys, keys]), np.concatenate([old_values, values])
            at = np.arange(first, position + count)
            group = model.heads // model.kv_heads
            keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
            scores = np.einsum("qhd,khd->hqk", queries, keys)
            if model.windows[layer]:
                scores[:, at[None] <= positions[:, None] - model.windows[layer]] = -np.inf
            chances = np.exp(scores - scores.max(axis=2, keepdims=True))
            chances /= chances.sum(axis=2, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", chances, values).reshape(count, width).astype(np.float16)
            x = (x + self._linear(f"{name}.o", attended)[:, : model.hidden]).astype(np.float32)
            both = self._linear(f"{name}.gate_up", self._norm(x, f"{name}.mlp_norm")).reshape(count, -1, 2, 8)
            gate, up = (both[:, :, half].reshape(count, -1)[:, : model.intermediate] for half in (0, 1))
            mlp = (gate / (1 + np.exp(-gate)) * up * MLP_SCALE).astype(np.float16)
            x = (x + self._linear(f"{name}.down", mlp, 1 / MLP_SCALE)[:, : model.hidden]).astype(np.float32)
        return x

    def check_block(self, root: int, count: int, position: int, first: int = 0) -> None:
        """The last block: the residual that has left the layers, and the logits of that."""
        tokens = [root, *[self.head.mask_token] * (count - 1)]
        found = self.rows("residual", self.model.hidden)[:count]
        expected = self.forward(tokens, position, first)
        assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).mean()
        weights, scale, bias = self._matrix("lm_head")
        exact, tolerance = product(weights, scale, bias, self._norm(found, "norm"))
        vocabulary = self.model.vocabulary
        assert (np.abs(self.logits[:count] - exact[:, :vocabulary]) <= tolerance[:, :vocabulary]).all()

    def entry(self, depth: int) -> int:
        """Which entry of a block predicts the token so far behind the root."""
        return depth - 1 if self.head.anchor_predicts else depth

    def factor(self, depth: int, token: int) -> NDArray[np.float16]:
        """What the Markov term of a token's children at `depth` is made of."""
        embedding = self.own["markov.embed"][token].astype(np.float32)
        if not self.gated:
            return embedding.astype(np.float16)
        state = self._norm(self.rows("residual", self.model.hidden)[[self.entry(depth)]], "norm")[0]
        read = np.concatenate([state, embedding.astype(np.float16)])
        gate = self._linear("markov.gate", read[None])[0, : self.head.markov]
        return np.asarray(embedding / (1 + np.exp(-gate))).astype(np.float16)

    def check_markov(self, tokens: Sequence[int], parents: Sequence[int], ranked: int) -> Row:
        """The logits of the last nodes' children, which are returned: [ranked, V]."""
        vocabulary, first = self.model.vocabulary, len(tokens) - ranked
        found = self.rows(DFLASH_LOGITS, vocabulary)[:ranked].copy()
        factors = unpack_activations(self.memory[DFLASH_FACTORS].view(np.float16).reshape(-1, 64, 32), self.head.markov)
        weights, scale, _ = self._matrix("markov.head")
        for index in range(ranked):
            depth = len(way_of(parents, first + index))
            expected = self.factor(depth, tokens[first + index])
            close = np.abs(factors[index] - expected.astype(np.float64)) <= np.abs(expected) * 2**-9 + 1e-6
            assert close.all() if self.gated else np.array_equal(factors[index], expected)
            exact, tolerance = product(weights[:, : self.head.markov], scale, None, factors[[index]])
            exact = exact[0, :vocabulary] + self.logits[self.entry(depth)]
            assert (np.abs(found[index] - exact) <= tolerance[0, :vocabulary] + np.abs(exact) * 1e-6).all()
        return found

    def check_chance(self, found: float, depth: int, token: int | None) -> None:
        """What the confidence head says of the draft at `depth` below a token; 1 where there is no such head."""
        if not self.head.confidence:
            assert found == 1.0
            return
        row = self.rows("residual", self.model.hidden)[self.entry(depth)].astype(np.float64)
        state = row / np.sqrt((row**2).mean() + self.model.rms_epsilon) * self.own["norm"][: self.model.hidden]
        if self.head.confidence_reads_markov:
            state = np.concatenate([state, self.own["markov.embed"][token].astype(np.float64)])
        inner = state @ self.own["confidence.weight"][: len(state)] + self.own["confidence.bias"][0]
        assert abs(found - 1 / (1 + np.exp(-inner))) <= 1e-4

    def check_ranks(
        self, result: RoundResult, rows: Row, depths: Sequence[int], nodes: Sequence[int], position: int, wish: Wish
    ) -> None:
        """The best candidates of the device's own logits, by the rule that accepts them and the target's names."""
        assert (result.status, result.count, result.stopped) == (OK, len(depths), 0)
        kept = min(MEDUSA_RANKS, self.model.vocabulary)
        for index, depth in enumerate(depths):
            scores = rows[index].copy()
            if wish.presence_penalty:
                scores[np.isin(self.names, wish.text)] -= np.float32(wish.presence_penalty)
            for token, bias in wish.bias:
                scores[self.names == token] += np.float32(bias)
            if wish.temperature > 0:
                noise = _native.gumbel(SEED, position + depth, self.names)
                scores = scores * (np.float32(1) / np.float32(wish.temperature)) + noise
            best = np.lexsort((self.names, -scores.astype(np.float64)))[:kept]
            drawn = result.tokens[index]
            assert (drawn.node, drawn.top_count) == (nodes[index], kept)
            assert [drawn.top[rank].token for rank in range(kept)] == self.names[best].tolist()
            assert [drawn.top[rank].logprob for rank in range(kept)] == scores[best].tolist()


def way_of(parents: Sequence[int], node: int) -> list[int]:
    """From the root to a node."""
    way = [node]
    while way[0] > 0:
        way.insert(0, parents[way[0]])
    return way


def head_of(target: Model, weights: Any = "fp8", biases: bool = False, reports: bool = False, **changes: Any) -> Head:
    """A small head of the target, but for `changes`: fields of DflashHead, or of its Model."""
    fields = {name: changes.pop(name) for name in list(changes) if name in DflashHead.__struct_fields__}
    own = {
        "layers": 2,
        "hidden": target.hidden,
        "vocabulary": target.vocabulary,
        "tokenizer_vocabulary": 64,
        "context": target.context,
    }
    fields = {"taps": [1, 2, 6], "block": 8, "mask_token": 3} | fields
    head = DflashHead(model=model_of(**(own | changes)), precision=Precision(weights=weights), **fields)
    return Head(head, target, Precision(), biases, reports)
