"""`ull generate` with choices and grammars: what it prints, to whom, and what it says of wrong ones."""

import json
import re
from pathlib import Path

import pytest

from conftest import Daemon
from processes import ull
from ull.commands.outcome import EXIT_FAILED


def test_generate_prints_the_choice_and_how_likely_each_is(shared_daemon: Daemon) -> None:
    command = ("generate", "import ", "--connect", shared_daemon.url, "--choices", "zzz", "--choices", "sys")
    outcome = ull(*command)
    assert (outcome.returncode, outcome.stdout) == (0, "sys\n")
    head, first, second, margin = outcome.stderr.splitlines()
    assert head.split() == ["tokens", "logprob", "probability", "choice"]
    assert first.endswith("'zzz'") and second.endswith("'sys' *") and margin.startswith("margin ")
    choice = json.loads(ull(*command, "--json").stdout)["choice"]
    assert (choice["label"], choice["index"]) == ("sys", 1)
    assert f"{choice['logprobs'][1]:.4f}" in second and f"{choice['probabilities'][1]:.6f}" in second
    refused = ull(*command, "--choices", "sys")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (EXIT_FAILED, "", 1)
    assert "choices[2] is 'sys' once more" in refused.stderr


def test_generate_prints_how_likely_the_prompt_is(shared_daemon: Daemon) -> None:
    command = ("generate", "import os", "--connect", shared_daemon.url, "--max-tokens", "0", "--prompt-logprobs")
    found = json.loads(ull(*command, "--json").stdout)["prompt_logprobs"]
    assert found[0] is None and all(value < 0 for value in found[1:])
    outcome = ull(*command)
    assert (outcome.returncode, outcome.stdout.strip()) == (0, "")
    head, first, *rest, total = outcome.stderr.splitlines()
    assert (head.split(), first.split()) == (["prompt", "logprob"], ["0"])
    assert [line.split() for line in rest] == [
        [str(place + 1), f"{value:.4f}"] for place, value in enumerate(found[1:])
    ]
    assert total.split() == ["sum", f"{sum(found[1:]):.4f}"]
    likeliest = (*command, "--prompt-top-logprobs", "2")
    top = json.loads(ull(*likeliest, "--json").stdout)["prompt_top_logprobs"]
    head, first, *rest, _ = ull(*likeliest).stderr.splitlines()
    assert (head.split(), first.split(), top[0]) == (["prompt", "logprob", "likeliest"], ["0"], None)
    for place, line in enumerate(rest, 1):
        told = (f"{token} {value:.4f}" for token, value in top[place])
        assert line.split() == f"{place} {found[place]:.4f} {'  '.join(told)}".split()


def test_generate_keeps_to_a_form(shared_daemon: Daemon, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text('{"type": "integer", "minimum": 10, "maximum": 99}')
    grammar.write_text('start: "yes" | "no"')
    for option, value, fits in (
        ("--json-schema", str(schema), "[1-9][0-9]"),
        ("--json-schema", ' {"enum": [7]}', "7"),
        ("--regex", "[a-c]{5}", "[a-c]{5}"),
        ("--lark", str(grammar), "yes|no"),
    ):
        outcome = ull("generate", "x = ", "--connect", shared_daemon.url, "--max-tokens", "32", option, value)
        assert outcome.returncode == 0 and re.fullmatch(fits, outcome.stdout.strip()), outcome
    assert ull("generate", "x", "--connect", shared_daemon.url, "--json-object", "--max-tokens", "9").stdout[0] == "{"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--json-schema", "missing.json"), 2, "missing.json: No such file or directory"),
        (("--lark", "missing.lark"), 2, "missing.lark: No such file or directory"),
        (("--json-schema", '{"type":'), EXIT_FAILED, "json_schema is a text, but no JSON"),
        (("--json-schema", '{"type": "strin"}'), EXIT_FAILED, "Invalid type: strin"),
        (("--regex", "(a"), EXIT_FAILED, "unclosed group"),
        (("--regex", "a", "--json-object"), EXIT_FAILED, "json_object and regex are both set"),
    ],
)
def test_generate_says_what_is_wrong_with_a_form(
    shared_daemon: Daemon, arguments: tuple[str, ...], status: int, says: str
) -> None:
    outcome = ull("generate", "x", "--connect", shared_daemon.url, *arguments)
    assert (outcome.returncode, outcome.stdout) == (status, "")
    assert says in outcome.stderr.splitlines()[-1]
