"""What a step's process of measure.py does: functions that yield findings, by name."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ahead
import numpy as np
from bandwidth import read_bandwidth
from bundles import build_once
from cores import placed_client
from floor import kv_bytes_of, medusa_bytes, prompt_bytes, prompt_operations, weight_bytes
from journal import Finding
from replay import DRAFTER, TEXTS, replay, replaying
from rounds import Prompts, RoundTimer, Times, loaded, parts_of
from shapes import CLIENT_PROMPTS, FIRST_TOKENS, MIDDLE, SHAPES, TURNS, Point, at, repeats
from sources import ROOT
from tables import PERSISTENT_CONTEXTS

sys.path.insert(0, str(Path(__file__).parent.parent))
from report import percentiles
from ull.bundle import Bundle, open_bundle
from ull.client.sync import Client
from ull.gpu import driver
from ull.gpu.params import CHUNK_TOKENS, TREE_TOKENS, RoundResult

CACHE = ROOT / ".cache/h200"
COMPARED_PROMPT, COMPARED_TOKENS, COMPARED_TOP = 150, 64, 5  # two pages and more; logprobs beside each token
REQUEST_GAPS = 400  # of a client's request: what its cache grows by adds 1% to a round
FEWEST_FIRST_TOKENS = 7  # of one length
FEWEST_SAMPLES = {"p99": 100, "p99.9": 1000}  # from which on a percentile says something


VARIANTS = {  # of a bundle: without heads, but for the EAGLE-3 head
    "eagle": ["--eagle-shape"],
    "fast": ["--prefill", "fast"],
    "warps": ["--tree-products", "warp"],
}


def build(arch: str, variant: str = "") -> Path:
    """A bundle of random weights, made once from the same sources. `variant`: "", or of VARIANTS."""
    shape = SHAPES[arch]
    options = VARIANTS[variant] if variant else ["--heads", str(shape.heads)] if shape.heads else []
    name = f"{arch}-{variant}" if variant else arch
    bundle = CACHE / f"{name}.ull"
    if build_once(bundle, "--arch", arch, "--random-weights", "--target", "sm_90a", "--context", "32768", *options):
        for retuned in CACHE.glob(f"{name}-ahead-*"):  # made from the one before
            shutil.rmtree(retuned)
    return bundle


def row(times: Times, weights: int, kv: int, layers: int, bandwidth: float) -> dict[str, Any]:
    """The figures of one point that must read so many bytes, in milliseconds and microseconds."""
    median = float(np.median(times.period)) / 1e6
    floor_ms = (weights + kv) / bandwidth * 1e3
    return {
        "period_us": percentiles(times.period / 1e3),
        "busy_us": percentiles(times.busy / 1e3),
        "gap_us": percentiles(times.gap / 1e3),
        "timer_step_ns": times.timer_step_ns,
        "mean_ms_by_events": times.mean_ns / 1e6,
        "median_ms": median,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "floor_ms": floor_ms,
        "share_of_read_bandwidth": floor_ms / median,
        "us_per_layer_above_floor": (median - floor_ms) * 1e3 / layers,
    }


def prompt_row(prompts: Prompts, tokens: int, nbytes: int, operations: int, bandwidth: float) -> dict[str, Any]:
    """The figures of prompts that must read so many bytes and compute so much."""
    median = float(np.median(prompts.device))
    floor_ms = nbytes / bandwidth * 1e3
    return {
        "tokens": tokens,
        "median_ms": median,
        "fastest_ms": float(prompts.device.min()),
        "slowest_ms": float(prompts.device.max()),
        "median_ms_seen_by_host": float(np.median(prompts.host)),
        "prompts": len(prompts.device),
        "tokens_per_s": tokens / median * 1e3,
        "bytes": nbytes,
        "floor_ms": floor_ms,
        "share_of_read_bandwidth": floor_ms / median,
        "tflop_per_s": operations / median / 1e9,
    }


def build_bundles(archs: Sequence[str]) -> Iterator[Finding]:
    """All at once. One that cannot be built fails again in the step that needs it."""
    started = time.monotonic()
    wanted = [(arch, "") for arch in archs]
    wanted += [(MIDDLE.arch, variant) for variant in VARIANTS if MIDDLE.arch in archs]
    wanted += [(shape.arch, variant) for shape, variant, _ in FIRST_TOKENS if shape.arch in archs]
    with ThreadPoolExecutor() as pool:
        for bundle in [pool.submit(build, *one) for one in dict.fromkeys(wanted)]:
            bundle.result()
    yield {"bundles_s": time.monotonic() - started}


def time_reading() -> Iterator[Finding]:
    yield {"gpu": driver.describe_device(0)}
    yield {"read_bandwidth": read_bandwidth()}


def measured(
    timer: RoundTimer, bundle: Bundle, points: Sequence[Point], rounds: int, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """The figures of each point, with what it is; and those with the attention for a long cache, where there is one."""
    layers, weights = bundle.manifest.model.layers, weight_bytes(bundle)
    for tree, context in points:
        for wide in (False, True) if timer.may_be_wide(tree, context) else (False,):
            times = timer.time_rounds(tree, context, rounds, wide=wide)
            figures = row(times, weights, kv_bytes_of(bundle, context), layers, bandwidth)
            yield {"tree": tree, "context": context, **({"wide": True} if wide else {}), **figures}


def time_points(
    arch: str, points: Sequence[Point], rounds: int, bandwidth: float, medusa: bool = False
) -> Iterator[Finding]:
    """Points of one model, and what its Medusa heads take."""
    bundle = open_bundle(build(arch))
    started = time.monotonic()
    with loaded(bundle) as program:
        timer = RoundTimer(program)
        layers, weights = bundle.manifest.model.layers, weight_bytes(bundle)
        yield {"about": {"layers": layers, "weight_bytes": weights, "load_s": time.monotonic() - started}}
        for figures in measured(timer, bundle, points, rounds, bandwidth):
            yield {"points": figures}
        if medusa:
            times_us = timer.time_medusa(128, rounds) / 1e3
            floor_us = medusa_bytes(bundle) / bandwidth * 1e6
            heads = SHAPES[arch].heads
            yield {"drafts": {"heads": heads, "busy_us": percentiles(times_us), "floor_us": floor_us}}
        timer.drain()


def time_trees_by_warps(arch: str, points: Sequence[Point], rounds: int, bandwidth: float) -> Iterator[Finding]:
    """The same points where each warp multiplies alone, instead of warpgroups."""
    bundle = open_bundle(build(arch, "warps"))
    with loaded(bundle) as program:
        timer = RoundTimer(program)
        for figures in measured(timer, bundle, points, rounds, bandwidth):
            yield {"by_warps": figures}
        timer.drain()


def time_prompts(
    arch: str, lengths: Sequence[int], bandwidth: float, turns: Sequence[tuple[int, int]] = TURNS
) -> Iterator[Finding]:
    """Prompts of these lengths, of one model: in chunks, the last of which may draw, read fast or exactly, and in 64s.

    And `turns`: so many tokens behind so many that are cached.
    """
    exact = ((CHUNK_TOKENS, False), (CHUNK_TOKENS, True), (TREE_TOKENS, False))
    for fast, ways in ((False, exact), (True, exact[:2])):
        bundle = open_bundle(build(arch, "fast" if fast else ""))
        with loaded(bundle) as program:
            timer = RoundTimer(program)
            for tokens, behind in (*((tokens, 0) for tokens in lengths), *turns):
                operations = prompt_operations(bundle.manifest.model, tokens, behind)
                for widest, draws in ways:
                    prompts = timer.time_prompt(tokens, repeats(tokens), widest=widest, draws=draws, behind=behind)
                    nbytes = prompt_bytes(bundle, parts_of(program.replay(), tokens, widest, behind), draws)
                    figures = prompt_row(prompts, tokens, nbytes, operations, bandwidth)
                    way = {"widest": widest, "fast": fast, "draws": draws, "behind": behind}
                    yield {"prefill": {**way, **figures}}
            timer.drain()


def time_persistent(arch: str, rounds: int, bandwidth: float) -> Iterator[Finding]:
    """Plain rounds with one kernel for all layers, whose blocks wait for ever if they wait in vain."""
    bundle = open_bundle(build(arch))
    with loaded(bundle, persistent=True) as program:
        timer = RoundTimer(program)
        for figures in measured(timer, bundle, at(PERSISTENT_CONTEXTS, 1), rounds, bandwidth):
            yield {"persistent": figures}
        timer.drain()


def decode(bundle: Bundle, persistent: bool, prompt: Sequence[int], count: int) -> list[list[Any]]:
    """[token, logprob, [(token, logprob) of the likeliest]] of each plain round behind the prompt."""
    with loaded(bundle, persistent=persistent) as program:
        replay = program.replay()
        replay.prefill(prompt[:-1])
        results = replay.decode(prompt[-1], len(prompt) - 1, count, top_logprobs=COMPARED_TOP)
        replay.drain()
    return [_said(result) for result in results]


def _said(result: RoundResult) -> list[Any]:
    first = result.tokens[0]
    return [first.token, first.logprob, [(entry.token, entry.logprob) for entry in first.top[: first.top_count]]]


def compare_persistent(arch: str, prompt_tokens: int, count: int) -> Iterator[Finding]:
    """Tokens and logprobs of one kernel for all layers against the chain's, bit for bit. Raises RuntimeError."""
    bundle = open_bundle(build(arch))
    prompt = [int(token) for token in np.random.default_rng(9).integers(2, 4000, prompt_tokens)]
    chain = decode(bundle, False, prompt, count)
    yield {"persistent_compared": {"tokens": count, "distinct": len({said[0] for said in chain}), "same": None}}
    kernel = decode(bundle, True, prompt, count)
    differs = [index for index in range(count) if chain[index] != kernel[index]]
    distinct = len({said[0] for said in chain})
    yield {"persistent_compared": {"tokens": count, "distinct": distinct, "same": not differs}}
    if differs:
        at = differs[0]
        raise RuntimeError(
            f"one kernel for all layers says otherwise than the chain in {len(differs)} of {count} rounds, first in "
            f"round {at}: {kernel[at][:2]} instead of {chain[at][:2]}"
        )


def time_client(arch: str, rounds: int) -> Iterator[Finding]:
    """What a client on an ipc socket sees: first tokens, then the gaps between tokens over so many plain rounds."""
    bundle = build(arch)
    with placed_client(bundle) as (client, placement):
        about = {"arch": arch, "placement": placement}
        for tokens in CLIENT_PROMPTS:
            times = first_tokens_ms(client, tokens, vocabulary_of(bundle))
            yield {"client": {**about, "first_token_ms": {str(tokens): spread(times["none"])}}}
        gaps: list[float] = []
        while len(gaps) < rounds:
            options = {"max_tokens": REQUEST_GAPS + 1, "speculate": "none", "ignore_eos": True}
            seen_ns = [time.perf_counter_ns() for _ in client.generate([1, 2, 3, 4], **options)]
            gaps += (np.diff(seen_ns) / 1e3).tolist()
        yield {"client": {**about, "inter_token_us": spread(gaps[:rounds])}}


def first_tokens_ms(
    client: Client, tokens: int, vocabulary: int, drafters: Sequence[str] = ("none",)
) -> dict[str, list[float]]:
    """From the request to its first token, by drafter, of prompts that begin like no other before.

    So nothing of them is cached. The drafters take turns; what the first turn took does not count.
    """
    generator, times = np.random.default_rng(tokens), {drafter: list[float]() for drafter in drafters}
    for _ in range(1 + max(FEWEST_FIRST_TOKENS, repeats(tokens))):
        for drafter, of_drafter in times.items():
            prompt = generator.integers(2, vocabulary, tokens).tolist()
            sent = time.perf_counter_ns()
            with client.generate(prompt, max_tokens=1, speculate=drafter, ignore_eos=True) as stream:
                next(stream)
                of_drafter.append((time.perf_counter_ns() - sent) / 1e6)
    return {drafter: of_drafter[1:] for drafter, of_drafter in times.items()}


def time_first_tokens(arch: str, variant: str, lengths: Sequence[int]) -> Iterator[Finding]:
    """First tokens of a client whose daemon has an engine of that variant; of "eagle" with the head, too."""
    bundle = build(arch, variant)
    drafters = (DRAFTER, "none") if variant == DRAFTER else ("none",)
    with placed_client(bundle) as (client, placement):
        for tokens in lengths:
            for drafter, times in first_tokens_ms(client, tokens, vocabulary_of(bundle), drafters).items():
                about = {"variant": variant or "exact", "drafter": drafter, "tokens": tokens, "placement": placement}
                yield {"first_token": {**about, **spread(times)}}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Their percentiles, but for those that so few samples say nothing of."""
    found = percentiles(samples)
    return {name: value for name, value in found.items() if found["samples"] >= FEWEST_SAMPLES.get(name, 0)}


def vocabulary_of(bundle: Path) -> int:
    return open_bundle(bundle).manifest.model.vocabulary


def time_speculation(arch: str) -> Iterator[Finding]:
    """A daemon's tokens with an EAGLE-3 head whose acceptance is others', and without: of each kind of text."""
    bundle = build(arch, "eagle")
    with replaying(bundle, ready_timeout=300.0) as client:
        for number in range(len(TEXTS)):
            yield {"speculation": replay(client, number, vocabulary_of(bundle))}


def time_ahead(arch: str, rounds: int) -> Iterator[Finding]:
    """Plain rounds with kernels that were compiled to fetch weights further ahead, or not at all."""
    yield from ahead.time_ahead(build(arch), rounds)


WORK: dict[str, Callable[..., Iterator[Finding]]] = {
    work.__name__: work
    for work in (
        *(build_bundles, time_reading, time_points, time_trees_by_warps, time_prompts, time_persistent),
        *(compare_persistent, time_speculation, time_client, time_first_tokens, time_ahead),
    )
}
