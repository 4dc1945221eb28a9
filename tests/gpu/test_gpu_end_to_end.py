"""`ulld` on the driver double, from a client: the tiny engine by captured graphs and emulated kernels, and faults."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import driver_double
from conftest import ROOT
from device_bundles import build_with_stubs, emulated_kernels
from double_daemons import TOKENS, complete, daemons
from ull import _native
from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.errors import RequestFailed
from ull.spawn import DaemonProcess
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings

sys.path += [str(ROOT / "bench"), str(ROOT / "bench/h200")]
from replay import replay, replaying

TINY = ROOT / "engines/tiny"
CONTEXT = 512
REPEATING = "x = 1\nx = 1\nx = 1\nx = 1\nx ="  # n-gram has something to propose
PROMPTS = ("def add(first, second):\n    return", REPEATING)
PROMPT_IDS = [0, 306, 903, 10, 1617, 14, 2480, 294, 271, 323]  # of the first
DRAFTED = 24
ALWAYS_DRAFTS = ("--set", "engine.watchdog_ms=120000", "--set", "speculation.adaptive=false")

pytestmark = pytest.mark.timeout(1800)  # the first test compiles every kernel for the emulator
Start = Callable[..., DaemonProcess]


def tiny_settings(output: Path, target: str, draft: Path | None = None, **heads: Path) -> Settings:
    return Settings(
        *(TINY, output, "tiny", target),
        evaluate=False,
        context=CONTEXT,
        speculation=SpeculationSettings(medusa=TINY / "medusa", draft=draft, **heads),
    )


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """engines/tiny for both targets; the GPU's cubins name the kernels, whose code is the emulator's."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        gpu = build_with_stubs(patch, folder / "kernels", tiny_settings(folder / "gpu.ull", "sm_90a"))
    return {"gpu": gpu, "cpu": build(tiny_settings(folder / "cpu.ull", "cpu")).path}


@pytest.fixture(scope="module")
def emulated(bundles: dict[str, Path]) -> str:
    return emulated_kernels(bundles["gpu"])


@pytest.fixture
def start(bundles: dict[str, Path], emulated: str) -> Iterator[Start]:
    """start(*arguments, bundle=, **double's options): ulld on the GPU bundle, or another one."""
    with daemons() as serve:

        def begin(
            *arguments: str, bundle: Path = bundles["gpu"], kernels: str = emulated, **options: object
        ) -> DaemonProcess:
            options = {"multiprocessors": 4, "launch_ms": 1000} | options
            environment = driver_double.environment(kernels, **options)
            return serve(bundle, environment, *arguments)

        yield begin


def test_the_daemon_says_what_the_cpu_executor_says(bundles: dict[str, Path], start: Start) -> None:
    """Greedy and sampled, with every filter and penalty, plain and by n-gram, cold and from the prefix cache.

    What neither filters nor penalises runs in bursts of rounds.
    """
    cases: list[dict[str, Any]] = [
        {"speculate": "none"},
        {"speculate": "suffix"},
        {"speculate": "none", "logprobs": 0},  # another sampler's graph than the first
        {"speculate": "none", "temperature": 0.8, "min_p": 0.02},
        {"speculate": "none", "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"speculate": "suffix", "temperature": 0.8, "logit_bias": {13: -2.0}},
        {"speculate": "none", "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"speculate": "suffix", "temperature": 0.7, "top_p": 0.95, "frequency_penalty": 0.8},
    ]
    with DaemonProcess(bundles["cpu"]) as daemon, Client(daemon.url) as client:
        expected = [[complete(client, prompt, **case) for prompt in PROMPTS] for case in cases]
    daemon = start("--set", "engine.watchdog_ms=120000", launch_ms=0)  # the host does its part while the device does
    with Client(daemon.url) as client:
        assert client.info().executor["name"] == "graph/sm_90a"
        for case, texts in zip(cases, expected, strict=True):
            assert [complete(client, prompt, **case) for prompt in PROMPTS] == texts
        repeated = client.generate(
            REPEATING, max_tokens=TOKENS, ignore_eos=True, speculate="suffix", max_tree=8
        ).result()
        assert repeated.token_ids == expected[0][1]
        assert repeated.usage.cached_tokens > 0
        with client.generate(PROMPTS[0], max_tokens=200, ignore_eos=True) as stream:  # barge-in
            next(stream)
            stream.cancel()
            assert stream.result().finish_reason == "cancelled"
        assert complete(client, PROMPTS[0], speculate="none") == expected[0][0]
        # Rounds and bursts that are queued behind one request when another comes first.
        for case, texts in zip(cases, expected, strict=True):
            with Client(daemon.url) as urgent:
                options = {"max_tokens": TOKENS, "seed": 7, "ignore_eos": True, "priority": "batch", **case}
                stream = client.generate(PROMPTS[0], **options)
                next(stream)
                assert complete(urgent, PROMPTS[1], priority="realtime", **case) == texts[1]
                assert list(stream.result().token_ids) == texts[0]
        assert client.stats().engine["suspensions"] > 0
    assert daemon.stop() == 0


def test_a_long_prompt_says_the_same(bundles: dict[str, Path], start: Start) -> None:
    """It is read in chunks; so is what another turn adds, behind a cache that ends anywhere. A cancel ends one."""
    text = (ROOT / "engines/tiny/train.py").read_text()[:700]
    cases: list[dict[str, Any]] = [{"speculate": "none"}, {"speculate": "medusa", "temperature": 0.7}]
    prompts = (text, text + "\n\n" + text[100:500])
    with DaemonProcess(bundles["cpu"]) as daemon, Client(daemon.url) as client:
        assert client.generate(prompts[0], max_tokens=0).result().usage.prompt_tokens > 2 * 64 + 64
        expected = [[complete(client, prompt, **case) for prompt in prompts] for case in cases]
        likely = client.generate(prompts[0], max_tokens=0, prompt_logprobs=True).result().prompt_logprobs
    daemon = start("--set", "engine.watchdog_ms=120000", launch_ms=0)
    with Client(daemon.url) as client:
        for seconds in (0.0, 0.5):  # before its chunk begins, and while that runs, which takes longer here than 2 s
            with client.generate(prompts[1], max_tokens=1) as stream:
                time.sleep(seconds)
                stream.cancel()
                assert stream.result().finish_reason == "cancelled"
        cold = client.generate(prompts[0], max_tokens=0, prompt_logprobs=True).result().prompt_logprobs
        assert cold is not None and likely is not None and cold[0] is None
        assert cold[1:] == pytest.approx(likely[1:], abs=0.05)  # 16-bit activations
        # The passes that score leave the cache as it was: what stands in it serves these, bit for bit.
        assert [[complete(client, prompt, **case) for prompt in prompts] for case in cases] == expected
        asked: dict[str, Any] = {"prompt_logprobs": True, "prompt_top_logprobs": 3}
        again = client.generate(prompts[0], max_tokens=0, **asked).result()
        assert again.prompt_logprobs == cold and again.usage.cached_tokens > 0
        ids, top = client.tokenize(prompts[0]), again.prompt_top_logprobs or []
        for place in (1, 64, 65, len(ids) - 1):  # the first and last of a pass among them
            there = client.generate(ids[:place], max_tokens=1, logprobs=3).result().logprobs
            assert there is not None and there[0].top == top[place]
    assert daemon.stop() == 0


def test_a_long_cache_says_the_same(start: Start, tmp_path: Path) -> None:
    """Behind 1,024 positions trees have a kernel of their own for what lies in the pages."""
    text = (ROOT / "engines/tiny/train.py").read_text()[:3000]
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TINY, checkpoint, ignore=shutil.ignore_patterns("medusa"))
    config = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": 1280}
    (checkpoint / "config.json").write_text(json.dumps(config))

    def settings(target: str) -> Settings:
        return replace(tiny_settings(tmp_path / f"{target}.ull", target), model=checkpoint, context=1280)

    with pytest.MonkeyPatch.context() as patch:
        gpu = build_with_stubs(patch, tmp_path / "kernels", settings("sm_90a"))
    case: dict[str, Any] = {"speculate": "medusa", "temperature": 0.7}
    with DaemonProcess(build(settings("cpu")).path) as daemon, Client(daemon.url) as client:
        assert 1024 + 64 < client.generate(text, max_tokens=0).result().usage.prompt_tokens < 1280 - TOKENS
        expected = complete(client, text, **case)
    daemon = start(*ALWAYS_DRAFTS, bundle=gpu, launch_ms=0)
    with Client(daemon.url) as client:
        assert complete(client, text, **case) == expected
    assert daemon.stop() == 0


def test_a_successor_says_the_same(start: Start) -> None:
    """Two daemons hold the device while one warms up; its session's cache is computed anew."""
    daemon = start("--set", "engine.watchdog_ms=120000")
    with Client(daemon.url) as client, client.open_session() as session:
        expected = complete(client, PROMPTS[0], speculate="none")
        session.append(PROMPTS[0]).result()
        answer = client.upgrade()
        try:
            assert answer.pid != daemon.pid
            assert daemon.process.wait(120) == 0
            assert complete(client, PROMPTS[0], speculate="none") == expected
            result = session.generate(max_tokens=TOKENS, seed=7, ignore_eos=True, speculate="none").result()
            assert result.token_ids == expected
        finally:
            os.kill(answer.pid, signal.SIGKILL)


def test_one_kernel_for_all_layers_says_the_same(bundles: dict[str, Path], start: Start) -> None:
    """As the cpu executor, and so as the chain of kernels does: greedy and sampled, alone and beside other rounds."""
    cases: list[dict[str, Any]] = [
        {"speculate": "none"},
        {"speculate": "none", "temperature": 0.8},
        {"speculate": "none", "temperature": 0.8, "top_p": 0.95},
        {"speculate": "suffix", "temperature": 0.6},
    ]
    with DaemonProcess(bundles["cpu"]) as daemon, Client(daemon.url) as client:
        expected = [complete(client, REPEATING, **case) for case in cases]
    daemon = start("--set", "engine.watchdog_ms=120000", "--set", "engine.persistent=true")
    with Client(daemon.url) as client:
        assert [complete(client, REPEATING, **case) for case in cases] == expected
    assert daemon.stop() == 0


def test_medusa_heads_draft_on_the_device(bundles: dict[str, Path], start: Start) -> None:
    """Trees in every round but the first: the plain tokens, in about as many rounds as with the CPU's heads."""
    cases: list[tuple[int, dict[str, Any]]] = [
        (8, {}),
        (16, {"temperature": 0.8, "logit_bias": {13: -2.0}, "presence_penalty": 0.3}),
    ]
    rig = _native.SpeculationRig(open_bundle(bundles["cpu"]).native_spec(), adaptive=False)
    on_cpu = [
        rig.decode(np.array(PROMPT_IDS, np.int32), DRAFTED, {"seed": 7, **sampling}, "medusa", max_tree)
        for max_tree, sampling in cases
    ]
    daemon = start("--set", "engine.persistent=true", *ALWAYS_DRAFTS)
    with Client(daemon.url) as client:
        info = client.info()
        assert list(info.limits["drafters"]) == ["none", "suffix", "medusa", "auto"]
        assert info.executor["adaptive"] is False
        for (max_tree, sampling), expected in zip(cases, on_cpu, strict=True):
            options = {"max_tokens": DRAFTED, "seed": 7, "ignore_eos": True, "max_tree": max_tree, **sampling}
            result = client.generate(PROMPT_IDS, speculate="medusa", **options).result()
            assert result.token_ids == expected["tokens"]
            speculation, rounds = result.speculation, len(expected["rounds"])
            assert speculation is not None and rounds < 0.8 * DRAFTED
            assert speculation.rounds <= rounds + 2  # the first is plain: a prompt leaves no hidden state
            assert speculation.by_drafter["medusa"] >= speculation.rounds - 2  # nor need the last one draft
            assert speculation.accepted_tokens == DRAFTED - speculation.rounds
    assert daemon.stop() == 0


def write_truncated(folder: Path, layers: int) -> Path:
    """engines/tiny with its first layers alone, which sometimes says what the whole says. The kernels are the same."""
    folder.mkdir()
    weights = load_file(TINY / "model.safetensors")
    places = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in weights}
    kept = {name: weights[name] for name, place in places.items() if place is None or int(place[1]) < layers}
    save_file(kept, folder / "model.safetensors")
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(TINY / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize(
    ("layers", "cases"),
    [
        (6, [(1, {}), (1, {"temperature": 0.6, "repetition_penalty": 1.2, "presence_penalty": 0.3}), (14, {})]),
        (5, [(1, {"temperature": 0.8, "top_p": 0.9, "logit_bias": {13: -2.0}})]),
    ],
)
def test_a_draft_model_drafts_on_the_device(
    bundles: dict[str, Path], start: Start, tmp_path: Path, layers: int, cases: list[tuple[int, dict[str, Any]]]
) -> None:
    """The plain tokens, whatever the draft says; a draft that is the target (6 layers) is accepted whole.

    Also behind a prompt that both read in chunks.
    """
    draft = write_truncated(tmp_path / "draft", layers)
    with pytest.MonkeyPatch.context() as patch:
        bundle = build_with_stubs(patch, tmp_path / "kernels", tiny_settings(tmp_path / "x.ull", "sm_90a", draft))
    rig = _native.SpeculationRig(open_bundle(bundles["cpu"]).native_spec())
    daemon = start(*ALWAYS_DRAFTS, bundle=bundle)
    with Client(daemon.url) as client:
        info = client.info()
        assert list(info.limits["drafters"]) == ["none", "suffix", "medusa", "draft", "auto"]
        assert info.executor["draft_ns"]["draft"] > 0
        for times, sampling in cases:
            prompt = PROMPT_IDS * times
            plain = rig.decode(np.array(prompt, np.int32), DRAFTED, {"seed": 7, **sampling}, "none", 1)["tokens"]
            options = {"max_tokens": DRAFTED, "seed": 7, "ignore_eos": True, "max_tree": 6, **sampling}
            result = client.generate(prompt, speculate="draft", **options).result()
            assert result.token_ids == plain
            speculation = result.speculation
            assert speculation is not None and speculation.by_drafter["draft"] >= speculation.rounds - 1
            assert speculation.accepted_tokens == DRAFTED - speculation.rounds
            # A round that reads the prompt's end draws the token behind it and drafts nothing.
            first = int(result.usage.cached_tokens < len(prompt) - 1)
            whole = first + math.ceil((DRAFTED - first) / 6)
            assert speculation.rounds == whole if layers == 6 else speculation.rounds < DRAFTED
    assert daemon.stop() == 0


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_a_head_drafts_on_the_device(start: Start, tmp_path: Path, kind: str) -> None:
    """Trees in every round but the first: the plain tokens, in about as many rounds as with the CPU's head.

    Also behind a prompt that model and head read in chunks.
    """
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (1, 16, {}),
        (1, 8, {"temperature": 0.8, "logit_bias": {13: -2.0}, "presence_penalty": 0.3}),
        (30, 16, {}),
    ]
    head = {kind: TINY / kind}
    on_cpu = build(tiny_settings(tmp_path / "cpu.ull", "cpu", **head)).path
    rig = _native.SpeculationRig(open_bundle(on_cpu).native_spec(), adaptive=False)
    decoded = [
        rig.decode(np.array(PROMPT_IDS * times, np.int32), DRAFTED, {"seed": 7, **sampling}, kind, max_tree)
        for times, max_tree, sampling in cases
    ]
    with pytest.MonkeyPatch.context() as patch:
        settings = tiny_settings(tmp_path / "gpu.ull", "sm_90a", **head)
        bundle = build_with_stubs(patch, tmp_path / "kernels", settings)
    daemon = start(*ALWAYS_DRAFTS, bundle=bundle, kernels=emulated_kernels(bundle))
    with Client(daemon.url) as client:
        info = client.info()
        assert list(info.limits["drafters"]) == ["none", "suffix", "medusa", kind, "auto"]
        assert info.executor["draft_ns"][kind] > 0
        for (times, max_tree, sampling), expected in zip(cases, decoded, strict=True):
            options = {"max_tokens": DRAFTED, "seed": 7, "ignore_eos": True, "max_tree": max_tree, **sampling}
            result = client.generate(PROMPT_IDS * times, speculate=kind, **options).result()
            assert result.token_ids == expected["tokens"]
            speculation, rounds = result.speculation, len(expected["rounds"])
            assert speculation is not None and rounds < 0.6 * DRAFTED
            assert speculation.rounds <= rounds + 3  # the first is plain: of another request's State no rank is made
            assert speculation.by_drafter[kind] >= speculation.rounds - 2  # nor need the last one draft
            assert speculation.accepted_tokens == DRAFTED - speculation.rounds
    assert daemon.stop() == 0
    if kind == "eagle":  # its acceptance replayed, as `make h200` measures it: the same tokens again
        with replaying(bundle, arguments=ALWAYS_DRAFTS, ready_timeout=600.0) as client:
            found = replay(client, 0, vocabulary=4096, tokens=DRAFTED, passes=1, max_tree=4)
        assert found["rounds"] < 0.8 * DRAFTED and found["drafted_per_round"] > 1.5


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of engines/tiny as an engine: what a fault ends need not say anything."""
    folder = tmp_path_factory.mktemp("one_layer")
    model = write_truncated(folder / "model", 1)
    settings = Settings(model, folder / "x.ull", "one", "sm_90a", evaluate=False, context=CONTEXT)
    with pytest.MonkeyPatch.context() as patch:
        return build_with_stubs(patch, folder / "kernels", settings)


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("launch=2", 4, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        ("hang=2", 3, "has not answered"),
        ("sticky=2", 3, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("corrupt=3:99999999", 4, "impossible answer"),
    ],
)
def test_a_fault_ends_the_request_with_its_reason_and_the_daemon_with_its_status(
    one_layer: Path, start: Start, tmp_path: Path, fault: str, status: int, words: str
) -> None:
    """Exactly one terminal frame, which says why; systemd restarts only what a restart can mend."""
    control = tmp_path / "faults"
    control.write_text("")
    limit = 10_000 if fault.startswith("hang") else 120_000  # a round takes half a second beside other work
    options = ("--set", f"engine.watchdog_ms={limit}", "--set", "log.format=json")
    daemon = start(*options, bundle=one_layer, control=control)
    with Client(daemon.url) as client:
        assert len(complete(client, PROMPTS[0], max_tokens=2)) == 2
        control.write_text(fault + "\n")
        # The double corrupts what a sampler hands to ull_accept: that of requests with logprobs.
        logprobs = 0 if fault.startswith("corrupt") else None
        with pytest.raises(RequestFailed, match=words):
            client.generate(PROMPTS[1], max_tokens=50, ignore_eos=True, speculate="none", logprobs=logprobs).result()
    assert daemon.process.wait(60) == status
    log = [json.loads(line) for line in daemon.log_lines() if line.startswith("{")]  # the double speaks plainly
    assert [line["finish"] for line in log if line["event"] == "request"] == ["length", "error"]
    (reason,) = [line["reason"] for line in log if line["event"] == "engine"]
    assert words in reason
