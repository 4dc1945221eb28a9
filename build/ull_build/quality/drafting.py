"""What a bundle's drafters win: tokens per round on a text, drafted and verified by the CPU executor.

A head that reads hidden states says little about how it was made, and a wrong reading gives no error, only drafts that
nobody accepts. So a build drafts with it, and where that wins next to nothing it tries the readings that are usually
confused and names the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import (
    DflashHead,
    EagleHead,
    Model,
    Precision,
    Rope,
    Speculation,
    StoredDrafter,
    native_spec,
    read_tensor_file,
)
from ull.errors import BuildError
from ull_build.progress import Reporter
from ull_build.quality.evaluate import EvaluationText

WEAK = 1.3  # tokens per round; every round gives one without any drafter
_PROMPTS, _PROMPT_TOKENS, _DRAFTED_TOKENS = 8, 128, 48
_MOST_TREE = 16  # nodes: enough to tell a good head from a misread one, on a CPU at a price that a build can pay
_NAMES: dict[StoredDrafter, str] = {
    "medusa": "the Medusa heads",
    "draft": "the draft model",
    "eagle": "the EAGLE head",
    "dflash": "the DFlash head",
}

AnyHead = TypeVar("AnyHead", EagleHead, DflashHead)


@dataclass(frozen=True)
class DraftedBundle:
    """The written weights of a CPU bundle, and what drafts for them."""

    model: Model
    precision: Precision
    weights: Path
    speculation: Speculation
    threads: int

    @property
    def drafters(self) -> list[StoredDrafter]:
        kinds: tuple[StoredDrafter, ...] = ("medusa", "draft", "eagle", "dflash")
        return [kind for kind in kinds if getattr(self.speculation, kind) is not None]


def check_drafters(
    bundle: DraftedBundle, text: EvaluationText, allow_weak: bool, reporter: Reporter
) -> dict[StoredDrafter, float]:
    """Tokens per round of each drafter in the bundle on the text.

    Raises BuildError for an EAGLE or DFlash head below WEAK, unless it is allowed; then it is noted, as weak Medusa
    heads and draft models are, which a build cannot misread.
    """
    rates: dict[StoredDrafter, float] = {}
    for kind in bundle.drafters:
        rates[kind] = tokens_per_round(bundle, kind, text, reporter)
        if rates[kind] >= WEAK:
            continue
        head = getattr(bundle.speculation, kind)
        weak = f"{_NAMES[kind]} wins next to nothing on {text.name}: {rates[kind]:.2f} tokens per round"
        if not isinstance(head, EagleHead | DflashHead):
            reporter.note(weak)
            continue
        problem = f"{weak}, where {WEAK} are expected. {_advice(bundle, kind, head, text, reporter)}"
        if not allow_weak:
            raise BuildError(f"{problem}. Or accept it with --allow-weak-drafter (allow_weak_drafter)", field=kind)
        reporter.note(problem)
    return rates


def tokens_per_round(bundle: DraftedBundle, kind: StoredDrafter, text: EvaluationText, reporter: Reporter) -> float:
    """Tokens that a round of the drafter gives, greedily, after the beginnings of the text's windows."""
    prompts = _prompts(text, bundle.model.context)
    count = min(_DRAFTED_TOKENS, bundle.model.context - len(prompts[0]))
    context = len(prompts[0]) + count
    tree = min(_MOST_TREE, bundle.speculation.max_tree)
    tensors = read_tensor_file(bundle.weights)
    spec = native_spec(bundle.model, bundle.weights, tensors, context, bundle.precision.kv, bundle.speculation)
    rounds = tokens = 0
    with reporter.stage(f"draft with {kind}", len(prompts) * count, "tokens") as advance:
        for out in _decoded(spec, prompts, count, kind, tree, bundle.threads):
            rounds, tokens = rounds + len(out["rounds"]), tokens + len(out["tokens"])
            advance(count)
    return max(1.0, tokens / max(1, rounds))


def _prompts(text: EvaluationText, context: int) -> list[NDArray[np.int32]]:
    length = max(1, min(_PROMPT_TOKENS, text.window // 2, context // 2))
    return [window[:length] for window in text.tokens.reshape(-1, text.window)[:_PROMPTS]]


def _decoded(
    spec: dict[str, Any], prompts: Sequence[NDArray[np.int32]], count: int, kind: StoredDrafter, tree: int, threads: int
) -> Iterator[dict[str, Any]]:
    """What the executor emits after each prompt, drafting in every round. Raises BuildError."""
    try:
        from ull import _native

        rig = _native.SpeculationRig(spec, threads=threads, adaptive=False)
        for prompt in prompts:
            out: dict[str, Any] = rig.decode(np.ascontiguousarray(prompt), count, {}, kind, tree)
            if out["failed"]:
                raise BuildError(f"drafting with {_NAMES[kind]} failed: its weights, or the model's, are damaged")
            yield out
    except ImportError as error:
        raise BuildError("the native core is not built; install ull, or skip the measurement with --no-eval") from error
    except (ValueError, RuntimeError, MemoryError) as error:
        raise BuildError(f"{_NAMES[kind]} cannot be run: {error}", field=kind) from error


def _advice(
    bundle: DraftedBundle, kind: StoredDrafter, head: EagleHead | DflashHead, text: EvaluationText, reporter: Reporter
) -> str:
    """What is likely wrong: the other readings with what they give."""
    found: list[tuple[float, str]] = []
    others = _other_eagles(head, bundle.model) if isinstance(head, EagleHead) else _other_dflashes(head, bundle.model)
    for what, other in others:
        speculation = msgspec.structs.replace(bundle.speculation, **{kind: other})
        tried = DraftedBundle(bundle.model, bundle.precision, bundle.weights, speculation, bundle.threads)
        found.append((tokens_per_round(tried, kind, text, reporter), what))
    tried_text = ", ".join(f"{what} gives {rate:.2f}" for rate, what in found)
    rate, what = max(found, default=(0.0, ""))
    if rate >= WEAK:
        return (
            f"Most likely its config.json does not say how it was made: with {what} it gives {rate:.2f}; put that "
            f"into the recipe's [{kind}] (tried: {tried_text})"
        )
    return (
        "Most likely it was trained for another model, another fine-tune of it or other quantised weights "
        f"(tried, without success: {tried_text})"
    )


def _other_eagles(head: EagleHead, target: Model) -> Iterator[tuple[str, EagleHead]]:
    """The readings that are confused with this one, by the recipe's keys."""
    yield from _other_taps_and_theta(head, target)
    output = not head.norm_output
    yield f"norm_output = {str(output).lower()}", msgspec.structs.replace(head, norm_output=output)


def _other_dflashes(head: DflashHead, target: Model) -> Iterator[tuple[str, DflashHead]]:
    yield from _other_taps_and_theta(head, target)
    anchor = not head.anchor_predicts
    yield f"anchor_predicts = {str(anchor).lower()}", msgspec.structs.replace(head, anchor_predicts=anchor)


def _other_taps_and_theta(head: AnyHead, target: Model) -> Iterator[tuple[str, AnyHead]]:
    for step in (-1, 1):
        taps = [tap + step for tap in head.taps]
        if min(taps) >= 0 and max(taps) <= target.layers:
            yield f"taps = {taps}", msgspec.structs.replace(head, taps=taps)
    if target.rope.theta != head.model.rope.theta:
        rope: Rope = msgspec.structs.replace(head.model.rope, theta=target.rope.theta)
        own: Model = msgspec.structs.replace(head.model, rope=rope)
        yield f"theta = {target.rope.theta:g}", msgspec.structs.replace(head, model=own)
