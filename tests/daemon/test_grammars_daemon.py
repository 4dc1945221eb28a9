"""Grammars end to end: answers that keep to their form, wherever they are given, and what is refused meanwhile."""

import asyncio
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

import ull
from checkpoints import write_checkpoint
from conftest import Daemon, Spawn
from processes import descriptors
from raw_client import RawClient
from ull import wire
from ull_build.build import build
from ull_build.settings import Settings

PROMPT = "x = "
SCHEMA = {
    "type": "object",
    "properties": {"side": {"enum": ["buy", "sell"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["side", "size"],
    "additionalProperties": False,
}
NAN = float("nan")
BOMB = "(a{1000}){1000}"


class Order(msgspec.Struct, forbid_unknown_fields=True):
    side: Literal["buy", "sell"]
    urgent: bool


@pytest.fixture(params=["local", "zeromq"])
def client(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[ull.Client]:
    transport: Any = request.param
    with ull.Client(shared_daemon.url, transport=transport) as client:
        yield client


# ---- answers ------------------------------------------------------------------------------------------------------


def is_order(text: str) -> bool:
    order = json.loads(text)
    return order["side"] in ("buy", "sell") and 1 <= order["size"] <= 99 and len(order) == 2


is_list = re.compile("[a-z]{2}(,[a-z]{2}){1,3}\\.").fullmatch
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "schema": ({"json_schema": SCHEMA}, is_order),
    "schema as a text": ({"json_schema": json.dumps(SCHEMA)}, is_order),
    "struct": ({"json_schema": Order}, lambda text: msgspec.json.decode(text, type=Order)),
    "schema of unicode": ({"json_schema": {"enum": ["été", "日本"]}}, lambda text: json.loads(text) in ("été", "日本")),
    "regex": ({"regex": "[a-z]{3}-[0-9]+;"}, re.compile("[a-z]{3}-[0-9]+;").fullmatch),
    "lark": (
        {"lark": 'start: WORD ("," WORD)~1..3 "."\nWORD: /[a-z]{2}/'},
        re.compile("[a-z]{2}(,[a-z]{2}){1,3}\\.").fullmatch,
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_its_form(client: ull.Client, name: str, temperature: float) -> None:
    options, fits = FORMS[name]
    result = client.generate(PROMPT, max_tokens=200, temperature=temperature, seed=5, **options).result()
    assert result.finish_reason == "stop" and fits(result.text), result.text
    assert result.grammar is not None and result.choice is None
    again = client.generate(PROMPT, max_tokens=200, temperature=temperature, seed=5, **options).result()
    assert again.token_ids == result.token_ids


def test_any_object_begins_as_one(client: ull.Client) -> None:
    result = client.generate(PROMPT, json_object=True, max_tokens=30).result()
    assert result.text.startswith("{")
    assert result.finish_reason == "length" or isinstance(result.json(), dict)


def test_json_is_written_as_models_write_it(client: ull.Client) -> None:
    result = client.generate(PROMPT, json_schema=SCHEMA, max_tokens=60).result()
    assert result.text == json.dumps(result.json())
    assert result.grammar is not None and result.grammar.forced_tokens > 0
    dense = {**SCHEMA, "x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}}
    result = client.generate(PROMPT, json_schema=dense, max_tokens=60).result()
    assert result.text == json.dumps(result.json(), separators=(",", ":"))


def test_what_is_cut_off_says_so(client: ull.Client) -> None:
    result = client.generate(PROMPT, json_schema=SCHEMA, max_tokens=2).result()
    assert result.finish_reason == "length"
    with pytest.raises(ValueError, match="truncated"):
        result.json()


def test_in_a_session_it_holds_for_one_answer(client: ull.Client) -> None:
    with client.open_session() as session:
        first = session.generate(PROMPT, json_schema=SCHEMA, max_tokens=60).result()
        assert is_order(first.text)
        free = session.generate("\ny = ", max_tokens=4, ignore_eos=True).result()
        assert len(free.token_ids) == 4 and free.grammar is None
        second = session.generate("\nz = ", regex="[0-9]{4}", max_tokens=60).result()
        assert re.fullmatch("[0-9]{4}", second.text) and second.usage.cached_tokens > 0
        prompt = [*client.tokenize(PROMPT), *first.token_ids, *ids_of(client, "\ny = "), *free.token_ids]
        alone = client.generate([*prompt, *ids_of(client, "\nz = ")], regex="[0-9]{4}", max_tokens=60).result()
        assert alone.token_ids == second.token_ids


def ids_of(client: ull.Client, text: str) -> list[int]:
    return client.tokenize(text, add_special_tokens=False)


def test_a_chat_a_hold_and_a_deadline(client: ull.Client) -> None:
    chat = [{"role": "user", "content": "A number?"}]
    held = client.generate(chat, regex="[0-9]{3}", hold=True, deadline=60.0, priority="realtime")
    held.commit()
    assert re.fullmatch("[0-9]{3}", held.result().text)


@pytest.mark.parametrize("drafter", ["none", "suffix", "auto"])
def test_every_drafter_gives_the_same(client: ull.Client, drafter: str) -> None:
    def answer(speculate: str) -> list[int]:
        options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 80, "speculate": speculate}
        return client.generate("1 2 3 1 2 3 1 2 ", lark='start: (" "? /[0-9]/){20}', **options).result().token_ids

    assert answer(drafter) == answer("none")


def test_the_asynchronous_client_has_the_same(shared_daemon: Daemon) -> None:
    async def ask() -> ull.Result:
        async with ull.AsyncClient(shared_daemon.url) as client:
            return await client.generate(PROMPT, json_schema=Order, max_tokens=60).result()

    assert msgspec.convert(asyncio.run(ask()).json(), Order)


def test_other_languages_write_a_schema_as_they_like(shared_daemon: Daemon) -> None:
    raw = RawClient(shared_daemon.url)
    try:
        schema = {"type": "string", "minLength": 2.0, "maxLength": 2.0}
        raw.send_map(type="generate", id=1, prompt=PROMPT, json_schema=schema, json_object=False, max_tokens=20.0)
        *tokens, done = raw.collect(1)
        text = "".join(frame.text for frame in tokens if isinstance(frame, wire.Token))
        assert isinstance(done, wire.Done) and isinstance(done.grammar, wire.GrammarUse), done
        assert len(json.loads(text)) == 2
    finally:
        raw.close()


def test_the_log_names_the_grammar(spawn: Spawn) -> None:
    daemon = spawn()
    with ull.Client(daemon.url) as client:
        for options in ({"regex": "ab"}, {"regex": "ab"}, {"regex": "abc"}, {}):
            client.generate(PROMPT, max_tokens=4, **options).result()
    first, again, other, none = [line.get("grammar") for line in daemon.wait_events("request", 4)[-4:]]
    assert re.fullmatch("[0-9a-f]{16}", first) and first == again != other and none is None


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "field", "said"),
    [
        ({"json_schema": {"type": "strin"}}, "invalid_grammar", "json_schema", "Invalid type: strin"),
        ({"json_schema": False}, "invalid_grammar", "json_schema", "Unsatisfiable"),
        ({"json_schema": {"$ref": "#"}}, "invalid_grammar", "json_schema", "allows nothing"),
        ({"json_schema": {"minimum": NAN}}, "invalid_grammar", "json_schema", "nan, which is no JSON, at $.minimum"),
        ({"json_schema": "{"}, "invalid_grammar", "json_schema", "no JSON"),
        ({"json_schema": {"enum": ["x" * 300_000]}}, "invalid_grammar", "json_schema", "at most 262144"),
        ({"json_schema": {"enum": ["x" * 10_000_000]}}, "too_long", None, "max_message_bytes"),
        ({"json_schema": 5}, "bad_request", "json_schema", "must be a mapping, true, false, a JSON text"),
        ({"json_schema": "[]"}, "bad_request", "json_schema", "must be a mapping"),
        ({"regex": ""}, "invalid_grammar", "regex", "is empty"),
        ({"regex": "(a"}, "invalid_grammar", "regex", "unclosed group"),
        ({"regex": BOMB}, "invalid_grammar", "regex", ""),
        ({"lark": "start: foo"}, "invalid_grammar", "lark", 'at 1(8): unknown name: "foo"'),
        ({"lark": 5}, "bad_request", "lark", "Expected `str"),
        ({"regex": "a", "lark": "start: a"}, "bad_request", "lark", "and regex are both set; send at most one"),
        ({"json_object": True, "json_schema": False}, "bad_request", "json_object", "and json_schema are both set"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    client: ull.Client, options: dict[str, Any], code: str, field: str, said: str
) -> None:
    with pytest.raises(ull.RequestError) as caught:
        client.generate(PROMPT, max_tokens=4, **options).result()
    assert (caught.value.code, caught.value.field) == (code, field)
    assert isinstance(caught.value, ull.InvalidGrammar) == (code == "invalid_grammar")
    assert said in caught.value.message
    assert client.generate(PROMPT, regex="ok", max_tokens=4).result().text == "ok"


def test_a_grammar_that_fails_ends_its_own_request_alone(client: ull.Client) -> None:
    banned = dict.fromkeys(ids_of(client, "b"), -math.inf)
    with pytest.raises(ull.RequestFailed, match="logit_bias bans every token") as caught:
        client.generate(PROMPT, regex="b", logit_bias=banned, max_tokens=8).result()
    assert caught.value.code == "grammar_failed" and isinstance(caught.value.partial, ull.Result)
    assert client.generate(PROMPT, regex="b", max_tokens=8).result().text == "b"


def test_a_refused_grammar_leaves_its_session_as_it_was(client: ull.Client) -> None:
    with client.open_session() as session:
        before = session.generate(PROMPT, max_tokens=3, ignore_eos=True).result().usage
        with pytest.raises(ull.InvalidGrammar):
            session.generate("more", regex="(").result()
        with pytest.raises(ull.InvalidGrammar):
            session.generate("more", regex="").result()
        assert session.rollback(0) == before.prompt_tokens + before.completion_tokens


# ---- while a grammar is compiled ----------------------------------------------------------------------------------


def child_of(daemon: Daemon) -> int:
    """The process in which grammars are tried."""
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"grammar_trial" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("there is none")


@pytest.fixture
def stuck(spawn: Spawn) -> Iterator[Daemon]:
    """A daemon of which no grammar's compilation ends."""
    daemon = spawn("--set", "grammars.time_limit_s=3600")
    with ull.Client(daemon.url) as client:
        client.generate(PROMPT, regex="kept", max_tokens=8).result()
    pid = child_of(daemon)
    os.kill(pid, signal.SIGSTOP)
    yield daemon
    os.kill(pid, signal.SIGCONT)


def test_others_are_undisturbed_and_what_is_kept_needs_no_compilation(stuck: Daemon) -> None:
    with ull.Client(stuck.url) as client, ull.Client(stuck.url) as other:
        waiting = client.generate(PROMPT, regex="new", max_tokens=8)
        for asking in (client, other):
            assert asking.generate(PROMPT, regex="kept", max_tokens=8).result().text == "kept"
            assert asking.generate("def f" * 500, max_tokens=4, ignore_eos=True).result().usage.completion_tokens == 4
            assert asking.generate([{"role": "user", "content": "Hi"}], max_tokens=2).result().usage.prompt_tokens
        assert not waiting.finished
        waiting.cancel()
        assert waiting.result().finish_reason == "cancelled"


@pytest.mark.parametrize("limit", ["timeout", "deadline"])
def test_its_time_limit_ends_it(stuck: Daemon, limit: Literal["timeout", "deadline"]) -> None:
    with ull.Client(stuck.url) as client:
        options: Any = {limit: 0.2}
        result = client.generate(PROMPT, regex="new", max_tokens=8, **options).result()
        assert (result.finish_reason, result.text, result.usage.prompt_tokens) == (limit, "", 0)
        with client.open_session() as session:
            assert session.generate(PROMPT, regex="new", max_tokens=8, **options).result().finish_reason == limit
            assert session.generate(PROMPT, regex="kept", max_tokens=8).result().text == "kept"


def test_a_client_that_hangs_up_is_forgotten(stuck: Daemon) -> None:
    with ull.Client(stuck.url) as client:
        client.generate(PROMPT, regex="new", max_tokens=8)
        while not client.stats().requests["accepted"]:
            time.sleep(0.01)
    stuck.wait_events("request", 2)
    assert stuck.events("request")[-1]["finish"] == "cancelled"


def test_what_waits_for_compilation_is_bounded(stuck: Daemon) -> None:
    with ull.Client(stuck.url) as client:
        share = 32  # half of engine.queue_depth
        waiting = [client.generate(PROMPT, regex=f"new{number}", max_tokens=8) for number in range(share)]
        with pytest.raises(ull.Busy, match="grammars of this client"):
            client.generate(PROMPT, regex="one too many", max_tokens=8).result()
        for stream in waiting:
            stream.cancel()
        assert {stream.result().finish_reason for stream in waiting} == {"cancelled"}


def test_what_requests_are_bound_to_has_a_bound_in_bytes(spawn: Spawn) -> None:
    daemon = spawn("--set", f"grammars.memory_bytes={24 << 20}", "--set", "grammars.time_limit_s=60")
    heavy: dict[str, Any] = {"json_schema": {"enum": [f"{number}aaaa" for number in range(5_000)]}, "max_tokens": 2}
    with ull.Client(daemon.url) as client:
        held = [client.generate(PROMPT, hold=True, **heavy) for _ in range(24)]  # of about 2 MB each
        with pytest.raises(ull.Busy, match=r"the grammars of [0-9]+ requests take [0-9]+ bytes \(grammars\.memory"):
            client.generate(PROMPT, **heavy).result()
        assert client.generate(PROMPT, max_tokens=2).result().usage.prompt_tokens
        for stream in held:
            if not stream.finished:
                stream.cancel()
        deadline = time.monotonic() + 20
        while client.stats().engine["slots_used"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.generate(PROMPT, **heavy).result().text


def test_a_drain_does_not_wait_for_ever(spawn: Spawn) -> None:
    daemon = spawn("--set", "grammars.time_limit_s=3600", "--set", "drain_timeout_s=0.2")
    with ull.Client(daemon.url) as client:
        client.generate(PROMPT, regex="kept", max_tokens=8).result()
        pid = child_of(daemon)
        os.kill(pid, signal.SIGSTOP)
        waiting = client.generate(PROMPT, regex="new", max_tokens=8)
        client.health()
        assert daemon.stop() == 0
        assert waiting.result().finish_reason == "cancelled"
    assert not Path(f"/proc/{pid}").exists()


def test_bombs_leave_nothing_behind(spawn: Spawn) -> None:
    daemon = spawn("--set", f"grammars.memory_bytes={8 << 20}", "--set", "grammars.time_limit_s=60")

    def what_is_there() -> dict[str, int]:
        tasks = list(Path(f"/proc/{daemon.pid}/task").iterdir())
        names = [(task / "comm").read_text().strip() for task in tasks]
        return {
            "threads": len(tasks),
            "workers": sum(name.startswith("ull-grammar") for name in names),
            "descriptors": descriptors(daemon.pid),
            "children": sum(len((task / "children").read_text().split()) for task in tasks),
        }

    with ull.Client(daemon.url) as client:
        client.generate(PROMPT, regex="kept", max_tokens=8).result()
        before = what_is_there()
        for number in range(10):
            bombs = [client.generate(PROMPT, regex=f"(a{{1000}}){{1{number}0{each}}}") for each in range(2)]
            for bomb in bombs:
                with pytest.raises(ull.InvalidGrammar, match="it ended its process"):
                    bomb.result()
        client.generate(PROMPT, regex="after", max_tokens=8).result()
        assert what_is_there() == before


def test_a_daemon_without_llguidance_serves_all_else(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "llguidance"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    daemon = spawn()
    with ull.Client(daemon.url) as client:
        assert client.info().limits["grammars"] is False
        with pytest.raises(ull.RequestError, match=r"takes no grammars \(limits\.grammars") as caught:
            client.generate(PROMPT, regex="a").result()
        assert (caught.value.code, caught.value.field) == ("bad_request", "regex")
        assert client.generate(PROMPT, choices=["a", "b"]).result().choice is not None
    (line,) = daemon.wait_events("grammars", 1)
    assert "has no _lib.abi3.so" in line["message"] and "reinstall" in line["message"]


def test_a_model_without_an_end_of_text_is_served_but_for_grammars(spawn: Spawn, tmp_path: Path) -> None:
    """As bundles of random weights are: no token ends what they say, and no grammar could say that it is complete."""
    checkpoint = write_checkpoint(tmp_path / "model", config={"eos_token_id": ...})
    tokenizer = checkpoint / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"eos_token"', '"other_token"'))
    bundle = build(Settings(model=checkpoint, output=tmp_path / "x.ull", name="x", evaluate=False)).path
    daemon = spawn(bundle=bundle)
    with ull.Client(daemon.url) as client:
        assert client.info().limits["grammars"] is False
        with pytest.raises(ull.RequestError, match="takes no grammars"):
            client.generate([5, 6], regex="a").result()
        result = client.generate([5, 6], max_tokens=20).result()
        assert (len(result.token_ids), result.finish_reason) == (20, "length")
    (line,) = daemon.wait_events("grammars", 1)
    assert line["message"] == "grammars are refused: no token of this model ends a text"
