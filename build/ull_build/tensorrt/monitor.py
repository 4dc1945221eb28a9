"""Watching a TensorRT build: its messages, its progress, and how it is stopped."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


class BuildLog:
    """Writes messages to a file and remembers the last error. A context manager; `write` suits make_logger.

    Of the verbose ones, with which a model would fill hundreds of megabytes, only what the timing cache can be edited
    by is kept, compressed in a file of its own: each layer's key, the tactics that were timed, the one that was taken.
    """

    def __init__(self, path: Path, tactics: Path) -> None:
        self._file = path.open("w", encoding="utf-8", errors="replace")
        self._tactics = gzip.open(tactics, "wt", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._is_timing = False  # inside the lines on one layer's tactics
        self.last_error = ""

    def write(self, severity: str, message: str) -> None:
        if self._file.closed:  # TensorRT's objects have a word to say when they go, too
            return
        if severity == "verbose":
            self._write_tactic(message)
            return
        if severity.endswith("error"):
            self.last_error = message.strip()
        self._file.write(f"[{severity}] {message}\n")

    def _write_tactic(self, message: str) -> None:
        """The lines of TensorRT 11, as its sample sampleEditableTimingCache reads them."""
        self._is_timing |= "Autotuning op " in message
        if self._is_timing:
            self._tactics.write(f"{message}\n")
        self._is_timing &= "(tactic hash, cost(in ms)):" not in message

    def reason(self) -> str:
        return self.last_error or "it gave no reason"

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._tactics.close()


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Phases:
    """How far nested phases have come: the furthest of the outermost ones, as a fraction. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = _Phase(parent, max(1, steps))

    def complete(self, name: str, step: int) -> None:
        if name in self._phases:
            self._phases[name].done = step + 1

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def fraction(self) -> float:
        outermost = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        return max(map(self._fraction_of, outermost), default=0.0)

    def _fraction_of(self, name: str) -> float:
        phase = self._phases[name]
        inner = [self._fraction_of(child) for child, other in self._phases.items() if other.parent == name]
        return min(1.0, (phase.done + max(inner, default=0.0)) / phase.steps)


def make_monitor(trt: Any, cancelled: threading.Event, report: Callable[[float], None]) -> Any:
    """A trt.IProgressMonitor: calls report(fraction), never from two threads at once; `cancelled` stops the build."""
    lock = threading.Lock()
    phases = Phases()

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with lock:
                phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with lock:
                phases.complete(phase_name, step)
                report(phases.fraction())
            return not cancelled.is_set()

        def phase_finish(self, phase_name: str) -> None:
            with lock:
                phases.finish(phase_name)

    return Monitor()


def run_cancellable(work: Callable[[], Result], cancelled: threading.Event) -> Result:
    """work() in another thread, while this one can take a Ctrl-C.

    It sets `cancelled`, waits until the work has noticed, and goes on as KeyboardInterrupt. A second one does not wait.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="tensorrt build", daemon=True)
    try:
        thread.start()
        return future.result()
    except KeyboardInterrupt:
        cancelled.set()
        if thread.ident is not None:  # it has begun
            wait([future])
        raise
