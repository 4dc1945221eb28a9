"""Opens what drafts for a target, and refuses what belongs to another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ull.bundle import (
    DFLASH,
    DRAFT,
    EAGLE,
    DeviceCode,
    DflashHead,
    DraftModel,
    EagleHead,
    MedusaHeads,
    Model,
    Precision,
    Speculation,
    Target,
    device_head_precision,
    host_head_precision,
)
from ull.errors import CheckpointError
from ull.wire import MAX_TREE, Drafter
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.heads.dflash import read_dflash
from ull_build.source.heads.eagle import read_eagle
from ull_build.source.heads.head import NO_OPTIONS, Head, HeadOptions
from ull_build.source.heads.tensors import HeadTensors
from ull_build.source.medusa import MedusaWeights, check_medusa, read_medusa
from ull_build.source.vocabulary import CheckpointTokenizer, Vocabulary, build_vocabulary, load_tokenizer


@dataclass(frozen=True)
class Drafters:
    """What drafts for the model and is stored beside it."""

    medusa: MedusaWeights | None = None
    draft: Checkpoint | None = None
    eagle: Head[EagleHead] | None = None
    dflash: Head[DflashHead] | None = None

    @property
    def notes(self) -> list[str]:
        """What a person should know about how the heads were read."""
        return [note for head in (self.eagle, self.dflash) if head is not None for note in head.notes]

    @property
    def heads(self) -> MedusaHeads | None:
        """The manifest's account of the Medusa heads."""
        return None if self.medusa is None else self.medusa.description


NO_DRAFTERS = Drafters()


@dataclass(frozen=True)
class SpeculationSettings:
    """What a recipe says about speculation. `medusa_count` None takes all heads of the file."""

    default: Drafter = "auto"
    max_tree: int = MAX_TREE
    medusa: Path | None = None
    medusa_count: int | None = None
    draft: Path | None = None
    eagle: Path | None = None
    eagle_options: HeadOptions = NO_OPTIONS
    dflash: Path | None = None
    dflash_options: HeadOptions = NO_OPTIONS


@contextmanager
def open_drafters(
    settings: SpeculationSettings, checkpoint: Checkpoint, model: Model, tokenizer: CheckpointTokenizer
) -> Iterator[Drafters]:
    """The drafters of the target in `checkpoint` with `model` and `tokenizer`, checked. Raises CheckpointError."""
    medusa = None
    if settings.medusa is not None:
        medusa = read_medusa(settings.medusa, settings.medusa_count)
        check_medusa(medusa, model)
    with ExitStack() as opened:
        draft = eagle = dflash = None
        if settings.eagle is not None:
            tensors = opened.enter_context(HeadTensors(settings.eagle))
            eagle = read_eagle(tensors, checkpoint, model, settings.eagle_options)
        if settings.dflash is not None:
            tensors = opened.enter_context(HeadTensors(settings.dflash))
            dflash = read_dflash(tensors, checkpoint, model, settings.dflash_options)
        if settings.draft is not None:
            draft = opened.enter_context(Checkpoint(settings.draft))
            _check_draft(settings.draft, draft, model, tokenizer.vocabulary)
        yield Drafters(medusa, draft, eagle, dflash)


def describe(
    settings: SpeculationSettings,
    drafters: Drafters,
    model: Model,
    precision: Precision,
    target: Target = "cpu",
) -> Speculation:
    """The manifest's account of speculation, without code."""
    draft, of_heads = None, (host_head_precision if target == "cpu" else device_head_precision)(precision)
    if drafters.draft is not None:
        sizes = msgspec.structs.replace(drafters.draft.model, tokenizer_vocabulary=model.tokenizer_vocabulary)
        draft = DraftModel(model=sizes, precision=precision)
    return Speculation(
        default=settings.default,
        max_tree=settings.max_tree,
        medusa=drafters.heads,
        draft=draft,
        eagle=None if drafters.eagle is None else msgspec.structs.replace(drafters.eagle.about, precision=of_heads),
        dflash=None if drafters.dflash is None else msgspec.structs.replace(drafters.dflash.about, precision=of_heads),
    )


def with_code(speculation: Speculation, code: Mapping[str, DeviceCode]) -> Speculation:
    """The same with the code of what drafts on a GPU, by its prefix."""
    draft, eagle, dflash = speculation.draft, speculation.eagle, speculation.dflash
    return msgspec.structs.replace(
        speculation,
        draft=None if draft is None else msgspec.structs.replace(draft, code=code.get(DRAFT)),
        eagle=None if eagle is None else msgspec.structs.replace(eagle, code=code.get(EAGLE)),
        dflash=None if dflash is None else msgspec.structs.replace(dflash, code=code.get(DFLASH)),
    )


def _check_draft(path: Path, draft: Checkpoint, model: Model, vocabulary: Vocabulary) -> None:
    """A draft model must speak of the same tokens, and as far into a session as the target."""
    if draft.model.context < model.context:
        raise CheckpointError(
            f"the draft model {path} holds {draft.model.context} tokens, the target {model.context}; lower `context` "
            f"to {draft.model.context}, or use another draft model",
            field="draft",
        )
    if draft.model.vocabulary < vocabulary.count:
        raise CheckpointError(
            f"the draft model {path} has {draft.model.vocabulary} embedding rows, the target's tokenizer "
            f"{vocabulary.count} tokens; the two must share a tokenizer",
            field="draft",
        )
    file = path / "tokenizer.json"
    if not file.exists():
        if draft.model.vocabulary != model.vocabulary:
            raise CheckpointError(
                f"{file} is missing, and the draft model has {draft.model.vocabulary} embedding rows, the target "
                f"{model.vocabulary}: whether they share a tokenizer cannot be told; put the draft model's there",
                field="draft",
            )
        return
    other = build_vocabulary(load_tokenizer(file))
    for token in range(max(vocabulary.count, other.count)):
        own, theirs = _piece(vocabulary, token), _piece(other, token)
        if own != theirs:
            raise CheckpointError(
                f"the draft model {path} has another tokenizer: token {token} is {_show(theirs)}, the target's is "
                f"{_show(own)}",
                field="draft",
            )


def _piece(vocabulary: Vocabulary, token: int) -> bytes | None:
    """The text of a token; None for special and missing ones, which may be named or reserved differently."""
    return None if token >= vocabulary.count or vocabulary.special[token] else vocabulary.pieces[token]


def _show(piece: bytes | None) -> str:
    return "no text" if piece is None else repr(piece.decode(errors="replace"))[:60]
