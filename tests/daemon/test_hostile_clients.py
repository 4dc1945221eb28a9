"""What clients do to a daemon, by accident or on purpose, and what others notice of it: nothing."""

import contextlib
import itertools
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
from processes import resident_mb
from ull.client.sync import Client

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
PING = b"\x04\x07\x04PING\x00\x00"


def message(payload: bytes) -> bytes:
    """A request as it is on ZeroMQ's wire: two frames, the second of less than 256 bytes."""
    return b"\x01\x04ull1" + b"\x00" + bytes([len(payload)]) + payload


def connect(url: str) -> socket.socket:
    """A connection that has shaken hands and is free to do anything."""
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(20)
    link.connect(url.removeprefix("ipc://"))
    link.sendall(GREETING + READY)
    heard = b""
    while len(heard) < len(GREETING + READY):  # the daemon's own, as long
        heard += link.recv(4096)
    return link


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
    """Which has made libzmq abort the process: hence no ROUTER of its."""
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
    rig.control.set_high_water(1)  # as the control plane has it
    with rig:
        flood, other = connect(rig.io.endpoints[0]), connect(rig.io.endpoints[0])
        flood.setblocking(False)
        sent = b""
        with contextlib.suppress(BlockingIOError):  # until neither the daemon nor the kernel takes more
            while True:
                sent = sent or b"".join(message(b"%d" % number) for number in range(100_000))
                sent = sent[flood.send(sent) :]
        other.sendall(message(b"late"))
        heard = [rig.control.recv_multipart()[2] for _ in range(100)]
        assert heard.index(b"late") < 20
        heard.remove(b"late")
        assert heard == [b"%d" % number for number in range(99)]
        flood.close()
        other.close()


@pytest.mark.parametrize("size", [0, 200, 1 << 20])
def test_a_message_without_an_end_fills_nothing(spawn: Spawn, size: int) -> None:
    daemon = spawn(script={})
    check_served(daemon)
    before = resident_mb(daemon.pid)
    link = connect(daemon.url)
    frame = (b"\x01" + bytes([size]) if size < 256 else b"\x03" + struct.pack(">Q", size)) + bytes(size)
    batch = frame * max(1, (1 << 20) // len(frame))
    with pytest.raises(OSError):  # it is closed
        for _ in range(100):
            link.sendall(batch)
    link.close()
    assert resident_mb(daemon.pid) < before + 30
    check_served(daemon)


def test_a_routing_id_names_nobody(spawn: Spawn) -> None:
    """Clients of one name are as many clients; each gets what it has asked for, and nothing else."""
    daemon = spawn(script={"round_ns": 2_000_000})
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def client() -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.DEALER)
        socket.routing_id, socket.rcvtimeo, socket.linger = b"desk", 20_000, 0
        socket.connect(daemon.url)
        return socket

    def ask(socket: "zmq.Socket[bytes]", max_tokens: int) -> None:
        request = {"type": "generate", "id": 1, "token_ids": [5], "max_tokens": max_tokens, "ignore_eos": True}
        socket.send_multipart([b"ull1", msgspec.msgpack.encode(request)])

    def tokens(socket: "zmq.Socket[bytes]") -> int:
        count = 0
        while (frame := msgspec.msgpack.decode(socket.recv_multipart()[1]))["type"] == "token":
            assert frame["index"] == count
            count += len(frame["ids"])
        assert frame["type"] == "done" and frame["usage"]["completion_tokens"] == count
        return count

    first, second = client(), client()
    ask(first, 200)
    first.poll(20_000)
    ask(second, 5)
    assert tokens(second) == 5
    assert tokens(first) == 200
    ask(first, 100_000)
    first.poll(20_000)
    first.close()  # in mid stream; the heir comes at once, under the same name and with the same id
    heir = client()
    ask(heir, 7)
    assert tokens(heir) == 7
    assert not heir.poll(100)
    context.destroy(0)
    check_served(daemon)
