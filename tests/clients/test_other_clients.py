"""The clients in C++ and for Node: the same scenarios, against a daemon and against one that breaks the rules."""

import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ull
from curve_rig import Keys, spawn_with_keys
from fake_daemon import FakeDaemon, done, token
from other_clients import driver as driver_of
from other_clients import run
from ull import wire
from ull.curve import new_pair

SLOW = {"tokens": [65], "round_ns": 5_000_000, "context": 9000}  # of a script: a token takes five milliseconds


@pytest.fixture(scope="module", params=["cpp", "node"])
def driver(request: pytest.FixtureRequest) -> list[str]:
    """The command that runs scenarios of one of the clients."""
    return driver_of(request.param)


@pytest.fixture(params=["local", "zeromq"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_sampled_completion_is_the_python_clients(driver: list[str], shared_daemon: Any, transport: str) -> None:
    seed = 2**64 - 1
    with ull.Client(shared_daemon.url) as client:
        options = {"max_tokens": 24, "temperature": 0.8, "seed": seed}
        expected = client.generate("def add(first, second):\n", **options).result()
    assert run(driver, "sampled", shared_daemon.url, transport, str(seed)) == [
        " ".join(["ids", *map(str, expected.token_ids)]),
        "same 1",
        f"done length {seed} 24 64",
        "rounds 1",
        "after 0",
    ]


def test_tcp_works_too(driver: list[str], spawn: Callable[..., Any]) -> None:
    daemon = spawn(url="tcp://127.0.0.1:*")
    assert run(driver, "sampled", daemon.url, "auto", "7")[2] == "done length 7 24 64"


def test_a_daemon_that_asks_for_keys_gets_them(
    driver: list[str], spawn: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path)
    daemon = spawn_with_keys(spawn, keys)
    own = keys.of("bob")
    monkeypatch.setenv("ULL_TEST_KEYS", f"{own.server} {own.public} {own.secret}")
    assert run(driver, "sampled", daemon.url, "auto", "7")[2] == "done length 7 24 64"
    assert {event["peer"] for event in daemon.wait_events("request", 1)} == {"key:bob"}
    stranger = new_pair()
    monkeypatch.setenv("ULL_TEST_KEYS", f"{own.server} {stranger.public} {stranger.secret}")
    assert run(driver, "nobody", daemon.url, "auto") == ["health disconnected"]


def test_streams_are_read_side_by_side(driver: list[str], shared_daemon: Any, transport: str) -> None:
    with ull.Client(shared_daemon.url) as client:
        expected = [client.generate(f"item {number}", max_tokens=20).result().token_ids for number in range(3)]
    found = run(driver, "interleaved", shared_daemon.url, transport)
    assert found == [" ".join(["ids", *map(str, ids)]) for ids in expected]


def test_a_stream_is_cancelled_by_call_and_by_being_dropped(
    driver: list[str], spawn: Callable[..., Any], transport: str
) -> None:
    daemon = spawn(script=SLOW)
    assert run(driver, "cancelled", daemon.url, transport) == ["done cancelled", "then length"]
    finished = [event["finish"] for event in daemon.wait_events("request", 3)]
    assert sorted(finished) == ["cancelled", "cancelled", "length"]


def test_sessions_are_read_cut_forked_and_closed(driver: list[str], shared_daemon: Any, transport: str) -> None:
    assert run(driver, "sessions", shared_daemon.url, transport) == [
        "cached 1 1",
        "rolled 1",
        "cut 1",
        "cut 1",
        "closed 1",
        "gone refused unknown_session session",
        "bad refused bad_request tokens",
    ]


def test_a_held_answer_comes_with_its_commit(driver: list[str], shared_daemon: Any, transport: str) -> None:
    found = run(driver, "held", shared_daemon.url, transport)
    assert found == ["done length 6", "again refused not_held request"]


def test_exact_answers(driver: list[str], shared_daemon: Any, transport: str) -> None:
    label, json, regex, *top, prompt, likeliest = run(driver, "exact", shared_daemon.url, transport)
    assert prompt == "prompt 1 1 2"
    with ull.Client(shared_daemon.url) as client:
        asked = {"max_tokens": 0, "prompt_logprobs": True, "prompt_top_logprobs": 1}
        told = client.generate("import os\nimport sys\n", **asked).result().prompt_top_logprobs
    assert told is not None and told[1] is not None and likeliest == f"likeliest 1 1 {told[1][0][0]}"
    assert re.fullmatch("choice [012] 3 1", label) and re.fullmatch(r'json \{"n": \d\}', json)
    assert regex == "regex stop" and top == ["top 2 1"] * 2


def test_texts_and_questions(driver: list[str], shared_daemon: Any, transport: str) -> None:
    with ull.Client(shared_daemon.url) as client:
        ids = client.tokenize("import os")
    assert run(driver, "texts", shared_daemon.url, transport) == [
        " ".join(["ids", *map(str, ids)]),
        "count 1",
        "text import os",
        "chat 4",
        "health ok",
        "info 1",
        "stats 1",
    ]


def test_wrong_input_is_a_typed_error_and_the_connection_lives_on(
    driver: list[str], shared_daemon: Any, transport: str
) -> None:
    assert run(driver, "wrong", shared_daemon.url, transport) == [
        "nothing refused bad_request prompt",
        "both refused bad_request token_ids",
        "hot refused bad_request temperature",
        "type refused bad_request top_k",
        "unknown refused bad_request colour",
        "long refused too_long prompt",
        "regex refused invalid_grammar regex",
        "late refused deadline_unreachable deadline_ms",
        "session refused bad_request tokens",
        "then length",
        "warned colour",
        "unread refused bad_request prompt",
    ]


def test_a_killed_daemon_ends_a_stream_at_once_and_its_successor_is_found(
    driver: list[str], spawn: Callable[..., Any], tmp_path: Path, transport: str
) -> None:
    url = f"ipc://{tmp_path}/d"
    daemon = spawn(url=url, script=SLOW)
    command = [*driver, "killed", url, transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "reading\n"
        daemon.process.kill()
        daemon.process.wait()
        lost = [process.stdout.readline().strip() for _ in range(3)]
        assert lost == ["stream disconnected", "over disconnected", "session disconnected"]
        spawn(url=url, script=SLOW)
        process.stdin.write("\n")
        process.stdin.close()
        rest = process.stdout.read().splitlines()
        assert (rest, process.wait(60)) == (["then length", "old disconnected"], 0)


def test_a_successor_is_found_by_a_client_that_was_idle(
    driver: list[str], spawn: Callable[..., Any], tmp_path: Path, transport: str
) -> None:
    url = f"ipc://{tmp_path}/d"
    daemon = spawn(url=url)
    with subprocess.Popen(
        [*driver, "idle", url, transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "first length\n"
        assert daemon.stop() == 0
        spawn(url=url)
        process.stdin.write("\n")
        process.stdin.close()
        rest = process.stdout.read().splitlines()
        assert (rest, process.wait(60)) == (["then length"], 0)


def test_what_was_sent_before_a_hang_up_is_read_behind_it(driver: list[str], tmp_path: Path, transport: str) -> None:
    url = f"ipc://{tmp_path}/d"
    sent = threading.Event()

    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate):
            words = [token(request.id, index, f"{index} ") for index in range(100)]
            daemon.send(identity, *words, done(request.id, 100))
            sent.set()

    daemon = FakeDaemon(url, handler, local=transport == "local")
    command = [*driver, "late", url, transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert sent.wait(60)
        daemon.close(linger_ms=1000)
        out, _ = process.communicate(timeout=60)
    text = "".join(f"{index} " for index in range(100))
    assert out.splitlines() == [f"text {text}", "health disconnected"]


def test_a_message_too_long_is_refused_under_its_id(driver: list[str], shared_daemon: Any, transport: str) -> None:
    assert run(driver, "too_long", shared_daemon.url, transport) == ["long refused too_long -", "then length"]


def test_nobody_at_the_url(driver: list[str], tmp_path: Path) -> None:
    assert run(driver, "nobody", f"ipc://{tmp_path}/nobody", "auto") == ["health disconnected"]
    assert run(driver, "nobody", f"ipc://{tmp_path}/nobody", "local") == ["health disconnected"]
    assert run(driver, "nobody", "tcp://127.0.0.1:1", "auto") == ["health disconnected"]
    assert run(driver, "nobody", "tcp://127.0.0.1:1", "local") == ["health usage"]
    assert run(driver, "nobody", "nonsense", "auto") == ["health disconnected"]
    assert run(driver, "nobody", f"ipc:///{'x' * 200}", "auto") == ["health disconnected"]


# Daemons that break the rules

LONG = (2**32 - 1).to_bytes(4, "little")
HUGE_LIST = b"\x83\xa4type\xa5token\xa2id\x01\xa3ids\xdd\xff\xff\xff\xff"


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x80", b"\x91" * 5000, HUGE_LIST, b"\x81\xa2id\xd6\x01\x00\x00\x00\x00"],
    ids=["nothing", "no-msgpack", "no-map", "empty", "deep", "a-list-too-long", "an-extension"],
)
def test_garbage_is_a_protocol_error(driver: list[str], tmp_path: Path, transport: str, payload: bytes) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        local = identity.startswith(b"\0L")
        daemon.send_raw(identity, *([len(payload).to_bytes(4, "little"), payload] if local else [b"ull1", payload]))

    with FakeDaemon(f"ipc://{tmp_path}/d", handler, local=transport == "local") as daemon:
        assert run(driver, "one", daemon.url, transport) == ["one protocol", "health protocol"]


def test_a_message_too_long_is_not_read(driver: list[str], tmp_path: Path) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        daemon.send_raw(identity, LONG, bytes(64))

    with FakeDaemon(f"ipc://{tmp_path}/d", handler, local=True) as daemon:
        assert run(driver, "one", daemon.url, "local") == ["one protocol", "health protocol"]


def test_other_frames_than_two_are_a_protocol_error(driver: list[str], tmp_path: Path) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        daemon.send_raw(identity, b"ull1", b"\x80", b"more")

    with FakeDaemon(f"ipc://{tmp_path}/d", handler) as daemon:
        assert run(driver, "one", daemon.url, "zeromq") == ["one protocol", "health protocol"]


def test_a_silent_daemon_is_given_up(driver: list[str], tmp_path: Path, transport: str) -> None:
    with FakeDaemon(f"ipc://{tmp_path}/d", lambda *_: None, local=transport == "local") as daemon:
        assert run(driver, "one", daemon.url, transport) == ["one disconnected", "health disconnected"]


def test_a_daemon_that_knows_nothing_of_the_request_any_more_is_given_up(
    driver: list[str], tmp_path: Path, transport: str
) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Health):
            live = None if request.request is None else False
            daemon.send(identity, wire.HealthReply(id=request.id, status="ok", uptime_ns=1, queue_length=0, live=live))

    with FakeDaemon(f"ipc://{tmp_path}/d", handler, local=transport == "local") as daemon:
        assert run(driver, "one", daemon.url, transport) == ["one disconnected", "health nothing"]


def test_a_slow_daemon_is_waited_for_as_long_as_it_says_that_the_request_runs(
    driver: list[str], tmp_path: Path, transport: str
) -> None:
    asked: list[int] = []

    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate):
            asked.append(request.id)
        elif isinstance(request, wire.Health):
            if request.request is not None and len(asked) < 3:
                asked.append(request.id)
            elif request.request is not None:
                daemon.send(identity, token(asked[0], 0, "late"), done(asked[0], 1))
            reply = wire.HealthReply(id=request.id, status="ok", uptime_ns=1, queue_length=0, live=True)
            daemon.send(identity, reply)

    with FakeDaemon(f"ipc://{tmp_path}/d", handler, local=transport == "local") as daemon:
        assert run(driver, "one", daemon.url, transport) == ["text late", "one nothing", "health nothing"]
