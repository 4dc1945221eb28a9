"""NumPy's side of the linear kernels: packed weights, activations as they lie in device memory, and the references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from emulation import aligned

Floats = NDArray[np.floating[Any]]
TOKENS = 64  # rows of every activation buffer


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def padded(values: NDArray[Any], *units: int) -> NDArray[Any]:
    """Zeros after the end of each axis, up to a multiple of its unit."""
    return np.pad(values, [(0, round_up(size, unit) - size) for size, unit in zip(values.shape, units, strict=True)])


def pack_weights(weights: NDArray[Any]) -> NDArray[np.uint8]:
    """[N, K] e4m3 or f16 -> row tiles of 16, steps of 32, each lane's A fragments in 16 bytes."""
    bits = weights.dtype.itemsize * 8
    full = padded(weights.view(np.uint8 if bits == 8 else np.uint16), 16, 32)
    tiles, steps = full.shape[0] // 16, full.shape[1] // 32
    # tile, half (row g or g + 8), g, step, t, mma, pair of columns, column
    parts = full.reshape(tiles, 2, 8, steps, 4, 2, 2, 2)
    order = (0, 3, 2, 4, 5, 6, 1, 7) if bits == 8 else (0, 3, 5, 2, 4, 6, 1, 7)
    packed = np.ascontiguousarray(parts.transpose(order)).view(np.uint8).reshape(-1)
    result: NDArray[np.uint8] = aligned(packed.size, np.uint8)
    result[...] = packed
    return result


def interleave(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """The row order of gate_up: eight gate rows, the eight up rows that belong to them, and so on."""
    units = (8,) + (1,) * (gate.ndim - 1)
    pairs = np.stack([padded(part, *units).reshape(-1, 8, *part.shape[1:]) for part in (gate, up)], axis=1)
    return pairs.reshape(-1, *gate.shape[1:])


def pack_rows(values: Floats) -> NDArray[np.float32]:
    """A scale or bias per row, padded with zeros."""
    result: NDArray[np.float32] = aligned(round_up(len(values), 16), np.float32, 0)
    result[: len(values)] = values
    return result


def columns_of_step() -> NDArray[np.int64]:
    """[quarter, 8]: the column of a step that stands there, as warpgroups take them (linear/activations.cuh)."""
    quarter, place = np.mgrid[0:4, 0:8]
    columns: NDArray[np.int64] = 8 * (place // 2) + 2 * quarter + place % 2
    return columns


def activation_buffer(columns: int, cores: int = 0) -> NDArray[np.float16]:
    """[K / 32, 64 tokens, 32] f16, unwritten; with `cores`: [K / 32, quarter, so many tokens, 8]."""
    steps = round_up(columns, 32) // 32
    return aligned((steps, 4, cores, 8) if cores else (steps, TOKENS, 32), np.float16)


def pack_activations(rows: NDArray[np.float16], cores: int = 0) -> NDArray[np.float16]:
    """[T, K] -> the layout of activations.cuh, `activation_buffer`'s; tokens beyond T are NaN."""
    result = activation_buffer(rows.shape[1], cores)
    steps = padded(rows, 1, 32).reshape(len(rows), len(result), 32)
    if cores:
        result[:, :, : len(rows)] = steps[..., columns_of_step()].transpose(1, 2, 0, 3)
    else:
        result[:, : len(rows)] = steps.transpose(1, 0, 2)
    return result


def unpack_activations(buffer: NDArray[np.float16], columns: int) -> NDArray[np.float16]:
    """Either layout -> [64, K], after checking that the padding of a written row is zero."""
    steps = np.full((TOKENS, len(buffer), 32), np.nan, np.float16)
    if buffer.ndim == 4:
        steps[: buffer.shape[2]][..., columns_of_step()] = buffer.transpose(2, 0, 1, 3)
    else:
        steps[...] = buffer.transpose(1, 0, 2)
    rows = steps.reshape(TOKENS, -1)
    padding = rows[:, columns:]
    written = ~np.isnan(rows[:, :columns].astype(np.float32)).any(axis=1)
    assert (padding[written] == 0).all()
    return rows[:, :columns]


def quantised(generator: np.random.Generator, rows: int, columns: int, bits: int) -> tuple[NDArray[Any], Floats]:
    """Weights [N, K] as the build stores them, and a scale per row."""
    values = generator.standard_normal((rows, columns), np.float32)
    if bits == 8:
        return (values * 64).astype(ml_dtypes.float8_e4m3fn), generator.uniform(0.5, 2, rows).astype(np.float32) / 2048
    return (values / 4).astype(np.float16), np.exp2(generator.integers(-5, -2, rows)).astype(np.float32)


def inverse_rms(residual: NDArray[np.float32], epsilon: float) -> NDArray[np.float32]:
    """1 / rms of each row by the plan of norm.cuh, bit for bit: [T, H] -> [T]."""
    tokens, columns = residual.shape
    threads = padded(residual, 1, 1024).reshape(tokens, round_up(columns, 1024) // 1024, 256, 4).astype(np.float64)
    sums = np.zeros((tokens, 256), np.float32)
    for i in range(threads.shape[1]):
        for j in range(4):  # a square is exact in double precision, so this rounds as fma does
            sums = (threads[:, i, :, j] ** 2 + sums).astype(np.float32)
    warps = sums.reshape(tokens, 8, 32)
    for mask in (16, 8, 4, 2, 1):
        warps = warps + warps[:, :, np.arange(32) ^ mask]
    total = warps[:, 0, 0]
    for warp in range(1, 8):
        total = total + warps[:, warp, 0]
    mean = total.astype(np.float64) * np.float32(1 / columns) + np.float32(epsilon)
    one = np.float32(1)
    return one / np.sqrt(mean.astype(np.float32))


def normed(residual: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float) -> NDArray[np.float16]:
    """RMSNorm as the kernels do it, bit for bit: [T, H] -> [T, H] f16."""
    scaled: NDArray[np.float32] = residual * inverse_rms(residual, epsilon)[:, None] * weight
    return np.clip(scaled, -65504, 65504).astype(np.float16)


SINGLE = 2e-6  # how far single-precision sums in any order may be from the exact one, of the terms' magnitudes


def product(
    weights: NDArray[Any], scale: Floats, bias: Floats | None, activations: NDArray[Any], off: float = SINGLE
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[T, N] outputs in double precision, and how far the kernels' may be from them."""
    w = weights.astype(np.float64) * scale[:, None]
    x = activations.astype(np.float64)
    exact = x @ w.T
    tolerance = (np.abs(x) @ np.abs(w).T) * off + 1e-6
    return exact + (0 if bias is None else bias), tolerance
