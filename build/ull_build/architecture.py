"""Reads a Hugging Face `config.json`: which architecture, which dimensions, and what is not supported.

Both spellings are understood: the classic keys (`rope_theta`, `rope_scaling`) and those of transformers 5
(`rope_parameters`). Absent keys take the defaults of transformers' own configuration classes. The dtype is not read
here: what counts is the dtype that each tensor has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from ull.bundle import Model, Rope
from ull.errors import CheckpointError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3")

# Fields that change the maths in a way that no supported architecture has. A value listed as harmless is let through.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
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
    "quantization_config": "the checkpoint is already quantised; build from the original bf16, fp16 or fp32 weights",
    "num_experts": "mixture-of-experts models are not supported",
    "num_local_experts": "mixture-of-experts models are not supported",
    "n_routed_experts": "mixture-of-experts models are not supported",
    "partial_rotary_factor": "rotary embeddings must span the whole head (partial_rotary_factor 1)",
}
_KV_HEADS_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_WINDOW_DEFAULT = 4096  # MistralConfig, Qwen2Config, Qwen3Config
_MAX_WINDOW_LAYERS_DEFAULT = 28  # Qwen2Config, Qwen3Config


@dataclass(frozen=True)
class Architecture:
    """The parsed config: `model` (its tokenizer_vocabulary still equal to the embedding's) and which biases exist."""

    model: Model
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    bos: int | None
    eos: list[int]


class _Fields:
    """Typed access to config.json; every complaint names the field."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def fail(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(f"config.json: `{self.prefix}{name}` {message}", field=self.prefix + name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(name, "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise self.fail(name, f"must be a positive integer, not {_short(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(name, "is missing")
        if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
            raise self.fail(name, f"must be a positive number, not {_short(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.fail(name, f"must be true or false, not {_short(value)}")
        return value

    def token_ids(self, name: str) -> list[int]:
        """An int, a list of ints, or nothing."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(item) is not int or item < 0 for item in ids):
            raise self.fail(name, f"must be a token id or a list of them, not {_short(value)}")
        return ids


def parse_config(config: dict[str, Any], generation: dict[str, Any], context: int | None = None) -> Architecture:
    """Parses config.json and generation_config.json (empty when absent) of one checkpoint.

    `context` (tokens) lowers the model's own. Raises CheckpointError naming an unsupported or inconsistent field.
    """
    fields = _Fields(config)
    architecture = _architecture(fields)
    for name, harmless in _REFUSED.items():
        if name in config and config[name] not in harmless:
            meaning = _REFUSED_MEANING.get(name, "no supported architecture has it")
            raise fields.fail(name, f"= {_short(config[name])} is not supported: {meaning}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.fail("hidden_act", f"= {_short(activation)} is not supported; supported: 'silu'")
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
            rope=_rope(fields),
            windows=_windows(fields, architecture, layers),
        )
        model = msgspec.convert(msgspec.to_builtins(model), type=Model)  # checks the ranges too
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"config.json: {error}", field="config.json") from error
    attention_bias = fields.flag("attention_bias") if architecture in ("llama", "qwen3") else False
    generation_fields = _Fields(generation, "generation_config.json: ")
    bos = fields.token_ids("bos_token_id") or generation_fields.token_ids("bos_token_id")
    return Architecture(
        model=model,
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if architecture == "llama" else False,
        bos=bos[0] if bos else None,
        eos=sorted({*fields.token_ids("eos_token_id"), *generation_fields.token_ids("eos_token_id")}),
    )


def _architecture(fields: _Fields) -> str:
    """The architecture's short name, by `architectures` or else by `model_type`."""
    supported = "supported: " + ", ".join(ARCHITECTURES)
    names = fields.values.get("architectures")
    if isinstance(names, list) and names:
        if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
            raise fields.fail("architectures", f"= {_short(names[0])} is not supported; {supported}")
        return ARCHITECTURES[names[0]]
    kind = fields.values.get("model_type")
    if kind not in ARCHITECTURES.values():
        raise fields.fail("model_type", f"= {_short(kind)} is not supported; {supported}")
    return str(kind)


def _kv_heads(fields: _Fields, architecture: str, heads: int) -> int:
    """num_key_value_heads; null means one per head, absent the default of the configuration class."""
    default = heads if _is_null(fields, "num_key_value_heads") else _KV_HEADS_DEFAULT.get(architecture, heads)
    return fields.integer("num_key_value_heads", default)


def _head_dim(fields: _Fields, architecture: str, hidden: int, heads: int) -> int:
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


def _rope(fields: _Fields) -> Rope:
    """The rotary embedding from `rope_parameters`, or else from `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    values = fields.values.get(name) or {}
    if not isinstance(values, dict):
        raise fields.fail(name, f"must be an object, not {_short(values)}")
    if values and all(isinstance(value, dict) for value in values.values()):
        raise fields.fail(name, "differs per layer type, which is not supported")
    rope = _Fields(values, f"{name}.")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise rope.fail("rope_type", f"= {_short(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor") not in (None, 1):
        raise rope.fail("partial_rotary_factor", f"is not supported: {_REFUSED_MEANING['partial_rotary_factor']}")
    theta = rope.number("rope_theta") if "rope_theta" in values else fields.number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.fail("factor", f"must be at least 1, not {factor}")
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.fail("low_freq_factor", f"= {low} must be below high_freq_factor {high}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context=rope.integer("original_max_position_embeddings"),
    )


def _windows(fields: _Fields, architecture: str, layers: int) -> list[int]:
    """Sliding window per layer in tokens, 0 = full attention, as transformers' configuration classes decide it."""
    types = fields.values.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers:
            raise fields.fail("layer_types", f"must list {layers} layers")
        for kind in types:
            if kind not in known:
                raise fields.fail(
                    "layer_types", f"has {_short(kind)}, which is not supported; supported: {', '.join(known)}"
                )
    sliding = types is not None and "sliding_attention" in types
    if architecture == "llama":
        if sliding:
            raise fields.fail("layer_types", "asks for sliding attention, which Llama does not have")
        return [0] * layers
    if architecture == "mistral":
        window = 0 if _is_null(fields, "sliding_window") else fields.integer("sliding_window", _WINDOW_DEFAULT)
        if types is not None and len(set(types)) != 1:
            raise fields.fail("layer_types", "mixes kinds of attention, which Mistral does not do")
        if types is not None and sliding != bool(window):
            raise fields.fail("layer_types", "contradicts `sliding_window`")
        return [window] * layers
    if not fields.flag("use_sliding_window") or _is_null(fields, "sliding_window"):
        if sliding:
            raise fields.fail("layer_types", "asks for sliding attention but `use_sliding_window` is false")
        return [0] * layers
    window = fields.integer("sliding_window", _WINDOW_DEFAULT)
    if types is not None:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    first = fields.values.get("max_window_layers", _MAX_WINDOW_LAYERS_DEFAULT)
    if type(first) is not int or first < 0:
        raise fields.fail("max_window_layers", f"must be an integer >= 0, not {_short(first)}")
    return [window if layer >= first else 0 for layer in range(layers)]


def _is_null(fields: _Fields, name: str) -> bool:
    """Present and null, which differs from absent (the default applies)."""
    return name in fields.values and fields.values[name] is None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
