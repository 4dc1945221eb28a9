"""Chat templates as transformers applies them: which one a tokenizer has, how it is compiled, what it is given.

Imports little: the process that runs templates (template_process.py) is made of this module.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.nodes
import jinja2.sandbox
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from ull.errors import TokenizerError

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a directory of NAME.jinja
DEFAULT, WITH_TOOLS = "default", "tool_use"  # the names that transformers looks for

# What templates read a message's reasoning from; each name gives the others their value, as in transformers.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PART_PROBE = "ull-probe-of-text-parts"


class ChatError(Exception):
    """A template refuses what it is given, fails on it, or writes more than it may."""


class ChatTemplate:
    """One compiled template. Raises TokenizerError with the line if it does not compile.

    Compiling evaluates constant expressions, so it is for the process that runs templates too.
    """

    def __init__(self, source: str) -> None:
        with _compiling():
            self._template = _environment().from_string(source)
        self._source = source
        self._takes_parts: bool | None = None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_characters: int,
    ) -> str:
        """The text of a chat. `variables` are the special tokens and whatever else the template may read.

        Keys of a message whose value is None are left out. Raises ChatError, also for a text that is longer than
        `most_characters`.
        """
        turns = [_turn(message) for message in messages]
        variables = dict(variables or {})
        if any(isinstance(turn.get("content"), list) for turn in turns) and not self._reads_parts(variables):
            turns = [_flat(turn) for turn in turns]
        final = self._tag_final(turns) if continue_final_message else ""
        given = {"messages": turns, "tools": tools, "documents": documents}
        text = self._run({**variables, **given, "add_generation_prompt": add_generation_prompt}, most_characters)
        return _cut_at_tag(text, final) if continue_final_message else text

    def _run(self, variables: dict[str, Any], most_characters: int) -> str:
        pieces: list[str] = []
        written = 0
        try:
            for piece in self._template.generate(variables):
                written += len(piece)
                if written > most_characters:
                    raise ChatError(f"it writes more than {most_characters} characters")
                pieces.append(piece)
        except RecursionError as error:
            raise ChatError("it is nested too deeply") from error
        except MemoryError as error:
            raise ChatError("it needs too much memory") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ChatError(str(error) or type(error).__name__) from error
        return "".join(pieces)

    def _reads_parts(self, variables: dict[str, Any]) -> bool:
        """Whether the template reads a content that is a list of parts; tried once."""
        if self._takes_parts is None:
            turn = {"role": "user", "content": [{"type": "text", "text": _PART_PROBE}]}
            given = {"messages": [turn], "tools": None, "documents": None, "add_generation_prompt": True}
            try:
                text = self._run({**variables, **given}, 1 << 20)
            except ChatError:
                text = ""
            self._takes_parts = _PART_PROBE in text and "'text'" not in text and '"text"' not in text
        return self._takes_parts

    def _tag_final(self, turns: list[dict[str, Any]]) -> str:
        """Marks the end of the last message's text, which is returned."""
        content = turns[-1].get("content")
        if "content" not in self._source:
            raise ChatError("it does not read contents, so none can be continued")
        parts = [part for part in content if "text" in part] if isinstance(content, list) else []
        if parts:
            text = str(parts[-1]["text"])
            parts[-1]["text"] = text + _CONTINUE_TAG
        elif isinstance(content, str):
            text = content
            turns[-1]["content"] = content + _CONTINUE_TAG
        else:
            raise ChatError("the final message has no text to continue")
        return text


def literal_texts(source: str) -> set[str]:
    """The texts that the template itself may write. Raises TokenizerError with the line for what is no template."""
    with _compiling():
        tree = _environment().parse(source)
    texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    return texts | {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}


def choose(names: Iterable[str], with_tools: bool) -> str:
    """The name of the template for a chat: "tool_use" for one with tools, else "default", else the first there is."""
    names = list(names)
    for name in (WITH_TOOLS, DEFAULT) if with_tools else (DEFAULT,):
        if name in names:
            return name
    return names[0]


def find_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a tokenizer directory by name; empty if it has none.

    chat_template.jinja and additional_chat_templates/*.jinja win over tokenizer_config.json (`config`), which holds
    a text, or a list of named ones. Raises TokenizerError for anything else.
    """
    files = {path.stem: path for path in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).exists():
        files = {DEFAULT: directory / TEMPLATE_FILE, **files}
    try:
        found = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read the chat template: {error}", "chat_template") from error
    if found:
        return found
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise TokenizerError("chat_template is neither a string nor a list of named templates", "chat_template")
    return value


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template does not compile: line {error.lineno}: {error.message}", "chat_template"
        ) from error
    except (jinja2.TemplateError, ValueError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise TokenizerError(f"the chat template does not compile: {reason}", "chat_template") from error


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to a template: without null values, its reasoning under every name."""
    turn = {key: value for key, value in message.items() if value is not None}
    reasoning = next((turn[name] for name in _REASONING if name in turn), None)
    if reasoning is not None:
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    return turn


def _flat(turn: dict[str, Any]) -> dict[str, Any]:
    """`turn` with its text parts as one text, a part to a line."""
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    return {**turn, "content": "\n".join(str(part.get("text", "")) for part in content)}


def _cut_at_tag(text: str, final: str) -> str:
    """`text` up to the end of the final message, whose text is `final`."""
    if final.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise ChatError("the final message cannot be continued: the template changes or drops its text")
    place = text.rindex(_CONTINUE_TAG.strip())
    kept = text[:place]
    return kept if text.startswith(_CONTINUE_TAG, place) else kept.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionary:
    """The global `dict` of templates, without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja2's `namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: its name begins with an underscore")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The extensions, filters and globals that transformers offers to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dictionary()
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
