"""bench/gateway.py without a gateway: what it counts as text, which pass it takes, and when a bar is missed."""

import json
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from conftest import ROOT

pytest.importorskip("httptools", reason="needs the extra `gateway`")
sys.path.append(str(ROOT / "bench"))

import gateway
from gateway import GATEWAY, LOCAL, PEER, HttpConnection, Samples, checks_of, quietest, take_turns, text_times


def event(text: str | None, chat: bool = True) -> bytes:
    choice = {"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


LAST = b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'


def test_only_events_with_text_count() -> None:
    arrived = [(1, event("")), (2, event("a")), (3, event(None)), (4, event("b", chat=False)), (5, LAST)]
    assert text_times(arrived) == [2, 4]


def test_events_that_come_together_have_one_time_and_a_split_one_its_last() -> None:
    split = event("c")
    assert text_times([(1, event("a") + event("b")), (2, split[:9]), (3, split[9:] + LAST)]) == [1, 1, 3]


@pytest.mark.parametrize("payload", [b'{"error": {}}', b'data: {"error": {"message": "no"}}\n\n', LAST, b""])
def test_an_answer_without_text_ends_the_benchmark(payload: bytes) -> None:
    with pytest.raises(SystemExit, match="the gateway answers"):
        text_times([(1, payload)])


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """Answers two requests of one connection, each in chunks that do not end where events do."""
    body = event("a") + event("b") + LAST
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:30], body[30:])) + b"0\r\n\r\n"

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for _ in range(2):
                head, _, rest = connection.recv(4096).partition(b"\r\n\r\n")
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                while len(rest) < length:
                    rest += connection.recv(4096)
                asked.append(json.loads(rest))
                connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)

    asked: list[dict[str, object]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()
        thread.join(20)
    assert [body["max_tokens"] for body in asked] == [3, 4]
    assert all(body["stream"] is True and body["ignore_eos"] is True for body in asked)
    assert "messages" in asked[0] and "prompt" in asked[1]


def test_a_connection_is_kept_for_the_next_request(server: tuple[str, int]) -> None:
    with HttpConnection(server) as connection:
        for kind, tokens in (("chat", 3), ("completion", 4)):
            begun, times = connection.ask(kind, tokens)
            assert len(times) == 2 and begun < times[0] <= times[1]


def test_every_way_is_as_often_at_each_place_of_a_turn() -> None:
    order: list[str] = []

    def asks(name: str) -> gateway.Ask:
        return lambda kind, tokens: (order.append(name), (0, [1, 3]))[1]

    samples: Samples = defaultdict(list)
    take_turns({name: asks(name) for name in "abc"}, "chat", 6, samples)
    turns = np.array(order).reshape(-1, 3)[gateway.WARM_UP :]
    assert [sorted(column.tolist()) for column in turns.T] == [sorted("abcabc")] * 3
    assert {name: len(values) for name, values in samples.items()} == {
        f"{what}, chat, {name} ({unit})": 6 for what, unit in (("TTFT", "ms"), ("ITL", "us")) for name in "abc"
    }


def samples(**change: float) -> Samples:
    """A run that meets all bars, but for what is changed."""
    rows: Samples = {}
    for kind in gateway.PATHS:
        for name in (PEER, LOCAL, GATEWAY):
            added = name == GATEWAY
            rows[f"TTFT, {kind}, {name} (ms)"] = [3.0 + (change.get(f"{kind}_ttft", 0.7) if added else 0.0)] * 9
            rows[f"ITL, {kind}, {name} (us)"] = [2000.0 + (change.get(f"{kind}_itl", 100.0) if added else 0.0)] * 9
    rows["ITL, 1 connections (us)"] = [2000.0] * 90 + [4000.0] * 10
    rows["ITL, 200 connections (us)"] = [change.get("crowded", 2000.0)] * 90 + [change.get("tail", 4000.0)] * 10
    return rows


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, set()),
        ({"chat_ttft": 2.1}, {"TTFT, chat: p50 above the ZeroMQ client's"}),
        ({"completion_ttft": 2.1}, {"TTFT, completion: p50 above the ZeroMQ client's"}),
        ({"chat_itl": 1001.0}, {"ITL, chat: p99 above the ZeroMQ client's"}),
        ({"crowded": 2210.0}, {"ITL p50 with 200 connections, of that with one"}),
        ({"tail": 4500.0}, {"ITL p99 with 200 connections, of that with one"}),
    ],
)
def test_bars(change: dict[str, float], missed: set[str]) -> None:
    assert {check.name for check in checks_of(samples(**change)) if not check.ok} == missed


def test_the_peer_says_which_pass_was_quiet() -> None:
    noisy, quiet = samples(), samples(chat_itl=900.0)
    noisy[f"ITL, chat, {PEER} (us)"] = [2500.0] * 9
    assert quietest([noisy, quiet]) == 1
