"""The asynchronous client, for programs that live in asyncio. Its tail is longer than `ull.Client`'s.

async with ull.AsyncClient() as client:
    async for token in client.generate("def main():", max_tokens=64):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack, cast

import msgspec
import zmq

from ull import wire
from ull.client.link import LINGER_MS, Link, Transport, check_silence
from ull.client.options import GenerateOptions, ReadOptions, TokenizeOptions, names_options
from ull.client.ownership import OwnerProcess
from ull.client.protocol import Protocol, Query, Result, SessionState, StreamState, Token
from ull.client.requests import (
    ChatMessage,
    Prompt,
    build_detokenize,
    build_reading,
    build_request,
    build_tokenize,
    encode_request,
    time_limit,
)
from ull.client.sessions import AsyncSession
from ull.client.sync import CONNECT_TIMEOUT_S, GRACE_S, QUERY_TIMEOUT_S, SILENCE_TIMEOUT_S, UPGRADE_TIMEOUT_S
from ull.curve import CurveKeys, given_keys
from ull.errors import ConnectionLost, RequestError, RequestTimeout, UllError, UsageError
from ull.socket_reader import Reader

_RETRY_S = 0.02  # between two looks for a daemon that is not there


class AsyncStream:
    """The tokens of one request as they arrive; as `ull.Stream`, with `async for`, `async with`, `await result()`."""

    def __init__(self, client: AsyncClient, state: StreamState, session: AsyncSession | None = None) -> None:
        self._client = client
        self._state = state
        self._session = session  # which lives as long as its streams
        self._deadline: float | None = None  # loop.time() seconds
        self._moved = asyncio.Event()
        state.on_change = self._moved.set

    @property
    def id(self) -> int:
        """The request's id on the wire."""
        return self._state.id

    @property
    def finished(self) -> bool:
        """Whether everything has arrived (some of it may be unread)."""
        return self._state.finished

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Token:
        state = self._state
        while (token := state.next_token()) is None:
            if state.finished:
                state.raise_failure()
                raise StopAsyncIteration
            await self._wait()
        return token

    async def result(self) -> Result:
        """Waits for the end and returns all of it, whether iterated before or not."""
        while not self._state.finished:
            await self._wait()
        return self._state.result()

    def ready(self) -> Token | None:
        """The next token if it has arrived already, else None; never waits."""
        return self._state.next_token()

    def cancel(self) -> None:
        """Asks the daemon to stop; what follows is at most a few tokens and the end ("cancelled")."""
        if not self._state.finished:
            self._client._cancel(self._state.id)

    async def commit(self) -> None:
        """Releases an answer that was held, as `ull.Stream.commit`."""
        state = self._state
        state.raise_refusal()
        try:
            await self._client._ask(wire.Commit(id=self._client._protocol.new_id(), request=state.id))
        except RequestError:
            state.raise_refusal()
            raise
        state.released()

    def close(self) -> None:
        """Cancels if still running, and forgets what is unread."""
        self._drop()
        self._state.drop_unread()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._drop()

    def __del__(self) -> None:
        if hasattr(self, "_state") and not self._state.detached:
            self._drop()

    def _drop(self) -> None:
        if not self._state.finished:
            self._state.abandoned = True
            self._client._end_soon(self._state)

    async def _wait(self) -> None:
        """Waits for a message; after a silence asks the daemon whether it still knows the request."""
        state = self._state
        self._client._running()  # in another event loop than its own the stream has failed, or this raises
        if state.failure is not None:
            return
        self._moved.clear()
        ask_at = state.heard_ns / 1e9 + self._client._silence_timeout  # loop.time() is CLOCK_MONOTONIC too
        asks = self._deadline is None or ask_at < self._deadline
        try:
            async with asyncio.timeout_at(ask_at if asks else self._deadline):
                await self._moved.wait()
        except TimeoutError:
            if state.finished:
                return
            if asks:
                await self._client._ask_about(self)
            else:
                self._drop()
                state.failure = RequestTimeout("the daemon did not end the request within its timeout")


class AsyncClient:
    """A connection to a daemon at `url`; the arguments are `ull.Client`'s, None stands for the default of each.

    It belongs to the event loop of its first use. Once that is closed (a second `asyncio.run`), the next one to use it
    gets a new connection; while it is open, another loop gets UsageError, and so does a fork's child.
    There is no `priority`: it would put every task of the loop before other threads, not only what waits for tokens.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect_timeout: float | None = None,
        query_timeout: float | None = None,
        silence_timeout: float | None = None,
        transport: Transport | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        keys: CurveKeys | Path | str | None = None,
    ) -> None:
        self._protocol = Protocol()
        self._connect_timeout = CONNECT_TIMEOUT_S if connect_timeout is None else connect_timeout
        self._query_timeout = QUERY_TIMEOUT_S if query_timeout is None else query_timeout
        self._silence_timeout = check_silence(SILENCE_TIMEOUT_S if silence_timeout is None else silence_timeout)
        self._owner = OwnerProcess()
        self._link = Link(url, context, transport, given_keys(keys))
        self._link.before_close = self._unwatch_link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: list[Reader] = []
        self._retry: asyncio.TimerHandle | None = None  # the next look for a daemon, while there is none
        self._connected = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def url(self) -> str:
        """The endpoint this client talks to."""
        return self._link.url

    @property
    def transport(self) -> str | None:
        """What the present connection runs over, "local" or "zeromq"; None while there is none."""
        return self._link.transport

    @names_options(GenerateOptions)
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Sends a request and returns its stream at once, as `ull.Client.generate`.

        To be called from a coroutine of the client's event loop. Where no daemon answers within connect_timeout, the
        stream fails with ConnectionLost.
        """
        return self._start(build_request(self._protocol.new_id(), prompt, options))

    @names_options(ReadOptions)
    async def prewarm(self, prompt: Prompt, **options: Unpack[ReadOptions]) -> Result:
        """Reads a prompt and generates nothing, as `ull.Client.prewarm`."""
        return await self._start(build_reading("prewarm", self._protocol.new_id(), prompt, options)).result()

    async def open_session(self, *, pin: bool | None = None) -> AsyncSession:
        """Opens a session, which holds nothing yet, as `ull.Client.open_session`."""
        self._running()
        self._take_in()  # a connection that has ended before is none of this session's
        session = AsyncSession(self, SessionState(self._protocol.new_id()))
        await self._open(session, wire.OpenSession(id=self._protocol.new_id(), session=session.id, pin=bool(pin)))
        return session

    @names_options(TokenizeOptions)
    async def tokenize(self, prompt: str | Sequence[ChatMessage], **options: Unpack[TokenizeOptions]) -> list[int]:
        """The ids that generate() would use of this text or these chat messages, with the same arguments.

        Raises RequestError: too long, or messages that the chat template refuses.
        """
        request = build_tokenize(self._protocol.new_id(), prompt, options)
        return cast("wire.TokenizeReply", await self._ask(request)).token_ids

    @names_options(TokenizeOptions)
    async def count_tokens(self, prompt: str | Sequence[ChatMessage], **options: Unpack[TokenizeOptions]) -> int:
        """How many ids tokenize() would return, for texts of any length; raises what it raises."""
        request = build_tokenize(self._protocol.new_id(), prompt, options)
        request.count_only = True
        return cast("wire.TokenizeReply", await self._ask(request)).count

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """The text that a stream of these ids would give; with skip_special_tokens False special tokens' texts too."""
        request = build_detokenize(self._protocol.new_id(), token_ids, skip_special_tokens=skip_special_tokens)
        return cast("wire.DetokenizeReply", await self._ask(request)).text

    async def health(self) -> wire.HealthReply:
        """The daemon's state: status, uptime_ns, queue_length."""
        return cast("wire.HealthReply", await self._ask(wire.Health(id=self._protocol.new_id())))

    async def info(self) -> wire.InfoReply:
        """What the daemon serves: engine, executor, limits."""
        return cast("wire.InfoReply", await self._ask(wire.Info(id=self._protocol.new_id())))

    async def trace(self, steps: int = 0, frames: int = 0, requests: int = 0) -> wire.TraceReply:
        """What the daemon's threads have done lately, from these numbers on (`ull trace`). For the role admin."""
        request = wire.Trace(id=self._protocol.new_id(), steps=steps, frames=frames, requests=requests)
        return cast("wire.TraceReply", await self._ask(request))

    async def set_log(self, *, level: str | None = None, prompts: bool | None = None) -> None:
        """Changes the daemon's log from now on: its level, and whether it has prompts' text. For the role admin.

        Raises Forbidden for everybody else.
        """
        await self._ask(wire.SetLog(id=self._protocol.new_id(), level=level, prompts=prompts))

    async def upgrade(self, *, timeout: float = UPGRADE_TIMEOUT_S) -> wire.UpgradeReply:
        """Has the daemon hand over to a successor, started from the files that are there now. For the role admin.

        Returns once the successor serves; this client stays connected. Raises Forbidden for everybody else,
        RequestError ("upgrade_failed") where there is no successor: the daemon then goes on as it was. `timeout`:
        seconds for the successor to load, and for what runs to end.
        """
        return cast("wire.UpgradeReply", await self._ask(wire.Upgrade(id=self._protocol.new_id()), timeout=timeout))

    async def stats(self, *, histograms: bool = False) -> wire.StatsReply:
        """Counters and latencies since the daemon's start; with every bucket of the histograms if asked for them."""
        return cast(
            "wire.StatsReply",
            await self._ask(wire.Stats(id=self._protocol.new_id(), histograms=histograms or msgspec.UNSET)),
        )

    async def close(self) -> None:
        """Cancels what still runs and closes the connection. Streams that were not finished fail.

        In a fork's child it gives up the child's copy of the connection, and nothing happens to the parent's.
        """
        if self._closed:
            return
        if not self._owner.here:
            self._closed = True
            self._link.leave()
            return
        self._running()
        self._closed = True
        for task in self._sending:
            task.cancel()
        for stream_id in self._protocol.live_streams():
            self._link.send(wire.encode(wire.Cancel(id=stream_id)))
        self._protocol.end_all(ConnectionLost("the client was closed"))
        if self._retry is not None:
            self._retry.cancel()
        self._link.close(LINGER_MS)

    async def __aenter__(self) -> AsyncClient:
        self._running()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        """The event loop, with the connection registered in it.

        Raises ConnectionLost after close(), UsageError outside of the event loop that the client belongs to.
        """
        self._owner.check("AsyncClient")
        if self._closed:
            raise ConnectionLost("the client is closed")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "no event loop runs here: use an AsyncClient in a coroutine (asyncio.run(...)), or use Client"
            ) from None
        if loop is self._loop:
            return loop
        if self._loop is not None:
            if not self._loop.is_closed():
                raise UsageError(
                    "this AsyncClient belongs to another event loop, which is still open; make one in each loop"
                )
            self._leave_loop()
        self._loop = loop
        self._follow_link()
        return loop

    def _catch_up(self) -> asyncio.AbstractEventLoop:
        """Before a request is made: takes in what has arrived. A connection that had gone before is none of it.

        Returns and raises as _running() does.
        """
        loop = self._running()
        self._take_in()
        return loop

    def _leave_loop(self) -> None:
        """Ends what belonged to an event loop that is closed, and opens a new connection."""
        self._loop = self._retry = None
        self._readers = []
        self._sending = set()
        self._connected = asyncio.Event()
        self._protocol.end_all(ConnectionLost("the event loop that the request was made in is closed"), tell=False)
        self._link.restart()

    def _unwatch_link(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []

    def _follow_link(self) -> bool:
        """Registers the present connection, and while it has no daemon sees to it that it is looked at again."""
        loop, link = self._running(), self._link
        if not self._readers and link.connection is not None:
            self._readers = link.connection.readers(loop, self._take_in, self._look)
        if link.connected:
            self._connected.set()
        else:
            self._connected.clear()
            if self._retry is None:
                self._retry = loop.call_later(_RETRY_S, self._look_again)
        return False

    def _take_in(self) -> bool:
        """Passes on what has arrived."""
        self._link.receive_all(self._protocol)
        if self._protocol.unwanted:
            self._end_unwanted()
        return self._look()

    def _look(self) -> bool:
        """Follows the connection's ups and downs."""
        if self._link.watch(self._protocol):
            self._follow_link()
        return False

    def _look_again(self) -> None:
        self._retry = None
        if not self._closed:
            self._link.watch(self._protocol)
            self._follow_link()

    def _start(
        self, request: wire.Generate, session: AsyncSession | None = None, detached: bool = False
    ) -> AsyncStream:
        """Sends a request whose answer is a stream."""
        loop = self._catch_up()
        payload = encode_request(request)
        owner = None if session is None else session._state
        if owner is not None:
            owner.raise_failure()
        state = self._protocol.open_stream(request, owner, detached)
        stream = AsyncStream(self, state, session)
        if (limit := time_limit(request)) is not None:
            stream._deadline = loop.time() + limit + GRACE_S
        self._send(payload, state, owner)
        return stream

    async def _open(
        self, session: AsyncSession, request: wire.OpenSession | wire.Fork, parent: AsyncSession | None = None
    ) -> None:
        """Asks for a session, which is closed again where that may have come about although the answer did not."""
        self._catch_up()
        if parent is not None:
            parent._state.raise_failure()
        self._protocol.open_session(session._state)
        try:
            await self._ask(request, (parent or session)._state)
        except RequestError:
            self._protocol.forget(session.id)
            raise
        except BaseException:
            session.close()
            raise

    def _send(self, payload: bytes, target: StreamState | Query, session: SessionState | None = None) -> None:
        """Sends at once where there is a connection, else from a task that waits for one.

        What is for a session goes over its own connection or not at all.
        """
        if self._protocol.unwanted:
            self._end_unwanted()
        if self._connected.is_set() and self._send_now(payload):
            return
        task = asyncio.ensure_future(self._send_later(payload, target, session))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _send_now(self, payload: bytes) -> bool:
        sent = self._link.send(payload)
        if self._readers:
            self._readers[0].again()
        return sent

    async def _send_later(self, payload: bytes, target: StreamState | Query, session: SessionState | None) -> None:
        failure: UllError | None = None
        try:
            async with asyncio.timeout(self._connect_timeout):
                while await self._connected.wait() and (session is None or session.failure is None):
                    # What ended with a connection that took a part of it is not sent over the next one.
                    if target.finished or self._send_now(payload):
                        return
                    await asyncio.sleep(0.01)
                failure = None if session is None else session.failure
        except TimeoutError:
            failure = await asyncio.to_thread(self._link.nobody, self._connect_timeout)
        if failure is not None and not target.finished:
            target.failure = failure
            if target.on_change is not None:
                target.on_change()

    async def _ask(
        self, request: wire.Request, session: SessionState | None = None, timeout: float | None = None
    ) -> wire.Reply:
        timeout = self._query_timeout if timeout is None else timeout
        self._catch_up()
        if session is not None:
            session.raise_failure()
        query = self._protocol.open_query(request)
        moved = asyncio.Event()
        query.on_change = moved.set
        try:
            self._send(encode_request(request), query, session)
            async with asyncio.timeout(self._connect_timeout + timeout):
                await moved.wait()
        except TimeoutError:
            raise RequestTimeout(f"the daemon at {self.url} did not answer within {timeout:g} s") from None
        finally:
            self._protocol.forget(request.id)
        if query.failure is not None:
            raise query.failure.copy()
        assert query.reply is not None
        return query.reply

    async def _ask_about(self, stream: AsyncStream) -> None:
        """Fails a stream that the daemon does not know, or that no daemon answers for."""
        state = stream._state
        try:
            reply = cast("wire.HealthReply", await self._ask(wire.Health(id=self._protocol.new_id(), request=state.id)))
        except RequestTimeout as error:
            stream._drop()
            state.failure = state.failure or ConnectionLost(f"nothing was heard of the request, and {error}")
        except ConnectionLost:
            pass  # the stream knows: it has failed with its connection
        else:
            state.answered(reply)

    def _cancel(self, request_id: int) -> None:
        if not self._closed:
            self._running()
            self._send_now(wire.encode(wire.Cancel(id=request_id)))

    def _end_soon(self, state: StreamState | SessionState) -> None:
        """Ends a stream or a session, also from the garbage collector in any thread."""
        self._protocol.unwanted.append(state)
        if self._loop is not None and not self._closed and self._owner.here:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self._end_unwanted)

    def _end_unwanted(self) -> None:
        """Ends at the daemon what nobody wants any more."""
        while self._protocol.unwanted and not self._closed:
            state = self._protocol.unwanted.popleft()
            if (farewell := self._protocol.farewell(state)) is not None:
                self._running()
                self._send_now(farewell)
                if isinstance(state, SessionState):
                    self._protocol.forget(state.id)
