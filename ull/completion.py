"""`--print-completion SHELL`: completion of a program's options and files, made of its parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")

_DIRECTORIES = ("DIR",)  # metavars of options that name something on the disk
_FILES = ("FILE", "FILE.npz", "PATH", "RECIPE", "X.ull")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Gives a program the option, once its parser has everything else."""
    parser.add_argument(
        "--print-completion", action=_Print, choices=SHELLS, help="print a script that completes this program, and end"
    )


class _Print(argparse.Action):
    """Prints the script and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        import shtab

        for action in every_action(parser):
            if action.choices is not None or action.nargs == 0:
                continue
            if action.metavar in _DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.metavar in _FILES or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell=values))
        parser.exit(0)


def every_action(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from every_action(command)
