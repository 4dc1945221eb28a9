"""What a daemon and its successor say to each other, over a socket that the successor is born with.

    predecessor -> successor    Begin: which cores there are
    successor -> predecessor    Ready: it is warm, and what it would serve
    predecessor -> successor    Estate, and descriptors: everything stands still there
    successor -> predecessor    Taken: it can go on with that
    predecessor -> successor    Go: from here on it is the daemon

Before Go the predecessor can go on as if nothing had been; the end of the socket is the end of the other process. Where
anything is in the way, the successor says Failed and ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from ull import _native
from ull.errors import DaemonError
from ull.spawn import python_command

ENVIRONMENT = "ULLD_PREDECESSOR"  # number of the socket's descriptor
_LENGTH = struct.Struct("<QI")  # bytes of the message, and descriptors behind it
_MOST_DESCRIPTORS = 200  # with one byte; the kernel takes 253
_END_S = 0.5  # for a process that has said its last word to end
_MOST_BYTES = 1 << 34  # nobody sends so much: what comes is no message


class Begin(msgspec.Struct, tag=True, array_like=True):
    """The first words of a predecessor."""

    cores: list[int]  # that its process was given, of which it uses some


class Ready(msgspec.Struct, tag=True, array_like=True):
    """A successor is warm. What it serves, where that must be what its predecessor serves."""

    version: str
    saved_format: int  # of what the io threads hand over
    listen: list[str]  # endpoints, as configured
    server_key: str  # the public key of CURVE; "": there is none
    vocabulary: bytes  # digest: sessions are token ids


class Failed(msgspec.Struct, tag=True, array_like=True):
    """There will be no successor."""

    reason: str


class HandedSession(msgspec.Struct, array_like=True):
    """See `ull.daemon.sessions.Session`."""

    number: int
    pinned: bool
    ids: bytes  # int32
    answers: list[tuple[int, int]]
    chat: bytes | None
    chat_messages: int
    warned: bool


class HandedClient(msgspec.Struct, array_like=True):
    """A connection. Its descriptor comes with the message."""

    state: bytes  # the io thread's
    payloads: list[bytes]  # that it has not taken yet
    peer: tuple[str, str, bool, int | None] | None  # kind, name, admin, pid; None: it has not asked for anything
    sessions: list[HandedSession]


class HandedMessage(msgspec.Struct, array_like=True):
    """What a client has sent, and nobody has looked into."""

    client: int  # index
    payload: bytes
    received_ns: int
    malformed: str | None  # why the io thread could not read it; then there is no payload
    request_id: int | None  # of such a one, where it is known


class Estate(msgspec.Struct, tag=True, array_like=True):
    """All that a successor goes on with. Descriptors: of the locks, the doors and the clients, in this order."""

    locks: list[str]  # paths of ipc sockets
    doors: list[bytes]
    clients: list[HandedClient]
    messages: list[HandedMessage]  # in the order in which they came
    metrics: str  # address of the exporter; "": there is none
    asker: int | None  # index of the client that asked for it, ...
    request_id: int  # ... and with which id
    since_ns: int  # CLOCK_MONOTONIC: since then nobody has been answered


class Taken(msgspec.Struct, tag=True, array_like=True):
    """A successor can go on with the estate."""


class Go(msgspec.Struct, tag=True, array_like=True):
    """The predecessor touches nothing any more."""


Message = Begin | Ready | Failed | Estate | Taken | Go
_Expected = TypeVar("_Expected", bound=Message)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Ended(Exception):
    """The other process has ended, or says what nobody expects."""


class Channel:
    """One end of the socket. Everything blocks; `cancel` ends that from another thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends a message, and copies of descriptors. Raises Ended."""
        payload = _encoder.encode(message)
        try:
            self._connection.sendall(_LENGTH.pack(len(payload), len(descriptors)) + payload)
            for begin in range(0, len(descriptors), _MOST_DESCRIPTORS):
                socket.send_fds(self._connection, [b"\0"], descriptors[begin : begin + _MOST_DESCRIPTORS])
        except OSError as error:
            raise Ended("it has ended") from error

    def receive(self, kind: type[_Expected], timeout_s: float | None = None) -> tuple[_Expected, list[int]]:
        """The next message, which is of this kind, and descriptors. Raises Ended, DaemonError of Failed."""
        self._connection.settimeout(timeout_s)
        try:
            length, count = _LENGTH.unpack(self._bytes(_LENGTH.size))
            if length > _MOST_BYTES:
                raise Ended("it does not speak as a daemon of ull")
            message = _decoder.decode(self._bytes(length))
            descriptors: list[int] = []
            while len(descriptors) < count:
                some = self._descriptors()
                if not some:
                    raise Ended("it has ended")
                descriptors += some
        except TimeoutError as error:
            raise Ended(f"it has said nothing for {timeout_s:g} s") from error
        except OSError as error:
            raise Ended("it has ended") from error
        except msgspec.MsgspecError as error:
            raise Ended("it does not speak as a daemon of this version") from error
        finally:
            self._connection.settimeout(None)
        if isinstance(message, Failed):
            raise DaemonError(message.reason)
        if not isinstance(message, kind):
            raise Ended(f"it says {type(message).__name__}, not {kind.__name__}")
        return message, descriptors

    def cancel(self) -> None:
        """Ends the conversation, whoever waits for what."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket up."""
        self._connection.close()

    def _descriptors(self) -> list[int]:
        """Those that come with the next byte. No child process is to keep a client's connection."""
        room, received = socket.CMSG_LEN(_MOST_DESCRIPTORS * array("i").itemsize), array("i")
        _, ancillary, _, _ = self._connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(content)
        return received.tolist()

    def _bytes(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            chunk = self._connection.recv(min(count - len(received), 1 << 20))
            if not chunk:
                raise Ended("it has ended")
            received += chunk
        return bytes(received)


class Successor:
    """A daemon that is to take this one's place: a child process with the same command line. Ended by `close`.

    Raises DaemonError where it cannot be started.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        environment = {**os.environ, ENVIRONMENT: str(theirs.fileno())}
        environment.pop("WATCHDOG_PID", None)  # it is another process
        command = _command(sys.argv[1:])
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
                )
            except OSError as error:
                ours.close()
                raise DaemonError(f"{command[0]} cannot be started: {error.strerror}") from error
        with contextlib.suppress(Ended):  # who listens to it hears of that
            self.channel.send(Begin(list(cores)))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> str:
        """Ends it, where it has not done so itself; says how."""
        self.channel.cancel()
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "it was ended"
        return f"it has ended with status {status}"

    def close(self) -> None:
        """Gives it up, whether it has ended or goes on."""
        self.channel.close()


class Predecessor:
    """The daemon whose place this one is to take."""

    def __init__(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        self.channel = Channel(connection)
        _native.be_the_service(False)
        begin, _ = self.channel.receive(Begin, 10.0)
        os.sched_setaffinity(0, begin.cores)

    @classmethod
    def from_environment(cls) -> Self | None:
        """The one that has started this process, if that was one. Raises DaemonError."""
        text = os.environ.pop(ENVIRONMENT, None)
        if text is None:
            return None
        try:
            return cls(int(text))
        except (Ended, OSError, ValueError) as error:
            raise DaemonError(f"{ENVIRONMENT}={text[:20]}: no daemon is there to be succeeded: {error}") from error

    def fail(self, reason: str) -> None:
        """Says that there will be no successor."""
        with contextlib.suppress(Ended):  # nobody is waiting
            self.channel.send(Failed(reason))

    def wait(self) -> None:
        """Until its process has ended."""
        try:
            while True:
                self.channel.receive(Go)
        except (Ended, DaemonError):
            self.channel.close()


def _command(arguments: Sequence[str]) -> list[str]:
    """How this program was started: by a script, which another version may have taken the place of, or as a module."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" and os.access(script, os.X_OK):
        return [str(script.absolute()), *arguments]
    return [*python_command("ull.daemon"), *arguments]
