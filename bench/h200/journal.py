"""A run that may end at any moment: its report is saved whenever something is known.

What fails costs itself, and what has no time left is cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

Finding = dict[str, Any]
Take = Callable[[Finding], None]

NOTES = ("failures", "cut", "skipped")
PATIENCE = 4.0  # times its estimate that a step may take, if it does not say otherwise
POLL_S = 0.05
GRACE_S = 5.0  # that a process has to end its own children


class Report:
    """One JSON object on disk, as complete as what is known; goes on with the one that is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = False  # whether this process has noted a failure
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def save(self) -> None:
        """Whoever reads the file finds the last report or this one, never a part."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n")
        temporary.replace(self.path)

    def reload(self) -> None:
        """Takes up what another process has written since."""
        on_disk = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.found.clear()
        self.found.update(on_disk)

    def note(self, key: str, step: str, text: str) -> None:
        """One more line of "failures", "cut" or "skipped", under the step's name."""
        line = f"{step}: {text}"
        self.failed |= key == "failures"
        print(f"{'FAILED' if key == 'failures' else key.upper()} {line}", file=sys.stderr, flush=True)
        self.found.setdefault(key, []).append(line)
        self.save()

    def forget(self, step: str) -> None:
        """Takes back what an earlier run of the step has noted: it runs again, and this time counts."""
        for key in NOTES:
            if key in self.found:
                self.found[key] = [line for line in self.found[key] if not line.startswith(f"{step}: ")]


class Run:
    """Steps until a deadline, each in a process of its own: one that hangs or loses the device costs only itself.

    `command`, a file for findings and the step's own arguments make up the process's command line.
    """

    def __init__(self, report: Report, seconds: float, command: Sequence[str]) -> None:
        self.report, self._command = report, command
        self._deadline = time.monotonic() + seconds

    def fits(self, estimate_s: float) -> bool:
        return estimate_s <= self._deadline - time.monotonic()

    def step(
        self, name: str, estimate_s: float, arguments: Sequence[str], take: Take, patience: float = PATIENCE
    ) -> None:
        """Gives each finding to `take` and saves the report after it; a failure is noted and costs nothing else."""
        if (left := self._begin(name, estimate_s)) is None:
            return
        limit_s = min(left, patience * estimate_s)
        failed = False

        def save(finding: Finding) -> None:
            nonlocal failed
            if "failure" in finding:
                failed = True
                self.report.note("failures", name, finding["failure"])
            else:
                take(finding)
                self.report.save()

        status = _follow_findings(self._command, arguments, limit_s, save)
        if status != 0 and not failed:
            self._note_end(name, status, limit_s, limit_s == left)

    def program(self, name: str, estimate_s: float, command: Sequence[str]) -> None:
        """Runs a program that adds to the report on its own."""
        if (left := self._begin(name, estimate_s)) is None:
            return
        self.report.save()
        limit_s = min(left, PATIENCE * estimate_s)
        status = follow(command, limit_s)
        self.report.reload()
        if status != 0:
            self._note_end(name, status, limit_s, limit_s == left)

    def _begin(self, name: str, estimate_s: float) -> float | None:
        """The seconds that are left for a step, or None where they are too few."""
        left = self._deadline - time.monotonic()
        self.report.forget(name)
        if estimate_s > left:
            self.report.note("cut", name, f"takes about {estimate_s:.0f} s of {max(left, 0):.0f} s left")
            return None
        print(f"-- {name}", flush=True)
        return left

    def _note_end(self, name: str, status: int | None, limit_s: float, at_deadline: bool) -> None:
        if status is None and at_deadline:
            self.report.note("cut", name, f"stopped after {limit_s:.0f} s, at the deadline")
        elif status is None:
            self.report.note("failures", name, f"did not end within {limit_s:.0f} s")
        else:
            self.report.note("failures", name, f"ended with status {status}")


def follow(
    command: Sequence[str], limit_s: float, poll: Callable[[], None] = lambda: None, **options: Any
) -> int | None:
    """Runs a process; its exit status, or None where it had to be ended. Leaves none of its children behind.

    Those that are in process groups of their own it ends itself, when it is asked to end.
    `poll` is called several times a second, and once when it has ended. `options` are Popen's.
    """
    deadline = time.monotonic() + limit_s
    process = subprocess.Popen(command, process_group=0, **options)
    try:
        while True:
            status = process.poll()  # before the last call of `poll`: what it wrote last is there
            poll()
            if status is not None or time.monotonic() > deadline:
                return status
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process may be stuck in the driver
            process.wait(GRACE_S)


def _follow_findings(command: Sequence[str], arguments: Sequence[str], limit_s: float, take: Take) -> int | None:
    """Runs a step's process and takes its findings as it writes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings"
        path.touch()
        with path.open("rb") as findings:
            return follow([*command, str(path), *arguments], limit_s, lambda: _take_lines(findings, take))


def _take_lines(file: BinaryIO, take: Take) -> None:
    """Every complete line that has not been read yet."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        take(json.loads(line))


def write_findings(path: Path, findings: Iterable[Finding]) -> NoReturn:
    """What a step's process does: a line for each finding, then the end, at once: a failed device may never answer."""
    status = 0
    with path.open("a", buffering=1) as file:
        try:
            for finding in findings:
                file.write(json.dumps(finding) + "\n")
        except BaseException as error:
            traceback.print_exc()
            file.write(json.dumps({"failure": f"{type(error).__name__}: {error}"}) + "\n")
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
