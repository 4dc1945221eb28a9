"""`ull`, `ulld` and `ull-gateway`, each run to its end in a process of its own; what a process holds."""

import subprocess
from pathlib import Path
from typing import Any

from ull.spawn import python_command, python_environment

Completed = subprocess.CompletedProcess[str]


def ull(*arguments: str, stdin: str = "") -> Completed:
    """Runs ull to its end in a process of its own."""
    return _run("ull.cli", arguments, 250, input=stdin)


def ulld(*arguments: str) -> Completed:
    """Runs ulld to its end."""
    return _run("ull.daemon", arguments, 60)


def gateway(*arguments: str) -> Completed:
    """Runs ull-gateway to its end."""
    return _run("ull.gateway", arguments, 120)


def _run(module: str, arguments: tuple[str, ...], timeout: float, **options: Any) -> Completed:
    return subprocess.run(
        [*python_command(module), *arguments],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mb(pid: int) -> float:
    """Its resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
