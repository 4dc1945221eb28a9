"""What a daemon says of itself (`stats`, `health`, `info`), as families of Prometheus metrics.

Names and units are Prometheus's: base units (seconds, bytes), `_total` for counters. docs/monitoring.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ull import wire

HEALTHS = ("ok", "draining", "stalled", "failed", "journal_unavailable", "unreachable")
# Upper bounds of the buckets, in nanoseconds: four to each power of two, from 16 us to 240 s. They are bounds of the
# recording histograms' own buckets too, so that no count is a guess.
BOUNDS_NS = tuple(quarter << shift for shift in range(12, 36) for quarter in (4, 5, 6, 7))
_S = 1e-9

# By the daemon's name of a histogram: the metric's, and what it measures.
HISTOGRAMS = {
    "time_to_first_token": ("ull_time_to_first_token_seconds", "from a request's receipt to its first token"),
    "inter_token": ("ull_inter_token_latency_seconds", "mean time between two tokens of a request"),
    "round": ("ull_inter_token_gap_seconds", "from one round's tokens to the next's, each of them"),
    "end_to_end": ("ull_e2e_request_latency_seconds", "from a request's receipt to its end"),
    "admission": ("ull_request_admission_time_seconds", "from a request's receipt to its place in the queue"),
    "queue": ("ull_request_queue_time_seconds", "from its place in the queue to its beginning"),
    "prefill": ("ull_request_prefill_time_seconds", "from a request's beginning to its prompt in the cache"),
    "decode": ("ull_request_decode_time_seconds", "from a request's first token to its end"),
    "delivery": ("ull_frame_delivery_seconds", "from a token's acceptance to its frame's hand-over to the kernel"),
}


class HistogramFamily(HistogramMetricFamily):
    """Classic buckets, and beside them all that was recorded: protobuf makes a native histogram of it."""

    native: wire.Histogram


def families(stats: wire.StatsReply, health: wire.HealthReply, info: wire.InfoReply) -> Iterator[Metric]:
    """All that the daemon says of itself; `stats` with histograms."""
    return chain(
        _identity(health, info),
        _requests(stats),
        _histograms(stats),
        _speculation(stats),
        _cache(stats),
        _threads(stats),
        _connections(stats),
    )


def unreachable() -> Iterator[Metric]:
    """In their place where the daemon does not answer."""
    yield health_of("unreachable")
    yield _gauge("ull_up", "1 while the daemon answers", 0)


def health_of(status: str) -> Metric:
    """One gauge for each state, 1 for the present one."""
    family = GaugeMetricFamily("ull_health", "the daemon's health: 1 for the present status", labels=["status"])
    for each in sorted({*HEALTHS, status}):
        family.add_metric([each], float(each == status))
    return family


def cumulative(buckets: Iterable[tuple[int, int]]) -> list[int]:
    """How many records are at most each of BOUNDS_NS; `buckets` as in wire.Histogram."""
    counts, pairs = [], list(buckets)
    seen = index = 0
    for bound in BOUNDS_NS:
        while index < len(pairs) and pairs[index][0] <= bound:
            seen += pairs[index][1]
            index += 1
        counts.append(seen)
    return counts


def histogram_family(name: str, meaning: str, histogram: wire.Histogram, labels: Mapping[str, str]) -> Metric:
    """A histogram of durations, in seconds, with classic buckets and all that native ones are made of."""
    family = HistogramFamily(name, meaning, labels=list(labels))
    counts = cumulative(histogram.buckets)
    pairs = [(_bound(bound), count) for bound, count in zip(BOUNDS_NS, counts, strict=True)]
    total = sum(count for _, count in histogram.buckets)
    family.add_metric(list(labels.values()), [*pairs, ("+Inf", total)], histogram.sum * _S)
    family.native = histogram
    return family


def _bound(nanoseconds: int) -> str:
    return repr(nanoseconds / 1e9)


def _identity(health: wire.HealthReply, info: wire.InfoReply) -> Iterator[Metric]:
    yield _gauge("ull_up", "1 while the daemon answers", 1)
    yield health_of(health.status)
    yield _gauge("ull_uptime_seconds", "since the daemon's start", health.uptime_ns * _S)
    build = InfoMetricFamily("ull_build", "what the daemon serves")
    build.add_metric(
        [],
        {
            "version": str(info.executor.get("version", "")),
            "name": str(info.engine.get("name", "")),
            "bundle": str(info.engine.get("digest", ""))[:16],
            "executor": str(info.executor.get("name", "")),
        },
    )
    yield build


def _requests(stats: wire.StatsReply) -> Iterator[Metric]:
    requests, engine = stats.requests, stats.engine
    yield _gauge("ull_requests_running", "requests that are being served", engine["running"])
    yield _gauge("ull_requests_waiting", "accepted requests that wait", engine["queue_length"])
    yield _gauge("ull_sessions", "sessions of clients that are open", requests["sessions"])
    yield _counter("ull_requests_accepted", "accepted requests", requests["accepted"])
    yield _counters("ull_request_success", "ended requests", "finished_reason", requests["finished"])
    yield _counters("ull_requests_refused", "refused messages, by error code", "code", requests["refused"])
    yield _counters("ull_request_errors", "ended requests with an error, by its code", "code", requests["errors"])
    yield _counter(
        "ull_deadline_misses", "requests that ended at their deadline", requests["finished"].get("deadline", 0)
    )
    yield _counter("ull_preemptions", "times a request waited for a more urgent one", engine["suspensions"])
    yield _counter("ull_prompt_tokens", "prompt tokens of ended requests", requests["prompt_tokens"])
    yield _counter("ull_generation_tokens", "completion tokens of ended requests", requests["completion_tokens"])
    yield _counter("ull_undelivered", "ends of requests that could not be handed over", requests["undelivered"])


def _histograms(stats: wire.StatsReply) -> Iterator[Metric]:
    for name, (metric, meaning) in HISTOGRAMS.items():
        if name in stats.histograms:
            yield histogram_family(metric, meaning, stats.histograms[name], {})


def _speculation(stats: wire.StatsReply) -> Iterator[Metric]:
    engine = stats.engine
    for metric, meaning, counts in (
        ("ull_speculation_rounds", "rounds, by what drafted; none: plain rounds", engine["by_drafter"]),
        ("ull_speculation_drafted_tokens", "tokens that were drafted and verified", engine["drafted_by_drafter"]),
        ("ull_speculation_accepted_tokens", "of them, those accepted", engine["accepted_by_drafter"]),
    ):
        yield _counters(metric, meaning, "drafter", counts)


def _cache(stats: wire.StatsReply) -> Iterator[Metric]:
    engine = stats.engine
    used, total = engine["pages_used"], engine["page_count"]
    yield _counter("ull_prefix_cache_queries", "prompt tokens looked for in the KV cache", engine["prompt_tokens"])
    yield _counter("ull_prefix_cache_hits", "of them, those found", engine["cached_tokens"])
    yield _gauge("ull_kv_cache_usage_ratio", "pages of the KV cache in use", used / total if total else 0.0)
    pages = GaugeMetricFamily("ull_kv_pages", "pages of the KV cache", labels=["state"])
    pages.add_metric(["used"], used)
    pages.add_metric(["free"], total - used)
    yield pages
    yield _gauge("ull_kv_sessions", "conversations whose KV is in the cache", engine["sessions"])


def _threads(stats: wire.StatsReply) -> Iterator[Metric]:
    engine = stats.engine
    yield _gauge(
        "ull_decode_max_cycle_seconds", "the longest time between two rounds' tokens", engine["longest_cycle_ns"] * _S
    )
    yield _counter(
        "ull_decode_cycle_threshold_exceeded", "such times beyond engine.slow_cycle_us", engine["slow_cycles"]
    )
    yield _counter("ull_engine_stalls", "times the watchdog found the engine stalled", engine["stalls"])
    yield _counter("ull_late_threads", "times a thread gave no sign of life in time", engine["late_threads"])
    threads = stats.threads
    yield _counters(
        "ull_thread_busy_seconds", "time at work", "thread", {name: t["working_ns"] * _S for name, t in threads.items()}
    )
    yield _counters(
        "ull_thread_stalls", "cycles that took too long", "thread", {name: t["stalls"] for name, t in threads.items()}
    )
    longest = GaugeMetricFamily("ull_thread_longest_cycle_seconds", "the longest cycle", labels=["thread"])
    for name, thread in threads.items():
        longest.add_metric([name], thread["longest_ns"] * _S)
    yield longest
    yield _counter("ull_log_dropped", "lines of the log that could not be written", stats.log.get("dropped", 0))
    if stats.journal:
        yield _counter("ull_journal_records", "records in the journal", stats.journal["records"])
        yield _counter("ull_journal_dropped", "records that could not be written", stats.journal["dropped"])


def _connections(stats: wire.StatsReply) -> Iterator[Metric]:
    io = stats.io
    yield _gauge("ull_clients", "connections of clients", io["clients"])
    yield _counter("ull_connections", "connections since the start", io["accepted"])
    refused = {"no_room": io["turned_away"], "dropped": io["dropped"], "denied": io["denied"]}
    yield _counters("ull_connections_refused", "connections that were ended, by reason", "reason", refused)
    yield _counter("ull_clients_stalled", "requests ended because their client did not read", io["clients_stalled"])
    yield _counter("ull_messages_malformed", "messages of a wrong shape or version", io["malformed"])
    yield _gauge("ull_endpoints_unreachable", "sockets whose file is not the daemon's", io["unreachable"])


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)


def _counters(name: str, meaning: str, label: str, values: Mapping[str, Any]) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family
