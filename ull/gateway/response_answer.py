"""What `/v1/responses` writes of a completion: OpenAI's objects and events, nothing of it stored."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ull.client.protocol import Result, Token
from ull.gateway.answers import new_id
from ull.gateway.bodies import ResponseRequest
from ull.gateway.daemon import Engine
from ull.gateway.events import event
from ull.gateway.usage import extras
from ull.text.call_guard import CallGuard


class ResponseAnswer:
    """A response with at most one message, and behind it the calls of functions."""

    def __init__(self, engine: Engine, request: ResponseRequest, guard: CallGuard | None) -> None:
        self._guard = guard
        self._sequence = 0
        self._text = ""
        self._message_id = new_id("msg_")
        self._begun = self._message_open = False
        self._base: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": engine.name,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "parallel_tool_calls": True if request.parallel_tool_calls is None else request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "text": {"format": {"type": "text"}} if request.text is None else msgspec.to_builtins(request.text),
            "tools": [] if request.tools is None else msgspec.to_builtins(request.tools),
            "tool_choice": request.tool_choice or "auto",
            "truncation": "disabled",
        }

    async def round(self, token: Token) -> bytes:
        """The text that may be sent."""
        text = token.text if self._guard is None else self._guard.add(token.text)
        return (self._begin() + self._delta(text)) if text or not self._begun else b""

    async def end(self, result: Result) -> bytes:
        """What was held back, the message's end, the calls, and the response's end."""
        events = self._begin()
        if self._guard is not None and (rest := self._guard.rest(result.content, bool(result.tool_calls))):
            events += self._delta(rest)
        output = self._output(result)
        if not self._message_open and output and output[0]["type"] == "message":
            events += self._open_message()
        if self._message_open:
            place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
            part = output[0]["content"][0]
            events += self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            events += self._event("response.content_part.done", **place, part=part)
            events += self._event("response.output_item.done", output_index=0, item=output[0])
        for index, item in enumerate(output):
            if item["type"] == "function_call":
                events += self._call(index, item)
        done = self._response(result, output)
        return events + self._event(f"response.{done['status']}", response=done)

    async def whole(self, result: Result) -> dict[str, Any]:
        """A response."""
        return self._response(result, self._output(result))

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        begun = self._base | {"status": "in_progress", "output": [], "usage": None, "error": None}
        begun["incomplete_details"] = None
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _open_message(self) -> bytes:
        self._message_open = True
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        item = self._message("", "in_progress") | {"content": []}
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **place, part=part
        )

    def _delta(self, text: str) -> bytes:
        if not text:
            return b""
        events = b"" if self._message_open else self._open_message()
        self._text += text
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        return events + self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def _call(self, index: int, item: dict[str, Any]) -> bytes:
        place = {"output_index": index, "item_id": item["id"]}
        begun = item | {"arguments": "", "status": "in_progress"}
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            + self._event(
                "response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"]
            )
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _output(self, result: Result) -> list[dict[str, Any]]:
        text = (result.content or "") if result.tool_calls else result.text
        if self._message_open and result.tool_calls:
            text = self._text  # what was sent counts
        status = "completed" if result.finish_reason in ("stop", "tool_calls") else "incomplete"
        calls = [
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for call in result.tool_calls
        ]
        return ([] if calls and not text else [self._message(text, status)]) + calls

    def _message(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "message", "id": self._message_id, "role": "assistant", "status": status, "content": [part]}

    def _response(self, result: Result, output: list[dict[str, Any]]) -> dict[str, Any]:
        whole = result.finish_reason in ("stop", "tool_calls")
        usage = result.usage
        return {
            **self._base,
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "error": None,
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **extras(result),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, kind)
