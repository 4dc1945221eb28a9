"""A daemon hands over to its successor, without a refused request or a lost connection.

The successor is a process of its own, started from the files that are there now: program, bundle, configuration. It
loads and warms up beside this daemon, which serves meanwhile. Then this one begins nothing new, lets what it has begun
end, stands still, and hands over: listening sockets, connections as they are, sessions, and what clients have sent in
the meantime. Until the successor has all of that, whatever goes wrong leaves this daemon as it was.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ull import __version__, _native
from ull.daemon.control import ControlPlane
from ull.daemon.socket_claim import SocketClaim
from ull.daemon.succession import Ended, Estate, Go, HandedClient, Message, Predecessor, Ready, Successor, Taken
from ull.errors import DaemonError, RequestError
from ull.log import Log
from ull.wire import UpgradeReply

_TAKE_S = 10.0  # for a successor to take over: to read the last journal file, above all
_LOOK_S = 0.02  # between two looks whether all is quiet
_Expected = TypeVar("_Expected", bound=Message)


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a daemon has and hands over.

    `prepare` comes before there is a successor, `leave` gives up what only one process can have. `resume` undoes the
    first and, where it is told so, the second; it raises DaemonError where this daemon is of no use without.
    """

    io: _native.Io
    control: ControlPlane
    claims: Sequence[SocketClaim]
    served: Ready  # what a successor must serve, too
    cores: Sequence[int]  # that the process was given
    drain_timeout_s: float
    ready: asyncio.Event  # set once this daemon has all that it hands over, a predecessor's place above all
    metrics: Callable[[], str]  # address of the exporter; "": there is none
    prepare: Callable[[], None]
    leave: Callable[[], None]
    resume: Callable[[bool], None]


class Upgrade:
    """One try to have a successor. `done` is its process id, once it is the daemon."""

    def __init__(self, holdings: Holdings, log: Log, identity: bytes, request_id: int) -> None:
        self.done: int | None = None
        self.successor: int | None = None  # its process id, as soon as there is one
        self._holdings = holdings
        self._log = log
        self._identity = identity  # of the client that asked for it
        self._request_id = request_id
        self._halted = False
        self._left = False
        self._task = asyncio.create_task(self._run())

    @property
    def under_way(self) -> bool:
        """Whether it has not ended."""
        return not self._task.done()

    async def cancel(self) -> None:
        """Gives it up, unless it is done; this daemon then is as it was before."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        holdings, control = self._holdings, self._holdings.control
        successor: Successor | None = None
        reason = "it was given up: this daemon is being stopped"
        try:
            await holdings.ready.wait()
            await asyncio.to_thread(holdings.prepare)
            successor = Successor(holdings.cores)
            self.successor = successor.pid
            self._log.info("upgrade", message="a successor is warming up", successor=successor.pid)
            ready = await _hear(successor, Ready)
            self._check(ready)
            control.hold()
            message = "the successor is warm; it goes on once what runs here has ended"
            self._log.info("upgrade", message=message, successor=successor.pid, live=control.live)
            await self._until_quiet()
            await self._hand_over(successor, ready)
            self.done = successor.pid
        except Ended as error:
            reason = str(error)
        except DaemonError as error:
            reason = error.message
        except Exception as error:  # of ours: whatever it is, this daemon goes on
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self.done is None:
                self._give_up(successor, reason)
            else:
                control.changed.set()

    def _check(self, ready: Ready) -> None:
        """Raises DaemonError where a successor would not serve what its predecessor does."""
        served = self._holdings.served
        if ready.saved_format != served.saved_format:
            raise DaemonError(f"ull {ready.version} cannot go on with connections of this version: restart the daemon")
        if ready.listen != served.listen:
            raise DaemonError("listen has changed: restart the daemon, or change it back", "listen")
        if ready.server_key != served.server_key:
            raise DaemonError("access.server_key has changed: restart the daemon, or change it back")

    async def _until_quiet(self) -> None:
        """Lets what was begun end; after the time that a stop leaves it, cancels it."""
        control, loop = self._holdings.control, asyncio.get_running_loop()
        deadline = loop.time() + self._holdings.drain_timeout_s
        cancelled = False
        while not control.is_quiet():
            if loop.time() >= deadline and not cancelled:
                control.cancel_all()
                cancelled = True
            await asyncio.sleep(_LOOK_S)

    async def _hand_over(self, successor: Successor, ready: Ready) -> None:
        holdings, control = self._holdings, self._holdings.control
        since_ns = time.monotonic_ns()
        control.fall_silent()
        metrics, self._left = holdings.metrics(), True
        await _to_its_end(holdings.leave)
        self._halted = True
        await _to_its_end(holdings.io.halt)
        doors, clients = holdings.io.hand_over()
        handed, messages = control.hand_over(clients)
        if ready.vocabulary != holdings.served.vocabulary:
            self._drop_sessions(handed)
        identities = [identity for *_, identity in clients]
        estate = Estate(
            locks=[str(claim.path) for claim in holdings.claims],
            doors=[state for _, state in doors],
            clients=handed,
            messages=messages,
            metrics=metrics,
            asker=identities.index(self._identity) if self._identity in identities else None,
            request_id=self._request_id,
            since_ns=since_ns,
        )
        descriptors = [claim.descriptor for claim in holdings.claims]
        descriptors += [door[0] for door in doors] + [client[0] for client in clients]
        await asyncio.to_thread(successor.channel.send, estate, descriptors)
        await _hear(successor, Taken, _TAKE_S)
        # From here on nothing is awaited: it is this daemon's, or the successor's.
        _native.notify(f"MAINPID={successor.pid}\nSTATUS=process {successor.pid} goes on")
        successor.channel.send(Go())
        holdings.io.abandon()
        for claim in holdings.claims:
            claim.abandon()
        requests, sessions = len(messages), sum(len(client.sessions) for client in handed)
        counts = {"clients": len(handed), "requests": requests, "sessions": sessions}
        self._log.info("upgrade", message="the successor goes on", successor=successor.pid, **counts)

    def _drop_sessions(self, clients: Sequence[HandedClient]) -> None:
        """The successor's token ids stand for other texts."""
        dropped = sum(len(client.sessions) for client in clients)
        if dropped:
            message = "the successor has another vocabulary: sessions end, and clients have to open new ones"
            self._log.warning("upgrade", message=message, sessions=dropped)
        for client in clients:
            client.sessions = []

    def _give_up(self, successor: Successor | None, reason: str) -> None:
        """This daemon goes on as it was."""
        holdings, control = self._holdings, self._holdings.control
        if successor is not None:
            how = successor.end()
            successor.close()
            reason = f"{reason}; {how}, and the log may say more" if "ended" in reason else reason
        if self._halted:
            holdings.io.start()
        try:
            holdings.resume(self._left)
        except (DaemonError, OSError) as error:
            control.give_up(f"what was given up for a successor cannot be taken again: {error}")
        _native.notify(f"MAINPID={os.getpid()}")
        control.go_on()
        self._log.error("upgrade", message="there is no successor; this daemon goes on", reason=reason)

        def answer() -> None:
            raise RequestError("upgrade_failed", f"the daemon goes on as it was: {reason}")

        control.attempt(self._identity, self._request_id, answer)


@dataclass(frozen=True)
class Inheritance:
    """What a daemon has from its predecessor."""

    estate: Estate
    identities: Sequence[bytes]  # of the clients, here
    locks: Sequence[int]  # descriptors

    def claims(self, mode: int) -> list[SocketClaim]:
        """Of the ipc sockets, whose files get this mode."""
        claims = [
            SocketClaim.inherited(Path(path), lock) for path, lock in zip(self.estate.locks, self.locks, strict=True)
        ]
        for path in (path for claim in claims for path in claim.paths):
            with suppress(FileNotFoundError):  # the io thread sees to that
                path.chmod(mode)
        return claims

    def answer(self) -> UpgradeReply:
        """What the client is told that asked for the successor."""
        estate = self.estate
        return UpgradeReply(
            id=estate.request_id,
            pid=os.getpid(),
            version=__version__,
            clients=len(estate.clients),
            requests=len(estate.messages),
            sessions=sum(len(client.sessions) for client in estate.clients),
            pause_ns=time.monotonic_ns() - estate.since_ns,
        )


async def inherit(
    predecessor: Predecessor,
    io: _native.Io,
    served: Ready,
    open_journal: Callable[[], None],
    stopped: Callable[[], bool],
) -> Inheritance:
    """The other side of `Upgrade`: waits for what there is, and takes it; the io thread is halted then.

    Raises Ended or DaemonError, also once `stopped` says so: the predecessor goes on with all of it.
    """
    channel = predecessor.channel
    await asyncio.to_thread(channel.send, served)
    receiving = asyncio.ensure_future(asyncio.to_thread(channel.receive, Estate))
    while not receiving.done():
        await asyncio.wait({receiving}, timeout=_LOOK_S)
        if stopped():
            channel.cancel()
    estate, descriptors = receiving.result()
    locks, doors = len(estate.locks), len(estate.locks) + len(estate.doors)
    clients = zip(descriptors[doors:], estate.clients, strict=True)
    await asyncio.to_thread(io.halt)
    try:
        identities = io.take_over(
            list(zip(descriptors[locks:doors], estate.doors, strict=True)),
            [(descriptor, client.state, client.payloads) for descriptor, client in clients],
        )
        await asyncio.to_thread(open_journal)
        channel.send(Taken())
        await asyncio.to_thread(channel.receive, Go, _TAKE_S)
    except BaseException:
        io.abandon()
        raise
    return Inheritance(estate, identities, descriptors[:locks])


async def _hear(successor: Successor, kind: type[_Expected], timeout_s: float | None = None) -> _Expected:
    message, _ = await asyncio.to_thread(successor.channel.receive, kind, timeout_s)
    return message


async def _to_its_end(work: Callable[[], None]) -> None:
    """Does `work` on another thread; a cancellation waits for it."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
