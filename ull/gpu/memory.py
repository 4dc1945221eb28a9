"""What an engine keeps in device memory, and how large each part is."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ull.bundle import (
    MAX_DFLASH_BLOCK,
    MedusaHeads,
    Model,
    Precision,
    attention_factor,
    inverse_frequencies,
    qkv_rows,
    round_up,
)
from ull.gpu.arena import ArenaPlan
from ull.gpu.geometry import attention, chunk, linear, sampling
from ull.gpu.params import (
    CHUNK_TOKENS,
    MASK_TOKENS,
    PAGE_TOKENS,
    TAP_SLOTS,
    TREE_TOKENS,
    Chunk,
    LayerParams,
    Round,
    State,
)

MEDUSA_STATES = ("medusa states", "next medusa states")  # regions: of the heads before and after a layer, in turn

TAP_ROWS, TAP_RING = "tapped rows", "tap ring"  # regions: of a round's nodes, and of the newest positions

# Of an EAGLE head: its entries' taps, their hidden states, and the input of its layer.
EAGLE_TAPS, EAGLE_STATES, EAGLE_INPUT = "eagle taps", "eagle states", "eagle input"
EAGLE_WIDTH = 8  # entries of a pass that are ranked

# Of a DFlash head: positions' taps and what fc makes of them; of a Markov term the nodes' factors, what a gate reads
# for these, and the logits of the nodes' children.
DFLASH_TAPS, DFLASH_STATES = "dflash taps", "dflash states"
DFLASH_FACTORS, DFLASH_GATE_INPUT, DFLASH_LOGITS = "dflash factors", "dflash gate input", "dflash logits"
DFLASH_NODES = 8  # nodes of a pass that are ranked

# Of a chunk of a prompt: what it is, its tokens' residual, and activations.
CHUNK, CHUNK_RESIDUAL, CHUNK_NORMED = "chunk", "chunk residual", "chunk normed"
CHUNK_QKV, CHUNK_ATTENTION, CHUNK_MLP = "chunk qkv", "chunk attention", "chunk mlp"
CHUNK_PARTIAL = "chunk partial sums"  # what o or down leave of few tokens
CHUNK_TAPS, CHUNK_STATES = "chunk taps", "chunk states"  # of a head, and an EAGLE head's input of its layer
CHUNK_INPUT = "chunk input"
CHUNK_QUANTISED, CHUNK_SCALES = "chunk quantised", "chunk scales"  # fast: e4m3, and what each token's are multiplied by

_COLUMN_UNIT, _ROW_UNIT = 32, 16  # of f16 activations and of f32 outputs


@dataclass(frozen=True)
class EagleShape:
    """What an EAGLE head reads: the number of layers whose taps it takes, and the target's hidden size."""

    taps: int
    target_hidden: int


@dataclass(frozen=True)
class DflashShape:
    """What a DFlash head reads, as EagleShape, and the rank of its Markov term; 0: it has none."""

    taps: int
    target_hidden: int
    markov: int
    gated: bool


class Sizes:
    """Widths and counts that launches, memory and the hand-over agree on. `context` and `pages` as the daemon asks."""

    def __init__(
        self,
        model: Model,
        precision: Precision,
        context: int,
        pages: int | None = None,
        medusa: MedusaHeads | None = None,
        taps: Sequence[int] = (),
        eagle: EagleShape | None = None,
        dflash: DflashShape | None = None,
        chunks: bool = False,
        fast_prefill: bool = False,
        warpgroup_trees: bool = False,
    ) -> None:
        self.model, self.precision, self.context, self.medusa = model, precision, context, medusa
        self.eagle, self.dflash, self.chunks, self.fast_prefill = eagle, dflash, chunks, fast_prefill
        self.warpgroup_trees = warpgroup_trees  # rounds of 16 and more: `Forward.tree_products`
        self.taps = tuple(taps)  # see `ull.bundle.tapped_layers`
        self.tap_bytes = 4 * round_up(model.hidden, _ROW_UNIT)  # a layer's row; a position has one of each in turn
        self.table_pages = -(-context // PAGE_TOKENS)  # of one request
        self.mask_bytes = round_up(model.vocabulary, MASK_TOKENS) // 8
        self.kv_bits = {"bf16": 16, "fp8": 8}[precision.kv]
        self.page_count = pages or self.table_pages  # of the pool
        self.attention_width = model.heads * model.head_dim
        self.qkv_width = qkv_rows(model)
        # Keys, or values, of 64 tokens in one layer: the tree scratch and half of a page's layer.
        self.tree_bytes = attention.tree_bytes(model.kv_heads, model.head_dim, self.kv_bits)
        self.layer_page_bytes = 2 * self.tree_bytes
        self.page_bytes = model.layers * self.layer_page_bytes
        self.attention_counters = attention.counter_count(model.heads)
        self.layers_counter = round_up(model.layers * self.attention_counters, linear.LINE_WORDS)
        self.commit_counter = self.layers_counter + linear.layers_counters(model.kv_heads)
        self.plain_counter = self.commit_counter + 1
        self.medusa_counter = self.plain_counter + 1
        self.eagle_counter = self.medusa_counter + (medusa.heads if medusa else 0)
        self.dflash_counter = self.eagle_counter + (EAGLE_WIDTH if eagle else 0)
        self.chunk_counter = self.dflash_counter + (MAX_DFLASH_BLOCK if dflash else 0)
        self.chunks_attend = chunks and eagle is None and dflash is None  # heads' chunks do not
        chunk_counters = chunk.attention_counter_count(model.heads) if self.chunks_attend else 0
        self.counter_count = self.chunk_counter + chunk_counters

    @property
    def kv_bytes(self) -> int:
        return self.page_count * self.page_bytes


def plan_memory(sizes: Sizes, weight_bytes: int) -> ArenaPlan:
    """The arena of one model: its weights, and what its rounds touch."""
    plan = ArenaPlan()
    plan.reserve("weights", weight_bytes)
    reserve_model(plan, sizes)
    return plan


def reserve_model(plan: ArenaPlan, sizes: Sizes, prefix: str = "") -> None:
    """Every region that a model's rounds touch. The names, behind `prefix`, are what `ull.gpu.rounds` asks for."""
    model = sizes.model

    def reserve(name: str, nbytes: int) -> None:
        plan.reserve(prefix + name, nbytes)

    reserve("KV pages", sizes.kv_bytes)
    reserve("rope", 4 * sizes.context * model.head_dim)
    for name in ("tree keys", "tree values"):
        reserve(name, model.layers * sizes.tree_bytes)
    reserve("round", ctypes.sizeof(Round))
    reserve("state", ctypes.sizeof(State))
    reserve("counters", 4 * sizes.counter_count)
    reserve("layer parameters", model.layers * ctypes.sizeof(LayerParams))
    reserve("text", 4 * (sizes.context + TREE_TOKENS + 1))
    reserve("text counts", 4 * round_up(model.vocabulary, _ROW_UNIT))
    reserve("mask", sizes.mask_bytes)
    reserve("page table", 4 * attention.table_pages(sizes.context))
    reserve("residual", 4 * TREE_TOKENS * round_up(model.hidden, _ROW_UNIT))
    reserve("normed", 2 * TREE_TOKENS * round_up(model.hidden, _COLUMN_UNIT))
    reserve("qkv", 4 * TREE_TOKENS * round_up(sizes.qkv_width, _ROW_UNIT))
    reserve("partial sums", linear.partial_bytes(model.hidden, sizes.qkv_width))
    reserve("attention", 2 * TREE_TOKENS * round_up(sizes.attention_width, _COLUMN_UNIT))
    reserve("mlp", 2 * TREE_TOKENS * round_up(model.intermediate, _COLUMN_UNIT))
    reserve("logits", 4 * TREE_TOKENS * round_up(model.vocabulary, _ROW_UNIT))
    parts = attention.partial_bytes(model.heads, model.head_dim, sizes.context)
    if sizes.chunks_attend:
        parts = max(parts, chunk.attention_partial_bytes(model.heads, model.head_dim, sizes.context))
    reserve("attention parts", parts)
    reserve("sampler", sampling.SCRATCH_BYTES)
    if sizes.chunks:
        reserve(CHUNK, ctypes.sizeof(Chunk))
        reserve(CHUNK_QKV, chunk.row_bytes(sizes.qkv_width))
    if sizes.chunks and (head := sizes.eagle or sizes.dflash):
        reserve(CHUNK_TAPS, chunk.activation_bytes(head.taps * head.target_hidden))
        reserve(CHUNK_STATES, chunk.row_bytes(model.hidden))
        if sizes.eagle:
            reserve(CHUNK_INPUT, chunk.activation_bytes(2 * model.hidden))
        else:
            reserve(CHUNK_NORMED, chunk.activation_bytes(model.hidden))
    elif sizes.chunks:
        reserve(CHUNK_RESIDUAL, chunk.row_bytes(model.hidden))
        if sizes.fast_prefill:
            widest = max(model.hidden, sizes.attention_width, model.intermediate)
            reserve(CHUNK_QUANTISED, chunk.fast_activation_bytes(widest))
            reserve(CHUNK_SCALES, 4 * CHUNK_TOKENS)
        else:
            reserve(CHUNK_NORMED, chunk.activation_bytes(model.hidden))
            reserve(CHUNK_PARTIAL, chunk.partial_bytes(model.hidden))
        reserve(CHUNK_ATTENTION, chunk.activation_bytes(sizes.attention_width))
        reserve(CHUNK_MLP, chunk.activation_bytes(model.intermediate))
    if sizes.taps:
        reserve(TAP_ROWS, TREE_TOKENS * len(sizes.taps) * sizes.tap_bytes)
    if sizes.taps and sizes.eagle is None:  # a head needs no position's output but the last pass's
        reserve(TAP_RING, TAP_SLOTS * len(sizes.taps) * sizes.tap_bytes)
    if sizes.eagle is not None:
        reserve(EAGLE_TAPS, 2 * TREE_TOKENS * sizes.eagle.taps * sizes.eagle.target_hidden)
        reserve(EAGLE_STATES, 4 * TREE_TOKENS * round_up(model.hidden, _ROW_UNIT))
        reserve(EAGLE_INPUT, 2 * TREE_TOKENS * 2 * round_up(model.hidden, _COLUMN_UNIT))
    if sizes.dflash is not None:
        shape = sizes.dflash
        reserve(DFLASH_TAPS, 2 * TREE_TOKENS * shape.taps * shape.target_hidden)
        reserve(DFLASH_STATES, 4 * TREE_TOKENS * round_up(model.hidden, _ROW_UNIT))
        if shape.markov:
            reserve(DFLASH_FACTORS, 2 * TREE_TOKENS * round_up(shape.markov, _COLUMN_UNIT))
            reserve(DFLASH_LOGITS, 4 * DFLASH_NODES * round_up(model.vocabulary, _ROW_UNIT))
        if shape.gated:
            reserve(DFLASH_GATE_INPUT, 2 * TREE_TOKENS * (model.hidden + round_up(shape.markov, _COLUMN_UNIT)))
    if sizes.medusa is not None:
        for name in MEDUSA_STATES:
            reserve(name, 2 * TREE_TOKENS * round_up(model.hidden, _COLUMN_UNIT))


def rope_table(model: Model, context: int) -> NDArray[np.float32]:
    """[context, head_dim / 2, 2] cosines and sines, as the CPU executor computes them.

    Angles are rounded to float32 first; cosine and sine are the C library's in double precision, not NumPy's own. Both
    carry the attention factor of the rotary embedding.
    """
    frequencies = inverse_frequencies(model.rope, model.head_dim)
    angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies).reshape(-1).tolist()
    table = np.empty((len(angles), 2), np.float32)
    table[:, 0] = np.fromiter(map(math.cos, angles), np.float64, len(angles))
    table[:, 1] = np.fromiter(map(math.sin, angles), np.float64, len(angles))
    table *= np.float32(attention_factor(model.rope))
    return table.reshape(context, len(frequencies), 2)
