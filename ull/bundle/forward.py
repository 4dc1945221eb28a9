"""The manifest's account of forward sources: who computes prefill and decode, and the TensorRT plans that do.

A plan is bound to one version of TensorRT and one GPU model. Where its results differ in bits from those of another
source, or of itself for another number of tokens, speculation and caching keep away from it: see `Forward.reuse`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Source = Literal["fused", "tensorrt"]
PrefillSource = Literal["exact", "fast", "tensorrt"]
AttentionKind = Literal["paged", "native"]
Reuse = Literal["all", "prompt", "nothing"]
TreeProducts = Literal["warp", "warpgroup"]

PLANS_DIRECTORY: Final = "code/plans"
TOKEN_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)  # that graphs are captured for
MOST_TOKENS: Final = TOKEN_COUNTS[-1]
_NARROW: Final = 16  # the widest round of the first of two profiles

ENTRY_SEGMENT: Final = "entry"  # what comes before the first attention
EXIT_SEGMENT: Final = "exit"  # what comes after the last one
HEAD_SEGMENT: Final = "head"
STEP_SEGMENT: Final = "step"  # all layers, with TensorRT's own attention

Profile = tuple[int, int, int]  # least tokens, the number that kernels are chosen for, most tokens
ProfileScheme = Literal["two", "seven"]

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


def profile_of(tokens: int, profiles: Sequence[Profile]) -> int:
    """The number of the first profile for so many tokens. Raises ValueError where there is none."""
    for number, (least, _, most) in enumerate(profiles):
        if least <= tokens <= most:
            return number
    raise ValueError(f"no profile is for {tokens} tokens")


class PlanCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """Logits of the plans against others', on the GPU that built them: |difference| / |logits|, Frobenius norms.

    The CPU executor computes with the same FP8 activations, our kernels with 16-bit ones: what that alone makes of the
    logits, by the CPU executor, is `activation_error`. Weights that were made up are held against our kernels only.
    """

    tokens: Annotated[int, Meta(ge=1)]
    cpu_error: Annotated[float, Meta(ge=0.0)] | None
    cpu_top1: Share | None
    fused_error: Annotated[float, Meta(ge=0.0)] | None  # None: our kernels do not run there
    fused_top1: Share | None
    activation_error: Annotated[float, Meta(ge=0.0)] | None
    limit: Annotated[float, Meta(gt=0.0)]  # of cpu_error, and of fused_error beyond activation_error

    def __post_init__(self) -> None:
        errors = (self.fused_error, self.cpu_error, self.activation_error, self.limit)
        if not all(math.isfinite(error or 0.0) for error in errors):
            raise ValueError("errors must be finite")


class Plans(Struct, frozen=True, forbid_unknown_fields=True):
    """TensorRT plans, one per segment of the forward in order of execution.

    `profiles` are the optimisation profiles of each, in order; empty: one for each of `token_counts`. `sixteen_bits`
    are linears with FP8 weights that take 16-bit activations, because TensorRT's FP8 kernels for them proved wrong;
    `operands` are those whose product has other operands than it was given, and which, as TensorRT's inspector says.
    `exact` are the token counts whose logits were bit for bit those of one token at a time; `place_exact` says that a
    prompt token's were the same wherever in a chunk it stood. Both were seen on the GPU, by the build.
    """

    version: Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)+", max_length=64)]  # of TensorRT
    gpu: Annotated[str, Meta(min_length=1, max_length=128)]  # name
    capability: Annotated[str, Meta(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")]
    files: Annotated[list[str], Meta(min_length=2)]
    token_counts: Annotated[list[int], Meta(min_length=1)]
    scratch_bytes: Annotated[int, Meta(ge=0)]  # device memory that the largest plan needs while it runs
    exact: Annotated[list[int], Meta(min_length=1)]
    place_exact: bool
    attention: AttentionKind = "paged"
    resident_bytes: Annotated[int, Meta(ge=0)] = 0  # that TensorRT took to load them, as the build saw; 0: not seen
    check: PlanCheck | None = None
    profiles: list[Profile] = []
    sixteen_bits: list[str] = []
    operands: dict[str, str] = {}

    def profile_of(self, tokens: int) -> int:
        """The number of the profile for so many tokens. Raises ValueError where there is none."""
        return profile_of(tokens, self.profiles or [(count, count, count) for count in self.token_counts])

    def __post_init__(self) -> None:
        ascending = sorted(set(self.token_counts)) == self.token_counts
        if not ascending or not set(self.token_counts) <= set(TOKEN_COUNTS):
            raise ValueError("`token_counts` must ascend within 1, 2, 4, 8, 16, 32, 64")
        if not {1, MOST_TOKENS} <= set(self.token_counts):
            raise ValueError("`token_counts` lacks 1 or 64")
        if 1 not in self.exact or not set(self.exact) <= set(self.token_counts):
            raise ValueError("`exact` must hold 1 and nothing that `token_counts` lacks")
        if any(not 1 <= least <= best <= most for least, best, most in self.profiles):
            raise ValueError("a profile of `profiles` does not ascend")
        for count in self.token_counts:
            self.profile_of(count)
        for name in self.files:
            if not name.startswith(PLANS_DIRECTORY + "/"):
                raise ValueError(f"{name!r} does not lie in {PLANS_DIRECTORY}/")


class Forward(Struct, frozen=True, forbid_unknown_fields=True):
    """Who computes what lies between embedding and sampler, by phase.

    "fused" are our own kernels. They read "exact" prompts, which have the bits of rounds, and "fast" ones, with FP8
    activations in the linear layers: the bits are others. `tree_products`: who multiplies in our rounds of 16 and more
    tokens, each warp alone or the warpgroups of Hopper; the bits are the same.

    `notes`: what the build replaced or left out of what it was asked for, and why.
    """

    prefill: PrefillSource = "exact"
    decode: Source = "fused"
    plans: Plans | None = None
    notes: list[str] = []
    tree_products: TreeProducts = "warp"

    def __post_init__(self) -> None:
        if self.prefill == "fast" and self.decode != "fused":
            raise ValueError("fast prefill goes with decode by our own kernels")
        if self.tree_products == "warpgroup" and self.uses("tensorrt"):
            raise ValueError("products of warpgroups are for our own kernels alone: both phases must be theirs")
        if self.uses("tensorrt") != (self.plans is not None):
            raise ValueError("`plans` belong to a forward by tensorrt, and to no other")
        if self.plans is not None and self.plans.attention == "native" and self.uses("fused"):
            raise ValueError("native attention has a KV cache of its own: both phases must be tensorrt")

    @property
    def prefill_by(self) -> Source:
        """Who computes prompts."""
        return "tensorrt" if self.prefill == "tensorrt" else "fused"

    def uses(self, source: Source) -> bool:
        """Whether any phase is computed by it."""
        return source in (self.prefill_by, self.decode)

    @property
    def attention(self) -> AttentionKind | None:
        """Whose attention the plans have; None: there are no plans."""
        return None if self.plans is None else self.plans.attention

    @property
    def tree_sizes(self) -> list[int]:
        """Token counts of rounds that give the bits of plain decoding."""
        if self.decode == "fused" or self.plans is None:
            return list(TOKEN_COUNTS)
        return self.plans.exact

    @property
    def reuse(self) -> Reuse:
        """Of a finished request's keys and values, those whose bits a prefill of the same tokens would give."""
        plans = self.plans
        if self.prefill == "fast":
            return "prompt"
        if plans is None:
            return "all"
        if plans.attention == "native" or (self.prefill == "tensorrt" and not plans.place_exact):
            return "nothing"
        same = self.prefill == self.decode == "tensorrt" and MOST_TOKENS in plans.exact
        return "all" if same else "prompt"


FUSED = Forward()


def profile_scheme(scheme: ProfileScheme, decodes: bool, attention: AttentionKind) -> tuple[list[int], list[Profile]]:
    """Token counts of the graphs and the optimisation profiles behind them.

    "two": one for 1 to 16 tokens, whose kernels are chosen for 16, and one for 64. The weights are what such a round
    reads, however few tokens it has, so little is lost at one token; and rounds that share kernels may share bits,
    without which no tree is verified. "seven": one for each count. Plans that do not decode, or have TensorRT's own
    attention, get a profile for each of 1 and 64.
    """
    if not decodes or attention == "native":
        counts = [1, MOST_TOKENS]
    elif scheme == "two":
        narrow = [count for count in TOKEN_COUNTS if count <= _NARROW]
        return [*narrow, MOST_TOKENS], [(1, _NARROW, _NARROW), (MOST_TOKENS,) * 3]
    else:
        counts = list(TOKEN_COUNTS)
    return counts, [(count, count, count) for count in counts]


def segment_names(layers: int, attention: AttentionKind) -> list[str]:
    """The segments of a forward in order of execution; our attention runs before each but the first and the head."""
    if attention == "native":
        return [STEP_SEGMENT, HEAD_SEGMENT]
    return [ENTRY_SEGMENT, *(f"layer.{layer}" for layer in range(layers - 1)), EXIT_SEGMENT, HEAD_SEGMENT]


def cache_positions(context: int) -> int:
    """Positions of a native KV cache: a step that is not full writes rubbish behind its last token."""
    return context + MOST_TOKENS
