"""A client of a real daemon, interrupted at random points by a signal handler that raises (Ctrl-C, an alarm).

Whatever was interrupted, the next request gives the right answer, and nothing is left running at the daemon.
"""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn

PROMPT = "import os\n"
INTERRUPTS = 250
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what leaves a __del__


class Interrupt(BaseException):
    """As KeyboardInterrupt: nothing that catches errors catches it."""


@contextmanager
def armed(after_s: float, every_s: float = 0.0) -> Iterator[None]:
    """Raises Interrupt in this thread after `after_s`, and then every `every_s` (0: once)."""

    def ring(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, every_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
                    use(client, chance.randrange(5), partial)
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
        assert not client._protocol.live_streams()
        assert not client._orphans and not client._dropped


@pytest.mark.parametrize("transport", ["local", "zeromq"])
def test_a_storm_of_interrupts_costs_no_token(shared_daemon: Daemon, transport: Any) -> None:
    with ull.Client(shared_daemon.url, transport=transport, connect_timeout=60) as client:
        expected = complete(client, 100)
        interrupts = 0
        for _ in range(3):
            stream = client.generate(PROMPT, max_tokens=100, ignore_eos=True, seed=1, temperature=0.7)
            while not stream.finished:
                try:
                    with armed(0.0008, 0.0008):
                        client.poll(20)
                except Interrupt:
                    interrupts += 1
            assert stream.result().token_ids == expected
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
