"""Prompts read fast on the driver double: by the captured graph, by the daemon from a client, and in the build."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
from conftest import ROOT
from device_bundles import PROMPT, build_with_stubs, emulated_kernels
from double_daemons import complete, daemons
from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.errors import RequestError
from ull.gpu.params import CHUNK_TOKENS, PREFILL, RoundResult
from ull.spawn import DaemonProcess
from ull_build.build import build
from ull_build.progress import Reporter
from ull_build.quality.evaluate import EvaluationText
from ull_build.recipe import ForwardRecipe
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings

TINY = ROOT / "engines/tiny"
CONTEXT = 512
LONG = 3 * [*PROMPT, 2, 71, 828, 1500, 9, 33] * 6 + PROMPT  # 298 tokens
ANSWER = 8

pytestmark = pytest.mark.timeout(1800)  # the first test compiles every kernel for the emulator


def settings(output: Path, target: str, prefill: str) -> Settings:
    return Settings(
        *(TINY, output, "tiny", target),
        evaluate=False,
        context=CONTEXT,
        forward=ForwardRecipe(prefill=prefill),
        speculation=SpeculationSettings(medusa=TINY / "medusa", eagle=TINY / "eagle"),
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fast")
    with pytest.MonkeyPatch.context() as patch:
        return build_with_stubs(patch, folder / "kernels", settings(folder / "fast.ull", "sm_90a", "fast"))


@pytest.fixture(scope="module")
def cpu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(settings(tmp_path_factory.mktemp("cpu") / "cpu.ull", "cpu", "exact")).path


@pytest.fixture(scope="module")
def emulated(bundle: Path) -> str:
    return emulated_kernels(bundle)


def run(scenario: str, bundle: Path, emulated: str) -> Any:
    program = f"import test_gpu_fast_prefill as t; t.{scenario}({str(bundle)!r})"
    environment = driver_double.environment(emulated, multiprocessors=4)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def scenario_cuts(path: str) -> None:
    """Tokens and logprobs behind LONG, however it is cut, and where rounds read its last token or all of it."""
    from ull.gpu.program import load

    program = load(open_bundle(path))
    assert program.handover["chunk"] == program.handover["prefill"] != 0
    assert program.handover["last_chunk"] not in (0, program.handover["chunk"])
    assert program.handover["reuse"] == "prompt"
    rounds, place, said = program.replay(), len(LONG) - 1, []

    def keep(results: list[RoundResult]) -> None:
        said.append([(item.tokens[0].token, item.tokens[0].logprob) for item in results])

    for cuts in ([], [1, 64, 200], [130, 131], [place]):
        for first, end in itertools.pairwise([0, *cuts]):
            rounds.wait(rounds.launch(LONG[first:end], first, PREFILL, size=CHUNK_TOKENS))
        last = cuts[-1] if cuts else 0
        keep(rounds.answer(LONG[last:], last, ANSWER, top_logprobs=3))
    rounds.prefill(LONG[:place])
    keep(rounds.decode(LONG[-1], place, ANSWER, top_logprobs=3))
    rounds.prefill(LONG[:40])  # what a core does with a short prompt: by the same graph
    rounds.logits(LONG[:place])
    keep(rounds.decode(LONG[-1], place, ANSWER, top_logprobs=3))
    rounds.drain()
    program.close()
    print(json.dumps(said))


def test_a_prompt_says_the_same_however_it_is_cut(bundle: Path, emulated: str) -> None:
    whole, *cut, last_by_a_round, exact = run("scenario_cuts", bundle, emulated)
    assert cut == [whole, whole, whole]
    for other in (last_by_a_round, exact):
        assert other != whole and whole[0][1] == pytest.approx(other[0][1], abs=0.3)  # FP8 activations


def scenario_quality(path: str) -> None:
    """Losses on LONG as the build measures them on a GPU: exact, and behind tokens that were read fast."""
    from ull_build.quality.on_gpu import DeviceEvaluator

    manifest = open_bundle(path).manifest
    evaluator = DeviceEvaluator(None, manifest, Path(path), None, Reporter())  # type: ignore[arg-type]
    text = EvaluationText("LONG", np.array(LONG, np.int32), len(LONG))
    found = [evaluator.quantised(text), evaluator.read_fast(text)]
    print(json.dumps([[float(loss) for loss in one.nll] for one in found]))


def test_the_build_measures_what_it_costs_on_the_gpu(bundle: Path, emulated: str) -> None:
    """The first 64 tokens stand behind none that was read fast."""
    exact, fast = map(np.array, run("scenario_quality", bundle, emulated))
    assert len(exact) == len(fast) == len(LONG) - 1
    np.testing.assert_array_equal(exact[:64], fast[:64])
    assert (exact[64:] != fast[64:]).mean() > 0.9
    assert np.exp(fast.mean()) == pytest.approx(np.exp(exact.mean()), rel=0.05)


def test_a_daemon_serves_prompts_that_are_read_fast(bundle: Path, cpu_bundle: Path, emulated: str) -> None:
    """Cold, from the cache, over turns and with every drafter the same tokens; near those of exact prefill."""
    text = (TINY / "train.py").read_text()[:700]
    longer = text + "\n\n" + text[100:500]
    with DaemonProcess(cpu_bundle) as daemon, Client(daemon.url) as client:
        exact = client.generate(text, max_tokens=1, logprobs=1).result()
    with daemons() as serve:
        environment = driver_double.environment(emulated, multiprocessors=4, launch_ms=0)
        drafts = ("--set", "engine.watchdog_ms=120000", "--set", "speculation.adaptive=false")
        daemon = serve(bundle, environment, *drafts)
        with Client(daemon.url) as client:
            info = client.info()
            assert info.engine["forward"] == {"prefill": "fast", "decode": "fused", "attention": None}
            first = client.generate(text, max_tokens=1, logprobs=1).result()
            assert first.usage.cached_tokens == 0 and first.logprobs is not None and exact.logprobs is not None
            assert first.logprobs[0].logprob == pytest.approx(exact.logprobs[0].logprob, abs=0.3)
            for options in ({"speculate": "none"}, {"speculate": "none", "temperature": 0.7}):
                tokens = complete(client, text, **options)
                for drafter in ("none", "suffix", "medusa", "eagle"):
                    assert complete(client, text, **options | {"speculate": drafter}) == tokens
            again = client.generate(text, max_tokens=1).result()
            assert again.usage.cached_tokens == again.usage.prompt_tokens - 1  # the first round feeds the last one
            assert again.token_ids == first.token_ids
            # The first token is drawn under a grammar, or where labels are weighed, by a chunk and by a round.
            exact_answer = {"json_schema": {"enum": ["buy", "sell"]}, "max_tokens": 8}
            said = {
                client.generate(text, **exact_answer, speculate=drafter).result().text for drafter in ("none", "eagle")
            }
            assert len(said) == 1 and json.loads(said.pop()) in ("buy", "sell")
            choice = client.generate(text, choices=["buy", "sell"]).result().choice
            assert choice is not None and choice.label in ("buy", "sell")
            # Another turn: a cold daemon says the same behind all of it.
            warm = complete(client, longer)
            drafted = client.generate(longer, max_tokens=16, ignore_eos=True, speculate="eagle").result()
            assert drafted.speculation is not None and drafted.speculation.accepted_tokens > 0
            assert drafted.speculation.by_drafter["eagle"] > 0
            assert client.generate(longer, max_tokens=1).result().usage.cached_tokens > 0
            with client.generate(longer + text, max_tokens=1) as stream:
                stream.cancel()
                assert stream.result().finish_reason == "cancelled"
            with pytest.raises(RequestError, match="scores no prompts") as refused:
                client.generate(text, max_tokens=0, prompt_logprobs=True).result()
            assert refused.value.field == "prompt_logprobs"
        assert daemon.stop() == 0
        cold = ("--set", "engine.watchdog_ms=120000", "--set", "engine.prefix_cache=false")
        daemon = serve(bundle, environment, *cold, "--set", "engine.prefill_chunk=100")
        with Client(daemon.url) as client:
            assert complete(client, longer) == warm
            assert client.stats().engine["prefill_chunks"] > 2
        assert daemon.stop() == 0
