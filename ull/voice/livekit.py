"""ull as an LLM of LiveKit Agents (the extra `livekit`).

language_model = LLM(temperature=0.7)
session = AgentSession(llm=language_model, stt=..., tts=...)
language_model.attach(session)      # interim transcripts are read while the user still speaks
await session.start(Agent(instructions="..."))

LiveKit's preemptive generation asks for the answer to a likely turn ahead of time, and holds what comes until the turn
is confirmed. A turn that goes on is asked for anew, and its beginning is found in the session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from livekit.agents import (
    APIConnectionError,
    APIConnectOptions,
    APIError,
    APIStatusError,
    APITimeoutError,
    NotGivenOr,
    llm,
)
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS, NOT_GIVEN
from livekit.agents.utils import is_given
from livekit.agents.voice import AgentSession, UserInputTranscribedEvent

from ull.client.aio import AsyncClient, AsyncStream
from ull.client.options import GENERATE_OPTIONS, GenerateOptions, refuse_unknown
from ull.client.protocol import Result
from ull.errors import Busy, ConnectionLost, Draining, RequestError, RequestTimeout, UllError
from ull.text.call_guard import CallGuard
from ull.voice.conversation import Conversation, as_message


class LLM(llm.LLM):
    """One conversation with a daemon: make one for each AgentSession.

    url: the daemon's endpoint; None: this user's socket. client: an `ull.AsyncClient` to share instead.
    options: any of `ull.AsyncClient.generate`, for every answer. An unknown one is a TypeError.
    """

    def __init__(self, *, url: str | None = None, client: AsyncClient | None = None, **options: Any) -> None:
        super().__init__()
        refuse_unknown("LLM", options, GENERATE_OPTIONS)
        self._options = options
        self._own_client = client is None
        self._client = AsyncClient(url) if client is None else client
        self._conversation: Conversation | None = None
        self._name = "unknown"  # until the daemon was asked

    @property
    def model(self) -> str:
        """The engine's name, once the daemon was asked."""
        return self._name

    @property
    def provider(self) -> str:
        """Who answers, for metrics."""
        return "ull"

    @property
    def conversation(self) -> Conversation:
        """What reads ahead and answers; opened in the event loop that uses it first."""
        if self._conversation is None:
            self._conversation = Conversation(self._client)
        return self._conversation

    def attach(self, session: AgentSession[Any]) -> None:
        """Has the daemon read what a session's user says while it is still being said."""
        session.on("user_input_transcribed", lambda event: self._heard(session, event))

    def chat(
        self,
        *,
        chat_ctx: llm.ChatContext,
        tools: list[llm.Tool] | None = None,
        conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS,
        parallel_tool_calls: NotGivenOr[bool] = NOT_GIVEN,
        tool_choice: NotGivenOr[llm.ToolChoice] = NOT_GIVEN,
        extra_kwargs: NotGivenOr[dict[str, Any]] = NOT_GIVEN,
    ) -> Stream:
        """The answer to a chat. extra_kwargs: options of this answer alone. parallel_tool_calls says nothing here."""
        options = {**self._options, **(extra_kwargs if is_given(extra_kwargs) else {})}
        refuse_unknown("chat", options, GENERATE_OPTIONS)
        if is_given(tool_choice):
            options["tool_choice"] = tool_choice
        return Stream(self, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options, options=options)

    async def aclose(self) -> None:
        """Ends what runs at the daemon."""
        await super().aclose()
        if self._conversation is not None:
            await self._conversation.aclose()
        if self._own_client:
            await self._client.close()

    async def _prewarm_impl(self) -> None:
        """Connects, and learns the engine's name."""
        self._name = str((await self._client.info()).engine["name"])

    def _heard(self, session: AgentSession[Any], event: UserInputTranscribedEvent) -> None:
        if event.is_final or not event.transcript.strip():
            return
        with contextlib.suppress(RuntimeError, RequestError):  # no agent runs yet, or a chat that has no text
            agent = session.current_agent
            options = _with_tools(self._options, agent.tools)
            heard = {"role": "user", "content": event.transcript.strip()}
            self.conversation.read_ahead([*_messages(agent.chat_ctx), heard], **options)


class Stream(llm.LLMStream):
    """One answer. LiveKit ends it by cancelling the task that runs `_run`, and the daemon hears of it."""

    def __init__(
        self,
        owner: LLM,
        *,
        chat_ctx: llm.ChatContext,
        tools: list[llm.Tool],
        conn_options: APIConnectOptions,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(owner, chat_ctx=chat_ctx, tools=tools, conn_options=conn_options)
        self._owner = owner
        self._options = options

    async def _run(self) -> None:
        """Sends the answer's chunks. Raises LiveKit's APIError."""
        sent = False

        def send(chunk: llm.ChatChunk) -> None:
            nonlocal sent
            sent = sent or chunk.has_response()
            self._event_ch.send_nowait(chunk)

        try:
            if self._owner.model == "unknown":
                await self._owner._prewarm_impl()
            options = _with_tools(self._options, self._tools)
            stream = await self._owner.conversation.answer(_messages(self._chat_ctx), **options)
            async with stream:
                await self._send(stream, options, send)
        except UllError as error:
            raise _as_api_error(error, retryable=not sent) from error

    async def _send(self, stream: AsyncStream, options: GenerateOptions, send: Any) -> None:
        guard = CallGuard.of(options.get("tools"), options.get("tool_choice"))
        name = f"ull-{stream.id}"

        def say(text: str) -> None:
            if text:
                send(llm.ChatChunk(id=name, delta=llm.ChoiceDelta(role="assistant", content=text)))

        while (token := await self._token(stream)) is not None:
            say(token.text if guard is None else guard.add(token.text))
        result = await stream.result()
        if guard is not None:
            say(guard.rest(result.content, bool(result.tool_calls)))
        if result.tool_calls:
            calls = [
                llm.FunctionToolCall(name=call.name, arguments=call.arguments, call_id=call.id)
                for call in result.tool_calls
            ]
            send(llm.ChatChunk(id=name, delta=llm.ChoiceDelta(role="assistant", tool_calls=calls)))
        send(llm.ChatChunk(id=name, usage=_usage(result)))
        if result.finish_reason == "cancelled" and result.error is not None:
            raise ConnectionLost(result.error.message)

    async def _token(self, stream: AsyncStream) -> Any:
        """The next token; None: there is none. Raises RequestTimeout after LiveKit's time limit."""
        try:
            async with asyncio.timeout(self._conn_options.timeout):
                return await anext(stream)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise RequestTimeout(f"no token came within {self._conn_options.timeout:g} s") from None


def _messages(chat: llm.ChatContext) -> list[dict[str, Any]]:
    """A chat as the daemon takes it. Raises RequestError: a part of it is no text."""
    turns, _ = chat.to_provider_format("openai", inject_dummy_user_message=False)
    messages = []
    for turn in turns:
        message = as_message(turn)
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part.get("type") != "text":
                kind = part.get("type")
                raise RequestError("bad_request", f"a message has a part of type {kind!r}; texts are taken", "content")
        messages.append(message)
    return messages


def _with_tools(options: Mapping[str, Any], tools: list[llm.Tool]) -> GenerateOptions:
    """The options of a request that may call these tools."""
    values = dict(options)
    schemas = llm.ToolContext(tools).parse_function_tools("openai", strict=False)
    if schemas:
        values["tools"] = schemas
    else:
        values.pop("tool_choice", None)
    return cast("GenerateOptions", values)


def _usage(result: Result) -> llm.CompletionUsage:
    usage = result.usage
    return llm.CompletionUsage(
        completion_tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        prompt_cached_tokens=usage.cached_tokens,
        cache_read_tokens=usage.cached_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _as_api_error(error: UllError, *, retryable: bool) -> APIError:
    """LiveKit's error for one of ull's; what has been said aloud is not said again."""
    if isinstance(error, RequestTimeout):
        return APITimeoutError(error.message, retryable=retryable)
    if isinstance(error, ConnectionLost):
        return APIConnectionError(error.message, retryable=retryable)
    status = 429 if isinstance(error, Busy) else 503 if isinstance(error, Draining) else 500
    if isinstance(error, RequestError) and status == 500 and error.code not in ("internal", "journal_unavailable"):
        status = 400
    return APIStatusError(error.message, status_code=status, body={"code": error.code}, retryable=retryable)


__all__ = ["LLM", "Stream"]
