"""Weights of a bundle under their Hugging Face names: exactly what the executor multiplies with, as float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull.bundle import Bundle, embedding_is_shared
from ull_build.weights.pack_cpu import unpack_tiles
from ull_build.weights.quantise import dequantise_rows, from_bf16

TILE = 32
_DTYPES = {"F8_E4M3": np.uint8, "BF16": np.uint16, "F32": np.float32}
_VECTORS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def bundle_weights(bundle: Bundle) -> dict[str, NDArray[np.float32]]:
    """Every weight of the target, by Hugging Face name; quantised ones are widened, which loses nothing."""
    model = bundle.manifest.model
    weights: dict[str, NDArray[np.float32]] = {}
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def put(names: tuple[str, ...], sizes: tuple[int, ...], kind: str, fused: NDArray[np.float32]) -> None:
        start = 0
        for name, size in zip(names, sizes, strict=True):
            weights[f"{name}.{kind}"] = fused[start : start + size]
            start += size

    for layer in range(model.layers):
        prefix, source = f"model.layers.{layer}", f"layers.{layer}"
        for short, name in _VECTORS.items():
            if f"{source}.{short}" in bundle.tensors:
                length = model.head_dim if short in ("q_norm", "k_norm") else model.hidden
                weights[f"{prefix}.{name}.weight"] = _vector(bundle, f"{source}.{short}")[:length]
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        linears: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
            "qkv": (tuple(f"{attention}.{part}_proj" for part in "qkv"), (query, key, key)),
            "o": ((f"{attention}.o_proj",), (model.hidden,)),
            "gate_up": ((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (model.intermediate, model.intermediate)),
            "down": ((f"{mlp}.down_proj",), (model.hidden,)),
        }
        for short, (names, sizes) in linears.items():
            for kind, fused in _linear(bundle, f"{source}.{short}").items():
                if short == "gate_up":
                    for name, rows in zip(names, _alternate(fused), strict=True):
                        weights[f"{name}.{kind}"] = rows[: model.intermediate]
                else:
                    put(names, sizes, kind, fused)
    weights["model.norm.weight"] = _vector(bundle, "norm")[: model.hidden]
    head = _linear(bundle, "lm_head")["weight"][: model.vocabulary]
    if embedding_is_shared(model, bundle.manifest.precision):
        weights["model.embed_tokens.weight"] = head
    else:
        weights["model.embed_tokens.weight"] = _floats(_raw(bundle, "embed.weight"))
        weights["lm_head.weight"] = head  # also when tied: the head is then quantised and the embedding is not
    return weights


def _raw(bundle: Bundle, name: str) -> NDArray[Any]:
    entry = bundle.tensors[name]
    values = np.fromfile(
        bundle.weights_path,
        _DTYPES[entry.dtype],
        count=entry.nbytes // np.dtype(_DTYPES[entry.dtype]).itemsize,
        offset=entry.offset,
    )
    return values.reshape(entry.shape)


def _floats(values: NDArray[Any]) -> NDArray[np.float32]:
    if values.dtype == np.uint16:
        return from_bf16(values)
    if values.dtype == np.uint8:
        wide: NDArray[np.float32] = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return wide
    return values.astype(np.float32)


def _vector(bundle: Bundle, name: str) -> NDArray[np.float32]:
    return _floats(_raw(bundle, name))


def _linear(bundle: Bundle, name: str) -> dict[str, NDArray[np.float32]]:
    """`weight` [rows, K] in whole tiles, and `bias` [rows] where there is one."""
    rows = unpack_tiles(_raw(bundle, f"{name}.weight"))
    quantised = f"{name}.scale" in bundle.tensors
    parts = {"weight": dequantise_rows(rows, _raw(bundle, f"{name}.scale")) if quantised else _floats(rows)}
    if f"{name}.bias" in bundle.tensors:
        parts["bias"] = _vector(bundle, f"{name}.bias")
    return parts


def _alternate(fused: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Undoes `fuse.alternate_tiles`: rows or elements of the first and of the second stream."""
    tiles = fused.reshape(-1, 2, TILE, *fused.shape[1:])
    first, second = (np.ascontiguousarray(tiles[:, side]).reshape(-1, *fused.shape[1:]) for side in (0, 1))
    return first, second
