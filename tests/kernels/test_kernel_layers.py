"""The kernel of all layers against the chain of kernels, bit for bit."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import emulation
from layer_rig import COMPARED, Layers, arrivals, model_of
from ull.bundle import Model, Precision

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(emulation.ON_DEVICE, reason="parameters point to parameters; tests/h200 compares whole engines"),
]
SHAPES = {
    "small": (model_of(), Precision(), False),
    "qk-norm, biases, fp8 pages, windows, odd sizes": (
        model_of(hidden=100, intermediate=76, vocabulary=77, qk_norm=True, windows=[0, 300, 0], context=3000),
        Precision(kv="fp8"),
        True,
    ),
    "heads of 128": (
        model_of(hidden=256, head_dim=128, intermediate=640, layers=2, windows=[0, 300]),
        Precision(lm_head="fp8"),
        False,
    ),
    "16 bits, long rows, many heads that share": (
        model_of(hidden=160, heads=20, kv_heads=1, head_dim=64, intermediate=2100, layers=2),
        Precision(weights="bf16"),
        False,
    ),
}


@functools.cache
def layers(name: str) -> Layers:
    return Layers(*SHAPES[name])


@functools.cache
def chain(name: str, position: int) -> dict[str, bytes]:
    result = layers(name).run(position, 4, persistent=False)
    assert np.isfinite(np.frombuffer(result["logits"], np.float32)).all()
    assert np.frombuffer(result["logits"], np.float32).any()
    return result


def expected_arrivals(model: Model, multiprocessors: int) -> list[int]:
    """Row tiles of qkv by kv head, blocks of attention by kv head, row tiles of o, of gate_up by slice, of down."""
    qkv = (model.heads // model.kv_heads + 2) * model.head_dim // 16
    steps = -(-model.intermediate // 32)
    ends = [min(4 * (part * steps // 8), -(-model.intermediate // 8)) for part in range(9)]
    gate_up = [end - begin for begin, end in itertools.pairwise(ends)]
    hidden, blocks = -(-model.hidden // 16), max(1, multiprocessors // model.kv_heads)
    each = [*[qkv] * model.kv_heads, *[blocks] * model.kv_heads, hidden, *gate_up, hidden]
    return [model.layers * count for count in each]


def check(name: str, position: int, multiprocessors: int, seed: int) -> None:
    found, expected = layers(name).run(position, multiprocessors, True, seed), chain(name, position)
    for region in COMPARED:
        assert found[region] == expected[region], region
    assert arrivals(found).tolist() == expected_arrivals(layers(name).model, multiprocessors)


@pytest.mark.parametrize("multiprocessors", [1, 3, 4, 30])
@pytest.mark.parametrize("name", SHAPES)
def test_every_grid_gives_the_chain_s_bits(name: str, multiprocessors: int) -> None:
    """30: more blocks than most layers have row tiles."""
    check(name, 700, multiprocessors, seed=multiprocessors)


@pytest.mark.parametrize("position", [0, 1, 255, 256, 511, 2400])
def test_every_place_gives_the_chain_s_bits(position: int) -> None:
    """Within a split of attention and over up to ten."""
    check("qk-norm, biases, fp8 pages, windows, odd sizes", position, 4, seed=position)


@pytest.mark.parametrize("multiprocessors", [2, 6])
@pytest.mark.parametrize("position", [192, 193, 224, 255, 256, 460, 990])
def test_every_place_in_bf16_pages_gives_the_chain_s_bits(position: int, multiprocessors: int) -> None:
    """The values of a split's last page wait in registers there: begun, whole, behind a window, in split after split.

    2: a block walks through all splits.
    """
    check("heads of 128", position, multiprocessors, seed=position)


@pytest.mark.parametrize("seed", range(5))
def test_every_order_gives_the_chain_s_bits(seed: int) -> None:
    check("small", 300, 3, seed)


@pytest.mark.parametrize(
    ("position", "blocks", "count"), [(300, 3, 1), (0, 3, 1), (230, 3, 1), (300, 20, 1), (300, 3, 0)]
)
def test_all_accesses_are_ordered(position: int, blocks: int, count: int) -> None:
    """In the chain and in the one kernel, within a split of attention and over two; in blocks without row tiles too."""
    shape, precision, biases = SHAPES["small"]
    watched = Layers(shape, precision, biases, reports=True)
    results = [watched.run(position, blocks, persistent, seed=7, count=count) for persistent in (False, True)]
    assert all(results[0][region] == results[1][region] for region in COMPARED)


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_a_skipped_round_does_nothing(multiprocessors: int) -> None:
    result = layers("small").run(300, multiprocessors, True, count=0)
    assert not arrivals(result).any()
    assert not any(result["qkv"]) and not any(result["attention"])


def test_blocks_that_do_not_run_at_once_are_refused() -> None:
    with pytest.raises(emulation.KernelError, match="ull_layers_1: 65 blocks that wait for each other"):
        layers("small").run(0, 65, True)
