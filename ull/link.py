"""A client's socket and the monitor that says whether a daemon is at the other end. Nothing here waits."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import zmq

from ull.errors import ConfigError
from ull.streams import Protocol

_EVENT = struct.Struct("=HI")  # zmq_socket_monitor: event number, value
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 3000  # a daemon whose machine vanished is noticed after this long
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
LINGER_MS = 200  # at the client's end: long enough for a last cancel to leave


class Link:
    """One DEALER at a time, connected to `url`. libzmq retries until a daemon is there.

    When a connection ends, its socket is given up and a new one opened: each connection is a new client to the
    daemon anyway, and what libzmq would carry over to the next connection is a request that has been reported lost.
    (Its own remedy, ZMQ_IMMEDIATE, also drops what the daemon had sent and nobody has read yet.) `generation` counts
    the sockets.
    """

    def __init__(self, url: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.url = url
        self.connected = False
        self.generation = 0
        self.before_close: Callable[[], None] | None = None  # told while the sockets' descriptors are still valid
        self._context = context or zmq.Context.instance()
        self._open()

    def _open(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # requests are few; the daemon's queue is the limit
        socket.setsockopt(zmq.RCVHWM, 0)  # a client that has stopped reading is the daemon's to judge
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self.socket = socket
        self._receive_timeout_ms = -1  # RCVTIMEO of the socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.connected = False
        self.generation += 1
        try:
            socket.connect(self.url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{self.url!r} is not an endpoint to connect to: {error}", "url") from error

    def send(self, frames: list[bytes]) -> bool:
        """Hands a message to the connection; False where there is none."""
        if not self.connected:
            return False
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, protocol: Protocol, wait_ms: int = 0) -> bool:
        """Passes every message that has arrived to `protocol`, waiting at most `wait_ms` for the first.

        Returns whether there was one. The wait is a blocking receive, which wakes up sooner than a poll does.
        """
        received = False
        if wait_ms and wait_ms != self._receive_timeout_ms:
            self.socket.setsockopt(zmq.RCVTIMEO, wait_ms)
            self._receive_timeout_ms = wait_ms
        while True:
            try:
                frames = [self.socket.recv(0 if wait_ms and not received else zmq.NOBLOCK)]
            except zmq.Again:
                return received
            received_ns = time.monotonic_ns()
            while self.socket.getsockopt(zmq.RCVMORE):
                frames.append(self.socket.recv(zmq.NOBLOCK))
            protocol.receive(frames, received_ns)
            received = True

    def watch(self, protocol: Protocol) -> bool:
        """Follows the connection's ups and downs; returns whether there were any.

        What a daemon sent before it went away is received first, so that only what is truly unfinished is lost.
        """
        changed = False
        while True:
            try:
                event = self.monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return changed
            while self.monitor.getsockopt(zmq.RCVMORE):
                self.monitor.recv(zmq.NOBLOCK)
            if _EVENT.unpack(event)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = changed = True
                continue
            self.receive(protocol)
            protocol.lost(self.url)
            self.close()
            self._open()
            return True

    def close(self, linger_ms: int = 0) -> None:
        """Closes both sockets; a second call does nothing. `linger_ms`: how long unsent messages may take to leave."""
        self.connected = False
        if not self.socket.closed:
            if self.before_close is not None:
                self.before_close()
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.socket.close(linger_ms)
