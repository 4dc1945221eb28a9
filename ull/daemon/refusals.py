"""The log of refused requests: a line each while they are few, a count each second while they are many."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from ull.errors import RequestError
from ull.log import Log

BURST = 128  # refusals that get a line each, however fast they come
LINES_PER_S = 16  # ... and after that
_SUMMARY_S = 1.0


class RefusalLog:
    """Logs refusals so that a client that sends nothing else does not fill the disk. One event loop's thread.

    A line `event` tells of one; a line `summary`, once a second, how many had none (`count`), by error code.
    """

    def __init__(self, log: Log, event: str = "refused", summary: str = "refusals") -> None:
        self._log = log
        self._event = event
        self._summary = summary
        self._lines = float(BURST)  # that may be written now
        self._filled_s = time.monotonic()
        self._unlogged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, identity: bytes, request_id: int | None, error: RequestError) -> None:
        """Logs the refusal of a request, or counts it for the next summary."""
        self.write(
            error.code, client=identity.hex(), id=request_id, code=error.code, field=error.field, message=error.message
        )

    def write(self, kind: str, /, **fields: Any) -> None:
        """Logs one refusal, or counts it."""
        now = time.monotonic()
        self._lines = min(BURST, self._lines + (now - self._filled_s) * LINES_PER_S)
        self._filled_s = now
        if self._lines < 1:
            self._unlogged[kind] += 1
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_SUMMARY_S, self.summarise)
            return
        self._lines -= 1
        self._log.info(self._event, **fields)

    def summarise(self) -> None:
        """Logs how many refusals have had no line, if any, since this was last said."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._unlogged:
            return
        codes = ",".join(f"{code}:{count}" for code, count in sorted(self._unlogged.items()))
        count = self._unlogged.total()
        self._unlogged.clear()
        self._log.info(self._summary, count=count, codes=codes, message=f"{count} more were {self._event}, unlogged")
