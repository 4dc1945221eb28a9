"""bench/h200 without a GPU: what a run that fails, hangs or runs out of time leaves behind."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "bench"))
sys.path.append(str(ROOT / "bench/h200"))

from cores import client_cores
from journal import Report, Run
from shapes import LARGE, LAST_STEPS, STEPS
from tables import checks, headline

import report as bench_report
from ull.config import parse_config
from ull.launch import _overrides, _parser
from ull.placement import CoreClaims, place

# A step's process: writes each of its arguments as a line, "hang" and "die" apart.
PROCESS = """import os, sys, time
for argument in sys.argv[2:]:
    if argument == "hang": time.sleep(60)
    if argument == "die": os._exit(3)
    open(sys.argv[1], "a").write(argument + "\\n")
"""
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(seconds: float) -> Run:
        return Run(Report(tmp_path / "out/report.json"), seconds, [sys.executable, "-S", "-c", PROCESS])

    return start


def saved(run: Run) -> Any:
    return json.loads(run.report.path.read_text())


def test_every_finding_is_saved_before_the_next_one(start: Start) -> None:
    run = start(60)
    before = []

    def take(finding: dict[str, int]) -> None:
        before.append(saved(run) if run.report.path.exists() else None)
        run.report.found |= finding

    run.step("step", 1, ['{"a": 1}', '{"b": 2}'], take)
    assert before == [None, {"a": 1}]
    assert saved(run) == {"a": 1, "b": 2}
    assert [path.name for path in run.report.path.parent.iterdir()] == ["report.json"]


def test_a_step_that_fails_hangs_or_dies_keeps_what_it_found(start: Start) -> None:
    run = start(60)
    run.step("one", 1, ['{"a": 1}', '{"failure": "the device is lost"}', "die"], run.report.found.update)
    run.step("two", 0.75, ['{"b": 2}', "hang", '{"c": 3}'], run.report.found.update)
    run.step("three", 1, ["die"], run.report.found.update)
    failures = ["one: the device is lost", "two: did not end within 3 s", "three: ended with status 3"]
    assert saved(run) == {"a": 1, "b": 2, "failures": failures}


def test_what_has_no_time_left_is_cut(start: Start) -> None:
    run = start(3)
    run.step("long", 60, ['{"a": 1}'], run.report.found.update)
    run.step("short", 1, ['{"b": 2}', "hang"], run.report.found.update)
    assert saved(run) == {
        "b": 2,
        "cut": ["long: takes about 60 s of 3 s left", "short: stopped after 3 s, at the deadline"],
    }


def test_a_report_goes_on_where_it_was(start: Start) -> None:
    run = start(60)
    run.report.found["a"] = 1
    run.report.save()
    assert Report(run.report.path).found == {"a": 1}


def test_large_contexts_are_cut_before_the_points_of_the_issue() -> None:
    first = [(step.shape.arch, tuple(step.points)) for step in STEPS[:3]]
    assert first == [
        ("llama-3.1-8b", ((1, 128), (16, 128), (64, 128))),
        ("llama-3.2-1b", ((1, 128), (16, 128), (64, 128))),
        ("llama-3.3-70b", ((1, 128),)),
    ]
    assert LAST_STEPS[-1].shape is LARGE and not LAST_STEPS[-1].points
    points = [(step.shape.arch, *point) for step in STEPS for point in step.points]
    assert len(points) == len(set(points)) == 16 + 16 + 6


def test_a_part_of_the_points_is_checked() -> None:
    point = {"tree": 1, "context": 128, "median_ms": 2.0, "us_per_layer_above_floor": 4.0, "gap_us": {"p50": 1.0}}
    shapes = [
        {"arch": "llama-3.1-8b", "points": [point, {"tree": 64, "context": 128, "median_ms": 3.0}]},
        {"arch": "llama-3.2-1b", "points": []},
    ]
    found = {check.name: check.ok for check in checks(shapes, None)}
    assert found == {
        "llama-3.1-8b T=1": True,
        "llama-3.1-8b above the floor": True,
        "llama-3.1-8b round to round": True,
        "8B verify T=64": False,
    }
    assert headline([]) == "nothing was measured"


def test_each_thread_on_a_token_s_way_has_a_core_of_its_own() -> None:
    cores = client_cores(range(2, 18))
    options = _overrides(_parser().parse_args(["X.ull", *cores.arguments]))
    config = parse_config("", options)
    daemon = place(
        config.engine, config.io, automatic=True, threads=1, allowed=cores.daemon, claims=CoreClaims("test-")
    )
    assert (daemon.engine, daemon.io) == (17, 16)
    assert (cores.client, cores.client_libzmq, daemon.others) == ({15}, {14}, set(range(2, 14)))
    assert (config.engine.idle, config.io.idle) == ("spin", "spin")
    few = client_cores([0, 1, 2])
    assert few.daemon == few.client == few.client_libzmq == {0, 1, 2} and few.arguments == []


def test_the_commit_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("ULL_COMMIT", raising=False)
    assert bench_report.environment()["commit"] == "unknown"
    monkeypatch.setenv("ULL_COMMIT", "abc123")
    assert bench_report.environment()["commit"] == "abc123"
