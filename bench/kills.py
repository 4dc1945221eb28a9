"""Clients killed by the thousand (bench/doomed.py), in mid stream or before: does anything stay with a daemon?"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import ull
from report import Check, arguments, finish
from serving import serve, tiny_bundle
from soak import GOLDEN, LOOK_S, PROMPT, Look, Seen, checks_of, doomed, idle, look
from ull.spawn import DaemonProcess, python_environment

TITLE = "kills"
WARM_UP = 100  # clients: what a daemon allocates once, it has then


async def kill(url: str, kills: int, seed: int) -> dict[str, int]:
    """Runs bench/doomed.py; returns how many were killed at which moment."""
    killer = await asyncio.create_subprocess_exec(
        *doomed(url, kills, seed),
        env=python_environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        told, _ = await killer.communicate()
    finally:
        if killer.returncode is None:
            killer.kill()
    if killer.returncode != 0:
        raise SystemExit(f"bench/doomed.py ended with status {killer.returncode}")
    counts: dict[str, int] = json.loads(told)
    return counts


async def run(daemon: DaemonProcess, kills: int, seed: int) -> tuple[dict[str, Any], list[Check]]:
    """Kills so many; returns the samples and the verdicts."""
    async with ull.AsyncClient(daemon.url) as client:
        golden = (await client.generate(PROMPT, **GOLDEN).result()).token_ids
        await kill(daemon.url, WARM_UP, seed + 1)
        before = await idle(client)
        began_s = time.monotonic()
        looks: list[Look] = [await look(client, daemon, golden, began_s)]
        running = asyncio.ensure_future(kill(daemon.url, kills, seed))
        while not running.done():
            await asyncio.wait({running}, timeout=LOOK_S)
            looks.append(await look(client, daemon, golden, began_s))
        counts, took_s = running.result(), looks[-1].at_s
        requests = await idle(client)
        looks.append(await look(client, daemon, golden, began_s))
    seen = Seen(killed=counts)
    lost = requests["clients"]["gone"] - before["clients"]["gone"]
    samples = {"seed": seed, "killed": counts, "seconds": took_s, "requests": requests, "looks": [*map(vars, looks)]}
    kept, *others = checks_of(seen, looks, requests, 0.0)
    kept.name = "memory grown"  # since the first look: the warm-up came before
    asked = Check("clients killed that had asked", lost, "", must=counts["streaming"], at_least=True)
    return samples, [kept, *others, Check("clients killed", sum(counts.values()), ""), asked]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=10_000, help="clients to kill (default: 10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    options = parser.parse_args()
    with serve(tiny_bundle()) as daemon:
        samples, checks = asyncio.run(run(daemon, options.kills, options.seed))
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
