"""`ull trace` on a real daemon: the stamps are in order, and belong to the requests that were asked."""

import json
import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from curve_rig import Keys, spawn_with_keys
from ull import wire
from ull.trace.chrome import chrome_json
from ull.trace.collect import Kind, Position, Trace

PROMPT = "def main():"


def trace(daemon: Daemon, *arguments: str, url: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ull", "trace", "--connect", url or daemon.url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] == name]


def test_one_request_from_its_client_to_its_last_frame(spawn: Spawn, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    daemon = spawn()
    output, picture = tmp_path / "t.json", tmp_path / "t.png"
    outcome = trace(daemon, PROMPT, "--max-tokens", "24", "-o", str(output), "--png", str(picture))
    assert outcome.returncode == 0, outcome.stderr
    assert "1 request," in outcome.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(output.read_text())["traceEvents"]
    sent = next(e["ts"] for e in events if e["name"] == "send")
    received = [e for e in events if e["name"] == "receive"]
    stages = [spans(events, name)[0] for name in ("admission", "queue", "prefill", "first round", "decode")]
    assert sent == 0 <= stages[0][0]
    for before, after in pairwise(stages):
        assert before[0] <= before[1] == pytest.approx(after[0])
    rounds, frames = spans(events, "round"), spans(events, "frame")
    assert rounds[0][1] == pytest.approx(stages[3][1])  # the first token
    assert rounds[-1][1] == pytest.approx(stages[4][1])  # the last
    emitted = [e["args"]["tokens"] for e in events if e["name"] == "round"]
    assert sum(emitted) == sum(e["args"]["tokens"] for e in received) == 24
    assert sum(e["args"]["tokens"] for e in events if e["name"] == "frame") == 24
    assert all(begin <= end for begin, end in (*rounds, *frames))
    assert frames[0][0] <= received[0]["ts"]  # a client may read a frame before the io thread looks at the clock again
    (whole,) = [e for e in events if e["ph"] == "X" and e["name"].startswith("request ") and e["pid"] == 1]
    assert whole["args"] == {"finish": "length", "prompt": 4, "cached": 0, "completion": 24}


def test_what_others_ask(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn()
    done = threading.Event()

    def load() -> None:
        with ull.Client(daemon.url) as client:
            while not done.is_set():
                client.generate(PROMPT, max_tokens=5, speculate="none").result()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        outcome = trace(daemon, "--seconds", "1", "-o", str(tmp_path / "t.json"))
    finally:
        done.set()
        thread.join()
    assert outcome.returncode == 0, outcome.stderr
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = Counter(e["name"] for e in events if e["ph"] == "X")
    assert names["round"] >= 5
    assert names["queue"] >= 1
    assert not [e for e in events if e["name"] == "send"]


def test_much_is_read_in_pieces_and_nothing_twice(spawn: Spawn) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 20_000, "context": 9000, "pages": 200})
    with ull.Client(daemon.url) as client:
        position, found = Position(), Trace()
        connection = position.skip(client)
        for _ in range(3):
            client.generate([5], max_tokens=1500).result()
            position.read(client, found)
        for _ in range(100):
            client.generate([5], max_tokens=1).result()
        position.read(client, found)
    rounds = [record for record in found.records if record.kind is Kind.ROUND]
    assert len(rounds) == 4600
    assert len({(record.begin_ns, record.request) for record in rounds}) == 4600
    assert {record.connection for record in found.records} == {connection}
    assert len(found.requests) == 103
    assert all(one.end_ns <= other.end_ns for one, other in pairwise(rounds))


def test_it_is_for_admins(spawn: Spawn, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    daemon = spawn_with_keys(spawn, keys)
    refused = trace(daemon, PROMPT, "--key", str(keys.file("bob")), "-o", str(tmp_path / "b.json"))
    assert (refused.returncode, "role admin" in refused.stderr) == (1, True)
    allowed = trace(daemon, PROMPT, "--key", str(keys.file("alice")), "-o", str(tmp_path / "a.json"))
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["x", "--seconds", "1"], "not both"),
        (["--seconds", "0"], "above 0"),
        (["-o", "/no/where/t.json", "x"], "/no/where"),
    ],
)
def test_wrong_use_is_one_line(spawn: Spawn, tmp_path: Path, arguments: list[str], said: str) -> None:
    where = [] if "-o" in arguments else ["-o", str(tmp_path / "t.json")]
    outcome = trace(spawn(), *arguments, *where)
    assert (outcome.returncode, outcome.stderr.count("\n"), said in outcome.stderr) == (1, 1, True)


def test_an_empty_trace_is_a_trace() -> None:
    assert chrome_json(Trace())["traceEvents"]


def test_drafters_have_the_core_s_numbers(shared_daemon: Daemon) -> None:
    with ull.Client(shared_daemon.url) as client:
        assert tuple(client.stats().engine["by_drafter"]) == wire.DRAFTERS[:-1]  # auto is none
