"""Reads a daemon's trace, and puts together what belongs to a request."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from ull import wire
from ull.client import Client

_RECORD = struct.Struct("<qqQQBBHHH")
assert _RECORD.size == wire.TRACE_BYTES


class Kind(IntEnum):
    """What a record is of: native/sync/trace_ring.h has the same."""

    PREFILL = 0
    ROUND = 1
    SCORE = 2
    FRAME = 3


@dataclass(frozen=True)
class Record:
    """A step of a request, or a frame of it. Times are nanoseconds of CLOCK_MONOTONIC on the daemon's machine."""

    begin_ns: int
    end_ns: int
    request: int
    connection: int
    kind: Kind
    drafter: str
    tree: int
    accepted: int
    count: int


@dataclass
class ClientStamps:
    """What the client saw of its own request, on the same machine's clock: when it was sent, when each frame came."""

    request: int
    sent_ns: int
    received: list[tuple[int, int]] = field(default_factory=list)  # when, and how many tokens


@dataclass
class Trace:
    """All that was read."""

    requests: list[wire.TracedRequest] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    clients: list[ClientStamps] = field(default_factory=list)


class Position:
    """How far a daemon's trace was read."""

    def __init__(self) -> None:
        self._steps = self._frames = self._requests = 0

    def skip(self, client: Client) -> int:
        """Goes to the present; returns the number of this client's connection. Raises UllError."""
        for reply in self._replies(client):
            connection = reply.connection
        return connection

    def read(self, client: Client, into: Trace) -> None:
        """Reads what has come since. Raises UllError."""
        for reply in self._replies(client):
            into.requests += reply.requests
            for data in (reply.steps, reply.frames):
                into.records += map(_record, _RECORD.iter_unpack(data))

    def _replies(self, client: Client) -> Iterator[wire.TraceReply]:
        more = True
        while more:
            reply = client.trace(self._steps, self._frames, self._requests)
            self._steps, self._frames, self._requests = reply.next_step, reply.next_frame, reply.next_request
            more = reply.more
            yield reply


def _record(fields: tuple[int, ...]) -> Record:
    begin, end, request, connection, kind, drafter, tree, accepted, count = fields
    # By number; the core's order (DrafterKind of native/executor/executor.h), held equal by a test.
    name = wire.DRAFTERS[drafter] if drafter < len(wire.DRAFTERS) else str(drafter)
    return Record(begin, end, request, connection, Kind(kind), name, tree, accepted, count)
