"""`ull tokenize`, `ull detokenize`: a text's ids and the text of ids, by a daemon's tokenizer or by a bundle's."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from ull.commands.connection import client_of
from ull.errors import ConfigError
from ull.wire import Detokenize, Message, Tokenize


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull tokenize`."""
    _add_bundle(parser)
    parser.add_argument("text", metavar="TEXT", help="the text, or - to read it from standard input")
    parser.add_argument("--messages", action="store_true", help="TEXT is a JSON list of a chat's messages")
    parser.add_argument("--no-special-tokens", action="store_true", help="the text's own ids, without BOS")
    parser.add_argument("--count", action="store_true", help="print how many there are")


def add_detokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull detokenize`."""
    _add_bundle(parser)
    parser.add_argument("ids", metavar="ID", nargs="+", help="token ids, or - to read them from standard input")
    parser.add_argument("--special-tokens", action="store_true", help="print the texts of special tokens too")


def run_tokenize(options: argparse.Namespace) -> int:
    """Prints one id a line, or their number."""
    request = Tokenize(id=1, add_special_tokens=not options.no_special_tokens, count_only=options.count)
    text = _standard_input() if options.text == "-" else options.text
    if options.messages:
        request.messages = _messages(text)
    else:
        request.prompt = text
    reply = _ask(options, request)
    if options.count:
        print(reply.count)
    else:
        print(*reply.token_ids, sep="\n")
    return 0


def run_detokenize(options: argparse.Namespace) -> int:
    """Writes the ids' text and nothing else, so that it can go into a file; a newline follows it on a terminal."""
    words = _standard_input().split() if options.ids == ["-"] else options.ids
    try:
        ids = [int(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"ids are integers: {error}", "ids") from error
    reply = _ask(options, Detokenize(id=1, token_ids=ids, skip_special_tokens=not options.special_tokens))
    sys.stdout.write(reply.text)
    if sys.stdout.isatty() and not reply.text.endswith("\n"):
        sys.stdout.write("\n")
    return 0


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", type=Path, metavar="X.ull", help="use this bundle's tokenizer, without a daemon")


def _ask(options: argparse.Namespace, request: Tokenize | Detokenize) -> Any:
    """The answer of the daemon, or what a daemon on the bundle would answer."""
    if options.bundle is None:
        with client_of(options) as client:
            return client._ask(request)
    from ull import _native
    from ull.bundle import open_bundle
    from ull.daemon.admission import Admission, Limits
    from ull.text.tokenizer import Tokenizer

    bundle = open_bundle(options.bundle)
    model = bundle.manifest.model
    limits = Limits(context=model.context, vocabulary=model.vocabulary, default_max_tokens=1, max_tokens=model.context)
    with contextlib.closing(Tokenizer(bundle.tokenizer_directory)) as tokenizer:
        text_of = _native.Vocabulary(str(bundle.vocabulary_path)).text
        admission = Admission(tokenizer, limits, [], text_of)
        admission.check_text(request)
        return admission.convert(request)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not valid UTF-8: {error}", "text") from error


def _messages(text: str) -> list[Message]:
    try:
        return msgspec.json.decode(text, type=list[Message])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--messages takes a JSON list of {{role, content}}: {error}", "messages") from error
