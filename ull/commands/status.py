"""`ull health`, `ull info`, `ull stats`: what a daemon says about itself, as JSON."""

from __future__ import annotations

import argparse
import json

import msgspec

from ull.commands.connection import client_of


def run_health(options: argparse.Namespace) -> int:
    """Prints the health reply; exit status 0 only for "ok"."""
    with client_of(options) as client:
        reply = client.health()
    _print({"status": reply.status, "uptime_s": reply.uptime_ns / 1e9, "queue_length": reply.queue_length})
    return 0 if reply.status == "ok" else 1


def run_info(options: argparse.Namespace) -> int:
    """Prints the info reply."""
    with client_of(options) as client:
        _print(_body(client.info()))
    return 0


def run_stats(options: argparse.Namespace) -> int:
    """Prints the stats reply."""
    with client_of(options) as client:
        _print(_body(client.stats()))
    return 0


def _body(reply: msgspec.Struct) -> dict[str, object]:
    """The reply's fields without the envelope's."""
    return {key: value for key, value in msgspec.to_builtins(reply).items() if key not in ("type", "id")}


def _print(value: dict[str, object]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
