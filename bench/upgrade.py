"""A new daemon in the place of one that serves, by `ull upgrade` and by a restart: what clients notice of each.

Short requests come by a clock that does not wait for answers (Poisson arrivals of a seeded generator), over connections
that stay, and are timed from when they were due. First nothing happens, then one is put in the place of another, again
and again, then the same by a stop and a start on the same socket.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ull
from report import Check, arguments, finish, percentiles
from serving import tiny_bundle
from ull.errors import UllError
from ull.spawn import DaemonProcess

TITLE = "upgrade"
PROMPT = "def main():\n"
OPTIONS: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 11, "ignore_eos": True}
CLIENTS = 4
PAUSE_S = 2.0  # between two replacements
ENDS_S = 60.0  # for a predecessor to end


@dataclass
class Seen:
    """What became of the requests of one phase."""

    first_ms: list[float] = field(default_factory=list)  # token, from when it was due
    failures: Counter[str] = field(default_factory=Counter)
    tokens: set[tuple[int, ...]] = field(default_factory=set)


async def ask(client: ull.AsyncClient, due_s: float, seen: Seen) -> None:
    """One request, which failed if it was refused or lost."""
    try:
        stream = client.generate(PROMPT, **OPTIONS)
        first = await anext(stream)
        seen.first_ms.append((time.monotonic() - due_s) * 1e3)
        seen.tokens.add((*first.ids, *[each async for token in stream for each in token.ids]))
    except (UllError, StopAsyncIteration) as error:
        seen.failures[getattr(error, "code", "ended")] += 1


async def phase(url: str, rate: float, generator: random.Random, happens: Callable[[], Awaitable[None]]) -> Seen:
    """Requests while something `happens`."""
    seen = Seen()
    clients = [ull.AsyncClient(url, transport=("zeromq", "local")[place % 2]) for place in range(CLIENTS)]
    for client in clients:
        await client.health()
    running = asyncio.ensure_future(happens())
    asked: set[asyncio.Task[None]] = set()
    due_s = time.monotonic()
    while not running.done():
        due_s += generator.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        asked.add(asyncio.create_task(ask(generator.choice(clients), due_s, seen)))
    await running
    await asyncio.gather(*asked)
    for client in clients:
        await client.close()
    return seen


def run(bundle: Path, home: Path, times: int, rate: float, seed: int) -> tuple[dict[str, Any], list[Check]]:
    """The three phases; returns the samples and the verdicts."""
    generator = random.Random(seed)
    url = f"ipc://{home / 'ull.sock'}"
    daemon, pauses_ms, took_s = DaemonProcess(bundle, directory=home), list[float](), list[float]()

    async def nothing() -> None:
        await asyncio.sleep(times * PAUSE_S)

    async def upgrade() -> None:
        async with ull.AsyncClient(url) as admin:
            for _ in range(times):
                await asyncio.sleep(PAUSE_S)
                began_s = time.monotonic()
                pauses_ms.append((await admin.upgrade()).pause_ns / 1e6)
                took_s.append(time.monotonic() - began_s)

    def start_again(process: DaemonProcess) -> DaemonProcess:
        process.stop()
        return DaemonProcess(bundle, directory=home)

    async def restart() -> None:
        nonlocal daemon
        for _ in range(times):
            await asyncio.sleep(PAUSE_S)
            daemon = await asyncio.to_thread(start_again, daemon)

    quiet = asyncio.run(phase(url, rate, generator, nothing))
    upgraded = asyncio.run(phase(url, rate, generator, upgrade))
    with ull.Client(url) as client:
        successor = client.info().executor["pid"]
    os.kill(successor, signal.SIGTERM)
    ends_s = time.monotonic() + ENDS_S
    while (home / "ull.sock.lock").exists() and time.monotonic() < ends_s:
        time.sleep(0.05)
    daemon.stop()  # it has ended long ago
    daemon = DaemonProcess(bundle, directory=home)
    try:
        restarted = asyncio.run(phase(url, rate, generator, restart))
    finally:
        daemon.stop()

    phases = {"nothing happens": quiet, "upgrades": upgraded, "restarts": restarted}
    samples: dict[str, Any] = {
        **{f"first token, {name} (ms)": percentiles(seen.first_ms) for name, seen in phases.items()},
        "nobody was answered for, upgrades (ms)": percentiles(pauses_ms),
        "from the command to the successor (s)": percentiles(took_s),
        "failures": {name: dict(seen.failures) for name, seen in phases.items()},
        "times": times,
        "rate": rate,
        "seed": seed,
    }
    tokens = set().union(*(seen.tokens for seen in phases.values()))
    checks = [
        Check("requests refused or lost in upgrades", upgraded.failures.total(), "", must=0),
        Check("requests refused or lost in restarts", restarted.failures.total(), ""),
        Check("answers that differ", len(tokens) - 1, "", must=0),
        Check("requests during upgrades", len(upgraded.first_ms), ""),
    ]
    return samples, checks


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--times", type=int, default=20, help="replacements of each kind (default: 20)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests that come in a second (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (default: 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ull-") as home:
        samples, checks = run(tiny_bundle(), Path(home), options.times, options.rate, options.seed)
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
