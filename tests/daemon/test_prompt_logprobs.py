"""A prompt's log-probabilities end to end: they are what the model says of each token, to the bit."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from raw_client import RawClient
from ull import wire

TEXT = "import os\nimport sys\n\n\ndef main(arguments: list[str]) -> int:\n    return len(arguments)\n"


@pytest.fixture(params=["local", "zeromq"])
def client(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[ull.Client]:
    transport: Any = request.param
    with ull.Client(shared_daemon.url, transport=transport) as client:
        yield client


def ids_of(client: ull.Client, tokens: int, seed: int) -> list[int]:
    """A prompt that no other test has, of so many tokens of the whole vocabulary."""
    drawn = random.Random(seed)
    return [drawn.randrange(client.info().limits["vocabulary"]) for _ in range(tokens)]


def scores(client: ull.Client, prompt: Any, **options: Any) -> list[float | None]:
    found = client.generate(prompt, prompt_logprobs=True, **options).result().prompt_logprobs
    assert found is not None
    return found


def test_each_is_what_generating_the_token_behind_the_rest_says(client: ull.Client) -> None:
    prompt = client.tokenize(TEXT)
    found = scores(client, TEXT, max_tokens=0)
    assert len(found) == len(prompt) and found[0] is None
    for place in range(1, len(prompt)):
        # Nothing else may come, and the log-probability is the model's own, before bias.
        forced = client.generate(prompt[:place], max_tokens=1, logprobs=0, logit_bias={prompt[place]: 1e4}).result()
        assert forced.logprobs is not None and forced.token_ids == [prompt[place]]
        assert found[place] == forced.logprobs[0].logprob, place


@pytest.mark.parametrize("top", [1, 5])
def test_the_likeliest_are_those_that_generating_there_tells(client: ull.Client, top: int) -> None:
    prompt = client.tokenize(TEXT)
    asked: dict[str, Any] = {"prompt_logprobs": True, "prompt_top_logprobs": top}
    scored = client.generate(TEXT, max_tokens=0, **asked).result()
    likeliest = scored.prompt_top_logprobs
    assert scored.prompt_logprobs == scores(client, TEXT, max_tokens=0)
    assert likeliest is not None and len(likeliest) == len(prompt) and likeliest[0] is None
    for place in range(1, len(prompt)):
        there = client.generate(prompt[:place], max_tokens=1, logprobs=top, speculate="none").result()
        assert there.logprobs is not None and likeliest[place] == there.logprobs[0].top, place
        assert there.token_ids == [likeliest[place][0][0]], "greedy"
    drawn = client.generate(TEXT, max_tokens=6, temperature=0.9, seed=3, ignore_eos=True, logprobs=2)
    both = client.generate(TEXT, max_tokens=6, temperature=0.9, seed=3, ignore_eos=True, logprobs=2, **asked).result()
    assert (both.prompt_top_logprobs, both.logprobs) == (likeliest, drawn.result().logprobs)


def test_the_likeliest_of_a_long_prompt_come_in_many_frames(shared_daemon: Daemon, client: ull.Client) -> None:
    prompt = ids_of(client, 700, seed=5)
    whole = client.generate(prompt, max_tokens=0, prompt_logprobs=True, prompt_top_logprobs=5).result()
    assert whole.prompt_top_logprobs is not None and len(whole.prompt_top_logprobs) == 700
    raw = RawClient(shared_daemon.url)
    try:
        fields = {"token_ids": prompt, "max_tokens": 0, "prompt_logprobs": True, "prompt_top_logprobs": 5}
        raw.send_map(type="generate", id=1, **fields)
        *parts, done = raw.collect(1)
        assert isinstance(done, wire.Done) and len(parts) == 4  # of 186 tokens each
        top = [top for part in parts if isinstance(part, wire.PromptLogprobs) for top in part.top or ()]
        assert top == whole.prompt_top_logprobs[1:]
        for wrong in ({"prompt_top_logprobs": 6}, {"prompt_logprobs": False}):
            raw.send_map(type="generate", id=2, **{**fields, **wrong})
            (refused,) = raw.collect(2)
            assert isinstance(refused, wire.Error)
            assert (refused.code, refused.field) == ("bad_request", "prompt_top_logprobs")
    finally:
        raw.close()


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 66, 200, 700])
def test_cold_and_warm_they_are_the_same_bits(client: ull.Client, tokens: int) -> None:
    prompt = ids_of(client, tokens, seed=tokens)
    cold = client.generate(prompt, max_tokens=0, prompt_logprobs=True).result()
    assert (cold.finish_reason, cold.token_ids, cold.text) == ("length", [], "")
    assert cold.prompt_logprobs is not None and len(cold.prompt_logprobs) == cold.usage.prompt_tokens == tokens
    assert cold.prompt_logprobs[0] is None and all(value is None or value < 0 for value in cold.prompt_logprobs)
    plain = client.generate(prompt, max_tokens=8, ignore_eos=True).result()
    warm = client.generate(prompt, max_tokens=8, ignore_eos=True, prompt_logprobs=True).result()
    assert warm.usage.cached_tokens >= tokens - 1
    assert (warm.prompt_logprobs, warm.token_ids) == (cold.prompt_logprobs, plain.token_ids)
    assert plain.prompt_logprobs is None
    longer = scores(client, [*prompt, *plain.token_ids], max_tokens=0)
    assert longer[:tokens] == cold.prompt_logprobs


@pytest.mark.parametrize("drafter", ["none", "suffix", "medusa", "auto"])
def test_the_answer_is_the_same_with_any_drafter_and_grammar(client: ull.Client, drafter: str) -> None:
    if drafter not in client.info().limits["drafters"]:
        pytest.skip("the tiny bundle has none")
    for options in (
        {"temperature": 0.8, "seed": 5, "logprobs": 2, "repetition_penalty": 1.1},
        {"regex": "[a-z]{3}-[0-9]{4}-constant-end"},
    ):
        asked: dict[str, Any] = {"max_tokens": 24, "speculate": drafter, **options}
        plain = client.generate(TEXT, **asked).result()
        scored = client.generate(TEXT, prompt_logprobs=True, **asked).result()
        assert (scored.token_ids, scored.logprobs, scored.text) == (plain.token_ids, plain.logprobs, plain.text)
        assert scored.prompt_logprobs == scores(client, TEXT, max_tokens=0)


def test_in_a_session_they_are_of_all_that_it_holds(client: ull.Client) -> None:
    with client.open_session() as session:
        first = session.generate("import ", max_tokens=5, ignore_eos=True, prompt_logprobs=True).result()
        second = session.generate("\nimport ", max_tokens=0, prompt_logprobs=True).result()
        assert second.prompt_logprobs is not None and first.prompt_logprobs is not None
        rest = client.tokenize("\nimport ", add_special_tokens=False)
        whole = [*client.tokenize("import "), *first.token_ids, *rest]
        assert second.usage.prompt_tokens == len(second.prompt_logprobs) == len(whole)
        assert second.prompt_logprobs == scores(client, whole, max_tokens=0)
        assert second.prompt_logprobs[: len(first.prompt_logprobs)] == first.prompt_logprobs
        assert session.tokens == len(whole)


def test_held_they_come_with_the_commit(client: ull.Client) -> None:
    held = client.generate(TEXT, max_tokens=3, hold=True, prompt_logprobs=True)
    client.generate(TEXT, max_tokens=1).result()
    assert not held.finished
    held.commit()
    assert held.result().prompt_logprobs == scores(client, TEXT, max_tokens=0)
    dropped = client.generate(TEXT, max_tokens=0, hold=True, prompt_logprobs=True)
    dropped.cancel()
    result = dropped.result()
    assert result.finish_reason == "cancelled" and result.prompt_logprobs in ([], [None])


def test_choices_and_chats_have_them_too(client: ull.Client) -> None:
    chat = [{"role": "user", "content": "yes or no?"}]
    result = client.generate(chat, choices=["yes", "no"], prompt_logprobs=True).result()
    assert result.choice == client.generate(chat, choices=["yes", "no"]).result().choice
    assert result.prompt_logprobs == scores(client, client.tokenize(chat), max_tokens=0)


def test_the_asynchronous_client_has_the_same(shared_daemon: Daemon) -> None:
    async def ask() -> ull.Result:
        async with ull.AsyncClient(shared_daemon.url) as client:
            return await client.generate(TEXT, max_tokens=4, prompt_logprobs=True).result()

    with ull.Client(shared_daemon.url) as client:
        assert asyncio.run(ask()).prompt_logprobs == scores(client, TEXT, max_tokens=4)


def test_many_streams_at_once_keep_theirs_apart(client: ull.Client) -> None:
    prompts = [ids_of(client, 100 + place, seed=9000 + place) for place in range(8)]
    streams = [client.generate(prompt, max_tokens=3, prompt_logprobs=True) for prompt in prompts]
    found = [stream.result().prompt_logprobs for stream in streams]
    assert found == [scores(client, prompt, max_tokens=0) for prompt in prompts]


def test_on_the_wire(shared_daemon: Daemon) -> None:
    raw = RawClient(shared_daemon.url)
    try:
        raw.send_map(type="generate", id=1, token_ids=[5] * 10, max_tokens=2, prompt_logprobs=True, ignore_eos=True)
        first, *tokens, done = raw.collect(1)
        assert isinstance(first, wire.PromptLogprobs) and (first.index, len(first.logprobs)) == (1, 9)
        assert tokens and all(isinstance(token, wire.Token) for token in tokens) and isinstance(done, wire.Done)
        raw.send_map(type="generate", id=2, token_ids=[5], max_tokens=0, prompt_logprobs=True)
        (done,) = raw.collect(2)  # one token has none
        assert isinstance(done, wire.Done) and done.warnings == []
        raw.send_map(type="generate", id=3, prompt="x", prompt_logprobs=5)
        (refused,) = raw.collect(3)
        assert isinstance(refused, wire.Error) and (refused.code, refused.field) == ("bad_request", "prompt_logprobs")
    finally:
        raw.close()


def test_an_executor_that_scores_no_prompts_says_so(spawn: Spawn) -> None:
    daemon = spawn(script={"score_nodes": 0})
    with ull.Client(daemon.url) as client:
        assert client.info().limits["prompt_logprobs"] is False
        with pytest.raises(ull.RequestError, match=r"limits\.prompt_logprobs of info\); leave it out") as caught:
            client.generate(TEXT, prompt_logprobs=True).result()
        assert (caught.value.code, caught.value.field) == ("bad_request", "prompt_logprobs")


def test_what_ended_early_has_the_beginning_or_nothing(spawn: Spawn) -> None:
    daemon = spawn(script={"round_ns": 20_000_000})
    with ull.Client(daemon.url) as client:
        prompt = [place % 100 for place in range(1000)]  # 16 passes
        late = client.generate(prompt, max_tokens=0, prompt_logprobs=True, timeout=0.2).result()
        assert late.finish_reason == "timeout" and late.prompt_logprobs is not None
        assert len(late.prompt_logprobs) < 1000
        whole = scores(client, prompt, max_tokens=0)
        assert late.prompt_logprobs == whole[: len(late.prompt_logprobs)]
        running = client.generate([1], max_tokens=1000, ignore_eos=True)
        next(running)
        waiting = client.generate(prompt, max_tokens=0, prompt_logprobs=True)
        waiting.cancel()
        assert waiting.result().prompt_logprobs == [None]
        running.cancel()
