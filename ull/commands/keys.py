"""`ull keys`: the daemon's key, those of its clients, and the list of who may come in (`ull.curve`)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from ull.curve import ROLES, KnownClient, check_name, new_pair, read_clients, read_pair, write_key
from ull.errors import ConfigError
from ull.files import replace

_HEAD = "# Clients that may connect by tcp: NAME ROLE PUBLIC-KEY. `ull keys` writes it, SIGHUP has ulld read it.\n"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The subcommands."""
    which = command.add_subparsers(required=True, metavar="WHAT")

    def add_list(command: argparse.ArgumentParser) -> None:
        command.add_argument("--clients", type=Path, required=True, metavar="FILE", help="the list (access.clients)")

    summary = "Makes the daemon's key (access.server_key)."
    server = which.add_parser("server", help=summary, description=summary)
    server.add_argument("out", type=Path, metavar="FILE", help="where it is written, for the daemon's user alone")
    server.set_defaults(run=_server)
    summary = "Makes a client's key and puts the client into the list."
    new = which.add_parser("new", help=summary, description=summary)
    new.add_argument("name", metavar="NAME", help="1 to 64 letters, digits and ._@-")
    new.add_argument("--role", choices=ROLES, default="generate", help="default: generate")
    new.add_argument("--server", type=Path, required=True, metavar="FILE", help="the daemon's key file")
    add_list(new)
    new.add_argument("--out", type=Path, metavar="FILE", help="the client's key file (default: NAME.key)")
    new.set_defaults(run=_new)
    summary = "Prints the list."
    listing = which.add_parser("list", help=summary, description=summary)
    add_list(listing)
    listing.set_defaults(run=_list)
    summary = "Takes a client out of the list."
    remove = which.add_parser("remove", help=summary, description=summary)
    remove.add_argument("name", metavar="NAME")
    add_list(remove)
    remove.set_defaults(run=_remove)


def _server(options: argparse.Namespace) -> int:
    pair = new_pair()
    write_key(options.out, pair, name="ulld")
    print(f"{options.out}: the daemon's key; its public part is {pair.public}")
    return 0


def _new(options: argparse.Namespace) -> int:
    name = check_name(options.name)
    server = read_pair(options.server, "server")
    known = read_clients(options.clients) if options.clients.exists() else []
    if any(client.name == name for client in known):
        raise ConfigError(f"{name} is in {options.clients} already: choose another name, or remove it first", "name")
    pair, out = new_pair(), options.out or Path(f"{name}.key")
    write_key(out, pair, name=name, server=server.public)
    _write(options.clients, [*known, KnownClient(name, options.role, pair.public)])
    print(f"{out}: the key of {name}, role {options.role}: give it to that client, and to nobody else")
    print(f"{options.clients}: has the client; `systemctl reload` or SIGHUP tells a running daemon")
    return 0


def _list(options: argparse.Namespace) -> int:
    for client in read_clients(options.clients):
        print(f"{client.name:20} {client.role:8} {client.public}")
    return 0


def _remove(options: argparse.Namespace) -> int:
    known = read_clients(options.clients)
    left = [client for client in known if client.name != options.name]
    if len(left) == len(known):
        raise ConfigError(f"{options.name} is not in {options.clients}", "name")
    _write(options.clients, left)
    print(f"{options.clients}: without {options.name}; `systemctl reload` or SIGHUP tells a running daemon, which")
    print("then disconnects that client")
    return 0


def _write(path: Path, clients: Iterable[KnownClient]) -> None:
    """Replaces the list whole, so that a daemon never reads half of it. Its mode and owner stay, if it has any."""
    lines = [f"{client.name} {client.role} {client.public}\n" for client in clients]
    found = path.stat() if path.exists() else None
    mode = 0o644 if found is None else found.st_mode & 0o777
    owner = (found.st_uid, found.st_gid) if found is not None and os.geteuid() == 0 else None
    replace(path, "".join([_HEAD, *lines]).encode(), mode, owner)
