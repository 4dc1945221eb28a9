"""The LiveKit plug-in, with the real package's streams and sessions, in front of a daemon on the tiny engine."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

import ull
from conftest import Daemon, Spawn
from manifests import with_template
from tool_families import build_families, template_of

pytest.importorskip("livekit.agents", reason="needs the extra `livekit`")

from livekit.agents import (
    Agent,
    AgentSession,
    APIConnectionError,
    APIConnectOptions,
    APIStatusError,
    function_tool,
    llm,
)
from livekit.agents.voice import UserInputTranscribedEvent

from ull.voice.livekit import LLM

QUESTION = "Write a function that reads lines."
INSTRUCTIONS = "You are the voice of a library of small programs."
AT_ONCE = APIConnectOptions(max_retry=0, timeout=30.0)


def chat(text: str = QUESTION) -> llm.ChatContext:
    context = llm.ChatContext.empty()
    context.add_message(role="user", content=text)
    return context


def play(game: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(game, 120))


def native(daemon: Daemon, messages: list[Any], **options: Any) -> ull.Result:
    with ull.Client(daemon.url) as client:
        return client.generate(messages, **{"max_tokens": 24, **options}).result()


def user(text: str = QUESTION) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_is_answered_with_usage_and_metrics(shared_daemon: Daemon) -> None:
    async def game() -> tuple[llm.CollectedResponse, list[Any], str]:
        metrics: list[Any] = []
        async with LLM(url=shared_daemon.url, max_tokens=24) as model:
            model.on("metrics_collected", metrics.append)
            answer = await model.chat(chat_ctx=chat(), conn_options=AT_ONCE).collect()
            return answer, metrics, model.model

    answer, metrics, name = play(game())
    wanted = native(shared_daemon, [user()])
    assert answer.text == wanted.text.strip()
    assert name == "tiny"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (wanted.usage.prompt_tokens, 24)
    assert (metrics[0].completion_tokens, metrics[0].cancelled) == (24, False)
    assert metrics[0].ttft > 0


def test_options_are_those_of_the_request(shared_daemon: Daemon) -> None:
    async def game() -> str:
        async with LLM(url=shared_daemon.url, max_tokens=24, temperature=0.9) as model:
            stream = model.chat(chat_ctx=chat(), conn_options=AT_ONCE, extra_kwargs={"seed": 3, "min_p": 0.01})
            return (await stream.collect()).text

    assert play(game()) == native(shared_daemon, [user()], temperature=0.9, seed=3, min_p=0.01).text.strip()


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"'temprature'\. Did you mean 'temperature'"):
        LLM(temprature=1)


def test_a_stream_that_is_closed_is_cancelled_at_the_daemon(spawn: Spawn) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 5_000_000, "context": 9000})

    async def game() -> None:
        async with LLM(url=daemon.url, max_tokens=8000) as model:
            stream = model.chat(chat_ctx=chat(), conn_options=AT_ONCE)
            await anext(stream)
            await stream.aclose()

    play(game())
    assert daemon.wait_events("request", 1)[0]["finish"] == "cancelled"


def test_a_session_speaks_and_remembers(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")

    async def game() -> list[str]:
        async with LLM(url=daemon.url, max_tokens=24) as model, AgentSession(llm=model) as session:
            model.attach(session)
            await session.start(Agent(instructions=INSTRUCTIONS))
            said = []
            for text in (QUESTION, "And one that writes them."):
                result = await session.run(user_input=text)
                result.expect.next_event().is_message(role="assistant")
                said.append(str(session.history.items[-1].text_content))
            return said

    first, second = play(game())
    turns = [{"role": "system", "content": INSTRUCTIONS}, user()]
    assert first.strip() == native(daemon, turns).text.strip()
    assert second
    asked = daemon.wait_events("request", 2)
    assert asked[1]["cached"] >= asked[0]["prompt"]


def test_what_is_being_said_is_read_before_the_turn_ends(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")

    async def game() -> None:
        async with LLM(url=daemon.url, max_tokens=24) as model, AgentSession(llm=model) as session:
            model.attach(session)
            await session.start(Agent(instructions=INSTRUCTIONS))
            for words in ("Write", "Write a function", "Write a function that reads"):
                session.emit("user_input_transcribed", UserInputTranscribedEvent(transcript=words, is_final=False))
                await asyncio.sleep(0.1)
            await session.run(user_input=QUESTION)

    play(game())
    deadline = time.monotonic() + 20
    while not (found := [event for event in daemon.events("request") if event["completion"] == 24]):
        assert time.monotonic() < deadline, daemon.log_lines()
        time.sleep(0.01)
    (answered,) = found
    assert answered["prompt"] - answered["cached"] <= 12
    assert answered["cached"] > 12


def test_a_turn_that_was_asked_for_too_early_costs_what_it_adds(spawn: Spawn) -> None:
    """As preemptive generation does: an answer is asked for, dropped, and asked for with more words."""
    daemon = spawn("--set", "engine.kv_pages=64")

    async def game() -> str:
        async with LLM(url=daemon.url, max_tokens=24) as model:
            early = model.chat(chat_ctx=chat("Write a function"), conn_options=AT_ONCE)
            await anext(early)
            await early.aclose()
            return (await model.chat(chat_ctx=chat(), conn_options=AT_ONCE).collect()).text

    assert play(game()) == native(daemon, [user()]).text.strip()
    assert daemon.wait_events("request", 2)[1]["cached"] > 4


def test_a_tool_is_called_and_its_call_is_no_text(
    spawn: Spawn, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    families = build_families(tmp_path_factory.mktemp("families"))
    daemon = spawn(bundle=with_template(families, tmp_path, template_of("hermes")))

    @function_tool
    async def weather(place: Literal["Rome", "Oslo"]) -> str:
        """How warm it is."""
        return f"9 degrees in {place}"

    async def game() -> tuple[llm.CollectedResponse, llm.CollectedResponse]:
        async with LLM(url=daemon.url, max_tokens=2000, temperature=1.0, seed=1) as model:
            context = chat("Is it warm?")
            stream = model.chat(chat_ctx=context, tools=[weather], tool_choice="required", conn_options=AT_ONCE)
            answer = await stream.collect()
            for call in answer.tool_calls:
                done = await llm.execute_function_call(call, llm.ToolContext([weather]))
                context.insert(done.fnc_call)
                if done.fnc_call_out is not None:
                    context.insert(done.fnc_call_out)
            after = model.chat(
                chat_ctx=context,
                tools=[weather],
                tool_choice="none",
                conn_options=AT_ONCE,
                extra_kwargs={"max_tokens": 4},
            )
            return answer, await after.collect()

    answer, after = play(game())
    assert answer.text == ""
    assert answer.tool_calls[0].name == "weather"
    assert after.usage is not None
    assert after.usage.prompt_tokens > (answer.usage.prompt_tokens if answer.usage else 0)


def test_a_daemon_that_is_not_there_is_a_connection_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ull.client.aio.CONNECT_TIMEOUT_S", 2.0)

    async def game() -> None:
        async with LLM(url=f"ipc://{tmp_path / 'nobody.sock'}") as model:
            await model.chat(chat_ctx=chat(), conn_options=AT_ONCE).collect()

    with pytest.raises(APIConnectionError, match="no daemon answers"):
        play(game())


@pytest.mark.parametrize(("text", "code"), [("word " * 4000, "too_long"), (QUESTION, "bad_request")])
def test_what_the_daemon_refuses_is_not_tried_again(shared_daemon: Daemon, text: str, code: str) -> None:
    errors: list[Any] = []

    async def game() -> None:
        async with LLM(url=shared_daemon.url, temperature=-1 if code == "bad_request" else 0) as model:
            model.on("error", errors.append)
            await model.chat(chat_ctx=chat(text)).collect()

    with pytest.raises(APIStatusError) as caught:
        play(game())
    assert (caught.value.status_code, caught.value.retryable, caught.value.body) == (400, False, {"code": code})
    assert [error.recoverable for error in errors] == [False]


def test_a_full_queue_is_tried_again(spawn: Spawn) -> None:
    script = {"tokens": [65], "round_ns": 5_000_000, "context": 9000}
    daemon = spawn("--set", "engine.queue_depth=1", "--set", "engine.client_share=1", script=script)

    async def game() -> str:
        async with ull.AsyncClient(daemon.url) as other, LLM(client=other, max_tokens=4) as model:
            busy = other.generate("x", max_tokens=100, ignore_eos=True)
            await anext(busy)
            retries = APIConnectOptions(max_retry=20, retry_interval=0.2, timeout=30.0)
            return (await model.chat(chat_ctx=chat(), conn_options=retries).collect()).text

    assert play(game())
