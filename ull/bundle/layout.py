"""The layout of weights for the CPU: which tensors a bundle holds, in order of use, and their stored shapes.

The executor reads linear weights in row tiles of 32: `[tiles, K, 32]`, so that one vector load takes the same column of
32 output rows. `ull_build.weights.pack_cpu` fills this layout, `ull.bundle.open` checks it.
"""

from __future__ import annotations

import msgspec

from ull.bundle.manifest import DflashHead, EagleHead, MedusaHeads, Model, Precision, Speculation, embedding_is_shared
from ull.bundle.tensor_file import ITEM_BYTES, TensorShape

TILE_ROWS = 32
ALIGNMENT = 64  # bytes: one cache line, and one AVX-512 register
DRAFT = "draft."  # prefix of the draft model's tensors
MEDUSA = "medusa."  # prefix of the Medusa heads' tensors
EAGLE = "eagle."  # prefix of an EAGLE head's tensors
DFLASH = "dflash."  # prefix of a DFlash head's tensors
FILLER = ".filler"  # suffix of tensors of zeros that only align the next one
STORED_AS = {"fp8": "F8_E4M3", "bf16": "BF16", "f32": "F32"}  # precision -> safetensors dtype


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` >= `value`."""
    return -(-value // unit) * unit


def qkv_rows(model: Model) -> int:
    """Rows of the fused query, key and value projection."""
    return (model.heads + 2 * model.kv_heads) * model.head_dim


def tile_count(rows: int) -> int:
    """Row tiles that hold `rows` rows."""
    return -(-rows // TILE_ROWS)


def padded_length(length: int, item_bytes: int) -> int:
    """The least length >= `length` of a vector whose bytes are a multiple of ALIGNMENT."""
    return round_up(length, ALIGNMENT // item_bytes)


class _Plan:
    """Collects the tensors of one model in file order.

    A matrix of odd dimensions may end between two multiples of ALIGNMENT; since safetensors allows no holes, a filler
    tensor NAME + FILLER follows it.
    """

    def __init__(self, precision: Precision) -> None:
        self.small = "F32" if precision.weights == "f32" else "BF16"
        self.kv = precision.kv
        self.tensors: dict[str, TensorShape] = {}

    def vector(self, name: str, length: int) -> None:
        self.tensors[name] = TensorShape(self.small, (padded_length(length, ITEM_BYTES[self.small]),))

    def matrix(self, name: str, stored: str, shape: tuple[int, ...]) -> None:
        self.tensors[name] = TensorShape(STORED_AS[stored], shape)
        if filler := -self.tensors[name].nbytes % ALIGNMENT:
            self.tensors[name + FILLER] = TensorShape("U8", (filler,))

    def linear(self, name: str, tiles: int, columns: int, stored: str, bias: bool = True) -> None:
        self.matrix(f"{name}.weight", stored, (tiles, columns, TILE_ROWS))
        if stored == "fp8":
            self.tensors[f"{name}.scale"] = TensorShape("F32", (tiles * TILE_ROWS,))
        if bias:
            self.tensors[f"{name}.bias"] = TensorShape(self.small, (tiles * TILE_ROWS,), optional=True)

    def number(self, name: str, dtype: str, length: int) -> None:
        """A vector that is stored as `dtype` whatever the precision."""
        self.tensors[name] = TensorShape(dtype, (padded_length(length, ITEM_BYTES[dtype]),))

    def layer(self, model: Model, index: int, stored: str, eagle: bool = False) -> None:
        """A transformer layer; an EAGLE head's reads an embedding and a hidden state, each with a norm of its own."""
        prefix, attention = f"layers.{index}", model.heads * model.head_dim
        self.vector(f"{prefix}.attn_norm", model.hidden)
        if eagle:
            self.vector(f"{prefix}.hidden_norm", model.hidden)
        self.linear(f"{prefix}.qkv", tile_count(qkv_rows(model)), model.hidden * (2 if eagle else 1), stored)
        if model.qk_norm:
            self.vector(f"{prefix}.q_norm", model.head_dim)
            self.vector(f"{prefix}.k_norm", model.head_dim)
        if self.kv == "fp8":
            self.number(f"{prefix}.kv_scale", "F32", 2 * model.kv_heads)
        self.linear(f"{prefix}.o", tile_count(model.hidden), attention, stored)
        self.vector(f"{prefix}.mlp_norm", model.hidden)
        self.linear(f"{prefix}.gate_up", 2 * tile_count(model.intermediate), model.hidden, stored)
        self.linear(f"{prefix}.down", tile_count(model.hidden), model.intermediate, stored)


def host_head_precision(precision: Precision) -> Precision:
    """How the CPU executor stores a head that drafts for a model of that precision: its keys and values are not FP8."""
    return msgspec.structs.replace(precision, kv="bf16") if precision.kv == "fp8" else precision


def expected_tensors(
    model: Model, precision: Precision, speculation: Speculation | None = None
) -> dict[str, TensorShape]:
    """Every tensor of a bundle with its stored shape: the model's in order of use, then what drafts for it."""
    tensors = _model_tensors(model, precision)
    if speculation and speculation.medusa:
        tensors |= medusa_tensors(model, precision, speculation.medusa)
    if speculation and speculation.draft:
        draft = _model_tensors(speculation.draft.model, speculation.draft.precision)
        tensors |= {DRAFT + name: shape for name, shape in draft.items()}
    if speculation and speculation.eagle:
        tensors |= {EAGLE + name: shape for name, shape in eagle_tensors(model, speculation.eagle).items()}
    if speculation and speculation.dflash:
        tensors |= {DFLASH + name: shape for name, shape in dflash_tensors(model, speculation.dflash).items()}
    return tensors


def medusa_tensors(model: Model, precision: Precision, medusa: MedusaHeads) -> dict[str, TensorShape]:
    """The tensors of the heads; lm_heads of their own are stored like the other linears, not like the model's."""
    plan = _Plan(precision)
    for head in range(medusa.heads):
        for layer in range(medusa.layers):
            plan.linear(f"{MEDUSA}{head}.{layer}", tile_count(model.hidden), model.hidden, precision.weights)
        if medusa.version == "1":
            name = f"{MEDUSA}{head}.lm_head"
            plan.linear(name, tile_count(model.vocabulary), model.hidden, precision.weights, bias=False)
    return plan.tensors


def eagle_tensors(model: Model, head: EagleHead) -> dict[str, TensorShape]:
    """The tensors of an EAGLE head of the target `model`, by their names without EAGLE."""
    plan, own = _Plan(head.precision), head.model
    if head.tap_norm == "each":
        for tap in range(len(head.taps)):
            plan.vector(f"tap_norm.{tap}", model.hidden)
    elif head.tap_norm == "all":
        plan.vector("tap_norm", len(head.taps) * model.hidden)
    _shared_tensors(plan, model, head, own_lm_head=True)
    plan.layer(own, 0, head.precision.weights, eagle=True)
    return plan.tensors


def dflash_tensors(model: Model, head: DflashHead) -> dict[str, TensorShape]:
    """The tensors of a DFlash or DSpark head of the target `model`, by their names without DFLASH.

    The Markov term's two tables, [vocabulary, rank], are read row by row.
    """
    plan, own = _Plan(head.precision), head.model
    _shared_tensors(plan, model, head, head.own_lm_head)
    plan.vector("hidden_norm", own.hidden)
    for layer in range(own.layers):
        plan.layer(own, layer, head.precision.weights)
    if head.markov:
        plan.matrix("markov.embed", "bf16", (model.vocabulary, head.markov))
        plan.matrix("markov.head", "bf16", (own.vocabulary, head.markov))
        if head.markov_kind == "gated":
            plan.linear("markov.gate", tile_count(head.markov), own.hidden + head.markov, head.precision.weights)
    if head.confidence:
        inputs = own.hidden + (head.markov if head.confidence_reads_markov else 0)
        plan.number("confidence.weight", "F32", inputs)
        plan.number("confidence.bias", "F32", 1)
    return plan.tensors


def _shared_tensors(plan: _Plan, model: Model, head: EagleHead | DflashHead, own_lm_head: bool) -> None:
    """What both kinds of head have: the taps' projection, the final norm, and embedding and lm_head of their own."""
    own, precision = head.model, head.precision
    plan.linear("fc", tile_count(own.hidden), len(head.taps) * model.hidden, precision.weights)
    if head.own_embedding:
        plan.matrix("embed.weight", precision.embedding, (model.vocabulary, own.hidden))
    plan.vector("norm", own.hidden)
    if own_lm_head:
        plan.linear("lm_head", tile_count(own.vocabulary), own.hidden, precision.lm_head, bias=False)
    if head.mapped:
        plan.number("d2t", "I32", own.vocabulary)


def _model_tensors(model: Model, precision: Precision) -> dict[str, TensorShape]:
    plan = _Plan(precision)
    if not embedding_is_shared(model, precision):
        plan.matrix("embed.weight", precision.embedding, (model.vocabulary, model.hidden))
    for layer in range(model.layers):
        plan.layer(model, layer, precision.weights)
    plan.vector("norm", model.hidden)
    plan.linear("lm_head", tile_count(model.vocabulary), model.hidden, precision.lm_head, bias=False)
    return plan.tensors
