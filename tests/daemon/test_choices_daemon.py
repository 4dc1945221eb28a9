"""Choices end to end: what is chosen and how likely it is, where it happens, and what is refused by name."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from raw_client import RawClient
from ull import wire

PROMPT = "import "
LABELS = ["os", "sys", "re", "os.path", "été", "日本", " leading", "trailing "]


@pytest.fixture(params=["local", "zeromq"])
def client(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[ull.Client]:
    transport: Any = request.param
    with ull.Client(shared_daemon.url, transport=transport) as client:
        yield client


def test_the_likeliest_is_chosen_and_all_figures_are_there(client: ull.Client) -> None:
    result = client.generate(PROMPT, choices=LABELS).result()
    choice = result.choice
    assert choice is not None and result.finish_reason == "stop" and result.grammar is None
    assert choice.index == max(range(len(LABELS)), key=choice.logprobs.__getitem__)
    assert result.text == choice.label == LABELS[choice.index]
    weights = [math.exp(logprob - max(choice.logprobs)) for logprob in choice.logprobs]
    assert choice.probabilities == pytest.approx([weight / sum(weights) for weight in weights])
    best, second = sorted(choice.probabilities, reverse=True)[:2]
    assert choice.margin == pytest.approx(best - second)
    assert result.usage.choice_tokens[choice.index] == result.usage.completion_tokens == len(result.token_ids)
    assert len(result.usage.choice_tokens) == len(LABELS) and result.usage.scored_tokens >= 1


def test_a_label_is_as_likely_as_the_model_says_of_its_tokens(client: ull.Client) -> None:
    said = client.generate(PROMPT, max_tokens=3, logprobs=0, ignore_eos=True).result()
    assert said.logprobs is not None
    choice = client.generate(PROMPT, choices=[said.text, "zzz"]).result().choice
    assert choice is not None and choice.label == said.text
    assert choice.logprobs[0] == pytest.approx(sum(entry.logprob for entry in said.logprobs), abs=1e-3)


def test_every_label_comes_as_it_was_sent(client: ull.Client) -> None:
    for label in LABELS:
        streamed = client.generate(PROMPT, choices=[label])
        assert "".join(token.text for token in streamed) == label
        choice = streamed.result().choice
        assert choice is not None and (choice.label, choice.probabilities, choice.margin) == (label, [1.0], 1.0)


def test_with_a_temperature_it_is_drawn_by_its_seed(client: ull.Client) -> None:
    def draw(seed: int) -> str:
        choice = client.generate(PROMPT, choices=["sys", "re"], temperature=8.0, seed=seed).result().choice
        assert choice is not None and choice.probabilities[0] > 0.5  # the temperature is not in them
        return choice.label

    drawn = [draw(seed) for seed in range(40)]
    assert drawn == [draw(seed) for seed in range(40)]
    assert min(Counter(drawn)[label] for label in ("sys", "re")) >= 5


def test_in_a_session_the_label_joins_it(client: ull.Client) -> None:
    with client.open_session() as session:
        result = session.generate(PROMPT, choices=["sys", "re"]).result()
        assert session.tokens == len(client.tokenize(PROMPT)) + len(result.token_ids)
        again = session.generate("\nimport ", choices=["sys", "re"]).result()
        assert again.usage.cached_tokens > 0
        ids = [*client.tokenize(PROMPT), *result.token_ids, *client.tokenize("\nimport ", add_special_tokens=False)]
        alone = client.generate(ids, choices=["sys", "re"]).result()
        assert alone.choice == again.choice
        assert session.truncate(characters=1) < len(ids) + len(again.token_ids) + 1
        session.generate(choices=["a", "b"]).result()  # goes on from what it holds


def test_a_held_label_comes_with_its_commit(client: ull.Client) -> None:
    plain = client.generate(PROMPT, choices=["sys", "re"]).result()
    held = client.generate(PROMPT, choices=["sys", "re"], hold=True)
    client.generate(PROMPT, max_tokens=1).result()
    assert not held.finished
    held.commit()
    assert held.result().choice == plain.choice


def test_a_deadline_that_can_be_met_is_and_one_that_cannot_ends_it(client: ull.Client) -> None:
    assert client.generate(PROMPT, choices=["sys", "re"], deadline=60.0).result().finish_reason == "stop"
    labels = [f"label {number}" for number in range(256)]
    try:
        reason = client.generate(PROMPT * 100, choices=labels, deadline=0.001).result().finish_reason
    except ull.DeadlineUnreachable as error:
        reason = error.code
    assert reason in ("deadline", "deadline_unreachable")


def test_a_chat_is_answered_with_a_label(client: ull.Client) -> None:
    chat = [{"role": "user", "content": "yes or no?"}]
    choice = client.generate(chat, choices=["yes", "no"], priority="realtime").result().choice
    assert choice is not None and choice.label in ("yes", "no")


def test_the_asynchronous_client_has_the_same(shared_daemon: Daemon) -> None:
    async def ask() -> ull.Result:
        async with ull.AsyncClient(shared_daemon.url) as client:
            return await client.generate(PROMPT, choices=LABELS).result()

    with ull.Client(shared_daemon.url) as client:
        assert asyncio.run(ask()).choice == client.generate(PROMPT, choices=LABELS).result().choice


@pytest.mark.parametrize(
    ("options", "code", "field", "said"),
    [
        ({"choices": []}, "bad_request", "choices", "must be 1 to 256 texts, not 0"),
        ({"choices": ["a", "b", "a"]}, "bad_request", "choices", "choices[2] is 'a' once more, as choices[0]"),
        ({"choices": ["a", ""]}, "bad_request", "choices", "choices[1] is empty"),
        ({"choices": [str(n) for n in range(10_000)]}, "bad_request", "choices", "not 10000"),
        ({"choices": [str(n) for n in range(20_000)]}, "bad_request", "choices", "length <= 16384"),
        ({"choices": ["a", "b" * 70]}, "bad_request", "choices", "choices[1] has 70 tokens; at most 64: shorten it"),
        ({"choices": ["a", "b" * 9000]}, "bad_request", "choices", "choices[1] has at least "),
        ({"choices": ["a", "b" * 70_000]}, "bad_request", "choices", "length <= 65536"),
        ({"choices": ["a", "a b"], "ignore_eos": True}, "bad_request", "choices", "choices"),
        ({"choices": ["a", "b"], "regex": "a|b"}, "bad_request", "regex", "and choices are both set; send at most one"),
        ({"choices": ["a", "b"], "json_object": True}, "bad_request", "json_object", "both set"),
        ({"choices": ["a", "b"], "max_tokens": 1}, "bad_request", "max_tokens", "cannot be combined with choices"),
        ({"choices": ["a", "b"], "max_tokens": 0}, "bad_request", "max_tokens", "cannot be combined with choices"),
        ({"choices": ["a", "b"], "logprobs": 0}, "bad_request", "logprobs", "leave it out"),
        ({"choices": ["a", "b"], "top_k": 2}, "bad_request", "top_k", "leave it out"),
        ({"choices": ["a", "b"], "top_p": 0.5}, "bad_request", "top_p", "leave it out"),
        ({"choices": ["a", "b"], "min_p": 0.5}, "bad_request", "min_p", "leave it out"),
        ({"choices": ["a", "b"], "presence_penalty": 1}, "bad_request", "presence_penalty", "leave it out"),
        ({"choices": ["a", "b"], "frequency_penalty": 1}, "bad_request", "frequency_penalty", "leave it out"),
        ({"choices": ["a", "b"], "repetition_penalty": 1.5}, "bad_request", "repetition_penalty", "leave it out"),
        ({"choices": ["a", "b"], "logit_bias": {5: 1}}, "bad_request", "logit_bias", "leave it out"),
        ({"choices": ["a", "b"], "stop": "x"}, "bad_request", "stop", "leave it out"),
        ({"choices": "ab"}, "bad_request", "choices", "must be a list of texts"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused_by_name(
    client: ull.Client, options: dict[str, Any], code: str, field: str, said: str
) -> None:
    with pytest.raises(ull.RequestError) as caught:
        client.generate(PROMPT, **options).result()
    assert (caught.value.code, caught.value.field) == (code, field)
    assert said in caught.value.message
    assert client.generate(PROMPT, choices=["sys", "re"]).result().text in ("sys", "re")


def test_a_label_must_fit_behind_its_prompt(client: ull.Client) -> None:
    context = client.info().limits["context"]
    with pytest.raises(ull.RequestError, match="leaves room for 2 in the context") as caught:
        client.generate([5] * (context - 2), choices=["a", "b c d e f g"]).result()
    assert (caught.value.code, caught.value.field) == ("too_long", "choices")


def test_other_languages_write_it_as_they_like(shared_daemon: Daemon) -> None:
    raw = RawClient(shared_daemon.url)
    try:
        raw.send_map(type="generate", id=1.0, prompt=PROMPT, choices=["sys", "re"], top_p=1, stop=None, regex=None)
        *_, done = raw.collect(1)
        assert isinstance(done, wire.Done) and isinstance(done.choice, wire.Choice), done
        raw.send_map(type="generate", id=2, prompt=PROMPT, choices=[1, 2])
        (refused,) = raw.collect(2)
        assert isinstance(refused, wire.Error) and (refused.code, refused.field) == ("bad_request", "choices")
    finally:
        raw.close()


def test_the_log_says_which_was_chosen(shared_daemon: Daemon) -> None:
    with ull.Client(shared_daemon.url) as client:
        result = client.generate(PROMPT, choices=["zzz", "sys", "re"], seed=987_654).result()
    assert result.choice is not None
    lines = [line for line in shared_daemon.wait_events("request", 1) if line.get("seed") == 987_654]
    deadline = time.monotonic() + 20
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
        lines = [line for line in shared_daemon.events("request") if line.get("seed") == 987_654]
    assert [line["choice"] for line in lines] == [result.choice.index]


def test_an_executor_that_scores_nothing_says_so(spawn: Spawn) -> None:
    daemon = spawn(script={"score_nodes": 0})
    with ull.Client(daemon.url) as client:
        assert client.info().limits["choices"] is False
        with pytest.raises(ull.RequestError, match=r"limits\.choices") as caught:
            client.generate(PROMPT, choices=["a", "b"]).result()
        assert caught.value.field == "choices"


def test_what_ended_before_it_was_scored_has_no_choice(spawn: Spawn) -> None:
    daemon = spawn(script={"round_ns": 200_000_000})
    with ull.Client(daemon.url) as client:
        running = client.generate(PROMPT, max_tokens=50, ignore_eos=True)
        next(running)
        stream = client.generate(PROMPT, choices=["a", "b"])
        stream.cancel()
        result = stream.result()
        assert (result.finish_reason, result.choice, result.text) == ("cancelled", None, "")
        running.cancel()
