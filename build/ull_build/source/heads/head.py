"""What heads of both kinds have in common: config.json in its two forms, dimensions, names of tensors, vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import MAX_TAPS, DflashHead, EagleHead, Model, head_problems, round_up
from ull.errors import CheckpointError
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.config_fields import Fields, short
from ull_build.source.files import CONFIG_FILE, read_json
from ull_build.source.heads.tensors import HeadTensors
from ull_build.source.rope import WHOLE_HEAD, read_rope

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_TARGET_EMBEDDING = "model.embed_tokens.weight"
_VOCABULARY_PADDING = 1024  # rows; embeddings of one model are padded differently by different libraries
_LONGEST_DEFAULT = 2048  # LlamaConfig's max_position_embeddings

About = TypeVar("About", EagleHead, DflashHead)
Parts = dict[
    str, list[tuple[str, tuple[int, ...]]]
]  # bundle's tensor -> the head's, below each other, and their shapes


@dataclass(frozen=True)
class HeadOptions:
    """Where a recipe knows better than the head's config.json; None: it does not."""

    taps: tuple[int, ...] | None = None
    theta: float | None = None
    norm_output: bool | None = None  # EAGLE
    anchor_predicts: bool | None = None  # DFlash


NO_OPTIONS = HeadOptions()


@dataclass(frozen=True)
class Head(Generic[About]):
    """A head that was read and fits its target.

    `sources` says for every tensor of a bundle (a linear without .weight) which of `tensors` it is made of, `d2t` which
    of the target's tokens the head's own are; None: the same ones. `about.precision` is still to be chosen.
    """

    about: About
    tensors: HeadTensors
    sources: Mapping[str, list[str]]
    d2t: NDArray[np.int32] | None
    notes: tuple[str, ...] = ()  # what a person should know about the reading

    def has_bias(self, stem: str) -> bool:
        """Whether the linear has a bias in the checkpoint."""
        return self.tensors.has(_bias_of(self.sources[stem][0]))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm, or what the confidence is made of; a bias that the checkpoint lacks is zero."""
        if name == "confidence.bias":
            bias = _bias_of(self.sources["confidence.weight"][0])
            return self.tensors.vector(bias) if self.tensors.has(bias) else np.zeros(1, np.float32)
        if name == "tap_norm" and name not in self.sources:  # one of each tap, where they stand in one vector
            each = [key for key in self.sources if key.startswith("tap_norm.")]
            return np.concatenate([self.tensors.vector(self.sources[key][0]) for key in each])
        return self.tensors.vector(self.sources[name][0])

    def biases(self, stem: str) -> list[str]:
        """The names of its parts' biases."""
        return [_bias_of(name) for name in self.sources[stem]]


class HeadConfig:
    """config.json of a head: `top` its fields, `layer` those of its transformer, which speculators nests in `top`."""

    def __init__(self, directory: Path) -> None:
        path = directory / CONFIG_FILE
        self.top = Fields(read_json(path), file=str(path))
        kind = self.top.values.get("speculators_model_type")
        self.speculators: str | None = None if kind is None else str(kind)
        self.layer = self.top if kind is None else self.nested("transformer_layer_config")
        for fields in (self.top, self.layer):
            for name in ("quantization_config", "compression_config"):
                if fields.values.get(name) is not None:
                    raise fields.fail(name, "is not supported: take the head's unquantised weights")
        if (activation := self.layer.values.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise self.layer.fail("hidden_act", f"= {short(activation)} is not supported; supported: 'silu'")

    @property
    def architectures(self) -> str:
        """The names of the classes that the head was made for, in one text."""
        names = self.top.values.get("architectures")
        return " ".join(map(str, names)) if isinstance(names, list) else ""

    def nested(self, name: str) -> Fields:
        """An object in `top`, empty where there is none."""
        values = self.top.values.get(name)
        if values is not None and not isinstance(values, dict):
            raise self.top.fail(name, f"must be an object, not {short(values)}")
        return Fields(values or {}, f"{name}.", self.top.file)

    def layer_ids(self, fields: Fields, name: str) -> list[int] | None:
        """A list of layers of the target; None where there is none, or an empty one."""
        ids = fields.values.get(name)
        if not ids:
            return None
        if not isinstance(ids, list) or any(type(item) is not int or item < 0 for item in ids) or len(ids) > MAX_TAPS:
            raise fields.fail(name, f"must list 1 to {MAX_TAPS} layers of the target, not {short(ids)}")
        return ids

    def own_model(
        self,
        target: Model,
        architecture: Literal["llama", "qwen3"],
        layers: int,
        qk_norm: bool,
        vocabulary: int,
        theta: float | None,
    ) -> Model:
        """The head's own dimensions; its context is the target's. `theta` replaces that of config.json."""
        fields = self.layer
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = 128 if fields.values.get("model_type") == "qwen3" else hidden // heads
        rope = read_rope(fields, fields.integer("max_position_embeddings", _LONGEST_DEFAULT))
        if fields.values.get("partial_rotary_factor") not in (None, 1):
            raise fields.fail("partial_rotary_factor", f"is not supported: {WHOLE_HEAD}")
        self._check_windows()
        try:
            model = Model(
                architecture=architecture,
                hidden=hidden,
                layers=layers,
                heads=heads,
                kv_heads=fields.integer("num_key_value_heads", heads),
                head_dim=fields.integer("head_dim", head_dim),
                intermediate=fields.integer("intermediate_size"),
                vocabulary=vocabulary,
                tokenizer_vocabulary=min(vocabulary, target.tokenizer_vocabulary),
                context=target.context,
                rms_epsilon=fields.number("rms_norm_eps", 1e-6),
                tied_embeddings=False,
                qk_norm=qk_norm,
                rope=rope if theta is None else msgspec.structs.replace(rope, theta=theta),
                windows=[0] * layers,
            )
            return msgspec.convert(msgspec.to_builtins(model), type=Model)  # checks the ranges too
        except (ValueError, msgspec.ValidationError) as error:
            raise CheckpointError(f"{self.top.file}: {error}", field=CONFIG_FILE) from error

    @property
    def names_theta(self) -> bool:
        """Whether it says anything about the rotary embedding's base."""
        inside = (self.layer.values.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
        return "rope_theta" in self.layer.values or any("rope_theta" in values for values in inside)

    def _check_windows(self) -> None:
        for fields in (self.top, self.layer):
            types, switch = fields.values.get("layer_types"), fields.values.get("use_sliding_window")
            slides = isinstance(types, list) and "sliding_attention" in types
            if slides or (types is None and switch and fields.values.get("sliding_window") is not None):
                name = "layer_types" if slides else "use_sliding_window"
                raise fields.fail(name, "asks for sliding attention in a head; supported: full attention")

    def check_target(self, target: Model) -> None:
        """Refuses a head that its config.json says was made for another model."""
        if (vocabulary := self.layer.values.get("vocab_size")) is not None:
            most = max(target.vocabulary, round_up(target.tokenizer_vocabulary, _VOCABULARY_PADDING))
            if not target.tokenizer_vocabulary <= self.layer.integer("vocab_size") <= most:
                raise self.layer.fail(
                    "vocab_size",
                    f"is {vocabulary}, the target has {target.tokenizer_vocabulary} tokens; this head belongs to "
                    "another model",
                )
        for fields in (self.top, self.layer):
            if fields.values.get("target_hidden_size") not in (None, target.hidden):
                raise fields.fail(
                    "target_hidden_size",
                    f"is {short(fields.values['target_hidden_size'])}, the target's hidden size is {target.hidden}; "
                    "this head belongs to another model",
                )


def layer_parts(index: int, source: str, own: Model, inputs: int) -> Parts:
    """The tensors of a transformer layer that are called `source`.* and read `inputs` values."""
    queries, keys, prefix = own.heads * own.head_dim, own.kv_heads * own.head_dim, f"layers.{index}"
    parts: Parts = {
        f"{prefix}.attn_norm": [(f"{source}.input_layernorm.weight", (own.hidden,))],
        f"{prefix}.qkv": [
            (f"{source}.self_attn.q_proj.weight", (queries, inputs)),
            (f"{source}.self_attn.k_proj.weight", (keys, inputs)),
            (f"{source}.self_attn.v_proj.weight", (keys, inputs)),
        ],
        f"{prefix}.o": [(f"{source}.self_attn.o_proj.weight", (own.hidden, queries))],
        f"{prefix}.mlp_norm": [(f"{source}.post_attention_layernorm.weight", (own.hidden,))],
        f"{prefix}.gate_up": [
            (f"{source}.mlp.{name}_proj.weight", (own.intermediate, own.hidden)) for name in ("gate", "up")
        ],
        f"{prefix}.down": [(f"{source}.mlp.down_proj.weight", (own.hidden, own.intermediate))],
    }
    if own.qk_norm:
        for name in ("q_norm", "k_norm"):
            parts[f"{prefix}.{name}"] = [(f"{source}.self_attn.{name}.weight", (own.head_dim,))]
    return parts


def check_parts(tensors: HeadTensors, parts: Parts, kind: str, others: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """The sources by bundle's name, once every tensor is there, of its shape, and nothing else is.

    `others` are tensors beside `parts`. Raises CheckpointError naming the tensor.
    """
    known = {*others}
    for pieces in parts.values():
        biased = [tensors.has(_bias_of(name)) for name, _ in pieces]
        for name, shape in pieces:
            if not tensors.has(name):
                raise CheckpointError(
                    f"{tensors.directory} lacks tensor {name!r} {list(shape)}, which {kind} has", field=name
                )
            if tensors.shape(name) != shape:
                raise CheckpointError(
                    f"{tensors.directory}: tensor {name!r} has the shape {list(tensors.shape(name))}, "
                    f"{list(shape)} is needed by config.json and the target; this head belongs to another model, or "
                    "its config.json does",
                    field=name,
                )
            known.add(name)
            if any(biased):
                bias = _bias_of(name)
                if not all(biased) or tensors.shape(bias) != shape[:1]:
                    raise CheckpointError(f"{tensors.directory}: tensor {bias!r} is missing or misshapen", field=bias)
                known.add(bias)
    for name in tensors.names:
        if name not in known:
            raise CheckpointError(f"{tensors.directory}: tensor {name!r} is none of {kind}'s", field=name)
    return {stem: [name for name, _ in pieces] for stem, pieces in parts.items()}


def check_head(head: EagleHead | DflashHead, directory: Path) -> None:
    """Raises CheckpointError for a head that cannot draft for its target."""
    try:
        msgspec.convert(msgspec.to_builtins(head), type=type(head))  # the ranges
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{directory}: {error}", field=CONFIG_FILE) from error


def check_fit(head: EagleHead | DflashHead, target: Model, directory: Path) -> None:
    """Raises CheckpointError for a head that was made for another model."""
    check_head(head, directory)
    for problem in head_problems(head, target):
        raise CheckpointError(f"{directory}: {problem}", field="eagle" if isinstance(head, EagleHead) else "dflash")


def taps_of_fc(tensors: HeadTensors, target: Model) -> int:
    """How many of the target's hidden states fc reads. Raises CheckpointError where it is none of this target's."""
    if not tensors.has("fc.weight"):
        raise CheckpointError(f"{tensors.directory} lacks tensor 'fc.weight', which every such head has", field="fc")
    shape = tensors.shape("fc.weight")
    if len(shape) != 2 or shape[1] % target.hidden:
        raise CheckpointError(
            f"{tensors.directory}: tensor 'fc.weight' has the shape {list(shape)}, it must read a multiple of the "
            f"target's hidden size {target.hidden}; this head belongs to another model",
            field="fc.weight",
        )
    return shape[1] // target.hidden


def read_map(tensors: HeadTensors, rows: int, target: Model) -> NDArray[np.int32] | None:
    """The target's token of each of the head's `rows` own; None: they are the same.

    In the files d2t holds offsets: own token i is the target's i + d2t[i].
    """
    directory = tensors.directory
    offsets = tensors.integers("d2t") if tensors.has("d2t") else None
    if offsets is None or (rows >= target.tokenizer_vocabulary and not offsets.any()):
        if rows < target.tokenizer_vocabulary:
            raise CheckpointError(
                f"{directory}: the lm_head has {rows} rows, the target's tokenizer {target.tokenizer_vocabulary} "
                "tokens, and there is no d2t that maps them; the file is incomplete, or this head belongs to another "
                "model",
                field="d2t",
            )
        return None
    if offsets.shape != (rows,):
        raise CheckpointError(
            f"{directory}: tensor 'd2t' has the shape {list(offsets.shape)}, the lm_head {rows} rows", field="d2t"
        )
    tokens = offsets + np.arange(rows)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= target.vocabulary))
    if len(wrong):
        raise CheckpointError(
            f"{directory}: d2t maps own token {wrong[0]} to {tokens[wrong[0]]}, the target has {target.vocabulary}; "
            "this head belongs to another model",
            field="d2t",
        )
    if len(np.unique(tokens)) != rows:
        raise CheckpointError(f"{directory}: d2t maps two own tokens to one of the target's", field="d2t")
    return tokens.astype(np.int32)


def own_rows(tensors: HeadTensors, name: str, target: Model) -> int:
    """The rows of an embedding or a full lm_head, which must hold every token. Raises CheckpointError."""
    rows = tensors.shape(name)[0] if len(tensors.shape(name)) == 2 else 0
    if rows < target.tokenizer_vocabulary:
        raise CheckpointError(
            f"{tensors.directory}: tensor {name!r} has the shape {list(tensors.shape(name))}, the target's tokenizer "
            f"{target.tokenizer_vocabulary} tokens; this head belongs to another model",
            field=name,
        )
    return rows


def is_targets(tensors: HeadTensors, name: str, checkpoint: Checkpoint) -> bool:
    """Whether the head's embedding or lm_head is but a copy of the target's, to bf16."""
    tied = checkpoint.model.tied_embeddings or name == EMBEDDING
    of_target = _TARGET_EMBEDDING if tied else LM_HEAD
    if tensors.shape(name) != checkpoint.tensors[of_target].shape:
        return False
    pairs: Iterator[tuple[NDArray[Any], NDArray[Any]]] = zip(
        tensors.blocks(name), checkpoint.blocks(of_target), strict=True
    )
    return all(np.array_equal(_bits(one), _bits(two)) for one, two in pairs)


def _bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The upper halves, rounded half up: equal for values that are equal in bf16."""
    return (values.view(np.uint32).astype(np.uint64) + 0x8000 >> 16).astype(np.uint32)


def _bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"
