"""What a daemon and its successor say to each other, and what the control plane sets aside for the successor."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_rig import Harness
from ull import wire
from ull.daemon.control import IoMessage
from ull.daemon.peers import Peer
from ull.daemon.set_aside import Kept, SetAside
from ull.daemon.succession import (
    Begin,
    Channel,
    Ended,
    Estate,
    Failed,
    Go,
    HandedClient,
    HandedMessage,
    HandedSession,
    Predecessor,
    Ready,
    Taken,
)
from ull.errors import DaemonError

OPEN = ("user", "0", True, 77)


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path, queue_depth=4)


def estate() -> Estate:
    session = HandedSession(7, True, b"\1\0\0\0", [(0, 1)], b"digest", 2, False)
    return Estate(
        locks=["/run/ull.sock"],
        doors=[b"door"],
        clients=[HandedClient(b"state", [b"waits"], OPEN, [session])],
        messages=[HandedMessage(0, b"payload", 5, None, 3)],
        metrics="",
        asker=0,
        request_id=2**64 - 1,
        since_ns=9,
    )


# ---- the channel ----------------------------------------------------------------------------------------------------


def test_messages_arrive_with_all_their_descriptors(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    given = [os.memfd_create(str(number)) for number in range(450)]  # more than the kernel takes at once
    for number, descriptor in enumerate(given):
        os.write(descriptor, str(number).encode())
    one.send(estate(), given)
    one.send(Go())
    message, got = other.receive(Estate)
    assert message == estate()
    assert [os.pread(descriptor, 8, 0) for descriptor in got] == [str(number).encode() for number in range(450)]
    assert not any(os.get_inheritable(descriptor) for descriptor in got)
    assert other.receive(Go) == (Go(), [])
    for descriptor in (*given, *got):
        os.close(descriptor)


def test_what_nobody_expects_ends_the_conversation(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    one.send(Taken())
    with pytest.raises(Ended, match="it says Taken, not Go"):
        other.receive(Go)
    one.send(Failed("the bundle is gone"))
    with pytest.raises(DaemonError, match="the bundle is gone"):
        other.receive(Ready)
    with pytest.raises(Ended, match=r"said nothing for 0\.05 s"):
        other.receive(Go, 0.05)
    other.send(Begin([0]))  # it can still be spoken to
    assert one.receive(Begin)[0].cores == [0]
    one.close()
    with pytest.raises(Ended, match="it has ended"):
        other.receive(Go)
    with pytest.raises(Ended, match="it has ended"):
        for _ in range(1000):
            other.send(estate())


@pytest.mark.parametrize("said", [b"\xff" * 64, b"\3" + b"\0" * 11 + b"\xc1\xc1\xc1", b"\2" + b"\0" * 11 + b"\x91\x01"])
def test_who_is_no_daemon_of_ull_is_not_listened_to(said: bytes) -> None:
    one, other = socket.socketpair()
    with one:
        one.sendall(said)
        channel = Channel(other)
        with pytest.raises(Ended, match="does not speak as"):
            channel.receive(Ready, 10.0)
        channel.close()


def test_a_daemon_that_nobody_has_started_has_no_predecessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ULLD_PREDECESSOR", raising=False)
    assert Predecessor.from_environment() is None
    for text in ("none", "-1", "1000000"):
        monkeypatch.setenv("ULLD_PREDECESSOR", text)
        with pytest.raises(DaemonError, match=f"ULLD_PREDECESSOR={text}: no daemon is there"):
            Predecessor.from_environment()
        assert "ULLD_PREDECESSOR" not in os.environ  # no child of ours takes itself for a successor


# ---- what is set aside ----------------------------------------------------------------------------------------------


def test_what_had_begun_comes_first_and_who_has_gone_is_forgotten() -> None:
    aside = SetAside(most=10, share=3)
    for number in (1, 2):
        aside.keep(Kept(b"a", b"", 0, number))
    for number in (3, 4):
        aside.keep_first(Kept(b"b", b"", 0, number))
    aside.keep_first(Kept(b"a", b"", 0, 5))
    assert [kept.request_id for kept in aside] == [3, 4, 5, 1, 2]
    work, end = wire.Generate(id=9, prompt="x"), wire.Cancel(id=1)
    assert aside.is_full_for(b"a", work)
    assert not aside.is_full_for(b"b", work)
    assert not aside.is_full_for(b"a", end)
    for _ in range(3):
        aside.keep(Kept(b"a", b"", 0, 1))
    assert aside.is_full_for(b"a", end)
    aside.forget(b"b")
    aside.keep_first(Kept(b"c", b"", 0, 6))
    assert [kept.request_id for kept in aside] == [5, 6, 1, 2, 1, 1, 1]


def test_what_is_said_of_what_runs_is_not_kept() -> None:
    aside = SetAside(most=10, share=10)
    aside.keep(Kept(b"a", b"", 0, 1))
    said: dict[bool, list[wire.Request]] = {
        True: [
            wire.Generate(id=5, prompt="x"),
            wire.Tokenize(id=5, prompt="x"),
            wire.OpenSession(id=5, session=1),
            wire.Cancel(id=1),
            wire.Commit(id=5, request=1),
            wire.CloseSession(id=5, session=1),
        ],
        False: [
            wire.Cancel(id=2),
            wire.Commit(id=5, request=2),
            wire.Health(id=5),
            wire.Info(id=5),
            wire.Stats(id=5),
            wire.Upgrade(id=5),
        ],
    }
    for kept, requests in said.items():
        assert {aside.concerns(b"a", request) for request in requests} == {kept}
    assert not aside.concerns(b"b", wire.Cancel(id=1))
    assert not aside.concerns(b"b", wire.CloseSession(id=5, session=1))


def test_a_control_plane_that_holds_goes_on_where_it_was(harness: Harness) -> None:
    async def body() -> None:
        plane, engine = harness.plane, harness.engine
        engine.client_share = 3
        harness.send(wire.Generate(id=1, prompt="x", hold=True))
        harness.send(wire.Generate(id=2, prompt="x"))
        await harness.until(lambda: plane.live == 2)
        plane.hold()
        assert not plane.is_quiet()
        assert engine.withdrawn == [(b"me", 1)]
        harness.send(wire.Generate(id=3, prompt="x"))
        harness.send(wire.Commit(id=4, request=1))
        harness.send(wire.Generate(id=3, prompt="again"))
        assert (await harness.reply()).code == "duplicate_id"  # type: ignore[union-attr]
        harness.send(wire.Generate(id=5, prompt="x"))
        assert (await harness.reply()).code == "busy"  # type: ignore[union-attr]
        harness.send(wire.Health(id=6, request=3))
        assert (await harness.reply()).live is True  # type: ignore[union-attr]
        assert len(engine.submitted) == 2
        harness.end(1)
        harness.end(2)
        await harness.until(plane.is_quiet)
        plane.go_on()
        assert engine.submitted[2:] == [(b"me", 1), (b"me", 3)]
        assert engine.params[2]["hold"] is True
        assert engine.committed == [(b"me", 1)]
        assert isinstance(await harness.reply(), wire.Ack)
        harness.send(wire.Generate(id=7, prompt="x"))
        await harness.until(lambda: len(engine.submitted) == 5)

    harness.run(body)
    assert [event["id"] for event in harness.events("request")] == [2]  # what was withdrawn has not ended
    assert harness.plane.metrics.accepted == 4


def test_a_silent_control_plane_hands_everything_over(harness: Harness, tmp_path: Path) -> None:
    clients = [(3, b"state", [b"waits"], b"me"), (4, b"other", [], b"quiet")]
    handed: list[HandedClient] = []
    messages: list[HandedMessage] = []
    request = wire.Generate(id=2, prompt="x", session=1)

    async def give() -> None:
        plane = harness.plane
        harness.send_frames(IoMessage.PEER, b"me", b"u", b"A", b"0:77")
        harness.send(wire.OpenSession(id=1, session=1))
        assert isinstance(await harness.reply(), wire.SessionReply)
        plane.hold()
        harness.send(request)
        harness.send(wire.OpenSession(id=3, session=2), b"gone")
        harness.send_frames(IoMessage.GONE, b"gone")
        await harness.until(lambda: plane.is_quiet() and len(plane._aside or ()) == 1)
        plane.fall_silent()
        harness.send(wire.Health(id=4))
        harness.send_frames(IoMessage.MALFORMED, b"me", b"too_long", (9).to_bytes(8, "little"))
        harness.send_frames(IoMessage.REQUEST, b"me", b"\xc1", (5).to_bytes(8, "little"))
        harness.send(wire.Health(id=6), b"unknown")  # of a connection that has ended meanwhile
        given = plane.hand_over(clients)
        handed.extend(given[0])
        messages.extend(given[1])

    harness.run(give)
    assert [(client.state, client.payloads, client.peer) for client in handed] == [
        (b"state", [b"waits"], OPEN),
        (b"other", [], None),
    ]
    assert [[session.number for session in client.sessions] for client in handed] == [[1], []]
    kept = [(message.client, message.request_id, message.malformed) for message in messages]
    assert kept == [(0, 2, None), (0, 4, None), (0, 9, "too_long"), (0, None, None)]
    assert messages[0].payload == wire.encode(request)

    (tmp_path / "heir").mkdir()
    heir = Harness(tmp_path / "heir")

    async def take() -> None:
        heir.plane.take_over([b"me", b"quiet"], handed, messages)
        assert heir.engine.submitted == [(b"me", 2)]
        replies = [await heir.reply() for _ in range(3)]
        assert isinstance(replies[0], wire.HealthReply)
        assert [reply.code for reply in replies[1:] if isinstance(reply, wire.Error)] == ["too_long", "bad_message"]
        assert heir.plane._peers[b"me"] == Peer(*OPEN)
        heir.end(2, [300])
        heir.send(wire.Rollback(id=8, session=1, tokens=0))
        reply = await heir.reply()
        assert isinstance(reply, wire.SessionReply) and reply.tokens > 0

    heir.run(take)
