"""One `generate` from its receipt to its end: what it asked for, where it takes place, and how far it has come."""

from __future__ import annotations

import asyncio
from array import array
from enum import Enum
from typing import TYPE_CHECKING, Any

from ull.wire import Generate

if TYPE_CHECKING:
    from ull.daemon.grammars import Grammar, Source
    from ull.daemon.peers import Peer
    from ull.daemon.sessions import Session


class TurnState(Enum):
    """What becomes of a `generate`. Each comes after the one above, if it comes."""

    WAITING = "waiting"  # for its session's earlier messages
    PREPARING = "preparing"  # a worker compiles its grammar or tokenizes it
    SUBMITTED = "submitted"  # the engine has accepted it
    OVER = "over"


class Turn:
    """One `generate`, in a session or not. `ull.daemon.turns` changes its state."""

    def __init__(
        self, identity: bytes, request: Generate, received_ns: int, warnings: list[str], rehearsal: bool
    ) -> None:
        self.identity = identity
        self.request = request
        self.received_ns = received_ns
        self.warnings = warnings
        self.peer: Peer | None = None  # whose it is
        self.rehearsal = rehearsal  # the daemon's own, which leaves no trace
        self.state = TurnState.WAITING
        self.held = request.hold  # its answer waits for a `commit` that has not come
        self.withdrawn = False  # a successor answers it
        self.session: Session | None = None
        self.source: Source | None = None  # of its grammar, ...
        self.grammar: Grammar | None = None  # ... once that is compiled
        self.labels: list[list[int]] = []  # of its choices, once it is submitted
        self.told = False  # its client is told of its end here, once the calls in the answer have been read
        self.prompt = array("i")  # once it is submitted; its session's ids, which change, once it is over
        self.record: tuple[bytes, dict[str, Any]] | None = None  # for the journal: the ids and what came with them
        self.timer: asyncio.TimerHandle | None = None  # ends it: its time limit while it waits, then what holds it

    @property
    def key(self) -> tuple[bytes, int]:
        """What names it: ids are a client's own."""
        return self.identity, self.request.id

    def stop_timer(self) -> None:
        """Nothing ends it by itself any more, but the engine."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
