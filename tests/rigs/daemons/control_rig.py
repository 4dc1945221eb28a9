"""The control plane on an engine that fails on purpose, with the test at the io thread's end of the socket."""

import asyncio
import contextlib
import io
import json
import os
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from checkpoints import write_tokenizer
from ull import wire
from ull.daemon.admission import Admission, Limits
from ull.daemon.config import SessionsConfig
from ull.daemon.control import ControlPlane, IoMessage
from ull.daemon.turns import INLINE_CHARACTERS
from ull.log import Log
from ull.socket_reader import MessageReceiver
from ull.text.tokenizer import Tokenizer

LONG = "x " * INLINE_CHARACTERS  # tokenized in a worker


class FakeEngine:
    """Accepts everything unless `failure` is set; remembers what it was given."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.status = "ok"
        self.submitted: list[tuple[bytes, int]] = []
        self.cancelled: list[tuple[bytes, int]] = []
        self.committed: list[tuple[bytes, int]] = []
        self.withdrawn: list[tuple[bytes, int]] = []
        self.unpinned: list[int] = []
        self.tokens: list[list[int]] = []  # of what was submitted, ...
        self.params: list[dict[str, Any]] = []  # ... and how
        self.control_call = os.eventfd(0, os.EFD_NONBLOCK)
        self.beats = 0
        self.looks = 0
        self.client_share = 1

    def beat(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.control_call)
        self.beats += 1

    def end_beat(self) -> None:
        self.beats = 0

    def submit(self, identity: bytes, request_id: int, tokens: Any, params: dict[str, Any]) -> int:
        if self.failure is not None:
            raise self.failure
        self.submitted.append((identity, request_id))
        self.tokens.append(array("i", tokens).tolist())
        self.params.append(params)
        return len(self.submitted)

    def cancel(self, identity: bytes, request_id: int, shed: bool = False) -> bool:
        self.cancelled.append((identity, request_id))
        return (identity, request_id) in self.submitted

    def withdraw(self, identity: bytes, request_id: int) -> bool:
        self.withdrawn.append((identity, request_id))
        return (identity, request_id) in self.submitted

    def commit(self, identity: bytes, request_id: int) -> bool:
        self.committed.append((identity, request_id))
        return (identity, request_id) in self.submitted

    def unpin(self, pin: int) -> None:
        self.unpinned.append(pin)

    def health(self) -> str:
        return self.status

    @property
    def queue_length(self) -> int:
        return len(self.submitted)

    def stats(self) -> dict[str, Any]:
        self.looks += 1
        return {"looks": self.looks}

    def threads(self) -> dict[str, dict[str, int]]:
        return {"engine": {"cycles": 3}}


class Harness:
    """The io thread's end of the control socket."""

    def __init__(self, directory: Path, queue_depth: int = 2, sessions: SessionsConfig | None = None) -> None:
        write_tokenizer(directory)
        self.engine = FakeEngine()
        self.output = io.StringIO()
        self._context = zmq.Context()
        self._io = self._context.socket(zmq.PAIR)
        self._io.bind("inproc://control")
        self._control = self._context.socket(zmq.PAIR)
        self._control.connect("inproc://control")
        limits = Limits(
            context=4096,
            vocabulary=320,
            default_max_tokens=8,
            max_tokens=200,
            max_pinned_sessions=8,
            max_pinned_tokens=1024,
        )
        self.plane = ControlPlane(
            self._control,
            self.engine,
            self.engine,
            Admission(Tokenizer(directory), limits, [1]),
            Log(form="json", stream=self.output),
            engine_summary={},
            executor_summary={},
            queue_depth=queue_depth,
            sessions=SessionsConfig() if sessions is None else sessions,
        )

    def send(self, request: wire.Request, identity: bytes = b"me") -> None:
        self._io.send_multipart([IoMessage.REQUEST, identity, wire.encode(request), (5).to_bytes(8, "little")])

    def fail_receives(self, failures: list[Exception | None]) -> None:
        """The control plane's next receives of a frame fail as FailingSocket says."""
        failing: Any = FailingSocket(self._control, failures)
        self.plane._receiver = MessageReceiver(failing)

    def end(
        self,
        request_id: int,
        completion: Sequence[int] = (),
        reason: str = "stop",
        record: Mapping[str, Any] | None = None,
        **usage: int,
    ) -> None:
        """The io thread says that the engine has ended a request of "me". record: what else its record has."""
        counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": len(completion), **usage}
        end = {"identity": b"me", "id": request_id, "finish_reason": reason, "usage": counts, "timeline": {}}
        ids = array("i", completion).tobytes()
        self.send_frames(IoMessage.ENDED, msgspec.msgpack.encode({**end, "seed": 3, **(record or {})}), ids)

    def send_frames(self, *frames: bytes) -> None:
        self._io.send_multipart(frames)

    async def reply(self) -> wire.Reply:
        """The next reply; fails after ten seconds."""
        for _ in range(2000):
            try:
                identity, payload = self._io.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.005)
                continue
            assert identity == b"me"
            return wire.decode_reply(payload)
        raise AssertionError("no reply")

    async def refuse(self, count: int) -> None:
        """Sends so many requests at once, and waits for the answer of each."""
        for request_id in range(count):
            self.send(wire.Generate(id=request_id, prompt=""))
        for _ in range(count):
            await self.reply()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets the control plane work until `condition` holds; fails after ten seconds."""
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("the condition never held")

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.output.getvalue().splitlines()]
        return [event for event in events if event["event"] == kind]

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            self.plane.start()
            try:
                await body()
            finally:
                self.plane.close()

        try:
            asyncio.run(main())
        finally:
            self._io.close(0)
            self._control.close(0)
            self._context.term()
            os.close(self.engine.control_call)


class FailingSocket:
    """A PAIR whose receives fail as `failures` says, one entry per frame: an exception to raise, or None."""

    def __init__(self, socket: zmq.Socket[bytes], failures: list[Exception | None]) -> None:
        self._socket = socket
        self._failures = failures

    def recv(self, flags: int, copy: bool) -> zmq.Frame:
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        return self._socket.recv(flags, copy=copy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
