"""Trains an EAGLE-3 head (arXiv 2503.01840): one layer that drafts token by token from the target's own hidden states.

Entry p of the head reads f_p, which `fc` makes of the target's residual stream at position p, and the embedding of the
token at p + 1; its output predicts the token at p + 2. A drafted entry reads the output of the entry before it for f.
Training does as drafting does ("training-time test"): every position begins a chain of drafts whose steps all count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ull.bundle import Model
from ull_build.progress import Reporter
from ull_build.train.data import Sequences
from ull_build.train.heads import FeedForward, optimizers_of, rotation, streams_of, write_head
from ull_build.train.loop import SoftCrossEntropy, autocast, run_steps
from ull_build.train.model import Decoder, rotate

_DEVIATION = 0.02  # of the weights at the start


@dataclass(frozen=True)
class Settings:
    """When `minutes` are up training ends early, on the same curve. Rates as those of a draft model."""

    taps: tuple[int, ...]  # the residual stream as it enters these layers of the target
    vocabulary: int  # of the head: the target's most frequent tokens
    intermediate: int
    depths: int = 5  # drafts of a chain in training
    decay: float = 0.85  # weight of draft d: decay ** d
    steps: int = 4000
    minutes: float | None = None
    rows: int = 2  # per step; every other one holds the target's own outputs
    length: int = 512  # tokens per row
    rate: float = 1e-3
    matrix_rate: float = 5e-3
    seed: int = 0


class Attention(nn.Module):
    """Grouped-query attention over pairs of embedding and hidden state; drafts see what they come from."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.head_dim, self.groups = model.head_dim, model.heads // model.kv_heads
        self.q_proj = nn.Linear(2 * model.hidden, query, bias=False)
        self.k_proj = nn.Linear(2 * model.hidden, key, bias=False)
        self.v_proj = nn.Linear(2 * model.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, model.hidden, bias=False)

    def forward(
        self, pairs: Tensor, cosine: Tensor, sine: Tensor, before: Sequence[tuple[Tensor, Tensor]], mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[B, N, 2 * hidden] -> [B, N, hidden], and these entries' own keys and values [B, heads, N, head_dim].

        `before` are the keys and values of the steps so far: of the true entries, then of each draft of the chains.
        Draft d of chain p stands at position p + d and sees the true entries up to p and the drafts of its own chain.
        """
        split = (*pairs.shape[:2], -1, self.head_dim)
        query = rotate(self.q_proj(pairs).view(split).transpose(1, 2), cosine, sine)
        key = rotate(self.k_proj(pairs).view(split).transpose(1, 2), cosine, sine)
        value = self.v_proj(pairs).view(split).transpose(1, 2)
        own = (key.repeat_interleave(self.groups, dim=1), value.repeat_interleave(self.groups, dim=1))
        (true_keys, true_values), *drafts = [*before, own]
        scale = self.head_dim**-0.5
        query = query * scale
        scores = query @ true_keys.transpose(-1, -2) + mask
        chain = [(query * keys).sum(-1, keepdim=True) for keys, _ in drafts]
        shares = torch.cat((scores, *chain), dim=-1).softmax(-1)
        of_true, *of_drafts = shares.split([true_keys.shape[2], *[1] * len(drafts)], dim=-1)
        mixed = of_true @ true_values
        for share, (_, values) in zip(of_drafts, drafts, strict=True):
            mixed = mixed + share * values
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), own


class Layer(nn.Module):
    """The head's one layer."""

    def __init__(self, model: Model, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)  # of the embedding
        self.hidden_norm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.mlp = FeedForward(model.hidden, intermediate)


class Eagle(nn.Module):
    """The head; parameters are named as SafeAILab/EAGLE names them. `kept`: the target's token of each of its own."""

    def __init__(self, model: Model, settings: Settings, kept: Tensor) -> None:
        super().__init__()
        self.sizes, self.settings = model, settings
        self.fc = nn.Linear(len(settings.taps) * model.hidden, model.hidden, bias=False)
        self.midlayer = Layer(model, settings.intermediate)
        self.norm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.lm_head = nn.Linear(model.hidden, len(kept), bias=False)
        self.register_buffer("kept", kept, persistent=False)

    def chains(self, taps: Sequence[Tensor], embedded: Tensor, depths: int) -> list[Tensor]:
        """The lm_head's input for each draft of the chains that begin at every position, [B, T - depths, hidden] each.

        `taps` and `embedded`, the target's embeddings, [B, T, hidden]; what is fed back is what stands in the text.
        """
        count = embedded.shape[1] - depths
        cosine, sine = rotation(self.sizes, embedded.shape[1], embedded.device)
        mask = torch.full((count, count), -torch.inf, device=embedded.device).triu(1)
        states = self.fc(torch.cat([tap[:, :count] for tap in taps], dim=-1))
        embedded = self.midlayer.input_layernorm(embedded)
        outputs: list[Tensor] = []
        before: list[tuple[Tensor, Tensor]] = []
        for depth in range(depths):
            pairs = torch.cat((embedded[:, 1 + depth : 1 + depth + count], self.midlayer.hidden_norm(states)), dim=-1)
            places = slice(depth, depth + count)
            mixed, own = self.midlayer.self_attn(pairs, cosine[places], sine[places], before, mask)
            before.append(own)
            states = states + mixed
            states = states + self.midlayer.mlp(self.midlayer.post_attention_layernorm(states))
            outputs.append(self.norm(states))
        return outputs


def train_eagle(
    target: Decoder,
    documents: Sequence[NDArray[np.int32]],
    outputs: Sequences,
    settings: Settings,
    device: torch.device,
    reporter: Reporter,
    path: Path,
    initial: Mapping[str, Tensor] | None = None,
) -> Eagle:
    """Trains a head for the frozen `target` and writes it to `path` (a directory).

    The loss of each draft is the divergence from the target's distribution where the target has read the same tokens.
    Training goes on from the weights `initial` where they are given.
    """
    head = make_head(target, settings, outputs, initial).to(device)
    next_rows = streams_of(documents, outputs, settings, target.sizes, settings.depths)
    weights = [settings.decay**depth for depth in range(settings.depths)]

    def loss_of() -> Tensor:
        tokens = next_rows().to(device)
        depths, count = settings.depths, tokens.shape[1] - settings.depths
        with autocast(device):
            with torch.no_grad():
                states, taps = target.tapped(tokens, settings.taps)
                wanted = functional.linear(states, target.head).float().softmax(-1)[..., head.kept]
                embedded = target.model.embed_tokens(tokens)
            total = states.new_zeros((), dtype=torch.float32)
            for depth, drafted in enumerate(head.chains(taps, embedded, depths)):
                logits = head.lm_head(drafted).flatten(0, 1)
                shares = wanted[:, 1 + depth : 1 + depth + count].flatten(0, 1)
                total = total + weights[depth] * SoftCrossEntropy.apply(logits, shares) / len(logits)
        return total / sum(weights)

    with reporter.stage("train the EAGLE-3 head", settings.steps, "steps") as advance:
        run_steps(
            settings.steps,
            settings.minutes,
            loss_of,
            optimizers_of(head, settings.rate, settings.matrix_rate, ("lm_head.weight",)),
            list(head.parameters()),
            advance,
            reporter.note,
            lambda: save_eagle(head, target, path),
        )
    return head


def make_head(
    target: Decoder, settings: Settings, outputs: Sequences, initial: Mapping[str, Tensor] | None = None
) -> Eagle:
    """A head whose lm_head and norm are the target's and whose layer is random, or the one with the weights `initial`.

    Its vocabulary are the tokens most frequent in what the target wrote.
    """
    if initial is not None and "d2t" in initial:
        kept = initial["d2t"] + torch.arange(len(initial["d2t"]))
    elif initial is not None or settings.vocabulary >= target.sizes.vocabulary:
        kept = torch.arange(target.sizes.vocabulary)
    else:
        counts = np.bincount(outputs.tokens, minlength=target.sizes.vocabulary)
        kept = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: settings.vocabulary]))
    head = Eagle(target.sizes, settings, kept)
    generator = torch.Generator().manual_seed(settings.seed)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * _DEVIATION
    head.lm_head.weight.data = target.head.detach().float().cpu()[kept].clone()
    head.norm.weight.data = target.model.norm.weight.detach().float().cpu().clone()
    if initial is not None:
        head.load_state_dict({name: value.float() for name, value in initial.items() if name not in ("d2t", "t2d")})
    return head


def save_eagle(head: Eagle, target: Decoder, path: Path) -> None:
    """Writes the head as bf16 with its vocabulary's map, and the config.json, both in the original's form."""
    tensors: dict[str, Tensor] = head.state_dict()
    kept = head.kept.cpu()
    if len(kept) < target.sizes.vocabulary:
        known = torch.zeros(target.sizes.vocabulary, dtype=torch.bool)
        known[kept] = True
        tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": known}
    model = head.sizes
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": head.settings.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": model.rms_epsilon,
        "rope_theta": model.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": model.context,
        "vocab_size": model.vocabulary,
        "draft_vocab_size": len(kept),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(head.settings.taps),
    }
    write_head(path, tensors, config)
