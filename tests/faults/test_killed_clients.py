"""Clients that are killed in mid stream, one after the other: no slot, page, descriptor or memory stays with them."""

import json
import subprocess
import sys
import time

from conftest import ROOT, Spawn
from processes import descriptors, resident_mb
from ull.client.sync import Client
from ull.spawn import python_environment

PROMPT = "def main():\n"


def kill_clients(url: str, count: int, seed: int) -> dict[str, int]:
    command = [sys.executable, str(ROOT / "bench/doomed.py"), url, "--kills", str(count), "--seed", str(seed)]
    run = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    counts: dict[str, int] = json.loads(run.stdout)
    return counts


def test_two_hundred_killed_clients_leave_nothing_behind(spawn: Spawn) -> None:
    daemon = spawn()
    with Client(daemon.url) as client:
        golden = client.generate(PROMPT, max_tokens=48, ignore_eos=True).result().token_ids
        warm_up = kill_clients(daemon.url, 40, seed=1)  # what is allocated once is
        before = descriptors(daemon.pid), resident_mb(daemon.pid)
        counts = kill_clients(daemon.url, 200, seed=2)
        assert sum(counts.values()) == 200 and counts["streaming"] > 100
        deadline = time.monotonic() + 60
        while client.stats().engine["slots_used"] or descriptors(daemon.pid) > before[0]:
            assert time.monotonic() < deadline, (client.stats().engine, descriptors(daemon.pid), before)
            time.sleep(0.05)
        assert resident_mb(daemon.pid) < before[1] + 20
        assert client.health().status == "ok"
        stats = client.stats()
        assert sum(stats.requests["finished"].values()) == stats.requests["accepted"] > 150
        streaming = warm_up["streaming"] + counts["streaming"]
        assert stats.requests["accepted"] - 1 > streaming  # of those killed early, some had asked
        whole = client.generate([100] * 1020, max_tokens=4, ignore_eos=True).result()  # takes every page that there is
        assert whole.usage.completion_tokens == 4
        assert client.generate(PROMPT, max_tokens=48, ignore_eos=True).result().token_ids == golden
        lines = daemon.wait_events("request", stats.requests["accepted"] + 2)
    assert len({(line["client"], line["id"]) for line in lines}) == len(lines)
