"""The Llama family in PyTorch, as training needs it: whole sequences, gradients, any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ull.bundle import Model, attention_factor, inverse_frequencies
from ull_build.source.architecture import Architecture


class Attention(nn.Module):
    """Causal grouped-query attention with rotate-half RoPE, [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, architecture: Architecture, layer: int) -> None:
        super().__init__()
        model = architecture.model
        self.model, self.window = model, model.windows[layer]
        query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden, query, bias=architecture.qkv_bias)
        self.k_proj = nn.Linear(model.hidden, key, bias=architecture.qkv_bias)
        self.v_proj = nn.Linear(model.hidden, key, bias=architecture.qkv_bias)
        self.o_proj = nn.Linear(query, model.hidden, bias=architecture.output_bias)
        if model.qk_norm:
            self.q_norm = nn.RMSNorm(model.head_dim, eps=model.rms_epsilon)
            self.k_norm = nn.RMSNorm(model.head_dim, eps=model.rms_epsilon)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = states.shape
        split = (batch, length, -1, self.model.head_dim)
        query, key = self.q_proj(states).view(split), self.k_proj(states).view(split)
        if self.model.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate(part.transpose(1, 2), cosine, sine) for part in (query, key))
        value = self.v_proj(states).view(split).transpose(1, 2)
        groups = self.model.heads // self.model.kv_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        mask = None
        if 0 < self.window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=states.device).tril().triu(1 - self.window)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU, [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, inner = architecture.model.hidden, architecture.model.intermediate
        self.gate_proj = nn.Linear(hidden, inner, bias=architecture.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=architecture.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=architecture.mlp_bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, architecture: Architecture, layer: int) -> None:
        super().__init__()
        model = architecture.model
        self.input_layernorm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.self_attn = Attention(architecture, layer)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        self.mlp = FeedForward(architecture)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), cosine, sine)
        return states + self.mlp(self.post_attention_layernorm(states))


class Decoder(nn.Module):
    """A decoder whose parameters bear their Hugging Face names. `separate_head`: the lm_head has its own weights."""

    def __init__(self, architecture: Architecture, separate_head: bool) -> None:
        super().__init__()
        model = architecture.model
        self.sizes = model
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.model.layers = nn.ModuleList(Layer(architecture, layer) for layer in range(model.layers))
        self.model.norm = nn.RMSNorm(model.hidden, eps=model.rms_epsilon)
        if separate_head:
            self.lm_head = nn.Linear(model.hidden, model.vocabulary, bias=False)
        frequencies = torch.from_numpy(inverse_frequencies(model.rope, model.head_dim))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.attention_factor = attention_factor(model.rope)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> the lm_head's input, after the final norm, [B, T, hidden]."""
        return self.tapped(tokens, ())[0]

    def tapped(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """`forward`, and the residual stream as it enters the layers `taps`, each [B, T, hidden], in their order.

        The number of layers as a tap: as it leaves the last one, before the final norm.
        """
        cosine, sine = self.rotation(tokens.shape[1])
        states = self.model.embed_tokens(tokens)
        entering = []
        for layer in self.model.layers:
            entering.append(states)
            states = layer(states, cosine, sine)
        entering.append(states)
        return self.model.norm(states), [entering[tap] for tap in taps]

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, head_dim] of the positions from 0 on."""
        angles = torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    @property
    def head(self) -> Tensor:
        """The lm_head's weights [vocabulary, hidden]."""
        return self.lm_head.weight if hasattr(self, "lm_head") else self.model.embed_tokens.weight


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate-half RoPE of [B, heads, T, head_dim]."""
    first, second = states.chunk(2, dim=-1)
    return (states * cosine + torch.cat((-second, first), dim=-1) * sine).to(states.dtype)


def architecture_of(model: Model, weights: Mapping[str, NDArray[np.float32]]) -> Architecture:
    """What `Decoder` needs to know about a target: its dimensions, and which biases its weights have."""
    layer = "model.layers.0"
    return Architecture(
        model=model,
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in weights,
        output_bias=f"{layer}.self_attn.o_proj.bias" in weights,
        mlp_bias=f"{layer}.mlp.down_proj.bias" in weights,
        bos=None,
        eos=[],
    )


def frozen_target(model: Model, weights: Mapping[str, NDArray[np.float32]], device: torch.device) -> Decoder:
    """The target with its quantised weights, without gradients."""
    target = Decoder(architecture_of(model, weights), "lm_head.weight" in weights)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()})
    return target.to(device, dtype).requires_grad_(False).eval()


def initialise(draft: Decoder, target: Decoder, seed: int) -> None:
    """Normal weights, residual writers scaled down by depth, and the target's embedding in its main directions.

    The embedding keeps the geometry of the target's (its leading principal directions), which a draft model would
    otherwise spend most of its training on.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = draft.sizes
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 2:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / (2 * sizes.layers) ** 0.5 if into_residual else 0.02
            parameter.data = torch.randn(parameter.shape, generator=generator) * deviation
        elif name.endswith(".bias"):
            parameter.data.zero_()
    embedding = target.model.embed_tokens.weight.float().cpu()
    rows, width = min(len(embedding), sizes.vocabulary), min(embedding.shape[1], sizes.hidden)
    _, directions = torch.linalg.eigh(embedding.T @ embedding)  # ascending
    projected = embedding[:rows] @ directions[:, -width:]
    draft.model.embed_tokens.weight.data[:rows, :width] = projected * (0.02 / projected.std())
