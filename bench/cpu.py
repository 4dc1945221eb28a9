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
from report import ROOT, Check, arguments, compile_peer, finish, percentiles
from serving import serve, tiny_bundle
from synthetic import synthetic_bundle

import ull

PROMPT_TOKENS = 512
NEW_TOKENS = 256
REPEATS = 10
BLOCKS = 3  # alternating with the peer
LARGE_TOKENS = 48
TITLE = "cpu"


def our_block(url: str, vocabulary: int, repeats: int) -> tuple[list[float], list[float]]:
    """(decode ITL, prefill time) of `repeats` requests by the engine's own clock, microseconds; the first is left out.

    Every prompt is random, so no prefix is cached; ITL is the mean over one request's tokens after the first.
    """
    generator = np.random.default_rng(0)
    decode, prefill = [], []
    with ull.Client(url) as client:
        for repeat in range(repeats + 1):
            prompt = generator.integers(3, vocabulary, PROMPT_TOKENS).tolist()
            result = client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).result()
            if repeat > 0:
                timeline = result.timeline
                decode.append((timeline.last_token_ns - timeline.first_token_ns) / 1e3 / (NEW_TOKENS - 1))
                prefill.append((timeline.prefilled_ns - timeline.started_ns) / 1e3)
    return decode, prefill


def peer_block(python: Path, threads: int) -> dict[str, list[int]]:
    """llama.cpp's times on the same shape, ns."""
    gguf = ROOT / ".cache/bench/tiny-q8_0.gguf"
    gguf.parent.mkdir(parents=True, exist_ok=True)
    script = ROOT / "bench/peers/llama_cpp_peer.py"
    numbers = [threads, PROMPT_TOKENS, NEW_TOKENS, REPEATS]
    command = [python, script, ROOT / "engines/tiny", gguf, *(str(number) for number in numbers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]


def tiny_against_peer(threads: int, peer: Path | None, samples: dict[str, Any], checks: list[Check]) -> None:
    """Decode and prefill of the tiny engine, side by side with llama.cpp."""
    decode: list[float] = []
    prefill: list[float] = []
    peer_decode: list[float] = []
    peer_prefill: list[float] = []
    with serve(tiny_bundle(), engine__threads=threads) as daemon:
        for _ in range(BLOCKS):
            ours = our_block(daemon.url, 4096, REPEATS)
            decode += ours[0]
            prefill += ours[1]
            if peer:
                theirs = peer_block(peer, threads)
                steps = np.array(theirs["decode_ns"]).reshape(REPEATS, NEW_TOKENS)
                peer_decode += (steps.mean(axis=1) / 1e3).tolist()
                peer_prefill += (np.array(theirs["prefill_ns"]) / 1e3).tolist()
    label = f"{threads} thread{'s' if threads > 1 else ''}"
    samples[f"ull decode, {label} (us/token)"] = percentiles(decode)
    samples[f"ull prefill {PROMPT_TOKENS}, {label} (us)"] = percentiles(prefill)
    if peer:
        samples[f"llama.cpp decode, {label} (us/token)"] = percentiles(peer_decode)
        samples[f"llama.cpp prefill {PROMPT_TOKENS}, {label} (us)"] = percentiles(peer_prefill)
        ratio = float(np.median(decode) / np.median(peer_decode))
        checks.append(Check(f"decode time, ull / llama.cpp, {label}", ratio, "x", must=1.0))
        ratio = float(np.median(prefill) / np.median(peer_prefill))
        checks.append(Check(f"prefill time, ull / llama.cpp, {label}", ratio, "x", must=1.5))


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
