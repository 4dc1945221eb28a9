"""A daemon without an engine: a ROUTER and a local socket in a thread that answers by a script. For clients' tests."""

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import zmq

from ull import wire
from ull.client import AsyncClient, Client
from ull.client.dealer import DealerConnection

Handler = Callable[["FakeDaemon", bytes, wire.Request], None]

NOTHING_HAPPENED = wire.Timeline()


HELLO = b"ull1" + bytes(4)


class LocalServer:
    """The local transport's socket at `path`: hellos and frames, without a bound on anything."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self._clients: dict[bytes, socket.socket] = {}
        self._numbers = itertools.count(1)

    def sockets(self) -> list[socket.socket]:
        return [self.listener, *self._clients.values()]

    def ready(self, ready: list[socket.socket]) -> list[tuple[bytes, bytes]]:
        """Accepts, and reads one message of each readable client: (identity, payload)."""
        if self.listener in ready:
            client, _ = self.listener.accept()
            client.settimeout(10)
            with contextlib.suppress(BrokenPipeError):
                client.sendall(HELLO)
            if self._exactly(client, len(HELLO)) == HELLO:
                self._clients[b"\0L" + struct.pack(">Q", next(self._numbers))] = client
        messages = []
        for identity, client in list(self._clients.items()):
            if client in ready:
                header = self._exactly(client, 4)
                if len(header) < 4:
                    self._clients.pop(identity).close()
                    continue
                messages.append((identity, self._exactly(client, struct.unpack("<I", header)[0])))
        return messages

    def send(self, identity: bytes, payload: bytes) -> None:
        self.send_raw(identity, struct.pack("<I", len(payload)) + payload)

    def send_raw(self, identity: bytes, data: bytes) -> None:
        if identity in self._clients:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._clients[identity].sendall(data)

    def close(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        for each in self.sockets():
            each.close()

    @staticmethod
    def _exactly(client: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = client.recv(size - len(data))
            except ConnectionResetError:
                break
            if not more:
                break
            data += more
        return data


def await_loss(client: Client | AsyncClient, patience_s: float = 60.0) -> None:
    """Until the client could notice that its connection has gone: libzmq's thread tells it, when it is given time."""
    if isinstance(connection := client._link.connection, DealerConnection):
        assert connection._monitor.poll(patience_s * 1000)


class FakeDaemon:
    """Serves `url` with `handler(daemon, identity, request)` until closed. Remembers every request.

    local: serves the local transport beside an ipc endpoint too.
    """

    def __init__(self, url: str, handler: Handler, local: bool = False) -> None:
        self.url = url
        self.requests: list[wire.Request] = []
        self.local = LocalServer(url.removeprefix("ipc://") + ".local") if local else None
        self._handler = handler
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # nothing is dropped, as little as by the daemon
        self._socket.bind(url)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, identity: bytes, *replies: wire.Reply) -> None:
        """Sends replies; only from the handler (a zmq socket belongs to one thread)."""
        for reply in replies:
            if self.local is not None and identity.startswith(b"\0L"):
                self.local.send(identity, wire.encode(reply))
            else:
                self._socket.send_multipart([identity, *wire.encode_frames(reply)])

    def send_raw(self, identity: bytes, *frames: bytes) -> None:
        """Sends frames as they are; on the local transport as one run of bytes."""
        if self.local is not None and identity.startswith(b"\0L"):
            self.local.send_raw(identity, b"".join(frames))
        else:
            self._socket.send_multipart([identity, *frames])

    def wait_for(self, kind: type[wire.Request], count: int = 1) -> list[wire.Request]:
        """The requests of one kind once there are `count`; fails after a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [request for request in self.requests if isinstance(request, kind)]
            if len(found) >= count:
                return found
            time.sleep(0.002)
        raise AssertionError(f"{count} x {kind.__name__} never arrived: {self.requests}")

    def close(self, linger_ms: int = 0) -> None:
        """Disappears like a killed daemon: no goodbye to anyone. What it has sent may take `linger_ms` to leave."""
        self._stop.set()
        self._thread.join()
        if self.local is not None:
            self.local.close()
        self._socket.close(linger_ms)
        self._context.term()

    def __enter__(self) -> "FakeDaemon":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            local = [] if self.local is None else self.local.sockets()
            ready, _, _ = zmq.select([self._socket, *(each.fileno() for each in local)], [], [], 0.01)
            if self._socket in ready:
                identity, version, payload = self._socket.recv_multipart()
                assert version == wire.VERSION
                self._take(identity, payload)
            if self.local is not None:
                for identity, payload in self.local.ready([each for each in local if each.fileno() in ready]):
                    self._take(identity, payload)

    def _take(self, identity: bytes, payload: bytes) -> None:
        request = wire.decode_request(payload)
        self.requests.append(request)
        self._handler(self, identity, request)


def token(request_id: int, index: int, text: str) -> wire.Token:
    """A frame of one token whose id is its index + 100."""
    return wire.Token(id=request_id, index=index, ids=[100 + index], text=text, time_ns=1000 + index)


def done(request_id: int, tokens: int, reason: str = "length", error: wire.Failure | None = None) -> wire.Done:
    """A terminal frame."""
    usage = wire.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=tokens)
    timeline = wire.Timeline(received_ns=1, admitted_ns=2, done_ns=9)
    return wire.Done(
        id=request_id,
        finish_reason=reason,
        usage=usage,
        timeline=timeline,
        seed=7,
        error=error,
        speculation=wire.Speculation(rounds=tokens, tokens_per_round=1.0, by_drafter={"none": tokens}),
    )


def words(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
    """Answers generate with the prompt's words, one token each; everything else suitably."""
    if isinstance(request, wire.Generate):
        parts = (request.prompt or "").split()
        daemon.send(identity, *(token(request.id, index, part + " ") for index, part in enumerate(parts)))
        daemon.send(identity, done(request.id, len(parts)))
    elif isinstance(request, wire.Cancel):
        daemon.send(identity, wire.Ack(id=request.id, known=False))
    elif isinstance(request, wire.Health):
        daemon.send(identity, wire.HealthReply(id=request.id, status="ok", uptime_ns=5, queue_length=0))
    elif isinstance(request, wire.Info):
        engine = {"name": "fake", "chat_template": True}
        executor = {"name": "fake/none", "threads": 1}
        daemon.send(
            identity, wire.InfoReply(id=request.id, engine=engine, executor=executor, limits={"vocabulary": 1000})
        )
    elif isinstance(request, wire.SessionRequest):
        daemon.send(identity, wire.SessionReply(id=request.id, session=request.session, tokens=0))
    else:
        daemon.send(identity, wire.StatsReply(id=request.id, requests={}, latency={}, engine={}, io={}))
