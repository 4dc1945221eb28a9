"""What the daemon does to its process and machine, and how it claims its socket."""

import fcntl
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ull.daemon import host, main, server
from ull.daemon.socket_claim import SocketClaim
from ull.errors import DaemonError
from ull.libzmq import loaded_libzmq


def test_the_loaded_libzmq_is_found() -> None:
    path = loaded_libzmq()
    assert Path(path).is_file()
    assert path in Path("/proc/self/maps").read_text()


def test_auto_threads_leave_a_core_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, wanted in ((1, 1), (2, 1), (4, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=available: set(range(count)))
        assert host.auto_threads() == wanted


def test_too_small_an_address_space_is_said() -> None:
    code = """
import resource
from ull import errors
from ull.daemon import host
host.check_address_space()
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), used + (32 << 20)))
try:
    host.check_address_space()
except errors.DaemonError as error:
    print(error.message)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("no room for 64 MiB of threads' stacks") and "ulimit -v" in said


def test_a_priority_that_is_not_permitted_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, policy: int, parameters: os.sched_param) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
    name = Path("/proc/self/task", str(threading.get_native_id()), "comm").read_text().strip()
    with pytest.raises(DaemonError) as caught:
        host.prioritise({name: 1}, 7, "io.priority")
    assert caught.value.message == (
        "io.priority = 7 is not permitted (rtprio limit 0): raise it with `ulimit -r 7` or systemd/priority.conf, or "
        "set io.priority = 0"
    )
    assert caught.value.field == "io.priority"


def test_a_thread_that_never_begins_gets_no_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_NAMED_S", 0.0)
    with pytest.raises(DaemonError, match="not all of the threads ull-nobody have begun"):
        host.prioritise({"ull-nobody": 1}, 1, "io.priority")


def test_quick_wake_ups_last_as_long_as_they_are_wanted(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    with host.quick_wake_ups(device) as problem:
        assert problem is None
        assert device.read_bytes() == bytes(4)  # 0 microseconds, an int
        held = [Path(link).resolve() for link in Path("/proc/self/fd").iterdir()]
        assert device in held
    assert device not in [Path(link).resolve() for link in Path("/proc/self/fd").iterdir()]
    with host.quick_wake_ups(tmp_path / "none") as problem:
        assert problem == f"{tmp_path / 'none'}: No such file or directory"


def test_required_memory_locking_stops_the_start(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "lock_memory", lambda: "mlockall: not today")
    listen = ["--listen", f"ipc://{tmp_path / 's'}"]
    assert main.run([str(tiny_bundle), *listen, "--set", "lock_memory=require"]) == 1
    assert capfd.readouterr().err == "ulld: lock_memory is required, but mlockall: not today\n"
    assert list(tmp_path.iterdir()) == []  # socket and lock are gone


def test_a_claim_excludes_another_and_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claim = SocketClaim(path, 0o600)
    with pytest.raises(DaemonError, match=f"held by a live daemon \\(process {os.getpid()}\\)"):
        SocketClaim(path, 0o600)
    path.touch()
    claim.release()
    assert list(tmp_path.iterdir()) == []
    SocketClaim(path, 0o600).release()


def test_a_lock_file_that_was_left_behind_is_taken_over(tmp_path: Path) -> None:
    lock = tmp_path / "s.lock"
    lock.write_text("4711\n")
    SocketClaim(tmp_path / "s", 0o600).release()
    assert not lock.exists()
    lock.write_text("")
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DaemonError, match="another process"):
            SocketClaim(tmp_path / "s", 0o600)


def test_standing_back_concerns_one_thread() -> None:
    found: list[int] = []

    def body() -> None:
        host.stand_back()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
