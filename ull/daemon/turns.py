"""Every `generate` from its receipt to its end, and the sessions in which they take place.

What a `generate` is doing is its TurnState; the methods of Turns are the transitions. A session's messages are carried
out one after the other: `_enter` lets a message in or has it wait, `_advance` goes on with those that waited.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import zmq

from ull import _native, wire
from ull.daemon.admission import Admission
from ull.daemon.answers import EngineLike
from ull.daemon.grammars import Grammar, Grammars, Source
from ull.daemon.journal import Journal
from ull.daemon.metrics import Metrics
from ull.daemon.preparation import Preparation, Work
from ull.daemon.sessions import MAX_WAITING, Session, Sessions, Step
from ull.daemon.succession import HandedSession
from ull.daemon.tools import Calls
from ull.daemon.turn import Turn, TurnState
from ull.errors import Busy, DeadlineUnreachable, Draining, RequestError
from ull.log import Log

# A prompt of this many characters is tokenized in the event loop's thread (about a millisecond); a longer one in a
# worker, where the tokenizer runs without the GIL. A chat waits in a thread for the process that runs its template.
INLINE_CHARACTERS = 1024
_SHUTTING_DOWN = "the daemon is shutting down and did not wait for this request"  # the core's words too

_Result = TypeVar("_Result")


class Front(Protocol):
    """What turns need of the control plane."""

    @property
    def draining(self) -> bool: ...

    def attempt(self, identity: bytes, request_id: int, work: Callable[[], None], rehearsal: bool = False) -> None:
        """Does `work`; what it raises is its client's answer."""
        ...

    def reply(self, identity: bytes, message: wire.Reply) -> None: ...

    def busy(self, message: str, waiting: int | None = None, wait_ns: int = 0) -> Busy: ...

    def ended(self, record: wire.Ended, turn: Turn | None, completion: Sequence[int] = ()) -> None:
        """Counts, logs and records a turn that is over."""
        ...


class Turns:
    """All turns and sessions. `bundle` is the digest that `done` reports; `hold_timeout_s` ends what nobody commits."""

    def __init__(
        self,
        front: Front,
        engine: EngineLike,
        admission: Admission,
        preparation: Preparation,
        grammars: Grammars | None,
        sessions: Sessions,
        metrics: Metrics,
        log: Log,
        *,
        queue_depth: int,
        bundle: str,
        hold_timeout_s: float,
        journal: Journal | None,
    ) -> None:
        self._front = front
        self._engine = engine
        self._admission = admission
        self._preparation = preparation
        self._grammars = grammars
        self._sessions = sessions
        self._metrics = metrics
        self._log = log
        self._queue_depth = queue_depth
        self._bundle = bundle
        self._hold_timeout_s = hold_timeout_s
        self.journal = journal  # another one once this daemon has succeeded another
        self._live: dict[tuple[bytes, int], Turn] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: tuple[bytes, int]) -> bool:
        return key in self._live

    # ---- a turn ---------------------------------------------------------------------------------------------------

    def generate(self, turn: Turn) -> None:
        """Takes a `generate`. Raises RequestError for what cannot be served."""
        self._admission.check(turn.request)
        turn.source = self._admission.grammar(turn.request)
        if turn.request.session is None:
            self._start(turn)
            return
        session = turn.session = self._sessions.find(turn.identity, turn.request.session)
        if session.blocked:
            self._refuse_many_waiting(turn.identity)
        self._enter(session, Step(turn.identity, turn.request.id, partial(self._start, turn), turn))
        if turn.state is TurnState.WAITING:
            self._live[turn.key] = turn
            self._end_in_time(turn)

    def cancel(self, key: tuple[bytes, int]) -> bool:
        """Ends a turn. False if there is no such one."""
        turn = self._live.get(key)
        if turn is None:
            return False
        self._end(turn, "cancelled")
        return True

    def commit(self, identity: bytes, request_id: int) -> None:
        """Releases an answer that is held. Raises RequestError if this client has no such one."""
        turn = self._live.get((identity, request_id))
        submitted = turn is not None and turn.state is TurnState.SUBMITTED
        if turn is None or not turn.held or (submitted and not self._engine.commit(*turn.key)):
            message = f"no answer of a request {request_id} of this client is held: it is not known, or has ended"
            raise RequestError("not_held", message, "request")
        turn.held = False
        if submitted:
            turn.stop_timer()

    def ended(self, record: wire.Ended, completion: Sequence[int]) -> None:
        """Takes the end of a submitted turn, of which the io thread has told its client unless that is done here."""
        turn = self._live.get((record.identity, record.id))
        if turn is not None and turn.withdrawn:
            self._leave(turn)
            if turn.session is not None and turn.session.closed:
                self._unpin(turn.session)
            return
        if turn is None or not turn.told:
            self._over(turn, record, completion)
            return
        finish = partial(self._read, turn, record, completion)
        if turn.held or record.client != "ok" or record.finish_reason == "error":
            finish(None)  # its client has not got the answer, or cannot use it
            return
        work = partial(self._admission.tools.read, turn.request, completion)
        if len(completion) > INLINE_CHARACTERS:
            try:
                self._preparation.start(turn.identity, self._engine.client_share, work, finish)
                return
            except Busy:
                pass  # an end waits for nobody's prompts
        done: asyncio.Future[Calls] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        finish(done)

    def _read(
        self, turn: Turn, record: wire.Ended, completion: Sequence[int], read: asyncio.Future[Calls] | None
    ) -> None:
        """Tells a client of its request's end, with the calls that were found. Nothing is told to one that is gone."""
        found = Calls([], "")
        try:
            found = found if read is None else read.result()
        except Exception as error:
            reason = f"the answer's calls could not be read: {type(error).__name__}: {error}"
            self._log.error("internal", id=record.id, error=reason)
        done = self._done(record, turn)
        done.tool_calls = found.calls
        if found.calls:
            done.content = found.content
            done.finish_reason = "tool_calls" if done.finish_reason == "stop" else done.finish_reason
        try:
            if record.client != "gone":
                self._front.reply(turn.identity, done)
                record.delivered = record.client == "ok"
        finally:
            self._over(turn, record, completion)

    def _over(self, turn: Turn | None, record: wire.Ended, completion: Sequence[int]) -> None:
        """A submitted turn has ended, and its client has been told."""
        if turn is not None:
            session = turn.session
            present = session is not None and session.turn is turn  # not an answer that was held and has been dropped
            self._leave(turn)
            if session is not None and session.closed:
                self._unpin(session)  # what this request has left under its key
            if session is not None and present:
                tokens = record.usage.prompt_tokens + record.usage.completion_tokens
                session.pinned_tokens = tokens if session.pin else 0
                if record.finish_reason != "error" and not turn.held:
                    session.complete(turn.request, turn.prompt, completion)
                self._advance(session)
        self._front.ended(record, turn, completion)

    def gone(self, identity: bytes) -> None:
        """A client has hung up: nobody waits for what it asked for, and its sessions are closed."""
        for session in self._sessions.of(identity):
            self._sessions.close(identity, session)
            self._unpin(session)
            session.waiting.clear()
        self._metrics.sessions = self._sessions.open_now
        for turn in [turn for turn in self._live.values() if turn.identity == identity]:
            self._end(turn, "cancelled")

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way, in no session either."""
        return not self._live and not any(session.reserved or session.waiting for session in self._sessions)

    def withdraw_held(self) -> list[Turn]:
        """Ends the answers that are held: nobody has seen anything of them. They are to be asked for anew."""
        held = [turn for turn in self._live.values() if turn.held and turn.state is TurnState.SUBMITTED]
        withdrawn = [turn for turn in held if not turn.withdrawn and self._engine.withdraw(*turn.key)]
        for turn in withdrawn:
            turn.withdrawn = True
            turn.stop_timer()
            if turn.session is not None and turn.session.turn is turn:
                turn.session.turn = None
            self._metrics.accepted -= 1
        return withdrawn

    def sessions_saved(self, identity: bytes) -> list[HandedSession]:
        """A client's sessions, for a successor."""
        return [session.save() for session in self._sessions.of(identity)]

    def restore_session(self, identity: bytes, saved: HandedSession) -> None:
        """Opens a session that a predecessor had."""
        self._sessions.restore(identity, saved)
        self._metrics.sessions = self._sessions.open_now

    def drop_held(self, identity: bytes, number: int) -> None:
        """A message for this session has come, which drops an answer that is held in it."""
        for session in self._sessions.of(identity):
            if session.number == number:
                self._drop_held(session)

    def live_of(self, identities: set[bytes]) -> int:
        """How many turns of these connections have not ended."""
        return sum(turn.identity in identities for turn in self._live.values())

    def sessions_of(self, identities: set[bytes]) -> int:
        """How many sessions of these connections are open."""
        return sum(len(self._sessions.of(identity)) for identity in identities)

    def cancel_all(self) -> None:
        """Ends all that is left: the daemon is being stopped."""
        for turn in list(self._live.values()):
            self._end(turn, "cancelled", shed=True)

    def _refuse_many_waiting(self, identity: bytes) -> None:
        """What waits for sessions is bounded as what waits for the engine: it may be long."""
        waiting = [turn for turn in self._live.values() if turn.state is TurnState.WAITING]
        own, share = sum(turn.identity == identity for turn in waiting), self._engine.client_share
        if len(waiting) >= self._queue_depth:
            raise self._front.busy(f"{len(waiting)} requests wait for their sessions", len(waiting))
        if own >= share:
            raise self._front.busy(f"{own} requests of this client wait for their sessions", len(waiting))

    def _start(self, turn: Turn) -> None:
        """Its session, if it has one, is free for it: prepares and submits it. Raises RequestError."""
        if turn.session is not None:
            turn.session.turn = turn
        try:
            if self._front.draining:
                raise Draining()
            tools = self._admission.tools
            if tools.known(turn.request):
                self._know_tools(turn, None)
            else:
                self._prepare(turn, tools.learn, self._know_tools, Work.CHAT)
        except BaseException:
            self._leave(turn)
            raise

    def _know_tools(self, turn: Turn, _: None) -> None:
        """The first step of preparing it: what its tools ask of the answer. Raises RequestError."""
        turn.source = turn.source or self._admission.tools.source(turn.request)
        self._find_grammar(turn)

    def _find_grammar(self, turn: Turn) -> None:
        """The second step: its grammar, which is there at once if it is kept. Raises RequestError."""
        source, grammars = turn.source, self._grammars
        if source is not None and grammars is not None:
            turn.grammar = grammars.find(source)
            if turn.grammar is None:
                self._prepare(turn, partial(_compile, grammars, turn, source), self._have_grammar, Work.GRAMMAR)
                return
        self._read_prompt(turn)

    def _have_grammar(self, turn: Turn, grammar: Grammar | None) -> None:
        turn.grammar = grammar
        self._read_prompt(turn)

    def _read_prompt(self, turn: Turn) -> None:
        """The third step: its prompt's ids, and its choices'. Raises RequestError."""
        request = turn.request
        before = array("i") if turn.session is None else turn.session.ids
        work = partial(self._tokenize, request, before)
        if request.messages is None and self._admission.prompt_size(request) <= INLINE_CHARACTERS:
            self._submit(turn, work())
        else:
            self._prepare(turn, work, self._submit, Work.TEXT if request.messages is None else Work.CHAT)

    def _tokenize(self, request: wire.Generate, before: array[int]) -> _Ids:
        """Behind what its session holds. Thread-safe: nothing changes that while the request is under way in it."""
        prompt = self._admission.prompt_ids(request, len(before))
        if request.choices is None:
            return _Ids(prompt, [])
        whole = prompt if request.messages is not None else [*before, *prompt]
        return _Ids(prompt, self._admission.labels(request, whole))

    def _prepare(
        self, turn: Turn, work: Callable[[], _Result], then: Callable[[Turn, _Result], None], kind: Work
    ) -> None:
        """Does `work` for a turn in a worker, `then` goes on with what it returned. Raises Busy.

        Meanwhile the turn may be cancelled, and its time limits hold.
        """
        finish = partial(self._prepared, turn, then)
        self._preparation.start(turn.identity, self._engine.client_share, work, finish, kind)
        turn.state = TurnState.PREPARING
        self._live[turn.key] = turn
        turn.stop_timer()
        self._end_in_time(turn)

    def _prepared(self, turn: Turn, then: Callable[[Turn, _Result], None], prepared: asyncio.Future[_Result]) -> None:
        if turn.state is not TurnState.PREPARING:
            prepared.exception()  # nobody wants it any more
            return

        def go_on() -> None:
            try:
                if self._front.draining:
                    raise Draining()
                then(turn, prepared.result())
            except BaseException:
                self._leave(turn)
                raise

        self._front.attempt(*turn.key, go_on, turn.rehearsal)
        if turn.session is not None:
            self._advance(turn.session)

    def _submit(self, turn: Turn, ids: _Ids) -> None:
        """Hands it to the engine. Raises RequestError."""
        turn.stop_timer()
        session, request = turn.session, turn.request
        turn.labels = ids.labels
        recorded = self.journal is not None and not turn.rehearsal
        if self.journal is not None and recorded:
            self.journal.check()
        params = self._admission.parameters(request, turn.received_ns, time.monotonic_ns(), ids.labels)
        params |= {"hold": turn.held, "rehearsal": turn.rehearsal, "warnings": turn.warnings}
        if recorded:
            params["returns_tokens"] = True
        if ids.labels:
            params["choices"] = ids.labels
        if turn.grammar is not None:
            self._refuse_heavy(turn.grammar)
            params["grammar"] = turn.grammar.compiled
        turn.prompt = array("i", ids.prompt)
        if session is not None:
            params |= self._place(session, turn)
        turn.told = self._admission.tools.reads(request)
        if turn.told:
            params |= {"told_by_control": True, "returns_tokens": True}
        tokens = turn.prompt.tobytes()
        try:
            self._engine.submit(*turn.key, tokens, params)
        except _native.QueueFull as full:  # the whole queue, or the client's share
            raise self._front.busy(str(full), full.queue_length, full.expected_ns) from None
        except _native.DeadlineUnreachable as late:
            expected_s = (late.expected_ns - turn.received_ns) / 1e9
            raise DeadlineUnreachable(f"deadline_ms cannot be met: {late}", expected=expected_s) from None
        except _native.InvalidRequest as error:  # a limit of the engine that admission does not know
            raise RequestError("bad_request", str(error), error.field) from None
        except _native.EngineClosed as error:
            raise RequestError("internal", f"the engine takes no requests: {error}") from None
        if session is not None and session.pin:
            session.pinned_tokens = max(session.pinned_tokens, self._tokens(turn))
        turn.state = TurnState.SUBMITTED
        turn.record = (tokens, params) if recorded else None
        self._live[turn.key] = turn
        self._metrics.accepted += not turn.rehearsal
        if turn.held:
            turn.timer = asyncio.get_running_loop().call_later(self._hold_timeout_s, self._end, turn, "cancelled")

    def _refuse_heavy(self, grammar: Grammar) -> None:
        """What the grammars of submitted requests take together is bounded as what is kept of them is."""
        bound = [turn.grammar for turn in self._live.values() if turn.state is TurnState.SUBMITTED and turn.grammar]
        taken, most = sum(other.size for other in bound), 0 if self._grammars is None else self._grammars.memory_bytes
        if bound and taken + grammar.size > most:
            raise self._front.busy(f"the grammars of {len(bound)} requests take {taken} bytes (grammars.memory_bytes)")

    def _place(self, session: Session, turn: Turn) -> dict[str, object]:
        """Puts a turn's prompt behind what its session holds; returns what the engine is told of that."""
        rolled_back = 0
        if turn.request.messages is None:
            turn.prompt = session.ids + turn.prompt
        else:
            rolled_back = session.rolled_back(turn.prompt)
            if rolled_back and not session.warned and session.is_answered_in(turn.request):
                session.warned = True
                self._log.warning(
                    "template",
                    client=turn.identity.hex(),
                    session=session.number,
                    id=turn.request.id,
                    rolled_back=rolled_back,
                    message="the last answer is not in the next turn's prompt as it was generated: the chat template "
                    "renders it otherwise, or the client has changed it; so many tokens are rolled back",
                )
        if session.pin:
            self._sessions.check_pins(session, self._tokens(turn))
        return {"rolled_back_tokens": rolled_back, "returns_tokens": True, "pin": session.pin}

    def _tokens(self, turn: Turn) -> int:
        """How many tokens a turn may come to have: its prompt's and its completion's."""
        most = self._admission.most_tokens(turn.request, turn.labels)
        return min(len(turn.prompt) + most, self._admission.limits.context)

    def _end(self, turn: Turn, reason: str, *, shed: bool = False) -> None:
        """Ends a turn wherever it is. What the engine has is over once it says so, the rest at once.

        `shed`: the daemon is being stopped, and does not wait for it.
        """
        if turn.state is TurnState.SUBMITTED:
            session = turn.session
            if turn.held and session is not None and session.turn is turn:
                session.turn = None  # it is no part of it, and never will be
            turn.stop_timer()
            self._engine.cancel(*turn.key, shed)
            return
        self._leave(turn)
        now_ns = time.monotonic_ns()
        record = wire.Ended(
            identity=turn.identity,
            id=turn.request.id,
            finish_reason=reason,
            usage=wire.Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
            timeline=wire.Timeline(received_ns=turn.received_ns, done_ns=now_ns),
            seed=turn.request.seed or 0,
            error=wire.Failure(code="draining", message=_SHUTTING_DOWN) if shed else None,
        )
        self._front.reply(turn.identity, self._done(record, turn))
        self._metrics.accepted += 1
        self._front.ended(record, turn)
        if turn.session is not None:
            self._advance(turn.session)

    def _done(self, record: wire.Ended, turn: Turn) -> wire.Done:
        """The terminal frame of a request that has ended so."""
        same = [name for name in wire.Done.__struct_fields__ if name in wire.Ended.__struct_fields__]
        fields = {name: value for name in same if (value := getattr(record, name)) is not None}
        return wire.Done(**fields, bundle=self._bundle, warnings=turn.warnings)

    def _leave(self, turn: Turn) -> None:
        """A turn is over: it is nobody's present one any more, and waits for nothing."""
        turn.state = TurnState.OVER
        turn.stop_timer()
        self._live.pop(turn.key, None)
        session = turn.session
        if session is None:
            return
        if session.turn is turn:
            session.turn = None
        for step in [step for step in session.waiting if step.turn is turn]:
            session.waiting.remove(step)

    def _end_in_time(self, turn: Turn) -> None:
        """A turn that waits for its session or is being prepared ends when its time is over."""
        limits = {"timeout": turn.request.timeout_ms, "deadline": turn.request.deadline_ms}
        given = [(limit, reason) for reason, limit in limits.items() if limit is not None]
        if given:
            limit_ms, reason = min(given)
            left_s = (turn.received_ns - time.monotonic_ns()) / 1e9 + limit_ms / 1000
            turn.timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._end, turn, reason)

    # ---- a session's messages, in order ---------------------------------------------------------------------------

    def change(self, identity: bytes, request: wire.SessionRequest) -> None:
        """Opens, changes or closes a session, once it is the message's turn. Raises RequestError."""
        try:
            self._change(identity, request)
        finally:
            self._metrics.sessions = self._sessions.open_now

    def _change(self, identity: bytes, request: wire.SessionRequest) -> None:
        if isinstance(request, wire.OpenSession):
            self._answer(identity, request.id, self._sessions.open(identity, request.session, pin=request.pin))
            return
        session = self._sessions.find(identity, request.session)
        if isinstance(request, wire.CloseSession):
            self._close(identity, request, session)
        elif isinstance(request, wire.Fork):
            self._fork(identity, request, session)
        elif isinstance(request, wire.Rollback):
            self._enter(session, Step(identity, request.id, partial(self._roll_back, identity, request, session)))
        else:
            self._admission.check_truncation(request)
            self._enter(session, Step(identity, request.id, partial(self._truncate, identity, request, session)))

    def _enter(self, session: Session, step: Step) -> None:
        """Carries a message out now, or once those before it have been. It drops an answer that is held."""
        if len(session.waiting) >= MAX_WAITING:
            raise self._front.busy(f"{MAX_WAITING} messages wait for session {session.number}", MAX_WAITING)
        self._drop_held(session)
        if session.blocked or session.waiting:
            session.waiting.append(step)
        else:
            step.carry_out()

    def _advance(self, session: Session) -> None:
        """Goes on with what waits for a session."""
        while session.waiting and not session.blocked:
            step = session.waiting.popleft()
            self._front.attempt(step.identity, step.request_id, step.carry_out)

    def _drop_held(self, session: Session) -> None:
        for turn in (session.turn, *(step.turn for step in session.waiting)):
            if turn is not None and turn.held:
                self._end(turn, "cancelled")

    def _roll_back(self, identity: bytes, request: wire.Rollback, session: Session) -> None:
        session.roll_back(request.tokens)
        self._answer(identity, request.id, session)

    def _truncate(self, identity: bytes, request: wire.Truncate, session: Session) -> None:
        begin, end = session.last_answer
        answer = session.ids[begin:end].tolist()
        if request.tokens is not None:
            if request.tokens > len(answer):
                raise RequestError("bad_request", f"tokens must be at most the {len(answer)} of the answer", "tokens")
            session.truncate(answer[: request.tokens])
            self._answer(identity, request.id, session)
            return
        prompt = session.ids[:begin].tolist()
        work = partial(self._admission.cut, prompt, answer, request.characters or 0)
        if len(answer) <= INLINE_CHARACTERS:
            session.truncate(work())
            self._answer(identity, request.id, session)
            return

        def finish(kept: asyncio.Future[list[int]]) -> None:
            session.reserved = False

            def truncate() -> None:
                session.truncate(kept.result())
                self._answer(identity, request.id, session)

            self._front.attempt(identity, request.id, truncate)
            self._advance(session)

        self._preparation.start(identity, self._engine.client_share, work, finish)
        session.reserved = True

    def _fork(self, identity: bytes, request: wire.Fork, session: Session) -> None:
        """The new session is there at once, and what is sent for it waits until it has been filled."""
        into = self._sessions.open(identity, request.to, "to")
        into.reserved = True

        def fork() -> None:
            into.reserved = False
            session.fork(into)
            self._answer(identity, request.id, into)
            self._advance(into)

        try:
            self._enter(session, Step(identity, request.id, fork))
        except RequestError:
            self._sessions.close(identity, into)
            raise

    def _close(self, identity: bytes, request: wire.CloseSession, session: Session) -> None:
        """Its number is free at once; the answer comes when what ran in it has ended."""
        self._sessions.close(identity, session)
        self._unpin(session)
        for turn in [turn for turn in reversed(self._live.values()) if turn.session is session]:
            self._end(turn, "cancelled")  # the last first, so that none begins before it is ended
        session.waiting.append(Step(identity, request.id, partial(self._answer, identity, request.id, session)))
        self._advance(session)

    def _unpin(self, session: Session) -> None:
        if session.pin:
            self._engine.unpin(session.pin)

    def _answer(self, identity: bytes, request_id: int, session: Session) -> None:
        self._front.reply(identity, wire.SessionReply(id=request_id, session=session.number, tokens=len(session.ids)))


class _Ids(NamedTuple):
    """What a request's texts are: the prompt's ids, those of its session left out, and each of its choices'."""

    prompt: list[int]
    labels: list[list[int]]


def _compile(grammars: Grammars, turn: Turn, source: Source) -> Grammar | None:
    """In a worker. None where the turn has ended while others' grammars were compiled."""
    return None if turn.state is TurnState.OVER else grammars.compile(source)


def completion_ids(frames: Sequence[zmq.Frame]) -> array[int]:
    """The ids that the io thread sends with the end of a request that returns them: one frame, or none."""
    ids = array("i")
    for frame in frames:
        ids.frombytes(frame.buffer)
    return ids
