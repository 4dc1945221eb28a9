"""The daemon as a process: signals at any time, standard streams that are closed or full, descriptors that run out."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ROOT, Spawn
from raw_client import RawClient
from ull import wire
from ull.client.sync import Client
from ull.daemon.main import DESCRIPTORS
from ull.daemon.process import raise_descriptor_limit
from ull.errors import DaemonError
from ull.spawn import python_command, python_environment

SLOW = {"round_ns": 5_000_000}


class ServiceManager:
    """$NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def hear(self, seconds: float = 60) -> str | None:
        """The next message; None if none comes."""
        self._socket.settimeout(seconds)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return None

    def hear_until(self, beginning: str) -> None:
        """Waits for a message that begins so."""
        while (said := self.hear()) is not None and not said.startswith(beginning):
            pass
        assert said is not None, f"never heard {beginning}"

    def hear_end_of_life(self, thread: str) -> None:
        """Waits until `thread` is said to be late and WATCHDOG=1, due twice a second, comes no more.

        A busy machine may have made any thread late for a while before.
        """
        late = False
        for _ in range(100):
            said = self.hear(1.5 if late else 60)
            if said is None:
                break
            late = said.startswith(f"STATUS=the {thread} has given no sign of life") or (late and said != "WATCHDOG=1")
        assert late and said is None, f"the {thread} was not said to be late, or life was heard of again"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceManager]:
    path = tmp_path / "notify.sock"
    manager = ServiceManager(path)
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    yield manager
    manager.close()


@pytest.fixture
def start(tiny_bundle: Path, tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """start(*arguments, **Popen's options): ulld on the tiny bundle, not waited for, killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **options: object) -> "subprocess.Popen[str]":
        home = tmp_path / f"process{len(started)}"
        home.mkdir()
        command = [*python_command("ull.daemon"), str(tiny_bundle), "--listen", f"ipc://{home}/s", *arguments]
        streams: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=python_environment(), text=True, **{**streams, **options}))  # type: ignore[call-overload]
        started[-1].url = f"ipc://{home}/s"  # type: ignore[attr-defined]
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def serves(url: str) -> bool:
    """Whether a completion comes."""
    with Client(url, connect_timeout=60) as client:
        return client.generate("x", max_tokens=2, ignore_eos=True).result().usage.completion_tokens == 2


# ---- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_before_ready_ends_it_with_one_line(
    start: Callable[..., "subprocess.Popen[str]"], number: signal.Signals
) -> None:
    process = start()
    lock = Path(process.url.removeprefix("ipc://") + ".lock")  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while not lock.exists():  # it hears signals from before this on, and loads the engine after it
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if "READY" not in out:  # the signal came in time
        said = [line for line in err.splitlines() if " warning " not in line]  # of memory, where it is not locked
        assert said == [f"ulld: stopped by {number.name} before it was ready"]
    assert process.returncode == 0
    assert list(lock.parent.iterdir()) == []


def test_little_is_imported_before_signals_are_heard() -> None:
    """What an interrupt of an import would show as a traceback."""
    late = ["asyncio", "numpy", "tokenizers", "ull.daemon.server", "uvloop", "zmq"]
    program = (
        f"import ull.daemon.__main__, ull.daemon.main, sys; print([name for name in {late} if name in sys.modules])"
    )
    outcome = subprocess.run(
        [sys.executable, "-P", "-c", program], env=python_environment(), capture_output=True, text=True, check=True
    )
    assert outcome.stdout == "[]\n"


def test_ten_signals_harm_nothing(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    with Client(daemon.url) as client:
        running = client.generate([5], max_tokens=1000)
        next(running)
        for number in range(10):
            daemon.process.send_signal(signal.SIGTERM if number % 2 else signal.SIGINT)
            time.sleep(0.02)
        assert running.result().finish_reason == "cancelled"
    while daemon.process.poll() is None:  # until the very end
        daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait() == 0
    daemon.check_log()


def test_a_control_plane_that_hangs_is_noticed_and_ends_all_the_same(
    manager: ServiceManager, monkeypatch: pytest.MonkeyPatch, spawn: Spawn
) -> None:
    command = [sys.executable, str(ROOT / "tests/rigs/daemons/stuck_daemon.py")]
    monkeypatch.setenv("ULL_TEST_SCRIPT", json.dumps(SLOW))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    daemon = spawn("--set", "drain_timeout_s=1", command=command)
    manager.hear_until("READY=1")
    manager.hear_until("WATCHDOG=1")
    raw = RawClient(daemon.url)
    raw.send_map(type="generate", id=1, token_ids=[5], max_tokens=20)
    assert isinstance(raw.receive(), wire.Token)
    raw.send_map(type="cancel", id=99)
    assert isinstance(raw.collect(1)[-1], wire.Done)  # tokens need no control plane
    manager.hear_end_of_life("control plane")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 4
    assert any("ulld: the control plane has given no sign of life" in line for line in daemon.log_lines())
    assert "ulld: not stopped after" in daemon.log_lines()[-1]
    raw.close()


# ---- standard streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redirection", ["2>&-", ">&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"])
def test_streams_that_are_closed_or_full_stop_nothing(
    tiny_bundle: Path, tmp_path: Path, manager: ServiceManager, redirection: str
) -> None:
    url = f"ipc://{tmp_path}/s"
    command = " ".join([*python_command("ull.daemon"), str(tiny_bundle), "--listen", url, redirection])
    process = subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        env=python_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        manager.hear_until("READY=1")  # it serves before; only now it has tried to print READY
        assert serves(url)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in err and "Exception" not in err
        assert ("READY could not be printed" in err) == (redirection in (">&-", ">/dev/full"))
    finally:
        process.kill()
        process.communicate()


def test_ready_does_not_wait_for_a_reader(
    start: Callable[..., "subprocess.Popen[str]"], manager: ServiceManager
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    process = start(stdout=writer)
    manager.hear_until("READY=1")
    assert serves(process.url)  # type: ignore[attr-defined]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "nobody reads it" in err
    os.close(reader)
    os.close(writer)


# ---- descriptors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [16, 24, DESCRIPTORS - 1])
def test_too_few_descriptors_are_said_in_one_line(start: Callable[..., "subprocess.Popen[str]"], limit: int) -> None:
    process = start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (1, "", 1)
    assert f"{DESCRIPTORS} file descriptors are needed" in err and f"the limit is {limit}" in err


def test_as_many_descriptors_as_are_needed_are_enough(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    limits = (DESCRIPTORS, DESCRIPTORS)
    process = start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    clients = [Client(process.url, connect_timeout=60) for _ in range(4)]  # type: ignore[attr-defined]
    assert all(client.health().status == "ok" for client in clients)
    for client in clients:
        client.close()


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    raise_descriptor_limit(64)
    assert limits == [(4096, 4096)]
    with pytest.raises(DaemonError, match="5000 file descriptors are needed"):
        raise_descriptor_limit(5000)
