"""`ull top`: what lies between two looks, and the running view in a terminal of its own."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from ull import wire
from ull.commands.top import gpu_of
from ull.top.figures import History, Interval, Look, duration, quantile, sparkline


def look(at_s: float, tokens: int, uptime_s: float, buckets: list[tuple[int, int]] | None = None, **more: int) -> Look:
    histogram = wire.Histogram(sum=0, buckets=buckets or [])
    stats = wire.StatsReply(
        id=1,
        requests={"accepted": more.get("accepted", 0)},
        latency={},
        engine={"completion_tokens": tokens},
        io={},
        threads={"engine": {"working_ns": more.get("working_ns", 0)}},
        histograms={"time_to_first_token": histogram, "round": histogram},
    )
    return Look(at_s, stats, wire.HealthReply(id=1, status="ok", uptime_ns=int(uptime_s * 1e9), queue_length=0))


def test_rates_and_quantiles_are_of_what_came_between() -> None:
    before = look(10.0, 1000, 100, [(100, 50), (5000, 1)], accepted=5, working_ns=10**9)
    after = look(12.0, 1500, 102, [(100, 50), (200, 98), (5000, 3)], accepted=9, working_ns=2 * 10**9)
    interval = Interval.between(before, after)
    assert (interval.tokens_per_s, interval.requests_per_s) == (250, 2)
    assert (interval.gap_p50, interval.gap_p99) == (200, 5000)  # the fifty at 100 were there before
    assert interval.busy == {"engine": 0.5}


def test_a_daemon_s_successor_is_counted_from_its_start() -> None:
    interval = Interval.between(look(10.0, 1000, 100, [(100, 50)]), look(20.0, 80, 4, [(300, 2)]))
    assert interval.tokens_per_s == 20
    assert interval.ttft_p50 == 300


def test_sparklines_quantiles_and_durations() -> None:
    assert sparkline([0, None, 4, 8]) == "▁ ▅█"
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert quantile([], 0.5) is None
    assert [duration(ns) for ns in (None, 7, 1500, 25_000, 999_000, 1_230_000, 61 * 10**9)] == [
        *("-", "7 ns", "1.50 us", "25.0 us", "999 us", "1.23 ms", "61.0 s"),
    ]
    history = History(kept=3)
    for tokens in (1, 2, 3, 4):
        history.add(Interval.between(look(0, 0, 1), look(1, tokens, 2)))
    assert history.line("tokens_per_s", 10) == sparkline([2, 3, 4])


def top(url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ull", "top", "--connect", url, *arguments]
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_once_prints_a_frame(shared_daemon: Daemon) -> None:
    with ull.Client(shared_daemon.url) as client:
        client.generate("def", max_tokens=3).result()
    outcome = top(shared_daemon.url, "--once", "--interval", "0.1")
    assert outcome.returncode == 0, outcome.stderr
    for word in ("tiny", "ok", "in flight", "accepted", "KV pages", "engine thread"):
        assert word in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert len(outcome.stdout.splitlines()) <= 24


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    for arguments, said in ((["--interval", "0"], "--interval"), ([], "no daemon answers")):
        outcome = top(f"ipc://{tmp_path}/none", *arguments)
        assert (outcome.returncode, outcome.stderr.count("\n"), said in outcome.stderr) == (1, 1, True)


@pytest.mark.parametrize("device, asked", [(3, [3]), (None, [])])
def test_the_gpu_shown_is_the_daemon_s(monkeypatch: pytest.MonkeyPatch, device: int | None, asked: list[int]) -> None:
    numbers: list[int] = []
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=numbers.append)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    info = wire.InfoReply(id=1, engine={"target": "sm_90a"}, executor={"device": device}, limits={})
    assert (gpu_of(info) is None) == (device is None)
    assert numbers == asked


class Terminal:
    """`ull top` in a terminal."""

    def __init__(self, url: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.environ |= {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
            os.execv(sys.executable, [sys.executable, "-m", "ull", "top", "--connect", url, "--interval", "0.1"])
        self.seen = ""

    def until(self, pattern: str) -> None:
        """Reads until something new fits."""
        self.seen, deadline = "", time.monotonic() + 60
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            if select.select([self.descriptor], [], [], 1)[0]:
                self.seen += os.read(self.descriptor, 65536).decode(errors="replace")

    def status(self) -> Any:
        """Waits for its end; returns its exit status."""
        deadline = time.monotonic() + 30
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                if select.select([self.descriptor], [], [], 0.1)[0]:
                    os.read(self.descriptor, 65536)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(ended[1])


def test_the_view_goes_on_through_a_restart_and_ends_with_q(spawn: Spawn, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s.sock"
    first = spawn(url=url)
    terminal = Terminal(url)
    terminal.until("in flight")
    first.stop()
    terminal.until("unreachable, trying again")
    spawn(url=url)
    terminal.until("in flight")
    os.write(terminal.descriptor, b"q")
    assert terminal.status() == 0


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interrupt_ends_it(shared_daemon: Daemon, number: signal.Signals) -> None:
    terminal = Terminal(shared_daemon.url)
    terminal.until("in flight")
    os.kill(terminal.pid, number)
    assert terminal.status() == 130
