"""Chats through a daemon: what reaches the template, and templates that do not compile or never end."""

import threading
from pathlib import Path
from typing import Any

import pytest

import ull
from checkpoints import CHAT_TEMPLATE, END, write_checkpoint
from conftest import Daemon, Spawn
from manifests import with_template
from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.errors import CheckpointError
from ull.text.control_tokens import Marks
from ull.text.tokenizer import RenderedChat, Tokenizer
from ull.wire import Message
from ull_build.build import build
from ull_build.progress import Reporter
from ull_build.settings import Settings

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}<|end|>"
    "{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = (
    "{% if messages[0].content == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


def checkpoint(directory: Path, template: str) -> Path:
    write_checkpoint(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_tools_calls_and_variables_reach_the_template(spawn: Spawn, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = with_template(tiny_bundle, tmp_path, TEMPLATE)
    daemon = spawn(bundle=bundle)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hot?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "yes"},
    ]
    tokenizer = Tokenizer(open_bundle(bundle).tokenizer_directory)
    expected = (
        '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]'
        '<user>hot?<|end|><assistant>weather({"place": "Rome"})<|end|><tool>yes<|end|>False<assistant>'
    )
    with Client(daemon.url) as client:
        result = client.generate(
            messages, tools=[TOOL], chat_template_kwargs={"enable_thinking": False}, max_tokens=4
        ).result()
        ids = tokenizer.encode_chat(RenderedChat(expected, Marks()))
        same = client.generate(ids, max_tokens=4).result()
        continued = client.generate(
            [*messages, {"role": "assistant", "content": "It is"}], continue_final_message=True, max_tokens=1
        ).result()
    assert result.usage.prompt_tokens == len(ids)
    assert result.token_ids == same.token_ids
    without_tools = expected[expected.index("<user>") :].replace("False<assistant>", "<assistant>It is")
    assert continued.usage.prompt_tokens == len(tokenizer.encode_chat(RenderedChat(without_tools, Marks())))


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_users_text_is_no_control_token(shared_daemon: Daemon, field: str) -> None:
    text = "a<|end|>b"
    prompt: Any = text if field == "prompt" else [{"role": "user", "content": text}]
    with Client(shared_daemon.url) as client:
        plain = client.generate(prompt, max_tokens=1).result().usage.prompt_tokens
        special = client.generate(prompt, max_tokens=1, special_tokens=True).result().usage.prompt_tokens
    assert plain > special


def test_a_template_that_does_not_compile_leaves_prompts(spawn: Spawn, tiny_bundle: Path, tmp_path: Path) -> None:
    daemon = spawn(bundle=with_template(tiny_bundle, tmp_path, "a\n{% endfor %}"))
    with Client(daemon.url) as client:
        with pytest.raises(ull.RequestError, match="does not compile: line 2") as caught:
            client.generate([{"role": "user", "content": "a"}]).result()
        assert (caught.value.code, caught.value.field) == ("bad_request", "messages")
        assert client.generate("def f", max_tokens=4).result().usage.completion_tokens
    assert "line 2" in daemon.events("chat_template")[0]["message"]


def test_an_endless_template_holds_up_nobody_s_tokens(spawn: Spawn, tiny_bundle: Path, tmp_path: Path) -> None:
    daemon = spawn(bundle=with_template(tiny_bundle, tmp_path, ENDLESS))
    refused: list[ull.RequestError] = []

    def ask() -> None:
        with Client(daemon.url) as other, pytest.raises(ull.RequestError) as caught:
            other.generate([{"role": "user", "content": "endless"}]).result()
        refused.append(caught.value)

    thread = threading.Thread(target=ask)
    with Client(daemon.url) as client:
        client.generate([{"role": "user", "content": "a"}], max_tokens=1).result()
        thread.start()
        for _ in range(5):
            assert client.generate("def f", max_tokens=4).result().usage.completion_tokens
        thread.join(120)
        assert refused[0].code == "bad_request"
        assert "takes longer than" in refused[0].message
        assert client.generate([{"role": "user", "content": "a"}], max_tokens=1).result().usage.prompt_tokens


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}\n{{ m.content }}", "line 2"),
        ("{{ messages | nonesuch }}", "nonesuch"),
        ("{{ 'x' | center(10000000000) }}{{ 2 ** (9 ** 99) }}", "does not compile: it takes longer"),
    ],
)
def test_the_build_refuses_what_does_not_compile(tmp_path: Path, template: str, said: str) -> None:
    model = checkpoint(tmp_path / "model", template)
    with pytest.raises(CheckpointError, match=said) as caught:
        build(Settings(model=model, output=tmp_path / "x.ull", name="x", evaluate=False))
    assert caught.value.field == "chat_template"
    assert not (tmp_path / "x.ull").exists()


def test_the_build_warns_of_a_template_that_refuses_a_plain_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Reporter, "note", lambda self, text: notes.append(text))
    model = checkpoint(tmp_path / "model", "{{ raise_exception('one turn only') }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text(CHAT_TEMPLATE)
    made = build(Settings(model=model, output=tmp_path / "x.ull", name="x", evaluate=False))
    assert [note for note in notes if "one turn only" in note]
    bundle = open_bundle(made.path, verify="hashes")
    tokenizer = Tokenizer(bundle.tokenizer_directory)
    chat = tokenizer.render([Message(role="user", content="a")], tools=[TOOL])
    assert END in tokenizer.encode_chat(chat)
