"""`ull generate`: streams one completion to the terminal."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence

import msgspec

from ull.client import Choice, Result, Stream
from ull.client.options import GENERATE_OPTIONS
from ull.commands.connection import client_of
from ull.commands.flags import NOT_IN_GENERATE, add_options, given_options
from ull.commands.outcome import EXIT_FAILED, EXIT_TIMED_OUT, complain
from ull.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull generate`."""
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt's text, or - to read it from standard input")
    add_options(parser, GENERATE_OPTIONS - NOT_IN_GENERATE)
    parser.add_argument("--ids", action="store_true", help="print token ids instead of text")
    parser.add_argument("--json", action="store_true", help="print one JSON object with everything at the end")


def run(options: argparse.Namespace) -> int:
    """Runs `ull generate`; a keyboard interrupt cancels the request. An answer that is not whole is no success."""
    with client_of(options) as client:
        stream = client.generate(_prompt(options.prompt), **given_options(options))
        with stream:
            if options.json:
                print(json.dumps(msgspec.to_builtins(stream.result()), ensure_ascii=False))
            elif options.ids:
                _print_ids(stream)
            else:
                print_text(stream)
        result = stream.result()
    if result.prompt_logprobs is not None and not options.json:
        _print_prompt_logprobs(result.prompt_logprobs, result.prompt_top_logprobs)
    if options.logprobs is not None and not options.json:
        _print_logprobs(result)
    if result.choice is not None and not options.json:
        _print_choice(result, result.choice, options.choices)
    tokens = len(result.token_ids)
    if result.finish_reason == "timeout":
        complain(f"timed out after {options.timeout:g} s: the answer ends after {tokens} tokens")
        return EXIT_TIMED_OUT
    if result.finish_reason == "deadline":
        complain(f"not done by its deadline of {options.deadline:g} s: the answer ends after {tokens} tokens")
        return EXIT_TIMED_OUT
    if result.finish_reason == "cancelled":
        complain(f"the daemon has cancelled the request: the answer ends after {tokens} tokens")
        return EXIT_FAILED
    return 0


def print_text(stream: Stream) -> str:
    """Writes a stream's text as it arrives, then a newline if it ended without one; returns the text."""
    text = ""
    for token in stream:
        text += token.text
        sys.stdout.write(token.text)
        sys.stdout.flush()
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return text


def _print_ids(stream: Stream) -> None:
    for token in stream:
        print(*token.ids, sep="\n", flush=True)


def _print_prompt_logprobs(
    logprobs: Sequence[float | None], tops: Sequence[Sequence[tuple[int, float]] | None] | None
) -> None:
    """A line per token of the prompt on standard error, and their sum: the text's, given its first token."""
    sys.stdout.flush()
    print(f"  prompt   logprob{'' if tops is None else '  likeliest'}", file=sys.stderr)
    for place, logprob in enumerate(logprobs):
        top = tops[place] if tops is not None and place < len(tops) else None
        told = "" if logprob is None else f"{logprob:9.4f}  {_alternatives(top or ())}"
        print(f"{place:8d} {told}".rstrip(), file=sys.stderr)
    print(f"     sum {math.fsum(filter(None, logprobs)):9.4f}", file=sys.stderr)


def _print_logprobs(result: Result) -> None:
    """A line per token on standard error, so that standard output holds the answer alone."""
    sys.stdout.flush()
    print("   token   logprob  alternatives", file=sys.stderr)
    for entry in result.logprobs or ():
        print(f"{entry.token:8d} {entry.logprob:9.4f}  {_alternatives(entry.top)}".rstrip(), file=sys.stderr)


def _alternatives(top: Sequence[tuple[int, float]]) -> str:
    return "  ".join(f"{token} {logprob:.4f}" for token, logprob in top)


def _print_choice(result: Result, choice: Choice, labels: Sequence[str]) -> None:
    """A line per choice on standard error, so that standard output holds the answer alone."""
    sys.stdout.flush()
    print("  tokens   logprob  probability  choice", file=sys.stderr)
    table = zip(labels, result.usage.choice_tokens, choice.logprobs, choice.probabilities, strict=True)
    for index, (label, tokens, logprob, probability) in enumerate(table):
        chosen = " *" if index == choice.index else ""
        print(f"{tokens:8d} {logprob:9.4f} {probability:12.6f}  {label!r}{chosen}", file=sys.stderr)
    print(f"margin {choice.margin:.6f}, {result.usage.scored_tokens} tokens fed", file=sys.stderr)


def _prompt(argument: str) -> str:
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not valid UTF-8: {error}", "prompt") from error
