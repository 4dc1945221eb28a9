"""Sessions and held answers of both clients end to end: whatever was read when, the tokens are those of one request."""

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn

PROMPT = "import os\n"
WHOLE: dict[str, Any] = {"max_tokens": 12, "seed": 3, "temperature": 0.8, "ignore_eos": True}
TRANSPORTS = pytest.mark.parametrize("transport", ["local", "zeromq"])


@pytest.fixture(params=["local", "zeromq"])
def client(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[ull.Client]:
    transport: Any = request.param
    with ull.Client(shared_daemon.url, transport=transport, connect_timeout=60, query_timeout=60) as client:
        yield client
        wait_idle(client)


def wait_idle(client: ull.Client) -> None:
    """Until no request of anybody is left at the daemon."""
    deadline = time.monotonic() + 60
    while (used := client.stats().engine["slots_used"]) != 0:
        assert time.monotonic() < deadline, f"{used} requests are left at the daemon"
        time.sleep(0.01)


def test_turns_are_those_of_one_request_each(client: ull.Client) -> None:
    first = client.tokenize(PROMPT)
    second = client.tokenize("x = 1\n", add_special_tokens=False)
    with client.open_session() as session:
        answer = session.generate(PROMPT, **WHOLE).result()
        assert answer.token_ids == client.generate(first, **WHOLE).result().token_ids
        assert session.tokens == len(first) + 12
        again = session.generate("x = 1\n", **WHOLE).result()
        whole = first + answer.token_ids + second
        assert again.token_ids == client.generate(whole, **WHOLE).result().token_ids
        assert (again.usage.prompt_tokens, again.usage.rolled_back_tokens) == (len(whole), 0)
        assert again.usage.cached_tokens > 0
        assert session.tokens == len(whole) + 12


def test_what_is_appended_is_read_at_once(client: ull.Client) -> None:
    ids = client.tokenize(PROMPT * 4)
    with client.open_session() as session:
        for begin in range(0, len(ids), 7):
            session.append(ids[begin : begin + 7])
            gc.collect()
        result = session.generate(**WHOLE).result()
        assert result.usage.prompt_tokens == len(ids)
        assert result.token_ids == client.generate(ids, **WHOLE).result().token_ids


def test_rollback_truncate_and_fork(client: ull.Client) -> None:
    ids = client.tokenize(PROMPT)
    with client.open_session() as session:
        answer = session.generate(ids, **WHOLE).result()
        with session.fork() as other:
            assert other.tokens == session.tokens
            assert other.truncate(tokens=5) == len(ids) + 5
            assert session.rollback(12) == len(ids)
            expected = client.generate(ids + answer.token_ids[:5], **WHOLE).result()
            assert other.generate(**WHOLE).result().token_ids == expected.token_ids
            assert session.generate(**WHOLE).result().token_ids == answer.token_ids
            with pytest.raises(ull.RequestError) as caught:
                session.rollback(10_000)
            assert (caught.value.code, caught.value.field) == ("bad_request", "tokens")
            with pytest.raises(ull.RequestError) as caught:
                session.truncate(characters=10_000)
            assert (caught.value.code, caught.value.field) == ("bad_request", "characters")
            characters = len(answer.text) // 2
            session.truncate(characters=characters)
            kept = session.tokens - len(ids)
            assert 0 <= kept <= 12


def test_a_held_answer_is_the_same_one(client: ull.Client) -> None:
    expected = client.generate(PROMPT, **WHOLE).result()
    with client.open_session() as session:
        stream = session.generate(PROMPT, hold=True, **WHOLE)
        client.health()
        assert stream.ready() is None
        stream.commit()
        assert stream.result().token_ids == expected.token_ids
        held = session.tokens
        guess = session.generate("guessed", hold=True, **WHOLE)
        real = session.generate("meant", **WHOLE).result()
        assert guess.result().finish_reason == "cancelled" and not guess.result().token_ids
        assert real.usage.prompt_tokens < held + 12  # what was guessed is no part of it
        with pytest.raises(ull.RequestError) as caught:
            guess.commit()
        assert (caught.value.code, caught.value.field) == ("not_held", "request")


def test_prewarm_reads_and_generates_nothing(client: ull.Client) -> None:
    prompt = "def prewarmed(argument):\n    return argument\n" * 4
    result = client.prewarm(prompt)
    assert (result.text, result.token_ids, result.finish_reason) == ("", [], "length")
    assert client.generate(prompt, max_tokens=1).result().usage.cached_tokens > 0


def test_priorities_are_taken_and_others_refused(client: ull.Client) -> None:
    for priority in ("realtime", "interactive", "batch"):
        assert client.generate(PROMPT, max_tokens=2, ignore_eos=True, priority=priority).result().text
    with pytest.raises(ull.RequestError) as caught:
        client.generate(PROMPT, priority="urgent").result()
    assert caught.value.field == "priority"


def test_sessions_are_bounded_and_places_come_back(client: ull.Client) -> None:
    sessions = []
    with pytest.raises(ull.RequestError) as caught:
        while True:
            sessions.append(client.open_session())
    assert (caught.value.code, caught.value.field, len(sessions)) == ("too_many_sessions", "session", 16)
    sessions.pop().close()
    sessions.append(client.open_session())
    sessions.clear()
    assert client.open_session().generate(PROMPT, **WHOLE).result().text


def test_pins_need_pages_beyond_one_full_context(spawn: Spawn, shared_daemon: Daemon, client: ull.Client) -> None:
    ids = client.tokenize(PROMPT)
    with client.open_session(pin=True) as session:
        with pytest.raises(ull.RequestError, match=r"raise engine\.kv_pages") as caught:
            session.append(ids).result()
        assert (caught.value.code, caught.value.field) == ("pins_full", "session")
    daemon = spawn("--set", "engine.kv_pages=40", "--set", "engine.sessions=2")
    with ull.Client(daemon.url) as other, other.open_session(pin=True) as session:
        session.append(ids).result()
        for place in range(4):  # which would take the place of anything that is not pinned
            other.generate([1000 + place] * 900, max_tokens=1).result()
        assert session.generate("x", max_tokens=1).result().usage.cached_tokens == len(ids)


def test_a_foreign_session_is_unknown(shared_daemon: Daemon, client: ull.Client) -> None:
    session = client.open_session()
    with ull.Client(shared_daemon.url, connect_timeout=60) as other:
        session._client = other
        with pytest.raises(ull.RequestError) as caught:
            session.rollback(0)
        session._client = client
    assert (caught.value.code, caught.value.field) == ("unknown_session", "session")


def test_chats_go_on_from_their_session(client: ull.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write a loop."}]
    with client.open_session() as session:
        for _ in range(3):
            result = session.generate(messages, **WHOLE).result()
            assert result.token_ids == client.generate(messages, **WHOLE).result().token_ids
            messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": "Again."}]


@TRANSPORTS
def test_async_sessions(shared_daemon: Daemon, transport: Any) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(120),
            ull.AsyncClient(shared_daemon.url, transport=transport, connect_timeout=60, query_timeout=60) as client,
            await client.open_session() as session,
        ):
            ids = await client.tokenize(PROMPT)
            expected = await client.generate(ids, **WHOLE).result()
            session.append(ids)
            stream = session.generate(hold=True, **WHOLE)
            await stream.commit()
            assert (await stream.result()).token_ids == expected.token_ids
            async with await session.fork() as other:
                assert await other.rollback(12) == len(ids)
                assert (await other.generate(**WHOLE).result()).token_ids == expected.token_ids
                assert await other.truncate(characters=0) == len(ids)
            with pytest.raises(ull.RequestError):
                await session.rollback(10_000)
            assert (await client.prewarm(PROMPT)).finish_reason == "length"

    asyncio.run(main())


@TRANSPORTS
def test_barge_in_without_waiting(spawn: Spawn, transport: Any) -> None:
    """Cancel, truncate, append and generate are sent at once, and carried out in this order."""
    daemon = spawn(script={"tokens": [65, 66, 67], "round_ns": 2_000_000})
    with ull.Client(daemon.url, transport=transport, connect_timeout=60, query_timeout=60) as client:
        with client.open_session() as session:
            stream = session.generate([1, 2], max_tokens=900)
            next(stream)
            stream.cancel()
            session.truncate(tokens=1)
            assert session.tokens == 3
            session.append([5, 6])
            usage = session.generate([7], max_tokens=3).result().usage
            assert (usage.prompt_tokens, session.tokens) == (6, 9)
            assert stream.result().finish_reason == "cancelled"
        wait_idle(client)


@TRANSPORTS
def test_a_held_answer_outlives_silences(spawn: Spawn, transport: Any) -> None:
    daemon = spawn(script={"tokens": [65, 66, 67]})
    with ull.Client(
        daemon.url, transport=transport, silence_timeout=0.02, connect_timeout=60, query_timeout=60
    ) as client:
        stream = client.generate([1, 2], max_tokens=4, hold=True)
        for _ in range(5):
            stream._wait()
        assert not stream.finished
        stream.commit()
        assert len(stream.result().token_ids) == 4


def test_sessions_are_over_when_the_daemon_is(spawn: Spawn) -> None:
    daemon = spawn(script={})
    with ull.Client(daemon.url, connect_timeout=60) as client:
        session = client.open_session()
        session.append([1, 2]).result()
        assert daemon.stop() == 0
        with pytest.raises(ull.ConnectionLost, match="ended with its connection"):
            session.generate([3])
        session.close()
