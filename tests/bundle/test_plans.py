"""The manifest's account of forward sources: what it refuses, and what each leaves of speculation and caching."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from manifests import BUILT, plans
from ull.bundle import TOKEN_COUNTS, Forward


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_counts": [64, 1]}, "`token_counts` must ascend"),
        ({"token_counts": [1, 3, 64]}, "within 1, 2, 4"),
        ({"token_counts": [1, 2]}, "lacks 1 or 64"),
        ({"exact": [2]}, "`exact` must hold 1"),
        ({"token_counts": [1, 64], "exact": [1, 2]}, "nothing that `token_counts` lacks"),
        ({"files": ["code/plans/entry.plan", "elsewhere/head.plan"]}, "does not lie in code/plans"),
        ({"version": "eleven"}, "matching regex"),
        ({"check": {"tokens": 8}}, "missing required field"),
    ],
)
def test_what_the_account_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        plans(**changes)


def test_plans_go_with_tensorrt_and_with_nothing_else() -> None:
    for wrong in ({"prefill": "tensorrt"}, {"plans": BUILT}):
        with pytest.raises(msgspec.ValidationError, match="belong to a forward by tensorrt"):
            msgspec.convert(wrong, Forward)
    with pytest.raises(msgspec.ValidationError, match="both phases must be tensorrt"):
        msgspec.convert({"prefill": "tensorrt", "plans": {**BUILT, "attention": "native"}}, Forward)


EVERY = list(TOKEN_COUNTS)


@pytest.mark.parametrize(
    ("prefill", "decode", "changes", "reuse", "sizes"),
    [
        ("exact", "fused", None, "all", EVERY),
        ("tensorrt", "fused", {}, "prompt", EVERY),  # what decode wrote has other bits than a prefill's
        ("tensorrt", "fused", {"place_exact": False}, "nothing", EVERY),
        ("exact", "tensorrt", {"place_exact": False}, "prompt", [1, 2, 4]),
        ("tensorrt", "tensorrt", {}, "prompt", [1, 2, 4]),
        ("tensorrt", "tensorrt", {"exact": EVERY}, "all", EVERY),
        ("tensorrt", "tensorrt", {"exact": EVERY, "place_exact": False}, "nothing", EVERY),
        ("tensorrt", "tensorrt", {"attention": "native", "exact": [1]}, "nothing", [1]),
    ],
)
def test_speculation_and_caching_keep_to_what_is_bit_identical(
    prefill: Any, decode: Any, changes: dict[str, Any] | None, reuse: str, sizes: list[int]
) -> None:
    forward = Forward(prefill, decode, None if changes is None else plans(**changes))
    assert (forward.reuse, forward.tree_sizes) == (reuse, sizes)
