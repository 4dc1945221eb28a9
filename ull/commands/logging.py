"""`ull log`: changes what a running daemon's log has."""

from __future__ import annotations

import argparse

from ull.commands.connection import client_of
from ull.errors import UsageError
from ull.log import LEVELS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's own options."""
    command.add_argument("--level", choices=LEVELS, help="least severe line that is written")
    command.add_argument(
        "--prompts",
        choices=("on", "off"),
        help="on: requests' lines have the first 1000 characters of their prompts",
    )


def run(options: argparse.Namespace) -> int:
    """Asks the daemon for it."""
    if options.level is None and options.prompts is None:
        raise UsageError("say what to change: --level LEVEL, --prompts on or --prompts off")
    prompts = None if options.prompts is None else options.prompts == "on"
    with client_of(options) as client:
        client.set_log(level=options.level, prompts=prompts)
    return 0
