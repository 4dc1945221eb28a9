"""The io thread with real sockets: what clients see, whatever other clients do."""

import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from native_rig import Rig
from ull import _native
from ull.daemon.control import IoMessage
from ull.libzmq import loaded_libzmq

ALPHABET = list(b"abcdefghijklmnopqrstuvwxyz")
PROMPT = b"once upon a time there was"  # 26 tokens: the completion begins at "a"
LONG = {"tokens": ALPHABET, "context": 600_000, "pages": 10_000}


def joined(frames: list[dict[str, Any]]) -> tuple[list[int], str]:
    """All ids and all text of a request's token frames, which must follow each other without a gap."""
    ids: list[int] = []
    for frame in frames:
        assert frame["index"] == len(ids)
        ids += frame["ids"]
    return ids, "".join(frame["text"] for frame in frames)


@pytest.mark.parametrize("idle", ["adaptive", "spin"])
@pytest.mark.parametrize("endpoint", ["ipc://{folder}/sock", "tcp://127.0.0.1:0"])
def test_an_exchange(tmp_path: Path, endpoint: str, idle: str) -> None:
    io = {"listen": [endpoint.format(folder=tmp_path)], "idle": idle, "bundle": "d" * 64}
    with Rig(tmp_path, {"tokens": ALPHABET}, engine={"idle": idle}, io=io) as rig:
        assert not rig.io.endpoints[0].endswith(":0")
        client = rig.client(b"client")
        rig.submit(b"client", 7, PROMPT, max_tokens=30, seed=3, received_ns=1, admitted_ns=2)
        frames, done = client.finish(7)
        ids, text = joined(frames)
        assert text == "abcdefghijklmnopqrstuvwxyzabcd"
        assert bytes(ids).decode() == text
        for frame in frames:
            assert set(frame) == {"type", "id", "index", "ids", "text", "time_ns"}
        timeline = done.pop("timeline")
        assert list(timeline) == [
            "received_ns",
            "admitted_ns",
            "started_ns",
            "prefilled_ns",
            "first_token_ns",
            "last_token_ns",
            "done_ns",
            "expected_first_ns",
            "expected_done_ns",
        ]
        happened = list(timeline.values())[:-2]
        assert happened == sorted(happened)
        assert timeline["first_token_ns"] == frames[0]["time_ns"]
        ending = {
            "id": 7,
            "finish_reason": "length",
            "usage": {"prompt_tokens": 26, "cached_tokens": 0, "completion_tokens": 30, "rolled_back_tokens": 0},
            "seed": 3,
            "error": None,
            "speculation": {
                "rounds": 30,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
                "tokens_per_round": 1.0,
                "by_drafter": {"none": 30},
                "accepted_by_depth": [],
            },
        }
        assert done == {"type": "done", "bundle": "d" * 64, **ending, "warnings": []}
        assert list(done)[list(done).index("seed") + 1] == "bundle"
        record = rig.record()
        assert record.pop("timeline") == timeline
        assert record == {"identity": b"client", "delivered": True, "client": "ok", **ending}
        rig.wait_until(rig.engine.drained)


def test_requests_go_to_the_control_plane_and_replies_come_back(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": [97]}) as rig:
        client = rig.client(b"client")
        client.send([b"ull1", b"a request"])
        kind, identity, payload, received_ns = rig.control.recv_multipart()
        assert (kind, identity, payload) == (IoMessage.REQUEST, b"client", b"a request")
        assert int.from_bytes(received_ns, "little") > 0
        rig.control.send_multipart([b"client", b"\x81\xa2id\x05"])
        assert client.receive() == {"id": 5}
        rig.control.send_multipart([b"nobody", b"lost"])
        rig.wait_until(lambda: rig.io.stats()["replies_dropped"] == 1)


def test_a_client_of_the_local_transport_is_served_and_its_hang_up_told(tmp_path: Path) -> None:
    path = str(tmp_path / "sock.local")
    with Rig(tmp_path, {"tokens": [97]}, io={"local": [path]}) as rig:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(path)
            client.sendall(b"ull1\0\0\0\0" + b"\7\0\0\0request")
            kind, identity, payload, received_ns = rig.control.recv_multipart()
            assert (kind, payload, len(identity), identity[:2]) == (IoMessage.REQUEST, b"request", 10, b"\0L")
            assert int.from_bytes(received_ns, "little") > 0
            rig.control.send_multipart([identity, b"reply"])
            expected = b"ull1\0\0\0\0" + b"\5\0\0\0reply"
            with client.makefile("rb") as received:
                assert received.read(len(expected)) == expected
            assert rig.io.stats()["local_clients"] <= 1
        assert rig.control.recv_multipart(hang_ups=True) == [IoMessage.GONE, identity]
        rig.control.send_multipart([identity, b"too late"])
        rig.wait_until(lambda: rig.io.stats()["replies_dropped"] == 1)
        rig.wait_until(lambda: rig.io.stats()["local_clients"] == 0)


def test_malformed_messages_are_told_to_the_control_plane(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": [97]}) as rig:
        client = rig.client(b"client")
        for frames, reason in [
            ([b"x"], b"bad_frame"),
            ([b"ull1"], b"bad_frame"),
            ([b"ull1", b"a", b"b"], b"bad_frame"),
            ([b"ull1"] * 100, b"bad_frame"),
            ([b"", b"ull1", b"payload"], b"bad_frame"),
            ([b"ull2", b"payload"], b"bad_version"),
            ([b"", b"payload"], b"bad_version"),
            ([b"ull1\0", b"payload"], b"bad_version"),
        ]:
            client.send(frames)
            assert rig.control.recv_multipart() == [IoMessage.MALFORMED, b"client", reason]
        rig.wait_until(lambda: rig.io.stats()["malformed"] == 8)
        rig.submit(b"client", 1, PROMPT, max_tokens=3)
        assert client.finish(1)[1]["finish_reason"] == "length"


def test_bytes_that_are_not_zmq_and_frames_that_are_too_big_harm_nobody(tmp_path: Path) -> None:
    io = {"listen": ["tcp://127.0.0.1:0"], "max_message": 1000}
    with Rig(tmp_path, {"tokens": [97]}, io=io) as rig:
        good = rig.client(b"good")
        port = int(rig.io.endpoints[0].rsplit(":", 1)[1])
        for garbage in [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f" + b"\0" * 500, bytes(range(256)) * 40]:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(garbage)
        big, huge = rig.client(b"big"), rig.client(b"huge", immediate=1)
        big.send([b"ull1", b"x" * 2000])
        assert rig.control.recv_multipart() == [IoMessage.MALFORMED, b"big", b"too_long"]
        huge.send([b"ull1", b"x" * (2**24 + 1)])
        good.send([b"ull1", b"x" * 900])
        assert rig.control.recv_multipart()[1:3] == [b"good", b"x" * 900]
        rig.submit(b"good", 1, PROMPT, max_tokens=3)
        assert good.finish(1)[1]["finish_reason"] == "length"


def test_two_clients_may_use_the_same_request_id(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET, "round_ns": 10_000}) as rig:
        clients = [rig.client(name) for name in (b"one", b"two")]
        for number, client in enumerate(clients):
            rig.submit(client.name, 1, PROMPT, max_tokens=20 + number)
        for number, client in enumerate(clients):
            frames, done = client.finish(1)
            assert len(joined(frames)[0]) == 20 + number == done["usage"]["completion_tokens"]
        assert [rig.record()["identity"] for _ in clients] == [b"one", b"two"]


def test_a_client_that_dies_loses_its_request_and_nobody_elses(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET, "round_ns": 100_000, "context": 60_000, "pages": 1000}) as rig:
        dying, other = rig.client(b"dying"), rig.client(b"other")
        rig.submit(b"dying", 1, PROMPT, max_tokens=50_000)
        rig.submit(b"other", 1, PROMPT, max_tokens=20)
        assert dying.receive()["type"] == "token"
        dying.socket.close(linger=0)
        frames, done = other.finish(1)
        assert (joined(frames)[1], done["finish_reason"]) == ("abcdefghijklmnopqrst", "length")
        record = rig.record()
        assert (record["identity"], record["finish_reason"]) == (b"dying", "cancelled")
        assert (record["client"], record["delivered"]) == ("gone", False)
        assert record["usage"]["completion_tokens"] < 50_000
        rig.wait_until(lambda: rig.io.stats()["clients_gone"] == 1)


def test_a_client_that_stops_reading_is_cancelled_and_nobody_else(tmp_path: Path) -> None:
    script = {"tokens": ALPHABET, "context": 16_000_000, "pages": 250_000}  # more than its socket's buffers hold
    with Rig(tmp_path, script, engine={"queue_depth": 1, "prefix_cache": False}) as rig:
        slow, other = rig.client(b"slow", rcvhwm=1), rig.client(b"other")
        rig.submit(b"slow", 1, PROMPT, max_tokens=15_000_000)
        assert slow.receive()["type"] == "token"
        rig.submit(b"other", 1, PROMPT, max_tokens=20)
        frames, done = other.finish(1)
        assert (joined(frames)[1], done["finish_reason"]) == ("abcdefghijklmnopqrst", "length")
        records = {record["identity"]: record for record in (rig.record(), rig.record())}
        assert (records[b"slow"]["client"], records[b"slow"]["delivered"]) == ("stalled", False)
        assert (records[b"other"]["client"], records[b"other"]["delivered"]) == ("ok", True)
        rig.wait_until(lambda: rig.io.stats()["clients_stalled"] == 1)
        rig.wait_until(rig.engine.drained)  # its slot is free again
        assert rig.io.stats()["waiting"] <= 1  # 0 where the client's libzmq, on a busy machine, has made room late
        _, done = slow.finish(1)  # when it reads again it hears the end
        assert (done["finish_reason"], done["error"]["code"]) == ("cancelled", "stalled")
        assert done["usage"] == records[b"slow"]["usage"]
        rig.wait_until(lambda: rig.io.stats()["waiting"] == 0)


def test_a_flood_of_replies_is_told_whole(tmp_path: Path) -> None:
    """Also to a client that begins to read late, and with replies far beyond what its connection takes at once."""
    with Rig(tmp_path, {"tokens": [97]}, io={"client_stall_ms": 50}) as rig:
        late, other = rig.client(b"late", rcvhwm=1), rig.client(b"other")
        rig.control.set_high_water(0)
        padding = b"x" * 2000
        for number in range(400):
            rig.control.send_multipart([b"late", msgspec.msgpack.encode({"id": number, "padding": padding})])
        rig.control.send_multipart([b"other", msgspec.msgpack.encode({"id": 1})])
        assert other.receive() == {"id": 1}
        assert [late.receive()["id"] for _ in range(400)] == list(range(400))
        assert rig.io.stats()["replies_dropped"] == 0


def test_what_was_sent_last_leaves_while_the_io_thread_ends(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": [97]}, io={"linger_ms": 20_000, "client_stall_ms": 20_000}) as rig:
        client = rig.client(b"client", rcvhwm=1)
        rig.control.set_high_water(0)
        for number in range(60):  # far more than the connection's buffers take
            rig.control.send_multipart([b"client", msgspec.msgpack.encode({"id": number, "padding": b"x" * 100_000})])
        rig.wait_until(lambda: rig.io.stats()["waiting"] > 0)
        rig.engine.stop()
        stopping = threading.Thread(target=rig.io.stop)
        stopping.start()
        assert [client.receive()["id"] for _ in range(60)] == list(range(60))
        stopping.join()


@pytest.mark.parametrize("logprobs", [-1, 2])
def test_a_flood_reaches_one_client_without_loss(tmp_path: Path, logprobs: int) -> None:
    tokens = 500_000 if logprobs < 0 else 50_000
    with Rig(tmp_path, LONG, io={"client_stall_ms": 20_000}) as rig:
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT, max_tokens=tokens, logprobs=logprobs)
        frames, done = client.finish(1)
        ids, text = joined(frames)
        assert bytes(ids) == (bytes(ALPHABET) * (tokens // 26 + 1))[:tokens]
        assert text.encode() == bytes(ids)
        assert done["usage"]["completion_tokens"] == tokens
        assert len(frames) < tokens  # coalesced: the engine does not wait for the io thread to send each token
        if logprobs >= 0:
            assert [entry["token"] for frame in frames for entry in frame["logprobs"]] == ids


def test_text_held_back_for_a_stop_string_comes_at_the_end(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET, "round_ns": 2_000_000}) as rig:
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT, max_tokens=6, stop=[b"efX", b"defgh"])
        frames, done = client.finish(1)
        ids, text = joined(frames)
        assert (text, len(ids), done["finish_reason"]) == ("abcdef", 6, "length")
        rig.submit(b"client", 2, PROMPT, max_tokens=20, stop=[b"efX", b"defgh"])
        frames, done = client.finish(2)
        ids, text = joined(frames)
        assert (text, len(ids), done["finish_reason"]) == ("abc", 8, "stop")
        rig.submit(b"client", 3, PROMPT, max_tokens=20, stop_ids=[ord("d")])
        frames, done = client.finish(3)
        ids, text = joined(frames)
        assert (text, bytes(ids), done["finish_reason"]) == ("abc", b"abcd", "stop")


def test_stopping_sends_every_done_frame_first(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET, "round_ns": 1_000_000}) as rig:
        client = rig.client(b"client")
        for request_id in range(5):
            rig.submit(b"client", request_id, PROMPT, max_tokens=4000)
        assert client.receive()["type"] == "token"
        rig.engine.stop()
        rig.io.stop()
        dones: list[dict[str, Any]] = []
        while len(dones) < 5:
            message = client.receive()
            dones += [message] if message["type"] == "done" else []
        assert sorted(done["id"] for done in dones) == list(range(5))
        assert {(done["finish_reason"], done["error"]["code"]) for done in dones} == {("cancelled", "draining")}
        assert sorted(rig.record()["id"] for _ in range(5)) == list(range(5))


def test_an_endpoint_that_is_taken_is_named(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": [97]}, io={"listen": ["tcp://127.0.0.1:0"]}) as rig:
        taken = rig.io.endpoints[0]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for number, listen in enumerate([taken, "nonsense", "tcp://127.0.0.1"]):
            io = _native.Io(
                rig.engine,
                zmq_context=context.underlying,
                libzmq=loaded_libzmq(),
                listen=[listen],
                control=f"inproc://other-{number}",  # libzmq frees a name some time after its socket is closed
            )
            with pytest.raises(RuntimeError, match=f"^{listen}: "):
                io.start()
            io.stop()
        context.destroy(linger=0)


def test_a_library_that_is_not_loaded_is_refused(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": [97]}) as rig, pytest.raises(RuntimeError, match="is not loaded in this process"):
        _native.Io(rig.engine, zmq_context=rig.context.underlying, libzmq="/none/libzmq.so", listen=["ipc:///tmp/x"])


def test_a_digest_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bundle: a digest has at most 64 characters"):
        Rig(tmp_path, {"tokens": [97]}, io={"bundle": "d" * 65})


def test_a_deleted_socket_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    mask = os.umask(0o137)
    with Rig(tmp_path, {"tokens": [97]}) as rig:
        os.umask(mask)
        connected = rig.client(b"connected")
        for turn in range(1, 3):
            path.unlink()
            assert rig.control.recv_multipart() == [IoMessage.ENDPOINT, f"ipc://{path}".encode(), b"bound_again"]
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
            rig.wait_until(lambda turn=turn: rig.io.stats()["bound_again"] == turn)
            late = rig.client(b"late%d" % turn)
            for client in (connected, late):
                rig.control.send_multipart([client.name, msgspec.msgpack.encode({"id": turn})])
                assert client.receive() == {"id": turn}
        assert rig.io.stats()["unreachable"] == 0


def test_another_s_socket_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with Rig(tmp_path, {"tokens": [97]}) as rig:
        connected = rig.client(b"connected")
        (tmp_path / "ours").hardlink_to(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(tmp_path / "other"))
            (tmp_path / "other").replace(path)
            inode = path.stat().st_ino
            assert rig.control.recv_multipart()[2] == b"foreign"
            rig.wait_until(lambda: rig.io.stats()["unreachable"] == 1)
            rig.control.send_multipart([b"connected", msgspec.msgpack.encode({"id": 1})])
            assert connected.receive() == {"id": 1}
            assert path.stat().st_ino == inode
        (tmp_path / "ours").replace(path)
        assert rig.control.recv_multipart()[2] == b"ours"
        rig.client(b"late")
        assert rig.io.stats()["bound_again"] == 0


def test_a_socket_whose_directory_is_gone_comes_back_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Rig(tmp_path, {"tokens": [97]}, io={"listen": [f"ipc://{folder}/sock"]}) as rig:
        folder.rename(tmp_path / "moved")
        assert rig.control.recv_multipart()[2] == b"gone"
        (tmp_path / "moved").rename(folder)
        assert rig.control.recv_multipart()[2] == b"ours"
        rig.client(b"late")
