"""One list of options: the wire's fields, both clients' arguments and the command line's flags are it."""

import argparse
import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ull
from ull import wire
from ull.client.options import GenerateOptions, ReadOptions, SamplingOptions, TokenizeOptions, options_of
from ull.commands import chat, generate
from ull.commands.flags import NOT_IN_CHAT, NOT_IN_GENERATE, given_options

OF_THE_PROMPT = {"id", "prompt", "messages", "token_ids"}  # fields that are made of the call's first argument
BOTH = pytest.mark.parametrize("client", [ull.Client, ull.AsyncClient])


def test_the_options_are_the_fields_of_generate() -> None:
    fields = {name.removesuffix("_ms") for name in wire.Generate.__struct_fields__}
    assert set(options_of(GenerateOptions)) == fields - OF_THE_PROMPT - {"strict", "session"}


def test_what_only_reads_has_the_options_of_its_prompt_and_its_time() -> None:
    sampling = set(options_of(SamplingOptions))
    assert set(options_of(ReadOptions)) == set(options_of(GenerateOptions)) - sampling
    assert {"max_tokens", "hold"} < sampling and {"deadline", "priority", "tools"} < set(options_of(ReadOptions))


def test_the_options_are_the_fields_of_tokenize() -> None:
    fields = set(wire.Tokenize.__struct_fields__)
    assert set(options_of(TokenizeOptions)) == fields - OF_THE_PROMPT - {"strict", "count_only"}


@pytest.mark.parametrize(
    ("add_arguments", "left_out", "own"),
    [
        (generate.add_arguments, NOT_IN_GENERATE, {"help", "prompt", "ids", "json"}),
        (chat.add_arguments, NOT_IN_CHAT, {"help", "system", "template_kwargs"}),
    ],
    ids=["generate", "chat"],
)
def test_every_option_has_a_flag_but_those_that_are_listed(
    add_arguments: Callable[[argparse.ArgumentParser], None], left_out: frozenset[str], own: set[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {(action.option_strings or [action.dest])[-1].lstrip("-").replace("-", "_") for action in parser._actions}
    assert left_out < set(options_of(GenerateOptions))
    assert flags - own == set(options_of(GenerateOptions)) - left_out


def test_flags_are_read_as_the_types_of_their_options() -> None:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    line = "--top-k 4 --temperature 0.5 --stop A --stop B --special-tokens --speculate suffix --system X"
    given = given_options(parser.parse_args([*line.split(), "--template-kwargs", '{"a": 1}']))
    assert {name: value for name, value in given.items() if value is not None} == {
        "top_k": 4,
        "temperature": 0.5,
        "stop": ["A", "B"],
        "special_tokens": True,
        "speculate": "suffix",
        "chat_template_kwargs": {"a": 1},
    }


@BOTH
@pytest.mark.parametrize(
    ("method", "group"), [("generate", GenerateOptions), ("tokenize", TokenizeOptions), ("prewarm", ReadOptions)]
)
def test_signature_and_help_name_every_option(client: type, method: str, group: type) -> None:
    function = getattr(client, method)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["self", "prompt", *options_of(group)]
    for name, option in options_of(group).items():
        shown = parameters[name]
        assert (shown.kind, shown.default) == (inspect.Parameter.KEYWORD_ONLY, None)
        assert shown.annotation == option.type
        assert f"\n{name}: {option.meaning}" in function.__doc__


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("generate", {"temprature": 0.5}, "unexpected keyword argument 'temprature'. Did you mean 'temperature'?"),
        ("generate", {"timeout_ms": 1}, "unexpected keyword argument 'timeout_ms'. Did you mean 'timeout'?"),
        ("generate", {"deadline_ms": 1}, "unexpected keyword argument 'deadline_ms'. Did you mean 'deadline'?"),
        ("prewarm", {"priorty": "batch"}, "unexpected keyword argument 'priorty'. Did you mean 'priority'?"),
        ("prewarm", {"top_k": 1}, "unexpected keyword argument 'top_k'"),
        ("generate", {"strict": True}, "unexpected keyword argument 'strict'"),
        ("generate", {"xyzzy": None}, "unexpected keyword argument 'xyzzy'"),
        ("tokenize", {"special_token": True}, "argument 'special_token'. Did you mean 'special_tokens'?"),
        ("tokenize", {"top_k": 1}, "unexpected keyword argument 'top_k'"),
    ],
)
@BOTH
def test_an_unknown_option_is_refused_by_name(
    client: Callable[[str], Any], method: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    async def call() -> None:
        open_client = client(f"ipc://{tmp_path / 'nobody.sock'}")
        try:
            answer = getattr(open_client, method)("x", **options)
            if inspect.isawaitable(answer):
                await answer
        finally:
            if inspect.isawaitable(closing := open_client.close()):
                await closing

    with pytest.raises(TypeError) as caught:
        asyncio.run(call())
    assert str(caught.value).startswith(f"{method}() got an ")
    assert str(caught.value).endswith(said)
