"""The C++ client: what people copy, and what only it can do wrong. test_other_clients.py has the scenarios."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ull
from other_clients import CPP, compiled, driver, run
from ull.endpoints import default_endpoint


def test_a_text_that_is_no_utf8_is_refused_and_the_connection_lives_on(shared_daemon: Any) -> None:
    found = run(driver("cpp"), "bytes", shared_daemon.url)
    assert found == ["bytes refused bad_message -", "then length"]


def test_the_default_url_is_the_daemons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        assert run(driver("cpp"), "default") == [f"url {default_endpoint()}"]


def test_the_example(shared_daemon: Any) -> None:
    program = compiled(CPP / "examples/complete.cpp")
    with ull.Client(shared_daemon.url) as client:
        expected = client.generate("def add(first, second):\n", max_tokens=12).result().text
    command = [str(program), shared_daemon.url, "def add(first, second):\n", "12"]
    found = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, expected, "\n12 tokens, length\n")
    refused = subprocess.run([*command[:3], "99999999"], text=True, capture_output=True, timeout=60)
    assert refused.returncode == 1 and refused.stderr.startswith("refused (bad_request, max_tokens): ")
    usage = subprocess.run([str(program)], text=True, capture_output=True, timeout=60)
    assert usage.returncode == 2 and "usage: complete URL PROMPT" in usage.stderr


def test_the_examples_of_the_readme(shared_daemon: Any, tmp_path: Path) -> None:
    page = (CPP / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    whole = [block for block in blocks if "int main" in block]
    parts = [block for block in blocks if "int main" not in block]
    assert len(whole) == 1 and len(parts) >= 2
    source = tmp_path / "readme.cpp"
    source.write_text(whole[0].replace("ipc:///run/ull/ull.sock", shared_daemon.url), encoding="utf-8")
    assert run([str(compiled(source))])
    body = "".join(f"{{\n{part}}}\n" for part in parts)
    includes = '#include <iostream>\n#include "ull/client.hpp"\n'
    text = f'{includes}int main() {{\n  ull::Client client("{shared_daemon.url}");\n{body}}}\n'
    source = tmp_path / "parts.cpp"
    source.write_text(text, encoding="utf-8")
    run([str(compiled(source))])
