"""What has happened between two looks at a daemon."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ull import wire

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Look:
    """One look: when (time.monotonic(), s), and what the daemon said."""

    at_s: float
    stats: wire.StatsReply
    health: wire.HealthReply


@dataclass(frozen=True)
class Interval:
    """What lies between two looks. Rates are per second; durations nanoseconds, None without a record."""

    tokens_per_s: float
    requests_per_s: float
    ttft_p50: int | None
    ttft_p99: int | None
    gap_p50: int | None
    gap_p99: int | None
    busy: dict[str, float]  # by thread, the share of the time at work

    @classmethod
    def between(cls, before: Look, after: Look) -> Interval:
        """Of a daemon that is still the same; of another one (its counters begin anew) since its start."""
        same = after.stats.engine["completion_tokens"] >= before.stats.engine["completion_tokens"]
        same = same and after.health.uptime_ns >= before.health.uptime_ns
        elapsed = max(1e-9, after.at_s - before.at_s if same else after.health.uptime_ns / 1e9)

        def gained(now: int, then: int) -> int:
            return now - then if same else now

        ttft = _difference(before.stats if same else None, after.stats, "time_to_first_token")
        gaps = _difference(before.stats if same else None, after.stats, "round")
        busy = {
            name: gained(thread["working_ns"], before.stats.threads.get(name, {}).get("working_ns", 0)) / 1e9 / elapsed
            for name, thread in after.stats.threads.items()
        }
        return cls(
            tokens_per_s=gained(after.stats.engine["completion_tokens"], before.stats.engine["completion_tokens"])
            / elapsed,
            requests_per_s=gained(after.stats.requests["accepted"], before.stats.requests["accepted"]) / elapsed,
            ttft_p50=quantile(ttft, 0.5),
            ttft_p99=quantile(ttft, 0.99),
            gap_p50=quantile(gaps, 0.5),
            gap_p99=quantile(gaps, 0.99),
            busy=busy,
        )


class History:
    """The last intervals, for sparklines."""

    def __init__(self, kept: int = 60) -> None:
        self.intervals: deque[Interval] = deque(maxlen=kept)

    def add(self, interval: Interval) -> None:
        """Appends one; the oldest goes."""
        self.intervals.append(interval)

    def line(self, name: str, width: int) -> str:
        """A sparkline of one figure."""
        return sparkline([getattr(interval, name) for interval in self.intervals][-width:])


def sparkline(values: Iterable[float | None]) -> str:
    """Bars from nothing to the largest value; a space where there is none."""
    known = list(values)
    most = max((value for value in known if value is not None), default=0)
    return "".join(
        " " if value is None else _BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)) if most > 0 else 0)]
        for value in known
    )


def quantile(buckets: Sequence[tuple[int, int]], share: float) -> int | None:
    """The upper edge of the bucket that holds it; None without a record."""
    total = sum(count for _, count in buckets)
    seen = 0
    for upper, count in buckets:
        seen += count
        if total and seen >= share * total:
            return upper
    return None


def duration(nanoseconds: int | None) -> str:
    """Three digits and a unit."""
    if nanoseconds is None:
        return "-"
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            value = nanoseconds / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{nanoseconds} ns"


def _difference(before: wire.StatsReply | None, after: wire.StatsReply, name: str) -> list[tuple[int, int]]:
    """The records of a histogram that have come since."""
    now = after.histograms[name].buckets if name in after.histograms else []
    then = dict(before.histograms[name].buckets) if before is not None and name in before.histograms else {}
    return [(upper, count - then.get(upper, 0)) for upper, count in now if count > then.get(upper, 0)]
