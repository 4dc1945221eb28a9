"""A daemon without an engine: a ROUTER in a thread that answers by a script. For the clients' tests."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

import zmq

from ull import wire

Handler = Callable[["FakeDaemon", bytes, wire.Request], None]

NOTHING_HAPPENED = wire.Timeline()


class FakeDaemon:
    """Serves `url` with `handler(daemon, identity, request)` until closed. Remembers every request."""

    def __init__(self, url: str, handler: Handler) -> None:
        self.url = url
        self.requests: list[wire.Request] = []
        self._handler = handler
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(url)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, identity: bytes, *replies: wire.Reply) -> None:
        """Sends replies; only from the handler (a zmq socket belongs to one thread)."""
        for reply in replies:
            self._socket.send_multipart([identity, *wire.encode_frames(reply)])

    def send_raw(self, identity: bytes, *frames: bytes) -> None:
        self._socket.send_multipart([identity, *frames])

    def wait_for(self, kind: type[wire.Request], count: int = 1) -> list[wire.Request]:
        """The requests of one kind once there are `count`; fails after ten seconds."""
        deadline = time.monotonic() + 10
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
            if self._socket.poll(10):
                identity, version, payload = self._socket.recv_multipart()
                assert version == wire.VERSION
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
    else:
        daemon.send(identity, wire.StatsReply(id=request.id, requests={}, latency={}, engine={}, io={}))
