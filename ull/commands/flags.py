"""The options of a completion as flags of the command line: made from `GenerateOptions`, which says what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from types import NoneType
from typing import Any, Final, cast, get_args

from ull.client.options import GENERATE_OPTIONS, GenerateOptions, Option, options_of

_OF_PROGRAMS = frozenset(
    {"stop_ids", "logit_bias", "tools", "tool_choice", "documents"}
    | {"add_generation_prompt", "continue_final_message", "hold"}
)
NOT_IN_GENERATE: Final = _OF_PROGRAMS | {"chat_template_kwargs"}  # its prompt goes through no template
_FORMS = frozenset({"choices", "json_schema", "regex", "lark", "json_object"})
# `ull chat` prints answers alone; its flag for the template's variables is --template-kwargs.
NOT_IN_CHAT: Final = (
    _OF_PROGRAMS | _FORMS | {"chat_template_kwargs", "logprobs", "prompt_logprobs", "prompt_top_logprobs", "ignore_eos"}
)
_METAVARS: Final = {
    "speculate": "DRAFTER",
    "timeout": "S",
    "deadline": "S",
    "priority": "CLASS",
    "regex": "PATTERN",
}
_KINDS: Final[dict[type, str]] = {int: "N", float: "X", str: "TEXT"}  # metavar of the others, by type


def _file(name: str) -> str:
    """The text of a file that a flag names."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{name} is not valid UTF-8: {error.reason}") from None


def _json_or_file(text: str) -> str:
    """The JSON text of a schema, given itself or by the name of its file."""
    if text.lstrip().startswith("{") or text.strip() in ("true", "false"):
        return text
    return _file(text)


# Flags that name a file: how they are read, their metavar, and what they say of that.
_FILES: Final[dict[str, tuple[Callable[[str], str], str, str]]] = {
    "json_schema": (_json_or_file, "FILE|JSON", "the answer is JSON of this JSON Schema: a file, or the schema itself"),
    "lark": (_file, "FILE", "the answer is a text of the grammar in this file, in Lark's syntax"),
}


def add_options(parser: argparse.ArgumentParser, names: Set[str]) -> None:
    """A flag for each option named. One that is not given stays None, which stands for the option's default."""
    for name, option in options_of(GenerateOptions).items():
        if name in names:
            parser.add_argument("--" + name.replace("_", "-"), **_reading(name, option))


def given_options(arguments: argparse.Namespace) -> GenerateOptions:
    """Those of the arguments that are options of a completion."""
    return cast(GenerateOptions, {name: value for name, value in vars(arguments).items() if name in GENERATE_OPTIONS})


def _reading(name: str, option: Option) -> dict[str, Any]:
    """How argparse reads and explains a flag: one that says yes, a number or text, or a text that may come again."""
    if name in _FILES:
        read, metavar, meaning = _FILES[name]
        return {"type": read, "metavar": metavar, "help": meaning}
    kinds = [kind for kind in get_args(option.type) if kind is not NoneType]
    if kinds == [bool]:
        return {"action": "store_true", "default": None, "help": option.meaning}
    texts = Sequence[str] in kinds
    metavar = _METAVARS.get(name, _KINDS[str if texts else kinds[0]])
    if texts:
        return {"action": "append", "metavar": metavar, "help": f"{option.meaning}; repeatable"}
    return {"type": kinds[0], "metavar": metavar, "help": option.meaning}
