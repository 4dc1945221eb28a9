"""Speculative decoding: what each drafter brings on the tiny engine, side by side with none, and that nobody can tell.

Everything goes through a daemon and `ull.Client`. For each prompt all drafters take turns, over several passes, so that
what else the machine does meets them alike; times are the engine's own clock. The cache holds all prompts, and each is
in it before its turns: who comes first would else read it for all. Every completion must be the one without
speculation, and on no text may a drafter cost time, asked for by name or not. The planner drafts what pays on this
machine; so the bars for tokens per round are for trees of 64 tokens in every round, which say what the drafters know.
A drafter that the bundle lacks misses its bars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import ull
from report import ROOT, Check, arguments, finish, percentiles
from serving import serve, tiny_bundle, told
from ull.client.benchmark import speculation_summary
from ull.daemon.metrics import added
from ull.wire import DRAFTERS, Speculation

HELD_OUT = ROOT / "engines/tiny/heldout.txt"
PROMPTS = 16  # per kind of text
PROMPT_CHARACTERS = 1200  # most of a held-out prompt, about 340 tokens
REPEATS = 8  # of a line, in the text that repeats its prompt
RANDOM_TOKENS = 64
NEW_TOKENS = 96
PASSES = 5  # measured, after one that is not: the planner learns acceptance as it goes
COUPLING_TEMPERATURES = (0.8, 1.0)
FIXED_TREES = (2, 16)  # tokens, the fed one included: a draft of one token, and a tree
WIDEST_TREE = 64
LEARNED = ("medusa", "eagle", "dflash", "draft")
# Tokens per round with the widest trees, by text: must and goal.
MOST_TOKENS: dict[str, dict[str, tuple[float, float | None]]] = {
    "medusa": {"held-out, greedy": (2.0, None), "held-out, T=0.8": (1.7, None)},
    "eagle": {"held-out, greedy": (3.0, 4.0), "held-out, T=0.8": (2.4, 3.0)},
    "dflash": {"held-out, greedy": (3.0, 4.5), "held-out, T=0.8": (2.4, 3.2)},
    "draft": {"held-out, greedy": (2.5, None)},
    "suffix": {"repeated lines, greedy": (3.0, None)},
}
LEAST_GAIN = (0.97, 1.0)  # must and goal of any drafter on any text, times faster than none
COUPLED = ("eagle", "dflash", "draft")  # Medusa's first token, too seldom right for that, has no bar
COUPLED_AT = 1.0  # temperature
COUPLED_POINTS = (10.0, 15.0)  # must and goal: more of the first drafted tokens accepted than uncoupled
# The cache holds all prompts; what others were answered is forgotten, since the passes repeat them.
SETTINGS = {"engine__threads": 1, "engine__kv_pages": 256, "speculation__past_outputs": 0}
TITLE = "speculation"

Prompt = str | list[int]


@dataclass(frozen=True)
class Workload:
    """One kind of text: its prompts, and how it is sampled."""

    name: str
    prompts: Sequence[Prompt]
    temperature: float


@dataclass
class Series:
    """What one drafter did on one workload."""

    total: Speculation = field(default_factory=Speculation)
    times_us: dict[int, list[float]] = field(default_factory=dict)  # prompt -> per token, one entry a pass
    differences: int = 0  # completions that are not those of "none"

    def time_us(self) -> float:
        """Microseconds per token: each prompt's median over the passes, the mean over the prompts."""
        return float(np.mean([np.median(times) for times in self.times_us.values()]))


def boundaries(text: str) -> list[int]:
    """Where a top-level function or class begins."""
    return [match.start() for match in re.finditer(r"^(?:def |class |@)", text, re.MULTILINE)]


def held_out_prompts() -> list[str]:
    """Beginnings of held-out text, from one top-level boundary to the end of the block before another."""
    text = HELD_OUT.read_text()
    starts = boundaries(text)
    prompts = []
    for end in starts:
        start = next((start for start in starts if end - start <= PROMPT_CHARACTERS), end)
        if end - start >= PROMPT_CHARACTERS // 4:
            prompts.append(text[start:end].rstrip("\n"))
    return spread(prompts)


def repeating_prompts() -> list[str]:
    """Held-out lines, each repeated: what follows is mostly the line again."""
    lines = [line for line in HELD_OUT.read_text().splitlines() if len(line.strip()) >= 12]
    return spread(["\n".join([line] * REPEATS) for line in lines])


def random_prompts(vocabulary: int) -> list[list[int]]:
    """Token ids without any sense."""
    generator = np.random.default_rng(0)
    return [generator.integers(3, vocabulary, RANDOM_TOKENS).tolist() for _ in range(PROMPTS)]


def spread(prompts: list[str]) -> list[str]:
    """PROMPTS of them, evenly from all of the text."""
    return [prompts[index * len(prompts) // PROMPTS] for index in range(PROMPTS)]


def run(
    client: ull.Client,
    workload: Workload,
    drafters: Sequence[str],
    max_tree: int | None = None,
    passes: int = PASSES,
    warm_up: int = 1,
    reader: str = "none",
) -> dict[str, Series]:
    """Every prompt with every drafter in turn, `passes` times after `warm_up` ones that are only compared.

    reader: the drafter of the request that reads a prompt for all. "auto": every head reads along, as where all
    requests speculate; else a head knows of a prompt what has not been cached without it.
    """
    series = {drafter: Series() for drafter in drafters}
    for number in range(warm_up + passes):
        for index, prompt in enumerate(workload.prompts):
            client.generate(prompt, max_tokens=1, speculate=reader).result()
            expected: list[int] | None = None
            for drafter in drafters:
                result = client.generate(
                    prompt,
                    max_tokens=NEW_TOKENS,
                    temperature=workload.temperature,
                    seed=index,
                    ignore_eos=True,
                    speculate=drafter,
                    max_tree=max_tree,
                ).result()
                expected = result.token_ids if expected is None else expected
                one = series[drafter]
                one.differences += result.token_ids != expected
                if number < warm_up:
                    continue
                elapsed_ns = result.timeline.last_token_ns - result.timeline.prefilled_ns
                one.times_us.setdefault(index, []).append(elapsed_ns / 1e3 / len(result.token_ids))
                one.total = added(one.total, result.speculation)
    return series


def gain(series: dict[str, Series], drafter: str) -> float:
    """How many times faster than "none"."""
    return series["none"].time_us() / series[drafter].time_us()


def record(workload: Workload, series: dict[str, Series], samples: dict[str, Any]) -> None:
    """Adds a workload's distributions and totals to the report."""
    for drafter, one in series.items():
        times = [time for times in one.times_us.values() for time in times]
        samples[f"{workload.name}, {drafter} (us/token)"] = percentiles(times)
        samples.setdefault("rounds", {}).setdefault(workload.name, {})[drafter] = {
            **speculation_summary(one.total),
            "us_per_token": one.time_us(),
            "gain": gain(series, drafter),
            "differences": one.differences,
        }


@contextmanager
def fixed_trees(coupled: bool) -> Iterator[ull.Client]:
    """A client of a daemon that drafts the widest tree allowed in every round, with or without the shared noise."""
    arguments = ["--set=engine.threads=1", "--set=speculation.adaptive=false"]
    with told(tiny_bundle(), {"coupled": coupled}, arguments=arguments) as client:
        yield client


def full_trees(workloads: Sequence[Workload], drafters: Sequence[str], samples: dict[str, Any]) -> Table:
    """Tokens per round where each round drafts as much as it may: what the drafters know, whatever it costs here."""
    table = Table(title=f"tokens per round, trees of {WIDEST_TREE} tokens in every round")
    table.add_column("text")
    for drafter in drafters:
        table.add_column(drafter, justify="right")
    with fixed_trees(coupled=True) as client:
        for workload in workloads:
            series = run(client, workload, drafters, WIDEST_TREE, passes=1, warm_up=0, reader="auto")
            row = {
                drafter: {**speculation_summary(one.total), "differences": one.differences}
                for drafter, one in series.items()
            }
            samples.setdefault("full_trees", {})[workload.name] = row
            table.add_row(workload.name, *(f"{cell['tokens_per_round']:.2f}" for cell in row.values()))
    return table


def coupling(drafters: Sequence[str], samples: dict[str, Any]) -> Table:
    """Acceptance with trees of one size, drafted with the target's noise and without (by the drafter's own argmax).

    samples["first_accepted"]: by drafter, how often the first token was at COUPLED_AT: coupled, uncoupled."""
    table = Table(title="coupled against uncoupled (argmax) drafting on held-out text, trees of a fixed size")
    for column, justify in (("drafter", "left"), ("T", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for size in FIXED_TREES:
        measure = "first token accepted" if size == 2 else f"tokens/round, {size}"
        for kind in ("coupled", "uncoupled"):
            table.add_column(f"{measure}, {kind}", justify="right")
    cells: dict[tuple[str, float], list[str]] = {}
    for size in FIXED_TREES:
        for coupled in (True, False):
            with fixed_trees(coupled) as client:
                for temperature in COUPLING_TEMPERATURES:
                    workload = Workload(f"T={temperature:g}", held_out_prompts(), temperature)
                    for drafter, one in run(
                        client, workload, drafters, size, passes=1, warm_up=0, reader="auto"
                    ).items():
                        total = one.total
                        accepted = total.accepted_tokens / max(1, total.drafted_tokens)
                        cell = f"{accepted:.1%}" if size == 2 else f"{total.tokens_per_round:.2f}"
                        cells.setdefault((drafter, temperature), []).append(cell)
                        if size == FIXED_TREES[0] and temperature == COUPLED_AT:
                            samples.setdefault("first_accepted", {}).setdefault(drafter, []).append(accepted)
                        key = f"{drafter}, {workload.name}, tree of {size}, {'' if coupled else 'un'}coupled"
                        samples.setdefault("coupling", {})[key] = speculation_summary(total)
    for (drafter, temperature), row in sorted(cells.items()):
        table.add_row(drafter, f"{temperature:g}", *row)
    return table


def rounds_table(samples: dict[str, Any], drafters: Sequence[str]) -> Table:
    """Tokens per round and gain of every drafter on every workload."""
    table = Table(title=f"{TITLE}: tokens per round, and times faster than none")
    table.add_column("text")
    for drafter in drafters:
        table.add_column(drafter, justify="right")
    for name, row in samples["rounds"].items():
        cells = [row.get(drafter) for drafter in drafters]
        table.add_row(name, *(f"{cell['tokens_per_round']:.2f}  {cell['gain']:.2f}x" if cell else "" for cell in cells))
    return table


def bars(samples: dict[str, Any]) -> list[Check]:
    """What the drafters must reach; one that the engine lacks counts as 0."""

    def least(name: str, value: float, unit: str, limits: tuple[float, float | None]) -> Check:
        return Check(name, value, unit, *limits, at_least=True)

    def tokens(drafter: str, text: str) -> float:
        return float(samples["full_trees"][text].get(drafter, {}).get("tokens_per_round", 0.0))

    rows = [row for kind in ("rounds", "full_trees") for text in samples[kind].values() for row in text.values()]
    return [
        Check("completions unlike none's", sum(row["differences"] for row in rows), "", must=0),
        *(
            least(f"{drafter}, {text}", tokens(drafter, text), "tokens/round", limits)
            for drafter, by_text in MOST_TOKENS.items()
            for text, limits in by_text.items()
        ),
        *(
            least(f"speed of {drafter}, {text}", row["gain"], "x none", LEAST_GAIN)
            for text, series in samples["rounds"].items()
            for drafter, row in series.items()
            if drafter != "none"
        ),
        *(
            least(f"{drafter}, coupled", 100 * (coupled - uncoupled), "points", COUPLED_POINTS)
            for drafter, (coupled, uncoupled) in samples["first_accepted"].items()
            if drafter in COUPLED
        ),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    samples: dict[str, Any] = {}
    with (
        serve(tiny_bundle(), **SETTINGS) as daemon,
        ull.Client(daemon.url) as client,
    ):
        info = client.info()
        drafters = [drafter for drafter in DRAFTERS if drafter in info.limits["drafters"]]
        samples["costs"] = {name: info.executor[name] for name in ("verify_ns", "draft_ns")}
        workloads = [
            Workload("held-out, greedy", held_out_prompts(), 0.0),
            Workload("held-out, T=0.8", held_out_prompts(), 0.8),
            Workload("repeated lines, greedy", repeating_prompts(), 0.0),
            Workload("unpredictable", random_prompts(info.limits["vocabulary"]), 2.0),
        ]
        for workload in workloads:
            record(workload, run(client, workload, drafters), samples)
    console = Console(width=118)
    console.print(rounds_table(samples, drafters))
    fixed = [drafter for drafter in drafters if drafter != "auto"]
    console.print(full_trees(workloads[:3], fixed, samples))
    console.print(coupling([drafter for drafter in LEARNED if drafter in drafters], samples))
    finish(TITLE, samples, bars(samples), options.json)


if __name__ == "__main__":
    main()
