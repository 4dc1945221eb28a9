"""Grammars: what llguidance's matchers say through the core, and what the tiny engine answers under them."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from json_check import random_schema, violation
from native_rig import Rig, write_vocabulary
from ull import _native
from ull.bundle import open_bundle

Kind = Literal["json_schema", "regex", "lark", "json_object"]

# How models write JSON.
STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ORDER = STYLE | {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 1000},
        "kind": {"enum": ["alpha", "beta"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SOURCES: list[tuple[Kind, str]] = [
    ("json_schema", json.dumps(ORDER)),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}}'),
    ("json_schema", json.dumps(STYLE | {"type": "array", "items": {"$ref": "#"}})),
    ("json_schema", '{"const": "aaaaaaaaaaaaaaaaaaaa"}'),
    ("json_object", ""),
    ("regex", "(a|b)+"),
    ("regex", "abc+d{3}(foo|foobar)"),
    ("regex", '[^"\\n]{3,9}\\.'),
    ("lark", 'start: "a" <|bos|> "b" x\nx: /[0-9]+/ | "hello world, this is forced"'),
]
MANY: dict[str, Any] = {f"property_{i}": {} for i in range(500)}
DRAFTERS = ("none", "suffix", "medusa", "eagle", "dflash", "draft", "auto")


def library() -> str:
    spec = find_spec("llguidance._lib")
    assert spec is not None and spec.origin is not None
    return spec.origin


@pytest.fixture(scope="module")
def grammars(tiny_bundle: Path) -> _native.Grammars:
    added = json.loads((tiny_bundle / "tokenizer/tokenizer.json").read_text())["added_tokens"]
    special = {token["id"]: token["content"] for token in added}
    eos = open_bundle(tiny_bundle).manifest.tokens.eos
    return _native.Grammars(library(), str(tiny_bundle / "vocab.bin"), eos, special)


@pytest.fixture(scope="module")
def vocabulary(tiny_bundle: Path) -> int:
    return open_bundle(tiny_bundle).manifest.model.vocabulary


def allowed(matcher: _native.GrammarMatcher, vocabulary: int) -> list[int]:
    mask = matcher.mask(vocabulary)
    assert mask is not None, matcher.failure
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def behind(grammar: _native.CompiledGrammar, tokens: list[int]) -> _native.GrammarMatcher:
    """A new matcher that has taken these."""
    matcher = grammar.matcher()
    assert all(matcher.take(token) for token in tokens)
    return matcher


@pytest.mark.parametrize(("kind", "source"), SOURCES)
def test_the_mask_holds_what_is_taken_and_nothing_else(
    grammars: _native.Grammars, vocabulary: int, kind: Kind, source: str
) -> None:
    grammar = grammars.compile(kind, source)
    rng = random.Random(1)
    for _ in range(3):
        matcher = grammar.matcher()
        for _ in range(25):
            if matcher.complete:
                break
            tokens, forced = allowed(matcher, vocabulary), matcher.forced(64)
            taken = []
            for token in range(vocabulary):
                if matcher.take(token):
                    taken.append(token)
                    matcher.give_back(1)
            assert taken == tokens
            assert not forced or tokens == forced[:1]
            assert not matcher.take(-1) and not matcher.take(vocabulary)
            assert matcher.failure is None
            assert matcher.take(rng.choice(tokens))


@pytest.mark.parametrize(("kind", "source"), SOURCES)
def test_a_matcher_that_gave_tokens_back_is_as_a_new_one(
    grammars: _native.Grammars, vocabulary: int, kind: Kind, source: str
) -> None:
    grammar = grammars.compile(kind, source)
    rng = random.Random(2)
    for _ in range(20):
        matcher, text = grammar.matcher(), list[int]()
        while not matcher.complete and len(text) < 40:
            forced = matcher.forced(200)
            assert matcher.forced(3) == forced[:3]  # however many are asked for
            text.append(rng.choice(allowed(matcher, vocabulary)))
            assert matcher.take(text[-1])
            if rng.random() < 0.3:
                kept = rng.randrange(len(text))
                matcher.give_back(len(text) - kept)
                fresh = behind(grammar, text[:kept])
                assert (matcher.complete, matcher.forced(200)) == (fresh.complete, fresh.forced(200))
                assert allowed(matcher, vocabulary) == allowed(fresh, vocabulary)
                assert all(matcher.take(token) for token in text[kept:])


def test_a_complete_matcher_that_is_asked_again_takes_nothing(grammars: _native.Grammars, vocabulary: int) -> None:
    matcher = grammars.compile("regex", "abc").matcher()
    (token,) = matcher.forced(9)
    assert matcher.take(token) and matcher.complete
    for other in (token, 0, 1, 2, 300):
        assert not matcher.take(other)
    assert matcher.forced(9) == []
    assert matcher.complete and matcher.failure is None
    matcher.give_back(1)
    assert not matcher.complete and matcher.forced(9) == [token]
    assert matcher.take(token) and matcher.mask(vocabulary) is None  # it fails, and says so
    assert matcher.failure == "the answer is complete: nothing may follow"


def test_an_end_of_text_token_completes_where_the_grammar_may_end(grammars: _native.Grammars, vocabulary: int) -> None:
    grammar = grammars.compile("regex", "(a|b)+")
    first = allowed(grammar.matcher(), vocabulary)
    for end in (1, 2):
        assert end not in first and not grammar.matcher().take(end)
        matcher = behind(grammar, first[:1])
        assert not matcher.complete and end in allowed(matcher, vocabulary)
        assert matcher.take(end) and matcher.complete
        matcher.give_back(1)
        assert not matcher.complete and matcher.take(first[0])


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("json_schema", '{"type": "nope"}', "Invalid type: nope"),
        ("json_schema", "{bad", "line 1 column 2"),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', r"minLength \(5\) is greater"),
        ("json_schema", '{"$ref": "#/definitions/x"}', "'/definitions/x' does not exist"),
        ("json_schema", '{"$ref": "#"}', "it allows nothing"),
        ("json_schema", "[" * 100_000, "recursion limit"),
        ("json_schema", json.dumps({"type": "object", "properties": MANY}), "items; max is 500"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(" * 200 + "a" + ")*" * 200, "invalid regex"),
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("regex", "a\0b", "NUL"),
        ("lark", 'start: "a" nothing', r'at 1\(8\): unknown name: "nothing"'),
        ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
        ("lark", "x" * (2**18 + 1), "more than 256 KiB"),
        ("xml", "<a>", 'of the kind "xml"'),
    ],
)
def test_a_grammar_that_cannot_be_used_says_why(
    grammars: _native.Grammars, kind: Kind, source: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(_native.GrammarError, match=said) as caught:
        grammars.compile(kind, source)
    assert len(str(caught.value)) < 800
    assert "<state>" not in str(caught.value) and "verbose" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # llguidance writes nothing beside it


def test_what_a_matcher_may_cost_is_limited(grammars: _native.Grammars, vocabulary: int) -> None:
    """A text that can be read in hundreds of ways: the matcher fails, and says that it was too much."""
    matcher = grammars.compile("lark", 'start: start start | "a" | "b"').matcher()
    taken = 0
    while (mask := matcher.mask(vocabulary)) is not None:
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not matcher.take(int(tokens[-1])):
            break
        taken += 1
    assert 10 < taken < 1000
    assert re.search("the grammar cannot be followed: .*(items|Too many)", matcher.failure or "")


def test_a_grammar_is_known_by_its_kind_and_source(grammars: _native.Grammars) -> None:
    keys = {grammars.compile(kind, source).key for kind, source in [*SOURCES, *SOURCES]}
    assert len(keys) == len(SOURCES)
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert grammars.compile("regex", "json").key != grammars.compile("lark", 'start: "json"').key


def test_matchers_of_one_grammar_run_in_several_threads(grammars: _native.Grammars, vocabulary: int) -> None:
    """The control thread clones while the engine thread runs an earlier clone."""
    grammar = grammars.compile("json_schema", json.dumps(ORDER))

    def walk(seed: int) -> list[int]:
        rng, matcher, text = random.Random(seed), grammar.matcher(), list[int]()
        while not matcher.complete and len(text) < 60:
            text.append(rng.choice(allowed(matcher, vocabulary)))
            assert matcher.take(text[-1])
        return text

    expected = [walk(seed) for seed in range(24)]
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda start=start: results.update({s: walk(s) for s in range(start, 24, 4)}))
        for start in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[seed] for seed in range(24)] == expected


def test_bad_libraries_and_tokens_are_named(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.bin", [bytes([token]) for token in range(128)], special=[0])
    with pytest.raises(RuntimeError, match=r"llguidance cannot be loaded: .*nothing\.so"):
        _native.Grammars("/nothing.so", str(path), [0])
    with pytest.raises(RuntimeError, match="has no llg_new_tokenizer_v2"):
        _native.Grammars(_native.__file__, str(path), [0])
    for eos, special, said in [
        ([], {}, "eos: at least one"),
        ([128], {}, "eos: .*outside"),
        ([0], {-1: "x"}, "special: "),
    ]:
        with pytest.raises(ValueError, match=said):
            _native.Grammars(library(), str(path), eos, special)


def test_a_grammar_of_another_vocabulary_is_refused(tmp_path: Path, grammars: _native.Grammars) -> None:
    with Rig(tmp_path, {"tokens": [97]}) as rig:
        rig.client(b"client")
        with pytest.raises(_native.InvalidRequest, match="grammar: is of another vocabulary"):
            rig.submit(b"client", 1, b"hello", grammar=grammars.compile("json_object", ""))
        with pytest.raises(_native.InvalidRequest, match="grammar: has the wrong type"):
            rig.submit(b"client", 1, b"hello", grammar="json")


class Tiny:
    """The tiny engine, which drafts the widest tree in every round."""

    def __init__(self, rig: Rig, prompt: bytes, eos: list[int]) -> None:
        self.rig, self.prompt, self._eos = rig, prompt, eos
        self._client, self.urgent = rig.client(b"client"), rig.client(b"urgent")
        self._requests = 0

    def answer(self, grammar: _native.CompiledGrammar | None, **params: Any) -> tuple[str, list[int], dict[str, Any]]:
        """Text, tokens, and the done frame."""
        return self.end(self.begin(grammar, **params))

    def begin(self, grammar: _native.CompiledGrammar | None, **params: Any) -> int:
        self._requests += 1
        params = {"max_tokens": 200, "stop_ids": self._eos, "grammar": grammar} | params
        self.rig.engine.submit(self._client.identity, self._requests, self.prompt, params)
        return self._requests

    def end(self, request: int) -> tuple[str, list[int], dict[str, Any]]:
        frames, done = self._client.finish(request)
        return "".join(frame["text"] for frame in frames), [id for frame in frames for id in frame["ids"]], done


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    bundle = open_bundle(tiny_bundle)
    executor = _native.CpuExecutor(bundle.native_spec(), threads=1, cores=[], adaptive=False, max_tree=16)
    folder = tmp_path_factory.mktemp("rig")
    with Rig(folder, {}, executor=executor, vocabulary=tiny_bundle / "vocab.bin") as rig:
        prompt = np.arange(100, 140, dtype=np.int32).tobytes()
        yield Tiny(rig, prompt, bundle.manifest.tokens.eos)


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.4, "seed": 6, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 8, "logprobs": 2},
]


@pytest.mark.parametrize("seed", range(60))
def test_answers_to_random_schemas_validate_and_are_the_same_for_every_drafter(
    grammars: _native.Grammars, tiny: Tiny, seed: int
) -> None:
    schema = random_schema(random.Random(seed))
    grammar = grammars.compile("json_schema", json.dumps(STYLE | schema))
    sampling = SAMPLINGS[seed % len(SAMPLINGS)]
    answers = {drafter: tiny.answer(grammar, speculate=drafter, **sampling) for drafter in DRAFTERS}
    text, tokens, done = answers["none"]
    for drafter, (other_text, other_tokens, other_done) in answers.items():
        assert (other_text, other_tokens) == (text, tokens), drafter
        assert (other_done["finish_reason"], other_done["error"]) == (done["finish_reason"], None)
    if done["finish_reason"] == "stop":
        assert violation(schema, json.loads(text)) is None
    else:  # its end was cut off: what there is fits
        assert done["finish_reason"] == "length" and len(tokens) == 200
    assert behind(grammar, [token for token in tokens if token > 2]).failure is None


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_is_forced_is_not_drawn(grammars: _native.Grammars, tiny: Tiny, drafter: str) -> None:
    """Logprobs have each token drawn: the answer is the same, and takes more masks."""
    grammar = grammars.compile("json_schema", json.dumps(ORDER))
    for sampling in ({}, {"temperature": 1.2, "seed": 3}):
        text, tokens, done = tiny.answer(grammar, speculate=drafter, **sampling)
        same_text, same_tokens, drawn = tiny.answer(grammar, speculate=drafter, logprobs=0, **sampling)
        assert (text, tokens) == (same_text, same_tokens)
        assert done["grammar"]["forced_tokens"] > 10 and drawn["grammar"]["forced_tokens"] == 0
        assert done["grammar"]["masks"] < drawn["grammar"]["masks"]
        assert done["speculation"]["rounds"] < len(tokens) - 10


def test_a_request_that_others_come_between_says_the_same(grammars: _native.Grammars, tiny: Tiny) -> None:
    """A batch request under a grammar, and realtime ones, under others and under none, while it runs."""
    schema = {"type": "array", "items": ORDER, "minItems": 12, "maxItems": 12}
    grammar = grammars.compile("json_schema", json.dumps(STYLE | schema))
    words = grammars.compile("regex", "[a-z ]{20,30}\\.")
    urgent, requests, suspended = tiny.urgent, count(), 0
    for drafter, sampling in [
        ("none", {}),
        ("medusa", {"temperature": 1.0, "seed": 4}),
        ("eagle", {"temperature": 0.9, "seed": 6}),
        ("dflash", {"frequency_penalty": 0.4}),
        ("auto", {"logprobs": 0}),
    ]:
        params = {"speculate": drafter, "max_tokens": 600, "priority": "batch"} | sampling
        alone = tiny.answer(grammar, **params)
        rounds = tiny.rig.engine.stats()["rounds"]
        pending = tiny.begin(grammar, **params)
        tiny.rig.wait_until(lambda rounds=rounds: tiny.rig.engine.stats()["rounds"] > rounds)
        for _ in range(4):
            request = next(requests)
            other = {"max_tokens": 8, "priority": "realtime", "grammar": words if request % 2 else None}
            tiny.rig.engine.submit(urgent.identity, request, tiny.prompt, other)
            assert urgent.finish(request)[1]["error"] is None
        text, tokens, done = tiny.end(pending)
        assert (text, tokens) == alone[:2]
        assert done["finish_reason"] == "stop" and violation(schema, json.loads(text)) is None
        suspended += tiny.rig.engine.stats()["suspensions"]
    assert suspended > 0


def test_requests_without_a_grammar_have_no_figures_of_one(tiny: Tiny) -> None:
    assert "grammar" not in tiny.answer(None, max_tokens=3)[2]


def test_a_matcher_that_fails_ends_its_request_and_no_other(grammars: _native.Grammars, tiny: Tiny) -> None:
    grammar = grammars.compile("lark", 'start: start start | "a" | "b"')
    for drafter in DRAFTERS:
        _, tokens, done = tiny.answer(grammar, speculate=drafter, logit_bias={1: -1e9, 2: -1e9}, max_tokens=400)
        assert done["finish_reason"] == "error" and done["error"]["code"] == "grammar_failed"
        assert done["error"]["message"].startswith("the grammar cannot be followed: ")
        assert len(tokens) > 10
        assert tiny.rig.engine.health() == "ok"
    text, _, done = tiny.answer(grammars.compile("regex", "[ab]{3}c"))
    assert re.fullmatch("[ab]{3}c", text) and done["finish_reason"] == "stop"
