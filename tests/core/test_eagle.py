"""An EAGLE head on the cpu executor, through the bindings: it changes the speed of an output, never the output."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import Dims, Eagle, RandomModel
from ull import _native

TARGETS = (
    Dims(),
    Dims(weights="fp8", lm_head="bf16", kv="bf16", windows=(0, 40)),
    Dims(bias=True, qk_norm=True, heads=6, kv_heads=2, tied=False, vocabulary=131),
)
OWN = Dims(hidden=40, heads=3, kv_heads=1, head_dim=20, intermediate=50, weights="bf16", lm_head="bf16", windows=(30,))


def a_model(target: Dims, eagle: Eagle) -> RandomModel:
    model = RandomModel(target)
    model.add_eagle(eagle)
    return model


@st.composite
def eagles(draw: st.DrawFn) -> Eagle:
    own = draw(st.booleans())
    dims = OWN if own else Dims(weights=draw(st.sampled_from(["f32", "fp8"])), lm_head="bf16", kv="bf16")
    return Eagle(
        dims,
        taps=tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))),
        norm_before_residual=draw(st.booleans()),
        norm_output=draw(st.booleans()),
        tap_norm=draw(st.sampled_from(["none", "each", "all"])),
        own_embedding=own or draw(st.booleans()),
        known=draw(st.sampled_from([0, 33, 96])),
    )


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.2, 0.8, 1.5])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "top_k": draw(st.sampled_from([0, 1, 12])),
        "top_p": draw(st.sampled_from([1.0, 0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.9])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.4])),
    }
    if draw(st.booleans()):
        choices["logit_bias"] = {7: 2.0, 9: -float("inf")}
    return choices


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(TARGETS),
    eagles(),
    samplings(),
    st.integers(1, 150),
    st.sampled_from([0, 2, 9, 64]),
    st.sampled_from(["eagle", "auto"]),
    st.booleans(),
)
def test_output_does_not_depend_on_the_head(
    target: Dims, eagle: Eagle, sampling: dict[str, Any], length: int, max_tree: int, drafter: str, adaptive: bool
) -> None:
    tokens = np.random.default_rng(length).integers(0, 90, length).astype(np.int32)
    with TemporaryDirectory() as directory:
        spec = a_model(target, eagle).save(Path(directory) / "weights.safetensors")
        expected = _native.SpeculationRig(spec).decode(tokens, 40, sampling)
        rig = _native.SpeculationRig(spec, threads=2, prefill_chunk=32, adaptive=adaptive)
        for _ in range(2):
            out = rig.decode(tokens, 40, sampling, drafter, max_tree)
            assert out["tokens"] == expected["tokens"]
            assert not out["failed"]
            if drafter == "eagle" and not adaptive and length > 1:
                assert any(name == "eagle" for name, *_ in out["rounds"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("taps", [], "eagle.taps: must name 1 layer or more"),
        ("taps", [3], "eagle.taps: must be 0 to the target's number of layers"),
        ("tap_norm", "some", 'eagle.tap_norm: must be "none", "each" or "all"'),
        ("context", 319, "eagle.context: must not be shorter"),
        ("mapped", True, "eagle: tensor d2t: missing"),
        ("own_embedding", True, "eagle: tensor embed.weight: missing"),
        ("layers", 2, "eagle.windows: must hold one value per layer"),
    ],
)
def test_a_bad_head_is_refused_by_name(tmp_path: Path, field: str, value: object, message: str) -> None:
    spec = a_model(Dims(), Eagle(Dims())).save(tmp_path / "weights.safetensors")
    _native.SpeculationRig(spec)
    spec["eagle"][field] = value
    with pytest.raises(ValueError, match=message):
        _native.SpeculationRig(spec)
