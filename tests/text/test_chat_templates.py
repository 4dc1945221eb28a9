"""Public chat templates give the texts and ids that transformers gives (tests/oracle/chat_templates.py wrote them)."""

import datetime
import json
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from oracle.chat_templates import CHATS, EXPECTED, NAMES, TEMPLATES, date_formats, dated, digest, write_tokenizer
from ull.daemon.sessions import Session
from ull.errors import RequestError
from ull.text.tokenizer import Tokenizer
from ull.wire import Generate, Message

VIEWS = json.loads(EXPECTED.read_text(encoding="utf-8"))


# Templates that render an earlier answer otherwise than it was generated: what the model thought is left out or
# replaced, or the answer gets a frame of its own. A session rolls these answers back, and says so.
REFRAMED = {
    *(f"axolotl/{name}.jinja" for name in ("command_a_rag", "command_a_tool_use", "gemma4", "qwen3", "qwen3_5")),
    *(f"trl/{name}.jinja" for name in ("deepseek_r1_distill", "deepseekv3", "deepseekv3_training", "glm4moe")),
    *(f"trl/{name}.jinja" for name in ("gptoss", "qwen3_6", "qwen3_8", "qwen3_training")),
    *(f"trl/nemotron_3_{name}.jinja" for name in ("5_lightning", "nano", "ultra")),
}
PARTS_ONLY = {"trl/idefics3.jinja", "trl/llava_next.jinja", "trl/smolvlm.jinja"}  # they read no text of a turn


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, (TEMPLATES / request.param).read_text(encoding="utf-8"))
    tokenizer = Tokenizer(directory)
    yield tokenizer
    tokenizer.close()


def test_there_are_sixty_templates_and_most_chats_render() -> None:
    assert sorted(VIEWS) == NAMES
    assert len(NAMES) >= 60
    for chat in ("plain", "turns", "tools", "called", "documents", "no-thinking", "no-prompt", "continued"):
        rendered = [name for name in NAMES if "text" in VIEWS[name][chat]]
        assert len(rendered) >= 35, chat


@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in NAMES], indirect=["tokenizer"], ids=NAMES)
def test_texts_and_ids_are_those_of_transformers(tokenizer: Tokenizer, name: str) -> None:
    formats = date_formats((TEMPLATES / name).read_text(encoding="utf-8"))
    for chat_name, expected in VIEWS[name].items():
        chat: dict[str, Any] = {**CHATS[chat_name]}
        messages = msgspec.convert(chat.pop("messages"), list[Message])
        if "error" in expected:
            if chat_name != "parts":  # which ull gives as one text to a template that reads none
                with pytest.raises(RequestError, match="the chat template refuses"):
                    tokenizer.render(messages, **chat)
            continue
        before = datetime.datetime.now()
        rendered = tokenizer.render(messages, **chat)
        days = (before, datetime.datetime.now())
        assert rendered.text in [dated(expected["text"], formats, day) for day in days], chat_name
        if "ids" in expected:
            assert digest(tokenizer.encode_chat(rendered)) == expected["ids"], chat_name


@pytest.mark.parametrize(("tokenizer", "name"), [(name, name) for name in NAMES], indirect=["tokenizer"], ids=NAMES)
def test_a_turn_s_ids_begin_the_next_turn_s_prompt(tokenizer: Tokenizer, name: str) -> None:
    """As a session sees it: three turns, whose answers come as the template's prompt has the model say them."""

    def said(role: str, text: str) -> Message:
        return Message(role=role, content=[{"type": "text", "text": text}] if name in PARTS_ONLY else text)

    def rolled_back(lead: str, sent_back: str) -> list[int]:
        """Of each turn but the first. `lead`: what every answer begins with, `sent_back`: what of that clients keep."""
        session, chat, counts = Session(1), [said("user", "How far is Rome?")], []
        for answer in ("Far: 1200 km. Take a train.", "At 7.\n\n- platform 3", "Yes."):
            request = Generate(id=1, messages=chat)
            prompt = array("i", tokenizer.encode_chat(tokenizer.render(chat)))
            counts.append(session.rolled_back(prompt))
            session.complete(request, prompt, tokenizer.encode(lead + answer, add_special_tokens=False))
            chat = [*chat, said("assistant", sent_back + answer), said("user", "When does it leave?")]
            assert session.is_answered_in(Generate(id=1, messages=chat))
        return counts[1:]

    # Behind some prompts the model begins with a space, which some templates write themselves.
    counts = min(rolled_back("", ""), rolled_back(" ", " "), rolled_back(" ", ""))
    assert bool(sum(counts)) == (name in REFRAMED), counts
