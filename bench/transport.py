"""What a token's way costs: engine thread's stamp -> io thread -> ZeroMQ (ipc) -> the client's receive.

The peer is the least that ZeroMQ costs: a C program streaming stamped messages of the same size at the same pace from a
ROUTER to a DEALER, same libzmq, in alternating blocks of the same run.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np
from report import Check, arguments, compile_peer, finish, percentiles
from serving import serve, tiny_bundle

import ull

BLOCKS = 8
TOKENS = 900  # per block: one request that nearly fills the context of the tiny engine
PAYLOAD_BYTES = 72  # a token frame of one token without logprobs
TITLE = "transport"


def libzmq_path() -> str:
    """The libzmq that pyzmq has loaded into this process."""
    import zmq  # noqa: F401  (loads it)

    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libzmq" in line)


def stream_block(client: ull.Client, seed: int) -> tuple[list[float], list[float]]:
    """One request's one-way times and intervals between engine stamps, microseconds."""
    one_way, stamps = [], []
    options = {"max_tokens": TOKENS, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    for frame in client.generate("import ", **options):
        one_way.append((frame.received_ns - frame.time_ns) / 1e3)
        stamps.append(frame.time_ns / 1e3)
    return one_way[10:], np.diff(stamps).tolist()


def peer_block(program: Path, libzmq: str, interval_us: int) -> list[float]:
    """The peer's one-way times for the same number of messages, microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [program, libzmq, f"ipc://{folder}/peer.sock", str(PAYLOAD_BYTES), str(TOKENS), str(interval_us)]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [int(line) / 1e3 for line in output.split()][10:]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    program, libzmq = compile_peer("zmq_ping_pong.cpp"), libzmq_path()
    ours: list[float] = []
    theirs: list[float] = []
    intervals: list[float] = []
    with serve(tiny_bundle()) as daemon, ull.Client(daemon.url) as client:
        stream_block(client, 0)
        for block in range(BLOCKS):
            one_way, gaps = stream_block(client, block)
            ours += one_way
            intervals += gaps
            theirs += peer_block(program, libzmq, max(1, round(float(np.median(gaps)))))
    samples = {
        "ull one-way (us)": percentiles(ours),
        "bare libzmq one-way (us)": percentiles(theirs),
        "engine interval (us)": percentiles(intervals),
    }
    ratio = {p: float(np.percentile(ours, p) / np.percentile(theirs, p)) for p in (50, 99)}
    checks = [
        Check("one-way p50, ull / bare libzmq", ratio[50], "x", must=1.3),
        Check("one-way p99, ull / bare libzmq", ratio[99], "x", must=2.0),
    ]
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
