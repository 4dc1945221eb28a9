"""The sessions of a fake daemon: lists of words, each a token, as docs/wire.md has them. For clients' tests."""

from itertools import accumulate

from fake_daemon import FakeDaemon, done, token, words
from ull import wire

Key = tuple[bytes, int]


class FakeSessions:
    """A handler that answers with the prompt's words and adds both to the session.

    A prompt "open" ends by a cancel only, after one word; "refuse" is busy, "refuse later" once something else comes.
    "too late" and "fail" end before they begin.
    """

    def __init__(self) -> None:
        self.sessions: dict[Key, list[str]] = {}
        self.held: dict[Key, wire.Generate] = {}
        self.live: dict[Key, int | None] = {}  # open requests, and their sessions
        self.late: wire.Generate | None = None  # to be refused
        self.cancelled: list[str | None] = []  # the prompts of held answers that were dropped

    @property
    def busy(self) -> bool:
        """Whether anything is left of anybody."""
        return bool(self.sessions or self.held or self.live)

    def __call__(self, daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if self.late is not None:
            refuse(daemon, identity, self.late.id, "busy", None)
            self.late = None
        if isinstance(request, wire.Generate):
            self._generate(daemon, identity, request)
        elif isinstance(request, wire.OpenSession):
            self.sessions[identity, request.session] = []
            self._report(daemon, identity, request.id, request.session)
        elif isinstance(request, wire.SessionRequest):
            self._change(daemon, identity, request)
        elif isinstance(request, wire.Commit):
            self._commit(daemon, identity, request)
        elif isinstance(request, wire.Cancel):
            self._cancel(daemon, identity, request.id)
        elif isinstance(request, wire.Health) and request.request is not wire.UNSET:
            live = (identity, request.request) in self.live or (identity, request.request) in self.held
            daemon.send(identity, wire.HealthReply(id=request.id, status="ok", uptime_ns=5, queue_length=0, live=live))
        else:
            words(daemon, identity, request)

    def _generate(self, daemon: FakeDaemon, identity: bytes, request: wire.Generate) -> None:
        if request.session is not None:
            if (identity, request.session) not in self.sessions:
                refuse(daemon, identity, request.id, "unknown_session", "session")
                return
            self._drop_held(daemon, identity, request.session)
        prompt = request.prompt or ""
        if prompt == "refuse later":
            self.late = request
        elif prompt == "refuse":
            refuse(daemon, identity, request.id, "busy", None)
        elif prompt in ("too late", "fail"):
            why = wire.Failure(code="executor", message="the executor failed") if prompt == "fail" else None
            end = done(request.id, 0, "error" if why else "timeout", why)
            end.usage = wire.Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
            daemon.send(identity, end)
        elif request.hold:
            self.held[identity, request.id] = request
        elif prompt == "open":
            self.live[identity, request.id] = request.session
            daemon.send(identity, token(request.id, 0, "one "))
        else:
            self._answer(daemon, identity, request)

    def _answer(self, daemon: FakeDaemon, identity: bytes, request: wire.Generate) -> None:
        held = self.sessions.get((identity, request.session or -1), [])
        asked = (request.prompt or "").split()
        whole = [*held, *asked]
        if request.messages is not None:
            asked = [word for message in request.messages for word in str(message.content).split()]
            whole = asked
        same = sum(accumulate((one == other for one, other in zip(held, whole, strict=False)), min))
        answer = asked if request.max_tokens is None else asked[: request.max_tokens]
        if request.session is not None:
            self.sessions[identity, request.session] = whole + answer
        daemon.send(identity, *(token(request.id, index, word + " ") for index, word in enumerate(answer)))
        end = done(request.id, len(answer))
        end.usage = wire.Usage(
            prompt_tokens=len(whole),
            cached_tokens=same,
            completion_tokens=len(answer),
            rolled_back_tokens=len(held) - same,
        )
        daemon.send(identity, end)

    def _change(self, daemon: FakeDaemon, identity: bytes, request: wire.SessionRequest) -> None:
        key = (identity, request.session)
        if (held := self.sessions.get(key)) is None:
            refuse(daemon, identity, request.id, "unknown_session", "session")
            return
        self._drop_held(daemon, identity, request.session)
        if isinstance(request, wire.Fork):
            self.sessions[identity, request.to] = [*held]
            self._report(daemon, identity, request.id, request.to)
        elif isinstance(request, wire.CloseSession):
            for (whose, request_id), session in list(self.live.items()):
                if (whose, session) == key:
                    self._cancel(daemon, identity, request_id)
            self._report(daemon, identity, request.id, request.session)
            del self.sessions[key]
        elif isinstance(request, wire.Rollback) and request.tokens > len(held):
            refuse(daemon, identity, request.id, "bad_request", "tokens")
        elif isinstance(request, wire.Rollback):
            self.sessions[key] = held[: len(held) - request.tokens]
            self._report(daemon, identity, request.id, request.session)
        elif isinstance(request, wire.Truncate):  # the last answer is half of all
            answer = held[len(held) // 2 :]
            kept = answer[: request.tokens] if request.tokens is not None else cut(answer, request.characters or 0)
            self.sessions[key] = held[: len(held) // 2] + kept
            self._report(daemon, identity, request.id, request.session)

    def _commit(self, daemon: FakeDaemon, identity: bytes, request: wire.Commit) -> None:
        held = self.held.pop((identity, request.request), None)
        if held is None:
            refuse(daemon, identity, request.id, "not_held", "request")
            return
        daemon.send(identity, wire.Ack(id=request.id, known=True))
        self._answer(daemon, identity, held)

    def _drop_held(self, daemon: FakeDaemon, identity: bytes, session: int) -> None:
        for (whose, request_id), request in list(self.held.items()):
            if (whose, request.session) == (identity, session):
                self._cancel(daemon, identity, request_id)

    def _cancel(self, daemon: FakeDaemon, identity: bytes, request_id: int) -> None:
        held = self.held.pop((identity, request_id), None)
        known = held is not None or (identity, request_id) in self.live
        self.live.pop((identity, request_id), None)
        if held is not None:
            self.cancelled.append(held.prompt)
        daemon.send(identity, wire.Ack(id=request_id, known=known))
        if known:
            daemon.send(identity, done(request_id, 0 if held is not None else 1, "cancelled"))

    def _report(self, daemon: FakeDaemon, identity: bytes, request_id: int, session: int) -> None:
        tokens = len(self.sessions[identity, session])
        daemon.send(identity, wire.SessionReply(id=request_id, session=session, tokens=tokens))


def refuse(daemon: FakeDaemon, identity: bytes, request_id: int, code: str, field: str | None) -> None:
    daemon.send(identity, wire.Error(id=request_id, code=code, message=f"refused: {code}", field=field))


def cut(answer: list[str], characters: int) -> list[str]:
    """The first `characters` of the words, and of the spaces between them."""
    return " ".join(answer)[:characters].split()
