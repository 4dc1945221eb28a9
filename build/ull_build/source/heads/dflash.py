"""Reads DFlash and DSpark heads in the forms in which they are published.

z-lab's form, which SpecForge and DeepSeek (DeepSpec) share:
  config.json: a Qwen3's, num_hidden_layers 5 or so, block_size, num_target_layers, and dflash_config {mask_token_id,
    target_layer_ids}, which DeepSeek's have beside it. The ids are of layers whose OUTPUT is read: one less than ours.
    Where they are missing, as in SpecForge's configs, they are spread evenly over 1 .. N - 3 of the target's N layers.
    DSpark adds markov_rank, markov_head_type ("vanilla", "gated", "rnn"), enable_confidence_head,
    confidence_head_with_markov, in dflash_config or beside it; dflash_config.projector_type says "dspark".
  model.safetensors: layers.I.{input_layernorm, post_attention_layernorm, self_attn.{q,k,v,o}_proj,
    self_attn.{q,k}_norm, mlp.{gate,up,down}_proj}.weight, fc.weight, hidden_norm.weight, norm.weight; no embedding or
    lm_head in z-lab's, copies of the target's in some others'. DSpark: markov_head.{markov_w1, markov_w2}.weight, with
    gates markov_head.gate_proj.{weight, bias}; confidence_head.proj.{weight, bias}. Older files put "logit_head."
    before them.
speculators' form (RedHatAI):
  config.json: speculators_model_type "dflash" or "dspark", transformer_layer_config {a Qwen3's}, and beside it
    block_size, mask_token_id, draft_vocab_size, aux_hidden_state_layer_ids (layers whose INPUT is read: ours),
    sample_from_anchor, and DSpark's fields as above.
  model.safetensors: as above with embed_tokens.weight, lm_head.weight, d2t, t2d.
The first position predicts too (`sample_from_anchor`) in DSpark heads, in DFlash heads it does not, unless the field,
or vLLM's `dspark_bonus_anchor`, its opposite, says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from ull.bundle import DflashHead, Model, Precision
from ull.errors import CheckpointError
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.config_fields import Fields, short
from ull_build.source.heads.head import (
    EMBEDDING,
    LM_HEAD,
    NO_OPTIONS,
    Head,
    HeadConfig,
    HeadOptions,
    Parts,
    check_fit,
    check_parts,
    is_targets,
    layer_parts,
    own_rows,
    read_map,
    taps_of_fc,
)
from ull_build.source.heads.tensors import HeadTensors

_KIND = "a DFlash head"
_SUPPORTED = "supported: DFlash and DSpark heads"
_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_GATE = "markov_head.gate_proj.weight"
_CONFIDENCE, _CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
# field -> what a head that has it is, and values that mean nothing
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "projector_type": ("another kind of drafter's (Domino)", (None, "dflash", "dspark")),
    "causal": ("a head's whose positions do not see the later ones", (None, False)),
    "shift_label": ("Domino's", (None, False)),
    "attention_sink_bias": ("a head's with attention sinks", (None, False)),
    "gating": ("a head's with gated attention", (None, False)),
    "selector_rank": ("a DFlash2 head's", (None, 0)),
    "conv_kernel_size": ("a DFlash2 head's", (None, 0)),
}


def read_dflash(
    tensors: HeadTensors, checkpoint: Checkpoint, target: Model, options: HeadOptions = NO_OPTIONS
) -> Head[DflashHead]:
    """The head in `tensors` for the target of `checkpoint`. Raises CheckpointError naming file, field and remedy."""
    directory = tensors.directory
    config = HeadConfig(directory)
    inner = config.nested("dflash_config")
    is_dspark = _check_variant(config, inner, target)
    config.check_target(target)
    count = taps_of_fc(tensors, target)
    taps = list(options.taps or _taps(config, inner, target))
    if len(taps) != count:
        raise CheckpointError(
            f"{directory}: fc.weight reads {count} hidden states, {taps} are {len(taps)} layers; give their numbers "
            "(taps)",
            field="taps",
        )
    own_lm_head = tensors.has(LM_HEAD) and (tensors.has("d2t") or not is_targets(tensors, LM_HEAD, checkpoint))
    d2t = read_map(tensors, tensors.shape(LM_HEAD)[0], target) if own_lm_head else None
    if not own_lm_head and tensors.has("d2t"):
        raise CheckpointError(f"{directory} has a d2t, but no lm_head with such a vocabulary", field="d2t")
    layers = config.layer.integer("num_hidden_layers")
    rows = tensors.shape(LM_HEAD)[0] if d2t is not None else target.vocabulary
    own = config.own_model(target, "qwen3", layers, True, rows, options.theta)
    anchor = options.anchor_predicts
    about = DflashHead(
        model=own,
        precision=Precision(),
        taps=taps,
        block=_where(config, inner, "block_size").integer("block_size"),
        mask_token=_mask_token(config, inner),
        anchor_predicts=_anchor_predicts(config, inner, is_dspark) if anchor is None else anchor,
        own_embedding=tensors.has(EMBEDDING) and not is_targets(tensors, EMBEDDING, checkpoint),
        own_lm_head=own_lm_head,
        mapped=d2t is not None,
        **_small_heads(config, inner, tensors, own.hidden),
    )
    check_fit(about, target, directory)
    others = (EMBEDDING, LM_HEAD, "d2t", _CONFIDENCE_BIAS)
    sources = check_parts(tensors, _parts(about, tensors, target), _KIND, others)
    return Head(about, tensors, sources, d2t)


def _where(config: HeadConfig, inner: Fields, name: str) -> Fields:
    """The object that has the field: dflash_config, or else the whole."""
    return inner if inner.values.get(name) is not None else config.top


def _check_variant(config: HeadConfig, inner: Fields, target: Model) -> bool:
    """Refuses relatives of DFlash that draft otherwise; whether this is a DSpark head."""
    top = config.top
    if config.speculators not in (None, "dflash", "dspark"):
        raise top.fail("speculators_model_type", f"is {short(config.speculators)}; {_SUPPORTED}")
    for name, (meaning, harmless) in _REFUSED.items():
        for fields in (inner, top):
            if (value := fields.values.get(name)) not in harmless:
                raise fields.fail(name, f"= {short(value)} is {meaning}; {_SUPPORTED}")
    count = top.values.get("num_target_layers")
    ids = _where(config, inner, "target_layer_ids").values.get("target_layer_ids") or []
    if count not in (None, target.layers, len(ids)):
        raise top.fail(
            "num_target_layers", f"is {count}, the target has {target.layers}; this head belongs to another model"
        )
    named = "dspark" in config.architectures.lower() or inner.values.get("projector_type") == "dspark"
    return config.speculators == "dspark" or (config.speculators is None and named)


def _taps(config: HeadConfig, inner: Fields, target: Model) -> list[int]:
    """The layers of the target whose input the head reads."""
    if config.speculators is not None:
        ids = config.layer_ids(config.top, "aux_hidden_state_layer_ids")
        if ids is None:
            raise config.top.fail("aux_hidden_state_layer_ids", "is missing: give the layers' numbers (taps)")
        return ids
    ids = config.layer_ids(_where(config, inner, "target_layer_ids"), "target_layer_ids")
    if ids is None:
        layers, last = config.layer.integer("num_hidden_layers"), target.layers - 3
        if layers == 1:
            ids = [target.layers // 2]
        elif last >= 1:
            ids = [round(1 + place * (last - 1) / (layers - 1)) for place in range(layers)]
        else:
            raise inner.fail("target_layer_ids", "is missing: give the layers' numbers (taps)")
    return [layer + 1 for layer in ids]


def _mask_token(config: HeadConfig, inner: Fields) -> int:
    fields = _where(config, inner, "mask_token_id")
    token = fields.values.get("mask_token_id")
    if type(token) is not int or token < 0:
        raise fields.fail("mask_token_id", f"must be the token that stands for an unknown one, not {short(token)}")
    return token


def _anchor_predicts(config: HeadConfig, inner: Fields, is_dspark: bool) -> bool:
    fields = _where(config, inner, "sample_from_anchor")
    if fields.values.get("sample_from_anchor") is not None:
        return fields.flag("sample_from_anchor")
    return not config.top.flag("dspark_bonus_anchor", not is_dspark)


def _small_heads(config: HeadConfig, inner: Fields, tensors: HeadTensors, hidden: int) -> dict[str, Any]:
    """DSpark's Markov term and confidence: what the file has, which config.json must not contradict."""
    fields = _where(config, inner, "markov_rank")
    said, found = fields.values.get("markov_rank") or 0, tensors.has(_MARKOV[0])
    rank = tensors.shape(_MARKOV[0])[-1] if found else 0
    if said != rank:
        has = f"the file's is of rank {rank}" if found else "the file has no Markov term"
        raise fields.fail("markov_rank", f"is {short(said)}, but {has}")
    fields = _where(config, inner, "markov_head_type")
    kind = fields.values.get("markov_head_type", "vanilla") if rank else "vanilla"
    if kind not in ("vanilla", "gated"):
        raise fields.fail("markov_head_type", f"= {short(kind)} is not supported; supported: 'vanilla', 'gated'")
    markov_kind: Literal["plain", "gated"] = "gated" if kind == "gated" else "plain"
    confidence = tensors.has(_CONFIDENCE)
    fields = _where(config, inner, "enable_confidence_head")
    if fields.flag("enable_confidence_head", confidence) != confidence:
        raise fields.fail(
            "enable_confidence_head", f"does not agree with the file, which {'has' if confidence else 'lacks'} one"
        )
    reads_markov = confidence and rank > 0 and tensors.shape(_CONFIDENCE)[-1] == hidden + rank
    return {
        "markov": rank,
        "markov_kind": markov_kind,
        "confidence": confidence,
        "confidence_reads_markov": reads_markov,
    }


def _parts(about: DflashHead, tensors: HeadTensors, target: Model) -> Parts:
    own = about.model
    parts: Parts = {
        "fc": [("fc.weight", (own.hidden, len(about.taps) * target.hidden))],
        "hidden_norm": [("hidden_norm.weight", (own.hidden,))],
        "norm": [("norm.weight", (own.hidden,))],
    }
    for layer in range(own.layers):
        parts |= layer_parts(layer, f"layers.{layer}", own, own.hidden)
    if about.own_lm_head:
        rows = own.vocabulary if about.mapped else own_rows(tensors, LM_HEAD, target)
        parts["lm_head"] = [(LM_HEAD, (rows, own.hidden))]
    if about.own_embedding:
        parts["embed"] = [(EMBEDDING, (own_rows(tensors, EMBEDDING, target), own.hidden))]
    if about.markov:
        rows = own.vocabulary if about.mapped else own_rows(tensors, _MARKOV[1], target)
        parts["markov.embed"] = [(_MARKOV[0], (own_rows(tensors, _MARKOV[0], target), about.markov))]
        parts["markov.head"] = [(_MARKOV[1], (rows, about.markov))]
        if about.markov_kind == "gated":
            parts["markov.gate"] = [(_GATE, (about.markov, own.hidden + about.markov))]
    if about.confidence:
        inputs = own.hidden + (about.markov if about.confidence_reads_markov else 0)
        parts["confidence.weight"] = [(_CONFIDENCE, (1, inputs))]
    return parts
