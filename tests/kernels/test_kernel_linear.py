"""The linear layers' kernels against NumPy, in the emulator: every layer, both weight formats, every tile, any grid."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
import linear_layers
from emulation import aligned, pointer
from linear_layers import TOKENS, Floats, activation_buffer, interleave, pack_activations, pack_rows, pack_weights
from ull.gpu.geometry import linear
from ull.gpu.params import MLP_SCALE, SLICES, LinearParams, NormParams, Round
from ull_build.weights.mlp_scale import scale_rows_of

EPSILON = 1e-5
UNWRITTEN = 54321.0  # in rows of the residual beyond the round's tokens
TILES = linear.LINEAR_TILES
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
ALL_MODELS = {**MODELS, **PLACES}


@functools.cache
def kernels_of(model: str, reports: bool = False) -> emulation.Kernels:
    sizes, bits = ALL_MODELS[model]
    macros = {**sizes, "WEIGHT_BITS": bits, "HEAD_BITS": 24 - bits, "RMS_EPSILON": EPSILON}
    layers = [name for placed, name in PLACED if placed == model] or NAMES
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
    """One layer of a model with random weights, its inputs, and how to run it and what must come out."""

    def __init__(self, name: str, model: str, seed: int, with_bias: bool, reports: bool = False) -> None:
        self.name = name
        self.kernels = kernels_of(model, reports)
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
        size = self.rows // 2 if self.name == "gate_up" else self.rows
        geometry: linear.Geometry = getattr(linear, self.name)(size, tile, multiprocessors)
        return geometry

    def run(self, tile: int, count: int, multiprocessors: int = 3, seed: int = 0) -> NDArray[Any]:
        """The whole output buffer after a round of `count` tokens; what was not written is NaN, or UNWRITTEN."""
        split = linear.is_split(tile)
        residual = copied(self.residual)
        residual[count:] = np.nan if self.norms else UNWRITTEN
        rows = self.normed if self.norms else self.inputs
        activations = pack_activations(rows[:count])
        output = residual if self.name in ("o", "down") else self._empty_output()
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
        self.launch(f"{self.name}_{tile}", geometry, params, seed, [round_, activations, residual])
        if params.partial is not None:
            self._finish(tile, params, [round_, partial], output, seed)
        return output

    def _finish(
        self, tile: int, params: LinearParams, written: list[NDArray[Any]], output: NDArray[Any], seed: int
    ) -> None:
        """What runs after a split layer. written: by it, or by what came before."""
        if self.name == "qkv":
            params.output = pointer(output)
            self.launch(f"qkv_sum_{tile}", linear.qkv_sum(self.rows, tile), params, seed, written)
            return
        normed = activation_buffer(self.rows)
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
        self.launch(f"norm_{tile}", linear.norm(tile), finish, seed, [*written, output])
        is_written = ~(output[:, 0] == UNWRITTEN)
        expected = linear_layers.normed(output[is_written][:, : self.rows], self.norm_weight, EPSILON)
        np.testing.assert_array_equal(linear_layers.unpack_activations(normed, self.rows)[is_written], expected)

    def launch(
        self, kernel: str, geometry: linear.Geometry, params: ctypes.Structure, seed: int, hidden: list[NDArray[Any]]
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
        )

    def is_unwritten(self, rows: NDArray[Any]) -> bool:
        return bool(
            (rows == UNWRITTEN).all() if self.name in ("o", "down") else np.isnan(rows.astype(np.float32)).all()
        )

    def _empty_output(self) -> NDArray[Any]:
        if self.name == "gate_up":
            return activation_buffer(self.rows // 2)
        return aligned((TOKENS, linear_layers.round_up(self.rows, 16)), np.float32)

    def expected(self, count: int) -> tuple[Floats, Floats]:
        """[count, N] and the tolerance of each element."""
        x = (self.normed if self.norms else self.inputs)[:count]
        scale = self.scale / np.float32(MLP_SCALE) if self.name == "down" else self.scale
        exact, tolerance = linear_layers.product(self.weights, scale, self.bias, x)
        if self.name == "gate_up":
            inner = self.rows // 2
            gate, up = exact[:, :inner], exact[:, inner:]
            activated = gate / (1 + np.exp(-gate)) * up * MLP_SCALE
            # silu is steeper than 1.1 nowhere; then the rounding to f16
            error = (1.1 * tolerance[:, :inner] * np.abs(up) + np.abs(gate) * tolerance[:, inner:]) * MLP_SCALE
            return activated, error + np.abs(activated) * 2.0**-10 + 1e-6
        if not self.norms:
            return self.residual[:count, : self.rows] + exact, tolerance + np.abs(exact) * 1e-6
        return exact, tolerance

    def rows_of(self, output: NDArray[Any]) -> NDArray[Any]:
        """[64, N] of the output buffer."""
        if self.name == "gate_up":
            return linear_layers.unpack_activations(output, self.rows // 2)
        return output[:, : self.rows]


def check(layer: Layer, tile: int, count: int, multiprocessors: int = 3, seed: int = 0) -> NDArray[Any]:
    rows = layer.rows_of(layer.run(tile, count, multiprocessors, seed))
    expected, tolerance = layer.expected(count)
    assert (np.abs(rows[:count].astype(np.float64) - expected) <= tolerance).all()
    assert layer.is_unwritten(rows[count:]), "rows beyond the round's tokens were written"
    return rows


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_matches_numpy(name: str, model: str, tile: int) -> None:
    layer = Layer(name, model, seed=1, with_bias=name == "qkv" or model == "odd")
    check(layer, tile, min(tile, 3), seed=2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_for_every_tile_and_grid(name: str, model: str) -> None:
    layer = Layer(name, model, seed=3, with_bias=model == "long")
    widest = check(layer, 64, 64)
    wide = [(64, 33, 40), (32, 32, 1), (32, 17, 16), (16, 16, 2)]
    narrow = [(8, 8, 1), (8, 5, 7), (4, 4, 2), (4, 3, 5), (2, 2, 1), (2, 1, 3)]
    for tile, count, multiprocessors in wide + narrow:
        np.testing.assert_array_equal(check(layer, tile, count, multiprocessors)[:count], widest[:count])
    for multiprocessors in (1, 2, 3, 132):  # row tiles of a block: in twos, with one left over, one alone
        np.testing.assert_array_equal(check(layer, 1, 1, multiprocessors)[:1], widest[:1])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", NAMES)
def test_any_thread_order(name: str, tile: int) -> None:
    layer = Layer(name, "long", seed=4, with_bias=True)
    first = layer.run(tile, tile, multiprocessors=2, seed=1)
    for seed in range(2, 6):
        np.testing.assert_array_equal(layer.run(tile, tile, multiprocessors=2, seed=seed), first)


@pytest.mark.parametrize(("model", "name"), PLACED)
def test_same_bits_wherever_the_activations_are(model: str, name: str) -> None:
    layer = Layer(name, model, seed=8, with_bias=False)
    widest = check(layer, 16, 11, multiprocessors=2)
    for tile, count, multiprocessors in [(8, 8, 1), (8, 7, 3), (4, 4, 2), (4, 3, 1), (2, 2, 3), (1, 1, 2)]:
        np.testing.assert_array_equal(check(layer, tile, count, multiprocessors)[:count], widest[:count])


@pytest.mark.skipif(emulation.ON_DEVICE, reason="the emulator sees what is not ordered")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("model", "name"), [*(("long", name) for name in NAMES), ("held", "qkv"), ("deep", "down")])
def test_all_accesses_are_ordered(model: str, name: str, tile: int) -> None:
    """With rings that are filled more than once, with too few tokens, and with none."""
    if model != "long" and (linear.is_split(tile) or (model == "held" and tile != 8)):
        pytest.skip("as in other models")
    layer = Layer(name, model, seed=4, with_bias=model == "long", reports=True)
    for count in (tile, 0):
        check(layer, tile, count, multiprocessors=6, seed=count)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", NAMES)
def test_a_round_without_tokens_writes_nothing(name: str, tile: int) -> None:
    layer = Layer(name, "long", seed=5, with_bias=False)
    assert layer.is_unwritten(layer.rows_of(layer.run(tile, 0)))


@pytest.mark.parametrize("tile", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("model", MODELS)
def test_norm_is_exact(model: str, tile: int) -> None:
    layer = Layer("qkv", model, seed=6, with_bias=False)
    count = tile - 3
    output = activation_buffer(layer.columns)
    round_ = round_of(count)
    params = NormParams(
        round=pointer(round_),
        residual=pointer(layer.residual),
        norm_weight=pointer(layer.norm_weight),
        normed=pointer(output),
    )
    layer.launch(f"norm_{tile}", linear.norm(tile), params, 1, [round_, layer.residual])
    rows = linear_layers.unpack_activations(output, layer.columns)
    np.testing.assert_array_equal(rows[:count], layer.normed[:count])
    assert np.isnan(rows[count:].astype(np.float32)).all()


def test_large_products_saturate() -> None:
    """silu(gate) * up beyond f16's range stays finite."""
    layer = Layer("gate_up", "odd", seed=7, with_bias=False)
    layer.packed[1] = pack_rows(interleave(*np.split(layer.scale * 3000, 2)))
    rows = layer.rows_of(layer.run(1, 1))[0].astype(np.float32)
    assert np.isfinite(rows).all()
    assert np.abs(rows).max() == 65504


@pytest.mark.parametrize("tile", [1, 8, 64])
def test_a_scaled_mlp_has_the_bits_of_one_that_fits(tile: int) -> None:
    """Rows of up that are 2^20 times as large saturate; with the scales that a build gives them nothing is lost."""
    layer, count, saturating = Layer("gate_up", "odd", seed=8, with_bias=True), min(tile, 9), {"layers.0.down": 20}
    plain = layer.rows_of(layer.run(tile, count))[:count]
    larger = [part.copy() for part in (layer.scale, layer.bias) if part is not None]
    for place, part in enumerate(larger, start=1):
        part[layer.rows // 2 :] *= np.float32(2.0**20)
        layer.packed[place] = pack_rows(interleave(*np.split(part, 2)))
    assert np.abs(layer.rows_of(layer.run(tile, count))[:count].astype(np.float32)).max() == 65504
    for place, (part, kind) in enumerate(zip(larger, ("scale", "bias"), strict=True), start=1):
        rows = scale_rows_of(f"layers.0.gate_up.{kind}", interleave(*np.split(part, 2)), saturating)
        layer.packed[place] = pack_rows(rows)
    np.testing.assert_array_equal(layer.rows_of(layer.run(tile, count))[:count], plain)
