"""`ull generate`: streams one completion to the terminal."""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from ull.client.protocol import Result
from ull.client.sync import Client, Stream
from ull.commands.outcome import EXIT_FAILED, EXIT_TIMED_OUT, complain
from ull.errors import ConfigError
from ull.wire import DRAFTERS, MAX_TREE


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that generate and chat share; their meaning is `ull.Client.generate`'s."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate (default: the daemon's)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0: off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="1: off (default)")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="X", help="0: off (default)")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; 0: off (default)")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; 0: off (default)")
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 0, prompt included; 1: off (default)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="default: drawn by the daemon")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable")
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="texts of control tokens, such as <|im_end|>, become these tokens (default: they stay text)",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds after which the daemon ends the request")
    add_speculation_arguments(parser)


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that decide how fast the same tokens come; the daemon knows which drafters its engine has."""
    names = ", ".join(DRAFTERS)
    parser.add_argument("--speculate", metavar="DRAFTER", help=f"{names} (default: the daemon's)")
    parser.add_argument("--max-tree", type=int, metavar="N", help=f"most tokens of one verification, 1 to {MAX_TREE}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull generate`."""
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt's text, or - to read it from standard input")
    add_sampling_arguments(parser)
    parser.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities and N alternatives")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the engine's end-of-text ids")
    parser.add_argument("--ids", action="store_true", help="print token ids instead of text")
    parser.add_argument("--json", action="store_true", help="print one JSON object with everything at the end")


def run(options: argparse.Namespace) -> int:
    """Runs `ull generate`; a keyboard interrupt cancels the request. An answer that is not whole is no success."""
    with Client(options.connect) as client:
        stream = client.generate(
            _prompt(options.prompt),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            stop=options.stop,
            logprobs=options.logprobs,
            ignore_eos=options.ignore_eos,
            timeout=options.timeout,
            speculate=options.speculate,
            max_tree=options.max_tree,
            special_tokens=options.special_tokens,
        )
        with stream:
            if options.json:
                print(json.dumps(msgspec.to_builtins(stream.result()), ensure_ascii=False))
            elif options.ids:
                _print_ids(stream)
            else:
                print_text(stream)
        result = stream.result()
    if options.logprobs is not None and not options.json:
        _print_logprobs(result)
    if result.finish_reason == "timeout":
        complain(f"timed out after {options.timeout:g} s: the answer ends after {len(result.token_ids)} tokens")
        return EXIT_TIMED_OUT
    if result.finish_reason == "cancelled":
        complain(f"the daemon has cancelled the request: the answer ends after {len(result.token_ids)} tokens")
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


def _print_logprobs(result: Result) -> None:
    """A line per token on standard error, so that standard output holds the answer alone."""
    sys.stdout.flush()
    print("   token   logprob  alternatives", file=sys.stderr)
    for entry in result.logprobs or ():
        alternatives = "  ".join(f"{token} {logprob:.4f}" for token, logprob in entry.top)
        print(f"{entry.token:8d} {entry.logprob:9.4f}  {alternatives}".rstrip(), file=sys.stderr)


def _prompt(argument: str) -> str:
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not valid UTF-8: {error}", "prompt") from error
