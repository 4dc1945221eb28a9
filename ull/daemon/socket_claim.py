"""Who owns an ipc socket: one live daemon per path, and a dead one's path is free."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Self

from ull.access import denial
from ull.endpoints import local_path
from ull.errors import DaemonError

_PROBE_S = 0.5


class SocketClaim:
    """Holds the right to bind the ipc socket `path`, by a lock on `path`.lock that dies with the process.

    The right covers the local transport's socket beside it, `local` (None where its name is too long for one).
    Raises DaemonError if another daemon holds it, something else listens there, or a path is no socket.
    Socket files that a dead daemon has left are removed.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._name(path)
        self._descriptor = self._lock(mode)
        self._sign()
        try:
            for each in self.paths:
                self._clear_way(each)
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def inherited(cls, path: Path, descriptor: int) -> Self:
        """The claim that a predecessor had: `descriptor` is of its lock."""
        claim = cls.__new__(cls)
        claim._name(path)
        claim._descriptor = descriptor
        claim._sign()
        return claim

    @property
    def descriptor(self) -> int:
        """Of the lock, for a successor."""
        return self._descriptor

    def abandon(self) -> None:
        """A successor has the claim."""
        self._close()

    def release(self) -> None:
        """Removes the socket files and gives up the claim, unless that was done or a successor has it."""
        if self._descriptor < 0:
            return
        for path in self.paths:
            path.unlink(missing_ok=True)
        self._unlock()

    def _name(self, path: Path) -> None:
        self.path = path
        self.local = local_path(path)
        self.paths = [path] if self.local is None else [path, self.local]  # of sockets
        self._lock_path = path.with_name(path.name + ".lock")

    def _lock(self, mode: int) -> int:
        while True:
            try:
                descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            except PermissionError as error:
                place = self._lock_path if os.path.lexists(self._lock_path) else self._lock_path.parent
                raise DaemonError(
                    f"cannot listen on {self.path}: {denial(place.absolute(), 'write')}", "listen"
                ) from error
            except OSError as error:
                raise DaemonError(f"cannot create {self._lock_path}: {error.strerror}", "listen") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                os.close(descriptor)
                who = f"process {holder}" if holder else "another process"
                raise DaemonError(f"{self.path} is held by a live daemon ({who})", "listen") from None
            # The previous holder may have unlinked the file between our open and our lock.
            try:
                current = self._lock_path.stat()
            except FileNotFoundError:
                current = None
            if current is not None and current.st_ino == os.fstat(descriptor).st_ino:
                return descriptor
            os.close(descriptor)

    def _sign(self) -> None:
        """Writes into the lock's file who has it."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _clear_way(self, path: Path) -> None:
        """Removes a dead daemon's socket. The lock says that no ull daemon lives; another program might."""
        try:
            kind = path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise DaemonError(f"cannot look at {path}: {error.strerror}", "listen") from error
        if not stat.S_ISSOCK(kind):
            raise DaemonError(f"{path} exists and is not a socket; it is not ours to remove", "listen")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(path))
            except OSError as error:
                if error.errno != errno.ECONNREFUSED:
                    raise DaemonError(f"cannot probe {path}: {error}", "listen") from error
            else:
                raise DaemonError(f"{path} is in use: something listens on it", "listen")
        path.unlink(missing_ok=True)
