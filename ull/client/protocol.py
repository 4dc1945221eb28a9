"""The client's half of the wire without a socket: which answers belong to which request.

`Protocol` is shared by the synchronous and the asynchronous client. It never waits and never sends; the clients
do, and feed every message they receive to `Protocol.receive`. A signal handler may raise between any two steps here
(Ctrl-C): what is recorded is recorded by a single one of them, and the same message may be fed once more.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from ull import wire
from ull.client.options import GENERATE_OPTIONS, TOKENIZE_OPTIONS, GenerateOptions, TokenizeOptions, refuse_unknown
from ull.errors import ConnectionLost, RequestError, RequestFailed, UllError
from ull.wire import Failure, Speculation, Timeline, TokenLogprob, Usage

ChatMessage = wire.Message | Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[ChatMessage]


_CONTAINERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(("stop", "stop_ids", "token_ids", "tools", "documents"), (list, "a list")),
    "logit_bias": (dict, "a mapping of token ids to numbers"),
    "chat_template_kwargs": (dict, "a mapping"),
}


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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion. `logprobs` has one entry per id where they were asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" | "length" | "cancelled" | "timeout" | "error"
    usage: Usage
    timeline: Timeline
    seed: int
    bundle: str  # digest of the bundle that answered: what `ull inspect` says of it, hexadecimal
    speculation: Speculation
    logprobs: list[TokenLogprob] | None = None
    error: Failure | None = None
    warnings: list[str] = []  # fields of the request that the daemon did not know, and ignored


class StreamState:
    """Everything known about one generate request of this client."""

    def __init__(self, request_id: int, wants_logprobs: bool) -> None:
        self.id = request_id
        self.done: wire.Done | None = None
        self.failure: UllError | None = None  # refused, or the connection was lost
        self.abandoned = False  # nobody will read it: frames are dropped until the terminal one
        self.on_change: Callable[[], None] | None = None
        self.guard: object = None  # a weak reference to who reads it
        self.heard_ns = time.monotonic_ns()  # when the daemon last said something about it
        self._wants_logprobs = wants_logprobs
        self._tokens: list[Token] = []
        self._read = 0  # tokens that the caller has had

    @property
    def finished(self) -> bool:
        """Whether no further frame can come."""
        return self.done is not None or self.failure is not None

    def raise_failure(self) -> None:
        """Raises what ended the stream, unless it ended well."""
        if self.failure is not None:
            raise self.failure.copy()  # a shared exception would collect every raiser's traceback
        if self.done is not None and self.done.finish_reason == "error":
            reason = self.done.error or Failure(code="internal", message="the engine failed")
            failed = RequestFailed(reason.code, reason.message)
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
            error=done.error,
            warnings=done.warnings,
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

    def take(self, reply: wire.Token, received_ns: int) -> None:
        """Appends one token frame."""
        self.heard_ns = received_ns
        if self.abandoned:
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


class Protocol:
    """The live requests of one client, by id."""

    def __init__(self) -> None:
        self._streams: dict[int, StreamState] = {}
        self._queries: dict[int, Query] = {}
        self._next_id = 0

    def new_id(self) -> int:
        """An id that this client has not used."""
        self._next_id += 1
        return self._next_id

    def open_stream(self, request: wire.Generate) -> StreamState:
        """Registers `request`; its frames will be collected in the returned state."""
        state = StreamState(request.id, request.logprobs is not None)
        self._streams[request.id] = state
        return state

    def open_query(self, request_id: int) -> Query:
        """Registers a request with a single answer."""
        query = Query()
        self._queries[request_id] = query
        return query

    def forget(self, request_id: int) -> None:
        """Drops a request that was never sent, or whose answer no longer matters."""
        self._streams.pop(request_id, None)
        self._queries.pop(request_id, None)

    def stream(self, request_id: int) -> StreamState | None:
        """The stream of a request that awaits its terminal frame."""
        return self._streams.get(request_id)

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
        if isinstance(reply, wire.Token):
            if (stream := self._streams.get(reply.id)) is not None:
                stream.take(reply, received_ns)
                stream.changed()
                if stream.failure is not None:
                    self._streams.pop(reply.id, None)
        elif isinstance(reply, wire.Done):
            if (stream := self._streams.get(reply.id)) is not None:
                stream.done = reply
                stream.changed()
                self._streams.pop(reply.id, None)
        elif isinstance(reply, wire.Error):
            if reply.id is None:
                self.fail_all(wire.error_of(reply))
            else:
                self._fail(reply.id, wire.error_of(reply))
        elif (query := self._queries.get(reply.id)) is not None:
            query.reply = reply
            if query.on_change is not None:
                query.on_change()
            self._queries.pop(reply.id, None)
        elif isinstance(reply, wire.Ack) and not reply.known:
            self._forget_abandoned(reply.id)

    def misunderstood(self) -> None:
        """The daemon has sent what is no message of this protocol."""
        self.fail_all(RequestError("bad_version", "the daemon speaks another protocol version"))

    def lost(self, url: str) -> None:
        """The connection is gone, and with it everything in flight: a new connection is a new client."""
        self.fail_all(ConnectionLost(f"the connection to {url} was lost while the request was in flight"))

    def fail_all(self, error: UllError, tell: bool = True) -> None:
        """Ends everything in flight with `error`; whoever waits for it is told, unless nobody can."""
        for request_id in [*self._streams, *self._queries]:
            self._fail(request_id, error, tell)

    def _forget_abandoned(self, request_id: int) -> None:
        """A stream that was given up before its request had left: the daemon knows nothing of it."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.abandoned:
            stream.failure = ConnectionLost("the request was given up before it was sent")
            self._streams.pop(request_id, None)

    def _fail(self, request_id: int, error: UllError, tell: bool = True) -> None:
        target = self._streams.get(request_id) or self._queries.get(request_id)
        if target is not None:
            target.failure = error
            if tell and target.on_change is not None:
                target.on_change()
            self.forget(request_id)


def build_request(request_id: int, prompt: Prompt, options: GenerateOptions) -> wire.Generate:
    """The message for one generate call. None stands for an option's default.

    The daemon checks the values; here it is only what kind of prompt there is, and that containers are containers.
    Raises RequestError, which names the field; TypeError for what is no option.
    """
    refuse_unknown("generate", options, GENERATE_OPTIONS)
    values: dict[str, Any] = {**options}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if (timeout := values.pop("timeout", None)) is not None:
        values["timeout_ms"] = _milliseconds(timeout)
    request = wire.Generate(id=request_id, **_given(values))
    if isinstance(prompt, str):
        request.prompt = prompt
        return request
    items = _prompt_items(prompt)
    if items and isinstance(items[0], wire.Message | Mapping):
        request.messages = [_message(index, item) for index, item in enumerate(items)]
    else:
        request.token_ids = _token_ids(items, "prompt", "a text, a list of messages or of token ids (integers)")
    return request


def build_tokenize(request_id: int, prompt: str | Sequence[ChatMessage], options: TokenizeOptions) -> wire.Tokenize:
    """The message for one tokenize call, as `build_request`; the prompt is a text or a list of messages."""
    refuse_unknown("tokenize", options, TOKENIZE_OPTIONS)
    request = wire.Tokenize(id=request_id, **_given(options))
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.messages = [_message(index, item) for index, item in enumerate(_prompt_items(prompt))]
    return request


def build_detokenize(request_id: int, token_ids: Sequence[int], **values: Any) -> wire.Detokenize:
    """The message for one detokenize call. Raises RequestError where an item is no integer."""
    ids = _token_ids(_container("token_ids", token_ids), "token_ids", "a list of token ids (integers)")
    return wire.Detokenize(id=request_id, token_ids=ids, **_given(values))


def encode_request(request: wire.Request) -> bytes:
    """The payload of `request`. Raises RequestError, which names the field that the wire cannot carry."""
    try:
        return wire.encode(request)
    except (RequestError, TypeError, ValueError):
        for name in request.__struct_fields__:
            _check_sendable(name, getattr(request, name))
        raise


def _check_sendable(name: str, value: object) -> None:
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        raise _refused(
            name,
            f"{name} holds {error.object[error.start]!r} (character {error.start} of a text), which has no UTF-8 form",
        ) from None
    except OverflowError:
        raise _refused(name, f"{name} holds a number that does not fit 64 bits") from None
    except RecursionError:
        raise _refused(name, f"{name} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refused(name, f"{name} holds what cannot be sent: {error}") from None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None; lists and maps as such."""
    return {name: _container(name, value) for name, value in values.items() if value is not None}


def _prompt_items(prompt: object) -> list[Any]:
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise _refused("prompt", f"prompt is {type(prompt).__name__}; decode it to a text, or give a list of token ids")
    wanted = "prompt must be a text, a list of messages {role, content} or a list of token ids"
    if isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | Set):
        return list(prompt)
    raise _refused("prompt", f"{wanted}, not {type(prompt).__name__}")


def _message(index: int, item: object) -> wire.Message:
    if isinstance(item, Mapping):
        known = wire.Message.__struct_encode_fields__
        unknown = [key for key in item if key not in known]
        if unknown:
            raise _refused(
                "prompt", f"message {index} of the prompt has the unknown key {unknown[0]!r}; known: {', '.join(known)}"
            )
    try:
        return msgspec.convert(item, wire.Message, from_attributes=True)
    except msgspec.ValidationError as error:
        raise _refused("prompt", f"prompt must be a list of messages, but message {index} is none: {error}") from error


def _token_ids(items: list[Any], name: str, wanted: str) -> list[int]:
    if set(map(type, items)) == {int}:
        return items
    ids = []
    for index, item in enumerate(items):
        try:
            if isinstance(item, bool):
                raise TypeError
            ids.append(operator.index(item))  # NumPy's integers are welcome
        except TypeError:
            raise _refused(
                name, f"{name} must be {wanted}, but item {index} is {_shortened(item)}, a {type(item).__name__}"
            ) from None
    return ids


def _container(name: str, value: Any) -> Any:
    """`value`; that of a field which is a list or a map, as one."""
    kind, wanted = _CONTAINERS.get(name, (None, ""))
    if kind is None:
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return kind(value)
    except (TypeError, ValueError):
        raise _refused(name, f"{name} must be {wanted}, not {_shortened(value)}") from None


def _milliseconds(seconds: float) -> int:
    try:
        if seconds > 0:
            return max(1, math.ceil(seconds * 1000))
    except (TypeError, ValueError, OverflowError):
        pass
    raise _refused("timeout", f"timeout must be a positive number of seconds, not {_shortened(seconds)}")


def _shortened(value: object) -> str:
    return f"{value!r:.60}"


def _refused(name: str, message: str) -> RequestError:
    return RequestError("bad_request", message, name)
