"""What to build, as a recipe and the command line say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec

from ull.bundle import FromHub, Precision, RecipeValue, Target, keeps_taps, runs_draft_models
from ull_build.recipe import DflashRecipe, EagleRecipe, ForwardRecipe, Recipe
from ull_build.source.drafters import SpeculationSettings
from ull_build.source.heads.head import HeadOptions
from ull_build.source.hub import HubId, hub_id

_MEDUSA_LEFT_OUT = (
    "the recipe's Medusa heads are left out: they read the hidden state of ull's own decode, and TensorRT decodes; "
    'forward.decode = "fused" keeps them'
)


@dataclass(frozen=True)
class Settings:
    """What to build. A text of None is the default one; `evaluate` False leaves the quality unmeasured.

    `calibrate`: FP8 linears get FP8 inputs too, as TensorRT's plans need; their ranges are measured, not without
    `evaluate`.
    """

    model: Path
    output: Path
    name: str
    target: Target = "cpu"
    precision: Precision = field(default_factory=Precision)
    context: int | None = None
    evaluate: bool = True
    eval_text: Path | None = None
    eval_tokens: int = 4096
    evaluate_on: Literal["cpu", "gpu"] = "cpu"
    calibrate: bool = False
    calibration_text: Path | None = None
    calibration_tokens: int = 2048
    max_perplexity_increase: float = 0.01
    lora: Path | None = None  # an adapter that is merged into the model
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    allow_weak_drafter: bool = False
    forward: ForwardRecipe = field(default_factory=ForwardRecipe)
    force: bool = False
    threads: int = 0  # 0: as many as this process may use
    recipe: dict[str, RecipeValue] = field(default_factory=dict)
    from_hub: dict[FromHub, HubId] = field(default_factory=dict)  # what to fetch first; its path is none until then
    notes: tuple[str, ...] = ()  # what the recipe asks for and this build leaves out, and why

    @property
    def on_cpu(self) -> bool:
        return self.target == "cpu"

    @property
    def evaluates_on_gpu(self) -> bool:
        return self.evaluate and self.evaluate_on == "gpu"


def settings_from_recipe(recipe: Recipe, *, evaluate: bool = True, force: bool = False) -> Settings:
    """The settings that a recipe asks for. What a GPU cannot draft with is left out, Medusa heads with a note."""
    medusa = recipe.medusa if recipe.forward.decode == "fused" else None
    notes = [_MEDUSA_LEFT_OUT] if recipe.medusa is not None and medusa is None else []
    draft = recipe.draft if runs_draft_models(recipe.target) else None
    keeps = keeps_taps(recipe.target, recipe.forward.prefill, recipe.forward.decode)
    eagle, dflash = (recipe.eagle, recipe.dflash) if keeps else (None, None)
    places: dict[FromHub, str | None] = {
        "model": recipe.model,
        "lora": recipe.lora,
        "medusa": None if medusa is None else medusa.heads,
        "draft": None if draft is None else draft.model,
        "eagle": None if eagle is None else eagle.head,
        "dflash": None if dflash is None else dflash.head,
    }
    return Settings(
        model=Path(recipe.model),
        output=Path(recipe.output),
        name=recipe.name,
        lora=None if recipe.lora is None else Path(recipe.lora),
        target=cast(Target, recipe.target),
        precision=Precision(
            weights=recipe.precision, lm_head=recipe.lm_head, kv=recipe.kv, lm_head_scan=recipe.lm_head_scan
        ),
        context=recipe.context,
        evaluate=evaluate,
        eval_text=None if recipe.eval_text is None else Path(recipe.eval_text),
        eval_tokens=recipe.eval_tokens,
        evaluate_on=recipe.evaluate_on,
        calibrate=recipe.forward.has_plans,
        calibration_text=None if recipe.calibration_text is None else Path(recipe.calibration_text),
        calibration_tokens=recipe.calibration_tokens,
        max_perplexity_increase=recipe.max_perplexity_increase,
        speculation=SpeculationSettings(
            default=recipe.drafter,
            max_tree=recipe.speculation.max_tree,
            medusa=None if medusa is None else Path(medusa.heads),
            medusa_count=None if medusa is None else medusa.num,
            draft=None if draft is None else Path(draft.model),
            eagle=None if eagle is None else Path(eagle.head),
            eagle_options=_options(eagle),
            dflash=None if dflash is None else Path(dflash.head),
            dflash_options=_options(dflash),
        ),
        allow_weak_drafter=recipe.allow_weak_drafter,
        forward=recipe.forward,
        force=force,
        recipe={key: value for key, value in msgspec.to_builtins(recipe).items() if key != "output"},
        from_hub={kind: found for kind, place in places.items() if place and (found := hub_id(place)) is not None},
        notes=tuple(notes),
    )


def _options(head: EagleRecipe | DflashRecipe | None) -> HeadOptions:
    """Where the recipe knows better than the head's config.json."""
    if head is None:
        return HeadOptions()
    return HeadOptions(
        taps=None if head.taps is None else tuple(head.taps),
        theta=head.theta,
        norm_output=head.norm_output if isinstance(head, EagleRecipe) else None,
        anchor_predicts=head.anchor_predicts if isinstance(head, DflashRecipe) else None,
    )
