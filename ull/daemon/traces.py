"""What `trace` answers: the threads' records, as the core keeps them, and the requests that have ended lately."""

from __future__ import annotations

from collections import deque
from itertools import islice

from ull import wire
from ull.daemon.answers import EngineLike

MOST_RECORDS = 2048  # of each kind in one answer, so that it costs nobody their turn
MOST_REQUESTS = 64
_KEPT_REQUESTS = 1024


class Traces:
    """Of one engine. Used by the control plane's one thread."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._requests: deque[wire.TracedRequest] = deque(maxlen=_KEPT_REQUESTS)
        self._ended = 0  # requests so far

    def ended(self, record: wire.Ended, peer: str) -> None:
        """Keeps a request that has ended."""
        self._ended += 1
        self._requests.append(
            wire.TracedRequest(
                connection=connection_of(record.identity),
                request=record.id,
                peer=peer,
                finish_reason=record.finish_reason,
                usage=record.usage,
                timeline=record.timeline,
            )
        )

    def answer(self, request: wire.Trace, identity: bytes) -> wire.TraceReply:
        """The records from the numbers that were asked for on, a bounded number of them."""
        steps, next_step = self._engine.trace(False, request.steps, MOST_RECORDS)
        frames, next_frame = self._engine.trace(True, request.frames, MOST_RECORDS)
        oldest = self._ended - len(self._requests)
        first = min(max(request.requests, oldest), self._ended)
        requests = list(islice(self._requests, first - oldest, first - oldest + MOST_REQUESTS))
        next_request = first + len(requests)
        size = MOST_RECORDS * wire.TRACE_BYTES
        return wire.TraceReply(
            id=request.id,
            steps=steps,
            next_step=next_step,
            frames=frames,
            next_frame=next_frame,
            requests=requests,
            next_request=next_request,
            more=next_request < self._ended or len(steps) == size or len(frames) == size,
            connection=connection_of(identity),
        )


def connection_of(identity: bytes) -> int:
    """What the records have of a client's identity."""
    return int.from_bytes(identity[-8:], "big")
