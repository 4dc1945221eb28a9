"""ull as a service of Pipecat (the extra `pipecat`).

Pipeline([
    transport.input(), stt,
    UllPrefill(llm, context),          # interim transcripts are read while the user still speaks
    user_aggregator, llm, tts, ...
])

`llm` is a `UllLLMService`. An eager end of turn is answered ahead and held at the daemon, until Pipecat confirms the
turn or takes it back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pipecat.adapters.llm.services.open_ai_adapter import OpenAILLMAdapter
from pipecat.frames.frames import (
    CancelFrame,
    EndFrame,
    Frame,
    InterimTranscriptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    StartFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.metrics.metrics import LLMTokenUsage
from pipecat.processors.aggregators.llm_context import LLMContext, is_given
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallFromLLM, LLMService
from pipecat.services.settings import LLMSettings

from ull.client.aio import AsyncClient, AsyncStream
from ull.client.options import GENERATE_OPTIONS, GenerateOptions, refuse_unknown
from ull.client.protocol import Result
from ull.errors import RequestTimeout, UllError
from ull.text.call_guard import CallGuard
from ull.voice.conversation import Conversation, as_message

_SAME_NAMES = ("temperature", "max_tokens", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


@dataclass
class UllLLMSettings(LLMSettings):
    """Pipecat's settings of an LLM; `extra` has any other option of `ull.AsyncClient.generate`."""


class UllLLMService(LLMService[OpenAILLMAdapter]):
    """Streams a daemon's answers into a pipeline.

    url: the daemon's endpoint; None: this user's socket. client: an `ull.AsyncClient` to share instead.
    settings: `UllLLMService.Settings(temperature=..., max_tokens=..., extra={"speculate": "none"})`; what is not given
    has the daemon's default. model is a name for metrics only: a daemon serves one.
    """

    Settings = UllLLMSettings
    adapter_class = OpenAILLMAdapter
    supports_response_schema = True

    def __init__(
        self,
        *,
        url: str | None = None,
        client: AsyncClient | None = None,
        settings: UllLLMSettings | None = None,
        **kwargs: Any,
    ) -> None:
        defaults = UllLLMSettings(
            model="ull",
            system_instruction=None,
            **dict.fromkeys(_SAME_NAMES),
            filter_incomplete_user_turns=False,
            user_turn_completion_config=None,
            extra={},
        )
        if settings is not None:
            defaults.apply_update(settings)
        super().__init__(settings=defaults, **kwargs)
        refuse_unknown("settings.extra", defaults.extra, GENERATE_OPTIONS)
        self._own_client = client is None
        self._client = AsyncClient(url) if client is None else client
        self.conversation = Conversation(self._client)
        self._verdict = asyncio.Event()  # the turn that is answered ahead has ended

    def can_generate_metrics(self) -> bool:
        """It measures time to first byte, processing time and usage."""
        return True

    async def stop(self, frame: EndFrame) -> None:
        """Ends what runs at the daemon."""
        await super().stop(frame)
        await self._close()

    async def cancel(self, frame: CancelFrame) -> None:
        """Ends what runs at the daemon."""
        await super().cancel(frame)
        await self._close()

    async def start(self, frame: StartFrame) -> None:
        """Connects before the first turn."""
        await super().start(frame)
        if self._own_client:
            await self._client.__aenter__()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Answers a context; everything else passes."""
        if isinstance(frame, UserStoppedSpeakingFrame):
            self._verdict.set()
        elif isinstance(frame, UserStartedSpeakingFrame):
            self._verdict.clear()
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        try:
            await self.push_frame(LLMFullResponseStartFrame())
            await self.start_processing_metrics()
            await self._process_context(frame.context, frame.speculation)
        except RequestTimeout as error:
            await self._call_event_handler("on_completion_timeout")
            await self.push_error(error_msg="LLM completion timeout", exception=error)
        except UllError as error:
            await self.push_error(error_msg=f"Error during completion: {error.message}", exception=error)
        finally:
            await self.stop_processing_metrics()
            await self.push_frame(LLMFullResponseEndFrame())

    async def read_ahead(self, context: LLMContext) -> None:
        """Has the daemon read a context that is not to be answered yet."""
        messages, options = await self._call(context)
        self.conversation.read_ahead(messages, **options)

    async def run_inference(
        self,
        context: LLMContext,
        max_tokens: int | None = None,
        system_instruction: str | None = None,
        response_schema: dict[str, Any] | None = None,
    ) -> str | None:
        """One answer beside the conversation."""
        messages, options = await self._call(context, system_instruction)
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        if response_schema is not None:
            options["json_schema"] = response_schema
        result = await self._client.generate(messages, **options).result()
        return result.text or None

    async def _process_context(self, context: LLMContext, speculation: bool = False) -> None:
        """Pushes one answer. Pipecat cancels the task that runs this where the user interrupts."""
        await self.start_ttfb_metrics()
        messages, options = await self._call(context)
        if speculation and not self._verdict.is_set():
            self.conversation.expect(messages, **options)
            try:
                await self._verdict.wait()
            except asyncio.CancelledError:
                self.conversation.withdraw()
                raise
        stream = await self.conversation.answer(messages, **options)
        result = await self._push(stream, options)
        if result.tool_calls:
            await self.stop_ttfat_metrics()
            await self.run_function_calls(
                [
                    FunctionCallFromLLM(
                        context=context,
                        tool_call_id=call.id,
                        function_name=call.name,
                        arguments=json.loads(call.arguments),
                    )
                    for call in result.tool_calls
                ]
            )

    async def _push(self, stream: AsyncStream, options: GenerateOptions) -> Result:
        """Pushes the text of a stream, and its usage, also of one that is cancelled on the way."""
        guard = CallGuard.of(options.get("tools"), options.get("tool_choice"))
        try:
            async for token in stream:
                await self.stop_ttfb_metrics()
                if text := guard.add(token.text) if guard is not None else token.text:
                    await self._push_llm_text(text)
        finally:
            stream.cancel()
            result = await asyncio.shield(stream.result())
            usage = result.usage
            await self.start_llm_usage_metrics(
                LLMTokenUsage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    total_tokens=usage.prompt_tokens + usage.completion_tokens,
                    cache_read_input_tokens=usage.cached_tokens,
                )
            )
        if guard is not None and (rest := guard.rest(result.content, bool(result.tool_calls))):
            await self._push_llm_text(rest)
        return result

    async def _call(
        self, context: LLMContext, system_instruction: str | None = None
    ) -> tuple[list[dict[str, Any]], GenerateOptions]:
        """Messages and options of a context."""
        adapter = self.get_llm_adapter()
        params: Mapping[str, Any] = await adapter.get_llm_invocation_params(
            context,
            system_instruction=system_instruction or self._settings.system_instruction,
            convert_developer_to_user=False,
        )
        options = self._options(params)
        return [as_message(message) for message in params["messages"]], options

    def _options(self, params: Mapping[str, Any]) -> GenerateOptions:
        """The options that settings and context ask for."""
        values: dict[str, Any] = {}
        for name in _SAME_NAMES:
            value = getattr(self._settings, name)
            if is_given(value) and value is not None:
                values[name] = value
        for name in ("tools", "tool_choice"):
            if isinstance(params.get(name), list | str | dict) and params[name]:
                values[name] = params[name]
        if "tools" not in values:
            values.pop("tool_choice", None)
        return cast("GenerateOptions", values | self._settings.extra)

    async def _close(self) -> None:
        await self.conversation.aclose()
        if self._own_client:
            await self._client.close()


class UllPrefill(FrameProcessor):
    """Stands in front of the user aggregator, and has interim transcripts read while their speaker goes on.

    context: the one that the aggregator fills; what has been said before is in it.
    """

    def __init__(self, service: UllLLMService, context: LLMContext, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._service = service
        self._context = context

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Looks at a frame, and passes it on."""
        await super().process_frame(frame, direction)
        if isinstance(frame, InterimTranscriptionFrame) and frame.text.strip():
            heard: Any = {"role": "user", "content": frame.text.strip()}
            before = self._context
            so_far = LLMContext([*before.get_messages(), heard], tools=before.tools, tool_choice=before.tool_choice)
            await self._service.read_ahead(so_far)
        await self.push_frame(frame, direction)


__all__ = ["UllLLMService", "UllLLMSettings", "UllPrefill"]
