"""Daemons that hand over to successors, which are nobody's children once their predecessor has ended."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ull
from conftest import Daemon

_PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 60.0
_DONE = "the successor goes on"


@contextmanager
def heirs(daemon: Daemon) -> Iterator[None]:
    """Whatever has become of `daemon` at the end is stopped, and must end well."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans come to us
    try:
        yield
    finally:
        successors = [event["successor"] for event in daemon.events("upgrade") if event["message"] == _DONE]
        if successors:
            assert daemon.process.wait(LIMIT_S) == 0
            for pid in successors[:-1]:
                assert wait(pid) == 0
            os.kill(successors[-1], signal.SIGTERM)
            assert wait(successors[-1]) == 0
            assert sorted(path.name for path in daemon.log_path.parent.glob("*.sock*")) == []


def wait(pid: int) -> int:
    """The exit status of an orphan, once it has ended."""
    deadline = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def pid_of(client: ull.Client) -> int:
    """Which process answers."""
    pid: int = client.info().executor["pid"]
    return pid
