"""What rounds with an EAGLE-3 head take where no trained head is at hand: its acceptance is replayed, all else is real.

The head has the shape of the published ones and random weights. It reads, drafts and is verified as any head is, but
how many of its tokens are right is drawn by what others have published for chains (ull/native/testing/
replayed_acceptance.h). So these are times of this engine with acceptance of others' heads: label them so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from serving import told
from ull.client.protocol import Result
from ull.client.sync import Client

DRAFTER = "eagle"
SHORT, LONG = 3, 7  # drafted tokens of the chains that the tables are about
PROMPT_TOKENS = 128
NEW_TOKENS = 512
WARM_UP, PASSES = 2, 5  # replays of a text that the planner learns from, and those that count
# The head's scores are then so far apart that it drafts one chain, as deep as it is asked for.
TEMPERATURE = 0.02


@dataclass(frozen=True)
class Text:
    """A kind of text: tokens per round that were published for it (the target's own included), and limits in ms.

    `after_short` None: chains of three were not published.
    """

    name: str
    source: str
    after_short: float | None
    after_long: float
    must_ms: float
    goal_ms: float

    def chances(self) -> list[float]:
        """[LONG] by depth: that a token is right if all before it are. They give both published figures."""
        if self.after_short is None:
            return [_solve(lambda chance: tokens_per_round([chance] * LONG), self.after_long)] * LONG
        first = [_solve(lambda chance: tokens_per_round([chance] * SHORT), self.after_short)] * SHORT
        rest = _solve(lambda chance: tokens_per_round(first + [chance] * (LONG - SHORT)), self.after_long)
        return first + [rest] * (LONG - SHORT)


# SpecBundle's heads, greedy: Llama-3.1-8B, and for finance, which only it has, Llama-3.3-70B.
TEXTS = (
    Text("code", "HumanEval, SpecBundle EAGLE-3 for Llama-3.1-8B", 3.34, 4.91, 0.75, 0.6),
    Text("chat", "MT-Bench, SpecBundle EAGLE-3 for Llama-3.1-8B", 2.90, 3.86, 0.95, 0.8),
    Text("finance", "FinanceQA, SpecBundle EAGLE-3 for Llama-3.3-70B", None, 2.45, 1.5, 1.4),
)


def tokens_per_round(chances: Sequence[float]) -> float:
    """What a round emits on average: the target's own token, and those of the chain up to the first that is wrong."""
    return 1.0 + float(np.cumprod(chances).sum())


def _solve(rising: Callable[[float], float], value: float) -> float:
    """Where in [0, 1] a rising function has a value. Raises ValueError where it nowhere has."""
    low, high = 0.0, 1.0
    if not rising(low) <= value <= rising(high):
        raise ValueError(f"{value} is not within {rising(low)} and {rising(high)}")
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2


@contextmanager
def replaying(bundle: Path, **options: Any) -> Iterator[Client]:
    """A client of a daemon whose head is replayed. `options`: DaemonProcess's."""
    tables = {DRAFTER: [text.chances() for text in TEXTS]}
    with told(bundle, {"replayed_acceptance": tables}, **options) as client:
        yield client


def replay(
    client: Client, number: int, vocabulary: int, tokens: int = NEW_TOKENS, passes: int = PASSES, **request: Any
) -> dict[str, Any]:
    """TEXTS[number] with the head and without, by turns. `request`: options of its requests.

    The first request is the one whose answer the others replay. Raises RuntimeError if an answer differs.
    """
    text = TEXTS[number]
    prompt = np.random.default_rng(number).integers(3, vocabulary, PROMPT_TOKENS).tolist()

    def answer(drafter: str) -> Result:
        options: dict[str, Any] = {"temperature": TEMPERATURE, "seed": number, "ignore_eos": True, **request}
        return client.generate(prompt, max_tokens=tokens, speculate=drafter, **options).result()

    expected = answer(DRAFTER).token_ids
    for _ in range(WARM_UP):
        answer(DRAFTER)
    times: dict[str, list[float]] = {DRAFTER: [], "none": []}
    rounds = drafted = 0
    by_depth = np.zeros(LONG, np.int64)
    for _ in range(passes):
        for drafter, of_drafter in times.items():
            result = answer(drafter)
            if result.token_ids != expected:
                raise RuntimeError(f"{text.name}: the answer with {drafter} is not the one before")
            elapsed_ns = result.timeline.last_token_ns - result.timeline.first_token_ns
            of_drafter.append(elapsed_ns / 1e6 / (len(result.token_ids) - 1))
            if drafter == DRAFTER:
                accepted = np.array(result.speculation.accepted_by_depth, np.int64)
                by_depth[: len(accepted)] += accepted
                rounds += result.speculation.rounds
                drafted += result.speculation.drafted_tokens
    with_head, without = (float(np.median(of_drafter)) for of_drafter in times.values())
    return {
        **asdict(text),
        "chances": text.chances(),
        "tokens_per_round": passes * len(expected) / rounds,
        "drafted_per_round": drafted / rounds,
        "accepted_by_depth": by_depth.tolist(),
        "rounds": rounds,
        "ms_per_token": with_head,
        "ms_per_token_without": without,
        "slowest_ms_per_token": max(times[DRAFTER]),
        "passes": passes,
        "tokens": len(expected),
    }
