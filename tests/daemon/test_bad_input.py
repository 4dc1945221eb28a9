"""What hostile, clumsy and dying clients do, and that the daemon answers, survives and forgets them."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from raw_client import RawClient
from ull import wire
from ull.bundle import open_bundle
from ull.client.link import Transport
from ull.client.sync import Client
from ull.daemon.admission import MAX_LOGIT_BIAS, MAX_STOP_BYTES, MAX_STOPS
from ull.spawn import python_environment
from ull.text.tokenizer import Tokenizer

SLOW = {"round_ns": 5_000_000}
PROMPT = "def main():\n"


@pytest.fixture
def raw(shared_daemon: Daemon) -> Iterator[RawClient]:
    client = RawClient(shared_daemon.url)
    yield client
    client.close()


def serves(daemon: Daemon) -> bool:
    """Whether a fresh client gets a completion."""
    with Client(daemon.url, connect_timeout=20) as client:
        return client.generate(PROMPT, max_tokens=2, ignore_eos=True).result().usage.completion_tokens == 2


# ---- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "bad_frame"),
        ([b"hello"], "bad_frame"),
        ([wire.VERSION], "bad_frame"),
        ([wire.VERSION] * 3, "bad_frame"),
        ([wire.VERSION, b"\x80"] * 50, "bad_frame"),
        ([b"x" * 1000] * 100, "bad_frame"),
        ([b"ull0", b"\x80"], "bad_version"),
        ([b"", b"\x80"], "bad_version"),
        ([b"\x80", wire.VERSION], "bad_version"),
        ([wire.VERSION, b""], "bad_message"),
        ([wire.VERSION, b"\xc1\xc1"], "bad_message"),
        ([wire.VERSION, b"\x91" * 64 + b"\xc0"], "bad_message"),
        ([wire.VERSION, b"\x91" * 100_000 + b"\xc0"], "bad_message"),
        ([wire.VERSION, b"{}"], "bad_message"),
    ],
)
def test_garbage_is_answered_once(raw: RawClient, frames: list[bytes], code: str) -> None:
    raw.send(*frames)
    reply = raw.receive()
    assert isinstance(reply, wire.Error)
    assert (reply.code, reply.id) == (code, None)
    assert reply.message
    raw.send_map(type="health", id=1)
    assert isinstance(raw.receive(), wire.HealthReply)
    assert raw.silent(0.02)


def test_random_bytes(raw: RawClient, shared_daemon: Daemon) -> None:
    chance = random.Random(1)
    for _ in range(300):
        raw.send(wire.VERSION, chance.randbytes(chance.randrange(200)))
    for _ in range(300):
        reply = raw.receive()
        assert isinstance(reply, wire.Error) and reply.code in {"bad_message", "bad_request", "unknown_type"}
    assert raw.silent(0.02)
    assert serves(shared_daemon)


# fields beside type and id -> (code, field, part of the message)
BAD_FIELDS: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    "nothing to complete": ({}, "bad_request", "prompt", "is missing"),
    "empty prompt": ({"prompt": ""}, "bad_request", "prompt", "is empty"),
    "empty messages": ({"messages": []}, "bad_request", "messages", "is empty"),
    "empty ids": ({"token_ids": []}, "bad_request", "token_ids", "is empty"),
    "two prompts": ({"prompt": "x", "token_ids": [1]}, "bad_request", "token_ids", "both set"),
    "too long": ({"token_ids": [5] * 1500}, "too_long", "token_ids", "1500 tokens are 477 too many"),
    "300 kB": ({"prompt": "word " * 60_000}, "too_long", "prompt", "300000 bytes are at least"),
    "300 kB of chat": (
        {"messages": [{"role": "user", "content": "word " * 60_000}]},
        "too_long",
        "messages",
        "too many",
    ),
    "513 messages": (
        {"messages": [{"role": "user", "content": ""}] * 513},
        "too_long",
        "messages",
        "513 are 1 too many",
    ),
    "ids beyond the vocabulary": ({"token_ids": [4096]}, "bad_request", "token_ids", "id 4096 is outside"),
    "max_tokens -1": ({"prompt": "x", "max_tokens": -1}, "bad_request", "max_tokens", "not -1"),
    "priority": ({"prompt": "x", "priority": "urgent"}, "bad_request", "priority", "is none of realtime"),
    "deadline_ms": ({"prompt": "x", "deadline_ms": 0}, "bad_request", "deadline_ms", "not 0"),
    "hold": ({"prompt": "x", "hold": 1}, "bad_request", "hold", "hold"),
    "session": ({"prompt": "x", "session": "a"}, "bad_request", "session", "session"),
    "max_tokens negative": ({"prompt": "x", "max_tokens": -1}, "bad_request", "max_tokens", "not -1"),
    "max_tokens text": ({"prompt": "x", "max_tokens": "9"}, "bad_request", "max_tokens", "got `str`"),
    "temperature NaN": ({"prompt": "x", "temperature": math.nan}, "bad_request", "temperature", "not nan"),
    "top_p 2": ({"prompt": "x", "top_p": 2.0}, "bad_request", "top_p", "not 2.0"),
    "bias NaN": ({"prompt": "x", "logit_bias": {1: math.nan}}, "bad_request", "logit_bias", "of id 1"),
    "stop empty": ({"prompt": "x", "stop": [""]}, "bad_request", "stop", "empty text"),
    "logprobs 21": ({"prompt": "x", "logprobs": 21}, "bad_request", "logprobs", "not 21"),
    "messages nested": ({"messages": [[[[[[]]]]]]}, "bad_request", "messages", "Expected `object`"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_fields_are_refused_by_name(raw: RawClient, name: str) -> None:
    fields, code, field, said = BAD_FIELDS[name]
    raw.send_map(type="generate", id=9, **fields)
    reply = raw.receive()
    assert isinstance(reply, wire.Error)
    assert (reply.id, reply.code, reply.field) == (9, code, field)
    assert said in reply.message


def test_unknown_types_and_text_that_is_not_utf8(raw: RawClient) -> None:
    raw.send_map(type="sing", id=3)
    reply = raw.receive()
    assert isinstance(reply, wire.Error) and (reply.id, reply.code) == (3, "unknown_type")
    raw.send(wire.VERSION, b"\x83\xa4type\xa8generate\xa2id\x04\xa6prompt\xa2\xff\xfe")
    reply = raw.receive()
    assert isinstance(reply, wire.Error) and (reply.id, reply.code) == (4, "bad_message")
    assert "UTF-8" in reply.message


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_a_message_beyond_the_limit_is_refused(spawn: Spawn, transport: Transport) -> None:
    daemon = spawn("--set", "io.max_message_bytes=65536")
    with Client(daemon.url, connect_timeout=20, transport=transport) as client:
        assert client.info().limits["max_message_bytes"] == 65536
        running = client.generate([5], max_tokens=200, ignore_eos=True)
        with pytest.raises(ull.RequestError, match="65536 bytes") as caught:
            client.generate("x" * 100_000).result()
        assert caught.value.code == "too_long"
        assert running.result().usage.completion_tokens == 200
        with pytest.raises(ull.ConnectionLost):  # not even thrown away
            client.generate("x" * 17_000_000).result()
        assert client.health().status == "ok"


def test_the_limit_follows_from_the_context_unless_it_is_set(shared_daemon: Daemon, tiny_bundle: Path) -> None:
    tokenizer = Tokenizer(open_bundle(tiny_bundle).tokenizer_directory)
    limit = wire.longest_request(1024, tokenizer.bytes_per_token)
    assert limit < 2**20
    with Client(shared_daemon.url, connect_timeout=20) as client:
        with pytest.raises(ull.RequestError, match="at least"):  # taken, and found too long
            client.generate("x" * (limit - 1000)).result()
        with pytest.raises(ull.RequestError, match=f"{limit} bytes"):
            client.generate("x" * limit).result()
        assert client.health().status == "ok"


def test_the_longest_requests_of_every_form_fit(tiny_bundle: Path) -> None:
    tokenizer = Tokenizer(open_bundle(tiny_bundle).tokenizer_directory)
    limit = wire.longest_request(1024, tokenizer.bytes_per_token)
    everything: dict[str, Any] = {
        "stop": ["s" * MAX_STOP_BYTES] * MAX_STOPS,
        "stop_ids": [2**31] * 32,
        "logit_bias": {2**31 + token: 0.1 for token in range(MAX_LOGIT_BIAS)},
    }
    messages = [wire.Message(role="assistant", content="c" * (2 * tokenizer.bytes_per_token))] * 512
    for prompt in (
        {"prompt": "p" * 1024 * tokenizer.bytes_per_token},
        {"token_ids": [2**40] * 1024},
        {"messages": messages},
    ):
        assert len(wire.encode(wire.Generate(id=2**63, **prompt, **everything))) <= limit


def test_others_are_served_while_one_sends_megabytes(spawn: Spawn) -> None:
    daemon = spawn("--set", "io.max_message_bytes=16777216")
    flood = RawClient(daemon.url)
    prompt = "word " * 2_000_000
    for request_id in range(20):
        flood.send_map(type="generate", id=request_id, prompt=prompt)
    assert serves(daemon)
    for _ in range(20):
        reply = flood.receive()
        assert isinstance(reply, wire.Error) and reply.code in ("too_long", "busy")  # busy: more than may wait of one
        assert (reply.retry_after_ms is not None) == (reply.code == "busy")
    flood.close()
    assert len(daemon.wait_events("refused", 20)) == 20


# ---- cancellation -------------------------------------------------------------------------------------------------


def test_cancel_before_start_twice_and_unknown(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    raw = RawClient(daemon.url)
    raw.send_map(type="generate", id=1, token_ids=[5], max_tokens=1000)
    raw.send_map(type="generate", id=2, token_ids=[5], max_tokens=1000)  # waits behind 1
    raw.send_map(type="cancel", id=2)
    raw.send_map(type="cancel", id=2)
    raw.send_map(type="cancel", id=77)
    acks: list[wire.Ack] = []
    ends: list[wire.Done] = []
    while len(acks) < 3 or len(ends) < 1:
        reply = raw.receive()
        if isinstance(reply, wire.Ack):
            acks.append(reply)
        elif isinstance(reply, wire.Done):
            ends.append(reply)
    assert [(ack.id, ack.known) for ack in acks] in (
        [(2, True), (2, True), (77, False)],
        [(2, True), (2, False), (77, False)],
    )
    assert (ends[0].id, ends[0].finish_reason, ends[0].usage.completion_tokens) == (2, "cancelled", 0)
    assert ends[0].timeline.started_ns == 0
    raw.send_map(type="cancel", id=1)
    last: list[wire.Reply] = []  # the end comes from the io thread, the ack from the control plane: in any order
    while len(last) < 2:
        reply = raw.receive()
        if not isinstance(reply, wire.Token):
            last.append(reply)
    assert wire.Ack(id=1, known=True) in last
    assert [reply.finish_reason for reply in last if isinstance(reply, wire.Done)] == ["cancelled"]
    raw.send_map(type="cancel", id=1)  # it has ended
    assert raw.receive() == wire.Ack(id=1, known=False)
    assert raw.silent()
    assert len(daemon.wait_events("request", 2)) == 2
    raw.close()


def test_cancel_during_prefill(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.prefill_chunk=64", script={"prefill_token_ns": 20_000_000, "prefill_chunk": 64})
    with Client(daemon.url) as client:
        stream = client.generate([5] * 1000, max_tokens=5)
        while client.stats().engine["started"] == 0:
            time.sleep(0.005)
        stream.cancel()
        result = stream.result()
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    assert result.timeline.started_ns > 0
    assert result.timeline.first_token_ns == 0


def test_an_id_may_not_be_used_twice_at_once(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    raw, other = RawClient(daemon.url), RawClient(daemon.url)
    raw.send_map(type="generate", id=1, token_ids=[5], max_tokens=600)
    assert isinstance(raw.receive(), wire.Token)
    raw.send_map(type="generate", id=1, token_ids=[5], max_tokens=2)
    other.send_map(type="generate", id=1, token_ids=[5], max_tokens=2)  # another client's id is another request
    refusal: wire.Reply | None = None
    while not isinstance(refusal, wire.Error):
        refusal = raw.receive()
    assert (refusal.id, refusal.code) == (1, "duplicate_id")
    end = raw.collect(1)[-1]
    assert isinstance(end, wire.Done) and end.usage.completion_tokens == 600
    assert isinstance(other.collect(1)[-1], wire.Done)
    raw.send_map(type="generate", id=1, token_ids=[5], max_tokens=2)  # free again
    end = raw.collect(1)[-1]
    assert isinstance(end, wire.Done) and end.usage.completion_tokens == 2
    raw.close()
    other.close()


# ---- clients that die or sleep ------------------------------------------------------------------------------------

CLIENT_PROGRAM = """
import sys
from ull.client.sync import Client
with Client(sys.argv[1]) as client:
    for index, token in enumerate(client.generate([5], max_tokens=1000, logprobs=20)):
        if index == 0:
            print("streaming", flush=True)
"""


def streaming_client(url: str, max_tokens: int = 1000) -> "subprocess.Popen[str]":
    """A process that has received its first token and goes on reading."""
    program = CLIENT_PROGRAM.replace("1000", str(max_tokens))
    client = subprocess.Popen(
        [sys.executable, "-c", program, url], env=python_environment(), stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "streaming\n"
    return client


def finish(client: "subprocess.Popen[str]") -> None:
    client.kill()
    client.wait()
    if client.stdout is not None:
        client.stdout.close()


def test_a_killed_client_frees_the_engine(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    client = streaming_client(daemon.url)
    with Client(daemon.url) as other:
        waiting = other.generate([5], max_tokens=2)
        finish(client)
        assert waiting.result().usage.completion_tokens == 2
    killed, served = daemon.wait_events("request", 2)
    assert (killed["finish"], killed["connection"], killed["delivered"]) == ("cancelled", "gone", False)
    assert killed["completion"] < 1000
    assert (served["finish"], served["connection"]) == ("length", "ok")


def test_a_killed_client_s_waiting_requests_end_too(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    program = CLIENT_PROGRAM.replace(
        "for index", "queued = [client.generate([5], max_tokens=1000) for _ in range(3)]\n    for index"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program, daemon.url], env=python_environment(), stdout=subprocess.PIPE, text=True
    )
    with Client(daemon.url) as other:
        while other.health().queue_length < 3:
            time.sleep(0.01)
        finish(client)
        assert other.generate([5], max_tokens=2).result().usage.completion_tokens == 2
    lines = daemon.wait_events("request", 5)
    assert sorted(line["finish"] for line in lines) == ["cancelled"] * 4 + ["length"]  # clients take turns
    assert sum(line["completion"] for line in lines) < 1500


def test_a_client_that_stops_reading_loses_its_stream_only(spawn: Spawn) -> None:
    script = {"round_ns": 500_000, "context": 65536, "pages": 1100}
    daemon = spawn("--set", "io.client_stall_ms=500", script=script)
    client = streaming_client(daemon.url, 20_000)
    try:
        os.kill(client.pid, signal.SIGSTOP)
        with Client(daemon.url) as other:
            frames = other.generate([5], max_tokens=20).result()
            assert frames.usage.completion_tokens == 20
            assert other.stats().io["clients_stalled"] == 1
    finally:
        os.kill(client.pid, signal.SIGCONT)
        finish(client)
    stalled, served = daemon.wait_events("request", 2)
    assert (stalled["finish"], stalled["connection"]) == ("cancelled", "stalled")
    assert (served["finish"], served["connection"], served["delivered"]) == ("length", "ok", True)


def test_a_client_gone_before_its_answer(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    for ended in range(5):
        hasty = RawClient(daemon.url)
        hasty.send_map(type="generate", id=1, token_ids=[5], max_tokens=1000)
        with Client(daemon.url) as client:  # until the request has been accepted
            while client.stats().requests["accepted"] <= ended:
                time.sleep(0.002)
        hasty.close()
        daemon.wait_events("request", ended + 1)
    assert {line["connection"] for line in daemon.events("request")} == {"gone"}


def test_many_requests_are_all_answered_once(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.queue_depth=16")
    chance = random.Random(7)
    with Client(daemon.url) as client:
        streams = []
        for _ in range(300):
            stream = client.generate(PROMPT, max_tokens=chance.randrange(1, 12), temperature=1.0)
            if chance.random() < 0.3:
                stream.cancel()
            streams.append(stream)
            if chance.random() < 0.5:
                client.poll(0.002)
        outcomes = {"busy": 0, "accepted": 0}
        for stream in streams:
            try:
                assert stream.result().finish_reason in {"length", "stop", "cancelled"}
                outcomes["accepted"] += 1
            except ull.Busy:
                outcomes["busy"] += 1
        stats = client.stats()
    assert outcomes["accepted"] == stats.requests["accepted"]
    assert outcomes["accepted"] == len(daemon.wait_events("request", outcomes["accepted"]))
    assert outcomes["busy"] == stats.requests["refused"].get("busy", 0)
    assert sum(outcomes.values()) == 300
    assert stats.engine["slots_used"] == 0


def test_descriptors_and_threads_do_not_pile_up(spawn: Spawn) -> None:
    daemon = spawn()
    assert serves(daemon)

    def held() -> tuple[int, int]:
        process = Path(f"/proc/{daemon.pid}")
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    before = held()
    for _ in range(30):
        assert serves(daemon)
    deadline = time.monotonic() + 20
    while held() > (before[0] + 1, before[1]):  # closed connections are noticed a little later
        assert time.monotonic() < deadline, (before, held())
        time.sleep(0.02)
