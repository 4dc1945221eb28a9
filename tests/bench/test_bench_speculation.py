"""bench/speculation.py without its daemon: which text it measures on, how it adds up, and when a bar is missed."""

import sys

import pytest

from conftest import ROOT
from ull.wire import Speculation

sys.path.append(str(ROOT / "bench"))

import speculation
from speculation import LEARNED, PROMPTS, Series, Workload, bars, record

HELD_OUT = (ROOT / "engines/tiny/heldout.txt").read_text()


def test_held_out_prompts_end_where_a_block_ends() -> None:
    prompts = speculation.held_out_prompts()
    assert len(prompts) == len(set(prompts)) == PROMPTS
    for prompt in prompts:
        assert prompt.startswith(("def ", "class ", "@"))
        assert len(prompt) <= speculation.PROMPT_CHARACTERS
        rest = HELD_OUT[HELD_OUT.index(prompt) + len(prompt) :]
        assert rest.startswith("\n") and rest.lstrip("\n").startswith(("def ", "class ", "@"))


def test_repeating_prompts_repeat_a_held_out_line() -> None:
    for prompt in speculation.repeating_prompts():
        lines = prompt.split("\n")
        assert len(lines) == speculation.REPEATS and len(set(lines)) == 1
        assert lines[0] in HELD_OUT.splitlines()


def test_random_prompts_are_the_same_in_every_run() -> None:
    prompts = speculation.random_prompts(4096)
    assert prompts == speculation.random_prompts(4096)
    assert all(3 <= token < 4096 for prompt in prompts for token in prompt)


def series(us: float, tokens_per_round: float, drafter: str = "medusa", differences: int = 0) -> Series:
    total = Speculation(rounds=10, tokens_per_round=tokens_per_round, by_drafter={drafter: 10}, accepted_by_depth=[5])
    return Series(total=total, times_us={0: [us, us * 9, us], 1: [3 * us]}, differences=differences)


def test_a_time_is_the_mean_of_the_prompts_medians() -> None:
    assert series(10.0, 1.0).time_us() == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, set()),
        ({"differences": 1}, {"completions unlike none's"}),
        ({"medusa": 1.9}, {"medusa, held-out, greedy"}),
        ({"medusa": 1.6}, {"medusa, held-out, greedy", "medusa, held-out, T=0.8"}),
        ({"draft": 2.4}, {"draft, held-out, greedy"}),
        ({"suffix": 2.9}, {"suffix, repeated lines, greedy"}),
        ({"eagle": 2.9}, {"eagle, held-out, greedy"}),
        ({"dflash": 2.3}, {"dflash, held-out, greedy", "dflash, held-out, T=0.8"}),
        ({"slow": 10.4}, {"speed of auto, held-out, T=0.8", "speed of draft, held-out, T=0.8"}),
        ({"uncoupled": 0.41}, {"eagle, coupled"}),
    ],
)
def test_bars(change: dict[str, float], missed: set[str]) -> None:
    good = {"none": 1.0, "suffix": 3.1, "medusa": 2.1, "eagle": 3.1, "dflash": 3.2, "draft": 2.6, "auto": 3.0}
    samples: dict[str, object] = {}
    for name in ("held-out, greedy", "held-out, T=0.8", "repeated lines, greedy", "unpredictable"):
        rows = {}
        for drafter, tokens in good.items():
            slow = name == "held-out, T=0.8" and drafter in ("auto", "draft")
            us = 10.0 if drafter == "none" else change.get("slow", 10.2) if slow else 10.2
            differences = int(change.get("differences", 0)) if drafter == "draft" else 0
            rows[drafter] = series(us, change.get(drafter, tokens), drafter, differences)
        record(Workload(name, ["x"], 0.0), rows, samples)
    samples["full_trees"] = samples["rounds"]
    samples["first_accepted"] = {"eagle": [0.5, change.get("uncoupled", 0.39)], "medusa": [0.2, 0.18]}
    found = {check.name for check in bars(samples) if not check.ok}
    assert found == missed


def test_what_the_bundle_must_have_and_lacks_misses_its_bars() -> None:
    samples: dict[str, object] = {}
    for name in ("held-out, greedy", "held-out, T=0.8", "repeated lines, greedy", "unpredictable"):
        record(Workload(name, ["x"], 0.0), {"none": series(10.0, 1.0, "none"), "auto": series(10.0, 1.0)}, samples)
    samples["full_trees"] = samples["rounds"]
    samples["first_accepted"] = {}
    missed = [check.name for check in bars(samples) if not check.ok]
    assert len(missed) == 8 and {name.partition(",")[0] for name in missed} == {*LEARNED, "suffix"}
