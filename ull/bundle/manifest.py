"""The manifest of an engine bundle: every field of `manifest.json` with its type, range and meaning.

The structs validate themselves while they are decoded, single fields by `Meta` and mutual consistency in
`__post_init__`, so a `Manifest` that exists is one that the rest of ull may trust. `ull.bundle.open` opens bundles.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct

from ull.bundle.forward import FUSED, AttentionKind, Forward, PrefillSource, Source, TreeProducts, segment_names
from ull.bundle.seal import MANIFEST_FILE, SEAL_FILE
from ull.bundle.targets import GPU_ARCHITECTURES, Target
from ull.wire import MAX_TREE, Drafter

FORMAT: Final = "ull-engine"
FORMAT_VERSION: Final = 3
WEIGHTS_FILE = "weights.safetensors"
VOCABULARY_FILE = "vocab.bin"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
CODE_DIRECTORY = "code"
DRAFT_CODE_DIRECTORY = f"{CODE_DIRECTORY}/draft"
EAGLE_CODE_DIRECTORY = f"{CODE_DIRECTORY}/eagle"
DFLASH_CODE_DIRECTORY = f"{CODE_DIRECTORY}/dflash"
MAX_MEDUSA_HEADS: Final = 12
MAX_DEVICE_HEADS: Final = 8  # on a GPU: the columns of one matrix instruction
MAX_MEDUSA_LAYERS: Final = 16
MAX_TAPS: Final = 8  # layers of a target whose hidden states a head reads
MAX_DFLASH_BLOCK: Final = 32  # positions of one pass
REQUIRED_FILES = (VOCABULARY_FILE, TOKENIZER_FILE)  # and WEIGHTS_FILE, unless the weights are random
_WITH_WARPGROUPS: Final = " or ".join(name for name, gpu in GPU_ARCHITECTURES.items() if gpu.has_warpgroup_products)
_LAYER_LINEARS: Final = ("qkv", "o", "gate_up", "down")

# Upper bounds far above any real model; they keep every product of dimensions inside 64-bit integers.
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
LayerCount = Annotated[int, Meta(ge=1, le=1 << 12)]
TokenCount = Annotated[int, Meta(ge=1, le=1 << 28)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 28) - 1)]
Positive = Annotated[float, Meta(gt=0.0)]
RecipeValue = str | int | float | bool | None | dict[str, str | int | float | bool | list[int] | None]
StoredDrafter = Literal["medusa", "draft", "eagle", "dflash"]  # what drafts with weights of its own
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
KernelName = Annotated[str, Meta(pattern="^ull_[a-z0-9_]+$", max_length=64)]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_finite(struct: Struct) -> None:
    """JSON has no infinities, but 1e999 decodes to one."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        _require(not isinstance(value, float) or math.isfinite(value), f"`{name}` must be finite")


class Rope(Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary position embedding: base period and context extension, named as in transformers' rope types."""

    theta: Positive
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: Positive | None = None
    low_frequency_factor: Positive | None = None  # llama3
    high_frequency_factor: Positive | None = None  # llama3
    original_context: TokenCount | None = None  # llama3, yarn: tokens
    attention_factor: Positive | None = None  # yarn: on cosines and sines
    beta_fast: Positive | None = None  # yarn: turns within the original context above which a pair is kept
    beta_slow: Positive | None = None  # yarn: turns below which it is stretched
    truncate: bool = True  # yarn: the pairs of both are rounded outwards

    def __post_init__(self) -> None:
        _require_finite(self)
        llama3 = (self.low_frequency_factor, self.high_frequency_factor)
        yarn = (self.attention_factor, self.beta_fast, self.beta_slow)
        _require((self.kind == "default") == (self.factor is None), f"rope kind {self.kind!r} and `factor` disagree")
        if self.kind == "llama3":
            _require(None not in llama3, "rope kind 'llama3' needs its frequency factors")
            _require(
                (self.low_frequency_factor or 0.0) < (self.high_frequency_factor or 0.0),
                "`low_frequency_factor` must be below `high_frequency_factor`",
            )
        else:
            _require(llama3 == (None, None), f"rope kind {self.kind!r} takes no llama3 fields")
        if self.kind == "yarn":
            _require(None not in yarn, "rope kind 'yarn' needs `attention_factor`, `beta_fast` and `beta_slow`")
            _require(self.theta > 1.0, "rope kind 'yarn' needs a `theta` above 1")
        else:
            _require(yarn == (None, None, None) and self.truncate, f"rope kind {self.kind!r} takes no yarn fields")
        extends = self.kind in ("llama3", "yarn")
        _require(
            extends == (self.original_context is not None), f"rope kind {self.kind!r} and `original_context` disagree"
        )


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """Architecture and dimensions. `windows[i]` is the sliding window of layer i in tokens, 0 = full attention."""

    architecture: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden: Size
    layers: LayerCount
    heads: Size
    kv_heads: Size
    head_dim: Size
    intermediate: Size
    vocabulary: TokenCount  # rows of the embedding
    tokenizer_vocabulary: TokenCount  # highest token id + 1
    context: TokenCount  # tokens a session may hold
    rms_epsilon: Positive
    tied_embeddings: bool
    qk_norm: bool
    rope: Rope
    windows: list[Annotated[int, Meta(ge=0, le=1 << 28)]]

    def __post_init__(self) -> None:
        _require_finite(self)
        _require(self.rms_epsilon < 1.0, "`rms_epsilon` must be below 1")
        _require(self.heads % self.kv_heads == 0, f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        _require(self.head_dim % 2 == 0, "`head_dim` must be even")
        _require(len(self.windows) == self.layers, f"{len(self.windows)} `windows` for {self.layers} layers")
        _require(
            self.tokenizer_vocabulary <= self.vocabulary,
            f"tokenizer_vocabulary {self.tokenizer_vocabulary} is larger than the embedding's {self.vocabulary} rows",
        )


class Precision(Struct, frozen=True, forbid_unknown_fields=True):
    """Storage formats. "f32" serves tests and the build's own evaluation of the original weights.

    `lm_head_scan`: beside the lm_head there is an FP8 copy, which a GPU reads instead where that gives the same token.
    """

    weights: Literal["fp8", "bf16", "f32"] = "fp8"
    lm_head: Literal["fp8", "bf16", "f32"] = "bf16"
    embedding: Literal["bf16", "f32"] = "bf16"
    kv: Literal["bf16", "fp8", "f32"] = "bf16"
    lm_head_scan: bool = False


class MedusaHeads(Struct, frozen=True, forbid_unknown_fields=True):
    """Medusa heads: `layers` residual blocks each; version "1" has an lm_head per head, "2" shares the model's."""

    heads: Annotated[int, Meta(ge=1, le=MAX_MEDUSA_HEADS)]
    layers: Annotated[int, Meta(ge=1, le=MAX_MEDUSA_LAYERS)]
    version: Literal["1", "2"]


class DraftModel(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A smaller model of the same tokenizer that drafts; its tensors bear the prefix "draft."."""

    model: Model
    precision: Precision
    code: DeviceCode | None = None  # of a GPU target

    def __post_init__(self) -> None:
        _check_tied_precision(self.model, self.precision)


Taps = Annotated[list[Annotated[int, Meta(ge=0, le=1 << 12)]], Meta(min_length=1, max_length=MAX_TAPS)]


class EagleHead(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An EAGLE-3 head: one layer that drafts token by token; its tensors bear the prefix "eagle.".

    `model` are its own dimensions: `layers` 1, `vocabulary` the rows of its lm_head, `context` the target's. Its qkv
    reads twice its hidden size: the embedding of the next token, normalised by attn_norm, then the hidden state,
    normalised by hidden_norm.
    """

    model: Model
    precision: Precision
    taps: Taps  # the target's residual stream as it enters these layers; the number of layers: as it leaves the last
    norm_before_residual: bool = False  # the residual is the hidden state behind hidden_norm, not before it
    norm_output: bool = False  # the next step is fed the layer's output behind the final norm (EAGLE-3.1)
    tap_norm: Literal["none", "each", "all"] = (
        "none"  # before fc: an RMS norm per tap (fc_norm), or of all (input_norm)
    )
    own_embedding: bool = False  # False: the target's
    mapped: bool = False  # d2t[i] is the target's token of its own token i; False: they are the same
    code: DeviceCode | None = None  # of a GPU target


class DflashHead(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A DFlash or DSpark head: one pass drafts a whole block; its tensors bear the prefix "dflash.".

    `model` are its own dimensions; `vocabulary` is that of its lm_head, or of the target's where it has none.
    """

    model: Model
    precision: Precision
    taps: Taps  # as EagleHead's: z-lab's and SpecForge's `target_layer_ids` + 1
    block: Annotated[int, Meta(ge=2, le=MAX_DFLASH_BLOCK)]  # positions of a pass, the last token's own first
    mask_token: TokenId  # of the target's embedding: what stands where nothing is known yet
    anchor_predicts: bool = False  # DSpark: the first position predicts the next one; False: it predicts nothing
    own_embedding: bool = False  # False: the target's
    own_lm_head: bool = False  # False: the target's
    mapped: bool = False  # as EagleHead's; only with an lm_head of its own
    markov: Annotated[int, Meta(ge=0, le=4096)] = 0  # rank of DSpark's Markov term; 0: there is none
    markov_kind: Literal["plain", "gated"] = "plain"
    confidence: bool = False  # DSpark: a chance of acceptance per position
    confidence_reads_markov: bool = False  # from the hidden state and the Markov embedding of the token before
    code: DeviceCode | None = None  # of a GPU target


class Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """What drafts for this engine; "suffix" needs nothing. `default` serves requests that do not say."""

    default: Drafter = "auto"
    max_tree: Annotated[int, Meta(ge=1, le=MAX_TREE)] = MAX_TREE
    medusa: MedusaHeads | None = None
    draft: DraftModel | None = None
    eagle: EagleHead | None = None
    dflash: DflashHead | None = None

    def __post_init__(self) -> None:
        _require(self.default != "eagle" or self.eagle is not None, "`default` is eagle, but there is no head")
        _require(self.default != "dflash" or self.dflash is not None, "`default` is dflash, but there is no head")
        _require(self.default != "medusa" or self.medusa is not None, "`default` is medusa, but there are no heads")
        _require(self.default != "draft" or self.draft is not None, "`default` is draft, but there is no draft model")

    @property
    def taps(self) -> list[int]:
        """The layers whose residual the heads read, ascending, each once."""
        heads: list[EagleHead | DflashHead | None] = [self.eagle, self.dflash]
        return sorted({layer for head in heads if head is not None for layer in head.taps})


class Tokens(Struct, frozen=True, forbid_unknown_fields=True):
    """Special token ids: `eos` ends a generation; `chat_template` says whether chat messages can be rendered."""

    bos: TokenId | None
    eos: list[TokenId]
    chat_template: bool


class TensorError(Struct, frozen=True, forbid_unknown_fields=True):
    """Frobenius norm of (stored - original) over that of the original, for one packed tensor."""

    name: str
    relative_error: Annotated[float, Meta(ge=0.0)]

    def __post_init__(self) -> None:
        _require_finite(self)


class FastPrefill(Struct, frozen=True, forbid_unknown_fields=True):
    """What it costs that prompts are read fast; Quality's own text is read exactly.

    Measured on the CPU, all of the text has FP8 inputs in every linear but the lm_head, the token that predicts too:
    that loses more than answers do, but for the sums of FP8 products, which keep fewer bits on a chip. On a GPU all is
    read fast but the last 1 to 64 tokens before each prediction; of a prompt all is.
    """

    perplexity: Positive
    perplexity_increase: float  # against the original, as Quality's
    top1_agreement: Annotated[float, Meta(ge=0.0, le=1.0)]

    def __post_init__(self) -> None:
        _require_finite(self)


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """What the build measured about its own loss. Negative increases are possible and reported as they are."""

    eval_text: str
    eval_tokens: TokenCount  # predictions compared
    window: TokenCount  # tokens
    perplexity_original: Positive
    perplexity_quantised: Positive
    perplexity_increase: float  # fraction, 0.01 = 1%
    top1_agreement: Annotated[float, Meta(ge=0.0, le=1.0)]
    limit: float  # fraction: the recipe's max_perplexity_increase
    tensors: list[TensorError]
    tokens_per_round: dict[StoredDrafter, Annotated[float, Meta(ge=1.0)]] = {}  # by drafter, on the calibration text
    fast_prefill: FastPrefill | None = None  # None: prompts are read exactly

    def __post_init__(self) -> None:
        _require_finite(self)
        _require(all(map(math.isfinite, self.tokens_per_round.values())), "`tokens_per_round` must be finite")


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """The ranges of FP8 activations, and what they and the weights cost together.

    `amax` is by linear, see `quantised_inputs`: its input is rounded to E4M3 in steps of amax / 448, so that larger
    ones saturate.
    """

    text: str
    tokens: TokenCount  # of it that were looked at
    method: Literal["max", "percentile"]
    percentile: Annotated[float, Meta(gt=0.0, lt=100.0)] | None  # of |x|, in percent
    losses: dict[str, Positive]  # perplexity on that text by each method that was tried
    amax: dict[str, Annotated[float, Meta(ge=0.0)]]
    perplexity: Positive  # as `Quality.perplexity_quantised`, with the activations quantised too
    perplexity_increase: float  # against the original, as Quality's
    top1_agreement: Annotated[float, Meta(ge=0.0, le=1.0)]

    def __post_init__(self) -> None:
        _require_finite(self)
        for name, values in (("losses", self.losses), ("amax", self.amax)):
            _require(all(map(math.isfinite, values.values())), f"`{name}` must be finite")
        _require(self.losses.keys() <= {"max", "percentile"}, "`losses` are by method: max and percentile")
        _require(self.method in self.losses, f"`losses` lacks the method {self.method!r}")
        _require(
            (self.method == "max") == (self.percentile is None), f"method {self.method!r} and `percentile` disagree"
        )


class ActivationRange(Struct, frozen=True, forbid_unknown_fields=True):
    """How much of f16's range a GPU's activations take, as the unquantised model has them on a text.

    `largest_share` of what f16 holds is taken at `largest_at`, the input of a linear or "layers.N.keys" or ".values".
    `scaled` names the inputs of linears ("layers.N.down") that are kept 2^-k times the usual ones, with k.
    """

    text: str
    tokens: TokenCount  # of it that were looked at
    largest_share: Annotated[float, Meta(ge=0.0, le=1.0)]
    largest_at: str
    scaled: dict[str, Annotated[int, Meta(ge=1)]]


class SourceFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a checkpoint that a build has read: name -> SHA-256. `sha256`: see `listing_sha256`."""

    sha256: Sha256
    files: dict[str, Sha256]

    def __post_init__(self) -> None:
        _require(self.sha256 == listing_sha256(self.files), "`sha256` is not that of `files`")


class Fp8Source(Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint whose linear weights were FP8 already.

    `method` made them, with a scale for each of `granularity`: "tensor", "channel" or "block", or several of them. Of
    the `rows` of these `weights` the bundle has so many as they were, `kept`: the same codes and the same scale.
    """

    method: Annotated[str, Meta(min_length=1)]
    granularity: Annotated[str, Meta(min_length=1)]
    weights: Annotated[int, Meta(ge=1)]
    rows: Annotated[int, Meta(ge=1)]
    kept: Annotated[int, Meta(ge=0)]

    def __post_init__(self) -> None:
        _require(self.kept <= self.rows, "`kept` must not exceed `rows`")

    def describe(self, stored: str) -> str:
        """What became of them in an engine whose weights are `stored` as "fp8" or "bf16", for people."""
        if stored != "fp8":
            fate = f"rounded to {stored}"
        elif self.kept == self.rows:
            fate = "kept as they are"
        elif self.kept == 0:
            fate = "quantised again"
        else:
            fate = f"{self.kept / self.rows:.1%} of the rows kept as they are, the others quantised again"
        return f"{self.weights} FP8 weights ({self.method}, {self.granularity}), {fate}"


FromHub = Literal["model", "lora", "medusa", "draft", "eagle", "dflash"]  # what may come from there


class Provenance(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the weights came from: `source` is the checkpoint's directory, without its path.

    `source_files` are the files of the checkpoint that the build has read, with their SHA-256: config.json,
    generation_config.json, the weights' index, ModelOpt's hf_quant_config.json, every safetensors file, and the
    tokenizer's files that the bundle holds.
    `source_sha256` covers them all, see `listing_sha256`. Weights that were made up have neither.
    """

    source: str
    source_sha256: Sha256 | None
    source_files: dict[str, Sha256]
    recipe: dict[str, RecipeValue]
    builder_version: str
    drafters: dict[StoredDrafter, SourceFiles] = {}  # the checkpoints of what drafts
    lora: SourceFiles | None = None  # the LoRA adapter that was merged into the weights
    hub: dict[FromHub, str] = {}  # what came from the Hugging Face Hub: "ORG/NAME@COMMIT"
    fp8_source: Fp8Source | None = None  # None: the checkpoint's weights were not quantised

    def __post_init__(self) -> None:
        expected = listing_sha256(self.source_files) if self.source_files else None
        _require(self.source_sha256 == expected, "`source_sha256` is not that of `source_files`")


def listing_sha256(files: Mapping[str, str]) -> str:
    """The SHA-256 of what `sha256sum FILES` prints: a line "SHA256  NAME" per file, in byte order of the names.

    In the checkpoint's directory `sha256sum FILES | sha256sum` gives the same value.
    """
    lines = [f"{files[name]}  {name}\n" for name in sorted(files, key=os.fsencode)]
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the bundle."""

    sha256: Sha256
    bytes: Annotated[int, Meta(ge=0)]


class CodeFile(Struct, frozen=True, forbid_unknown_fields=True):
    """One cubin: its path in the bundle and the kernels that it holds."""

    path: str
    kernels: Annotated[list[KernelName], Meta(min_length=1)]


class DeviceCode(Struct, frozen=True, forbid_unknown_fields=True):
    """The compiled kernels. `toolkit` is the compiler's CUDA version, which the driver's must match."""

    compiler: Annotated[str, Meta(min_length=1)]
    toolkit: Annotated[str, Meta(pattern="^[0-9]{1,4}\\.[0-9]{1,4}$")]
    options: list[str]
    macros: dict[str, str]  # the model's dimensions as the sources see them, and how they are tuned
    files: Annotated[list[CodeFile], Meta(min_length=1)]

    def kernels(self) -> dict[str, str]:
        """Kernel name -> path of the cubin that holds it."""
        return {kernel: file.path for file in self.files for kernel in file.kernels}


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`manifest.json`."""

    format: Literal["ull-engine"]
    format_version: Literal[3]
    name: Annotated[str, Meta(min_length=1)]
    created: str  # ISO 8601, UTC
    target: Target
    ull_version: str
    model: Model
    precision: Precision
    tokens: Tokens
    quality: Quality | None
    provenance: Provenance
    files: dict[str, FileEntry]  # relative path -> entry, all but the manifest and its seal
    speculation: Speculation | None = None  # None: built before there was any
    code: DeviceCode | None = None  # of a GPU target
    forward: Forward = FUSED  # of a GPU target
    random_weights: bool = False  # no weights file: they are made up on the device at load, for benchmarks
    calibration: Calibration | None = None  # None: activations stay in 16 bits
    activations: ActivationRange | None = None  # of a GPU target; None: not checked whether f16 holds them

    def __post_init__(self) -> None:
        forward = self.forward
        for problem in fast_prefill_problems(self.target, self.precision.weights, forward.prefill, forward.decode):
            raise ValueError(problem)
        for problem in head_scan_problems(self.target, self.precision, self.forward.decode):
            raise ValueError(problem)
        if self.target == "cpu":
            _require(self.draft is None or self.draft.code is None, 'target "cpu" takes no `code` of a draft model')
            _require(self.code is None and not self.random_weights, 'target "cpu" takes no `code` or `random_weights`')
            _require(self.forward == FUSED, 'target "cpu" takes no `forward`')
            _require(self.activations is None, 'target "cpu" takes no `activations`: its own are float32')
        else:
            self._check_device()
        for token in (*self.tokens.eos, *([] if self.tokens.bos is None else [self.tokens.bos])):
            _require(token < self.model.vocabulary, f"special token {token} is outside of the vocabulary")
        _check_tied_precision(self.model, self.precision)
        if self.calibration is not None:
            unknown = self.calibration.amax.keys() - set(quantised_inputs(self.model, self.precision))
            _require(not unknown, f"`calibration.amax` names no FP8 linear: {', '.join(sorted(unknown))}")
        draft = self.draft
        if draft is not None:
            _require(
                draft.model.vocabulary >= self.model.tokenizer_vocabulary,
                f"the draft model's vocabulary {draft.model.vocabulary} is smaller than the tokenizer's",
            )
            _require(
                draft.model.context >= self.model.context,
                f"the draft model's context {draft.model.context} is shorter than the model's {self.model.context}",
            )
        if self.speculation is not None:
            for head in (self.speculation.eagle, self.speculation.dflash):
                for problem in () if head is None else head_problems(head, self.model):
                    raise ValueError(problem)
                _require(
                    head is None or self.target != "cpu" or head.precision.kv != "fp8",
                    'a head\'s `precision.kv` fp8 is not supported on target "cpu"',
                )
                _require(
                    head is None or self.target != "cpu" or head.code is None, 'target "cpu" takes no `code` of a head'
                )
        for name in self.files:
            _require(is_inside(name), f"file {name!r} does not lie inside the bundle")
        for name in (*REQUIRED_FILES, *([] if self.random_weights else [WEIGHTS_FILE])):
            _require(name in self.files, f"`files` lacks {name!r}")

    @property
    def medusa(self) -> MedusaHeads | None:
        """The heads that draft for the engine."""
        return None if self.speculation is None else self.speculation.medusa

    @property
    def draft(self) -> DraftModel | None:
        """The model that drafts for the engine."""
        return None if self.speculation is None else self.speculation.draft

    @property
    def taps(self) -> list[int]:
        """The layers whose residual is kept for heads that draft from it; see `Speculation.taps`."""
        return [] if self.speculation is None else self.speculation.taps

    def _check_device(self) -> None:
        """What a GPU target needs and what its kernels can do."""
        _require(self.code is not None, f"target {self.target!r} needs `code`")
        forward = self.forward
        for problem in tree_products_problems(self.target, forward.tree_products, forward.prefill, forward.decode):
            raise ValueError(problem)
        for problem in device_problems(self.target, self.model, self.precision, self.forward.attention):
            raise ValueError(problem)
        if (draft := self.draft) is not None:
            _require(draft.code is not None, f"target {self.target!r} needs `code` of the draft model")
            for problem in draft_problems(self.target, draft.model, draft.precision):
                raise ValueError(problem)
        if self.medusa is not None:
            for problem in medusa_problems(self.medusa, self.forward.decode):
                raise ValueError(problem)
        speculation = self.speculation or Speculation()
        heads = {"EAGLE": speculation.eagle, "DFlash": speculation.dflash}
        for name, head in heads.items():
            if head is None:
                continue
            _require(head.code is not None, f"target {self.target!r} needs `code` of the {name} head")
            for problem in device_head_problems(self.target, head):
                raise ValueError(problem)
        for problem in tap_problems(self.taps, self.target, self.forward.prefill, self.forward.decode):
            raise ValueError(problem)
        paths: set[str] = set()
        codes = [one.code for one in (draft, *heads.values()) if one is not None]
        for code in (self.code, *codes):
            kernels: set[str] = set()
            for file in () if code is None else code.files:
                _require(file.path.startswith(CODE_DIRECTORY + "/"), f"{file.path!r} does not lie in {CODE_DIRECTORY}/")
                _require(file.path in self.files, f"`files` lacks {file.path!r}")
                _require(file.path not in paths, f"{file.path!r} is listed twice")
                _require(not kernels & set(file.kernels), f"{file.path!r} repeats a kernel")
                paths.add(file.path)
                kernels |= set(file.kernels)
        if (plans := self.forward.plans) is not None:
            for name in plans.files:
                _require(name in self.files, f"`files` lacks {name!r}")
            segments = len(segment_names(self.model.layers, plans.attention))
            _require(len(plans.files) == segments, f"{len(plans.files)} plans where {segments} are needed")


def head_problems(head: EagleHead | DflashHead, target: Model) -> Iterator[str]:
    """Why this head cannot draft for the model `target`: it belongs to another one, or contradicts itself."""
    of, own = ("the EAGLE head" if isinstance(head, EagleHead) else "the DFlash head"), head.model
    for tap in head.taps:
        if tap > target.layers:
            yield f"{of} reads layer {tap}, the model has {target.layers}: `taps` lie in 0 to {target.layers}"
    if not head.own_embedding and own.hidden != target.hidden:
        yield f"{of} has hidden size {own.hidden} and no embedding of its own; the model's has {target.hidden}"
    if own.context < target.context:
        yield f"{of} holds {own.context} tokens, fewer than the model's context of {target.context}"
    if own.vocabulary > target.vocabulary or (own.vocabulary != target.vocabulary and not head.mapped):
        yield f"{of} has {own.vocabulary} tokens, the model {target.vocabulary}, and no map (`mapped`) between them"
    if isinstance(head, EagleHead):
        if own.layers != 1:
            yield f"{of} has {own.layers} layers; supported: 1"
        return
    if head.mask_token >= target.vocabulary:
        yield f"{of}'s `mask_token` {head.mask_token} is outside of the model's {target.vocabulary} tokens"
    if not head.own_lm_head and own.hidden != target.hidden:
        yield f"{of} has hidden size {own.hidden} and no lm_head of its own; the model's lm_head reads {target.hidden}"
    if not head.own_lm_head and head.mapped:
        yield f"{of} has no lm_head of its own, so its tokens are the model's: `mapped` must be false"
    if head.markov == 0 and (head.markov_kind != "plain" or head.confidence_reads_markov):
        yield f"{of} has no Markov term (`markov` 0) that a gate or the confidence could read"
    if head.confidence_reads_markov and not head.confidence:
        yield f"{of} has no `confidence` that could read its Markov term"


def medusa_problems(medusa: MedusaHeads, decode: Source) -> Iterator[str]:
    """What a GPU target cannot do with these heads, each with what it can. `decode`: who computes it."""
    if decode != "fused":
        yield "Medusa heads read the hidden state of ull's own decode; supported: forward.decode fused"
    if medusa.heads > MAX_DEVICE_HEADS:
        yield f"a GPU runs at most {MAX_DEVICE_HEADS} Medusa heads, not {medusa.heads}; take fewer (medusa.num)"


def keeps_taps(target: str, prefill: PrefillSource, decode: Source) -> bool:
    """Whether an engine for this target, so computed, can keep hidden states for EAGLE and DFlash heads."""
    return target == "cpu" or (runs_draft_models(target) and "tensorrt" not in (prefill, decode))


def tap_problems(taps: Sequence[int], target: Target, prefill: PrefillSource, decode: Source) -> Iterator[str]:
    """Why a GPU target cannot keep hidden states for EAGLE and DFlash heads, with what could."""
    if taps and not keeps_taps(target, prefill, decode):
        yield (
            "EAGLE and DFlash heads read hidden states that only ull's own kernels leave; "
            "supported: forward.decode fused, forward.prefill exact or fast"
        )


def fast_prefill_problems(target: str, weights: str, prefill: PrefillSource, decode: Source) -> Iterator[str]:
    """Why prompts cannot be read fast there, each with what could; `weights`: their precision."""
    if prefill != "fast":
        return
    if not _has_warpgroup_products(target):
        yield (
            f"fast prefill is made of products that {target} has not; "
            f"supported: target {_WITH_WARPGROUPS}, or prefill exact"
        )
    if decode != "fused":
        yield "fast prefill is of ull's own kernels; supported: forward.decode fused"
    if weights != "fp8":
        yield f"fast prefill multiplies FP8 weights, and these are {weights}; supported: precision fp8"


def tree_products_problems(
    target: str, products: TreeProducts, prefill: PrefillSource, decode: Source
) -> Iterator[str]:
    """Why warpgroups cannot multiply for trees there, with what can."""
    if products != "warpgroup":
        return
    if not _has_warpgroup_products(target):
        yield f"{target} has no products of warpgroups; supported: target {_WITH_WARPGROUPS}, or tree_products warp"
    elif "tensorrt" in (prefill, decode):
        yield "products of warpgroups are for ull's own kernels alone; supported: forward fused, or tree_products warp"


def default_tree_products(target: str, prefill: PrefillSource, decode: Source) -> TreeProducts:
    """Warpgroups where they can, in an engine for this target that is computed so."""
    return "warp" if any(tree_products_problems(target, "warpgroup", prefill, decode)) else "warpgroup"


def _has_warpgroup_products(target: str) -> bool:
    return target != "cpu" and GPU_ARCHITECTURES[cast(Target, target)].has_warpgroup_products


def head_scan_problems(target: Target, precision: Precision, decode: Source) -> Iterator[str]:
    """Why an FP8 copy of the lm_head would be of no use there, each with what would be. `decode`: who computes it."""
    if not precision.lm_head_scan:
        return
    if target == "cpu" or not GPU_ARCHITECTURES[target].has_bulk_copies:
        yield f"lm_head_scan is for ull's own kernels, which do not run on {target}; leave it out"
    elif decode != "fused":
        yield "lm_head_scan is read by ull's own decode; supported: forward.decode fused"
    if precision.lm_head != "bf16":
        yield f"lm_head_scan spares reading a bf16 lm_head; this one is {precision.lm_head}: leave it out"


def runs_draft_models(target: str) -> bool:
    """Whether an engine for this target can have a draft model: the CPU's, and where our own kernels run."""
    return target == "cpu" or (target in GPU_ARCHITECTURES and GPU_ARCHITECTURES[cast(Target, target)].has_bulk_copies)


def draft_problems(target: Target, model: Model, precision: Precision) -> Iterator[str]:
    """What a GPU target cannot do with this draft model, each with what it can."""
    if not runs_draft_models(target):
        yield f"a draft model is run by ull's own kernels, which do not run on {target}; leave it out"
        return
    for problem in device_problems(target, model, precision, None):
        yield f"the draft model: {problem}"


def device_head_problems(target: Target, head: EagleHead | DflashHead) -> Iterator[str]:
    """What a GPU target cannot do with this head, each with what it can."""
    a, the = ("an EAGLE", "the EAGLE") if isinstance(head, EagleHead) else ("a DFlash", "the DFlash")
    if not runs_draft_models(target):
        yield f"{a} head is run by ull's own kernels, which do not run on {target}; leave it out"
        return
    for problem in device_problems(target, head.model, head.precision, None):
        yield f"{the} head: {problem}"


def device_problems(
    target: Target, model: Model, precision: Precision, attention: AttentionKind | None
) -> Iterator[str]:
    """What a GPU target cannot do with this model, each with what it can. `attention`: of plans; None: no plans."""
    if not GPU_ARCHITECTURES[target].has_bulk_copies and attention != "native":
        yield f"ull's kernels of the layers do not run on {target}; supported: --forward tensorrt --attention native"
    if attention == "native" and precision.kv != "bf16":
        yield f"TensorRT's own attention keeps its KV cache in bf16, not {precision.kv}"
    if model.head_dim % 32 or model.head_dim > 128:
        yield f"head_dim {model.head_dim} is not supported on a GPU; supported: multiples of 32 up to 128"
    if model.hidden % 32:
        yield f"hidden size {model.hidden} is not supported on a GPU; supported: multiples of 32"
    if "f32" in (precision.weights, precision.lm_head, precision.embedding):
        yield "f32 weights are not supported on a GPU; supported: fp8 and bf16 (kept as f16 with a scale per row)"
    if precision.kv == "f32":
        yield "an f32 KV cache is not supported on a GPU; supported: bf16 and fp8"


def quantised_inputs(model: Model, precision: Precision) -> list[str]:
    """The linears with FP8 weights, in the order of execution: their inputs may be FP8 too."""
    names = []
    if precision.weights == "fp8":
        names += [f"layers.{layer}.{linear}" for layer in range(model.layers) for linear in _LAYER_LINEARS]
    return [*names, "lm_head"] if precision.lm_head == "fp8" else names


def _check_tied_precision(model: Model, precision: Precision) -> None:
    if embedding_is_shared(model, precision):
        _require(
            precision.embedding == precision.lm_head,
            "tied embeddings share the lm_head's weights, so `precision.embedding` must equal `precision.lm_head`",
        )


def embedding_is_shared(model: Model, precision: Precision) -> bool:
    """True when the executor gathers embeddings from the lm_head's tiles and no embed.weight is stored."""
    return model.tied_embeddings and precision.lm_head != "fp8"


def is_inside(name: str) -> bool:
    """True for a plain relative POSIX path that stays inside its directory, but for the manifest and its seal."""
    path = PurePosixPath(name)
    plain = bool(name) and "\\" not in name and "\0" not in name and str(path) == name
    plain = plain and not path.is_absolute() and not {"..", "."} & set(path.parts)
    return plain and name not in (MANIFEST_FILE, SEAL_FILE)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: indented, keys in the order of the structs."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
