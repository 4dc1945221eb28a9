"""The control plane: everything about a request before its first token and after its last. One thread, never waits.

The io thread hands over what clients send (kinds R, B) and how accepted requests ended (D); replies and the
engine's queue are the way back. Tokens never pass here.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from ull import _native, wire
from ull.admission import Admission
from ull.errors import Busy, Draining, RequestError
from ull.log import Log
from ull.metrics import Metrics, inter_token_ns
from ull.reader import SocketReader

# A prompt of this many characters is tokenized in the event loop's thread (about a millisecond); a longer one in a
# worker, where the tokenizer runs without the GIL.
INLINE_CHARACTERS = 1024
_TURN_NS = 2_000_000  # spent on the io thread's messages before other events have their turn
_WORKERS = 2


class EngineLike(Protocol):
    """What the control plane needs of `_native.Engine`."""

    def submit(self, identity: bytes, request_id: int, tokens: Any, params: dict[str, Any]) -> int: ...

    def cancel(self, identity: bytes, request_id: int) -> bool: ...

    def health(self) -> str: ...

    def stats(self) -> dict[str, Any]: ...


class IoLike(Protocol):
    """What the control plane needs of `_native.Io`."""

    def stats(self) -> dict[str, Any]: ...


class ControlPlane:
    """Answers clients' messages. `socket` is the PAIR whose other end the io thread holds.

    `engine_summary` and `executor_summary` are what `info` reports.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        engine: EngineLike,
        io: IoLike,
        admission: Admission,
        log: Log,
        *,
        engine_summary: dict[str, Any],
        executor_summary: dict[str, Any],
        queue_depth: int,
    ) -> None:
        self.metrics = Metrics()
        self.draining = False
        self._socket = socket
        self._engine = engine
        self._io = io
        self._admission = admission
        self._log = log
        self._info = (engine_summary, executor_summary)
        self._queue_depth = queue_depth
        self._started_ns = time.monotonic_ns()
        self._live: set[tuple[bytes, int]] = set()  # submitted, not yet ended
        self._preparing: dict[tuple[bytes, int], bool] = {}  # being tokenized -> cancelled meanwhile
        self._workers = ThreadPoolExecutor(_WORKERS, "ull-tokenize")
        self._reader: SocketReader | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> int:
        """Accepted requests that have not ended, and requests that are being tokenized."""
        return len(self._live) + len(self._preparing)

    def start(self) -> None:
        """Begins to serve, in the running event loop."""
        self._reader = SocketReader(asyncio.get_running_loop(), self._socket, self._drain_socket)

    def close(self) -> None:
        """Stops serving."""
        if self._reader is not None:
            self._reader.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def cancel_all(self) -> None:
        """Asks the engine to end everything that is still running."""
        for identity, request_id in self._live:
            self._engine.cancel(identity, request_id)

    def health(self) -> str:
        """ "ok" | "draining" | "stalled" | "failed"; a fault of the engine outranks draining."""
        status = self._engine.health()
        return "draining" if status == "ok" and self.draining else status

    def _drain_socket(self) -> bool:
        end_ns = time.monotonic_ns() + _TURN_NS
        while time.monotonic_ns() < end_ns:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._take(frames)
        return True

    def _take(self, frames: list[bytes]) -> None:
        """One message of the io thread. No exception may leave: one client's message must not stop the others'."""
        kind, rest = frames[0], frames[1:]
        try:
            if kind == b"R":
                identity, payload, received = rest
                self._request(identity, payload, int.from_bytes(received, "little"))
            elif kind == b"B":
                identity, reason = rest
                self._malformed(identity, reason.decode())
            elif kind == b"D":
                self._ended(wire.decode_ended(rest[0]))
        except Exception as error:
            self._log.error("internal", kind=kind.decode(errors="replace"), error=f"{type(error).__name__}: {error}")

    def _request(self, identity: bytes, payload: bytes, received_ns: int) -> None:
        request_id: int | None = None
        try:
            request = wire.decode_request(payload)
            request_id = request.id
            self._dispatch(identity, request, received_ns)
        except wire.WireError as error:
            self._refuse(identity, error.request_id, error)
        except RequestError as error:
            self._refuse(identity, request_id, error)
        except Exception as error:
            self._log.error("internal", id=request_id, error=f"{type(error).__name__}: {error}")
            self._refuse(
                identity, request_id, RequestError("internal", "the daemon failed on this request; see its log")
            )

    def _dispatch(self, identity: bytes, request: wire.Request, received_ns: int) -> None:
        if isinstance(request, wire.Generate):
            self._generate(identity, request, received_ns)
        elif isinstance(request, wire.Cancel):
            self._reply(identity, wire.Ack(id=request.id, known=self._cancel(identity, request.id)))
        elif isinstance(request, wire.Health):
            uptime_ns = time.monotonic_ns() - self._started_ns
            queue_length = int(self._engine.stats()["queue_length"])
            self._reply(
                identity,
                wire.HealthReply(id=request.id, status=self.health(), uptime_ns=uptime_ns, queue_length=queue_length),
            )
        elif isinstance(request, wire.Info):
            engine, executor = self._info
            limits = {name: getattr(self._admission.limits, name) for name in self._admission.limits.__struct_fields__}
            self._reply(identity, wire.InfoReply(id=request.id, engine=engine, executor=executor, limits=limits))
        else:
            self._reply(
                identity,
                wire.StatsReply(
                    id=request.id,
                    requests=self.metrics.requests(),
                    latency=self.metrics.latency(),
                    engine=self._engine.stats(),
                    io=self._io.stats(),
                    speculation=msgspec.to_builtins(self.metrics.speculation) | self._costs(),
                ),
            )

    def _costs(self) -> dict[str, Any]:
        """What the executor measured at warm-up: ns by tokens verified at once, and by drafter per proposed token."""
        _, executor = self._info
        return {name: executor.get(name, {}) for name in ("verify_ns", "draft_ns")}

    def _generate(self, identity: bytes, request: wire.Generate, received_ns: int) -> None:
        key = (identity, request.id)
        if self.draining:
            raise Draining()
        if key in self._live or key in self._preparing:
            raise RequestError("duplicate_id", f"request {request.id} of this client is still running", "id")
        self._admission.check(request)
        if self._admission.prompt_size(request) <= INLINE_CHARACTERS:
            self._submit(identity, request, self._admission.prompt_ids(request), received_ns)
            return
        if len(self._preparing) >= self._queue_depth:
            raise Busy()
        self._preparing[key] = False
        task = asyncio.ensure_future(self._prepare(identity, request, received_ns))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, identity: bytes, request: wire.Generate, received_ns: int) -> None:
        """Tokenizes a long prompt in a worker, then submits it; a cancel that came meanwhile follows it."""
        key = (identity, request.id)
        cancelled = False
        try:
            loop = asyncio.get_running_loop()
            try:
                ids = await loop.run_in_executor(self._workers, self._admission.prompt_ids, request)
            finally:
                cancelled = self._preparing.pop(key)
            if self.draining:
                raise Draining()
            self._submit(identity, request, ids, received_ns)
        except RequestError as error:
            self._refuse(identity, request.id, error)
            return
        except Exception as error:
            self._log.error("internal", id=request.id, error=f"{type(error).__name__}: {error}")
            self._refuse(
                identity, request.id, RequestError("internal", "the daemon failed on this request; see its log")
            )
            return
        if cancelled:
            self._engine.cancel(identity, request.id)

    def _submit(self, identity: bytes, request: wire.Generate, ids: list[int], received_ns: int) -> None:
        params = self._admission.parameters(request, received_ns, time.monotonic_ns())
        try:
            self._engine.submit(identity, request.id, np.asarray(ids, np.int32), params)
        except _native.QueueFull:
            raise Busy() from None
        except _native.InvalidRequest as error:  # a limit of the engine that admission does not know
            raise RequestError("bad_request", str(error), error.field) from None
        except _native.EngineClosed as error:
            raise RequestError("internal", f"the engine takes no requests: {error}") from None
        self._live.add((identity, request.id))
        self.metrics.accepted += 1

    def _cancel(self, identity: bytes, request_id: int) -> bool:
        key = (identity, request_id)
        if key in self._preparing:
            self._preparing[key] = True
            return True
        return self._engine.cancel(identity, request_id)

    def _malformed(self, identity: bytes, reason: str) -> None:
        code = "bad_version" if "version" in reason else "bad_frame"
        expected = f"send two frames, {wire.VERSION.decode()} and a msgpack map"
        self._refuse(identity, None, RequestError(code, f"{reason}; {expected}"))

    def _refuse(self, identity: bytes, request_id: int | None, error: RequestError) -> None:
        self.metrics.refused[error.code] += 1
        self._log.info(
            "refused", client=identity.hex(), id=request_id, code=error.code, field=error.field, message=error.message
        )
        self._reply(identity, wire.Error(id=request_id, code=error.code, message=error.message, field=error.field))

    def _reply(self, identity: bytes, message: wire.Reply) -> None:
        self._socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        if self._reader is not None:
            self._reader.again()  # a send may swallow the edge that announces the next message

    def _ended(self, record: wire.Ended) -> None:
        self._live.discard((record.identity, record.id))
        self.metrics.ended(record)
        times = record.timeline
        gap = inter_token_ns(record)
        self._log.info(
            "request",
            client=record.identity.hex(),
            id=record.id,
            finish=record.finish_reason,
            prompt=record.usage.prompt_tokens,
            cached=record.usage.cached_tokens,
            completion=record.usage.completion_tokens,
            admit_ms=_milliseconds(times.received_ns, times.admitted_ns),
            queue_ms=_milliseconds(times.admitted_ns, times.started_ns),
            prefill_ms=_milliseconds(times.started_ns, times.prefilled_ns),
            ttft_ms=_milliseconds(times.received_ns, times.first_token_ns),
            itl_us=None if gap is None else gap / 1000,
            tokens_per_round=record.speculation.tokens_per_round or None,
            total_ms=_milliseconds(times.received_ns, times.done_ns),
            seed=record.seed,
            delivered=record.delivered,
            connection=record.client,
            error=None if record.error is None else f"{record.error.code}: {record.error.message}",
        )


def _milliseconds(start_ns: int, end_ns: int) -> float | None:
    """The time between two stamps; None if either did not happen."""
    return (end_ns - start_ns) / 1e6 if start_ns and end_ns else None
