"""Both clients against a scripted daemon: streams, cancellation, refusals, loss and return of the daemon."""

import asyncio
import gc
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import uvloop

import ull
from fake_daemon import FakeDaemon, await_loss, done, token, words
from ull import wire

Serve = Callable[..., FakeDaemon]


@pytest.fixture(params=["zeromq", "local"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which transport the fake daemons offer their clients: each test runs over both."""
    return str(request.param)


@pytest.fixture
def serve(tmp_path: Path, transport: str) -> Iterator[Serve]:
    """Starts fake daemons that end with the test."""
    daemons: list[FakeDaemon] = []

    def start(handler: Any = words, name: str = "ull.sock") -> FakeDaemon:
        daemons.append(FakeDaemon(f"ipc://{tmp_path / name}", handler, local=transport == "local"))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


def silent(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
    """Answers cancels with a cancelled end, and nothing else at all."""
    if isinstance(request, wire.Cancel):
        daemon.send(identity, wire.Ack(id=request.id, known=True), done(request.id, 1, "cancelled"))


def first_word_then_silence(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
    if isinstance(request, wire.Generate):
        daemon.send(identity, token(request.id, 0, "one"))
    else:
        silent(daemon, identity, request)


# ---- the synchronous client ---------------------------------------------------------------------------------------


def test_iteration_then_result(serve: Serve, transport: str) -> None:
    with ull.Client(serve().url) as client:
        stream = client.generate("one two three", max_tokens=3)
        tokens = list(stream)
        assert [item.text for item in tokens] == ["one ", "two ", "three "]
        assert [item.ids for item in tokens] == [[100], [101], [102]]
        assert [item.index for item in tokens] == [0, 1, 2]
        assert client.transport == transport
        assert tokens[0].time_ns == 1000
        assert 0 < tokens[0].received_ns <= tokens[2].received_ns <= time.monotonic_ns()
        result = stream.result()
        assert result.text == "one two three "
        assert result.token_ids == [100, 101, 102]
        assert (result.finish_reason, result.seed, result.usage.completion_tokens) == ("length", 7, 3)
        assert (result.timeline.received_ns, result.timeline.started_ns, result.logprobs) == (1, 0, None)


def test_result_without_iteration(serve: Serve) -> None:
    with ull.Client(serve().url) as client:
        assert client.generate("one two").result().text == "one two "


def test_what_is_said_of_a_prompt_comes_in_parts(serve: Serve) -> None:
    def answer(*indices: int) -> Callable[[FakeDaemon, bytes, wire.Request], None]:
        def handle(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
            if isinstance(request, wire.Generate):
                parts = [
                    wire.PromptLogprobs(
                        id=request.id,
                        index=index,
                        logprobs=[-1.0, -2.0],
                        top=[[(index, -0.5)], [(index + 1, -0.25)]] if request.prompt_top_logprobs else msgspec.UNSET,
                    )
                    for index in indices
                ]
                daemon.send(identity, *parts, token(request.id, 0, "one"), done(request.id, 1))

        return handle

    with ull.Client(serve(answer(1, 1)).url) as client:  # the second is the first once more
        stream = client.generate("text", prompt_logprobs=True)
        assert [item.text for item in stream] == ["one"]
        found = stream.result().prompt_logprobs
        assert found == [None, -1.0, -2.0] and len(found) == stream.result().usage.prompt_tokens
        assert stream.result().prompt_top_logprobs is None
        assert client.generate("text").result().prompt_logprobs is None
        likeliest = client.generate("text", prompt_logprobs=True, prompt_top_logprobs=1).result()
        assert likeliest.prompt_logprobs == found
        assert likeliest.prompt_top_logprobs == [None, [(1, -0.5)], [(2, -0.25)]]
    with (
        ull.Client(serve(answer(1, 4), name="gap.sock").url) as client,
        pytest.raises(ull.ConnectionLost, match="3 to 3 of the prompt were lost on the way"),
    ):
        client.generate("text", prompt_logprobs=True).result()


def test_what_is_sent(serve: Serve) -> None:
    daemon = serve()
    with ull.Client(daemon.url) as client:
        client.generate(
            [{"role": "user", "content": "x"}],
            max_tokens=9,
            temperature=0.5,
            top_k=4,
            top_p=0.9,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            seed=3,
            stop="END",
            stop_ids=[5],
            logit_bias={1: -1.0},
            logprobs=2,
            ignore_eos=True,
            timeout=1.5,
        ).result()
        client.generate([1, 2]).result()
        client.generate("text").result()
    first, second, third = daemon.wait_for(wire.Generate, 3)
    assert msgspec.structs.replace(first, id=0) == wire.Generate(
        id=0,
        messages=[wire.Message(role="user", content="x")],
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        seed=3,
        stop=["END"],
        stop_ids=[5],
        logit_bias={1: -1.0},
        logprobs=2,
        ignore_eos=True,
        timeout_ms=1500,
    )
    assert (second.token_ids, second.prompt, third.prompt, third.token_ids) == ([1, 2], None, "text", None)
    assert len({first.id, second.id, third.id}) == 3


def test_several_streams_over_one_client(serve: Serve) -> None:
    with ull.Client(serve().url) as client:
        first, second, third = client.generate("a b"), client.generate("c d e"), client.generate("f")
        assert third.result().text == "f "
        assert [item.text for item in second] == ["c ", "d ", "e "]
        assert first.finished
        item = first.ready()
        assert item is not None and item.text == "a "
        assert first.result().text == "a b "


def test_refusals_are_typed(serve: Serve) -> None:
    def refuse(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        assert isinstance(request, wire.Generate)
        daemon.send(identity, wire.Error(id=request.id, code=request.prompt or "", message="no", field="prompt"))

    with ull.Client(serve(refuse).url) as client:
        with pytest.raises(ull.Busy, match="no"):
            client.generate("busy").result()
        with pytest.raises(ull.Draining):
            list(client.generate("draining"))
        stream = client.generate("too_long")
        for _ in range(2):  # asked twice, answered twice
            with pytest.raises(ull.RequestError) as caught:
                stream.result()
            assert (caught.value.code, caught.value.field) == ("too_long", "prompt")


def test_an_engine_s_failure_keeps_what_was_there(serve: Serve) -> None:
    def fail(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        failure = wire.Failure(code="executor", message="the executor failed")
        daemon.send(identity, token(request.id, 0, "part"), done(request.id, 1, "error", failure))

    with ull.Client(serve(fail).url) as client:
        stream = client.generate("x")
        assert next(stream).text == "part"
        with pytest.raises(ull.RequestFailed, match="the executor failed") as caught:
            next(stream)
        assert isinstance(caught.value.partial, ull.Result)
        assert caught.value.partial.text == "part"


def test_logprobs_are_collected(serve: Serve) -> None:
    def answer(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        frame = token(request.id, 0, "x")
        frame.logprobs = [wire.TokenLogprob(token=100, logprob=-0.25, top=[(100, -0.25), (7, -2.0)])]
        daemon.send(identity, frame, done(request.id, 1))

    with ull.Client(serve(answer).url) as client:
        stream = client.generate("x", logprobs=2)
        expected = [wire.TokenLogprob(token=100, logprob=-0.25, top=[(100, -0.25), (7, -2.0)])]
        assert next(stream).logprobs == expected
        assert stream.result().logprobs == expected


def test_cancel_ends_the_stream(serve: Serve) -> None:
    daemon = serve(first_word_then_silence)
    with ull.Client(daemon.url) as client:
        stream = client.generate("x")
        assert next(stream).text == "one"
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        stream.cancel()  # after the end: nothing to do
        assert [request.id for request in daemon.wait_for(wire.Cancel)] == [stream.id]


def test_leaving_with_cancels(serve: Serve) -> None:
    daemon = serve(first_word_then_silence)
    with ull.Client(daemon.url) as client:
        with client.generate("x") as stream:
            next(stream)
        assert daemon.wait_for(wire.Cancel)[0].id == stream.id


def test_a_dropped_stream_is_cancelled(serve: Serve) -> None:
    daemon = serve(first_word_then_silence)
    with ull.Client(daemon.url) as client:
        stream = client.generate("x")
        request_id = stream.id
        del stream
        gc.collect()
        assert daemon.wait_for(wire.Cancel)[0].id == request_id


def test_a_stream_dropped_in_another_thread_is_cancelled_later(serve: Serve) -> None:
    daemon = serve(first_word_then_silence)
    with ull.Client(daemon.url) as client:
        holder = [client.generate("x")]
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
        assert not [request for request in daemon.requests if isinstance(request, wire.Cancel)]
        client.poll()
        daemon.wait_for(wire.Cancel)


def test_closing_the_client_cancels_and_fails_what_runs(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ull.client.sync.LINGER_MS", 10_000)
    daemon = serve(first_word_then_silence)
    client = ull.Client(daemon.url)
    stream = client.generate("x")
    client.close()
    client.close()
    daemon.wait_for(wire.Cancel)
    with pytest.raises(ull.ConnectionLost, match="closed"):
        stream.result()
    with pytest.raises(ull.ConnectionLost, match="closed"):
        client.generate("y")


def test_nobody_there(tmp_path: Path) -> None:
    with ull.Client(f"ipc://{tmp_path / 'nobody'}", connect_timeout=0.1) as client:
        with pytest.raises(ull.ConnectionLost, match=r"no daemon answers at ipc://.*is ulld running"):
            client.generate("x")
        with pytest.raises(ull.ConnectionLost):
            client.health()


def test_a_bad_url() -> None:
    with pytest.raises(ull.UllError, match="neither ipc:///path nor tcp://"):
        ull.Client("nonsense")


def test_loss_and_return_of_the_daemon(serve: Serve) -> None:
    first = serve(first_word_then_silence)
    with ull.Client(first.url, connect_timeout=10) as client:
        stream = client.generate("x")
        assert next(stream).text == "one"
        first.close()
        with pytest.raises(ull.ConnectionLost, match="was lost while the request was in flight"):
            next(stream)
        second = serve(words)
        assert client.generate("back again").result().text == "back again "
        assert second.wait_for(wire.Generate)


def test_what_is_asked_once_the_daemon_has_gone_is_asked_of_the_next_one(serve: Serve) -> None:
    first = serve()
    with ull.Client(first.url, connect_timeout=60) as client:
        assert client.generate("a").result().text == "a "
        first.close()
        await_loss(client)
        second = serve()
        assert client.generate("b").result().text == "b "
        assert len(second.wait_for(wire.Generate)) == 1


def test_so_does_a_client_of_asyncio(serve: Serve) -> None:
    async def body() -> None:
        first = serve()
        async with ull.AsyncClient(first.url, connect_timeout=60) as client:
            assert (await client.generate("a").result()).text == "a "
            first.close()  # nothing else happens in the event loop
            await_loss(client)
            second = serve()
            assert (await client.generate("b").result()).text == "b "
            assert len(second.wait_for(wire.Generate)) == 1

    asyncio.run(body())


def replaced_at_next_send(
    client: ull.Client | ull.AsyncClient, first: FakeDaemon, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> list[FakeDaemon]:
    """The daemon goes as the next message is handed over, and leaves another in its place, which the list then has."""
    send, later = client._link.send, list[FakeDaemon]()

    def send_too_late(payload: bytes) -> bool:
        if not later:
            first.close()
            later.append(serve())
        return send(payload)

    monkeypatch.setattr(client._link, "send", send_too_late)
    return later


@pytest.mark.parametrize("transport", ["local"], indirect=True)
@pytest.mark.parametrize("asks", [False, True])
def test_a_request_that_ended_with_its_connection_is_not_sent_over_the_next_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    first = serve()
    with ull.Client(first.url, connect_timeout=60) as client:
        assert client.generate("a").result().text == "a "
        later = replaced_at_next_send(client, first, serve, monkeypatch)
        with pytest.raises(ull.ConnectionLost, match="was lost while the request was in flight"):
            _ = client.health() if asks else client.generate("b").result()
        assert client.generate("c").result().text == "c "
        assert len(later[0].requests) == 1


@pytest.mark.parametrize("transport", ["local"], indirect=True)
def test_nor_does_a_client_of_asyncio_send_it_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        first = serve()
        async with ull.AsyncClient(first.url, connect_timeout=60) as client:
            assert (await client.generate("a").result()).text == "a "
            later = replaced_at_next_send(client, first, serve, monkeypatch)
            with pytest.raises(ull.ConnectionLost, match="was lost while the request was in flight"):
                await client.generate("b").result()
            assert (await client.generate("c").result()).text == "c "
            await asyncio.sleep(0.1)  # what waits for a connection looks every 10 ms
            assert len(later[0].requests) == 1

    asyncio.run(body())


def test_what_was_sent_before_the_daemon_left_is_not_lost(serve: Serve) -> None:
    daemon = serve()
    with ull.Client(daemon.url) as client:
        stream = client.generate("one two")
        daemon.wait_for(wire.Generate)
        daemon.close(linger_ms=10_000)
        assert stream.result().text == "one two "


def test_the_daemon_may_start_after_the_client(serve: Serve, tmp_path: Path) -> None:
    with ull.Client(f"ipc://{tmp_path / 'ull.sock'}", connect_timeout=10) as client:
        timer = threading.Timer(0.2, serve)
        timer.start()
        assert client.generate("late").result().text == "late "
        timer.join()


def test_a_daemon_that_never_ends_a_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ull.client.sync.GRACE_S", 0.05)
    daemon = serve(lambda daemon, identity, request: None)
    with ull.Client(daemon.url, query_timeout=0.05) as client:
        with pytest.raises(ull.RequestTimeout):
            client.generate("x", timeout=0.05).result()
        daemon.wait_for(wire.Cancel)
        with pytest.raises(ull.RequestTimeout):
            client.health()


def test_timeouts_are_checked(serve: Serve) -> None:
    with ull.Client(serve().url) as client:
        for timeout in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ull.RequestError, match="timeout must be"):
                client.generate("x", timeout=timeout)


@pytest.mark.parametrize("prompt", [3, [object()], [{"content": "x"}], [{"role": 1, "content": "x"}], ["text"]])
def test_odd_prompts(serve: Serve, prompt: Any) -> None:
    with ull.Client(serve().url) as client, pytest.raises(ull.RequestError, match="prompt must be") as caught:
        client.generate(prompt)
    assert caught.value.field == "prompt"


def test_queries(serve: Serve) -> None:
    with ull.Client(serve().url) as client:
        assert (client.health().status, client.health().uptime_ns) == ("ok", 5)
        assert client.info().engine["name"] == "fake"
        assert client.stats().requests == {}


def asked_about(live: bool | None) -> Any:
    """A daemon that has lost what it was asked to generate; asked, it says so, denies it, or (None) nothing."""

    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Health) and live is not None:
            assert request.request == 1
            daemon.send(identity, wire.HealthReply(id=request.id, status="ok", uptime_ns=5, queue_length=0, live=live))

    return handler


def test_a_stream_that_the_daemon_has_lost_is_not_waited_for(serve: Serve) -> None:
    daemon = serve(asked_about(live=False))
    client = ull.Client(daemon.url, silence_timeout=0.05)
    with client, pytest.raises(ull.ConnectionLost, match="no longer knows the request"):
        client.generate("x").result()


def test_a_daemon_that_does_not_answer_is_not_waited_for(serve: Serve) -> None:
    daemon = serve(asked_about(live=None))
    with ull.Client(daemon.url, silence_timeout=0.05, query_timeout=0.05) as client:
        with pytest.raises(ull.ConnectionLost, match=r"nothing was heard of the request, and the daemon at .* did not"):
            client.generate("x").result()
        daemon.wait_for(wire.Cancel)


def test_a_slow_stream_is_asked_about_and_goes_on(serve: Serve) -> None:
    questions = []

    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Health):
            questions.append(request.request)
            asked_about(live=True)(daemon, identity, request)
            if len(questions) == 3:
                daemon.send(identity, token(1, 0, "late"), done(1, 1))

    with ull.Client(serve(handler).url, silence_timeout=0.05) as client:
        assert client.generate("x").result().text == "late"
    assert len(questions) >= 3 and set(questions) == {1}  # a busy machine may leave time for another


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_no_wait_is_without_a_limit(tmp_path: Path, seconds: float) -> None:
    for kind in (ull.Client, ull.AsyncClient):
        with pytest.raises(ull.UllError, match="silence_timeout must be a positive"):
            kind(f"ipc://{tmp_path / 's'}", silence_timeout=seconds)


@pytest.mark.parametrize(
    ("frames", "code"),
    [([b"ull9", b"\x80"], "bad_version"), ([b"ull1"], "bad_version"), ([b"ull1", b"\xc1"], "bad_message")],
)
def test_a_daemon_that_speaks_otherwise(serve: Serve, transport: str, frames: list[bytes], code: str) -> None:
    if transport == "local":  # where the version is part of the hello
        frames, code = [b"\1\0\0\0\xc1"], "bad_message"
    daemon = serve(lambda daemon, identity, request: daemon.send_raw(identity, *frames))
    with ull.Client(daemon.url) as client, pytest.raises(ull.RequestError) as caught:
        client.generate("x").result()
    assert caught.value.code == code


def test_frames_of_unknown_requests_are_ignored(serve: Serve) -> None:
    def chatter(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        daemon.send(identity, token(999, 0, "stray"), done(999, 1), wire.Ack(id=998, known=True))
        words(daemon, identity, request)

    with ull.Client(serve(chatter).url) as client:
        assert client.generate("one").result().text == "one "


# ---- the asynchronous client --------------------------------------------------------------------------------------


def run(
    url: str,
    body: Callable[[ull.AsyncClient], Coroutine[Any, Any, None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    **options: Any,
) -> None:
    """Runs `body` with a client in a fresh event loop; a test that hangs fails after 30 seconds."""

    async def main() -> None:
        async with asyncio.timeout(30), ull.AsyncClient(url, **options) as client:
            await body(client)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_async_iteration_and_result(serve: Serve, transport: str) -> None:
    async def body(client: ull.AsyncClient) -> None:
        stream = client.generate("one two")
        assert [item.text async for item in stream] == ["one ", "two "]
        assert client.transport == transport
        assert (await stream.result()).text == "one two "

    run(serve().url, body)


def test_async_streams_side_by_side(serve: Serve) -> None:
    async def body(client: ull.AsyncClient) -> None:
        streams = [client.generate(f"w{index} " * index) for index in range(1, 40)]
        results = await asyncio.gather(*(stream.result() for stream in streams))
        assert [result.text for result in results] == [f"w{index} " * index for index in range(1, 40)]

    run(serve().url, body)


def test_async_cancel_and_leaving_with(serve: Serve) -> None:
    daemon = serve(first_word_then_silence)

    async def body(client: ull.AsyncClient) -> None:
        stream = client.generate("x")
        assert (await anext(stream)).text == "one"
        stream.cancel()
        assert (await stream.result()).finish_reason == "cancelled"
        async with client.generate("y") as second:
            await anext(second)
        await asyncio.to_thread(daemon.wait_for, wire.Cancel, 2)
        third = client.generate("z")
        await anext(third)
        del third
        gc.collect()
        await asyncio.to_thread(daemon.wait_for, wire.Cancel, 3)

    run(daemon.url, body)


def test_async_refusal_and_queries(serve: Serve) -> None:
    def handler(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate):
            daemon.send(identity, wire.Error(id=request.id, code="busy", message="full"))
        else:
            words(daemon, identity, request)

    async def body(client: ull.AsyncClient) -> None:
        with pytest.raises(ull.Busy):
            await client.generate("x").result()
        assert (await client.health()).status == "ok"
        assert (await client.info()).engine["name"] == "fake"
        assert (await client.stats()).requests == {}

    run(serve(handler).url, body)


def test_async_nobody_there(tmp_path: Path) -> None:
    async def body(client: ull.AsyncClient) -> None:
        with pytest.raises(ull.ConnectionLost, match="no daemon answers"):
            await client.generate("x").result()
        with pytest.raises(ull.ConnectionLost, match="no daemon answers"):
            await client.health()

    run(f"ipc://{tmp_path / 'nobody'}", body, connect_timeout=0.1)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_async_loss_and_return(serve: Serve, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body(client: ull.AsyncClient) -> None:
        stream = client.generate("x")
        assert (await anext(stream)).text == "one"
        first.close()
        with pytest.raises(ull.ConnectionLost):
            await anext(stream)
        await asyncio.to_thread(serve, words)
        for _ in range(3):
            assert (await client.generate("back again").result()).text == "back again "

    first = serve(first_word_then_silence)
    run(first.url, body, new_loop, connect_timeout=10)


def test_async_timeout(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ull.client.aio.GRACE_S", 0.05)

    async def body(client: ull.AsyncClient) -> None:
        with pytest.raises(ull.RequestTimeout):
            await client.generate("x", timeout=0.05).result()
        with pytest.raises(ull.RequestTimeout):
            await client.health()

    run(serve(lambda daemon, identity, request: None).url, body, query_timeout=0.05, connect_timeout=2)


@pytest.mark.parametrize("live", [False, None])
def test_async_streams_are_asked_about_after_a_silence(serve: Serve, live: bool | None) -> None:
    async def body(client: ull.AsyncClient) -> None:
        with pytest.raises(ull.ConnectionLost, match=r"no longer knows|nothing was heard of the request"):
            await client.generate("x").result()

    run(serve(asked_about(live)).url, body, silence_timeout=0.05, query_timeout=0.05, connect_timeout=2)


def test_async_close_fails_what_runs(serve: Serve) -> None:
    async def main() -> None:
        client = ull.AsyncClient(serve(silent).url)
        stream = client.generate("x")
        await client.close()
        await client.close()
        with pytest.raises(ull.ConnectionLost, match="closed"):
            await stream.result()
        with pytest.raises(ull.ConnectionLost, match="closed"):
            client.generate("y")

    asyncio.run(main())


# ---- choices and grammars -----------------------------------------------------------------------------------------


class Point(msgspec.Struct):
    x: int


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"type": "object"}, {"type": "object"}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (True, True),
        (False, False),
        (' {"a": 1} ', {"a": 1}),
        ("false", False),
        (Point, msgspec.json.schema(Point)),
    ],
)
def test_what_may_stand_for_a_schema(serve: Serve, given: Any, sent: object) -> None:
    daemon = serve()
    with ull.Client(daemon.url) as client:
        client.generate("x", json_schema=given).result()
    (request,) = daemon.wait_for(wire.Generate)
    assert isinstance(request, wire.Generate) and request.json_schema == sent


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"json_schema": "{"}, "invalid_grammar", "json_schema is a text, but no JSON"),
        ({"json_schema": "NaN"}, "invalid_grammar", "no JSON"),
        ({"json_schema": "[" * 100_000}, "invalid_grammar", "no JSON"),
        ({"json_schema": "[1]"}, "bad_request", "json_schema must be a mapping, true, false"),
        ({"json_schema": int}, "bad_request", "json_schema must be a mapping"),
        ({"json_schema": {"a": object()}}, "bad_request", "json_schema holds what cannot be sent"),
        ({"choices": "yes"}, "bad_request", "choices must be a list of texts"),
        ({"choices": ["\ud800"]}, "bad_request", "choices holds"),
        ({"regex": "\ud800"}, "bad_request", "regex holds"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(tmp_path: Path, options: dict[str, Any], code: str, said: str) -> None:
    with ull.Client(f"ipc://{tmp_path / 'nobody.sock'}") as client, pytest.raises(ull.RequestError) as caught:
        client.generate("x", **options)
    assert (caught.value.code, caught.value.field) == (code, next(iter(options)))
    assert said in caught.value.message
    assert isinstance(caught.value, ull.InvalidGrammar) == (code == "invalid_grammar")


def test_a_result_has_its_choice(serve: Serve) -> None:
    figures: Any = {"logprobs": [-2.0, -0.5], "probabilities": [0.2, 0.8], "margin": 0.6}

    def answer(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        assert isinstance(request, wire.Generate) and request.choices
        end = done(request.id, 1, "stop")
        end.choice = wire.Choice(index=1, **figures) if request.choices == ["no", "yes"] else None
        daemon.send(identity, token(request.id, 0, "yes"), end)

    with ull.Client(serve(answer).url) as client:
        result = client.generate("x", choices=("no", "yes")).result()
        assert result.choice == ull.Choice(label="yes", index=1, **figures)
        assert (result.grammar, result.usage.scored_tokens, result.usage.choice_tokens) == (None, 0, [])
        assert client.generate("x", choices=["other"]).result().choice is None


def test_a_result_reads_its_json_and_tells_of_its_grammar(serve: Serve) -> None:
    def answer(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        assert isinstance(request, wire.Generate) and request.prompt
        end = done(request.id, 1, "stop")
        end.grammar = wire.GrammarUse(masks=2, forced_tokens=7)
        daemon.send(identity, token(request.id, 0, request.prompt), end)

    with ull.Client(serve(answer).url) as client:
        result = client.generate('{"a": [1]}', json_object=True).result()
        assert (result.json(), result.grammar) == ({"a": [1]}, wire.GrammarUse(masks=2, forced_tokens=7))
        with pytest.raises(ValueError, match="truncated"):
            client.generate('{"a": [1', json_object=True).result().json()


def test_an_invalid_grammar_is_typed(serve: Serve) -> None:
    def refuse(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        assert request.id is not None
        daemon.send(identity, wire.Error(id=request.id, code="invalid_grammar", message="at 1(8)", field="lark"))

    with ull.Client(serve(refuse).url) as client:
        stream = client.generate("x", lark="start: foo")
        for _ in range(2):
            with pytest.raises(ull.InvalidGrammar, match=r"at 1\(8\)") as caught:
                stream.result()
            assert caught.value.field == "lark"
        assert pickle.loads(pickle.dumps(caught.value)).code == "invalid_grammar"
