"""The engine loop on its own: what a round costs the engine thread, and how many tokens a second reach one client.

A scripted executor that costs nothing replaces the model; the rest is the product: engine thread, rings, io thread,
ZeroMQ over ipc, and `ull.Client` in a process of its own, which checks that every token arrives once and in order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

import ull
from report import Check, arguments, finish, percentiles
from serving import tiny_bundle
from ull import _native, wire
from ull.libzmq import loaded_libzmq

CONTEXT = 400_000  # tokens
MAX_TOKENS = 300_000
REQUESTS = 8
PROMPT = [1, 2, 3]
SCRIPT = [300 + i for i in range(1000)]  # the token at position p is SCRIPT[p % len(SCRIPT)]
TITLE = "loop"


def consume(url: str) -> None:
    """The client's process: streams each request, compares every id, prints tokens/s and frames as JSON."""
    rates, frames, lost = [], [], 0
    with ull.Client(url) as client:
        for _ in range(REQUESTS):
            ids: list[int] = []
            count = 0
            started = time.perf_counter()
            for frame in client.generate(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True):
                ids += frame.ids
                count += 1
            rates.append(len(ids) / (time.perf_counter() - started))
            frames.append(count)
            positions = np.arange(len(PROMPT), len(PROMPT) + MAX_TOKENS)
            expected = np.array(SCRIPT)[positions % len(SCRIPT)]
            lost += MAX_TOKENS if len(ids) != MAX_TOKENS else int(np.count_nonzero(expected != np.array(ids)))
    print(json.dumps({"rates": rates, "frames": frames, "lost": lost}))


def submit_all(control: zmq.Socket[bytes], engine: _native.Engine, client: subprocess.Popen[str]) -> None:
    """The least of a control plane: hands the client's requests to the engine until the client has finished."""
    while client.poll() is None:
        if not control.poll(50):
            continue
        kind, *rest = control.recv_multipart()
        if kind != b"R":
            continue
        request = wire.decode_request(rest[1])
        if isinstance(request, wire.Generate):
            params: dict[str, Any] = {"max_tokens": request.max_tokens, "temperature": 0.0, "seed": 0}
            engine.submit(rest[0], request.id, np.array(request.token_ids, np.int32), params)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--consume", metavar="URL", help="be the client's process (used by the benchmark itself)")
    options = parser.parse_args()
    if options.consume:
        consume(options.consume)
        return
    executor = _native.ScriptedExecutor(SCRIPT, vocabulary=4096, context=CONTEXT, pages=CONTEXT // 64 + 2)
    settings = {"queue_depth": 1, "cooperative": False, "prefix_cache": False}  # as on a core of its own
    engine = _native.Engine(executor, str(tiny_bundle() / "vocab.bin"), **settings)
    engine.warm_up()
    engine.start()
    with tempfile.TemporaryDirectory(prefix="ull-bench-") as folder, zmq.Context() as context:
        url = f"ipc://{Path(folder) / 'loop.sock'}"
        io = _native.Io(engine, zmq_context=context.underlying, libzmq=loaded_libzmq(), listen=[url])
        io.start()
        with context.socket(zmq.PAIR) as control:
            control.connect("inproc://ull-control")
            command = [sys.executable, __file__, "--consume", url]
            client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            submit_all(control, engine, client)
        rounds = engine.stats()["round_ns"]
        engine.stop()
        io.stop()
    assert client.stdout is not None
    received = json.loads(client.stdout.read())
    samples = {
        "engine cost per round (ns)": {**rounds, "p99.9": rounds["p999"], "samples": rounds["count"]},
        "tokens/s at the client": percentiles(received["rates"]),
        "frames a request": percentiles(received["frames"]),
    }
    checks = [
        Check("engine cost per round, p50", rounds["p50"] / 1e3, "us", must=1.0),
        Check("tokens/s reaching one client, median", float(np.median(received["rates"])), "1/s", 300_000, None, True),
        Check("tokens lost or out of order", received["lost"], "tokens", must=0),
    ]
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
