"""What clients do to a daemon, by accident or on purpose, and what others notice of it: nothing."""

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from conftest import Daemon, Spawn
from native_rig import Rig
from ull.client import Client

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
PING = b"\x04\x07\x04PING\x00\x00"


def ready(identity: bytes = b"") -> bytes:
    """The handshake's second half, of a DEALER."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
    return b"\x04" + bytes([len(body)]) + body


def message(payload: bytes) -> bytes:
    """A request as it is on ZeroMQ's wire: two frames, the second of less than 256 bytes."""
    return b"\x01\x04ull1" + b"\x00" + bytes([len(payload)]) + payload


def connect(url: str, identity: bytes = b"") -> socket.socket:
    """A connection that has shaken hands and is free to do anything."""
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(20)
    link.connect(url.removeprefix("ipc://"))
    link.sendall(GREETING + ready(identity))
    heard = b""
    while len(heard) < len(GREETING) + 43:  # the daemon's own greeting and READY, before which it takes no message
        heard += link.recv(4096)
    return link


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def until(condition: Iterator[bool]) -> None:
    """Fails after 30 seconds without a True."""
    deadline = time.monotonic() + 30
    while not next(condition):
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


def check_served(daemon: Daemon) -> None:
    """A new client is answered, once the queue has room."""
    with Client(daemon.url) as client:
        assert client.health().status == "ok"
        until(client.stats().engine["slots_used"] == 0 for _ in itertools.count())
        assert client.generate([5], max_tokens=3).result().usage.completion_tokens == 3


def test_a_client_that_hangs_up_on_its_backlog_harms_nobody(spawn: Spawn) -> None:
    """libzmq aborts the process if it finds a PING in what it had stopped reading."""
    daemon = spawn(script={"round_ns": 100_000})
    request = message(msgspec.msgpack.encode({"type": "generate", "id": 1, "token_ids": [5], "max_tokens": 2}))
    for _ in range(10):
        links = [connect(daemon.url) for _ in range(5)]
        for link in links:
            link.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                link.sendall((request * 20 + PING) * 30)
            link.close()
    check_served(daemon)


def test_what_large_messages_take_is_bounded_and_comes_back(spawn: Spawn) -> None:
    daemon = spawn("--set", f"io.max_message_bytes={2**24}", script={})
    check_served(daemon)
    before = resident_mb(daemon.pid)
    payload = msgspec.msgpack.encode({"type": "generate", "id": 7, "token_ids": [5], "padding": b"\0" * (15 << 20)})
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [context.socket(zmq.DEALER) for _ in range(2)]
    peak = before
    for client in clients:
        client.rcvtimeo = 20_000
        client.connect(daemon.url)
    for client in clients * 15:  # 450 MB
        client.send_multipart([b"ull1", payload])
        peak = max(peak, resident_mb(daemon.pid))
    for client in clients:
        ends = 0
        while ends < 15:  # each is answered: accepted and done, or refused as a duplicate or as too much
            reply = msgspec.msgpack.decode(client.recv_multipart()[1])
            peak = max(peak, resident_mb(daemon.pid))
            if reply["type"] in ("done", "error"):
                assert reply["id"] == 7, reply
                ends += 1
    context.destroy(0)
    assert peak < before + 300
    until(resident_mb(daemon.pid) < before + 60 for _ in itertools.count())
    check_served(daemon)


def test_clients_take_turns_however_much_one_has_sent(tmp_path: Path) -> None:
    rig = Rig(tmp_path, {"tokens": [97]}, io={"max_message": 1024})
    rig.control.rcvhwm = 1  # as the control plane has it
    with rig:
        flood, other = rig.client(b"flood"), rig.client(b"other")
        for number in range(3000):
            flood.send([b"ull1", str(number).encode()])
        rig.wait_until(lambda: rig.io.stats()["backlog_bytes"] >= 2990 * 256)  # a few are beyond the backlog
        other.send([b"ull1", b"late"])
        rig.wait_until(lambda: rig.io.stats()["backlog_bytes"] >= 2991 * 256)
        heard = [rig.control.recv_multipart()[1:3] for _ in range(3001)]
        assert heard.index([b"other", b"late"]) < 20
        assert [int(payload) for name, payload in heard if name == b"flood"] == list(range(3000))
        assert rig.io.stats()["refused"] == 0


def test_a_small_message_that_waits_does_not_hold_the_buffer_it_came_in(tmp_path: Path) -> None:
    rig = Rig(tmp_path, {"tokens": [97]})
    rig.control.rcvhwm = 1
    with rig:
        client = rig.client(b"client")
        before = resident_mb(os.getpid())
        for _ in range(1500):  # each is received by itself, into 8 KiB
            client.send([b"ull1", b"x" * 100])
            time.sleep(0.001)
        rig.wait_until(lambda: rig.io.stats()["backlog_bytes"] >= 1490 * 356)
        assert resident_mb(os.getpid()) < before + 6


@pytest.mark.parametrize("first", ["lives", "is stopped"])
def test_a_routing_id_belongs_to_its_newest_connection(tmp_path: Path, first: str) -> None:
    with Rig(tmp_path, {"tokens": [97]}) as rig:
        if first == "lives":
            rig.client(b"desk")
        else:  # nobody reads or writes at the other end, and the kernel keeps the connection
            link = connect(rig.io.endpoints[0], b"desk")
            link.sendall(message(b"hello"))
            assert rig.control.recv_multipart()[1] == b"desk"
        second = rig.client(b"desk")
        rig.control.send_multipart([b"desk", msgspec.msgpack.encode({"id": 5})])
        assert second.receive() == {"id": 5}


def test_a_stream_that_is_read_is_not_taken_over(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": [97], "round_ns": 1_000_000, "context": 2000, "pages": 100}) as rig:
        first = rig.client(b"desk")
        rig.submit(b"desk", 1, b"once upon", max_tokens=600)
        assert first.receive()["type"] == "token"
        second = rig.context.socket(zmq.DEALER)
        second.routing_id, second.linger = b"desk", 0
        second.connect(rig.io.endpoints[0])
        second.send_multipart([b"ull1", b"not heard"])
        frames, done = first.finish(1)
        assert done["usage"]["completion_tokens"] == 600
        assert sum(len(frame["ids"]) for frame in frames) == 599
        second.close()
        rig.record()
        rig.client(b"desk")  # now it has the name: its hello is heard
