"""The clients' half of sessions and held answers, against a daemon of words: both clients, both transports."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ull
from fake_daemon import FakeDaemon, await_loss, words
from fake_sessions import FakeSessions, refuse
from ull import wire

Serve = Callable[..., FakeDaemon]
LONG_S = 60.0  # for a machine that is busy with other things


@pytest.fixture(params=["zeromq", "local"])
def serve(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Starts fake daemons that end with the test, once for each transport."""
    daemons: list[FakeDaemon] = []

    def start(handler: Any = None, name: str = "ull.sock") -> FakeDaemon:
        url = f"ipc://{tmp_path / name}"
        daemons.append(FakeDaemon(url, handler or FakeSessions(), local=request.param == "local"))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def sessions() -> FakeSessions:
    return FakeSessions()


@pytest.fixture
def client(serve: Serve, sessions: FakeSessions) -> Iterator[ull.Client]:
    with ull.Client(serve(sessions).url, connect_timeout=LONG_S, query_timeout=LONG_S) as client:
        yield client


def run(url: str, body: Callable[[ull.AsyncClient], Awaitable[None]], **options: Any) -> None:
    """Runs `body` with a client in a fresh event loop; a test that hangs fails."""

    async def main() -> None:
        options.setdefault("query_timeout", LONG_S)
        async with asyncio.timeout(LONG_S), ull.AsyncClient(url, connect_timeout=LONG_S, **options) as client:
            await body(client)

    asyncio.run(main())


def settle(client: ull.Client) -> None:
    """All that was sent before has been answered, and the answers are taken in."""
    client.health()


# ---- what a session does ------------------------------------------------------------------------------------------


def test_turns_add_up(client: ull.Client) -> None:
    with client.open_session() as session:
        assert session.tokens == 0
        result = session.generate("a b").result()
        assert (result.text, result.usage.prompt_tokens, session.tokens) == ("a b ", 2, 4)
        result = session.generate("c").result()
        assert (result.usage.prompt_tokens, result.usage.cached_tokens, session.tokens) == (5, 4, 6)
        result = session.generate(max_tokens=3).result()  # goes on from what is there
        assert (result.usage.prompt_tokens, session.tokens) == (6, 6)


def test_messages_are_the_whole_conversation(client: ull.Client) -> None:
    with client.open_session() as session:
        session.generate([{"role": "user", "content": "a b"}], max_tokens=1).result()
        turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "x"}]
        usage = session.generate(turns, max_tokens=0).result().usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.rolled_back_tokens) == (3, 2, 1)


def test_append_rollback_truncate_and_fork(client: ull.Client) -> None:
    with client.open_session() as session:
        usage = session.append("a b c").result().usage
        assert (usage.prompt_tokens, usage.completion_tokens, session.tokens) == (3, 0, 3)
        assert (session.rollback(1), session.tokens) == (2, 2)
        session.generate().result()
        session.generate("c d").result()
        assert session.tokens == 6
        with session.fork() as other:
            assert (other.tokens, other.id != session.id) == (6, True)
            assert (other.truncate(tokens=1), other.tokens) == (4, 4)
            assert (session.truncate(characters=4), session.tokens) == (5, 5)
            assert other.tokens == 4


def test_what_is_sent_is_what_was_asked_for(serve: Serve) -> None:
    daemon = serve()
    with ull.Client(daemon.url, connect_timeout=LONG_S) as client:
        with client.open_session(pin=True) as session:
            session.append([1, 2], priority="batch", deadline=2.5).result()
            session.generate("x", timeout=1.5, seed=None).result()
            session.rollback(1)
            session.truncate(characters=0)
            session.fork().close()
        client.prewarm("y", deadline=1, timeout=None)
    number = session.id
    expected: list[wire.Request] = [
        wire.OpenSession(id=0, session=number, pin=True),
        wire.Generate(id=0, session=number, token_ids=[1, 2], max_tokens=0, priority="batch", deadline_ms=2500),
        wire.Generate(id=0, session=number, prompt="x", timeout_ms=1500),
        wire.Rollback(id=0, session=number, tokens=1),
        wire.Truncate(id=0, session=number, characters=0),
        wire.Fork(id=0, session=number, to=number + 6),
        wire.CloseSession(id=0, session=number + 6),
        wire.CloseSession(id=0, session=number),
        wire.Generate(id=0, prompt="y", max_tokens=0, deadline_ms=1000),
    ]
    assert [msgspec.structs.replace(request, id=0) for request in daemon.requests] == expected
    assert len({request.id for request in daemon.requests} | {number, number + 6}) == len(expected) + 2


def test_nothing_is_waited_for(client: ull.Client, sessions: FakeSessions) -> None:
    session = client.open_session()
    for word in ("a", "b", "c"):
        session.append(word)  # and the stream is dropped, which cancels nothing
    gc.collect()
    result = session.generate("d", max_tokens=1).result()
    assert (result.text, result.usage.prompt_tokens, session.tokens) == ("d ", 4, 5)
    session.close()
    settle(client)
    assert not sessions.sessions


def test_prewarm(client: ull.Client) -> None:
    result = client.prewarm("a b c")
    assert (result.text, result.token_ids, result.finish_reason, result.usage.prompt_tokens) == ("", [], "length", 3)


# ---- held answers -------------------------------------------------------------------------------------------------


def test_a_held_answer_comes_with_its_commit(client: ull.Client) -> None:
    with client.open_session() as session:
        stream = session.generate("a b", hold=True)
        settle(client)
        assert stream.ready() is None and session.tokens == 0
        stream.commit()
        assert [item.text for item in stream] == ["a ", "b "]
        assert session.tokens == 4
        with pytest.raises(ull.RequestError) as caught:
            stream.commit()
        assert (caught.value.code, caught.value.field) == ("not_held", "request")
    stream = client.generate("no session", hold=True)
    stream.commit()
    assert stream.result().text == "no session "


def test_the_first_token_is_a_commit_s_answer_too(serve: Serve) -> None:
    class Late(FakeSessions):
        def _commit(self, daemon: FakeDaemon, identity: bytes, request: wire.Commit) -> None:
            self._answer(daemon, identity, self.held.pop((identity, request.request)))

    with ull.Client(serve(Late()).url, connect_timeout=LONG_S, query_timeout=LONG_S) as client:
        stream = client.generate("a b", hold=True)
        stream.commit()
        assert stream.result().text == "a b "


def test_the_next_message_drops_what_is_held(client: ull.Client, sessions: FakeSessions) -> None:
    with client.open_session() as session:
        session.append("a")
        held = session.generate("eager guess", hold=True)
        assert session.generate("b", max_tokens=0).result().usage.prompt_tokens == 2
        assert held.result().finish_reason == "cancelled"
        assert (sessions.cancelled, session.tokens) == (["eager guess"], 2)
        with pytest.raises(ull.RequestError, match="not_held"):
            held.commit()


def test_a_silence_while_an_answer_is_held_is_no_loss(serve: Serve) -> None:
    daemon = serve(FakeSessions())
    with ull.Client(daemon.url, silence_timeout=0.02, connect_timeout=LONG_S, query_timeout=LONG_S) as client:
        stream = client.generate("a", hold=True, timeout=0.01)
        waiting = threading.Thread(target=lambda: daemon.wait_for(wire.Health, 3))
        waiting.start()
        while waiting.is_alive():
            stream._wait()
        assert not stream.finished
        stream.commit()
        assert stream.result().text == "a "

    async def body(client: ull.AsyncClient) -> None:
        stream = client.generate("a", hold=True, timeout=0.01)
        reading = asyncio.ensure_future(stream.result())
        await asyncio.to_thread(daemon.wait_for, wire.Health, 6)
        assert not reading.done()
        await stream.commit()
        assert (await reading).text == "a "

    run(daemon.url, body, silence_timeout=0.02)


def test_a_held_answer_that_was_refused_says_so_at_its_commit(client: ull.Client) -> None:
    stream = client.generate("refuse", hold=True)
    for _ in range(2):  # the answer arrives while it asks, and before
        with pytest.raises(ull.Busy):
            stream.commit()


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_refusals_are_typed_and_the_session_goes_on(client: ull.Client) -> None:
    with client.open_session() as session:
        session.append("a b").result()
        with pytest.raises(ull.RequestError) as caught:
            session.rollback(3)
        assert (caught.value.code, caught.value.field) == ("bad_request", "tokens")
        with pytest.raises(ull.Busy):
            session.generate("refuse").result()
        assert session.generate("c").result().usage.prompt_tokens == 3


def test_an_append_that_is_refused_is_told_of_once(client: ull.Client, sessions: FakeSessions) -> None:
    with client.open_session() as session:
        with pytest.raises(ull.Busy):  # to who asks
            session.append("refuse").result()
        assert session.append("a").result().usage.prompt_tokens == 1

        session.append("refuse")  # to who is next
        settle(client)
        with pytest.raises(ull.Busy):
            session.rollback(1)
        assert session.rollback(1) == 0

        session.append("refuse later")  # to who waits behind it, whose answer would not be what was asked for
        stream = session.generate("open")
        with pytest.raises(ull.Busy):
            stream.result()
        settle(client)
        assert not sessions.live
        assert session.generate("b").result().text == "b "


@pytest.mark.parametrize(
    ("prompt", "kind", "said"),
    [
        ("fail", ull.RequestFailed, "the executor failed"),
        ("too late", ull.RequestTimeout, "had to wait for longer than its time limit"),
    ],
)
def test_an_append_that_never_began_is_told_of(
    client: ull.Client, prompt: str, kind: type[ull.UllError], said: str
) -> None:
    with client.open_session() as session:
        session.append("a").result()
        session.append(prompt)
        settle(client)
        with pytest.raises(kind, match=said):
            session.generate("b")
        assert session.tokens == 1
        with pytest.raises(kind, match=said):
            session.append(prompt).result()
        assert session.generate("b", max_tokens=0).result().usage.prompt_tokens == 2


def test_what_lacks_its_beginning_is_cancelled_although_nobody_waits(
    client: ull.Client, sessions: FakeSessions
) -> None:
    session = client.open_session()
    session.append("refuse later")
    stream = session.generate("open")
    with pytest.raises(ull.Busy):
        stream.result()
    deadline = time.monotonic() + LONG_S
    while sessions.live and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not sessions.live


def test_a_session_that_is_refused_is_none(serve: Serve) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.OpenSession):
            refuse(daemon, identity, request.id, "too_many_sessions", "session")
        else:
            words(daemon, identity, request)

    daemon = serve(handler)
    with ull.Client(daemon.url, connect_timeout=LONG_S) as client:
        with pytest.raises(ull.RequestError) as caught:
            client.open_session()
        assert (caught.value.code, caught.value.field) == ("too_many_sessions", "session")
        gc.collect()
        settle(client)
    assert not [request for request in daemon.requests if isinstance(request, wire.CloseSession)]


@pytest.mark.parametrize(
    ("call", "field", "said"),
    [
        (lambda session: session.rollback("3"), "tokens", "tokens must be a number of tokens, 0 or more, not '3'"),
        (lambda session: session.rollback(-1), "tokens", "0 or more, not -1"),
        (lambda session: session.rollback(True), "tokens", "not True"),
        (lambda session: session.rollback(2**70), "tokens", "must be a number"),
        (lambda session: session.truncate(), "tokens", "takes either tokens or characters"),
        (lambda session: session.truncate(1, 1), "tokens", "takes either tokens or characters"),
        (lambda session: session.truncate(characters=1.5), "characters", "a number of characters, 0 or more, not 1.5"),
        (lambda session: session.append(None), "prompt", r"append\(\) needs a prompt to read"),
        (lambda session: session.append(b"x"), "prompt", "prompt is bytes"),
        (
            lambda session: session.generate("x", deadline=0),
            "deadline",
            "deadline must be a positive number",
        ),
        (lambda session: session.generate("x", timeout=-1), "timeout", "timeout must be a positive number"),
    ],
)
def test_what_cannot_be_asked_of_a_session(client: ull.Client, call: Any, field: str, said: str) -> None:
    with client.open_session() as session:
        with pytest.raises(ull.RequestError, match=said) as caught:
            call(session)
        assert (caught.value.code, caught.value.field) == ("bad_request", field)
        assert session.generate("a").result().text == "a "


def test_unknown_options_name_the_nearest(client: ull.Client) -> None:
    with client.open_session() as session:
        with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'hodl'.*'hold'"):
            session.generate("x", hodl=True)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"append\(\) got an unexpected keyword argument 'priorty'.*'priority'"):
            session.append("x", priorty="batch")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"append\(\) got an unexpected keyword argument 'temperature'"):
            session.append("x", temperature=1.0)  # type: ignore[call-arg]


# ---- the ends of sessions -----------------------------------------------------------------------------------------

ASKING: list[Callable[[ull.Session], object]] = [
    lambda session: session.generate("x"),
    lambda session: session.append("x"),
    lambda session: session.rollback(0),
    lambda session: session.truncate(tokens=0),
    lambda session: session.fork(),
]


def test_a_closed_session_says_so(client: ull.Client, sessions: FakeSessions) -> None:
    session = client.open_session()
    stream = session.generate("open")
    assert next(stream).text == "one "
    session.close()
    session.close()
    for ask in ASKING:
        with pytest.raises(ull.RequestError, match="the session is closed") as caught:
            ask(session)
        assert (caught.value.code, caught.value.field) == ("unknown_session", "session")
    assert stream.result().finish_reason == "cancelled"
    settle(client)
    assert not sessions.sessions
    assert client.generate("and on").result().text == "and on "


def test_a_dropped_session_is_closed_but_not_under_its_stream(client: ull.Client, sessions: FakeSessions) -> None:
    stream = client.open_session().generate("open")
    gc.collect()
    assert next(stream).text == "one " and len(sessions.sessions) == 1
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    del stream
    gc.collect()
    settle(client)
    assert not sessions.sessions and not client._protocol._sessions


def test_a_session_dropped_in_another_thread_is_closed_later(client: ull.Client, sessions: FakeSessions) -> None:
    holder = [client.open_session()]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert sessions.sessions
    settle(client)
    assert not sessions.sessions


def test_another_thread_is_told(client: ull.Client) -> None:
    session = client.open_session()
    raised: list[BaseException] = []

    def body() -> None:
        for ask in [*ASKING, lambda _: client.open_session(), lambda _: client.prewarm("x")]:
            try:
                ask(session)
            except ull.UsageError as error:
                raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert len(raised) == len(ASKING) + 2
    assert session.generate("and on").result().text == "and on "


def test_sessions_end_with_their_connection(serve: Serve) -> None:
    first = serve()
    with ull.Client(first.url, connect_timeout=LONG_S, query_timeout=LONG_S) as client:
        with client.open_session() as noticed, client.open_session() as unnoticed:
            stream = noticed.generate("open")
            assert next(stream).text == "one "
            first.close()
            await_loss(client)
            second = serve()
            with pytest.raises(ull.ConnectionLost, match="ended with its connection; open another and send it"):
                unnoticed.generate("x")  # the loss is found while this is sent, and it is not sent to a stranger
            with pytest.raises(ull.ConnectionLost, match="was lost while"):
                stream.result()
            for ask in ASKING:
                with pytest.raises(ull.ConnectionLost, match="ended with its connection"):
                    ask(noticed)
            with client.open_session() as anew:
                assert anew.generate("a").result().text == "a "
        settle(client)
    kinds = [type(request) for request in second.requests]
    assert kinds == [wire.OpenSession, wire.Generate, wire.CloseSession, wire.Health]


def test_a_session_is_opened_over_a_new_connection_where_the_old_one_has_gone(serve: Serve) -> None:
    first = serve()
    with ull.Client(first.url, connect_timeout=LONG_S, query_timeout=LONG_S) as client:
        settle(client)
        first.close()
        await_loss(client)
        serve()
        with client.open_session() as session:
            assert session.generate("a").result().text == "a "


def test_a_closed_client_has_no_sessions(serve: Serve) -> None:
    client = ull.Client(serve().url, connect_timeout=LONG_S)
    session = client.open_session()
    client.close()
    for ask in ASKING:
        with pytest.raises(ull.ConnectionLost):
            ask(session)
    session.close()
    with pytest.raises(ull.ConnectionLost, match="the client is closed"):
        client.open_session()


# ---- the asynchronous client --------------------------------------------------------------------------------------


def test_async_sessions(serve: Serve, sessions: FakeSessions) -> None:
    async def body(client: ull.AsyncClient) -> None:
        async with await client.open_session(pin=True) as session:
            session.append("a b")
            gc.collect()
            assert [item.text async for item in session.generate("c", max_tokens=1)] == ["a "] or session.tokens
            assert session.tokens == 4
            assert await session.rollback(1) == 3
            async with await session.fork() as other:
                assert other.tokens == 3
                assert await other.truncate(tokens=1) == 2
            held = session.generate("d", hold=True)
            with pytest.raises(ull.RequestError) as caught:
                await session.rollback(99)
            assert caught.value.field == "tokens"
            assert (await held.result()).finish_reason == "cancelled"
            held = session.generate("d", hold=True)
            await held.commit()
            assert (await held.result()).text == "d "
            with pytest.raises(ull.RequestError) as caught:
                await held.commit()
            assert caught.value.code == "not_held"
        with pytest.raises(ull.RequestError, match="the session is closed"):
            session.generate("x")
        await client.health()
        assert not sessions.sessions
        assert (await client.prewarm("a b")).usage.prompt_tokens == 2

    run(serve(sessions).url, body)


def test_async_refusals_of_appends_are_told_of(serve: Serve, sessions: FakeSessions) -> None:
    async def body(client: ull.AsyncClient) -> None:
        session = await client.open_session()
        session.append("refuse")
        await client.health()
        with pytest.raises(ull.Busy):
            session.generate("x")
        session.append("refuse later")
        stream = session.generate("open")
        with pytest.raises(ull.Busy):
            await stream.result()
        await client.health()
        assert not sessions.live
        assert (await session.generate("b").result()).text == "b "
        del session, stream
        gc.collect()
        await client.health()
        await client.health()
        assert not sessions.sessions

    run(serve(sessions).url, body)


def test_async_sessions_end_with_their_connection(serve: Serve) -> None:
    async def body(client: ull.AsyncClient) -> None:
        async with await client.open_session() as session:
            stream = session.generate("open")
            assert (await anext(stream)).text == "one "
            first.close()
            await asyncio.to_thread(serve)
            with pytest.raises(ull.ConnectionLost, match="was lost while"):
                await stream.result()
            for ask in ASKING[:2]:
                with pytest.raises(ull.ConnectionLost, match="ended with its connection"):
                    ask(session)  # type: ignore[arg-type]
            with pytest.raises(ull.ConnectionLost, match="ended with its connection"):
                await session.rollback(0)
            async with await client.open_session() as anew:
                assert (await anew.generate("a").result()).text == "a "

    first = serve()
    run(first.url, body)


def test_async_a_task_cancelled_while_it_opens_a_session_leaves_none(serve: Serve, sessions: FakeSessions) -> None:
    async def body(client: ull.AsyncClient) -> None:
        await client.health()
        for turns in range(4):
            task = asyncio.ensure_future(client.open_session())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):  # a later one may have had its session
                (await task).close()
        await client.health()
        await client.health()
        assert not sessions.sessions and not client._protocol._sessions

    run(serve(sessions).url, body)


def test_both_sessions_can_do_the_same() -> None:
    public = {name for name in dir(ull.Session) if not name.startswith("_")}
    assert public == {name for name in dir(ull.AsyncSession) if not name.startswith("_")}
