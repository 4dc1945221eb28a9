"""The steps of `make h200`: each a process of its own with a limit; what fails, hangs or has no time left costs itself.

run.sh says how it is called. Nothing here needs more than Python: what the machine lacks is installed by a step.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from journal import Report, follow
from sources import BUNDLE, NATIVE, ROOT, digest
from steps import chosen

HERE = ROOT / "bench/h200"
CACHE = ROOT / ".cache/h200"
SECONDS = {"correctness": 330.0, "figures": 450.0}  # a machine is lent for 15 minutes, two starts of it among them
REFUSED = 75  # exit status of a step that this machine does not let run
STARTING_S = 15.0  # of a pytest: until its first test runs
KERNEL_TEST_S = 75.0  # that a kernel's test may take, NVRTC's time included


@dataclass(frozen=True)
class Step:
    """`command` gets the seconds that the step may take. `lacks`: what is missing here, so that it is not run."""

    name: str
    needs_s: float  # where less is left it is cut
    limit_s: float
    command: Callable[[float], Sequence[str]]
    lacks: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


class Session:
    """Runs steps until a deadline. The running report is `report`; `copy` gets it whenever it has changed."""

    def __init__(self, report: Path, copy: Path, seconds: float) -> None:
        self.report, self._copy = report, copy
        self._deadline = time.monotonic() + seconds
        self._copied = 0
        self.failed = False

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def do(self, step: Step) -> bool:
        """Whether the step came to its end and all was well."""
        started, limit_s = time.monotonic(), min(step.limit_s, self.left_s)
        report = Report(self.report)
        report.forget(step.name)
        status: int | None = REFUSED
        if step.lacks:
            said = "skipped"
            report.note("skipped", step.name, step.lacks)
        elif self.left_s < step.needs_s:
            said = "cut"
            report.note("cut", step.name, f"needs {step.needs_s:.0f} s of {max(self.left_s, 0):.0f} s left")
        else:
            print(f"== {step.name}", flush=True)
            report.save()
            environment = {**os.environ, **step.environment}
            status = follow(step.command(limit_s), limit_s, self.copy_report, cwd=ROOT, env=environment)
            report.reload()
            said = {0: "ok", REFUSED: "refused", None: "did not end in time"}.get(status, f"status {status}")
            if status == REFUSED:
                report.note("skipped", step.name, "this machine does not let it run")
            elif status is None and limit_s < step.limit_s:
                report.note("cut", step.name, f"stopped after {limit_s:.0f} s, at the deadline")
            elif status is None:
                report.note("failures", step.name, f"did not end within {limit_s:.0f} s")
            elif status != 0 and not _named(report, step.name):
                report.note("failures", step.name, f"ended with status {status}")
        self.failed |= status not in (0, REFUSED) or said == "cut"
        seconds = time.monotonic() - started
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        report.found.setdefault("steps", {})[step.name] = {"status": said, "seconds": round(seconds, 1), "date": date}
        report.save()
        self.copy_report()
        print(f"== {step.name}: {said}, {seconds:.0f} s", flush=True)
        return status == 0

    def copy_report(self) -> None:
        """A command that is ended from outside leaves what was known half a moment before."""
        if self._copy == self.report or not self.report.exists():
            return
        changed = self.report.stat().st_mtime_ns
        if changed != self._copied:
            self._copied = changed
            temporary = self._copy.with_suffix(".part")
            shutil.copy(self.report, temporary)
            temporary.replace(self._copy)


def _named(report: Report, step: str) -> bool:
    return any(line.startswith(f"{step}: ") for line in report.found.get("failures", []))


# ---- the steps -----------------------------------------------------------------------------------------------------


def program(script: str, *arguments: object) -> Callable[[float], list[str]]:
    return lambda limit_s: [sys.executable, str(HERE / script), *map(str, arguments)]


def measuring(report: Path, steps: Sequence[str]) -> Callable[[float], list[str]]:
    """measure.py, which must have time left to print its tables."""

    def command(limit_s: float) -> list[str]:
        seconds = max(limit_s - 10, 1)
        return program("measure.py", "--json", report, "--steps", ",".join(steps), "--seconds", seconds)(limit_s)

    return command


def tests(
    paths: Sequence[str], processes: int = 1, by_file: bool = False, test_s: float = math.inf
) -> Callable[[float], list[str]]:
    """pytest, which with its plugin ends tests that take longer than `test_s`, and says what failed in time."""

    def command(limit_s: float) -> list[str]:
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
        if _imports("pytest_timeout"):
            limit = max(limit_s - STARTING_S, 10.0)
            one_s = min(limit - 5, test_s)
            options += [f"--timeout={one_s:.0f}", "--timeout-method=thread", f"--session-timeout={limit:.0f}"]
        if processes > 1 and _imports("xdist"):
            # xdist would wait for ever for what a process that has crashed had left.
            options += ["-n", str(processes), "--max-worker-restart", "0", *(["--dist", "loadfile"] if by_file else [])]
        return [sys.executable, "-m", "pytest", *options, *paths]

    return command


def _imports(module: str) -> bool:
    """As a step's process would: this one was started before what was missing had been installed."""
    roots = [CACHE / "site", *map(Path, sys.path)]
    return any((root / module).exists() or (root / f"{module}.py").exists() for root in roots)


def preparation(report: Path, log: Path) -> list[Step]:
    """What every command begins with; each is over at once where nothing is to be done."""
    return [
        Step("packages", 5, 90, program("packages.py", ROOT / ".wheels", CACHE / "site")),
        Step("machine", 5, 60, program("machine.py", report)),
        Step("build", 20, 240, program("native.py", CACHE / "native", log)),
    ]


def correctness(report: Path) -> list[Step]:
    names = ("linear", "attention", "attention_pages", "sampling", "plain", "redraw", "medusa", "rounds", "chunk")
    files = [*(f"kernel_{name}" for name in names), "kernel_fast_chunk", "warpgroup", "clusters"]
    on_device = {"ULL_KERNELS": "device"}
    kernels = [f"tests/kernels/test_{name}.py" for name in files]
    engine = [f"tests/h200/test_{name}.py" for name in ("engine", "chunks", "small", "models")]
    torch = "" if _imports("torch") and _imports("transformers") else "PyTorch or transformers is not on this machine"
    sanitizer = "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on this machine"
    return [
        # Alone: beside others' launches a kernel that reads too early may come too late.
        Step("early-reads", 20, 45, tests(["tests/h200/test_dependent_launch.py"]), environment=on_device),
        Step("kernels", 30, 140, tests(kernels, processes=8, test_s=KERNEL_TEST_S), environment=on_device),
        Step("pytorch", 40, 200, tests(["tests/h200/test_reference.py"]), lacks=torch),
        Step("engine", 30, 150, tests(engine, 2, by_file=True)),
        Step("memory", 30, 120, program("memory_checks.py", CACHE / "tiny-medusa.ull"), lacks=sanitizer),
        # Last, since their blocks wait for each other: for ever, if they wait in vain.
        Step("persistent", 75, 150, measuring(report, ["persistent"])),  # below that it would be cut by measure.py
        Step("persistent-engine", 20, 60, tests(["tests/h200/test_persistent.py"])),
    ]


def figures(report: Path, steps: Sequence[str]) -> list[Step]:
    return [Step("figures", 30, 24 * 3600, measuring(report, steps))]


def begin(report: Path, made_from: str) -> None:
    """Goes on with the report that is there if it is of the same sources; else that one is put aside."""
    found = Report(report).found
    if found and found.get("sources") != made_from:
        print(f"{report} is of other sources: it goes to {report.with_suffix('.old.json').name}")
        report.replace(report.with_suffix(".old.json"))
    fresh = Report(report)
    fresh.found["sources"] = made_from
    fresh.save()


def steps_of(group: str, names: Sequence[str], report: Path) -> list[Step]:
    if group == "figures":
        return figures(report, names)
    return [step for step in correctness(report) if step.name in names]


def pack_traces(folder: Path) -> None:
    """All traces and their pictures as two files, the chunk's apart.

    A machine that is lent gives back 8 files of 16 MiB each at most.
    """
    chunk = sorted(CACHE.glob("trace-*-chunk.*"))
    rounds = sorted(set(CACHE.glob("trace-*")) - set(chunk))
    for name, traces in (("traces.tar", rounds), ("trace-chunk.tar", chunk)):
        if traces:
            with tarfile.open(folder / name, "w") as packed:
                for trace in traces:
                    packed.add(trace, trace.name)


def main() -> int:
    copy = Path(sys.argv[1])
    try:
        groups = chosen(os.environ.get("ULL_H200_STEPS", ""))
        given = os.environ.get("ULL_H200_SECONDS")
        seconds = dict.fromkeys(SECONDS, float(given)) if given else SECONDS
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    report, failed = CACHE / "report.json", False
    begin(report, digest(*NATIVE, *BUNDLE))
    for number, (group, names) in enumerate(groups.items()):
        session = Session(report, copy, seconds[group])
        print(f"==== {group}: {', '.join(names)}; {seconds[group]:.0f} s", flush=True)
        if number == 0:
            for step in preparation(report, copy.parent / "build.log"):
                if not session.do(step):
                    return 1
        for step in steps_of(group, names, report):
            session.do(step)
        failed |= session.failed
    pack_traces(copy.parent)
    print(f"report in {copy}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
