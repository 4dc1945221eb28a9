"""A body as a call of `ull.AsyncClient.generate`: its prompt and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from ull.client.options import GenerateOptions
from ull.client.requests import Prompt
from ull.gateway.bodies import (
    ChatRequest,
    CompletionRequest,
    FunctionTool,
    Generation,
    Item,
    Message,
    Part,
    ResponseFormat,
    ResponseRequest,
)
from ull.gateway.errors import bad_request

SAME_NAMES = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "choices",
    "regex",
    "lark",
    "deadline",
    "timeout",
    "priority",
    "speculate",
    "max_tree",
)
TEMPLATE_NAMES = ("documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def chat_call(request: ChatRequest, max_tokens: int) -> tuple[Prompt, GenerateOptions]:
    """Messages and options of a chat. `max_tokens` is meant where the body names none."""
    if request.functions is not None or request.function_call is not None:
        raise bad_request("functions and function_call are no longer taken: use tools and tool_choice", "functions")
    if not request.messages:
        raise bad_request("messages is empty: a chat needs a turn to answer", "messages")
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    values = _sampling(request, max_tokens)
    for name in TEMPLATE_NAMES:
        values[name] = getattr(request, name)
    if request.tools:
        values |= {"tools": request.tools, "tool_choice": request.tool_choice}
    elif request.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return [_message(turn) for turn in request.messages], cast("GenerateOptions", values)


def completion_call(request: CompletionRequest, max_tokens: int) -> tuple[Prompt, GenerateOptions]:
    """Prompt and options of a plain completion."""
    if request.best_of not in (None, 1):
        raise bad_request("best_of must be 1: one stream is served at a time", "best_of")
    if request.suffix:
        raise bad_request("suffix is not supported: write the prompt as the model expects it", "suffix")
    values = _sampling(request, max_tokens)
    values |= {"logprobs": request.logprobs, "special_tokens": request.special_tokens}
    return _plain_prompt(request.prompt), cast("GenerateOptions", values)


def response_call(request: ResponseRequest, max_tokens: int) -> tuple[Prompt, GenerateOptions]:
    """Messages and options of a response."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise bad_request(f"{name} is not supported: nothing is stored here; send the whole conversation", name)
    if request.background:
        raise bad_request("background is not supported: wait for the response, or stream it", "background")
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    values: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "stop",
            "chat_template_kwargs",
            "timeout",
            "priority",
            "speculate",
        )
    }
    values["max_tokens"] = max_tokens if request.max_output_tokens is None else request.max_output_tokens
    values["seed"] = _seed(request.seed)
    form = None if request.text is None else request.text.format
    if form is not None:
        values |= _form(form.type, form.schema, "text.format")
    if request.tools:
        values["tools"] = [_function(tool) for tool in request.tools]
        values["tool_choice"] = _flat_choice(request.tool_choice)
    items = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    messages += _turns(items)
    if not messages:
        raise bad_request("input is empty: there is nothing to answer", "input")
    return messages, cast("GenerateOptions", values)


def _message(turn: Message) -> dict[str, Any]:
    """A turn as the daemon takes it."""
    return {
        "role": "system" if turn.role == "developer" else turn.role,
        "content": turn.content if not isinstance(turn.content, list) else [_part(part) for part in turn.content],
        "name": turn.name,
        "tool_calls": turn.tool_calls or None,
        "tool_call_id": turn.tool_call_id,
        "reasoning_content": turn.reasoning_content,
    }


def _sampling(request: Generation, max_tokens: int) -> dict[str, Any]:
    if request.n not in (None, 1):
        raise bad_request("n must be 1: one stream is served at a time", "n")
    values: dict[str, Any] = {name: getattr(request, name) for name in SAME_NAMES}
    values["max_tokens"] = request.max_tokens
    if request.max_tokens is None and request.choices is None:
        values["max_tokens"] = max_tokens
    values["seed"] = _seed(request.seed)
    values["stop_ids"] = request.stop_token_ids
    if request.logit_bias:
        values["logit_bias"] = _biases(request.logit_bias)
    if request.response_format is not None:
        values |= _response_form(request.response_format)
    return values


def _seed(seed: int | None) -> int | None:
    """A seed of the wire: OpenAI's may be negative, which is the same 64 bits without a sign."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise bad_request("seed must be an integer of 64 bits", "seed")
    return None if seed is None else seed % 2**64


def _biases(biases: dict[str, int | float]) -> dict[int, float]:
    try:
        return {int(key): value for key, value in biases.items()}
    except ValueError:
        raise bad_request("logit_bias must map token ids to numbers", "logit_bias") from None


def _response_form(form: ResponseFormat) -> dict[str, Any]:
    schema = form.json_schema
    if form.type == "json_schema" and (schema is None or schema.schema is None):
        raise bad_request("response_format.json_schema.schema is missing", "response_format")
    return _form(form.type, None if schema is None else schema.schema, "response_format")


def _form(kind: str, schema: dict[str, Any] | bool | None, param: str) -> dict[str, Any]:
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and schema is not None:
        return {"json_schema": schema}
    raise bad_request(f"{param}.type must be text, json_object, or json_schema with its schema", param)


def _plain_prompt(prompt: str | Sequence[int | str | list[int]]) -> Prompt:
    """A text or ids; OpenAI's lists of prompts may have one."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        return prompt[0]
    if not prompt or not all(isinstance(item, int) for item in prompt):
        raise bad_request("prompt must be one text or one list of token ids: one stream is served at a time", "prompt")
    return prompt  # type: ignore[return-value]


def _part(part: Part) -> dict[str, Any]:
    """A part of a message's content; what the daemon does not know it refuses itself."""
    if part.type in ("input_text", "output_text"):
        return {"type": "text", "text": part.text or ""}
    if part.type == "refusal":
        return {"type": "text", "text": part.refusal or ""}
    return {"type": part.type} if part.text is None else {"type": part.type, "text": part.text}


def _turns(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items of a response's input as messages: calls that follow one another are of one turn."""
    turns: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if item.type == "function_call":
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments or "{}"},
            }
            if turns and turns[-1]["role"] == "assistant":
                turns[-1].setdefault("tool_calls", []).append(call)
            else:
                turns.append({"role": "assistant", "tool_calls": [call]})
        elif item.type == "function_call_output":
            turns.append(_message(Message(role="tool", content=item.output or "", tool_call_id=item.call_id)))
        elif item.type in (None, "message") and item.role is not None:
            turns.append(_message(Message(role=item.role, content=item.content)))
        elif item.type != "reasoning":
            raise bad_request(f"input[{index}] is of type {item.type!r}: text and function calls are known", "input")
    return turns


def _function(tool: FunctionTool) -> dict[str, Any]:
    """A function as a chat has it: what is said of it in a map of its own."""
    if tool.type != "function":
        raise bad_request(f"tools of type {tool.type!r} are not supported: functions are", "tools")
    inner = msgspec.to_builtins(tool)
    return {"type": inner.pop("type"), "function": inner}


def _flat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Responses name a function without the inner map."""
    if isinstance(choice, dict) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
