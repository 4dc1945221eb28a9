"""The calls of session_model.py's clients. Each is a value that can be sent at once and checked later.

`send` returns what waits for the answer, compares it and carries the call out in the model. Calls are checked in the
order in which they were sent. That is right although the daemon has many under way at a time: a session's messages are
carried out in order, and sessions have nothing in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from session_model import Held, ModelClient, ModelSession, World, following
from ull import wire
from ull.errors import RequestError

UNKNOWN = 10**9  # no request has this number

Settle = Callable[[], None]


@dataclass(frozen=True)
class Call:
    client: int

    def send(self, world: World, client: ModelClient) -> Settle:
        raise NotImplementedError


def carry_out(world: World, calls: Sequence[Call]) -> None:
    """Sends all of them without waiting, then checks every answer, but those of clients that have hung up."""
    waiting = []
    for call in calls:
        client = world.clients[call.client % len(world.clients)]
        waiting.append((client, call.send(world, client)))
    for client, settle in waiting:
        if not client.closed:
            settle()


def end(world: World) -> None:
    """Closes all that is open, and drops what is held without a session."""
    for client in world.clients:
        for session in list(client.sessions):
            CloseSession(0, session).send(world, client)()
        for number in list(client.held):
            client.send_cancel(number)
            client.acknowledged(number)
            client.drop(number)


def _open(world: World, client: ModelClient, number: int, to: int, field: str, pin: bool = False) -> bool:
    """Whether a session could be opened; checks the refusal where it could not."""
    if to in client.sessions:
        client.refused(number, "session_exists", field)
    elif len(client.sessions) >= world.per_client:
        client.refused(number, "too_many_sessions", field)
    else:
        client.sessions[to] = ModelSession(pin=pin)
        return True
    return False


@dataclass(frozen=True)
class OpenSession(Call):
    session: int
    pin: bool = False

    def send(self, world: World, client: ModelClient) -> Settle:
        number = client.send("open_session", session=self.session, pin=self.pin)

        def settle() -> None:
            if _open(world, client, number, self.session, "session", self.pin):
                client.holds(number, self.session, 0)

        return settle


@dataclass(frozen=True)
class InSession(Call):
    """A message for a session, which is refused if there is none."""

    session: int

    def _send(self, client: ModelClient) -> int:
        raise NotImplementedError

    def _settle(self, world: World, client: ModelClient, number: int, session: ModelSession) -> None:
        raise NotImplementedError

    def send(self, world: World, client: ModelClient) -> Settle:
        number = self._send(client)

        def settle() -> None:
            session = client.sessions.get(self.session)
            if session is None:
                client.refused(number, "unknown_session", "session")
            elif world.busy and getattr(client.last(number), "code", None) == "busy":
                client.refused(number, "busy", None)
            else:
                self._settle(world, client, number, session)

        return settle


@dataclass(frozen=True)
class CloseSession(InSession):
    def _send(self, client: ModelClient) -> int:
        client.cancelled |= {number for number, session in client.pending.items() if session == self.session}
        return client.send("close_session", session=self.session)

    def _settle(self, world: World, client: ModelClient, number: int, session: ModelSession) -> None:
        client.drop_held(session)
        client.holds(number, self.session, len(session.ids))
        del client.sessions[self.session]


@dataclass(frozen=True)
class Fork(InSession):
    to: int

    def _send(self, client: ModelClient) -> int:
        return client.send("fork", session=self.session, to=self.to)

    def _settle(self, world: World, client: ModelClient, number: int, session: ModelSession) -> None:
        if _open(world, client, number, self.to, "to"):
            client.drop_held(session)
            client.sessions[self.to] = ModelSession(ids=list(session.ids), answers=list(session.answers))
            client.holds(number, self.to, len(session.ids))


@dataclass(frozen=True)
class Rollback(InSession):
    tokens: int

    def _send(self, client: ModelClient) -> int:
        return client.send("rollback", session=self.session, tokens=self.tokens)

    def _settle(self, world: World, client: ModelClient, number: int, session: ModelSession) -> None:
        client.drop_held(session)
        if not 0 <= self.tokens <= len(session.ids):
            client.refused(number, "bad_request", "tokens")
            return
        session.keep(len(session.ids) - self.tokens)
        client.holds(number, self.session, len(session.ids))


@dataclass(frozen=True)
class Truncate(InSession):
    count: int
    unit: str  # "tokens" or "characters"

    def _send(self, client: ModelClient) -> int:
        return client.send("truncate", session=self.session, **{self.unit: self.count})

    def _settle(self, world: World, client: ModelClient, number: int, session: ModelSession) -> None:
        if self.count < 0:
            client.refused(number, "bad_request", self.unit)
            return
        client.drop_held(session)
        if not session.answers:
            client.refused(number, "bad_request", "session")
            return
        begin, end = session.answers[-1]
        prompt, answer = session.ids[:begin], session.ids[begin:end]
        try:
            kept = world.texts.cut(prompt, answer, self.count) if self.unit == "characters" else answer[: self.count]
        except RequestError:
            kept = None
        if kept is None or (self.unit == "tokens" and self.count > len(answer)):
            client.refused(number, "bad_request", self.unit)
            return
        session.ids = prompt + kept
        session.answers[-1] = (begin, len(session.ids))
        client.holds(number, self.session, len(session.ids))


@dataclass(frozen=True)
class Generate(Call):
    """`stop`: the place of the token, of those to come, that ends it; None: none. `extra`: fields that are sent too."""

    session: int | None
    ids: tuple[int, ...]
    max_tokens: int
    stop: int | None = None
    hold: bool = False
    timeout_ms: int | None = None
    deadline_ms: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def send(self, world: World, client: ModelClient) -> Settle:
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "ignore_eos": True, **self.extra}
        if self.ids:
            fields["token_ids"] = self.ids
        fields |= {"hold": True} if self.hold else {}
        for name in ("session", "timeout_ms", "deadline_ms"):
            fields |= {name: getattr(self, name)} if getattr(self, name) is not None else {}
        stops: list[int] = []
        if self.stop is not None:  # right if nothing that was sent before changes the session
            known = client.sessions.get(-1 if self.session is None else self.session)
            before = [] if known is None else known.ids
            stops = fields["stop_ids"] = following([*before, *self.ids], self.stop + 1, world.texts.vocabulary)[-1:]
        number = client.send("generate", **fields)
        client.generated.append(number)
        if self.hold:
            client.to_hold.append(number)
        client.pending[number] = self.session

        def settle() -> None:
            del client.pending[number]
            self._settle(world, client, number, stops)

        return settle

    def _settle(self, world: World, client: ModelClient, number: int, stops: list[int]) -> None:
        session = None if self.session is None else client.sessions.get(self.session)
        if self.session is not None and session is None:
            client.refused(number, "unknown_session", "session")
            return
        if session is not None:
            client.drop_held(session)
        before = [] if session is None else session.ids
        prompt = [*before, *self.ids]
        may_be_refused = {"pins_full"} if session is not None and session.pin else set()
        may_be_refused |= {"deadline_unreachable"} if self.deadline_ms is not None else set()
        may_be_refused |= {"busy"} if world.busy else set()

        def deliver() -> None:
            self._delivered(world, client, number, stops, prompt, session, frozenset(may_be_refused))

        held = Held(prompt, session, deliver, frozenset(may_be_refused))
        limited = number in client.cancelled or self.timeout_ms is not None or self.deadline_ms is not None
        if limited and isinstance(client.last(number), wire.Done):  # in the place of a refusal, where it waited
            if self.hold:
                client.held[number] = held
            else:
                deliver()
        elif world.busy and not self.hold and getattr(client.last(number), "code", None) == "busy":
            deliver()
        elif not prompt:
            client.refused(number, "bad_request", "prompt")
        elif len(prompt) > world.context - 1:
            client.refused(number, "too_long", "token_ids" if self.ids else "session")
        elif self.hold:
            client.held[number] = held
        else:
            deliver()

    def _delivered(
        self,
        world: World,
        client: ModelClient,
        number: int,
        stops: list[int],
        prompt: list[int],
        session: ModelSession | None,
        may_be_refused: frozenset[str],
    ) -> None:
        reply, tokens = client.last(number), client.tokens(number)
        if isinstance(reply, wire.Error):
            assert reply.code in may_be_refused and not tokens, reply
            fields = {"pins_full": "session", "deadline_unreachable": "deadline_ms", "busy": None}
            assert reply.field == fields[reply.code], reply
            return
        assert isinstance(reply, wire.Done), reply
        assert reply.usage.completion_tokens == len(tokens), reply
        reasons = {"cancelled"} if number in client.cancelled else set()
        reasons |= {"timeout"} if self.timeout_ms is not None else set()
        reasons |= {"deadline"} if self.deadline_ms is not None else set()
        if reply.usage.prompt_tokens == 0:  # it has waited for its session to the end
            assert reply.finish_reason in reasons and not tokens, reply
            return
        most = min(self.max_tokens, world.context - len(prompt))
        expected = following(prompt, most, world.texts.vocabulary)
        stop = next((at for at, token in enumerate(expected) if token in stops), None)
        if stop is not None:
            expected = expected[: stop + 1]
        assert tokens == expected[: len(tokens)], (number, prompt)
        assert reply.usage.prompt_tokens == len(prompt), reply
        assert reply.usage.cached_tokens < len(prompt), reply
        if reply.finish_reason not in reasons:
            assert reply.finish_reason == ("length" if stop is None else "stop"), reply
            assert tokens == expected, reply
        if session is not None:
            session.complete(prompt, None if self.max_tokens == 0 else tokens)


@dataclass(frozen=True)
class Commit(Call):
    back: int  # of the requests with `hold`, counted from the last one

    def send(self, world: World, client: ModelClient) -> Settle:
        request = client.to_hold[-1 - self.back] if self.back < len(client.to_hold) else UNKNOWN
        number = client.send("commit", request=request)

        def settle() -> None:
            held = client.held.get(request)
            reply = client.last(number)
            if held is None or (isinstance(reply, wire.Error) and held.refusals):
                client.refused(number, "not_held", "request")
                if held is not None:
                    client.drop(request)
                return
            assert reply == wire.Ack(id=number, known=True), reply
            del client.held[request]
            held.deliver()

        return settle


@dataclass(frozen=True)
class Cancel(Call):
    back: int  # of all requests, counted from the last one

    def send(self, world: World, client: ModelClient) -> Settle:
        request = client.generated[-1 - self.back] if self.back < len(client.generated) else UNKNOWN
        client.send_cancel(request)

        def settle() -> None:
            client.acknowledged(request)
            if request in client.held:
                client.drop(request)

        return settle


@dataclass(frozen=True)
class Reconnect(Call):
    """The client hangs up in the middle of everything, and another one comes."""

    def send(self, world: World, client: ModelClient) -> Settle:
        client.hang_up()
        world.clients[self.client % len(world.clients)] = ModelClient(world.url)
        return lambda: None


@dataclass(frozen=True)
class Wrong(Call):
    """A message that is refused whatever the client has."""

    fields: dict[str, Any]
    code: str
    field: str | None

    def send(self, world: World, client: ModelClient) -> Settle:
        fields = dict(self.fields)
        number = client.send(fields.pop("type"), **fields)
        return lambda: client.refused(number, self.code, self.field)
