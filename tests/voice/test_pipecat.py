"""The Pipecat plug-in, in pipelines of the real package, in front of a daemon on the tiny engine."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from manifests import with_template
from tool_families import build_families, template_of

pytest.importorskip("pipecat", reason="needs the extra `pipecat`")

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EagerEndOfTurnCancelFrame,
    ErrorFrame,
    Frame,
    InterimTranscriptionFrame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    MetricsFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.metrics.metrics import LLMUsageMetricsData, TTFBMetricsData
from pipecat.pipeline.worker import PipelineParams
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.tests.utils import SleepFrame, run_test

from ull.voice.pipecat import UllLLMService, UllPrefill

CHAT: list[Any] = [{"role": "user", "content": "Write a function that reads lines."}]
METRICS = PipelineParams(enable_metrics=True, enable_usage_metrics=True)


def service(daemon: Daemon, **settings: Any) -> UllLLMService:
    given: dict[str, Any] = {"max_tokens": 24, **settings}
    return UllLLMService(url=daemon.url, settings=UllLLMService.Settings(**given))


def run(processor: FrameProcessor, frames: Sequence[Frame], **options: Any) -> list[Frame]:
    """What leaves a pipeline of this processor, and what goes back up."""

    async def play() -> list[Frame]:
        down, up = await run_test(
            processor, frames_to_send=frames, pipeline_params=METRICS, start_timeout=30.0, **options
        )
        return [*down, *up]

    return asyncio.run(asyncio.wait_for(play(), 120))


def spoken(frames: Sequence[Frame]) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, LLMTextFrame))


def usage(frames: Sequence[Frame]) -> list[Any]:
    data = [each for frame in frames if isinstance(frame, MetricsFrame) for each in frame.data]
    return [each.value for each in data if isinstance(each, LLMUsageMetricsData)]


def native(daemon: Daemon, messages: list[Any], **options: Any) -> ull.Result:
    with ull.Client(daemon.url) as client:
        return client.generate(messages, **{"max_tokens": 24, **options}).result()


def test_a_context_is_answered_with_metrics(shared_daemon: Daemon) -> None:
    frames = run(service(shared_daemon), [LLMContextFrame(LLMContext(CHAT))])
    wanted = native(shared_daemon, CHAT)
    assert spoken(frames) == wanted.text
    kinds = [type(frame) for frame in frames]
    assert kinds.index(LLMFullResponseStartFrame) < kinds.index(LLMTextFrame) < kinds.index(LLMFullResponseEndFrame)
    (told,) = usage(frames)
    assert (told.prompt_tokens, told.completion_tokens) == (wanted.usage.prompt_tokens, 24)
    assert told.total_tokens == told.prompt_tokens + told.completion_tokens
    assert told.cache_read_input_tokens is not None
    data = [each for frame in frames if isinstance(frame, MetricsFrame) for each in frame.data]
    assert [each.value for each in data if isinstance(each, TTFBMetricsData) and each.value > 0]


def test_settings_are_those_of_the_request(shared_daemon: Daemon) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
    told = service(shared_daemon, **settings, system_instruction="Be brief.", extra={"min_p": 0.01, "stop": ["\n\n"]})
    frames = run(told, [LLMContextFrame(LLMContext(CHAT))])
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert spoken(frames) == native(shared_daemon, chat, **settings, min_p=0.01, stop=["\n\n"]).text


def test_an_unknown_setting_is_named(shared_daemon: Daemon) -> None:
    with pytest.raises(TypeError, match=r"'temprature'\. Did you mean 'temperature'"):
        service(shared_daemon, extra={"temprature": 1})


def test_an_interruption_cancels_the_answer(spawn: Spawn) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 5_000_000, "context": 9000})
    frames = run(
        service(daemon, max_tokens=8000),
        [LLMContextFrame(LLMContext(CHAT)), SleepFrame(sleep=0.5), InterruptionFrame(), SleepFrame(sleep=0.3)],
    )
    assert daemon.wait_events("request", 1)[0]["finish"] == "cancelled"
    (told,) = usage(frames)
    assert 0 < told.completion_tokens < 8000


def test_interim_transcripts_are_read_before_the_turn_ends(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")
    context = LLMContext([{"role": "system", "content": "You are the voice of a library of small programs."}])
    llm = service(daemon)
    words = ["Write", "Write a function", "Write a function that reads lines"]
    frames = [InterimTranscriptionFrame(text, "me", "now") for text in words]
    spaced = [each for frame in frames for each in (frame, SleepFrame(sleep=0.1))]

    async def play() -> list[Frame]:
        from pipecat.pipeline.pipeline import Pipeline

        turn = LLMContext([*context.get_messages(), {"role": "user", "content": words[-1]}])
        down, _ = await run_test(
            Pipeline([UllPrefill(llm, context), llm]),
            frames_to_send=[*spaced, SleepFrame(sleep=0.2), LLMContextFrame(turn)],
            pipeline_params=METRICS,
            start_timeout=30.0,
        )
        return list(down)

    out = asyncio.run(asyncio.wait_for(play(), 120))
    (told,) = usage(out)
    assert told.prompt_tokens - told.cache_read_input_tokens <= 8
    assert [frame.text for frame in out if isinstance(frame, InterimTranscriptionFrame)] == words
    assert spoken(out) == native(daemon, [*context.get_messages(), {"role": "user", "content": words[-1]}]).text


def test_an_eager_turn_that_is_confirmed_was_answered_ahead(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")
    frames = run(
        service(daemon),
        [
            UserStartedSpeakingFrame(),
            LLMContextFrame(LLMContext(CHAT), speculation=True),
            SleepFrame(sleep=0.5),
            UserStoppedSpeakingFrame(),
            SleepFrame(sleep=0.3),
        ],
    )
    assert spoken(frames) == native(daemon, CHAT).text
    kinds = [type(frame) for frame in frames]
    assert kinds.index(UserStoppedSpeakingFrame) < kinds.index(LLMTextFrame)
    first = daemon.wait_events("request", 2)[0]
    assert (first["completion"], first["finish"]) == (24, "length")


def test_an_eager_turn_that_is_taken_back_says_nothing(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")
    longer: list[Any] = [{"role": "user", "content": f"{CHAT[0]['content']} And writes them."}]
    frames = run(
        service(daemon),
        [
            UserStartedSpeakingFrame(),
            LLMContextFrame(LLMContext(CHAT), speculation=True),
            SleepFrame(sleep=0.3),
            EagerEndOfTurnCancelFrame(),
            SleepFrame(sleep=0.2),
            LLMContextFrame(LLMContext(longer), speculation=True),
            SleepFrame(sleep=0.3),
            UserStoppedSpeakingFrame(),
            SleepFrame(sleep=0.3),
        ],
    )
    assert spoken(frames) == native(daemon, longer).text
    assert daemon.wait_events("request", 3)[0]["finish"] == "cancelled"


def test_a_tool_is_called_and_its_call_is_not_spoken(
    spawn: Spawn, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    families = build_families(tmp_path_factory.mktemp("families"))
    daemon = spawn(bundle=with_template(families, tmp_path, template_of("hermes")))
    called: list[dict[str, Any]] = []

    async def weather(params: FunctionCallParams) -> None:
        called.append(dict(params.arguments))
        await params.result_callback({"degrees": 9})

    schema = FunctionSchema("weather", "d", {"place": {"enum": ["Rome", "Oslo"]}}, ["place"])
    llm = service(daemon, max_tokens=200, extra={"tool_choice": "required"})
    llm.register_function("weather", weather)
    context = LLMContext([{"role": "user", "content": "Is it warm?"}], tools=ToolsSchema([schema]))
    frames = run(llm, [LLMContextFrame(context), SleepFrame(sleep=1.0)])
    assert spoken(frames) == ""
    assert called
    assert called[0]["place"] in ("Rome", "Oslo")


def test_a_daemon_that_is_not_there_is_an_error_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ull.client.aio.CONNECT_TIMEOUT_S", 2.0)
    llm = UllLLMService(url=f"ipc://{tmp_path / 'nobody.sock'}")
    frames = run(llm, [LLMContextFrame(LLMContext(CHAT)), SleepFrame(sleep=6)])
    errors = [frame for frame in frames if isinstance(frame, ErrorFrame)]
    assert errors
    assert "no daemon answers" in errors[0].error
    assert [frame for frame in frames if isinstance(frame, LLMFullResponseEndFrame)]


def test_what_the_daemon_refuses_is_an_error_frame_and_the_next_turn_is_answered(shared_daemon: Daemon) -> None:
    frames = run(
        service(shared_daemon),
        [
            LLMContextFrame(LLMContext([{"role": "user", "content": "word " * 4000}])),
            LLMContextFrame(LLMContext(CHAT)),
        ],
    )
    (error,) = [frame for frame in frames if isinstance(frame, ErrorFrame)]
    assert "tokens" in error.error
    assert spoken(frames) == native(shared_daemon, CHAT).text


def test_one_answer_beside_the_conversation(shared_daemon: Daemon) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}

    async def play() -> tuple[str | None, str | None]:
        llm = service(shared_daemon)
        context = LLMContext(CHAT)
        plain = await llm.run_inference(context, max_tokens=8)
        exact = await llm.run_inference(context, response_schema=schema)
        await llm._close()
        return plain, exact

    plain, exact = asyncio.run(play())
    assert plain == native(shared_daemon, CHAT, max_tokens=8).text
    assert json.loads(exact or "")["n"] in (1, 2)
