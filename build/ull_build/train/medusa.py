"""Trains Medusa heads (version 2: residual blocks on the shared lm_head) on a frozen target's own outputs.

Head i takes the lm_head's input at position t and predicts the token at t + 2 + i (Cai et al., arXiv 2401.10774).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ull_build.progress import Reporter
from ull_build.train.data import Sequences
from ull_build.train.loop import autocast, rows_of, run_steps
from ull_build.train.model import Decoder

WEIGHTS, CONFIG = "medusa_lm_head.safetensors", "config.json"


@dataclass(frozen=True)
class Settings:
    """When `minutes` are up training ends early, on the same curve."""

    heads: int = 4
    layers: int = 1
    steps: int = 1500
    minutes: float | None = None
    positions: int = 1024  # tokens per step
    rate: float = 1e-3
    decay: float = 0.8  # weight of head i: decay ** i
    seed: int = 0


class Block(nn.Module):
    """x + SiLU(W x + b), W and b zero at the start, so that a head begins as the target's own next-token head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + functional.silu(self.linear(states))


class Heads(nn.ModuleList):
    """`heads` stacks of `layers` blocks; parameters are named as FasterDecoding/Medusa names them."""

    def __init__(self, heads: int, layers: int, hidden: int) -> None:
        super().__init__(nn.ModuleList(Block(hidden) for _ in range(layers)) for _ in range(heads))

    def apply_head(self, head: int, states: Tensor) -> Tensor:
        """[N, hidden] -> the lm_head's input of one head."""
        for block in self[head]:
            states = block(states)
        return states


def label_table(sequences: Sequences, heads: int) -> NDArray[np.bool_]:
    """[tokens, heads]: whether the token at t + 2 + i was written by the target in the sequence that t stands in.

    Position t must be able to stand at a round's end: it is the prompt's last token or later.
    """
    valid = np.zeros((len(sequences.tokens), heads), np.bool_)
    for place in range(len(sequences)):
        start, stop = int(sequences.starts[place]), int(sequences.starts[place + 1])
        first = start + int(sequences.prompts[place]) - 1
        for head in range(heads):
            valid[first : max(first, stop - 2 - head), head] = True
    return valid


def train_medusa(
    target: Decoder,
    outputs: Sequences,
    settings: Settings,
    device: torch.device,
    reporter: Reporter,
    path: Path,
    initial: Mapping[str, Tensor] | None = None,
) -> Heads:
    """Trains heads for the frozen `target` on its `outputs` and writes them to `path` (a directory).

    Training goes on from the weights `initial` where they are given.
    """
    heads = Heads(settings.heads, settings.layers, target.sizes.hidden)
    if initial is not None:
        heads.load_state_dict({name: value.float() for name, value in initial.items()})
    heads.to(device)
    random = np.random.default_rng(settings.seed)
    length = min(1024, target.sizes.context, settings.positions)
    rows = rows_of(outputs.tokens, length, random)
    valid = label_table(outputs, settings.heads)
    weights = [settings.decay**head for head in range(settings.heads)]

    def loss_of() -> Tensor:
        pieces = [next(rows) for _ in range(max(1, settings.positions // length))]
        tokens = torch.from_numpy(np.stack([row for _, row in pieces])).long().to(device)
        marks = torch.from_numpy(np.stack([valid[start : start + len(row)] for start, row in pieces])).to(device)
        with autocast(device):
            with torch.no_grad():
                states = target(tokens)
            total = states.new_zeros((), dtype=torch.float32)
            for head, weight in enumerate(weights):
                ahead = 2 + head
                chosen = marks[:, : tokens.shape[1] - ahead, head]
                labels = tokens[:, ahead:][chosen]
                logits = functional.linear(heads.apply_head(head, states[:, :-ahead][chosen]), target.head)
                total = total + weight * HardCrossEntropy.apply(logits, labels) / max(1, len(labels))
        return total / sum(weights)

    optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    with reporter.stage("train the Medusa heads", settings.steps, "steps") as advance:
        run_steps(
            settings.steps,
            settings.minutes,
            loss_of,
            [optimizer],
            list(heads.parameters()),
            advance,
            reporter.note,
            lambda: save_heads(heads, target, path),
        )
    return heads


class HardCrossEntropy(torch.autograd.Function):
    """Sum over rows [N, V] of the cross-entropy with token ids [N]; the gradient is kept from the forward pass."""

    @staticmethod
    def forward(ctx: object, logits: Tensor, labels: Tensor) -> Tensor:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.gather(1, labels[:, None])
        probabilities.scatter_add_(1, labels[:, None], torch.full_like(chosen, -1.0))
        ctx.save_for_backward(probabilities.to(logits.dtype))  # type: ignore[attr-defined]
        return -chosen.clamp_min(1e-30).log().sum()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return difference * gradient.to(difference.dtype), None


def save_heads(heads: Heads, target: Decoder, path: Path) -> None:
    """Writes the heads as bf16, and the config.json by which they are known to be of version 2."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in heads.state_dict().items()}
    partial = path / f".{WEIGHTS}.new"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(path / WEIGHTS)
    config: Mapping[str, object] = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads[0]),  # type: ignore[arg-type, unused-ignore]
        "hidden_size": target.sizes.hidden,
        "vocab_size": target.sizes.vocabulary,
        "version": "2",
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
