"""One HTTP exchange within bounds: who asks, the body, and an answer that ends when its client hangs up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ull.gateway.errors import HttpError
from ull.gateway.events import event
from ull.gateway.protocol import ABORT, IS_PAUSED

BODIES_IN_MEMORY = 64 << 20  # bytes, of all exchanges together
JSON_TYPE = b"application/json"
EVENTS_TYPE = b"text/event-stream; charset=utf-8"


class HungUp(Exception):
    """The client has closed its connection."""


class BodyBudget:
    """What the bodies of all exchanges together may take in memory while they are read and decoded."""

    def __init__(self, most: int = BODIES_IN_MEMORY) -> None:
        self._left = most

    def take(self, size: int) -> None:
        """Counts `size` bytes. Raises HttpError where there is no room."""
        if size > self._left:
            raise HttpError(503, "too many large requests at once; try again", code="busy", kind="server_error")
        self._left -= size

    def give_back(self, size: int) -> None:
        """The bytes are gone."""
        self._left += size


class Exchange:
    """A request's way in and its answer's way out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        self.scope = scope
        self.request_id: str = scope["state"]["request_id"]
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self.begun = False
        self.started = time.monotonic()
        self.status = 0

    async def read(self, most: int, timeout_s: float, budget: BodyBudget) -> bytes:
        """The body. Raises HttpError: not JSON by its type, too long, too slow; HungUp."""
        headers = dict(self.scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise HttpError(415, "the body must be JSON: send the header `Content-Type: application/json`")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise HungUp
                    part = message.get("body", b"")
                    if size + len(part) > most:
                        raise _too_large(most)
                    budget.take(len(part))
                    size += len(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(408, f"the body was not there within {timeout_s:g} s") from None
        finally:
            budget.give_back(size)

    async def watched(self, work: Awaitable[None]) -> None:
        """Runs `work`, which is cancelled when the client hangs up. Raises HungUp then."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._until_hung_up())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise HungUp
            await task
        finally:
            for each in (task, watch):
                if not each.done():
                    each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Sends one JSON body."""
        await self.answer_text(status, msgspec.json.encode(body), JSON_TYPE, headers)

    async def answer_text(
        self, status: int, payload: bytes, content_type: bytes | str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends one body of any type."""
        kind = content_type.encode() if isinstance(content_type, str) else content_type
        more = [(key.encode(), value.encode("latin-1", "replace")) for key, value in (headers or {}).items()]
        await self._start(status, [(b"content-type", kind), (b"content-length", b"%d" % len(payload)), *more])
        await self._put({"type": "http.response.body", "body": payload})

    async def begin_events(self) -> None:
        """Begins a stream of events."""
        await self._start(
            200, [(b"content-type", EVENTS_TYPE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        )

    async def events(self, payload: bytes, last: bool = False) -> None:
        """Sends events. Raises HungUp: the client has read nothing for too long, and its connection is ended."""
        if payload or last:
            await self._put({"type": "http.response.body", "body": payload, "more_body": not last})

    async def fail(self, error: HttpError) -> None:
        """Says what went wrong: with a status if nothing has been sent, else as an event."""
        if not self.begun:
            await self.answer(error.status, error.body(), error.headers)
        else:
            self.status = error.status
            await self.events(event(error.body()), last=True)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun, self.status = True, status
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, message: Message) -> None:
        is_paused = self.scope.get(IS_PAUSED)
        if is_paused is not None and not is_paused():
            await self._send(message)  # which returns at once: no timer for it
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            if (abort := self.scope.get(ABORT)) is not None:
                abort()
            raise HungUp from None

    async def _until_hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the body has more than {most} bytes, which is more than this engine's context can take")
