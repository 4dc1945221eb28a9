"""The linear layers' kernels against NumPy, in the emulator: every layer, both weight formats, every tile, any grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
import linear_layers
from emulation import pointer
from linear_layers import activation_buffer, interleave, pack_rows
from linear_rig import MODELS, NAMES, PLACED, UNEVEN, Layer, round_of
from ull.gpu.geometry import linear
from ull.gpu.params import NormParams
from ull_build.weights.mlp_scale import scale_rows_of

TILES = linear.LINEAR_TILES
# Of tokens, and whether warpgroups multiply, which they may from 16 on.
WAYS = [*((tile, False) for tile in TILES), *((tile, True) for tile in TILES if linear.is_split(tile))]
each_way = pytest.mark.parametrize(
    ("tile", "together"), WAYS, ids=[f"{tile}{' together' if together else ''}" for tile, together in WAYS]
)


def check(layer: Layer, tile: int, count: int, multiprocessors: int = 3, seed: int = 0) -> NDArray[Any]:
    rows = layer.rows_of(layer.run(tile, count, multiprocessors, seed))
    expected, tolerance = layer.expected(count)
    assert (np.abs(rows[:count].astype(np.float64) - expected) <= tolerance).all()
    assert layer.is_unwritten(rows[count:]), "rows beyond the round's tokens were written"
    return rows


@each_way
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_matches_numpy(name: str, model: str, tile: int, together: bool) -> None:
    layer = Layer(name, model, seed=1, with_bias=name == "qkv" or model == "odd", together=together)
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
    together = Layer(name, model, seed=3, with_bias=model == "long", together=True)
    for tile, count, multiprocessors in [(64, 64, 3), *wide, (16, 5, 132)]:  # 132: warps without row tiles, and groups
        np.testing.assert_array_equal(check(together, tile, count, multiprocessors)[:count], widest[:count])
    for multiprocessors in (1, 2, 3, 132):  # row tiles of a block: in twos, with one left over, one alone
        np.testing.assert_array_equal(check(layer, 1, 1, multiprocessors)[:1], widest[:1])


@pytest.mark.parametrize("model", UNEVEN)
def test_blocks_of_a_cluster_keep_step(model: str) -> None:
    """They share activations: one that has no row tiles left brings its half all the same."""
    alone = Layer("head", model, seed=9, with_bias=True)
    together = Layer("head", model, seed=9, with_bias=True, together=True)
    for tile, count in ((64, 64), (64, 35), (32, 31)):
        expected = check(alone, tile, count)
        for seed in range(4):
            np.testing.assert_array_equal(check(together, tile, count, multiprocessors=2, seed=seed), expected)


@each_way
@pytest.mark.parametrize("name", NAMES)
def test_any_thread_order(name: str, tile: int, together: bool) -> None:
    layer = Layer(name, "even" if together else "long", seed=4, with_bias=True, together=together)
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
@each_way
@pytest.mark.parametrize(("model", "name"), [*(("long", name) for name in NAMES), ("held", "qkv"), ("deep", "down")])
def test_all_accesses_are_ordered(model: str, name: str, tile: int, together: bool) -> None:
    """With rings that are filled more than once, with too few tokens, and with none."""
    if model != "long" and (linear.is_split(tile) or (model == "held" and tile != 8)):
        pytest.skip("as in other models")
    if together:
        model = "even"  # as real ones: whole stages
    layer = Layer(name, model, seed=4, with_bias=model == "long", reports=True, together=together)
    for count in (tile, 0):
        check(layer, tile, count, multiprocessors=6, seed=count)


@each_way
@pytest.mark.parametrize("name", NAMES)
def test_a_round_without_tokens_writes_nothing(name: str, tile: int, together: bool) -> None:
    layer = Layer(name, "long", seed=5, with_bias=False, together=together)
    assert layer.is_unwritten(layer.rows_of(layer.run(tile, 0)))


@pytest.mark.parametrize(("tile", "together"), [way for way in WAYS if way[0] > 2])
@pytest.mark.parametrize("model", MODELS)
def test_norm_is_exact(model: str, tile: int, together: bool) -> None:
    layer = Layer("qkv", model, seed=6, with_bias=False, together=together)
    count = tile - 3
    output = activation_buffer(layer.columns, layer.cores(tile))
    round_ = round_of(count)
    params = NormParams(
        round=pointer(round_),
        residual=pointer(layer.residual),
        norm_weight=pointer(layer.norm_weight),
        normed=pointer(output),
    )
    layer.launch(f"norm_{tile}", linear.norm(tile), params, 1, round_, [layer.residual])
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
