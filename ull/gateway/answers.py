"""What one door writes of a completion: the events of a stream, or the whole at once. Chat and plain completions.

`response_answer.py` has the third door's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ull.client import AsyncClient
from ull.client.protocol import Result, Token
from ull.gateway.bodies import StreamOptions
from ull.gateway.daemon import Engine
from ull.gateway.events import DONE, event
from ull.gateway.usage import FINISH_REASONS, counted, extras, usage_of
from ull.text.call_guard import CallGuard
from ull.wire import TokenLogprob


class Answer(Protocol):
    """How a door writes a completion."""

    async def round(self, token: Token) -> bytes:
        """The events of what one frame has brought; may be empty."""

    async def end(self, result: Result) -> bytes:
        """The last events."""

    async def whole(self, result: Result) -> dict[str, Any]:
        """The body of an answer that is not streamed."""


def new_id(prefix: str) -> str:
    """An id as OpenAI's clients expect them."""
    return f"{prefix}{secrets.token_hex(12)}"


class _Openai:
    """What the answers of chat and plain completions share."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, engine: Engine, client: AsyncClient, options: StreamOptions | None, prompt_tokens: int) -> None:
        self._engine = engine
        self._client = client
        options = options or StreamOptions()
        self._usage, self._timing = bool(options.include_usage), bool(options.include_timing)
        self._running_usage = self._usage and bool(options.continuous_usage_stats)
        self._prompt_tokens = prompt_tokens  # counted only where chunks tell the usage so far
        self._completion_tokens = 0
        self._head = {
            "id": new_id(self.prefix),
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": engine.name,
            "system_fingerprint": engine.fingerprint,
        }

    async def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """`logprobs` of a choice, once the texts of all its tokens are known."""
        if entries is None:
            return None
        await self._engine.texts.learn(self._client, entries)
        return self._told(entries)

    def _told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` in the door's own form."""
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any], token: Token | None = None) -> bytes:
        """One event with one choice."""
        chunk = {**self._head, "choices": [choice]}
        if self._running_usage:
            chunk["usage"] = counted(self._prompt_tokens, self._completion_tokens)
        elif self._usage:
            chunk["usage"] = None
        if self._timing and token is not None:
            chunk["ull"] = {"index": token.index, "token_ids": token.ids, "time_ns": token.time_ns}
        return event(chunk)

    def _last(self, choice: dict[str, Any], result: Result) -> bytes:
        """The chunk with the reason of the end, and the one with the usage where it is wanted."""
        if not self._usage:
            return event({**self._head, "choices": [choice], **extras(result)})
        return self._chunk(choice) + event(
            {**self._head, "choices": [], "usage": usage_of(result.usage), **extras(result)}
        )

    def _body(self, choice: dict[str, Any], result: Result) -> dict[str, Any]:
        body = {**self._head, "object": self.kind, "choices": [choice], "usage": usage_of(result.usage)}
        return body | extras(result)


class ChatAnswer(_Openai):
    """`/v1/chat/completions`. `guard`: of a request whose answer may have calls of tools."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        engine: Engine,
        client: AsyncClient,
        options: StreamOptions | None,
        prompt_tokens: int,
        guard: CallGuard | None,
    ) -> None:
        super().__init__(engine, client, options, prompt_tokens)
        self._guard = guard
        self._begun = False

    async def round(self, token: Token) -> bytes:
        """A chunk with the text that may be sent, if there is any to send."""
        self._completion_tokens += len(token.ids)
        text = token.text if self._guard is None else self._guard.add(token.text)
        logprobs = await self._logprobs(token.logprobs)
        if not text and logprobs is None and not self._timing:
            return b""
        return self._chunk(self._choice(self._delta(text), logprobs), token)

    async def end(self, result: Result) -> bytes:
        """What was held back, the calls, and the end."""
        events = b""
        if self._guard is not None and (rest := self._guard.rest(result.content, bool(result.tool_calls))):
            events += self._chunk(self._choice(self._delta(rest)))
        if result.tool_calls:
            calls = [{"index": index} | call for index, call in enumerate(_calls(result))]
            events += self._chunk(self._choice(self._delta(None) | {"tool_calls": calls}))
        if not self._begun:
            events += self._chunk(self._choice(self._delta("")))
        return events + self._last(self._choice({}, None, FINISH_REASONS[result.finish_reason]), result) + DONE

    async def whole(self, result: Result) -> dict[str, Any]:
        """A chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        if result.tool_calls:
            message |= {"content": result.content, "tool_calls": _calls(result)}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": await self._logprobs(result.logprobs),
            "finish_reason": FINISH_REASONS[result.finish_reason],
        }
        return self._body(choice, result)

    def _delta(self, text: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return delta if text is None else delta | {"content": text}

    def _choice(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._engine.texts.chat(entries)


class CompletionAnswer(_Openai):
    """`/v1/completions`. `echo`: the prompt's text, which the answer begins with where that was asked for.

    `scored`: the prompt's ids, where their log-probabilities are wanted too. Such an answer is never streamed.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        engine: Engine,
        client: AsyncClient,
        options: StreamOptions | None,
        prompt_tokens: int,
        echo: str,
        scored: Sequence[int] | None,
    ) -> None:
        super().__init__(engine, client, options, prompt_tokens)
        self._echo = echo
        self._scored = scored
        self._length = len(echo)  # characters sent

    async def round(self, token: Token) -> bytes:
        """A chunk with the text, if there is any."""
        self._completion_tokens += len(token.ids)
        logprobs = await self._logprobs(token.logprobs)
        text, self._echo = self._echo + token.text, ""
        self._length += len(token.text)
        if not text and logprobs is None and not self._timing:
            return b""
        return self._chunk(self._choice(text, logprobs), token)

    async def end(self, result: Result) -> bytes:
        """The end."""
        return self._last(self._choice(self._echo, None, FINISH_REASONS[result.finish_reason]), result) + DONE

    async def whole(self, result: Result) -> dict[str, Any]:
        """A text completion."""
        if self._scored is None:
            logprobs = await self._logprobs(result.logprobs)
        else:
            logprobs = await self._logprobs_with_prompt(self._scored, result)
        reason = FINISH_REASONS[result.finish_reason]
        return self._body(self._choice(self._echo + result.text, logprobs, reason), result)

    async def _logprobs_with_prompt(self, prompt: Sequence[int], result: Result) -> dict[str, Any]:
        """`logprobs` of prompt and completion together."""
        likeliest = (token for top in result.prompt_top_logprobs or () for token, _ in top or ())
        await self._engine.texts.learn(self._client, result.logprobs or [], {*prompt, *likeliest})
        return self._engine.texts.echoed(prompt, result, self._engine.engine.get("tokens", {}).get("bos"))

    def _choice(self, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._engine.texts.plain(entries, self._length)


def _calls(result: Result) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in result.tool_calls
    ]
