"""The gateway through OpenAI's own client: the same answers as ull's, in the words that this client reads."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import ull
from conftest import Daemon
from gateways import Gateway

CHAT: list[Any] = [{"role": "user", "content": "Open the file."}]
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.openai, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def native(shared_daemon: Daemon) -> Iterator[ull.Client]:
    with ull.Client(shared_daemon.url) as client:
        yield client


def test_a_chat_is_answered_as_by_the_native_client(client: openai.OpenAI, native: ull.Client) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=24)
    wanted = native.generate(CHAT, max_tokens=24).result()
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == wanted.usage.prompt_tokens + 24
    assert answer.model == "tiny"
    assert answer.system_fingerprint == f"ull_{wanted.bundle[:16]}"


def test_a_sampled_chat_has_the_tokens_of_its_seed(client: openai.OpenAI, native: ull.Client) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, **options, extra_body={"top_k": 40, "speculate": "none"}
    )
    assert answer.choices[0].message.content == native.generate(CHAT, top_k=40, **options).result().text


def test_a_negative_seed_is_its_64_bits(client: openai.OpenAI, native: ull.Client) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, temperature=1, seed=-5)
    assert answer.choices[0].message.content == (
        native.generate(CHAT, max_tokens=8, temperature=1.0, seed=2**64 - 5).result().text
    )


def test_a_stream_has_the_same_text_and_a_last_chunk_with_the_usage(client: openai.OpenAI, native: ull.Client) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    wanted = native.generate(CHAT, max_tokens=24).result()
    told = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == wanted.text
    assert told[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1].choices[0].finish_reason == "length"
    assert [chunk.usage for chunk in told] == [None] * len(told)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_usage_may_be_told_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    for stream in (
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, stream=True, stream_options=options),
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, stream=True, stream_options=options),
        client.completions.create(model="tiny", prompt=[5, 6], max_tokens=12, stream=True, stream_options=options),
    ):
        usages = [chunk.usage for chunk in stream]
        assert all(usage is not None for usage in usages)
        prompts = {usage.prompt_tokens for usage in usages if usage}
        assert len(prompts) == 1
        counts = [usage.completion_tokens for usage in usages if usage]
        assert counts == sorted(counts)
        assert counts[-1] == 12


def test_a_text_is_completed(client: openai.OpenAI, native: ull.Client) -> None:
    wanted = native.generate(PROMPT, max_tokens=16).result()
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16)
    assert answer.choices[0].text == wanted.text
    stream = client.completions.create(model="tiny", prompt=[PROMPT], max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted.text
    ids = native.tokenize(PROMPT)
    assert client.completions.create(model="tiny", prompt=ids, max_tokens=16).choices[0].text == wanted.text
    echoed = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, echo=True)
    assert echoed.choices[0].text == PROMPT + wanted.text


def test_a_stop_text_ends_an_answer(client: openai.OpenAI, native: ull.Client) -> None:
    whole = native.generate(PROMPT, max_tokens=64).result().text
    stop = whole[8:12]
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=64, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_no_limit_is_that_of_the_context(client: openai.OpenAI, native: ull.Client) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == native.info().limits["context"]


def test_a_prompt_may_be_read_only(client: openai.OpenAI) -> None:
    unlike_all_others = [{"role": "user", "content": "Nobody has asked this before: why is a raven like a desk?"}]
    read = client.chat.completions.create(model="tiny", messages=unlike_all_others, max_tokens=0)  # type: ignore[arg-type]
    assert (read.choices[0].message.content, read.choices[0].finish_reason) == ("", "length")
    answer = client.chat.completions.create(model="tiny", messages=unlike_all_others, max_tokens=2)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert read.usage is not None
    assert 0 < read.usage.prompt_tokens == answer.usage.prompt_tokens_details.cached_tokens


def test_log_probabilities_are_the_native_ones(client: openai.OpenAI, native: ull.Client) -> None:
    wanted = native.generate(CHAT, max_tokens=6, logprobs=3).result()
    assert wanted.logprobs is not None
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=6, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in wanted.logprobs]
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [
        [value for _, value in entry.top] for entry in wanted.logprobs
    ]
    assert "".join(entry.token for entry in entries) == wanted.text
    assert all(bytes(entry.bytes or []).decode() == entry.token for entry in entries)

    streamed = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=6, logprobs=True, stream=True)
    told = [choice.logprobs for chunk in streamed for choice in chunk.choices if choice.logprobs]
    assert [entry.logprob for each in told for entry in each.content or []] == [entry.logprob for entry in entries]


def test_log_probabilities_of_a_plain_completion(client: openai.OpenAI, native: ull.Client) -> None:
    wanted = native.generate(PROMPT, max_tokens=6, logprobs=2).result()
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert wanted.logprobs is not None
    assert told.token_logprobs == [entry.logprob for entry in wanted.logprobs]
    assert "".join(told.tokens or []) == wanted.text
    placed = zip(told.text_offset or [], told.tokens or [], strict=True)
    assert all(wanted.text[offset:].startswith(text) for offset, text in placed)
    assert all(text in top for text, top in zip(told.tokens or [], told.top_logprobs or [], strict=True))


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_an_echoed_prompt_has_its_own(client: openai.OpenAI, native: ull.Client, max_tokens: int) -> None:
    scored: dict[str, Any] = {"prompt_logprobs": True, "prompt_top_logprobs": 1}
    wanted = native.generate(PROMPT, max_tokens=max_tokens, logprobs=1, **scored).result()
    ids = native.tokenize(PROMPT)
    assert wanted.logprobs is not None and wanted.prompt_logprobs is not None
    prompts: list[Any] = [PROMPT, [PROMPT], ids, [ids]]  # as harnesses send them
    for prompt in prompts:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=max_tokens, logprobs=1, echo=True, seed=1234, temperature=0
        )
        assert answer.choices[0].text == PROMPT + wanted.text
        told = answer.choices[0].logprobs
        assert told is not None and told.tokens is not None and told.text_offset is not None
        assert told.token_logprobs == [*wanted.prompt_logprobs, *(entry.logprob for entry in wanted.logprobs)]
        assert told.token_logprobs[0] is None
        assert "".join(told.tokens[1:]) == PROMPT + wanted.text and told.text_offset[0] == 0  # behind BOS
        placed = zip(told.text_offset[1:], told.tokens[1:], strict=True)
        assert all((PROMPT + wanted.text)[offset:].startswith(text) for offset, text in placed)
        of_prompt, of_answer = (told.top_logprobs or [])[: len(ids)], (told.top_logprobs or [])[len(ids) :]
        likeliest = [top and {native.detokenize([top[0][0]]): top[0][1]} for top in wanted.prompt_top_logprobs or ()]
        assert of_prompt == likeliest and of_prompt[0] is None and len(of_prompt) == len(ids)
        assert all(text in top for text, top in zip(told.tokens[len(ids) :], of_answer, strict=True))
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), max_tokens)


def test_a_long_prompt_of_any_tokens_is_scored(client: openai.OpenAI, native: ull.Client) -> None:
    ids = [place * 7 % native.info().limits["vocabulary"] for place in range(700)]
    wanted = native.generate(ids, max_tokens=0, prompt_logprobs=True).result()
    told = client.completions.create(model="tiny", prompt=ids, max_tokens=0, logprobs=0, echo=True).choices[0].logprobs
    assert told is not None and told.token_logprobs == wanted.prompt_logprobs
    assert told.top_logprobs == [None] * len(ids)
    assert len(told.tokens or []) == len(told.text_offset or []) == len(ids)


def test_where_an_echo_s_log_probabilities_are_not_told_is_said(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "logprobs": 1, "echo": True}
    with pytest.raises(openai.BadRequestError, match="not streamed: leave out stream") as caught:
        client.completions.create(**asked, stream=True)
    assert caught.value.param == "stream"
    with pytest.raises(openai.BadRequestError, match="leave out the session's header") as caught:
        client.completions.create(**asked, extra_headers={"x-session-id": "mine"})
    assert caught.value.param == "echo"
    with pytest.raises(openai.BadRequestError, match="must be 0 to 5 with echo, not 6") as caught:
        client.completions.create(**{**asked, "logprobs": 6})
    assert caught.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**asked, "prompt": ""})
    assert caught.value.param == "prompt"


def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 999}
    answer = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=12,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    )
    assert 0 <= json.loads(answer.choices[0].message.content or "") <= 999
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, response_format={"type": "json_object"}
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_a_label_comes_with_its_probabilities(client: openai.OpenAI, native: ull.Client) -> None:
    labels = ["buy", "sell", "hold"]
    answer = client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"choices": labels, "n": 1})
    wanted = native.generate(CHAT, choices=labels).result().choice
    assert wanted is not None
    assert answer.choices[0].message.content == wanted.label
    assert answer.model_extra is not None
    assert answer.model_extra["ull"]["choice"]["probabilities"] == list(wanted.probabilities)


def test_how_drafts_were_accepted_is_told(client: openai.OpenAI) -> None:
    """Where something was drafted, which on a busy machine may not pay for a while."""
    for _ in range(20):
        answer = client.completions.create(
            model="tiny",
            prompt="import os\nimport sys\nimport os\nimport sys\nimport os\n",
            max_tokens=48,
            extra_body={"speculate": "suffix", "ignore_eos": True},
        )
        assert answer.model_extra is not None
        if "metrics" in answer.model_extra:
            break
    told = answer.model_extra["metrics"]["speculative_decoding"]
    spec = answer.model_extra["ull"]["speculation"]
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    assert told["num_accepted_draft_tokens"] == spec["accepted_tokens"] > 0
    assert told["num_draft_tokens"] == spec["drafted_tokens"]
    assert told["mean_acceptance_length"] == 1 + spec["accepted_tokens"] / told["num_spec_steps"]


def test_a_conversation_is_found_again_by_its_tokens(client: openai.OpenAI) -> None:
    for headers in ({}, {"x-session-id": "a-call"}):
        chat: list[Any] = [{"role": "user", "content": f"Name a module. {headers}"}]
        first = client.chat.completions.create(model="tiny", messages=chat, max_tokens=16, extra_headers=headers)
        chat += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Why?"},
        ]
        second = client.chat.completions.create(model="tiny", messages=chat, max_tokens=4, extra_headers=headers)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_more_named_sessions_than_there_may_be_are_all_served(client: openai.OpenAI, native: ull.Client) -> None:
    wanted = native.generate(CHAT, max_tokens=4).result().text
    for number in range(int(native.info().limits["max_sessions"]) + 3):
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=4, extra_headers={"x-session-id": f"s{number}"}
        )
        assert answer.choices[0].message.content == wanted


def test_a_response_is_written_whole_and_as_events(client: openai.OpenAI, native: ull.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *CHAT]
    wanted = native.generate(messages, max_tokens=16).result()
    options: dict[str, Any] = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": CHAT[0]["content"]}]}],
        "max_output_tokens": 16,
    }
    answer = client.responses.create(**options)
    assert answer.output_text == wanted.text
    assert answer.status == "incomplete"  # cut off by its limit
    assert answer.usage is not None
    assert answer.usage.output_tokens == 16
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if "response.completed" in kinds else None
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.incomplete"
    assert final is None
    events = list(client.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert client.responses.create(model="tiny", input="Open the file.", max_output_tokens=16).output_text


def test_a_response_may_be_json(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    answer = client.responses.create(
        model="tiny",
        input="A number.",
        max_output_tokens=20,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema | {"additionalProperties": False}}},
    )
    assert answer.status == "completed"
    assert 0 <= json.loads(answer.output_text)["n"] <= 9


def test_the_model_is_named(client: openai.OpenAI, native: ull.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == native.info().limits["context"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 2}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": -1}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("stop", {"stop": ["x"] * 17}),
        ("seed", {"seed": 2**70}),
        ("logit_bias", {"logit_bias": {"word": 1}}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("response_format", {"response_format": {"type": "yaml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("speculate", {"speculate": "magic"}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("priority", {"priority": "mine"}),
        ("timeout", {"timeout": -1}),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", cast_to=object, body={"model": "tiny", "messages": CHAT, **fields})
    assert caught.value.param == param, caught.value
    assert caught.value.type == "invalid_request_error"


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    chat: list[Any] = [{**CHAT[0], "annotations": [], "refusal": None}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=chat,
        max_tokens=2,
        user="me",
        store=False,
        reasoning_effort="low",
        metadata={"a": "b"},
        extra_body={"call": {"id": 1}, "nothing": None},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 3000, max_tokens=2)
    assert caught.value.code == "context_length_exceeded"


def test_an_answer_that_is_not_read_to_its_end_is_cancelled(unhurried: Daemon, tmp_path: Path) -> None:
    with Gateway(unhurried.url, tmp_path) as gateway, openai.OpenAI(base_url=gateway.openai, api_key="none") as client:
        with client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
        assert unhurried.wait_events("request", 1)[0]["finish"] == "cancelled"


def test_a_whole_answer_that_nobody_waits_for_is_cancelled(unhurried: Daemon, tmp_path: Path) -> None:
    async def ask(base_url: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            answer = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=8000, extra_body={"ignore_eos": True}
            )
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer, 2)

    with Gateway(unhurried.url, tmp_path) as gateway:
        asyncio.run(ask(gateway.openai))
        assert unhurried.wait_events("request", 1)[0]["finish"] == "cancelled"


def test_a_request_keeps_its_id(client: openai.OpenAI, gateway: Gateway) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="tiny", messages=CHAT, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert gateway.wait_request(id="mine-1")["status"] == 200
    drawn = client.chat.completions.with_raw_response.create(model="tiny", messages=CHAT, max_tokens=1)
    assert drawn.headers["x-request-id"].startswith("req_")


def test_many_ask_at_once_and_each_gets_its_own(gateway: Gateway, native: ull.Client) -> None:
    prompts = [f"import {name}\n" for name in ("os", "sys", "json", "re", "ast", "csv", "time", "math")] * 2
    wanted = {prompt: native.generate(prompt, max_tokens=12).result().text for prompt in prompts}

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=gateway.openai, api_key="none") as client:
            answers = await asyncio.gather(
                *(client.completions.create(model="tiny", prompt=prompt, max_tokens=12) for prompt in prompts)
            )
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [wanted[prompt] for prompt in prompts]
