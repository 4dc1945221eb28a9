"""Tools through a daemon: whole conversations in each form of calls, and calls that a grammar asks for."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ull
from conftest import Daemon, Spawn
from manifests import with_template
from tool_families import CONTROL, FIRST, FORMS, build_families, template_of
from ull.bundle import open_bundle
from ull.client import AsyncClient, Client
from ull.text.tokenizer import Tokenizer
from ull.wire import Message

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Is it warm?"}]


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a random model with the tokens of all families."""
    return build_families(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bundle(families: Path, tmp_path: Path, form: str) -> Path:
    """A bundle whose template writes calls in one form."""
    return with_template(families, tmp_path, template_of(form))


def messages_of(result: ull.Result, answer: str) -> list[dict[str, Any]]:
    """What the next turn has of an answer with calls, and of what they gave."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in result.tool_calls
    ]
    results = [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": answer} for call in result.tool_calls
    ]
    return [{"role": "assistant", "content": result.content or "", "tool_calls": calls}, *results]


def prompt_of(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    chat = msgspec.convert(messages, list[Message])
    return tokenizer.encode_chat(tokenizer.render(chat, tools=[tool()]))


@pytest.mark.parametrize("in_session", [True, False])
def test_a_conversation_with_a_call(bundle: Path, spawn: Spawn, form: str, in_session: bool) -> None:
    """The scripted model writes the call as the template does, and then an answer."""
    tokenizer = Tokenizer(open_bundle(bundle).tokenizer_directory)
    end = {text: token for token, text in tokenizer.special_tokens.items()}[FORMS[form][1]]
    arguments = {"place": "Rome", "days": 2}
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": "[21]"},
    ]
    first, second = prompt_of(tokenizer, QUESTION), prompt_of(tokenizer, history)
    tokenizer.close()
    assert second[: len(first)] == first
    written = second[len(first) :]
    written = written[: written.index(end) + 1]
    warm = [*Tokenizer(open_bundle(bundle).tokenizer_directory).encode("Warm.", add_special_tokens=False), end]
    script = [40] * 4096
    script[len(first) : len(first) + len(written)] = written
    script[len(second) : len(second) + len(warm)] = warm
    daemon = spawn(bundle=bundle, script={"tokens": script})
    with Client(daemon.url) as client:
        asking: Any = client.open_session() if in_session else client
        options: dict[str, Any] = {"tools": [tool()], "stop_ids": [end], "max_tokens": 300}
        result = asking.generate(QUESTION, **options).result()
        assert result.token_ids == written
        assert not in_session or asking.tokens == len(first) + len(written)
        assert (result.finish_reason, result.content) == ("tool_calls", None)
        assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [("weather", arguments)]
        chat = [*QUESTION, *messages_of(result, "[21]")]
        result = asking.generate(chat, **options).result()
        assert (result.text, result.finish_reason, result.tool_calls) == ("Warm.", "stop", [])
        assert result.usage.prompt_tokens == len(second)
        assert result.usage.rolled_back_tokens == 0
        cut = asking.generate(QUESTION, **options | {"max_tokens": len(written) - 4}).result()
        assert (cut.finish_reason, cut.tool_calls) == ("length", [])
        none = client.generate(QUESTION, **options, tool_choice="none", speculate="none").result()
        assert none.usage.prompt_tokens < len(first)


@pytest.fixture
def asking(bundle: Path, spawn: Spawn) -> Iterator[Client]:
    """A client of a daemon whose model writes what comes to its mind."""
    with Client(spawn(bundle=bundle).url) as client:
        yield client


def is_right(arguments: str) -> bool:
    value = json.loads(arguments)
    return set(value) == {"place", "days"} and value["place"] in ("Rome", "Oslo") and value["days"] in range(1, 10)


def test_what_is_asked_for_is_a_call(asking: Client, form: str) -> None:
    tools = [tool(), tool("other", parameters={"type": "object", "properties": {"n": {"enum": [1, 2]}}})]
    for temperature in (0.0, 1.5):
        options: dict[str, Any] = {"tools": tools, "max_tokens": 400, "seed": 5, "temperature": temperature}
        one = asking.generate(QUESTION, tool_choice=named("weather"), ignore_eos=False, **options).result()
        assert one.grammar is not None
        assert (one.finish_reason, [call.name for call in one.tool_calls]) == ("tool_calls", ["weather"]), one.text
        assert is_right(one.tool_calls[0].arguments)
        again = asking.generate(QUESTION, tool_choice=named("weather"), speculate="suffix", **options).result()
        assert again.token_ids == one.token_ids
        some = asking.generate(QUESTION, tool_choice="required", **options | {"tools": tools[:1]}).result()
        assert some.tool_calls, some.text
        assert all(is_right(call.arguments) for call in some.tool_calls)
        assert form != "llama" or len(some.tool_calls) == 1


def test_a_strict_tool_is_called_as_its_schema_says(asking: Client, form: str) -> None:
    """A bias has the model begin a call, and go on with a brace."""
    begins = {"hermes": FIRST + len(CONTROL), "llama": FIRST + CONTROL.index("<|python_tag|>")}.get(form, FIRST)
    options: dict[str, Any] = {"max_tokens": 300, "logit_bias": {begins: 100.0}, "temperature": 1.0, "seed": 1}
    strict = asking.generate(QUESTION, tools=[tool(strict=True)], **options).result()
    assert strict.grammar is not None
    assert strict.tool_calls and all(is_right(call.arguments) for call in strict.tool_calls), strict.text
    free = asking.generate(QUESTION, tools=[tool()], **options).result()
    assert (free.grammar, free.tool_calls) == (None, [])


def test_the_asynchronous_client_has_the_calls(families: Path, tmp_path: Path, spawn: Spawn) -> None:
    daemon = spawn(bundle=with_template(families, tmp_path, template_of("hermes")))

    async def ask() -> tuple[ull.Result, ull.Result]:
        async with AsyncClient(daemon.url) as client:
            options: dict[str, Any] = {"tools": [tool()], "tool_choice": "required", "max_tokens": 100}
            return await client.generate(QUESTION, **options).result(), await client.generate("def f").result()

    called, plain = asyncio.run(ask())
    assert called.tool_calls and called.tool_calls[0].name == "weather"
    assert (plain.tool_calls, plain.content) == ([], None)


def test_a_schema_that_cannot_be_compiled_is_refused(families: Path, tmp_path: Path, spawn: Spawn) -> None:
    daemon = spawn(bundle=with_template(families, tmp_path, template_of("hermes")))
    wrong = {"type": "object", "properties": {"a": {"type": "nonesuch"}}}
    with Client(daemon.url) as client:
        for fields in ({"tool_choice": "required"}, {"tools": [tool(parameters=wrong, strict=True)]}):
            with pytest.raises(ull.RequestError, match="tools cannot be compiled") as caught:
                client.generate(QUESTION, **({"tools": [tool(parameters=wrong)]} | fields)).result()
            assert (caught.value.code, caught.value.field) == ("invalid_grammar", "tools")
        lax = client.generate(
            QUESTION, tools=[tool(parameters=wrong, strict=False)], tool_choice="required", max_tokens=8
        )
        assert lax.result().usage.completion_tokens == 8


def test_a_drain_tells_every_client_of_its_end(families: Path, tmp_path: Path, spawn: Spawn) -> None:
    bundle = with_template(families, tmp_path, template_of("hermes"))
    daemon: Daemon = spawn(
        "--set", "drain_timeout_s=0.1", bundle=bundle, script={"tokens": [40], "round_ns": 5_000_000}
    )
    with Client(daemon.url) as client:
        streams = [client.generate(QUESTION, tools=[tool()], max_tokens=1000) for _ in range(2)]
        next(streams[0])
        while client.stats().requests["accepted"] < 2:  # the other's prompt is still being written, perhaps
            client.poll(0.005)
        daemon.process.send_signal(signal.SIGTERM)
        results = [stream.result() for stream in streams]
        assert [(result.finish_reason, result.tool_calls) for result in results] == [("cancelled", [])] * 2
        assert daemon.process.wait(20) == 0
    daemon.check_log()
