"""What a token's way costs: engine thread's stamp -> io thread -> ZeroMQ (ipc) or local transport -> client's receive.

The peer is the least that ZeroMQ costs one way: two C processes, ROUTER and DEALER, same libzmq, same payload, the
sender computing on while the message travels, as an engine does. It takes turns with ull in one run, sends at the
engine's pace, and is placed as ull is: its sender on the engine's core, its libzmq threads where the daemon's io thread
is, its receiver where the client is. Clients stand aside (off the cores that READY says to avoid) or anywhere.
The client's process has told Python's garbage collector to leave alone what it has imported, as docs/clients.md
advises: a full collection of that takes 20 ms.
"""

from __future__ import annotations

import gc
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import zmq

import ull
from report import Check, arguments, compile_peer, finish, percentiles
from serving import serve, tiny_bundle
from ull.client.link import Transport
from ull.libzmq import loaded_libzmq
from ull.spawn import DaemonProcess

BLOCKS = 8
TOKENS = 900  # per block: one request that nearly fills the context of the tiny engine
SETTLING = 10  # first samples of a block, left out
PAYLOAD_BYTES = 58  # a token frame of one token without logprobs
TITLE = "transport"
TRANSPORTS: tuple[Transport, ...] = ("local", "zeromq")
PEER = "bare libzmq"
Samples = dict[str, list[float]]  # by series, microseconds


def stream_block(client: ull.Client, seed: int) -> tuple[list[float], list[float]]:
    """One request's one-way times and intervals between engine stamps, microseconds."""
    one_way, stamps = [], []
    options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": seed, "ignore_eos": True, "speculate": "none"}
    for frame in client.generate("import ", **options):
        one_way.append((frame.received_ns - frame.time_ns) / 1e3)
        stamps.append(frame.time_ns / 1e3)
    return one_way[SETTLING:], np.diff(stamps).tolist()


class Peer:
    """The C program, with its sending thread and the rest of its first process on given cores."""

    def __init__(self, sender: Sequence[int], others: Sequence[int]) -> None:
        self._program = compile_peer("zmq_one_way.cpp")
        self._libzmq = loaded_libzmq()
        self._places = [sender, others]

    def block(self, interval_us: int, receiver: Sequence[int]) -> list[float]:
        """One-way times of as many messages as a block of ull has, microseconds."""
        cores = [",".join(map(str, place)) for place in (*self._places, receiver)]
        with tempfile.TemporaryDirectory() as folder:
            endpoint = f"ipc://{folder}/peer.sock"
            message = [str(PAYLOAD_BYTES), str(TOKENS), str(interval_us)]
            command = [str(self._program), self._libzmq, endpoint, *message, *cores]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        return [int(line) / 1e3 for line in output.split()][SETTLING:]


def measure(
    daemon: DaemonProcess, transports: Sequence[Transport], peer: Peer, clients: dict[str, list[int]]
) -> Samples:
    """Blocks of ull over each transport and of the peer in turn, for each place of the client."""
    samples: Samples = defaultdict(list)
    for block in range(BLOCKS):
        for place, cores in clients.items():
            intervals: list[float] = []
            for transport in transports:
                with connected(daemon.url, cores, transport) as client:
                    stream_block(client, 0)
                    one_way, gaps = stream_block(client, block)
                samples[f"ull, {transport}, client {place}"] += one_way
                intervals += gaps
            samples[f"{PEER}, client {place}"] += peer.block(max(1, round(float(np.median(intervals)))), cores)
            samples["engine interval"] += intervals
    return samples


@contextmanager
def connected(url: str, cores: Sequence[int], transport: Transport) -> Iterator[ull.Client]:
    """A client that runs on `cores`, and so do libzmq's threads in this process."""
    os.sched_setaffinity(0, cores)
    with zmq.Context() as context, ull.Client(url, context=context, transport=transport) as client:
        yield client


def client_places(avoid: Sequence[int], allowed: Sequence[int]) -> dict[str, list[int]]:
    """Cores of the client by the name of the choice."""
    aside = [core for core in allowed if core not in avoid]
    return {"aside": aside, "anywhere": list(allowed)} if avoid and aside else {"anywhere": list(allowed)}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="daemon configuration")
    options = parser.parse_args()
    settings = dict(assignment.split("=", 1) for assignment in options.set)
    allowed = sorted(os.sched_getaffinity(0))
    gc.freeze()
    with serve(tiny_bundle(), **settings) as daemon:
        with ull.Client(daemon.url) as client:
            placement = client.info().executor["placement"]
            transports = TRANSPORTS if client.transport == "local" else ("zeromq",)
        clients = client_places(placement["avoid_cores"], allowed)
        peer = Peer(placement["computing"][:1] or allowed, placement["io"])
        samples = measure(daemon, transports, peer, clients)
    checks = []
    for place in clients:
        theirs = samples[f"{PEER}, client {place}"]
        for transport in transports:
            ours = samples[f"ull, {transport}, client {place}"]
            for percent, must in ((50, 1.3), (99, 2.0)):
                ratio = float(np.percentile(ours, percent) / np.percentile(theirs, percent))
                checks.append(Check(f"p{percent}, ull, {transport} / {PEER}, client {place}", ratio, "x", must=must))
    report = {f"{series} (us)": percentiles(values) for series, values in samples.items()}
    finish(TITLE, {**report, "placement": placement, "client_cores": clients}, checks, options.json)


if __name__ == "__main__":
    main()
