"""Sessions of a real daemon, spoken to with the wire's own messages: what they hold, and what they make a model say."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, Spawn
from manifests import with_template
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


# ---- the same tokens, however they came to be computed ------------------------------------------------------------


SAMPLED = {"temperature": 1.0, "seed": 11}


def conversation(client: Talker, session: int) -> list[list[int]]:
    """Three turns in a session."""
    client.ask("open_session", session=session)
    turns = ({"token_ids": PROMPT}, {"prompt": "\nfor x in"}, {"token_ids": [9, 8], "max_tokens": 16})
    return [client.generate(session=session, **SAMPLED, **turn)[1] for turn in turns]


def test_cold_warm_forked_rolled_back_and_held_are_the_same(shared_daemon: Daemon, spawn: Spawn, talk: Talk) -> None:
    cold = spawn("--set", "engine.prefix_cache=false")
    truth = conversation(talk(cold), 1)
    client = talk(shared_daemon)
    assert conversation(client, 1) == truth
    assert conversation(client, 2) == truth  # of which everything is cached
    last = {"token_ids": [9, 8], "max_tokens": 16, **SAMPLED}
    client.ask("rollback", session=1, tokens=18)
    client.ask("fork", session=1, to=3)
    assert client.generate(session=1, **last)[1] == truth[2]
    assert client.generate(session=3, token_ids=[5], **SAMPLED)[1]
    client.ask("rollback", session=3, tokens=9)
    held = client.send("generate", session=3, hold=True, ignore_eos=True, **last)
    assert client.ask("commit", request=held) == wire.Ack(id=held + 1, known=True)
    client.last(held)
    assert client.tokens(held) == truth[2]
    whole = [*PROMPT, *truth[0], *ids_of(client, "\nfor x in"), *truth[1], 9, 8]
    assert client.generate(token_ids=whole, **SAMPLED, max_tokens=16)[1] == truth[2]
    for session in (1, 2, 3):
        assert client.ask("close_session", session=session).tokens == len(whole) + 16


def ids_of(client: Talker, text: str) -> list[int]:
    """What a text is behind another."""
    ids: list[int] = client.ask("tokenize", prompt=text, add_special_tokens=False).token_ids
    return ids


def test_only_the_first_prompt_of_a_session_gets_a_bos(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    client.ask("open_session", session=1)
    client.generate(session=1, prompt="def f", max_tokens=0)
    assert client.holds(1) == client.ask("tokenize", prompt="def f").count
    client.generate(session=1, prompt="def g", max_tokens=0)
    assert client.holds(1) == client.ask("tokenize", prompt="def f").count + len(ids_of(client, "def g"))
    client.ask("close_session", session=1)


# ---- answers that are held ----------------------------------------------------------------------------------------


def test_a_held_answer_comes_with_its_commit(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    client.ask("open_session", session=1)
    plain = client.generate(token_ids=PROMPT)[1]
    held = client.send("generate", session=1, token_ids=PROMPT, hold=True, max_tokens=8, ignore_eos=True)
    assert client.generate(token_ids=PROMPT)[1] == plain  # by now the held one is computed
    assert client.ask("health", request=held).live and not client.tokens(held)
    client.ask("commit", request=held)
    done = client.last(held)
    assert isinstance(done, wire.Done) and done.finish_reason == "length"
    assert client.tokens(held) == plain and client.holds(1) == 28
    again = client.refused("commit", request=held)
    assert (again.code, again.field) == ("not_held", "request")
    client.ask("close_session", session=1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("generate", {"token_ids": [50], "max_tokens": 0}),
        ("rollback", {"tokens": 0}),
        ("rollback", {"tokens": 10_000}),
        ("truncate", {"tokens": 8}),
        ("fork", {"to": 2}),
        ("close_session", {}),
    ],
)
def test_the_next_message_of_its_session_drops_a_held_answer(
    shared_daemon: Daemon, talk: Talk, kind: str, fields: dict[str, Any]
) -> None:
    client = talk(shared_daemon)
    client.ask("open_session", session=1)
    client.generate(session=1, token_ids=PROMPT)
    held = client.send("generate", session=1, token_ids=[7], hold=True)
    number = client.send(kind, session=1, **fields)
    answer, dropped = client.last(number), client.last(held)
    assert isinstance(dropped, wire.Done)
    assert (dropped.finish_reason, client.tokens(held)) == ("cancelled", [])
    assert client.refused("commit", request=held).code == "not_held"
    if isinstance(answer, wire.SessionReply):
        assert answer.tokens == 28
    elif kind == "rollback":
        assert isinstance(answer, wire.Error) and "28 that the session holds" in answer.message
    if kind != "close_session":
        assert client.holds(1) == 28 + (kind == "generate")


def test_a_held_answer_that_nobody_commits_is_dropped(spawn: Spawn, talk: Talk) -> None:
    client = talk(spawn("--set", "sessions.hold_timeout_s=0.05"))
    for fields in ({}, {"session": 1}):
        client.ask("open_session", session=1)
        held = client.send("generate", token_ids=PROMPT, hold=True, **fields)
        done = client.last(held)
        assert isinstance(done, wire.Done) and (done.finish_reason, client.tokens(held)) == ("cancelled", [])
    assert client.holds(1) == 0


def test_a_held_answer_can_be_cancelled_and_needs_no_session(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    held = client.send("generate", token_ids=PROMPT, hold=True)
    assert client.until(client.send("cancel", id=held), lambda reply: isinstance(reply, wire.Ack)).known  # type: ignore[union-attr]
    done = client.until(held, lambda reply: isinstance(reply, wire.Done))
    assert isinstance(done, wire.Done) and (done.finish_reason, client.tokens(held)) == ("cancelled", [])
    refused = client.refused("generate", token_ids=PROMPT, hold=True, logprobs=0)
    assert (refused.code, refused.field) == ("bad_request", "hold")


def test_a_commit_may_come_before_the_request_has_begun(spawn: Spawn, talk: Talk) -> None:
    client = talk(spawn(script=SLOW))
    client.ask("open_session", session=1)
    first = client.send("generate", session=1, token_ids=[5], max_tokens=1000)
    held = client.send("generate", session=1, token_ids=[6], max_tokens=4, hold=True)
    assert client.ask("commit", request=held).known
    client.send("generate", session=1, token_ids=[7], max_tokens=0)  # drops nothing: it is an answer as any other
    client.ask("cancel", id=first)
    done = client.last(held)
    assert isinstance(done, wire.Done) and (done.finish_reason, len(client.tokens(held))) == ("length", 4)


# ---- in order -----------------------------------------------------------------------------------------------------


def test_a_barge_in_is_sent_at_once(spawn: Spawn, talk: Talk) -> None:
    """cancel, truncate, append and generate, without waiting in between."""
    client = talk(spawn(script=SLOW))
    client.ask("open_session", session=1)
    speaking = client.send("generate", session=1, token_ids=PROMPT, max_tokens=1000)
    client.until(speaking, lambda reply: isinstance(reply, wire.Token) and reply.index >= 3)
    client.send("cancel", id=speaking)
    truncated = client.send("truncate", session=1, tokens=2)
    appended = client.send("generate", session=1, token_ids=[5, 6], max_tokens=0)
    answer = client.send("generate", session=1, token_ids=[7], max_tokens=3)
    done = client.until(speaking, lambda reply: isinstance(reply, wire.Done))
    assert isinstance(done, wire.Done) and done.finish_reason == "cancelled"
    assert client.last(truncated) == wire.SessionReply(id=truncated, session=1, tokens=22)
    ends = [client.last(number) for number in (appended, answer)]
    assert [end.usage.prompt_tokens for end in ends if isinstance(end, wire.Done)] == [24, 25]
    assert client.holds(1) == 28


def test_sixteen_messages_wait_for_a_session(spawn: Spawn, talk: Talk) -> None:
    client = talk(spawn(script=SLOW))
    client.ask("open_session", session=1)
    running = client.send("generate", session=1, token_ids=[5], max_tokens=1000)
    waiting = [client.send("rollback", session=1, tokens=0) for _ in range(16)]
    busy = client.refused("generate", session=1)
    assert (busy.code, busy.queue_length) == ("busy", 16) and "16 messages wait for session 1" in busy.message
    assert client.ask("health", request=running).live
    client.ask("cancel", id=running)
    assert len({client.last(number).tokens for number in waiting}) == 1  # type: ignore[union-attr]


def test_a_waiting_generate_ends_by_cancel_and_by_its_time(spawn: Spawn, talk: Talk) -> None:
    daemon = spawn(script=SLOW)
    client = talk(daemon)
    client.ask("open_session", session=1)
    running = client.send("generate", session=1, token_ids=[5], max_tokens=1000)
    late = client.send("generate", session=1, token_ids=[6], timeout_ms=20)
    later = client.send("generate", session=1, token_ids=[6], deadline_ms=20)
    cancelled = client.send("generate", session=1, token_ids=[6])
    assert client.ask("health", request=cancelled).live
    client.send("cancel", id=cancelled)
    ends = [client.until(number, lambda reply: isinstance(reply, wire.Done)) for number in (late, later, cancelled)]
    reasons = ["timeout", "deadline", "cancelled"]
    assert [(end.finish_reason, end.usage.prompt_tokens) for end in ends if isinstance(end, wire.Done)] == [
        (reason, 0) for reason in reasons
    ]
    assert client.ask("health", request=running).live
    client.send("cancel", id=running)
    done = client.until(running, lambda reply: isinstance(reply, wire.Done))
    assert isinstance(done, wire.Done)
    assert client.holds(1) == 1 + done.usage.completion_tokens
    assert sorted(line["finish"] for line in daemon.wait_events("request", 4)) == sorted([*reasons, "cancelled"])


def test_a_fork_waits_for_what_runs_and_its_own_messages_for_it(spawn: Spawn, talk: Talk) -> None:
    client = talk(spawn(script=SLOW))
    client.ask("open_session", session=1)
    running = client.send("generate", session=1, token_ids=[5], max_tokens=30)
    forked = client.send("fork", session=1, to=2)
    behind = client.send("generate", session=2, token_ids=[6], max_tokens=2)
    again = client.send("fork", session=2, to=3)
    client.last(running)
    assert client.last(forked) == wire.SessionReply(id=forked, session=2, tokens=31)
    end = client.last(behind)
    assert isinstance(end, wire.Done) and end.usage.prompt_tokens == 32
    assert client.last(again) == wire.SessionReply(id=again, session=3, tokens=34)
    assert client.holds(1) == 31


def test_a_closed_session_ends_what_runs_and_frees_its_number(spawn: Spawn, talk: Talk) -> None:
    client = talk(spawn("--set", "sessions.per_client=1", script=SLOW))
    client.ask("open_session", session=1)
    running = client.send("generate", session=1, token_ids=[5], max_tokens=1000)
    waiting = client.send("generate", session=1, token_ids=[6])
    rolled = client.send("rollback", session=1, tokens=1)
    closed = client.send("close_session", session=1)
    opened = client.send("open_session", session=1)
    ends = [client.last(number) for number in (running, waiting)]
    assert [end.finish_reason for end in ends if isinstance(end, wire.Done)] == ["cancelled"] * 2
    left = client.last(rolled)
    assert isinstance(left, wire.SessionReply) and left.tokens == len(client.tokens(running))
    assert client.last(closed) == wire.SessionReply(id=closed, session=1, tokens=left.tokens)
    assert client.last(opened) == wire.SessionReply(id=opened, session=1, tokens=0)


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "code", "field"),
    [
        ("generate", {"session": 9, "prompt": "x"}, "unknown_session", "session"),
        ("generate", {"session": -1, "prompt": "x"}, "unknown_session", "session"),
        ("generate", {"session": 2}, "bad_request", "prompt"),
        ("generate", {"session": 1, "prompt": ""}, "bad_request", "prompt"),
        ("generate", {"session": 1, "token_ids": []}, "bad_request", "token_ids"),
        ("generate", {"session": 1, "prompt": "x", "token_ids": [5]}, "bad_request", "token_ids"),
        ("generate", {"session": 1, "tools": [{}]}, "bad_request", "tools"),
        ("generate", {"session": 1, "token_ids": [5] * 2000}, "too_long", "token_ids"),
        ("generate", {"session": 1, "prompt": "word " * 2000}, "too_long", "prompt"),
        ("generate", {"session": 1, "messages": [{"role": "user", "content": "x " * 2000}]}, "too_long", "messages"),
        ("generate", {"session": 1, "priority": "high"}, "bad_request", "priority"),
        ("generate", {"session": "one"}, "bad_request", "session"),
        ("open_session", {"session": 1}, "session_exists", "session"),
        ("open_session", {"session": -1}, "bad_request", "session"),
        ("fork", {"session": 9, "to": 3}, "unknown_session", "session"),
        ("fork", {"session": 1, "to": 2}, "session_exists", "to"),
        ("fork", {"session": 1, "to": 1}, "session_exists", "to"),
        ("rollback", {"session": 9, "tokens": 0}, "unknown_session", "session"),
        ("rollback", {"session": 1, "tokens": 29}, "bad_request", "tokens"),
        ("rollback", {"session": 1, "tokens": -1}, "bad_request", "tokens"),
        ("truncate", {"session": 9, "tokens": 0}, "unknown_session", "session"),
        ("truncate", {"session": 1}, "bad_request", "tokens"),
        ("truncate", {"session": 1, "tokens": 1, "characters": 1}, "bad_request", "characters"),
        ("truncate", {"session": 1, "tokens": 9}, "bad_request", "tokens"),
        ("truncate", {"session": 1, "tokens": -1}, "bad_request", "tokens"),
        ("truncate", {"session": 1, "characters": 10_000}, "bad_request", "characters"),
        ("truncate", {"session": 1, "characters": -1}, "bad_request", "characters"),
        ("truncate", {"session": 2, "tokens": 0}, "bad_request", "session"),
        ("close_session", {"session": 9}, "unknown_session", "session"),
        ("commit", {"request": 99}, "not_held", "request"),
    ],
)
def test_refusals_name_the_field_and_change_nothing(
    shared_daemon: Daemon, talk: Talk, kind: str, fields: dict[str, Any], code: str, field: str
) -> None:
    client, other = talk(shared_daemon), talk(shared_daemon)
    for session in (1, 2):
        client.ask("open_session", session=session)
    other.ask("open_session", session=9)  # another's: unknown here
    client.generate(session=1, token_ids=PROMPT)
    error = client.refused(kind, **fields)
    assert (error.code, error.field) == (code, field), error
    assert (client.holds(1), client.holds(2), other.holds(9)) == (28, 0, 0)


def test_a_session_over_the_context_says_by_how_much(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    context = client.ask("info").limits["context"]
    client.ask("open_session", session=1)
    client.generate(session=1, token_ids=[5] * (context - 10), max_tokens=0)
    error = client.refused("generate", session=1, token_ids=[5] * 12)
    assert error.code == "too_long"
    assert "12 tokens are 3 too many" in error.message and f"{context - 10} that the session holds" in error.message
    done, ids = client.generate(session=1, token_ids=[5], max_tokens=1000)
    assert (done.finish_reason, len(ids), client.holds(1)) == ("length", 9, context)
    error = client.refused("generate", session=1)
    assert (error.code, error.field) == ("too_long", "session")
    client.ask("rollback", session=1, tokens=5)
    assert len(client.generate(session=1, max_tokens=1000)[1]) == 5
    client.ask("close_session", session=1)


def test_there_is_a_bound_for_each_client_and_for_all(spawn: Spawn, talk: Talk) -> None:
    daemon = spawn("--set", "sessions.per_client=2", "--set", "sessions.total=3")
    first, second = talk(daemon), talk(daemon)
    assert first.ask("info").limits["max_sessions"] == 2
    for session in (1, 2):
        first.ask("open_session", session=session)
    for kind, fields in (("open_session", {"session": 3}), ("fork", {"session": 1, "to": 3})):
        error = first.refused(kind, **fields)
        assert error.code == "too_many_sessions" and "sessions.per_client" in error.message
    second.ask("open_session", session=1)
    error = second.refused("open_session", session=2)
    assert (error.code, error.field) == ("too_many_sessions", "session") and "sessions.total" in error.message
    assert second.ask("stats").requests["sessions"] == 3
    first.ask("close_session", session=1)
    second.ask("open_session", session=2)


def test_a_connection_s_end_closes_its_sessions(spawn: Spawn, talk: Talk) -> None:
    daemon = spawn("--set", "sessions.total=2", script=SLOW)
    leaver, stays = talk(daemon), talk(daemon)
    for session in (1, 2):
        leaver.ask("open_session", session=session)
    leaver.send("generate", session=1, token_ids=[5], max_tokens=1000)
    leaver.send("generate", session=1, token_ids=[5], max_tokens=1000)  # which waits
    leaver.send("rollback", session=1, tokens=1)
    leaver.send("generate", session=2, token_ids=[5], max_tokens=1000, hold=True)
    leaver.ask("info")
    assert stays.refused("open_session", session=1).code == "too_many_sessions"
    leaver.close()
    assert [line["finish"] for line in daemon.wait_events("request", 3)] == ["cancelled"] * 3
    for session in (1, 2):
        assert stays.ask("open_session", session=session).tokens == 0
    assert stays.generate(session=1, token_ids=[5])[0].usage.completion_tokens == 8


# ---- the last answer ----------------------------------------------------------------------------------------------


def test_truncate_keeps_what_was_heard(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    client.ask("open_session", session=1)
    answer = client.send("generate", session=1, token_ids=PROMPT, max_tokens=24, ignore_eos=True)
    client.last(answer)
    ids, text = client.tokens(answer), client.text(answer)
    client.generate(session=1, token_ids=[5, 6], max_tokens=0)  # goes with what is cut off
    assert client.ask("truncate", session=1, tokens=20).tokens == 40
    assert (
        client.generate(session=1, max_tokens=4)[1] == client.generate(token_ids=[*PROMPT, *ids[:20]], max_tokens=4)[1]
    )
    client.ask("rollback", session=1, tokens=4 + 20 - 10)  # into the answer before
    assert client.refused("truncate", session=1, tokens=11).field == "tokens"
    heard = len(client.ask("detokenize", token_ids=ids[:10]).text) - 1
    kept = client.ask("truncate", session=1, characters=heard).tokens - len(PROMPT)
    assert kept <= 11
    whole = client.ask("detokenize", token_ids=ids[:10]).text
    assert whole == text[: heard + 1]
    assert client.ask("truncate", session=1, tokens=0).tokens == len(PROMPT)
    assert client.ask("truncate", session=1, characters=0).tokens == len(PROMPT)
    client.ask("rollback", session=1, tokens=1)
    assert client.refused("truncate", session=1, tokens=0).field == "session"
    client.ask("close_session", session=1)


# ---- chats --------------------------------------------------------------------------------------------------------


def test_a_chat_goes_on_from_its_last_turn(shared_daemon: Daemon, talk: Talk) -> None:
    client = talk(shared_daemon)
    client.ask("open_session", session=1)
    chat = [{"role": "user", "content": "hi"}]
    done, _ = client.generate(session=1, messages=chat, max_tokens=0)
    assert (done.usage.rolled_back_tokens, client.holds(1)) == (0, done.usage.prompt_tokens)
    done, ids = client.generate(session=1, messages=chat)
    assert done.usage.rolled_back_tokens == 0
    assert ids == client.generate(messages=chat)[1]
    held = client.holds(1)
    done, _ = client.generate(session=1, messages=[{"role": "user", "content": "ho"}])
    assert 0 < done.usage.rolled_back_tokens <= held
    client.ask("close_session", session=1)


def test_a_template_that_drops_answers_is_said_so(spawn: Spawn, tiny_bundle: Path, tmp_path: Path, talk: Talk) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}|{% endfor %}"
    daemon = spawn(bundle=with_template(tiny_bundle, tmp_path, template))
    client = talk(daemon)
    client.ask("open_session", session=4)
    chat = [{"role": "user", "content": "one"}]
    for word in ("two", "three"):
        answer = client.send("generate", session=4, messages=chat, max_tokens=8, ignore_eos=True)
        done = client.last(answer)
        text = client.text(answer)
        chat = [*chat, {"role": "assistant", "content": text}, {"role": "user", "content": word}]
    assert isinstance(done, wire.Done) and done.usage.rolled_back_tokens > 0
    done, _ = client.generate(session=4, messages=chat)
    assert done.usage.rolled_back_tokens > 0
    (line,) = daemon.wait_events("template", 1)  # once for a session
    assert (line["level"], line["session"], line["rolled_back"] > 0) == ("warning", 4, True)


def test_requests_are_logged_with_their_session_and_priority(spawn: Spawn, talk: Talk) -> None:
    daemon = spawn()
    client = talk(daemon)
    client.ask("open_session", session=4)
    client.generate(session=4, token_ids=PROMPT, priority="realtime")
    client.generate(token_ids=PROMPT)
    lines = daemon.wait_events("request", 2)
    assert [(line.get("session"), line["priority"]) for line in lines] == [(4, "realtime"), (None, "interactive")]
