"""A run that may end at any moment: its report is saved whenever something is known, and what has no time left is cut.

python bench/h200/journal.py REPORT STEP STATUS SECONDS    # what came of one of run.sh's steps
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

PATIENCE = 4.0  # times its estimate that a step may take
POLL_S = 0.05


class Report:
    """One JSON object on disk, as complete as what is known; goes on with the one that is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def save(self) -> None:
        """Whoever reads the file finds the last report or this one, never a part."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n")
        temporary.replace(self.path)

    def note(self, key: str, text: str) -> None:
        """One more line of "failures" or "cut"."""
        print(f"{'FAILED' if key == 'failures' else key.upper()} {text}", file=sys.stderr, flush=True)
        self.found.setdefault(key, []).append(text)
        self.save()


class Run:
    """Steps until a deadline, each in a process of its own: one that hangs or loses the device costs only itself.

    `command`, a file for findings and the step's own arguments make up the process's command line.
    """

    def __init__(self, report: Report, seconds: float, command: Sequence[str]) -> None:
        self.report, self._command = report, command
        self._deadline = time.monotonic() + seconds

    def fits(self, estimate_s: float) -> bool:
        return estimate_s <= self._deadline - time.monotonic()

    def step(self, name: str, estimate_s: float, arguments: Sequence[str], take: Take) -> None:
        """Gives each finding to `take` and saves the report after it; a failure is noted and costs nothing else."""
        left = self._deadline - time.monotonic()
        if estimate_s > left:
            self.report.note("cut", f"{name}: takes about {estimate_s:.0f} s of {max(left, 0):.0f} s left")
            return
        print(f"-- {name}", flush=True)
        limit_s = min(left, PATIENCE * estimate_s)
        failed = False

        def save(finding: Finding) -> None:
            nonlocal failed
            if "failure" in finding:
                failed = True
                self.report.note("failures", f"{name}: {finding['failure']}")
            else:
                take(finding)
                self.report.save()

        status = _follow(self._command, arguments, limit_s, save)
        if status is None and limit_s == left:
            self.report.note("cut", f"{name}: stopped after {limit_s:.0f} s, at the deadline")
        elif status is None:
            self.report.note("failures", f"{name}: did not end within {limit_s:.0f} s")
        elif status != 0 and not failed:
            self.report.note("failures", f"{name}: ended with status {status}")


def _follow(command: Sequence[str], arguments: Sequence[str], limit_s: float, take: Take) -> int | None:
    """Runs a step's process; its exit status, or None where it had to be killed. Leaves none of its children behind."""
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings"
        path.touch()
        process = subprocess.Popen([*command, str(path), *arguments], process_group=0)
        try:
            with path.open("rb") as findings:
                while True:
                    status = process.poll()  # before the reading: what it wrote last is there
                    _take_lines(findings, take)
                    if status is not None or time.monotonic() > deadline:
                        return status
                    time.sleep(POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process may be stuck in the driver
                process.wait(5.0)


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


def main() -> None:
    path, step, status, seconds = sys.argv[1:]
    report = Report(Path(path))
    report.found.setdefault("steps", {})[step] = {"status": status, "seconds": int(seconds)}
    report.save()


if __name__ == "__main__":
    main()
