"""A KV cache and the rounds that run over it on the emulated attention kernels, with their float64 reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import emulation
from emulation import SANITIZE, aligned, pointer
from linear_layers import activation_buffer, unpack_activations
from ull.gpu.geometry import attention
from ull.gpu.geometry.linear import is_split
from ull.gpu.launch import tile_of
from ull.gpu.params import PAGE_TOKENS, ROUND_SLOTS, TREE_TOKENS, AttentionParams, CommitParams, Round, RoundResult

Array = NDArray[Any]
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """A model's attention; the kernels are compiled for it."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    qk_norm: bool = False
    kv_bits: int = 16
    layers: int = 2
    together: bool = False  # from 16 tokens on warpgroups multiply: outputs lie as they take them, and a long cache has
    # a kernel of its own
    reports: bool = False  # see emulation.build
    sources: tuple[str | Path, ...] = ("attention.cu", "commit.cu")

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def stored(self) -> Any:
        return ml_dtypes.bfloat16 if self.kv_bits == 16 else ml_dtypes.float8_e4m3fn

    def kernels(self) -> emulation.Kernels:
        model = {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "LAYERS": self.layers,
            "QK_NORM": int(self.qk_norm),
            "KV_BITS": self.kv_bits,
            "WARPGROUP_TREES": int(self.together),
            "RMS_EPSILON": EPSILON,
        }
        sources = (*self.sources, "attention_pages.cu") if self.together else self.sources
        return emulation.build(sources, model, reports=self.reports)


# What the tests of every kernel of attention go through.
SHAPES = {
    "tiny": Shape(),
    "tiny-e4m3": Shape(kv_bits=8),
    "one query head per kv head": Shape(heads=2),
    "seven query heads, norms": Shape(heads=7, kv_heads=1, head_dim=64, qk_norm=True),
    "64, e4m3": Shape(head_dim=64, kv_bits=8),
    "96, e4m3": Shape(head_dim=96, kv_bits=8),
    "128": Shape(heads=4, kv_heads=1, head_dim=128),
    "128, e4m3, norms": Shape(heads=8, kv_heads=1, head_dim=128, qk_norm=True, kv_bits=8),
}
if SANITIZE:  # compiling a model's kernels with sanitizers takes long: one shape of each format
    SHAPES = {name: SHAPES[name] for name in ("tiny", "128, e4m3, norms")}


@dataclass
class Tree:
    """Nodes by their parents; parents[0] is ignored."""

    parents: Sequence[int]
    depths: list[int] = field(init=False)
    paths: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.depths, self.paths = [0] * min(len(self.parents), 1), [[0]] * min(len(self.parents), 1)
        for node, parent in enumerate(self.parents[1:], 1):
            self.depths.append(self.depths[parent] + 1)
            self.paths.append([*self.paths[parent], node])

    @classmethod
    def chain(cls, count: int) -> Tree:
        return cls([0, *range(count - 1)])


class Cache:
    """Pages (NaN where nothing was written) of every layer; layer `layer` is the one that is looked at."""

    def __init__(
        self,
        shape: Shape,
        context: int = 512,
        window: int = 0,
        blocks: int = 8,
        page_blocks: int | None = None,
        seed: int = 0,
        layer: int = 1,
        table: Sequence[int] | None = None,
    ) -> None:
        self.shape, self.context, self.window, self.seed, self.layer = shape, context, window, seed, layer
        self.blocks, self.page_blocks = blocks, page_blocks  # of a kv head
        self.kernels = shape.kernels()
        pages = context // PAGE_TOKENS
        self.table = aligned(attention.table_pages(context), np.int32, 0)
        self.table[:pages] = range(pages) if table is None else table
        head = shape.head_dim * PAGE_TOKENS
        self.pool = aligned((int(self.table.max()) + 1, shape.layers, 2, shape.kv_heads, head), shape.stored)
        tree = (shape.layers, shape.kv_heads, TREE_TOKENS, shape.head_dim)
        self.tree = [aligned(tree, shape.stored) for _ in range(2)]
        self.partial = aligned(attention.partial_bytes(shape.heads, shape.head_dim, context) // 4, np.float32)
        self.counters = aligned(attention.counter_count(shape.heads), np.uint32, 0)
        self.commit_counter = aligned(1, np.uint32, 0)
        self.rope = aligned((context, shape.head_dim // 2, 2), np.float32)
        angles = np.arange(context)[:, None] * 10000.0 ** (-np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        self.rope[..., 0], self.rope[..., 1] = np.cos(angles), np.sin(angles)
        rng = np.random.default_rng(5)
        self.norms = [aligned(shape.head_dim, np.float32, rng.uniform(0.5, 1.5, shape.head_dim)) for _ in range(2)]
        self.scale = aligned((2, shape.kv_heads), np.float32, 2.0 ** rng.integers(-7, -4, (2, shape.kv_heads)))
        self.kernel_of_one = "ull_attention_1"
        self.begin_overlaps = False  # with embed, and so with what reads early: see ull.gpu.rounds
        self.results = aligned(ROUND_SLOTS * ctypes.sizeof(RoundResult), np.uint8, 0)
        self.sequence = 0

    @property
    def constants(self) -> list[Array]:
        return [self.rope, *self.norms, self.scale]

    def copy(self, **changes: Any) -> Cache:
        """The same cache in memory of its own, where `changes` (blocks, seed, table of pages) may differ."""
        names = ("context", "window", "blocks", "page_blocks", "seed", "layer")
        options = {name: getattr(self, name) for name in names}
        other = Cache(self.shape, **{**options, "table": self.table[: self.context // PAGE_TOKENS], **changes})
        for page in range(self.context // PAGE_TOKENS):
            other.pool[other.table[page]] = self.pool[self.table[page]]
        return other

    def round(
        self, rows: Array, base: int, tree: Tree | None = None, accept: Sequence[int] | None = None, tile: int = 0
    ) -> Array:
        """Attention of the nodes, whose rows of qkv are `rows`; then the commit of the nodes `accept` (all).

        `tile` 1 is the kernel for one token, behind which nothing is committed.
        """
        count = len(rows)
        tree = Tree.chain(count) if tree is None else tree
        self.sequence += 1
        state = self._state(count, base, tree, list(range(count)) if accept is None else accept)
        qkv = aligned((TREE_TOKENS, self.shape.width), np.float32)
        qkv[:count] = rows
        width, tile = self.shape.heads * self.shape.head_dim, tile or tile_of(max(count, 1))
        output = activation_buffer(width, tile if self.shape.together and is_split(tile) else 0)
        self._attend(state, qkv, output, tile)
        if tile != 1:
            self._commit(state)
        outputs: Array = unpack_activations(output, width)
        assert np.isnan(outputs[count:]).all()
        return outputs[:count]

    def _state(self, count: int, base: int, tree: Tree, accept: Sequence[int]) -> Array:
        memory = aligned(ctypes.sizeof(Round), np.uint8)
        state = Round.from_buffer(memory)
        state.sequence, state.count, state.base = self.sequence, count, base
        for node, (depth, path) in enumerate(zip(tree.depths, tree.paths, strict=True)):
            state.depths[node] = depth
            for index, ancestor in enumerate(path):
                state.path[node][index] = ancestor
        state.accepted_count = len(accept)
        for index, node in enumerate(accept):
            state.accepted[index] = node
        return memory

    def _attend(self, state: Array, qkv: Array, output: Array, tile: int) -> None:
        shape = self.shape
        params = AttentionParams(
            round=pointer(state),
            qkv=pointer(qkv),
            q_norm=pointer(self.norms[0]) if shape.qk_norm else None,
            k_norm=pointer(self.norms[1]) if shape.qk_norm else None,
            rope=pointer(self.rope),
            pages=pointer(self.table),
            page_pool=pointer(self.pool),
            tree_keys=pointer(self.tree[0][self.layer]),
            tree_values=pointer(self.tree[1][self.layer]),
            kv_scale=pointer(self.scale) if shape.kv_bits == 8 else None,
            partial=pointer(self.partial),
            counters=pointer(self.counters),
            output=pointer(output),
            page_bytes=self.pool[0].nbytes,
            layer_offset=self.layer * self.pool[0, 0].nbytes,
            window=self.window,
            splits=attention.splits(self.context),
        )
        sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.kv_bits, self.context, tile)
        if shape.together and is_split(tile):
            self._attend_pages(params, attention.of_pages(*sizes, self.blocks * shape.kv_heads), qkv, state)
        blocks = self.blocks * shape.kv_heads + shape.kv_heads - 1  # as many as can be left over
        grid, threads, shared = attention.attention(*sizes, blocks, warpgroups=shape.together)
        reads_early = not self.begin_overlaps
        self.kernels.run(
            self.kernel_of_one if tile == 1 else f"ull_attention_{tile}",
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=self.seed,
            predecessor_writes=[qkv] if reads_early else [qkv, state],
            constants=self.constants,
            earlier=[self.pool, *([state, self.table] if reads_early else ())],
        )
        assert not self.counters.any()

    def _attend_pages(
        self, params: AttentionParams, geometry: attention.Geometry | None, qkv: Array, state: Array
    ) -> None:
        """The kernel for a long cache, if there is one."""
        if geometry is None:
            return
        (blocks, kv_heads), threads, shared = geometry
        parts = -(-len(qkv) * self.shape.group // attention.PAGE_ROWS)
        params.page_blocks = blocks if self.page_blocks is None else max(self.page_blocks, parts)
        grid = (params.page_blocks, kv_heads)
        self.kernels.run(
            "ull_attention_pages",
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=self.seed,
            predecessor_writes=[qkv],
            constants=self.constants,
            earlier=[self.pool, self.table, state],
        )

    def _commit(self, state: Array) -> None:
        shape = self.shape
        params = CommitParams(
            round=pointer(state),
            pages=pointer(self.table),
            page_pool=pointer(self.pool),
            tree_keys=pointer(self.tree[0]),
            tree_values=pointer(self.tree[1]),
            results=pointer(self.results),
            counters=pointer(self.commit_counter),
            page_bytes=self.pool[0].nbytes,
        )
        grid, threads, shared = attention.commit(shape.kv_heads, shape.layers)
        self.kernels.run(
            "ull_commit",
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=self.seed,
            predecessor_writes=[state, self.tree[0], self.tree[1]],
        )
        assert not self.commit_counter.any()

    def fill(self, rows: Array) -> None:
        """Puts a chain's tokens into the pages of layer `layer` as the reference rounds them."""
        if len(rows) == 0:
            return
        _, keys, values = self.heads_of(rows, range(len(rows)))
        if self.shape.kv_bits == 8:
            keys, values = keys / self.scale[0][None, :, None], values / self.scale[1][None, :, None]
        for start in range(0, len(rows), PAGE_TOKENS):
            page = self.pool[self.table[start // PAGE_TOKENS], self.layer]
            part = slice(start, start + PAGE_TOKENS)
            count = len(rows[part])
            for which, (heads, order) in enumerate(((keys[part], (1, 0, 2)), (values[part], (1, 2, 0)))):
                stored = page[which].reshape(self.shape.kv_heads, *self._page_shape(which))
                block = heads.transpose(order).astype(np.float32).astype(self.shape.stored)
                if which == 0:
                    stored[:, :count] = block
                else:
                    stored[:, :, :count] = block

    def _page_shape(self, which: int) -> tuple[int, int]:
        shape = (PAGE_TOKENS, self.shape.head_dim)
        return shape if which == 0 else shape[::-1]

    def stored_tokens(self, pool: Array) -> tuple[Array, Array]:
        """Bytes of keys and values: [page * 64 + slot][layer][kv_head][head_dim in bytes]."""
        shape = self.shape
        pages = pool.view(np.uint8).reshape(
            -1, shape.layers, 2, shape.kv_heads, PAGE_TOKENS * shape.head_dim, shape.kv_bits // 8
        )
        keys = pages[:, :, 0].reshape(-1, shape.layers, shape.kv_heads, PAGE_TOKENS, shape.head_dim, shape.kv_bits // 8)
        values = pages[:, :, 1].reshape(
            -1, shape.layers, shape.kv_heads, shape.head_dim, PAGE_TOKENS, shape.kv_bits // 8
        )
        flat = (-1, shape.layers, shape.kv_heads, shape.head_dim * shape.kv_bits // 8)
        return keys.transpose(0, 3, 1, 2, 4, 5).reshape(flat), values.transpose(0, 4, 1, 2, 3, 5).reshape(flat)

    def snapshot(self) -> bytes:
        return self.pool.tobytes() + self.counters.tobytes() + self.commit_counter.tobytes()

    def end_ns(self) -> int:
        """The end of the last round, as its result block reports it."""
        size = ctypes.sizeof(RoundResult)
        slot = self.sequence % ROUND_SLOTS
        return RoundResult.from_buffer(self.results[slot * size : (slot + 1) * size]).end_ns

    # ---- reference --------------------------------------------------------------------------------------------------

    def heads_of(self, rows: Array, positions: Sequence[int]) -> tuple[Array, Array, Array]:
        """Queries [n, heads, dim], keys and values [n, kv_heads, dim] of rows, in float64, stored ones rounded."""
        shape = self.shape
        heads = rows.astype(np.float64).reshape(len(rows), -1, shape.head_dim)
        queries, keys, values = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        if shape.qk_norm:
            queries, keys = self._norm(queries, self.norms[0]), self._norm(keys, self.norms[1])
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        return queries, self._rounded(keys, 0), self._rounded(values, 1)

    def _norm(self, heads: Array, weight: Array) -> Array:
        return heads / np.sqrt((heads**2).mean(-1, keepdims=True) + EPSILON) * weight

    def _rotate(self, heads: Array, positions: Sequence[int]) -> Array:
        table = self.rope[np.asarray(positions)][:, None].astype(np.float64)
        low, high = np.split(heads, 2, axis=-1)
        cosine, sine = table[..., 0], table[..., 1]
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

    def _rounded(self, heads: Array, which: int) -> Array:
        if self.shape.kv_bits == 16:
            return heads.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        scale = self.scale[which].astype(np.float64)[None, :, None]
        return np.clip(heads / scale, -448, 448).astype(np.float32).astype(self.shape.stored).astype(np.float64) * scale

    def reference(self, rows: Array) -> Array:
        """Output of the last of a chain's rows, which start at position 0."""
        queries, keys, values = self.heads_of(rows, range(len(rows)))
        position = len(rows) - 1
        first = max(0, position - self.window + 1) if self.window else 0
        outputs = []
        for head in range(self.shape.heads):
            kv_head = head // self.shape.group
            scores = keys[first:, kv_head] @ queries[position, head] / np.sqrt(self.shape.head_dim)
            weights = np.exp(scores - scores.max())
            outputs.append(weights @ values[first:, kv_head] / weights.sum())
        return np.concatenate(outputs)


def text(shape: Shape, count: int, seed: int = 1) -> Array:
    """Rows of qkv."""
    rows = np.random.default_rng(seed).normal(size=(count, shape.width)) * 1.5
    return rows.astype(np.float32)


def filled(cache: Cache, rows: Array) -> Cache:
    """The cache with these tokens in its pages, by chunks of up to 64."""
    for start in range(0, len(rows), TREE_TOKENS):
        cache.round(rows[start : start + TREE_TOKENS], start)
    return cache
