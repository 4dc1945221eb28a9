"""What people do with the Python clients: threads, forks, event loops, odd arguments, wrong endpoints."""

import asyncio
import gc
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import uvloop
import zmq

import ull
import ull.client
from fake_daemon import FakeDaemon, done, token, words
from ull import wire
from ull.client.options import GenerateOptions
from ull.client.unreachable import permission_denied, why_nobody
from ull.endpoints import default_endpoint

TRANSPORTS = pytest.mark.parametrize("transport", ["local", "zeromq"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'ull.sock'}"


@pytest.fixture
def client(url: str) -> Iterator[ull.Client]:
    with FakeDaemon(url, words, local=True), ull.Client(url, connect_timeout=60) as client:
        yield client


def open_stream(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
    """Ends a request of the prompt "open" by a cancel only, after one word."""
    if isinstance(request, wire.Generate) and request.prompt == "open":
        daemon.send(identity, token(request.id, 0, "one"))
    elif isinstance(request, wire.Cancel):
        daemon.send(identity, wire.Ack(id=request.id, known=True), done(request.id, 1, "cancelled"))
    else:
        words(daemon, identity, request)


# ---- threads ------------------------------------------------------------------------------------------------------


def in_thread(body: Callable[[], object]) -> BaseException | None:
    """Runs `body` in a thread of its own; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def test_a_second_thread_is_told(client: ull.Client) -> None:
    stream = client.generate("one two three")
    next(stream)
    for body in [
        lambda: client.generate("x"),
        client.health,
        client.info,
        client.stats,
        client.poll,
        client.close,
        stream.result,
        stream.cancel,
    ]:
        error = in_thread(body)
        assert isinstance(error, ull.UsageError), body
        assert "belongs to the thread 'MainThread', and 'second' uses it; make a Client in each thread" in str(error)
    assert stream.result().text == "one two three "
    assert client.generate("and on").result().text == "and on "


def test_a_client_may_belong_to_any_thread(url: str) -> None:
    def body() -> None:
        with ull.Client(url, connect_timeout=60) as client:
            assert client.generate("one").result().text == "one "

    with FakeDaemon(url, words, local=True):
        assert in_thread(body) is None


# ---- forks --------------------------------------------------------------------------------------------------------


def in_fork(body: Callable[[], object]) -> str:
    """Runs `body` in a fork's child, which then collects its garbage; what it returned or raised, as a text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            text = repr(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        gc.collect()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:  # noqa: PTH123
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@TRANSPORTS
def test_a_fork_s_child_is_told_and_the_parent_goes_on(url: str, transport: Any) -> None:
    with FakeDaemon(url, open_stream, local=True) as daemon, ull.Client(url, transport=transport) as client:
        client._connect_timeout = 60
        streams = [client.generate("open")]
        assert next(streams[0]).text == "one"
        asked = len(daemon.requests)
        for body in (lambda: client.generate("x"), streams[0].result, client.health, client.poll):
            said = in_fork(body)
            assert said.startswith(f"UsageError: this Client belongs to process {os.getpid()}"), said
            assert said.endswith("make a new Client after the fork")

        def leave() -> None:
            with client:
                streams.pop()

        for body in (leave, client.close, streams[0].close, streams.clear):
            assert in_fork(body) == "None"
        assert len(daemon.requests) == asked, daemon.requests[asked:]  # the children have sent nothing
        streams[0].cancel()
        assert streams[0].result().finish_reason == "cancelled"

        def anew() -> str:
            with ull.Client(url, transport=transport, connect_timeout=60) as other:
                return other.generate("from the child").result().text

        assert in_fork(anew) == "'from the child '"
        assert client.generate("and on").result().text == "and on "


@TRANSPORTS
def test_a_fork_under_an_event_loop(url: str, transport: Any) -> None:
    async def main() -> None:
        async with ull.AsyncClient(url, transport=transport, connect_timeout=60) as client:
            stream = client.generate("open")
            assert (await anext(stream)).text == "one"
            asked = len(daemon.requests)
            said = in_fork(lambda: client.generate("x"))
            assert "this AsyncClient belongs to process" in said and "make a new AsyncClient after the fork" in said
            assert in_fork(lambda: drive(client.close())) == "None"
            assert in_fork(stream.close) == "None"
            assert len(daemon.requests) == asked
            stream.cancel()
            assert (await stream.result()).finish_reason == "cancelled"

    with FakeDaemon(url, open_stream, local=True) as daemon:
        asyncio.run(main())


def drive(coroutine: Any) -> None:
    """Runs a coroutine that waits for nothing, without a loop."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


# ---- event loops --------------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_one_async_client_in_one_loop_after_the_other(url: str, transport: Any, new_loop: Any) -> None:
    streams: list[ull.AsyncStream] = []

    async def main() -> None:
        if streams:
            with pytest.raises(ull.ConnectionLost, match="event loop that the request was made in is closed"):
                await streams[-1].result()
        async with asyncio.timeout(60):
            assert (await client.generate("one two").result()).text == "one two "
            assert (await client.health()).status == "ok"
            streams.append(client.generate("open"))
            await anext(streams[-1])

    async def close() -> None:
        await client.close()
        with pytest.raises(ull.ConnectionLost, match="closed"):
            client.generate("x")

    with FakeDaemon(url, open_stream, local=True):
        client = ull.AsyncClient(url, transport=transport, connect_timeout=60)
        for body in (main, main, main, close):
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(body())


def test_a_loop_closed_under_a_waiting_task(url: str) -> None:
    async def wait() -> None:
        await client.generate("open").result()

    async def ask() -> str:
        async with asyncio.timeout(60):
            return (await client.generate("one").result()).text

    with FakeDaemon(url, open_stream, local=True) as daemon:
        client = ull.AsyncClient(url, connect_timeout=60)
        loop = asyncio.new_event_loop()
        task = loop.create_task(wait())
        while not [request for request in daemon.requests if isinstance(request, wire.Generate)]:
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()  # with the task in it
        assert asyncio.run(ask()) == "one "
        assert not task.done()


def test_an_async_client_in_two_loops_at_once(url: str) -> None:
    async def ask() -> str:
        return (await client.generate("one").result()).text

    with FakeDaemon(url, words, local=True):
        client = ull.AsyncClient(url, connect_timeout=60)
        with asyncio.Runner() as first:
            assert first.run(ask()) == "one "
            error = in_thread(lambda: asyncio.run(ask()))
            assert isinstance(error, ull.UsageError)
            assert "belongs to another event loop, which is still open; make one in each loop" in str(error)
            assert first.run(ask()) == "one "
            with pytest.raises(ull.UsageError, match=r"no event loop runs here: .*asyncio.run"):
                client.generate("x")
            first.run(client.close())


def test_an_async_stream_has_what_a_stream_has(url: str) -> None:
    async def main() -> None:
        async with ull.AsyncClient(url, connect_timeout=60) as client:
            stream = client.generate("one two")
            assert stream.ready() is None
            await stream.result()
            item = stream.ready()
            assert item is not None and item.text == "one "
            stream.close()
            assert stream.ready() is None
            running = client.generate("open")
            await anext(running)
            running.close()
            await asyncio.to_thread(daemon.wait_for, wire.Cancel)

    with FakeDaemon(url, open_stream, local=True) as daemon:
        asyncio.run(main())
    public = {name for name in dir(ull.Stream) if not name.startswith("_")}
    assert public == {name for name in dir(ull.AsyncStream) if not name.startswith("_")}


# ---- arguments ----------------------------------------------------------------------------------------------------


def test_none_is_the_default(url: str) -> None:
    nothing = dict.fromkeys(GenerateOptions.__optional_keys__)

    async def main() -> None:
        async with ull.AsyncClient(url, connect_timeout=None, transport=None, silence_timeout=None) as client:
            client._connect_timeout = 60
            await client.generate("x", **nothing).result()

    with FakeDaemon(url, words, local=True) as daemon:
        with ull.Client(url, connect_timeout=None, query_timeout=None, silence_timeout=None, transport=None) as client:
            client._connect_timeout = 60
            client.generate("x", **nothing).result()
            assert ull.Client(None).url == default_endpoint()
        asyncio.run(main())
        assert daemon.wait_for(wire.Generate, 2) == [wire.Generate(id=1, prompt="x")] * 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (b"abc", "prompt is bytes; decode it to a text"),
        (bytearray(b"abc"), "prompt is bytearray; decode"),
        ([1.5, 2.5], r"item 0 is 1\.5, a float"),
        ([True, False], "item 0 is True, a bool"),
        ([1, True], "item 1 is True, a bool"),
        ([1, "a"], "item 1 is 'a', a str"),
        ([1, {"role": "user", "content": "x"}], "item 1 is .*, a dict"),
        ([1, None], "item 1 is None, a NoneType"),
        (np.array([1.0, 2.0]), "item 0 is .*, a float64"),
        (np.array([True]), "item 0 is .*, a bool"),
        ({1, 2}, "prompt must be .*, not set"),
        ({"role": "user", "content": "x"}, "prompt must be .* list of messages .*, not dict"),
        (None, "prompt must be .*, not NoneType"),
        ([{"role": "user", "content": "x"}, 3], "message 1 is none: Expected `object`, got `int`"),
        ([{"role": "user", "content": "x"}, "x"], "message 1 is none"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "colour": 1}], "message 1 .* 'colour'"),
        (
            [{"role": "user", "content": "x", 5: 1}],
            "message 0 of the prompt has the unknown key 5; known: role, content",
        ),
    ],
)
def test_prompts_of_the_wrong_kind(client: ull.Client, prompt: Any, said: str) -> None:
    with pytest.raises(ull.RequestError, match=said) as caught:
        client.generate(prompt)
    assert (caught.value.code, caught.value.field) == ("bad_request", "prompt")


def test_prompts_of_the_right_kind(url: str) -> None:
    with FakeDaemon(url, words, local=True) as daemon, ull.Client(url, connect_timeout=60) as client:
        for prompt in ([1, 2], (1, 2), range(1, 3), np.array([1, 2], np.int32), iter([1, 2])):
            client.generate(prompt).result()  # type: ignore[arg-type]
        messages = [{"role": "user", "content": "x"}]
        for chat in (messages, tuple(messages), [wire.Message(role="user", content="x")]):
            client.generate(chat).result()
        sent = daemon.wait_for(wire.Generate, 8)
        assert [request.token_ids for request in sent[:5]] == [[1, 2]] * 5  # type: ignore[union-attr]
        assert [request.messages for request in sent[5:]] == [[wire.Message(role="user", content="x")]] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**64),
        ("seed", -(2**64)),
        ("max_tokens", 10**30),
        ("max_tokens", object()),
        ("stop_ids", [2**70]),
        ("stop_ids", 5),
        ("stop_ids", b"ab"),
        ("stop", ["a", "\ud800"]),
        ("stop", 5),
        ("stop", b"x"),
        ("logit_bias", {2**64: 1.0}),
        ("logit_bias", [1]),
        ("logit_bias", 7),
        ("speculate", "\udfff"),
        ("timeout", "5"),
        ("timeout", 1e308),
        ("timeout", float("nan")),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(url: str, field: str, value: Any) -> None:
    async def main() -> None:
        async with ull.AsyncClient(url, connect_timeout=60) as other:
            with pytest.raises(ull.RequestError, match=field) as refused:
                other.generate("x", **{field: value})
            assert refused.value.field == field

    with FakeDaemon(url, words, local=True) as daemon, ull.Client(url, connect_timeout=60) as client:
        with pytest.raises(ull.RequestError, match=field) as caught:
            client.generate("x", **{field: value})
        assert caught.value.field == field
        asyncio.run(main())
        assert client.generate("and on").result().text == "and on "
        assert len(daemon.wait_for(wire.Generate)) == 1


def test_texts_that_have_no_utf8_form(client: ull.Client) -> None:
    for prompt, field in [("a\udc00", "prompt"), ([{"role": "user", "content": "b\ud800"}], "messages")]:
        with pytest.raises(ull.RequestError, match=rf"{field} holds '\\ud[c8]00' \(character 1 of a text\)") as caught:
            client.generate(prompt)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(ull.RequestError, match="token_ids holds a number that does not fit 64 bits"):
        client.generate([1, 2**64])


@pytest.mark.parametrize("face", [ull, ull.client], ids=["ull", "ull.client"])
def test_completion_in_a_shell_shows_what_there_is(face: ModuleType) -> None:
    late = ["msgspec", "ull.client.sync", "zmq"]
    program = (
        f"import sys, {face.__name__} as face; print(*dir(face))\n"
        f"assert not [name for name in {late} if name in sys.modules]"
    )
    names = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert set(face.__all__) <= set(names)
    assert not {"TYPE_CHECKING", "annotations", "importlib"} & set(names)
    for name in face.__all__:
        assert getattr(face, name) is not None
    with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'Klient'"):
        _ = face.Klient


def test_the_room_and_the_package_have_the_same_client() -> None:
    for name in ull.client.__all__:
        assert getattr(ull.client, name) is getattr(ull, name)


# ---- endpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost:8000", "'http://localhost:8000' is neither ipc:///path nor tcp://"),
        ("unix:///tmp/x", "is neither ipc:///path nor tcp://"),
        ("/tmp/ull.sock", "is neither ipc:///path nor"),
        ("ipc://", "is neither ipc:///path"),
        ("tcp://localhost", "has no port; write tcp://address:port"),
        ("tcp://:5555", "has no port; write tcp://address:port"),
        ("tcp://localhost:port", "has no port"),
        (Path("/tmp/ull.sock"), "url must be a text, ipc:///path or tcp://address:port, not"),
    ],
)
def test_wrong_urls_are_named(url: Any, said: str) -> None:
    for kind in (ull.Client, ull.AsyncClient):
        with pytest.raises(ull.ConfigError, match=said) as caught:
            kind(url)
        assert caught.value.field == "url"


def refusal(url: str, **options: Any) -> str:
    with ull.Client(url, connect_timeout=0.05, **options) as client, pytest.raises(ull.ConnectionLost) as caught:
        client.generate("x")
    return str(caught.value)


def test_why_nobody_answers_is_said(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert f"there is no file {path}; is ulld running?" in refusal(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert f"nobody listens on {path}; is ulld running?" in refusal(f"ipc://{path}")
    path.unlink()
    path.write_text("mine")
    assert f"{path} is not a socket" in refusal(f"ipc://{path}")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert "something listens there, but it does not answer as ulld does" in refusal(f"ipc://{path}")
    assert "nobody listens on @ull-test-nobody" in refusal("ipc://@ull-test-nobody")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert f"nobody listens on port {port} of 127.0.0.1; is ulld running?" in refusal(f"tcp://127.0.0.1:{port}")
        free.listen()
        assert "something listens there" in refusal(f"tcp://127.0.0.1:{port}")


def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert "the host 'ull.invalid' is not known (Name or service not known)" in refusal("tcp://ull.invalid:5555")

    async def main() -> None:
        async with ull.AsyncClient("tcp://ull.invalid:5555", connect_timeout=0.05) as client:
            with pytest.raises(ull.ConnectionLost, match=r"the host 'ull.invalid' is not known"):
                await client.generate("x").result()

    asyncio.run(main())


def test_a_name_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def wait(*_: object, **__: object) -> socket.socket:
        answer.wait(60)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", wait)
    monkeypatch.setattr("ull.client.unreachable._LOOK_S", 0.05)
    assert why_nobody("tcp://slow.invalid:1") == "neither the name service nor slow.invalid:1 has answered"
    answer.set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody whom a file refuses")
@TRANSPORTS
def test_a_socket_that_refuses_the_user(transport: Any) -> None:
    """Over both transports the file, the group and the remedy are named."""

    def ask() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        with ull.Client(url, connect_timeout=0.1, transport=transport) as client:
            client.generate("x")

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "ull.sock"
        url = f"ipc://{path}"
        with FakeDaemon(url, words, local=True):
            for each in (path, path.with_name("ull.sock.local")):
                each.chmod(0o660)
                os.chown(each, 0, 1)  # group daemon
            said = in_fork(ask)
            assert said.startswith(f"ConnectionLost: no daemon answers at {url}"), said
            assert f"permission to connect to {path}" in said
            assert "only its group daemon may; `sudo usermod -aG daemon nobody`, then log in again" in said
            for each in (path, path.with_name("ull.sock.local")):
                each.chmod(0o600)
            assert "it is root's, mode 0600; ulld's user and `ipc_mode` decide" in in_fork(ask)
            Path(folder).chmod(0o700)
            assert "nobody may not enter its directory" in in_fork(ask)


def test_a_member_of_the_group_since_this_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ull.sock"
    path.touch()
    path.chmod(0o660)
    monkeypatch.setattr("ull.client.unreachable._group", lambda number: ("ull", ["me"]))
    monkeypatch.setattr("ull.client.unreachable.user_name", lambda number: "me")
    status = os.stat_result((0o140660, 0, 0, 1, 0, 77, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self, **_: status)
    assert permission_denied(path).endswith("me is in its group ull since after this login; log in again")


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.IPV6, 1)
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://[::1]")
        with ull.Client(f"tcp://[::1]:{port}", connect_timeout=60) as client:
            stream = client.generate("x")
            assert router.poll(60_000)
            identity, version, payload = router.recv_multipart()
            assert version == wire.VERSION
            assert isinstance(wire.decode_request(payload), wire.Generate)
            router.send_multipart([identity, *wire.encode_frames(done(stream.id, 0))])
            assert stream.result().finish_reason == "length"


def test_a_context_that_ends_under_a_client(url: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with FakeDaemon(url, words), ull.Client(url, transport="zeromq", context=context, connect_timeout=60) as client:
        assert client.generate("one").result().text == "one "
        stream = client.generate("")
        context.destroy(0)
        for body in (stream.result, client.health):
            with pytest.raises(ull.ConnectionLost):
                body()
