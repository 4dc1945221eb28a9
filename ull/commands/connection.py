"""Which daemon a command talks to, and with which key."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ull.client import Client

KEY_VARIABLE = "ULL_KEY"  # of the environment: the key file of commands that are given none


def add_connection(command: argparse.ArgumentParser, *synonyms: str) -> None:
    """The options of a command that talks to a daemon. `synonyms`: further names of --connect."""
    url_help = "default: this user's socket, as ulld's without --listen"
    command.add_argument("--connect", *synonyms, metavar="URL", dest="connect", help=url_help)
    add_key(command)


def add_key(command: argparse.ArgumentParser) -> None:
    """The option that names a key."""
    key_help = f"key file for a daemon that asks for one, by tcp (default: ${KEY_VARIABLE})"
    command.add_argument("--key", type=Path, metavar="FILE", help=key_help)


def client_of(
    options: argparse.Namespace, connect_timeout: float | None = None, query_timeout: float | None = None
) -> Client:
    """A client as the options say. Raises UllError."""
    key = options.key or os.environ.get(KEY_VARIABLE) or None
    return Client(options.connect, keys=key, connect_timeout=connect_timeout, query_timeout=query_timeout)
