"""`ull`: the command line for users of a daemon. Each subcommand lives in `ull.commands`.

What takes long to import comes in only where an interrupt ends the process without a traceback.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ull import __version__

AddArguments = Callable[[argparse.ArgumentParser], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `ull`; returns the exit status, which `ull --help` explains. Wrong usage raises SystemExit."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ull.commands.outcome import conclude

    command = parser()
    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def run() -> int:
        options = command.parse_args(arguments)
        return int(options.run(options))

    return conclude(run)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from ull.commands import (
        bench,
        chat,
        demo,
        doctor,
        generate,
        inspect,
        install,
        journal,
        keys,
        logging,
        outcome,
        replay,
        status,
        tokenize,
        top,
        trace,
        upgrade,
        verify,
    )
    from ull.commands.connection import add_connection
    from ull.completion import add_completion

    program = argparse.ArgumentParser(
        "ull",
        description="Talks to an ull daemon, and looks into engine bundles.",
        epilog=outcome.STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_argument("--version", action="version", version=f"ull {__version__}")
    commands = program.add_subparsers(required=True, metavar="COMMAND")

    def add_command(
        name: str, summary: str, run: Callable[[argparse.Namespace], int], *add_arguments: AddArguments
    ) -> None:
        command = commands.add_parser(name, help=summary, description=summary)
        for add in add_arguments:
            add(command)
        command.set_defaults(run=run)

    def client_command(
        name: str, summary: str, run: Callable[[argparse.Namespace], int], *add_arguments: AddArguments
    ) -> None:
        add_command(name, summary, run, add_connection, *add_arguments)

    client_command("generate", "Streams one completion to the terminal.", generate.run, generate.add_arguments)
    client_command("chat", "A conversation in the terminal.", chat.run, chat.add_arguments)
    client_command(
        "tokenize",
        "A text's token ids, by a daemon's tokenizer or a bundle's.",
        tokenize.run_tokenize,
        tokenize.add_tokenize_arguments,
    )
    client_command(
        "detokenize",
        "The text of token ids, by a daemon's tokenizer or a bundle's.",
        tokenize.run_detokenize,
        tokenize.add_detokenize_arguments,
    )
    client_command("bench", "Measures a running daemon from the client's side.", bench.run, bench.add_arguments)
    client_command("health", "Whether the daemon serves; exit status 0 if it does.", status.run_health)
    client_command("info", "What the daemon serves.", status.run_info)
    client_command("stats", "Counters and latencies since the daemon's start.", status.run_stats)
    client_command("top", "A live view of a running daemon.", top.run, top.add_arguments)
    client_command(
        "trace", "Where a token's time goes, for Perfetto; for the role admin.", trace.run, trace.add_arguments
    )
    client_command(
        "log", "Changes what a running daemon's log has; for the role admin.", logging.run, logging.add_arguments
    )
    client_command(
        "upgrade",
        "Has a running daemon hand over to its successor, and lose nothing; for the role admin.",
        upgrade.run,
        upgrade.add_arguments,
    )
    command = commands.add_parser("keys", help="Makes and lists the keys of clients that come over a network.")
    keys.add_arguments(command)

    def add_daemon(command: argparse.ArgumentParser) -> None:
        add_connection(command, "--url")

    summary = "Runs a journal's requests again, and names every token that differs."
    add_command("replay", summary, replay.run, add_daemon, replay.add_arguments)
    summary = "Proves that tokens depend on nothing but the request, as a report to file."
    add_command("verify", summary, verify.run, verify.add_arguments)
    command = commands.add_parser("journal", help="Checks a journal's chain, or prints its records.")
    journal.add_arguments(command)
    command = commands.add_parser("config", help="Prints or checks a daemon's configuration.")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--defaults", action="store_true", help="print every key, commented, with its default")
    which.add_argument("--check", type=Path, metavar="FILE", help="say what is wrong with FILE, if anything")
    command.set_defaults(run=_config)
    command = commands.add_parser("inspect", help="Prints what is inside an engine bundle, and what drafting costs.")
    inspect.add_arguments(command)
    command.set_defaults(run=inspect.run)
    summary = "Whether this machine is fit to serve tokens without jitter, and what mends it."
    add_command("doctor", summary, doctor.run, doctor.add_arguments)
    add_command("install", "Makes a service of an engine on this machine.", install.run, install.add_arguments)
    command = commands.add_parser("demo", help="Builds the tiny engine, serves it, streams a completion, measures.")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)
    add_completion(program)
    return program


def _config(options: argparse.Namespace) -> int:
    from ull.daemon.config import default_toml, load_config

    if options.defaults:
        print(default_toml(), end="")
    else:
        load_config(options.check)
        print(f"{options.check}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
