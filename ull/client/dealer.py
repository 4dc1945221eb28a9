"""A client's end of the ZeroMQ transport: a DEALER and the monitor that says whether a daemon is at the other end.

A signal handler may raise wherever Python calls something. What is received is therefore put into a list by one native
call, and taken out only once it has been delivered.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import struct
import time

import zmq

from ull import wire
from ull._native import MessageSocket, MonitoredSocket
from ull.client.protocol import Protocol
from ull.curve import CurveKeys
from ull.errors import ConfigError, ConnectionLost
from ull.libzmq import loaded_libzmq
from ull.socket_reader import Drain, Reader, SocketReader

_MECHANISM_MISMATCH = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_EVENT = struct.Struct("=HI")  # zmq_socket_monitor: event number, value
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_HANDSHAKE_MS = 1000
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
# A daemon whose machine has vanished is noticed within five seconds, by the kernel: ZeroMQ's own heartbeat would end a
# connection whose PONG waits behind the requests that a busy daemon has not read yet.
_TCP_OPTIONS = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,  # seconds
    zmq.TCP_KEEPALIVE_INTVL: 1,  # seconds
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 5000,  # milliseconds
}


class DealerConnection:
    """One DEALER, connected to `url`; libzmq retries until a daemon is there. Raises ConfigError for a wrong `url`.

    When a connection ends it is given up as a whole: each is a new client to the daemon anyway, and what libzmq would
    carry over to the next one is a request that has been reported lost. (Its own remedy, ZMQ_IMMEDIATE, also drops what
    the daemon had sent and nobody has read yet.)
    """

    name = "zeromq"
    unsent = False  # libzmq keeps what the kernel does not take

    def __init__(self, url: str, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None = None) -> None:
        self.connected = False
        self.over: str | None = None
        self.refused = False  # by the daemon, which may have a reason that stays
        if context.closed:
            raise ConnectionLost("the client's zmq context has ended; make a new client")
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # requests are few; the daemon's queue is the limit
        socket.setsockopt(zmq.RCVHWM, 0)  # a client that has stopped reading is the daemon's to judge
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        for option, value in _TCP_OPTIONS.items():
            socket.setsockopt(option, value)
        if keys is not None:
            socket.curve_serverkey = keys.server.encode()
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
        self._has_keys = keys is not None
        if "[" in url:  # an IPv6 literal; libzmq resolves names to IPv4 only, unless it is told otherwise
            socket.setsockopt(zmq.IPV6, 1)
        self._monitored = MonitoredSocket(socket, libzmq=_libzmq())  # goes first where nobody calls close()
        self._socket = socket
        self._wait_ms = -1  # RCVTIMEO of the socket
        self._monitor = socket.get_monitor_socket(_EVENTS)
        # pyzmq itself drops the frame that it has just received where a signal handler raises (pyzmq #2044).
        self._messages = MessageSocket(socket.underlying, libzmq=_libzmq())
        self._changes = MessageSocket(self._monitor.underlying, libzmq=_libzmq())
        self._received: list[list[bytes]] = []  # messages, and ...
        self._noticed: list[list[bytes]] = []  # ... the monitor's events, that have not been dealt with yet
        try:
            socket.connect(url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{url!r} is not an endpoint to connect to: {error}", "url") from error

    def send(self, payload: bytes) -> bool:
        """Hands a message to libzmq; False where there is no connection."""
        return self.connected and self._usable() and _happened(self._messages.send((wire.VERSION, payload)))

    def flush(self) -> bool:
        """Nothing to do: libzmq's own thread sends."""
        return True

    def receive(self, protocol: Protocol, wait_ms: int = 0) -> bool:
        """Passes one message to `protocol`, waiting at most `wait_ms` for it; whether there was one.

        The wait is a blocking receive, which wakes up sooner than a poll does. Before there is a connection the wait is
        one for its changes.
        """
        if not self._received:
            if not self._usable():
                return False
            if wait_ms and not self.connected:
                self._monitor.poll(wait_ms)
                wait_ms = 0
            if wait_ms and wait_ms != self._wait_ms:
                self._socket.setsockopt(zmq.RCVTIMEO, wait_ms)
                self._wait_ms = wait_ms
            _happened(self._messages.receive(self._received, wait_ms > 0))
            if not self._received:
                return False
        frames = self._received[0]
        if len(frames) == 2 and frames[0] == wire.VERSION:
            protocol.receive(frames[1], time.monotonic_ns())
        else:
            protocol.misunderstood()
        self._received.clear()
        return True

    def receive_all(self, protocol: Protocol) -> None:
        """Passes every message that has arrived to `protocol`."""
        while self.receive(protocol):
            pass

    def look(self, protocol: Protocol) -> None:
        """Follows the connection's ups and downs.

        What a daemon sent before it went away is received first, so that only what is truly unfinished is lost.
        """
        while self.over is None:
            if not self._noticed and self._usable():
                _happened(self._changes.receive(self._noticed, False))
            if not self._noticed:
                return
            event, value = _EVENT.unpack(self._noticed[0][0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                self.receive_all(protocol)
                self.over = "the connection was closed"
            else:
                self.over, self.refused = self._refusal(event, value), True
            self._noticed.clear()

    def _refusal(self, event: int, value: int) -> str:
        """What a handshake that has failed says."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the daemon does not know this key: have it put into the file access.clients"
        if not self._has_keys:
            return "the daemon asks for a key there: give one (`--key FILE`, Client(keys=...))"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            return "the daemon asks for no key there, and one was given"
        return "the daemon is another one than the key file names, or does not know this key"

    def readers(self, loop: asyncio.AbstractEventLoop, on_input: Drain, on_change: Drain) -> list[Reader]:
        """Event sources: messages call `on_input`, the connection's ups and downs `on_change`."""
        return [SocketReader(loop, self._socket, on_input), SocketReader(loop, self._monitor, on_change)]

    def close(self, linger_ms: int = 0) -> None:
        """Closes both sockets; a second call does nothing. `linger_ms`: how long unsent messages may take to leave."""
        self.connected = False
        if not self._socket.closed:
            self._monitored.end()
            self._monitor.close(0)
            self._socket.close(linger_ms)

    def leave(self) -> None:
        """In a fork's child: nothing. The descriptors are libzmq's, and pyzmq closes nothing that is the parent's."""
        self.connected = False

    def _usable(self) -> bool:
        """Whether the sockets are open: the native calls do not look, and a context closes its sockets when it ends."""
        if self._socket.closed or self._monitor.closed:
            self.over = "its zmq context has ended"
            return False
        return True


@functools.cache
def _libzmq() -> str:
    return loaded_libzmq()


def _happened(error: int) -> bool:
    """Whether a call of a MessageSocket did what it was asked to; False where it would have had to wait."""
    if error in (0, errno.EAGAIN, errno.EINTR):
        return error == 0
    raise zmq.ZMQError(error)
