"""The request that a daemon sends itself before it is ready: it must be answered, and must leave no trace."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Spawn
from ull.client.sync import Client
from ull.spawn import python_environment

COMMAND = [sys.executable, str(ROOT / "tests/rigs/daemons/rehearsing_daemon.py")]
SIGNS_OF_LIFE = {"sleeps", "requests", "replies"}  # of a thread, and of the clients that ask


def rehearse(bundle: Path, home: Path, fault: str, script: dict[str, Any] | None = None) -> subprocess.Popen[str]:
    """A daemon with this fault, on its way to READY."""
    environment = python_environment() | {
        "ULL_TEST_SCRIPT": json.dumps(script or {}),
        "ULL_TEST_REHEARSAL": fault,
    }
    arguments = [str(bundle), "--listen", f"ipc://{home / 'r.sock'}", "--threads", "1"]
    return subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def last_words(process: subprocess.Popen[str]) -> str:
    """What a daemon that cannot start says: one line, and no READY. It may have warned of memory before."""
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    lines = [line for line in said.splitlines() if " warning " not in line]
    assert len(lines) == 1, said
    assert lines[0].startswith("ulld: cannot start: the request that the daemon sends itself at ipc://"), said
    return lines[0]


def wait_for_counts(client: Client, started: int = 0) -> dict[str, Any]:
    """All that `stats` counts of requests, once the threads have published what they have done."""
    deadline = time.monotonic() + 20
    while True:
        stats = client.stats()
        io = stats.io
        unanswered = io["requests"] - started - io["replies"]  # at most the one that asks
        counted = stats.requests["accepted"] == stats.engine["started"] == started
        if counted and io["local_clients"] == 1 and unanswered in (0, 1):
            break
        assert time.monotonic() < deadline, stats
        time.sleep(0.03)
    io = {name: value for name, value in io.items() if name not in SIGNS_OF_LIFE}
    return {"io": io, "requests": stats.requests, "latency": stats.latency, "engine": stats.engine}


@pytest.mark.parametrize(
    ("fault", "script", "reason"),
    [
        ("tokenizer", {}, "KeyError: 'no such piece'"),
        ("", {"fail_step": 0, "failure": "the chip has melted"}, "(zeromq) failed: the chip has melted"),
        ("", {"fail_step": 3, "failure": "it has melted later"}, "(local) failed: it has melted later"),
        ("deaf", {}, "(zeromq) failed: no answer within 0.5 s (the engine is ok)"),
    ],
)
def test_what_fails_the_daemon_s_own_request_ends_the_start(
    tiny_bundle: Path, tmp_path: Path, fault: str, script: dict[str, Any], reason: str
) -> None:
    assert reason in last_words(rehearse(tiny_bundle, tmp_path, fault, script))


def test_sigterm_ends_the_wait_for_the_daemon_s_own_request(tiny_bundle: Path, tmp_path: Path) -> None:
    process = rehearse(tiny_bundle, tmp_path, "patient")
    deadline = time.monotonic() + 60
    while not (tmp_path / "r.sock.local").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "stopped by SIGTERM before it was ready" in said


def test_the_daemon_s_own_request_leaves_no_trace(tiny_bundle: Path, tmp_path: Path, spawn: Spawn) -> None:
    """A daemon that has asked itself answers as one that has not, and its client finds nothing in the cache."""
    plain = spawn(script={})
    daemon = spawn("--set", "log.level=debug", command=COMMAND)
    daemon.wait_events("ready", 1)
    own = daemon.events("request")
    assert [(event["level"], event["finish"], event["completion"]) for event in own] == [("debug", "length", 2)] * 2
    assert [event["client"][:4] for event in own] == ["005a", "004c"], "by ZeroMQ, then by the local transport"
    lines = [json.loads(line)["event"] for line in daemon.log_lines()]
    assert lines.index("ready") > max(index for index, event in enumerate(lines) if event == "request")

    with Client(daemon.url) as client, Client(plain.url) as other:
        fresh, expected = wait_for_counts(client), wait_for_counts(other)
        assert fresh == expected
        assert fresh["requests"]["accepted"] == fresh["engine"]["started"] == fresh["engine"]["progress"] == 0
        result, twin = (each.generate("a", max_tokens=8, temperature=0.8, seed=3).result() for each in (client, other))
        assert (result.usage.cached_tokens, result.token_ids) == (0, twin.token_ids)
        assert wait_for_counts(client, 1)["engine"]["submitted"] == 1
