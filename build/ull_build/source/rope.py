"""Reads the rotary embedding of a config.json as transformers 5 does (`modeling_rope_utils`, its version 5.23).

Its rules: a `rope_scaling` that says anything replaces `rope_parameters` altogether, its rope_theta included. Inside of
either, `rope_type` goes before the older `type`. A rope_theta inside goes before the one beside it; without both it is
10000. For llama3 and yarn an `original_max_position_embeddings` beside goes before the one inside; without both it is
max_position_embeddings. A null is not absent: transformers fails on it where it needs a number, and here it is refused.
"""

from __future__ import annotations

import math

from ull.bundle import Rope
from ull_build.source.config_fields import Fields, short

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
WHOLE_HEAD = "rotary embeddings must span the whole head (partial_rotary_factor 1)"
_THETA_DEFAULT = 10000.0  # PreTrainedConfig.default_theta
_BETA_FAST_DEFAULT, _BETA_SLOW_DEFAULT = 32.0, 1.0


def read_rope(fields: Fields, longest: int) -> Rope:
    """The rotary embedding of a model whose max_position_embeddings is `longest` tokens.

    Raises CheckpointError, and ValueError for values that no Rope may have.
    """
    rope = _parameters(fields)
    theta = _theta(fields, rope)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise rope.fail("rope_type", f"= {short(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if rope.values.get("partial_rotary_factor") not in (None, 1):
        raise rope.fail("partial_rotary_factor", f"is not supported: {WHOLE_HEAD}")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=_factor(rope))
    original = _original_context(fields, rope, longest)
    return _llama3(rope, theta, original) if kind == "llama3" else _yarn(rope, theta, original, longest)


def rope_notes(fields: Fields) -> list[str]:
    """What a person should know about the reading, one line each: a rope_theta that has no effect."""
    rope, replaced = _parameters(fields), fields.values.get("rope_parameters") or {}
    theta, unused = _theta(fields, rope), replaced.get("rope_theta")
    if type(unused) not in (int, float) or unused == theta:
        return []
    return [
        f"config.json: `rope_scaling` replaces `rope_parameters`, as in transformers: rope_theta is {theta:g}, not "
        f"{unused:g}; if that is not meant, put rope_theta into rope_scaling"
    ]


def _parameters(fields: Fields) -> Fields:
    """The object that describes the embedding, be it empty."""
    for name in ("rope_scaling", "rope_parameters"):
        values = fields.values.get(name)
        if values is not None and not isinstance(values, dict):
            raise fields.fail(name, f"must be an object, not {short(values)}")
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(name) or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.fail(name, "differs per layer type, which is not supported")
    return Fields(values, f"{name}.", fields.file)


def _theta(fields: Fields, rope: Fields) -> float:
    if "rope_theta" in rope.values:
        return rope.number("rope_theta")
    return fields.number("rope_theta") if "rope_theta" in fields.values else _THETA_DEFAULT


def _original_context(fields: Fields, rope: Fields, longest: int) -> int:
    """Tokens of the context that the model was trained with before it was extended."""
    name = "original_max_position_embeddings"
    inside = rope.integer(name) if name in rope.values else longest
    return fields.integer(name) if name in fields.values else inside


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.fail("factor", f"must be at least 1, not {factor}")
    return factor


def _llama3(rope: Fields, theta: float, original: int) -> Rope:
    factor, low, high = _factor(rope), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.fail("low_freq_factor", f"= {low} must be below high_freq_factor {high}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context=original,
    )


def _yarn(rope: Fields, theta: float, original: int, longest: int) -> Rope:
    """Here a factor of null stands for how much longer the context became."""
    if theta <= 1.0:
        raise rope.fail("rope_theta", f"must be above 1 for yarn, not {theta}")
    factor = longest / original if rope.is_null("factor") else _factor(rope)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=_number_or_none(rope, "beta_fast") or _BETA_FAST_DEFAULT,
        beta_slow=_number_or_none(rope, "beta_slow") or _BETA_SLOW_DEFAULT,
        truncate=not rope.is_null("truncate") and rope.flag("truncate", True),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """What cosines and sines are multiplied by: as given, or from the factor of the context (YaRN, equation 22)."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    growth = math.log(factor) if factor > 1.0 else 0.0
    scale, scale_of_all = _number_or_none(rope, "mscale"), _number_or_none(rope, "mscale_all_dim")
    if scale and scale_of_all:
        return (0.1 * scale * growth + 1.0) / (0.1 * scale_of_all * growth + 1.0)
    return 0.1 * growth + 1.0


def _number_or_none(rope: Fields, name: str) -> float | None:
    """A positive number; None where there is none, or 0, which transformers takes for the same."""
    return rope.number(name) if rope.values.get(name) else None
