"""The layout of weights for a GPU: which tensors a bundle holds, in the order and shape in which the kernels read them.

Linear weights lie in blocks of 512 bytes, one 16-byte vector per lane of a warp: row tiles of 16, in each the columns
in steps of 32 (one step of e4m3, half a step of f16). Rows and columns are padded with zeros.
`ull_build.weights.pack_gpu` fills this layout, `ull.bundle.open` checks it, `ull/kernels/linear/linear.cuh` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from ull.bundle.forward import FUSED, Forward
from ull.bundle.layout import DFLASH, DRAFT, EAGLE, FILLER, MEDUSA, qkv_rows, round_up
from ull.bundle.manifest import DeviceCode, DflashHead, EagleHead, Manifest, MedusaHeads, Model, Precision
from ull.bundle.tensor_file import TensorEntry, TensorShape

# Of ull/kernels/params.h and of the kernels' grids (ull/gpu/geometry): cubins of another one do not understand what the
# core tells them.
DEVICE_INTERFACE = 16
DEVICE_TILE_ROWS = 16
DEVICE_STEP = 32  # columns
DEVICE_ALIGNMENT = 128  # bytes: a cache line of the GPU
MLP_SCALE = 0.0625  # of ull/kernels/params.h: silu(gate) * up is kept as f16 times this
HEAD_SCAN = "lm_head_scan"  # the FP8 copy of the lm_head, with a bound for each row

_LINEARS = ("ull_qkv", "ull_o", "ull_gate_up", "ull_down", "ull_head")
ROUND_KERNELS = frozenset(
    [
        *("ull_begin", "ull_embed", "ull_sample_scan", "ull_sample_draw", "ull_sample_filter"),
        *("ull_sample_plain", "ull_accept", "ull_commit", "ull_fill"),
    ]
)
_ATTENTION_KERNELS = frozenset(f"ull_attention_{tile}" for tile in (1, 8, 16, 32, 64))
_LINEAR_KERNELS = frozenset(
    [
        *(f"ull_qkv_sum_{tile}" for tile in (16, 32, 64)),
        *(f"{name}_{tile}" for name in ("ull_norm", *_LINEARS) for tile in (1, 2, 4, 8, 16, 32, 64)),
        "ull_layers_1",
    ]
)
DEVICE_KERNELS = ROUND_KERNELS | _ATTENTION_KERNELS | _LINEAR_KERNELS
CHUNK_KERNELS = frozenset(  # of prompts' chunks, on warpgroups' products
    [
        *("ull_begin_chunk", "ull_chunk_embed", "ull_chunk_norm", "ull_chunk_store", "ull_chunk_probe"),
        *("ull_chunk_attention", "ull_chunk_quantise"),
        *(f"ull_chunk_{name}" for name in ("qkv", "o", "gate_up", "down")),
    ]
)
PAGES_KERNELS = frozenset(["ull_attention_pages"])  # of trees whose products are warpgroups'
HEAD_SCAN_KERNELS = frozenset(["ull_head_scan_1", "ull_head_bounds", "ull_head_rescore"])
EAGLE_KERNELS = frozenset(
    [
        *("ull_eagle_taps", "ull_eagle_fc_8", "ull_eagle_fc_64", "ull_eagle_input", "ull_eagle_rank"),
        *(f"ull_eagle_qkv_{tile}" for tile in (8, 16, 32, 64)),
    ]
)
EAGLE_PASSES = (
    EAGLE_KERNELS
    | {  # what a head's passes are made of
        *("ull_begin", "ull_accept", "ull_commit"),
        *(f"ull_qkv_sum_{tile}" for tile in (16, 32, 64)),
        *(f"ull_norm_{tile}" for tile in (16, 32, 64)),
        *(f"{name}_{tile}" for name in ("ull_attention", *_LINEARS[1:]) for tile in (8, 16, 32, 64)),
    }
)
DFLASH_KERNELS = frozenset(
    [
        *("ull_dflash_taps", "ull_dflash_fc_8", "ull_dflash_fc_64", "ull_dflash_kv_16", "ull_dflash_kv_64"),
        *(f"ull_dflash_{name}" for name in ("store", "nodes", "gate", "markov", "rank")),
    ]
)
DFLASH_PASSES = DFLASH_KERNELS | {  # what a head's passes are made of
    *("ull_begin", "ull_embed", "ull_accept", "ull_commit", "ull_norm_64"),
    *(f"ull_qkv_sum_{tile}" for tile in (16, 32)),
    *(f"{name}_{tile}" for name in ("ull_norm", "ull_attention", *_LINEARS) for tile in (8, 16, 32)),
}
# What heads with a cache read a prompt's chunks with, as CHUNK_KERNELS.
EAGLE_CHUNK_KERNELS = frozenset(f"ull_eagle_chunk_{name}" for name in ("taps", "fc", "input", "kv"))
EAGLE_CHUNKS = EAGLE_CHUNK_KERNELS | {"ull_begin_chunk", "ull_chunk_store"}
DFLASH_CHUNK_KERNELS = frozenset(f"ull_dflash_chunk_{name}" for name in ("taps", "fc", "kv"))
DFLASH_CHUNKS = DFLASH_CHUNK_KERNELS | {"ull_begin_chunk", "ull_chunk_norm", "ull_chunk_store"}
MEDUSA_KERNELS = frozenset(f"ull_medusa_{name}" for name in ("start", "block", "head", "rank"))


@dataclass(frozen=True)
class DevicePart:
    """One of the models in a bundle for a GPU. `prefix` begins the names of its tensors."""

    prefix: str
    model: Model
    precision: Precision
    code: DeviceCode
    forward: Forward
    medusa: MedusaHeads | None
    taps: tuple[int, ...] = ()  # layers whose residual its rounds keep, for heads that draft from it

    @property
    def reads_chunks(self) -> bool:
        """Whether it reads a prompt in chunks: its own kernels do, and were compiled for a target that has what they
        need.
        """
        return self.forward.prefill_by == "fused" and set(self.code.kernels()) >= self.chunk_kernels()

    def chunk_kernels(self) -> frozenset[str]:
        """The kernels of ull that read a chunk of a prompt."""
        return CHUNK_KERNELS

    @property
    def tree_sizes(self) -> list[int]:
        """Token counts of its rounds. A draft model feeds token after token, and reads a few that it lacks."""
        return [1, 8] if self.prefix else self.forward.tree_sizes

    def needed_kernels(self) -> frozenset[str]:
        """The kernels of ull that its rounds are made of."""
        return needed_kernels(self.forward, self.medusa, self.precision.lm_head_scan)

    def macros(self) -> dict[str, str]:
        """The model as the sources of its kernels see it."""
        return device_macros(self.model, self.precision, self.medusa, len(self.taps), self.forward)

    def tensors(self) -> dict[str, TensorShape]:
        """Its tensors with their stored shapes, in order of use."""
        own = device_tensors(self.model, self.precision, self.forward.uses("fused"), self.medusa)
        return {self.prefix + name: shape for name, shape in own.items()}

    def columns(self, stem: str) -> int:
        """K of the linear layer that is named so."""
        attention = self.model.heads * self.model.head_dim
        return {"o": attention, "down": self.model.intermediate}.get(stem.rpartition(".")[2], self.model.hidden)


@dataclass(frozen=True, kw_only=True)
class EaglePart(DevicePart):
    """An EAGLE head: a model of one layer, which reads what the model `target` leaves."""

    head: EagleHead
    target: Model

    def chunk_kernels(self) -> frozenset[str]:
        return EAGLE_CHUNKS

    def needed_kernels(self) -> frozenset[str]:
        return EAGLE_PASSES

    def macros(self) -> dict[str, str]:
        return device_eagle_macros(self.head, self.target.hidden)

    def tensors(self) -> dict[str, TensorShape]:
        return {self.prefix + name: shape for name, shape in device_eagle_tensors(self.head, self.target).items()}

    def columns(self, stem: str) -> int:
        if stem == f"{self.prefix}fc":
            return len(self.head.taps) * self.target.hidden
        return 2 * self.model.hidden if stem.endswith(".qkv") else super().columns(stem)


@dataclass(frozen=True, kw_only=True)
class DflashPart(DevicePart):
    """A DFlash or DSpark head, which reads what the model `target` leaves, and its lm_head where it has none."""

    head: DflashHead
    target: Model
    target_precision: Precision

    def chunk_kernels(self) -> frozenset[str]:
        return DFLASH_CHUNKS

    def needed_kernels(self) -> frozenset[str]:
        return DFLASH_PASSES

    def macros(self) -> dict[str, str]:
        return device_dflash_macros(self.head, self.target.hidden, self.target_precision)

    def tensors(self) -> dict[str, TensorShape]:
        return {self.prefix + name: shape for name, shape in device_dflash_tensors(self.head, self.target).items()}


def dflash_part(head: DflashHead, target: Model, precision: Precision, code: DeviceCode) -> DflashPart:
    """A DFlash head of the model `target` as a part of its bundle; `code` with its kernels."""
    own = (DFLASH, head.model, head.precision, code, FUSED, None)
    return DflashPart(*own, head=head, target=target, target_precision=precision)


def eagle_part(head: EagleHead, target: Model, code: DeviceCode) -> EaglePart:
    """An EAGLE head of the model `target` as a part of its bundle; `code` with its kernels."""
    return EaglePart(EAGLE, head.model, head.precision, code, FUSED, None, (1,), head=head, target=target)


def device_parts(manifest: Manifest) -> list[DevicePart]:
    """The models of a bundle for a GPU, the one that it serves first; none of one for the CPU."""
    parts, draft = list[DevicePart](), manifest.draft
    if manifest.code is not None:
        model, precision, taps = manifest.model, manifest.precision, tuple(manifest.taps)
        parts.append(DevicePart("", model, precision, manifest.code, manifest.forward, manifest.medusa, taps))
    if draft is not None and draft.code is not None:
        parts.append(DevicePart(DRAFT, draft.model, draft.precision, draft.code, FUSED, None))
    eagle = None if manifest.speculation is None else manifest.speculation.eagle
    if eagle is not None and eagle.code is not None:
        parts.append(eagle_part(eagle, manifest.model, eagle.code))
    dflash = None if manifest.speculation is None else manifest.speculation.dflash
    if dflash is not None and dflash.code is not None:
        parts.append(dflash_part(dflash, manifest.model, manifest.precision, dflash.code))
    return parts


def needed_kernels(forward: Forward, medusa: MedusaHeads | None = None, scans: bool = False) -> frozenset[str]:
    """The kernels of ull that a bundle's rounds are made of. `scans`: with an FP8 copy of the lm_head."""
    needed = ROUND_KERNELS | optional_kernels(forward, medusa, scans)
    if forward.attention != "native":
        needed |= _ATTENTION_KERNELS
    if forward.prefill == "fast" or forward.tree_products == "warpgroup":
        needed |= CHUNK_KERNELS
    return needed | _LINEAR_KERNELS if forward.uses("fused") else needed


def optional_kernels(forward: Forward, medusa: MedusaHeads | None, scans: bool) -> frozenset[str]:
    """Those that only bundles with heads, with an FP8 copy of the lm_head, or whose warpgroups multiply trees have."""
    wanted = {
        MEDUSA_KERNELS: medusa is not None,
        HEAD_SCAN_KERNELS: scans,
        PAGES_KERNELS: forward.tree_products == "warpgroup",
    }
    return frozenset[str]().union(*(kernels for kernels, has in wanted.items() if has))


def gate_up_rows(model: Model) -> int:
    """Rows of the fused gate and up projection: tiles of 8 and 8, so that each is padded to a multiple of 8."""
    return 2 * round_up(model.intermediate, DEVICE_TILE_ROWS // 2)


def head_rows(model: Model) -> int:
    """Rows of one Medusa head's own lm_head, the next one's following: whole tiles."""
    return round_up(model.vocabulary, DEVICE_TILE_ROWS)


def device_macros(
    model: Model,
    precision: Precision,
    medusa: MedusaHeads | None = None,
    taps: int = 0,
    forward: Forward = FUSED,
) -> dict[str, str]:
    """The model as the kernels' sources see it (`ull/kernels/model.cuh`, for heads `medusa.cu`).

    `taps`: how many layers' residual is kept for heads that draft.
    """
    bits = {"fp8": 8, "bf16": 16}
    values: dict[str, object] = {
        "INTERFACE": DEVICE_INTERFACE,
        "HIDDEN": model.hidden,
        "LAYERS": model.layers,
        "HEADS": model.heads,
        "KV_HEADS": model.kv_heads,
        "HEAD_DIM": model.head_dim,
        "INTERMEDIATE": model.intermediate,
        "VOCABULARY": model.vocabulary,
        "QK_NORM": int(model.qk_norm),
        "RMS_EPSILON": f"{float(model.rms_epsilon)!r}F",
        "WEIGHT_BITS": bits[precision.weights],
        "HEAD_BITS": bits[precision.lm_head],
        "KV_BITS": bits[precision.kv],
        "TAPS": taps,
        "MAY_LACK": 0,
        "BLOCK": 0,
        "WARPGROUP_TREES": int(forward.tree_products == "warpgroup"),
        "FAST_PREFILL": int(forward.prefill == "fast"),
    }
    if medusa is not None:
        values |= {"MEDUSA_HEADS": medusa.heads, "MEDUSA_OWN_HEADS": int(medusa.version == "1")}
    return {f"ULL_{name}": str(value) for name, value in values.items()}


def device_eagle_macros(head: EagleHead, target_hidden: int) -> dict[str, str]:
    """An EAGLE head as its kernels' sources see it: a model of one layer, and what `eagle.cu` asks for besides."""
    values: dict[str, object] = {
        "TARGET_HIDDEN": target_hidden,
        "TAPS": len(head.taps),
        "TAP_NORM": ("none", "each", "all").index(head.tap_norm),
        "NORM_BEFORE_RESIDUAL": int(head.norm_before_residual),
        "NORM_OUTPUT": int(head.norm_output),
        "MAPPED": int(head.mapped),
    }
    own = device_macros(head.model, head.precision, taps=1)  # what leaves its layer is kept for the next pass
    own["ULL_MAY_LACK"] = "1"  # its cache begins where taps of it were read first
    return own | {f"ULL_EAGLE_{name}": str(value) for name, value in values.items()}


def device_head_precision(precision: Precision) -> Precision:
    """How a GPU stores a head that drafts for a model of that precision: what it says need not be exact."""
    return Precision(weights=precision.weights, lm_head=precision.weights, embedding=precision.embedding, kv="bf16")


def device_dflash_macros(head: DflashHead, target_hidden: int, target_precision: Precision) -> dict[str, str]:
    """A DFlash head as its kernels' sources see it: a model whose rounds are blocks, and what `dflash.cuh` asks for.

    Where it has no lm_head of its own, the target's is read with its kernels.
    """
    values: dict[str, object] = {
        "TARGET_HIDDEN": target_hidden,
        "TAPS": len(head.taps),
        "ANCHOR_PREDICTS": int(head.anchor_predicts),
        "MAPPED": int(head.mapped),
        "MARKOV": head.markov,
        "GATED": int(head.markov > 0 and head.markov_kind == "gated"),
        "CONFIDENCE": int(head.confidence) + int(head.confidence and head.confidence_reads_markov),
    }
    lm_head = head.precision.lm_head if head.own_lm_head else target_precision.lm_head
    own = device_macros(head.model, structs.replace(head.precision, lm_head=lm_head))
    own |= {"ULL_MAY_LACK": "1", "ULL_BLOCK": "1"}
    return own | {f"ULL_DFLASH_{name}": str(value) for name, value in values.items()}


def device_dflash_tensors(head: DflashHead, target: Model) -> dict[str, TensorShape]:
    """Every tensor of a DFlash head for a GPU, without its prefix, stored as `device_tensors` says, in order of use.

    fc, hidden_norm, names (the target's token of each of its own) and what a Markov term and a confidence head need are
    what a model has not. markov.embed is read row by row, markov.head like an lm_head of 16 bits.
    """
    model, precision = head.model, head.precision
    tensors = _linear_shapes("fc", model.hidden, len(head.taps) * target.hidden, precision.weights)
    tensors["hidden_norm"] = _vector_shape(model.hidden)
    for name, shape in device_tensors(model, precision).items():
        if not name.startswith("embed.") and (head.own_lm_head or not name.startswith("lm_head.")):
            tensors[name] = shape
    if head.mapped:
        tensors["d2t"] = TensorShape("I32", _vector_shape(model.vocabulary).shape)
    if head.own_embedding:
        tensors |= _table_shapes("embed.weight", target.vocabulary, model.hidden)
    if head.markov:
        tensors |= _table_shapes("markov.embed", target.vocabulary, head.markov)
        tensors |= _linear_shapes("markov.head", model.vocabulary, head.markov, "bf16", bias=False)
        if head.markov_kind == "gated":
            tensors |= _linear_shapes("markov.gate", head.markov, model.hidden + head.markov, precision.weights)
    if head.confidence:
        reads = head.markov if head.confidence_reads_markov else 0
        tensors["confidence.weight"] = _vector_shape(model.hidden + reads)
        tensors["confidence.bias"] = _vector_shape(1)
    return tensors


def device_eagle_tensors(head: EagleHead, target: Model) -> dict[str, TensorShape]:
    """Every tensor of an EAGLE head for a GPU, without its prefix, stored as `device_tensors` says, in order of use.

    tap_norm [taps * target hidden], fc, layers.0.hidden_norm, layers.0.qkv of twice the hidden size, and d2t (the
    target's token of each of its own) are what a model of one layer has not.
    """
    model, stored = head.model, head.precision.weights
    tensors: dict[str, TensorShape] = {}
    if head.tap_norm != "none":
        tensors["tap_norm"] = _vector_shape(len(head.taps) * target.hidden)
    tensors |= _linear_shapes("fc", model.hidden, len(head.taps) * target.hidden, stored)
    layer = device_tensors(model, head.precision)
    wide = _linear_shapes("layers.0.qkv", qkv_rows(model), 2 * model.hidden, stored)
    for name, shape in layer.items():
        if name.startswith("embed."):
            continue
        tensors[name] = wide.get(name, shape)
        if name == "layers.0.attn_norm":
            tensors["layers.0.hidden_norm"] = _vector_shape(model.hidden)
    if head.mapped:
        tensors["d2t"] = TensorShape("I32", _vector_shape(model.vocabulary).shape)
    if head.own_embedding:
        tensors |= _table_shapes("embed.weight", target.vocabulary, model.hidden)
    return tensors


def _vector_shape(length: int, optional: bool = False) -> TensorShape:
    return TensorShape("F32", (round_up(length, DEVICE_ALIGNMENT // 4),), optional)


def _linear_shapes(name: str, rows: int, columns: int, stored: str, bias: bool = True) -> dict[str, TensorShape]:
    tiles, steps = -(-rows // DEVICE_TILE_ROWS), -(-columns // DEVICE_STEP)
    fp8 = TensorShape("F8_E4M3", (tiles, steps, 32, 16))
    shapes = {f"{name}.weight": fp8 if stored == "fp8" else TensorShape("F16", (tiles, steps, 2, 32, 8))}
    shapes[f"{name}.scale"] = _vector_shape(tiles * DEVICE_TILE_ROWS)
    if bias:
        shapes[f"{name}.bias"] = _vector_shape(tiles * DEVICE_TILE_ROWS, optional=True)
    return shapes


def _table_shapes(name: str, rows: int, columns: int) -> dict[str, TensorShape]:
    """Of a matrix that is read row by row."""
    table = TensorShape("BF16", (rows, columns))
    filler = -table.nbytes % DEVICE_ALIGNMENT
    padding = {name + FILLER: TensorShape("U8", (filler,))} if filler else {}
    return {name: table, **padding}


def device_tensors(
    model: Model, precision: Precision, fused: bool = True, medusa: MedusaHeads | None = None
) -> dict[str, TensorShape]:
    """Every tensor of a bundle for a GPU with its stored shape, in order of use.

    Where no phase is `fused`, the linear layers and their norms lie in plans instead. A vector is padded to a multiple
    of DEVICE_ALIGNMENT bytes; a matrix that does not end at one is followed by a tensor of zeros, NAME + FILLER. Medusa
    heads stand one below the other: a matrix per layer, and one of all lm_heads where they have their own.
    """
    tensors: dict[str, TensorShape] = {}

    def vector(name: str, length: int, optional: bool = False) -> None:
        tensors[name] = _vector_shape(length, optional)

    def linear(name: str, rows: int, columns: int, stored: str, bias: bool = True) -> None:
        if fused:
            tensors.update(_linear_shapes(name, rows, columns, stored, bias))

    def norm(name: str) -> None:
        if fused:
            vector(name, model.hidden)

    tensors |= _table_shapes("embed.weight", model.vocabulary, model.hidden)
    for layer in range(model.layers):
        prefix = f"layers.{layer}"
        norm(f"{prefix}.attn_norm")
        linear(f"{prefix}.qkv", qkv_rows(model), model.hidden, precision.weights)
        if model.qk_norm:
            vector(f"{prefix}.q_norm", model.head_dim)
            vector(f"{prefix}.k_norm", model.head_dim)
        if precision.kv == "fp8":
            vector(f"{prefix}.kv_scale", 2 * model.kv_heads)
        linear(f"{prefix}.o", model.hidden, model.heads * model.head_dim, precision.weights)
        norm(f"{prefix}.mlp_norm")
        linear(f"{prefix}.gate_up", gate_up_rows(model), model.hidden, precision.weights)
        linear(f"{prefix}.down", model.hidden, model.intermediate, precision.weights)
    norm("norm")
    linear("lm_head", model.vocabulary, model.hidden, precision.lm_head, bias=False)
    if precision.lm_head_scan:
        linear(HEAD_SCAN, model.vocabulary, model.hidden, "fp8", bias=False)
        vector(f"{HEAD_SCAN}.bound", head_rows(model))
    if medusa is not None:
        for layer in range(medusa.layers):
            linear(f"{MEDUSA}{layer}", medusa.heads * model.hidden, model.hidden, precision.weights)
        if medusa.version == "1":
            linear(f"{MEDUSA}lm_head", medusa.heads * head_rows(model), model.hidden, precision.weights, bias=False)
    return tensors


def entries_of(tensors: dict[str, TensorShape]) -> dict[str, TensorEntry]:
    """Where the tensors would lie in a file without a header: for weights that are made up on the device."""
    entries, offset = {}, 0
    for name, shape in tensors.items():
        entries[name] = TensorEntry(offset, shape.nbytes, shape.dtype, shape.shape)
        offset += shape.nbytes
    return entries
