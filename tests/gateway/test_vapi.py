"""Vapi's side of a custom LLM, scripted: a chat with much beside it, streamed as events up to `[DONE]`."""

import http.client
import json
from pathlib import Path

import ull
from conftest import Daemon
from gateways import Gateway

CHAT = [
    {"role": "system", "content": "You answer the phone of a shop."},
    {"role": "user", "content": "Where is the file?"},
]
# What Vapi sends beside the chat, of which OpenAI's API knows nothing.
BESIDE = {
    "call": {"id": "c-1", "type": "webCall", "monitor": {"listenUrl": "wss://x"}, "transport": None},
    "phoneNumber": None,
    "customer": {"number": "+1"},
    "metadata": {"numAssistantTurns": 1},
    "credentials": [],
    "timestamp": 1795594140123,
    "assistant": {"model": {"provider": "custom-llm", "messages": [[]]}},
}


def test_a_turn_of_a_call(shared_daemon: Daemon, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 24, "stream": True, **BESIDE}
    with Gateway(shared_daemon.url, tmp_path) as gateway, ull.Client(shared_daemon.url) as client:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.read().decode().split("\n") if line]
        connection.close()
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert said == client.generate(CHAT, max_tokens=24).result().text
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
