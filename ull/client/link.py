"""A client's way to the daemon: which transport, and a new connection when one has ended. Only receive() waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import zmq

from ull.client.dealer import DealerConnection
from ull.client.local import LocalConnection
from ull.client.protocol import Protocol
from ull.client.unreachable import permission_denied, why_nobody
from ull.curve import CurveKeys
from ull.endpoints import check_url, default_endpoint, ipc_path, local_path
from ull.errors import ConfigError, ConnectionLost

Transport = Literal["auto", "local", "zeromq"]
LINGER_MS = 200  # at the client's end: long enough for a last cancel to leave
_REFUSED_MS = 500  # before a connection that was refused is tried again
_RETRY_MS = 20  # between two looks for a daemon that is not there


class Link:
    """The connection to the daemon at `url`, and its successors.

    transport: "local" is the unix socket beside an ipc endpoint, "zeromq" what every daemon offers, "auto" the first
    where it is there and answers, else the second. keys: for a daemon that asks for them, by tcp. Raises ConfigError
    for a url that cannot be.
    """

    def __init__(
        self,
        url: str | None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        transport: Transport | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        url = default_endpoint() if url is None else url
        check_url(url)
        transport = "auto" if transport is None else transport
        self.url = url
        self.before_close: Callable[[], None] | None = None  # told while the sockets' descriptors are still valid
        self.trouble: str | None = None  # why the last attempt to reach the daemon failed, where that is known
        self._context = context
        self._keys = keys if ipc_path(url) is None else None
        self._transport = transport
        path = ipc_path(url)
        self._path = None if path is None or transport == "zeromq" else local_path(path)
        if transport not in ("auto", "local", "zeromq"):
            raise ConfigError(f"transport is {transport!r}; choose auto, local or zeromq", "transport")
        if transport == "local" and self._path is None:
            raise ConfigError(
                f"transport is local, but {url!r} is not ipc:///path, or too long: use zeromq or auto", "transport"
            )
        self._closed = False
        self._wait_until = 0.0  # time.monotonic(): a daemon that has refused the connection is left alone until then
        self._greeted = False  # by the present connection's daemon
        self._shunned = False  # the local socket has let a client wait in vain: not again before the next loss
        self.connection: LocalConnection | DealerConnection | None = None  # None: nobody listens at the local socket
        self._open()

    @property
    def connected(self) -> bool:
        """Whether there is a daemon at the other end."""
        return self.connection is not None and self.connection.connected

    @property
    def transport(self) -> str | None:
        """ "local" or "zeromq" while there is a connection, else None."""
        return self.connection.name if self.connection is not None and self.connection.connected else None

    @property
    def unsent(self) -> bool:
        """Whether something that was sent has not left this process, and needs receive() or flush() to do so."""
        return self.connection is not None and self.connection.unsent

    def send(self, payload: bytes) -> bool:
        """Hands a message to the connection; False where there is none."""
        return self.connection is not None and self.connection.send(payload)

    def receive(self, protocol: Protocol, wait_ms: int = 0) -> bool:
        """Passes one message to `protocol`, waiting at most `wait_ms` for something to happen; whether there was one.

        It returns after the first, so that the caller's code runs at once; what came with it is kept.
        """
        if self.connection is None:
            time.sleep(min(wait_ms, _RETRY_MS) / 1000)
            return False
        return self.connection.receive(protocol, wait_ms)

    def receive_all(self, protocol: Protocol) -> None:
        """Passes on what has arrived, without waiting."""
        if self.connection is not None:
            self.connection.receive_all(protocol)

    def watch(self, protocol: Protocol) -> bool:
        """Follows the connection's ups and downs; returns whether there were any."""
        connection = self.connection
        if connection is None:
            return self._open()
        connection.look(protocol)
        if connection.over is None:
            if connection.connected == self._greeted:
                return False
            self._greeted, self.trouble = True, None
            if connection.name == "zeromq" and self._path is not None and not self._shunned:
                self._prefer_local(self._path)  # the daemon opens its local socket first: it is there, if it ever is
            return True
        if self._greeted:
            protocol.lost(self.url)
        else:
            self.trouble = connection.over
            self._wait_until = time.monotonic() + _REFUSED_MS / 1000 if connection.refused else 0.0
        self._shunned = not self._greeted and self._transport == "auto"
        self._close_connection()
        self._open()
        return True

    def nobody(self, waited_s: float) -> ConnectionLost:
        """The error of a client that has waited for a daemon in vain. It takes up to a second to find out why."""
        reason = self.trouble or why_nobody(self.url)
        return ConnectionLost(f"no daemon answers at {self.url} (waited {waited_s:g} s): {reason}")

    def close(self, linger_ms: int = 0) -> None:
        """Closes the connection for good. `linger_ms`: how long unsent messages may take to leave."""
        self._closed = True
        self._close_connection(linger_ms)

    def restart(self) -> None:
        """Ends the connection and opens another."""
        self._close_connection()
        self._shunned = False
        self._open()

    def leave(self) -> None:
        """In a fork's child: gives up its copy of the connection; the parent's is not touched, nor told anything."""
        self._closed = True
        if self.connection is not None:
            self.connection.leave()

    def _open(self) -> bool:
        """Opens the best connection that there is; False if there is none."""
        self._greeted = False
        if time.monotonic() < self._wait_until:
            return False
        if self._path is not None and not self._shunned:
            try:
                self.connection = LocalConnection(self._path)
                return True
            except PermissionError:
                self.trouble = permission_denied(self._path)
            except OSError as error:
                self.trouble = f"{self._path}: {error.strerror or error}" if self._transport == "local" else None
        if self._transport == "local":
            return False
        self.connection = DealerConnection(self.url, self._context or zmq.Context.instance(), self._keys)
        return True

    def _prefer_local(self, path: Path) -> None:
        """Changes to the local transport if somebody listens there. Nothing is under way yet."""
        try:
            local = LocalConnection(path)
        except OSError:
            return
        self._close_connection()
        self.connection, self._greeted = local, False

    def _close_connection(self, linger_ms: int = 0) -> None:
        if self.connection is not None:
            if self.before_close is not None:
                self.before_close()
            self.connection.close(linger_ms)
            if not self._closed:
                self.connection = None


def check_silence(seconds: float) -> float:
    """A client's silence_timeout. Raises ConfigError unless it is a positive number of seconds."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"silence_timeout must be a positive number of seconds, not {seconds}", "silence_timeout")
    return seconds
