"""Client-side latency of a running daemon: what `ull bench` measures.

Definitions (those of AIPerf): TTFT is from the request's start to its first non-empty frame; ITL is (end - first
frame) / (tokens - 1) per request; the inter-chunk time is the gap between two frames, which differs from ITL where a
frame holds several tokens. In the open loop (a `rate` is given) a request starts at its planned time, whether the
client managed to send it then or not, so that a slow daemon cannot slow its own measurement down.

With a deadline, a request that was accepted is on time if the daemon's own clock says so: from its receipt to its end.
How far off the daemon's predictions were is the distance between the expected and the real moment of a request's first
token, and of its end.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ull.client.protocol import Result
from ull.client.requests import Prompt
from ull.client.sync import Client, Stream
from ull.errors import DeadlineUnreachable, RequestError
from ull.wire import Speculation, added

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999))


@dataclass(frozen=True)
class Load:
    """What to ask for, how often. `rate` is in requests per second (None: one after the other, `concurrency` wide)."""

    prompt: Prompt
    max_tokens: int = 64
    requests: int = 100
    warmup: int = 5
    temperature: float = 0.0
    seed: int | None = None
    concurrency: int = 1
    rate: float | None = None
    poisson: bool = True
    ignore_eos: bool = True
    speculate: str | None = None
    max_tree: int | None = None
    priority: str | None = None
    deadline: float | None = None  # seconds, of each measured request


@dataclass
class Punctuality:
    """Of the requests with a deadline: how many met it, and how far off the daemon's predictions were (ns)."""

    on_time: int = 0
    late: int = 0
    unreachable: int = 0  # refused, since they could not have met it
    first_token_error: list[int] = field(default_factory=list)
    done_error: list[int] = field(default_factory=list)

    def add(self, result: Result, deadline: float) -> None:
        """Counts an accepted request. A prediction of 0 is none."""
        times = result.timeline
        if result.finish_reason != "deadline" and times.done_ns - times.received_ns <= deadline * 1e9:
            self.on_time += 1
        else:
            self.late += 1
        if times.expected_first_ns and times.first_token_ns:
            self.first_token_error.append(abs(times.expected_first_ns - times.first_token_ns))
        if times.expected_done_ns and times.done_ns:
            self.done_error.append(abs(times.expected_done_ns - times.done_ns))

    def summary(self) -> dict[str, Any]:
        """Counts, the share of the accepted that were on time, and quantiles of the errors in microseconds."""
        accepted = self.on_time + self.late
        errors = ("first_token_error", "done_error")
        return {
            "accepted": accepted,
            "on_time": self.on_time,
            "hit_rate": self.on_time / accepted if accepted else None,
            "unreachable": self.unreachable,
            **{f"{name}_us": quantiles(getattr(self, name)) for name in errors if getattr(self, name)},
        }


@dataclass
class Samples:
    """Durations in nanoseconds, one list per metric; `tokens` over `elapsed_ns` is the throughput."""

    time_to_first_token: list[int] = field(default_factory=list)
    inter_token: list[int] = field(default_factory=list)
    inter_chunk: list[int] = field(default_factory=list)
    end_to_end: list[int] = field(default_factory=list)
    send_delay: list[int] = field(default_factory=list)  # open loop: sent after planned
    requests: int = 0
    refused: int = 0
    tokens: int = 0
    elapsed_ns: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    punctuality: Punctuality | None = None  # None: without a deadline

    def summary(self) -> dict[str, Any]:
        """Quantiles of every metric in microseconds, tokens per second, and what speculation brought."""
        metrics = ("time_to_first_token", "inter_token", "inter_chunk", "end_to_end", "send_delay")
        seconds = self.elapsed_ns / 1e9
        return {
            "requests": self.requests,
            "refused": self.refused,
            "tokens": self.tokens,
            "elapsed_s": seconds,
            "tokens_per_s": self.tokens / seconds if seconds else 0.0,
            "speculation": speculation_summary(self.speculation),
            "deadline": None if self.punctuality is None else self.punctuality.summary(),
            **{f"{name}_us": quantiles(getattr(self, name)) for name in metrics if getattr(self, name)},
        }


def speculation_summary(total: Speculation) -> dict[str, Any]:
    """`total` as plain data, with `share_by_drafter` (of all rounds) and `acceptance_by_depth`.

    Acceptance at depth d is the share of the rounds with a draft whose draft was accepted to d or beyond, whether
    the draft reached that deep or not.
    """
    drafted_rounds = total.rounds - total.by_drafter.get("none", 0)
    return {
        **msgspec.to_builtins(total),
        "share_by_drafter": {name: count / total.rounds for name, count in total.by_drafter.items() if total.rounds},
        "acceptance_by_depth": [count / drafted_rounds for count in total.accepted_by_depth if drafted_rounds],
    }


def quantiles(durations_ns: Sequence[int]) -> dict[str, float]:
    """Nearest-rank quantiles and the maximum of non-empty `durations_ns`, in microseconds."""
    ordered = sorted(durations_ns)
    ranks = {name: ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] for name, fraction in QUANTILES}
    return {name: value / 1000 for name, value in {**ranks, "max": ordered[-1]}.items()}


def measure(client: Client, load: Load, progress: Callable[[int], None] | None = None) -> Samples:
    """Runs `load` over `client`, warm-up requests first and uncounted; `progress` is told the requests done.

    Raises what the client raises, except that refusals of measured requests are counted.
    """
    for _ in range(load.warmup):
        _send(client, replace(load, deadline=None)).result()
    samples = Samples(punctuality=None if load.deadline is None else Punctuality())
    start_ns = time.monotonic_ns()
    planned = deque(_plan(load, start_ns))
    running: list[_Running] = []
    while planned or running:
        _start_due(client, load, planned, running, samples)
        wait_s = 1.0
        if load.rate is not None and planned:
            wait_s = max(0.0, (planned[0] - time.monotonic_ns()) / 1e9)
        if running:
            client.poll(min(wait_s, 1.0))
        elif planned:
            time.sleep(wait_s)
        for request in [request for request in running if request.take(samples, load.deadline)]:
            running.remove(request)
            if progress is not None:
                progress(samples.requests + samples.refused)
    samples.elapsed_ns = time.monotonic_ns() - start_ns
    return samples


class _Running:
    """One request under measurement."""

    def __init__(self, stream: Stream, start_ns: int) -> None:
        self._stream = stream
        self._start_ns = start_ns
        self._first_ns = 0
        self._last_ns = 0

    def take(self, samples: Samples, deadline: float | None) -> bool:
        """Records the frames that have arrived; True once the request has ended."""
        finished = self._stream.finished
        while (token := self._stream.ready()) is not None:
            if self._last_ns:
                samples.inter_chunk.append(token.received_ns - self._last_ns)
            if not self._first_ns and token.text:
                self._first_ns = token.received_ns
                samples.time_to_first_token.append(self._first_ns - self._start_ns)
            self._last_ns = token.received_ns
        if not finished:
            return False
        try:
            result = self._stream.result()
        except RequestError as error:
            samples.refused += 1
            if samples.punctuality is not None and isinstance(error, DeadlineUnreachable):
                samples.punctuality.unreachable += 1
            return True
        if samples.punctuality is not None and deadline is not None:
            samples.punctuality.add(result, deadline)
        tokens = result.usage.completion_tokens
        samples.requests += 1
        samples.tokens += tokens
        samples.speculation = added(samples.speculation, result.speculation)
        if self._last_ns:  # else its deadline came before its first token
            samples.end_to_end.append(self._last_ns - self._start_ns)
        if tokens > 1 and self._first_ns:
            samples.inter_token.append((self._last_ns - self._first_ns) // (tokens - 1))
        return True


def _plan(load: Load, start_ns: int) -> list[int]:
    """The planned start of every request (ns): all at once in the closed loop, the same Poisson draw in every run."""
    if load.rate is None:
        return [start_ns] * load.requests
    gaps = random.Random(0)
    times, now = [], float(start_ns)
    for _ in range(load.requests):
        times.append(int(now))
        now += (gaps.expovariate(load.rate) if load.poisson else 1 / load.rate) * 1e9
    return times


def _start_due(client: Client, load: Load, planned: deque[int], running: list[_Running], samples: Samples) -> None:
    """Sends what is due: by the plan in the open loop, up to the concurrency in the closed one."""
    while planned:
        now = time.monotonic_ns()
        if load.rate is None:
            if len(running) >= load.concurrency:
                return
            start_ns = now
        else:
            start_ns = planned[0]
            if start_ns > now:
                return
            samples.send_delay.append(now - start_ns)
        planned.popleft()
        running.append(_Running(_send(client, load), start_ns))


def _send(client: Client, load: Load) -> Stream:
    return client.generate(
        load.prompt,
        max_tokens=load.max_tokens,
        temperature=load.temperature,
        seed=load.seed,
        ignore_eos=load.ignore_eos,
        speculate=load.speculate,
        max_tree=load.max_tree,
        priority=load.priority,
        deadline=load.deadline,
    )
