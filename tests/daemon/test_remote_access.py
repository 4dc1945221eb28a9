"""Who may connect by tcp, what a role may do, and how much one client may ask for."""

import asyncio
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from zmq.utils import z85

import ull
from conftest import Spawn
from curve_rig import Keys, Wire, spawn_with_keys
from ull.curve import CurveKeys, new_pair, raw
from ull.daemon.config import AccessConfig, parse_config
from ull.daemon.peers import Peers
from ull.errors import Busy, ConfigError, DaemonError

PROMPT = "def main():"
SLOW = {"tokens": [65], "round_ns": 2_000_000, "context": 9000}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_a_client_with_a_key_gets_what_one_of_this_machine_gets(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 3}
    with ull.Client(daemon.urls[1]) as client:
        expected = client.generate(PROMPT, **options).result().token_ids
    with ull.Client(daemon.url, keys=keys.file("bob")) as client:
        assert client.generate(PROMPT, **options).result().token_ids == expected
        assert client.transport == "zeromq"
        text = "word " * 300  # in several reads
        assert client.detokenize(client.tokenize(text)).strip() == text.strip()

    async def with_asyncio() -> list[int]:
        async with ull.AsyncClient(daemon.url, keys=keys.of("bob")) as client:
            return (await client.generate(PROMPT, **options).result()).token_ids

    assert asyncio.run(with_asyncio()) == expected
    peers = {event["peer"] for event in daemon.wait_events("request", 3)}
    assert "key:bob" in peers
    assert any(peer.startswith("user:") for peer in peers)


def test_a_message_that_is_too_long_is_refused_with_its_id(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    with ull.Client(daemon.url, keys=keys.file("bob")) as client:
        other = client.generate(PROMPT, max_tokens=5)
        with pytest.raises(ull.RequestError, match="max_message_bytes"):
            client.generate("x" * 3_000_000).result()
        assert other.result().finish_reason == "length"
        assert client.generate(PROMPT, max_tokens=3).result().finish_reason == "length"


def test_those_without_a_key_are_told_why_and_logged(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    stranger = new_pair()
    bob = keys.of("bob")
    for given, said in (
        (CurveKeys(stranger.public, stranger.secret, keys.server.public), "access.clients"),
        (CurveKeys(bob.public, bob.secret, stranger.public), "another one"),
        (None, "--key"),
    ):
        with (
            pytest.raises(ull.ConnectionLost, match=said),
            ull.Client(daemon.url, keys=given, connect_timeout=2) as client,
        ):
            client.health()
    reasons = {event["reason"] for event in daemon.wait_events("denied", 3)}
    assert {"unknown_key", "wrong_server_key"} <= reasons
    with ull.Client(daemon.url, keys=bob) as client:
        assert client.stats().io["denied"] >= 3


def test_keys_are_for_daemons_that_ask_for_them(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn(url="tcp://127.0.0.1:0")
    with (
        pytest.raises(ull.ConnectionLost, match=r"asks for no key|another one"),
        ull.Client(daemon.url, keys=keys.of("bob"), connect_timeout=3) as client,
    ):
        client.health()


def test_a_role_says_what_a_client_may_change(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    secret = "the prompt of somebody"
    with ull.Client(daemon.url, keys=keys.file("bob")) as client:
        with pytest.raises(ull.Forbidden, match="role admin"):
            client.set_log(level="debug")
        client.generate(secret, max_tokens=1).result()
    daemon.wait_events("request", 1)
    assert secret not in daemon.log_path.read_text()
    with ull.Client(daemon.url, keys=keys.file("alice")) as client:
        client.set_log(prompts=True)
        client.generate(secret, max_tokens=1).result()
        assert daemon.wait_events("request", 2)[1]["text"] == secret
        with pytest.raises(ull.RequestError, match="level"):
            client.set_log(level="loud")
        client.set_log(level="error", prompts=False)
        with pytest.raises(ull.RequestError):
            client.generate(secret, max_tokens=-1).result()  # has no line now
    with ull.Client(daemon.urls[1]) as client:  # the daemon's own user
        client.set_log(level="info")
        client.generate(PROMPT, max_tokens=1).result()
    assert len(daemon.wait_events("request", 3)) == 3
    assert "max_tokens" not in {event.get("field") for event in daemon.events("refused")}
    assert daemon.log_path.read_text().count(secret) == 1
    changes = daemon.events("log")
    assert [change["by"].partition(":")[0] for change in changes] == ["key", "key", "user"]


def test_a_log_may_have_prompts_from_the_start(spawn: Spawn) -> None:
    daemon = spawn("--set", "log.prompts=true")
    with ull.Client(daemon.url) as client:
        client.generate("x" * 2000, max_tokens=1).result()
        client.generate([5], max_tokens=1).result()
    first, second = daemon.wait_events("request", 2)
    assert (first["text"], "text" in second) == ("x" * 1000, False)  # the beginning; ids are no text


def test_sighup_reads_the_list_again(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys, script=SLOW)
    with ull.Client(daemon.url, keys=keys.file("bob")) as bob, ull.Client(daemon.url, keys=keys.file("alice")) as alice:
        running = bob.generate([5], max_tokens=5000)
        next(running)
        keys.add("carol", "generate")
        keys.list.write_text("\n".join(line for line in keys.list.read_text().splitlines() if "bob" not in line))
        daemon.process.send_signal(signal.SIGHUP)
        with pytest.raises(ull.ConnectionLost):
            running.result()
        with (
            pytest.raises(ull.ConnectionLost),
            ull.Client(daemon.url, keys=keys.file("bob"), connect_timeout=1) as again,
        ):
            again.health()
        with ull.Client(daemon.url, keys=keys.file("carol")) as carol:
            assert carol.health().status == "ok"
        keys.list.write_text("carol generate nonsense")
        daemon.process.send_signal(signal.SIGHUP)
        (problem,) = [event for event in daemon.wait_events("reload", 2) if event["level"] == "error"]
        assert "line 1" in problem["message"]
        assert alice.health().status == "ok"


@pytest.mark.parametrize("seed", range(6))
def test_bytes_that_are_changed_end_the_connection_and_nothing_else(spawn: Spawn, keys: Keys, seed: int) -> None:
    daemon = spawn_with_keys(spawn, keys)
    random_ = random.Random(seed)
    seen = {"up": 0, "down": 0}
    flip = (random_.choice(["up", "down"]), random_.randrange(64, 1200))

    def look(direction: str, data: bytes) -> bytes:
        at = flip[1] - seen[direction]
        seen[direction] += len(data)
        if direction != flip[0] or not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :]

    with Wire(daemon.url, look) as wire, ull.Client(daemon.url, keys=keys.file("bob")) as honest:
        limits = {"connect_timeout": 0.3, "query_timeout": 5, "silence_timeout": 1}
        with (
            pytest.raises(ull.ConnectionLost),
            ull.Client(wire.url, keys=keys.file("bob"), **limits) as client,
        ):
            for _ in range(50):
                client.generate(PROMPT, max_tokens=8).result()
        assert honest.generate(PROMPT, max_tokens=3).result().finish_reason == "length"
        assert honest.health().status == "ok"


def test_what_was_sent_once_is_refused_when_it_is_sent_again(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    sent: list[bytes] = []
    received: list[bytes] = []

    def look(direction: str, data: bytes) -> bytes:
        received.append(data)
        if direction == "up":
            sent.append(data)
        return data

    secret = "nobody else can read this"
    with Wire(daemon.url, look) as wire, ull.Client(wire.url, keys=keys.file("bob")) as client:
        client.generate(secret, max_tokens=5).result()
    assert secret.encode() not in b"".join(received)
    assert sent
    before = len(daemon.wait_events("request", 1))
    host, port = daemon.url.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as again:
        again.settimeout(20)
        try:
            again.sendall(b"".join(sent))
            while again.recv(65536):
                pass
        except ConnectionError:
            pass
    with ull.Client(daemon.url, keys=keys.file("bob")) as client:
        assert client.health().status == "ok"
    assert len(daemon.events("request")) == before


def test_an_address_that_keeps_failing_costs_no_more_handshakes(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    host, port = daemon.url.removeprefix("tcp://").rsplit(":", 1)
    null = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL" + bytes(48)
    for _ in range(200):
        with socket.create_connection((host, int(port))) as peer:
            try:
                peer.sendall(null)
                peer.settimeout(20)
                while peer.recv(4096):
                    pass
            except ConnectionError:
                pass
    with ull.Client(daemon.url, keys=keys.file("bob")) as client:  # from the same address: it comes in before long
        io = client.stats().io
    assert io["denied"] >= 200
    assert io["accepted"] < 150  # the others were turned away before anything was done for them
    lines = len(daemon.events("denied"))
    assert 8 <= lines < 150


def test_limits_hold_for_all_connections_of_a_client(spawn: Spawn, keys: Keys) -> None:
    limits = ["--set", "access.in_flight=2", "--set", "access.sessions=2"]
    daemon = spawn_with_keys(spawn, keys, *limits, script=SLOW)
    with (
        ull.Client(daemon.url, keys=keys.file("bob")) as one,
        ull.Client(daemon.url, keys=keys.file("bob")) as other,
        ull.Client(daemon.url, keys=keys.file("alice")) as alice,
    ):
        running = [one.generate([5], max_tokens=3000), other.generate([5], max_tokens=3000)]
        next(running[0])
        with pytest.raises(ull.Busy, match=r"access\.in_flight"):
            other.generate([5], max_tokens=1).result()
        mine = alice.generate([5], max_tokens=1, priority="realtime")
        assert mine.result().finish_reason == "length"
        for stream in running:
            stream.cancel()
            stream.result()
        assert other.generate([5], max_tokens=1).result().finish_reason == "length"
        sessions = [one.open_session(), other.open_session()]
        with pytest.raises(ull.Busy, match=r"access\.sessions"):
            one.open_session().generate([5], max_tokens=1).result()
        for session in sessions:
            session.generate([5], max_tokens=1).result()


def test_a_client_may_send_so_many_requests_a_second(spawn: Spawn, keys: Keys) -> None:
    limits = ["--set", "access.requests_per_s=0.5", "--set", "access.burst=3"]
    daemon = spawn_with_keys(spawn, keys, *limits)
    with ull.Client(daemon.url, keys=keys.file("bob")) as client, ull.Client(daemon.urls[1]) as other:
        for _ in range(3):
            client.generate(PROMPT, max_tokens=1).result()
        with pytest.raises(ull.Busy, match=r"access\.requests_per_s") as refused:
            for _ in range(200):
                client.generate(PROMPT, max_tokens=1).result()
        assert refused.value.retry_after is not None
        assert 0 < refused.value.retry_after <= 2
        assert other.generate(PROMPT, max_tokens=1).result().finish_reason == "length"


def test_the_rate_is_of_time_and_buckets_do_not_pile_up() -> None:
    now = [0.0]
    peers = Peers(AccessConfig(requests_per_s=2, burst=2), clock=lambda: now[0])
    peers.came(b"1", b"k", False, "bob")
    peers.came(b"2", b"k", False, "bob")
    peers.spend(b"1")
    peers.spend(b"2")
    with pytest.raises(Busy) as refused:
        peers.spend(b"1")
    assert refused.value.retry_after == pytest.approx(0.5)
    now[0] = 0.5
    peers.spend(b"2")
    for number in range(20_000):
        identity = str(number).encode()
        peers.came(identity, b"a", False, f"10.0.{number // 256}.{number % 256}")
        peers.spend(identity)
        peers.gone(identity)
        now[0] += 0.001
    assert len(peers._buckets) <= 4096


def test_a_user_of_this_machine_is_one_client_whatever_the_process() -> None:
    peers = Peers(AccessConfig())
    peers.came(b"1", b"u", False, "1000:77")
    peers.came(b"2", b"u", False, "1000:78")
    peers.came(b"3", b"u", True, "0:1")
    assert peers.connections(b"1") == {b"1", b"2"}
    assert (str(peers[b"1"]), peers[b"1"].pid, str(peers[b"9"])) == ("user:1000:77", 77, "address:unknown")


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda keys: (keys.directory / "server.key").chmod(0o644), "chmod 600"),
        (lambda keys: (keys.directory / "server.key").write_text("public = 3"), "ull keys"),
        (lambda keys: (keys.directory / "server.key").unlink(), "cannot be read"),
        (lambda keys: keys.list.write_text("bob generate"), "line 1: it has not three words"),
        (lambda keys: keys.list.write_text(f"bob god {new_pair().public}"), "'god' is no role"),
        (lambda keys: keys.list.write_text("bob admin abc"), "CURVE key"),
        (lambda keys: keys.list.write_text(keys.list.read_text() * 2), "line 3: it is the key of alice too"),
    ],
)
def test_key_files_that_are_wrong_stop_the_start(
    spawn: Spawn, keys: Keys, damage: Callable[[Keys], object], said: str
) -> None:
    damage(keys)
    with pytest.raises(DaemonError, match=said):
        spawn_with_keys(spawn, keys)


def test_both_files_are_needed_and_open_tcp_asks_for_them() -> None:
    with pytest.raises(ConfigError, match=r"access\.clients is needed"):
        parse_config('access.server_key = "x"')
    with pytest.raises(ConfigError, match=r"access\.server_key"):
        parse_config('listen = ["tcp://0.0.0.0:5555"]')
    parse_config('listen = ["tcp://0.0.0.0:5555"]\naccess = {server_key = "x", clients = "y"}')


def test_keys_in_z85_come_back() -> None:
    for _ in range(100):
        pair = new_pair()
        assert z85.encode(raw(pair.public)).decode() == pair.public
    for wrong in ("", "x" * 39, "~" * 40, "#" * 40):
        with pytest.raises(ConfigError):
            raw(wrong)


def test_a_connection_that_says_nothing_is_ended_with_keys_too(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    host, port = daemon.url.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as mute:
        mute.settimeout(20)
        began = time.monotonic()
        while mute.recv(4096):
            pass
        assert time.monotonic() - began < 20
    with ull.Client(daemon.url, keys=keys.file("bob")) as client:
        assert client.health().status == "ok"
