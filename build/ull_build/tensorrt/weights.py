"""Weights of a checkpoint as TensorRT's networks take them: fused linears in the checkpoint's own row order.

qkv      all rows of q, then k, then v
gate_up  all rows of gate, then all of up
lm_head  padded with rows of zeros to a multiple of 16
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull.bundle import Precision
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.names import bias_sources, vector_source, weight_sources
from ull_build.weights.quantise import BF16_MAX, FP8_MAX, complete_rows, round_to_bf16

HEAD = "lm_head"
HEAD_ROWS = 16  # the padded vocabulary is a multiple of it
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)

# Least normal and largest value. A subnormal scale would have too few bits of its own.
_RANGES = {
    BF16: (np.finfo(np.float32).tiny, BF16_MAX),
    F16: (np.float32(np.finfo(np.float16).tiny), np.float32(np.finfo(np.float16).max)),
    F32: (np.finfo(np.float32).tiny, np.finfo(np.float32).max),
}


@dataclass(frozen=True)
class Linear:
    """One fused linear, y = (x W^T) * s + b.

    rows W: [N, K], FP8 codes or values in `compute`; scales s: [N] float32, of rows that are codes, else None; bias b:
    [N] float32 or None; compute: the type that FP8 operands are dequantised to, and that others have.
    """

    rows: NDArray[Any]
    scales: NDArray[np.float32] | None
    bias: NDArray[np.float32] | None
    compute: np.dtype[Any]

    @property
    def is_fp8(self) -> bool:
        """Whether both operands of the product pass through FP8."""
        return bool(self.rows.dtype == F8)

    def in_16_bits(self, name: str) -> Linear:
        """The same weights for activations that are not quantised: every code is a bf16 and an f16 value too."""
        compute = compute_type(name, "bf16")
        return replace(self, rows=self.rows.astype(compute), compute=compute)


class Weights(Protocol):
    """Where a network's weights come from."""

    def storage(self, name: str) -> Literal["fp8", "bf16", "f32"]:
        """How the linear of this name is stored."""

    def norm(self, name: str) -> NDArray[np.float32]:
        """A norm's weight [H]."""

    def linear(self, name: str) -> Linear:
        """The linear `name`: "layers.N.qkv", ".o", ".gate_up", ".down", or "lm_head"."""


class SegmentWeights:
    """Reads weights of an open checkpoint in the storage that `precision` asks for.

    Raises CheckpointError for values that are not finite.
    """

    def __init__(self, checkpoint: Checkpoint, precision: Precision) -> None:
        self._checkpoint, self._precision = checkpoint, precision

    def storage(self, name: str) -> Literal["fp8", "bf16", "f32"]:
        return self._precision.lm_head if name == HEAD else self._precision.weights

    def norm(self, name: str) -> NDArray[np.float32]:
        return round_to_bf16(self._checkpoint.vector(vector_source(name)))

    def linear(self, name: str) -> Linear:
        storage = self.storage(name)
        compute = compute_type(name, storage)
        sources = weight_sources(self._checkpoint, name)
        shapes = [self._checkpoint.tensors[source].shape for source in sources]
        rows = sum(shape[0] for shape in shapes)
        padded = -(-rows // HEAD_ROWS) * HEAD_ROWS if name == HEAD else rows
        stored = np.zeros((padded, shapes[0][1]), F8 if storage == "fp8" else compute)
        scales = np.ones(padded, np.float32) if storage == "fp8" else None
        start = 0
        for block, fp8 in self._blocks(sources, storage == "fp8"):
            place = slice(start, start + len(block))
            if scales is None:
                stored[place] = to_compute(round_to_bf16(block), compute)
            else:
                codes, scales[place] = complete_rows(block, fp8)
                stored[place] = codes.view(F8)
            start += len(block)
        return Linear(stored, scales, self._bias(name), compute)

    def _blocks(self, sources: list[str], fp8: bool) -> Iterator[tuple[NDArray[np.float32], NDArray[np.uint8] | None]]:
        """Rows in order, each with what is FP8 of them already, where that is wanted; see `complete_rows`."""
        for source in sources:
            as_it_is = fp8 and source in self._checkpoint.fp8_weights
            stored = self._checkpoint.fp8_rows(source) if as_it_is else repeat(None)
            yield from zip(self._checkpoint.blocks(source), stored, strict=False)

    def _bias(self, name: str) -> NDArray[np.float32] | None:
        names = [] if name == HEAD else bias_sources(self._checkpoint, f"{name}.bias")
        if not names:
            return None
        return round_to_bf16(np.concatenate([self._checkpoint.vector(source) for source in names]))


def compute_type(name: str, storage: str) -> np.dtype[Any]:
    """Of a linear's operands: bf16, but for logits, which would be too coarse to sample from.

    The head's operands are f16, or FP8 that is dequantised to f32: 448 times an activation, summed over K, is beyond
    f16. Either way its product is f32.
    """
    of_head: np.dtype[Any] = F32 if storage == "fp8" else F16
    return of_head if name == HEAD else BF16


def to_compute(values: NDArray[np.float32], compute: np.dtype[Any]) -> NDArray[Any]:
    """Rounds to bf16 or f16, saturating."""
    _, limit = _RANGES[compute]
    return np.clip(values, -limit, limit).astype(compute)


def round_up(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The least normal values of a float type that are not below `values` (which are not negative)."""
    least, _ = _RANGES[dtype]
    rounded = np.maximum(values, least).astype(dtype)
    too_small = rounded.astype(np.float32) < values
    rounded[too_small] = np.nextafter(rounded[too_small], np.array(np.inf, dtype))
    return rounded


def activation_scale(amax: float, compute: np.dtype[Any]) -> NDArray[Any]:
    """The scale of activations up to `amax`, a scalar array in `compute`, rounded up to it; 1 for zeros."""
    exact = np.float32(amax) / FP8_MAX if amax > 0.0 else np.float32(1.0)
    return round_up(np.array([exact], np.float32), compute).reshape(())


def input_scales(amax: Mapping[str, float]) -> dict[str, float]:
    """The scale of each FP8 linear's input, by its largest activation."""
    return {name: float(activation_scale(value, compute_type(name, "fp8"))) for name, value in amax.items()}
