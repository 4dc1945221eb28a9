"""Retell's side of a call, scripted: it connects, tells what is said, and asks for what the agent says."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

import ull
from conftest import Daemon
from gateways import Gateway
from ull.gateway.keys import new_key

PROMPT = "You answer the phone of a shop."
HEARD = ["Where", "Where is the file", "Where is the file that I was looking for all the time"]


def transcript(words: str) -> list[dict[str, Any]]:
    return [{"role": "agent", "content": "Hello.", "words": []}, {"role": "user", "content": words, "words": []}]


def chat(words: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": PROMPT},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": words},
    ]


@asynccontextmanager
async def call(gateway: Gateway, path: str = "/retell/call_1") -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://127.0.0.1:{gateway.port}{path}", open_timeout=60) as socket:
        yield socket


async def tell(socket: ClientConnection, **event: Any) -> None:
    await socket.send(json.dumps(event))


async def hear(socket: ClientConnection) -> dict[str, Any]:
    """The next message that is no ping."""
    while True:
        message: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 60))
        if message["response_type"] != "ping_pong":
            return message


async def answer(socket: ClientConnection, response: int) -> str:
    """What the agent says in one response; nothing of others may come between."""
    text = ""
    while True:
        message = await hear(socket)
        assert message["response_type"] == "response"
        assert message["response_id"] == response
        assert message["end_call"] is False
        text += message["content"]
        if message["content_complete"]:
            return text


@pytest.fixture
def gateway(shared_daemon: Daemon, tmp_path: Path) -> Gateway:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(f"{PROMPT}\n", encoding="utf-8")
    arguments = ("--retell-prompt", str(prompt), "--retell-greeting", "Hello.", "--retell-max-tokens", "24")
    return Gateway(shared_daemon.url, tmp_path, *arguments)


def test_a_call(gateway: Gateway, shared_daemon: Daemon) -> None:
    async def play() -> str:
        async with call(gateway) as socket:
            assert (await hear(socket))["config"]["auto_reconnect"] is True
            assert await answer(socket, 0) == "Hello."
            for words in HEARD:
                await tell(socket, interaction_type="update_only", transcript=transcript(words))
                await asyncio.sleep(0.05)
            await tell(socket, interaction_type="ping_pong", timestamp=1700000000000)
            await tell(socket, interaction_type="response_required", response_id=1, transcript=transcript(HEARD[-1]))
            return await answer(socket, 1)

    with gateway, ull.Client(shared_daemon.url) as client:
        said = asyncio.run(play())
        assert said == client.generate(chat(HEARD[-1]), max_tokens=24).result().text
    deadline = time.monotonic() + 20
    while not (answered := [event for event in shared_daemon.events("request") if event["completion"] == 24]):
        assert time.monotonic() < deadline, shared_daemon.log_lines()
        time.sleep(0.01)
    assert answered[0]["cached"] > 15  # what was told has been read before it was asked for


def test_a_response_that_is_no_longer_wanted_is_cancelled(gateway: Gateway, shared_daemon: Daemon) -> None:
    async def play() -> str:
        async with call(gateway) as socket:
            await hear(socket)
            await answer(socket, 0)
            for number in range(1, 6):
                words = transcript(HEARD[-1] * number)
                await tell(socket, interaction_type="response_required", response_id=number, transcript=words)
            while (message := await hear(socket))["response_id"] < 5:
                pass
            return str(message["content"]) + await answer(socket, 5)

    with gateway, ull.Client(shared_daemon.url) as client:
        assert asyncio.run(play()) == client.generate(chat(HEARD[-1] * 5), max_tokens=24).result().text


def test_a_silent_user_is_spoken_to(gateway: Gateway) -> None:
    async def play() -> str:
        async with call(gateway) as socket:
            await hear(socket)
            await answer(socket, 0)
            await tell(socket, interaction_type="reminder_required", response_id=3, transcript=transcript("Hm."))
            return await answer(socket, 3)

    with gateway:
        assert asyncio.run(play())


WRONG = (
    "",
    "{",
    "[]",
    '{"transcript": 1}',
    '{"interaction_type": 1}',
    "[" * 50_000,
    '{"interaction_type": "x"',
    b"\xff",
)


@pytest.mark.parametrize("message", WRONG, ids=range(len(WRONG)))
def test_what_retell_does_not_send_ends_the_call_and_no_other(gateway: Gateway, message: str | bytes) -> None:
    async def play() -> int:
        async with call(gateway) as other, call(gateway) as socket:
            await socket.send(message)
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    await asyncio.wait_for(socket.recv(), 60)
            await hear(other)
            await answer(other, 0)
            await tell(other, interaction_type="something_new", transcript=[])  # what may come one day is ignored
            await tell(other, interaction_type="response_required", response_id=1, transcript=transcript("Hm."))
            assert await answer(other, 1)
            return caught.value.rcvd.code if caught.value.rcvd else 0

    with gateway:
        assert asyncio.run(play()) == 1008


def test_a_message_that_is_too_long_ends_the_call(gateway: Gateway) -> None:
    async def play() -> int:
        async with call(gateway) as socket:
            await socket.send("x" * (2 << 20))
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    await asyncio.wait_for(socket.recv(), 60)
            return caught.value.rcvd.code if caught.value.rcvd else 0

    with gateway:
        assert asyncio.run(play()) == 1009


def test_pings_are_sent(gateway: Gateway) -> None:
    async def play() -> dict[str, Any]:
        async with call(gateway) as socket:
            while True:
                message: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 60))
                if message["response_type"] == "ping_pong":
                    return message

    with gateway:
        assert asyncio.run(play())["timestamp"] > 1_700_000_000_000


def test_a_call_needs_a_key_where_others_do(shared_daemon: Daemon, tmp_path: Path) -> None:
    key, line = new_key("retell")
    file = tmp_path / "keys"
    file.write_text(line, encoding="utf-8")

    async def play() -> None:
        async with call(gateway, f"/retell/{key}/call_2") as socket:
            await hear(socket)
        for path in ("/retell/call_2", "/retell/wrong/call_2"):
            with pytest.raises(Exception, match="403"):
                async with call(gateway, path):
                    pass

    with Gateway(shared_daemon.url, tmp_path, "--api-keys", str(file)) as gateway:
        asyncio.run(play())
        assert key not in gateway.log_path.read_text(encoding="utf-8")
