"""What only a trial can say: whether hot cores are left alone, and how even the rounds of a daemon are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ull import _native
from ull.client import Client
from ull.doctor.check import Finding, Topic
from ull.trace.collect import Kind, Position, Trace

BOUNDS_NS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
LONGEST_GAP_NS = 10_000
ROUNDS = 2000
_SLICE_NS = 250_000_000  # of a measurement that nothing can interrupt
_MOST_SPREAD = 1.05
_MOST_REQUESTS = 200  # an answer may end early
_FEWEST_ROUNDS = 200


def noise(cores: Sequence[int], seconds: float) -> Iterator[Finding]:
    """Reads the clock on each core without end: a gap is something else that ran there."""
    for core in cores:
        topic = Topic(f"noise of core {core}", "what takes the core away for longer than 10 us makes a round late")
        try:
            found = _listen(core, seconds)
        except ValueError as error:
            yield topic.skip(error)
            continue
        value = f"longest gap {found['longest_ns'] / 1000:.1f} us in {seconds:g} s; {_gaps(found)}"
        if found["longest_ns"] > LONGEST_GAP_NS:
            yield topic.warn(value, "mend the warnings above; `perf trace -C CORE` and rtla say who runs there")
        else:
            yield topic.ok(value)


def rounds(client: Client) -> Iterator[Finding]:
    """Two thousand plain rounds of a running daemon: the slow ones against the usual ones.

    Raises UllError, Forbidden among them: the stamps are for the role admin.
    """
    topic = Topic("self-test", "a round that takes longer than the others is jitter that clients hear")
    limits = client.info().limits
    most = min(int(limits["context"]) - 8, int(limits["max_tokens"]))
    position, trace = Position(), Trace()
    connection = position.skip(client)
    took: list[int] = []
    for _ in range(_MOST_REQUESTS):
        client.generate([0], max_tokens=min(most, ROUNDS), speculate="none", temperature=1.0).result()
        trace.records.clear()
        position.read(client, trace)
        own = [record for record in trace.records if record.kind is Kind.ROUND and record.connection == connection]
        took += [record.end_ns - record.begin_ns for record in own[1:]]  # the first reads the prompt's end
        if len(took) >= ROUNDS:
            break
    if len(took) < _FEWEST_ROUNDS:
        yield topic.skip(f"answers end too soon: {len(took)} rounds in {_MOST_REQUESTS} requests")
        return
    took.sort()
    usual, slow = took[len(took) // 2], took[math.ceil(len(took) * 0.999) - 1]
    value = (
        f"p50 {usual / 1000:.0f} us, p99 {took[math.ceil(len(took) * 0.99) - 1] / 1000:.0f}, "
        f"p99.9 {slow / 1000:.0f}, longest {took[-1] / 1000:.0f} ({len(took)} rounds)"
    )
    if slow > _MOST_SPREAD * usual:
        remedy = "give the daemon cores of its own (--cores), then look at the noise and the warnings above"
        yield topic.warn(f"{value}: {slow / usual:.2f} times", remedy)
    else:
        yield topic.ok(value)


def _listen(core: int, seconds: float) -> dict[str, Any]:
    """What is measured in so long, in slices: between two of them an interrupt (Ctrl-C) is heard."""
    left_ns, longest_ns, by_size = int(seconds * 1e9), 0, [0] * len(BOUNDS_NS)
    while left_ns > 0:
        found = _native.measure_noise(core, min(left_ns, _SLICE_NS), BOUNDS_NS)
        left_ns -= _SLICE_NS
        longest_ns = max(longest_ns, found["longest_ns"])
        by_size = [sum(pair) for pair in zip(by_size, found["by_size"], strict=True)]
    return {"longest_ns": longest_ns, "by_size": by_size}


def _gaps(found: dict[str, Any]) -> str:
    pairs = zip(BOUNDS_NS, found["by_size"], strict=True)
    told = [f"{count} from {bound // 1000} us" for bound, count in pairs if count]
    return ", ".join(told) or "none from 1 us"
