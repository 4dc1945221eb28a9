"""Server-sent events: how every door's stream is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


def event(data: Mapping[str, Any], kind: str = "") -> bytes:
    """One event of a stream, with its kind where events have one."""
    head = f"event: {kind}\n".encode() if kind else b""
    return b"%bdata: %b\n\n" % (head, _json.encode(data))
