"""Core numbers, in the kernel's form of them: `0-3,8`."""

from __future__ import annotations

from collections.abc import Collection

from ull.errors import ConfigError

MAX_CORE = 1023  # the core's number, held equal by tests/core/test_shared_numbers.py


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers, ascending. Raises ConfigError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        last = last if dash else first
        numbers = first.isdecimal() and last.isdecimal() and len(last) <= 9
        if not numbers or not int(first) <= int(last) <= MAX_CORE:
            raise ConfigError(f"{text!r:.80} is no list of cores, 0 to {MAX_CORE}: write it as 2,3 or 2-5", "cores")
        cores.update(range(int(first), int(last) + 1))
    return tuple(sorted(cores))


def core_list(cores: Collection[int]) -> str:
    """The text of these numbers."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
