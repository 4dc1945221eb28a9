"""What a check finds: a value, a verdict, why it matters, and the command that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Verdict(IntEnum):
    """From good to bad; the worst is the exit status of `ull doctor`."""

    SKIPPED = -1
    OK = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def word(self) -> str:
        """As it is printed."""
        return {-1: "skipped", 0: "ok", 1: "warning", 2: "critical"}[int(self)]


@dataclass(frozen=True)
class Finding:
    """What one check has found. `why` it matters; `remedy`: a command, or what to do, where there is something."""

    name: str
    verdict: Verdict
    value: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Host:
    """What checks look at: a tree like that below /, whose files may be missing, and the hot cores (() if unknown).

    gpu: number of the GPU; None: the first. target: of the bundle that is to run on it; "": it is not known.
    """

    root: Path = Path("/")
    cores: tuple[int, ...] = ()
    gpu: int | None = None
    target: str = ""

    def text(self, path: str) -> str | None:
        """What a file says, without its line end; None where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def paths(self, pattern: str) -> list[Path]:
        """The files that fit a pattern."""
        return sorted(self.root.glob(pattern))


Check = Callable[[Host], Iterator[Finding]]


@dataclass(frozen=True)
class Topic:
    """Name and reason of a check, from which its findings are made."""

    name: str
    why: str

    def ok(self, value: object) -> Finding:
        """As it should be."""
        return Finding(self.name, Verdict.OK, str(value), self.why)

    def warn(self, value: object, remedy: str) -> Finding:
        """It works, but not as well as it could."""
        return Finding(self.name, Verdict.WARNING, str(value), self.why, remedy)

    def critical(self, value: object, remedy: str) -> Finding:
        """It will not work, or not as promised."""
        return Finding(self.name, Verdict.CRITICAL, str(value), self.why, remedy)

    def skip(self, reason: object) -> Finding:
        """It cannot be looked at."""
        return Finding(self.name, Verdict.SKIPPED, str(reason), self.why)
