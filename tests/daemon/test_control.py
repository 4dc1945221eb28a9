"""The control plane with an engine that fails on purpose: whatever happens, one answer and the next request served."""

import os
import pickle
import threading
from pathlib import Path

import msgspec
import pytest

from control_rig import LONG, Harness
from ull import _native, wire
from ull.daemon.control import IoMessage
from ull.daemon.refusals import BURST
from ull.errors import Busy


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def ended(request_id: int, **times: int) -> bytes:
    """The io thread's record of a finished request."""
    usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2}
    fields = {
        "identity": b"me",
        "id": request_id,
        "finish_reason": "stop",
        "usage": usage,
        "timeline": times,
        "seed": 3,
    }
    rounds = {"rounds": 1, "drafted_tokens": 3, "accepted_tokens": 1, "tokens_per_round": 2.0}
    speculation = rounds | {"by_drafter": {"suffix": 1}, "accepted_by_depth": [1]}
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
        harness.send_frames(IoMessage.MALFORMED, b"me", b"frame count")
        harness.send_frames(IoMessage.MALFORMED, b"me", b"version")
        codes = [(await harness.reply()).code for _ in range(2)]  # type: ignore[union-attr]
        assert codes == ["bad_frame", "bad_version"]
        harness.send_frames(IoMessage.ENDED, b"\xc1")
        harness.send_frames(IoMessage.REQUEST, b"me")
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
        harness.send_frames(IoMessage.ENDED, ended(1))
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
    assert harness.plane.metrics.speculation.by_drafter == {"suffix": 1}


def test_a_cancel_that_meets_a_prompt_being_tokenized(harness: Harness) -> None:
    """The request is over at once: it never comes to the engine, and its id may be used again."""
    started, go = hold_tokenizing(harness)

    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt=LONG, seed=3))
        await harness.until(started.is_set)
        harness.send(wire.Cancel(id=1))
        done, ack = await harness.reply(), await harness.reply()
        assert ack == wire.Ack(id=1, known=True)
        assert isinstance(done, wire.Done) and (done.finish_reason, done.usage.prompt_tokens) == ("cancelled", 0)
        assert harness.plane.live == 0 and harness.engine.cancelled == []
        harness.send(wire.Generate(id=1, prompt="x"))
        go.set()
        await harness.until(lambda: harness.engine.submitted == [(b"me", 1)])
        await harness.until(lambda: not harness.plane._preparation._jobs)
        assert harness.engine.submitted == [(b"me", 1)]

    harness.run(body)
    (line,) = harness.events("request")
    assert (line["finish"], line["seed"]) == ("cancelled", 3)
    assert harness.plane.metrics.accepted == 2


def test_a_client_that_has_hung_up_is_worked_for_no_longer(harness: Harness) -> None:
    """What it has running, and what was still being tokenized; nobody else's."""

    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt="x"))
        harness.send(wire.Generate(id=2, prompt="x"), identity=b"you")
        harness.send(wire.Generate(id=3, prompt=LONG))
        harness.send_frames(IoMessage.GONE, b"me")
        await harness.until(lambda: harness.engine.cancelled == [(b"me", 1)])
        await harness.until(lambda: harness.plane.live == 2)  # the one that ends, and the other client's
        assert (b"me", 3) not in harness.engine.submitted

    harness.run(body)


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


@pytest.mark.parametrize("frame", range(5))
def test_memory_that_fails_in_the_middle_of_a_message_costs_no_message(harness: Harness, frame: int) -> None:
    async def body() -> None:
        harness.fail_receives([None] * frame + [MemoryError()] * 3)
        for request_id in (1, 2):
            harness.send(wire.Health(id=request_id))
            assert isinstance(reply := await harness.reply(), wire.HealthReply) and reply.id == request_id
        assert harness.plane.failure is None

    harness.run(body)


def test_memory_that_fails_for_good_is_a_failure_of_the_control_plane(harness: Harness) -> None:
    async def body() -> None:
        harness.fail_receives([MemoryError()] * 10_000)
        harness.send(wire.Health(id=1))
        await harness.until(lambda: harness.plane.failure is not None)
        assert harness.plane.failure == "out of memory"

    harness.run(body)


def test_a_receive_that_fails_otherwise_is_a_failure_of_the_control_plane(harness: Harness) -> None:
    async def body() -> None:
        harness.fail_receives([RuntimeError("odd")])
        harness.send(wire.Health(id=1))
        await harness.until(lambda: harness.plane.failure == "RuntimeError: odd")

    harness.run(body)


def test_memory_that_fails_in_a_request_is_answered(harness: Harness) -> None:
    async def body() -> None:
        harness.engine.failure = MemoryError()
        harness.send(wire.Generate(id=1, prompt="x"))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and (reply.id, reply.code) == (1, "internal")
        harness.engine.failure = None
        harness.send(wire.Generate(id=1, prompt="x"))
        await harness.until(lambda: harness.plane.live == 1)

    harness.run(body)


def test_an_end_that_is_lost_is_a_failure_of_the_control_plane(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(_: object) -> wire.Ended:
        raise MemoryError

    async def body() -> None:
        monkeypatch.setattr(wire, "decode_ended", decode)
        harness.send_frames(IoMessage.ENDED, ended(1))
        await harness.until(lambda: harness.plane.failure == "out of memory")

    harness.run(body)


def test_a_flood_of_refusals_is_counted_in_the_log_not_written_out(harness: Harness) -> None:
    async def body() -> None:
        await harness.refuse(1000)
        stats = harness.send(wire.Stats(id=1)) or await harness.reply()
        assert isinstance(stats, wire.StatsReply) and stats.requests["refused"] == {"bad_request": 1000}
        control = stats.threads["control"]
        assert stats.threads["engine"] == {"cycles": 3}
        assert control["cycles"] > 0 and control["working_ns"] >= control["longest_ns"] > 0
        assert stats.log == {"dropped": 0}

    harness.run(body)
    lines, summaries = harness.events("refused"), harness.events("refusals")
    assert BURST <= len(lines) < 1000
    assert len(lines) + sum(summary["count"] for summary in summaries) == 1000
    assert summaries[-1]["codes"].startswith("bad_request:")


def test_a_summary_of_refusals_comes_by_itself(harness: Harness) -> None:
    async def body() -> None:
        await harness.refuse(BURST + 200)
        await harness.until(lambda: len(harness.events("refusals")) >= 1)

    harness.run(body)


def test_the_watchdog_s_question_is_answered_until_the_end(harness: Harness) -> None:
    async def body() -> None:
        await harness.until(lambda: harness.engine.beats == 1)  # watched from now on
        os.eventfd_write(harness.engine.control_call, 1)
        await harness.until(lambda: harness.engine.beats == 2)
        harness.engine.status = "failed"
        assert not harness.plane.changed.is_set()
        os.eventfd_write(harness.engine.control_call, 1)
        await harness.until(lambda: harness.plane.changed.is_set())

    harness.run(body)
    assert harness.engine.beats == 0


def test_the_last_end_and_a_failure_are_told(harness: Harness) -> None:
    async def body() -> None:
        for request_id in (1, 2):
            harness.send(wire.Generate(id=request_id, prompt="x"))
        await harness.until(lambda: harness.plane.live == 2)
        harness.send_frames(IoMessage.ENDED, ended(1))
        await harness.until(lambda: harness.plane.live == 1)
        assert not harness.plane.changed.is_set()
        harness.send_frames(IoMessage.ENDED, ended(2))
        await harness.until(lambda: harness.plane.changed.is_set())
        harness.plane.changed.clear()
        harness.send(wire.Generate(id=1, prompt="y " * 2 * 4096))  # refused while it is tokenized
        await harness.reply()
        await harness.until(lambda: harness.plane.changed.is_set())

    harness.run(body)


# ---- turns ---------------------------------------------------------------------------------------------------------


def test_busy_says_when_to_try_again(harness: Harness) -> None:
    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt="x"))
        harness.send(wire.Generate(id=2, prompt="x"))
        await harness.until(lambda: harness.plane.live == 2)
        full = harness.engine.failure = _native.QueueFull("no room")
        full.queue_length = 7
        harness.send(wire.Generate(id=3, prompt="x"))
        first = await harness.reply()
        harness.send_frames(IoMessage.ENDED, ended(1, started_ns=1, done_ns=3_000_000_001))
        await harness.until(lambda: harness.plane.live == 1)
        harness.send(wire.Generate(id=4, prompt="x"))
        second = await harness.reply()
        assert isinstance(first, wire.Error) and isinstance(second, wire.Error)
        assert (first.code, first.message, first.retry_after_ms) == ("busy", "no room", 100)  # nothing is known yet
        assert second.retry_after_ms == 3000  # as long as a request takes
        assert first.queue_length == second.queue_length == 7
        full.expected_ns = 41_000_000  # what the engine says counts more
        harness.send(wire.Generate(id=5, prompt="x"))
        third = await harness.reply()
        assert isinstance(third, wire.Error) and third.retry_after_ms == 41
        busy = wire.error_of(second)
        assert isinstance(busy, Busy) and busy.retry_after == 3.0
        for same in (busy.copy(), pickle.loads(pickle.dumps(busy))):
            assert isinstance(same, Busy) and (same.message, same.retry_after) == ("no room", 3.0)

    harness.run(body)


def test_stats_asked_for_all_the_time_are_packed_once(harness: Harness) -> None:
    async def ask() -> wire.StatsReply:
        harness.send(wire.Stats(id=7))
        stats = await harness.reply()
        assert isinstance(stats, wire.StatsReply) and stats.id == 7
        return stats

    async def body() -> None:
        looks = {(await ask()).engine["looks"] for _ in range(200)}
        assert len(looks) < 200
        before = await ask()
        harness.send(wire.Generate(id=1, prompt="x"))
        after = await ask()  # whoever has changed something sees it
        assert after.requests["accepted"] == before.requests["accepted"] + 1
        harness.send(wire.Info(id=8))
        info = await harness.reply()
        assert isinstance(info, wire.InfoReply) and info.limits["context"] == 4096

    harness.run(body)


def hold_tokenizing(harness: Harness) -> tuple[threading.Event, threading.Event]:
    """Has the workers wait with each prompt. Returns what is set once one has begun, and what lets all go on."""
    started, go = threading.Event(), threading.Event()

    def tokenize(request: wire.Generate, held: int) -> list[int]:
        started.set()
        assert go.wait(20)
        return [1]

    harness.plane._admission.prompt_ids = tokenize  # type: ignore[method-assign]
    return started, go


def test_long_prompts_of_one_client_leave_room_for_another_s(harness: Harness) -> None:
    started, go = hold_tokenizing(harness)

    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt=LONG))
        await harness.until(started.is_set)
        harness.send(wire.Generate(id=2, prompt=LONG))
        refused = await harness.reply()
        assert isinstance(refused, wire.Error) and (refused.id, refused.code) == (2, "busy")
        assert refused.message == "1 long prompts or grammars of this client are being read" and refused.retry_after_ms
        harness.send(wire.Generate(id=1, prompt=LONG), identity=b"other")
        await harness.until(lambda: harness.plane.live == 2)
        harness.send(wire.Generate(id=1, prompt=LONG), identity=b"third")  # two are all that there may be
        await harness.until(lambda: harness.plane.metrics.refused["busy"] == 2)
        go.set()
        await harness.until(lambda: len(harness.engine.submitted) == 2)
        assert not harness.plane._preparation._jobs

    harness.run(body)


def test_a_client_may_have_its_share_of_long_prompts(tmp_path: Path) -> None:
    harness = Harness(tmp_path, queue_depth=4)
    harness.engine.client_share = 3  # more than half of the queue
    _, go = hold_tokenizing(harness)

    async def body() -> None:
        for number in range(1, 5):
            harness.send(wire.Generate(id=number, prompt=LONG))
        refused = await harness.reply()
        assert isinstance(refused, wire.Error) and (refused.id, refused.code) == (4, "busy")
        assert refused.message == "3 long prompts or grammars of this client are being read"
        go.set()
        await harness.until(lambda: len(harness.engine.submitted) == 3)

    harness.run(body)


def test_draining_refuses_a_prompt_that_is_being_tokenized(harness: Harness) -> None:
    started, go = hold_tokenizing(harness)

    async def body() -> None:
        harness.send(wire.Generate(id=1, prompt=LONG))
        await harness.until(started.is_set)
        harness.plane.draining = True
        go.set()
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and reply.code == "draining"
        assert harness.engine.submitted == [] and harness.plane.live == 0

    harness.run(body)
