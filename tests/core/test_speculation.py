"""Speculation never changes the output: every drafter, tree, cut and setting against plain decoding, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_rig import Rig
from packing import Dims, RandomModel
from ull import _native

DRAFTS = ["right", "wrong", "random", "mixed", "duplicates", "beyond"]
CONTEXT = 320


@dataclass(frozen=True)
class Case:
    """A random model and one request to it."""

    dims: Dims
    prompt: int
    max_tokens: int
    sampling: dict[str, Any]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small models of every kind, prompts that end anywhere in a page, every sampling parameter."""
    group = draw(st.sampled_from([1, 2, 3]))
    kv_heads = draw(st.sampled_from([1, 2]))
    weights = draw(st.sampled_from(["f32", "bf16", "fp8"]))
    dims = Dims(
        hidden=draw(st.sampled_from([32, 64])),
        layers=2,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 40])),
        vocabulary=draw(st.sampled_from([5, 33, 100])),
        context=CONTEXT,
        qk_norm=draw(st.booleans()),
        bias=draw(st.booleans()),
        windows=draw(st.sampled_from([(0, 0), (5, 0), (64, 33), (1, 70)])),
        weights=weights,
        lm_head=draw(st.sampled_from(["f32", "bf16"])) if weights == "f32" else "bf16",
        kv=draw(st.sampled_from(["f32", "bf16", "fp8"])),
        seed=draw(st.integers(0, 1000)),
    )
    sampling: dict[str, Any] = {"logprobs": draw(st.sampled_from([0, 3]))}
    if draw(st.booleans()):
        sampling |= {
            "temperature": draw(st.sampled_from([0.5, 1.0, 2.0])),
            "seed": draw(st.integers(0, 2**64 - 1)),
            "top_k": draw(st.sampled_from([0, 1, 4])),
            "top_p": draw(st.sampled_from([1.0, 0.9, 0.3])),
            "min_p": draw(st.sampled_from([0.0, 0.1])),
        }
    if draw(st.booleans()):
        sampling |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "presence_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
                    "frequency_penalty": st.sampled_from([-0.5, 0.2, 2.0]),
                    "repetition_penalty": st.sampled_from([0.5, 1.1, 3.0]),
                },
            )
        )
    if draw(st.booleans()):
        sampling["logit_bias"] = {0: float("-inf"), 3: 1.5}
    prompt = draw(st.one_of(st.integers(1, 30), st.integers(55, 75), st.integers(120, 135)))
    return Case(dims, prompt, draw(st.integers(1, 100)), sampling, draw(st.integers(0, 2**32 - 1)))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the cases' weights lie, one file after another."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def outcome(result: dict[str, Any]) -> tuple[Any, ...]:
    """What speculation must not change."""
    return result["tokens"], result["logprobs"], result["top"], result["failed"]


def prompt_of(case: Case) -> np.ndarray:
    return np.random.default_rng(case.seed).integers(0, case.dims.vocabulary, case.prompt).astype(np.int32)


slow_but_thorough = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow_but_thorough
@given(
    case=cases(),
    drafts=st.sampled_from(DRAFTS),
    max_tree=st.integers(1, 64),
    chunk=st.sampled_from([1, 7, 64, 256]),
    threads=st.sampled_from([1, 2]),
    isa=st.sampled_from(["auto", "portable"]),
)
def test_no_draft_changes_the_output(
    folder: Path, case: Case, drafts: str, max_tree: int, chunk: int, threads: int, isa: str
) -> None:
    spec = RandomModel(case.dims).save(folder / "weights.safetensors")
    prompt = prompt_of(case)
    plain = _native.SpeculationRig(spec).decode(prompt, case.max_tokens, case.sampling)
    assert len(plain["tokens"]) == case.max_tokens
    assert {round[0] for round in plain["rounds"]} == {"none"}
    rig = _native.SpeculationRig(
        spec,
        threads=threads,
        prefill_chunk=chunk,
        isa=isa,
        adaptive=False,
        drafter=drafts,
        truth=[*prompt.tolist(), *plain["tokens"]],
        seed=case.seed,
    )
    pages = np.random.default_rng(case.seed).permutation(rig.info["page_count"]).astype(np.int32)
    result = rig.decode(prompt, case.max_tokens, case.sampling, speculate="draft", max_tree=max_tree, pages=pages)
    assert outcome(result) == outcome(plain)
    rounds = result["rounds"]
    assert sum(accepted + 1 for _, _, _, accepted, _ in rounds) == case.max_tokens
    assert all(tree <= max_tree and depth < tree and accepted <= depth for _, tree, depth, accepted, _ in rounds)
    if drafts == "right":  # every round but the last is as long as the tree is wide
        assert len(rounds) == -(-case.max_tokens // max_tree)
    if drafts == "wrong":
        assert len(rounds) == case.max_tokens
    # The cache that the rounds left holds what plain decoding would have put there.
    cached = case.prompt + case.max_tokens - 1
    longer = np.array([*prompt.tolist(), *plain["tokens"]], np.int32)
    if len(longer) + 5 <= CONTEXT:
        cold = _native.SpeculationRig(spec).decode(longer, 5, case.sampling)
        warm = rig.decode(longer, 5, case.sampling, pages=pages, cached=cached)
        assert outcome(warm) == outcome(cold)


@slow_but_thorough
@given(case=cases(), max_tree=st.integers(0, 64), adaptive=st.booleans(), kind=st.sampled_from(["suffix", "auto"]))
def test_suffixes_change_nothing_but_the_rounds(
    folder: Path, case: Case, max_tree: int, adaptive: bool, kind: str
) -> None:
    spec = RandomModel(case.dims).save(folder / "weights.safetensors")
    prompt = np.resize(prompt_of(case)[: 1 + case.prompt // 3], case.prompt)  # repeats itself
    plain = _native.SpeculationRig(spec).decode(prompt, case.max_tokens, case.sampling)
    past = _native.PastOutputs(150)
    past.append(np.random.default_rng(case.seed).integers(-1, 200, 200).astype(np.int32))
    rig = _native.SpeculationRig(spec, adaptive=adaptive, past_outputs=past)
    other = _native.SpeculationRig(spec).decode(prompt[:1], 40)
    for _ in range(2):  # the second request finds the first ones' index, outputs and statistics
        result = rig.decode(prompt, case.max_tokens, case.sampling, speculate=kind, max_tree=max_tree)
        assert outcome(result) == outcome(plain)
        assert outcome(rig.decode(prompt[:1], 40, speculate=kind, max_tree=max_tree)) == outcome(other)
    assert len(past.copy()) == 150


def test_a_repeating_text_takes_few_rounds(folder: Path) -> None:
    spec = RandomModel(Dims(vocabulary=50, seed=5)).save(folder / "weights.safetensors")
    prompt = np.arange(20, dtype=np.int32)
    plain = _native.SpeculationRig(spec).decode(prompt, 250)  # greedy: a random model soon repeats itself
    result = _native.SpeculationRig(spec, adaptive=False).decode(prompt, 250, speculate="suffix", max_tree=16)
    assert result["tokens"] == plain["tokens"]
    assert len(result["rounds"]) < 125
    assert "suffix" in {round[0] for round in result["rounds"]}


def test_past_outputs_save_rounds(folder: Path) -> None:
    spec = RandomModel(Dims(vocabulary=50, seed=5)).save(folder / "weights.safetensors")
    prompt = np.arange(20, dtype=np.int32)
    sampling = {"temperature": 2.0, "seed": 1}
    past = _native.PastOutputs(1000)
    rig = _native.SpeculationRig(spec, adaptive=False, past_outputs=past)
    first = rig.decode(prompt, 100, sampling, speculate="suffix", max_tree=16)
    rig.decode(prompt[:1], 2, speculate="suffix")  # what has ended enters with the next request
    assert past.copy().tolist()[:90] == first["tokens"][:90]
    second = rig.decode(prompt, 100, sampling, speculate="suffix", max_tree=16)
    assert second["tokens"] == first["tokens"]
    assert 3 * len(second["rounds"]) < len(first["rounds"])


def test_a_logit_that_is_not_finite_fails_where_it_would_have(folder: Path) -> None:
    dims = Dims(vocabulary=40, tied=False)
    model = RandomModel(dims)
    plain = _native.SpeculationRig(model.save(folder / "weights.safetensors")).decode(np.arange(9, dtype=np.int32), 30)
    table = model.tensors["embed.weight"]
    poisoned = plain["tokens"][12]
    reached = plain["tokens"].index(poisoned)
    table[poisoned] = np.nan
    spec = model.save(folder / "weights.safetensors")
    truth = [*range(9), *plain["tokens"]]
    alone = _native.SpeculationRig(spec).decode(np.arange(9, dtype=np.int32), 30)
    for drafts in DRAFTS:
        rig = _native.SpeculationRig(spec, adaptive=False, drafter=drafts, truth=truth, seed=3)
        result = rig.decode(np.arange(9, dtype=np.int32), 30, speculate="draft")
        assert result["failed"] is alone["failed"] is True
        assert result["tokens"] == alone["tokens"] == plain["tokens"][: reached + 1]


def test_the_cost_table_is_measured(folder: Path) -> None:
    spec = RandomModel(Dims()).save(folder / "weights.safetensors")
    info = _native.SpeculationRig(spec).info
    assert list(info["verify_ns"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert all(cost > 0 for cost in info["verify_ns"].values())
    assert info["drafters"] == ["none", "suffix", "auto"]
    assert info["draft_ns"]["suffix"] > 0


def test_bad_arguments_are_named(folder: Path) -> None:
    spec = RandomModel(Dims()).save(folder / "weights.safetensors")
    rig = _native.SpeculationRig(spec)
    prompt = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match=r"^speculate: "):
        rig.decode(prompt, 4, speculate="medusa")
    with pytest.raises(ValueError, match=r"^speculate: "):
        rig.decode(prompt, 4, speculate="oracle")
    with pytest.raises(ValueError, match=r"^max_tree: "):
        rig.decode(prompt, 4, speculate="suffix", max_tree=65)
    with pytest.raises(ValueError, match=r"^max_tokens: "):
        rig.decode(prompt, CONTEXT)
    with pytest.raises(ValueError, match=r"^drafter: "):
        _native.SpeculationRig(spec, drafter="lucky")
    with pytest.raises(ValueError, match=r"^max_tree: "):
        _native.CpuExecutor(spec, threads=1, cores=[], max_tree=0)


# ---- through the engine -----------------------------------------------------------------------------------------


def finished(
    rig: Rig, client: Any, request_id: int, prompt: bytes, **params: Any
) -> tuple[list[int], str, dict[str, Any]]:
    """Runs a request -> (ids, text, done)."""
    rig.submit(b"client", request_id, prompt, **params)
    frames, done = client.finish(request_id)
    return [token for frame in frames for token in frame["ids"]], "".join(frame["text"] for frame in frames), done


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_requests_end_as_they_would_without_speculation(folder: Path, prefix_cache: bool) -> None:
    spec = RandomModel(Dims(vocabulary=128, context=512, seed=9)).save(folder / "weights.safetensors")
    executor = _native.CpuExecutor(spec, threads=1, cores=[], prefill_chunk=32, adaptive=False)
    options = {"prefix_cache": prefix_cache}
    with Rig(folder, {}, executor=executor, engine=options) as rig:
        client = rig.client(b"client")
        prompt = b"abcabcabcabc the same again, the same again, the same"
        _, text, _ = finished(rig, client, 1, prompt, max_tokens=200)
        request_id = 1
        variants: list[dict[str, Any]] = [
            {"max_tokens": 200},
            {"max_tokens": 1},
            {"max_tokens": 17},
            {"max_tokens": 200, "stop": [text[40:44].encode()]},
            {"max_tokens": 200, "stop_ids": [ord(text[60])]},
            {"max_tokens": 120, "temperature": 0.3, "seed": 5, "top_k": 3},
            {"max_tokens": 60, "logprobs": 2},
        ]
        speculative_rounds = 0
        for variant in variants:
            results = []
            for speculate in ("none", "suffix", "auto"):
                for length in (len(prompt), len(prompt) + 150):  # the second turn goes on after the first one's answer
                    turn = (prompt + text.encode())[:length]
                    request_id += 1
                    ids, said, done = finished(rig, client, request_id, turn, speculate=speculate, **variant)
                    results.append((length, ids, said, done["finish_reason"], done["usage"]["completion_tokens"]))
                    rounds = done["speculation"]
                    assert sum(rounds["by_drafter"].values()) == rounds["rounds"]
                    assert rounds["accepted_tokens"] == sum(rounds["accepted_by_depth"])
                    if speculate == "none":
                        assert rounds["by_drafter"].keys() == {"none"}
                    speculative_rounds += rounds["by_drafter"].get("suffix", 0)
            assert results[0:2] == results[2:4] == results[4:6]
        assert speculative_rounds > 10
        rig.engine.stop()
        stats = rig.engine.stats()
        assert stats["by_drafter"]["suffix"] == speculative_rounds
        assert sum(stats["by_drafter"].values()) == stats["rounds"]
        assert stats["accepted_tokens"] >= sum(stats["accepted_by_depth"]) > 0


def test_the_engine_refuses_a_drafter_that_it_lacks(folder: Path) -> None:
    spec = RandomModel(Dims(vocabulary=128)).save(folder / "weights.safetensors")
    executor = _native.CpuExecutor(spec, threads=1, cores=[], speculate="suffix", max_tree=8)
    with Rig(folder, {}, executor=executor) as rig:
        assert (rig.engine.info["default_drafter"], rig.engine.info["default_max_tree"]) == ("suffix", 8)
        for params in ({"speculate": "medusa"}, {"speculate": "x"}, {"max_tree": 65}, {"max_tree": -1}):
            with pytest.raises(_native.InvalidRequest) as caught:
                rig.submit(b"client", 1, b"abc", max_tokens=4, **params)
            assert caught.value.field == next(iter(params))
