"""Reads a Hugging Face `config.json`: which architecture, which dimensions, and what is not supported.

The rotary embedding is read in `ull_build.source.rope`. Absent keys take the defaults of transformers' own
configuration classes. The dtype is not read here: what counts is the dtype that each tensor has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ull.bundle import Model
from ull.errors import CheckpointError
from ull_build.source.config_fields import Fields, short
from ull_build.source.rope import WHOLE_HEAD, read_rope, rope_notes

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Fields that change the maths in a way that no supported architecture has. A value listed as harmless is let through.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "use_mrope": (None, False),
}
_REFUSED_MEANING = {
    "num_experts": "mixture-of-experts models are not supported",
    "num_local_experts": "mixture-of-experts models are not supported",
    "n_routed_experts": "mixture-of-experts models are not supported",
    "partial_rotary_factor": WHOLE_HEAD,
}
_KV_HEADS_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_WINDOW_DEFAULT = 4096  # MistralConfig, Qwen2Config, Qwen3Config
_MAX_WINDOW_LAYERS_DEFAULT = 28  # Qwen2Config, Qwen3Config
_LAYER_TYPES = {kind: kind for kind in ("full_attention", "sliding_attention")} | {"attention": "full_attention"}


@dataclass(frozen=True)
class Architecture:
    """The parsed config: `model` (its tokenizer_vocabulary still equal to the embedding's) and which biases exist."""

    model: Model
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    bos: int | None
    eos: list[int]
    notes: tuple[str, ...] = ()  # what a person should know about the reading


def parse_config(config: dict[str, Any], generation: dict[str, Any], context: int | None = None) -> Architecture:
    """Parses config.json and generation_config.json (empty when absent) of one checkpoint.

    `context` (tokens) lowers the model's own. Raises CheckpointError naming an unsupported or inconsistent field.
    """
    fields = Fields(config)
    architecture = _architecture(fields)
    for name, harmless in _REFUSED.items():
        if name in config and config[name] not in harmless:
            meaning = _REFUSED_MEANING.get(name, "no supported architecture has it")
            raise fields.fail(name, f"= {short(config[name])} is not supported: {meaning}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.fail("hidden_act", f"= {short(activation)} is not supported; supported: 'silu'")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    longest = fields.integer("max_position_embeddings")
    if context is not None and context > longest:
        raise CheckpointError(
            f"context {context} is more than the model's max_position_embeddings {longest}; lower it", field="context"
        )
    vocabulary = fields.integer("vocab_size")
    try:
        model = Model(
            architecture=architecture,  # type: ignore[arg-type]
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=_kv_heads(fields, architecture, heads),
            head_dim=_head_dim(fields, architecture, hidden, heads),
            intermediate=fields.integer("intermediate_size"),
            vocabulary=vocabulary,
            tokenizer_vocabulary=vocabulary,
            context=context or longest,
            rms_epsilon=fields.number("rms_norm_eps", 1e-6),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            qk_norm=architecture == "qwen3",
            rope=read_rope(fields, longest),
            windows=_windows(fields, architecture, layers),
        )
        model = msgspec.convert(msgspec.to_builtins(model), type=Model)  # checks the ranges too
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"config.json: {error}", field="config.json") from error
    attention_bias = fields.flag("attention_bias") if architecture in ("llama", "qwen3") else False
    generation_fields = Fields(generation, "generation_config.json: ")
    bos = fields.token_ids("bos_token_id") or generation_fields.token_ids("bos_token_id")
    return Architecture(
        model=model,
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if architecture == "llama" else False,
        bos=bos[0] if bos else None,
        eos=sorted({*fields.token_ids("eos_token_id"), *generation_fields.token_ids("eos_token_id")}),
        notes=tuple(rope_notes(fields)),
    )


def _architecture(fields: Fields) -> str:
    """The architecture's short name, by `architectures` or else by `model_type`."""
    supported = "supported: " + ", ".join(ARCHITECTURES)
    names = fields.values.get("architectures")
    if isinstance(names, list) and names:
        if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
            raise fields.fail("architectures", f"= {short(names[0])} is not supported; {supported}")
        return ARCHITECTURES[names[0]]
    kind = fields.values.get("model_type")
    if kind not in ARCHITECTURES.values():
        raise fields.fail("model_type", f"= {short(kind)} is not supported; {supported}")
    return str(kind)


def _kv_heads(fields: Fields, architecture: str, heads: int) -> int:
    """num_key_value_heads; null means one per head, absent the default of the configuration class."""
    default = heads if fields.is_null("num_key_value_heads") else _KV_HEADS_DEFAULT.get(architecture, heads)
    return fields.integer("num_key_value_heads", default)


def _head_dim(fields: Fields, architecture: str, hidden: int, heads: int) -> int:
    """head_dim, or hidden / heads where it is absent (Qwen3's default is 128)."""
    if fields.values.get("head_dim") is not None or architecture == "qwen3":
        head_dim = fields.integer("head_dim", 128)
    elif hidden % heads:
        raise fields.fail("head_dim", f"is missing and hidden_size {hidden} is no multiple of {heads} heads")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.fail("head_dim", f"= {head_dim} is not supported; rotary embeddings need an even head size")
    return head_dim


def _windows(fields: Fields, architecture: str, layers: int) -> list[int]:
    """Sliding window per layer in tokens, 0 = full attention, as transformers' configuration classes decide it.

    A Mistral with `layer_types` is what transformers reads as a Ministral: the layers that slide are those listed.
    """
    types = _layer_types(fields, layers)
    if architecture == "llama":
        if types is not None and "sliding_attention" in types:
            raise fields.fail("layer_types", "asks for sliding attention, which Llama does not have")
        return [0] * layers
    switch = None if architecture == "mistral" else "use_sliding_window"
    off = (switch is not None and not fields.flag(switch)) or fields.is_null("sliding_window")
    window = 0 if off else fields.integer("sliding_window", _WINDOW_DEFAULT)
    if types is not None:
        if off and "sliding_attention" in types:
            needed = "`sliding_window`" if switch is None or fields.flag(switch) else f"`{switch}`"
            raise fields.fail("layer_types", f"asks for sliding attention, which {needed} switches off")
        return [window if kind == "sliding_attention" else 0 for kind in types]
    if off or switch is None:
        return [window] * layers
    first = fields.values.get("max_window_layers", _MAX_WINDOW_LAYERS_DEFAULT)
    if type(first) is not int or first < 0:
        raise fields.fail("max_window_layers", f"must be an integer >= 0, not {short(first)}")
    return [window if layer >= first else 0 for layer in range(layers)]


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    """The kind of attention of each layer, in today's words; None without the field."""
    types = fields.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise fields.fail("layer_types", f"must list {layers} layers")
    for kind in types:
        if not isinstance(kind, str) or kind not in _LAYER_TYPES:
            known = ", ".join(sorted({*_LAYER_TYPES.values()}))
            raise fields.fail("layer_types", f"has {short(kind)}, which is not supported; supported: {known}")
    return [_LAYER_TYPES[kind] for kind in types]
