"""The engine on an H200 against the memory's limit: every shape, tree size and context, one table, one JSON object.

Times are the device's own timestamps and CUDA events; weights and cache hold random data. `make h200` runs it. Every
step is a process of its own, the most important first, and the report is saved after each figure.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from journal import NOTES, PATIENCE, Finding, Report, Run, write_findings
from rich.console import Console
from shapes import CLIENT_ROUNDS, FIRST_STEPS, FIRST_TOKENS, LAST_STEPS, MIDDLE, SHAPES, SMALL, STEPS, Step
from steps import GROUPS, chosen
from tables import (
    DATASHEET,
    checks,
    headline,
    name_of_prompt,
    name_of_tree,
    print_ahead,
    print_checks,
    print_first_tokens,
    print_medusa,
    print_persistent,
    print_prompts,
    print_rounds,
    print_speculation,
    print_trees,
)
from work import (
    CACHE,
    COMPARED_PROMPT,
    COMPARED_TOKENS,
    WORK,
    build_bundles,
    compare_persistent,
    time_ahead,
    time_client,
    time_first_tokens,
    time_persistent,
    time_points,
    time_prompts,
    time_reading,
    time_speculation,
    time_trees_by_warps,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from report import environment

HERE = Path(__file__).parent
COMMAND = (sys.executable, __file__, "--findings")  # of a step's process
DATASHEET_BANDWIDTH = 4.8e12  # bytes per second; where ours was not measured
CLIENT_PATIENCE = 2.0  # times its estimate: it is what most others wait behind
BUNDLES_S, BANDWIDTH_S, COMPARISON_S, AHEAD_S = 40.0, 15.0, 60.0, 120.0  # estimates
FIRST_TOKENS_S = 30.0
SPECULATION_S = 60.0  # 12 s to load, and 39 requests of 512 tokens, 18 of them without drafts
# In files of their own, which add to the report; estimates.
PROGRAMS = {"probes": 20.0, "trace": 40.0, "profiled": 45.0}


class Measurement:
    """The steps and what they find. `archs`: only these shapes; `steps`: only these of steps.py."""

    def __init__(self, run: Run, archs: Sequence[str], steps: Collection[str]) -> None:
        self._run, self._archs, self._steps = run, archs, steps
        self.found = run.report.found
        gpu = self.found.get("environment", {}).get("gpu")
        self.found |= {"benchmark": "h200", "environment": {**environment(), "gpu": gpu}}
        for key in ("shapes", *NOTES):
            self.found.setdefault(key, [])

    def measure(self) -> None:
        """Everything that there is time for; no figures where there is no GPU."""
        if "persistent" in self._steps and MIDDLE.arch in self._archs:
            arguments = (MIDDLE.arch, COMPARED_PROMPT, COMPARED_TOKENS)
            name = f"{MIDDLE.arch}, one kernel for all layers against the chain"
            self._do(name, COMPARISON_S, compare_persistent, *arguments, arch=MIDDLE.arch)
        if set(self._steps) & set(GROUPS["figures"]):
            self._figures()

    def _figures(self) -> None:
        if "bandwidth" in self._steps or "read_bandwidth" not in self.found:
            self._do("bandwidth", BANDWIDTH_S, time_reading)
        if self.found["environment"]["gpu"] is None:
            return
        if "bundles" in self._steps:
            self._do("bundles", BUNDLES_S, build_bundles, self._archs)
        self._shapes(FIRST_STEPS)
        self._client()
        self._first_tokens()
        self._program("probes")
        if "speculation" in self._steps and MIDDLE.arch in self._archs:
            name = f"{MIDDLE.arch}, an EAGLE head's acceptance replayed"
            self._do(name, SPECULATION_S, time_speculation, MIDDLE.arch, arch=MIDDLE.arch)
        self._shapes(STEPS)
        # What is no row of docs/figures.md's table.
        self._program("trace")
        self._program("profiled")
        if "ahead" in self._steps and MIDDLE.arch in self._archs:
            name = f"{MIDDLE.arch}, weights ahead"
            self._do(name, AHEAD_S, time_ahead, MIDDLE.arch, MIDDLE.rounds, arch=MIDDLE.arch)
        self._shapes(LAST_STEPS)

    def _program(self, name: str) -> None:
        if name in self._steps and (HERE / f"{name}.py").exists():
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(self._run.report.path)]
            self._run.program(name, PROGRAMS[name], command)

    def _client(self) -> None:
        shapes = [shape for shape in (MIDDLE, SMALL) if shape.arch in self._archs]
        if "client" in self._steps and shapes:
            fitting = (shape for shape in shapes if self._run.fits(shape.seconds(CLIENT_ROUNDS)))
            shape = next(fitting, shapes[-1])
            estimate_s = shape.seconds(CLIENT_ROUNDS)
            arguments = (shape.arch, CLIENT_ROUNDS)
            self._do(f"client, {shape.arch}", estimate_s, time_client, *arguments, patience=CLIENT_PATIENCE)

    def _first_tokens(self) -> None:
        for shape, variant, lengths in FIRST_TOKENS:
            if "first-tokens" in self._steps and shape.arch in self._archs:
                name = f"{shape.arch}, a client's first tokens, {variant or 'exact'}"
                self._do(name, FIRST_TOKENS_S, time_first_tokens, shape.arch, variant, lengths, arch=shape.arch)

    def _shapes(self, steps: Sequence[Step]) -> None:
        _, bandwidth = self._bandwidth()
        for step in steps:
            arch, rounds = step.shape.arch, step.shape.rounds
            if arch not in self._archs or step.kind not in self._steps:
                continue
            work: tuple[Callable[..., Iterator[Finding]], Any, ...] = (time_persistent, arch, rounds, bandwidth)
            if step.by_warps:
                work = (time_trees_by_warps, arch, step.points, rounds, bandwidth)
            elif step.points:
                work = (time_points, arch, step.points, rounds, bandwidth, step.medusa)
            elif step.prompts:
                work = (time_prompts, arch, step.prompts, bandwidth)
            self._do(step.name, step.estimate_s, *work, arch=arch)

    def _bandwidth(self) -> tuple[str, float]:
        """What floors are reckoned with: how it was measured, or the datasheet, and bytes per second."""
        known = self.found.get("read_bandwidth") or {DATASHEET: DATASHEET_BANDWIDTH}
        return max(known.items(), key=lambda one: one[1])

    def _do(
        self,
        name: str,
        estimate_s: float,
        work: Callable[..., Iterator[Finding]],
        *arguments: Any,
        arch: str = "",
        patience: float = PATIENCE,
    ) -> None:
        command = ["--work", work.__name__, "--arguments", json.dumps(arguments)]
        self._run.step(name, estimate_s, command, lambda finding: self._take(arch, finding), patience)

    def _take(self, arch: str, finding: Finding) -> None:
        """Puts a finding where the report has its place, and says what it is if it is a figure."""
        ((key, value),) = finding.items()
        if isinstance(value, dict) and value.keys() & {"floor_ms", "floor_us"}:
            value["floor_from"], _ = self._bandwidth()
        if key == "gpu":
            self.found["environment"]["gpu"] = value
        elif key == "about":
            self._shape(arch).update(value)
        elif key == "client":
            self._keep_client(value)
        elif key in ("drafts", "persistent_compared"):
            self._shape(arch)[key] = value
        elif key in ("ahead", "speculation", "first_token"):
            self._keep(arch, key, value)
        elif key in ("points", "by_warps", "persistent", "prefill"):
            self._keep(arch, key, value)
            what = name_of_prompt(value) if key == "prefill" else f"{name_of_tree(value)} at {value['context']}"
            gap = "" if key == "prefill" else f", gap {value['gap_us']['p50']:.2f} us"
            print(
                f"{arch} {what}: p50 {value['median_ms']:.4f} ms, floor {value['floor_ms']:.4f} ms{gap}",
                flush=True,
            )
        else:
            self.found[key] = value

    def _keep(self, arch: str, key: str, value: dict[str, Any]) -> None:
        """Adds to a list of the shape's, in place of what was measured of the same before."""
        known = self._shape(arch).setdefault(key, [])
        known[:] = [one for one in known if _subject(one) != _subject(value)]
        known.append(value)

    def _keep_client(self, value: dict[str, Any]) -> None:
        """Adds to what is known of the same model: first tokens by the prompt's length, or the gaps between tokens."""
        known = self.found.get("client", {})
        if known.get("arch") != value["arch"]:
            if known.get("arch") == MIDDLE.arch:
                return  # whose bars they are
            known = {}
        first = known.get("first_token_ms", {}) | value.get("first_token_ms", {})
        self.found["client"] = known | value | {"first_token_ms": first}

    def _shape(self, arch: str) -> dict[str, Any]:
        shapes: list[dict[str, Any]] = self.found["shapes"]
        if (found := next((shape for shape in shapes if shape["arch"] == arch), None)) is None:
            found = {"arch": arch, "points": []}
            shapes.append(found)
        return found


def _subject(found: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured: of a point, a prompt, a setting or a text, all that tells it from others of its kind."""
    told = ("tree", "context", "wide", "tokens", "behind", "widest", "fast", "draws", "setting", "persistent", "name")
    return tuple(found.get(key) for key in (*told, "variant", "drafter"))


def print_report(found: dict[str, Any]) -> None:
    console = Console(width=132)
    if found["environment"]["gpu"] is None:
        return
    print_rounds(console, found)
    print_trees(console, found["shapes"])
    print_prompts(console, found["shapes"])
    print_persistent(console, found["shapes"])
    print_medusa(console, found["shapes"])
    print_speculation(console, found["shapes"])
    print_first_tokens(console, found["shapes"])
    print_ahead(console, found["shapes"])
    verdicts = checks(found["shapes"], found.get("client"), found.get("probes"))
    found["checks"] = [{**check.__dict__} for check in verdicts]
    print_checks(console, verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", default=CACHE / "report.json")
    parser.add_argument(
        "--seconds", type=float, metavar="N", default=600.0, help="cut what does not fit into this time"
    )
    parser.add_argument("--arch", action="append", choices=SHAPES, help="only these shapes")
    parser.add_argument("--steps", metavar="NAMES", default="figures", help="only these, separated by commas")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    for name in ("--work", "--arguments"):  # of a step's process
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        write_findings(options.findings, WORK[options.work](*json.loads(options.arguments)))
    try:
        steps = {name for names in chosen(options.steps).values() for name in names}
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step's process too
    started = time.monotonic()
    report = Report(options.json)
    Measurement(Run(report, options.seconds, COMMAND), options.arch or list(SHAPES), steps).measure()
    found = report.found
    found.setdefault("seconds", {})["+".join(sorted(steps))] = time.monotonic() - started
    try:
        if steps & set(GROUPS["figures"]):
            print_report(found)
    except Exception as error:  # the figures are worth more than their tables
        report.note("failures", "tables", f"{type(error).__name__}: {error}")
    report.save()
    for key in NOTES:
        for text in found[key]:
            print(f"{key}: {text}", file=sys.stderr)
    print(f"{headline(found['shapes'])}; report in {options.json}")
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
