"""`ull upgrade`: has a running daemon hand over to its successor."""

from __future__ import annotations

import argparse

from ull.client.sync import UPGRADE_TIMEOUT_S
from ull.commands.connection import client_of


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's own options."""
    command.add_argument(
        "--wait",
        type=float,
        default=UPGRADE_TIMEOUT_S,
        metavar="SECONDS",
        help="for the successor to load, and for what runs to end (default: %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    """Asks the daemon for it, and waits."""
    with client_of(options) as client:
        before = client.info().executor["pid"]
        after = client.upgrade(timeout=options.wait)
    print(
        f"process {before} has handed over to {after.pid} (ull {after.version}): {after.clients} connections, "
        f"{after.sessions} sessions, {after.requests} waiting requests; nobody was answered for "
        f"{after.pause_ns / 1e6:.0f} ms"
    )
    return 0
