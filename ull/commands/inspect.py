"""`ull inspect`: what is inside an engine bundle and what drafting costs, or the same of a daemon's engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ull.client import Client
from ull.commands import inspect_tables as inspect
from ull.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull inspect`."""
    parser.add_argument("bundle", metavar="X.ull|URL", help="a bundle, or a running daemon's address (ipc://, tcp://)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--verify", action="store_true", help="compare every file with its SHA-256")
    parser.add_argument(
        "--measure", action="store_true", help="load the engine and measure here what verifying and drafting cost"
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="computing threads of --measure (default: as ulld takes)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs `ull inspect`; exit status 1 when the bundle cannot be opened, differs from its hashes or does not load."""
    if options.threads < 0:
        raise ConfigError(f"--threads must be positive, not {options.threads}", "threads")
    if "://" not in options.bundle:
        return inspect.main(Path(options.bundle), options.json, options.verify, options.measure, options.threads)
    for name in ("verify", "measure"):
        if getattr(options, name):
            raise ConfigError(f"--{name} takes a bundle; {options.bundle} is a daemon's address", name)
    with Client(options.bundle) as client:
        info = client.info()
    if options.json:
        print(json.dumps({"engine": info.engine, "executor": info.executor}, indent=2, ensure_ascii=False))
    else:
        inspect.print_served(options.bundle, info.engine, info.executor)
    return 0
