"""Trains a small draft model on the target's own distribution: soft distillation on texts and on its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from ull_build.progress import Reporter
from ull_build.source.architecture import Architecture
from ull_build.train.data import Sequences
from ull_build.train.loop import SoftCrossEntropy, autocast, rows_of, run_steps
from ull_build.train.model import Decoder, initialise

WEIGHTS = "model.safetensors"
_LOSS_ROWS = 2048  # positions whose logits are held at once


@dataclass(frozen=True)
class Settings:
    """When `minutes` are up training ends early, on the same curve.

    `rate` is AdamW's, for embedding and norms; the matrices take Muon at `matrix_rate` (scaled to AdamW's RMS)."""

    steps: int = 1200
    minutes: float | None = None
    rows: int = 2  # per step; every other one holds the target's own outputs
    length: int = 1024  # tokens per row
    rate: float = 4e-3
    matrix_rate: float = 5e-3
    seed: int = 0


def train_draft(
    target: Decoder,
    architecture: Architecture,
    documents: Sequence[NDArray[np.int32]],
    outputs: Sequences,
    settings: Settings,
    device: torch.device,
    reporter: Reporter,
    path: Path,
    initial: Mapping[str, Tensor] | None = None,
) -> Decoder:
    """Trains a draft model of `architecture` for the frozen `target` and writes it to `path` (a directory).

    `documents` are token sequences of the texts; the loss at each position is the divergence from the target's
    distribution, so both texts and outputs teach what the target would say. Training goes on from the weights
    `initial` where they are given.
    """
    draft = Decoder(architecture, not architecture.model.tied_embeddings)
    initialise(draft, target, settings.seed)
    if initial is not None:
        draft.load_state_dict({name: value.float() for name, value in initial.items()})
    draft.to(device)
    random = np.random.default_rng(settings.seed)
    shuffled = [documents[place] for place in random.permutation(len(documents))]
    streams = [rows_of(np.concatenate(shuffled), settings.length, random)]
    streams.append(rows_of(outputs.tokens, settings.length, random))
    shared = min(target.sizes.vocabulary, draft.sizes.vocabulary)

    def loss_of() -> Tensor:
        rows = [next(streams[place % len(streams)])[1] for place in range(settings.rows)]
        length = min(map(len, rows))
        tokens = torch.from_numpy(np.stack([row[:length] for row in rows])).long().to(device)
        with autocast(device):
            with torch.no_grad():
                teacher = target(tokens).flatten(0, 1)
            student = draft(tokens).flatten(0, 1)
            total = student.new_zeros((), dtype=torch.float32)
            for start in range(0, len(student), _LOSS_ROWS):
                piece = slice(start, start + _LOSS_ROWS)
                wanted = functional.linear(teacher[piece], target.head[:shared])
                logits = functional.linear(student[piece], draft.head[:shared])
                total = total + SoftCrossEntropy.apply(logits, wanted.float().softmax(-1))  # type: ignore[no-untyped-call, unused-ignore]
        return total / len(student)

    matrices = [parameter for parameter in draft.model.layers.parameters() if parameter.dim() == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in draft.parameters() if id(parameter) not in inside]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    with reporter.stage("train the draft model", settings.steps, "steps") as advance:
        run_steps(
            settings.steps,
            settings.minutes,
            loss_of,
            optimizers,
            list(draft.parameters()),
            advance,
            reporter.note,
            lambda: save_draft(draft, path),
        )
    return draft


def save_draft(draft: Decoder, path: Path) -> None:
    """Writes the weights as bf16 under their Hugging Face names; a reader sees the old file or the new one."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in draft.state_dict().items()}
    partial = path / f".{WEIGHTS}.new"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(path / WEIGHTS)
