"""Medusa heads and the draft model on the cpu executor: they change the speed of an output, never the output."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packing import Dims, Medusa, RandomModel, pack_rows
from ull import _native

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 11},
    "hot, filtered, biased": {
        "temperature": 1.3,
        "seed": 2**63 + 5,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "logit_bias": {7: 2.0, 9: -float("inf")},
        "logprobs": 3,
    },
    "penalized": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 2},
    "sampled, penalized": {"temperature": 0.9, "seed": 6, "frequency_penalty": 1.0, "repetition_penalty": 1.4},
}

TARGETS = {
    "llama": (Dims(), Medusa(), Dims(layers=1, seed=5)),
    "fp8": (
        Dims(weights="fp8", lm_head="bf16", kv="fp8", windows=(0, 40)),
        Medusa(heads=4, layers=2, version="1"),
        Dims(40, layers=1, heads=3, kv_heads=1, head_dim=20, vocabulary=90, weights="fp8", lm_head="bf16", kv="fp8"),
    ),
    "qwen": (
        Dims(bias=True, qk_norm=True, heads=6, kv_heads=2, tied=False, vocabulary=131, kv="bf16"),
        Medusa(heads=2, precision="bf16", version="1"),
        Dims(bias=True, vocabulary=160, context=640, seed=9),  # vocabulary padded further
    ),
}


def prompt(count: int, seed: int = 3, vocabulary: int = 90) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def plain(spec: dict[str, Any], tokens: np.ndarray, count: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """What a cold executor without speculation emits."""
    out: dict[str, Any] = _native.SpeculationRig(spec).decode(tokens, count, sampling)
    assert not out["failed"] and all(name == "none" for name, *_ in out["rounds"])
    return out


def assert_same(out: dict[str, Any], expected: dict[str, Any]) -> None:
    for field in ("tokens", "logprobs", "top", "failed"):
        assert out[field] == expected[field]


def acceptance(out: dict[str, Any], drafter: str) -> float:
    """Accepted share of the deepest path that `drafter` proposed."""
    rounds = [entry for entry in out["rounds"] if entry[0] == drafter]
    assert rounds
    return sum(entry[3] for entry in rounds) / sum(entry[2] for entry in rounds)


@pytest.fixture(scope="module", params=TARGETS, ids=list(TARGETS))
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    dims, medusa, draft = TARGETS[request.param]
    model = RandomModel(dims)
    model.add_medusa(medusa)
    model.add_draft(RandomModel(draft))
    return model.save(tmp_path_factory.mktemp("weights") / "weights.safetensors")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target whose draft model is the target itself."""
    dims = Dims(weights="fp8", lm_head="bf16", kv="bf16", bias=True)
    model = RandomModel(dims)
    model.add_draft(RandomModel(dims))
    return model.save(tmp_path_factory.mktemp("weights") / "weights.safetensors")


# ---- the invariant -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
@pytest.mark.parametrize("drafter", ["medusa", "draft", "auto"])
def test_output_does_not_depend_on_the_drafter(spec: dict[str, Any], drafter: str, sampling: dict[str, Any]) -> None:
    tokens = prompt(100)
    expected = plain(spec, tokens, 60, sampling)
    for adaptive, threads, chunk in ((False, 1, 256), (False, 2, 48), (True, 2, 64)):
        rig = _native.SpeculationRig(spec, threads=threads, prefill_chunk=chunk, adaptive=adaptive)
        for max_tree in (0, 2, 7, 64):
            out = rig.decode(tokens, 60, sampling, drafter, max_tree)
            assert_same(out, expected)
            if not adaptive:
                assert all(name != "none" for name, *_ in out["rounds"][:-1])
                assert max(entry[1] for entry in out["rounds"]) <= (max_tree or 64)


@pytest.mark.parametrize("coupled", [True, False])
def test_output_does_not_depend_on_the_coupling(spec: dict[str, Any], coupled: bool) -> None:
    sampling = {"temperature": 0.9, "seed": 4}
    tokens = prompt(70)
    expected = plain(spec, tokens, 40, sampling)
    rig = _native.SpeculationRig(spec, adaptive=False, coupled=coupled)
    for drafter in ("medusa", "draft"):
        assert_same(rig.decode(tokens, 40, sampling, drafter), expected)


# ---- the coupling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
@pytest.mark.parametrize("max_tree", [2, 6, 40])
def test_a_draft_model_that_is_the_target_is_always_right(
    twin: dict[str, Any], sampling: dict[str, Any], max_tree: int
) -> None:
    tokens = prompt(90)
    out = _native.SpeculationRig(twin, adaptive=False).decode(tokens, 120, sampling, "draft", max_tree)
    assert_same(out, plain(twin, tokens, 120, sampling))
    assert acceptance(out, "draft") >= 0.98
    assert len(out["rounds"]) <= 61


def test_without_the_coupling_a_sampled_draft_is_often_wrong(twin: dict[str, Any]) -> None:
    tokens = prompt(90)
    sampling = {"temperature": 1.0, "seed": 8}
    uncoupled = _native.SpeculationRig(twin, adaptive=False, coupled=False)
    assert acceptance(uncoupled.decode(tokens, 120, sampling, "draft", 6), "draft") < 0.8
    assert acceptance(uncoupled.decode(tokens, 120, {}, "draft", 6), "draft") >= 0.98  # greedy: nothing to couple


def test_heads_that_know_the_distribution_are_always_right_when_coupled(tmp_path: Path) -> None:
    """Every token has the same embedding, so the logits are the same everywhere and only the noise differs: a head is
    right if and only if it draws with the noise of the position that it predicts."""
    model = RandomModel(Dims(tied=False))
    model.tensors["embed.weight"][:] = model.tensors["embed.weight"][0]
    model.add_medusa(Medusa(heads=4, version="2", size=0.0))
    spec = model.save(tmp_path / "weights.safetensors")
    sampling = {"temperature": 2.0, "seed": 6}
    tokens = prompt(30)
    expected = plain(spec, tokens, 100, sampling)
    assert len(set(expected["tokens"])) > 20
    out = _native.SpeculationRig(spec, adaptive=False).decode(tokens, 100, sampling, "medusa", 5)
    assert_same(out, expected)
    assert acceptance(out, "medusa") >= 0.98
    uncoupled = _native.SpeculationRig(spec, adaptive=False, coupled=False)
    assert acceptance(uncoupled.decode(tokens, 100, sampling, "medusa", 5), "medusa") < 0.5


@pytest.mark.parametrize("max_tree", [3, 5, 40])
@pytest.mark.parametrize("length", [2, 64, 65, 200])
def test_heads_see_the_state_of_the_last_accepted_token(tmp_path: Path, length: int, max_tree: int) -> None:
    """A model that permutes: what follows token t is next[t], whatever came before, and head i knows next^(i + 2)[t].
    A head that were given any other token's state would be wrong."""
    size = 64
    model = RandomModel(Dims(tied=False, vocabulary=size, hidden=size))
    cycle = np.random.default_rng(1).permutation(size)
    following = np.empty(size, np.int64)
    following[cycle] = np.roll(cycle, -1)

    def permutation(power: int) -> np.ndarray:
        after = np.arange(size)
        for _ in range(power):
            after = following[after]
        rows = np.zeros((size, size), np.float32)
        rows[after, np.arange(size)] = 1.0
        return pack_rows(rows)

    for layer in range(2):
        for name in ("o", "down"):
            model.tensors[f"layers.{layer}.{name}.weight"][:] = 0.0
    model.tensors["embed.weight"][:] = np.eye(size)
    model.tensors["lm_head.weight"][:] = permutation(1)
    model.add_medusa(Medusa(heads=4, version="1", precision="f32", size=0.0))
    for head in range(4):
        model.tensors[f"medusa.{head}.lm_head.weight"][:] = permutation(head + 2)
    spec = model.save(tmp_path / "weights.safetensors")
    walk = np.resize(cycle, length + 50).astype(np.int32)
    rig = _native.SpeculationRig(spec, adaptive=False, prefill_chunk=70)
    out = rig.decode(walk[:length], 50, {}, "medusa", max_tree)
    assert out["tokens"] == walk[length:].tolist()
    assert acceptance(out, "medusa") == 1.0
    assert all(name == "medusa" for name, *_ in out["rounds"][:-1])


# ---- the draft's cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [40, 256])
@pytest.mark.parametrize("order", list(itertools.permutations(["none", "suffix", "draft"])))
def test_the_draft_s_cache_stays_right_across_requests_and_reuse(
    twin: dict[str, Any], order: tuple[str, ...], chunk: int
) -> None:
    """A conversation whose turns are drafted by different drafters; a wrong entry in the draft's cache would show as a
    rejected token."""
    rig = _native.SpeculationRig(twin, adaptive=False, prefill_chunk=chunk)
    history = prompt(50)
    cached = 0
    for turn, drafter in enumerate(order + order[::-1] + ("draft", "auto", "draft")):
        if turn == 5:  # the user takes back what came after the middle of the first turns
            history = np.concatenate([history[:70], prompt(20, seed=99)])
            cached = 70
        sampling = {"temperature": 0.9, "seed": turn} if turn % 2 else {}
        out = rig.decode(history, 15, sampling, drafter, 5, cached=cached)
        assert_same(out, plain(twin, history, 15, sampling))
        if drafter == "draft":
            assert acceptance(out, "draft") >= 0.98
        history = np.concatenate([history, np.array(out["tokens"], np.int32)])
        cached = len(history) - 1
        history = np.concatenate([history, prompt(12, seed=turn)])


def test_sessions_in_turn_do_not_disturb_each_other_s_drafts(twin: dict[str, Any]) -> None:
    """Two conversations in different pages; drafted positions are those of the conversation that comes back cold."""
    rig = _native.SpeculationRig(twin, adaptive=False)
    tables = [np.array([4, 0, 2], np.int32), np.array([1, 3], np.int32)]
    for turn in range(4):
        tokens = prompt(60 + turn, seed=turn % 2)
        out = rig.decode(tokens, 30, {}, "draft", 4, tables[turn % 2])
        assert_same(out, plain(twin, tokens, 30, {}))
        assert acceptance(out, "draft") >= 0.98


# ---- loading -----------------------------------------------------------------------------------------------------


def test_drafters_and_their_costs_are_reported(spec: dict[str, Any]) -> None:
    info = _native.SpeculationRig(spec).info
    assert info["drafters"] == ["none", "suffix", "medusa", "draft", "auto"]
    assert all(info["draft_ns"][name] > 0 for name in ("medusa", "draft"))
    bare = spec | {"medusa": None, "draft": None}
    alone = _native.SpeculationRig(bare).info
    assert alone["drafters"] == ["none", "suffix", "auto"]
    assert alone["drafter_weight_bytes"] == alone["drafter_kv_bytes"] == 0
    for what in ("weight_bytes", "kv_bytes"):
        assert info[f"drafter_{what}"] > 0
        assert info[what] == alone[what] + info[f"drafter_{what}"]
    with pytest.raises(ValueError, match="no such drafter"):
        _native.SpeculationRig(bare).decode(prompt(10), 5, {}, "medusa")


def without(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return spec | {"tensors": {key: value for key, value in spec["tensors"].items() if key != name}}


def changed(spec: dict[str, Any], section: str, **fields: Any) -> dict[str, Any]:
    return spec | {section: spec[section] | fields}


def test_bad_drafters_are_refused_by_name(tmp_path: Path) -> None:
    model = RandomModel(Dims())
    model.add_medusa(Medusa(heads=2, version="1"))
    model.add_draft(RandomModel(Dims(layers=1)))
    spec = model.save(tmp_path / "weights.safetensors")
    _native.SpeculationRig(spec)
    narrow = {key: value for key, value in spec["medusa"].items() if key != "version"}
    refusals: list[tuple[dict[str, Any], str]] = [
        (changed(spec, "medusa", version="3"), r'medusa\.version: must be "1" or "2", not "3"'),
        (changed(spec, "medusa", version=1), r"medusa\.version: has the wrong type"),
        (spec | {"medusa": narrow}, r"medusa\.version: missing"),
        (spec | {"medusa": 4}, r"medusa: has the wrong type"),
        (changed(spec, "medusa", heads=0), r"medusa\.heads: must be 1 to 12"),
        (changed(spec, "medusa", heads=3), r"tensor medusa\.2\.0\.weight: missing"),
        (changed(spec, "medusa", layers=2), r"tensor medusa\.0\.1\.weight: missing"),
        (without(spec, "medusa.1.lm_head.weight"), r"tensor medusa\.1\.lm_head\.weight: missing"),
        (without(spec, "medusa.0.0.scale"), r"tensor medusa\.0\.0\.scale: missing"),
        (changed(spec, "draft", context=319), r"draft\.context: must not be shorter than the target's"),
        (changed(spec, "draft", head_dim="wide"), r"draft\.head_dim: has the wrong type"),
        (changed(spec, "draft", kv_dtype="int8"), r'draft\.kv_dtype: dtype "int8" is unknown'),
        (changed(spec, "draft", hidden=96), r"draft: tensor layers\.0\.attn_norm: shape \[64\], expected \[96\]"),
        (without(spec, "draft.layers.0.o.weight"), r"draft: tensor layers\.0\.o\.weight: missing"),
    ]
    for bad, message in refusals:
        with pytest.raises(ValueError, match=message):
            _native.SpeculationRig(bad)


def test_heads_that_hold_nan_are_refused(tmp_path: Path) -> None:
    model = RandomModel(Dims())
    model.add_medusa(Medusa(heads=2))
    model.tensors["medusa.1.0.weight"].view(np.uint8).reshape(-1)[5] = 0xFF
    with pytest.raises(ValueError, match=r"tensor medusa\.1\.0\.weight: holds NaN"):
        _native.SpeculationRig(model.save(tmp_path / "weights.safetensors"))


def test_a_draft_that_yields_nan_costs_nothing_but_time(tmp_path: Path) -> None:
    model = RandomModel(Dims())
    draft = RandomModel(Dims(layers=1))
    draft.tensors["norm"][0] = np.nan
    model.add_draft(draft)
    spec = model.save(tmp_path / "weights.safetensors")
    out = _native.SpeculationRig(spec, adaptive=False).decode(prompt(20), 20, {}, "draft")
    assert_same(out, plain(spec, prompt(20), 20, {}))


def test_a_model_alone_ignores_the_drafters(spec: dict[str, Any]) -> None:
    tokens = prompt(40)
    bare = spec | {
        "medusa": None,
        "draft": None,
        "tensors": {
            name: entry for name, entry in spec["tensors"].items() if not name.startswith(("medusa.", "draft."))
        },
    }
    np.testing.assert_array_equal(_native.CpuModel(spec).logits(tokens), _native.CpuModel(bare).logits(tokens))
    assert _native.CpuModel(spec).weight_bytes == _native.CpuModel(bare).weight_bytes
