"""uvicorn's HTTP protocol with bounds on what a peer may cost before there is a request: head, time, number.

uvicorn itself waits for ever for a head, keeps as many header lines as come, and reads on behind a refused body.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ull.gateway.errors import HttpError

MAX_HEAD_BYTES = 64 << 10
ABORT = "ull.abort"  # the scope's key of the function that hangs up at once
IS_PAUSED = "ull.is_paused"  # likewise of the one that says whether a send would wait for the client to read


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The bounds are class attributes, which `bounded` sets."""

    max_connections: ClassVar[int] = 1024
    read_timeout: ClassVar[float] = 30.0  # seconds for a head, and for what is thrown away of a body

    _head_bytes = 0
    _in_head = True
    _message_complete = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, or says that there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(HttpError(503, "too many connections; try again", code="busy", kind="server_error"))
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; a head that is too long, or takes too long, ends the connection."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HttpError(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes"))
            return
        thrown_away = not self._message_complete and self.cycle is not None and self.cycle.response_complete
        if (self._in_head and self._head_bytes) or thrown_away:
            self._start_timer()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._message_complete, self._head_bytes = True, False, 1
        scope = cast("dict[str, Any]", self.scope)
        scope[ABORT], scope[IS_PAUSED] = self.transport.abort, lambda: self.flow.write_paused

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there."""
        self._message_complete = True
        self._stop_timer()
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an answer of the form that all others have."""
        self._refuse(HttpError(400, msg))

    def _refuse(self, error: HttpError) -> None:
        body = msgspec.json.encode(error.body())
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.read_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes:
            self._refuse(HttpError(408, "the request's head took too long"))
        else:
            self.transport.abort()


def bounded(max_connections: int, read_timeout: float) -> type[BoundedHttpProtocol]:
    """The protocol with these bounds."""
    return type(
        "BoundedHttpProtocol",
        (BoundedHttpProtocol,),
        {"max_connections": max_connections, "read_timeout": read_timeout},
    )
