"""The daemon's log on standard error: one event per line, as key=value pairs or as one JSON object."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final, TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:/+,@[]%")


class Log:
    """Writes events at or above `level`. `form` is "text" or "json".

    A line that cannot be written (closed pipe, full disk) is dropped: the log never stops the daemon.
    """

    def __init__(self, level: str = "info", form: str = "text", stream: TextIO | None = None) -> None:
        self._threshold = LEVELS.index(level)
        self._json = form == "json"
        self._stream = stream if stream is not None else sys.stderr

    def debug(self, event: str, **fields: Any) -> None:
        """For whoever looks for a fault."""
        self._write(0, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """The ordinary course of things: requests, start, stop."""
        self._write(1, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """The daemon runs on, but something deserves attention."""
        self._write(2, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something failed."""
        self._write(3, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < self._threshold:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        present = {key: value for key, value in fields.items() if value is not None}
        if self._json:
            line = json.dumps({"time": stamp, "level": LEVELS[level], "event": event, **present}, ensure_ascii=False)
        else:
            pairs = " ".join(f"{key}={_quote(value)}" for key, value in present.items())
            line = f"{stamp} {LEVELS[level]} {event} {pairs}".rstrip()
        try:
            self._stream.write(line.encode("utf-8", "backslashreplace").decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return


def _quote(value: Any) -> str:
    """A value on one line: bare if it needs no quotes, else as a JSON string (which escapes newlines)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=True)
