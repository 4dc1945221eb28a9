"""What every benchmark shares: percentiles, the environment, checks against a bar, one table and one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass
class Check:
    """One figure against its bar. `must` and `goal` are limits: upper ones, or lower ones where `at_least`."""

    name: str
    value: float
    unit: str
    must: float | None = None
    goal: float | None = None
    at_least: bool = False
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ok = self.must is None or (self.value >= self.must if self.at_least else self.value <= self.must)


def percentiles(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """p50, p90, p99, p99.9, max and the number of samples, in the samples' unit."""
    values = np.asarray(samples, dtype=np.float64)
    row = {f"p{percent:g}": float(np.percentile(values, percent)) for percent in PERCENTILES}
    return {**row, "max": float(values.max()), "samples": int(values.size)}


def environment() -> dict[str, Any]:
    """Where and on what this run happened."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": None,
        "load_average_1min": os.getloadavg()[0],
    }


def _commit() -> str:
    """What git says of this tree, or ULL_COMMIT where the tree was copied without its history."""
    if given := os.environ.get("ULL_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        said = ""
    return said or "unknown"


def arguments(description: str) -> argparse.ArgumentParser:
    """The parser that every benchmark starts from."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser


def finish(name: str, samples: dict[str, Any], checks: list[Check], json_path: Path | None) -> None:
    """Prints the tables, writes the JSON object and exits: 0 only if every `must` holds."""
    console = Console(width=max(118, Console().width))
    distributions = {key: row for key, row in samples.items() if isinstance(row, dict) and "p50" in row}
    if distributions:
        table = Table(title=f"{name}: distributions")
        table.add_column("series")
        for column in ("p50", "p90", "p99", "p99.9", "max", "samples"):
            table.add_column(column, justify="right")
        for key, row in distributions.items():
            cells = [f"{row[column]:,.2f}" for column in ("p50", "p90", "p99", "p99.9", "max")]
            table.add_row(key, *cells, f"{row['samples']:,}")
        console.print(table)
    table = Table(title=f"{name}: checks")
    for column, justify in (("check", "left"), ("value", "right"), ("unit", "left"), ("must", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for check in checks:
        bar = "" if check.must is None else f"{'>=' if check.at_least else '<='} {check.must:,.4g}"
        verdict = "" if check.must is None else ("[green]ok" if check.ok else "[red]missed")
        table.add_row(check.name, f"{check.value:,.4g}", check.unit, bar, verdict)
    console.print(table)
    if json_path:
        report = {
            "benchmark": name,
            "environment": environment(),
            "samples": samples,
            "checks": [asdict(check) for check in checks],
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def compile_peer(source: str) -> Path:
    """Compiles bench/peers/`source` with g++ into .cache/bench and returns the program's path."""
    path = ROOT / "bench/peers" / source
    program = ROOT / ".cache/bench" / path.stem
    if not program.exists() or program.stat().st_mtime < path.stat().st_mtime:
        program.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-std=c++20", "-O3", "-march=native", "-o", str(program), str(path), "-ldl", "-pthread"]
        subprocess.run(command, check=True)
    return program
