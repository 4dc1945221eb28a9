"""A client interrupted by a signal handler that raises (Ctrl-C, an alarm): at random moments, and at every place.

Whatever was interrupted, the next request gives the right answer, and nothing is left running at the daemon.
"""

import ctypes
import dis
import errno
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import zmq

import ull
from alarms import ringing
from conftest import Daemon, Spawn
from fake_daemon import FakeDaemon, done, token, words
from fake_sessions import FakeSessions
from ull import _native, wire
from ull.client.protocol import StreamState
from ull.libzmq import loaded_libzmq

PROMPT = "import os\n"
INTERRUPTS = 250


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves a `__del__` is dropped; pytest would keep it, and with its traceback the stream."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


class Interrupt(BaseException):
    """As KeyboardInterrupt: nothing that catches errors catches it."""


@contextmanager
def armed(after_s: float, every_s: float = 0.0) -> Iterator[None]:
    """Raises Interrupt in this thread after `after_s`, and then every `every_s` (0: once)."""

    def ring(*_: object) -> None:
        raise Interrupt

    with ringing(ring, after_s, every_s):
        yield


def wait_idle(client: ull.Client) -> None:
    """Until no request of anybody is left at the daemon."""
    deadline = time.monotonic() + 60
    while (used := client.stats().engine["slots_used"]) != 0:
        assert time.monotonic() < deadline, f"{used} requests are left at the daemon"
        time.sleep(0.01)


def complete(client: ull.Client, tokens: int) -> list[int]:
    return client.generate(PROMPT, max_tokens=tokens, ignore_eos=True, seed=1, temperature=0.7).result().token_ids


def use(client: ull.Client, kind: int, partial: list[ull.Stream]) -> None:
    """One of the things that can be done with a client; each may be interrupted."""
    if kind == 0:
        complete(client, 12)
    elif kind == 1:
        partial.append(client.generate(PROMPT, max_tokens=900, ignore_eos=True))
        for _ in partial[0]:
            pass
    elif kind == 2:
        with client.generate(PROMPT, max_tokens=900, ignore_eos=True) as stream:
            next(stream)
    elif kind == 3:
        next(client.generate(PROMPT, max_tokens=900, ignore_eos=True))  # and dropped
        client.health()
    elif kind == 4:
        with client.open_session() as session:
            session.append(PROMPT)
            session.generate(max_tokens=9, ignore_eos=True, hold=True).commit()
            with session.fork() as other:
                other.rollback(1)
                other.generate(PROMPT, max_tokens=9, ignore_eos=True).result()
    else:
        streams = [client.generate(PROMPT, max_tokens=9, ignore_eos=True) for _ in range(3)]
        streams[1].cancel()
        [stream.result() for stream in streams]


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_an_interrupt_at_any_point_leaves_a_client_that_works(shared_daemon: Daemon, transport: Any) -> None:
    chance = random.Random(5)
    with ull.Client(shared_daemon.url, transport=transport, connect_timeout=60) as client:
        expected = complete(client, 12)
        interrupts = turns = 0
        while interrupts < INTERRUPTS:
            turns += 1
            assert turns < 100 * INTERRUPTS
            partial: list[ull.Stream] = []
            try:
                with armed(chance.uniform(0.0001, 0.008)):
                    use(client, chance.randrange(6), partial)
            except Interrupt:
                interrupts += 1
            for stream in partial:
                result = stream.result()  # what had arrived is kept, and the request is over
                assert result.finish_reason in ("cancelled", "length")
                assert len(result.token_ids) == result.usage.completion_tokens
            if turns % 5 == 0:
                assert complete(client, 12) == expected
        partial.clear()
        assert complete(client, 12) == expected
        wait_idle(client)
        deadline = time.monotonic() + 20
        while client._protocol.live_streams() and time.monotonic() < deadline:
            client.poll(0.01)
        assert not client._protocol.live_streams() and not client._protocol._sessions
        assert not client._orphans and not client._dropped
        sessions = [client.open_session() for _ in range(16)]  # as many as there may be: none is left of those before
        for session in sessions:
            session.close()


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_a_storm_of_interrupts_costs_no_token(shared_daemon: Daemon, transport: Any) -> None:
    with ull.Client(shared_daemon.url, transport=transport, connect_timeout=60) as client:
        expected = complete(client, 100)
        interrupts, streams = 0, 0
        while streams < 3 or (interrupts < 10 and streams < 100):
            delay = 0.0008 / 2 ** (streams % 4)  # one of them ends waits, however fast the machine is
            stream = client.generate(PROMPT, max_tokens=100, ignore_eos=True, seed=1, temperature=0.7)
            while not stream.finished:
                try:
                    with armed(delay, delay):
                        client.poll(20)
                except Interrupt:
                    interrupts += 1
            assert stream.result().token_ids == expected
            streams += 1
        assert interrupts > 0


def test_an_interrupted_stream_is_cancelled_although_its_traceback_is_kept(spawn: Spawn) -> None:
    """As by a notebook's stop button: the traceback, and with it the stream, lives on in sys.last_value."""
    daemon = spawn(script={"tokens": [65], "round_ns": 1_000_000, "context": 100_000, "pages": 2000})
    for transport in ("local", "zeromq"):
        with ull.Client(daemon.url, transport=transport, connect_timeout=60) as client:  # type: ignore[arg-type]
            client.health()
            with pytest.raises(Interrupt) as kept, armed(0.3):
                client.generate([1, 2], max_tokens=90_000).result()
            wait_idle(client)
            assert kept.value.__traceback__ is not None


# ---- at every place -----------------------------------------------------------------------------------------------


class Tripwire:
    """Raises Interrupt at the `place`th place in ull's code where the interpreter lets signal handlers run.

    Those are the beginnings of functions, the ends of calls and the ends of loops' rounds.
    """

    def __init__(self, place: int) -> None:
        self._left = place
        self._last: dict[int, str] = {}  # by frame (not kept alive): its last operation
        self._operations: dict[CodeType, dict[int, str]] = {}

    @property
    def tripped(self) -> bool:
        return self._left < 0

    def __enter__(self) -> "Tripwire":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not str(frame.f_globals.get("__name__")).startswith("ull."):
            return None
        frame.f_trace_opcodes = True
        self._last[id(frame)] = ""
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            code = frame.f_code
            if code not in self._operations:
                self._operations[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
            last = self._last[id(frame)]
            self._last[id(frame)] = self._operations[code].get(frame.f_lasti, "")
            if last.startswith(("RESUME", "CALL", "JUMP_BACKWARD")):
                self._left -= 1
                if self._left == -1:
                    raise Interrupt
        return self._step


class Requests:
    """A fake daemon's handler: a request of the prompt "open" ends by a cancel only, after one word."""

    def __init__(self) -> None:
        self.live: set[tuple[bytes, int]] = set()

    def __call__(self, daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate) and request.prompt == "open":
            self.live.add((identity, request.id))
            daemon.send(identity, token(request.id, 0, "one "))
        elif isinstance(request, wire.Cancel):
            known = (identity, request.id) in self.live
            self.live.discard((identity, request.id))
            daemon.send(identity, wire.Ack(id=request.id, known=known))
            if known:
                daemon.send(identity, done(request.id, 1, "cancelled"))
        else:
            words(daemon, identity, request)


def read_to_the_end(client: ull.Client) -> None:
    assert client.generate("a b c").result().text == "a b c "


def leave_with(client: ull.Client) -> None:
    with client.generate("open") as stream:
        next(stream)
    client.health()


def drop(client: ull.Client) -> None:
    next(client.generate("open"))
    client.health()


@pytest.mark.parametrize("transport", ["local", "zeromq"])
@pytest.mark.parametrize("body", [read_to_the_end, leave_with, drop])
def test_every_place_may_be_interrupted(tmp_path: Path, transport: Any, body: Any) -> None:
    requests = Requests()
    url = f"ipc://{tmp_path / 'ull.sock'}"
    with FakeDaemon(url, requests, local=True), ull.Client(url, transport=transport, connect_timeout=60) as client:
        client.health()
        place, tripped = 0, True
        while tripped:
            with suppress(Interrupt), Tripwire(place) as tripwire:
                body(client)
            tripped = tripwire.tripped
            assert client.generate("x y").result().text == "x y ", place
            deadline = time.monotonic() + 60
            while (requests.live or client._protocol.live_streams()) and time.monotonic() < deadline:
                client.poll(0.01)
            assert not requests.live and not client._protocol.live_streams(), place
            place += 1
        assert place > 50


def append_and_ask(client: ull.Client) -> None:
    with client.open_session() as session:
        session.append("a")
        assert session.generate("b").result().text == "b "
        session.rollback(1)


def hold(client: ull.Client) -> None:
    with client.open_session() as session:
        held = session.generate("b", hold=True)
        held.commit()
        assert held.result().text == "b "
        session.generate("never said", hold=True)


def fork_and_drop(client: ull.Client) -> None:
    with client.open_session() as session, session.fork() as other:
        next(other.generate("open"))
    client.open_session()
    client.health()


@pytest.mark.parametrize("transport", ["local", "zeromq"])
@pytest.mark.parametrize("body", [append_and_ask, hold, fork_and_drop])
def test_every_place_of_a_conversation_may_be_interrupted(tmp_path: Path, transport: Any, body: Any) -> None:
    """No session and no held answer is left at the daemon, and the client goes on."""
    sessions = FakeSessions()
    url = f"ipc://{tmp_path / 'ull.sock'}"
    with FakeDaemon(url, sessions, local=True), ull.Client(url, transport=transport, connect_timeout=60) as client:
        client.health()
        place, tripped = 0, True
        while tripped:
            with suppress(Interrupt), Tripwire(place) as tripwire:
                body(client)
            tripped = tripwire.tripped
            with client.open_session() as session:
                assert session.generate("x y").result().text == "x y ", place
            deadline = time.monotonic() + 60
            while (sessions.busy or client._protocol.live_streams()) and time.monotonic() < deadline:
                client.poll(0.01)
            assert not sessions.busy and not client._protocol.live_streams(), place
            assert not client._protocol._sessions and not client._dropped and not client._orphans, place
            place += 1
        assert place > 100


@pytest.mark.parametrize("wait", [next, ull.Stream.result])
def test_an_interrupt_between_two_waits_cancels_what_is_still_referred_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[ull.Stream], object]
) -> None:
    """As a notebook keeps the stream, with the last traceback."""
    requests, looks = Requests(), []

    def look(state: StreamState) -> None:
        looks.append(state)
        if len(looks) == 2:  # behind the first wait, which has brought a token
            monkeypatch.undo()
            raise Interrupt

    url = f"ipc://{tmp_path / 'ull.sock'}"
    with FakeDaemon(url, requests, local=True), ull.Client(url, connect_timeout=60) as client:
        stream = client.generate("open")
        if wait is next:
            monkeypatch.setattr(StreamState, "next_token", look)
        else:
            monkeypatch.setattr(StreamState, "finished", property(look))
        with pytest.raises(Interrupt):
            wait(stream)
        assert stream.result().finish_reason == "cancelled"
        assert len(looks) == 2 and not requests.live


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_connecting_and_closing_may_be_interrupted_everywhere(tmp_path: Path, transport: Any) -> None:
    url = f"ipc://{tmp_path / 'ull.sock'}"
    with FakeDaemon(url, words, local=True):
        place, tripped = 0, True
        while tripped:
            client = None
            with suppress(Interrupt), Tripwire(place) as tripwire:
                client = ull.Client(url, transport=transport, connect_timeout=60)
                assert client.generate("a b").result().text == "a b "
            tripped = tripwire.tripped
            if client is not None:
                assert client.generate("x y").result().text == "x y ", place
                with suppress(Interrupt), Tripwire(place):
                    client.close()
                client.close()
                with pytest.raises(ull.ConnectionLost, match="closed"):
                    client.generate("z")
            place += 1
        assert place > 50


# libzmq's functions, of which those that do not wait end with EINTR every other time, as while a signal is pending.
CUT_SHORT = """
#include <cerrno>
#include <cstddef>
#include <dlfcn.h>

namespace {
template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen(LIBZMQ, RTLD_NOLOAD | RTLD_NOW), name));
}
bool cut_short(int flags) {
  static unsigned calls = 0;
  if ((flags & 1) == 0 || ++calls % 2 == 0) return false;  // ZMQ_DONTWAIT
  errno = EINTR;
  return true;
}
}  // namespace

extern "C" int zmq_send(void* socket, const void* data, size_t size, int flags) {
  return cut_short(flags) ? -1 : real<int (*)(void*, const void*, size_t, int)>("zmq_send")(socket, data, size, flags);
}
extern "C" int zmq_msg_recv(void* message, void* socket, int flags) {
  return cut_short(flags) ? -1 : real<int (*)(void*, void*, int)>("zmq_msg_recv")(message, socket, flags);
}
"""


def test_calls_that_a_signal_cuts_short_leave_messages_whole(tmp_path: Path) -> None:
    source, library = tmp_path / "cut_short.cpp", tmp_path / "cut_short.so"
    source.write_text(CUT_SHORT)
    libzmq = loaded_libzmq()
    # What it lacks is found in libzmq itself.
    flags = ["-shared", "-fPIC", f'-DLIBZMQ="{libzmq}"', "-Wl,--no-as-needed"]
    subprocess.run(["g++", *flags, source, libzmq, "-o", library, "-ldl"], check=True)
    ctypes.CDLL(str(library))
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind(f"inproc://{tmp_path}")
        other.connect(f"inproc://{tmp_path}")
        ours = _native.MessageSocket(one.underlying, libzmq=str(library))
        assert ours.send([b"version", b"payload"]) == 0
        assert other.recv_multipart(zmq.NOBLOCK) == [b"version", b"payload"]
        other.send_multipart([b"version", b"answer", b"more"])
        messages: list[list[bytes]] = []
        assert ours.receive(messages, False) == 0
        assert messages == [[b"version", b"answer", b"more"]]
        assert ours.receive(messages, False) == errno.EAGAIN
