"""Prompts and chats to ids: BOS exactly once, templates as transformers renders them."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import BOS, CHAT_TEMPLATE, tokenizer_json
from ull.errors import RequestError, TokenizerError
from ull.text.tokenizer import Tokenizer
from ull.wire import Message

USER = [Message(role="user", content="hello")]


def make(directory: Path, *, add_bos: bool = True, template: Any = CHAT_TEMPLATE, **config: Any) -> Tokenizer:
    """A tokenizer directory with a byte-level BPE whose BOS is <|bos|>."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(add_bos=add_bos))
    settings = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(directory)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("text", ["hello", "<|bos|>hello"])
def test_plain_prompts_have_at_most_one_bos(tmp_path: Path, add_bos: bool, text: str) -> None:
    ids = make(tmp_path, add_bos=add_bos).encode(text, special_tokens=True)
    wanted = add_bos or text.startswith("<|bos|>")
    assert ids.count(BOS) == wanted
    assert ids[:1] == [BOS] or not wanted


def test_chat_gets_the_template_s_bos_only(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    text = tokenizer.render(USER).text
    assert text == "<|bos|><user>hello<|end|><assistant>"
    assert tokenizer.encode_chat(tokenizer.render(USER)).count(BOS) == 1
    bare = make(tmp_path / "bare", template="{{ messages[0].content }}")
    assert BOS not in bare.encode_chat(bare.render(USER))


def test_ids_decode_back(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    text = "naïve 中文 🙂 def add(first):"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whitespace_is_trimmed_as_transformers_does(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n    {% if loop.first %}\n<{{ m.role }}>\n    {% endif %}\n{% endfor %}end"
    assert make(tmp_path, template=template).render(USER).text == "<user>\nend"


def test_extensions_that_templates_rely_on(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    turns = [Message(role="skip", content=""), Message(role="user", content="<é>")]
    assert make(tmp_path, template=template).render(turns).text == '{"role": "user", "content": "<é>"}4'


def test_the_template_may_refuse(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        tokenizer.render(USER)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template", ["{{ messages.pop() }}", "{{ ''.__class__.__mro__ }}", "{{ messages[9].content }}", "{{ 1 / 0 }}"]
)
def test_templates_are_confined(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses"):
        make(tmp_path, template=template).render(USER)


def test_named_templates_and_the_template_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert make(tmp_path, template=named).render(USER).text == "plain"
    assert make(tmp_path, template=named[:1]).render(USER).text == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert make(tmp_path).render(USER).text == "from the file"


def test_a_chat_with_tools_takes_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools | length }} tools"}, {"name": "default", "template": "plain"}]
    tokenizer = make(tmp_path, template=named)
    assert tokenizer.render(USER).text == "plain"
    assert tokenizer.render(USER, tools=[{"name": "f"}]).text == "1 tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("with tools, from a file")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = make(tmp_path, template=named)
    assert tokenizer.render(USER).text == "from the file"
    assert tokenizer.render(USER, tools=[]).text == "with tools, from a file"


def test_what_transformers_gives_to_every_template(tmp_path: Path) -> None:
    template = (
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ eos_token }} "
        "{{ nothing is defined }} {% generation %}body{% endgeneration %} "
        "{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, separators=(',', ':')) }}"
        " {{ ['é'] | tojson(ensure_ascii=true) }} {{ [1] | tojson(indent=1) }} {{ dict(a=1).a }}"
    )
    text = make(tmp_path, template=template).render(USER).text
    assert text == 'True True True <|eos|> False body {"a":"é","b":1} ["\\u00e9"] [\n 1\n] 1'


def test_fields_of_messages_are_there_only_if_they_were_given(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}"
    messages = [
        Message(role="assistant", content=None, tool_calls=[{"function": {"name": "f"}}]),
        Message(role="tool", content="1", name="f", tool_call_id="7"),
        Message(role="assistant", content="x", reasoning="so"),
    ]
    assert make(tmp_path, template=template).render(messages).text == (
        "role,tool_calls;role,content,name,tool_call_id;thinking,role,content,reasoning,reasoning_content;"
    )


def test_text_parts_go_to_templates_that_read_them_and_become_one_text_for_others(tmp_path: Path) -> None:
    parts = [Message(role="user", content=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]
    reads = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert make(tmp_path / "reads", template=reads).render(parts).text == "[one][two]"
    assert make(tmp_path / "joins", template="{{ 'a' + messages[0].content }}").render(parts).text == "aone\ntwo"
    assert make(tmp_path / "prints", template="{{ messages[0].content }}").render(parts).text == "one\ntwo"


def test_the_last_message_is_continued(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    turns = [*USER, Message(role="assistant", content="It is ")]
    assert tokenizer.render(turns, continue_final_message=True).text.endswith("<assistant>It is ")
    trims = make(tmp_path / "trims", template="{{ messages[0].content | trim }}")
    assert trims.render([Message(role="user", content=" ab ")], continue_final_message=True).text == "ab"
    drops = make(tmp_path / "drops", template="{# content #}x")
    with pytest.raises(RequestError, match="cannot be continued"):
        drops.render(turns, continue_final_message=True)


@pytest.mark.parametrize("known", [False, True])
def test_special_tokens_map_counts_as_in_transformers(tmp_path: Path, known: bool) -> None:
    """Where tokenizer_config.json has an added_tokens_decoder, transformers does not look at the older file."""
    config = {"added_tokens_decoder": {}} if known else {}
    make(tmp_path, bos_token=None, image_token="<image>", **config)
    legacy = {"bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": "<|end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(legacy))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}hi{{ eos_token }}{{ image_token }}")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.render(USER).text == ("hi<|eos|><image>" if known else "<|bos|>hi<|end|><image>")
    assert tokenizer.bos_id == (None if known else BOS)


@pytest.mark.parametrize("template", ["{% for %}", "a\n{{ x | nonesuch }}", "{% endgeneration %}"])
def test_a_template_that_does_not_compile_leaves_prompts_alone(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, template=template)
    assert tokenizer.encode("hello")
    with pytest.raises(RequestError, match="does not compile") as caught:
        tokenizer.render(USER)
    assert caught.value.field == "messages"
    with pytest.raises(TokenizerError, match="does not compile: line"):
        tokenizer.check_templates()


def test_a_template_is_tried_with_a_plain_chat(tmp_path: Path) -> None:
    assert make(tmp_path).try_template() is None
    reason = make(tmp_path / "refuses", template="{{ raise_exception('no turns, please') }}").try_template()
    assert reason is not None
    assert "no turns, please" in reason


def test_without_a_template(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render(USER)


def test_the_lower_bound_never_exceeds_the_truth(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    for text in ("", "a", "return" * 500, "é" * 999, "  " * 300):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens("x" * 10_000_000) > 100_000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither a string"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    make(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=said):
        Tokenizer(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
