"""The engine on an H200 against the memory's limit: every shape, tree size and context, one table, one JSON object.

Times are the device's own timestamps and CUDA events; weights and cache hold random data. `make h200` runs it. Every
step is a process of its own, the most important first, and the report is saved after each figure.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from bandwidth import read_bandwidth
from cores import client_cores
from journal import Finding, Report, Run, write_findings
from plans import measure_plans, print_plans
from rich.console import Console
from rounds import RoundTimer, Times, loaded
from shapes import CLIENT_ROUNDS, LAST_STEPS, MIDDLE, SHAPES, SMALL, STEPS, Point, Step
from tables import PERSISTENT_CONTEXTS, checks, headline, print_checks, print_drafts, print_persistent, print_rounds

sys.path.insert(0, str(Path(__file__).parent.parent))
from report import ROOT, environment, percentiles
from ull.bundle import MEDUSA, Bundle, open_bundle
from ull.client import Client
from ull.gpu import driver
from ull.spawn import DaemonProcess

CACHE = ROOT / ".cache/h200"
COMMAND = (sys.executable, __file__, "--findings")  # of a step's process
DATASHEET_BANDWIDTH = 4.8e12  # bytes per second; where ours was not measured
BUNDLES_S, BANDWIDTH_S, PLANS_S, NO_PLANS_S = 40.0, 15.0, 200.0, 5.0  # estimates


# ---- what a step's process does ------------------------------------------------------------------------------------


def build(arch: str) -> Path:
    """A bundle of random weights, made once."""
    shape = SHAPES[arch]
    drafting = ["--heads", str(shape.heads)] if shape.heads else []
    bundle = CACHE / f"{arch}.ull"
    if not (bundle / "manifest.json").exists():
        options = ["--arch", arch, "--random-weights", "--target", "sm_90a", "--context", "32768", *drafting]
        command = [sys.executable, "-m", "ull_build", *options, "--output", str(bundle), "--force", "--quiet"]
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
        "timer_step_ns": times.timer_step_ns,
        "mean_ms_by_events": times.mean_ns / 1e6,
        "median_ms": median,
        "floor_ms": floor_ms,
        "share_of_read_bandwidth": floor_ms / median,
        "us_per_layer_above_floor": (median - floor_ms) * 1e3 / layers,
    }


def build_bundles(archs: Sequence[str]) -> Iterator[Finding]:
    """All at once. One that cannot be built fails again in the step that needs it."""
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        for bundle in [pool.submit(build, arch) for arch in archs]:
            bundle.result()
    yield {"bundles_s": time.monotonic() - started}


def time_reading() -> Iterator[Finding]:
    yield {"gpu": driver.describe_device(0)}
    yield {"read_bandwidth": read_bandwidth()}


def time_points(
    arch: str, points: Sequence[Point], rounds: int, bandwidth: float, drafts: bool = False
) -> Iterator[Finding]:
    """Points of one model, and what its Medusa heads take."""
    bundle = open_bundle(build(arch))
    started = time.monotonic()
    with loaded(bundle) as program:
        timer = RoundTimer(program)
        layers, floor_ms = bundle.manifest.model.layers, bytes_per_token(bundle) / bandwidth * 1e3
        about = {"layers": layers, "bytes_per_token": bytes_per_token(bundle), "floor_ms": floor_ms}
        yield {"about": {**about, "load_s": time.monotonic() - started}}
        for tree, context in points:
            times = timer.time_rounds(tree, context, rounds)
            yield {"points": {"tree": tree, "context": context, **row(times, floor_ms, layers)}}
        if drafts:
            times_us = timer.time_drafts(128, rounds) / 1e3
            floor_us = bytes_per_draft(bundle) / bandwidth * 1e6
            heads = SHAPES[arch].heads
            yield {"drafts": {"heads": heads, "busy_us": percentiles(times_us), "floor_us": floor_us}}
        timer.drain()


def time_persistent(arch: str, floor_ms: float, rounds: int) -> list[dict[str, Any]]:
    """Plain rounds with one kernel for all layers, whose blocks wait for ever if they wait in vain."""
    bundle = open_bundle(build(arch))
    with loaded(bundle, persistent=True) as program:
        timer = RoundTimer(program)
        points = []
        for context in PERSISTENT_CONTEXTS:
            times = timer.time_rounds(1, context, rounds)
            points.append({"tree": 1, "context": context, **row(times, floor_ms, bundle.manifest.model.layers)})
        timer.drain()
    return points


def time_persistent_points(arch: str, rounds: int, bandwidth: float) -> Iterator[Finding]:
    floor_ms = bytes_per_token(open_bundle(build(arch))) / bandwidth * 1e3
    for point in time_persistent(arch, floor_ms, rounds):
        yield {"persistent": point}


def time_client(arch: str, rounds: int) -> Iterator[Finding]:
    """Gaps between tokens as a client on an ipc socket sees them, over so many plain rounds."""
    gaps: list[float] = []
    cores = client_cores(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores.daemon)  # the daemon inherits it
    with DaemonProcess(build(arch), arguments=cores.arguments, ready_timeout=300.0) as daemon, zmq.Context() as context:
        os.sched_setaffinity(0, cores.client_libzmq)  # its threads are started here and stay
        context.socket(zmq.PAIR).close()
        os.sched_setaffinity(0, cores.client)
        gc.freeze()  # a full collection of what was imported takes 20 ms
        with Client(daemon.url, context=context) as client:
            placement = client.info().executor["placement"]
            while len(gaps) < rounds:
                last = 0
                for _ in client.generate([1, 2, 3, 4], max_tokens=2000, speculate="none", ignore_eos=True):
                    now = time.perf_counter_ns()
                    if last:
                        gaps.append((now - last) / 1e3)
                    last = now
    yield {"client": {"arch": arch, "inter_token_us": percentiles(gaps[:rounds]), "placement": placement}}


def time_plans() -> Iterator[Finding]:
    yield {"tensorrt": measure_plans(CACHE)}


WORK: dict[str, Callable[..., Iterator[Finding]]] = {
    work.__name__: work
    for work in (build_bundles, time_reading, time_points, time_persistent_points, time_client, time_plans)
}


# ---- the run -------------------------------------------------------------------------------------------------------


class Measurement:
    """The steps and what they find. `archs`: only these shapes."""

    def __init__(self, run: Run, archs: Sequence[str]) -> None:
        self._run, self._archs = run, archs
        self.found = run.report.found
        self.found |= {"benchmark": "h200", "environment": environment(), "shapes": [], "failures": [], "cut": []}

    def measure(self, client: bool, plans: bool) -> None:
        """Everything that there is time for; nothing where there is no GPU."""
        self._do("bandwidth", BANDWIDTH_S, time_reading)
        if self.found["environment"]["gpu"] is None:
            return
        self._do("bundles", BUNDLES_S, build_bundles, self._archs)
        self._steps(STEPS)
        if client and (shape := next((shape for shape in (MIDDLE, SMALL) if shape.arch in self._archs), None)):
            if not self._run.fits(shape.seconds(CLIENT_ROUNDS)) and SMALL.arch in self._archs:
                shape = SMALL
            self._do(f"client, {shape.arch}", shape.seconds(CLIENT_ROUNDS), time_client, shape.arch, CLIENT_ROUNDS)
        self._steps(LAST_STEPS)
        if plans:
            installed = importlib.util.find_spec("tensorrt") is not None
            self._do("tensorrt", PLANS_S if installed else NO_PLANS_S, time_plans)

    def _steps(self, steps: Sequence[Step]) -> None:
        bandwidth = max(self.found.get("read_bandwidth", {}).values(), default=DATASHEET_BANDWIDTH)
        for step in steps:
            arch, rounds = step.shape.arch, step.shape.rounds
            if arch not in self._archs:
                continue
            if step.points:
                arguments = (arch, step.points, rounds, bandwidth, step.drafts)
                self._do(step.name, step.estimate_s, time_points, *arguments, arch=arch)
            else:
                self._do(step.name, step.estimate_s, time_persistent_points, arch, rounds, bandwidth, arch=arch)

    def _do(
        self, name: str, estimate_s: float, work: Callable[..., Iterator[Finding]], *arguments: Any, arch: str = ""
    ) -> None:
        command = ["--work", work.__name__, "--arguments", json.dumps(arguments)]
        self._run.step(name, estimate_s, command, lambda finding: self._take(arch, finding))

    def _take(self, arch: str, finding: Finding) -> None:
        """Puts a finding where the report has its place, and says what it is if it is a point."""
        ((key, value),) = finding.items()
        if key == "gpu":
            self.found["environment"]["gpu"] = value
        elif key in ("about", "points", "persistent", "drafts"):
            shape = self._shape(arch)
            if key == "about":
                shape |= {**value, **shape}
            elif key == "drafts":
                shape[key] = value
            else:
                shape.setdefault(key, []).append(value)
                print(
                    f"{arch} T={value['tree']} at {value['context']}: p50 {value['median_ms']:.4f} ms, "
                    f"floor {value['floor_ms']:.4f} ms, gap {value['gap_us']['p50']:.2f} us",
                    flush=True,
                )
        else:
            self.found[key] = value

    def _shape(self, arch: str) -> dict[str, Any]:
        shapes: list[dict[str, Any]] = self.found["shapes"]
        if (found := next((shape for shape in shapes if shape["arch"] == arch), None)) is None:
            found = {"arch": arch, "points": []}
            shapes.append(found)
        return found


def print_report(found: dict[str, Any]) -> None:
    console = Console(width=118)
    if found["environment"]["gpu"] is None:
        return
    print_rounds(console, found)
    print_persistent(console, found["shapes"])
    print_drafts(console, found["shapes"])
    verdicts = checks(found["shapes"], found.get("client"))
    found["checks"] = [{**check.__dict__} for check in verdicts]
    print_checks(console, verdicts)
    if "tensorrt" in found:
        print_plans(found["tensorrt"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", default=CACHE / "report.json")
    parser.add_argument(
        "--seconds", type=float, metavar="N", default=600.0, help="cut what does not fit into this time"
    )
    parser.add_argument("--arch", action="append", choices=SHAPES, help="only these shapes")
    parser.add_argument("--no-client", action="store_true", help="leave out the run through daemon and client")
    parser.add_argument("--no-plans", action="store_true", help="leave out TensorRT, installed or not")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    for name in ("--work", "--arguments"):  # of a step's process
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        write_findings(options.findings, WORK[options.work](*json.loads(options.arguments)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step's process too
    started = time.monotonic()
    report = Report(options.json)
    measurement = Measurement(Run(report, options.seconds, COMMAND), options.arch or list(SHAPES))
    measurement.measure(not options.no_client, not options.no_plans)
    found = report.found
    found["seconds"] = time.monotonic() - started
    try:
        print_report(found)
    except Exception as error:  # the figures are worth more than their tables
        report.note("failures", f"tables: {type(error).__name__}: {error}")
    report.save()
    for key in ("cut", "failures"):
        for text in found[key]:
            print(f"{key}: {text}", file=sys.stderr)
    print(f"{headline(found['shapes'])}; report in {options.json}")
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
