"""The suffix drafter beside the n-gram that it replaced: tokens per round, and times faster than none.

Each runs in a daemon of its own, without past outputs and with as many as a daemon keeps unless told. Past outputs
begin empty for each text. No prompt comes twice in the tokens per round; in the times it does, so that past outputs
hold the answer, and only the row without them says what the drafter knows of a new text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

import ull
from report import Check, arguments, finish
from serving import tiny_bundle, told
from speculation import (
    WIDEST_TREE,
    Workload,
    held_out_prompts,
    random_prompts,
    repeating_prompts,
    run,
)
from ull.client.benchmark import speculation_summary

TITLE = "suffixes"
UNSET = -1
# Name: whether n-gram drafts, and speculation.past_outputs.
DRAFTERS = {"n-gram": (True, 0), "suffix": (False, 0), "suffix, past outputs": (False, UNSET)}


@contextmanager
def daemon(ngram: bool, past_outputs: int, adaptive: bool) -> Iterator[ull.Client]:
    options = [
        "--set=engine.threads=1",
        f"--set=speculation.adaptive={str(adaptive).lower()}",
        f"--set=speculation.past_outputs={past_outputs}",
    ]
    with told(tiny_bundle(), {"ngram": ngram}, arguments=options) as client:
        yield client


def measure(workload: Workload, passes: int) -> dict[str, dict[str, Any]]:
    """By drafter: tokens per round of trees of WIDEST_TREE, and with `passes` > 0 the gain at the adaptive default."""
    rows: dict[str, dict[str, Any]] = {}
    for name, (ngram, past_outputs) in DRAFTERS.items():
        with daemon(ngram, past_outputs, adaptive=False) as client:
            full = run(client, workload, ("none", "suffix"), WIDEST_TREE, passes=1, warm_up=0)
        rows[name] = {**speculation_summary(full["suffix"].total), "differences": full["suffix"].differences}
        if passes:
            with daemon(ngram, past_outputs, adaptive=True) as client:
                adaptive = run(client, workload, ("none", "suffix"), passes=passes)
            rows[name]["gain"] = adaptive["none"].time_us() / adaptive["suffix"].time_us()
            rows[name]["differences"] += sum(series.differences for series in adaptive.values())
    return rows


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> Table:
    made = Table(title=f"{TITLE}: tokens per round in trees of {WIDEST_TREE}, and times faster than none when adaptive")
    made.add_column("text")
    for name in DRAFTERS:
        made.add_column(name, justify="right")
    for text, cells in rows.items():
        made.add_row(
            text, *(f"{cell['tokens_per_round']:.2f}  {cell.get('gain', float('nan')):.2f}x" for cell in cells.values())
        )
    return made


def bars(rows: dict[str, dict[str, dict[str, Any]]]) -> list[Check]:
    checks = [
        Check(
            "completions unlike none's",
            sum(cell["differences"] for row in rows.values() for cell in row.values()),
            "",
            0,
        )
    ]
    for text, row in rows.items():
        for name in list(DRAFTERS)[1:]:
            ratio = row[name]["tokens_per_round"] / row["n-gram"]["tokens_per_round"]
            checks.append(Check(f"{name} over n-gram, {text}", ratio, "tokens/round", must=1.0, at_least=True))
    return checks


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--passes", type=int, default=3, help="measured passes at the adaptive default; 0: none")
    options = parser.parse_args()
    with daemon(ngram=False, past_outputs=0, adaptive=True) as client:
        vocabulary = client.info().limits["vocabulary"]
    workloads = [
        Workload("held-out, greedy", held_out_prompts(), 0.0),
        Workload("held-out, T=0.8", held_out_prompts(), 0.8),
        Workload("repeated lines, greedy", repeating_prompts(), 0.0),
        Workload("unpredictable", random_prompts(vocabulary), 2.0),
    ]
    rows = {workload.name: measure(workload, options.passes) for workload in workloads}
    Console(width=118).print(table(rows))
    finish(TITLE, {"texts": rows}, bars(rows), options.json)


if __name__ == "__main__":
    main()
