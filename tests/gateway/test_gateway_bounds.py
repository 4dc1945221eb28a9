"""What hostile and broken clients may cost: typed errors, bounded memory, and nobody else is disturbed."""

import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from gateways import Gateway
from processes import descriptors

MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
ASK = {"prompt": "import ", "max_tokens": 4}


@pytest.fixture(scope="module")
def gateway(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("gateway")
    arguments = ("--read-timeout", "1.5", "--stall-timeout", "1.5", "--max-connections", "300")
    with Gateway(shared_daemon.url, directory, *arguments) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def undisturbed(gateway: Gateway) -> Iterator[None]:
    """After each attack the next client is served as ever, and memory is what it was."""
    before = gateway.memory
    yield
    status, body = post(gateway, ASK)
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)
    assert gateway.memory - before < 48 * MIB


def post(gateway: Gateway, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    try:
        connection.request("POST", path, payload, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def raw(gateway: Gateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=60)


def said(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer behind which the connection is closed."""
    data = b""
    while part := receive(connection):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def is_typed(body: dict[str, Any]) -> bool:
    error = body["error"]
    return set(error) == {"message", "type", "param", "code"} and bool(error["message"]) and bool(error["code"])


def test_a_body_of_100_mb_is_refused_at_its_head(gateway: Gateway) -> None:
    with raw(gateway) as connection:
        connection.sendall(HEAD + b"content-length: 100000000\r\n\r\n")
        status = connection.recv(65536)
    assert b" 413 " in status.split(b"\r\n")[0]


def test_a_body_of_100_mb_that_does_not_say_so_is_refused_on_the_way(gateway: Gateway) -> None:
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    before = gateway.memory
    with raw(gateway) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while sent < 100 * MIB:
                connection.sendall(chunk)
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            pass
        answer = receive(connection)
    assert not answer or b" 413 " in answer.split(b"\r\n")[0]
    assert gateway.memory - before < 48 * MIB


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "max_tokens": 1e400}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "max_tokens": NaN}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b', "prompt": "x"}',
        b'{"prompt": [' + b"[1]," * 50_000 + b"[1]]}",
        b'{"prompt": "x", "logit_bias": {"a": 1}}',
        b'{"prompt": [1, "x"]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [99999999999999999999999]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "x", "stream": "yes"}',
        b'{"prompt": "x", "stop": [1]}',
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}',
        b'{"prompt": "x", "regex": "("}',
        b'{"prompt": "x", "model": ' + b'"m' * 1 + b"m" * 100_000 + b'"}',
    ],
)
def test_every_wrong_body_gets_a_typed_error(gateway: Gateway, body: bytes) -> None:
    status, answer = post(gateway, body)
    assert 400 <= status < 500
    assert is_typed(answer)
    assert len(answer["error"]["message"]) < 2000


def test_every_wrong_type_of_every_field_gets_a_typed_error_or_an_answer(gateway: Gateway) -> None:
    from ull.gateway.bodies import ChatRequest, CompletionRequest, ResponseRequest

    wrong = [0, -1, 1.5, 2**70, "", "x", [], {}, [[]], [None], {"": None}, True, None, "x" * 5000, [0] * 5000]
    bodies: list[tuple[str, type, dict[str, Any]]] = [
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 1}),
        ("/v1/responses", ResponseRequest, {"input": "x", "max_output_tokens": 1}),
    ]
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    for path, struct_type, good in bodies:
        for field in struct_type.__struct_fields__:  # type: ignore[attr-defined]
            for value in wrong:
                body = json.dumps({**good, field: value})
                connection.request("POST", path, body, {"content-type": "application/json"})
                answer = connection.getresponse()
                payload = answer.read()
                if answer.headers["content-type"].startswith("text/event-stream"):
                    assert payload.endswith(b"\n\n")
                    continue
                told = json.loads(payload)
                assert answer.status == 200 or (answer.status in (400, 404) and is_typed(told)), (
                    path,
                    body[:200],
                    told,
                )
    connection.close()


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        (404, "GET", "/nothing", {}),
        (404, "POST", "/v1/embeddings", {}),
        (405, "GET", "/v1/completions", {}),
        (405, "DELETE", "/v1/models", {}),
        (415, "POST", "/v1/completions", {"content-type": "text/plain"}),
        (404, "GET", "/page/../../../etc/passwd", {}),
        (404, "GET", "/page/%2e%2e/app.py", {}),
        (400, "POST", "/v1/completions", {"content-type": "application/json", "x-session-id": "s" * 200}),
    ],
)
def test_what_is_not_there_says_so_in_the_same_form(
    gateway: Gateway, status: int, method: str, path: str, headers: dict[str, str]
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request(method, path, json.dumps(ASK) if method == "POST" else None, headers)
    answer = connection.getresponse()
    assert answer.status == status
    assert "error" in json.loads(answer.read())
    assert answer.headers["x-request-id"]
    connection.close()


@pytest.mark.parametrize(
    "junk", [b"\x00" * 100, b"GET\r\n\r\n", b"NONSENSE / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
def test_what_is_no_http_is_refused(gateway: Gateway, junk: bytes) -> None:
    with raw(gateway) as connection:
        connection.sendall(junk)
        status, body = said(connection)
    assert status == 400
    assert is_typed(body)


def test_a_flood_of_header_lines_is_refused(gateway: Gateway) -> None:
    with raw(gateway) as connection:
        try:
            connection.sendall(HEAD)
            for number in range(100_000):
                connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 100))
        except (ConnectionResetError, BrokenPipeError):
            pass
        answer = receive(connection)
    assert not answer or b" 431 " in answer.split(b"\r\n")[0]


def test_a_head_that_never_ends_is_given_up(gateway: Gateway) -> None:
    with raw(gateway) as connection:
        connection.sendall(b"POST /v1/compl")
        status, body = said(connection)
    assert status == 408
    assert is_typed(body)


def test_a_connection_that_says_nothing_is_given_up(gateway: Gateway) -> None:
    with raw(gateway) as connection:
        assert receive(connection) == b""


def test_a_body_that_never_ends_is_given_up(gateway: Gateway) -> None:
    with raw(gateway) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n" + b'{"prompt"')
        answer = receive(connection)
    assert b" 408 " in answer.split(b"\r\n")[0]


def test_half_open_connections_do_not_keep_others_out(gateway: Gateway) -> None:
    before = descriptors(gateway.process.pid)
    held = [raw(gateway) for _ in range(200)]
    for connection in held:
        connection.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
    assert post(gateway, ASK)[0] == 200
    for connection in held:
        connection.close()
    wait_for_descriptors(gateway, before + 2)


def test_connections_beyond_the_most_are_told_so(gateway: Gateway) -> None:
    before, held = descriptors(gateway.process.pid), []
    refused = None
    for _ in range(400):
        connection = raw(gateway)
        held.append(connection)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = receive(connection)
        if b" 503 " in answer.split(b"\r\n")[0]:
            refused = answer
            break
    for connection in held:
        connection.close()
    assert refused is not None
    assert is_typed(json.loads(refused.partition(b"\r\n\r\n")[2]))
    wait_for_descriptors(gateway, before + 2)


def test_a_client_that_never_reads_is_given_up_and_its_request_cancelled(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 20_000, "context": 131_072, "pages": 2048})
    with Gateway(daemon.url, tmp_path, "--stall-timeout", "1") as gateway, raw(gateway) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # A slow gateway puts many tokens into one event. With logprobs each is 60 bytes or more even so: 8 MB in all,
        # of which the kernel takes about 4 on a deaf client's behalf.
        asked = {"prompt": "x", "max_tokens": 130_000, "stream": True, "ignore_eos": True, "logprobs": 5}
        body = json.dumps(asked).encode()
        deaf.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert gateway.wait_request(finish="cancelled")
        assert post(gateway, ASK)[0] == 200


def test_a_client_that_hangs_up_rudely_is_forgotten(unhurried: Daemon, tmp_path: Path) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}).encode()
    with Gateway(unhurried.url, tmp_path) as gateway:
        rude = raw(gateway)
        rude.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        rude.recv(1000)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.close()
        assert unhurried.wait_events("request", 1)[0]["finish"] == "cancelled"


def test_requests_behind_one_another_are_answered_in_order(gateway: Gateway) -> None:
    body = json.dumps(ASK).encode()
    one = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with raw(gateway) as connection:
        connection.sendall(one * 5)
        data = b""
        while data.count(b"text_completion") < 5:
            data += connection.recv(65536)
    assert data.count(b"HTTP/1.1 200") == 5


def test_a_full_queue_says_when_to_try_again(spawn: Spawn, tmp_path: Path) -> None:
    script = {"tokens": [65], "round_ns": 50_000_000, "context": 9000}
    daemon = spawn("--set", "engine.queue_depth=2", "--set", "engine.client_share=1", script=script)
    with Gateway(daemon.url, tmp_path) as gateway, raw(gateway) as first:
        body = json.dumps({"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
        first.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        first.recv(1000)
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(ASK), {"content-type": "application/json"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
        assert (answer.status, told["error"]["code"]) == (429, "busy")
        assert int(answer.headers["retry-after"]) >= 1
        assert float(answer.headers["retry-after-ms"]) > 0
        connection.close()


def test_a_daemon_that_goes_away_is_an_error_and_its_successor_is_found(
    spawn: Spawn, tiny_bundle: Path, tmp_path: Path
) -> None:
    url = f"ipc://{tmp_path / 'moving.sock'}"
    with Gateway(url, tmp_path) as gateway:
        status, body = post(gateway, ASK)
        assert (status, body["error"]["code"]) == (503, "connection_lost")
        assert health(gateway) == (503, "unreachable")
        first = spawn(url=url, script={"tokens": [65], "round_ns": 5_000_000, "context": 9000})
        assert post(gateway, ASK)[0] == 200
        assert health(gateway) == (200, "ok")
        with raw(gateway) as connection:
            body_ = json.dumps({"prompt": "x", "max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
            connection.sendall(HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body_) + body_)
            data = connection.recv(1000)
            first.kill()
            while part := receive(connection):
                data += part
        events = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", data)]
        assert is_typed(events[-1])
        assert events[-1]["error"]["code"] == "connection_lost"
        assert b"[DONE]" not in data
        spawn(url=url)
        assert post(gateway, ASK)[0] == 200


def health(gateway: Gateway) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    status = json.loads(answer.read())["status"]
    connection.close()
    return answer.status, status


def test_health_tells_of_an_engine_that_makes_no_progress(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn("--set", "engine.watchdog_ms=100", script={"hang_step": 20, "round_ns": 1_000_000})
    with Gateway(daemon.url, tmp_path) as gateway, ull.Client(daemon.url) as client:
        assert health(gateway) == (200, "ok")
        stream = client.generate("x", max_tokens=50, ignore_eos=True)
        deadline = time.monotonic() + 30
        while health(gateway)[1] == "ok":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert health(gateway) == (503, "stalled")
        stream.cancel()


def wait_for_descriptors(gateway: Gateway, most: int) -> None:
    deadline = time.monotonic() + 20
    while descriptors(gateway.process.pid) > most:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_left_open_by_a_hundred_clients_that_leave(gateway: Gateway) -> None:
    before = descriptors(gateway.process.pid)
    for _ in range(100):
        with raw(gateway) as connection:
            connection.sendall(HEAD + b"content-length: 30\r\n\r\n{")
    wait_for_descriptors(gateway, before + 2)
