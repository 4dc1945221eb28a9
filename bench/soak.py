"""A daemon under everything that clients do, for ten minutes or for hours: does it stay as it was?

Requests come by a clock that does not wait for answers (Poisson arrivals of a seeded generator), and are timed from
when they were due: streams short and long, labels, JSON of a schema, conversations, answers that are held and committed
or dropped, and wrong ones. Beside them: storms of cancels, connections that end with requests under way, readers that
stop reading, clients that are killed. Every ten seconds another client looks: memory, descriptors, pages and slots of
the daemon, its health, and whether the same request still has the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ull
from report import ROOT, Check, arguments, finish, percentiles
from serving import serve, tiny_bundle
from ull import wire
from ull.errors import UllError
from ull.spawn import DaemonProcess, python_environment

TITLE = "soak"
PROMPT = "def main():\n"
GOLDEN: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 11, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LOOK_S = 10.0
STORM_S, STORM = 15.0, 24  # so many requests at once, each cancelled at some moment
RECONNECT_S = 7.0
READER_S = 5.0
KILL_S = 0.25  # mean between two kills
CLIENTS = 4
IDLE_S = 60.0  # for all that was asked to have ended
WARM_UP_S = 5.0  # of load before the first look
WARM_UP = 0.1  # of the run, in which memory may still grow


@dataclass
class Look:
    """What was seen of the daemon at one moment."""

    at_s: float
    resident_kb: int
    descriptors: int
    pages: int
    slots: int
    sessions: int
    clients: int
    health: str
    same: bool  # the golden request's tokens


@dataclass
class Seen:
    """What clients have seen."""

    begun: Counter[str] = field(default_factory=Counter)  # by kind
    ended: Counter[str] = field(default_factory=Counter)  # by how
    first_ms: list[float] = field(default_factory=list)  # from when it was due
    gap_ms: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # promises
    killed: dict[str, int] = field(default_factory=dict)  # clients, by when


class Load:
    """Everything that clients do, until `until_s` (time.monotonic())."""

    def __init__(self, url: str, rate: float, seed: int, until_s: float) -> None:
        self._url = url
        self._rate = rate
        self._random = random.Random(seed)
        self._until_s = until_s
        self._clients: list[ull.AsyncClient] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen = Seen()

    async def run(self) -> None:
        """Returns once all that was asked has ended."""
        self._clients = [ull.AsyncClient(self._url) for _ in range(CLIENTS)]
        await asyncio.gather(self._arrivals(), self._storms(), self._reconnects(), self._readers())
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=IDLE_S)
            self.seen.broken += [f"a request has not ended {IDLE_S:g} s after the load" for _ in late]
        for client in self._clients:
            await client.close()

    async def _arrivals(self) -> None:
        due = time.monotonic()
        others = [self._label, self._json, self._conversation, self._held, self._wrong]
        kinds = [self._stream] * 6 + others
        for kind in others:  # what the daemon opens once, it opens now
            self._begin(kind, due)
        while due < self._until_s:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._begin(self._random.choice(kinds), due)
            due += self._random.expovariate(self._rate)

    def _begin(self, kind: Callable[[ull.AsyncClient, float], Awaitable[None]], due: float) -> None:
        name = kind.__name__.removeprefix("_")
        self.seen.begun[name] += 1
        task = asyncio.ensure_future(self._watched(kind(self._random.choice(self._clients), due)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, work: Awaitable[None]) -> None:
        """Counts how it ended; what a client may not see is kept."""
        try:
            await work
        except UllError as error:
            self.seen.ended[error.code] += 1
        except Exception as error:
            self.seen.broken.append(f"{type(error).__name__}: {error}"[:300])

    async def _read(self, stream: Any, due: float, stop_after: int | None = None) -> None:
        last, next_index = None, 0
        async for token in stream:
            now = time.monotonic()
            if last is None:
                self.seen.first_ms.append((now - due) * 1000)
            else:
                self.seen.gap_ms.append((now - last) * 1000)
            if token.index != next_index:
                self.seen.broken.append(f"token {next_index} is missing, {token.index} came")
            last, next_index = now, token.index + len(token.ids)
            if stop_after is not None and next_index >= stop_after:
                stream.cancel()
                stop_after = None
        result = await stream.result()
        self.seen.ended[result.finish_reason] += 1
        if result.usage.completion_tokens != next_index and result.finish_reason != "cancelled":
            self.seen.broken.append(f"{result.usage.completion_tokens} tokens were counted, {next_index} came")

    async def _stream(self, client: ull.AsyncClient, due: float) -> None:
        tokens = self._random.choice([1, 8, 8, 40, 200])
        stop = self._random.randrange(1, 30) if self._random.random() < 0.2 else None
        await self._read(client.generate(PROMPT * self._random.randrange(1, 20), max_tokens=tokens, seed=1), due, stop)

    async def _label(self, client: ull.AsyncClient, due: float) -> None:
        result = await client.generate(PROMPT, choices=["buy", "sell", "hold"]).result()
        self.seen.ended[result.finish_reason] += 1

    async def _json(self, client: ull.AsyncClient, due: float) -> None:
        await self._read(client.generate(PROMPT, json_schema=SCHEMA, max_tokens=60, temperature=0.7, seed=3), due)

    async def _conversation(self, client: ull.AsyncClient, due: float) -> None:
        session = await client.open_session()
        await self._read(session.generate(PROMPT, max_tokens=12), due)
        if self._random.random() < 0.5:
            await session.rollback(session.tokens // 2)
        await self._read(session.generate("x = 1\n", max_tokens=12), time.monotonic())
        session.close()

    async def _held(self, client: ull.AsyncClient, due: float) -> None:
        stream = client.generate(PROMPT, max_tokens=12, hold=True)
        await asyncio.sleep(self._random.uniform(0, 0.1))
        if self._random.random() < 0.5:
            await stream.commit()
        else:
            stream.cancel()
        self.seen.ended[(await stream.result()).finish_reason] += 1

    async def _wrong(self, client: ull.AsyncClient, due: float) -> None:
        wrong: list[dict[str, Any]] = [{"max_tokens": -1}, {"temperature": -1.0}, {"top_p": 2.0}, {"stop_ids": [-5]}]
        try:
            await client.generate(PROMPT, **self._random.choice(wrong)).result()
        except UllError as error:
            self.seen.ended[error.code] += 1
        else:
            self.seen.broken.append("a wrong request was accepted")

    async def _storms(self) -> None:
        while time.monotonic() + STORM_S < self._until_s:
            await asyncio.sleep(STORM_S)
            streams = [self._clients[0].generate(PROMPT, max_tokens=300) for _ in range(STORM)]
            self.seen.begun["storm"] += STORM
            for stream in streams:
                await asyncio.sleep(self._random.uniform(0, 0.01))
                stream.cancel()
            for stream in streams:
                try:
                    self.seen.ended[(await stream.result()).finish_reason] += 1
                except UllError as error:  # its share of the queue was taken
                    self.seen.ended[error.code] += 1

    async def _reconnects(self) -> None:
        while time.monotonic() + RECONNECT_S < self._until_s:
            await asyncio.sleep(RECONNECT_S)
            place = self._random.randrange(1, CLIENTS)
            old, self._clients[place] = self._clients[place], ull.AsyncClient(self._url)
            await old.close()  # what it has under way fails with it

    async def _readers(self) -> None:
        """Local clients that ask for much and read nothing, then hang up."""
        path = self._url.removeprefix("ipc://") + ".local"
        request = wire.encode(wire.Generate(id=1, prompt=PROMPT, max_tokens=400, logprobs=5))
        while time.monotonic() + READER_S < self._until_s:
            with socket.socket(socket.AF_UNIX) as reader:
                reader.connect(path)
                reader.sendall(b"ull1" + bytes(4) + struct.pack("<I", len(request)) + request)
                self.seen.begun["mute reader"] += 1
                await asyncio.sleep(READER_S)


async def golden_request(client: ull.AsyncClient) -> ull.Result:
    """Asks for the same again, until there is room for it."""
    while True:
        try:
            return await client.generate(PROMPT, priority="realtime", **GOLDEN).result()
        except ull.Busy as busy:
            await asyncio.sleep(busy.retry_after or 0.1)


async def look(client: ull.AsyncClient, daemon: DaemonProcess, golden: list[int], began_s: float) -> Look:
    """Looks once."""
    stats, health = await client.stats(), await client.health()
    result = await golden_request(client)
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return Look(
        at_s=time.monotonic() - began_s,
        resident_kb=resident,
        descriptors=len(os.listdir(f"/proc/{daemon.pid}/fd")),  # noqa: PTH208
        pages=stats.engine["pages_used"],
        slots=stats.engine["slots_used"],
        sessions=stats.requests["sessions"],
        clients=stats.io["clients"],
        health=health.status,
        same=result.token_ids == golden,
    )


async def idle(client: ull.AsyncClient) -> dict[str, Any]:
    """Waits until nobody asks for anything; returns `requests` of `stats` then, or after a minute."""
    deadline = time.monotonic() + IDLE_S
    while True:
        stats = await client.stats()
        requests: dict[str, Any] = stats.requests
        ended = sum(requests["finished"].values()) == requests["accepted"]
        if (ended and stats.engine["slots_used"] == 0 and stats.io["clients"] == 1) or time.monotonic() > deadline:
            return requests
        await asyncio.sleep(0.1)


def doomed(url: str, kills: int, seed: int, pause_s: float = 0.0) -> list[str]:
    """The command that kills so many clients, `pause_s` between two on average."""
    command = [sys.executable, str(ROOT / "bench/doomed.py"), url, "--kills", str(kills), "--seed", str(seed)]
    return [*command, "--pause", str(pause_s)]


@contextmanager
def killed_clients(url: str, seed: int, seen: Seen) -> Iterator[subprocess.Popen[bytes]]:
    """Clients are killed meanwhile, and `seen.killed` counts them; yields what kills, which must not end by itself."""
    command = doomed(url, 10**9, seed, KILL_S)
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as said:
        killer = subprocess.Popen(command, env=python_environment(), stdout=told, stderr=said, start_new_session=True)
        try:
            yield killer
            killer.terminate()
            killer.wait(IDLE_S)
        except subprocess.TimeoutExpired:
            pass  # killed below, which its status tells
        finally:
            if killer.poll() is None:
                os.killpg(killer.pid, signal.SIGKILL)
                killer.wait()
        told.seek(0)
        said.seek(0)
        seen.killed = json.loads(told.read() or "{}")
        if killer.returncode not in (0, -signal.SIGTERM):
            seen.broken.append(f"bench/doomed.py: status {killer.returncode} {said.read().strip()[-200:]}".strip())


async def soak(
    daemon: DaemonProcess, minutes: float, rate: float, seed: int
) -> tuple[Seen, list[Look], dict[str, Any]]:
    """Runs it; returns what was seen, the looks (the first before, the last after the load), and the last `stats`."""
    async with ull.AsyncClient(daemon.url) as client:
        golden = (await client.generate(PROMPT, **GOLDEN).result()).token_ids
        await Load(daemon.url, rate, seed, time.monotonic() + WARM_UP_S).run()
        await idle(client)
        began_s = time.monotonic()
        until_s = began_s + minutes * 60
        looks = [await look(client, daemon, golden, began_s)]
        load = Load(daemon.url, rate, seed, until_s)
        with killed_clients(daemon.url, seed, load.seen):
            running = asyncio.ensure_future(load.run())
            while not running.done():
                await asyncio.wait({running}, timeout=LOOK_S)
                looks.append(await look(client, daemon, golden, began_s))
        running.result()
        requests = await idle(client)
        looks.append(await look(client, daemon, golden, began_s))
    return load.seen, looks, requests


def checks_of(seen: Seen, looks: list[Look], requests: dict[str, Any], minutes: float) -> list[Check]:
    """The verdicts."""
    settled = [each for each in looks if each.at_s >= WARM_UP * minutes * 60]
    growth_mb = (looks[-1].resident_kb - min(settled[0].resident_kb, settled[-1].resident_kb)) / 1024
    ended = sum(requests["finished"].values())
    return [
        Check("memory grown after the first tenth", max(0.0, growth_mb), "MiB", must=1.0),
        Check("descriptors more than before", looks[-1].descriptors - looks[0].descriptors, "", must=0),
        Check("slots taken at the end", looks[-1].slots, "", must=0),
        Check("sessions open at the end", looks[-1].sessions, "", must=0),
        Check("accepted requests without an end", requests["accepted"] - ended, "", must=0),
        Check("looks at which health was not ok", sum(each.health != "ok" for each in looks), "", must=0),
        Check("looks at which tokens differed", sum(not each.same for each in looks), "", must=0),
        Check("promises broken to clients", len(seen.broken), "", must=0),
        Check("requests", requests["accepted"], ""),
        Check("clients that were gone or did not read", requests["clients"].get("gone", 0), ""),
    ]


def plot(looks: list[Look], path: Path) -> None:
    """Memory, descriptors, pages and clients over the run, as a PNG; not without matplotlib (the extra `bench`)."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        print("no plot: it needs matplotlib (the extra `bench`)")
        return
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 9), sharex=True)
    minutes = [each.at_s / 60 for each in looks]
    for axis, (name, values) in zip(
        axes,
        {
            "resident memory, MiB": [each.resident_kb / 1024 for each in looks],
            "descriptors": [each.descriptors for each in looks],
            "KV pages in use": [each.pages for each in looks],
            "clients": [each.clients for each in looks],
        }.items(),
        strict=True,
    ):
        axis.plot(minutes, values, linewidth=1)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--rate", type=float, default=6.0, help="requests that come in a second (default: 6)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (default: 1)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plots of the run")
    options = parser.parse_args()
    with serve(tiny_bundle()) as daemon:
        seen, looks, requests = asyncio.run(soak(daemon, options.minutes, options.rate, options.seed))
    samples: dict[str, Any] = {
        "first token from when it was due (ms)": percentiles(seen.first_ms or [0.0]),
        "gap between frames (ms)": percentiles(seen.gap_ms or [0.0]),
        "minutes": options.minutes,
        "rate": options.rate,
        "seed": options.seed,
        "begun": dict(seen.begun),
        "ended": dict(seen.ended),
        "killed": seen.killed,
        "requests": requests,
        "broken": seen.broken[:20],
        "looks": [vars(each) for each in looks],
    }
    for line in seen.broken[:20]:
        print(line)
    if options.png is not None:
        plot(looks, options.png)
    finish(TITLE, samples, checks_of(seen, looks, requests, options.minutes), options.json)


if __name__ == "__main__":
    main()
