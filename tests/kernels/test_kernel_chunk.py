"""The kernels of a chunk of a prompt against those of rounds, bit for bit, and against NumPy, in the emulator."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import emulation
from chunk_rig import NAMES, ChunkLayer, Prompt
from emulation import aligned, pointer
from layer_rig import model_of
from linear_rig import MODELS
from ull.bundle import Precision
from ull.gpu.geometry import chunk
from ull.gpu.params import OK, ChunkProbeParams


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_has_the_bits_of_rounds(name: str, model: str) -> None:
    layer = ChunkLayer(name, model, seed=1, with_bias=name == "qkv" or model == "odd")
    count = 133
    rows = layer.run(count, seed=2)
    np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
    assert layer.is_unwritten(rows[count:]), "rows beyond the chunk's tokens were written"


SHAPES: dict[str, tuple[dict[str, Any], Precision, bool, tuple[int, ...]]] = {
    "small": ({}, Precision(), False, ()),
    "fp8 pages, a window, QK norm, biases": (
        {"qk_norm": True, "windows": [0, 70, 300], "head_dim": 64, "heads": 6},
        Precision(kv="fp8"),
        True,
        (),
    ),
    "16 bits, with taps": ({"hidden": 96, "intermediate": 200}, Precision(weights="bf16"), False, (0, 2, 3)),
}


@functools.cache
def prompt(name: str, reports: bool = False) -> Prompt:
    changes, precision, biases, taps = SHAPES[name]
    return Prompt(model_of(**changes), precision, biases, taps, reports)


TOKENS = [int(token) for token in np.random.default_rng(9).integers(0, 112, 512)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_leaves_the_same_bits_in_chunks_and_in_rounds(name: str) -> None:
    """Behind positions that are there, from the middle of a page on: keys, values and taps of every layer."""
    rig = prompt(name)
    tokens, base = TOKENS[:205], 331
    rig.begin()
    rig.read(tokens, base, whole=False)
    expected = rig.left()
    rig.begin()
    untouched = rig.left()
    rig.read(tokens, base, whole=True, seed=3)
    assert rig.left() == expected != untouched
    assert (rig.result().sequence, rig.result().status, rig.result().count) == (1, OK, 0)


@pytest.mark.parametrize("count", [1, 64, 128, 129, 512])
def test_a_chunk_of_any_length_has_the_bits_of_rounds(count: int) -> None:
    layer = ChunkLayer("down", "even", seed=3, with_bias=True)
    rows = layer.run(count)
    np.testing.assert_array_equal(rows[:count], layer.by_rounds(count))
    assert layer.is_unwritten(rows[count:])


@pytest.mark.parametrize("flaw", [0, 1])
def test_the_probe_sees_products_that_do_not_add_alike(flaw: int) -> None:
    differences = aligned(1, np.uint32, 0)
    params = ChunkProbeParams(differences=pointer(differences), seed=5, rounds=3, flaw=flaw)
    grid, threads, shared_bytes = chunk.probe(2)
    kernels = emulation.build(["chunk_probe.cu"])
    kernels.run("ull_chunk_probe", grid=grid, threads=threads, shared_bytes=shared_bytes, params=params)
    flawed = 2 * 3 * 32 * 8  # outputs of the rows whose operand is another
    assert differences[0] == 0 if flaw == 0 else flawed / 2 < differences[0] <= flawed
