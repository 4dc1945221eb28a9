"""Who is connected: a user of this machine, the owner of a key, or an address; what they may do, and how much.

A client is one of these with all its connections: limits hold for it as a whole. Used by the control plane's one
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ull.daemon.config import AccessConfig
from ull.errors import Busy, Forbidden

_KINDS = {b"u": "user", b"k": "key", b"a": "address"}
_MOST_BUCKETS = 4096  # of clients that have gone; those that are full again are forgotten first


@dataclass(frozen=True)
class Peer:
    """The other end of a connection. `name`: a user's id, a key's name, or an address."""

    kind: str = "address"
    name: str = "unknown"
    admin: bool = False
    pid: int | None = None  # of a process on this machine

    @property
    def client(self) -> str:
        """What limits hold for."""
        return f"{self.kind}:{self.name}"

    def __str__(self) -> str:
        return self.client if self.pid is None else f"{self.client}:{self.pid}"


UNKNOWN = Peer()


class _Bucket:
    """A token bucket: `rate` a second, at most `burst` at once."""

    def __init__(self, burst: int, now: float) -> None:
        self.level = float(burst)
        self.filled_s = now

    def fill(self, rate: float, burst: int, now: float) -> float:
        self.level = min(float(burst), self.level + (now - self.filled_s) * rate)
        self.filled_s = now
        return self.level


class Peers:
    """Who is connected, by the connection's identity."""

    def __init__(self, config: AccessConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._buckets: dict[str, _Bucket] = {}

    def __getitem__(self, identity: bytes) -> Peer:
        return self._peers.get(identity, UNKNOWN)

    def came(self, identity: bytes, kind: bytes, admin: bool, name: str) -> None:
        """A client's first message is about to come."""
        pid = None
        if kind == b"u":
            name, _, process = name.partition(":")
            pid = int(process) if process.isdecimal() else None
        self._peers[identity] = Peer(_KINDS.get(kind, "address"), name or "unknown", admin, pid)

    def known(self, identity: bytes) -> Peer | None:
        """Who a client is, once it has asked for something."""
        return self._peers.get(identity)

    def take(self, identity: bytes, peer: Peer) -> None:
        """A client that a predecessor knew."""
        self._peers[identity] = peer

    def gone(self, identity: bytes) -> None:
        """A client has hung up."""
        self._peers.pop(identity, None)

    def connections(self, identity: bytes) -> set[bytes]:
        """All connections of the client that has this one."""
        client = self[identity].client
        return {each for each, peer in self._peers.items() if peer.client == client} | {identity}

    def require_admin(self, identity: bytes, what: str) -> None:
        """Raises Forbidden unless this client may administer the daemon."""
        peer = self[identity]
        if not peer.admin:
            raise Forbidden(
                f"{what} is for the role admin, and {peer.client} is not: connect as root or as the daemon's own user "
                "on its machine, or with an admin's key"
            )

    def spend(self, identity: bytes) -> None:
        """Counts a request of a client. Raises Busy where it has come to its rate."""
        rate, burst = self._config.requests_per_s, self._config.burst
        if not rate:
            return
        now = self._clock()
        bucket = self._bucket(self[identity].client, burst, now)
        if bucket.fill(rate, burst, now) < 1:
            wait_s = (1 - bucket.level) / rate
            message = f"this client sends more than {rate:g} requests a second (access.requests_per_s)"
            raise Busy(message, retry_after=wait_s, queue_length=0)
        bucket.level -= 1

    def check_in_flight(self, identity: bytes, live: Callable[[set[bytes]], int]) -> None:
        """Raises Busy where a client has as many requests as it may; `live` counts those of some connections."""
        most = self._config.in_flight
        if most and (count := live(self.connections(identity))) >= most:
            raise Busy(f"{count} requests of this client have not ended (access.in_flight)", queue_length=count)

    def check_sessions(self, identity: bytes, count: Callable[[set[bytes]], int]) -> None:
        """Raises Busy where a client has as many sessions open as it may; `count` as in check_in_flight."""
        most = self._config.sessions
        if most and (found := count(self.connections(identity))) >= most:
            raise Busy(f"{found} sessions of this client are open (access.sessions)", queue_length=0)

    def _bucket(self, client: str, burst: int, now: float) -> _Bucket:
        bucket = self._buckets.get(client)
        if bucket is None:
            if len(self._buckets) >= _MOST_BUCKETS:
                self._forget(now)
            bucket = self._buckets[client] = _Bucket(burst, now)
        return bucket

    def _forget(self, now: float) -> None:
        """Drops the buckets that are full again; if none is, all of clients that are not connected."""
        rate, burst = self._config.requests_per_s, self._config.burst
        full = [client for client, bucket in self._buckets.items() if bucket.fill(rate, burst, now) >= burst]
        present = {peer.client for peer in self._peers.values()}
        for client in full or [client for client in self._buckets if client not in present]:
            del self._buckets[client]
