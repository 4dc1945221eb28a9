"""Turns that are read and answered ahead: the tokens are those of a plain request, whatever came before."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from ull.voice.conversation import Conversation

SYSTEM = {"role": "system", "content": "You are the voice of a library of small programs, and answer in code."}
HEARD = ["Write a", "Write a function", "Write a function that reads lines", "Write a function that reads lines."]
OPTIONS: dict[str, Any] = {"max_tokens": 24}


def chat(words: str) -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": words}]


@pytest.fixture
def daemon(spawn: Spawn) -> Daemon:
    return spawn("--set", "engine.kv_pages=128")


@asynccontextmanager
async def conversing(daemon: Daemon) -> AsyncIterator[tuple[ull.AsyncClient, Conversation]]:
    async with ull.AsyncClient(daemon.url) as client:
        conversation = Conversation(client)
        yield client, conversation
        await conversation.aclose()


def play(game: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(game, 120))


def test_a_turn_that_was_read_ahead_is_found_in_the_cache(daemon: Daemon) -> None:
    async def game() -> None:
        async with conversing(daemon) as (client, conversation):
            for words in HEARD:
                conversation.read_ahead(chat(words), **OPTIONS)
                await asyncio.sleep(0.05)
            if conversation._reading is not None:
                await conversation._reading  # else this machine's pace would decide how much of it is in the cache
            result = await (await conversation.answer(chat(HEARD[-1]), **OPTIONS)).result()
            assert result.usage.prompt_tokens - result.usage.cached_tokens <= 8
            assert result.token_ids == (await client.generate(chat(HEARD[-1]), **OPTIONS).result()).token_ids

    play(game())


def test_of_many_transcripts_at_once_the_last_is_read(daemon: Daemon) -> None:
    async def game() -> None:
        async with conversing(daemon) as (_, conversation):
            for number in range(200):
                conversation.read_ahead(chat("word " * number))
            await (await conversation.answer(chat("word " * 199), max_tokens=1)).result()

    play(game())
    assert len(daemon.events("request")) < 10


def test_an_answer_that_was_expected_is_there_at_once(daemon: Daemon) -> None:
    async def game() -> None:
        async with conversing(daemon) as (client, conversation):
            conversation.expect(chat(HEARD[-1]), **OPTIONS)
            conversation.expect(chat(HEARD[-1]), **OPTIONS)
            conversation.read_ahead(chat(HEARD[-1]))  # of the same words: the answer stays
            await asyncio.sleep(0.3)
            result = await (await conversation.answer(chat(HEARD[-1]), **OPTIONS)).result()
            assert result.token_ids == (await client.generate(chat(HEARD[-1]), **OPTIONS).result()).token_ids

    play(game())
    assert [event["completion"] for event in daemon.wait_events("request", 2)] == [24, 24]


@pytest.mark.parametrize("change", ["words", "options", "withdrawn", "read on"])
def test_an_answer_to_something_else_is_dropped(daemon: Daemon, change: str) -> None:
    async def game() -> None:
        async with conversing(daemon) as (client, conversation):
            conversation.expect(chat(HEARD[1]), **OPTIONS)
            await asyncio.sleep(0.1)
            words = HEARD[-1] if change == "words" else HEARD[1]
            options = {**OPTIONS, "temperature": 0.5, "seed": 1} if change == "options" else OPTIONS
            if change == "withdrawn":
                conversation.withdraw()
            if change == "read on":
                conversation.read_ahead(chat(HEARD[2]))
            result = await (await conversation.answer(chat(words), **options)).result()
            assert result.token_ids == (await client.generate(chat(words), **options).result()).token_ids

    play(game())
    assert daemon.wait_events("request", 3)[0]["finish"] in ("cancelled", "length")


def test_an_answer_is_interrupted_and_the_next_turn_goes_on_from_what_was_spoken(daemon: Daemon) -> None:
    async def game() -> None:
        async with conversing(daemon) as (client, conversation):
            stream = await conversation.answer(chat(HEARD[-1]), max_tokens=900, ignore_eos=True)
            spoken = ""
            async for token in stream:
                spoken += token.text
                if len(spoken) > 20:
                    stream.cancel()
                    break
            turns = [*chat(HEARD[-1]), {"role": "assistant", "content": spoken}, {"role": "user", "content": "Stop."}]
            result = await (await conversation.answer(turns, **OPTIONS)).result()
            assert result.usage.cached_tokens > len(HEARD[-1].split())
            assert result.token_ids == (await client.generate(turns, **OPTIONS).result()).token_ids

    play(game())
    assert daemon.wait_events("request", 1)[0]["finish"] == "cancelled"


def test_log_probabilities_are_read_ahead_only(daemon: Daemon) -> None:
    async def game() -> None:
        async with conversing(daemon) as (_, conversation):
            conversation.expect(chat(HEARD[-1]), **OPTIONS, logprobs=1)
            result = await (await conversation.answer(chat(HEARD[-1]), **OPTIONS, logprobs=1)).result()
            assert result.logprobs is not None

    play(game())


def test_what_cannot_be_read_is_complained_of_by_the_answer(daemon: Daemon) -> None:
    async def game() -> None:
        async with conversing(daemon) as (_, conversation):
            conversation.read_ahead(chat("word " * 4000))
            await asyncio.sleep(0.1)
            result = await (await conversation.answer(chat("Short."), **OPTIONS)).result()
            assert len(result.token_ids) == 24
            conversation.expect(chat("word " * 4000), **OPTIONS)
            with pytest.raises(ull.RequestError) as caught:
                await (await conversation.answer(chat("word " * 4000), **OPTIONS)).result()
            assert caught.value.code == "too_long"

    play(game())


def test_without_sessions_answers_come_all_the_same(spawn: Spawn) -> None:
    daemon = spawn("--set", "sessions.per_client=0")

    async def game() -> None:
        async with conversing(daemon) as (client, conversation):
            conversation.read_ahead(chat(HEARD[0]))
            conversation.expect(chat(HEARD[-1]), **OPTIONS)
            result = await (await conversation.answer(chat(HEARD[-1]), **OPTIONS)).result()
            assert result.token_ids == (await client.generate(chat(HEARD[-1]), **OPTIONS).result()).token_ids

    play(game())


def test_a_new_daemon_goes_on_with_the_conversation(spawn: Spawn) -> None:
    async def game() -> None:
        first = spawn()
        async with conversing(first) as (_, conversation):
            conversation.expect(chat(HEARD[-1]), **OPTIONS)
            await asyncio.sleep(0.1)
            first.kill()
            await asyncio.to_thread(spawn, url=first.url)
            result = await (await conversation.answer(chat(HEARD[-1]), **OPTIONS)).result()
            assert len(result.token_ids) == 24

    play(game())


def test_an_answer_that_was_held_for_too_long_is_computed_anew(spawn: Spawn) -> None:
    daemon = spawn("--set", "sessions.hold_timeout_s=0.05")

    async def game() -> None:
        async with conversing(daemon) as (_, conversation):
            conversation.expect(chat(HEARD[-1]), **OPTIONS)
            await asyncio.sleep(0.5)
            result = await (await conversation.answer(chat(HEARD[-1]), **OPTIONS)).result()
            assert (result.finish_reason, len(result.token_ids)) == ("length", 24)

    play(game())


def test_a_closed_conversation_leaves_nothing_behind(daemon: Daemon) -> None:
    async def game() -> None:
        async with ull.AsyncClient(daemon.url) as client:
            conversation = Conversation(client)
            conversation.read_ahead(chat("word " * 300))
            conversation.expect(chat(HEARD[-1]), max_tokens=900, ignore_eos=True)
            await asyncio.sleep(0.05)
            await conversation.aclose()
            await conversation.aclose()
            conversation.read_ahead(chat("x"))
            conversation.expect(chat("x"))
            with pytest.raises(ull.ConnectionLost, match="closed"):
                await conversation.answer(chat("x"))
            while (await client.stats()).requests["sessions"]:
                await asyncio.sleep(0.01)

    play(game())
