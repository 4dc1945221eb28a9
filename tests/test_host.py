"""What the daemon does to its process and machine, and how it claims its socket."""

import fcntl
import os
from pathlib import Path

import pytest

from ull import daemon, host
from ull.errors import DaemonError
from ull.sockets import SocketClaim


def test_the_loaded_libzmq_is_found() -> None:
    path = host.loaded_libzmq()
    assert Path(path).is_file()
    assert path in Path("/proc/self/maps").read_text()


def test_core_lists_read_like_the_kernel_s() -> None:
    assert host._ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


def test_auto_threads_leave_a_core_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, wanted in ((1, 1), (2, 1), (4, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=available: set(range(count)))
        assert host.auto_threads() == wanted


def test_keeping_off_hot_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(set(cores)))
    host.keep_off([1])
    host.keep_off([0, 1, 2])  # nothing is left: stay
    assert chosen == [{0, 2}]
    with pytest.raises(DaemonError, match="core 7 is not available here; available: 0-2"):
        host.keep_off([1, 7])


def test_required_memory_locking_stops_the_start(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "lock_memory", lambda: "mlockall: not today")
    listen = ["--listen", f"ipc://{tmp_path / 's'}"]
    assert daemon.main([str(tiny_bundle), *listen, "--set", "lock_memory=require"]) == 1
    assert capsys.readouterr().err == "ulld: lock_memory is required, but mlockall: not today\n"
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
