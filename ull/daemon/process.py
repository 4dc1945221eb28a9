"""What a daemon's process owes whoever started it: signals, standard streams, descriptors. Used before all else."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Callable

from ull import _native
from ull.errors import DaemonError

_LONGEST_LINE = 4096  # PIPE_BUF: a pipe that poll() calls writable takes so much at once
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """The process was asked to stop before it was ready; the message says by which signal."""


class Signals:
    """SIGTERM, SIGINT and SIGHUP, taken over for as long as the process lives. One object per process.

    They are heard natively, so that none of them interrupts Python, a second one harms nothing, and the process ends
    when its time is up, whatever Python does.
    """

    def __init__(self) -> None:
        # Python is told that they are ignored: else it, or asyncio, would put handlers of its own in place of ours.
        self._previous = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
        self._native = _native.Termination()
        self._hangups = 0  # of which `hear` has told

    @property
    def asked(self) -> int:
        """How often SIGTERM or SIGINT has come."""
        return self._native.asked

    @property
    def descriptor(self) -> int:
        """Readable after a signal, until `hear`."""
        return self._native.fd

    def hear(self, hangup: Callable[[], None]) -> None:
        """To be called when `descriptor` is readable; calls `hangup` if a SIGHUP has come."""
        self._native.clear()
        if self._native.hangups != self._hangups:
            self._hangups = self._native.hangups
            hangup()

    def heed(self) -> None:
        """Raises Stopped if SIGTERM or SIGINT has come."""
        if self.asked:
            name = signal.Signals(self._native.last_signal).name
            raise Stopped(f"stopped by {name} before it was ready")

    def be_patient(self, first_s: float, second_s: float, status: int) -> None:
        """The process ends with `status` so long after the first SIGTERM or SIGINT, and so long after the second."""
        self._native.set_patience(int(first_s * 1000), int(second_s * 1000), status)

    def end_within(self, time_s: float, status: int) -> None:
        """The process ends with `status` in this time at the latest."""
        self._native.end_within(int(time_s * 1000), status)

    def give_back(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def open_standard_streams() -> None:
    """Opens /dev/null in the place of standard streams that are closed, so that no other file gets their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)


def log_descriptor() -> int:
    """Standard error; /dev/null where the process was started without one, even if another file has its number now."""
    return 2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def say(message: str) -> None:
    """Writes one line to standard error, if there is one that takes it at once."""
    if sys.stderr is not None:
        _write(2, f"ulld: {message}\n")


def announce(line: str) -> str | None:
    """Writes one line to standard output. Returns why that was not possible, or None."""
    if sys.stdout is None:
        return "standard output is closed"
    return _write(1, f"{line}\n")


def raise_descriptor_limit(needed: int) -> None:
    """Allows this process as many descriptors as it may have. Raises DaemonError if these are fewer than `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise DaemonError(
            f"{needed} file descriptors are needed, and one more per client, but the limit is {hard}; raise it with "
            f"`ulimit -n` or LimitNOFILE="
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _write(descriptor: int, text: str) -> str | None:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    if not any(event & select.POLLOUT for _, event in poller.poll(0)):
        return "nobody reads it"
    try:
        os.write(descriptor, text.encode("utf-8", "backslashreplace")[:_LONGEST_LINE])
    except OSError as error:
        return error.strerror
    return None
