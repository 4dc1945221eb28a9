"""Broken networks, floods and a restart under load: nobody hangs, nothing stays, and each request has one end."""

import contextlib
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ull
from conftest import Spawn
from processes import descriptors, resident_mb

PROMPT = "def main():\n"
GOLDEN = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)  # ZeroMQ's
LONG = {"tokens": [65], "round_ns": 2_000_000, "context": 9000, "pages": 200}


def golden(url: str) -> list[int]:
    with ull.Client(url, connect_timeout=20) as client:
        return client.generate(PROMPT, **GOLDEN).result().token_ids


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_idle(url: str, clients: int = 1) -> bool:
    """Nothing is left of anybody's request; `clients`: with this one."""
    with ull.Client(url, connect_timeout=20) as client:
        stats = client.stats()
        ended = sum(stats.requests["finished"].values())
        return (
            stats.engine["slots_used"] == 0 and ended == stats.requests["accepted"] and stats.io["clients"] <= clients
        )


class Network:
    """A way to a daemon that may be cut, stopped and mended."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.carries = threading.Event()
        self.carries.set()
        self.works = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Both ends hear of it at once, in the rudest way: what was under way is lost."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.close()
        self._pairs.clear()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self.works:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._pairs.append((client, server))
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self.carries.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_network_that_breaks_and_is_mended(spawn: Spawn) -> None:
    daemon = spawn(url="tcp://127.0.0.1:0", script=LONG)
    network = Network(daemon.url)
    with ull.Client(network.url, connect_timeout=20) as client, ull.Client(daemon.url) as near:
        for number in range(5):
            running, waiting = client.generate([5], max_tokens=5000), client.generate([5], max_tokens=5000)
            next(running)
            until(lambda asked=3 * number + 2: near.stats().requests["accepted"] == asked, "one was never asked")
            network.works = False
            network.cut()
            for stream in (running, waiting):
                with pytest.raises(ull.ConnectionLost):
                    stream.result()
            network.works = True
            assert client.generate([5], max_tokens=3).result().finish_reason == "length"  # by the same client
    network.close()
    until(lambda: is_idle(daemon.url), "what was under way did not end")
    ends = daemon.wait_events("request", 15)
    assert sum(event["finish"] == "cancelled" for event in ends) == 10
    assert len({(event["client"], event["id"]) for event in ends}) == len(ends) == 15


def test_a_network_that_stands_still_costs_others_nothing(spawn: Spawn) -> None:
    script = {"tokens": [65], "round_ns": 20_000, "context": 200_000, "pages": 4000}
    daemon = spawn(url="tcp://127.0.0.1:0", script=script)
    network = Network(daemon.url)
    with ull.Client(network.url) as far, ull.Client(daemon.url) as near:
        stream = far.generate([5], max_tokens=130_000, logprobs=5)
        next(stream)
        network.carries.clear()
        ends = daemon.wait_events("request", 1)  # it is given up: its client takes nothing
        # By the daemon after io.client_stall_ms, or by the kernel, where that takes five seconds to fill its buffers.
        assert (ends[0]["finish"], ends[0]["connection"] in ("stalled", "gone")) == ("cancelled", True)
        assert near.generate([5], max_tokens=3).result().finish_reason == "length"
        network.carries.set()
        try:
            result = stream.result()  # what was sent, and its end
        except ull.ConnectionLost:
            assert ends[0]["connection"] == "gone"
        else:
            assert result.error is not None
            assert (result.finish_reason, result.error.code) == ("cancelled", "stalled")
    network.close()
    until(lambda: is_idle(daemon.url), "the slot was lost")


def test_descriptors_that_run_out_come_back(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn()
    expected = golden(daemon.url)
    used = descriptors(daemon.pid)
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    with ull.Client(daemon.url) as honest:
        honest.health()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 4, before[1]))
        path = daemon.url.removeprefix("ipc://") + ".local"
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        for each in crowd:
            each.connect(path)  # the kernel takes them; the daemon cannot
        assert honest.generate(PROMPT, **GOLDEN).result().token_ids == expected
        assert honest.health().status == "ok"
        for each in crowd:
            each.close()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        assert golden(daemon.url) == expected
    until(lambda: descriptors(daemon.pid) <= used + 1, "descriptors were lost")


def test_garbage_on_every_door_is_thrown_away(spawn: Spawn, tmp_path: Path) -> None:
    ipc = f"ipc://{tmp_path}/s.sock"
    daemon = spawn("--listen", "tcp://127.0.0.1:0", "--set", "metrics.listen=127.0.0.1:0", url=ipc)
    expected = golden(ipc)
    tcp, metrics = daemon.urls[1].removeprefix("tcp://"), daemon.ready["metrics"].split("/")[2]
    doors: list[tuple[int, object]] = [
        (socket.AF_UNIX, f"{tmp_path}/s.sock"),
        (socket.AF_UNIX, f"{tmp_path}/s.sock.local"),
        *((socket.AF_INET, (address.split(":")[0], int(address.split(":")[1]))) for address in (tcp, metrics)),
    ]
    before, random_ = resident_mb(daemon.pid), random.Random(1)
    beginnings = (b"", b"ull1" + bytes(4), GREETING, b"GET /metrics HTTP/1.1\r\n")
    for number in range(160):
        family, address = doors[number % len(doors)]
        with socket.socket(family) as peer:
            peer.settimeout(20)
            with contextlib.suppress(OSError):
                peer.connect(address)
                peer.sendall(random_.choice(beginnings) + random_.randbytes(random_.randrange(1, 100_000)))
        if number % 20 == 0:
            assert golden(ipc) == expected
    assert golden(ipc) == expected
    assert resident_mb(daemon.pid) < before + 30
    until(lambda: is_idle(ipc, clients=2), "connections were lost")  # the exporter's is one


def test_connections_that_take_their_time_keep_nobody_out(spawn: Spawn) -> None:
    daemon = spawn(url="tcp://127.0.0.1:0")
    expected = golden(daemon.url)
    host, port = daemon.url.removeprefix("tcp://").rsplit(":", 1)
    slow = [socket.create_connection((host, int(port))) for _ in range(60)]
    for at in range(12):
        for peer in slow:
            with contextlib.suppress(OSError):
                peer.send(GREETING[at : at + 1])
        if at % 4 == 0:
            assert golden(daemon.url) == expected
        time.sleep(0.15)
    until(lambda: is_idle(daemon.url), "half a handshake was waited for")
    for peer in slow:
        peer.close()


def test_a_restart_under_load_loses_nothing_in_silence(spawn: Spawn, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s.sock"
    first = spawn(url=url)
    expected = golden(url)
    done, problems, answers, lost = threading.Event(), [], [0], [0]

    def ask() -> None:
        with ull.Client(url, connect_timeout=60) as client:
            while not done.is_set():
                try:
                    result = client.generate(PROMPT, **GOLDEN).result()
                except (ull.ConnectionLost, ull.Draining, ull.Busy):
                    lost[0] += 1  # and the same client goes on with the successor
                except ull.UllError as error:
                    problems.append(error)
                else:
                    answers[0] += 1
                    if result.token_ids != expected:
                        problems.append(AssertionError(result.token_ids))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: answers[0] > 5, "no answers from the first")
        first.kill()
        seen = answers[0]
        second = spawn(url=url)
        until(lambda: answers[0] > seen + 8, "no answers from the second")
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert problems == []
    assert lost[0] >= 1
    until(lambda: is_idle(url), "slots were lost")
    assert golden(second.url) == expected
