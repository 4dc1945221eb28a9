"""Counters and latency histograms of the daemon, as `stats` reports them. Used by the control plane's one thread."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ull.wire import Ended, Speculation, added

_SUB_BUCKETS = 16  # per power of two: a quantile is at most 1/16 above the truth
_RECENT = 0.125  # weight of the latest request in service_ns
_QUANTILES = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99, "p999_ns": 0.999}


class LatencyHistogram:
    """Durations in nanoseconds, in buckets of constant relative width, so that memory does not grow."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._sum = 0
        self._max = 0

    def record(self, duration_ns: int) -> None:
        """Adds one duration; negative ones count as 0."""
        value = max(0, duration_ns)
        self._buckets[_bucket(value)] += 1
        self._count += 1
        self._sum += value
        self._max = max(self._max, value)

    def quantile(self, fraction: float) -> int:
        """The upper edge of the bucket that holds the quantile (ns), at most the maximum; 0 without records."""
        wanted = fraction * self._count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(_upper_edge(bucket), self._max)
        return 0

    def histogram(self) -> dict[str, Any]:
        """All of it, as `wire.Histogram` has it."""
        return {"sum": self._sum, "buckets": [(_upper_edge(b), self._buckets[b]) for b in sorted(self._buckets)]}

    def snapshot(self) -> dict[str, int]:
        """count, mean, quantiles and maximum."""
        quantiles = {name: self.quantile(fraction) for name, fraction in _QUANTILES.items()}
        mean = self._sum // self._count if self._count else 0
        return {"count": self._count, "mean_ns": mean, **quantiles, "max_ns": self._max}


class DutyCycle:
    """What a thread's turns of its event loop cost, as native/base/duty_cycle.h counts other threads' cycles.

    A turn that took longer than `stall_ns` is a stall.
    """

    def __init__(self, stall_ns: int) -> None:
        self._stall_ns = stall_ns
        self._cycles = self._working_ns = self._longest_ns = self._stalls = 0

    def record(self, took_ns: int) -> None:
        """Adds one turn."""
        self._cycles += 1
        self._working_ns += took_ns
        self._longest_ns = max(self._longest_ns, took_ns)
        self._stalls += took_ns > self._stall_ns

    def snapshot(self) -> dict[str, int]:
        """The figures, for `stats`."""
        return {
            "cycles": self._cycles,
            "working_ns": self._working_ns,
            "longest_ns": self._longest_ns,
            "stalls": self._stalls,
            "stall_ns": self._stall_ns,
        }


class Metrics:
    """What happened to requests since the start."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Counter[str] = Counter()  # by error code
        self.finished: Counter[str] = Counter()  # by finish reason
        self.clients: Counter[str] = Counter()  # ended requests by what became of their client
        self.errors: Counter[str] = Counter()  # ended requests that have one, by its code
        self.undelivered = 0  # terminal frames that could not be handed to a connection
        self.sessions = 0  # that are open now
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.speculation = Speculation()
        self.service_ns = 0.0  # running mean of how long requests have occupied the engine, the recent ones above all
        self._latency = {
            name: LatencyHistogram()
            for name in ("admission", "queue", "prefill", "decode", "time_to_first_token", "inter_token", "end_to_end")
        }

    def ended(self, record: Ended) -> None:
        """Counts one accepted request that has ended. Times that did not happen are not recorded."""
        self.finished[record.finish_reason] += 1
        self.clients[record.client] += 1
        if record.error is not None:
            self.errors[record.error.code] += 1
        self.undelivered += not record.delivered
        self.prompt_tokens += record.usage.prompt_tokens
        self.cached_tokens += record.usage.cached_tokens
        self.completion_tokens += record.usage.completion_tokens
        self.speculation = added(self.speculation, record.speculation)
        times = record.timeline
        self._record("admission", times.received_ns, times.admitted_ns)
        self._record("queue", times.admitted_ns, times.started_ns)
        self._record("prefill", times.started_ns, times.prefilled_ns)
        self._record("decode", times.first_token_ns, times.done_ns)
        self._record("time_to_first_token", times.received_ns, times.first_token_ns)
        self._record("end_to_end", times.received_ns, times.done_ns)
        if times.started_ns and times.done_ns:
            took = times.done_ns - times.started_ns
            self.service_ns += (took - self.service_ns) * (_RECENT if self.service_ns else 1.0)
        gap = inter_token_ns(record)
        if gap is not None:
            self._latency["inter_token"].record(gap)

    def requests(self) -> dict[str, Any]:
        """The counters, for `stats`."""
        return {
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "finished": dict(self.finished),
            "clients": dict(self.clients),
            "errors": dict(self.errors),
            "undelivered": self.undelivered,
            "sessions": self.sessions,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def latency(self) -> dict[str, dict[str, int]]:
        """The histograms, for `stats`; inter_token holds each request's mean."""
        return {name: histogram.snapshot() for name, histogram in self._latency.items()}

    def histograms(self) -> dict[str, dict[str, Any]]:
        """All of every histogram, for `stats` where it is asked for them."""
        return {name: histogram.histogram() for name, histogram in self._latency.items()}

    def _record(self, name: str, start_ns: int, end_ns: int) -> None:
        if start_ns and end_ns:
            self._latency[name].record(end_ns - start_ns)


def inter_token_ns(record: Ended) -> int | None:
    """Mean time between two tokens of one request (ns); None with fewer than two."""
    tokens, times = record.usage.completion_tokens, record.timeline
    if tokens < 2 or not times.first_token_ns:
        return None
    return (times.last_token_ns - times.first_token_ns) // (tokens - 1)


def _bucket(value: int) -> int:
    """Values below _SUB_BUCKETS have a bucket each; above, every power of two is cut into _SUB_BUCKETS."""
    shift = max(0, value.bit_length() - _SUB_BUCKETS.bit_length())
    return shift * _SUB_BUCKETS + (value >> shift)


def _upper_edge(bucket: int) -> int:
    shift = max(0, bucket // _SUB_BUCKETS - 1)
    return ((bucket - shift * _SUB_BUCKETS + 1) << shift) - 1
