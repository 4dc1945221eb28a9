"""What clients ask for while a daemon waits for its last requests to end, because a successor is ready: it is kept as
it came, for the successor or, where there is none in the end, for this daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ull.wire import Cancel, CloseSession, Commit, Health, Info, Request, SetLog, Stats, Trace, Upgrade

_ENDS = Cancel | Commit | CloseSession  # or releases
_ANSWERED = Health | Info | Stats | Trace | SetLog | Upgrade  # at once, whatever waits


@dataclass(frozen=True, slots=True)
class Kept:
    """A client's message. malformed: why the io thread could not read it; there is no payload then."""

    identity: bytes
    payload: bytes
    received_ns: int
    request_id: int | None  # where it is known
    malformed: str | None = None


class SetAside:
    """Messages in the order in which they came. `most`: how many, of one client `share`."""

    def __init__(self, most: int, share: int) -> None:
        self.closed = False  # nobody is answered any more: everything is kept
        self._most = most
        self._share = share
        self._messages: list[Kept] = []
        self._first = 0  # of them, that had been begun

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, key: tuple[bytes, int]) -> bool:
        return any((kept.identity, kept.request_id) == key for kept in self._messages)

    def concerns(self, identity: bytes, request: Request) -> bool:
        """Whether this message is to be kept. What is said of a request that runs here is not: it has to end."""
        if isinstance(request, _ANSWERED):
            return False
        if isinstance(request, Cancel):
            return (identity, request.id) in self
        if isinstance(request, Commit):
            return (identity, request.request) in self
        if isinstance(request, CloseSession):
            return self._of(identity) > 0
        return True

    def is_full_for(self, identity: bytes, request: Request) -> bool:
        """Whether there is no room for this message. What ends others has as much room again."""
        times = 2 if isinstance(request, _ENDS) else 1
        return len(self._messages) >= times * self._most or self._of(identity) >= times * self._share

    def keep(self, kept: Kept) -> None:
        """Keeps a message."""
        self._messages.append(kept)

    def keep_first(self, kept: Kept) -> None:
        """Keeps what had been begun, and so came before all that has not."""
        self._messages.insert(self._first, kept)
        self._first += 1

    def forget(self, identity: bytes) -> None:
        """A client has gone."""
        self._first -= sum(kept.identity == identity for kept in self._messages[: self._first])
        self._messages = [kept for kept in self._messages if kept.identity != identity]

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._messages)

    def _of(self, identity: bytes) -> int:
        return sum(kept.identity == identity for kept in self._messages)
