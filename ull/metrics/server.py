"""The endpoint that Prometheus asks. One thread asks the daemon, others talk to monitors, never more than a few.

GET /metrics    the figures, as Prometheus's text or as OpenMetrics
GET /health     200 while the daemon answers `ok`, else 503; the body is its status
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from ull.client import Client
from ull.curve import CurveKeys
from ull.endpoints import parse_address
from ull.errors import ConfigError, UllError
from ull.metrics.compat import vllm_families
from ull.metrics.exposition import encode
from ull.metrics.families import families, unreachable
from ull.metrics.gpu import Gpu
from ull.metrics.spans import SpanExporter

COMPATS = ("none", "vllm")
_MOST_CONNECTIONS = 16
_FRESH_S = 0.2  # for so long an answer may be given again
_SPANS_S = 0.5  # between two looks for requests that have ended
_ASK_S = 2.0  # for the daemon to answer
_SILENT_S = 5.0  # for a monitor to send its question, and to take the answer


@dataclass(frozen=True)
class ExporterOptions:
    """Where the figures come from, and where they go."""

    listen: str = "127.0.0.1:9464"  # host:port; port 0: any
    connect: str | None = None  # the daemon's endpoint; None: this user's
    compat: str = "none"  # other names beside ours: COMPATS
    device: int | None = None  # number of the GPU whose figures belong to it; None: none
    keys: CurveKeys | None = None  # where the daemon asks for them
    otlp: str = ""  # where spans go; "": nowhere


class Source:
    """What is asked of one daemon, by one thread: `run`. `scrape` and `health` may be called by any."""

    def __init__(self, options: ExporterOptions) -> None:
        self._options = options
        self._questions: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(_MOST_CONNECTIONS)
        self._client: Client | None = None
        self._gpu = None if options.device is None else Gpu(options.device)
        self._process: ProcessCollector | None = None
        self._pid = 0
        self._kept: tuple[float, list[Metric]] | None = None
        self._spans = SpanExporter(options.otlp) if options.otlp else None
        self._model: str | None = None

    def run(self) -> None:
        """Answers questions until `stop`, and sends spans meanwhile."""
        while True:
            try:
                item = self._questions.get(timeout=_SPANS_S if self._spans is not None else None)
            except queue.Empty:
                self._send_spans()
                continue
            if item is None:
                break
            question, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)
        self._drop_client()
        if self._spans is not None:
            self._spans.close()

    def _send_spans(self) -> None:
        if self._spans is None:
            return
        try:
            client = self._connected()
            if self._model is None:
                self._model = str(client.info().engine.get("name", ""))
            self._spans.poll(client, self._model)
        except (UllError, OSError):
            self._drop_client()

    def stop(self) -> None:
        """Ends `run`."""
        self._questions.put(None)

    def scrape(self) -> list[Metric]:
        """All families. Raises TimeoutError where too many ask at once."""
        return list(self._ask(self._scrape))

    def health(self) -> str:
        """The daemon's status, or "unreachable"."""
        return str(self._ask(self._health))

    def _ask(self, question: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        try:
            self._questions.put_nowait((question, future))
        except queue.Full:
            raise TimeoutError("too many ask at once") from None
        return future.result(2 * _ASK_S)

    def _scrape(self) -> list[Metric]:
        now = time.monotonic()
        if self._kept is None or now - self._kept[0] > _FRESH_S:
            self._kept = (now, list(self._read()))
        return self._kept[1]

    def _read(self) -> Iterator[Metric]:
        try:
            client = self._connected()
            health, info = client.health(), client.info()
            stats = client.stats(histograms=True)
        except (UllError, OSError):
            self._drop_client()
            yield from unreachable()
        else:
            yield from families(stats, health, info)
            if self._options.compat == "vllm":
                yield from vllm_families(stats, info)
            yield from self._process_of(int(info.executor.get("pid", 0)))
        if self._gpu is not None:
            yield from self._gpu.families()

    def _health(self) -> str:
        try:
            return self._connected().health().status
        except (UllError, OSError):
            self._drop_client()
            return "unreachable"

    def _connected(self) -> Client:
        if self._client is None:
            options = self._options
            self._client = Client(options.connect, keys=options.keys, connect_timeout=_ASK_S, query_timeout=_ASK_S)
        return self._client

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(UllError, OSError):
                client.close()

    def _process_of(self, pid: int) -> Iterable[Metric]:
        """Memory, descriptors and processor time of the daemon's process, where it is on this machine."""
        if self._process is None or pid != self._pid:
            self._pid = pid
            self._process = ProcessCollector(pid=lambda: self._pid, registry=CollectorRegistry())
        return self._process.collect() if pid and os.path.isdir(f"/proc/{pid}") else []  # noqa: PTH112


class Handler(BaseHTTPRequestHandler):
    """One monitor's connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_S
    server_version = "ull"
    sys_version = ""

    def do_GET(self) -> None:
        """Answers a question."""
        path = self.path.partition("?")[0]
        try:
            if path == "/metrics":
                self._answer(HTTPStatus.OK, *encode(self.server.source.scrape(), self.headers.get("accept", "")))
            elif path == "/health":
                status = self.server.source.health()
                code = HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer(code, f"{status}\n".encode(), "text/plain; charset=utf-8")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"ask for /metrics or /health\n", "text/plain; charset=utf-8")
        except TimeoutError:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many ask at once\n", "text/plain; charset=utf-8")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: monitors ask all the time."""

    def _answer(self, code: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Listens. A connection beyond the most that there may be is closed at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], source: Source) -> None:
        self.source = source
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives the connection a thread, if there is a place for it."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: who hangs up is no fault of ours."""

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"


@contextlib.contextmanager
def serving(options: ExporterOptions) -> Iterator[tuple[Server, Source]]:
    """A server that listens, in threads, for as long as the block runs; who enters it calls `Source.run`.

    Raises ConfigError for an address that cannot be listened on.
    """
    source = Source(options)
    try:
        server = Server(parse_address(options.listen, "metrics.listen"), source)
    except OSError as error:
        raise ConfigError(
            f"metrics.listen: cannot listen on {options.listen}: {error.strerror or error}", "metrics.listen"
        ) from error
    with server:
        thread = threading.Thread(target=server.serve_forever, name="ull-metrics", daemon=True)
        thread.start()
        try:
            yield server, source
        finally:
            server.shutdown()
