"""The client's half of the wire without a socket: which answers belong to which request.

`Protocol` is shared by the synchronous and the asynchronous client. It never waits and never sends; the clients
do, and feed every message they receive to `Protocol.receive`. A signal handler may raise between any two steps here
(Ctrl-C): what is recorded is recorded by a single one of them, and the same message may be fed once more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ull import wire
from ull.errors import ConnectionLost, RequestError, RequestFailed, RequestTimeout, UllError
from ull.wire import Failure, GrammarUse, Speculation, Timeline, TokenLogprob, ToolCall, Usage

_Known = TypeVar("_Known")


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """What one token frame brought: usually one round's tokens, `text` being their whole characters.

    `time_ns` is when the engine accepted ids[0], `received_ns` when the client took the frame; both are
    CLOCK_MONOTONIC and comparable on one machine.
    """

    index: int
    ids: list[int]
    text: str
    time_ns: int
    received_ns: int
    logprobs: list[TokenLogprob] | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the `choices` was chosen; the lists have an entry for each of them."""

    label: str  # the chosen text
    index: int  # of it
    logprobs: list[float]  # natural log-probability of each, by the model alone: before temperature
    probabilities: list[float]  # the same, normalised over the choices
    margin: float  # probability of the likeliest less that of the next one


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion. `logprobs` has one entry per id where they were asked for.

    So has `prompt_logprobs` per token of the prompt, as `usage.prompt_tokens` counts them: the natural log-probability
    behind the tokens before it, None for the first. `prompt_top_logprobs` has the likeliest tokens in the place of
    each, likeliest first, as `(id, logprob)`. Of a request that did not end well they may be the beginning.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" | "tool_calls" | "length" | "cancelled" | "timeout" | "deadline" | "error"
    usage: Usage
    timeline: Timeline
    seed: int
    bundle: str  # digest of the bundle that answered: what `ull inspect` says of it, hexadecimal
    speculation: Speculation
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]] | None] | None = None
    error: Failure | None = None
    warnings: list[str] = []  # fields of the request that the daemon did not know, and ignored
    tool_calls: list[ToolCall] = []  # that stand whole in the answer to a request with tools
    content: str | None = None  # what of `text` is no call, for the next turn's message; None where there is no call
    choice: Choice | None = None  # of a request with `choices`; None: it ended before all were scored
    grammar: GrammarUse | None = None  # of a request with a grammar: what that has cost, and saved

    def json(self) -> Any:
        """The text, read as JSON. Raises ValueError: it is none, as where `max_tokens` have cut it off."""
        return msgspec.json.decode(self.text)


_SESSION_LOST = (
    "the session has ended with its connection; open another and send it the same ids or messages: "
    "what was computed of them is found in the prefix cache"
)


def engine_failure(done: wire.Done) -> RequestFailed:
    """The error of a request that the engine could not finish."""
    reason = done.error or Failure(code="internal", message="the engine failed")
    return RequestFailed(reason.code, reason.message)


def why_not_appended(done: wire.Done) -> UllError | None:
    """Why an append that was accepted is no part of its session, unless it is, or somebody has cancelled it."""
    if done.finish_reason == "error":
        return engine_failure(done)
    if done.finish_reason in ("timeout", "deadline") and not done.usage.prompt_tokens:
        return RequestTimeout("what was to be appended to the session had to wait for longer than its time limit")
    return None


class SessionState:
    """Everything known about one session of this client."""

    def __init__(self, session_id: int) -> None:
        self.id = session_id  # its number on the wire, and no request's id
        self.tokens = 0  # in it, as last reported
        self.failure: UllError | None = None  # it has ended: closed, or its connection lost
        self.refusal: UllError | None = None  # why an append did not get into it, until somebody is told
        self.abandoned = False  # nobody uses it
        self.guard: object = None  # a weak reference to who uses it

    def raise_failure(self) -> None:
        """Raises why the session has ended, or (once) why it lacks what was to be appended."""
        if self.failure is not None:
            raise self.failure.copy()
        if (refusal := self.refusal) is not None:
            self.refusal = None
            raise refusal.copy()

    def close(self) -> None:
        """Nothing is asked of the session any more."""
        if self.failure is None:
            self.failure = RequestError("unknown_session", "the session is closed", "session")


class StreamState:
    """Everything known about one generate request of this client.

    detached: it goes on although nobody waits for it. If it fails, its session tells the next who asks for something.
    """

    def __init__(self, request: wire.Generate, session: SessionState | None = None, detached: bool = False) -> None:
        self.id = request.id
        self.session = session
        self.detached = detached
        self.done: wire.Done | None = None
        self.failure: UllError | None = None  # refused, or the connection was lost
        self.abandoned = False  # nobody will read it: frames are dropped until the terminal one
        self.on_change: Callable[[], None] | None = None
        self.guard: object = None  # a weak reference to who reads it
        self.heard_ns = time.monotonic_ns()  # when the daemon last said something about it
        self.commit: Query | None = None  # the request to release the answer
        self._withheld = request.hold  # nothing of it was released
        self._wants_logprobs = request.logprobs is not None
        self._wants_prompt = request.prompt_logprobs
        self._wants_prompt_top = request.prompt_logprobs and request.prompt_top_logprobs > 0
        self._of_prompt: list[wire.PromptLogprobs] = []
        self._choices = request.choices or ()
        self._tokens: list[Token] = []
        self._read = 0  # tokens that the caller has had

    @property
    def finished(self) -> bool:
        """Whether no further frame can come."""
        return self.done is not None or self.failure is not None

    def raise_refusal(self) -> None:
        """Raises why the request was refused or lost, if it was."""
        if self.failure is not None:
            if self.session is not None and self.session.refusal is self.failure:
                self.session.refusal = None
            raise self.failure.copy()  # a shared exception would collect every raiser's traceback

    def raise_failure(self) -> None:
        """Raises what ended the stream, unless it ended well."""
        self.raise_refusal()
        if self.done is not None and self.done.finish_reason == "error":
            failed = engine_failure(self.done)
            failed.partial = self._result(self.done)
            raise failed

    def result(self) -> Result:
        """The completion of a finished stream. Raises what raise_failure raises."""
        self.raise_failure()
        if self.done is None:
            raise RuntimeError("result() of a stream that has not finished")
        return self._result(self.done)

    def _result(self, done: wire.Done) -> Result:
        logprobs = [entry for token in self._tokens for entry in token.logprobs or ()]
        logprobs_of_prompt = [logprob for part in self._of_prompt for logprob in part.logprobs]
        top_of_prompt = [top for part in self._of_prompt for top in part.top or ()]
        return Result(
            text="".join(token.text for token in self._tokens),
            token_ids=[token_id for token in self._tokens for token_id in token.ids],
            finish_reason=done.finish_reason,
            usage=done.usage,
            timeline=done.timeline,
            seed=done.seed,
            bundle=done.bundle,
            speculation=done.speculation,
            logprobs=logprobs if self._wants_logprobs else None,
            prompt_logprobs=self._behind_first(logprobs_of_prompt, done) if self._wants_prompt else None,
            prompt_top_logprobs=self._behind_first(top_of_prompt, done) if self._wants_prompt_top else None,
            error=done.error,
            warnings=done.warnings,
            tool_calls=done.tool_calls or [],
            content=done.content or None,
            choice=self._choice(done.choice),
            grammar=None if done.grammar is msgspec.UNSET else done.grammar,
        )

    @staticmethod
    def _behind_first(found: list[_Known], done: wire.Done) -> list[_Known | None]:
        """Of the prompt's tokens the first has nothing. Of a prompt that was never rendered there are none."""
        return [None, *found][: done.usage.prompt_tokens]

    def _choice(self, choice: wire.Choice | msgspec.UnsetType | None) -> Choice | None:
        if not isinstance(choice, wire.Choice):
            return None
        return Choice(
            label=self._choices[choice.index],
            index=choice.index,
            logprobs=choice.logprobs,
            probabilities=choice.probabilities,
            margin=choice.margin,
        )

    def next_token(self) -> Token | None:
        """The next token that the caller has not had; None if it has had all that are there."""
        if self._read == len(self._tokens):
            return None
        self._read += 1
        return self._tokens[self._read - 1]

    def drop_unread(self) -> None:
        """Counts all that is there as had."""
        self._read = len(self._tokens)

    def released(self) -> None:
        """A held answer comes from now on."""
        self._withheld = False
        if self.commit is not None:
            self.commit.answer(wire.Ack(id=self.id, known=True))

    def end(self, done: wire.Done) -> None:
        """Takes the terminal frame. What has failed, never began or was held to the end is no part of the session."""
        self.done = done
        whole, failed = done.finish_reason in ("stop", "tool_calls", "length"), done.finish_reason == "error"
        if self.session is not None and (whole or not (failed or self._withheld)) and done.usage.prompt_tokens:
            self.session.tokens = done.usage.prompt_tokens + done.usage.completion_tokens

    def take_prompt(self, reply: wire.PromptLogprobs, received_ns: int) -> None:
        """Appends what is said of the prompt's tokens."""
        if not self._hear(received_ns) or not self._wants_prompt:
            return
        last = self._of_prompt[-1] if self._of_prompt else None
        expected = 1 if last is None else last.index + len(last.logprobs)
        if reply.index > expected:
            lost = f"log-probabilities {expected} to {reply.index - 1} of the prompt were lost on the way"
            self.failure = ConnectionLost(lost)
        elif reply.index == expected:  # else it is fed once more
            self._of_prompt.append(reply)

    def _hear(self, received_ns: int) -> bool:
        """Something of the answer has come: whether anybody will read it."""
        self.heard_ns = received_ns
        if self._withheld:
            self.released()
        return not self.abandoned

    def take(self, reply: wire.Token, received_ns: int) -> None:
        """Appends one token frame."""
        if not self._hear(received_ns):
            return
        last = self._tokens[-1] if self._tokens else None
        expected = 0 if last is None else last.index + len(last.ids)
        if reply.index < expected or (last is not None and not last.ids):
            return  # fed once more; a frame without ids is the last one's text
        if reply.index > expected:
            self.failure = ConnectionLost(f"tokens {expected} to {reply.index - 1} of the request were lost on the way")
            return
        self._tokens.append(
            Token(
                index=reply.index,
                ids=reply.ids,
                text=reply.text,
                time_ns=reply.time_ns,
                received_ns=received_ns,
                logprobs=None if reply.logprobs is msgspec.UNSET else reply.logprobs,
            )
        )

    def answered(self, health: wire.HealthReply) -> None:
        """The daemon has said whether it still runs the request. Its end, if it has had one, was sent before that."""
        self.heard_ns = time.monotonic_ns()
        if health.live is False and not self.finished:
            self.failure = ConnectionLost("the daemon no longer knows the request, and its end did not arrive")

    def changed(self) -> None:
        """Tells whoever waits for this stream that it has moved."""
        if self.on_change is not None:
            self.on_change()


class Query:
    """A request with one answer: all but generate."""

    def __init__(self) -> None:
        self.reply: wire.Reply | None = None
        self.failure: UllError | None = None
        self.on_change: Callable[[], None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer, or the reason why there will be none, is there."""
        return self.reply is not None or self.failure is not None

    def answer(self, reply: wire.Reply) -> None:
        """Takes the answer, and tells whoever waits for it."""
        self.reply = reply
        if self.on_change is not None:
            self.on_change()


class Protocol:
    """The live requests and the sessions of one client, by id."""

    def __init__(self) -> None:
        self.unwanted: deque[StreamState | SessionState] = deque()  # to be ended at the daemon by whoever sends next
        self._streams: dict[int, StreamState] = {}
        self._queries: dict[int, Query] = {}
        self._sessions: dict[int, SessionState] = {}
        self._next_id = 0

    def new_id(self) -> int:
        """An id that this client has not used."""
        self._next_id += 1
        return self._next_id

    def open_stream(
        self, request: wire.Generate, session: SessionState | None = None, detached: bool = False
    ) -> StreamState:
        """Registers `request`; its frames will be collected in the returned state."""
        state = StreamState(request, session, detached)
        self._streams[request.id] = state
        return state

    def open_session(self, session: SessionState) -> None:
        """Registers a session: it ends with the connection at the latest."""
        self._sessions[session.id] = session

    def open_query(self, request: wire.Request) -> Query:
        """Registers a request with a single answer; the first token answers a `commit` as well."""
        query = Query()
        self._queries[request.id] = query
        if isinstance(request, wire.Commit) and (stream := self._streams.get(request.request)) is not None:
            stream.commit = query
        return query

    def forget(self, request_id: int) -> None:
        """Drops what was never sent, or whose answer no longer matters: a request or a session."""
        self._streams.pop(request_id, None)
        self._queries.pop(request_id, None)
        self._sessions.pop(request_id, None)

    def find(self, request_id: int) -> StreamState | SessionState | None:
        """The request that awaits its terminal frame, or the session that the daemon keeps, with this id."""
        return self._streams.get(request_id) or self._sessions.get(request_id)

    def farewell(self, state: StreamState | SessionState) -> bytes | None:
        """The message that ends `state` at the daemon; None if there is nothing to end."""
        if self.find(state.id) is not state:
            return None
        if isinstance(state, SessionState):
            return wire.encode(wire.CloseSession(id=self.new_id(), session=state.id))
        return wire.encode(wire.Cancel(id=state.id))

    def live_streams(self) -> list[int]:
        """The ids of the streams that still await their terminal frame."""
        return list(self._streams)

    def receive(self, payload: bytes | memoryview, received_ns: int) -> None:
        """Takes one message of the daemon; what belongs to no live request is ignored."""
        try:
            reply = wire.decode_reply(payload)
        except wire.WireError as error:
            self.fail_all(RequestError("bad_message", f"the daemon's answer is not understood: {error}"))
            return
        if isinstance(reply, wire.Token | wire.PromptLogprobs):
            if (stream := self._streams.get(reply.id)) is not None:
                if isinstance(reply, wire.Token):
                    stream.take(reply, received_ns)
                else:
                    stream.take_prompt(reply, received_ns)
                stream.changed()
                if stream.failure is not None and not stream.abandoned:
                    self._streams.pop(reply.id, None)
        elif isinstance(reply, wire.Done):
            if (stream := self._streams.get(reply.id)) is not None:
                stream.end(reply)
                if stream.detached and (lacks := why_not_appended(reply)) is not None:
                    self._lack(stream, lacks)
                stream.changed()
                self._streams.pop(reply.id, None)
        elif isinstance(reply, wire.Error):
            if reply.id is None:
                self.fail_all(wire.error_of(reply))
            else:
                self._fail(reply.id, wire.error_of(reply))
        elif isinstance(reply, wire.SessionReply) and (session := self._sessions.get(reply.session)) is not None:
            session.tokens = reply.tokens
            self._answer(reply)
        elif reply.id in self._queries:
            self._answer(reply)
        elif isinstance(reply, wire.Ack) and not reply.known:
            self._forget_abandoned(reply.id)

    def misunderstood(self) -> None:
        """The daemon has sent what is no message of this protocol."""
        self.fail_all(RequestError("bad_version", "the daemon speaks another protocol version"))

    def lost(self, url: str) -> None:
        """The connection is gone, and with it everything in flight: a new connection is a new client."""
        self.end_all(ConnectionLost(f"the connection to {url} was lost while the request was in flight"))

    def end_all(self, error: UllError, tell: bool = True) -> None:
        """As fail_all, and ends every session: there is no connection any more."""
        self.fail_all(error, tell)
        for session in list(self._sessions.values()):
            session.failure = session.failure or ConnectionLost(_SESSION_LOST)
            self._sessions.pop(session.id, None)

    def fail_all(self, error: UllError, tell: bool = True) -> None:
        """Ends everything in flight with `error`; whoever waits for it is told, unless nobody can."""
        for request_id in [*self._streams, *self._queries]:
            self._fail(request_id, error, tell)

    def _answer(self, reply: wire.Reply) -> None:
        """Ends a request that has one answer."""
        assert reply.id is not None
        if (query := self._queries.get(reply.id)) is not None:
            query.answer(reply)
            self._queries.pop(reply.id, None)

    def _lack(self, append: StreamState, error: UllError) -> None:
        """The session lacks what was to be appended: what was sent for it later was meant otherwise, and ends."""
        append.failure = error
        if (session := append.session) is None:
            return
        session.refusal = error
        for stream in list(self._streams.values()):
            if stream.session is session and stream.id > append.id and not stream.finished:
                self.unwanted.append(stream)
                stream.abandoned, stream.failure = True, error
                stream.changed()

    def _forget_abandoned(self, request_id: int) -> None:
        """A stream that was given up before its request had left: the daemon knows nothing of it."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.abandoned:
            stream.failure = ConnectionLost("the request was given up before it was sent")
            self._streams.pop(request_id, None)

    def _fail(self, request_id: int, error: UllError, tell: bool = True) -> None:
        target = self._streams.get(request_id) or self._queries.get(request_id)
        if target is not None:
            if isinstance(target, StreamState) and target.detached:
                self._lack(target, error)
            target.failure = error
            if tell and target.on_change is not None:
                target.on_change()
            self.forget(request_id)
