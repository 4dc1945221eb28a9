"""docs/gateway.md: its program runs as it stands there, and it names what the gateway takes."""

import re
from pathlib import Path

import pytest

from conftest import ROOT, Daemon
from gateways import Gateway
from ull.gateway.bodies import ChatRequest, CompletionRequest
from ull.gateway.main import parser

PAGE = (ROOT / "docs/gateway.md").read_text(encoding="utf-8")


def test_the_programs_run(shared_daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert programs
    with Gateway(shared_daemon.url, tmp_path) as gateway:
        for program in programs:
            exec(compile(program.replace("http://127.0.0.1:8000", gateway.base), "docs/gateway.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert " 32 tokens" in said
    assert said[-1].split()[0] in ("buy", "sell")


def test_every_field_is_named() -> None:
    unnamed = {"functions", "function_call", "suffix"}  # which are refused
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - unnamed
    assert not [field for field in fields if f"`{field}`" not in PAGE and f"`{field}: " not in PAGE]


def test_every_bound_has_its_default() -> None:
    defaults = {action.dest: action.default for action in parser()._actions}
    assert f"| `--max-connections` | {defaults['max_connections']} |" in PAGE
    for name in ("read", "stall"):
        assert f"| `--{name}-timeout` | {defaults[f'{name}_timeout']:g} s |" in PAGE
