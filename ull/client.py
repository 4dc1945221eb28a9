"""The synchronous client: one zmq socket, blocking receives, no threads. The one to use where the tail counts.

    with ull.Client("ipc:///tmp/ull.sock") as client:
        for token in client.generate("def main():", max_tokens=64):
            print(token.text, end="", flush=True)

A client belongs to one thread. Several streams may run over one client; reading one collects the others' tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import cast

import zmq

from ull import wire
from ull.config import DEFAULT_ENDPOINT
from ull.errors import ConnectionLost, RequestTimeout
from ull.link import LINGER_MS, Link
from ull.streams import Prompt, Protocol, Query, Result, StreamState, Token, build_request

# Past the request's own timeout, which the daemon enforces, the client waits this much longer for the terminal frame.
GRACE_S = 5.0
_WATCH_MS = 50  # a wait for messages looks at the connection's state this often


class Stream:
    """The tokens of one request as they arrive. Iterate it, then ask for `result()`; both may be left out.

    Leaving a `with` block, or dropping the last reference, cancels a request that still runs.
    Raises RequestError (refused), ConnectionLost, RequestTimeout or RequestFailed, from iteration and result().
    """

    def __init__(self, client: Client, state: StreamState, deadline: float | None) -> None:
        self._client = client
        self._state = state
        self._deadline = deadline  # time.monotonic() seconds

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
        while not state.unread:
            if state.finished:
                state.raise_failure()
                raise StopIteration
            self._wait()
        return state.unread.popleft()

    def ready(self) -> Token | None:
        """The next token if it has arrived already, else None; never waits."""
        return self._state.unread.popleft() if self._state.unread else None

    def result(self) -> Result:
        """Waits for the end and returns all of it, whether iterated before or not."""
        while not self._state.finished:
            self._wait()
        return self._state.result()

    def cancel(self) -> None:
        """Asks the daemon to stop; what follows is at most a few tokens and the end ("cancelled")."""
        if not self._state.finished:
            self._client._cancel(self._state.id)

    def close(self) -> None:
        """Cancels if still running, and forgets what is unread."""
        if not self._state.finished:
            self._client._abandon(self._state)
        self._state.unread.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._state.finished:
            self._client._abandon(self._state)

    def __del__(self) -> None:
        if not self._state.finished:
            self._client._abandon(self._state)

    def _wait(self) -> None:
        if not self._client._pump(self._deadline) and self._deadline is not None and not self._state.finished:
            self._client._abandon(self._state)
            self._state.failure = RequestTimeout("the daemon did not end the request within its timeout")


class Client:
    """A connection to a daemon at `url`.

    connect_timeout: seconds to wait for a daemon before ConnectionLost, at the first request and after a restart.
    query_timeout: seconds to wait for the answer to health, info and stats.
    context: the zmq context to use (default: the process's shared one).
    """

    def __init__(
        self,
        url: str = DEFAULT_ENDPOINT,
        *,
        connect_timeout: float = 2.0,
        query_timeout: float = 5.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._protocol = Protocol()
        self._dropped: deque[StreamState] = deque()
        self._thread = threading.get_ident()
        self._busy = False
        self._closed = False
        self._connect_timeout = connect_timeout
        self._query_timeout = query_timeout
        self._link = Link(url, context)

    @property
    def url(self) -> str:
        """The endpoint this client talks to."""
        return self._link.url

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        ignore_eos: bool = False,
        timeout: float | None = None,
        speculate: str | None = None,
        max_tree: int | None = None,
    ) -> Stream:
        """Sends a request and returns its stream at once.

        prompt: a text, a list of chat messages ({"role", "content"}) or a list of token ids.
        max_tokens: tokens (None: the daemon's default). temperature 0: greedy. top_k 0, top_p 1, min_p 0: off.
        presence_penalty, frequency_penalty: -2 to 2, over the completion's tokens. repetition_penalty: above 0, over
        the prompt's too (1: off).
        seed: None lets the daemon draw one and report it. stop: texts that end the completion, not part of it.
        logit_bias: token id -> number added to its logit. logprobs: alternatives per token (0: only the chosen).
        timeout: seconds after which the daemon ends the request ("timeout").
        speculate: "none", "ngram", "medusa", "draft" or "auto" (None: the daemon's default); max_tree: tokens of one
        verification, 1 to 64 (None: as many as pay). Both change the speed only, never the tokens.
        Raises ConnectionLost if no daemon answers within connect_timeout.
        """
        request = build_request(
            self._protocol.new_id(),
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
            stop_ids=stop_ids,
            logit_bias=logit_bias,
            logprobs=logprobs,
            ignore_eos=ignore_eos,
            timeout=timeout,
            speculate=speculate,
            max_tree=max_tree,
        )
        frames = wire.encode_frames(request)
        state = self._protocol.open_stream(request)
        try:
            self._send(frames)
        except BaseException:
            self._protocol.forget(request.id)
            raise
        return Stream(self, state, None if timeout is None else time.monotonic() + timeout + GRACE_S)

    def health(self) -> wire.HealthReply:
        """The daemon's state: status, uptime_ns, queue_length."""
        return cast("wire.HealthReply", self._ask(wire.Health(id=self._protocol.new_id())))

    def info(self) -> wire.InfoReply:
        """What the daemon serves: engine, executor, limits."""
        return cast("wire.InfoReply", self._ask(wire.Info(id=self._protocol.new_id())))

    def stats(self) -> wire.StatsReply:
        """Counters and latencies since the daemon's start."""
        return cast("wire.StatsReply", self._ask(wire.Stats(id=self._protocol.new_id())))

    def poll(self, timeout: float = 0.0) -> bool:
        """Collects what has arrived for any stream, waiting at most `timeout` seconds; whether there was anything."""
        return self._pump(time.monotonic() + timeout)

    def close(self) -> None:
        """Cancels what still runs and closes the connection. Streams that were not finished fail."""
        if self._closed:
            return
        self._closed = True
        for stream_id in self._protocol.live_streams():
            self._link.send(wire.encode_frames(wire.Cancel(id=stream_id)))
        self._protocol.fail_all(ConnectionLost("the client was closed"))
        self._link.close(LINGER_MS)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _pump(self, deadline: float | None) -> bool:
        """Takes in what has arrived; waits until there is something, or until `deadline`. False: nothing came."""
        if self._closed:
            raise ConnectionLost("the client is closed")
        if self._dropped:
            self._flush_dropped()
        while True:
            remaining_ms = _WATCH_MS if deadline is None else int((deadline - time.monotonic()) * 1000 + 0.999)
            if self._receive(max(0, min(remaining_ms, _WATCH_MS))):
                return True
            if deadline is not None and remaining_ms <= _WATCH_MS:
                return False

    def _receive(self, wait_ms: int) -> bool:
        """Takes in messages and the connection's changes, waiting at most `wait_ms`; whether there were any."""
        if not self._link.connected:
            self._link.monitor.poll(wait_ms)  # nothing can arrive before the connection does
            wait_ms = 0
        self._busy = True
        try:
            return self._link.receive(self._protocol, wait_ms) or self._link.watch(self._protocol)
        finally:
            self._busy = False

    def _send(self, frames: list[bytes]) -> None:
        """Sends, waiting up to the connect timeout for a connection. Raises ConnectionLost if there is none."""
        if self._closed:
            raise ConnectionLost("the client is closed")
        deadline = time.monotonic() + self._connect_timeout
        self._pump(0.0)
        while not self._try_send(frames):
            if time.monotonic() >= deadline:
                raise ConnectionLost(
                    f"no daemon answers at {self.url} (waited {self._connect_timeout:g} s); is ulld running?"
                )
            self._pump(min(deadline, time.monotonic() + 0.05))

    def _try_send(self, frames: list[bytes]) -> bool:
        self._busy = True
        try:
            return self._link.send(frames)
        finally:
            self._busy = False

    def _ask(self, request: wire.Health | wire.Info | wire.Stats) -> wire.Reply:
        query: Query = self._protocol.open_query(request.id)
        try:
            self._send(wire.encode_frames(request))
            deadline = time.monotonic() + self._query_timeout
            while not query.finished:
                if not self._pump(deadline) and time.monotonic() >= deadline:
                    raise RequestTimeout(f"the daemon at {self.url} did not answer within {self._query_timeout:g} s")
        finally:
            self._protocol.forget(request.id)
        if query.failure is not None:
            raise query.failure.copy()
        assert query.reply is not None
        return query.reply

    def _cancel(self, request_id: int) -> None:
        if not self._closed:
            self._try_send(wire.encode_frames(wire.Cancel(id=request_id)))

    def _abandon(self, state: StreamState) -> None:
        """Cancels a stream that nobody will read; may run inside the garbage collector, in any thread."""
        state.abandoned = True
        self._dropped.append(state)
        if not self._busy and not self._closed and threading.get_ident() == self._thread:
            self._flush_dropped()

    def _flush_dropped(self) -> None:
        while self._dropped:
            state = self._dropped.popleft()
            if not state.finished:
                self._cancel(state.id)
