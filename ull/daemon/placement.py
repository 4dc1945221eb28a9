"""Which cores the daemon's threads run on: what the configuration says, and what is chosen where it says nothing.

A token is late when whoever carries it (the io thread, the client) is woken on a core where an engine computes: the
scheduler may let it wait there until the next tick, milliseconds later. So the computing threads get cores of their own
as far as there are any, and all else stays off them.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ull.cores import core_list
from ull.daemon.config import EngineConfig, IoConfig
from ull.errors import DaemonError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Cores by who runs on them. An empty `computing` means that the kernel places the computing threads."""

    computing: tuple[int, ...]  # the engine thread's first; one alone if only that thread is pinned
    io: int  # of the io thread; -1: one of `others`
    others: frozenset[int]  # of Python, and of every thread that is not named here
    configured: bool  # whether the engine's cores were given, not chosen
    reason: str = ""  # why the computing threads have no cores of their own, or share them

    @property
    def engine(self) -> int:
        """The engine thread's core; -1: any."""
        return self.computing[0] if self.computing else -1

    @property
    def avoid(self) -> frozenset[int]:
        """The cores that clients on this machine should leave alone."""
        own = frozenset(self.computing) | ({self.io} if self.io >= 0 else frozenset())
        return own - self.others

    @property
    def cooperative(self) -> bool:
        """Whether the engine offers its core to others between layers: unless somebody has given it one."""
        return not self.configured

    @property
    def io_shares(self) -> bool:
        """Whether the io thread may find another thread of the daemon on its core."""
        return self.io < 0 or self.io in self.others

    def check_priorities(self, engine: EngineConfig, io: IoConfig) -> None:
        """Raises DaemonError where a thread with a real-time priority would never let others run on their core."""
        if engine.priority and (not self.computing or set(self.computing) & (self.others | {self.io})):
            raise DaemonError(
                "engine.priority needs cores of the engine's own: name them with --cores, or set engine.priority = 0",
                "engine.priority",
            )
        if io.priority and io.idle == "spin" and self.io_shares:
            raise DaemonError(
                f"io.priority with io.idle = spin keeps everybody else off core {self.io}: leave a core for the rest, "
                "or set io.idle = adaptive",
                "io.priority",
            )

    def cores(self) -> dict[str, list[int]]:
        """By who runs there, in ascending order, but the engine thread's first."""
        return {
            "computing": list(self.computing),
            "io": [self.io] if self.io >= 0 else sorted(self.others),
            "others": sorted(self.others),
        }

    def summary(self) -> dict[str, Any]:
        """What `info` says."""
        return {**self.cores(), "avoid_cores": sorted(self.avoid), "cooperative": self.cooperative}


class CoreClaims:
    """The cores on which this process's engine computes, so that no other daemon chooses one of them for its own.

    A claim is a name in the abstract socket namespace: the kernel frees it with the process, it leaves no file, and
    every user may take one. Daemons in different network namespaces (containers) do not see each other's.
    """

    def __init__(self, prefix: str = "ull-core-") -> None:
        self._prefix = prefix
        self._held: dict[int, socket.socket] = {}

    def claim(self, core: int) -> bool:
        """Whether `core` is now this process's."""
        if core in self._held:
            return True
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0{self._prefix}{core}")
        except OSError:
            holder.close()
            return False
        self._held[core] = holder
        return True

    def claim_last(self, cores: Collection[int], count: int, keep: int) -> tuple[tuple[int, ...], set[int]]:
        """Claims the `count` highest of `cores` that no other process has, if `keep` of these are left.

        Returns the claimed cores, the last first, and those that are left; nothing if there are too few.
        """
        while len(free := {core for core in cores if self._is_free(core)}) >= count + keep:
            chosen = tuple(sorted(free, reverse=True)[:count])
            if all(map(self.claim, chosen)):
                return chosen, free - set(chosen)
            self.release()  # another daemon was quicker: look again
        return (), set()

    def release(self) -> None:
        """Gives up every claim."""
        for holder in self._held.values():
            holder.close()
        self._held.clear()

    def _is_free(self, core: int) -> bool:
        if not self.claim(core):
            return False
        self._held.pop(core).close()
        return True


def place(
    engine: EngineConfig, io: IoConfig, *, automatic: bool, threads: int, allowed: Collection[int], claims: CoreClaims
) -> Placement:
    """Where everything runs on the cores `allowed`, with `threads` computing.

    What the configuration names is taken as it is. Otherwise, if `automatic`, the computing threads get the last of the
    cores that no other daemon computes on, if one of these is left for the rest. Raises DaemonError for a core that is
    not allowed.
    """
    usable, io_core = set(allowed), {io.core} - {-1}
    computing = tuple(engine.cores) or ((engine.core,) if engine.core >= 0 else ())
    configured = bool(computing)
    if missing := sorted((set(computing) | io_core) - usable):
        key = ("engine.cores" if engine.cores else "engine.core") if missing[0] in computing else "io.core"
        raise DaemonError(f"{key}: core {missing[0]} is not available here; available: {core_list(allowed)}", key)
    reason = ""
    if configured:
        if shared := [core for core in computing if not claims.claim(core)]:
            reason = f"another daemon computes on core {core_list(shared)} too; give each its own"
    elif not automatic:
        reason = "placement is off"
    elif len(usable) <= threads:
        reason = f"{threads} computing and all other threads share {len(usable)} core{'s' * (len(usable) > 1)}"
    else:
        computing, left = claims.claim_last(usable - io_core, threads, keep=1 - len(io_core))
        if computing:
            usable = left | set(computing) | io_core
        else:
            reason = "other daemons compute on this machine's last cores; --cores says which are this one's"
    others = _first_not_empty(usable - set(computing) - io_core, usable - set(computing), usable)
    if configured and others & set(computing):
        reason = reason or f"no core is left for the rest of the daemon, which shares core {core_list(computing)}"
    return Placement(computing=computing, io=io.core, others=others, configured=configured, reason=reason)


def _first_not_empty(*choices: set[int]) -> frozenset[int]:
    return next(frozenset(choice) for choice in choices if choice)
