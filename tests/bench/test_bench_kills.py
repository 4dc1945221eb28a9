"""bench/kills.py, with few clients: it counts whom it killed, and most of those had asked."""

from pathlib import Path

from bench_reports import report_of


def test_forty_killed_clients_are_counted_and_had_asked(tmp_path: Path) -> None:
    told, outcome = report_of("kills", tmp_path, "--kills", "40")
    missed = [check["name"] for check in told["checks"] if not check["ok"] and not check["name"].startswith("memory")]
    assert missed == [], outcome.stdout  # of memory, so few say nothing
    counted = {check["name"]: check["value"] for check in told["checks"]}
    assert counted["clients killed"] == sum(told["samples"]["killed"].values()) == 40
    assert counted["clients killed that had asked"] >= told["samples"]["killed"]["streaming"] > 0
