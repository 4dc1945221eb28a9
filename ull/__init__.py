"""ull: a bare-metal, ultra-low-latency, single-stream LLM runtime."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # what type checkers take for True; typing itself takes longer to import than all of this
if TYPE_CHECKING:
    from ull.client.aio import AsyncClient, AsyncStream
    from ull.client.protocol import Choice, Result, Token
    from ull.client.sessions import AsyncSession, Session
    from ull.client.sync import Client, Stream
    from ull.errors import (
        Busy,
        ConfigError,
        ConnectionLost,
        DeadlineUnreachable,
        Draining,
        InvalidGrammar,
        JournalUnavailable,
        RequestError,
        RequestFailed,
        RequestTimeout,
        UllError,
        UsageError,
    )

__version__ = "0.1.0"

# Loaded on first use: the build and the daemon need no client, a client needs neither.
_HOMES = {
    "AsyncClient": "ull.client.aio",
    "AsyncSession": "ull.client.sessions",
    "AsyncStream": "ull.client.aio",
    "Busy": "ull.errors",
    "Choice": "ull.client.protocol",
    "Client": "ull.client.sync",
    "ConfigError": "ull.errors",
    "ConnectionLost": "ull.errors",
    "CurveKeys": "ull.curve",
    "DeadlineUnreachable": "ull.errors",
    "Draining": "ull.errors",
    "Forbidden": "ull.errors",
    "InvalidGrammar": "ull.errors",
    "JournalUnavailable": "ull.errors",
    "RequestError": "ull.errors",
    "RequestFailed": "ull.errors",
    "RequestTimeout": "ull.errors",
    "Result": "ull.client.protocol",
    "Session": "ull.client.sessions",
    "Stream": "ull.client.sync",
    "Token": "ull.client.protocol",
    "UllError": "ull.errors",
    "UsageError": "ull.errors",
}

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Busy",
    "Choice",
    "Client",
    "ConfigError",
    "ConnectionLost",
    "DeadlineUnreachable",
    "Draining",
    "InvalidGrammar",
    "JournalUnavailable",
    "RequestError",
    "RequestFailed",
    "RequestTimeout",
    "Result",
    "Session",
    "Stream",
    "Token",
    "UllError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ull' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
