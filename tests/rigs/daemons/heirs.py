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
_NONE = "there is no successor; this daemon goes on"


@contextmanager
def heirs(daemon: Daemon) -> Iterator[None]:
    """Whatever has become of `daemon` at the end is stopped, and must end well."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans come to us
    try:
        yield
    finally:
        successors = _successors(daemon)
        if successors:
            assert daemon.process.wait(LIMIT_S) == 0
            for pid in successors[:-1]:
                assert wait(pid) == 0
            os.kill(successors[-1], signal.SIGTERM)
            assert wait(successors[-1]) == 0
            assert sorted(path.name for path in daemon.log_path.parent.glob("*.sock*")) == []


def _successors(daemon: Daemon) -> list[int]:
    """The processes that went on, once the log tells how the last upgrade ended and that its successor is ready."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        events = daemon.events("upgrade")
        found = [event["successor"] for event in events if event["message"] == _DONE]
        ended = not events or events[-1]["message"] in (_DONE, _NONE)
        if (ended and len(daemon.events("ready")) > len(found)) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


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
