"""bench/upgrade.py, with one replacement of each kind: upgrades lose nothing, and the report has all of it."""

from pathlib import Path

from bench_reports import report_of


def test_one_upgrade_and_one_restart(tmp_path: Path) -> None:
    told, outcome = report_of("upgrade", tmp_path, "--times", "1")
    assert outcome.returncode == 0, outcome.stdout
    counted = {check["name"]: check["value"] for check in told["checks"]}
    assert counted["requests refused or lost in upgrades"] == counted["answers that differ"] == 0
    assert counted["requests during upgrades"] > 0
    assert told["samples"]["nobody was answered for, upgrades (ms)"]["samples"] == 1
