"""What sessions, held answers, priorities and deadlines bring, as a client of the tiny engine sees it.

Each figure stands beside its peer in the same run: a turn that is cached beside one that is cold, a rollback beside
reading as many tokens, a pre-emption beside the rounds that it falls between. Prompts are random token ids, so that
nothing is cached by chance. The mix of deadlines is open-loop: requests are sent when they are due, whatever has become
of those before, and a time counts from then.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ull
from report import Check, arguments, finish, percentiles
from serving import serve, tiny_bundle

TITLE = "sessions"
TURNS = 40
PROMPT = 900  # tokens of a cold prompt
CACHED = 810  # of them, those of the second turn that the session holds already
COMMITS = 200
ROLLBACKS = 150
WORD = 5  # tokens that are taken back
LONG = 1000  # tokens that the session holds meanwhile
PREEMPTIONS = 400
BARGE_INS = 200
SHORT = 16  # tokens of a short prompt
FIRSTS = 400
MIX_MINUTES = 10.0
LOAD = 0.7  # of the engine's time
GRACE = 4.0  # a deadline, of the time that a request takes alone, ...
LEAST_DEADLINE_S = 0.02  # ... at least
VOCABULARY = range(300, 1500)  # ids without a meaning to the daemon

Samples = dict[str, dict[str, float]]


def ids(count: int) -> list[int]:
    """A prompt that was never sent before."""
    return random.choices(VOCABULARY, k=count)


def first_token_ms(stream: ull.Stream, sent_ns: int) -> float:
    """Milliseconds from `sent_ns` to the first token at the client; the rest is awaited too."""
    first = next(stream)
    stream.result()
    return (first.received_ns - sent_ns) / 1e6


def timed_ms(action: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def second_turns(client: ull.Client) -> tuple[list[float], list[float]]:
    """TTFT of turns of which nine tenths are cached, and of cold ones; milliseconds."""
    warm, cold = [], []
    for _ in range(TURNS):
        with client.open_session() as session:
            session.append(ids(CACHED)).result()
            sent = time.monotonic_ns()
            warm.append(first_token_ms(session.generate(ids(PROMPT - CACHED), max_tokens=2, ignore_eos=True), sent))
        sent = time.monotonic_ns()
        cold.append(first_token_ms(client.generate(ids(PROMPT), max_tokens=2, ignore_eos=True), sent))
    return warm, cold


def commits(client: ull.Client) -> list[float]:
    """From commit() to the first token at the client, of answers that had been computed; milliseconds."""
    times = []
    for _ in range(COMMITS):
        stream = client.generate(ids(SHORT), max_tokens=16, ignore_eos=True, hold=True)
        while (engine := client.stats().engine)["running"] or engine["queue_length"]:
            time.sleep(0.001)
        time.sleep(0.002)
        sent = time.monotonic_ns()
        stream.commit()
        times.append(first_token_ms(stream, sent))
    return times


def rollbacks(client: ull.Client) -> tuple[list[float], list[float], list[float]]:
    """Rolling five tokens back, that and reading five others, and only reading five; milliseconds."""
    alone, changed, read = [], [], []
    with client.open_session() as session:
        session.append(ids(LONG)).result()
        for _ in range(ROLLBACKS):
            word, other = ids(WORD), ids(WORD)
            read.append(timed_ms(lambda word=word: session.append(word).result()))
            started = time.perf_counter()
            session.rollback(WORD)
            alone.append((time.perf_counter() - started) * 1e3)
            session.append(other).result()
            changed.append((time.perf_counter() - started) * 1e3)
            session.rollback(WORD)
    return alone, changed, read


def preemptions(client: ull.Client, urgent: ull.Client) -> list[float]:
    """How long realtime requests wait behind a batch request that runs; microseconds."""
    waits: list[float] = []
    while len(waits) < PREEMPTIONS:
        stream = client.generate(ids(SHORT), max_tokens=900, ignore_eos=True, priority="batch", speculate="none")
        next(stream)
        for _ in range(40):
            time.sleep(random.uniform(0.001, 0.004))
            result = urgent.generate(ids(SHORT), max_tokens=1, priority="realtime").result()
            waits.append((result.timeline.started_ns - result.timeline.admitted_ns) / 1e3)
            client.poll()
            if stream.finished:
                break
        stream.close()
    return waits


def undisturbed_rounds(client: ull.Client) -> list[float]:
    """How long a batch request's rounds take when nothing comes between; microseconds."""
    stamps = [
        token.time_ns
        for token in client.generate(ids(SHORT), max_tokens=900, ignore_eos=True, priority="batch", speculate="none")
    ]
    return (np.diff(stamps) / 1e3).tolist()


def barge_ins(client: ull.Client) -> tuple[list[float], list[float]]:
    """TTFT of a short prompt that is sent with the cancel of an answer, and on an idle engine; milliseconds."""
    after, idle = [], []
    for _ in range(BARGE_INS):
        talking = client.generate(ids(SHORT), max_tokens=900, ignore_eos=True)
        for _ in range(random.randrange(2, 20)):
            next(talking)
        talking.cancel()
        sent = time.monotonic_ns()
        after.append(first_token_ms(client.generate(ids(SHORT), max_tokens=1), sent))
        talking.result()
        sent = time.monotonic_ns()
        idle.append(first_token_ms(client.generate(ids(SHORT), max_tokens=1), sent))
    return after, idle


def first_tokens(client: ull.Client) -> list[float]:
    """TTFT of a short prompt above the engine's own time for it; milliseconds."""
    over = []
    for _ in range(FIRSTS):
        sent = time.monotonic_ns()
        stream = client.generate(ids(SHORT), max_tokens=1)
        total = first_token_ms(stream, sent)
        timeline = stream.result().timeline
        over.append(total - (timeline.first_token_ns - timeline.started_ns) / 1e6)
    return over


@dataclass(frozen=True)
class Kind:
    """One kind of request of the mix."""

    priority: str
    prompt: int  # tokens
    answer: int
    share: float  # of the load
    deadline: bool


KINDS = (
    Kind("realtime", SHORT, 8, 0.3, True),
    Kind("interactive", 100, 40, 0.4, True),
    Kind("batch", 300, 100, 0.3, False),
)


def send(client: ull.Client, kind: Kind, deadline: float | None) -> ull.Stream:
    """A request of a kind."""
    return client.generate(
        ids(kind.prompt), max_tokens=kind.answer, ignore_eos=True, priority=kind.priority, deadline=deadline
    )


def service_s(client: ull.Client, kind: Kind) -> float:
    """The engine's time for a request of a kind when nothing else runs, median of several."""
    times = []
    for _ in range(15):
        timeline = send(client, kind, None).result().timeline
        times.append((timeline.done_ns - timeline.started_ns) / 1e9)
    return float(np.median(times))


def arrivals(services: dict[Kind, float], seconds: float) -> Iterator[tuple[float, Kind]]:
    """When requests are due, as a Poisson process for each kind that takes its share of the load."""
    due = [
        (when, kind)
        for kind, service in services.items()
        for when in np.cumsum(
            np.random.exponential(service / (LOAD * kind.share), int(2 * seconds * LOAD * kind.share / service) + 10)
        )
    ]
    return iter(sorted(((when, kind) for when, kind in due if when < seconds), key=lambda entry: entry[0]))


def mix(client: ull.Client, minutes: float) -> tuple[Counter[str], dict[str, list[float]]]:
    """What became of the deadlines of an open-loop mix, and how far predictions were off (percent of the time)."""
    services = {kind: service_s(client, kind) for kind in KINDS}
    deadlines = {
        kind: max(LEAST_DEADLINE_S, GRACE * service) if kind.deadline else None for kind, service in services.items()
    }
    counts: Counter[str] = Counter()
    series: dict[str, list[float]] = {"prediction error, ms": [], "realtime, of its deadline": []}
    live: list[tuple[ull.Stream, Kind]] = []
    began = time.monotonic()

    def settle() -> None:
        for stream, kind in [entry for entry in live if entry[0].finished]:
            live.remove((stream, kind))
            deadline = deadlines[kind]
            try:
                result = stream.result()
            except ull.DeadlineUnreachable:
                counts["refused"] += 1
                continue
            except ull.Busy:
                counts["busy"] += 1
                continue
            counts[kind.priority] += 1
            if deadline is None:
                continue
            timeline = result.timeline
            took = (timeline.done_ns - timeline.received_ns) / 1e9
            counts["admitted"] += 1
            counts["met"] += took <= deadline and result.finish_reason == "length"
            series["prediction error, ms"].append(abs(timeline.done_ns - timeline.expected_done_ns) / 1e6)
            if kind.priority == "realtime":
                series["realtime, of its deadline"].append(took / deadline)

    for when, kind in arrivals(services, minutes * 60):
        while (left := began + when - time.monotonic()) > 0:
            client.poll(min(left, 0.05))
            settle()
        live.append((send(client, kind, deadlines[kind]), kind))
    for stream, _ in live:
        stream_end(stream)
    settle()
    return counts, series


def stream_end(stream: ull.Stream) -> None:
    """Waits for a stream's end, however it ends."""
    with contextlib.suppress(ull.RequestError):
        stream.result()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=MIX_MINUTES, help=f"of the mix (default {MIX_MINUTES:g})")
    parser.add_argument("--bundle", type=Path, help="another engine than the tiny one, with a context of 1024 at least")
    options = parser.parse_args()
    random.seed(14)
    np.random.seed(14)
    gc.freeze()
    samples: Samples = {}
    with serve(options.bundle or tiny_bundle(), engine__kv_pages=128) as daemon, ull.Client(daemon.url) as client:
        client.generate(ids(PROMPT), max_tokens=64, ignore_eos=True).result()  # code and pages are touched
        warm, cold = second_turns(client)
        committed = commits(client)
        alone, changed, read = rollbacks(client)
        after, idle = barge_ins(client)
        over = first_tokens(client)
        calm = undisturbed_rounds(client)
        with ull.Client(daemon.url) as urgent:
            waits = preemptions(client, urgent)
        counts, series = mix(client, options.minutes)
    rows = {
        "TTFT, 90% cached (ms)": warm,
        "TTFT, cold (ms)": cold,
        "commit to first token (ms)": committed,
        "rollback of 5 tokens (ms)": alone,
        "rollback and reading 5 tokens (ms)": changed,
        "reading 5 tokens (ms)": read,
        "TTFT behind a barge-in (ms)": after,
        "TTFT of an idle engine (ms)": idle,
        "TTFT of 16 tokens above the engine's time (ms)": over,
        "pre-emption delay (us)": waits,
        "undisturbed rounds (us)": calm,
        **series,
    }
    samples = {name: percentiles(values) for name, values in rows.items() if values}
    median = {name: row["p50"] for name, row in samples.items()}
    delay = samples["pre-emption delay (us)"]["p99"] - samples["undisturbed rounds (us)"]["p99"]
    late = (median["TTFT behind a barge-in (ms)"] - median["TTFT of an idle engine (ms)"]) * 1e3
    checks = [
        Check(
            "second-turn TTFT at 90% cached, of cold, p50",
            median["TTFT, 90% cached (ms)"] / median["TTFT, cold (ms)"],
            "x",
            0.2,
            0.12,
        ),
        Check("commit to first token, p50", median["commit to first token (ms)"], "ms", 1.0, 0.2),
        Check(
            "rollback of 5 tokens at 1k, of reading 5, p50",
            median["rollback of 5 tokens (ms)"] / median["reading 5 tokens (ms)"],
            "x",
            2.0,
            1.1,
        ),
        Check(
            "rollback and reading 5, of reading 5, p50",
            median["rollback and reading 5 tokens (ms)"] / median["reading 5 tokens (ms)"],
            "x",
            2.0,
            1.1,
        ),
        Check("pre-emption delay above a round, p99 of both", delay, "us", 50.0, 10.0),
        Check(
            "TTFT behind a barge-in above an idle engine's, p50, in rounds",
            late / median["undisturbed rounds (us)"],
            "rounds",
            1.0,
        ),
        Check(
            "deadlines met, of those admitted",
            100 * counts["met"] / max(1, counts["admitted"]),
            "%",
            99.9,
            99.99,
            at_least=True,
        ),
        Check(
            "TTFT of 16 tokens above the engine's time, p50",
            median["TTFT of 16 tokens above the engine's time (ms)"],
            "ms",
            1.0,
            0.3,
        ),
    ]
    finish(TITLE, {**samples, "mix": dict(counts), "minutes": options.minutes}, checks, options.json)


if __name__ == "__main__":
    main()
