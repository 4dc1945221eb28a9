"""Random sequences of all calls by several clients, against a plain Python model of what they must be answered."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from conftest import Daemon, Spawn
from session_calls import (
    Call,
    Cancel,
    CloseSession,
    Commit,
    Fork,
    Generate,
    OpenSession,
    Reconnect,
    Rollback,
    Truncate,
    Wrong,
    carry_out,
    end,
)
from session_model import ModelClient, Texts, World
from ull import _native, wire
from ull.bundle import open_bundle
from ull.text.cut import cut
from ull.text.tokenizer import Tokenizer

CONTEXT = 256
PER_CLIENT = 3
CLIENTS = 3
TEXTS = [tuple(range(first, first + 200)) for first in (300, 700)]  # with which many prompts begin
NUMBERS = st.sampled_from([0, 0, 0, 1, 1, 2, 3])  # of sessions: the fewer, the more happens in each


def some(kind: type[Call], *values: st.SearchStrategy[Any], **named: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, st.integers(0, CLIENTS - 1), *values, **named)


PROMPTS = st.one_of(
    st.just(()),
    st.lists(st.integers(3, 40), min_size=1, max_size=5).map(tuple),
    st.builds(lambda text, size: text[:size], st.sampled_from(TEXTS), st.integers(1, 200)),
)
BACK = st.integers(0, 2)
PRIORITY = st.sampled_from(["realtime", "interactive", "batch"])
EXTRA = st.fixed_dictionaries({}, optional={"priority": PRIORITY, "logprobs": st.integers(0, 2)})


def generates(**named: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lengths = st.one_of(st.integers(0, 12), st.just(0), st.sampled_from([40, 90, 300]))
    in_session = some(Generate, NUMBERS, PROMPTS, lengths, **named)
    return st.one_of(in_session, in_session, some(Generate, st.none(), PROMPTS.filter(bool), lengths, **named))


WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"type": "generate"}, "bad_request", "prompt"),
    ({"type": "generate", "token_ids": []}, "bad_request", "token_ids"),
    ({"type": "generate", "token_ids": [-1]}, "bad_request", "token_ids"),
    ({"type": "generate", "token_ids": [5], "prompt": "x"}, "bad_request", "token_ids"),
    ({"type": "generate", "token_ids": [5] * CONTEXT}, "too_long", "token_ids"),
    ({"type": "generate", "token_ids": [5], "max_tokens": -1}, "bad_request", "max_tokens"),
    ({"type": "generate", "token_ids": [5], "hold": True, "logprobs": 0}, "bad_request", "hold"),
    ({"type": "generate", "token_ids": [5], "priority": "high"}, "bad_request", "priority"),
    ({"type": "generate", "token_ids": [5], "deadline_ms": 0}, "bad_request", "deadline_ms"),
    ({"type": "generate", "token_ids": [5], "timeout_ms": -3}, "bad_request", "timeout_ms"),
    ({"type": "generate", "token_ids": [5], "session": "mine"}, "bad_request", "session"),
    ({"type": "generate", "token_ids": [5], "session": 99}, "unknown_session", "session"),
    ({"type": "open_session"}, "bad_request", "session"),
    ({"type": "open_session", "session": -1}, "bad_request", "session"),
    ({"type": "rollback", "session": 99, "tokens": 1}, "unknown_session", "session"),
    ({"type": "rollback", "session": 0}, "bad_request", "tokens"),
    ({"type": "fork", "session": 99, "to": 98}, "unknown_session", "session"),
    ({"type": "fork", "session": 0, "to": 1.5}, "bad_request", "to"),
    ({"type": "close_session", "session": None}, "bad_request", "session"),
    ({"type": "commit", "request": "all"}, "bad_request", "request"),
]

CALLS = st.one_of(
    some(OpenSession, NUMBERS),
    some(OpenSession, NUMBERS, pin=st.booleans()),
    generates(extra=EXTRA),
    generates(extra=EXTRA),
    generates(stop=st.integers(0, 9)),
    generates(hold=st.just(True)),
    generates(timeout_ms=st.integers(1, 4)),
    generates(deadline_ms=st.integers(1, 20)),
    some(Commit, BACK),
    some(Commit, BACK),
    some(Cancel, BACK),
    some(Cancel, BACK),
    some(Rollback, NUMBERS, st.integers(-1, 100)),
    some(Truncate, NUMBERS, st.integers(-1, 20), st.sampled_from(["tokens", "characters"])),
    some(Fork, NUMBERS, NUMBERS),
    some(CloseSession, NUMBERS),
    some(Reconnect),
    st.builds(lambda client, wrong: Wrong(client, *wrong), st.integers(0, CLIENTS - 1), st.sampled_from(WRONG)),
)


def hurried(random: Random) -> Call:
    """A call of a burst that keeps the engine busy. Hypothesis has no room for so many."""
    client, session, back = random.randrange(CLIENTS), random.randrange(2), random.randrange(3)
    ids = random.choice(TEXTS)[: random.randint(1, 60)]
    extra = {"priority": random.choice(["realtime", "interactive", "batch"])}
    kind = random.randrange(12)
    if kind < 6:
        limits = random.choice([{}, {}, {"timeout_ms": random.randint(1, 30)}, {"deadline_ms": random.randint(1, 200)}])
        place = random.choice([session, None])
        return Generate(client, place, ids, random.choice([0, 5, 30, 90]), extra=extra, **limits)
    if kind < 8:
        return Generate(client, None, ids, random.randint(0, 60), hold=True, extra=extra)
    return (
        Commit(client, back),
        Cancel(client, back),
        Rollback(client, session, random.randint(0, 100)),
        Truncate(client, session, random.randint(0, 5), "tokens"),
    )[kind - 8]


@pytest.fixture(scope="module")
def texts(tiny_bundle: Path) -> Iterator[Texts]:
    bundle = open_bundle(tiny_bundle)
    tokenizer = Tokenizer(bundle.tokenizer_directory)
    vocabulary = _native.Vocabulary(str(bundle.vocabulary_path))

    def cut_answer(prompt: list[int], answer: list[int], characters: int) -> list[int]:
        return cut(prompt, answer, characters, vocabulary.text, tokenizer.encode_rest)

    yield Texts(vocabulary.size, cut_answer)
    tokenizer.close()


def small_daemon(spawn: Spawn, script: dict[str, Any], pages: int, **engine: Any) -> Daemon:
    """A daemon of few pages, whose tokens depend on all before them."""
    fields = {"engine.context": CONTEXT, "engine.kv_pages": pages, "sessions.per_client": PER_CLIENT}
    fields |= {"sessions.hold_timeout_s": 1e6, "io.client_stall_ms": 600_000}
    fields |= {f"engine.{name}": value for name, value in engine.items()}
    arguments = [part for name, value in fields.items() for part in ("--set", f"{name}={str(value).lower()}")]
    return spawn(*arguments, script={"from_past": True, "pages": pages, **script})


SETTINGS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "plain": ({"prefill_chunk": 32}, 4, {}),
    "rounds_of_five": ({"prefill_chunk": 48, "tokens_per_round": 5, "forced_tokens": 7}, 8, {"sessions": 4}),
    "one_session": ({"prefill_chunk": 256}, 4, {"sessions": 1}),
    "cold": ({"prefill_chunk": 64, "tokens_per_round": 3}, 8, {"prefix_cache": False}),
    "slow": ({"prefill_chunk": 16, "round_ns": 50_000, "prefill_token_ns": 5_000, "tokens_per_round": 2}, 4, {}),
    "roomy": ({"prefill_chunk": 64, "forced_tokens": 3}, 20, {"sessions": 8}),
}


def check(world: World, bursts: list[list[Call]]) -> None:
    """Carries out a burst at a time; checks every answer, and that nothing is left at the end."""
    world.start(CLIENTS)
    try:
        carry_out(world, [OpenSession(client, session) for client in range(CLIENTS) for session in (0, 1)])
        for burst in bursts:
            carry_out(world, burst)
            world.stats()
        end(world)
        world.fill()
    finally:
        world.hang_up()


@pytest.mark.parametrize("name", SETTINGS)
def test_any_calls_are_answered_as_the_model_says(name: str, spawn: Spawn, texts: Texts) -> None:
    script, pages, engine = SETTINGS[name]
    daemon = small_daemon(spawn, script, pages, **engine)
    reuse = engine.get("prefix_cache", True)
    world = World(daemon.url, CONTEXT, pages, texts, PER_CLIENT, reuse)

    @settings(
        max_examples=10,
        phases=[Phase.generate],  # a daemon remembers what came before, and threads take turns as they like
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.lists(CALLS, min_size=1, max_size=6), min_size=10, max_size=30))
    def run(bursts: list[list[Call]]) -> None:
        check(world, bursts)

    run()


@pytest.mark.parametrize("pages", [4, 12])
def test_bursts_of_all_priorities_are_answered_in_full(pages: int, spawn: Spawn, texts: Texts) -> None:
    script = {"prefill_chunk": 16, "round_ns": 50_000, "prefill_token_ns": 1_000, "tokens_per_round": 3}
    daemon = small_daemon(spawn, script, pages, queue_depth=24, client_share=12, aging_ms=20)
    world = World(daemon.url, CONTEXT, pages, texts, PER_CLIENT, busy=True)
    random = Random(pages)
    for _ in range(12):
        check(world, [[hurried(random) for _ in range(40)] for _ in range(8)])
    assert world.suspensions > 0


def test_short_pinned_sessions_leave_room_for_a_whole_context(spawn: Spawn) -> None:
    daemon = small_daemon(spawn, {}, 8)
    clients = [ModelClient(daemon.url) for _ in range(3)]
    pinned = 0
    for place in range(9):
        client, session = clients[place // PER_CLIENT], place % PER_CLIENT
        assert isinstance(client.ask("open_session", session=session, pin=True), wire.SessionReply)
        reply = client.ask("generate", session=session, token_ids=[100 + place], max_tokens=1)
        pinned += isinstance(reply, wire.Done)
        assert isinstance(reply, wire.Done) or reply.code == "pins_full", reply
    done = clients[0].ask("generate", token_ids=[9] * (CONTEXT - 1), max_tokens=1)
    assert (done.finish_reason, done.error) == ("length", None)
    assert pinned == 4
    for client in clients:
        client.hang_up()
