"""Calls of tools through the gateway, in each form in which a template writes them: never in the text, always whole."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from conftest import Spawn
from gateways import Gateway
from manifests import with_template
from tool_families import FORMS, build_families, template_of
from ull.text.call_guard import CallGuard

NAMES = ("weather", "find_flight")
NO_TOKENS = "mistral named without its first control token"
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"place": "Oslo"}}',
    "python tag": '<|python_tag|>{"name": "weather", "parameters": {"place": "Oslo"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"place": "Oslo"}}]',
    "mistral without its control token": '[{"name": "weather", "arguments": {"place": "Oslo"}}]',
    "mistral named": '[TOOL_CALLS]weather[ARGS]{"place": "Oslo"}',
    "mistral named without control tokens": 'weather{"place": "Oslo"}',
    NO_TOKENS: 'weather[ARGS]{"place": "Oslo"}',
}


def fed(guard: CallGuard, text: str, size: int) -> str:
    return "".join(guard.add(text[at : at + size]) for at in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("form", CALLS)
def test_a_call_is_held_back_however_it_is_cut(form: str, size: int) -> None:
    guard = CallGuard(NAMES)
    assert fed(guard, CALLS[form], size) == ""
    assert guard.rest(None, called=True) == ""
    assert guard.rest(None, called=False) == CALLS[form]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "form", ["hermes", "python tag", "mistral", "mistral named", "mistral without its control token"]
)
def test_what_stands_in_front_of_a_call_is_sent(form: str, size: int) -> None:
    guard = CallGuard(NAMES)
    said = "Let me look: "
    sent = fed(guard, said + CALLS[form], size)
    assert said.startswith(sent)
    assert sent.strip() == said.strip()
    assert (sent + guard.rest(said.strip(), called=True)).strip() == said.strip()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "It is warm; a < b, a[0], a [see 1], {x} and `{}`; <tool> and [TOOLS].",
        "def f(a: list[int]) -> dict[str, int]:\n    return {k: a[k] for k in a}\n",
        "The weather in Oslo is weatherly, find_flights[0] or not.",
        "",
        "w",
    ],
)
def test_text_without_calls_is_sent_whole(text: str, size: int) -> None:
    guard = CallGuard(NAMES)
    sent = fed(guard, text, size)
    assert text.startswith(sent)
    assert len(text) - len(sent) <= max(map(len, NAMES)) + len("[TOOL_CALLS]")
    assert sent + guard.rest(None, called=False) == text


def test_what_follows_a_call_is_sent_at_the_end() -> None:
    guard = CallGuard(NAMES)
    sent = fed(guard, f"One. {CALLS['hermes']} Two.", 4)
    assert sent + guard.rest("One.  Two.", called=True) == "One.  Two."


SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
QUESTION: list[Any] = [{"role": "user", "content": "Is it warm?"}]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_families(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("form", FORMS)
def test_calls_come_as_openai_has_them(spawn: Spawn, families: Path, tmp_path: Path, form: str) -> None:
    daemon = spawn(bundle=with_template(families, tmp_path, template_of(form)))
    with (
        Gateway(daemon.url, tmp_path) as gateway,
        openai.OpenAI(base_url=gateway.openai, api_key="none", max_retries=0) as client,
    ):
        options: dict[str, Any] = {"model": "x", "messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}
        answer = client.chat.completions.create(**options, max_tokens=200, temperature=0.7, seed=3)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content in (None, "")
        assert choice.message.tool_calls is not None
        calls = [call for call in choice.message.tool_calls if call.type == "function"]
        assert calls[0].function.name == "weather"
        assert json.loads(calls[0].function.arguments)["place"] in ("Rome", "Oslo")

        chunks = list(client.chat.completions.create(**options, max_tokens=200, temperature=0.7, seed=3, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == ""
        streamed = [call for delta in deltas for call in delta.tool_calls or []]
        assert [call.index for call in streamed] == list(range(len(calls)))
        assert [call.function and call.function.arguments for call in streamed] == [
            call.function.arguments for call in calls
        ]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        given = [{"role": "tool", "tool_call_id": call.id, "content": "9 degrees"} for call in calls]
        history = [*QUESTION, choice.message.model_dump(exclude_none=True), *given]
        after = client.chat.completions.create(
            model="x",
            messages=history,
            tools=[TOOL],
            tool_choice="none",
            max_tokens=4,
        )
        assert after.choices[0].finish_reason in ("length", "stop")

        response = client.responses.create(
            model="x", input="Is it warm?", tools=[FLAT], tool_choice="required", max_output_tokens=200
        )
        call = response.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
        events = list(
            client.responses.create(
                model="x", input="Is it warm?", tools=[FLAT], tool_choice="required", max_output_tokens=200, stream=True
            )
        )
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == [
            item.arguments for item in events[-1].response.output if item.type == "function_call"
        ]
        items: Any = [
            {"role": "user", "content": "Is it warm?"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "9 degrees"},
        ]
        told = client.responses.create(model="x", input=items, tools=[FLAT], tool_choice="none", max_output_tokens=4)
        assert told.usage is not None
        assert told.usage.output_tokens > 0
