"""The wire: one struct per message, as msgpack maps tagged by "type".

A client's DEALER sends `[VERSION, payload]`, and so does the daemon, whose io thread speaks ZMTP as a ROUTER would.
Unknown fields are ignored, so either side may grow; `done` names those of its request. The io thread packs `token`,
`prompt_logprobs` and `done` natively (native/io/); the structs here are the same layout, frozen by golden bytes in
tests/wire/test_wire.py. What clients may read here, docs/wire.md says for people.

Times are nanoseconds of CLOCK_MONOTONIC on the daemon's machine; 0 stands for "did not happen".
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Annotated, Any, Final, Literal, NoReturn, Protocol, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ull.coercion import ONE_FOR_LIST, Coercion
from ull.errors import (
    Busy,
    DeadlineUnreachable,
    Draining,
    Forbidden,
    InvalidGrammar,
    JournalUnavailable,
    RequestError,
)

VERSION: Final = b"ull1"
MAX_ID: Final = 2**64 - 1  # request ids and seeds are unsigned 64-bit numbers
TRACE_BYTES: Final = 40  # of a record in a `trace` answer
MAX_TREE: Final = 64  # tokens of one verification, the root included
Drafter = Literal["none", "suffix", "medusa", "eagle", "dflash", "draft", "auto"]
DRAFTERS: Final[tuple[str, ...]] = get_args(Drafter)  # what `speculate` may name
Priority = Literal["realtime", "interactive", "batch"]
PRIORITIES: Final[tuple[str, ...]] = get_args(Priority)  # what `priority` may name, the most urgent first

# Refused while decoding, before anything is allocated for the elements. The engine's own limits are tighter and
# checked by admission, which can say more.
_MAX_PROMPT_IDS = 1 << 20
_MAX_MESSAGES = 1 << 14
_MAX_TOOLS = 4096
_MAX_STOPS = 1024
_MAX_BIASES = 1 << 13
_MAX_CHOICES = 1 << 14
_MAX_LABEL = 1 << 16  # characters
_MAX_GRAMMAR = 1 << 24  # characters of a regular expression or a Lark grammar
MAX_WARNINGS: Final = 8  # of one request; the core has room for so many
MAX_WARNING_BYTES: Final = 64  # of one of them


_Label = Annotated[str, Meta(max_length=_MAX_LABEL)]


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a chat, as the engine's chat template gets it. A field that is null is as one that is not there."""

    role: str
    content: str | list[dict[str, Any]] | None = None  # a text, or parts {"type": "text", "text": ...}
    name: str | None = None  # of who speaks, or of the function whose result this is
    tool_calls: list[dict[str, Any]] | None = None  # of an assistant's turn; `arguments` are JSON text or a map
    tool_call_id: str | None = None  # which call a result answers
    reasoning_content: str | None = None  # what the assistant thought; `reasoning` and `thinking` are other names
    reasoning: str | None = None
    thinking: str | None = None
    tool_plan: str | None = None


class Prompted(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What becomes a prompt's ids: a text, or a chat's messages."""

    id: int  # chosen by the client, unique among its live requests
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(max_length=_MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=_MAX_TOOLS)] | None = None  # function schemas; with messages
    documents: Annotated[list[dict[str, Any]], Meta(max_length=_MAX_TOOLS)] | None = None  # with messages
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the chat template; with messages
    add_generation_prompt: bool | None = None  # whether the template begins an answer; None: unless one is continued
    continue_final_message: bool = False  # the completion continues the last message instead of answering it
    special_tokens: bool = False  # texts of control tokens in prompt and messages become these tokens


class Generate(Prompted, tag="generate", kw_only=True, omit_defaults=True):
    """Asks for a completion of exactly one of `prompt`, `messages` and `token_ids`. Defaults are the daemon's.

    In a session `prompt` and `token_ids` go on behind what it holds, and may be left out where it holds something;
    `messages` are the whole conversation, of which the session keeps what is the same.
    """

    token_ids: Annotated[list[int], Meta(max_length=_MAX_PROMPT_IDS)] | None = None
    session: int | None = None  # of this client; None: none
    tool_choice: str | dict[str, Any] | None = None  # "auto", "none", "required", or a function's; None: "auto"
    max_tokens: int | None = None  # tokens; 0: only read the prompt; None: the daemon's default (256 unless configured)
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    presence_penalty: float = 0.0  # off a logit whose token the completion holds, -2 to 2; 0: off
    frequency_penalty: float = 0.0  # off a logit, times how often the completion holds its token, -2 to 2; 0: off
    repetition_penalty: float = 1.0  # divides the logits above 0, multiplies the others of tokens so far; 1: off
    seed: int | None = None  # None: drawn by the daemon and reported in `done`
    stop: Annotated[list[str], Meta(max_length=_MAX_STOPS, extra=ONE_FOR_LIST)] = []
    stop_ids: Annotated[list[int], Meta(max_length=_MAX_STOPS, extra=ONE_FOR_LIST)] = []
    logit_bias: Annotated[dict[int, float], Meta(max_length=_MAX_BIASES)] = {}
    logprobs: int | None = None  # None: none; 0: the chosen token's; n: and n alternatives
    prompt_logprobs: bool = False  # how likely each token of the prompt is behind those before it, ...
    prompt_top_logprobs: int = 0  # ... and so many of the likeliest in its place
    # Of these five at most one. The answer is one of these texts, ...
    choices: Annotated[list[_Label], Meta(max_length=_MAX_CHOICES)] | None = None
    json_schema: dict[str, Any] | bool | None = None  # ... JSON that this schema allows, ...
    regex: Annotated[str, Meta(max_length=_MAX_GRAMMAR)] | None = None  # ... what this expression matches, ...
    lark: Annotated[str, Meta(max_length=_MAX_GRAMMAR)] | None = None  # ... a text of this grammar, ...
    json_object: bool = False  # ... or any JSON object
    ignore_eos: bool = False
    timeout_ms: int | None = None  # milliseconds from receipt; None: none
    deadline_ms: int | None = None  # milliseconds from receipt, by which the last token must be there; None: none
    priority: str = "interactive"  # one of PRIORITIES
    hold: bool = False  # keep the answer until `commit`
    speculate: str | None = None  # one of DRAFTERS; None: the daemon's default. The tokens are the same for all
    max_tree: int | None = None  # tokens of one verification, 1 to MAX_TREE; None: the executor's choice
    strict: bool = False  # refuse unknown fields instead of naming them in `done`


class Tokenize(Prompted, tag="tokenize", kw_only=True, omit_defaults=True):
    """Asks for the ids that a `generate` of the same `prompt` or `messages` would use; answered by `tokenize`."""

    add_special_tokens: bool = True  # False: the text's own ids, without BOS; a chat's template writes its own
    count_only: bool = False  # answer with the number of ids alone
    strict: bool = False  # refuse unknown fields


class Detokenize(msgspec.Struct, tag="detokenize", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Asks for the text that a stream of `token_ids` would give; answered by `detokenize`."""

    id: int
    token_ids: Annotated[list[int], Meta(max_length=_MAX_PROMPT_IDS)]
    skip_special_tokens: bool = True  # False: special tokens' texts too, which no stream gives
    strict: bool = False  # refuse unknown fields


class OpenSession(msgspec.Struct, tag="open_session", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Opens a session, which holds nothing yet; answered by `session`, as all that follow."""

    id: int
    session: int  # chosen by the client, unique among its sessions
    pin: bool = False  # its KV cache is never given up for others'


class Fork(msgspec.Struct, tag="fork", kw_only=True, forbid_unknown_fields=True):
    """Opens the session `to` with what `session` holds."""

    id: int
    session: int
    to: int


class Rollback(msgspec.Struct, tag="rollback", kw_only=True, forbid_unknown_fields=True):
    """Takes the last `tokens` tokens off a session."""

    id: int
    session: int
    tokens: int


class Truncate(msgspec.Struct, tag="truncate", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Keeps the beginning of a session's last answer, which ends it: exactly one of `tokens` and `characters` of it."""

    id: int
    session: int
    tokens: int | None = None
    characters: int | None = None  # of its text


class CloseSession(msgspec.Struct, tag="close_session", kw_only=True, forbid_unknown_fields=True):
    """Ends a session, and what it still generates."""

    id: int
    session: int


class Commit(msgspec.Struct, tag="commit", kw_only=True, forbid_unknown_fields=True):
    """Releases the answer of the `generate` with the id `request`, which is held; answered by `ack`."""

    id: int
    request: int


class Cancel(msgspec.Struct, tag="cancel", kw_only=True, forbid_unknown_fields=True):
    """Ends the live request `id` of the same client; answered by `ack`."""

    id: int


class Health(msgspec.Struct, tag="health", kw_only=True, forbid_unknown_fields=True):
    """Asks whether the daemon serves, and whether it still runs `request`; answered by `health`."""

    id: int
    request: int | UnsetType = UNSET  # the id of a request of the same client


class Info(msgspec.Struct, tag="info", kw_only=True, forbid_unknown_fields=True):
    """Asks what the daemon serves; answered by `info`."""

    id: int


class Stats(msgspec.Struct, tag="stats", kw_only=True, forbid_unknown_fields=True):
    """Asks for counters and latencies; answered by `stats`."""

    id: int
    histograms: bool | UnsetType = UNSET  # with every bucket of the histograms


class Trace(msgspec.Struct, tag="trace", kw_only=True, forbid_unknown_fields=True):
    """Asks what the daemon's threads have done lately, step by step; for the role admin. Answered by `trace`."""

    id: int
    steps: int = 0  # number of the engine thread's first record that is wanted
    frames: int = 0  # ... of the io thread's
    requests: int = 0  # ... of the requests that have ended


class SetLog(msgspec.Struct, tag="set_log", kw_only=True, forbid_unknown_fields=True):
    """Changes what the daemon's log has from now on; for the role admin. Answered by `ack`."""

    id: int
    level: str | None = None  # "debug" | "info" | "warning" | "error"; None: as it is
    prompts: bool | None = None  # whether requests' lines have their prompts' text


class Upgrade(msgspec.Struct, tag="upgrade", kw_only=True, forbid_unknown_fields=True):
    """Has the daemon start its successor, from the files that are there now, and hand over to it; for the role admin.

    Answered by an `upgrade` of the successor, or by `error` where there is none.
    """

    id: int


class TokenLogprob(msgspec.Struct, kw_only=True):
    """Natural log-probability of one emitted token, and of the most likely alternatives `[id, logprob]`."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Token(msgspec.Struct, tag="token", kw_only=True):
    """One round's tokens, or several rounds' where the client or the io thread fell behind."""

    id: int
    index: int  # of ids[0] among the completion's tokens
    ids: list[int]
    text: str  # whole UTF-8 characters only; may be empty
    time_ns: int  # when ids[0] was accepted by the engine thread
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class PromptLogprobs(msgspec.Struct, tag="prompt_logprobs", kw_only=True):
    """Natural log-probabilities of a prompt's tokens, each behind those before it; before the request's first token."""

    id: int
    index: int  # of the prompt's token that logprobs[0] is of: 1 in the first, since the first token has none
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | UnsetType = UNSET  # of each the likeliest tokens `[id, logprob]`


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of one request; `completion_tokens` counts every emitted id, a stop id included."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    # That the session held, and the prompt does not go on from. It is sent even where it is 0, which a factory sees to.
    rolled_back_tokens: int = msgspec.field(default_factory=int)
    scored_tokens: int = 0  # of `choices`: that were fed to score them; their common beginnings count once
    choice_tokens: list[int] = []  # of each of the `choices`


class Timeline(msgspec.Struct, kw_only=True):
    """When things happened to one request (ns, CLOCK_MONOTONIC; 0: did not happen)."""

    received_ns: int = 0
    admitted_ns: int = 0
    started_ns: int = 0
    prefilled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    done_ns: int = 0
    expected_first_ns: int = 0  # as predicted when the request was accepted: its first token, ...
    expected_done_ns: int = 0  # ... and its last, if it has max_tokens

    def stages(self) -> Iterator[tuple[str, int, int]]:
        """The stages that the request has come through: name, begin and end (ns)."""
        for name, begin_ns, end_ns in (
            ("admission", self.received_ns, self.admitted_ns),
            ("queue", self.admitted_ns, self.started_ns),
            ("prefill", self.started_ns, self.prefilled_ns),
            ("first round", self.prefilled_ns, self.first_token_ns),
            ("decode", self.first_token_ns, self.last_token_ns),
        ):
            if begin_ns and end_ns:
                yield name, begin_ns, end_ns


class Speculation(msgspec.Struct, kw_only=True):
    """How one request's rounds went. A round emits what was accepted of its draft, and one token more."""

    rounds: int = 0
    drafted_tokens: int = 0  # proposed, the whole of every tree
    accepted_tokens: int = 0
    tokens_per_round: float = 0.0  # completion tokens / rounds; 0 without a round
    by_drafter: dict[str, int] = {}  # rounds by what proposed; "none": plain rounds
    accepted_by_depth: list[int] = []  # [d]: rounds whose draft was accepted to a depth of d + 1 or beyond


def added(one: Speculation, other: Speculation) -> Speculation:
    """The figures of two sets of rounds together."""
    rounds = one.rounds + other.rounds
    tokens = one.tokens_per_round * one.rounds + other.tokens_per_round * other.rounds
    depths = zip_longest(one.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
    return Speculation(
        rounds=rounds,
        drafted_tokens=one.drafted_tokens + other.drafted_tokens,
        accepted_tokens=one.accepted_tokens + other.accepted_tokens,
        tokens_per_round=tokens / rounds if rounds else 0.0,
        by_drafter=dict(Counter(one.by_drafter) + Counter(other.by_drafter)),
        accepted_by_depth=[first + second for first, second in depths],
    )


class Choice(msgspec.Struct, kw_only=True):
    """Which of a request's `choices` was chosen, and how likely the model takes each of them to be."""

    index: int  # of the chosen one
    logprobs: list[float]  # natural log-probability of each, by the model alone: before temperature
    probabilities: list[float]  # the same, normalised over the choices
    margin: float  # probability of the likeliest less that of the next one; 1.0 where there is one only


class GrammarUse(msgspec.Struct, kw_only=True):
    """What a request's grammar has cost, and saved."""

    masks: int  # tokens that the model drew and the grammar did not allow: each was drawn again under a mask
    forced_tokens: int  # that the grammar left no choice of, and that were not drawn


class Failure(msgspec.Struct, kw_only=True):
    """Why an accepted request ended with finish_reason "error"."""

    code: str
    message: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of one of the request's tools, as the answer has it."""

    id: str  # of nine letters and digits; what its result names as `tool_call_id`
    name: str
    arguments: str  # JSON text of an object, as it was generated


class Done(msgspec.Struct, tag="done", kw_only=True):
    """The one terminal frame of an accepted request."""

    id: int
    finish_reason: str  # "stop" | "tool_calls" | "length" | "cancelled" | "timeout" | "deadline" | "error"
    usage: Usage
    timeline: Timeline
    seed: int
    bundle: str = ""  # digest of the bundle that answered (see `ull.bundle.seal`), hexadecimal
    error: Failure | None = None
    speculation: Speculation = msgspec.field(default_factory=Speculation)
    warnings: list[str] = []  # unknown fields of the request, which were ignored: the first MAX_WARNINGS
    choice: Choice | UnsetType | None = UNSET  # where there were `choices`; nil: it ended before all were scored
    grammar: GrammarUse | UnsetType = UNSET  # where there was a grammar
    tool_calls: list[ToolCall] | UnsetType = UNSET  # that stand whole in the answer, where it could have some
    content: str | UnsetType = UNSET  # what of the answer's text is no call, where there are calls


class TokenizeReply(msgspec.Struct, tag="tokenize", kw_only=True):
    """Answers `tokenize`."""

    id: int
    token_ids: list[int]  # empty where `count_only` was asked for
    count: int


class DetokenizeReply(msgspec.Struct, tag="detokenize", kw_only=True):
    """Answers `detokenize`."""

    id: int
    text: str  # U+FFFD stands for bytes that are no UTF-8


class SessionReply(msgspec.Struct, tag="session", kw_only=True):
    """What a session holds, once the message that this answers has been carried out."""

    id: int
    session: int
    tokens: int  # in it


class Error(msgspec.Struct, tag="error", kw_only=True):
    """A request was refused or a message not understood (`id` null); never follows an accepted request."""

    id: int | None
    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None  # of code "busy": when it may be worth while to try again; an estimate
    queue_length: int | None = None  # of code "busy": requests that wait
    expected_ms: float | None = None  # of code "deadline_unreachable": when the last token would be there, from receipt


class Ack(msgspec.Struct, tag="ack", kw_only=True):
    """Answers `cancel`; `known` is false where no such request was live."""

    id: int
    known: bool


class HealthReply(msgspec.Struct, tag="health", kw_only=True):
    """Answers `health`."""

    id: int
    status: str  # "ok" | "journal_unavailable" | "draining" | "stalled" | "failed"
    uptime_ns: int
    queue_length: int
    live: bool | UnsetType = UNSET  # where a request was asked about: whether it has not ended


class InfoReply(msgspec.Struct, tag="info", kw_only=True):
    """Answers `info`: the bundle's summary, the executor in use, the limits that admission enforces."""

    id: int
    engine: dict[str, Any]
    executor: dict[str, Any]
    limits: dict[str, Any]


class Histogram(msgspec.Struct, kw_only=True):
    """Every bucket of a histogram of durations that holds any, in ascending order."""

    sum: int  # ns, of all that was recorded
    buckets: list[tuple[int, int]]  # a bucket's largest value (ns), and how many it holds


class StatsReply(msgspec.Struct, tag="stats", kw_only=True):
    """Answers `stats`: counters since the start, latencies, the engine's and the io thread's own figures.

    `threads` says by thread what its cycles cost: how many there were, how long it worked, the longest, how many were
    longer than `stall_ns`, and how often it slept.
    """

    id: int
    requests: dict[str, Any]
    latency: dict[str, Any]
    engine: dict[str, Any]
    io: dict[str, Any]
    speculation: dict[str, Any] = {}
    log: dict[str, Any] = {}  # dropped: lines that could not be written
    journal: dict[str, Any] = {}  # empty where there is none
    threads: dict[str, dict[str, int]] = {}
    histograms: dict[str, Histogram] = {}  # where they were asked for


class TracedRequest(msgspec.Struct, kw_only=True):
    """A request that has ended, in a `trace` answer."""

    connection: int  # as in the records
    request: int  # its id
    peer: str  # who asked
    finish_reason: str
    usage: Usage
    timeline: Timeline


class TraceReply(msgspec.Struct, tag="trace", kw_only=True):
    """Answers `trace`: records of 40 bytes (native/sync/trace_ring.h), and the numbers to go on with."""

    id: int
    steps: bytes
    next_step: int
    frames: bytes
    next_frame: int
    requests: list[TracedRequest]
    next_request: int
    more: bool  # there is more already
    connection: int  # of who asks


class UpgradeReply(msgspec.Struct, tag="upgrade", kw_only=True):
    """The answer to `upgrade`: the first words of the successor."""

    id: int
    pid: int
    version: str  # of ull
    clients: int  # connections that were handed over, this one among them
    requests: int  # that came meanwhile and waited for it
    sessions: int  # that go on in it
    pause_ns: int  # from the last answer of the predecessor, or the hand-over where nothing ran, to this one


SessionRequest = OpenSession | Fork | Rollback | Truncate | CloseSession
AdminRequest = Trace | SetLog | Upgrade
Request = Generate | Tokenize | Detokenize | SessionRequest | Commit | Cancel | Health | Info | Stats | AdminRequest
Reply = (
    Token
    | PromptLogprobs
    | Done
    | TokenizeReply
    | DetokenizeReply
    | SessionReply
    | Error
    | Ack
    | HealthReply
    | InfoReply
    | StatsReply
    | TraceReply
    | UpgradeReply
)


class Ended(msgspec.Struct, kw_only=True):
    """The io thread's record of one accepted request that has ended, for the log and the metrics."""

    identity: bytes
    id: int
    finish_reason: str
    usage: Usage
    timeline: Timeline
    seed: int
    error: Failure | None = None
    speculation: Speculation = msgspec.field(default_factory=Speculation)
    delivered: bool = True  # whether the terminal frame was handed to the client's connection
    client: str = "ok"  # "ok" | "gone" | "stalled"
    choice: Choice | None = None
    grammar: GrammarUse | None = None


class _Envelope(msgspec.Struct):
    """What every message to the daemon has; decoded first, so that an answer can carry the id."""

    type: str | None = None
    id: msgspec.Raw = msgspec.Raw(b"\xc0")


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_id_decoder = msgspec.msgpack.Decoder(int | float)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_ended_decoder = msgspec.msgpack.Decoder(Ended)
_request_types: dict[str, type[Request]] = {
    "generate": Generate,
    "tokenize": Tokenize,
    "detokenize": Detokenize,
    "open_session": OpenSession,
    "fork": Fork,
    "rollback": Rollback,
    "truncate": Truncate,
    "close_session": CloseSession,
    "commit": Commit,
    "cancel": Cancel,
    "health": Health,
    "info": Info,
    "stats": Stats,
    "trace": Trace,
    "set_log": SetLog,
    "upgrade": Upgrade,
}
_exact_decoders = {name: msgspec.msgpack.Decoder(struct) for name, struct in _request_types.items()}
_coercions: dict[str, Coercion[Any]] = {name: Coercion(struct, MAX_WARNINGS) for name, struct in _request_types.items()}
_FIELD_PATH = re.compile(r"\$\.([a-z_]+)|missing required field `([a-z_]+)`$")
_Decoded = TypeVar("_Decoded")
_Decoded_co = TypeVar("_Decoded_co", covariant=True)


class WireError(RequestError):
    """A message that could not be decoded; `request_id` is its id where that much could be read."""

    def __init__(self, code: str, message: str, field: str | None = None, request_id: int | None = None) -> None:
        super().__init__(code, message, field)
        self.request_id = request_id


def longest_request(context: int, bytes_per_token: int) -> int:
    """Bytes of the longest `generate` that an engine of `context` tokens can accept, whatever its form, and some more.

    A text of a token has at most `bytes_per_token`; 64 more are an id, or what a chat's message has around its text;
    stop texts, biases and fields that are unknown here share the rest.
    """
    return (256 << 10) + context * (bytes_per_token + 64)


def encode(message: Request | Reply) -> bytes:
    """The msgpack payload of `message`. Raises RequestError for a text that has no UTF-8 form (lone surrogates)."""
    try:
        return _encoder.encode(message)
    except UnicodeError as error:
        raise RequestError("bad_request", f"a text is not valid Unicode: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise RequestError("bad_request", f"a number does not fit 64 bits: {error}") from error


def encode_frames(message: Request | Reply) -> list[bytes]:
    """The frames `[VERSION, payload]` of `message`."""
    return [VERSION, encode(message)]


def decode_request(payload: bytes | memoryview) -> Request:
    """Decodes a client's message. Whatever the bytes are, the only exception is WireError."""
    return read_request(payload)[0]


def read_request(payload: bytes | memoryview) -> tuple[Request, list[str]]:
    """Decodes a client's message; with it the names of its unknown fields, MAX_WARNINGS of MAX_WARNING_BYTES at most.

    Whatever the bytes are, the only exception is WireError; also for unknown fields where the message says `strict`.
    """
    envelope = _decode(_envelope_decoder, payload, None)
    request_id = _valid_id(envelope.id)
    if envelope.type is None:
        raise WireError("bad_message", 'the message has no field "type"', "type", request_id)
    decoder = _exact_decoders.get(envelope.type)
    if decoder is None:
        known = ", ".join(_exact_decoders)
        raise WireError("unknown_type", f"unknown type {envelope.type[:40]!r}; known: {known}", "type", request_id)
    if request_id is None:
        raise WireError("bad_request", "id must be an integer from 0 to 2^64 - 1", "id")
    try:
        return decoder.decode(payload), []
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return _read_coerced(_coercions[envelope.type], payload, request_id)


def decode_reply(payload: bytes | memoryview) -> Reply:
    """Decodes a daemon's message. Raises WireError (code "bad_message") for anything else."""
    return _decode(_reply_decoder, payload, None)


def decode_ended(payload: bytes | memoryview) -> Ended:
    """Decodes the io thread's record of an ended request. Raises WireError if the two sides disagree."""
    return _decode(_ended_decoder, payload, None)


def error_of(reply: Error) -> RequestError:
    """The exception that a client raises for an `error` message."""
    if reply.code == "busy":
        seconds = None if reply.retry_after_ms is None else reply.retry_after_ms / 1000
        return Busy(reply.message, reply.field, seconds, reply.queue_length)
    if reply.code == "deadline_unreachable":
        expected = None if reply.expected_ms is None else reply.expected_ms / 1000
        return DeadlineUnreachable(reply.message, reply.field, expected)
    if reply.code == "draining":
        return Draining(reply.message, reply.field)
    if reply.code == "forbidden":
        return Forbidden(reply.message, reply.field)
    if reply.code == "journal_unavailable":
        return JournalUnavailable(reply.message, reply.field)
    if reply.code == "invalid_grammar":
        return InvalidGrammar(reply.message, reply.field)
    return RequestError(reply.code, reply.message, reply.field)


def _valid_id(raw: msgspec.Raw) -> int | None:
    """The id if it is an integer from 0 to MAX_ID; undecoded until here, since it may be anything of any size."""
    try:
        value = _id_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() and 0 <= value <= 2**53 else None
    return value if value >= 0 else None


def _read_coerced(coercion: Coercion[Any], payload: bytes | memoryview, request_id: int) -> tuple[Request, list[str]]:
    """A message that is not exactly of its struct: of unknown fields, or as other languages write it."""
    request, paths = _decode(coercion, payload, request_id)
    names = [path.encode()[:MAX_WARNING_BYTES].decode(errors="ignore") for path in paths]
    if names and getattr(request, "strict", False):
        nearest = difflib.get_close_matches(names[0], coercion.known_fields(paths[0]), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise WireError("bad_request", f"{names[0]} is no field of this message{hint}", names[0], request_id)
    return request, names


class _Decoder(Protocol[_Decoded_co]):
    def decode(self, payload: bytes | memoryview, /) -> _Decoded_co: ...


def _decode(decoder: _Decoder[_Decoded], payload: bytes | memoryview, request_id: int | None) -> _Decoded:
    """Runs a decoder; msgspec alone raises four families of exceptions on hostile bytes."""
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _FIELD_PATH.search(text)
        field = match[match.lastindex or 0] if match else None
        _raise(error, "bad_request" if field and request_id is not None else "bad_message", text, field, request_id)
    except UnicodeDecodeError as error:
        _raise(error, "bad_message", "a text is not valid UTF-8", None, request_id)
    except RecursionError as error:
        _raise(error, "bad_message", "the message is nested too deeply", None, request_id)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        _raise(error, "bad_message", f"not a msgpack map: {error}", None, request_id)


def _raise(cause: Exception, code: str, message: str, field: str | None, request_id: int | None) -> NoReturn:
    raise WireError(code, message, field, request_id) from cause
