"""Trains a DFlash head with DSpark's additions (arXiv 2607.05147): one pass drafts a whole block.

A block stands at the newest token: that token and mask tokens behind it. Each sees the whole block and, as keys and
values of every layer, what `fc` makes of the target's hidden states before the block. Slot i predicts the token i + 1
behind the newest one. Two additions know the token before a slot: the Markov term, a bigram table of low rank that is
added to the logits, and the confidence, the chance that the slot's first candidate is the target's own token.
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

_MARKOV_DEVIATION = 0.125  # of the Markov embeddings at the start; its other table begins with zeros
_UNMARKED = 0.15  # of slots that learn without the Markov term: alone they must rank what it chooses among
_JUDGED = 256  # slots per step that teach the confidence
_TEMPERATURES = (0.0, 0.8, 1.0)  # at which the confidence learns, a step each


@dataclass(frozen=True)
class Settings:
    """When `minutes` are up training ends early, on the same curve. Rates as those of a draft model."""

    taps: tuple[int, ...]  # the residual stream as it enters these layers of the target
    intermediate: int
    mask_token: int
    layers: int = 2
    block: int = 8
    rank: int = 64  # of the Markov term
    decay: float = 0.75  # weight of slot i: decay ** i
    anchors: int = 96  # blocks per row
    steps: int = 4000
    minutes: float | None = None
    rows: int = 2  # per step; every other one holds the target's own outputs
    length: int = 512  # tokens per row
    rate: float = 1e-3
    matrix_rate: float = 5e-3
    seed: int = 0


class Attention(nn.Module):
    """Grouped-query attention of blocks to the context before them and to all of themselves, with QK norm."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.head_dim, self.groups = model.head_dim, model.heads // model.kv_heads
        self.q_proj = nn.Linear(model.hidden, query, bias=False)
        self.k_proj = nn.Linear(model.hidden, key, bias=False)
        self.v_proj = nn.Linear(model.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, model.hidden, bias=False)
        self.q_norm = nn.RMSNorm(model.head_dim, eps=model.rms_epsilon)
        self.k_norm = nn.RMSNorm(model.head_dim, eps=model.rms_epsilon)

    def keys_and_values(self, states: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, hidden] -> [B, heads, N, head_dim] each."""
        split = (*states.shape[:2], -1, self.head_dim)
        key = rotate(self.k_norm(self.k_proj(states).view(split)).transpose(1, 2), cosine, sine)
        value = self.v_proj(states).view(split).transpose(1, 2)
        return key.repeat_interleave(self.groups, dim=1), value.repeat_interleave(self.groups, dim=1)

    def forward(self, states: Tensor, context: Tensor, places: Places) -> Tensor:
        """Slots [B, blocks * block, hidden] and context [B, T, hidden] -> [B, blocks * block, hidden]."""
        split = (*states.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(states).view(split)).transpose(1, 2)
        query = rotate(query, places.cosine, places.sine) * self.head_dim**-0.5
        keys, values = self.keys_and_values(context, places.context_cosine, places.context_sine)
        own_keys, own_values = self.keys_and_values(states, places.cosine, places.sine)
        blocks = (-1, places.block)
        own = query.unflatten(2, blocks) @ own_keys.unflatten(2, blocks).transpose(-1, -2)
        scores = torch.cat((query @ keys.transpose(-1, -2) + places.mask, own.flatten(2, 3)), dim=-1)
        of_context, of_block = scores.softmax(-1).split([keys.shape[2], places.block], dim=-1)
        mixed = of_context @ values + (of_block.unflatten(2, blocks) @ own_values.unflatten(2, blocks)).flatten(2, 3)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Places:
    """Where the blocks of a row stand: the newest token of each, at the same positions in every row of a step."""

    def __init__(self, model: Model, anchors: Tensor, block: int, length: int) -> None:
        device = anchors.device
        self.block = block
        self.positions = (anchors[:, None] + torch.arange(block, device=device)).flatten()  # of all slots
        cosine, sine = rotation(model, length + block, device)
        self.cosine, self.sine = cosine[self.positions], sine[self.positions]
        self.context_cosine, self.context_sine = cosine[:length], sine[:length]
        unseen = torch.arange(length, device=device) >= anchors.repeat_interleave(block)[:, None]
        self.mask = torch.zeros(unseen.shape, device=device).masked_fill_(unseen, -torch.inf)


class Layer(nn.Module):
    """One layer; only the slots pass through it."""

    def __init__(self, model: Model, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.mlp = FeedForward(model.hidden, intermediate)

    def forward(self, states: Tensor, context: Tensor, places: Places) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), context, places)
        return states + self.mlp(self.post_attention_layernorm(states))


class MarkovHead(nn.Module):
    """What the token before says of the next: a table of low rank."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of the chance of acceptance, from a slot's output and the Markov embedding of the token before it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class Dflash(nn.Module):
    """The head; parameters are named as z-lab and DeepSeek name them. Embedding and lm_head are the target's."""

    def __init__(self, model: Model, settings: Settings) -> None:
        super().__init__()
        self.sizes, self.settings = model, settings
        self.fc = nn.Linear(len(settings.taps) * model.hidden, model.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.layers = nn.ModuleList(Layer(model, settings.intermediate) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.markov_head = MarkovHead(model.vocabulary, settings.rank)
        self.confidence_head = ConfidenceHead(model.hidden + settings.rank)

    def slots(self, taps: Sequence[Tensor], tokens: Tensor, embedding: nn.Module, places: Places) -> Tensor:
        """Every slot's output behind the final norm, [B, blocks * block, hidden].

        `taps` [B, T, hidden]; `tokens` [B, T or more] of which a block reads its first.
        """
        context = self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1)))
        read = tokens[:, places.positions].clone()
        read.unflatten(1, (-1, places.block))[:, :, 1:] = self.settings.mask_token
        states = embedding(read)
        for layer in self.layers:
            states = layer(states, context, places)
        return self.norm(states)

    def logits(self, slots: Tensor, known: Tensor, lm_head: Tensor) -> Tensor:
        """Slots [N, hidden] and the Markov embeddings of the tokens before their own [N, rank] -> [N, V]."""
        return functional.linear(slots, lm_head) + self.markov_head.markov_w2(known)


def train_dflash(
    target: Decoder,
    documents: Sequence[NDArray[np.int32]],
    outputs: Sequences,
    settings: Settings,
    device: torch.device,
    reporter: Reporter,
    path: Path,
    initial: Mapping[str, Tensor] | None = None,
) -> Dflash:
    """Trains a head for the frozen `target` and writes it to `path` (a directory).

    The loss of each slot is the divergence from the target's distribution at its position, the tokens before it being
    the text's. Training goes on from the weights `initial` where they are given.
    """
    head = make_head(target, settings, initial).to(device)
    next_rows = streams_of(documents, outputs, settings, target.sizes, settings.block)
    generator = torch.Generator().manual_seed(settings.seed)
    decays = torch.tensor([settings.decay**slot for slot in range(settings.block)], device=device)

    def loss_of() -> Tensor:
        tokens = next_rows().to(device)
        rows, length = tokens.shape
        anchors = 1 + torch.randperm(length - 1 - settings.block, generator=generator)[: settings.anchors]
        places = Places(target.sizes, anchors.to(device), settings.block, length)
        weights = decays.repeat(rows * len(anchors))
        with autocast(device):
            with torch.no_grad():
                states, taps = target.tapped(tokens, settings.taps)
                wanted = functional.linear(states, target.head).float().softmax(-1)[:, places.positions].flatten(0, 1)
            slots = head.slots(taps, tokens, target.model.embed_tokens, places).flatten(0, 1)
            marked = torch.rand(len(slots), 1, generator=generator).to(device) >= _UNMARKED
            known = head.markov_head.markov_w1(tokens[:, places.positions].flatten()) * marked
            logits = head.logits(slots, known, target.head)
            total = SoftCrossEntropy.apply(logits, wanted * weights[:, None]) / weights.sum()
            judged = torch.randperm(len(slots), generator=generator)[:_JUDGED].to(device)
            temperature = _TEMPERATURES[int(torch.randint(len(_TEMPERATURES), (), generator=generator))]
            accepted = agreement(logits[judged].detach(), wanted[judged].log(), temperature, generator)
            features = torch.cat((slots[judged], known[judged]), dim=-1).detach()
            chances = head.confidence_head.proj(features)[:, 0]
        return total + functional.binary_cross_entropy_with_logits(chances.float(), accepted)

    tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight")
    with reporter.stage("train the DFlash head", settings.steps, "steps") as advance:
        run_steps(
            settings.steps,
            settings.minutes,
            loss_of,
            optimizers_of(head, settings.rate, settings.matrix_rate, tables),
            list(head.parameters()),
            advance,
            reporter.note,
            lambda: save_dflash(head, target, path),
        )
    return head


def agreement(logits: Tensor, wanted: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Whether both [N, V] choose the same token with the same noise, [N] float32."""
    if temperature > 0:
        uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-20).to(logits.device)
        noise = -(-uniform.log()).clamp_min(1e-20).log()
        logits, wanted = logits / temperature + noise, wanted / temperature + noise
    return (logits.argmax(-1) == wanted.argmax(-1)).float()


def make_head(target: Decoder, settings: Settings, initial: Mapping[str, Tensor] | None = None) -> Dflash:
    """A head whose layers begin as the target's last ones, or the one with the weights `initial`.

    What it reads of the target begins as the tap nearest to where the first of these layers reads. The Markov embedding
    begins as the target's embedding in its main directions, so that tokens alike are near.
    """
    head = Dflash(target.sizes, settings)
    if initial is not None:
        head.load_state_dict({name: value.float() for name, value in initial.items()})
        return head
    first = max(0, target.sizes.layers - settings.layers)
    with torch.no_grad():
        for place, layer in enumerate(head.layers):
            _copy_layer(target.model.layers[min(first + place, target.sizes.layers - 1)], layer)
    near = min(range(len(settings.taps)), key=lambda place: abs(settings.taps[place] - first))
    head.fc.weight.data.zero_()
    head.fc.weight.data[:, near * target.sizes.hidden :][:, : target.sizes.hidden] = torch.eye(target.sizes.hidden)
    embedding = target.model.embed_tokens.weight.detach().float().cpu()
    _, directions = torch.linalg.eigh(embedding.T @ embedding)  # ascending
    width = min(settings.rank, embedding.shape[1])
    projected = embedding @ directions[:, -width:]
    head.markov_head.markov_w1.weight.data[:, :width] = projected * (_MARKOV_DEVIATION / projected.std())
    head.markov_head.markov_w2.weight.data.zero_()
    head.norm.weight.data = target.model.norm.weight.detach().float().cpu().clone()
    return head


def _copy_layer(source: nn.Module, layer: Layer) -> None:
    """The target's layer as one of the head's.

    Context comes to a head's layer without that layer's own norm, so the norm's weights go into the matrices. QK norm
    that the target lacks begins with the size that its queries and keys have where inputs have a variance of 1. Of a
    wider feed-forward those neurons are kept that write most; a narrower one is filled up with silent ones.
    """
    theirs, own = source.self_attn, layer.self_attn
    scale = source.input_layernorm.weight.float().cpu()
    for name in ("q", "k", "v"):
        matrix = getattr(theirs, f"{name}_proj").weight.float().cpu() * scale
        getattr(own, f"{name}_proj").weight.data = matrix
        if name != "v":
            norm = getattr(theirs, f"{name}_norm", None)
            size = matrix.square().sum(-1).mean().sqrt() if norm is None else norm.weight.float().cpu()
            getattr(own, f"{name}_norm").weight.data[:] = size
    own.o_proj.weight.data = theirs.o_proj.weight.float().cpu().clone()
    layer.post_attention_layernorm.weight.data = source.post_attention_layernorm.weight.float().cpu().clone()
    gate, up, down = (getattr(source.mlp, f"{name}_proj").weight.float().cpu() for name in ("gate", "up", "down"))
    weight = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = weight.argsort(descending=True)[: layer.mlp.gate_proj.weight.shape[0]].sort().values
    layer.mlp.gate_proj.weight.data[: len(kept)] = gate[kept]
    layer.mlp.up_proj.weight.data[: len(kept)] = up[kept]
    layer.mlp.down_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data[:, : len(kept)] = down[:, kept]


def rarest_token(target: Decoder, documents: Sequence[NDArray[np.int32]], outputs: Sequences) -> int:
    """The token that texts and outputs have least of: what a mask token may be."""
    counts = np.bincount(outputs.tokens, minlength=target.sizes.vocabulary)
    for ids in documents:
        counts += np.bincount(ids, minlength=len(counts))
    return int(counts.argmin())


def save_dflash(head: Dflash, target: Decoder, path: Path) -> None:
    """Writes the head as bf16, and config.json, both in DeepSeek's form."""
    settings, model = head.settings, head.sizes
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
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
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "block_size": settings.block,
        "mask_token_id": settings.mask_token,
        "num_target_layers": target.sizes.layers,
        "target_layer_ids": [tap - 1 for tap in settings.taps],  # of layers whose output is read
        "markov_rank": settings.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    write_head(path, head.state_dict(), config)
