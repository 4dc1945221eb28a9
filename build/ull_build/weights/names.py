"""Which tensors of a checkpoint a bundle's tensor is made of: names in the bundle -> Hugging Face names."""

from __future__ import annotations

from ull.bundle import HEAD_SCAN, TensorShape
from ull_build.source.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
# name in the bundle -> names in the checkpoint's layer, without .weight or .bias
_PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_VECTORS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def present(checkpoint: Checkpoint, expected: dict[str, TensorShape]) -> dict[str, TensorShape]:
    """Of the expected tensors all required ones, and the biases that the checkpoint has."""
    return {name: shape for name, shape in expected.items() if not shape.optional or bias_sources(checkpoint, name)}


def weight_sources(checkpoint: Checkpoint, stem: str) -> list[str]:
    """Names in the checkpoint of a linear's weights."""
    if stem in ("lm_head", HEAD_SCAN):
        return [EMBEDDING if checkpoint.model.tied_embeddings else "lm_head.weight"]
    _, layer, short = stem.split(".")
    return [f"model.layers.{layer}.{source}.weight" for source in _PROJECTIONS[short]]


def bias_sources(checkpoint: Checkpoint, name: str) -> list[str]:
    """Names in the checkpoint of a linear's biases; empty when it has none."""
    _, layer, short, _ = name.split(".")
    names = [f"model.layers.{layer}.{source}.bias" for source in _PROJECTIONS[short]]
    return names if checkpoint.has(names[0]) else []


def vector_source(name: str) -> str:
    """Name in the checkpoint of a norm."""
    if name == "norm":
        return "model.norm.weight"
    _, layer, short = name.split(".")
    return f"model.layers.{layer}.{_VECTORS[short]}"
