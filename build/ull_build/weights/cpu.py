"""Turns a checkpoint's tensors into a bundle's weights file: fuse, quantise, pack and write, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle.open import (
    DRAFT,
    FILLER,
    MEDUSA,
    FileEntry,
    MedusaHeads,
    Precision,
    TensorError,
    TensorShape,
    expected_tensors,
    medusa_tensors,
)
from ull_build.progress import Reporter
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.medusa import MedusaWeights
from ull_build.weights.pack_cpu import alternate_tiles, pack_tiles, whole_tiles
from ull_build.weights.quantise import ErrorSum, dequantize_rows, from_bf16, quantize_rows, to_bf16
from ull_build.weights.writer import WeightsWriter

Rows = Iterable[NDArray[np.float32]]
ORIGINAL_F32 = Precision(weights="f32", lm_head="f32", embedding="f32", kv="f32")
ORIGINAL_BF16 = Precision(weights="bf16", lm_head="bf16", embedding="bf16", kv="f32")

MEDUSA_ROWS = 1024  # per piece: whole tiles
EMBEDDING = "model.embed_tokens.weight"
# name in the bundle -> names in the checkpoint's layer, without .weight or .bias
_PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_VECTORS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class Drafters:
    """What drafts for the model and is stored beside it."""

    medusa: MedusaWeights | None = None
    draft: Checkpoint | None = None

    @property
    def heads(self) -> MedusaHeads | None:
        """The manifest's account of the Medusa heads."""
        return None if self.medusa is None else self.medusa.description


NO_DRAFTERS = Drafters()


def present(checkpoint: Checkpoint, expected: dict[str, TensorShape]) -> dict[str, TensorShape]:
    """Of the expected tensors all required ones, and the biases that the checkpoint has."""
    return {name: shape for name, shape in expected.items() if not shape.optional or bias_sources(checkpoint, name)}


def plan_weights(
    checkpoint: Checkpoint, precision: Precision, drafters: Drafters = NO_DRAFTERS
) -> dict[str, TensorShape]:
    """The tensors of the weights file, in order: all required ones, and the biases that the checkpoints have."""
    plan = _plan_model(checkpoint, precision)
    if drafters.medusa is not None:
        expected = medusa_tensors(checkpoint.model, precision, drafters.medusa.description)
        plan |= {name: shape for name, shape in expected.items() if drafters.medusa.biased or not shape.optional}
    if drafters.draft is not None:
        plan |= {DRAFT + name: shape for name, shape in _plan_model(drafters.draft, precision).items()}
    return plan


def _plan_model(checkpoint: Checkpoint, precision: Precision) -> dict[str, TensorShape]:
    return present(checkpoint, expected_tensors(checkpoint.model, precision))


def convert_checkpoint(
    checkpoint: Checkpoint,
    precision: Precision,
    path: Path,
    progress: Callable[[int], None] | None = None,
    drafters: Drafters = NO_DRAFTERS,
) -> tuple[FileEntry, list[TensorError]]:
    """Writes the weights file at `path`; tells `progress` the bytes written by each step.

    Returns its size and hash, and the relative error of every linear weight. Equal input gives equal bytes. Raises
    CheckpointError for values that are not finite, OSError when the disk is full.
    """
    plan = plan_weights(checkpoint, precision, drafters)
    errors: list[TensorError] = []
    with WeightsWriter(path, plan) as writer:
        scales: list[NDArray[np.float32]] = []
        for name, shape in plan.items():
            error = ErrorSum()
            if drafters.draft is not None and name.startswith(DRAFT):
                pieces = _pieces(drafters.draft, name.removeprefix(DRAFT), shape, scales, error)
            elif drafters.medusa is not None and name.startswith(MEDUSA):
                pieces = _medusa_pieces(drafters.medusa, name, shape, scales, error)
            else:
                pieces = _pieces(checkpoint, name, shape, scales, error)
            for piece in pieces:
                writer.write(name, piece)
                if progress:
                    progress(piece.nbytes)
            if len(shape.shape) == 3:
                errors.append(TensorError(name=name, relative_error=error.value()))
        return writer.finish(), errors


def convert_stage(
    title: str,
    reporter: Reporter,
    checkpoint: Checkpoint,
    precision: Precision,
    path: Path,
    drafters: Drafters = NO_DRAFTERS,
) -> tuple[FileEntry, list[TensorError]]:
    """convert_checkpoint as a stage of a build, with its progress."""
    total = sum(shape.nbytes for shape in plan_weights(checkpoint, precision, drafters).values())
    with reporter.stage(title, total, "bytes") as advance:
        return convert_checkpoint(checkpoint, precision, path, advance, drafters)


def _pieces(
    checkpoint: Checkpoint,
    name: str,
    shape: TensorShape,
    scales: list[NDArray[np.float32]],
    error: ErrorSum,
) -> Iterator[NDArray[Any]]:
    """The pieces of one tensor in stored form. A quantised weight leaves its `scales`, its .scale takes them."""
    stem, _, kind = name.rpartition(".")
    if name.endswith(FILLER):
        yield np.zeros(shape.shape, np.uint8)
    elif name == "embed.weight":
        yield from (_stored(block, shape.dtype) for block in checkpoint.blocks(EMBEDDING))
    elif kind == "scale":
        yield np.concatenate(scales)
        scales.clear()
    elif kind == "bias":
        columns = [checkpoint.vector(source)[:, None] for source in bias_sources(checkpoint, name)]
        yield _stored(np.concatenate(list(_fuse(stem, [[column] for column in columns]))).reshape(-1), shape.dtype)
    elif kind == "weight":
        for rows in _fuse(stem, [checkpoint.blocks(source) for source in weight_sources(checkpoint, stem)]):
            yield pack_tiles(_quantised(rows, shape.dtype, scales, error))
    else:
        values = checkpoint.vector(vector_source(name))
        yield _stored(np.pad(values, (0, shape.shape[0] - len(values))), shape.dtype)


def _medusa_pieces(
    medusa: MedusaWeights,
    name: str,
    shape: TensorShape,
    scales: list[NDArray[np.float32]],
    error: ErrorSum,
) -> Iterator[NDArray[Any]]:
    """The pieces of one tensor of the heads in stored form; padding rows of an lm_head are left out or zeros."""
    if name.endswith(FILLER):
        yield np.zeros(shape.shape, np.uint8)
        return
    _, head, part, kind = name.split(".")
    if kind == "scale":
        yield np.concatenate(scales)
        scales.clear()
    elif kind == "bias":
        bias = medusa.blocks[int(head)][int(part)][1]
        if bias is not None:
            yield _stored(np.pad(bias, (0, shape.shape[0] - len(bias))), shape.dtype)
    else:
        source = medusa.lm_heads[int(head)] if part == "lm_head" else medusa.blocks[int(head)][int(part)][0]
        rows = shape.shape[0] * shape.shape[2]
        padded = np.pad(source[:rows], [(0, max(0, rows - len(source))), (0, 0)])
        for start in range(0, rows, MEDUSA_ROWS):
            yield pack_tiles(_quantised(padded[start : start + MEDUSA_ROWS], shape.dtype, scales, error))


def _quantised(
    rows: NDArray[np.float32], dtype: str, scales: list[NDArray[np.float32]], error: ErrorSum
) -> NDArray[Any]:
    """Rows in stored form, their error added to `error`."""
    if dtype == "F32":
        return rows
    if dtype == "BF16":
        bits = to_bf16(rows)
        error.add(rows, from_bf16(bits))
        return bits
    codes, row_scales = quantize_rows(rows)
    scales.append(row_scales)
    error.add(rows, dequantize_rows(codes, row_scales))
    return codes


def _stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return to_bf16(values) if dtype == "BF16" else values


def _fuse(stem: str, sources: list[Rows]) -> Iterator[NDArray[np.float32]]:
    """Whole tiles of one linear: gate and up in turn, anything else one source after the other."""
    if stem.endswith(".gate_up"):
        return alternate_tiles(sources[0], sources[1])
    return whole_tiles(chain.from_iterable(sources))


def weight_sources(checkpoint: Checkpoint, stem: str) -> list[str]:
    """Names in the checkpoint of a linear's weights."""
    if stem == "lm_head":
        return [EMBEDDING if checkpoint.model.tied_embeddings else "lm_head.weight"]
    _, layer, short = stem.split(".")
    return [f"model.layers.{layer}.{source}.weight" for source in _PROJECTIONS[short]]


def bias_sources(checkpoint: Checkpoint, name: str) -> list[str]:
    """Names in the checkpoint of a linear's biases; empty when it has none."""
    _, layer, short, _ = name.split(".")
    names = [f"model.layers.{layer}.{source}.bias" for source in _PROJECTIONS[short]]
    return names if checkpoint.has(names[0]) else []


def vector_source(name: str) -> str:
    """Name in the checkpoint of a norm."""
    if name == "norm":
        return "model.norm.weight"
    _, layer, short = name.split(".")
    return f"model.layers.{layer}.{_VECTORS[short]}"
