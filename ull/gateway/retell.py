"""Retell's LLM websocket: Retell connects for each call, sends the live transcript, and asks for what the agent says.

The protocol is at https://docs.retellai.com/api-references/llm-websocket. A transcript that only tells (`update_only`)
is read ahead, so that the answer finds it in the KV cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, NamedTuple

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from ull.client.aio import AsyncClient
from ull.errors import UllError
from ull.log import Log
from ull.voice.conversation import Conversation

PING_S = 2.0  # Retell connects anew where it has heard nothing for five seconds
MAX_UTTERANCES = 4096
POLICY_VIOLATION, TRY_AGAIN = 1008, 1013  # why a websocket is closed
_ROLES = {"agent": "assistant", "user": "user"}
_SILENCE = "(The user has not answered for a while. Say something that brings them back.)"


class CallSettings(NamedTuple):
    """What an agent is told, and what it says first; "": it waits for the user."""

    instructions: str = ""
    greeting: str = ""
    max_tokens: int = 256


class Utterance(msgspec.Struct):
    """What somebody has said, as far as it was heard."""

    role: str
    content: str = ""


class Event(msgspec.Struct):
    """A message of Retell's; what else it holds is of no concern here."""

    interaction_type: str
    response_id: int | None = None
    transcript: list[Utterance] = []


class Call:
    """One call: one websocket, one conversation."""

    def __init__(self, websocket: WebSocket, client: AsyncClient, settings: CallSettings, log: Log) -> None:
        self._websocket = websocket
        self._conversation = Conversation(client)
        self._settings = settings
        self._log = log
        self._answering: asyncio.Task[None] | None = None
        self.answers = 0

    async def run(self) -> None:
        """Serves the call until Retell hangs up, or says what nobody understands."""
        await self._websocket.accept()
        await self._send(response_type="config", config={"auto_reconnect": True, "call_details": False})
        await self._say(0, self._settings.greeting, complete=True)
        pings = asyncio.ensure_future(self._ping())
        try:
            while True:
                event = _events.decode(await self._websocket.receive_text())
                await self._take(event)
        except WebSocketDisconnect:
            pass
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
            reason = f"not a message of Retell's: {error}"[:120]
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await self._websocket.close(POLICY_VIOLATION, reason)
        finally:
            pings.cancel()
            await self._stop_answering()
            await self._conversation.aclose()

    async def _take(self, event: Event) -> None:
        kind = event.interaction_type
        if kind == "update_only":
            if self._answering is None or self._answering.done():
                self._conversation.read_ahead(self._messages(event))
        elif kind in ("response_required", "reminder_required") and event.response_id is not None:
            await self._stop_answering()  # the user went on: the answer before is not wanted
            self._answering = asyncio.ensure_future(self._answer(event))

    async def _answer(self, event: Event) -> None:
        assert event.response_id is not None
        messages = self._messages(event)
        if event.interaction_type == "reminder_required":
            messages.append({"role": "user", "content": _SILENCE})
        try:
            stream = await self._conversation.answer(messages, max_tokens=self._settings.max_tokens)
            async with stream:
                async for token in stream:
                    if token.text:
                        await self._say(event.response_id, token.text)
        except UllError as error:
            self._log.warning("retell", response=event.response_id, code=error.code, message=error.message[:200])
        self.answers += 1
        await self._say(event.response_id, "", complete=True)

    async def _stop_answering(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)

    def _messages(self, event: Event) -> list[dict[str, Any]]:
        """The transcript as a chat, in which what one says in several utterances is one turn."""
        turns: list[dict[str, Any]] = []
        if self._settings.instructions:
            turns.append({"role": "system", "content": self._settings.instructions})
        for utterance in event.transcript[-MAX_UTTERANCES:]:
            role = _ROLES.get(utterance.role)
            if role is None or not utterance.content:
                continue
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += f" {utterance.content}"
            else:
                turns.append({"role": role, "content": utterance.content})
        return turns

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            await self._send(response_type="ping_pong", timestamp=int(time.time() * 1000))

    async def _say(self, response: int, text: str, complete: bool = False) -> None:
        await self._send(
            response_type="response", response_id=response, content=text, content_complete=complete, end_call=False
        )

    async def _send(self, **message: Any) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # Retell has hung up, which the next receive says
            await self._websocket.send_text(msgspec.json.encode(message).decode())


_events = msgspec.json.Decoder(Event)
