"""The soak says what it has seen, and its verdicts can fail."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench_reports import report_of
from conftest import ROOT

sys.path.append(str(ROOT / "bench"))
from soak import Look, Seen, checks_of, killed_clients

CALM = Look(0.0, 90_000, 35, 1, 0, 0, 1, "ok", True)
REQUESTS = {"accepted": 5, "finished": {"stop": 5}, "clients": {"ok": 5}}


def missed(looks: list[Look], seen: Seen | None = None, requests: dict[str, object] = REQUESTS) -> list[str]:
    return [check.name for check in checks_of(seen or Seen(), looks, requests, 1.0) if not check.ok]


def test_a_calm_daemon_passes() -> None:
    assert missed([CALM, replace(CALM, at_s=60.0, resident_kb=90_500)]) == []


@pytest.mark.parametrize(
    "change, name",
    [
        ({"resident_kb": 92_000}, "memory"),
        ({"descriptors": 36}, "descriptors"),
        ({"slots": 1}, "slots"),
        ({"sessions": 1}, "sessions"),
        ({"health": "stalled"}, "health"),
        ({"same": False}, "tokens"),
    ],
)
def test_each_verdict_can_fail(change: dict[str, object], name: str) -> None:
    looks = [CALM, replace(CALM, at_s=30.0), replace(CALM, at_s=60.0, **change)]  # type: ignore[arg-type]
    (found,) = missed(looks)
    assert name in found


def test_broken_promises_and_lost_requests_fail() -> None:
    looks = [CALM, replace(CALM, at_s=60.0)]
    assert missed(looks, Seen(broken=["x"])) == ["promises broken to clients"]
    assert missed(looks, None, {**REQUESTS, "accepted": 6}) == ["accepted requests without an end"]
    assert isinstance(Seen().begun, Counter)


def test_what_kills_clients_may_not_end_by_itself() -> None:
    seen = Seen()
    with killed_clients("nonsense://", 1, seen) as killer:
        killer.wait(120)
    assert seen.killed == {}
    (told,) = seen.broken
    assert "no first token" in told


def test_it_runs(tmp_path: Path) -> None:
    told, outcome = report_of("soak", tmp_path, "--minutes", "0.3", "--rate", "3")
    others = [check["name"] for check in told["checks"] if not check["ok"] and not check["name"].startswith("memory")]
    assert others == [], outcome.stdout  # of memory, so short a run says nothing
    assert told["samples"]["begun"]["stream"] > 0
    assert sum(told["samples"]["killed"].values()) > 0
    assert len(told["samples"]["looks"]) >= 3
