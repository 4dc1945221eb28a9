"""bench/h200 without a GPU: what a run that fails, hangs or runs out of time leaves behind."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import ROOT, Spawn

sys.path.append(str(ROOT / "bench"))
sys.path.append(str(ROOT / "bench/h200"))

import measure
import numpy as np
import work
from cores import client_cores, placed_client
from floor import kv_bytes, prompt_operations
from journal import Report, Run
from rich.console import Console
from rounds import Prompts, Times
from run import Session, Step, begin, correctness, pack_traces
from shapes import CLIENT_ROUNDS, FIRST_STEPS, LARGE, LAST_STEPS, MIDDLE, STEPS, repeats
from steps import GROUPS, chosen
from tables import (
    checks,
    find,
    headline,
    print_checks,
    print_first_tokens,
    print_persistent,
    print_prompts,
    print_rounds,
    print_speculation,
    print_trees,
)
from work import FEWEST_FIRST_TOKENS, first_tokens_ms, prompt_row, row

import report as bench_report
from ull.bundle import Model, Rope
from ull.client.sync import Client
from ull.daemon.config import parse_config
from ull.daemon.main import _overrides, parser
from ull.daemon.placement import CoreClaims, place

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


def test_a_step_may_have_less_patience_than_others(start: Start) -> None:
    run = start(60)
    run.step("step", 0.5, ["hang"], run.report.found.update, patience=2.0)
    assert saved(run) == {"failures": ["step: did not end within 1 s"]}


def test_what_has_no_time_left_is_cut(start: Start) -> None:
    run = start(3)
    run.step("long", 60, ['{"a": 1}'], run.report.found.update)
    run.step("short", 1, ['{"b": 2}', "hang"], run.report.found.update)
    found = saved(run)
    assert found["b"] == 2
    # A second may have passed before either.
    cut = [re.sub(r"\b[23] s(?= left|, at)", "3 s", each) for each in found["cut"]]
    assert cut == ["long: takes about 60 s of 3 s left", "short: stopped after 3 s, at the deadline"]


def test_a_report_goes_on_where_it_was(start: Start) -> None:
    run = start(60)
    run.report.found["a"] = 1
    run.report.save()
    assert Report(run.report.path).found == {"a": 1}


def test_large_contexts_are_cut_before_the_points_of_the_issue() -> None:
    first = [(step.shape.arch, tuple(step.points)) for step in FIRST_STEPS if step.kind == "rounds"]
    assert first == [
        ("llama-3.1-8b", ((1, 128), (16, 128), (64, 128))),
        ("llama-3.2-1b", ((1, 128), (16, 128), (64, 128))),
        ("llama-3.3-70b", ((1, 128),)),
    ]
    assert LAST_STEPS[-1].shape is LARGE and not LAST_STEPS[-1].points
    rounds = [step for step in (*FIRST_STEPS, *STEPS, *LAST_STEPS) if step.kind == "rounds"]
    points = [(step.shape.arch, *point) for step in rounds for point in step.points]
    assert len(points) == len(set(points)) == 19 + 16 + 6


def test_prompts_of_8b_are_measured_before_anything_else_but_its_rounds() -> None:
    assert FIRST_STEPS[1].shape is MIDDLE and FIRST_STEPS[1].prompts == (128, 1024, 2048, 8192)
    assert [step.kind for step in FIRST_STEPS] == ["rounds", "prefill", "rounds", "rounds", "trees-by-warps"]
    assert [repeats(tokens) for tokens in (128, 1024, 2048, 8192)] == [20, 16, 8, 3]
    # 12 s to load; 21 x 2, 17 x 16, 9 x 32 and 4 x 128 parts of 2.24 ms, each taken for six times that long, and of
    # turns twice 21 x 2 and 21 x 4
    assert FIRST_STEPS[1].estimate_s == pytest.approx(12 + (42 + 272 + 288 + 512 + 168) * 4 * 2.24e-3 * 1.5)


REPLAYED = {
    "name": "code",
    "source": "HumanEval",
    "must_ms": 0.75,
    "goal_ms": 0.6,
    "after_long": 4.91,
    "tokens_per_round": 4.87,
    "drafted_per_round": 6.95,
    "ms_per_token": 0.8,
    "ms_per_token_without": 2.4,
}


def test_a_part_of_the_points_is_checked() -> None:
    point = {"tree": 1, "context": 128, "median_ms": 2.0, "us_per_layer_above_floor": 4.0, "gap_us": {"p50": 1.0}}
    wide = {"tree": 64, "context": 128, "median_ms": 3.0}
    shapes = [
        {"arch": "llama-3.1-8b", "points": [point, wide], "speculation": [REPLAYED]},
        {"arch": "llama-3.2-1b", "points": [], "prefill": [{"tokens": 1024, "widest": 512, "median_ms": 12.0}]},
    ]
    found = {check.name: check.ok for check in checks(shapes, None)}
    unlimited = next(
        check for check in checks(shapes, None) if check.name == "llama-3.2-1b prefill of 1024 in parts of 512"
    )
    assert (unlimited.value, unlimited.unit, unlimited.must, unlimited.goal) == (12.0, "ms", None, None)
    assert found == {
        "llama-3.1-8b T=1": True,
        "llama-3.1-8b above the floor": True,
        "llama-3.1-8b round to round": True,
        "8B verify T=64": False,
        "llama-3.1-8b with EAGLE, acceptance of code replayed": False,
        "llama-3.2-1b prefill of 1024 in parts of 512": True,
    }
    assert headline([]) == "nothing was measured"


def test_what_the_tables_rows_relate_is_stored() -> None:
    one = {"tree": 1, "context": 128, "median_ms": 2.0, "us_per_layer_above_floor": 4.0, "gap_us": {"p50": 1.0}}
    warps = [{**one, "median_ms": 2.5}, {**one, "tree": 16, "median_ms": 3.0}, {**one, "tree": 64, "median_ms": 3.0}]
    drafts = {"heads": 4, "busy_us": {"p50": 500.0}}
    one_kernel = [{**one, "context": 8192, "median_ms": 3.0}, {**one, "median_ms": 2.2}]
    shape = {"arch": "llama-3.1-8b", "points": [one], "by_warps": warps, "persistent": one_kernel, "drafts": drafts}
    found = {check.name: (check.value, check.must) for check in checks([shape], None) if check.unit.startswith("x of")}
    assert found == {
        "llama-3.1-8b verify T=16, by each warp alone": (pytest.approx(1.2), 1.12),
        "llama-3.1-8b verify T=64, by each warp alone": (pytest.approx(1.2), 1.35),
        "llama-3.1-8b T=1, one kernel for all layers": (pytest.approx(1.1), None),
        "llama-3.1-8b, 4 Medusa heads": (pytest.approx(0.25), None),
    }


def test_each_thread_on_a_token_s_way_has_a_core_of_its_own(tmp_path: Path) -> None:
    cores = client_cores(range(2, 18), tmp_path)
    options = _overrides(parser().parse_args(["X.ull", *cores.arguments]))
    config = parse_config("", options)
    daemon = place(
        config.engine, config.io, automatic=True, threads=1, allowed=cores.daemon, claims=CoreClaims("test-")
    )
    assert (daemon.engine, daemon.io) == (17, 16)
    assert (cores.client, cores.client_libzmq, daemon.others) == ({15}, {14}, set(range(2, 14)))
    assert (config.engine.idle, config.io.idle) == ("spin", "spin")
    few = client_cores([0, 1, 2], tmp_path)
    assert few.daemon == few.client == few.client_libzmq == {0, 1, 2} and few.arguments == []


def test_no_two_of_them_are_on_one_physical_core(tmp_path: Path) -> None:
    for cpu in range(16):
        told = tmp_path / f"cpu{cpu}/topology/thread_siblings_list"
        told.parent.mkdir(parents=True)
        told.write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    cores = client_cores(range(16), tmp_path)
    assert cores.arguments[:2] == ["--cores", "14,12"]
    assert (cores.client, cores.client_libzmq) == ({10}, {8})
    assert cores.daemon == {14, 12, *range(8)}  # the other CPUs of these four cores idle
    assert client_cores(range(8), tmp_path).arguments == []  # four cores are too few
    assert client_cores([1, 3, 5, 7, 9], tmp_path).arguments[:2] == ["--cores", "9,7"]


def test_the_commit_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("ULL_COMMIT", raising=False)
    assert bench_report.environment()["commit"] == "unknown"
    monkeypatch.setenv("ULL_COMMIT", "abc123")
    assert bench_report.environment()["commit"] == "abc123"


# ---- what is measured against ---------------------------------------------------------------------------------------


def model(windows: list[int]) -> Model:
    """Of 8 heads of 16 on 2 of keys and values, 64 wide, 96 inside."""
    return Model(
        architecture="llama",
        hidden=64,
        layers=len(windows),
        heads=8,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        vocabulary=256,
        tokenizer_vocabulary=256,
        context=4096,
        rms_epsilon=1e-5,
        tied_embeddings=False,
        qk_norm=False,
        rope=Rope(theta=10000.0),
        windows=windows,
    )


@pytest.mark.parametrize(
    ("windows", "kv", "context", "nbytes"),
    [
        ([0, 0], "bf16", 0, 0),
        ([0, 0], "bf16", 100, 25_600),  # 2 layers x keys and values of 2 heads of 16 x 2 bytes x 100 tokens
        ([0, 0], "fp8", 100, 12_800),
        ([0, 64], "bf16", 100, 20_992),  # 128 bytes x (100 + 64) tokens
        ([0, 64], "bf16", 50, 12_800),  # a window that is not full yet
        ([32, 64], "fp8", 4096, 6_144),  # 64 bytes x (32 + 64) tokens
    ],
)
def test_the_cache_is_a_part_of_the_floor(windows: list[int], kv: str, context: int, nbytes: int) -> None:
    assert kv_bytes(model(windows), kv, context) == nbytes


def test_an_8b_model_reads_a_gigabyte_of_cache_at_8192_tokens() -> None:
    from ull_build.shapes import shape_model

    assert kv_bytes(shape_model("llama-3.1-8b"), "bf16", 8192) == 2 * 32 * 8 * 128 * 2 * 8192 == 1_073_741_824


def test_the_operations_of_a_prompt() -> None:
    # A layer's weights: (128 + 64) x 64 for q, k and v, 128 x 64 behind attention, 3 x 64 x 96: 38,912 of two
    # operations a token. Attention: 4 x 128 a token that is seen: 1 + 2 + 3, and 1 + 2 + 2 in a window of two.
    assert prompt_operations(model([0]), 3) == 2 * 3 * 38_912 + 512 * 6 == 236_544
    assert prompt_operations(model([2]), 3) == 2 * 3 * 38_912 + 512 * 5
    from ull_build.shapes import shape_model

    a_token = prompt_operations(shape_model("llama-3.1-8b"), 1)
    assert a_token == 13_958_643_712 + 32 * 4 * 4096


def times(period: list[int]) -> Times:
    values = np.array(period, dtype=np.int64)
    return Times(values, values // 100, np.append(values, values[-1]) - values[0] // 100, 2e6)


def test_a_point_says_what_weights_and_what_cache_it_reads() -> None:
    found = row(times([2_000_000, 2_100_000, 1_900_000]), 6_000_000_000, 2_000_000_000, 32, bandwidth=4e12)
    assert (found["weight_bytes"], found["kv_bytes"]) == (6_000_000_000, 2_000_000_000)
    assert found["floor_ms"] == pytest.approx(2.0) and found["median_ms"] == pytest.approx(2.0)
    assert found["share_of_read_bandwidth"] == pytest.approx(1.0)
    assert found["us_per_layer_above_floor"] == pytest.approx(0.0)
    assert found["mean_ms_by_events"] == pytest.approx(2.0)


def test_a_prompts_share_of_the_products_rate_is_checked_where_both_are_known() -> None:
    prompts = [{"tokens": tokens, "widest": widest, "median_ms": 40.0, "tflop_per_s": 500.0} for tokens, widest in WAYS]
    shapes = [{"arch": "llama-3.1-8b", "points": [], "prefill": prompts}]
    rate = {"products": {"operations_per_s": 8e14}}
    found = [check for check in checks(shapes, None, rate) if check.unit == "x"]
    assert [(check.value, check.ok, check.at_least) for check in found] == [(pytest.approx(0.625), True, True)]
    assert not [check for check in checks(shapes, None, {}) + checks(shapes, None) if check.unit == "x"]


WAYS = ((1024, 512), (2048, 64), (2048, 512))  # prompts, and the most of their tokens that are read at once


def test_first_tokens_are_a_clients_and_held_against_8bs_limits(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "repeats", lambda tokens: 3)
    daemon = spawn(script={"tokens": [65]})
    with Client(daemon.url) as client:
        (seen,) = first_tokens_ms(client, 20, 100).values()
        assert len(seen) == FEWEST_FIRST_TOKENS == 7 and min(seen) > 0
        assert client.stats().requests["accepted"] == 8, "the first does not count"
    found = {"arch": "llama-3.1-8b", "inter_token_us": {"p99.9": 1.0, "p50": 1.0}}
    found["first_token_ms"] = {"128": {"p50": 7.0}, "1024": {"p50": 31.0}, "64": {"p50": 9.0}}
    verdicts = {check.name: check.ok for check in checks([], found)}
    assert verdicts["client's first token behind 128"] and not verdicts["client's first token behind 1024"]
    assert {check.must for check in checks([], found) if check.name.endswith(" 64")} == {None}


def test_percentiles_that_few_samples_say_nothing_of_are_left_out() -> None:
    names = {
        count: set(work.spread([1.0] * count)) - {"p50", "p90", "max", "samples"} for count in (7, 99, 100, 999, 1000)
    }
    assert names == {7: set(), 99: set(), 100: {"p99"}, 999: {"p99"}, 1000: {"p99", "p99.9"}}


@pytest.fixture
def scripted(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine is a script, whatever it is of."""
    monkeypatch.setenv("ULL_TEST_SCRIPT", json.dumps({"tokens": [65], "context": 2048}))
    command = [sys.executable, str(ROOT / "tests/rigs/daemons/scripted_daemon.py")]
    monkeypatch.setattr(work, "build", lambda arch, variant="": tiny_bundle)
    monkeypatch.setattr(work, "placed_client", functools.partial(placed_client, command=command))


@pytest.mark.usefixtures("scripted")
def test_a_clients_first_tokens_come_before_its_gaps_and_all_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    assert work.CLIENT_PROMPTS == (128, 1024, 1060, 8192)
    monkeypatch.setattr(work, "CLIENT_PROMPTS", (128, 1060))
    asked, generate = list[int](), Client.generate

    def noted(client: Client, prompt: Any, **options: Any) -> Any:
        asked.append(options["max_tokens"])
        return generate(client, prompt, **options)

    monkeypatch.setattr(Client, "generate", noted)
    found = [finding["client"] for finding in work.time_client("llama-3.1-8b", 500)]
    assert os.sched_getaffinity(0) == allowed
    assert [list(one.get("first_token_ms", ["gaps"])) for one in found] == [["128"], ["1060"], ["gaps"]]
    assert all(one["placement"]["adaptive"] is False and "computing" in one["placement"] for one in found)
    assert found[-1]["inter_token_us"]["samples"] == 500
    assert set(asked) == {1, 401}, "a cache that grows makes rounds longer"
    report = Report(tmp_path / "report.json")
    measurement = measure.Measurement(Run(report, 1e6, []), ["llama-3.1-8b"], ())
    for one in found[:-1]:
        measurement._take("", {"client": one})
        assert not [check for check in checks([], report.found["client"]) if "ITL" in check.name]
    measurement._take("", {"client": found[-1]})
    kept = report.found["client"]
    assert list(kept["first_token_ms"]) == ["128", "1060"] and kept["inter_token_us"]["samples"] == 500
    limits = {check.name.split()[-1]: check.must for check in checks([], kept) if "first token" in check.name}
    assert limits == {"128": 8.0, "1060": None}
    small = {"arch": "llama-3.2-1b", "inter_token_us": {}}
    measurement._take("", {"client": small})
    assert report.found["client"] == kept, "the bars are the larger one's"
    report.found["client"] = small
    measurement._take("", {"client": found[0]})
    assert report.found["client"] == found[0], "nothing of another model"


@pytest.mark.usefixtures("scripted")
def test_first_tokens_of_other_engines_are_a_client_s_in_the_same_place() -> None:
    (fast,) = (finding["first_token"] for finding in work.time_first_tokens("llama-3.1-8b", "fast", [128]))
    client = next(work.time_client("llama-3.1-8b", 1))["client"]
    assert fast["placement"] == client["placement"] and (fast["variant"], fast["samples"]) == ("fast", 20)
    assert set(fast) >= {"p50", "max"} and "p99" not in fast


def test_bundles_of_first_tokens_are_built_before(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str]] = []
    monkeypatch.setattr(work, "build", lambda arch, variant="": built.append((arch, variant)))
    list(work.build_bundles(["llama-3.1-8b", "llama-3.3-70b"]))
    assert len(built) == len(set(built)) == 6 and ("llama-3.3-70b", "fast") in built


def test_a_timer_that_does_not_move_ends_no_run() -> None:
    still = Times(np.array([32, 32]), np.array([32, 32]), np.array([32, 32, 32]), 1.0)
    assert still.timer_step_ns is None
    assert Times(np.array([64, 96]), np.array([32, 32]), np.array([128, 32, 32]), 1.0).timer_step_ns == 32
    assert Times(np.array([]), np.array([]), np.array([7]), 1.0).timer_step_ns is None


def test_the_figures_of_a_prompt() -> None:
    prompts = Prompts(np.array([50.0, 52.0, 51.0]), np.array([50.5, 52.5, 51.5]))
    found = prompt_row(prompts, 1024, nbytes=102_000_000_000, operations=14_280_000_000_000, bandwidth=4e12)
    assert (found["median_ms"], found["slowest_ms"], found["median_ms_seen_by_host"]) == (51.0, 52.0, 51.5)
    assert found["tokens_per_s"] == pytest.approx(1024 / 0.051)
    assert found["floor_ms"] == pytest.approx(25.5) and found["share_of_read_bandwidth"] == pytest.approx(0.5)
    assert found["tflop_per_s"] == pytest.approx(280.0)


def test_the_tables_take_any_part_of_a_report() -> None:
    point = {"tree": 1, "context": 128, **row(times([2_000_000, 2_000_000]), 7_000_000_000, 16_777_216, 32, 4e12)}
    still = {**point, "context": 8192, "timer_step_ns": None}
    prompt = {"widest": 512, **prompt_row(Prompts(np.array([51.0]), np.array([51.5])), 1024, 10**11, 10**13, 4e12)}
    drawn = {**prompt, "draws": True, "median_ms": 52.5}
    turn = {**prompt, "tokens": 128, "behind": 8192, "median_ms": 6.875}
    compared = {"tokens": 64, "distinct": 60, "same": False}
    shape = {
        "arch": "llama-3.1-8b",
        "points": [point, still],
        "prefill": [turn, drawn, prompt],
        "persistent_compared": compared,
    }
    console = Console(width=132, record=True, quiet=False)
    with console.capture() as said:
        print_rounds(console, {"shapes": [shape]})
        print_prompts(console, [shape])
        print_persistent(console, [shape])
        print_checks(console, checks([shape], None))
    text = said.get()
    for words in ("weights MB", "7000", "KV MB", " 17 ", "1024", "51.000", "DIFFERENT", "prefill of 1024", "two CUDA"):
        assert words in text, words
    assert "prefill of 1024 in parts of 512, and a draw" in text and text.index("51.000") < text.index("52.500")
    assert "prefill of 128 behind 8192 in parts of 512" in text and text.index("52.500") < text.index("6.875")
    with console.capture() as said:
        print_speculation(console, [{**shape, "speculation": [REPLAYED]}])
    for words in ("acceptance of published heads replayed", "code (HumanEval)", "4.87", "4.91", "0.8000", "3.00"):
        assert words in said.get(), words
    first = {"variant": "fast", "drafter": "none", "tokens": 1024, "p50": 19.25, "max": 34.5, "samples": 16}
    with console.capture() as said:
        print_first_tokens(console, [{**shape, "first_token": [first]}])
    assert "19.250" in said.get() and "34.500" in said.get()
    held = [{"arch": "llama-3.1-8b", "points": [], "first_token": [first, {**first, "p50": 21.0, "tokens": 128}]}]
    assert [(check.must, check.ok) for check in checks(held, None)] == [(20.0, True), (7.0, False)]
    trees = [point, {**point, "tree": 64, "median_ms": 3.0}]
    warps = [point, {**point, "tree": 64, "median_ms": 4.0}, {**point, "tree": 16}]
    with console.capture() as said:
        print_trees(console, [{**shape, "points": trees, "by_warps": warps}])
    rows = [line.split() for line in said.get().splitlines() if "llama" in line]
    ways = [[cell for cell in row if cell != "\u2502"] for row in rows]
    assert [(way[1], way[3], way[4], way[6]) for way in ways] == [
        ("64", "warpgroups", "3.0000", "1.500"),
        ("64", "warps", "4.0000", "2.000"),
        ("16", "warps", "2.0000", "1.000"),  # by warpgroups it was not measured
    ]
    with console.capture() as said:
        print_trees(console, [shape])
        print_prompts(console, [{"arch": "llama-3.1-8b", "points": []}])
        print_speculation(console, [{"arch": "llama-3.1-8b", "points": []}])
        print_first_tokens(console, [{"arch": "llama-3.1-8b", "points": []}])
    assert not said.get()


class BothWays:
    """A timer whose rounds of one token have an attention for a long cache from 4,096 positions on, twice as fast."""

    def may_be_wide(self, tree: int, position: int) -> bool:
        return tree == 1 and position >= 4096

    def time_rounds(self, tree: int, position: int, rounds: int, wide: bool = False) -> Times:
        return times([2_000_000 if wide else 4_000_000] * rounds)


def test_behind_a_long_cache_points_are_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "weight_bytes", lambda bundle: 7_000_000_000)
    monkeypatch.setattr(work, "kv_bytes_of", lambda bundle, context: context)
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(model=SimpleNamespace(layers=32)))
    timer: Any = BothWays()
    found = list(work.measured(timer, bundle, [(1, 128), (1, 8192), (16, 8192)], 3, 4e12))
    assert [(one["tree"], one["context"], one.get("wide", False)) for one in found] == [
        *((1, 128, False), (1, 8192, False), (1, 8192, True), (16, 8192, False))
    ]
    report = Report(tmp_path / "report.json")
    measurement = measure.Measurement(Run(report, 1e6, []), ["llama-3.1-8b"], ())
    for _ in range(2):
        for point in found:
            measurement._take("llama-3.1-8b", {"points": point})
    kept = report.found["shapes"][0]["points"]
    assert len(kept) == 4
    narrow = find(kept[::-1], 1, 8192)
    assert narrow is not None and narrow["median_ms"] == 4.0
    console = Console(width=240)
    with console.capture() as said:
        print_rounds(console, {"shapes": [{"arch": "llama-3.1-8b", "points": kept}]})
    assert "1, wide" in said.get()


def test_every_prompt_and_every_turn_stays_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = SimpleNamespace(manifest=SimpleNamespace(model=None))
    timer = SimpleNamespace(
        time_prompt=lambda *_, **__: Prompts(np.array([50.0]), np.array([51.0])), drain=lambda: None
    )
    doubles: dict[str, Any] = {
        "build": lambda *_: tmp_path,
        "open_bundle": lambda path: bundle,
        "RoundTimer": lambda program: timer,
        "loaded": lambda bundle: contextlib.nullcontext(SimpleNamespace(replay=lambda: None)),
        "parts_of": lambda *_: [],
        "prompt_bytes": lambda *_: 10**9,
        "prompt_operations": lambda *_: 10**12,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(work, name, double)
    report = Report(tmp_path / "report.json")
    measurement = measure.Measurement(Run(report, 1e6, []), ["llama-3.1-8b"], ())
    found = list(work.time_prompts("llama-3.1-8b", FIRST_STEPS[1].prompts, 4e12))
    for _ in range(2):
        for finding in found:
            measurement._take("llama-3.1-8b", finding)
    assert len(report.found["shapes"][0]["prefill"]) == len(found) == (4 + 3) * (3 + 2)


def test_a_floor_says_where_its_bandwidth_is_from(tmp_path: Path) -> None:
    point = {"tree": 1, "context": 128, **row(times([2_000_000, 2_000_000]), 7_000_000_000, 16_777_216, 32, 4e12)}
    report, console = Report(tmp_path / "report.json"), Console(width=240)
    measurement = measure.Measurement(Run(report, 1e6, []), ["llama-3.1-8b"], ())
    said = []
    for measured_before in ({}, {"bulk copies": 4.1e12, "16-byte loads": 4.0e12}):
        report.found["read_bandwidth"] = measured_before
        measurement._take("llama-3.1-8b", {"points": dict(point)})
        measurement._take("llama-3.1-8b", {"drafts": {"floor_us": 1.0}})
        with console.capture() as text:
            print_rounds(console, report.found)
        shape = report.found["shapes"][0]
        said.append((shape["points"][0]["floor_from"], shape["drafts"]["floor_from"], "datasheet" in text.get()))
    assert said == [("datasheet", "datasheet", True), ("bulk copies", "bulk copies", False)]


# ---- the steps ------------------------------------------------------------------------------------------------------


def test_steps_are_chosen_by_name_and_by_group() -> None:
    assert chosen("") == GROUPS and tuple(GROUPS) == ("correctness", "figures")
    assert chosen(" correctness ") == {"correctness": GROUPS["correctness"]}
    assert chosen("prefill,kernels, pytorch") == {"correctness": ("kernels", "pytorch"), "figures": ("prefill",)}
    assert chosen("figures,client") == {"figures": GROUPS["figures"]}
    with pytest.raises(
        ValueError, match=r"no step prefil, x; there are correctness \(build, early-reads, .*figures \("
    ):
        chosen("prefil,kernels,x")


def test_an_unknown_step_is_refused_at_once(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "bench/h200/run.sh"), str(tmp_path / "report.json")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "ULL_H200_STEPS": "correctness,tables"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "there is no step tables" in result.stdout
    assert not (tmp_path / "report.json").exists()


def step(name: str, code: str, needs_s: float = 0.0, limit_s: float = 60.0, **more: Any) -> Step:
    return Step(name, needs_s, limit_s, lambda limit_s: [sys.executable, "-S", "-c", code, str(limit_s)], **more)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    (tmp_path / "out").mkdir()
    return Session(tmp_path / "cache/report.json", tmp_path / "out/report.json", 60.0)


def reported(session: Session) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(session._copy.read_text())
    assert found == json.loads(session.report.read_text())
    return found


def test_a_step_that_fails_or_hangs_costs_itself_alone(session: Session) -> None:
    hang = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    )
    assert not session.do(step("one", "raise SystemExit(3)"))
    assert not session.do(step("two", hang, limit_s=1.0))
    assert not session.do(step("three", "raise SystemExit(75)"))
    assert not session.do(step("four", "", lacks="there is no four here"))
    assert not session.do(step("five", "", needs_s=100.0))
    assert session.do(step("six", "import os; assert os.environ['SIX'] == '6'", environment={"SIX": "6"}))
    found = reported(session)
    said = {name: what["status"] for name, what in found["steps"].items()}
    assert said == {
        "one": "status 3",
        "two": "did not end in time",
        "three": "refused",
        "four": "skipped",
        "five": "cut",
        "six": "ok",
    }
    assert found["failures"] == ["one: ended with status 3", "two: did not end within 1 s"]
    assert re.fullmatch(r"five: needs 100 s of \d+ s left", found["cut"][0]) and len(found["cut"]) == 1
    assert found["skipped"] == ["three: this machine does not let it run", "four: there is no four here"]
    assert session.failed


def test_steps_know_how_long_they_may_take(session: Session) -> None:
    assert session.do(step("short", "import sys; assert 0 < float(sys.argv[1]) <= 7", limit_s=7.0))
    assert session.do(step("long", "import sys; assert 0 < float(sys.argv[1]) <= 60", limit_s=1000.0))


def test_a_step_is_cut_at_the_deadline(tmp_path: Path) -> None:
    session = Session(tmp_path / "report.json", tmp_path / "report.json", 1.0)
    assert not session.do(step("long", "import time; time.sleep(60)"))
    found = reported(session)
    assert "failures" not in found and found["cut"][0].startswith("long: stopped after ") and session.failed


def test_what_a_step_writes_is_in_both_reports(session: Session) -> None:
    """A second command goes on with the first one's report, although it writes elsewhere."""
    write = "import json, pathlib, time; p = pathlib.Path({path!r}); d = json.loads(p.read_text()); d[{key!r}] = 1; "
    write += "p.write_text(json.dumps(d))"
    assert session.do(step("one", write.format(path=str(session.report), key="found by one")))
    session.do(step("two", "raise SystemExit(3)"))
    other = session.report.parent.parent / "elsewhere"
    other.mkdir()
    second = Session(session.report, other / "report.json", 60.0)
    assert second.do(step("two", ""))
    found = reported(second)
    assert found["found by one"] == 1 and set(found["steps"]) == {"one", "two"}
    assert found["failures"] == [] and not second.failed  # it has run again


NESTED = """import sys
sys.path.insert(0, {folder!r})
import signal
from pathlib import Path
from journal import Report, Run
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
child = "import os, sys, time; open({pid!r}, 'w').write(str(os.getpid())); time.sleep(600)"
Run(Report(Path({report!r})), 600, [sys.executable, "-S", "-c", child]).step("inner", 100, [], print)
"""


def test_a_step_that_is_ended_ends_the_steps_of_its_own(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that spins on the device would slow down everything after it."""
    pid = tmp_path / "pid"
    code = NESTED.format(folder=str(ROOT / "bench/h200"), pid=str(pid), report=str(tmp_path / "inner.json"))

    def end() -> None:
        if pid.exists() and pid.read_text():
            raise TimeoutError

    monkeypatch.setattr(session, "copy_report", end)
    with pytest.raises(TimeoutError):
        session.do(Step("outer", 0.0, 60.0, lambda limit_s: [sys.executable, "-c", code]))
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_report_is_copied_while_a_step_runs(session: Session) -> None:
    """What ends a command from outside gives no notice."""
    wait = f"import pathlib, time; p = pathlib.Path({str(session._copy)!r})\n"
    wait += "for _ in range(600):\n  if p.exists(): break\n  time.sleep(0.05)\nelse: raise SystemExit(1)"
    assert session.do(step("waits", wait))


def test_the_tests_that_steps_run_are_there(tmp_path: Path) -> None:
    commands = [step.command(60.0) for step in correctness(tmp_path / "report.json")]
    named = {word for command in commands for word in command if word.startswith("tests/")}
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_a_kernel_that_hangs_costs_less_than_its_step(tmp_path: Path) -> None:
    steps = {one.name: one for one in correctness(tmp_path / "report.json")}
    assert set(steps) == set(GROUPS["correctness"]) - {"build"}
    for name, limit_s in (("early-reads", 45), ("kernels", 140)):
        step = steps[name]
        assert step.limit_s == limit_s and step.environment == {"ULL_KERNELS": "device"}
    assert steps["early-reads"].command(45)[-1:] == ["tests/h200/test_dependent_launch.py"]
    command = steps["kernels"].command(140)
    assert "--timeout=75" in command and "--session-timeout=125" in command
    assert "tests/kernels/test_kernel_plain.py" in command and "tests/h200/test_dependent_launch.py" not in command
    assert "--timeout=120" in steps["engine"].command(140)


def test_traces_come_back_as_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    for folder in (cache, out):
        folder.mkdir()
    monkeypatch.setattr("run.CACHE", cache)
    pack_traces(out)
    assert not list(out.iterdir()), "there are none"
    for name in (
        "trace-x-16.json.gz",
        "trace-x-16.png",
        "trace-x-512-chunk.json.gz",
        "trace-x-512-chunk.png",
        "report.json",
    ):
        (cache / name).write_text(name)
    pack_traces(out)
    found = {}
    for path in out.iterdir():
        with tarfile.open(path) as packed:
            found[path.name] = packed.getnames()
    assert found == {  # beside report.json, run.log and build.log
        "traces.tar": ["trace-x-16.json.gz", "trace-x-16.png"],
        "trace-chunk.tar": ["trace-x-512-chunk.json.gz", "trace-x-512-chunk.png"],
    }


def test_a_report_of_other_sources_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    begin(path, "one")
    report = Report(path)
    report.found["a"] = 1
    report.save()
    begin(path, "one")
    assert Report(path).found == {"sources": "one", "a": 1}
    begin(path, "two")
    assert Report(path).found == {"sources": "two"}
    assert Report(tmp_path / "report.old.json").found == {"sources": "one", "a": 1}


# ---- what measure.py runs -------------------------------------------------------------------------------------------

# A step's process of measure.py: one finding of its kind.
WORK = """import json, sys
work, (arch, *rest) = sys.argv[3], json.loads(sys.argv[5]) or [""]
point = {"tree": 1, "median_ms": 1.0, "floor_ms": 0.5, "gap_us": {"p50": 1.0}}
findings = {
    "time_reading": [{"gpu": {"name": "double"}}, {"read_bandwidth": {"bulk copies": 4e12}}],
    "build_bundles": [{"bundles_s": 1.0}],
    "compare_persistent": [{"persistent_compared": {"same": True}}],
    "time_persistent": [{"persistent": {**point, "context": 128}}],
    "time_client": [{"client": {"arch": arch}}],
    "time_speculation": [{"speculation": {"name": name}} for name in ("code", "chat")],
    "time_ahead": [{"ahead": {"setting": "none", "persistent": False, "context": 128}}],
}
if work == "time_points":
    findings[work] = [{"about": {"layers": 2}}] + [{"points": {**point, "tree": t, "context": c}} for t, c in rest[0]]
if work == "time_trees_by_warps":
    findings[work] = [{"by_warps": {**point, "tree": t, "context": c}} for t, c in rest[0]]
if work == "time_prompts":
    findings[work] = [{"prefill": {"tokens": n, "widest": 512, "median_ms": 1.0, "floor_ms": 0.5}} for n in rest[0]]
if work == "time_first_tokens":
    times = {"variant": rest[0] or "exact", "drafter": "none", "p50": 1.0, "p99": 2.0, "samples": 20}
    findings[work] = [{"first_token": {"tokens": n, **times}} for n in rest[1]]
with open(sys.argv[1], "a") as file:
    for finding in findings[work]:
        print(json.dumps(finding), file=file)
"""
PROBES = """import json, pathlib, sys
assert sys.argv[1] == "--json"
path = pathlib.Path(sys.argv[2])
path.write_text(json.dumps({**json.loads(path.read_text()), "probes": {"empty": 1.5}}))
"""


def measured(run: Run, steps: set[str]) -> list[str]:
    """The names of what a run of these steps does, in order."""
    names: list[str] = []
    begin_step = run._begin

    def noted(name: str, estimate_s: float) -> float | None:
        names.append(name)
        return begin_step(name, estimate_s)

    run._begin = noted  # type: ignore[method-assign]
    measure.Measurement(run, ["llama-3.1-8b", "llama-3.2-1b", "llama-3.3-70b"], steps).measure()
    run.report.save()
    return names


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Run]:
    (tmp_path / "probes.py").write_text(PROBES)
    (tmp_path / "trace.py").write_text("")
    monkeypatch.setattr(measure, "HERE", tmp_path)
    return lambda: Run(Report(tmp_path / "report.json"), 1e6, [sys.executable, "-S", "-c", WORK])


def test_figures_come_in_the_order_of_their_worth(figures: Callable[[], Run]) -> None:
    run = figures()
    names = measured(run, set(GROUPS["figures"]))
    assert names[:18] == [
        "bandwidth",
        "bundles",
        "llama-3.1-8b, T = 1/16/64 at 128",
        "llama-3.1-8b, prefill of 128/1024/2048/8192 tokens",
        "llama-3.2-1b, T = 1/16/64 at 128",
        "llama-3.3-70b, T = 1 at 128",
        "llama-3.1-8b, T = 1/16/32/64 at 128/8192, by each warp alone",
        "client, llama-3.1-8b",
        "llama-3.1-8b, a client's first tokens, fast",
        "llama-3.1-8b, a client's first tokens, eagle",
        "llama-3.3-70b, a client's first tokens, exact",
        "llama-3.3-70b, a client's first tokens, fast",
        "probes",
        "llama-3.1-8b, an EAGLE head's acceptance replayed",
        "llama-3.1-8b, one kernel for all layers",
        "llama-3.1-8b, T = 2/4/8/32 at 128",  # and Medusa heads
        "trace",  # and no profile: there is no such file
        "llama-3.1-8b, weights ahead",
    ]
    assert "32000" not in " ".join(names[:18]) and STEPS[-1].medusa
    assert names[-1] == "llama-3.3-70b, one kernel for all layers"
    found = saved(run)
    assert found["probes"] == {"empty": 1.5} and found["failures"] == found["cut"] == []
    shapes = {shape["arch"]: shape for shape in found["shapes"]}
    assert len(shapes["llama-3.1-8b"]["points"]) == 19 and shapes["llama-3.3-70b"]["layers"] == 2
    assert [point["tree"] for point in shapes["llama-3.1-8b"]["by_warps"]] == [1, 16, 32, 64, 1, 16, 64]
    assert [prompt["tokens"] for prompt in shapes["llama-3.1-8b"]["prefill"]] == [128, 1024, 2048, 8192]
    assert [text["name"] for text in shapes["llama-3.1-8b"]["speculation"]] == ["code", "chat"]
    firsts = [(first["variant"], first["tokens"]) for first in shapes["llama-3.1-8b"]["first_token"]]
    assert firsts == [(variant, tokens) for variant in ("fast", "eagle") for tokens in (128, 1024, 8192)]
    assert [first["variant"] for first in shapes["llama-3.3-70b"]["first_token"]] == ["exact", "fast"]


def test_a_client_that_hangs_costs_no_more_than_twice_its_estimate(
    figures: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def follow(command: Any, arguments: Sequence[str], limit_s: float, take: Any) -> int:
        limits[arguments[1]] = limit_s
        if arguments[1] == "time_reading":
            take({"gpu": {"name": "double"}})
        return 0

    monkeypatch.setattr("journal._follow_findings", follow)
    measured(figures(), {"client", "speculation"})
    assert limits["time_client"] == 2 * MIDDLE.seconds(CLIENT_ROUNDS)
    assert limits["time_speculation"] == 4 * measure.SPECULATION_S


def test_single_steps_add_to_what_is_there(figures: Callable[[], Run]) -> None:
    assert measured(figures(), {"persistent"}) == ["llama-3.1-8b, one kernel for all layers against the chain"]
    measured(figures(), {"rounds"})
    run = figures()
    assert (
        measured(run, {"prefill"})[0] == "llama-3.1-8b, prefill of 128/1024/2048/8192 tokens"
    )  # the bandwidth is known
    for _ in range(2):
        assert measured(figures(), {"speculation"}) == ["llama-3.1-8b, an EAGLE head's acceptance replayed"]
    measured(figures(), {"rounds"})  # once more
    found = saved(run)
    shape = next(shape for shape in found["shapes"] if shape["arch"] == "llama-3.1-8b")
    assert (len(shape["points"]), len(shape["prefill"])) == (19, 4) and shape["persistent_compared"] == {"same": True}
    assert len(shape["speculation"]) == 2  # the second time took the place of the first


def test_a_program_that_fails_is_named(figures: Callable[[], Run], tmp_path: Path) -> None:
    (tmp_path / "trace.py").write_text("raise SystemExit(4)")
    run = figures()
    measured(run, {"probes", "trace"})
    assert saved(run)["failures"] == ["trace: ended with status 4"] and "probes" in saved(run)
