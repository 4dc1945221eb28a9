"""Recipes: `engines/NAME.toml`, what to build and how. Every key is documented here, once, with unit and default."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ull.bundle import (
    FUSED,
    GPU_ARCHITECTURES,
    MAX_TAPS,
    AttentionKind,
    Forward,
    PrefillSource,
    ProfileScheme,
    Source,
    TreeProducts,
    default_tree_products,
    fast_prefill_problems,
    keeps_taps,
    runs_draft_models,
    tree_products_problems,
)
from ull.errors import RecipeError
from ull.wire import MAX_TREE, Drafter
from ull.words import words_of
from ull_build.source.hub import named_source

Taps = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=MAX_TAPS)]
Theta = Annotated[float, Meta(gt=0.0)]
TARGETS = {"cpu": "any x86-64 or ARM machine"} | {name: item.machines for name, item in GPU_ARCHITECTURES.items()}


class MedusaRecipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Medusa heads."""

    heads: Annotated[
        str, Meta(min_length=1, description="medusa_lm_head.pt or .safetensors, or the directory that holds it")
    ]
    num: Annotated[
        int | None, Meta(description="how many heads to take, the first ones; default: all that the file holds")
    ] = None

    def __post_init__(self) -> None:
        if self.num is not None and self.num < 1:
            raise ValueError("`num` must be at least 1 head")


class DraftRecipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A draft model."""

    model: Annotated[
        str, Meta(min_length=1, description="directory or Hub id of a smaller checkpoint with the same tokenizer")
    ]


class EagleRecipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An EAGLE-3 head."""

    head: Annotated[
        str, Meta(min_length=1, description="directory of an EAGLE-3 head: config.json and its weights, in any form")
    ]
    taps: Annotated[
        Taps | None, Meta(description="layers of the model whose input it reads; default: what its config.json says")
    ] = None
    theta: Annotated[
        Theta | None, Meta(description="base of its rotary embedding; default: its config.json's, or 10000")
    ] = None
    norm_output: Annotated[
        bool | None, Meta(description="its next step is fed the normalised output; default: what its config.json says")
    ] = None


class DflashRecipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A DFlash or DSpark head."""

    head: Annotated[
        str, Meta(min_length=1, description="directory of a DFlash or DSpark head: config.json and model.safetensors")
    ]
    taps: Annotated[
        Taps | None, Meta(description="layers of the model whose input it reads; default: what its config.json says")
    ] = None
    theta: Annotated[
        Theta | None, Meta(description="base of its rotary embedding; default: its config.json's, or 10000")
    ] = None
    anchor_predicts: Annotated[
        bool | None, Meta(description="its first position predicts too; default: as its config.json says, or its kind")
    ] = None


class SpeculationRecipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of speculation."""

    max_tree: Annotated[
        int, Meta(ge=1, le=MAX_TREE, description="most tokens that one verification holds, the last accepted included")
    ] = MAX_TREE


class ForwardRecipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who computes the transformer's layers on a GPU."""

    prefill: Annotated[
        PrefillSource,
        Meta(
            description='how prompts are read: "exact", by ull\'s kernels with the bits of decode; "fast", by them '
            'with FP8 activations; or by "tensorrt", plans'
        ),
    ] = "exact"
    decode: Annotated[Source, Meta(description="who computes rounds, likewise")] = "fused"
    attention: Annotated[
        AttentionKind,
        Meta(description='of plans: "paged", ull\'s kernel between them, or "native", TensorRT\'s own, for comparison'),
    ] = "paged"
    profiles: Annotated[
        ProfileScheme,
        Meta(
            description='of plans that decode: "two" choices of kernels, for up to 16 tokens and for 64, or "seven", '
            "one for each size of round: longer builds, more memory, fewer sizes that agree bit for bit"
        ),
    ] = "two"
    tree_products: Annotated[
        TreeProducts | None,
        Meta(
            description='who multiplies for 16 and more tokens, with the same bits: "warpgroup" or "warp"; default: '
            "warpgroups where the target has them and ull's kernels compute alone"
        ),
    ] = None
    logits_limit: Annotated[
        float,
        Meta(
            gt=0.0,
            description="fraction by which plans' logits may be off the cpu executor's; an unstable kernel is off by 1",
        ),
    ] = 0.25

    @property
    def has_plans(self) -> bool:
        return "tensorrt" in (self.prefill, self.decode)

    @property
    def reads_fast(self) -> bool:
        return self.prefill == "fast"

    def own(self, target: str) -> Forward:
        """The manifest's account of what our own kernels compute: all of it, or where there are plans beside them."""
        if target == "cpu":
            return FUSED
        products = self.tree_products or default_tree_products(target, self.prefill, self.decode)
        return Forward(prefill="fast" if self.reads_fast else "exact", tree_products=products)

    def problems(self, target: str, weights: str) -> Iterator[tuple[str, str]]:
        """Why an engine for this target cannot be computed so, each with what can: the recipe's key, and the words.

        `weights`: their precision.
        """
        for problem in fast_prefill_problems(target, weights, self.prefill, self.decode):
            yield "forward.prefill", problem
        for problem in tree_products_problems(target, self.tree_products or "warp", self.prefill, self.decode):
            yield "forward.tree_products", problem

    @property
    def keeps_weights(self) -> bool:
        """Whether the bundle's weights file holds the linear layers."""
        return self.prefill != "tensorrt" or self.decode == "fused"


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One build. Paths are relative to the recipe's directory (`output`: to the current one)."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="the Hugging Face checkpoint: its directory, or its id on the Hub, ORG/NAME[@REVISION]",
        ),
    ]
    name: Annotated[str, Meta(min_length=1, description="name of the engine; default: the recipe's or output's name")]
    output: Annotated[str, Meta(min_length=1, description="bundle to write; default: NAME.ull")]
    target: Annotated[
        str, Meta(description='what the bundle runs on: "cpu", or a GPU\'s architecture, such as "sm_90a" (H100, H200)')
    ] = "cpu"
    precision: Annotated[
        Literal["fp8", "bf16"],
        Meta(description="format of the linear weights; fp8 is E4M3 with one scale per output channel"),
    ] = "fp8"
    lm_head: Annotated[Literal["bf16", "fp8"], Meta(description="format of the output head")] = "bf16"
    lm_head_scan: Annotated[
        bool,
        Meta(
            description="on a GPU: an FP8 copy beside a bf16 lm_head, half as much memory again, read in its place for "
            "greedy and plain sampled tokens; rows that may win are then computed in bf16, so the tokens are the same"
        ),
    ] = False
    kv: Annotated[
        Literal["bf16", "fp8", "f32"],
        Meta(
            description="format of the KV cache; fp8 halves it on a GPU, on cpu the same numbers are kept in 16 bits, "
            "without saving memory; f32 on cpu only"
        ),
    ] = "bf16"
    context: Annotated[
        int | None, Meta(description="tokens a session may hold; default: the model's max_position_embeddings")
    ] = None
    lora: Annotated[
        str | None,
        Meta(description="a LoRA adapter in PEFT's form, likewise; it is merged into the model"),
    ] = None
    eval_text: Annotated[
        str | None, Meta(description="UTF-8 text on which the loss is measured; default: a text that comes with ull")
    ] = None
    eval_tokens: Annotated[
        int, Meta(ge=2, le=1 << 24, description="tokens of eval_text to use at most; more is slower and more exact")
    ] = 4096
    evaluate_on: Annotated[
        Literal["cpu", "gpu"],
        Meta(description="where the loss is measured: gpu is quicker for large models, and needs one here"),
    ] = "cpu"
    calibration_text: Annotated[
        str | None,
        Meta(description="UTF-8 text on which activations and KV are measured; default: another that comes with ull"),
    ] = None
    calibration_tokens: Annotated[
        int, Meta(ge=2, le=1 << 24, description="tokens of calibration_text to use at most; more is slower")
    ] = 2048
    max_perplexity_increase: Annotated[
        float, Meta(description="fraction by which perplexity may rise before the build fails (0.01 = 1%)")
    ] = 0.01
    drafter: Annotated[
        Drafter, Meta(description="what drafts for requests that do not say; auto takes what is fastest at the time")
    ] = "auto"
    allow_weak_drafter: Annotated[
        bool,
        Meta(description="build with an EAGLE or DFlash head too that gives fewer than 1.3 tokens per round there"),
    ] = False
    medusa: Annotated[MedusaRecipe | None, Meta(description="table: Medusa heads")] = None
    draft: Annotated[DraftRecipe | None, Meta(description="table: a draft model")] = None
    eagle: Annotated[EagleRecipe | None, Meta(description="table: an EAGLE-3 head")] = None
    dflash: Annotated[DflashRecipe | None, Meta(description="table: a DFlash or DSpark head")] = None
    speculation: Annotated[SpeculationRecipe, Meta(description="table: limits of speculation")] = SpeculationRecipe()
    forward: Annotated[ForwardRecipe, Meta(description="table: who computes on a GPU")] = ForwardRecipe()

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise ValueError("`context` must be at least 1 token")
        if self.drafter == "medusa" and self.medusa is None:
            raise ValueError("`drafter` is medusa, but no heads are given: add [medusa] heads, or --medusa PATH")
        if self.drafter == "draft" and self.draft is None:
            raise ValueError("`drafter` is draft, but no draft model is given: add [draft] model, or --draft DIR")
        if self.drafter == "eagle" and self.eagle is None:
            raise ValueError("`drafter` is eagle, but no head is given: add [eagle] head, or --eagle DIR")
        if self.drafter == "dflash" and self.dflash is None:
            raise ValueError("`drafter` is dflash, but no head is given: add [dflash] head, or --dflash DIR")
        if not math.isfinite(self.max_perplexity_increase):
            raise ValueError("`max_perplexity_increase` must be finite")


_SECTIONS: dict[str, type[Struct]] = {
    "medusa": MedusaRecipe,
    "draft": DraftRecipe,
    "eagle": EagleRecipe,
    "dflash": DflashRecipe,
    "speculation": SpeculationRecipe,
    "forward": ForwardRecipe,
}
_SECTION_PATHS = (("medusa", "heads"), ("draft", "model"), ("eagle", "head"), ("dflash", "head"))


def load_recipe(path: Path, overrides: dict[str, Any]) -> Recipe:
    """Reads a recipe; `overrides` (from the command line) win. Paths come out relative to the current directory.

    Raises RecipeError naming the key, and for an unknown key the nearest valid one.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"no recipe at {path}", field=str(path)) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", field=str(path)) from error
    for key in ("eval_text", "calibration_text"):
        if isinstance(values.get(key), str):
            values[key] = str(path.parent / values[key])
    values, overrides = _with_sources(values, path.parent), _with_sources(overrides, Path())
    values.setdefault("name", path.stem)
    forward = values.get("forward")
    if isinstance(forward, dict) and "forward" in overrides:  # options name parts of it
        overrides = {**overrides, "forward": {**forward, **overrides["forward"]}}
    return _checked({**values, **overrides}, str(path))


def make_recipe(values: dict[str, Any], origin: str) -> Recipe:
    """Checks the keys and values of a recipe; `origin` is where they come from, for messages.

    Paths are relative to the current directory.
    """
    return _checked(_with_sources(values, Path()), origin)


def _with_sources(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """The values with each checkpoint's place as `named_source` has it."""
    placed = dict(values)
    for key in ("model", "lora"):
        if isinstance(values.get(key), str):
            placed[key] = named_source(values[key], base)
    for section, key in _SECTION_PATHS:
        table = values.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            placed[section] = {**table, key: named_source(table[key], base)}
    return placed


def _checked(values: dict[str, Any], origin: str) -> Recipe:
    """The recipe of values whose paths are the current directory's. Raises RecipeError."""
    _check_keys(values, Recipe, origin, "")
    for section, kind in _SECTIONS.items():
        if isinstance(values.get(section), dict):
            _check_keys(values[section], kind, origin, f"{section}.")
    if "model" not in values:
        raise RecipeError(f"{origin}: `model` is missing; it names the checkpoint's directory", field="model")
    if "name" in values and "output" not in values:
        values = {**values, "output": f"{values['name']}.ull"}
    elif "output" in values and "name" not in values:
        values = {**values, "name": Path(values["output"]).name.removesuffix(".ull")}
    try:
        recipe = msgspec.convert(values, type=Recipe)
    except msgspec.ValidationError as error:
        text = str(error)
        _, found, rest = text.rpartition(" - at `$.")
        key = rest.rstrip("`") if found else None
        words = words_of(Recipe, key) if key is not None and text.startswith("Invalid enum value") else []
        remedy = "; use one of " + ", ".join(f'"{word}"' for word in words) if words else ""
        raise RecipeError(f"{origin}: {text.replace('$.', '')}{remedy}", field=key) from error
    _check_target(recipe, origin)
    return recipe


def _check_target(recipe: Recipe, origin: str) -> None:
    """What a target can do. Raises RecipeError saying what it can do instead."""
    if recipe.target not in TARGETS:
        known = ", ".join(f'"{name}" ({machine})' for name, machine in TARGETS.items())
        raise RecipeError(f'{origin}: target "{recipe.target}" is unknown; use {known}', field="target")
    forward = recipe.forward
    for key, problem in forward.problems(recipe.target, recipe.precision):
        raise RecipeError(f"{origin}: {problem}", field=key)
    if recipe.target == "cpu":
        if recipe.evaluate_on == "gpu":
            raise RecipeError(f'{origin}: evaluate_on "gpu" is for GPU targets', field="evaluate_on")
        if forward.has_plans:
            raise RecipeError(f'{origin}: forward "tensorrt" needs a GPU: --target sm_90a', field="forward")
        return
    if recipe.evaluate_on == "gpu" and (forward.has_plans or recipe.kv == "fp8"):
        what = "TensorRT's FP8 activations" if forward.has_plans else "FP8 pages"
        raise RecipeError(f'{origin}: {what} are calibrated on the cpu: evaluate_on "cpu"', field="evaluate_on")
    if recipe.kv == "f32":
        raise RecipeError(f'{origin}: kv "f32" is for target "cpu"; {recipe.target} keeps "bf16" or "fp8"', field="kv")
    if forward.attention == "native":
        if (forward.prefill, forward.decode) != ("tensorrt", "tensorrt"):
            reason = "native attention has a KV cache of its own: both phases must be tensorrt (--forward tensorrt)"
            raise RecipeError(f"{origin}: {reason}", field="forward.attention")
        if recipe.kv != "bf16":
            raise RecipeError(f'{origin}: native attention keeps its KV cache in "bf16"', field="kv")
    _check_drafters(recipe, origin)


def _check_drafters(recipe: Recipe, origin: str) -> None:
    """What a GPU cannot draft with must not be what the recipe drafts with; else it is left out of the build."""
    useless = {}
    if recipe.draft is not None and not runs_draft_models(recipe.target):
        useless["draft"] = f"a draft model does not run on target {recipe.target}"
    if recipe.medusa is not None and recipe.forward.decode != "fused":
        useless["medusa"] = "Medusa heads read the hidden state of ull's own decode, not of TensorRT's"
    if not keeps_taps(recipe.target, recipe.forward.prefill, recipe.forward.decode):
        for given, kind in (("eagle", "an EAGLE"), ("dflash", "a DFlash")):
            if getattr(recipe, given) is not None:
                useless[given] = f"{kind} head reads hidden states that only ull's own kernels leave"
    for given, reason in useless.items():
        if recipe.drafter in ("auto", given):
            raise RecipeError(
                f"{origin}: {reason}, so [{given}] has no use; remove it, or leave it out of this build with "
                "--drafter suffix (or none)",
                field=given,
            )


def _check_keys(values: dict[str, Any], kind: type[Struct], origin: str, prefix: str) -> None:
    """Refuses keys that a table does not have, naming the nearest one that it has."""
    known = kind.__struct_fields__
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean `{prefix}{near[0]}`?" if near else f"valid keys: {', '.join(known)}"
            raise RecipeError(f"{origin}: unknown key `{prefix}{key}`; {hint}", field=prefix + key)


def describe_keys(kind: type[Struct] = Recipe, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key, for help texts: read from the structs, so that they cannot disagree."""
    rows = []
    for field in msgspec.structs.fields(kind):
        if not prefix and field.name in _SECTIONS:
            rows += describe_keys(_SECTIONS[field.name], f"{field.name}.")
            continue
        meta = next((item for item in getattr(field.type, "__metadata__", ()) if isinstance(item, Meta)), None)
        needed = field.required and field.name not in ("name", "output")  # those two have defaults of their own
        default = "required" if needed else "" if field.required else repr(field.default)
        rows.append((prefix + field.name, default, (meta.description or "") if meta else ""))
    return rows
