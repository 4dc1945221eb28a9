"""The daemon's log on standard error: one event per line, as key=value pairs or as one JSON object."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any, Final, Protocol

LEVELS: Final = ("debug", "info", "warning", "error")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:/+,@[]%")
_MAX_LINES = 4096  # of a LogQueue
_MAX_BYTES = 1 << 20
_RETRY_MS = 1000  # between two looks at a non-blocking descriptor that takes nothing
_SAY_LOSS_S = 1.0  # at most one line about dropped lines in this time


class Sink(Protocol):
    """Where a Log's lines go: a text stream, or a LogQueue."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class Log:
    """Writes events at or above `level`. `form` is "text" or "json".

    A line that cannot be written (closed pipe, full disk) is dropped. The log never stops its program, and behind a
    LogQueue it never makes it wait either.
    """

    def __init__(self, level: str = "info", form: str = "text", stream: Sink | None = None) -> None:
        self._threshold = LEVELS.index(level)
        self.prompts = False  # whether the lines of requests are to have their prompts' text
        self._form = form
        self._stream = stream if stream is not None else sys.stderr

    @property
    def dropped(self) -> int:
        """Lines that a LogQueue could not write."""
        return self._stream.dropped if isinstance(self._stream, LogQueue) else 0

    @property
    def level(self) -> str:
        """The least severe level that is written."""
        return LEVELS[self._threshold]

    @level.setter
    def level(self, level: str) -> None:
        self._threshold = LEVELS.index(level)

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
        try:
            self._stream.write(_line(self._form, level, event, fields))
            self._stream.flush()
        except (OSError, ValueError, MemoryError, AttributeError):  # AttributeError: Python found no standard error
            return


class LogQueue:
    """Takes lines and writes them to `descriptor` from a thread of its own. Bounded in lines and in bytes.

    `write` never waits, whatever becomes of the descriptor: a pipe whose reader has stopped, a full disk. A line that
    finds no room or cannot be written is dropped and counted; once lines can be written again, one line of the form
    `form` says how many were lost.
    """

    def __init__(self, descriptor: int, form: str = "text") -> None:
        self.dropped = 0  # lines since the start
        self._descriptor = descriptor
        self._form = form
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of self._lines
        self._unsaid = 0  # dropped lines that no line has told of
        self._lost_s = 0.0  # when the first of them was dropped
        self._works = True  # the last line was written
        self._cut = False  # of the last line only the beginning was written
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ull-log", daemon=True)
        self._thread.start()

    def write(self, text: str, /) -> None:
        """Queues one line, its line end included, or drops it."""
        line = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._closing or len(self._lines) >= _MAX_LINES or self._bytes + len(line) > _MAX_BYTES:
                self._drop()
                return
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify()

    def flush(self) -> None:
        """Does nothing: the thread writes each line as soon as it can."""

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, for at most `timeout_s` seconds. Later lines are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (following := self._next()) is not None:
            line, told = following
            self._works = self._put(line)
            if self._works:
                continue
            with self._changed:
                if told:
                    self._unsaid += told
                else:
                    self._drop()

    def _next(self) -> tuple[bytes, int] | None:
        """The next line, waited for, and how many dropped ones it tells of; None once the queue is closed and empty."""
        with self._changed:
            while not self._lines and not self._closing and not self._loss_is_due():
                self._changed.wait()
            if self._loss_is_due():
                count, self._unsaid = self._unsaid, 0
                fields = {"dropped": count, "message": f"{count} lines were dropped: they could not be written"}
                return _line(self._form, 2, "log", fields).encode(), count
            if not self._lines:
                return None
            line = self._lines.popleft()
            self._bytes -= len(line)
            return line, 0

    def _loss_is_due(self) -> bool:
        """Whether to tell of dropped lines: behind the queued ones, or after a second while there always are some."""
        if self._unsaid == 0 or not self._works:
            return False
        return not self._lines or time.monotonic() - self._lost_s >= _SAY_LOSS_S

    def _drop(self) -> None:
        if self._unsaid == 0:
            self._lost_s = time.monotonic()
        self.dropped += 1
        self._unsaid += 1

    def _put(self, line: bytes) -> bool:
        """Writes one line, for as long as it takes; False if it cannot be written."""
        rest = memoryview(b"\n" + line if self._cut else line)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                    self._cut = len(rest) > 0
                except BlockingIOError:  # whoever shares the descriptor has made it non-blocking
                    _wait_writable(self._descriptor)
        except OSError:
            return False
        return True


def _wait_writable(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    poller.poll(_RETRY_MS)


def _line(form: str, level: int, event: str, fields: dict[str, Any]) -> str:
    """One event as a line with its end; fields that are None are left out."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    present = {key: value for key, value in fields.items() if value is not None}
    if form == "json":
        line = json.dumps({"time": stamp, "level": LEVELS[level], "event": event, **present}, ensure_ascii=False)
    else:
        pairs = " ".join(f"{key}={_quote(value)}" for key, value in present.items())
        line = f"{stamp} {LEVELS[level]} {event} {pairs}".rstrip()
    return line.encode("utf-8", "backslashreplace").decode() + "\n"


def _quote(value: Any) -> str:
    """A value on one line: bare if it needs no quotes, else as a JSON string (which escapes newlines)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=True)
