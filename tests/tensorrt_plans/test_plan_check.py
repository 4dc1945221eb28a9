"""What the build makes of its plans' logits: which rounds count as exact, and when it refuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from manifests import plans
from ull.bundle import Bundle, Forward
from ull_build.tensorrt import check
from ull_build.tensorrt.plans import PlansFailed

TOKENS = list(range(check.CHECK_TOKENS))
TRUE = np.random.default_rng(0).standard_normal((check.CHECK_TOKENS, 50)).astype(np.float32)


def seen(logits: Any) -> check.Seen:
    return check.Seen(logits, logits[: check.EXACT_TOKENS], [1], True, 0)


Played = Callable[[int, int], Any]  # (size, start) -> added to the logits


@pytest.fixture
def observe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., check.Seen]:
    """observe(played): what is seen of plans whose logits differ from TRUE by what `played` adds."""

    def run(played: Played, tokens: list[int] = TOKENS) -> check.Seen:
        class Program:
            def replay(self) -> Any:
                return self

            def logits(self, tokens: Sequence[int], start: int = 0, size: int = 64) -> Any:
                assert list(tokens) == TOKENS[start : start + len(tokens)]
                return TRUE[start : start + len(tokens)] + np.float32(played(size, start))

            resident_bytes = 7

            def close(self) -> None: ...

        def opened(bundle: Bundle) -> Program:
            assert bundle.manifest.forward.tree_sizes == plans().token_counts
            return Program()

        monkeypatch.setattr(check, "_open", opened)
        manifest: Any = type("M", (), {"forward": Forward("tensorrt", "fused", plans())})()
        monkeypatch.setattr(check, "with_forward", lambda bundle, forward: _with(bundle, forward))
        return check.observe_plans(Bundle(None, manifest, {}, ""), tokens)  # type: ignore[arg-type]

    def _with(bundle: Bundle, forward: Forward) -> Bundle:
        bundle.manifest.forward = forward  # type: ignore[misc]
        return bundle

    return run


def test_rounds_with_other_bits_are_left_out(observe: Callable[..., check.Seen]) -> None:
    every = [1, 2, 4, 8, 16, 32, 64]
    for played, exact, place_exact in (
        (lambda size, start: 0.0, every, True),
        (lambda size, start: 1e-6 if size in (4, 64) else 0.0, [1, 2, 8, 16, 32], True),
        (lambda size, start: 1e-6 if start else 0.0, every, False),
    ):
        seen = observe(played)
        assert (seen.exact, seen.place_exact) == (exact, place_exact)


def references(fp8: float = 0.0, fused: float | None = 0.0) -> check.References:
    """TRUE with noise of a share of its size."""
    noise = np.random.default_rng(1).standard_normal(TRUE.shape).astype(np.float32)
    return check.References(TRUE, TRUE + fp8 * noise, None if fused is None else TRUE + fused * noise)


def test_made_up_weights_are_held_against_our_kernels_alone() -> None:
    made = check.check_plans(seen(TRUE), check.References(None, None, references(fused=0.1).fused), 0.25)
    assert made.cpu_error is None and made.activation_error is None
    assert made.fused_error == pytest.approx(0.1, rel=0.1)
    with pytest.raises(PlansFailed, match=r"(28|29|30)\.\d% off our kernels'; the limit is 25%"):
        check.check_plans(seen(TRUE), check.References(None, None, references(fused=0.3).fused), 0.25)


def test_what_fp8_activations_cost_is_not_the_plans_fault() -> None:
    made = check.check_plans(seen(references(fp8=0.15).fp8), references(fp8=0.15), 0.1)
    assert made.cpu_error == 0.0 and made.cpu_top1 == 1.0
    assert made.fused_error == pytest.approx(made.activation_error, rel=1e-3) and made.activation_error > made.limit


@pytest.mark.parametrize(
    ("logits", "against", "words"),
    [
        (
            TRUE * 1.2,
            references(),
            "20.0% off the cpu executor's with the same FP8 activations, 20.0% off our kernels'",
        ),
        (TRUE, references(fused=0.3), "off our kernels'; the limit is 10%"),
        (TRUE + np.float32(0.5), references(fused=None), "FP8 activations; the limit is 10%"),
        (TRUE * np.float32("nan"), references(), "chosen an unstable FP8 kernel"),
    ],
)
def test_plans_that_are_further_off_fail_the_build(logits: Any, against: check.References, words: str) -> None:
    with pytest.raises(PlansFailed, match=words) as caught:
        check.check_plans(seen(logits), against, 0.1)
    assert caught.value.field == "forward"


def test_rounds_of_one_token_are_held_against_the_references_too() -> None:
    """TensorRT chooses its kernels for each number of tokens: the widest may be right and the plain round wrong."""
    wrong = np.roll(TRUE[: check.EXACT_TOKENS], 1, axis=1)
    with pytest.raises(PlansFailed, match="off the cpu executor's"):
        check.check_plans(check.Seen(TRUE, wrong, [1], True, 0), references(), 0.25)


def test_plans_that_do_not_repeat_themselves_fail_the_build(observe: Callable[..., check.Seen]) -> None:
    calls = iter(range(100))
    with pytest.raises(PlansFailed, match="other logits each time"):
        observe(lambda size, start: next(calls) * 1e-6)


def test_few_tokens_claim_nothing(observe: Callable[..., check.Seen]) -> None:
    assert check.enough_of([5, 6, 7], 7) == [5, 6, 7, 5, 6, 7, 5]
    assert len(check.enough_of(TOKENS, 4096)) == check.CHECK_TOKENS
    for count, exact, place_exact in ((10, [1], False), (64, [1, 2, 4, 8, 16, 32, 64], False), (81, None, True)):
        found = observe(lambda size, start: 0.0, TOKENS[:count])
        assert found.place_exact == place_exact and (exact is None or found.exact == exact)


def test_a_native_cache_knows_no_trees() -> None:
    seen = check.Seen(TRUE, TRUE, [1, 64], True, 7)
    assert check.with_findings(plans(token_counts=[1, 64], exact=[1], attention="native"), seen, None).exact == [1]
    assert check.with_findings(plans(token_counts=[1, 64], exact=[1]), seen, None).exact == [1, 64]
