"""Grammars and choices on the driver double: what the CPU executor answers, by captured graphs and emulated kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
from conftest import ROOT
from device_bundles import build_with_stubs, emulated_kernels
from native_rig import Rig
from ull import _native
from ull.bundle import open_bundle
from ull.log import Log
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings

TINY = ROOT / "engines/tiny"
CONTEXT = 512
PROMPT = b"The order as JSON: "
SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "type": "object",
    "properties": {
        "side": {"enum": ["buy", "sell", "hold"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9999},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["side", "size", "note"],
    "additionalProperties": False,
}
GRAMMARS = {"schema": ("json_schema", json.dumps(SCHEMA)), "regex": ("regex", "[a-f]{3,9}(-[0-9]{2}){1,4}")}
FILTERS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 4}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3}
CASES: list[dict[str, Any]] = [
    {"grammar": "schema"},
    {"grammar": "schema", "logprobs": 2},  # nothing is forced: a mask leaves one token
    {"grammar": "schema", "speculate": "suffix", **FILTERS},
    {"grammar": "schema", "speculate": "medusa", "max_tree": 8, "temperature": 0.7, "seed": 5},
    {"grammar": "regex", "speculate": "medusa", "max_tree": 8, **PENALTIES},
    {"grammar": "regex", "temperature": 1.5, "seed": 6, "logit_bias": {70: -2.0}, **PENALTIES},
    {"grammar": "regex", **FILTERS, "logprobs": 0},
    {"choices": [[66], [83], [72]]},
    {"choices": [list(b"buy"), list(b"buy now"), list(b"sell"), list(b"hold")]},
    {"choices": [[100 + i, *range(3, 3 + i % 4)] for i in range(90)], "temperature": 2.0, "seed": 9},
]

pytestmark = pytest.mark.timeout(1800)  # the first test compiles every kernel for the emulator


class Asked:
    """An engine on a bundle's executor, and the client that asks it."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        bundle = open_bundle(path)
        self.executor: _native.Executor
        if bundle.manifest.code is None:
            self.executor = _native.CpuExecutor(bundle.native_spec(), threads=1, cores=[], adaptive=False)
        else:
            from ull.gpu.program import Program

            program = Program(bundle, Log("warning"), CONTEXT)
            stack.callback(program.close)
            self.executor = _native.GraphExecutor(program.handover, watchdog_ms=120_000, adaptive=False)
            stack.callback(self.executor.settle)
        spec = find_spec("llguidance._lib")
        assert spec is not None and spec.origin is not None
        self._eos = bundle.manifest.tokens.eos
        grammars = _native.Grammars(spec.origin, str(bundle.vocabulary_path), self._eos, {})
        self._grammars = {name: grammars.compile(*source) for name, source in GRAMMARS.items()}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rig = Rig(
            folder, {}, executor=self.executor, vocabulary=bundle.vocabulary_path, engine={"watchdog_ms": 120_000}
        )
        self.rig = stack.enter_context(rig)
        self._client = rig.client(b"client")
        self._client.socket.rcvtimeo = 600_000  # emulated rounds beside other work
        self._requests = 0

    def ask(self, case: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """The tokens of the answer, and its done frame."""
        self._requests += 1
        params = {"max_tokens": 60, "stop_ids": self._eos, "speculate": "none", **case}
        if "grammar" in case:
            params["grammar"] = self._grammars[case["grammar"]]
        self.rig.submit(b"client", self._requests, PROMPT, **params)
        frames, done = self._client.finish(self._requests)
        return [token for frame in frames for token in frame["ids"]], done


def scenario_answers(path: str) -> None:
    """The cases' token ids, masks, and what each label is worth, by the bundle's executor; twice, cold and warm."""
    with ExitStack() as stack:
        asked, said = Asked(path, stack), []
        assert asked.rig.engine.info["constraints"] and asked.rig.engine.info["score_nodes"] == 64
        for case in 2 * CASES:
            ids, done = asked.ask(case)
            assert done["error"] is None, done
            masks, worth = done.get("grammar", {}).get("masks"), done.get("choice", {}).get("logprobs")
            said.append({"ids": ids, "finish": done["finish_reason"], "masks": masks, "worth": worth})
        print(json.dumps(said))


def scenario_fault(path: str, control: str, fault: str) -> None:
    """What a request with a grammar is told when the device fails behind its first round."""
    with ExitStack() as stack:
        asked = Asked(path, stack)
        Path(control).write_text(fault + "\n")
        _, done = asked.ask({"grammar": "schema", "logprobs": 0})
        print(json.dumps([done["error"]["message"], asked.executor.failure]))


def run(scenario: str, *arguments: str, kernels: str | None = None, **options: object) -> Any:
    """Runs `scenario` under the double; what it printed as JSON. Fails with its traceback."""
    program = f"import test_gpu_exact as t; t.{scenario}(*{arguments!r})"
    environment = driver_double.environment(kernels, multiprocessors=4, launch_ms=0, **options)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """engines/tiny for both targets; the GPU's cubins name the kernels, whose code is the emulator's."""
    folder = tmp_path_factory.mktemp("tiny")

    def settings(name: str, target: str) -> Settings:
        speculation = SpeculationSettings(medusa=TINY / "medusa")
        return Settings(TINY, folder / name, "tiny", target, evaluate=False, context=CONTEXT, speculation=speculation)

    with pytest.MonkeyPatch.context() as patch:
        gpu = build_with_stubs(patch, folder / "kernels", settings("gpu.ull", "sm_90a"))
    return {"gpu": gpu, "cpu": build(settings("cpu.ull", "cpu")).path}


def test_answers_are_the_cpu_executors(bundles: dict[str, Path]) -> None:
    """The same tokens whoever drafts, and of grammars the same masks where nobody does; labels are worth the same."""
    on_cpu = run("scenario_answers", str(bundles["cpu"]))
    on_gpu = run("scenario_answers", str(bundles["gpu"]), kernels=emulated_kernels(bundles["gpu"]))
    for case, expected, found in zip(2 * CASES, on_cpu, on_gpu, strict=True):
        assert (found["ids"], found["finish"]) == (expected["ids"], expected["finish"]), case
        assert found["masks"] == expected["masks"], case
        if expected["worth"] is not None:
            # Sums over a label of what the two packings of the weights differ by.
            np.testing.assert_allclose(found["worth"], expected["worth"], rtol=1e-3, err_msg=str(case))
    masked = [answer for case, answer in zip(2 * CASES, on_gpu, strict=True) if "grammar" in case]
    assert all(answer["masks"] > 0 for answer in masked)  # what the model says of itself is refused somewhere
    assert on_gpu[len(CASES) :] == on_gpu[: len(CASES)]  # from the prefix cache the same bits


@pytest.mark.parametrize(
    ("fault", "words"), [("launch=2", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), ("sticky=2", "CUDA_ERROR_ILLEGAL_ADDRESS")]
)
def test_a_device_that_fails_while_it_draws_again(
    bundles: dict[str, Path], tmp_path: Path, fault: str, words: str
) -> None:
    """The first round draws what no order begins with, and the second launch is its draw under the mask."""
    control = tmp_path / "faults"
    control.write_text("")
    kernels = emulated_kernels(bundles["gpu"])
    said = run("scenario_fault", str(bundles["gpu"]), str(control), fault, kernels=kernels, control=control)
    assert all(words in message for message in said)
