"""Sessions of a real daemon, spoken to with the wire's own messages: what they hold, and what they make a model say."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import Daemon
from raw_client import RawClient
from ull import wire

PROMPT = list(range(40, 60))
SLOW = {"round_ns": 5_000_000}


class Talker:
    """A client that sends a message and waits for its answer, or looks for it later."""

    def __init__(self, daemon: Daemon) -> None:
        self._client = RawClient(daemon.url)
        self._ids = itertools.count(1)
        self._replies: dict[int, list[wire.Reply]] = {}

    def send(self, kind: str, **fields: Any) -> int:
        number = fields.pop("id", None) or next(self._ids)
        self._client.send_map(type=kind, id=number, **fields)
        self._replies[number] = []
        return number

    def until(self, number: int, enough: Callable[[wire.Reply], bool]) -> wire.Reply:
        """The first message about a request of which `enough` holds; others are kept."""
        seen = 0
        while True:
            for reply in self._replies[number][seen:]:
                seen += 1
                if enough(reply):
                    return reply
            reply = self._client.receive()
            assert reply.id is not None
            self._replies[reply.id].append(reply)

    def last(self, number: int) -> wire.Reply:
        """The message that ends a request's answer."""
        return self.until(number, lambda reply: not isinstance(reply, wire.Token))

    def tokens(self, number: int) -> list[int]:
        """The ids that have come of a request."""
        return [token for reply in self._replies[number] if isinstance(reply, wire.Token) for token in reply.ids]

    def text(self, number: int) -> str:
        return "".join(reply.text for reply in self._replies[number] if isinstance(reply, wire.Token))

    def ask(self, kind: str, **fields: Any) -> Any:
        return self.last(self.send(kind, **fields))

    def generate(self, **fields: Any) -> tuple[wire.Done, list[int]]:
        number = self.send("generate", **{"max_tokens": 8, "ignore_eos": True, **fields})
        done = self.last(number)
        assert isinstance(done, wire.Done), done
        return done, self.tokens(number)

    def holds(self, session: int) -> int:
        """How many tokens a session holds."""
        reply = self.ask("rollback", session=session, tokens=0)
        assert isinstance(reply, wire.SessionReply), reply
        return reply.tokens

    def refused(self, kind: str, **fields: Any) -> wire.Error:
        reply = self.ask(kind, **fields)
        assert isinstance(reply, wire.Error), reply
        return reply

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def talk() -> Iterator[Callable[[Daemon], Talker]]:
    talkers: list[Talker] = []

    def start(daemon: Daemon) -> Talker:
        talkers.append(Talker(daemon))
        return talkers[-1]

    yield start
    for talker in talkers:
        talker.close()


Talk = Callable[[Daemon], Talker]


def test_a_conversation_from_open_to_close(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    assert client.ask("open_session", session=5) == wire.SessionReply(id=1, session=5, tokens=0)
    done, first = client.generate(session=5, token_ids=PROMPT)
    assert (done.usage.prompt_tokens, len(first), client.holds(5)) == (20, 8, 28)
    done, none = client.generate(session=5, token_ids=[7, 8], max_tokens=0)
    assert (done.finish_reason, done.usage.prompt_tokens, none, client.holds(5)) == ("length", 30, [], 30)
    done, second = client.generate(session=5)
    assert done.usage.cached_tokens > 0
    assert second == client.generate(token_ids=[*PROMPT, *first, 7, 8])[1]
    assert client.ask("rollback", session=5, tokens=10).tokens == 28
    assert client.generate(session=5, token_ids=[9])[1] == client.generate(token_ids=[*PROMPT, *first, 9])[1]
    assert client.ask("close_session", session=5).tokens == 37
    assert client.refused("generate", session=5).code == "unknown_session"
