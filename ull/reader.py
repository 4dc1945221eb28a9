"""A zmq socket as an event source of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq


class SocketReader:
    """Calls `drain` whenever `socket` may have something to read.

    zmq's descriptor is edge triggered: it may stay silent after any send or partial read on the same socket. `drain`
    returns True if it stopped before the socket was empty (it is then called again after other callbacks had their
    turn), and whoever sends on the socket calls `again()`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], drain: Callable[[], bool]) -> None:
        self._loop = loop
        self._drain = drain
        self._scheduled = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._run)
        self.again()

    def again(self) -> None:
        """Has `drain` called once more, soon."""
        if not self._scheduled and self._descriptor >= 0:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def close(self) -> None:
        """Stops watching; to be called before the socket is closed."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = -1

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self._run()

    def _run(self) -> None:
        if self._descriptor >= 0 and self._drain():
            self.again()
