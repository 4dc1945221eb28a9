"""Admission: every field that cannot be served is named, with what would be right."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import CHAT_TEMPLATE, tokenizer_json
from tokenizer_kinds import KINDS
from ull import _native
from ull.daemon.admission import Admission, Limits
from ull.errors import RequestError
from ull.text.tokenizer import Tokenizer
from ull.wire import Generate, Message
from ull_build.source.vocabulary import build_vocabulary

CONTEXT = 64
VOCABULARY = 320
EOS = [1, 2]


def make(directory: Path, template: str | None = CHAT_TEMPLATE) -> Admission:
    (directory / "tokenizer.json").write_text(tokenizer_json(VOCABULARY))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<|bos|>"}))
    limits = Limits(context=CONTEXT, vocabulary=VOCABULARY, default_max_tokens=16, max_tokens=1000)
    return Admission(Tokenizer(directory), limits, EOS)


@pytest.fixture
def admission(tmp_path: Path) -> Admission:
    return make(tmp_path)


def refusal(admission: Admission, **fields: Any) -> RequestError:
    """What a request with a good prompt and these fields is refused with."""
    request = Generate(id=1, **{"prompt": "hello", **fields})
    with pytest.raises(RequestError) as caught:
        admission.check(request)
        admission.prompt_ids(request)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": None, "token_ids": []}, "token_ids", "is empty"),
        ({"prompt": None, "messages": []}, "messages", "is empty"),
        ({"token_ids": [1]}, "token_ids", "and prompt are both set"),
        ({"prompt": None, "token_ids": [5, 320]}, "token_ids", "id 320 is outside the vocabulary of 320"),
        ({"prompt": None, "token_ids": [5, -1]}, "token_ids", "id -1 is outside"),
        ({"prompt": None, "token_ids": [2**63]}, "token_ids", "outside"),
        ({"max_tokens": -4}, "max_tokens", "from 0 (only read the prompt) to 1000, not -4"),
        ({"max_tokens": 1001}, "max_tokens", "not 1001"),
        ({"temperature": math.nan}, "temperature", "not nan"),
        ({"temperature": math.inf}, "temperature", "not inf"),
        ({"temperature": -1.0}, "temperature", "not -1"),
        ({"temperature": 1e-9}, "temperature", "not 1e-09"),
        ({"top_k": -1}, "top_k", "not -1"),
        ({"top_p": 0.0}, "top_p", "not 0.0"),
        ({"top_p": 1.5}, "top_p", "not 1.5"),
        ({"top_p": math.nan}, "top_p", "not nan"),
        ({"min_p": -0.1}, "min_p", "not -0.1"),
        ({"min_p": math.nan}, "min_p", "not nan"),
        ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2, 0 being off, not 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "not -2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "from 0.01 to 100, 1 being off, not 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty", "not inf"),
        ({"seed": -1}, "seed", "2^64"),
        ({"stop": [""]}, "stop", "empty text"),
        ({"stop": ["x"] * 17}, "stop", "has 17 texts; at most 16"),
        ({"stop": ["é" * 200]}, "stop", "400 bytes; at most 256"),
        ({"stop_ids": [400]}, "stop_ids", "id 400 is outside"),
        ({"stop_ids": list(range(3, 40))}, "stop_ids", "are 39; at most 32"),
        ({"logit_bias": {5: math.nan}}, "logit_bias", "of id 5"),
        ({"logit_bias": {5: math.inf}}, "logit_bias", "of id 5"),
        ({"logit_bias": {5: 1e30}}, "logit_bias", "of id 5"),
        ({"logit_bias": {400: 1.0}}, "logit_bias", "id 400 is outside"),
        ({"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf)}, "logit_bias", "bans every token"),
        ({"logprobs": -1}, "logprobs", "from 0 to 20, not -1"),
        ({"logprobs": 21}, "logprobs", "not 21"),
        ({"timeout_ms": 0}, "timeout_ms", "not 0"),
        ({"timeout_ms": -5}, "timeout_ms", "not -5"),
        ({"deadline_ms": 0}, "deadline_ms", "not 0"),
        ({"deadline_ms": 86_400_001}, "deadline_ms", "from 1 to 86400000 milliseconds, not 86400001"),
        ({"priority": "urgent"}, "priority", "'urgent' is none of realtime, interactive, batch"),
        ({"priority": "real-time"}, "priority", "did you mean 'realtime'?"),
        ({"priority": "Q" * 10_000_000}, "priority", "is none of"),
        ({"hold": True, "logprobs": 0}, "hold", "cannot be combined with logprobs"),
        ({"prompt_logprobs": True, "prompt_top_logprobs": 6}, "prompt_top_logprobs", "from 0 to 5, not 6"),
        ({"prompt_logprobs": True, "prompt_top_logprobs": -1}, "prompt_top_logprobs", "not -1"),
        ({"prompt_top_logprobs": 1}, "prompt_top_logprobs", "needs prompt_logprobs to be true"),
        ({"speculate": "medusa"}, "speculate", "'medusa' is not in this engine's bundle; it offers none, suffix, auto"),
        ({"speculate": "draft"}, "speculate", "'draft' is not in this engine's bundle"),
        ({"speculate": "sufix"}, "speculate", "did you mean 'suffix'? This engine offers none, suffix, auto"),
        ({"speculate": ""}, "speculate", "'' is no drafter; this engine offers"),
        ({"speculate": "Q" * 10_000_000}, "speculate", "is no drafter; this engine offers"),
        ({"max_tree": 0}, "max_tree", "from 1 (no draft) to 64 tokens, not 0"),
        ({"max_tree": 65}, "max_tree", "not 65"),
        ({"max_tree": -(2**40)}, "max_tree", "not -1099511627776"),
    ],
)
def test_refusals(admission: Admission, fields: dict[str, Any], field: str, said: str) -> None:
    error = refusal(admission, **fields)
    assert (error.code, error.field) == ("bad_request", field)
    assert error.message.startswith(field)
    assert said in error.message


def test_too_many_biases(tmp_path: Path) -> None:
    admission = make(tmp_path)
    admission.limits = Limits(context=CONTEXT, vocabulary=5000, default_max_tokens=16, max_tokens=1000)
    assert "has 1025 entries; at most 1024" in refusal(admission, logit_bias=dict.fromkeys(range(1025), 0.5)).message


def test_too_long_says_by_how_many(admission: Admission) -> None:
    error = refusal(admission, prompt=None, token_ids=[5] * 70)
    assert (error.code, error.field) == ("too_long", "token_ids")
    assert error.message.startswith("token_ids: 70 tokens are 7 too many; the context of 64")
    error = refusal(admission, prompt="q " * 80)
    count = len(admission._tokenizer.encode("q " * 80))
    assert (error.code, error.field) == ("too_long", "prompt")
    assert f"{count} tokens are {count - 63} too many" in error.message
    error = refusal(admission, prompt=None, messages=[Message(role="user", content="q " * 80)])
    assert (error.code, error.field) == ("too_long", "messages")


def test_ten_megabytes_are_refused_without_tokenizing(admission: Admission) -> None:
    error = refusal(admission, prompt="a" * 10_000_000)
    assert error.code == "too_long"
    assert "10000000 bytes are at least" in error.message


def test_the_longest_prompt_leaves_room_for_one_token(admission: Admission) -> None:
    request = Generate(id=1, token_ids=[5] * (CONTEXT - 1))
    admission.check(request)
    assert admission.prompt_ids(request) == [5] * (CONTEXT - 1)


def test_chat_without_a_template(tmp_path: Path) -> None:
    error = refusal(make(tmp_path, template=None), prompt=None, messages=[Message(role="user", content="x")])
    assert (error.field, "no chat template" in error.message) == ("messages", True)


def test_parameters_of_a_plain_request(admission: Admission) -> None:
    request = Generate(id=1, prompt="x", stop=["é"], stop_ids=[9, 1])
    admission.check(request)
    parameters = admission.parameters(request, received_ns=100, admitted_ns=200)
    seed = parameters.pop("seed")
    assert 0 <= seed < 2**64
    assert parameters == {
        "max_tokens": 16,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["é".encode()],
        "stop_ids": [9, 1, 2],
        "logit_bias": {},
        "logprobs": -1,
        "prompt_logprobs": False,
        "prompt_top_logprobs": 0,
        "timeout_ns": 0,
        "deadline_ns": 0,
        "priority": "interactive",
        "hold": False,
        "received_ns": 100,
        "admitted_ns": 200,
        "speculate": "none",
        "max_tree": 0,
    }


def test_parameters_of_an_elaborate_request(admission: Admission) -> None:
    request = Generate(
        id=1,
        prompt="x",
        max_tokens=5,
        temperature=1.0,
        top_k=10**12,
        seed=2**64 - 1,
        ignore_eos=True,
        logprobs=3,
        timeout_ms=2,
        deadline_ms=3,
        priority="batch",
        hold=False,
        logit_bias={5: -math.inf, 6: 1.0},
        speculate="suffix",
        max_tree=8,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
    )
    admission.check(request)
    parameters = admission.parameters(request, received_ns=100, admitted_ns=200)
    assert parameters["top_k"] == VOCABULARY
    assert parameters["seed"] == 2**64 - 1
    assert parameters["stop_ids"] == []
    assert (parameters["timeout_ns"], parameters["deadline_ns"]) == (100 + 2_000_000, 100 + 3_000_000)
    assert parameters["priority"] == "batch"
    assert (parameters["logprobs"], parameters["max_tokens"]) == (3, 5)
    assert (parameters["speculate"], parameters["max_tree"]) == ("suffix", 8)
    assert (parameters["presence_penalty"], parameters["frequency_penalty"]) == (-2.0, 0.5)
    assert parameters["repetition_penalty"] == 1.1


def test_the_daemon_s_drafter_is_for_those_who_name_none(admission: Admission) -> None:
    offered = ("none", "suffix", "medusa", "auto")
    admission.limits = msgspec.structs.replace(
        admission.limits, drafters=offered, default_drafter="medusa", default_max_tree=16
    )
    for asked, drafter in ((None, "medusa"), *((name, name) for name in offered)):
        request = Generate(id=1, prompt="x", speculate=asked)
        admission.check(request)
        parameters = admission.parameters(request, 0, 0)
        assert (parameters["speculate"], parameters["max_tree"]) == (drafter, 16)
    assert "it offers none, suffix, medusa, auto" in refusal(admission, speculate="draft").message


def test_an_executor_without_penalties(admission: Admission) -> None:
    admission.limits = msgspec.structs.replace(admission.limits, penalties=False)
    admission.check(Generate(id=1, prompt="x", presence_penalty=0.0, repetition_penalty=1.0))
    for field, value in (("presence_penalty", 1.0), ("frequency_penalty", -0.5), ("repetition_penalty", 1.2)):
        error = refusal(admission, **{field: value})
        assert error.field == field and "not applied by this engine's executor" in error.message


def test_a_prompt_may_only_be_read(admission: Admission) -> None:
    request = Generate(id=1, prompt="x", max_tokens=0)
    admission.check(request)
    assert admission.parameters(request, 0, 0)["max_tokens"] == 0


def test_a_prompt_in_a_session_goes_on_behind_what_it_holds(admission: Admission) -> None:
    request = Generate(id=1, session=2, prompt="hello")
    whole = admission.prompt_ids(request)
    assert [0, *admission.prompt_ids(request, held=3)] == whole  # one BOS is enough
    nothing = Generate(id=1, session=2)
    admission.check(nothing)
    assert admission.prompt_ids(nothing, held=3) == []
    with pytest.raises(RequestError, match="the session holds nothing") as caught:
        admission.prompt_ids(nothing)
    assert (caught.value.code, caught.value.field) == ("bad_request", "prompt")


@pytest.mark.parametrize(("field", "value", "more"), [("prompt", "hello", 3), ("token_ids", [5] * 3, 3), (None, [], 0)])
def test_a_session_that_outgrows_the_context(admission: Admission, field: str | None, value: Any, more: int) -> None:
    request = Generate(id=1, session=2, **({field: value} if field else {}))
    count = len(admission.prompt_ids(request, held=1)) if more else 0
    admission.prompt_ids(request, held=CONTEXT - 1 - count)
    with pytest.raises(RequestError) as caught:
        admission.prompt_ids(request, held=CONTEXT - count)
    assert (caught.value.code, caught.value.field) == ("too_long", field or "session")
    assert f"{count} tokens are 1 too many" in caught.value.message
    assert f"behind the {CONTEXT - count} that the session holds" in caught.value.message


def test_drawn_seeds_differ(admission: Admission) -> None:
    request = Generate(id=1, prompt="x")
    assert admission.parameters(request, 0, 0)["seed"] != admission.parameters(request, 0, 0)["seed"]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"tools": [{"name": "f"}]}, "tools", "send it with messages"),
        ({"continue_final_message": True}, "continue_final_message", "send it with messages"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "send it with messages"),
    ],
)
def test_what_is_for_chats_needs_messages(admission: Admission, fields: dict[str, Any], field: str, said: str) -> None:
    error = refusal(admission, **fields)
    assert (error.code, error.field) == ("bad_request", field)
    assert said in error.message


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_template_variables_may_not_take_reserved_names(admission: Admission, name: str) -> None:
    messages = [Message(role="user", content="a")]
    error = refusal(admission, prompt=None, messages=messages, chat_template_kwargs={name: 1})
    assert error.field == "chat_template_kwargs"
    assert repr(name) in error.message


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message(role="user|>", content="a"), "messages [1].role"),
        (Message(role="", content="a"), "messages [1].role"),
        (Message(role="user"), "messages [1].content is missing"),
        (Message(role="user", content=[{"type": "image_url", "image_url": {}}]), "content[0] is of type 'image_url'"),
        (Message(role="user", content=[{"type": "text"}]), "content[0].text is missing"),
        (Message(role="user", content=[{}]), "content[0] is of type 'None'"),
    ],
)
def test_messages_of_a_wrong_shape_are_named(admission: Admission, message: Message, said: str) -> None:
    error = refusal(admission, prompt=None, messages=[Message(role="user", content="a"), message])
    assert error.field == "messages"
    assert said in error.message


def test_a_continued_message_gets_no_generation_prompt(admission: Admission) -> None:
    messages = [Message(role="assistant", content="a")]
    error = refusal(admission, prompt=None, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error.field == "continue_final_message"
    request = Generate(id=1, messages=messages, continue_final_message=True)
    admission.check(request)
    assert admission.prompt_ids(request)[-1] == admission._tokenizer.encode("a")[-1]


def test_control_tokens_in_prompts_are_text_unless_asked_for(admission: Admission) -> None:
    assert EOS[1] not in admission.prompt_ids(Generate(id=1, prompt="a<|end|>"))
    assert EOS[1] in admission.prompt_ids(Generate(id=1, prompt="a<|end|>", special_tokens=True))


def test_messages_are_refused_where_the_template_does_not_compile(tmp_path: Path) -> None:
    admission = make(tmp_path, template="{% for %}")
    assert admission.prompt_ids(Generate(id=1, prompt="a"))
    error = refusal(admission, prompt=None, messages=[Message(role="user", content="a")])
    assert "does not compile: line 1" in error.message


# ---- choices and grammars -----------------------------------------------------------------------------------------


def test_what_the_executor_does_not_offer_is_refused_by_name(tmp_path: Path) -> None:
    admission = make(tmp_path)
    admission.limits = msgspec.structs.replace(admission.limits, choices=False, grammars=False, prompt_logprobs=False)
    error = refusal(admission, prompt_logprobs=True)
    assert (error.code, error.field) == ("bad_request", "prompt_logprobs") and "limits.prompt_logprobs" in error.message
    error = refusal(admission, choices=["a"])
    assert (error.code, error.field) == ("bad_request", "choices") and "limits.choices" in error.message
    for field, value in (("json_schema", False), ("regex", "a"), ("lark", "start: A"), ("json_object", True)):
        error = refusal(admission, **{field: value})
        assert (error.code, error.field) == ("bad_request", field) and "limits.grammars" in error.message


@pytest.mark.parametrize("prompt", ["", "Say something:", " " * 40], ids=["alone", "behind text", "behind spaces"])
@pytest.mark.parametrize("name", KINDS)
def test_a_label_has_the_text_that_was_sent(tmp_path: Path, name: str, prompt: str) -> None:
    """Whatever the tokenizer does to the beginning of a text; what it cannot spell is refused by its place."""
    tokenizer = KINDS[name]()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    vocabulary = build_vocabulary(tokenizer)
    vocabulary.write(tmp_path / "vocab.bin", vocabulary.count)
    text_of = _native.Vocabulary(str(tmp_path / "vocab.bin")).text
    limits = Limits(context=4096, vocabulary=vocabulary.count, default_max_tokens=16, max_tokens=1000)
    admission = Admission(Tokenizer(tmp_path), limits, [1], text_of)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    spelled = 0
    for label in ("yes", " yes", "no ", "isn't", "a b", "naïve", "Köln", "\n", "<tool_call>", "日本"):
        request = Generate(id=1, prompt=prompt, choices=["one", label])
        try:
            found = admission.labels(request, ids)[1]
        except RequestError as error:
            assert error.field == "choices" and error.message.startswith("choices[1] ") and "change it" in error.message
        else:
            spelled += 1
            assert text_of(found, ids) == label
    assert spelled >= (6 if name == "metaspace" else 9)
