"""A real daemon's local socket: the same answers, who may connect, what hostile peers and hang-ups cost."""

import random
import signal
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import msgspec
import pytest

import ull
from conftest import Daemon, Spawn
from ull import wire
from ull.daemon.socket_claim import SocketClaim
from ull.errors import DaemonError

HELLO = b"ull1" + bytes(4)
PROMPT = "def main():"


def local(daemon: Daemon) -> str:
    return daemon.url.removeprefix("ipc://") + ".local"


class RawPeer:
    """A client of the local transport that may say anything."""

    def __init__(self, daemon: Daemon, first: bytes = HELLO) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(local(daemon))
        self.send(first)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(self, message: wire.Request) -> None:
        self.frame(wire.encode(message))

    def frame(self, payload: bytes) -> None:
        self.send(struct.pack("<I", len(payload)) + payload)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the daemon has hung up")
            data += more
        return data

    def reply(self) -> wire.Reply:
        return wire.decode_reply(self.receive(struct.unpack("<I", self.receive(4))[0]))

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def wait_idle(daemon: Daemon, clients: int = 1) -> None:
    """Until no request is left, and no client of the local transport but `clients`, ours among them."""
    with ull.Client(daemon.url, transport="local") as client:
        deadline = time.monotonic() + 30
        while True:
            stats = client.stats()
            if stats.engine["slots_used"] == 0 and stats.io["local_clients"] == clients:
                return
            assert time.monotonic() < deadline, (stats.engine["slots_used"], stats.io["local_clients"])
            time.sleep(0.01)


def test_both_transports_give_the_same_answers(shared_daemon: Daemon) -> None:
    answers = []
    for transport in ("local", "zeromq"):
        with ull.Client(shared_daemon.url, transport=transport, connect_timeout=20) as client:
            result = client.generate(PROMPT, max_tokens=40, temperature=0.7, seed=5, logprobs=1).result()
            assert client.transport == transport
            answers.append((result.text, result.token_ids, result.logprobs, result.usage.completion_tokens))
            with pytest.raises(ull.RequestError, match="max_tokens"):
                client.generate(PROMPT, max_tokens=-1).result()
            assert client.info().engine["name"]
    assert answers[0] == answers[1]


def test_clients_choose_it_by_themselves(shared_daemon: Daemon) -> None:
    with ull.Client(shared_daemon.url, connect_timeout=20) as client:
        assert client.generate(PROMPT, max_tokens=3).result().usage.completion_tokens == 3
        assert client.transport == "local"
    wait_idle(shared_daemon)  # which counts itself among them


def test_one_exchange_byte_by_byte(shared_daemon: Daemon) -> None:
    with RawPeer(shared_daemon, b"") as peer:
        payload = wire.encode(wire.Generate(id=1, prompt=PROMPT, max_tokens=2, seed=1))
        for byte in HELLO + struct.pack("<I", len(payload)) + payload:
            peer.send(bytes([byte]))
        assert peer.receive(8) == HELLO
        replies = []
        while not replies or not isinstance(replies[-1], wire.Done):
            replies.append(peer.reply())
        assert isinstance(replies[0], wire.Token)
        peer.frame(b"")
        error = peer.reply()
        assert isinstance(error, wire.Error)
        assert (error.code, error.id) == ("bad_message", None)


def test_a_stream_the_daemon_does_not_know(spawn: Spawn) -> None:
    daemon = spawn(script={"hang_step": 20})  # the stream does not end by itself
    with RawPeer(daemon) as peer:
        assert peer.receive(8) == HELLO
        peer.request(wire.Generate(id=1, prompt=PROMPT, max_tokens=900, ignore_eos=True))
        while not isinstance(peer.reply(), wire.Token):
            pass
        answers = {}
        for number, request in [(10, 1), (11, 2), (12, -5)]:
            peer.request(wire.Health(id=number, request=request))
            while not isinstance(reply := peer.reply(), wire.HealthReply):
                pass
            answers[reply.id] = reply.live
        assert answers == {10: True, 11: False, 12: False}
        peer.request(wire.Health(id=13))
        while not isinstance(reply := peer.reply(), wire.HealthReply):
            pass
        assert reply.live is msgspec.UNSET
    wait_idle(daemon)


def test_a_client_that_hangs_up_leaves_nothing_behind(shared_daemon: Daemon) -> None:
    """Running, queued and just being read: all are ended, and no token has to be sent to find out."""
    for _ in range(5):
        with RawPeer(shared_daemon) as peer:
            for number in range(10):
                peer.request(wire.Generate(id=number, prompt=PROMPT, max_tokens=900, ignore_eos=True))
            peer.request(wire.Generate(id=99, prompt="many words " * 80, max_tokens=1))
    wait_idle(shared_daemon)


def test_fuzz(shared_daemon: Daemon) -> None:
    """Random bytes, and streams of requests cut or damaged anywhere; another client is served all the while."""
    chance = random.Random(11)
    requests = [
        wire.encode(wire.Generate(id=1, prompt=PROMPT, max_tokens=2)),
        wire.encode(wire.Health(id=2)),
        wire.encode(wire.Cancel(id=1)),
        b"",
        b"\xc1",
    ]
    with ull.Client(shared_daemon.url, connect_timeout=20) as client:
        for turn in range(300):
            stream = bytearray(HELLO)
            for _ in range(chance.randrange(6)):
                payload = chance.choice(requests)
                stream += struct.pack("<I", len(payload)) + payload
            for _ in range(chance.randrange(4)):
                stream[chance.randrange(len(stream))] ^= 1 << chance.randrange(8)
            if turn % 5 == 0:
                stream = bytearray(chance.randbytes(chance.randrange(1, 5000)))
            try:
                with RawPeer(shared_daemon, bytes(stream[: chance.randrange(len(stream) + 1)])):
                    if turn % 10 == 0:
                        assert client.generate(PROMPT, max_tokens=1).result().usage.completion_tokens == 1
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert client.health().status == "ok"
    wait_idle(shared_daemon)


def test_an_announced_length_costs_nothing(shared_daemon: Daemon) -> None:
    def resident_kib() -> int:
        status = Path(f"/proc/{shared_daemon.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    announced = 60_000  # the shared daemon takes a little more
    before = resident_kib()
    peers = [RawPeer(shared_daemon) for _ in range(200)]
    for peer in peers:
        peer.send(struct.pack("<I", announced) + b"x")
    wait_idle(shared_daemon, clients=201)
    assert resident_kib() - before < 200 * announced // 1024 // 2
    for peer in peers:
        peer.socket.close()
    with RawPeer(shared_daemon) as peer:
        assert peer.receive(8) == HELLO
        peer.send(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionError):
            peer.receive(1)
    wait_idle(shared_daemon)


def test_many_clients_at_once(shared_daemon: Daemon) -> None:
    clients = [ull.Client(shared_daemon.url, connect_timeout=30) for _ in range(40)]
    streams = [client.generate(PROMPT, max_tokens=4, seed=number) for number, client in enumerate(clients)]
    assert [stream.result().usage.completion_tokens for stream in streams] == [4] * 40
    assert {client.transport for client in clients} == {"local"}
    for client in clients:
        client.close()
    wait_idle(shared_daemon)


def test_who_may_connect_and_what_is_left(spawn: Spawn) -> None:
    daemon = spawn("--set", "ipc_mode=384")
    path = Path(local(daemon))
    mode = path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert daemon.stop() == 0
    assert not path.exists()


def test_a_daemon_s_death_and_return(spawn: Spawn) -> None:
    first = spawn(script={"tokens": [65], "round_ns": 2_000_000, "context": 100_000, "pages": 2000})
    with ull.Client(first.url, connect_timeout=60) as client:
        stream = client.generate([1, 2], max_tokens=50_000)
        next(stream)
        assert client.transport == "local"
        first.kill()
        with pytest.raises(ull.ConnectionLost):
            stream.result()
        assert Path(local(first)).exists()  # what a killed daemon leaves is in nobody's way
        second = spawn(url=first.url)
        assert client.generate(PROMPT, max_tokens=2).result().usage.completion_tokens == 2
        assert client.transport == "local"
        second.stop()


def test_a_stopped_daemon_is_not_waited_for(spawn: Spawn) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 2_000_000, "context": 100_000, "pages": 2000})
    with ull.Client(daemon.url, query_timeout=0.2, connect_timeout=20) as client:
        stream = client.generate([1, 2], max_tokens=50_000)
        next(stream)
        daemon.process.send_signal(signal.SIGSTOP)
        client._silence_timeout = 0.2  # from here on: what is not stopped may be slow
        try:
            with pytest.raises(ull.ConnectionLost, match="nothing was heard of the request"):
                stream.result()
        finally:
            daemon.process.send_signal(signal.SIGCONT)
    wait_idle(daemon)


def test_the_last_words_of_a_daemon_arrive(spawn: Spawn) -> None:
    daemon = spawn("--set", "drain_timeout_s=0", script={"tokens": [65], "round_ns": 2_000_000, "context": 9000})
    with ull.Client(daemon.url, connect_timeout=20) as client:
        stream = client.generate([1, 2], max_tokens=8000)
        next(stream)
        stopper = threading.Thread(target=daemon.stop)
        stopper.start()
        assert stream.result().finish_reason == "cancelled"
        stopper.join()


def test_the_claim_covers_the_local_socket(tmp_path: Path) -> None:
    path = tmp_path / "ull.sock"
    (tmp_path / "ull.sock.local").write_text("mine")
    with pytest.raises(DaemonError, match=r"ull.sock.local exists and is not a socket"):
        SocketClaim(path, 0o600)
    (tmp_path / "ull.sock.local").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "ull.sock.local"))
        other.listen()
        with pytest.raises(DaemonError, match=r"ull.sock.local is in use"):
            SocketClaim(path, 0o600)
    SocketClaim(path, 0o600).release()  # nobody listens any more
    assert list(tmp_path.iterdir()) == []
