"""A client's end of the local transport: a unix stream that the daemon's io thread writes itself. Nothing waits here
but `receive`, and that in a single system call.

A message is a u32 (little endian) and as many bytes of payload; either side begins with its hello. A signal handler may
raise wherever Python calls something (Ctrl-C), but not inside a C function nor between two assignments: what a system
call returns is therefore put into a list by C code, and messages are taken out only once they have been delivered.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from pathlib import Path

from ull import wire
from ull.client.protocol import Protocol
from ull.socket_reader import DescriptorReader, Drain, Reader

HELLO = wire.VERSION + bytes(4)
_HELLO_S = 0.5  # a listener that has not said its hello by then is not a daemon's, or is stopped
_READ_BYTES = 16_384
_LENGTH = struct.Struct("<I")
_NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class LocalConnection:
    """One connection to the daemon that listens at `path`. Raises OSError where nobody does."""

    name = "local"
    refused = False

    def __init__(self, path: Path) -> None:
        self.connected = False  # the daemon has said its hello
        self.over: str | None = None  # why the connection has ended
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._chunks: list[bytes] = []  # received and not yet part of `_data`
        self._data = b""
        self._at = 0  # bytes of `_data` whose messages have been delivered
        self._read_ns = 0  # when `_data`'s last bytes were received
        self._wait_ms = 0  # SO_RCVTIMEO of the socket; 0: none
        self._outgoing = b""  # what the kernel has not taken, and ...
        self._taken: list[int] = []  # ... the bytes of it that it has, send by send
        self._closed = False
        self._greet_by = time.monotonic() + _HELLO_S
        try:
            self._socket.setblocking(False)
            self._socket.connect(str(path))
            self._socket.setblocking(True)
            self._socket.sendall(HELLO, socket.MSG_NOSIGNAL)
        except BaseException:
            self._socket.close()
            raise

    @property
    def unsent(self) -> bool:
        """Whether the kernel has not taken all that was sent."""
        return bool(self._outgoing)

    def send(self, payload: bytes) -> bool:
        """Hands a message to the kernel, or keeps what it does not take; False where the daemon has gone."""
        if not self.connected or self.over is not None:
            return False
        frame = _LENGTH.pack(len(payload)) + payload
        if self._outgoing:
            frame = self._outgoing[sum(self._taken) :] + frame
        self._outgoing, self._taken = frame, []
        return self.flush()

    def flush(self) -> bool:
        """Tries to send what is left; False where the daemon has gone."""
        while self._outgoing:
            rest = self._outgoing[sum(self._taken) :] if self._taken else self._outgoing
            if rest:
                try:
                    self._taken.extend(map(self._socket.send, (rest,), (_NO_WAIT,)))
                except BlockingIOError:
                    return True
                except OSError:  # why the daemon has gone is for the receiving side to find out, after its last words
                    self._outgoing, self._taken = b"", []
                    return False
            if sum(self._taken) >= len(self._outgoing):
                self._outgoing, self._taken = b"", []
        return True

    def receive(self, protocol: Protocol, wait_ms: int = 0) -> bool:
        """Passes one message to `protocol`, waiting at most `wait_ms` for it; whether there was one."""
        if self._deliver(protocol) or (self._chunks and self._absorb() and self._deliver(protocol)):
            return True
        if self._outgoing and self.over is None:
            wait_ms = self._wait_with_output(wait_ms)
        return self._read(wait_ms) and self._deliver(protocol)

    def receive_all(self, protocol: Protocol) -> None:
        """Passes on what one read brings, without waiting; more is an event of its own for who watches descriptors."""
        if self._read(0) or self._at < len(self._data):
            while self._deliver(protocol):
                pass

    def look(self, protocol: Protocol) -> None:
        """Notices what is due without anything arriving: here, a hello that does not come."""
        if not self.connected and self.over is None and time.monotonic() >= self._greet_by:
            self.over = f"what listens on {self._path} does not answer"

    def readers(self, loop: asyncio.AbstractEventLoop, on_input: Drain, on_change: Drain) -> list[Reader]:
        """Event sources that call `on_input` when something may have arrived. Changes come the same way."""
        return [DescriptorReader(loop, self._socket.fileno(), on_input, self)]

    def close(self, linger_ms: int = 0) -> None:
        """Ends the connection; what the kernel has not taken gets `linger_ms` to leave. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.connected = False
        deadline = time.monotonic() + linger_ms / 1000
        while self._outgoing and self.flush() and self._outgoing:
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                break
            self._poll(select.POLLOUT, int(left_ms) + 1)
        self._socket.close()

    def leave(self) -> None:
        """In a fork's child: closes its copy of the descriptor. The connection is the parent's."""
        self._closed = True
        self.connected = False
        self._socket.close()

    def _poll(self, events: int, wait_ms: int) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        poll.poll(wait_ms)

    def _wait_with_output(self, wait_ms: int) -> int:
        """Waits for input, or for room for what is unsent; returns how long the read may wait."""
        if self.flush() and not self._outgoing:
            return wait_ms
        if wait_ms:
            self._poll(select.POLLIN | select.POLLOUT, wait_ms)
            self.flush()
        return 0

    def _read(self, wait_ms: int) -> bool:
        """Reads once; whether anything came. Sets `over` at the daemon's hang-up."""
        if self.over is not None:
            return False
        if wait_ms and wait_ms != self._wait_ms:
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", wait_ms // 1000, wait_ms % 1000 * 1000)
            )
            self._wait_ms = wait_ms
        try:
            self._chunks.extend(map(self._socket.recv, (_READ_BYTES,), (0 if wait_ms else socket.MSG_DONTWAIT,)))
        except BlockingIOError:
            return self._absorb()
        except OSError as error:
            self.over = f"the daemon has gone ({error.strerror})"
            return self._absorb()
        self._read_ns = time.monotonic_ns()
        return self._absorb()

    def _absorb(self) -> bool:
        """Makes what was received part of `_data`; whether there was anything."""
        if not self._chunks:
            return False
        if not self._chunks[-1]:
            self.over = "the daemon has hung up"
        data = self._data[self._at :] + b"".join(self._chunks)
        self._data, self._at, self._chunks = data, 0, []
        return self.over is None or len(data) > 0

    def _greet(self) -> bool:
        """Whether the daemon has said its hello, which is the first that arrives."""
        if not self.connected and len(self._data) >= len(HELLO):
            if self._data.startswith(HELLO):
                self._at, self.connected = len(HELLO), True
            else:
                self.over = f"what listens on {self._path} is no daemon of this version"
        return self.connected

    def _deliver(self, protocol: Protocol) -> bool:
        """Passes the next message to `protocol`; False if it has not arrived whole."""
        if not self.connected and not self._greet():
            return False
        data, start = self._data, self._at + _LENGTH.size
        if len(data) < start:
            return False
        end = start + _LENGTH.unpack_from(data, self._at)[0]
        if len(data) < end:
            return False
        protocol.receive(memoryview(data)[start:end], self._read_ns)
        self._at = end
        return True
