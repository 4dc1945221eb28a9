"""`ull`: the command line for users of a daemon. Each subcommand lives in `ull.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ull import __version__
from ull.config import DEFAULT_ENDPOINT, default_toml, load_config
from ull.errors import UllError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `ull`; returns the exit status: 0, 1 (one line on standard error says why), 2 wrong usage, 130 Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UllError as error:
        print(f"ull: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone, as `| head` does. Point stdout elsewhere for the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    from ull.commands import bench, chat, demo, generate, inspect, status, tokenize

    parser = argparse.ArgumentParser("ull", description="Talks to an ull daemon, and looks into engine bundles.")
    parser.add_argument("--version", action="version", version=f"ull {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def client_command(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--connect", default=DEFAULT_ENDPOINT, metavar="URL", help=f"default {DEFAULT_ENDPOINT}")
        return command

    command = client_command("generate", "Streams one completion to the terminal.")
    generate.add_arguments(command)
    command.set_defaults(run=generate.run)
    command = client_command("chat", "A conversation in the terminal.")
    chat.add_arguments(command)
    command.set_defaults(run=chat.run)
    command = client_command("tokenize", "A text's token ids, by a daemon's tokenizer or a bundle's.")
    tokenize.add_tokenize_arguments(command)
    command.set_defaults(run=tokenize.run_tokenize)
    command = client_command("detokenize", "The text of token ids, by a daemon's tokenizer or a bundle's.")
    tokenize.add_detokenize_arguments(command)
    command.set_defaults(run=tokenize.run_detokenize)
    command = client_command("bench", "Measures a running daemon from the client's side.")
    bench.add_arguments(command)
    command.set_defaults(run=bench.run)
    client_command("health", "Whether the daemon serves; exit status 0 if it does.").set_defaults(run=status.run_health)
    client_command("info", "What the daemon serves.").set_defaults(run=status.run_info)
    client_command("stats", "Counters and latencies since the daemon's start.").set_defaults(run=status.run_stats)

    command = commands.add_parser("config", help="Prints or checks a daemon's configuration.")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--defaults", action="store_true", help="print every key, commented, with its default")
    which.add_argument("--check", type=Path, metavar="FILE", help="say what is wrong with FILE, if anything")
    command.set_defaults(run=_config)
    command = commands.add_parser("inspect", help="Prints what is inside an engine bundle, and what drafting costs.")
    inspect.add_arguments(command)
    command.set_defaults(run=inspect.run)
    command = commands.add_parser("demo", help="Builds the tiny engine, serves it, streams a completion, measures.")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)
    return parser


def _config(options: argparse.Namespace) -> int:
    if options.defaults:
        print(default_toml(), end="")
    else:
        load_config(options.check)
        print(f"{options.check}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
