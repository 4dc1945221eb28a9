"""bench/upgrade.py, with one replacement of each kind: upgrades lose nothing, and the report has all of it."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_one_upgrade_and_one_restart(tmp_path: Path) -> None:
    report = tmp_path / "upgrade.json"
    command = [sys.executable, str(ROOT / "bench/upgrade.py"), "--times", "1", "--json", str(report)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert report.exists(), outcome.stderr
    told = json.loads(report.read_text())
    assert outcome.returncode == 0, outcome.stdout
    counted = {check["name"]: check["value"] for check in told["checks"]}
    assert counted["requests refused or lost in upgrades"] == counted["answers that differ"] == 0
    assert counted["requests during upgrades"] > 0
    assert told["samples"]["nobody was answered for, upgrades (ms)"]["samples"] == 1
