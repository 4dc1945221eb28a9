"""What a token's way costs: engine thread's stamp -> io thread -> ZeroMQ (ipc) -> the client's receive.

The peer is the least that ZeroMQ costs: two C processes, DEALER and ROUTER, same libzmq, same payload, in alternating
blocks of the same run, half of their ping-pong's round trip. The bar is the ping-pong at the engine's own pace, whose
sender spins between messages as the engine computes between tokens; back to back, with all threads hot, is shown too.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np

import ull
from report import Check, arguments, compile_peer, finish, percentiles
from serving import serve, tiny_bundle
from ull.host import loaded_libzmq

BLOCKS = 8
TOKENS = 900  # per block: one request that nearly fills the context of the tiny engine
PAYLOAD_BYTES = 58  # a token frame of one token without logprobs
TITLE = "transport"


def stream_block(client: ull.Client, seed: int) -> tuple[list[float], list[float]]:
    """One request's one-way times and intervals between engine stamps, microseconds."""
    one_way, stamps = [], []
    options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": seed, "ignore_eos": True, "speculate": "none"}
    for frame in client.generate("import ", **options):
        one_way.append((frame.received_ns - frame.time_ns) / 1e3)
        stamps.append(frame.time_ns / 1e3)
    return one_way[10:], np.diff(stamps).tolist()


def peer_block(program: Path, libzmq: str, interval_us: int) -> list[float]:
    """The peer's one-way times for the same number of messages, microseconds; interval_us 0 is back to back."""
    with tempfile.TemporaryDirectory() as folder:
        command = [program, libzmq, f"ipc://{folder}/peer.sock", str(PAYLOAD_BYTES), str(TOKENS), str(interval_us)]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [int(line) / 1e3 for line in output.split()][10:]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="daemon configuration")
    options = parser.parse_args()
    program, libzmq = compile_peer("zmq_ping_pong.cpp"), loaded_libzmq()
    ours: list[float] = []
    intervals: list[float] = []
    paced: list[float] = []
    hot: list[float] = []
    settings = dict(assignment.split("=", 1) for assignment in options.set)
    with serve(tiny_bundle(), **settings) as daemon, ull.Client(daemon.url) as client:
        stream_block(client, 0)
        for block in range(BLOCKS):
            one_way, gaps = stream_block(client, block)
            ours += one_way
            intervals += gaps
            paced += peer_block(program, libzmq, max(1, round(float(np.median(gaps)))))
            hot += peer_block(program, libzmq, 0)
    samples = {
        "ull, engine stamp to client (us)": percentiles(ours),
        "bare libzmq, at the same pace (us)": percentiles(paced),
        "bare libzmq, back to back (us)": percentiles(hot),
        "engine interval (us)": percentiles(intervals),
    }
    ratio = {p: float(np.percentile(ours, p) / np.percentile(paced, p)) for p in (50, 99)}
    checks = [
        Check("one-way p50, ull / bare libzmq", ratio[50], "x", must=1.3),
        Check("one-way p99, ull / bare libzmq", ratio[99], "x", must=2.0),
    ]
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
