"""The programs in pages of docs/ run as they stand there, against the tiny engine."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import ull
from conftest import ROOT, Spawn

PAGES = [ROOT / f"docs/{name}.md" for name in ("sessions", "clients", "exact-answers")]


def programs(page: Path) -> list[str]:
    """The Python programs on a page; those of one page go on from one another."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_of_a_page(
    page: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")
    monkeypatch.setattr(ull, "Client", functools.partial(ull.Client, daemon.url))
    monkeypatch.setattr(ull, "AsyncClient", functools.partial(ull.AsyncClient, daemon.url))
    found = programs(page)
    assert found
    for place, program in enumerate(found):
        exec(compile(program, f"{page.name}, program {place + 1}", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    if page.name == "sessions.md":
        loop, decision = said.splitlines()[-2:]
        cached, prompt = map(int, re.findall(r"(\d+) of (\d+) tokens", loop)[0])
        assert 0 < prompt - cached <= 8  # what was heard last, and what a template writes behind it
        assert decision in ("buy", "sell", "hold")
    if page.name == "exact-answers.md":
        decision, score, order, refused = said.splitlines()[-4:]
        assert float(score.split()[0]) < 0
        assert decision.split()[0] in ("buy", "sell", "hold", "hold:")
        assert re.fullmatch(r"(buy|sell) \d+ \d+ tokens were not drawn", order)
        assert refused == "json_schema json_schema cannot be compiled: Invalid type: strin"
