"""Rounds with an FP8 scan of the lm_head on the driver double: the same tokens as with the lm_head."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
from device_bundles import build_with_stubs, emulated_kernels
from recording_driver import H200, RecordingDriver
from ull.bundle import HEAD_SCAN, Precision, open_bundle
from ull.gpu.program import Program
from ull.gpu.rounds import BURST_ROUNDS
from ull.log import Log
from ull_build.settings import Settings

ROOT = Path(__file__).parents[2]
CONTEXT = 512
PROMPT = [0, 306, 903, 10, 1617, 14, 2480, 294, 271, 323]  # engines/tiny: "def add(first, second):\n    return"
ANSWER = 8
WISHES: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.5, "seed": 6}]

pytestmark = pytest.mark.timeout(1800)  # the first test compiles every kernel for the emulator


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    options: dict[str, Any] = {"target": "sm_90a", "evaluate": False, "context": CONTEXT}
    precision = Precision(lm_head_scan=True)
    with pytest.MonkeyPatch.context() as patch:
        settings = Settings(ROOT / "engines/tiny", folder / "tiny.ull", "tiny", precision=precision, **options)
        return build_with_stubs(patch, folder / "kernels", settings)


def run(scenario: str, *arguments: object, kernels: str) -> Any:
    """Runs `scenario` under the double; what it printed as JSON. Fails with its traceback."""
    program = f"import test_gpu_head_scan as t; t.{scenario}(*{arguments!r})"
    environment = driver_double.environment(kernels, multiprocessors=4, launch_ms=1000)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def scenario_samplers(path: str) -> None:
    """PROMPT's answer by each sampler and wish, and how many rows the scan had to compute again for each token."""
    from ull.gpu.program import load

    program = load(open_bundle(path))
    rounds, place = program.replay(), len(PROMPT) - 1
    rounds.prefill(PROMPT[:-1])
    said: list[dict[str, Any]] = []
    for wish in WISHES:
        tokens = {}
        for sampler in ("full", "plain"):
            decoded = rounds.decode(PROMPT[-1], place, ANSWER, sampler=sampler, **wish)
            tokens[sampler] = [item.tokens[0].token for item in decoded]
        scanned, again = [], []
        for index, fed in enumerate([PROMPT[-1], *tokens["full"][:-1]]):
            result = rounds.wait(rounds.launch([fed], place + index, sampler="scan", **wish))
            scanned.append(result.tokens[0].token)
            again.append(listed(program))
        behind = rounds.decode(PROMPT[-1], place, ANSWER, sampler="scan", **wish)
        said.append({**tokens, "scan": scanned, "again": again, "continued": [item.tokens[0].token for item in behind]})
    program.close()
    print(json.dumps(said))


def listed(program: Any) -> int:
    """Rows that ull_head_rescore computed in the last round."""
    program.replay().drain()
    words = np.zeros(4, np.uint32)
    program._driver.copy_to_host(words.ctypes.data, program._arena.address("sampler"), words.nbytes, program._stream)
    program.replay().drain()
    return int(words[1])


def test_the_scan_says_what_the_lm_head_says(bundle: Path) -> None:
    """Each round alone and continued without the host, greedy and sampled; on real weights few rows may win."""
    said = run("scenario_samplers", str(bundle), kernels=emulated_kernels(bundle))
    for of_wish in said:
        assert of_wish["scan"] == of_wish["plain"] == of_wish["continued"] == of_wish["full"]
        assert all(0 < count < 4096 // 4 for count in of_wish["again"]), of_wish["again"]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_scanned_round_is_the_kernels_in_order(bundle: Path, persistent: bool) -> None:
    driver, opened = RecordingDriver(), open_bundle(bundle)
    program = Program(opened, Log(stream=io.StringIO()), persistent=persistent, driver=driver)
    try:
        plain, scan, burst = (
            driver.graphs[program.handover[name][sampler]]
            for name, sampler in (("singles", "plain"), ("singles", "scan"), ("bursts", "scan"))
        )
        arena = program._arena
        weights = arena.address("weights")
        offsets = {name: weights + entry.offset for name, entry in opened.tensors.items()}
        start = min(entry.offset for entry in opened.tensors.values())
    finally:
        program.close()
    names = [launch.kernel for launch in plain]
    ending = ["ull_head_scan_1", "ull_head_bounds", "ull_head_rescore"]
    assert [launch.kernel for launch in scan] == [*names[: names.index("ull_head_1")], *ending]
    assert [launch.kernel for launch in burst] == [launch.kernel for launch in scan] * BURST_ROUNDS
    head, rescore = scan[-3].params, scan[-1].params
    assert (
        head.weights == offsets[f"{HEAD_SCAN}.weight"] - start and head.scale == offsets[f"{HEAD_SCAN}.scale"] - start
    )
    assert (
        rescore.weights == offsets["lm_head.weight"] - start and rescore.bound == offsets[f"{HEAD_SCAN}.bound"] - start
    )
    assert head.output == rescore.logits and rescore.accept.results == plain[-1].params.accept.results


@pytest.mark.parametrize("persistent", [False, True])
def test_rounds_for_a_long_cache_differ_in_their_attentions_grid_alone(bundle: Path, persistent: bool) -> None:
    """Two multiprocessors have one block for each of two kv heads, and so from 256 positions on two splits a block."""
    driver = RecordingDriver(replace(H200, multiprocessors=2))
    program = Program(open_bundle(bundle), Log(stream=io.StringIO()), persistent=persistent, driver=driver)
    handover = program.handover
    program.close()
    if persistent:  # all layers are one kernel, of one block on each multiprocessor
        assert "wide" not in handover
        return
    wide = handover["wide"]
    assert (wide["from"], set(wide["graphs"])) == (256, {1, 2, 4, 8})
    assert set(wide["singles"]) == set(wide["bursts"]) == {"plain", "scan"}
    for kind in ("graphs", "singles", "bursts"):
        for name, handle in wide[kind].items():
            launches, narrow = driver.graphs[handle], driver.graphs[handover[kind][name]]
            for one, other in zip(launches, narrow, strict=True):
                blocks = 2 if one.kernel.startswith("ull_attention") else 1
                assert math.prod(one.grid) == blocks * math.prod(other.grid)
                assert (one.kernel, one.threads, one.shared_bytes) == (other.kernel, other.threads, other.shared_bytes)
                assert bytes(one.params) == bytes(other.params) and one.overlaps == other.overlaps


def test_the_bundle_holds_the_copy_and_its_bounds(bundle: Path) -> None:
    opened = open_bundle(bundle)
    sizes = {name: entry.nbytes for name, entry in opened.tensors.items()}
    assert 2 * sizes[f"{HEAD_SCAN}.weight"] == sizes["lm_head.weight"]
    assert sizes[f"{HEAD_SCAN}.bound"] == sizes[f"{HEAD_SCAN}.scale"] == 4 * opened.manifest.model.vocabulary
