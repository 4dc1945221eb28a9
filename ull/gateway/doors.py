"""The three doors through which completions are asked for: what they read, and how their requests are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from ull.client.aio import AsyncStream
from ull.client.options import GenerateOptions, prompt_options
from ull.client.protocol import Result, Token
from ull.client.requests import Prompt
from ull.errors import ConnectionLost, RequestError
from ull.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from ull.gateway.bodies import ChatRequest, CompletionRequest, ResponseRequest
from ull.gateway.daemon import Daemon, Engine, Owner
from ull.gateway.errors import HttpError, bad_request, unreadable
from ull.gateway.exchange import BodyBudget, Exchange
from ull.gateway.options import chat_call, completion_call, response_call
from ull.gateway.response_answer import ResponseAnswer
from ull.text.call_guard import CallGuard

SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id")
MAX_SESSION_NAME = 128
# JSON takes this many times the bytes of the daemon's msgpack at most, where nobody wastes them.
JSON_BYTES = 3
LEAST_BODY = 1 << 20
_Body = TypeVar("_Body", ChatRequest, CompletionRequest, ResponseRequest)


class Call(NamedTuple):
    """A request that is ready to go to the daemon, and how its answer is written."""

    prompt: Prompt
    options: GenerateOptions
    streamed: bool
    answer: Answer


class Settings(NamedTuple):
    """What bounds an exchange, in seconds and bytes."""

    read_timeout: float = 30.0  # for a body to arrive
    stall_timeout: float = 30.0  # of a client that reads nothing
    max_body: int | None = None  # bytes; None: what the engine's context can take


class Doors:
    """Serves completions of one daemon."""

    def __init__(self, daemon: Daemon, settings: Settings) -> None:
        self._daemon = daemon
        self.settings = settings
        self._budget = BodyBudget()

    async def chat(self, exchange: Exchange) -> dict[str, Any]:
        """`/v1/chat/completions`."""
        return await self._serve(exchange, _chat_bodies, self._chat, "messages")

    async def completions(self, exchange: Exchange) -> dict[str, Any]:
        """`/v1/completions`."""
        return await self._serve(exchange, _completion_bodies, self._completion, "prompt")

    async def responses(self, exchange: Exchange) -> dict[str, Any]:
        """`/v1/responses`."""
        return await self._serve(exchange, _response_bodies, self._response, "input")

    async def _serve(
        self, exchange: Exchange, bodies: msgspec.json.Decoder[_Body], prepare: Callable[..., Any], prompt: str
    ) -> dict[str, Any]:
        """Reads, asks and answers; returns what the log says of it. Raises what the client is to be told, or HungUp.

        prompt: what the door calls the field that the wire calls prompt or messages.
        """
        engine = await self._daemon.engine()
        body = await exchange.read(self._most(engine), self.settings.read_timeout, self._budget)
        try:
            request = bodies.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise unreadable(error) from None
        if request.model not in (None, engine.name):
            message = f"there is no model {request.model!r:.100}: this gateway serves {engine.name!r}"
            raise HttpError(404, message, code="model_not_found", param="model")
        told: dict[str, Any] = {}
        try:
            await exchange.watched(self._run(exchange, engine, request, prepare, told))
        except RequestError as error:
            if error.field in ("prompt", "messages"):
                error.field = prompt
            raise
        return told

    async def _run(
        self, exchange: Exchange, engine: Engine, request: Any, prepare: Callable[..., Any], told: dict[str, Any]
    ) -> None:
        owner = self._daemon.owner(exchange.scope["state"]["owner"])
        call: Call = await prepare(engine, owner, request)
        session = session_name(exchange)
        if session is not None and call.options.get("prompt_logprobs"):
            raise bad_request("echo with logprobs tells of a whole prompt: leave out the session's header", "echo")
        stream = await owner.generate(call.prompt, call.options, session, int(engine.limits.get("max_sessions", 0)))
        async with stream:
            if call.streamed:
                result = await self._stream(exchange, stream, call.answer)
            else:
                result = ended_well(await stream.result())
                await exchange.answer(200, await call.answer.whole(result))
        told |= {
            "prompt_tokens": result.usage.prompt_tokens,
            "cached_tokens": result.usage.cached_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "finish": result.finish_reason,
        }

    async def _stream(self, exchange: Exchange, stream: AsyncStream, answer: Answer) -> Result:
        """Sends events as rounds come. The status is sent with the first of them: until then it may be another."""
        token = await _next(stream)
        if token is None:
            ended_well(await stream.result())
        await exchange.begin_events()
        while token is not None:
            await exchange.events(await answer.round(token))
            token = stream.ready() or await _next(stream)
        result = ended_well(await stream.result())
        await exchange.events(await answer.end(result), last=True)
        return result

    def _most(self, engine: Engine) -> int:
        if self.settings.max_body is not None:
            return self.settings.max_body
        return max(LEAST_BODY, JSON_BYTES * int(engine.limits["max_message_bytes"]))

    async def _chat(self, engine: Engine, owner: Owner, request: ChatRequest) -> Call:
        prompt, options = chat_call(request, int(engine.limits["max_tokens"]))
        counted = await _counted(owner, request, prompt, options)
        answer = ChatAnswer(engine, owner.client, request.stream_options, counted, _guard(options))
        return Call(prompt, options, bool(request.stream), answer)

    async def _completion(self, engine: Engine, owner: Owner, request: CompletionRequest) -> Call:
        prompt, options = completion_call(request, int(engine.limits["max_tokens"]))
        echo, scored = "", None
        if request.echo:
            echo = prompt if isinstance(prompt, str) else await owner.client.detokenize(prompt)  # type: ignore[arg-type]
        if request.echo and request.logprobs is not None:
            prompt = scored = await _scored(engine, owner, request, prompt, options)
        counted = await _counted(owner, request, prompt, options)
        answer = CompletionAnswer(engine, owner.client, request.stream_options, counted, echo, scored)
        return Call(prompt, options, bool(request.stream), answer)

    async def _response(self, engine: Engine, owner: Owner, request: ResponseRequest) -> Call:
        prompt, options = response_call(request, int(engine.limits["max_tokens"]))
        return Call(prompt, options, bool(request.stream), ResponseAnswer(engine, request, _guard(options)))


def session_name(exchange: Exchange) -> str | None:
    """The session that a header names."""
    for name, value in exchange.scope["headers"]:
        if name in SESSION_HEADERS:
            if not 0 < len(value) <= MAX_SESSION_NAME:
                raise bad_request(f"{name.decode()} must have 1 to {MAX_SESSION_NAME} characters", name.decode())
            return str(value.decode("latin-1"))
    return None


def ended_well(result: Result) -> Result:
    """The result, unless the daemon has cancelled the request."""
    if result.finish_reason == "cancelled":
        reason = result.error
        if reason is not None and reason.code == "draining":
            raise HttpError(503, reason.message, code="draining", kind="server_error")
        raise ConnectionLost("the daemon has cancelled the request" if reason is None else reason.message)
    return result


async def _next(stream: AsyncStream) -> Token | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


async def _counted(
    owner: Owner, request: ChatRequest | CompletionRequest, prompt: Prompt, options: GenerateOptions
) -> int:
    """The prompt's tokens, where chunks tell the usage so far, for which they must be counted first; else 0."""
    wanted = request.stream_options
    if not (request.stream and wanted and wanted.include_usage and wanted.continuous_usage_stats):
        return 0
    if isinstance(request, CompletionRequest) and not isinstance(prompt, str):
        return len(prompt)  # its ids
    return await owner.client.count_tokens(prompt, **prompt_options(options))  # type: ignore[arg-type]


async def _scored(
    engine: Engine, owner: Owner, request: CompletionRequest, prompt: Prompt, options: GenerateOptions
) -> list[int]:
    """The ids of a prompt whose log-probabilities are wanted, which the options then say. Raises HttpError."""
    if request.stream:
        raise bad_request("echo with logprobs is not streamed: leave out stream", "stream")
    if not engine.limits.get("prompt_logprobs", False):
        raise bad_request("echo with logprobs is not supported: this engine scores no prompts", "echo")
    alternatives, most = request.logprobs or 0, engine.limits.get("max_prompt_top_logprobs", 0)
    if not 0 <= alternatives <= most:
        raise bad_request(f"logprobs must be 0 to {most} with echo, not {alternatives}", "logprobs")
    options["prompt_logprobs"] = True
    options["prompt_top_logprobs"] = alternatives
    if isinstance(prompt, str):
        return await owner.client.tokenize(prompt, **prompt_options(options))
    return list(prompt)  # type: ignore[arg-type]


def _guard(options: GenerateOptions) -> CallGuard | None:
    return CallGuard.of(options.get("tools"), options.get("tool_choice"))


_chat_bodies = msgspec.json.Decoder(ChatRequest)
_completion_bodies = msgspec.json.Decoder(CompletionRequest)
_response_bodies = msgspec.json.Decoder(ResponseRequest)
