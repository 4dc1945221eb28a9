"""Turns a checkpoint's tensors into a bundle's weights file: fuse, quantise, pack and write, block by block.

How each tensor is stored is the packer's to say: `pack_cpu`, `pack_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import (
    DFLASH,
    DRAFT,
    EAGLE,
    FILLER,
    HEAD_SCAN,
    MEDUSA,
    DflashHead,
    EagleHead,
    FileEntry,
    TensorError,
    TensorShape,
)
from ull_build.progress import Reporter
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.drafters import NO_DRAFTERS, Drafters
from ull_build.source.files import FP8_DTYPE
from ull_build.source.heads.head import Head
from ull_build.source.medusa import MedusaWeights
from ull_build.weights.fuse import exact_rows, fuse
from ull_build.weights.names import EMBEDDING, bias_sources, present, vector_source, weight_sources
from ull_build.weights.packer import Packer
from ull_build.weights.quantise import ErrorSum, as_stored
from ull_build.weights.writer import WeightsWriter

MEDUSA_ROWS = 1024  # per piece: whole tiles
_OF_ROWS = ("scale", "bound")
# Tensors of heads that are stored row by row, with what they are made of.
_ROW_BY_ROW = {"embed.weight": "embed", "markov.embed": "markov.embed", "markov.head": "markov.head"}


def plan_weights(checkpoint: Checkpoint, packer: Packer, drafters: Drafters = NO_DRAFTERS) -> dict[str, TensorShape]:
    """The tensors of the weights file, in order: all required ones, and the biases that checkpoints and heads have."""
    plan = present(checkpoint, packer.tensors(checkpoint.model))
    if drafters.medusa is not None:
        expected = packer.medusa_tensors(checkpoint.model, drafters.medusa.description)
        plan |= {name: shape for name, shape in expected.items() if drafters.medusa.biased or not shape.optional}
    if drafters.draft is not None:
        own = present(drafters.draft, packer.for_draft().tensors(drafters.draft.model))
        plan |= {DRAFT + name: shape for name, shape in own.items()}
    for prefix, head in _heads(drafters).items():
        for name, shape in packer.head_tensors(checkpoint.model, head.about).items():
            if not shape.optional or head.has_bias(name.removesuffix(".bias")):
                plan[prefix + name] = shape
    return plan


def _heads(drafters: Drafters) -> dict[str, Head[EagleHead] | Head[DflashHead]]:
    """The heads that read hidden states, by the prefix of their tensors."""
    heads: dict[str, Head[EagleHead] | Head[DflashHead] | None] = {EAGLE: drafters.eagle, DFLASH: drafters.dflash}
    return {prefix: head for prefix, head in heads.items() if head is not None}


def convert_checkpoint(
    checkpoint: Checkpoint,
    packer: Packer,
    path: Path,
    progress: Callable[[int], None] | None = None,
    drafters: Drafters = NO_DRAFTERS,
) -> tuple[FileEntry, list[TensorError]]:
    """Writes the weights file at `path`; tells `progress` the bytes written by each step.

    Returns its size and hash, and the relative error of every linear weight. Equal input gives equal bytes. Raises
    CheckpointError for values that are not finite, OSError when the disk is full.
    """
    plan = plan_weights(checkpoint, packer, drafters)
    errors: list[TensorError] = []
    model, medusa, draft = _Pieces(checkpoint, packer), drafters.medusa, None
    heads, drafting = _heads(drafters), _Pieces(checkpoint, packer.for_draft())
    if drafters.draft is not None:
        draft = _Pieces(drafters.draft, packer.for_draft())
    with WeightsWriter(path, plan) as writer:
        for name, shape in plan.items():
            error = ErrorSum()
            if draft is not None and name.startswith(DRAFT):
                pieces = draft.of_model(name.removeprefix(DRAFT), shape, error)
            elif medusa is not None and name.startswith(MEDUSA):
                pieces = model.of_medusa(medusa, name, shape, error)
            elif prefix := next((one for one in heads if name.startswith(one)), ""):
                pieces = drafting.of_head(heads[prefix], name.removeprefix(prefix), shape, error)
            else:
                pieces = model.of_model(name, shape, error)
            for piece in pieces:
                writer.write(name, piece)
                if progress:
                    progress(piece.nbytes)
            if len(shape.shape) > 2 and not name.endswith(f"{HEAD_SCAN}.weight"):  # whose error never shows
                errors.append(TensorError(name=name, relative_error=error.value()))
        return writer.finish(), errors


def convert_stage(
    title: str,
    reporter: Reporter,
    checkpoint: Checkpoint,
    packer: Packer,
    path: Path,
    drafters: Drafters = NO_DRAFTERS,
) -> tuple[FileEntry, list[TensorError]]:
    """convert_checkpoint as a stage of a build, with its progress."""
    total = sum(shape.nbytes for shape in plan_weights(checkpoint, packer, drafters).values())
    with reporter.stage(title, total, "bytes") as advance:
        return convert_checkpoint(checkpoint, packer, path, advance, drafters)


class _Pieces:
    """The tensors of one checkpoint in stored form, each in pieces, asked for in the order of the file.

    A weight leaves what its rows have besides, and the tensors of that, which follow it, take it.
    """

    def __init__(self, checkpoint: Checkpoint, packer: Packer) -> None:
        self._checkpoint, self._packer = checkpoint, packer
        self._of_rows: dict[str, list[NDArray[np.float32]]] = {kind: [] for kind in _OF_ROWS}

    def of_model(self, name: str, shape: TensorShape, error: ErrorSum) -> Iterator[NDArray[Any]]:
        """The pieces of a tensor of the model; adds a weight's error to `error`."""
        checkpoint, packer = self._checkpoint, self._packer
        stem, _, kind = name.rpartition(".")
        if name.endswith(FILLER):
            yield np.zeros(shape.shape, np.uint8)
        elif name == "embed.weight":
            yield from (as_stored(block, shape.dtype) for block in checkpoint.blocks(EMBEDDING))
        elif kind == "weight":
            names = weight_sources(checkpoint, stem)
            blocks = fuse(stem, [checkpoint.blocks(source) for source in names], packer.tile_rows, packer.gate_rows)
            for rows, stored in zip(blocks, self._stored(stem, names, shape.dtype), strict=False):
                yield self._packed(stem, rows, shape.dtype, error, stored)
        elif kind in _OF_ROWS:
            yield self._left(name, kind, shape)
        elif kind == "bias":
            columns = [[checkpoint.vector(source)[:, None]] for source in bias_sources(checkpoint, name)]
            tiles = np.concatenate(list(fuse(stem, columns, packer.tile_rows, packer.gate_rows)))
            yield packer.vector(name, tiles.reshape(-1), shape)
        else:
            own = packer.own_values(checkpoint, name)
            yield packer.vector(name, checkpoint.vector(vector_source(name)) if own is None else own, shape)

    def of_medusa(
        self, medusa: MedusaWeights, name: str, shape: TensorShape, error: ErrorSum
    ) -> Iterator[NDArray[Any]]:
        """The pieces of a tensor of Medusa heads: of the one that it names, else of each after the other.

        Padding rows of an lm_head are left out or zeros.
        """
        if name.endswith(FILLER):
            yield np.zeros(shape.shape, np.uint8)
            return
        stem, _, kind = name.rpartition(".")
        *named, part = stem.removeprefix(MEDUSA).split(".")
        heads = [int(head) for head in named] or range(len(medusa.blocks))
        if kind in _OF_ROWS:
            yield self._left(name, kind, shape)
        elif kind == "bias":
            biases = [medusa.blocks[head][int(part)][1] for head in heads]
            yield self._packer.vector(name, np.concatenate([bias for bias in biases if bias is not None]), shape)
        else:
            own, model, tile_rows = part == "lm_head", self._checkpoint.model, self._packer.tile_rows
            rows = -(-(model.vocabulary if own else model.hidden) // tile_rows) * tile_rows
            for head in heads:
                source = medusa.lm_heads[head] if own else medusa.blocks[head][int(part)][0]
                padded = np.pad(source[:rows], [(0, max(0, rows - len(source))), (0, 0)])
                for start in range(0, rows, MEDUSA_ROWS):
                    yield self._packed(stem, padded[start : start + MEDUSA_ROWS], shape.dtype, error)

    def of_head(
        self, head: Head[EagleHead] | Head[DflashHead], name: str, shape: TensorShape, error: ErrorSum
    ) -> Iterator[NDArray[Any]]:
        """The pieces of a tensor of a head that reads hidden states, `name` being without its prefix."""
        packer, tensors = self._packer, head.tensors
        stem, _, kind = name.rpartition(".")
        if name.endswith(FILLER):
            yield np.zeros(shape.shape, np.uint8)
        elif name == "d2t":
            assert head.d2t is not None
            yield np.pad(head.d2t, (0, shape.shape[0] - len(head.d2t)))
        elif name in _ROW_BY_ROW:  # a GPU has markov.head as a linear
            [source] = head.sources[_ROW_BY_ROW[name]]
            yield from (as_stored(rows, shape.dtype) for rows in exact_rows(tensors.blocks(source), shape.shape[0]))
        elif name in ("confidence.weight", "confidence.bias"):
            yield packer.vector(name, head.vector(name), shape)
        elif kind == "weight":
            sources = [tensors.blocks(source) for source in head.sources[stem]]
            if stem in ("lm_head", "markov.head"):  # rows beyond the vocabulary are padding
                sources = [exact_rows(sources[0], head.about.model.vocabulary)]
            for rows in fuse(stem, sources, packer.tile_rows, packer.gate_rows):
                yield self._packed(stem, rows, shape.dtype, error)
        elif kind in _OF_ROWS:
            yield self._left(name, kind, shape)
        elif kind == "bias":
            columns = [[tensors.vector(source)[:, None]] for source in head.biases(stem)]
            tiles = np.concatenate(list(fuse(stem, columns, packer.tile_rows, packer.gate_rows)))
            yield packer.vector(name, tiles.reshape(-1), shape)
        else:
            yield packer.vector(name, head.vector(name), shape)

    def _stored(self, stem: str, names: list[str], dtype: str) -> Iterator[NDArray[np.uint8] | None]:
        """Beside the blocks of a linear, what of them is FP8 already that stays as it is; None where nothing is."""
        checkpoint, packer = self._checkpoint, self._packer
        if dtype != FP8_DTYPE or checkpoint.fp8_weights.keys().isdisjoint(names):
            return repeat(None)
        return fuse(stem, [checkpoint.fp8_rows(name) for name in names], packer.tile_rows, packer.gate_rows)

    def _packed(
        self,
        stem: str,
        rows: NDArray[np.float32],
        dtype: str,
        error: ErrorSum,
        stored: NDArray[np.uint8] | None = None,
    ) -> NDArray[Any]:
        """Rows in stored form, their error added to `error`, and what they have besides kept for its own tensor."""
        packed = self._packer.rows(stem, rows, dtype, stored)
        if packed.restored is not None:
            error.add(rows, packed.restored)
        for kind, values in zip(_OF_ROWS, (packed.scales, packed.bounds), strict=True):
            if values is not None:
                self._of_rows[kind].append(values)
        return packed.weights

    def _left(self, name: str, kind: str, shape: TensorShape) -> NDArray[Any]:
        """What the rows of the weight that was written last have besides it, which is then forgotten."""
        left = np.concatenate(self._of_rows[kind])
        self._of_rows[kind].clear()
        return self._packer.vector(name, left, shape)
