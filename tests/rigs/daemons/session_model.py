"""What a daemon on the scripted executor must answer to any sequence of calls of several clients: a plain Python model.

`ModelClient` and `World` say what each session should hold; the calls themselves are in session_calls.py.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raw_client import RawClient
from ull import wire

PAGE_TOKENS = 64


def following(ids: Sequence[int], count: int, vocabulary: int) -> list[int]:
    """The `count` tokens that the scripted executor emits behind `ids`: FNV-1a of all before, mod the vocabulary."""
    state = 2166136261
    for token in ids:
        state = (state ^ token) * 16777619 % 2**32
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(state % vocabulary)
        state = (state ^ tokens[-1]) * 16777619 % 2**32
    return tokens


@dataclass
class ModelSession:
    """What a session should hold. `answers`: where each begins and ends in `ids`."""

    pin: bool = False
    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    def complete(self, prompt: list[int], completion: list[int] | None) -> None:
        """Goes on with a prompt that begins with its ids, and the completion, if one was asked for."""
        self.ids = list(prompt)
        if completion is not None:
            self.answers = [span for span in self.answers if span != (len(prompt), len(prompt))]
            self.ids += completion
            self.answers.append((len(prompt), len(self.ids)))

    def keep(self, count: int) -> None:
        """Holds its first `count` ids alone. An answer is cut with them, and gone where nothing of it is left."""
        if count < len(self.ids):
            self.answers = [(begin, min(end, count)) for begin, end in self.answers if begin < count]
            self.ids = self.ids[:count]


@dataclass
class Held:
    """A `generate` whose answer is held."""

    prompt: list[int]
    session: ModelSession | None
    deliver: Callable[[], None]  # checks its answer, as one of an ordinary request
    refusals: frozenset[str]  # codes of errors that it may have been answered with


class ModelClient:
    """A connection, and what the daemon should keep for it."""

    def __init__(self, url: str) -> None:
        self._raw = RawClient(url)
        self._numbers = itertools.count(1)
        self._tokens: dict[int, list[wire.Token]] = {}  # by request, ...
        self._last: dict[int, wire.Reply] = {}  # ... and what ended it
        self._acks: Counter[int] = Counter()  # of `cancel`, which has the request's own number
        self.closed = False
        self.sessions: dict[int, ModelSession] = {}
        self.held: dict[int, Held] = {}
        self.generated: list[int] = []  # numbers of all that were sent, ...
        self.to_hold: list[int] = []  # ... and of those with `hold`
        self.cancelled: set[int] = set()  # those that may end for this
        self.pending: dict[int, int | None] = {}  # sent and not checked, with their session's number

    def send(self, kind: str, **fields: Any) -> int:
        number = next(self._numbers)
        self._tokens[number] = []
        self._raw.send_map(type=kind, id=number, **fields)
        return number

    def send_cancel(self, number: int) -> None:
        self.cancelled.add(number)
        self._raw.send_map(type="cancel", id=number)

    def last(self, number: int) -> wire.Reply:
        """The message that ends the answer to a request."""
        while number not in self._last:
            self._receive()
        return self._last[number]

    def acknowledged(self, number: int) -> None:
        """Waits for the answer to a `cancel`."""
        while not self._acks[number]:
            self._receive()
        self._acks[number] -= 1

    def _receive(self) -> None:
        reply = self._raw.receive()
        assert reply.id is not None, reply
        if isinstance(reply, wire.Ack) and reply.id in self.cancelled:
            self._acks[reply.id] += 1
            return
        assert reply.id not in self._last, f"{reply} behind {self._last[reply.id]}"
        if isinstance(reply, wire.Token):
            self._tokens[reply.id].append(reply)
        else:
            self._last[reply.id] = reply

    def tokens(self, number: int) -> list[int]:
        """What has come of a request: once it has ended, all of it."""
        ids: list[int] = []
        for token in self._tokens[number]:
            assert token.index == len(ids), token
            ids += token.ids
        return ids

    def ask(self, kind: str, **fields: Any) -> Any:
        return self.last(self.send(kind, **fields))

    def refused(self, number: int, code: str, field: str | None) -> None:
        """Checks that a request was refused."""
        reply = self.last(number)
        assert isinstance(reply, wire.Error), (reply, code, field)
        assert (reply.code, reply.field) == (code, field), reply
        assert not self._tokens[number]

    def holds(self, number: int, session: int, tokens: int) -> None:
        """Checks what a session's message was answered."""
        assert self.last(number) == wire.SessionReply(id=number, session=session, tokens=tokens), self.last(number)

    def drop(self, number: int) -> None:
        """Checks that a held answer was dropped, of which nothing has come."""
        held, reply = self.held.pop(number), self.last(number)
        assert self.tokens(number) == []
        if isinstance(reply, wire.Error):
            assert reply.code in held.refusals, reply
        else:
            assert isinstance(reply, wire.Done) and reply.finish_reason == "cancelled", reply

    def drop_held(self, session: ModelSession) -> None:
        """A message for a session drops what is held in it."""
        for number in [number for number, held in self.held.items() if held.session is session]:
            self.drop(number)

    def hang_up(self) -> None:
        self.closed = True
        self._raw.close()


@dataclass(frozen=True)
class Texts:
    """What a bundle's ids mean. `cut`: a prompt's answer by characters, as ull.text.cut."""

    vocabulary: int
    cut: Callable[[list[int], list[int], int], list[int]]


@dataclass
class World:
    """A daemon, its clients, and what the model must know of its settings."""

    url: str
    context: int  # tokens
    pages: int  # of the KV cache, a multiple of a context's
    texts: Texts
    per_client: int  # sessions
    reuse: bool = True
    busy: bool = False  # whether a request may be refused for want of room
    clients: list[ModelClient] = field(default_factory=list)
    fills: int = 0
    suspensions: int = 0

    def start(self, clients: int) -> None:
        """Connects so many clients, and one that looks on."""
        self.clients = [ModelClient(self.url) for _ in range(clients)]
        self._observer = ModelClient(self.url)

    def stats(self) -> wire.StatsReply:
        reply = self._observer.ask("stats")
        assert isinstance(reply, wire.StatsReply)
        assert reply.engine["pages_used"] <= reply.engine["page_count"] == self.pages
        return reply

    def hang_up(self) -> None:
        for client in [*self.clients, self._observer]:
            client.hang_up()

    def rest(self) -> dict[str, Any]:
        """Waits until nothing is under way, held or open any more; returns the engine's figures."""
        deadline = time.monotonic() + 20
        while True:
            stats = self.stats()
            engine, requests = stats.engine, stats.requests
            idle = not (engine["slots_used"] or engine["queue_length"] or engine["running"] or requests["sessions"])
            told = sum(requests["finished"].values()) == requests["accepted"]
            if idle and told and sum(engine["finished"].values()) == engine["submitted"]:
                break
            assert time.monotonic() < deadline, stats
            time.sleep(0.001)
        assert engine["finished"]["error"] == 0
        return engine

    def fill(self) -> None:
        """Once all is at rest, requests that need every page: if one were lost, not all would stay in the cache."""
        self.rest()
        for _ in range(self.pages * PAGE_TOKENS // self.context):
            self.fills += 1
            prompt = following([self.fills], self.context - 1, self.texts.vocabulary)
            number = self._observer.send("generate", token_ids=prompt, max_tokens=1, ignore_eos=True)
            done = self._observer.last(number)
            assert isinstance(done, wire.Done) and done.finish_reason == "length", done
            assert self._observer.tokens(number) == following(prompt, 1, self.texts.vocabulary)
        stats = self.rest()
        self.suspensions = stats["suspensions"]
        full = self.pages * PAGE_TOKENS // self.context if self.reuse else 0
        assert (stats["sessions"], stats["pages_used"]) == (full, self.pages if self.reuse else 0), stats
