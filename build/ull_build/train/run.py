"""One training from the target to the weights, and what they win on held-out text. The door to PyTorch."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.nn import functional

from ull.bundle import Bundle
from ull.bundle.manifest import MAX_TAPS
from ull.errors import BuildError
from ull_build.progress import Reporter
from ull_build.source.architecture import parse_config
from ull_build.source.files import read_json
from ull_build.train import dflash as dflash_training
from ull_build.train import draft as draft_training
from ull_build.train import eagle as eagle_training
from ull_build.train import medusa as medusa_training
from ull_build.train.acceptance import Acceptance, describe, measure
from ull_build.train.data import Material, Sequences
from ull_build.train.heads import WEIGHTS
from ull_build.train.loop import choose_device
from ull_build.train.model import Decoder, frozen_target
from ull_build.train.unpack import bundle_weights

ACCEPTANCE_FILE = "acceptance.json"
DRAFT_DEPTH = 6  # tokens per round that the reported chain drafts


def run_medusa(options: argparse.Namespace, material: Material, reporter: Reporter) -> list[str]:
    """Trains heads; returns the lines that say what they win."""
    device, target = _target(options, material.bundle)
    settings = medusa_training.Settings(
        heads=options.heads,
        layers=options.layers,
        steps=options.steps,
        minutes=options.minutes,
        rate=options.rate,
        seed=options.seed,
    )
    initial = _initial(options.initial, medusa_training.WEIGHTS)
    heads = medusa_training.train_medusa(target, material.outputs, settings, device, reporter, options.output, initial)
    return _report(options.output, measure_heads(target, heads, material.unseen, device))


def run_draft(options: argparse.Namespace, material: Material, reporter: Reporter) -> list[str]:
    """Trains a draft model; returns the lines that say what it wins."""
    bundle = material.bundle
    device, target = _target(options, bundle)
    architecture = parse_config(read_json(options.config), {})
    sizes, wanted = architecture.model, bundle.manifest.model
    if sizes.vocabulary < wanted.tokenizer_vocabulary or sizes.context < wanted.context:
        raise BuildError(
            f"{options.config} asks for a vocabulary of {sizes.vocabulary} and a context of {sizes.context}; the "
            f"target needs {wanted.tokenizer_vocabulary} and {wanted.context} at least",
            field="config",
        )
    settings = draft_training.Settings(
        steps=options.steps,
        minutes=options.minutes,
        rate=options.rate,
        matrix_rate=options.matrix_rate,
        seed=options.seed,
    )
    initial = _initial(options.initial, draft_training.WEIGHTS)
    _copy_description(options, bundle)
    draft = draft_training.train_draft(
        target, architecture, material.rows(), material.outputs, settings, device, reporter, options.output, initial
    )
    return _report(options.output, measure_draft(draft, material.unseen, device))


def run_eagle(options: argparse.Namespace, material: Material, reporter: Reporter) -> list[str]:
    """Trains an EAGLE-3 head; returns the lines that say what it wins."""
    device, target = _target(options, material.bundle)
    settings = eagle_training.Settings(
        taps=_taps(options, material.bundle),
        vocabulary=options.vocabulary or target.sizes.vocabulary,
        intermediate=options.intermediate or target.sizes.intermediate,
        depths=options.depths,
        steps=options.steps,
        minutes=options.minutes,
        rate=options.rate,
        matrix_rate=options.matrix_rate,
        seed=options.seed,
    )
    initial = _initial(options.initial, WEIGHTS)
    head = eagle_training.train_eagle(
        target, material.rows(), material.outputs, settings, device, reporter, options.output, initial
    )
    return _report(options.output, measure_eagle(target, head, material.unseen, device))


def run_dflash(options: argparse.Namespace, material: Material, reporter: Reporter) -> list[str]:
    """Trains a DFlash head; returns the lines that say what it wins."""
    device, target = _target(options, material.bundle)
    rows = material.rows()
    mask = options.mask_token
    if mask is None:
        mask = dflash_training.rarest_token(target, rows, material.outputs)
    elif not 0 <= mask < target.sizes.vocabulary:
        raise BuildError(
            f"token {mask} is not in the target's vocabulary of {target.sizes.vocabulary}", field="mask_token"
        )
    settings = dflash_training.Settings(
        taps=_taps(options, material.bundle),
        intermediate=options.intermediate or target.sizes.intermediate,
        mask_token=mask,
        layers=options.layers,
        block=options.block,
        rank=options.rank,
        steps=options.steps,
        minutes=options.minutes,
        rate=options.rate,
        matrix_rate=options.matrix_rate,
        seed=options.seed,
    )
    initial = _initial(options.initial, WEIGHTS)
    head = dflash_training.train_dflash(
        target, rows, material.outputs, settings, device, reporter, options.output, initial
    )
    return _report(options.output, measure_dflash(target, head, material.unseen, device))


@torch.no_grad()
def measure_heads(
    target: Decoder, heads: medusa_training.Heads, unseen: Sequences, device: torch.device
) -> list[Acceptance]:
    """Acceptance of Medusa heads on the target's outputs."""

    def proposals(place: int, first: int, last: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(unseen.sequence(place)[:last]).long().to(device)
        states = target(tokens[None])[0, first:last].float()
        head = target.head.float()
        logits = [functional.linear(heads.apply_head(index, states), head) for index in range(len(heads))]
        return torch.stack(logits, dim=1).float().cpu().numpy()

    return measure(unseen, proposals, len(heads), first_ahead=2)


@torch.no_grad()
def measure_draft(draft: Decoder, unseen: Sequences, device: torch.device) -> list[Acceptance]:
    """Acceptance of a draft model on the target's outputs, drafting DRAFT_DEPTH tokens per round."""

    def proposals(place: int, first: int, last: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(unseen.sequence(place)[: last + DRAFT_DEPTH - 1]).long().to(device)
        states = draft(tokens[None])[0, first:]
        logits = functional.linear(states, draft.head).float().cpu().numpy()
        return np.lib.stride_tricks.sliding_window_view(logits, DRAFT_DEPTH, axis=0).transpose(0, 2, 1)

    return measure(unseen, proposals, DRAFT_DEPTH, first_ahead=1)


@torch.no_grad()
def measure_eagle(
    target: Decoder, head: eagle_training.Eagle, unseen: Sequences, device: torch.device
) -> list[Acceptance]:
    """Acceptance of an EAGLE-3 head on the target's outputs, drafting DRAFT_DEPTH tokens per round.

    With the root at position P, the chain that begins with entry P - 1 drafts the tokens behind it.
    """

    def proposals(place: int, first: int, last: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(unseen.sequence(place)[: last - 1 + DRAFT_DEPTH]).long().to(device)[None]
        _, taps = target.tapped(tokens, head.settings.taps)
        drafted = head.chains(taps, target.model.embed_tokens(tokens), DRAFT_DEPTH)
        logits = torch.stack([head.lm_head(states[0, first - 1 : last - 1]) for states in drafted], dim=1)
        everything = torch.full((*logits.shape[:2], target.sizes.vocabulary), -torch.inf)
        everything[..., head.kept.cpu()] = logits.float().cpu()
        return everything.numpy()

    return measure(unseen, proposals, DRAFT_DEPTH, first_ahead=1)


@torch.no_grad()
def measure_dflash(
    target: Decoder, head: dflash_training.Dflash, unseen: Sequences, device: torch.device
) -> list[Acceptance]:
    """Acceptance of a DFlash head on the target's outputs, drafting a block of tokens per round."""
    block = head.settings.block

    def proposals(place: int, first: int, last: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(unseen.sequence(place)[: last - 1 + block]).long().to(device)[None]
        _, taps = target.tapped(tokens, head.settings.taps)
        places = dflash_training.Places(target.sizes, torch.arange(first, last, device=device), block, tokens.shape[1])
        slots = head.slots(taps, tokens, target.model.embed_tokens, places)[0]
        logits = head.logits(slots, head.markov_head.markov_w1(tokens[0, places.positions]), target.head)
        return logits.unflatten(0, (-1, block)).float().cpu().numpy()

    return measure(unseen, proposals, block, first_ahead=1)


def _taps(options: argparse.Namespace, bundle: Bundle) -> tuple[int, ...]:
    """The taps asked for, or three. Raises BuildError for a layer that the target lacks."""
    layers = bundle.manifest.model.layers
    taps: tuple[int, ...] = options.taps or tuple(sorted({max(1, layers * part // 3) for part in (1, 2, 3)}))
    least = 1 if options.kind == "dflash" else 0  # DeepSeek's form counts layers that are behind one
    if taps[0] < least or taps[-1] > layers or len(taps) > MAX_TAPS:
        raise BuildError(
            f"taps {','.join(map(str, taps))}: the target has {layers} layers; give at most {MAX_TAPS} from {least} to "
            f"{layers}",
            field="taps",
        )
    return taps


def _target(options: argparse.Namespace, bundle: Bundle) -> tuple[torch.device, Decoder]:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    return device, frozen_target(bundle.manifest.model, bundle_weights(bundle), device)


def _initial(folder: Path | None, name: str) -> dict[str, torch.Tensor] | None:
    """The weights to go on from. Raises BuildError when there are none."""
    if folder is None:
        return None
    if not (folder / name).is_file():
        raise BuildError(f"{folder} has no {name} to go on from", field="initial")
    return load_file(folder / name)


def _copy_description(options: argparse.Namespace, bundle: Bundle) -> None:
    """Beside the weights: config.json as given, special tokens, and the target's tokenizer for whoever serves them."""
    if options.config.resolve() != (options.output / "config.json").resolve():
        shutil.copyfile(options.config, options.output / "config.json")
    tokens = bundle.manifest.tokens
    generation = {"bos_token_id": tokens.bos, "eos_token_id": list(tokens.eos)}
    (options.output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _report(folder: Path, results: list[Acceptance]) -> list[str]:
    """Writes acceptance.json; returns the same for people."""
    data = msgspec.json.format(msgspec.json.encode(results), indent=2)
    (folder / ACCEPTANCE_FILE).write_bytes(data + b"\n")
    return describe(results)


RUNS = {"medusa": run_medusa, "draft": run_draft, "eagle3": run_eagle, "dflash": run_dflash}
