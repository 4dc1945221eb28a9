"""The manifest's account of forward sources: who computes prefill and decode, and the TensorRT plans that do.

A plan is bound to one version of TensorRT and one GPU model. Where its results differ in bits from those of another
source, or of itself for another number of tokens, speculation and caching keep away from it: see `Forward.reuse`.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Source = Literal["fused", "tensorrt"]
AttentionKind = Literal["paged", "native"]
Reuse = Literal["all", "prompt", "nothing"]

PLANS_DIRECTORY: Final = "code/plans"
TOKEN_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)  # that graphs are captured for
MOST_TOKENS: Final = TOKEN_COUNTS[-1]

ENTRY_SEGMENT: Final = "entry"  # what comes before the first attention
EXIT_SEGMENT: Final = "exit"  # what comes after the last one
HEAD_SEGMENT: Final = "head"
STEP_SEGMENT: Final = "step"  # all layers, with TensorRT's own attention

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class PlanCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """Logits of the plans against others', on the GPU that built them: |difference| / |logits|, Frobenius norms.

    The CPU executor computes with the same FP8 activations, our kernels with 16-bit ones: what that alone makes of the
    logits, by the CPU executor, is `activation_error`.
    """

    tokens: Annotated[int, Meta(ge=1)]
    cpu_error: Annotated[float, Meta(ge=0.0)]
    cpu_top1: Share
    fused_error: Annotated[float, Meta(ge=0.0)] | None  # None: our kernels do not run there
    fused_top1: Share | None
    activation_error: Annotated[float, Meta(ge=0.0)]
    limit: Annotated[float, Meta(gt=0.0)]  # of cpu_error, and of fused_error beyond activation_error

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.fused_error or 0.0, self.cpu_error, self.activation_error, self.limit))):
            raise ValueError("errors must be finite")


class Plans(Struct, frozen=True, forbid_unknown_fields=True):
    """TensorRT plans, one per segment of the forward in order of execution; profile i is for `token_counts[i]`.

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

    def __post_init__(self) -> None:
        ascending = sorted(set(self.token_counts)) == self.token_counts
        if not ascending or not set(self.token_counts) <= set(TOKEN_COUNTS):
            raise ValueError("`token_counts` must ascend within 1, 2, 4, 8, 16, 32, 64")
        if not {1, MOST_TOKENS} <= set(self.token_counts):
            raise ValueError("`token_counts` lacks 1 or 64")
        if 1 not in self.exact or not set(self.exact) <= set(self.token_counts):
            raise ValueError("`exact` must hold 1 and nothing that `token_counts` lacks")
        for name in self.files:
            if not name.startswith(PLANS_DIRECTORY + "/"):
                raise ValueError(f"{name!r} does not lie in {PLANS_DIRECTORY}/")


class Forward(Struct, frozen=True, forbid_unknown_fields=True):
    """Who computes what lies between embedding and sampler, by phase."""

    prefill: Source = "fused"
    decode: Source = "fused"
    plans: Plans | None = None

    def __post_init__(self) -> None:
        if self.uses("tensorrt") != (self.plans is not None):
            raise ValueError("`plans` belong to a forward by tensorrt, and to no other")
        if self.plans is not None and self.plans.attention == "native" and self.uses("fused"):
            raise ValueError("native attention has a KV cache of its own: both phases must be tensorrt")

    def uses(self, source: Source) -> bool:
        """Whether any phase is computed by it."""
        return source in (self.prefill, self.decode)

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
        if plans is None:
            return "all"
        if plans.attention == "native" or (self.prefill == "tensorrt" and not plans.place_exact):
            return "nothing"
        same = self.prefill == self.decode == "tensorrt" and MOST_TOKENS in plans.exact
        return "all" if same else "prompt"


FUSED = Forward()


def segment_names(layers: int, attention: AttentionKind) -> list[str]:
    """The segments of a forward in order of execution; our attention runs before each but the first and the head."""
    if attention == "native":
        return [STEP_SEGMENT, HEAD_SEGMENT]
    return [ENTRY_SEGMENT, *(f"layer.{layer}" for layer in range(layers - 1)), EXIT_SEGMENT, HEAD_SEGMENT]


def cache_positions(context: int) -> int:
    """Positions of a native KV cache: a step that is not full writes rubbish behind its last token."""
    return context + MOST_TOKENS
