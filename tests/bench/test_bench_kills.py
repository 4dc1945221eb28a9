"""bench/kills.py, with few clients: it counts whom it killed, and most of those had asked."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_forty_killed_clients_are_counted_and_had_asked(tmp_path: Path) -> None:
    report = tmp_path / "kills.json"
    command = [sys.executable, str(ROOT / "bench/kills.py"), "--kills", "40", "--json", str(report)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert report.exists(), outcome.stderr
    told = json.loads(report.read_text())
    missed = [check["name"] for check in told["checks"] if not check["ok"] and not check["name"].startswith("memory")]
    assert missed == [], outcome.stdout  # of memory, so few say nothing
    counted = {check["name"]: check["value"] for check in told["checks"]}
    assert counted["clients killed"] == sum(told["samples"]["killed"].values()) == 40
    assert counted["clients killed that had asked"] >= told["samples"]["killed"]["streaming"] > 0
