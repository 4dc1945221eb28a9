"""bench/h200/replay.py on the tiny engine: what is replayed is what was published, and changes no token."""

import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "bench"))
sys.path.append(str(ROOT / "bench/h200"))

from replay import LONG, SHORT, TEXTS, Text, replay, replaying, tokens_per_round


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
def test_the_chances_of_a_text_give_what_was_published(text: Text) -> None:
    chances = text.chances()
    assert len(chances) == LONG and all(0 < chance < 1 for chance in chances)
    assert tokens_per_round(chances) == pytest.approx(text.after_long)
    if text.after_short is not None:
        assert tokens_per_round(chances[:SHORT]) == pytest.approx(text.after_short)


def test_tokens_per_round() -> None:
    assert tokens_per_round([]) == 1.0
    assert tokens_per_round([0.5, 0.5]) == 1.75
    assert tokens_per_round([1.0] * 3) == 4.0


@pytest.mark.parametrize(("after_short", "after_long"), [(None, 8.5), (4.5, 5.0), (3.0, 2.9), (None, 0.9)])
def test_what_no_chain_can_reach_is_refused(after_short: float | None, after_long: float) -> None:
    with pytest.raises(ValueError, match="is not within"):
        Text("x", "nowhere", after_short, after_long, 1.0, 1.0).chances()


def test_a_head_is_right_as_often_as_its_table_says_and_changes_no_token(tiny_bundle: Path) -> None:
    always = ["--set=engine.threads=1", "--set=speculation.adaptive=false"]
    with replaying(tiny_bundle, arguments=always) as client:
        for number, text in enumerate(TEXTS):
            found = replay(client, number, vocabulary=4096, tokens=150, passes=4, max_tree=LONG + 1)
            accepted = np.array([found["rounds"], *found["accepted_by_depth"]])
            for depth, chance in enumerate(text.chances(), start=1):
                reached = accepted[depth - 1]
                if reached < 60:  # what is deeper is not always drafted
                    break
                deviation = np.sqrt(chance * (1 - chance) / reached)
                assert accepted[depth] / reached < chance + 4 * deviation
                # A round without a draft, or with a shallow one, has nothing there that could be right.
                assert accepted[depth] / reached > 0.7 * chance - 4 * deviation
            assert found["tokens_per_round"] == pytest.approx(4 * 150 / found["rounds"])
            assert 1.5 < found["tokens_per_round"] < 1.25 * text.after_long
