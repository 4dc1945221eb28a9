"""The cpu executor against llama.cpp (same weights as Q8_0, same threads) and against the machine's memory bandwidth.

The peer is optional: `python -m venv PEER && PEER/bin/pip install llama-cpp-python gguf ml_dtypes safetensors`, then
`--peer PEER/bin/python`. Without it the two checks against llama.cpp are left out, and the table says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ull
from report import ROOT, Check, arguments, compile_peer, finish, percentiles
from serving import serve, tiny_bundle
from synthetic import synthetic_bundle

DECODE = (32, 256)  # prompt and new tokens where decode is measured: short, so that the weights dominate
PREFILL = (512, 8)  # ... where prefill is
REPEATS = 10
BLOCKS = 3  # alternating with the peer
LARGE_TOKENS = 48
TITLE = "cpu"


def our_block(url: str, vocabulary: int, prompt_tokens: int, new_tokens: int) -> dict[str, list[float]]:
    """Decode (mean ITL of a request) and prefill by the engine's own clock, microseconds; one warm-up is left out.

    Prefill lasts until the first token: the round that draws it reads the prompt's last chunk.

    Every prompt is random, so no prefix is cached.
    """
    generator = np.random.default_rng(0)
    times: dict[str, list[float]] = {"decode": [], "prefill": []}
    with ull.Client(url) as client:
        for repeat in range(REPEATS + 1):
            prompt = generator.integers(3, vocabulary, prompt_tokens).tolist()
            options = {"max_tokens": new_tokens, "ignore_eos": True, "speculate": "none"}
            timeline = client.generate(prompt, **options).result().timeline
            if repeat > 0:
                times["decode"].append((timeline.last_token_ns - timeline.first_token_ns) / 1e3 / (new_tokens - 1))
                times["prefill"].append((timeline.first_token_ns - timeline.started_ns) / 1e3)
    return times


def peer_block(python: Path, threads: int, prompt_tokens: int, new_tokens: int) -> dict[str, list[float]]:
    """llama.cpp's times on the same shape, microseconds."""
    gguf = ROOT / ".cache/bench/tiny-q8_0.gguf"
    gguf.parent.mkdir(parents=True, exist_ok=True)
    script = ROOT / "bench/peers/llama_cpp_peer.py"
    numbers = [threads, prompt_tokens, new_tokens, REPEATS]
    command = [python, script, ROOT / "engines/tiny", gguf, *(str(number) for number in numbers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    times = json.loads(output.splitlines()[-1])
    steps = np.array(times["decode_ns"]).reshape(REPEATS, new_tokens)
    return {"decode": (steps.mean(axis=1) / 1e3).tolist(), "prefill": (np.array(times["prefill_ns"]) / 1e3).tolist()}


def tiny_against_peer(threads: int, peer: Path | None, samples: dict[str, Any], checks: list[Check]) -> None:
    """Decode and prefill of the tiny engine, side by side with llama.cpp."""
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    bars = {"decode": (DECODE, "us/token", 1.0), "prefill": (PREFILL, f"us/{PREFILL[0]} tokens", 1.5)}
    with serve(tiny_bundle(), engine__threads=threads) as daemon:
        for phase, (shape, unit, must) in bars.items():
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(BLOCKS):
                ours += our_block(daemon.url, 4096, *shape)[phase]
                if peer:
                    theirs += peer_block(peer, threads, *shape)[phase]
            samples[f"ull {phase}, {label} ({unit})"] = percentiles(ours)
            if peer:
                samples[f"llama.cpp {phase}, {label} ({unit})"] = percentiles(theirs)
                ratio = float(np.median(ours) / np.median(theirs))
                checks.append(Check(f"{phase} time, ull / llama.cpp, {label}", ratio, "x", must=must))


def share_of_bandwidth(threads: int, samples: dict[str, Any], checks: list[Check]) -> None:
    """Bytes of weights that decode reads a second on about 1 GB of FP8, over what a bare read loop gets."""
    program = compile_peer("read_bandwidth.cpp")

    def read_passes() -> list[float]:
        command = [program, str(1_000_000_000), str(threads), "10"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [float(line) for line in output.split()]

    rates: list[float] = []
    peak = read_passes()
    with serve(synthetic_bundle(), engine__threads=threads) as daemon, ull.Client(daemon.url) as client:
        weight_bytes = client.info().executor["weight_bytes"]
        for seed in range(4):
            options = {"max_tokens": LARGE_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": seed}
            options["speculate"] = "none"  # one pass over the weights per token
            stamps = [frame.time_ns for frame in client.generate([1, 2, 3, 4 + seed], **options)]
            rates += (weight_bytes / np.diff(stamps)[1:]).tolist()
    peak += read_passes()
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    samples[f"memory read, {label} (GB/s)"] = percentiles(peak)
    samples[f"decode of 1 GB FP8, {label} (GB/s)"] = percentiles(rates)
    share = float(np.median(rates) / np.median(peak)) * 100
    checks.append(Check(f"decode's share of read bandwidth, {label}", share, "%", must=70.0, at_least=True))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--peer", type=Path, help="a Python that has llama-cpp-python and gguf")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure, default 1 2")
    options = parser.parse_args()
    samples: dict[str, Any] = {"peer": "llama.cpp Q8_0" if options.peer else "not installed: --peer was not given"}
    checks: list[Check] = []
    for threads in options.threads:
        tiny_against_peer(threads, options.peer, samples, checks)
        share_of_bandwidth(threads, samples, checks)
    if not options.peer:
        print("llama.cpp was not measured: give --peer (see --help)", file=sys.stderr)
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
