"""The committed readings of config.json files against transformers as it is installed (`make oracle`)."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from .cases import CONFIGS
from .configs import TINY, spellings, transformers_view

pytestmark = pytest.mark.oracle

STORED = json.loads(CONFIGS.read_text(encoding="utf-8"))


def test_the_family_is_stored_whole() -> None:
    assert STORED["base"] == TINY
    assert {entry["name"]: entry["config"] for entry in STORED["entries"]} == spellings()


@pytest.mark.parametrize("entry", STORED["entries"], ids=lambda entry: entry["name"])
def test_transformers_still_reads_the_same(entry: dict[str, Any], tmp_path: Path) -> None:
    view = transformers_view(entry["config"], tmp_path)
    stored = {key: value for key, value in entry.items() if key not in ("name", "config")}
    assert ("error" in view) == ("error" in stored)
    if "error" not in stored:
        assert view["inverse_frequencies"] == pytest.approx(stored["inverse_frequencies"], rel=1e-6)
        assert view["attention_factor"] == pytest.approx(stored["attention_factor"], rel=1e-9)
        assert view["seen"] == stored["seen"]
