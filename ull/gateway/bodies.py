"""What OpenAI's clients send, as far as it has a meaning here. Fields that are not named are ignored, as they ask for.

null stands for the default of every field. Fields beyond OpenAI's have the names of the wire (docs/wire.md), or those
that vLLM's users know.
"""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk
    include_timing: bool | None = None  # ours: the ids of each round and when the engine accepted them


class JsonSchema(msgspec.Struct, kw_only=True):
    """The schema of `response_format`."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Which form an answer has."""

    type: str
    json_schema: JsonSchema | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a chat."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Generation(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Number] | None = None
    response_format: ResponseFormat | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    choices: list[str] | None = None
    regex: str | None = None
    lark: str | None = None
    deadline: Number | None = None  # seconds
    timeout: Number | None = None  # seconds
    priority: str | None = None
    speculate: str | None = None
    max_tree: int | None = None


class ChatRequest(Generation, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: msgspec.Raw | None = None
    function_call: msgspec.Raw | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Generation, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    special_tokens: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """`text.format` of a response."""

    type: str
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """`text` of a response."""

    format: TextFormat | None = None


class Item(msgspec.Struct, kw_only=True):
    """One item of a response's `input`: a message, a call of a function, or what the call gave."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool of a response: only functions are known."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses`."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw | None = None
    prompt: msgspec.Raw | None = None
    background: bool | None = None
    # beyond OpenAI's
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: Number | None = None
    priority: str | None = None
    speculate: str | None = None
