"""A forward source: what lies between a round's embedding and its lm_head. Our kernels, or what captures itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ull.gpu.launch import Launch


@dataclass(frozen=True)
class Unfinished:
    """Partial sums that the next norm still has to add to the residual: `NormParams` says how. Device addresses."""

    partial: int
    scale: int | None
    bias: int | None
    unit: float


class Recorder(Protocol):
    """Where a forward is captured."""

    @property
    def stream(self) -> int:
        """The capturing stream (CUstream), for a source that enqueues its work by itself."""

    def launch(self, launch: Launch) -> None:
        """Captures one of our kernels behind what has been captured so far."""


class Forward(Protocol):
    """Turns the residual [tokens, H] f32 after the embedding into the one after the last layer, in place.

    Keys and values of the round's nodes go to the tree scratch, as `ull/kernels/params.h` says.
    """

    name: str

    def launches(self, tokens: int) -> list[Launch]:
        """The launches of our kernels among it, for whoever has to prepare them; empty for a foreign source."""

    def capture(self, recorder: Recorder, tokens: int) -> None:
        """Captures the forward of a round of up to `tokens` nodes (1 to 64)."""

    def unfinished(self, tokens: int) -> Unfinished | None:
        """What it leaves to the final norm; None: the residual is complete."""
