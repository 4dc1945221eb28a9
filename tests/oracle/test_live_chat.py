"""The committed renderings of chat templates against transformers as it is installed (`make oracle`)."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from . import chat_templates
from .cases import BEGIN, CHAT, END, END_OF_TURN, TOKENIZER, assemble_tokenizer
from .chat import transformers_view, write_tokenizer

pytestmark = pytest.mark.oracle

ENTRIES = json.loads(CHAT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_transformers_still_renders_the_same(entry: dict[str, Any], tmp_path: Path) -> None:
    view = transformers_view(assemble_tokenizer(entry, tmp_path / "tokenizer"))
    assert view["conversations"] == entry["conversations"]
    assert view["prompts"] == entry["prompts"]


def test_the_shared_tokenizer_regenerates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [BEGIN, END, END_OF_TURN])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((TOKENIZER / name).read_text()), name


@pytest.mark.parametrize("name", chat_templates.NAMES)
def test_transformers_still_renders_public_templates_the_same(name: str, tmp_path: Path) -> None:
    template = (chat_templates.TEMPLATES / name).read_text(encoding="utf-8")
    expected = json.loads(chat_templates.EXPECTED.read_text(encoding="utf-8"))[name]
    assert dict(chat_templates.transformers_view(template, tmp_path)) == expected
