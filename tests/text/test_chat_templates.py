"""Public chat templates give the texts and ids that transformers gives (tests/oracle/chat_templates.py wrote them)."""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracle.chat_templates import CHATS, EXPECTED, NAMES, TEMPLATES, date_formats, dated, digest, write_tokenizer
from ull.errors import RequestError
from ull.text.tokenizer import Tokenizer
from ull.wire import Message

VIEWS = json.loads(EXPECTED.read_text(encoding="utf-8"))


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tokenizer]:
    write_tokenizer(tmp_path, (TEMPLATES / request.param).read_text(encoding="utf-8"))
    tokenizer = Tokenizer(tmp_path)
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
