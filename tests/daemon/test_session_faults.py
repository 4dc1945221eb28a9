"""Sessions on an engine that fails on purpose: what they hold then, and that nothing is left behind."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from control_rig import LONG, Harness
from ull import _native, wire
from ull.daemon.config import SessionsConfig
from ull.daemon.control import IoMessage
from ull.errors import DeadlineUnreachable, RequestError
from ull.wire import CloseSession, Generate, OpenSession, Rollback, Truncate


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    harness = Harness(tmp_path, queue_depth=8)
    harness.engine.client_share = 4
    return harness


async def opened(harness: Harness, session: int = 1, **fields: Any) -> None:
    """A session, open."""
    harness.send(OpenSession(id=900 + session, session=session, **fields))
    assert isinstance(await harness.reply(), wire.SessionReply)


async def filled(harness: Harness, session: int = 1, prompt: tuple[int, ...] = (5, 6), answer: Any = (7, 8, 9)) -> None:
    """A session that holds a prompt and its answer."""
    await opened(harness, session)
    harness.send(Generate(id=800 + session, session=session, token_ids=list(prompt)))
    await harness.until(lambda: (b"me", 800 + session) in harness.plane._turns)
    harness.end(800 + session, answer)
    await harness.until(lambda: (b"me", 800 + session) not in harness.plane._turns)


async def holds(harness: Harness, session: int = 1) -> int:
    """How many tokens a session holds."""
    harness.send(Rollback(id=700, session=session, tokens=0))
    reply = await harness.reply()
    assert isinstance(reply, wire.SessionReply), reply
    return reply.tokens


def test_what_the_engine_is_told(harness: Harness) -> None:
    async def body() -> None:
        await filled(harness)
        harness.send(Generate(id=1, session=1, token_ids=[4], priority="realtime", deadline_ms=20, hold=True))
        await harness.until(lambda: len(harness.engine.submitted) == 2)
        harness.send(Generate(id=2, token_ids=[4]))
        await harness.until(lambda: len(harness.engine.submitted) == 3)

    harness.run(body)
    assert harness.engine.tokens == [[5, 6], [5, 6, 7, 8, 9, 4], [4]]
    _, told, plain = harness.engine.params
    names = ("priority", "deadline_ns", "hold", "returns_tokens", "rolled_back_tokens", "pin")
    assert [told[name] for name in names] == ["realtime", 5 + 20_000_000, True, True, 0, 0]
    assert (plain["priority"], plain["deadline_ns"], plain["hold"]) == ("interactive", 0, False)
    assert "returns_tokens" not in plain


@pytest.mark.parametrize(
    ("failure", "code", "field"),
    [
        (_native.QueueFull("full"), "busy", None),
        (_native.EngineClosed("stopped"), "internal", None),
        (RuntimeError("surprise"), "internal", None),
        (MemoryError(), "internal", None),
    ],
    ids=["full", "closed", "surprise", "memory"],
)
@pytest.mark.parametrize("prompt", ["x", LONG], ids=["inline", "worker"])
def test_a_refused_turn_leaves_its_session_as_it_was(
    harness: Harness, failure: Exception, code: str, field: str | None, prompt: str
) -> None:
    async def body() -> None:
        await filled(harness)
        harness.engine.failure = failure
        harness.send(Generate(id=1, session=1, prompt=prompt))
        harness.send(Rollback(id=2, session=1, tokens=1))
        refused, rolled = await harness.reply(), await harness.reply()
        assert isinstance(refused, wire.Error) and (refused.id, refused.code, refused.field) == (1, code, field)
        assert rolled == wire.SessionReply(id=2, session=1, tokens=4)
        harness.engine.failure = None
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        await harness.until(lambda: harness.engine.tokens[-1] == [5, 6, 7, 8, 4])

    harness.run(body)


def test_a_turn_that_ends_with_an_error_leaves_its_session_as_it_was(harness: Harness) -> None:
    async def body() -> None:
        await filled(harness)
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        await harness.until(lambda: harness.plane.live == 1)
        harness.end(1, [3, 3], "error")
        assert await holds(harness) == 5
        harness.send(Truncate(id=2, session=1, tokens=1))  # its last answer is still the one before
        assert await harness.reply() == wire.SessionReply(id=2, session=1, tokens=3)

    harness.run(body)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "timeout", "deadline"])
def test_every_other_end_is_held(harness: Harness, reason: str) -> None:
    async def body() -> None:
        await opened(harness)
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        await harness.until(lambda: harness.plane.live == 1)
        harness.end(1, [3, 3], reason)
        assert await holds(harness) == 3

    harness.run(body)


def test_a_deadline_that_cannot_be_met_says_when_it_could(harness: Harness) -> None:
    async def body() -> None:
        late = harness.engine.failure = _native.DeadlineUnreachable("it would take 40 ms")
        late.expected_ns = 5 + 40_000_000  # received at 5
        harness.send(Generate(id=1, token_ids=[4], deadline_ms=20))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error)
        assert (reply.code, reply.field, reply.expected_ms) == ("deadline_unreachable", "deadline_ms", 40.0)
        error = wire.error_of(reply)
        assert isinstance(error, DeadlineUnreachable) and error.expected == 0.04

    harness.run(body)
    assert [line["code"] for line in harness.events("refused")] == ["deadline_unreachable"]


def test_what_waits_for_sessions_is_bounded_as_the_queue(harness: Harness) -> None:
    harness.engine.client_share = 2

    async def body() -> None:
        for session in (1, 2):
            await opened(harness, session)
            harness.send(Generate(id=session, session=session, token_ids=[4]))
        for request_id in (3, 4, 5):
            harness.send(Generate(id=request_id, session=1 + request_id % 2, token_ids=[4]))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and (reply.id, reply.code, reply.queue_length) == (5, "busy", 2)
        assert reply.message == "2 requests of this client wait for their sessions"
        harness.engine.client_share = 9
        for request_id in range(5, 12):
            harness.send(Generate(id=request_id, session=1 + request_id % 2, token_ids=[4]))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and (reply.id, reply.code) == (11, "busy")
        assert reply.message == "8 requests wait for their sessions"

    harness.run(body)


def test_a_surprise_in_one_message_holds_up_no_other(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        await filled(harness)
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        await harness.until(lambda: harness.plane.live == 1)
        for request_id in (2, 3):
            harness.send(Truncate(id=request_id, session=1, tokens=2))
        harness.send(Rollback(id=4, session=1, tokens=1))

        def fail(*_: object) -> None:
            raise RuntimeError("surprise")

        monkeypatch.setattr("ull.daemon.sessions.Session.truncate", fail)
        harness.end(1, [3, 3])
        replies = [await harness.reply() for _ in range(3)]
        assert [reply.code for reply in replies if isinstance(reply, wire.Error)] == ["internal"] * 2
        assert replies[-1] == wire.SessionReply(id=4, session=1, tokens=7)

    harness.run(body)
    assert len(harness.events("internal")) == 2


def test_what_is_tokenized_by_a_worker_keeps_its_place(harness: Harness) -> None:
    """A long prompt, a short one behind it; the long one's answer is what the short one goes on from."""
    go = threading.Event()
    encode = harness.plane._admission.prompt_ids

    def slow(request: wire.Prompted, held: int = 0) -> list[int]:
        if request.prompt == LONG:
            assert go.wait(20)
            return [1, 2]
        return encode(request, held)

    harness.plane._admission.prompt_ids = slow  # type: ignore[method-assign]

    async def body() -> None:
        await filled(harness)
        harness.send(Generate(id=1, session=1, prompt=LONG))
        harness.send(Generate(id=2, session=1, token_ids=[4]))
        harness.send(Generate(id=3, token_ids=[3]))  # another's conversation goes on
        await harness.until(lambda: harness.engine.submitted[-1] == (b"me", 3))
        go.set()
        await harness.until(lambda: harness.engine.submitted[-1] == (b"me", 1))
        harness.end(1, [11])
        await harness.until(lambda: harness.engine.submitted[-1] == (b"me", 2))
        assert harness.engine.tokens[-2:] == [[5, 6, 7, 8, 9, 1, 2], [5, 6, 7, 8, 9, 1, 2, 11, 4]]

    harness.run(body)


def test_a_held_answer_that_is_still_tokenized_is_dropped_as_any_other(harness: Harness) -> None:
    go = threading.Event()

    def wait(request: wire.Prompted, held: int = 0) -> list[int]:
        assert go.wait(20)
        return [1, 2]

    async def body() -> None:
        await filled(harness)
        harness.plane._admission.prompt_ids = wait  # type: ignore[method-assign]
        harness.send(Generate(id=1, session=1, prompt=LONG, hold=True))
        harness.send(Rollback(id=2, session=1, tokens=1))
        done, rolled = await harness.reply(), await harness.reply()
        assert isinstance(done, wire.Done) and (done.id, done.finish_reason) == (1, "cancelled")
        assert rolled == wire.SessionReply(id=2, session=1, tokens=4)
        harness.send(Generate(id=3, session=1, prompt=LONG, hold=True))
        harness.send(wire.Commit(id=4, request=3))
        assert await harness.reply() == wire.Ack(id=4, known=True)
        go.set()
        await harness.until(lambda: len(harness.engine.submitted) == 2)
        assert harness.engine.params[-1]["hold"] is False and harness.engine.committed == []

    harness.run(body)


def test_a_dropped_answer_that_ends_late_is_no_part_of_its_session(harness: Harness) -> None:
    async def body() -> None:
        await filled(harness)
        harness.send(Generate(id=1, session=1, token_ids=[4], hold=True))
        harness.send(Generate(id=2, session=1, token_ids=[3]))
        await harness.until(lambda: len(harness.engine.submitted) == 3)
        assert harness.engine.cancelled == [(b"me", 1)]
        assert harness.engine.tokens[-1] == [5, 6, 7, 8, 9, 3]
        harness.end(1, [12, 12], "cancelled")
        harness.end(2, [13])
        assert await holds(harness) == 7
        assert harness.plane.live == 0

    harness.run(body)


def test_an_answer_that_the_engine_holds_no_more_cannot_be_committed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        monkeypatch.setattr(harness.engine, "commit", lambda *_: False)
        harness.send(Generate(id=1, token_ids=[4], hold=True))
        harness.send(wire.Commit(id=2, request=1))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and (reply.code, reply.field) == ("not_held", "request")

    harness.run(body)


def test_draining_carries_out_what_changes_and_begins_nothing(harness: Harness) -> None:
    async def body() -> None:
        await filled(harness)
        await opened(harness, 2)
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        harness.send(Generate(id=2, session=1, token_ids=[4]))
        harness.send(Generate(id=3, session=2, token_ids=[4], hold=True))
        await harness.until(lambda: harness.plane.live == 3)
        harness.plane.changed.clear()
        harness.plane.draining = True
        for message in (OpenSession(id=4, session=3), wire.Fork(id=4, session=1, to=3), Generate(id=4, token_ids=[4])):
            harness.send(message)
            reply = await harness.reply()
            assert isinstance(reply, wire.Error) and reply.code == "draining"
        harness.send(wire.Commit(id=5, request=3))
        assert await harness.reply() == wire.Ack(id=5, known=True)
        harness.end(1, [3])
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and (reply.id, reply.code) == (2, "draining")
        harness.send(Rollback(id=6, session=1, tokens=7))
        assert await harness.reply() == wire.SessionReply(id=6, session=1, tokens=0)
        assert not harness.plane.changed.is_set()
        harness.end(3, [3])
        await harness.until(harness.plane.changed.is_set)

    harness.run(body)


def test_all_that_is_left_can_be_ended(harness: Harness) -> None:
    async def body() -> None:
        await filled(harness)
        for request_id, hold in ((1, False), (2, False), (3, True)):
            harness.send(Generate(id=request_id, session=1, token_ids=[4], hold=hold))
        await harness.until(lambda: harness.plane.live == 3)
        harness.plane.cancel_all()
        assert harness.engine.cancelled == [(b"me", 1)]
        dones = [await harness.reply() for _ in range(2)]
        assert [(done.id, done.finish_reason) for done in dones if isinstance(done, wire.Done)] == [
            (2, "cancelled"),
            (3, "cancelled"),
        ]
        assert all(done.error is not None and done.error.code == "draining" for done in dones)
        harness.end(1, [], "cancelled")
        await harness.until(lambda: harness.plane.live == 0)

    harness.run(body)


def test_a_client_that_has_hung_up_leaves_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path, queue_depth=8, sessions=SessionsConfig(total=2))
    go = threading.Event()

    async def body() -> None:
        await opened(harness, 1)
        await opened(harness, 2, pin=True)
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        harness.send(Generate(id=2, session=1, token_ids=[4]))
        harness.send(Rollback(id=3, session=1, tokens=1))
        harness.send(wire.Fork(id=4, session=9, to=10))
        assert isinstance(await harness.reply(), wire.Error)

        def wait(request: wire.Prompted, held: int = 0) -> list[int]:
            assert go.wait(20)
            return [1]

        harness.plane._admission.prompt_ids = wait  # type: ignore[method-assign]
        harness.send(Generate(id=5, session=2, prompt=LONG, hold=True))
        await harness.until(lambda: harness.plane.live == 3)
        harness.send_frames(IoMessage.GONE, b"me")
        await harness.until(lambda: harness.engine.cancelled == [(b"me", 1)])
        harness.end(1, [3], "cancelled")
        go.set()
        await harness.until(lambda: harness.plane.live == 0)
        turns = harness.plane._turns
        assert (list(turns._sessions), turns._sessions._clients, harness.plane.metrics.sessions) == ([], {}, 0)
        assert harness.engine.unpinned == [1]
        assert harness.engine.submitted == [(b"me", 1)]
        for done in (await harness.reply(), await harness.reply()):  # the io thread drops these
            assert isinstance(done, wire.Done) and done.finish_reason == "cancelled"
        await opened(harness, 1)
        await opened(harness, 2)

    harness.run(body)


# ---- pinned sessions ----------------------------------------------------------------------------------------------


def test_pinned_sessions_take_no_more_than_there_is(harness: Harness) -> None:
    """1024 tokens, in full pages: what a turn may yet make counts, until it has ended."""

    async def body() -> None:
        for session in (1, 2):
            await opened(harness, session, pin=True)
        await opened(harness, 3)
        harness.send(Generate(id=1, session=1, token_ids=[5] * 600, max_tokens=200))
        await harness.until(lambda: len(harness.engine.submitted) == 1)
        assert harness.engine.params[-1]["pin"] == 1
        harness.send(Generate(id=2, session=2, token_ids=[5] * 201, max_tokens=100))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and (reply.code, reply.field) == ("pins_full", "session")
        assert "320 tokens of this session and 832 of others" in reply.message and "room for 1024" in reply.message
        harness.send(Generate(id=3, session=3, token_ids=[5] * 2000))  # not pinned
        harness.end(1, [7] * 50, prompt_tokens=600)
        harness.send(Generate(id=2, session=2, token_ids=[5] * 201, max_tokens=100))
        await harness.until(lambda: len(harness.engine.submitted) == 3)
        assert harness.engine.params[-1]["pin"] == 2
        harness.send(CloseSession(id=4, session=1))
        assert await harness.reply() == wire.SessionReply(id=4, session=1, tokens=650)
        assert harness.engine.unpinned == [1]

    harness.run(body)


def test_a_turn_that_ends_behind_its_session_leaves_no_pin(harness: Harness) -> None:
    async def body() -> None:
        await opened(harness, 1, pin=True)
        harness.send(Generate(id=1, session=1, token_ids=[5], hold=True))
        harness.send(CloseSession(id=2, session=1))
        assert await harness.reply() == wire.SessionReply(id=2, session=1, tokens=0)
        harness.end(1, [7], "cancelled")
        await harness.until(lambda: harness.plane.live == 0)
        assert harness.engine.unpinned == [1, 1]

    harness.run(body)


# ---- long answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_long_answer_is_cut_by_a_worker_in_its_turn(harness: Harness, fails: bool) -> None:
    started, go = threading.Event(), threading.Event()

    def cut(prompt: list[int], answer: list[int], characters: int) -> list[int]:
        started.set()
        assert go.wait(20)
        if fails:
            raise RequestError("bad_request", "characters too many", "characters")
        return answer[:characters]

    harness.plane._admission.cut = cut  # type: ignore[method-assign]

    async def body() -> None:
        await filled(harness, answer=[7] * 2000)
        harness.send(Truncate(id=1, session=1, characters=3))
        harness.send(Rollback(id=2, session=1, tokens=1))
        await harness.until(started.is_set)
        harness.send(wire.Health(id=3))
        assert isinstance(await harness.reply(), wire.HealthReply)
        go.set()
        cut_reply, rolled = await harness.reply(), await harness.reply()
        if fails:
            assert isinstance(cut_reply, wire.Error) and cut_reply.field == "characters"
        else:
            assert cut_reply == wire.SessionReply(id=1, session=1, tokens=5)
        assert rolled == wire.SessionReply(id=2, session=1, tokens=2001 if fails else 4)

    harness.run(body)


def test_a_cut_that_finds_no_worker_is_refused(harness: Harness) -> None:
    async def body() -> None:
        await filled(harness, answer=[7] * 2000)
        harness.engine.client_share = 0
        harness.send(Truncate(id=1, session=1, characters=3))
        reply = await harness.reply()
        assert isinstance(reply, wire.Error) and reply.code == "busy"
        assert await holds(harness) == 2002

    harness.run(body)


def test_a_time_that_has_passed_ends_a_waiting_turn_at_once(harness: Harness) -> None:
    async def body() -> None:
        await opened(harness)
        harness.send(Generate(id=1, session=1, token_ids=[4]))
        before_ns = time.monotonic_ns()
        harness.send(Generate(id=2, session=1, token_ids=[4], timeout_ms=1, seed=17))
        reply = await harness.reply()
        assert isinstance(reply, wire.Done) and (reply.id, reply.finish_reason) == (2, "timeout")
        assert reply.timeline.received_ns == 5 and reply.timeline.done_ns >= before_ns
        assert reply.seed == 17

    harness.run(body)
