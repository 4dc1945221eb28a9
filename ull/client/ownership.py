"""To which thread and which process a client belongs."""

from __future__ import annotations

import os
import threading

from ull.errors import UsageError

_process = [object()]  # another one in each fork's child


def _forked() -> None:
    _process[0] = object()


os.register_at_fork(after_in_child=_forked)


class OwnerProcess:
    """The process that creates it, told from its forks."""

    def __init__(self) -> None:
        self._process = _process[0]
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return self._process is _process[0]

    def check(self, kind: str) -> None:
        """Raises UsageError in a fork's child. `kind` is the client's class."""
        if not self.here:
            raise UsageError(
                f"this {kind} belongs to process {self._pid}, and this is its fork {os.getpid()}; "
                f"make a new {kind} after the fork"
            )


class OwnerThread:
    """The thread that creates it, and its process."""

    def __init__(self) -> None:
        self.process = OwnerProcess()
        self._ident = threading.get_ident()
        self._name = threading.current_thread().name

    @property
    def here(self) -> bool:
        """Whether this is that thread of that process."""
        return threading.get_ident() == self._ident and self.process.here

    def check(self, kind: str) -> None:
        """Raises UsageError in another thread, and in a fork's child. `kind` is the client's class."""
        if not self.here:
            self.process.check(kind)
            raise UsageError(
                f"this {kind} belongs to the thread {self._name!r}, and {threading.current_thread().name!r} uses it; "
                f"make a {kind} in each thread, or share an AsyncClient in one event loop"
            )
