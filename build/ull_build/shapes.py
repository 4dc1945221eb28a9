"""The shapes of well-known models, for benchmark bundles without weights: as their config.json says."""

from __future__ import annotations

from dataclasses import dataclass

from ull.bundle import Model, Rope
from ull.errors import RecipeError


def _llama3(factor: float) -> Rope:
    return Rope(
        theta=500000.0,
        kind="llama3",
        factor=factor,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_context=8192,
    )


@dataclass(frozen=True)
class Shape:
    """What distinguishes one model from the next; the vocabulary is that of the embedding."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    rms_epsilon: float
    tied: bool
    rope: Rope


SHAPES = {
    "llama-3.2-1b": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256, 131072, 1e-5, True, _llama3(32.0)),
    "llama-3.1-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 1e-5, False, _llama3(8.0)),
    "llama-3.3-70b": Shape("llama", 8192, 80, 64, 8, 128, 28672, 128256, 131072, 1e-5, False, _llama3(8.0)),
    "qwen3-8b": Shape("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 40960, 1e-6, False, Rope(theta=1000000.0)),
}


def shape_model(arch: str, layers: int | None = None, context: int | None = None) -> Model:
    """The model of that name, cut to its first `layers` and to `context` tokens. Raises RecipeError."""
    shape = SHAPES.get(arch)
    if shape is None:
        raise RecipeError(f"--arch {arch} is unknown; known: {', '.join(SHAPES)}", field="arch")
    for name, wanted, most in (("layers", layers, shape.layers), ("context", context, shape.context)):
        if wanted is not None and not 1 <= wanted <= most:
            raise RecipeError(f"--{name} {wanted} is out of range: {arch} has {most}", field=name)
    depth = layers or shape.layers
    return Model(
        architecture=shape.architecture,  # type: ignore[arg-type]
        hidden=shape.hidden,
        layers=depth,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        tokenizer_vocabulary=shape.vocabulary,
        context=context or shape.context,
        rms_epsilon=shape.rms_epsilon,
        tied_embeddings=shape.tied,
        qk_norm=shape.architecture == "qwen3",
        rope=shape.rope,
        windows=[0] * depth,
    )
