"""The synchronous client: one socket, blocking receives, no threads. The one to use where the tail counts.

    with ull.Client() as client:
        for token in client.generate("def main():", max_tokens=64):
            print(token.text, end="", flush=True)

A client belongs to the thread that makes it. Several streams may run over one client; reading one collects the others'
tokens. A signal handler may raise at any moment (Ctrl-C): the request that was waited for is cancelled, what it has
brought can still be read, and the client goes on.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack, cast

import msgspec
import zmq

from ull import wire
from ull.client.link import LINGER_MS, Link, Transport, check_silence
from ull.client.options import GenerateOptions, ReadOptions, TokenizeOptions, names_options
from ull.client.ownership import OwnerThread
from ull.client.priority import ThreadPriority
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
from ull.client.sessions import Session
from ull.curve import CurveKeys, given_keys
from ull.errors import ConnectionLost, RequestError, RequestTimeout, UllError

CONNECT_TIMEOUT_S = 2.0
QUERY_TIMEOUT_S = 5.0
UPGRADE_TIMEOUT_S = 600.0  # a large engine takes a while to load
SILENCE_TIMEOUT_S = 10.0
# Past the request's own timeout, which the daemon enforces, the client waits this much longer for the terminal frame.
GRACE_S = 5.0
_WATCH_MS = {"local": 1000, "zeromq": 50}  # a wait for messages looks at the connection's state this often
_UNCONNECTED_MS = 20  # ... and for a daemon to connect to


class _Guard(weakref.ref["Stream | Session"]):
    """Says which request or session somebody had who has gone, even if an exception has ended its `__del__`."""

    __slots__ = ("request_id",)
    request_id: int


class Stream:
    """The tokens of one request as they arrive. Iterate it, then ask for `result()`; both may be left out.

    Leaving a `with` block, dropping the last reference, or an exception of a signal handler (Ctrl-C) while it waits
    cancels a request that still runs.
    Raises RequestError (refused), ConnectionLost, RequestTimeout or RequestFailed, from iteration and result().
    """

    def __init__(self, client: Client, state: StreamState, session: Session | None = None) -> None:
        self._client = client
        self._state = state
        self._session = session  # which lives as long as its streams
        self._deadline: float | None = None  # time.monotonic() seconds
        if not state.detached:
            client._guard(self, state)

    @property
    def id(self) -> int:
        """The request's id on the wire."""
        return self._state.id

    @property
    def finished(self) -> bool:
        """Whether everything has arrived (some of it may be unread)."""
        return self._state.finished

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        state = self._state
        try:
            while (token := state.next_token()) is None and not state.finished:
                self._wait()
        except BaseException as error:
            self._cancel_after(error)
            raise
        if token is None:
            state.raise_failure()
            raise StopIteration
        return token

    def ready(self) -> Token | None:
        """The next token if it has arrived already, else None; never waits."""
        return self._state.next_token()

    def result(self) -> Result:
        """Waits for the end and returns all of it, whether iterated before or not."""
        try:
            while not self._state.finished:
                self._wait()
        except BaseException as error:
            self._cancel_after(error)
            raise
        return self._state.result()

    def cancel(self) -> None:
        """Asks the daemon to stop; what follows is at most a few tokens and the end ("cancelled")."""
        if not self._state.finished:
            self._client._cancel(self._state.id)

    def commit(self) -> None:
        """Releases an answer that was held: what there is comes at once, the rest as it is computed.

        Raises what has ended the request, as its refusal; RequestError of the code not_held where nothing is held: not
        asked for, released before, dropped by a later message for its session, or kept for too long.
        """
        state = self._state
        state.raise_refusal()
        try:
            self._client._ask(wire.Commit(id=self._client._protocol.new_id(), request=state.id))
            state.released()
        except RequestError:
            state.raise_refusal()
            raise
        except BaseException as error:
            self._cancel_after(error)
            raise

    def close(self) -> None:
        """Cancels if still running, and forgets what is unread."""
        if not self._state.finished:
            self._client._abandon(self._state)
        self._state.drop_unread()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._state.finished:
            self._client._abandon(self._state)

    def __del__(self) -> None:
        if hasattr(self, "_state") and not (self._state.finished or self._state.detached):
            self._client._abandon(self._state)

    def _cancel_after(self, error: BaseException) -> None:
        """Cancels the request where what ended a wait is none of ours, as an exception of a signal handler."""
        if not isinstance(error, UllError) and not self._state.finished:
            self._client._end_surely(self._state)

    def _wait(self) -> None:
        """Waits for a message; after a silence asks the daemon whether it still knows the request."""
        state, client = self._state, self._client
        ask_at = state.heard_ns / 1e9 + client._silence_timeout
        deadline = ask_at if self._deadline is None else min(ask_at, self._deadline)
        if client._pump(deadline) or state.finished or time.monotonic() < deadline:
            return
        if deadline == ask_at:
            client._ask_about(state)
        else:
            client._abandon(state)
            state.failure = RequestTimeout("the daemon did not end the request within its timeout")


class Client:
    """A connection to a daemon at `url`. None stands for the default of every argument.

    It belongs to the thread that makes it: UsageError in another thread, or in a fork's child.

    url: ipc:///path or tcp://host:port (default: this user's own, `ull.endpoints.default_endpoint`).
    connect_timeout: seconds to wait for a daemon before ConnectionLost, at the first request and after a restart (2).
    query_timeout: seconds to wait for the answer to health, info and stats (5).
    silence_timeout: seconds after which a stream that hears nothing asks the daemon whether it still runs (10); without
    an answer within query_timeout, or with a no, it fails with ConnectionLost. No wait is without a limit.
    transport: "auto" takes the unix socket beside an ipc endpoint where the daemon offers it, which wakes one thread
    per token instead of two, and ZeroMQ elsewhere; "local" and "zeromq" insist. Messages and answers are the same.
    priority: 1 to 99 lets the kernel run this thread, and libzmq's for it, before all ordinary ones (SCHED_RR) until
    close(). Needs the right to (LimitRTPRIO=, `ulimit -r` or CAP_SYS_NICE); ConfigError without.
    context: the zmq context to use (default: the process's shared one).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect_timeout: float | None = None,
        query_timeout: float | None = None,
        silence_timeout: float | None = None,
        transport: Transport | None = None,
        priority: int | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        keys: CurveKeys | Path | str | None = None,
    ) -> None:
        self._protocol = Protocol()
        self._dropped = self._protocol.unwanted
        self._orphans: deque[weakref.ref[Stream | Session]] = deque()  # guards of streams and sessions that have gone
        self._owner = OwnerThread()
        self._busy = False
        self._closed = False  # no more requests
        self._released = False  # close() has come to its end
        self._connect_timeout = CONNECT_TIMEOUT_S if connect_timeout is None else connect_timeout
        self._query_timeout = QUERY_TIMEOUT_S if query_timeout is None else query_timeout
        self._silence_timeout = check_silence(SILENCE_TIMEOUT_S if silence_timeout is None else silence_timeout)
        self._priority = None if priority is None else ThreadPriority(priority)
        try:
            self._link = Link(
                url,
                context or (None if self._priority is None else self._priority.context),
                transport,
                given_keys(keys),
            )
        except BaseException:
            self._closed = self._released = True
            if self._priority is not None:
                self._priority.close()
            raise

    @property
    def url(self) -> str:
        """The endpoint this client talks to."""
        return self._link.url

    @property
    def transport(self) -> str | None:
        """What the present connection runs over, "local" or "zeromq"; None while there is none."""
        return self._link.transport

    @names_options(GenerateOptions)
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Sends a request and returns its stream at once. None stands for the default of every argument.

        prompt: a text, a list of token ids, or a list of chat messages ({"role", "content", ...}), which may have
        tool_calls, tool_call_id and name.
        Raises ConnectionLost if no daemon answers within connect_timeout; RequestError, which names the argument, for
        what cannot be sent.
        """
        return self._start(build_request(self._protocol.new_id(), prompt, options))

    @names_options(ReadOptions)
    def prewarm(self, prompt: Prompt, **options: Unpack[ReadOptions]) -> Result:
        """Reads a prompt and generates nothing: a request that begins with the same ids reads only the rest.

        It lasts as long as the KV cache has room; a session opened with `pin` keeps it.
        """
        return self._start(build_reading("prewarm", self._protocol.new_id(), prompt, options)).result()

    def open_session(self, *, pin: bool | None = None) -> Session:
        """Opens a session, which holds nothing yet: see `ull.Session`. pin: its KV cache is not given up for others'.

        Raises RequestError: too many sessions. ConnectionLost and RequestTimeout as every question.
        """
        session = Session(self, SessionState(self._protocol.new_id()))
        self._open(session, wire.OpenSession(id=self._protocol.new_id(), session=session.id, pin=bool(pin)))
        return session

    @names_options(TokenizeOptions)
    def tokenize(self, prompt: str | Sequence[ChatMessage], **options: Unpack[TokenizeOptions]) -> list[int]:
        """The ids that generate() would use of this text or these chat messages, with the same arguments.

        Raises RequestError: too long, or messages that the chat template refuses.
        """
        request = build_tokenize(self._protocol.new_id(), prompt, options)
        return cast("wire.TokenizeReply", self._ask(request)).token_ids

    @names_options(TokenizeOptions)
    def count_tokens(self, prompt: str | Sequence[ChatMessage], **options: Unpack[TokenizeOptions]) -> int:
        """How many ids tokenize() would return, for texts of any length; raises what it raises."""
        request = build_tokenize(self._protocol.new_id(), prompt, options)
        request.count_only = True
        return cast("wire.TokenizeReply", self._ask(request)).count

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """The text that a stream of these ids would give; with skip_special_tokens False special tokens' texts too."""
        request = build_detokenize(self._protocol.new_id(), token_ids, skip_special_tokens=skip_special_tokens)
        return cast("wire.DetokenizeReply", self._ask(request)).text

    def health(self) -> wire.HealthReply:
        """The daemon's state: status, uptime_ns, queue_length."""
        return cast("wire.HealthReply", self._ask(wire.Health(id=self._protocol.new_id())))

    def info(self) -> wire.InfoReply:
        """What the daemon serves: engine, executor, limits."""
        return cast("wire.InfoReply", self._ask(wire.Info(id=self._protocol.new_id())))

    def trace(self, steps: int = 0, frames: int = 0, requests: int = 0) -> wire.TraceReply:
        """What the daemon's threads have done lately, from these numbers on (`ull trace`). For the role admin."""
        request = wire.Trace(id=self._protocol.new_id(), steps=steps, frames=frames, requests=requests)
        return cast("wire.TraceReply", self._ask(request))

    def set_log(self, *, level: str | None = None, prompts: bool | None = None) -> None:
        """Changes the daemon's log from now on: its level, and whether it has prompts' text. For the role admin.

        Raises Forbidden for everybody else.
        """
        self._ask(wire.SetLog(id=self._protocol.new_id(), level=level, prompts=prompts))

    def upgrade(self, *, timeout: float = UPGRADE_TIMEOUT_S) -> wire.UpgradeReply:
        """Has the daemon hand over to a successor, started from the files that are there now. For the role admin.

        Returns once the successor serves; this client stays connected. Raises Forbidden for everybody else,
        RequestError ("upgrade_failed") where there is no successor: the daemon then goes on as it was. `timeout`:
        seconds for the successor to load, and for what runs to end.
        """
        return cast("wire.UpgradeReply", self._ask(wire.Upgrade(id=self._protocol.new_id()), timeout=timeout))

    def stats(self, *, histograms: bool = False) -> wire.StatsReply:
        """Counters and latencies since the daemon's start; with every bucket of the histograms if asked for them."""
        return cast(
            "wire.StatsReply", self._ask(wire.Stats(id=self._protocol.new_id(), histograms=histograms or msgspec.UNSET))
        )

    def poll(self, timeout: float = 0.0) -> bool:
        """Collects what has arrived for any stream, waiting at most `timeout` seconds; whether there was anything."""
        if not self._pump(time.monotonic() + timeout):
            return False
        self._collect()
        return True

    def close(self) -> None:
        """Cancels what still runs and closes the connection. Streams that were not finished fail.

        In a fork's child it gives up the child's copy of the connection, and nothing happens to the parent's.
        """
        if self._released:
            return
        if not self._owner.process.here:
            self._closed = self._released = True
            self._link.leave()
            return
        self._owner.check("Client")
        self._closed = True
        for stream_id in self._protocol.live_streams():
            self._link.send(wire.encode(wire.Cancel(id=stream_id)))
        self._protocol.end_all(ConnectionLost("the client was closed"))
        self._link.close(LINGER_MS)
        if self._priority is not None:
            self._priority.close()
        self._released = True

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: wire.Generate, session: Session | None = None, detached: bool = False) -> Stream:
        """Sends a request whose answer is a stream."""
        payload = encode_request(request)
        state = None if session is None else session._state
        self._catch_up()
        try:
            stream = Stream(self, self._protocol.open_stream(request, state, detached), session)
            self._send(payload, stream._state, state)
            if (limit := time_limit(request)) is not None:
                stream._deadline = time.monotonic() + limit + GRACE_S
            return stream
        except UllError:  # it was not sent
            self._protocol.forget(request.id)
            raise
        except BaseException:  # an interrupt: it may have been sent
            if isinstance(interrupted := self._protocol.find(request.id), StreamState):
                self._abandon(interrupted)
            raise

    def _open(self, session: Session, request: wire.OpenSession | wire.Fork, parent: Session | None = None) -> None:
        """Asks for a session, which is closed again where that may have come about although the answer did not."""
        self._catch_up()
        if parent is not None:
            parent._state.raise_failure()
        try:
            self._protocol.open_session(session._state)
            self._ask(request, (parent or session)._state)
        except RequestError:
            self._protocol.forget(session.id)
            raise
        except BaseException:
            session.close()
            raise

    def _guard(self, holder: Stream | Session, state: StreamState | SessionState) -> None:
        """Has `state` ended once nobody holds it any more."""
        guard = _Guard(holder, self._orphans.append)
        guard.request_id = state.id
        state.guard = guard

    def _require_open(self) -> None:
        """Before every use: raises where this thread may not use it or it is closed, and ends what nobody holds."""
        self._owner.check("Client")
        if self._closed:
            raise ConnectionLost("the client is closed")
        if self._dropped or self._orphans:
            self._flush_dropped()

    def _pump(self, deadline: float) -> bool:
        """Takes in one message, or a change of the connection; waits for it until `deadline`. False: nothing came."""
        self._require_open()
        while True:
            left_ms = max(0, math.ceil((deadline - time.monotonic()) * 1000))
            watch_ms = _WATCH_MS.get(self._link.transport or "", _UNCONNECTED_MS)
            if self._receive(min(left_ms, watch_ms)):
                if self._dropped:
                    self._flush_dropped()
                return True
            if left_ms <= watch_ms:
                return False

    def _receive(self, wait_ms: int) -> bool:
        """Takes in one message or the connection's changes, waiting at most `wait_ms`; whether there were any."""
        self._busy = True
        try:
            return self._link.receive(self._protocol, wait_ms) or self._link.watch(self._protocol)
        finally:
            self._busy = False

    def _collect(self) -> None:
        """Takes in what has arrived, without waiting."""
        self._busy = True
        try:
            self._link.receive_all(self._protocol)
            self._link.watch(self._protocol)
        finally:
            self._busy = False

    def _catch_up(self) -> None:
        """Before a request is made: takes in what has arrived. A connection that had gone before is none of it."""
        self._require_open()
        self._collect()

    def _send(self, payload: bytes, target: StreamState | Query, session: SessionState | None = None) -> None:
        """Sends, waiting up to the connect timeout for a connection. Raises ConnectionLost if there is none.

        What is for a session goes over its own connection or not at all: raises what SessionState.raise_failure does.
        A request that has ended with a connection that took a part of it is not sent over the next one.
        """
        deadline = time.monotonic() + self._connect_timeout
        if session is not None:
            session.raise_failure()
        while not self._try_send(payload):
            if session is not None:
                session.raise_failure()
            if target.finished:
                return
            if time.monotonic() >= deadline:
                raise self._link.nobody(self._connect_timeout)
            self._pump(min(deadline, time.monotonic() + 0.05))
        while self._link.unsent and time.monotonic() < deadline:
            self._pump(min(deadline, time.monotonic() + 0.05))

    def _try_send(self, payload: bytes) -> bool:
        self._busy = True
        try:
            return self._link.send(payload)
        finally:
            self._busy = False

    def _ask(
        self, request: wire.Request, session: SessionState | None = None, timeout: float | None = None
    ) -> wire.Reply:
        timeout = self._query_timeout if timeout is None else timeout
        self._catch_up()
        query: Query = self._protocol.open_query(request)
        try:
            self._send(encode_request(request), query, session)
            deadline = time.monotonic() + timeout
            while not query.finished:
                if not self._pump(deadline) and time.monotonic() >= deadline:
                    raise RequestTimeout(f"the daemon at {self.url} did not answer within {timeout:g} s")
        finally:
            self._protocol.forget(request.id)
        if query.failure is not None:
            raise query.failure.copy()
        assert query.reply is not None
        return query.reply

    def _ask_about(self, state: StreamState) -> None:
        """Fails a stream that the daemon does not know, or that no daemon answers for."""
        try:
            reply = cast("wire.HealthReply", self._ask(wire.Health(id=self._protocol.new_id(), request=state.id)))
        except RequestTimeout as error:
            self._abandon(state)
            state.failure = state.failure or ConnectionLost(f"nothing was heard of the request, and {error}")
        except ConnectionLost:
            pass  # the stream knows: it has failed with its connection
        else:
            state.answered(reply)

    def _cancel(self, request_id: int) -> None:
        self._owner.check("Client")
        if not self._closed:
            self._try_send(wire.encode(wire.Cancel(id=request_id)))

    def _abandon(self, state: StreamState) -> None:
        """Cancels a stream that nobody will read; may run inside the garbage collector, in any thread."""
        state.abandoned = True
        self._end_surely(state)

    def _end_surely(self, state: StreamState | SessionState) -> None:
        """Ends a stream or a session now, or before anything else is sent or waited for."""
        self._dropped.append(state)
        if not self._busy and not self._closed and self._owner.here:
            self._flush_dropped()

    def _flush_dropped(self) -> None:
        while self._orphans:
            orphan = cast("_Guard", self._orphans[0])
            state = self._protocol.find(orphan.request_id)
            if state is not None and not state.abandoned:
                state.abandoned = True
                self._dropped.append(state)
            if self._orphans and self._orphans[0] is orphan:
                self._orphans.popleft()
        while self._dropped:
            state = self._dropped[0]
            if (farewell := self._protocol.farewell(state)) is not None and not self._closed:
                self._try_send(farewell)
                if isinstance(state, SessionState):
                    self._protocol.forget(state.id)
            if self._dropped and self._dropped[0] is state:  # else the garbage collector was here meanwhile
                self._dropped.popleft()
