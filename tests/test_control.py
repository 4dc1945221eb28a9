"""The control plane with an engine that fails on purpose: whatever happens, one answer and the next request served."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from checkpoints import write_tokenizer
from ull import _native, wire
from ull.admission import Admission, Limits
from ull.control import INLINE_CHARACTERS, ControlPlane
from ull.log import Log
from ull.tokenizer import Tokenizer

LONG = "x " * INLINE_CHARACTERS  # tokenized in a worker


class FakeEngine:
    """Accepts everything unless `failure` is set; remembers what it was given."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.status = "ok"
        self.submitted: list[tuple[bytes, int]] = []
        self.cancelled: list[tuple[bytes, int]] = []

    def submit(self, identity: bytes, request_id: int, tokens: Any, params: dict[str, Any]) -> int:
        if self.failure is not None:
            raise self.failure
        self.submitted.append((identity, request_id))
        return len(self.submitted)

    def cancel(self, identity: bytes, request_id: int) -> bool:
        self.cancelled.append((identity, request_id))
        return (identity, request_id) in self.submitted

    def health(self) -> str:
        return self.status

    def stats(self) -> dict[str, Any]:
        return {"queue_length": len(self.submitted)}


class Harness:
    """The io thread's end of the control socket."""

    def __init__(self, directory: Path) -> None:
        write_tokenizer(directory)
        self.engine = FakeEngine()
        self.output = io.StringIO()
        self._context = zmq.Context()
        self._io = self._context.socket(zmq.PAIR)
        self._io.bind("inproc://control")
        self._control = self._context.socket(zmq.PAIR)
        self._control.connect("inproc://control")
        limits = Limits(context=4096, vocabulary=320, default_max_tokens=8, max_tokens=100)
        self.plane = ControlPlane(
            self._control,
            self.engine,
            self.engine,
            Admission(Tokenizer(directory), limits, [1]),
            Log(form="json", stream=self.output),
            engine_summary={},
            executor_summary={},
            queue_depth=2,
        )

    def send(self, request: wire.Request, identity: bytes = b"me") -> None:
        self._io.send_multipart([b"R", identity, wire.encode(request), (5).to_bytes(8, "little")])

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

        asyncio.run(main())
        self._io.close(0)
        self._control.close(0)
        self._context.term()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def ended(request_id: int) -> bytes:
    """The io thread's record of a finished request."""
    usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2}
    fields = {"identity": b"me", "id": request_id, "finish_reason": "stop", "usage": usage, "timeline": {}, "seed": 3}
    rounds = {"rounds": 1, "drafted_tokens": 3, "accepted_tokens": 1, "tokens_per_round": 2.0}
    speculation = rounds | {"by_drafter": {"ngram": 1}, "accepted_by_depth": [1]}
    fields |= {"error": None, "delivered": True, "client": "ok", "speculation": speculation}
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("prompt", ["x", LONG], ids=["inline", "worker"])
@pytest.mark.parametrize(
    ("failure", "code", "field"),
    [
        (_native.QueueFull("full"), "busy", None),
        (_native.EngineClosed("stopped"), "internal", None),
        (RuntimeError("surprise"), "internal", None),
    ],
    ids=["full", "closed", "surprise"],
)
def test_submission_failures(harness: Harness, prompt: str, failure: Exception, code: str, field: str | None) -> None:
    async def body() -> None:
        harness.engine.failure = failure
        harness.send(wire.Generate(id=1, prompt=prompt))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error)
        assert (reply.id, reply.code, reply.field) == (1, code, field)
        assert "surprise" not in reply.message
        harness.engine.failure = None
        harness.send(wire.Generate(id=1, prompt="x"))
        await harness.until(lambda: harness.engine.submitted == [(b"me", 1)])

    harness.run(body)
    assert [event["code"] for event in harness.events("refused")] == [code]
    assert bool(harness.events("internal")) == isinstance(failure, RuntimeError) * (type(failure) is RuntimeError)


def test_a_limit_that_only_the_engine_knows(harness: Harness) -> None:
    async def body() -> None:
        failure = _native.InvalidRequest("top_k: too odd")
        failure.field = "top_k"
        harness.engine.failure = failure
        harness.send(wire.Generate(id=1, prompt="x"))
        reply = await harness.reply()
        assert reply == wire.Error(id=1, code="bad_request", message="top_k: too odd", field="top_k")

    harness.run(body)


def test_malformed_messages_and_odd_records(harness: Harness) -> None:
    async def body() -> None:
        harness.send_frames(b"B", b"me", b"frame count")
        harness.send_frames(b"B", b"me", b"version")
        codes = [(await harness.reply()).code for _ in range(2)]  # type: ignore[union-attr]
        assert codes == ["bad_frame", "bad_version"]
        harness.send_frames(b"D", b"\xc1")
        harness.send_frames(b"R", b"me")
        harness.send_frames(b"?", b"me")
        harness.send(wire.Health(id=9))
        assert isinstance(await harness.reply(), wire.HealthReply)

    harness.run(body)
    assert len(harness.events("internal")) == 2


def test_a_request_is_live_until_its_record_comes(harness: Harness) -> None:
    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt="x"))
        await harness.until(lambda: harness.plane.live == 1)
        harness.send(wire.Generate(id=1, prompt="x"))
        assert (await harness.reply()).code == "duplicate_id"  # type: ignore[union-attr]
        harness.send_frames(b"D", ended(1))
        await harness.until(lambda: harness.plane.live == 0)
        harness.send(wire.Generate(id=1, prompt="x"))
        await harness.until(lambda: len(harness.engine.submitted) == 2)
        harness.plane.cancel_all()
        assert harness.engine.cancelled == [(b"me", 1)]

    harness.run(body)
    assert harness.plane.metrics.accepted == 2
    (line,) = harness.events("request")
    assert (line["client"], line["finish"], line["completion"], line["seed"]) == (b"me".hex(), "stop", 2, 3)
    assert line["tokens_per_round"] == 2.0
    assert harness.plane.metrics.speculation.by_drafter == {"ngram": 1}


def test_a_cancel_that_meets_a_prompt_being_tokenized(harness: Harness) -> None:
    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt=LONG))
        harness.send(wire.Cancel(id=1))
        assert await harness.reply() == wire.Ack(id=1, known=True)
        await harness.until(lambda: harness.engine.cancelled == [(b"me", 1)])
        assert harness.engine.submitted == [(b"me", 1)]

    harness.run(body)


def test_prompts_being_tokenized_are_bounded(harness: Harness) -> None:
    async def body() -> None:
        for request_id in range(6):
            harness.send(wire.Generate(id=request_id, prompt=LONG))
        await harness.until(lambda: len(harness.engine.submitted) + len(harness.events("refused")) == 6)
        for event in harness.events("refused"):
            assert event["code"] == "busy"

    harness.run(body)
    assert len(harness.engine.submitted) >= 2


def test_draining_refuses_what_is_new_and_what_was_being_tokenized(harness: Harness) -> None:
    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt=LONG))
        harness.send(wire.Health(id=2))
        health = await harness.reply()
        assert isinstance(health, wire.HealthReply) and health.status == "ok"
        harness.plane.draining = True
        harness.send(wire.Generate(id=3, prompt="x"))
        replies = [await harness.reply() for _ in range(2 - len(harness.engine.submitted))]
        assert all(isinstance(reply, wire.Error) and reply.code == "draining" for reply in replies)
        harness.send(wire.Health(id=4))
        health = await harness.reply()
        assert isinstance(health, wire.HealthReply) and health.status == "draining"
        harness.engine.status = "stalled"
        assert harness.plane.health() == "stalled"

    harness.run(body)
