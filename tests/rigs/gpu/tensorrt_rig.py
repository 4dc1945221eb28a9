"""The double of TensorRT for tests, and the forward of a model through its segments in NumPy.

trt = tensorrt_rig.load()                       # in this process
env = tensorrt_rig.environment()                # for a subprocess: `import tensorrt` gives the double there
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull.bundle import Model, attention_factor, inverse_frequencies, segment_names
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.names import bias_sources, vector_source, weight_sources

FOLDER = Path(__file__).parents[3] / "tests/doubles/tensorrt_double"
TREE_TOKENS, COLUMNS = 64, 32  # of the attention's layout
BF16, F16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(ml_dtypes.float8_e4m3fn)
Array = NDArray[Any]
Segment = Callable[[str, Mapping[str, Array]], dict[str, Array]]  # (name, inputs) -> outputs


def load() -> Any:
    """The double, as `import tensorrt` gives it from now on."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module("tensorrt")


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base`, or this process's environment, with the double on PYTHONPATH."""
    variables = dict(os.environ if base is None else base)
    paths = [str(FOLDER), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


class Attention:
    """What lies between two segments: norms of q and k, RoPE, KV cache, softmax; in float64, as transformers does."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        model = self.model = checkpoint.model
        self._keys: list[list[Array]] = [[] for _ in range(model.layers)]
        self._values: list[list[Array]] = [[] for _ in range(model.layers)]
        self._frequencies = inverse_frequencies(model.rope, model.head_dim)

    def __call__(self, layer: int, qkv: Array, base: int) -> Array:
        """qkv [T, Q] of the tokens at `base` and after -> attention [A/32, 64, 32] f16; rubbish after row T."""
        model, rows = self.model, qkv.astype(np.float64)
        split = np.cumsum([model.heads, model.kv_heads]) * model.head_dim
        q, k, v = (part.reshape(len(rows), -1, model.head_dim) for part in np.split(rows, split, 1))
        positions = base + np.arange(len(rows))
        q = self._rotate(self._norm(layer, "q_norm", q), positions)
        k = self._rotate(self._norm(layer, "k_norm", k), positions)
        self._keys[layer].extend(k)
        self._values[layer].extend(v)
        group = model.heads // model.kv_heads
        keys = np.repeat(np.array(self._keys[layer]), group, 1)
        values = np.repeat(np.array(self._values[layer]), group, 1)
        scores = np.einsum("thd,shd->hts", q, keys) / np.sqrt(model.head_dim)
        scores[:, ~visible(positions, len(keys), model.windows[layer])] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return in_attention_layout(np.einsum("hts,shd->thd", weights, values).reshape(len(rows), -1))

    def forget(self, length: int) -> None:
        """Drops all tokens from position `length` on."""
        for cache in (*self._keys, *self._values):
            del cache[length:]

    def _norm(self, layer: int, name: str, heads: Array) -> Array:
        if not self.model.qk_norm:
            return heads
        weight = self._checkpoint.vector(vector_source(f"layers.{layer}.{name}"))
        return rms_norm(heads, weight, self.model.rms_epsilon)

    def _rotate(self, heads: Array, positions: Array) -> Array:
        angles = (positions.astype(np.float32)[:, None] * self._frequencies)[:, None].astype(np.float64)
        factor = attention_factor(self.model.rope)
        cosine, sine = factor * np.cos(angles), factor * np.sin(angles)
        first, second = np.split(heads, 2, -1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def visible(positions: Array, keys: int, window: int) -> Array:
    """[T, keys]: which keys each position attends to."""
    distance = positions[:, None] - np.arange(keys)
    return (distance >= 0) & ((distance < window) if window else True)


def in_attention_layout(rows: Array) -> Array:
    """[T, A] -> [A/32, 64, 32] f16, not-a-numbers after row T."""
    padded = np.full((TREE_TOKENS, rows.shape[1]), np.nan, F16)
    padded[: len(rows)] = rows
    return np.ascontiguousarray(padded.reshape(TREE_TOKENS, -1, COLUMNS).transpose(1, 0, 2))


def rms_norm(rows: Array, weight: Array, epsilon: float) -> Array:
    return rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + epsilon) * weight


def forward(checkpoint: Checkpoint, run: Segment, tokens: Array, step: int) -> Array:
    """Logits [len(tokens), vocabulary] by way of the segments, `step` tokens at a time; the last step is padded."""
    model, attention = checkpoint.model, Attention(checkpoint)
    embedding = np.concatenate(list(checkpoint.blocks("model.embed_tokens.weight")))
    logits = []
    for base in range(0, len(tokens), step):
        part = tokens[base : base + step]
        residual = embedding[np.pad(part, (0, step - len(part)))].astype(np.float32)
        qkv = run("entry", {"residual": residual})["qkv"]
        for layer, segment in enumerate(segment_names(model.layers, "paged")[1:-1]):
            outputs = run(segment, {"attention": attention(layer, qkv, base), "residual": residual})
            residual, qkv = outputs["residual_out"], outputs.get("qkv", qkv)
        logits.append(run("head", {"residual": residual})["logits"][: len(part), : model.vocabulary])
        attention.forget(base + len(part))
    return np.concatenate(logits)


class Reference:
    """The segments in NumPy, written apart from the networks: float64 but for the roundings that the engines make.

    `amax` None: nothing is FP8. `largest` collects the largest input of each linear: a calibration.
    """

    def __init__(self, checkpoint: Checkpoint, amax: Mapping[str, float] | None, fp8_head: bool = False) -> None:
        self._checkpoint, self._amax, self._fp8_head = checkpoint, amax, fp8_head
        self.largest: dict[str, float] = {}

    def __call__(self, segment: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        model, residual = self._checkpoint.model, inputs["residual"].astype(np.float64)
        if segment == "entry":
            return {"qkv": self._qkv(0, residual)}
        if segment == "head":
            return {"logits": self._linear("lm_head", self._norm("norm", residual))}
        layer = model.layers - 1 if segment == "exit" else int(segment.removeprefix("layer."))
        rows = inputs["attention"].transpose(1, 0, 2).reshape(TREE_TOKENS, -1)[: len(residual)]
        residual = residual + self._linear(f"layers.{layer}.o", rows.astype(np.float64))
        normed = self._norm(f"layers.{layer}.mlp_norm", residual)
        gate, up = np.split(self._linear(f"layers.{layer}.gate_up", normed), 2, 1)
        residual = residual + self._linear(f"layers.{layer}.down", gate / (1.0 + np.exp(-gate)) * up)
        outputs = {"residual_out": residual.astype(np.float32)}
        return outputs if segment == "exit" else {**outputs, "qkv": self._qkv(layer + 1, residual)}

    def _qkv(self, layer: int, residual: Array) -> Array:
        return self._linear(f"layers.{layer}.qkv", self._norm(f"layers.{layer}.attn_norm", residual))

    def _norm(self, name: str, rows: Array) -> Array:
        model: Model = self._checkpoint.model
        return rms_norm(rows, rounded(self._checkpoint.vector(vector_source(name)), BF16), model.rms_epsilon)

    def _linear(self, name: str, rows: Array) -> Array:
        is_head = name == "lm_head"
        self.largest[name] = max(self.largest.get(name, 0.0), float(np.abs(rows).max()))
        sources = weight_sources(self._checkpoint, name)
        weight = np.concatenate([block for source in sources for block in self._checkpoint.blocks(source)])
        if self._amax is not None and (self._fp8_head or not is_head):
            compute = np.dtype(np.float32) if is_head else BF16
            operand = rounded(rows, compute)
            scale = float(up_to(np.array([self._amax[name] / 448.0]), compute)[0])
            operand = rounded(rounded(np.clip(operand / scale, -448, 448), F8) * scale, compute)
            scales = np.abs(weight).max(1) / np.float32(448.0)
            codes = rounded(np.clip(weight / scales[:, None], -448, 448), F8)
            result = rounded(operand @ codes.T, compute) * scales
        else:
            compute = F16 if is_head else BF16
            product = rounded(rows, compute) @ rounded(rounded(weight, BF16), compute).T
            result = product if is_head else rounded(product, compute)
        biases = [] if is_head else bias_sources(self._checkpoint, f"{name}.bias")
        if biases:
            result = result + rounded(np.concatenate([self._checkpoint.vector(source) for source in biases]), BF16)
        return result.astype(np.float64)


def rounded(values: Array, dtype: np.dtype[Any]) -> Array:
    return values.astype(np.float32).astype(dtype).astype(np.float64)


def up_to(values: Array, dtype: np.dtype[Any]) -> Array:
    """Each value rounded up to one of `dtype`; float64."""
    near = rounded(values, dtype)
    above = np.nextafter(near.astype(dtype), np.array(np.inf, dtype)).astype(np.float64)
    return np.where(near < values.astype(np.float32), above, near)
