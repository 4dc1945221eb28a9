"""The linear layers' kernels on the emulator: models of a layer or a few, their inputs, and what must come out."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

import emulation
import linear_layers
from emulation import aligned, pointer
from linear_layers import TOKENS, Floats, activation_buffer, interleave, pack_activations, pack_rows, pack_weights
from ull.gpu.geometry import linear
from ull.gpu.params import MLP_SCALE, SLICES, LinearParams, NormParams, Round

EPSILON = 1e-5
UNWRITTEN = 54321.0  # in rows of the residual beyond the round's tokens
# Odd: no dimension is a multiple of its unit, slices differ in length and some are empty. Even: whole stages.
ODD = {"HIDDEN": 204, "HEADS": 5, "KV_HEADS": 1, "HEAD_DIM": 32, "INTERMEDIATE": 341, "VOCABULARY": 331}
LONG = {"HIDDEN": 1124, "HEADS": 10, "KV_HEADS": 2, "HEAD_DIM": 96, "INTERMEDIATE": 1500, "VOCABULARY": 203}
EVEN = {"HIDDEN": 1024, "HEADS": 8, "KV_HEADS": 2, "HEAD_DIM": 128, "INTERMEDIATE": 2048, "VOCABULARY": 512}
# Weights in the layers and in the head: 8 and 16 bits, or the other way round.
MODELS = {"odd": (ODD, 8), "long": (LONG, 16), "even": (EVEN, 8)}
# Where a block's activations are (see NarrowPlan), and which layers show it. In the models above o and down hold those
# of two tokens and more, and all else is staged. Held: normed ones of eight, too. Streamed: normed ones of four, too.
# Deep: down's even of one; o, which stages up to four tokens, has slices too long to be held.
HELD = {"HIDDEN": 2440, "HEADS": 5, "KV_HEADS": 1, "HEAD_DIM": 32, "INTERMEDIATE": 60, "VOCABULARY": 50}
STREAMED = {"HIDDEN": 4900, "HEADS": 3, "KV_HEADS": 1, "HEAD_DIM": 32, "INTERMEDIATE": 90, "VOCABULARY": 70}
DEEP = {"HIDDEN": 80, "HEADS": 34, "KV_HEADS": 1, "HEAD_DIM": 128, "INTERMEDIATE": 18500, "VOCABULARY": 64}
PLACES = {
    **{
        f"{name}{suffix}": (sizes, bits)
        for name, sizes in (("held", HELD), ("streamed", STREAMED), ("deep", DEEP))
        for suffix, bits in (("", 8), (" 16", 16))
    },
}
PLACED = [
    (model, name) for model in PLACES for name in (("o", "down") if "deep" in model else ("qkv", "gate_up", "head"))
]
# Where one block of a cluster has a pass more than its neighbour: of 16 row tiles each, or of none.
UNEVEN = {"33 row tiles": ({**EVEN, "VOCABULARY": 523}, 16), "1 row tile": ({**ODD, "VOCABULARY": 11}, 8)}
ALL_MODELS = {**MODELS, **PLACES, **UNEVEN}


@functools.cache
def kernels_of(model: str, reports: bool = False, together: bool = False) -> emulation.Kernels:
    sizes, bits = ALL_MODELS[model]
    macros = {**sizes, "WEIGHT_BITS": bits, "HEAD_BITS": 24 - bits, "RMS_EPSILON": EPSILON}
    macros["WARPGROUP_TREES"] = int(together)
    layers = ["head"] if model in UNEVEN else [name for placed, name in PLACED if placed == model] or NAMES
    sources = ["norm", *("output" if name == "o" else name for name in layers)]
    return emulation.build([f"{name}.cu" for name in sources], macros, reports=reports)


NAMES = ("qkv", "o", "gate_up", "down", "head")
SPLIT = ("qkv", "o", "down")


@functools.cache
def round_of(count: int) -> NDArray[np.uint8]:
    """A Round of `count` tokens, in device memory."""
    memory: NDArray[np.uint8] = aligned(ctypes.sizeof(Round), np.uint8, 0)
    Round.from_buffer(memory).count = count
    return memory


def copied(values: NDArray[Any]) -> NDArray[Any]:
    result = aligned(values.shape, values.dtype)
    result[...] = values
    return result


class Layer:
    """One layer of a model with random weights, its inputs, and how to run it and what must come out.

    `together`: from 16 tokens on warpgroups multiply, and activations lie as they take them.
    """

    def __init__(
        self, name: str, model: str, seed: int, with_bias: bool, reports: bool = False, together: bool = False
    ) -> None:
        self.name, self.together = name, together
        self.kernels = kernels_of(model, reports, together)
        self.generator = np.random.default_rng(seed)
        sizes, bits = ALL_MODELS[model]
        hidden, inner, width = sizes["HIDDEN"], sizes["INTERMEDIATE"], sizes["HEADS"] * sizes["HEAD_DIM"]
        heads = (sizes["HEADS"] + 2 * sizes["KV_HEADS"]) * sizes["HEAD_DIM"]
        shapes = {
            "qkv": (heads, hidden),
            "o": (hidden, width),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (sizes["VOCABULARY"], hidden),
        }
        self.rows, self.columns = shapes[name]
        self.norms = name in ("qkv", "gate_up", "head")
        self.weights, self.scale = linear_layers.quantised(
            self.generator, self.rows, self.columns, 24 - bits if name == "head" else bits
        )
        self.bias = self.generator.standard_normal(self.rows).astype(np.float32) if with_bias else None
        self.packed = [self._in_order(part) for part in (self.weights, self.scale, self.bias)]
        self.residual = aligned((TOKENS, linear_layers.round_up(hidden, 16)), np.float32)
        self.residual[:, :hidden] = self.generator.standard_normal((TOKENS, hidden)) * 3
        self.norm_weight = aligned(hidden, np.float32)
        self.norm_weight[...] = self.generator.uniform(0.5, 1.5, hidden)
        self.inputs = (self.generator.standard_normal((TOKENS, self.columns)) * MLP_SCALE).astype(np.float16)
        self.normed = linear_layers.normed(self.residual[:, :hidden], self.norm_weight, EPSILON)

    def _in_order(self, part: NDArray[Any] | None) -> NDArray[Any] | None:
        if part is None:
            return None
        if self.name == "gate_up":
            part = interleave(part[: self.rows // 2], part[self.rows // 2 :])
        return pack_weights(part) if part.ndim == 2 else pack_rows(part)

    def geometry(self, tile: int, multiprocessors: int) -> linear.Geometry:
        if self.name in ("o", "down"):
            return linear.o(self.rows, tile, multiprocessors, 0, 0)
        size = self.rows // 2 if self.name == "gate_up" else self.rows
        geometry: linear.Geometry = getattr(linear, self.name)(size, tile, multiprocessors)
        return geometry

    def run(self, tile: int, count: int, multiprocessors: int = 3, seed: int = 0) -> NDArray[Any]:
        """The whole output buffer after a round of `count` tokens; what was not written is NaN, or UNWRITTEN."""
        split = linear.is_split(tile)
        residual = copied(self.residual)
        residual[count:] = np.nan if self.norms else UNWRITTEN
        rows = self.normed if self.norms else self.inputs
        activations = pack_activations(rows[:count], self.cores(tile))
        output = residual if self.name in ("o", "down") else self._empty_output(tile)
        partial = aligned((SLICES, TOKENS, linear_layers.round_up(self.rows, 16)), np.float32)
        weights, scale, bias = self.packed
        assert weights is not None
        assert scale is not None
        round_ = round_of(count)
        params = LinearParams(round=pointer(round_), weights=pointer(weights), scale=pointer(scale))
        params.bias = None if bias is None else pointer(bias)
        if self.norms and not linear.norms_apart(self.columns, tile):
            params.residual, params.norm_weight = pointer(residual), pointer(self.norm_weight)
        else:
            params.activations = pointer(activations)
        if split and self.name in SPLIT:
            params.partial = pointer(partial)
        else:
            params.output = pointer(output)
        geometry = self.geometry(tile, multiprocessors)
        self.launch(f"{self.name}_{tile}", geometry, params, seed, round_, [activations, residual])
        if params.partial is not None:
            self._finish(tile, params, round_, [partial], output, seed)
        return output

    def _finish(
        self,
        tile: int,
        params: LinearParams,
        begun: NDArray[Any],
        written: list[NDArray[Any]],
        output: NDArray[Any],
        seed: int,
    ) -> None:
        """What runs after a split layer. begun: what begin wrote; written: by the layer, or by what came before."""
        if self.name == "qkv":
            params.output = pointer(output)
            self.launch(f"qkv_sum_{tile}", linear.qkv_sum(self.rows, tile), params, seed, begun, written)
            return
        normed = activation_buffer(self.rows, self.cores(tile))
        finish = NormParams(
            round=params.round,
            residual=pointer(output),
            norm_weight=pointer(self.norm_weight),
            normed=pointer(normed),
            partial=params.partial,
            scale=params.scale,
            bias=params.bias,
            unit=1 / MLP_SCALE if self.name == "down" else 1,
        )
        self.launch(f"norm_{tile}", linear.norm(tile), finish, seed, begun, [*written, output])
        is_written = ~(output[:, 0] == UNWRITTEN)
        expected = linear_layers.normed(output[is_written][:, : self.rows], self.norm_weight, EPSILON)
        np.testing.assert_array_equal(linear_layers.unpack_activations(normed, self.rows)[is_written], expected)

    def launch(
        self,
        kernel: str,
        geometry: linear.Geometry,
        params: ctypes.Structure,
        seed: int,
        begun: NDArray[Any],
        hidden: list[NDArray[Any]],
    ) -> None:
        grid, threads, shared_bytes = geometry
        self.kernels.run(
            f"ull_{kernel}",
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            params=params,
            seed=seed,
            predecessor_writes=hidden,
            constants=[*(part for part in self.packed if part is not None), self.norm_weight],
            earlier=[begun],
        )

    def is_unwritten(self, rows: NDArray[Any]) -> bool:
        return bool(
            (rows == UNWRITTEN).all() if self.name in ("o", "down") else np.isnan(rows.astype(np.float32)).all()
        )

    def cores(self, tile: int) -> int:
        """For `activation_buffer`."""
        return tile if self.together and linear.is_split(tile) else 0

    def _empty_output(self, tile: int) -> NDArray[Any]:
        if self.name == "gate_up":
            return activation_buffer(self.rows // 2, self.cores(tile))
        return aligned((TOKENS, linear_layers.round_up(self.rows, 16)), np.float32)

    def expected(self, count: int) -> tuple[Floats, Floats]:
        """[count, N] and the tolerance of each element."""
        return self.expected_of((self.normed if self.norms else self.inputs)[:count], self.residual[:count])

    def expected_of(
        self, x: NDArray[Any], residual: NDArray[np.float32], off: float = linear_layers.SINGLE
    ) -> tuple[Floats, Floats]:
        """The same for activations [count, K] and the residual [count, H] that the output is added to, if it is."""
        scale = self.scale / np.float32(MLP_SCALE) if self.name == "down" else self.scale
        exact, tolerance = linear_layers.product(self.weights, scale, self.bias, x, off)
        if self.name == "gate_up":
            inner = self.rows // 2
            gate, up = exact[:, :inner], exact[:, inner:]
            activated = gate / (1 + np.exp(-gate)) * up * MLP_SCALE
            # silu is steeper than 1.1 nowhere; then the rounding to f16
            error = (1.1 * tolerance[:, :inner] * np.abs(up) + np.abs(gate) * tolerance[:, inner:]) * MLP_SCALE
            return activated, error + np.abs(activated) * 2.0**-10 + 1e-6
        if not self.norms:
            return residual[:, : self.rows] + exact, tolerance + np.abs(exact) * 1e-6
        return exact, tolerance

    def rows_of(self, output: NDArray[Any]) -> NDArray[Any]:
        """[64, N] of the output buffer."""
        if self.name == "gate_up":
            return linear_layers.unpack_activations(output, self.rows // 2)
        return output[:, : self.rows]
