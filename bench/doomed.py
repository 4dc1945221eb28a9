"""Clients that are killed in mid stream (SIGKILL), one process each, by the thousand; bench for operators and tests.

    python bench/doomed.py URL --kills 10000

Each child is forked with the client's modules already imported, asks for an answer far longer than its life, and tells
of its first token or dies before it. One line of JSON says how many were killed at which moment, after SIGTERM too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import time

from ull.client.sync import Client  # not ull.Client: that is imported where it is first used, in each child

WAIT_S = 60.0  # for a first token: the requests of those killed before must have ended


def live(url: str, told: int) -> None:
    """The child: streams until it is killed."""
    with Client(url, connect_timeout=WAIT_S) as client:
        for number, _ in enumerate(client.generate([5], max_tokens=900, ignore_eos=True)):
            if number == 0:
                os.write(told, b"1")


def kill_one(url: str, chance: random.Random) -> str:
    """Forks a client and kills it at a random moment; says which: "early", or "streaming" (after its first token)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            live(url, writer)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        if chance.random() < 0.3:
            time.sleep(0.03 * chance.random() ** 2)  # many within the handshake, which takes 2 ms or 3
            return "early"
        ready, _, _ = select.select([reader], [], [], WAIT_S)
        if not ready or not os.read(reader, 1):
            raise SystemExit(f"a client got no first token within {WAIT_S:g} s: a slot is lost, or the daemon is")
        time.sleep(chance.uniform(0.0, 0.01))
        return "streaming"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="endpoint of a daemon")
    parser.add_argument("--kills", type=int, default=10_000, help="clients to kill (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default 1)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="mean between two (default 0)")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    counts = {"early": 0, "streaming": 0}
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while sum(counts.values()) < options.kills and not stopped:
        counts[kill_one(options.url, chance)] += 1
        if options.pause > 0:
            time.sleep(chance.expovariate(1 / options.pause))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
