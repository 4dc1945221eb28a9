"""Random models for the executor tests: a NumPy packer of the bundle's tensor layout and a float64 reference forward.

Written from the bundle contract, independently of both `ull_build` and the C++ code, so that each checks the others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TILE = 32
BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn
DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(BF16): "BF16",
    np.dtype(FP8): "F8_E4M3",
    np.dtype(np.int32): "I32",
}
INTERLEAVED = np.stack([np.arange(16), np.arange(16, 32)], axis=1).reshape(-1)  # position -> row


def llama3_frequencies(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Rotary frequencies with Llama 3's scaling (transformers `_compute_llama3_parameters`), float32 [head_dim / 2]."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * np.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelength > original / low, frequencies / factor, frequencies)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(medium, blended, scaled).astype(np.float32)


@dataclass
class Dims:
    """The shape of a random model, and which options of the family it uses."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    vocabulary: int = 100
    context: int = 320
    rms_epsilon: float = 1e-5
    qk_norm: bool = False
    bias: bool = False  # on qkv, o, gate_up and down
    tied: bool = True
    windows: tuple[int, ...] = ()
    inv_freq: np.ndarray | None = None
    attention_factor: float = 1.0
    weights: str = "f32"  # f32, bf16 or fp8
    lm_head: str = "f32"
    embedding: str = "f32"
    kv: str = "f32"  # f32, bf16 or fp8
    seed: int = 0
    spread: float = 1.0  # of attention scores and MLP activations


@dataclass
class Medusa:
    """Random Medusa heads on a random model."""

    heads: int = 3
    layers: int = 1
    version: str = "2"  # "1": an lm_head per head; "2": the model's
    precision: str = "fp8"
    seed: int = 1
    size: float = 1.0  # of the residual blocks; 0: every head predicts what the model does


@dataclass
class Eagle:
    """A random EAGLE head on a random model; `dims` are its own, of whose vocabulary it knows a part if `known`."""

    dims: Dims
    taps: tuple[int, ...] = (0, 1, 2)
    norm_before_residual: bool = False
    norm_output: bool = False
    tap_norm: str = "none"
    own_embedding: bool = False
    known: int = 0


@dataclass
class Layer:
    """Float64 weights of one layer, already rounded to what the bundle stores."""

    attn_norm: np.ndarray
    mlp_norm: np.ndarray
    qkv: np.ndarray
    o: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    bias: dict[str, np.ndarray] = field(default_factory=dict)
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    kv_scale: np.ndarray | None = None  # [2, kv_heads]


def quantise_fp8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> (FP8 codes, float32 scale per row); magnitudes below the smallest normal become 0 or that normal."""
    scale = (np.abs(rows).max(axis=1) / 448.0).astype(np.float32)
    scale[scale == 0] = 1.0
    scaled = (rows / scale[:, None]).astype(np.float32)
    smallest = 2.0**-6
    small = np.abs(scaled) < smallest
    scaled = np.where(small, np.where(np.abs(scaled) < smallest / 2, 0.0, np.copysign(smallest, scaled)), scaled)
    return np.clip(scaled, -448, 448).astype(FP8), scale


def round_in(scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The nearest E4M3 numbers times `scale`, +-448 of it at most."""
    return np.clip(values / scale, -448, 448).astype(np.float32).astype(FP8).astype(np.float64) * scale


def pad_rows(rows: np.ndarray) -> np.ndarray:
    """Pads the first axis with zeros to a multiple of 32."""
    missing = -len(rows) % TILE
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows


def pack_rows(rows: np.ndarray) -> np.ndarray:
    """[N, K] -> [tiles, K, 32] with the interleaving of the element type."""
    tiles = pad_rows(rows).reshape(-1, TILE, rows.shape[1])
    if rows.dtype != np.float32:
        tiles = tiles[:, INTERLEAVED]
    return np.ascontiguousarray(tiles.transpose(0, 2, 1))


def pad_vector(values: np.ndarray) -> np.ndarray:
    """Pads with zeros to a multiple of 64 bytes."""
    multiple = 64 // values.itemsize
    return np.concatenate([values, np.zeros(-len(values) % multiple, values.dtype)])


def medusa_reference(
    blocks: list[tuple[np.ndarray, np.ndarray]], lm_head: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
    """x <- x + SiLU(W x + b) per block, then the lm_head; hidden [T, hidden] -> logits [T, vocabulary]."""
    for weight, bias in blocks:
        y = hidden @ weight.T + bias
        hidden = hidden + y / (1 + np.exp(-y))
    return hidden @ lm_head.T


class RandomModel:
    """A random model: its tensors as the bundle stores them, and `reference()` in float64."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.random = np.random.default_rng(dims.seed)
        self.tensors: dict[str, np.ndarray] = {}
        self.medusa: Medusa | None = None
        self.draft: RandomModel | None = None
        self.eagle: dict[str, Any] | None = None
        d = dims
        self.layers = [self._layer(f"layers.{i}.") for i in range(d.layers)]
        self.norm = self._vector("norm", 1.0 + 0.1 * self.random.standard_normal(d.hidden))
        embedding = self.random.standard_normal((d.vocabulary, d.hidden))
        if d.tied and d.lm_head != "fp8":
            self.embedding = self.lm_head = self._linear("lm_head", embedding, d.lm_head)
        else:
            stored = embedding.astype(BF16 if d.embedding == "bf16" else np.float32)
            self.tensors["embed.weight"] = self._pad_table(stored)
            self.embedding = stored.astype(np.float64)
            head = embedding if d.tied else self.random.standard_normal((d.vocabulary, d.hidden))
            self.lm_head = self._linear("lm_head", head, d.lm_head)
        if d.inv_freq is None:
            d.inv_freq = (1.0 / 10000.0 ** (np.arange(0, d.head_dim, 2) / d.head_dim)).astype(np.float32)
        self.windows = list(d.windows) or [0] * d.layers

    def _pad_table(self, table: np.ndarray) -> np.ndarray:
        rows = len(table)
        while rows * table.shape[1] * table.itemsize % 64:
            rows += 1
        return np.concatenate([table, np.zeros((rows - len(table), table.shape[1]), table.dtype)])

    def _vector(self, name: str, values: np.ndarray) -> np.ndarray:
        stored = values.astype(np.float32 if self.dims.weights == "f32" else BF16)
        self.tensors[name] = pad_vector(stored)
        return stored.astype(np.float64)

    def _store(self, name: str, rows: np.ndarray, precision: str) -> np.ndarray:
        """Stores rows (a multiple of 32 where they are tile-aligned) -> what the executor computes with."""
        if precision == "fp8":
            codes, scale = quantise_fp8(rows)
            self.tensors[f"{name}.weight"] = pack_rows(codes)
            padded = np.ones(-(-len(rows) // TILE) * TILE, np.float32)
            padded[: len(rows)] = scale
            self.tensors[f"{name}.scale"] = padded
            return codes.astype(np.float64) * scale[:, None].astype(np.float64)
        stored = rows.astype(np.float32 if precision == "f32" else BF16)
        self.tensors[f"{name}.weight"] = pack_rows(stored)
        return stored.astype(np.float64)

    def _linear(self, name: str, rows: np.ndarray, precision: str) -> np.ndarray:
        return self._store(name, rows / np.sqrt(rows.shape[1]), precision)

    def _bias(self, name: str, values: np.ndarray) -> np.ndarray:
        stored = values.astype(np.float32 if self.dims.weights == "f32" else BF16)
        self.tensors[f"{name}.bias"] = pad_rows(stored)
        return stored.astype(np.float64)

    def _layer(self, prefix: str) -> Layer:
        d, normal = self.dims, self.random.standard_normal
        attn_norm = self._vector(prefix + "attn_norm", 1.0 + 0.1 * normal(d.hidden))
        mlp_norm = self._vector(prefix + "mlp_norm", 1.0 + 0.1 * normal(d.hidden))
        rows = (d.heads + 2 * d.kv_heads) * d.head_dim
        qkv = self._linear(prefix + "qkv", normal((rows, d.hidden)) * d.spread, d.weights)
        o = self._linear(prefix + "o", normal((d.hidden, d.heads * d.head_dim)), d.weights)
        gate = pad_rows(normal((d.intermediate, d.hidden)) * d.spread)
        up = pad_rows(normal((d.intermediate, d.hidden)))
        gate[d.intermediate :] = 0
        up[d.intermediate :] = 0
        alternating = np.stack([gate.reshape(-1, TILE, d.hidden), up.reshape(-1, TILE, d.hidden)], axis=1)
        stored = self._linear(prefix + "gate_up", alternating.reshape(-1, d.hidden), d.weights)
        stored = stored.reshape(-1, 2, TILE, d.hidden)
        down = self._linear(prefix + "down", normal((d.hidden, d.intermediate)), d.weights)
        layer = Layer(
            attn_norm,
            mlp_norm,
            qkv,
            o,
            stored[:, 0].reshape(-1, d.hidden)[: d.intermediate],
            stored[:, 1].reshape(-1, d.hidden)[: d.intermediate],
            down,
        )
        if d.bias:
            layer.bias["qkv"] = self._bias(prefix + "qkv", 0.2 * normal(rows))
            layer.bias["o"] = self._bias(prefix + "o", 0.2 * normal(d.hidden))
            layer.bias["down"] = self._bias(prefix + "down", 0.2 * normal(d.hidden))
            gate_up = np.zeros((len(stored), 2, TILE))
            for half in range(2):
                values = np.zeros(len(stored) * TILE)
                values[: d.intermediate] = 0.2 * normal(d.intermediate)
                gate_up[:, half] = values.reshape(-1, TILE)
            kept = self._bias(prefix + "gate_up", gate_up.reshape(-1)).reshape(-1, 2, TILE)
            layer.bias["gate"] = kept[:, 0].reshape(-1)[: d.intermediate]
            layer.bias["up"] = kept[:, 1].reshape(-1)[: d.intermediate]
        if d.qk_norm:
            layer.q_norm = self._vector(prefix + "q_norm", 1.0 + 0.1 * normal(d.head_dim))
            layer.k_norm = self._vector(prefix + "k_norm", 1.0 + 0.1 * normal(d.head_dim))
        if d.kv == "fp8":  # the first head's keys and the last one's values saturate
            layer.kv_scale = 2.0 ** self.random.integers(-6, 3, (2, d.kv_heads))
            layer.kv_scale[0, 0], layer.kv_scale[1, -1] = 2.0**-9, 2.0**-10
            self.tensors[prefix + "kv_scale"] = pad_vector(layer.kv_scale.reshape(-1).astype(np.float32))
        return layer

    def add_medusa(self, medusa: Medusa) -> list[Callable[[np.ndarray], np.ndarray]]:
        """Adds heads -> their float64 reference: hidden states [T, hidden] (the lm_head's input) -> logits per head."""
        normal = np.random.default_rng(medusa.seed).standard_normal
        d = self.dims
        references = []
        for i in range(medusa.heads):
            blocks = []
            for j in range(medusa.layers):
                name = f"medusa.{i}.{j}"
                weight = self._linear(name, medusa.size * normal((d.hidden, d.hidden)), medusa.precision)
                blocks.append((weight, self._bias(name, medusa.size * 0.2 * normal(d.hidden))))
            head = self.lm_head
            if medusa.version == "1":
                head = self._linear(f"medusa.{i}.lm_head", normal((d.vocabulary, d.hidden)), medusa.precision)
            references.append(partial(medusa_reference, blocks, head))
        self.medusa = medusa
        return references

    def add_draft(self, draft: RandomModel) -> None:
        """Adds a model as the draft of this one."""
        self.tensors |= {f"draft.{name}": tensor for name, tensor in draft.tensors.items()}
        self.draft = draft

    def add_eagle(self, eagle: Eagle) -> None:
        """Adds an EAGLE head."""
        d, width = eagle.dims, len(eagle.taps) * self.dims.hidden
        known = eagle.known or self.dims.vocabulary
        head = RandomModel(replace(d, layers=1, vocabulary=known, tied=not eagle.own_embedding))
        normal = head.random.standard_normal
        if eagle.own_embedding:
            stored = normal((self.dims.vocabulary, d.hidden)).astype(np.float32 if d.embedding == "f32" else BF16)
            head.tensors["embed.weight"] = head._pad_table(stored)
        else:
            head.tensors.pop("embed.weight", None)
        head._linear("fc", normal((d.hidden, width)), d.weights)
        head._linear("layers.0.qkv", normal(((d.heads + 2 * d.kv_heads) * d.head_dim, 2 * d.hidden)), d.weights)
        head._vector("layers.0.hidden_norm", 1.0 + 0.1 * normal(d.hidden))
        if eagle.tap_norm == "all":
            head._vector("tap_norm", 1.0 + 0.1 * normal(width))
        for tap in range(len(eagle.taps) if eagle.tap_norm == "each" else 0):
            head._vector(f"tap_norm.{tap}", 1.0 + 0.1 * normal(self.dims.hidden))
        if eagle.known:
            tokens = head.random.choice(self.dims.vocabulary, eagle.known, replace=False)
            head.tensors["d2t"] = pad_vector(tokens.astype(np.int32))
        self.tensors |= {f"eagle.{name}": tensor for name, tensor in head.tensors.items()}
        self.eagle = head._dimensions() | {
            "taps": list(eagle.taps),
            "norm_before_residual": eagle.norm_before_residual,
            "norm_output": eagle.norm_output,
            "tap_norm": eagle.tap_norm,
            "own_embedding": eagle.own_embedding,
            "mapped": eagle.known > 0,
        }

    def _dimensions(self) -> dict[str, Any]:
        d = self.dims
        return {
            "hidden": d.hidden,
            "layers": d.layers,
            "heads": d.heads,
            "kv_heads": d.kv_heads,
            "head_dim": d.head_dim,
            "intermediate": d.intermediate,
            "vocabulary": d.vocabulary,
            "context": d.context,
            "rms_epsilon": d.rms_epsilon,
            "kv_dtype": d.kv,
            "qk_norm": d.qk_norm,
            "inv_freq": d.inv_freq,
            "attention_factor": d.attention_factor,
            "windows": self.windows,
        }

    def save(self, path: Path) -> dict[str, Any]:
        """Writes weights.safetensors (header padded, tensors on multiples of 64) -> the native spec."""
        header: dict[str, Any] = {}
        position = 0
        for name, tensor in self.tensors.items():
            assert tensor.nbytes % 64 == 0, name
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, position + tensor.nbytes],
            }
            position += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in self.tensors.values():
                file.write(tensor.tobytes())
        start = 8 + len(text)
        drafters: dict[str, Any] = {}
        if self.medusa is not None:
            m = self.medusa
            drafters["medusa"] = {"heads": m.heads, "layers": m.layers, "version": m.version}
        if self.draft is not None:
            drafters["draft"] = self.draft._dimensions()
        if self.eagle is not None:
            drafters["eagle"] = self.eagle
        return (
            self._dimensions()
            | drafters
            | {
                "path": str(path),
                "tensors": {
                    name: (
                        start + entry["data_offsets"][0],
                        entry["data_offsets"][1] - entry["data_offsets"][0],
                        entry["dtype"],
                        tuple(entry["shape"]),
                    )
                    for name, entry in header.items()
                },
            }
        )

    def reference(
        self, tokens: np.ndarray, tap: Callable[[str, np.ndarray], np.ndarray] = lambda _, x: x
    ) -> np.ndarray:
        """Logits [T, vocabulary] of the whole sequence, in float64, as Hugging Face defines the family.

        `tap` sees, and may change, the input of each linear ("layers.N.qkv", ..., "lm_head") and "layers.N.keys" and
        "layers.N.values" [T, kv_heads, head_dim] as they go into the cache.
        """
        d = self.dims
        group = d.heads // d.kv_heads
        count = len(tokens)
        positions = np.arange(count)
        assert d.inv_freq is not None
        angles = (positions[:, None].astype(np.float32) * d.inv_freq[None]).astype(np.float64)
        # Both [T, 1, head_dim / 2].
        cos, sin = np.cos(angles)[:, None] * d.attention_factor, np.sin(angles)[:, None] * d.attention_factor

        def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + d.rms_epsilon) * weight

        def rotate(x: np.ndarray) -> np.ndarray:
            a, b = np.split(x, 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        hidden = self.embedding[tokens]
        for i, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            name = f"layers.{i}"
            x = tap(f"{name}.qkv", rms(hidden, layer.attn_norm))
            qkv = x @ layer.qkv.T + layer.bias.get("qkv", 0.0)
            q, k, v = np.split(qkv, [d.heads * d.head_dim, (d.heads + d.kv_heads) * d.head_dim], axis=-1)
            q = q.reshape(count, d.heads, d.head_dim)
            k = k.reshape(count, d.kv_heads, d.head_dim)
            v = v.reshape(count, d.kv_heads, d.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms(q, layer.q_norm), rms(k, layer.k_norm)
            q, k = rotate(q), rotate(k)
            k, v = tap(f"{name}.keys", k), tap(f"{name}.values", v)
            if d.kv == "bf16":
                k, v = k.astype(BF16).astype(np.float64), v.astype(BF16).astype(np.float64)
            if layer.kv_scale is not None:
                k, v = (round_in(scale[:, None], x) for scale, x in zip(layer.kv_scale, (k, v), strict=True))
            k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
            scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(d.head_dim)
            distance = positions[:, None] - positions[None]
            visible = (distance >= 0) & ((distance < window) if window else True)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mixed = tap(f"{name}.o", np.einsum("hts,shd->thd", weights, v).reshape(count, -1))
            hidden = hidden + mixed @ layer.o.T + layer.bias.get("o", 0.0)
            x = tap(f"{name}.gate_up", rms(hidden, layer.mlp_norm))
            gate = x @ layer.gate.T + layer.bias.get("gate", 0.0)
            up = x @ layer.up.T + layer.bias.get("up", 0.0)
            x = tap(f"{name}.down", gate / (1 + np.exp(-gate)) * up)
            hidden = hidden + x @ layer.down.T + layer.bias.get("down", 0.0)
        return tap("lm_head", rms(hidden, self.norm)) @ self.lm_head.T
