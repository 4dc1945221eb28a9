"""The control plane: everything about a request before its first token and after its last. One thread, never waits.

The io thread hands over what clients send, who has hung up and how accepted requests ended (IoMessage); replies and the
engine's queue are the way back. Tokens never pass here.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from enum import Enum
from typing import Any

import msgspec
import zmq

from ull import wire
from ull.daemon.admission import Admission
from ull.daemon.answers import Answers, EngineLike, IoLike
from ull.daemon.config import AccessConfig, SessionsConfig
from ull.daemon.grammars import Grammars
from ull.daemon.journal import Journal
from ull.daemon.metrics import DutyCycle, Metrics, inter_token_ns
from ull.daemon.peers import Peer, Peers
from ull.daemon.preparation import Preparation, Work
from ull.daemon.refusals import RefusalLog
from ull.daemon.sessions import Sessions
from ull.daemon.set_aside import Kept, SetAside
from ull.daemon.succession import HandedClient, HandedMessage
from ull.daemon.traces import Traces
from ull.daemon.turn import Turn
from ull.daemon.turns import INLINE_CHARACTERS, Turns, completion_ids
from ull.errors import Busy, DeadlineUnreachable, Draining, RequestError
from ull.log import LEVELS, Log
from ull.socket_reader import MessageReceiver, SocketReader

_STALL_NS = 10_000_000  # a turn that took longer is counted
LOGGED_DIGITS = 16  # of the bundle's digest and the grammar's key, in the line of each request
_LOGGED_CHARACTERS = 1000  # of a prompt, where the log is to have it
_DENIALS = {
    "no_key": "a client left without showing a key: this endpoint takes those with a CURVE key only (--key FILE)",
    "wrong_server_key": "the client expects a daemon with another key: compare its key file with access.server_key",
    "unknown_key": "the client's key is not in the file access.clients: `ull keys list` shows who is",
}
_UNKNOWN_SERVICE_MS = 100  # assumed before the first request has ended
_MOST_RETRY_MS = 60_000
_TURN_NS = 2_000_000  # spent on the io thread's messages before other events have their turn
_MEMORY_TRIES = 50  # receives that may fail in a row for want of memory, ...
_MEMORY_PAUSE_S = 0.02  # ... this far apart, before the daemon gives up


class IoMessage(bytes, Enum):
    """What the io thread tells the control plane: the first frame of a message. The core's, see io/control_pair.h."""

    REQUEST = b"R"
    MALFORMED = b"B"
    ENDED = b"D"
    ENDPOINT = b"E"
    PEER = b"P"
    DENIED = b"X"
    GONE = b"G"


class ControlPlane:
    """Answers clients' messages. `socket` is the PAIR whose other end the io thread holds.

    `engine_summary` and `executor_summary` are what `info` reports. `grammars`: none where admission refuses them.
    `upgrade` begins what an `upgrade` of this client and id asks for; it raises RequestError.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        engine: EngineLike,
        io: IoLike,
        admission: Admission,
        log: Log,
        *,
        engine_summary: dict[str, Any],
        executor_summary: dict[str, Any],
        queue_depth: int,
        sessions: SessionsConfig,
        grammars: Grammars | None = None,
        journal: Journal | None = None,
        access: AccessConfig | None = None,
        upgrade: Callable[[bytes, int], None] | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._peers = Peers(access or AccessConfig())
        self._traces = Traces(engine)
        self._denials = RefusalLog(log, "denied", "denials")
        self._duty = DutyCycle(_STALL_NS)
        self.draining = False
        self.rehearsal: int | None = None  # seed of the daemon's own request, unguessable, while it is under way
        self.rehearsed = asyncio.Event()  # it has ended
        self.failure: str | None = None  # why no more messages can be taken; only a new process helps
        self.changed = asyncio.Event()  # the last request has ended, the engine or the control plane has failed
        self._socket = socket
        self._engine = engine
        self._io = io
        self._admission = admission
        self._log = log
        self._journal = journal
        self._upgrade = upgrade
        self._queue_depth = queue_depth
        self._aside: SetAside | None = None  # while a successor waits for the last requests to end
        self._refusals = RefusalLog(log)
        self._receiver = MessageReceiver(socket)
        self._memory_tries = 0
        digest = str(engine_summary.get("digest", ""))
        self._bundle = digest[:LOGGED_DIGITS] or None
        self._started_ns = time.monotonic_ns()
        self._answers = Answers(engine_summary, executor_summary, admission.limits)
        self._preparation = Preparation(queue_depth, self.busy)
        self._converting: set[tuple[bytes, int]] = set()  # long texts and ids
        self._turns = Turns(
            self,
            engine,
            admission,
            self._preparation,
            grammars,
            Sessions(
                sessions.per_client,
                sessions.total,
                admission.limits.max_pinned_sessions,
                admission.limits.max_pinned_tokens,
            ),
            self.metrics,
            log,
            queue_depth=queue_depth,
            bundle=digest,
            hold_timeout_s=sessions.hold_timeout_s,
            journal=journal,
        )
        self._reader: SocketReader | None = None

    @property
    def live(self) -> int:
        """Requests that have not ended: accepted, being tokenized, or waiting for their session."""
        return len(self._turns) + len(self._converting)

    def start(self) -> None:
        """Begins to serve, in the running event loop."""
        loop = asyncio.get_running_loop()
        self._reader = SocketReader(loop, self._socket, self._turn)
        loop.add_reader(self._engine.control_call, self._called)
        self._engine.beat()

    def close(self) -> None:
        """Stops serving."""
        if self._reader is not None:
            self._reader.close()
        self._engine.end_beat()
        self._refusals.summarise()
        self._denials.summarise()
        self._preparation.close()
        self._upgrade = None  # it leads back to whoever owns this

    def cancel_all(self) -> None:
        """Asks the engine to end everything that is still running."""
        self._turns.cancel_all()

    def health(self) -> str:
        """What `wire.HealthReply` says; a fault of the engine outranks draining, which outranks one of the journal."""
        status = self._engine.health()
        if status == "ok" and self.draining:
            return "draining"
        if status == "ok" and self._journal is not None and self._journal.unavailable is not None:
            return "journal_unavailable"
        return status

    # ---- a successor, or a predecessor --------------------------------------------------------------------------

    def use_journal(self, journal: Journal | None) -> None:
        """Records of requests go there from now on."""
        self._journal = self._turns.journal = journal

    def hold(self) -> None:
        """From now on nothing new is begun: what comes is set aside. What was begun goes on, and is answered."""
        self._aside = SetAside(self._queue_depth, self._engine.client_share)

    def is_quiet(self) -> bool:
        """Whether nothing is under way any more. What is held is set aside: nobody has seen anything of it."""
        if self._aside is not None:
            for turn in self._turns.withdraw_held():
                payload = wire.encode(turn.request)
                self._aside.keep_first(Kept(turn.identity, payload, turn.received_ns, turn.request.id))
        return not self._converting and self._turns.quiet

    def fall_silent(self) -> None:
        """From now on nobody is answered at all: everything that comes is set aside."""
        if self._aside is not None:
            self._aside.closed = True

    def hand_over(
        self, clients: Sequence[tuple[int, bytes, list[bytes], bytes]]
    ) -> tuple[list[HandedClient], list[HandedMessage]]:
        """What a successor is told of the io thread's clients, once that has halted, and what was set aside."""
        while (frames := self._receiver.receive()) is not None:
            self._take(frames)
        handed, places = [], {}
        for place, (_, state, payloads, identity) in enumerate(clients):
            places[identity] = place
            peer = self._peers.known(identity)
            who = None if peer is None else astuple(peer)
            handed.append(HandedClient(state, payloads, who, self._turns.sessions_saved(identity)))
        return handed, [
            HandedMessage(places[kept.identity], kept.payload, kept.received_ns, kept.malformed, kept.request_id)
            for kept in (() if self._aside is None else self._aside)
            if kept.identity in places
        ]

    def go_on(self) -> None:
        """There is no successor: answers again, and first what was set aside."""
        aside, self._aside = self._aside, None
        for kept in () if aside is None else aside:
            self._receive(kept)
        self._read_again()

    def take_over(
        self, identities: Sequence[bytes], clients: Sequence[HandedClient], messages: Sequence[HandedMessage]
    ) -> None:
        """Goes on with a predecessor's clients, which the io thread knows by these identities."""
        for identity, client in zip(identities, clients, strict=True):
            if client.peer is not None:
                self._peers.take(identity, Peer(*client.peer))
            for session in client.sessions:
                self._turns.restore_session(identity, session)
        for message in messages:
            who = identities[message.client]
            self._receive(Kept(who, message.payload, message.received_ns, message.request_id, message.malformed))

    def _receive(self, kept: Kept) -> None:
        """What was set aside, as if it had come now."""
        if kept.malformed is None:
            self._request(kept.identity, memoryview(kept.payload), kept.received_ns)
        else:
            self._malformed(kept.identity, kept.malformed, kept.request_id)

    def _sets_aside(self, identity: bytes, request: wire.Request, payload: memoryview, received_ns: int) -> bool:
        """Whether this message is kept for later. Raises RequestError for one that is not."""
        aside = self._aside
        if aside is None or not (aside.closed or aside.concerns(identity, request)):
            return False
        if not aside.closed:
            if isinstance(request, wire.Generate):
                self._refuse_repeated(identity, request.id)
            if aside.is_full_for(identity, request):
                waiting = len(aside)
                raise self.busy(f"{waiting} requests wait while the daemon hands over to its successor", waiting)
            session = getattr(request, "session", None)
            if session is not None:
                self._turns.drop_held(identity, session)
        aside.keep(Kept(identity, bytes(payload), received_ns, request.id))
        return True

    # ---- messages -----------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        began_ns = time.monotonic_ns()
        more = self._drain_socket()
        self._duty.record(time.monotonic_ns() - began_ns)
        return more

    def _drain_socket(self) -> bool:
        """Takes messages for one turn. True: more may be there. What goes wrong ends the daemon; it never goes deaf."""
        end_ns = time.monotonic_ns() + _TURN_NS
        try:
            while time.monotonic_ns() < end_ns:
                frames = self._receiver.receive()
                if frames is None:
                    return False
                self._memory_tries = 0
                self._take(frames)
        except MemoryError:
            self._wait_for_memory()
            return False
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
            return False
        return True

    def _wait_for_memory(self) -> None:
        """The message that could not be received is still there: it is tried again soon, but not for ever."""
        self._memory_tries += 1
        if self._memory_tries > _MEMORY_TRIES:
            self.give_up("out of memory")
            return
        asyncio.get_running_loop().call_later(_MEMORY_PAUSE_S, self._read_again)

    def _read_again(self) -> None:
        if self._reader is not None:
            self._reader.again()

    def give_up(self, reason: str) -> None:
        """No more messages can be taken: only a new process helps."""
        self.failure = self.failure or reason
        self.changed.set()

    def _look_for_end(self) -> None:
        if not self.live:
            self.changed.set()

    def _called(self) -> None:
        """The watchdog asks for a sign of life. Messages are looked for too: none must wait for a lost event."""
        self._engine.beat()
        self._read_again()
        if self._engine.health() == "failed":
            self.changed.set()

    def _take(self, frames: list[zmq.Frame]) -> None:
        """One message of the io thread. What a client's message does to us must not stop the others'."""
        kind = frames[0].bytes
        try:
            if kind == IoMessage.REQUEST:
                _, identity, payload, received = frames
                self._request(identity.bytes, payload.buffer, int.from_bytes(received.buffer, "little"))
            elif kind == IoMessage.MALFORMED:
                _, identity, reason, *known = frames
                request_id = int.from_bytes(known[0].buffer, "little") if known else None
                self._malformed(identity.bytes, reason.bytes.decode(), request_id)
            elif kind == IoMessage.ENDPOINT:
                _, endpoint, what = frames
                self._endpoint_changed(endpoint.bytes.decode(), what.bytes.decode())
            elif kind == IoMessage.PEER:
                _, identity, letter, role, name = frames
                self._peers.came(identity.bytes, letter.bytes, role.bytes == b"A", name.bytes.decode(errors="replace"))
            elif kind == IoMessage.DENIED:
                self._denied(frames[1].bytes.decode(), frames[2].bytes.decode(errors="replace"))
            elif kind == IoMessage.GONE:
                if self._aside is not None:
                    self._aside.forget(frames[1].bytes)
                self._turns.gone(frames[1].bytes)
                self._peers.gone(frames[1].bytes)
            elif kind == IoMessage.ENDED:
                _, record, *completion = frames
                self._turns.ended(wire.decode_ended(record.buffer), completion_ids(completion))
        except MemoryError:
            self.give_up("out of memory")  # the client would wait for ever
        except Exception as error:
            self._log.error("internal", kind=kind.decode(errors="replace"), error=f"{type(error).__name__}: {error}")

    def _request(self, identity: bytes, payload: memoryview, received_ns: int) -> None:
        try:
            request, warnings = wire.read_request(payload)
        except wire.WireError as error:
            if self._aside is not None and self._aside.closed:
                self._aside.keep(Kept(identity, bytes(payload), received_ns, error.request_id))
            else:
                self._refuse(identity, error.request_id, error)
            return
        rehearsal = isinstance(request, wire.Generate) and self._rehearses(request.seed)

        def work() -> None:
            if not self._sets_aside(identity, request, payload, received_ns):
                self._dispatch(identity, request, received_ns, warnings)

        self.attempt(identity, request.id, work, rehearsal)

    def attempt(self, identity: bytes, request_id: int, work: Callable[[], None], rehearsal: bool = False) -> None:
        """Does `work`; what it raises is its client's answer."""
        try:
            work()
        except RequestError as error:
            self._refuse(identity, request_id, error, rehearsal)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not rehearsal:  # else who sent it says so in the daemon's last words
                self._log.error("internal", id=request_id, error=reason)
                reason = "the daemon failed on this request; see its log"
            self._refuse(identity, request_id, RequestError("internal", reason), rehearsal)

    def _rehearses(self, seed: int | None) -> bool:
        """Whether a request of this seed is the daemon's own, which leaves no trace."""
        return self.rehearsal is not None and seed == self.rehearsal

    def _dispatch(self, identity: bytes, request: wire.Request, received_ns: int, warnings: list[str]) -> None:
        turns = self._turns
        if isinstance(request, wire.Generate):
            self._refuse_repeated(identity, request.id)
            rehearsal = self._rehearses(request.seed)
            if not rehearsal:
                self._peers.check_in_flight(identity, turns.live_of)
                self._peers.spend(identity)
            turn = Turn(identity, request, received_ns, warnings, rehearsal)
            turn.peer = self._peers[identity]
            turns.generate(turn)
        elif isinstance(request, wire.Tokenize | wire.Detokenize):
            self._convert(identity, request)
        elif isinstance(request, wire.OpenSession | wire.Fork | wire.Rollback | wire.Truncate | wire.CloseSession):
            if isinstance(request, wire.OpenSession | wire.Fork) and self.draining:
                raise Draining()
            if isinstance(request, wire.OpenSession | wire.Fork):
                self._peers.check_sessions(identity, turns.sessions_of)
            turns.change(identity, request)
        elif isinstance(request, wire.Commit):
            turns.commit(identity, request.request)
            self.reply(identity, wire.Ack(id=request.id, known=True))
        elif isinstance(request, wire.Cancel):
            key = (identity, request.id)
            self.reply(identity, wire.Ack(id=request.id, known=turns.cancel(key) or key in self._converting))
        elif isinstance(request, wire.Trace):
            self._peers.require_admin(identity, "trace")
            self.reply(identity, self._traces.answer(request, identity))
        elif isinstance(request, wire.SetLog):
            self._set_log(identity, request)
        elif isinstance(request, wire.Upgrade):
            self._peers.require_admin(identity, "upgrade")
            if self._upgrade is None:
                raise RequestError("upgrade_failed", "this daemon has no successor")
            self._upgrade(identity, request.id)
        elif isinstance(request, wire.Health):
            self._answer_health(identity, request)
        elif isinstance(request, wire.Info):
            self.reply(identity, wire.InfoReply(id=request.id, **self._answers.info))
        else:
            stats = self._answers.stats(self.metrics, self._engine, self._io, self._log, self._duty, self._journal)
            if request.histograms is True:
                stats = stats | self._answers.histograms(self.metrics, self._engine, self._io)
            self.reply(identity, wire.StatsReply(id=request.id, **stats))

    def _set_log(self, identity: bytes, request: wire.SetLog) -> None:
        """Changes the log from now on. Raises RequestError."""
        self._peers.require_admin(identity, "set_log")
        log = self._log
        if request.level is not None and request.level not in LEVELS:
            raise RequestError("bad_request", f"level must be one of {', '.join(LEVELS)}", "level")
        level, prompts = request.level or log.level, log.prompts if request.prompts is None else request.prompts
        log.level = "info"  # whatever it was and will be, the change itself is told
        log.warning("log", message="changed", by=str(self._peers[identity]), level=level, prompts=prompts)
        log.level, log.prompts = level, prompts
        self.reply(identity, wire.Ack(id=request.id, known=True))

    def _denied(self, why: str, address: str) -> None:
        """Logs that somebody was not let in."""
        remedy = _DENIALS.get(why, why)
        self._denials.write(why, address=address, reason=why, message=remedy)

    def _answer_health(self, identity: bytes, request: wire.Health) -> None:
        uptime_ns = time.monotonic_ns() - self._started_ns
        queue_length = self._engine.queue_length
        reply = wire.HealthReply(id=request.id, status=self.health(), uptime_ns=uptime_ns, queue_length=queue_length)
        if request.request is not msgspec.UNSET:
            key = (identity, request.request)
            aside = self._aside is not None and key in self._aside
            reply.live = aside or key in self._turns or key in self._converting
        self.reply(identity, reply)

    def _convert(self, identity: bytes, request: wire.Tokenize | wire.Detokenize) -> None:
        """Answers `tokenize` and `detokenize`; long ones are in line with the long prompts."""
        self._refuse_repeated(identity, request.id)
        self._admission.check_text(request)
        chat = isinstance(request, wire.Tokenize) and request.messages is not None
        work = functools.partial(self._admission.convert, request)
        if not chat and self._admission.prompt_size(request) <= INLINE_CHARACTERS:
            self.reply(identity, work())
            return
        key = (identity, request.id)

        def finish(converted: asyncio.Future[wire.TokenizeReply | wire.DetokenizeReply]) -> None:
            def answer() -> None:
                if self.draining:
                    raise Draining()
                self.reply(identity, converted.result())

            self._converting.discard(key)
            self.attempt(*key, answer)
            self._look_for_end()

        self._preparation.start(identity, self._engine.client_share, work, finish, Work.CHAT if chat else Work.TEXT)
        self._converting.add(key)

    def _refuse_repeated(self, identity: bytes, request_id: int) -> None:
        """Refuses new work while draining, and an id that the client already uses."""
        if self.draining:
            raise Draining()
        key = (identity, request_id)
        if key in self._turns or key in self._converting or (self._aside is not None and key in self._aside):
            raise RequestError("duplicate_id", f"request {request_id} of this client is still running", "id")

    def busy(self, message: str, waiting: int | None = None, wait_ns: int = 0) -> Busy:
        """The error that refuses what there is no room for: so many requests wait (None: the engine's), for so long.

        0: it is not known for how long. Half of what is there now has then gone, if requests take as long as lately.
        """
        wait_ms = wait_ns / 1e6
        if not wait_ms:
            service_ms = self.metrics.service_ns / 1e6 or _UNKNOWN_SERVICE_MS
            wait_ms = service_ms * max(1.0, self.live / 2)
        waiting = self._engine.queue_length if waiting is None else waiting
        return Busy(message, retry_after=min(_MOST_RETRY_MS, max(1.0, wait_ms)) / 1000, queue_length=waiting)

    def _endpoint_changed(self, endpoint: str, what: str) -> None:
        """Says what has become of a socket's file; those who are connected notice nothing."""
        message = {
            "bound_again": "its file was gone; it has a new one, and clients can connect again",
            "gone": "its file is gone and cannot be made again (see its directory): no client can connect",
            "foreign": "its file was replaced by somebody else's: clients that connect there do not reach this daemon",
            "ours": "its file is back",
        }[what]
        (self._log.info if what == "ours" else self._log.warning)("endpoint", endpoint=endpoint, message=message)

    def _malformed(self, identity: bytes, reason: str, request_id: int | None = None) -> None:
        """Refuses what the io thread could not hand over: of a wrong shape, or too long."""
        if self._aside is not None and self._aside.closed:
            self._aside.keep(Kept(identity, b"", 0, request_id, reason))
            return
        if reason == "too_long":
            most = f"a message may have {self._admission.limits.max_message_bytes} bytes (io.max_message_bytes)"
            self._refuse(identity, request_id, RequestError("too_long", f"the message is too long: {most}"))
            return
        code = "bad_version" if "version" in reason else "bad_frame"
        expected = f"send two frames, {wire.VERSION.decode()} and a msgpack map"
        self._refuse(identity, None, RequestError(code, f"{reason}; {expected}"))

    def _refuse(self, identity: bytes, request_id: int | None, error: RequestError, rehearsal: bool = False) -> None:
        if not rehearsal:
            self.metrics.refused[error.code] += 1
            self._refusals.note(identity, request_id, error)
        reply = wire.Error(id=request_id, code=error.code, message=error.message, field=error.field)
        if isinstance(error, Busy):
            reply.queue_length = error.queue_length
            reply.retry_after_ms = None if error.retry_after is None else math.ceil(error.retry_after * 1000)
        elif isinstance(error, DeadlineUnreachable):
            reply.expected_ms = None if error.expected is None else error.expected * 1000
        self.reply(identity, reply)
        self._look_for_end()

    def reply(self, identity: bytes, message: wire.Reply) -> None:
        self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        self._read_again()  # a send may swallow the edge that announces the next message

    def ended(self, record: wire.Ended, turn: Turn | None, completion: Sequence[int] = ()) -> None:
        """Counts, logs and records a turn that is over."""
        self._look_for_end()
        if record.finish_reason == "error":
            self.changed.set()
        log = self._log.info
        if self._rehearses(record.seed):
            self.rehearsal = None
            self.rehearsed.set()
            log = self._log.debug
        else:
            self.metrics.ended(record)
            self._traces.ended(record, str(self._peers[record.identity] if turn is None else turn.peer))
            if self._journal is not None and turn is not None:
                self._journal.record(record, turn, completion)
        request = None if turn is None else turn.request
        times = record.timeline
        gap = inter_token_ns(record)
        log(
            "request",
            client=record.identity.hex(),
            peer=str(self._peers[record.identity] if turn is None else turn.peer),
            id=record.id,
            session=None if request is None else request.session,
            priority=None if request is None else request.priority,
            finish=record.finish_reason,
            prompt=record.usage.prompt_tokens,
            cached=record.usage.cached_tokens,
            completion=record.usage.completion_tokens,
            admit_ms=_milliseconds(times.received_ns, times.admitted_ns),
            queue_ms=_milliseconds(times.admitted_ns, times.started_ns),
            prefill_ms=_milliseconds(times.started_ns, times.prefilled_ns),
            ttft_ms=_milliseconds(times.received_ns, times.first_token_ns),
            itl_us=None if gap is None else gap / 1000,
            tokens_per_round=record.speculation.tokens_per_round or None,
            total_ms=_milliseconds(times.received_ns, times.done_ns),
            seed=record.seed,
            grammar=None if turn is None or turn.grammar is None else turn.grammar.key[:LOGGED_DIGITS],
            masks=None if record.grammar is None else record.grammar.masks,
            choice=None if record.choice is None else record.choice.index,
            bundle=self._bundle,
            delivered=record.delivered,
            connection=record.client,
            error=None if record.error is None else f"{record.error.code}: {record.error.message}",
            text=_prompt_text(request) if self._log.prompts and request is not None else None,
        )


def _prompt_text(request: wire.Generate) -> str | None:
    """The beginning of a request's prompt, for a log that was asked to have it."""
    if request.prompt is not None:
        return request.prompt[:_LOGGED_CHARACTERS]
    if request.messages is not None:
        return msgspec.json.encode(request.messages).decode(errors="replace")[:_LOGGED_CHARACTERS]
    return None


def _milliseconds(start_ns: int, end_ns: int) -> float | None:
    """The time between two stamps; None if either did not happen."""
    return (end_ns - start_ns) / 1e6 if start_ns and end_ns else None
