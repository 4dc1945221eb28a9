"""What a benchmark reports, run in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT

Completed = subprocess.CompletedProcess[str]


def report_of(name: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], Completed]:
    """Runs bench/`name`.py; returns its report, and the process, whose status says whether every bar was kept."""
    report = folder / f"{name}.json"
    command = [sys.executable, str(ROOT / f"bench/{name}.py"), *arguments, "--json", str(report)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert report.exists(), outcome.stderr
    told: dict[str, Any] = json.loads(report.read_text())
    return told, outcome
