"""What the journal costs a stream: the time between tokens with a journal and without, in turn on the same machine.

A request is measured behind another one that has just ended, whose record is written while it streams: that is when it
could be in the way. Daemons with and without a journal are started in turn, and each takes a part of the requests: what
the machine does meanwhile falls on both. The executor is scripted, with a round of two milliseconds, or the tiny engine
with `--tiny`. `--priority` keeps a machine's other work off the threads that tokens pass; the engine has the last core
then, and a pause keeps it below what the kernel lets a real-time thread take. `--same` compares two daemons without a
journal: what the machine's noise alone makes of the same comparison.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np

import ull
from report import ROOT, Check, arguments, finish, percentiles
from serving import scripted, tiny_bundle
from ull.journal import ChainReader, Request
from ull.spawn import DaemonProcess

TITLE = "recording"
PARTS = 8  # daemons of each kind
REQUESTS = 20  # of each daemon
TOKENS = 120  # of an answer
BEFORE = 20  # tokens of the one before it
PAUSE_S = 0.05
PROMPT = 400
ROUND_NS = 2_000_000
VOCABULARY = range(300, 1500)


def gaps_us(client: ull.Client, requests: int) -> tuple[list[float], list[float]]:
    """Microseconds between tokens, by the engine's clock and by the client's."""
    engine: list[float] = []
    arrival: list[float] = []
    for _ in range(requests):
        first, second = (random.choices(VOCABULARY, k=PROMPT) for _ in range(2))
        client.generate(first, max_tokens=BEFORE, ignore_eos=True, speculate="none").result()
        tokens = list(client.generate(second, max_tokens=TOKENS, ignore_eos=True, speculate="none"))
        engine += (np.diff([token.time_ns for token in tokens]) / 1e3).tolist()
        arrival += (np.diff([token.received_ns for token in tokens]) / 1e3).tolist()
        time.sleep(PAUSE_S)
    return engine, arrival


def part(journal: Path | None, fsync: str, tiny: bool, priority: int | None) -> tuple[list[float], list[float]]:
    """One daemon's share, and a look at what it has recorded."""
    settings = [] if journal is None else [f"--set=journal.path={journal}", f"--set=journal.fsync={fsync}"]
    if priority is not None:
        settings += [f"--cores={max(os.sched_getaffinity(0))}"]
        settings += [f"--set={thread}.priority={priority}" for thread in ("engine", "io")]
    bundle = tiny_bundle()
    with (
        DaemonProcess(bundle, arguments=settings)
        if tiny
        else scripted(bundle, {"round_ns": ROUND_NS}, arguments=settings) as daemon,
        ull.Client(daemon.url, priority=priority) as client,
    ):
        gaps_us(client, 2)
        gc.collect()
        gaps = gaps_us(client, REQUESTS)
    if journal is not None:
        records = [record for _, record in ChainReader().read(journal)]
        assert sum(isinstance(record, Request) for record in records) == 2 * (REQUESTS + 2)
    return gaps


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="the tiny engine instead of the scripted executor")
    parser.add_argument("--same", action="store_true", help="no journal on either side")
    parser.add_argument("--fsync", default="interval", help="journal.fsync (default interval)")
    parser.add_argument("--priority", type=int, metavar="N", help="real-time priority of engine, io thread and client")
    parser.add_argument("--parts", type=int, default=PARTS, help=f"daemons of each kind (default {PARTS})")
    options = parser.parse_args()
    random.seed(15)
    series: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as directory:  # on a disk, not in memory
        for number in range(2 * options.parts):
            journaled = number % 4 in (1, 2)  # off, on, on, off, ...
            path = Path(directory) / f"{number}.jsonl" if journaled and not options.same else None
            for name, values in zip(
                ("engine", "client"), part(path, options.fsync, options.tiny, options.priority), strict=True
            ):
                series.setdefault(f"ITL, {name}, {'on' if journaled else 'off'} (us)", []).extend(values)
    samples = {name: percentiles(values) for name, values in sorted(series.items())}
    checks = [
        Check(
            f"{name}'s ITL with the journal above that without, {quantile}",
            100 * (samples[f"ITL, {name}, on (us)"][quantile] / samples[f"ITL, {name}, off (us)"][quantile] - 1),
            "%",
            1.0 if quantile in ("p50", "p99.9") else None,
            0.0,
        )
        for name in ("engine", "client")
        for quantile in ("p50", "p99", "p99.9")
    ]
    setting = {
        "fsync": options.fsync,
        "executor": "tiny" if options.tiny else "scripted",
        "same": options.same,
        "priority": options.priority,
    }
    finish(TITLE, {**samples, **setting}, checks, options.json)


if __name__ == "__main__":
    main()
