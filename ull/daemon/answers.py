"""What the control plane answers to `info` and `stats`: packed once and sent often.

Somebody who asks for them all the time must not cost others their turn; packing anew takes most of a millisecond.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from ull.daemon.admission import Limits
from ull.daemon.journal import Journal
from ull.daemon.metrics import DutyCycle, Metrics
from ull.log import Log

_FRESH_NS = 20_000_000  # for so long `stats` may be the same, while nothing was accepted and nothing has ended
_FRESH_HISTOGRAMS_NS = 200_000_000  # they are for monitors, which look every few seconds
_pack = msgspec.msgpack.Encoder().encode


class EngineLike(Protocol):
    """What the control plane needs of `_native.Engine`."""

    def submit(self, identity: bytes, request_id: int, tokens: Any, params: dict[str, Any]) -> int: ...

    def cancel(self, identity: bytes, request_id: int, shed: bool = False) -> bool: ...

    def withdraw(self, identity: bytes, request_id: int) -> bool: ...

    def commit(self, identity: bytes, request_id: int) -> bool: ...

    def unpin(self, pin: int) -> None: ...

    def health(self) -> str: ...

    @property
    def control_call(self) -> int: ...

    def beat(self) -> None: ...

    def end_beat(self) -> None: ...

    @property
    def queue_length(self) -> int: ...

    @property
    def client_share(self) -> int: ...

    def stats(self) -> dict[str, Any]: ...

    def trace(self, frames: bool, since: int, most: int) -> tuple[bytes, int]: ...

    def round_histogram(self) -> dict[str, Any]: ...

    def threads(self) -> dict[str, dict[str, int]]: ...


class IoLike(Protocol):
    """What the control plane needs of `_native.Io`."""

    def stats(self) -> dict[str, Any]: ...

    def delivery_histogram(self) -> dict[str, Any]: ...


class Answers:
    """The packed answers of one daemon. `engine` and `executor` are what `info` reports of them.

    What goes into a message is a map of its fields.
    """

    def __init__(self, engine: dict[str, Any], executor: dict[str, Any], limits: Limits) -> None:
        self.info = _packed({"engine": engine, "executor": executor, "limits": msgspec.to_builtins(limits)})
        self._drafting = {name: executor[name] for name in ("adaptive", "verify_ns", "draft_ns") if name in executor}
        self._stats: dict[str, Any] = {}
        self._stats_of = (0, 0)  # how many requests were accepted, and had ended, when they were packed
        self._stats_ns = 0
        self._histograms: dict[str, Any] = {}
        self._histograms_ns = 0

    def stats(
        self,
        metrics: Metrics,
        engine: EngineLike,
        io: IoLike,
        log: Log,
        duty: DutyCycle,
        journal: Journal | None = None,
    ) -> dict[str, Any]:
        """The fields of the answer to `stats`, of a moment ago if nobody can have noticed a difference."""
        now, state = time.monotonic_ns(), (metrics.accepted, metrics.finished.total())
        if not self._stats or state != self._stats_of or now - self._stats_ns > _FRESH_NS:
            self._stats_of, self._stats_ns = state, now
            speculation = msgspec.to_builtins(metrics.speculation)
            self._stats = _packed(
                {
                    "requests": metrics.requests(),
                    "latency": metrics.latency(),
                    "engine": engine.stats(),
                    "io": io.stats(),
                    "speculation": speculation | self._drafting,
                    "threads": {**engine.threads(), "control": duty.snapshot()},
                    "log": {"dropped": log.dropped},
                    "journal": {} if journal is None else journal.stats(),
                }
            )
        return self._stats

    def histograms(self, metrics: Metrics, engine: EngineLike, io: IoLike) -> dict[str, Any]:
        """The field of the answer to `stats` that has every histogram in full, of a moment ago."""
        now = time.monotonic_ns()
        if not self._histograms or now - self._histograms_ns > _FRESH_HISTOGRAMS_NS:
            self._histograms_ns = now
            core = {"round": engine.round_histogram(), "delivery": io.delivery_histogram()}
            self._histograms = _packed({"histograms": metrics.histograms() | core})
        return self._histograms


def _packed(fields: dict[str, Any]) -> dict[str, Any]:
    """Each value as msgpack that goes into a message as it is."""
    return {name: msgspec.Raw(_pack(value)) for name, value in fields.items()}
