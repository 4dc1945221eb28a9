"""Reads EAGLE-3 and EAGLE-3.1 heads in the forms in which they are published.

The original's form (SafeAILab's EAGLE, SpecForge, AngelSlim):
  config.json: a Llama's with num_hidden_layers 1; vocab_size the target's, draft_vocab_size the head's. SpecForge's
    names neither rope_theta nor rope_scaling: 10000 holds, whatever the target's is. The layers whose input is read are
    2, N / 2 and N - 3 of the target's N, unless `eagle_config.eagle_aux_hidden_state_layer_ids` lists layers by
    SGLang's count, one less, or `eagle_aux_hidden_state_layer_ids` by vLLM's, which is ours.
    `eagle_config.use_aux_hidden_state` false: a head of EAGLE-1 or 2. `fc_norm` and `norm_output`: EAGLE-3.1.
    SpecForge's `norm_output` had the opposite meaning for some months and was on by default; without `fc_norm` it is
    no EAGLE-3.1 and left aside.
  model.safetensors or pytorch_model.bin: midlayer.{input_layernorm, hidden_norm, post_attention_layernorm, self_attn.
    {q,k,v,o}_proj, mlp.{gate,up,down}_proj}.weight (vLLM: layers.0.*), fc.weight, norm.weight, lm_head.weight,
    fc_norm.{0,1,2}.weight, d2t (offsets, i64), t2d (bool), maybe embed_tokens.weight. The prefix "model." may stand
    before all.
speculators' form (RedHatAI):
  config.json: speculators_model_type "eagle3", speculators_config, transformer_layer_config {a Llama's}, and beside it
    draft_vocab_size, norm_before_residual, norm_before_fc, fc_norm, norm_output, target_hidden_size,
    eagle_aux_hidden_state_layer_ids (layers whose input is read; null: as above).
  model.safetensors: layers.0.* as midlayer.* above; input_norm.weight with norm_before_fc; the rest alike.
"""

from __future__ import annotations

from typing import Literal

from ull.bundle import EagleHead, Model, Precision
from ull.errors import CheckpointError
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.config_fields import short
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

_KIND = "an EAGLE-3 head"
_SUPPORTED = "supported: EAGLE-3 and EAGLE-3.1 heads of one layer"
_LAYERS = ("midlayer", "layers.0")


def read_eagle(
    tensors: HeadTensors, checkpoint: Checkpoint, target: Model, options: HeadOptions = NO_OPTIONS
) -> Head[EagleHead]:
    """The head in `tensors` for the target of `checkpoint`. Raises CheckpointError naming file, field and remedy."""
    directory = tensors.directory
    config = HeadConfig(directory)
    _check_variant(config, tensors)
    config.check_target(target)
    source = next((name for name in _LAYERS if tensors.has(f"{name}.self_attn.q_proj.weight")), _LAYERS[0])
    if not tensors.has(f"{source}.hidden_norm.weight"):
        raise CheckpointError(
            f"{directory} lacks tensor '{source}.hidden_norm.weight': an EAGLE-1 or EAGLE-2 head, or none at all; "
            f"{_SUPPORTED}",
            field=f"{source}.hidden_norm.weight",
        )
    rows = tensors.shape(LM_HEAD)[0] if tensors.has(LM_HEAD) else 0
    if rows == 0:
        raise CheckpointError(f"{directory} lacks tensor {LM_HEAD!r}, which {_KIND} has", field=LM_HEAD)
    qk_norm = tensors.has(f"{source}.self_attn.q_norm.weight")
    d2t = read_map(tensors, rows, target)
    own = config.own_model(target, "llama", 1, qk_norm, rows if d2t is not None else target.vocabulary, options.theta)
    count = taps_of_fc(tensors, target)
    taps = list(options.taps or _taps(config, target, count))
    if len(taps) != count:
        raise CheckpointError(
            f"{directory}: fc.weight reads {count} hidden states, {taps} are {len(taps)} layers; give their numbers "
            "(taps)",
            field="taps",
        )
    tap_norm = _tap_norm(config, tensors, count)
    norm_output, notes = _norm_output(config, tap_norm, options)
    own_embedding = tensors.has(EMBEDDING) and not is_targets(tensors, EMBEDDING, checkpoint)
    about = EagleHead(
        model=own,
        precision=Precision(),
        taps=taps,
        norm_before_residual=config.top.flag("norm_before_residual"),
        norm_output=norm_output,
        tap_norm=tap_norm,
        own_embedding=own_embedding,
        mapped=d2t is not None,
    )
    check_fit(about, target, directory)
    sources = check_parts(tensors, _parts(about, tensors, target, source), _KIND, (EMBEDDING, "d2t"))
    if not config.names_theta and options.theta is None and own.rope.theta != target.rope.theta:
        notes.append(
            f"the EAGLE head's config.json names no rope_theta: {own.rope.theta:g} holds, as in transformers, not the "
            f"target's {target.rope.theta:g} (theta)"
        )
    return Head(about, tensors, sources, d2t, tuple(notes))


def _check_variant(config: HeadConfig, tensors: HeadTensors) -> None:
    """Refuses what is called EAGLE, or lies in such a file, and is something else."""
    top, layer = config.top, config.layer
    if config.speculators not in (None, "eagle3"):
        raise top.fail("speculators_model_type", f'is {short(config.speculators)}; {_SUPPORTED} ("eagle3")')
    if "eagle4" in config.architectures.lower() or any(name.startswith("efficient_lm_head") for name in tensors.names):
        raise top.fail("architectures", f"say that this is an EAGLE-4 head; {_SUPPORTED}")
    parallel = top.values.get("parallel_drafting") or tensors.has("mask_hidden")
    if parallel or "peagle" in config.architectures.lower():
        raise top.fail("parallel_drafting", f"is a P-EAGLE head's; {_SUPPORTED}")
    for fields in (config.nested("eagle_config"), top):
        if fields.values.get("use_aux_hidden_state") is False:
            raise fields.fail("use_aux_hidden_state", f"is false, as in EAGLE-1 and EAGLE-2; {_SUPPORTED}")
    if layer.integer("num_hidden_layers", 1) != 1:
        raise layer.fail("num_hidden_layers", f"is {layer.integer('num_hidden_layers')}; {_SUPPORTED}")


def _taps(config: HeadConfig, target: Model, count: int) -> list[int]:
    """The layers of the target whose input the head reads, as config.json or else the convention says."""
    name = "eagle_aux_hidden_state_layer_ids"
    if (ids := config.layer_ids(config.top, name)) is not None:
        return ids
    if (ids := config.layer_ids(config.nested("eagle_config"), name)) is not None:
        return [layer + 1 for layer in ids]
    taps = [2, target.layers // 2, target.layers - 3]
    if count != len(taps) or min(taps) < 0:
        raise config.top.fail(
            name, f"is missing, and fc reads {count} of the target's {target.layers} layers: give their numbers (taps)"
        )
    return taps


def _tap_norm(config: HeadConfig, tensors: HeadTensors, count: int) -> Literal["none", "each", "all"]:
    """Which norms stand before fc: those that the file has, if config.json does not say otherwise."""
    found = {"fc_norm": tensors.has("fc_norm.0.weight"), "norm_before_fc": tensors.has("input_norm.weight")}
    for name, has in found.items():
        said = config.top.flag(name, has)
        if said != has:
            raise config.top.fail(name, f"is {str(said).lower()}, but the file {'has' if has else 'lacks'} such norms")
    if all(found.values()):
        raise config.top.fail("fc_norm", "and `norm_before_fc` exclude each other, and the file has the norms of both")
    return "each" if found["fc_norm"] else "all" if found["norm_before_fc"] else "none"


def _norm_output(config: HeadConfig, tap_norm: str, options: HeadOptions) -> tuple[bool, list[str]]:
    """Whether the next step is fed the normalised output, and what a person should know about that."""
    said = config.top.flag("norm_output")
    if options.norm_output is not None:
        return options.norm_output, []
    if said and config.speculators is None and tap_norm == "none":
        return False, [
            "the EAGLE head's config.json says norm_output, but has no fc_norm: taken for a plain EAGLE-3 head of "
            "SpecForge's, whose norm_output meant the opposite (norm_output)"
        ]
    return said, []


def _parts(about: EagleHead, tensors: HeadTensors, target: Model, source: str) -> Parts:
    own, count = about.model, len(about.taps)
    parts: Parts = {"fc": [("fc.weight", (own.hidden, count * target.hidden))]}
    if about.tap_norm == "each":
        parts |= {f"tap_norm.{tap}": [(f"fc_norm.{tap}.weight", (target.hidden,))] for tap in range(count)}
    elif about.tap_norm == "all":
        parts["tap_norm"] = [("input_norm.weight", (count * target.hidden,))]
    parts |= layer_parts(0, source, own, 2 * own.hidden)
    parts["layers.0.hidden_norm"] = [(f"{source}.hidden_norm.weight", (own.hidden,))]
    parts["norm"] = [("norm.weight", (own.hidden,))]
    rows = own.vocabulary if about.mapped else own_rows(tensors, LM_HEAD, target)
    parts["lm_head"] = [(LM_HEAD, (rows, own.hidden))]
    if about.own_embedding:
        parts["embed"] = [(EMBEDDING, (own_rows(tensors, EMBEDDING, target), own.hidden))]
    return parts
