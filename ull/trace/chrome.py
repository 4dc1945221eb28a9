"""A trace as Chrome's and Perfetto's JSON: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Open it at https://ui.perfetto.dev. A row for each thread of the daemon and for each client; a request is a span with
its stages below it.
"""

from __future__ import annotations

from typing import Any

from ull.trace.collect import ClientStamps, Kind, Record, Trace

_DAEMON, _CLIENTS = 1, 2
_ENGINE, _IO = 1, 2
_NAMES = {Kind.PREFILL: "prefill", Kind.ROUND: "round", Kind.SCORE: "score", Kind.FRAME: "frame"}


def chrome_json(trace: Trace) -> dict[str, Any]:
    """The trace; times are microseconds from its first stamp on."""
    events: list[dict[str, Any]] = [
        _name("process_name", _DAEMON, 0, "ulld"),
        _name("thread_name", _DAEMON, _ENGINE, "engine thread"),
        _name("thread_name", _DAEMON, _IO, "io thread"),
    ]
    if trace.clients:
        events.append(_name("process_name", _CLIENTS, 0, "clients"))
    origin = first_ns(trace)
    for record in trace.records:
        events.append(_step(record, origin))
    for number, request in enumerate(trace.requests):
        times, row = request.timeline, 100 + number
        label = f"request {request.request} of {request.peer}"
        events.append(_name("thread_name", _DAEMON, row, label))
        arguments = {
            "finish": request.finish_reason,
            "prompt": request.usage.prompt_tokens,
            "cached": request.usage.cached_tokens,
            "completion": request.usage.completion_tokens,
        }
        events.append(_span(label, _DAEMON, row, times.received_ns, times.done_ns, origin, arguments))
        for name, begin_ns, end_ns in times.stages():
            events.append(_span(name, _DAEMON, row, begin_ns, end_ns, origin, {}))
    for number, stamps in enumerate(trace.clients):
        events += _client_events(stamps, number + 1, origin)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def first_ns(trace: Trace) -> int:
    """The earliest stamp; 0 without any."""
    stamps = [record.begin_ns for record in trace.records]
    stamps += [request.timeline.received_ns for request in trace.requests]
    stamps += [client.sent_ns for client in trace.clients]
    return min(stamps, default=0)


def _client_events(stamps: ClientStamps, row: int, origin: int) -> list[dict[str, Any]]:
    last = stamps.received[-1][0] if stamps.received else stamps.sent_ns
    events = [
        _name("thread_name", _CLIENTS, row, f"client of request {stamps.request}"),
        _span("request", _CLIENTS, row, stamps.sent_ns, last, origin, {}),
        _instant("send", _CLIENTS, row, stamps.sent_ns, origin, {}),
    ]
    return events + [_instant("receive", _CLIENTS, row, at, origin, {"tokens": count}) for at, count in stamps.received]


def _step(record: Record, origin: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"request": record.request, "tokens": record.count}
    if record.kind is Kind.ROUND:
        arguments |= {"drafter": record.drafter, "tree": record.tree, "accepted": record.accepted}
    thread = _IO if record.kind is Kind.FRAME else _ENGINE
    return _span(_NAMES[record.kind], _DAEMON, thread, record.begin_ns, record.end_ns, origin, arguments)


def _span(
    name: str, process: int, row: int, begin_ns: int, end_ns: int, origin: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": (begin_ns - origin) / 1000, "dur": max(0, end_ns - begin_ns) / 1000}
    return {"name": name, "ph": "X", "pid": process, "tid": row, **times, "args": arguments}


def _instant(name: str, process: int, row: int, at_ns: int, origin: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "i",
        "s": "t",
        "pid": process,
        "tid": row,
        "ts": (at_ns - origin) / 1000,
        "args": arguments,
    }


def _name(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
