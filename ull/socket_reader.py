"""Sockets as event sources of asyncio, and as sources of whole messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq

Drain = Callable[[], bool]


class Reader(Protocol):
    """What calls back when there is something to read, until it is closed."""

    def again(self) -> None:
        """To be called after each send on the same socket."""

    def close(self) -> None:
        """Stops watching; to be called before the socket is closed."""


class Sender(Protocol):
    """What may have bytes that the kernel has not taken yet."""

    @property
    def unsent(self) -> bool: ...

    def flush(self) -> bool: ...


class DescriptorReader:
    """Calls `drain` whenever there is something to read from `descriptor`, and sends what `sender` could not.

    The descriptor is level triggered: `drain` may leave something for the next time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, drain: Drain, sender: Sender) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._sender = sender
        self._writing = False
        loop.add_reader(descriptor, drain)

    def again(self) -> None:
        """Waits for room if something is unsent."""
        if self._sender.unsent and not self._writing and self._descriptor >= 0:
            self._writing = True
            self._loop.add_writer(self._descriptor, self._write)

    def close(self) -> None:
        """Stops watching; to be called before the descriptor is closed."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._stop_writing()
            self._descriptor = -1

    def _write(self) -> None:
        self._sender.flush()
        if not self._sender.unsent:
            self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)


class SocketReader:
    """Calls `drain` whenever `socket` may have something to read.

    zmq's descriptor is edge triggered: it may stay silent after any send or partial read on the same socket. `drain`
    returns True if it stopped before the socket was empty (it is then called again after other callbacks had their
    turn), and whoever sends on the socket calls `again()`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], drain: Drain) -> None:
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
        if self._descriptor < 0:
            return
        try:
            unfinished = self._drain()
        except BaseException:  # of a signal handler: what is left in the socket would not be announced again
            self.again()
            raise
        if unfinished:
            self.again()


class MessageReceiver:
    """Receives whole messages without copying their frames. An allocation that fails costs none, nor part of one.

    A frame leaves the socket only into an object that exists already, so that after a MemoryError the next `receive`
    goes on where the last one had to stop.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._frames: list[zmq.Frame] = []  # of a message whose rest is still in the socket
        self._frame: zmq.Frame | None = None  # received, and not yet in the list

    def receive(self) -> list[zmq.Frame] | None:
        """The next message's frames, or None if there is none. Raises MemoryError."""
        frames = self._frames
        try:
            while True:
                self._frame = frame = self._frame or self._socket.recv(zmq.NOBLOCK, copy=False)
                frames.append(frame)
                self._frame = None
                if not frame.more:
                    break
        except zmq.Again:
            return None
        self._frames = []
        return frames
