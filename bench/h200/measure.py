"""The engine on an H200 against the memory's limit: every shape, tree size and context, one table, one JSON object.

Times are the device's own timestamps and CUDA events; weights and cache hold random data. `make h200` runs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bandwidth import read_bandwidth
from plans import measure_plans, print_plans
from rich.console import Console
from rich.table import Table
from rounds import RoundTimer, Times

sys.path.insert(0, str(Path(__file__).parent.parent))
from report import ROOT, Check, environment, percentiles
from ull.bundle import MEDUSA, Bundle, open_bundle
from ull.client import Client
from ull.gpu import driver
from ull.gpu.program import load
from ull.spawn import DaemonProcess

CACHE = ROOT / ".cache/h200"


@dataclass(frozen=True)
class Shape:
    """A model to measure: which points of (tree tokens, context), and the issue's limits for a plain round, in ms."""

    arch: str
    points: Sequence[tuple[int, int]]
    rounds: int
    must_ms: float
    goal_ms: float
    heads: int = 0  # Medusa heads with lm_heads of their own


TREES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 2048, 8192, 32000)
ALL_POINTS = [(tree, 128) for tree in TREES] + [(tree, context) for context in CONTEXTS[1:] for tree in (1, 16, 64)]
SHAPES = (
    Shape("llama-3.2-1b", ALL_POINTS, 1000, 0.53, 0.44),
    Shape("llama-3.1-8b", ALL_POINTS, 500, 2.24, 2.05, heads=4),
    Shape("llama-3.3-70b", [(tree, 128) for tree in (1, 16, 64)] + [(1, 2048), (1, 8192), (1, 32000)], 500, 17.3, 16.9),
)
PERSISTENT_CONTEXTS = (128, 8192)  # at which graph + PDL and one kernel for all layers are compared, for T = 1
PERSISTENT_LIMIT_S = 90.0
CLIENT_ROUNDS = 20_000
MICROSECONDS_PER_LAYER = (11.6, 5.0)  # must, goal


def build(arch: str) -> Path:
    """A bundle of random weights, made once."""
    heads = next((str(shape.heads) for shape in SHAPES if shape.arch == arch and shape.heads), None)
    drafting = [] if heads is None else ["--heads", heads]
    bundle = CACHE / f"{arch}.ull"
    if not (bundle / "manifest.json").exists():
        shape = ["--arch", arch, "--random-weights", "--target", "sm_90a", "--context", "32768", *drafting]
        command = [sys.executable, "-m", "ull_build", *shape, "--output", str(bundle), "--force", "--quiet"]
        subprocess.run(command, check=True)
    return bundle


def bytes_per_token(bundle: Bundle) -> int:
    """What a plain round must read: every linear weight and scale and the lm_head; of the embedding only a row."""
    return sum(entry.nbytes for name, entry in bundle.tensors.items() if not name.startswith(("embed.", MEDUSA)))


def bytes_per_draft(bundle: Bundle) -> int:
    """What Medusa heads with lm_heads of their own must read."""
    return sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith(MEDUSA))


def row(times: Times, floor_ms: float, layers: int) -> dict[str, Any]:
    """The figures of one point, in milliseconds and microseconds."""
    median = float(np.median(times.period)) / 1e6
    return {
        "period_us": percentiles(times.period / 1e3),
        "busy_us": percentiles(times.busy / 1e3),
        "gap_us": percentiles(times.gap / 1e3),
        "mean_ms_by_events": times.mean_ns / 1e6,
        "median_ms": median,
        "floor_ms": floor_ms,
        "share_of_read_bandwidth": floor_ms / median,
        "us_per_layer_above_floor": (median - floor_ms) * 1e3 / layers,
    }


def measure_shape(shape: Shape, bandwidth: float) -> dict[str, Any]:
    """All points of one model."""
    started = time.monotonic()
    bundle = open_bundle(build(shape.arch))
    built = time.monotonic()
    program = load(bundle)
    try:
        rounds = RoundTimer(program)
        loaded = time.monotonic()
        floor_ms = bytes_per_token(bundle) / bandwidth * 1e3
        layers = bundle.manifest.model.layers
        points = []
        for tree, context in shape.points:
            times = rounds.time_rounds(tree, context, shape.rounds)
            points.append({"tree": tree, "context": context, **row(times, floor_ms, layers)})
        drafts = None
        if shape.heads:
            times_us = rounds.time_drafts(128, shape.rounds) / 1e3
            floor_us = bytes_per_draft(bundle) / bandwidth * 1e6
            drafts = {"heads": shape.heads, "busy_us": percentiles(times_us), "floor_us": floor_us}
        rounds.drain()
    finally:
        program.close()
    return {
        "arch": shape.arch,
        "drafts": drafts,
        "layers": layers,
        "bytes_per_token": bytes_per_token(bundle),
        "floor_ms": floor_ms,
        "build_s": built - started,
        "load_s": loaded - built,
        "points": points,
    }


def measure_persistent(arch: str, floor_ms: float, rounds: int) -> list[dict[str, Any]]:
    """Plain rounds with one kernel for all layers. In another process: blocks that wait in vain wait for ever."""
    command = [sys.executable, __file__, "--persistent", arch, "--floor-ms", str(floor_ms), "--rounds", str(rounds)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PERSISTENT_LIMIT_S)
    points: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return points


def time_persistent(arch: str, floor_ms: float, rounds: int) -> list[dict[str, Any]]:
    """What that process does."""
    bundle = open_bundle(build(arch))
    program = load(bundle, persistent=True)
    try:
        timer = RoundTimer(program)
        points = []
        for context in PERSISTENT_CONTEXTS:
            times = timer.time_rounds(1, context, rounds)
            points.append({"tree": 1, "context": context, **row(times, floor_ms, bundle.manifest.model.layers)})
        timer.drain()
    finally:
        program.close()
    return points


def measure_client(arch: str) -> dict[str, Any]:
    """Gaps between tokens as a client on an ipc socket sees them, over CLIENT_ROUNDS plain rounds."""
    gaps: list[float] = []
    with DaemonProcess(build(arch), ready_timeout=300.0) as daemon, Client(daemon.url) as client:
        length = 2000
        while len(gaps) < CLIENT_ROUNDS:
            last = 0
            stream = client.generate([1, 2, 3, 4], max_tokens=length, speculate="none", ignore_eos=True)
            for _ in stream:
                now = time.perf_counter_ns()
                if last:
                    gaps.append((now - last) / 1e3)
                last = now
    return {"arch": arch, "inter_token_us": percentiles(gaps[:CLIENT_ROUNDS])}


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """The point of one token at the shortest context."""
    return next(point for point in result["points"] if point["tree"] == 1 and point["context"] == 128)


def checks(shapes: list[dict[str, Any]], client: dict[str, Any] | None) -> list[Check]:
    """Every figure of the issue's table against its limit."""
    found = []
    limits = {shape.arch: shape for shape in SHAPES}
    for result in shapes:
        arch, base = result["arch"], plain(result)
        limit = limits[arch]
        found.append(Check(f"{arch} T=1", base["median_ms"], "ms", limit.must_ms, limit.goal_ms))
        above = base["us_per_layer_above_floor"]
        found.append(Check(f"{arch} above the floor", above, "us per layer", *MICROSECONDS_PER_LAYER))
        found.append(Check(f"{arch} round to round", base["gap_us"]["p50"], "us", 10.0, 2.0))
        if arch == "llama-3.1-8b":
            by_tree = {point["tree"]: point["median_ms"] for point in result["points"] if point["context"] == 128}
            found.append(Check("8B verify T=16", by_tree[16] / by_tree[1], "x of T=1", 1.15, 1.05))
            found.append(Check("8B verify T=64", by_tree[64] / by_tree[1], "x of T=1", 1.35, 1.15))
    if client:
        times = client["inter_token_us"]
        found.append(Check("client ITL p99.9 / p50", times["p99.9"] / times["p50"], "x", 1.10, 1.02))
    return found


def print_tables(bandwidths: dict[str, float], shapes: list[dict[str, Any]], found: list[Check]) -> None:
    console = Console(width=118)
    for name, value in bandwidths.items():
        console.print(f"read bandwidth by {name}: {value / 1e12:.3f} TB/s")
    table = Table(title="rounds: device time from one round's start to the next one's")
    columns = ("model", "T", "context", "p50 ms", "p99 ms", "floor ms", "of bandwidth", "us/layer above", "gap us")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in shapes:
        for point in result["points"]:
            table.add_row(
                result["arch"],
                str(point["tree"]),
                str(point["context"]),
                f"{point['median_ms']:.4f}",
                f"{point['period_us']['p99'] / 1e3:.4f}",
                f"{point['floor_ms']:.4f}",
                f"{point['share_of_read_bandwidth']:.1%}",
                f"{point['us_per_layer_above_floor']:.2f}",
                f"{point['gap_us']['p50']:.2f}",
            )
    console.print(table)
    print_persistent(console, shapes)
    print_drafts(console, shapes)
    table = Table(title="against the limits")
    for column in ("figure", "value", "unit", "must", "goal", ""):
        table.add_column(column)
    for check in found:
        verdict = "[green]ok" if check.ok else "[red]missed"
        table.add_row(check.name, f"{check.value:.4g}", check.unit, f"{check.must:g}", f"{check.goal:g}", verdict)
    console.print(table)


def print_persistent(console: Console, shapes: list[dict[str, Any]]) -> None:
    """Plain rounds both ways: a chain of kernels per layer against one kernel for all."""
    table = Table(title="plain rounds: what the layers are made of")
    for column in ("model", "context", "layers", "p50 ms", "p99 ms", "us/layer above"):
        table.add_column(column, justify="left" if column in ("model", "layers") else "right")
    for result in shapes:
        ways = {"graph + PDL": result["points"], "persistent": result.get("persistent", [])}
        for context in PERSISTENT_CONTEXTS:
            for way, points in ways.items():
                found = [point for point in points if (point["tree"], point["context"]) == (1, context)]
                figures = ("not measured", "", "")
                if found:
                    point = found[0]
                    figures = (
                        f"{point['median_ms']:.4f}",
                        f"{point['period_us']['p99'] / 1e3:.4f}",
                        f"{point['us_per_layer_above_floor']:.2f}",
                    )
                table.add_row(result["arch"], str(context), way, *figures)
    console.print(table)


def print_drafts(console: Console, shapes: list[dict[str, Any]]) -> None:
    """What Medusa heads take before a round."""
    for result in shapes:
        if drafts := result.get("drafts"):
            busy, floor = drafts["busy_us"], drafts["floor_us"]
            share = busy["p50"] / 1e3 / plain(result)["median_ms"]
            console.print(
                f"{result['arch']}, {drafts['heads']} Medusa heads: p50 {busy['p50']:.1f} us, p99 {busy['p99']:.1f} us "
                f"(floor {floor:.1f} us), {share:.1%} of a plain round"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", default=CACHE / "report.json")
    parser.add_argument("--tests-status", type=int, default=None, metavar="N", help="exit status of the GPU tests")
    parser.add_argument("--arch", action="append", help="only these shapes")
    parser.add_argument("--no-client", action="store_true", help="leave out the run through daemon and client")
    parser.add_argument("--no-plans", action="store_true", help="leave out TensorRT, installed or not")
    for name in ("--persistent", "--floor-ms", "--rounds"):  # for measure_persistent()
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.persistent:
        print(json.dumps(time_persistent(options.persistent, float(options.floor_ms), int(options.rounds))))
        return
    started = time.monotonic()
    device = driver.describe_device(0)
    bandwidths = read_bandwidth()
    bandwidth = max(bandwidths.values())
    report: dict[str, Any] = {
        "benchmark": "h200",
        "environment": {**environment(), "gpu": device},
        "tests_status": options.tests_status,
        "read_bandwidth": bandwidths,
        "shapes": [],
        "failures": [],
    }
    for shape in SHAPES:
        if options.arch and shape.arch not in options.arch:
            continue
        try:
            report["shapes"].append(measure_shape(shape, bandwidth))
        except Exception as error:  # one shape's failure must not cost the others' figures
            report["failures"].append(f"{shape.arch}: {type(error).__name__}: {error}")
    if not options.no_client:
        try:
            report["client"] = measure_client("llama-3.1-8b")
        except Exception as error:
            report["failures"].append(f"client: {type(error).__name__}: {error}")
    if not options.no_plans:
        try:
            report["tensorrt"] = measure_plans(CACHE)
        except Exception as error:
            report["failures"].append(f"tensorrt: {type(error).__name__}: {error}")
    rounds = {shape.arch: shape.rounds for shape in SHAPES}
    for result in report["shapes"]:  # last: what has never run may cost nothing else
        arch = result["arch"]
        try:
            result["persistent"] = measure_persistent(arch, result["floor_ms"], rounds[arch])
        except Exception as error:
            report["failures"].append(f"{arch}, persistent: {type(error).__name__}: {error}")
    found = checks(report["shapes"], report.get("client"))
    report["checks"] = [{**check.__dict__} for check in found]
    report["seconds"] = time.monotonic() - started
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_tables(bandwidths, report["shapes"], found)
    if "tensorrt" in report:
        print_plans(report["tensorrt"])
    for failure in report["failures"]:
        print(f"FAILED {failure}", file=sys.stderr)
    print(f"median above the floor: {_headline(report['shapes'])}; report in {options.json}")
    sys.exit(1 if report["failures"] else 0)


def _headline(shapes: list[dict[str, Any]]) -> str:
    """Microseconds per layer above the floor and share of the measured read bandwidth, over all shapes."""
    points = [plain(shape) for shape in shapes]
    if not points:
        return "nothing was measured"
    above = statistics.median(point["us_per_layer_above_floor"] for point in points)
    share = statistics.median(point["share_of_read_bandwidth"] for point in points)
    return f"{above:.2f} us per layer, {share:.1%} of read bandwidth"


if __name__ == "__main__":
    main()
