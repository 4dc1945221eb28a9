"""What the trainers of heads that read the target's hidden states share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ull.bundle import Model, Rope, inverse_frequencies
from ull.errors import BuildError
from ull_build.train.data import Sequences
from ull_build.train.loop import rows_of

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class FeedForward(nn.Module):
    """SwiGLU, [B, N, hidden] -> [B, N, hidden]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Rows(Protocol):
    """What of a training's settings says which rows of tokens a step reads."""

    @property
    def rows(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def seed(self) -> int: ...


def streams_of(
    documents: Sequence[NDArray[np.int32]], outputs: Sequences, settings: Rows, model: Model, ahead: int
) -> Callable[[], Tensor]:
    """Gives a step's tokens, [rows, length] int64: rows of the texts and of the target's outputs in turn.

    Raises BuildError when rows that fit into the target's context do not reach `ahead` tokens behind a position.
    """
    longest = min(settings.length, model.context, len(outputs.tokens), sum(map(len, documents)))
    if longest < ahead + 2:
        raise BuildError(
            f"rows of {longest} tokens are too short for drafts of {ahead}; draft less far, or give longer texts",
            field="text",
        )
    random = np.random.default_rng(settings.seed)
    shuffled = [documents[place] for place in random.permutation(len(documents))]
    streams = [rows_of(stream, longest, random) for stream in (np.concatenate(shuffled), outputs.tokens)]

    def next_rows() -> Tensor:
        rows = [next(streams[place % len(streams)])[1] for place in range(settings.rows)]
        return torch.from_numpy(np.stack(rows)).long()

    return next_rows


def rotation(model: Model, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of a head's rotary embedding: the target's period, never its scaling."""
    frequencies = torch.from_numpy(inverse_frequencies(Rope(theta=model.rope.theta), model.head_dim)).to(device)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def optimizers_of(
    head: nn.Module, rate: float, matrix_rate: float, tables: Sequence[str]
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for vectors and for the `tables`, matrices with a row for each token."""
    named = dict(head.named_parameters())
    matrices = [value for name, value in named.items() if value.dim() == 2 and name not in tables]
    others = [value for name, value in named.items() if value.dim() != 2 or name in tables]
    return [
        torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def write_head(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Writes both files of a head, weights as bf16; a reader sees the old weights or the new ones."""
    stored = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in tensors.items()
    }
    partial = path / f".{WEIGHTS}.new"
    save_file(stored, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
