"""Which transport a client takes, what it does about peers that are none, and what interrupts may cost."""

import asyncio
import itertools
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq

import ull
from alarms import ringing
from fake_daemon import HELLO, FakeDaemon, done, token, words
from ull import wire
from ull.client.dealer import DealerConnection
from ull.client.local import LocalConnection
from ull.client.protocol import Protocol


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'ull.sock'}"


@contextmanager
def listener(url: str, greet: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something else at the local socket: each of its connections is handed to `greet` and kept open."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(url.removeprefix("ipc://") + ".local")
        server.listen()
        clients: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    clients.append(server.accept()[0])
                    greet(clients[-1])
            except OSError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for client in clients:
            client.close()


def test_the_url_and_the_argument_decide(url: str, tmp_path: Path) -> None:
    with FakeDaemon(url, words, local=True):
        for asked, taken in [("auto", "local"), ("local", "local"), ("zeromq", "zeromq")]:
            with ull.Client(url, transport=asked) as client:
                assert client.transport is None
                assert client.generate("one").result().text == "one "
                assert client.transport == taken
    with pytest.raises(ull.UllError, match="transport is 'shared'; choose auto, local or zeromq"):
        ull.Client(url, transport="shared")
    for other in ("tcp://127.0.0.1:5", "ipc://@abstract"):
        with pytest.raises(ull.UllError, match="transport is local, but"):
            ull.Client(other, transport="local")
        with pytest.raises(ull.UllError, match="transport is local, but"):
            ull.AsyncClient(other, transport="local")


def test_local_alone_says_why_there_is_nobody(url: str) -> None:
    with ull.Client(url, transport="local", connect_timeout=0.1) as client:
        with pytest.raises(ull.ConnectionLost, match=r"ull.sock.local: No such file or directory"):
            client.generate("x")
        with FakeDaemon(url, words, local=False), pytest.raises(ull.ConnectionLost, match="No such file"):
            client.generate("x")
        client._connect_timeout = 20  # who is there may be slow to greet
        with FakeDaemon(url, words, local=True):
            assert client.generate("there now").result().text == "there now "


def test_local_alone_in_asyncio(url: str) -> None:
    async def main() -> None:
        async with ull.AsyncClient(url, transport="local", connect_timeout=0.1) as client:
            with pytest.raises(ull.ConnectionLost, match=r"ull.sock.local: No such file or directory"):
                await client.generate("x").result()
            client._connect_timeout = 20
            with FakeDaemon(url, words, local=True):
                assert (await client.generate("there now").result()).text == "there now "
                assert client.transport == "local"

    asyncio.run(main())


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    name = "s" * (107 - len(str(tmp_path)) - 1)  # fits, but not with .local behind it
    url = f"ipc://{tmp_path / name}"
    with pytest.raises(ull.UllError, match="too long"):
        ull.Client(url, transport="local")
    with FakeDaemon(url, words), ull.Client(url) as client:
        assert client.generate("one").result().text == "one "
        assert client.transport == "zeromq"


def test_a_socket_that_nobody_listens_on(url: str) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(url.removeprefix("ipc://") + ".local")
    with FakeDaemon(url, words), ull.Client(url) as client:
        assert client.generate("one").result().text == "one "
        assert client.transport == "zeromq"


@pytest.mark.parametrize("transport", ["auto", "local"])
def test_a_socket_that_is_not_for_us(url: str, monkeypatch: pytest.MonkeyPatch, transport: Any) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr("ull.client.link.LocalConnection", refuse)
    client = ull.Client(url, transport=transport, connect_timeout=0.05)
    with client, pytest.raises(ull.ConnectionLost, match=r"permission to connect to .*\.local is denied"):
        client.generate("x")


@pytest.mark.parametrize(
    "greet",
    [
        lambda client: None,  # says nothing
        lambda client: client.close(),
        lambda client: client.sendall(b"ull2\0\0\0\0"),
        lambda client: client.sendall(b"ull"),
        lambda client: client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"),
    ],
    ids=["mute", "hangs up", "another version", "half", "another protocol"],
)
def test_what_is_no_daemon_of_ours_is_left_alone(url: str, greet: Callable[[socket.socket], None]) -> None:
    with listener(url, greet), FakeDaemon(url, words):
        with ull.Client(url, connect_timeout=20) as client:
            assert client.generate("one").result().text == "one "
            assert client.transport == "zeromq"

        async def main() -> None:
            async with ull.AsyncClient(url, connect_timeout=20) as other:
                assert (await other.generate("two").result()).text == "two "
                assert other.transport == "zeromq"

        asyncio.run(main())


def test_local_alone_keeps_trying_what_does_not_answer(url: str) -> None:
    client = ull.Client(url, transport="local", connect_timeout=0.2)
    nobody = pytest.raises(ull.ConnectionLost, match=r"no daemon answers at .*: .*(hung up|gone|Broken pipe)")
    with listener(url, lambda client: client.close()), client:
        deadline = time.monotonic() + 20
        while client._link.trouble is None and time.monotonic() < deadline:
            client.poll(0.01)  # until it has been hung up on
        with nobody:
            client.generate("x")


def test_a_daemon_that_came_after_the_client_is_reached_locally(url: str) -> None:
    with ull.Client(url, connect_timeout=20) as client:
        client.poll(0.05)
        with FakeDaemon(url, words, local=True):
            assert client.generate("late").result().text == "late "
            assert client.transport == "local"


def test_a_daemon_that_comes_back_otherwise_is_found(url: str) -> None:
    with ull.Client(url, connect_timeout=20) as client:
        for local, taken in [(True, "local"), (False, "zeromq"), (True, "local")]:
            with FakeDaemon(url, words, local=local):
                assert client.generate("back again").result().text == "back again "
                assert client.transport == taken
            deadline = time.monotonic() + 20
            while client.transport is not None and time.monotonic() < deadline:
                client.poll(0.01)


def test_a_daemon_that_dies_within_a_frame(url: str) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        payload = wire.encode(token(request.id, 0, "whole"))
        frame = struct.pack("<I", len(payload)) + payload
        daemon.send_raw(identity, frame, frame[: len(frame) // 2])

    daemon = FakeDaemon(url, handler, local=True)
    with ull.Client(url) as client:
        stream = client.generate("x")
        assert next(stream).text == "whole"
        daemon.close()
        with pytest.raises(ull.ConnectionLost, match="was lost while the request was in flight"):
            next(stream)


def test_frames_may_be_cut_and_joined_anywhere(url: str) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        replies = [*(token(request.id, index, f"{index} ") for index in range(40)), done(request.id, 40)]
        payloads = [wire.encode(reply) for reply in replies]
        data = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
        size = len(request.prompt or "") if isinstance(request, wire.Generate) else 1
        for start in range(0, len(data), size):
            daemon.send_raw(identity, data[start : start + size])

    with FakeDaemon(url, handler, local=True), ull.Client(url) as client:
        for size in (1, 7, 100, 1000, 10_000):
            result = client.generate("x" * size).result()
            assert result.text == "".join(f"{index} " for index in range(40))


def test_large_messages_both_ways(url: str) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        assert isinstance(request, wire.Generate)
        daemon.send(identity, token(request.id, 0, request.prompt or ""), done(request.id, 1))

    text = "many words " * 300_000  # more than the kernel takes at once
    with FakeDaemon(url, handler, local=True), ull.Client(url) as client:
        streams = [client.generate(text), client.generate("short")]
        assert [stream.result().text for stream in streams] == [text, "short"]

        async def main() -> None:
            async with ull.AsyncClient(url) as other:
                results = await asyncio.gather(other.generate(text).result(), other.generate("short").result())
                assert [result.text for result in results] == [text, "short"]

        asyncio.run(main())


def test_several_clients_of_one_process(url: str) -> None:
    with FakeDaemon(url, words, local=True):
        clients = [ull.Client(url) for _ in range(5)]
        streams = [client.generate(f"client {number}") for number, client in enumerate(clients)]
        assert [stream.result().text for stream in streams] == [f"client {number} " for number in range(5)]
        for client in clients:
            client.close()


def test_one_message_at_a_time(url: str) -> None:
    """What came with a message waits in the client while the caller's code runs."""
    with FakeDaemon(url, words, local=True), ull.Client(url) as client:
        stream = client.generate("one two three")
        assert next(stream).text == "one "
        assert not stream.finished
        assert client.poll(10)
        while not stream.finished:
            client.poll(10)
        assert [item.text for item in stream] == ["two ", "three "]


# ---- what may be fed twice, or interrupted ------------------------------------------------------------------------


def test_messages_may_be_fed_twice() -> None:
    protocol = Protocol()
    state = protocol.open_stream(wire.Generate(id=1, prompt="x"))
    tail = wire.Token(id=1, index=2, ids=[], text="!", time_ns=5)
    query = protocol.open_query(wire.Health(id=2))
    health = wire.HealthReply(id=2, status="ok", uptime_ns=1, queue_length=0)
    for reply in [token(1, 0, "a"), token(1, 1, "b"), tail, health, done(1, 2)]:
        for received_ns in (7, 8):
            protocol.receive(wire.encode(reply), received_ns)
    assert (state.result().text, state.result().token_ids, query.reply) == ("ab!", [100, 101], health)


def test_a_token_that_is_missing_fails_the_stream() -> None:
    protocol = Protocol()
    state = protocol.open_stream(wire.Generate(id=1, prompt="x"))
    protocol.receive(wire.encode(token(1, 0, "a")), 1)
    protocol.receive(wire.encode(token(1, 3, "d")), 2)
    with pytest.raises(ull.ConnectionLost, match="tokens 1 to 2 of the request were lost"):
        state.result()
    assert protocol.live_streams() == []


def test_a_request_given_up_before_it_was_sent_is_forgotten() -> None:
    protocol = Protocol()
    state = protocol.open_stream(wire.Generate(id=1, prompt="x"))
    protocol.receive(wire.encode(wire.Ack(id=1, known=False)), 1)  # to a cancel of an earlier life: no business of ours
    assert not state.finished
    state.abandoned = True
    protocol.receive(wire.encode(wire.Ack(id=1, known=False)), 1)
    assert state.finished
    assert protocol.live_streams() == []


class Interrupt(Exception):
    pass


@contextmanager
def alarms(after_s: float, every_s: float = 0.0) -> Iterator[None]:
    """An exception from a signal handler at any moment in the client's code, once or again and again."""

    def ring(_: int, frame: FrameType | None) -> None:
        names = [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]
        if frame is not None and frame.f_globals["__name__"].startswith("ull.") and "__del__" not in names:
            raise Interrupt  # the interpreter would report, and swallow, what leaves a __del__

    with ringing(ring, after_s, every_s):
        yield


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_interrupts_cost_no_token(url: str, transport: Any) -> None:
    """A stream is read to its end although reading it is interrupted all the time."""
    count = 600

    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate):
            for index in range(count):
                daemon.send(identity, token(request.id, index, f"{index} "))
            daemon.send(identity, done(request.id, count))

    interrupts = 0
    with FakeDaemon(url, handler, local=True), ull.Client(url, transport=transport) as client:
        for _ in range(20):
            stream = client.generate("x")
            deadline = time.monotonic() + 60
            with alarms(0.0007, 0.0007):
                while time.monotonic() < deadline:
                    try:
                        if stream.finished:
                            break
                        client.poll(10)
                    except Interrupt:
                        interrupts += 1
            assert stream.result().text == "".join(f"{index} " for index in range(count))
    assert interrupts > 0


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_a_request_whose_sending_was_interrupted_is_cancelled(url: str, transport: Any) -> None:
    """What its connection brought to the daemon is cancelled over the same one; and the next request succeeds."""
    live: set[tuple[bytes, int]] = set()
    newest = [b""]

    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        newest[0] = identity
        if isinstance(request, wire.Generate) and request.prompt == "x":
            live.add((identity, request.id))
        elif isinstance(request, wire.Cancel):
            known = (identity, request.id) in live
            live.discard((identity, request.id))
            daemon.send(identity, wire.Ack(id=request.id, known=known))
            if known:
                daemon.send(identity, done(request.id, 0, "cancelled"))
        else:
            words(daemon, identity, request)

    interrupts = 0
    with FakeDaemon(url, handler, local=True), ull.Client(url, transport=transport, connect_timeout=20) as client:
        client.health()
        first = newest[0]
        for turn in itertools.count():
            try:
                with alarms(0.00003 + turn % 97 * 0.000005), client.generate("x"):
                    pass
            except Interrupt:
                interrupts += 1
            # Most turns end before their alarm: the daemon must keep up.
            while len(client._protocol.live_streams()) > 100:
                client.poll(0.01)
            if interrupts == 60:
                break
        assert client.generate("and now").result().text == "and now "
        deadline = time.monotonic() + 20
        while client._protocol.live_streams() and time.monotonic() < deadline:
            client.poll(0.01)
        assert not client._protocol.live_streams()
        assert not live
        assert newest[0] == first


# ---- priority -----------------------------------------------------------------------------------------------------


def test_priority(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
    for wrong in (0, 100, -1):
        with pytest.raises(ull.UllError, match="priority must be 1 to 99"):
            ull.Client(url, priority=wrong)
    try:
        client = ull.Client(url, transport="zeromq", priority=1)
    except ull.UllError as error:
        assert "needs the right to real-time scheduling" in str(error)
        return
    with client, FakeDaemon(url, words):
        assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
        assert client.generate("one").result().text == "one "
        policies = [os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()]
        assert sum(policy & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR for policy in policies) >= 2  # and libzmq's
    assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == before


def test_priority_without_the_right(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(ull.UllError, match=r"`ulimit -r 7`.*LimitRTPRIO=7.*CAP_SYS_NICE") as caught:
        ull.Client(url, priority=7)
    assert caught.value.field == "priority"


def test_the_hello_is_the_wire_s_version() -> None:
    assert wire.VERSION + bytes(4) == HELLO
    with pytest.raises(FileNotFoundError):
        LocalConnection(Path("/nonexistent"))


def test_connections_that_nobody_closed_hold_up_no_other(tmp_path: Path) -> None:
    """At any moment of their handshake: libzmq's thread tells nobody of them, who would be waited for."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    url = f"ipc://{tmp_path / 'ull.sock'}"
    with FakeDaemon(url, words):
        for count in range(3000):
            connection = DealerConnection(url, context)
            for _ in range(count % 400):
                pass
            del connection
            if count % 50 == 0:
                time.sleep(0.02)  # libzmq closes descriptors in a thread of its own
        with ull.Client(url, transport="zeromq", context=context, connect_timeout=20) as client:
            assert client.generate("x y").result().text == "x y "
    context.term()
