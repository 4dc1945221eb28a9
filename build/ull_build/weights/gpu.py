"""Turns a checkpoint into the weights file of a GPU bundle: fuse, quantise, pack and write, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle.open import (
    DEVICE_TILE_ROWS,
    DRAFT,
    FILLER,
    HEAD_SCAN,
    MEDUSA,
    FileEntry,
    Model,
    Precision,
    TensorError,
    TensorShape,
    device_tensors,
    head_rows,
)
from ull_build.progress import Reporter
from ull_build.quality.activation_range import scale_rows_of
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.medusa import MedusaWeights
from ull_build.weights.cpu import (
    EMBEDDING,
    MEDUSA_ROWS,
    NO_DRAFTERS,
    Drafters,
    bias_sources,
    present,
    vector_source,
    weight_sources,
)
from ull_build.weights.head_scan import scan_rows
from ull_build.weights.pack_cpu import alternate_tiles, whole_tiles
from ull_build.weights.pack_gpu import pack_blocks, scale_rows, unscale_rows
from ull_build.weights.quantise import ErrorSum, dequantize_rows, quantize_rows, round_to_bf16, to_bf16
from ull_build.weights.writer import WeightsWriter

_MAX_FP8 = 448.0


@dataclass
class RowValues:
    """What the rows of the weight that was written last have besides it, piece by piece."""

    scale: list[NDArray[np.float32]] = field(default_factory=list)
    bound: list[NDArray[np.float32]] = field(default_factory=list)

    def take(self, kind: str) -> NDArray[np.float32]:
        """All of one kind, which are then forgotten."""
        pieces: list[NDArray[np.float32]] = getattr(self, kind)
        taken = np.concatenate(pieces)
        pieces.clear()
        return taken


def plan_device_weights(
    checkpoint: Checkpoint, precision: Precision, fused: bool = True, drafters: Drafters = NO_DRAFTERS
) -> dict[str, TensorShape]:
    """The tensors of the weights file, in order: all required ones, and the biases that checkpoints and heads have."""
    medusa, draft = drafters.medusa, drafters.draft
    expected = device_tensors(checkpoint.model, precision, fused, drafters.heads)
    heads = {name: expected.pop(name) for name in list(expected) if name.startswith(MEDUSA)}
    biased = medusa is not None and medusa.biased
    plan = present(checkpoint, expected)
    plan |= {name: shape for name, shape in heads.items() if biased or not shape.optional}
    if draft is not None:
        own = present(draft, device_tensors(draft.model, precision))
        plan |= {DRAFT + name: shape for name, shape in own.items()}
    return plan


def convert_for_device(
    checkpoint: Checkpoint,
    precision: Precision,
    path: Path,
    progress: Callable[[int], None] | None = None,
    keys_values: Mapping[str, NDArray[np.float32]] | None = None,
    fused: bool = True,
    drafters: Drafters = NO_DRAFTERS,
    scaled: Mapping[str, int] = MappingProxyType({}),
) -> tuple[FileEntry, list[TensorError]]:
    """Writes the weights file at `path`; tells `progress` the bytes written by each step.

    `keys_values`: what Observation saw, for the scales of FP8 pages; None leaves them to the biases. Not `fused`:
    without the linear layers, which plans hold. `scaled`: MLPs whose activations are scaled, as check_activations says.

    Returns its size and hash, and the relative error of every linear weight. Equal input gives equal bytes. Raises
    CheckpointError for values that are not finite, OSError when the disk is full.
    """
    plan, medusa = plan_device_weights(checkpoint, precision, fused, drafters), drafters.medusa
    errors: list[TensorError] = []
    with WeightsWriter(path, plan) as writer:
        values = RowValues()
        for name, shape in plan.items():
            error = ErrorSum()
            if drafters.draft is not None and name.startswith(DRAFT):
                pieces = _pieces(drafters.draft, name.removeprefix(DRAFT), shape, values, error, None)
            elif medusa is not None and name.startswith(MEDUSA):
                pieces = _medusa_pieces(medusa, checkpoint.model, name, shape, values, error)
            else:
                pieces = _pieces(checkpoint, name, shape, values, error, keys_values)
                pieces = (scale_rows_of(name, piece, scaled) for piece in pieces)
            for piece in pieces:
                writer.write(name, piece)
                if progress:
                    progress(piece.nbytes)
            if len(shape.shape) > 2 and not name.endswith(f"{HEAD_SCAN}.weight"):  # whose error never shows
                errors.append(TensorError(name=name, relative_error=error.value()))
        return writer.finish(), errors


def convert_device_stage(
    title: str,
    reporter: Reporter,
    checkpoint: Checkpoint,
    precision: Precision,
    path: Path,
    keys_values: Mapping[str, NDArray[np.float32]] | None = None,
    drafters: Drafters = NO_DRAFTERS,
    scaled: Mapping[str, int] = MappingProxyType({}),
) -> tuple[FileEntry, list[TensorError]]:
    """convert_for_device as a stage of a build, with its progress."""
    plan = plan_device_weights(checkpoint, precision, drafters=drafters)
    with reporter.stage(title, sum(shape.nbytes for shape in plan.values()), "bytes") as advance:
        return convert_for_device(checkpoint, precision, path, advance, keys_values, drafters=drafters, scaled=scaled)


def _pieces(
    checkpoint: Checkpoint,
    name: str,
    shape: TensorShape,
    values: RowValues,
    error: ErrorSum,
    keys_values: Mapping[str, NDArray[np.float32]] | None,
) -> Iterator[NDArray[Any]]:
    """The pieces of one tensor in stored form. A weight leaves `values` of its rows, its .scale takes them."""
    stem, _, kind = name.rpartition(".")
    if name.endswith(FILLER):
        yield np.zeros(shape.shape, np.uint8)
    elif name == "embed.weight":
        yield from (to_bf16(block) for block in checkpoint.blocks(EMBEDDING))
    elif kind in ("scale", "bound"):
        yield _padded(values.take(kind), shape)
    elif kind == "bias":
        columns = [checkpoint.vector(source)[:, None] for source in bias_sources(checkpoint, name)]
        yield _vector(np.concatenate(list(_fuse(stem, [[column] for column in columns]))).reshape(-1), shape)
    elif name == f"{HEAD_SCAN}.weight":
        for rows in whole_tiles(checkpoint.blocks(*weight_sources(checkpoint, "lm_head")), DEVICE_TILE_ROWS):
            codes, row_scales, bounds = scan_rows(rows)
            values.scale.append(row_scales)
            values.bound.append(bounds)
            yield pack_blocks(codes)
    elif kind == "weight":
        for rows in _fuse(stem, [checkpoint.blocks(source) for source in weight_sources(checkpoint, stem)]):
            yield pack_blocks(_stored(rows, shape.dtype, values, error))
    elif kind == "kv_scale":
        largest = None if keys_values is None else keys_values[f"{stem}.kv"]
        yield _padded(kv_scales(checkpoint, stem, largest), shape)
    else:
        yield _vector(checkpoint.vector(vector_source(name)), shape)


def _medusa_pieces(
    medusa: MedusaWeights,
    model: Model,
    name: str,
    shape: TensorShape,
    values: RowValues,
    error: ErrorSum,
) -> Iterator[NDArray[Any]]:
    """The pieces of one tensor of the heads in stored form: each head's part after the other.

    Padding rows of an lm_head are left out or zeros.
    """
    if name.endswith(FILLER):
        yield np.zeros(shape.shape, np.uint8)
        return
    _, part, kind = name.split(".")
    if kind == "scale":
        yield _padded(values.take(kind), shape)
    elif kind == "bias":
        biases = [bias for bias in (layers[int(part)][1] for layers in medusa.blocks) if bias is not None]
        yield _vector(np.concatenate(biases), shape)
    else:
        own = part == "lm_head"
        rows = head_rows(model) if own else model.hidden
        for source in medusa.lm_heads if own else [layers[int(part)][0] for layers in medusa.blocks]:
            padded = np.pad(source[:rows], [(0, max(0, rows - len(source))), (0, 0)])
            for start in range(0, rows, MEDUSA_ROWS):
                yield pack_blocks(_stored(padded[start : start + MEDUSA_ROWS], shape.dtype, values, error))


def kv_scales(checkpoint: Checkpoint, layer: str, observed: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Scale of each KV head's keys, then values, in FP8 pages: a power of two, [2 * kv_heads].

    Room for twice the largest ones `observed` [2 * kv_heads], the smallest power that gives it. Where nothing was
    observed: 1 reaches +-448, far beyond the keys and values of a model without biases. A projection's bias can be
    larger, and it is in every key: then the scale leaves room for twice that.
    """
    model: Model = checkpoint.model
    if observed is not None:
        return _with_room_for_twice(np.where(observed > 0, observed, np.float32(_MAX_FP8 / 2)))
    sources = bias_sources(checkpoint, f"{layer}.qkv.bias")
    if not sources or model.qk_norm:  # a norm takes the bias's size away
        return np.ones(2 * model.kv_heads, np.float32)
    biases = np.concatenate([checkpoint.vector(source) for source in sources[1:]])
    largest = np.abs(biases).reshape(2 * model.kv_heads, model.head_dim).max(axis=1)
    return np.maximum(_with_room_for_twice(np.maximum(largest, np.float32(1.0))), np.float32(1.0))


def _with_room_for_twice(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """The smallest powers of two, float32, that reach 2 * largest (all positive) with E4M3's 448."""
    powers = np.ceil(np.log2(2.0 * largest.astype(np.float64) / _MAX_FP8))
    return np.asarray(np.ldexp(1.0, np.clip(powers, -126, 127).astype(np.int64)), np.float32)


def _stored(rows: NDArray[np.float32], dtype: str, values: RowValues, error: ErrorSum) -> NDArray[Any]:
    """Rows in stored form, their error added to `error`."""
    if dtype == "F16":
        halves, row_scales = scale_rows(rows)
        error.add(rows, unscale_rows(halves, row_scales))
        values.scale.append(row_scales)
        return halves
    codes, row_scales = quantize_rows(rows)
    error.add(rows, dequantize_rows(codes, row_scales))
    values.scale.append(row_scales)
    return codes


def _fuse(stem: str, sources: list[Any]) -> Iterator[NDArray[np.float32]]:
    """Whole tiles of one linear: eight rows of gate and eight of up in turn, else one source after the other."""
    if stem.endswith(".gate_up"):
        return alternate_tiles(sources[0], sources[1], DEVICE_TILE_ROWS // 2)
    return whole_tiles(chain.from_iterable(sources), DEVICE_TILE_ROWS)


def _vector(values: NDArray[np.float32], shape: TensorShape) -> NDArray[np.float32]:
    """A norm or bias, of the CPU's precision though stored as float32, with zeros up to its stored length."""
    return _padded(round_to_bf16(values.astype(np.float32)), shape)


def _padded(values: NDArray[np.float32], shape: TensorShape) -> NDArray[np.float32]:
    """A vector with zeros up to its stored length."""
    return np.pad(values.astype(np.float32), (0, shape.shape[0] - len(values)))
