"""TensorRT on an H200, step by step: what it makes of our networks, and what its plans take beside our kernels.

`make h200-tensorrt` runs it. Every step is a process of its own, the cheapest answers first, and the report is saved
after each finding, so that a run that is cut still tells what it has seen.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plan_probe
from journal import Finding, Report, Run, write_findings
from plans import ARCH, measure_plans, print_plans
from rich.console import Console
from rich.table import Table

from ull.bundle import Precision
from ull_build.shapes import shape_model
from ull_build.tensorrt.preflight import estimate, read_machine, remarks

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".cache/h200"
PROBES = CACHE / "probes"
COMMAND = (sys.executable, __file__, "--findings")  # of a step's process
PEAK_BANDWIDTH = 4.8e12  # bytes per second, by the datasheet
LINEARS = ("layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "lm_head")
# Seconds, estimated: TensorRT has not been timed by us.
MACHINE_S, LINEAR_S, PROFILES_S, CAPTURE_S, TINY_S, LAYERS_S = 10.0, 60.0, 240.0, 60.0, 300.0, 400.0


def describe_machine() -> Iterator[Finding]:
    """Stops here with a sentence where TensorRT or its GPU is missing, or the driver is too old for the wheel."""
    from ull.gpu.driver import describe_device
    from ull.gpu.tensorrt import library as tensorrt_library

    trt = tensorrt_library.load()
    machine = read_machine(trt, ROOT)
    lines = remarks(machine, estimate(shape_model(ARCH, 8), Precision()))
    print(*lines, sep="\n")
    yield {"machine": {"gpu": describe_device(0), "tensorrt": machine.tensorrt, "remarks": lines}}


def probe_linear(name: str) -> Iterator[Finding]:
    yield from plan_probe.probe_linear(ARCH, name)


def probe_profiles() -> Iterator[Finding]:
    yield from plan_probe.probe_profiles(ARCH, str(PROBES))


def probe_capture() -> Iterator[Finding]:
    yield from plan_probe.probe_capture(ARCH, str(PROBES))


def try_tiny() -> Iterator[Finding]:
    """The tiny engine from the build to a client, with both attentions."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
    status = subprocess.run([*command, "tests/h200/test_plans.py"], cwd=ROOT).returncode
    yield {"tiny": {"status": status}}
    if status != 0:
        raise RuntimeError(f"tests/h200/test_plans.py ended with status {status}")


def time_layers() -> Iterator[Finding]:
    yield {"layers": measure_plans(CACHE)}


WORK: dict[str, Callable[..., Iterator[Finding]]] = {
    work.__name__: work
    for work in (describe_machine, probe_linear, probe_profiles, probe_capture, try_tiny, time_layers)
}
STEPS: tuple[tuple[str, float, Callable[..., Iterator[Finding]], tuple[str, ...]], ...] = (
    *((f"linear {name}", LINEAR_S, probe_linear, (name,)) for name in LINEARS),
    ("profiles", PROFILES_S, probe_profiles, ()),
    ("capture", CAPTURE_S, probe_capture, ()),
    ("tiny engine", TINY_S, try_tiny, ()),
    ("layers", LAYERS_S, time_layers, ()),
)


def measure(run: Run) -> None:
    """Every step that there is time for; none where the machine cannot."""
    found = run.report.found
    found |= {"benchmark": "h200-tensorrt", "linears": [], "profiles": [], "failures": [], "cut": []}

    def take(finding: Finding) -> None:
        ((key, value),) = finding.items()
        if isinstance(found.get(key), list):
            found[key].append(value)
        else:
            found[key] = value

    def do(name: str, estimate_s: float, work: Callable[..., Iterator[Finding]], arguments: tuple[str, ...]) -> None:
        run.step(name, estimate_s, ["--work", work.__name__, "--arguments", json.dumps(arguments)], take)

    do("machine", MACHINE_S, describe_machine, ())
    if "machine" in found:
        for step in STEPS:
            do(*step)


def print_linears(console: Console, linears: list[dict[str, Any]]) -> None:
    columns = ("linear", "scheme", "level", "T", "operands", "us", "of 4.8 TB/s", "error", "plan / weights")
    table = Table(*columns, title="a linear by scheme and optimisation level")
    for found in linears:
        head = [found["linear"], found["scheme"], str(found["level"])]
        if "refused" in found:
            table.add_row(*head, "", f"refused: {found['refused']}"[:40])
            continue
        operands = "; ".join(sorted({" x ".join(types) for types in found["operands"]})) or "not named"
        size = f"{found['plan_bytes'] / found['weight_bytes']:.2f}"
        for point in found["points"]:
            rate = point["bytes_per_second"]
            share = "" if rate is None else f"{rate / PEAK_BANDWIDTH:.0%}"
            figures = (f"{point['us']:.1f}", share, f"{point['error']:.2%}", size)
            table.add_row(*head, str(point["tokens"]), operands, *figures)
    console.print(table)


def print_report(found: dict[str, Any]) -> None:
    console = Console(width=118)
    if found["linears"]:
        print_linears(console, found["linears"])
    for profiles in found["profiles"]:
        us = ", ".join(f"{tokens}: {value:.1f}" for tokens, value in profiles["us"].items())
        exact = ", ".join(map(str, profiles["exact"]))
        print(f"profiles {profiles['scheme']}: us by T {us}; exact {exact}; {profiles['build_s']:.0f} s")
    if capture := found.get("capture"):
        print(
            f"capture: {capture['same_bits']} of {capture['replays']} replays give the eager bits; {capture['nodes']}"
        )
    if layers := found.get("layers"):
        print_plans(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", default=CACHE / "tensorrt.json")
    parser.add_argument("--seconds", type=float, metavar="N", default=1500.0, help="cut what does not fit")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    for name in ("--work", "--arguments"):  # of a step's process
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        write_findings(options.findings, WORK[options.work](*json.loads(options.arguments)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step's process too
    started = time.monotonic()
    options.json.unlink(missing_ok=True)
    report = Report(options.json)
    measure(Run(report, options.seconds, COMMAND))
    report.found["seconds"] = time.monotonic() - started
    report.save()
    print_report(report.found)
    print(f"report in {options.json}")
    sys.exit(1 if report.found["failures"] else 0)


if __name__ == "__main__":
    main()
