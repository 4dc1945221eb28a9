"""How a build reports itself: bars on a terminal, one plain line per stage elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[[int], None]


def format_amount(amount: float, unit: str) -> str:
    """`unit` is "bytes", or the name of what is counted."""
    return decimal(int(amount)) if unit == "bytes" else f"{amount:,.0f} {unit}"


class _RateColumn(ProgressColumn):
    """Units per second of the running stage."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{format_amount(speed, task.fields['unit'])}/s" if speed else "", style="progress.data.speed")


class Reporter:
    """Reports nothing: the quiet one, and the base of the others."""

    has_bars = False  # whether people watch a terminal, and libraries may draw bars of their own there

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Advance]:
        """A stage of at most `total` units; the body calls what it is given with each further amount done."""
        yield lambda amount: None

    def note(self, text: str) -> None:
        """One line for people."""


class PlainReporter(Reporter):
    """One line when a stage ends, for logs and pipes: what was done, which may be less than the stage's total."""

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Advance]:
        start = time.monotonic()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount

        yield advance
        seconds = time.monotonic() - start
        rate = format_amount(done / seconds, unit) if seconds > 0 else "-"
        self.note(f"{title}: {format_amount(done, unit)} in {seconds:.1f} s ({rate}/s)")

    def note(self, text: str) -> None:
        print(text, flush=True)


class BarReporter(Reporter):
    """Progress bars with rate and remaining time."""

    has_bars = True

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TaskProgressColumn(),
            _RateColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total, unit=unit)
            yield lambda amount: progress.advance(task, amount)
            progress.update(task, completed=total)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)


def make_reporter(quiet: bool) -> Reporter:
    """The reporter that suits standard output."""
    if quiet:
        return Reporter()
    return BarReporter(Console()) if sys.stdout.isatty() else PlainReporter()
