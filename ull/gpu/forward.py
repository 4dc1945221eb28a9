"""A forward source: what lies between a round's embedding and its sampler. Our kernels, or what captures itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ull.gpu.launch import Launch


class Recorder(Protocol):
    """Where a forward is captured."""

    def launch(self, launch: Launch) -> None:
        """Captures one of our kernels behind what has been captured so far."""

    def enqueue(self, work: Callable[[int], None]) -> None:
        """Captures what `work` does on the capturing stream (CUstream): work that is not a launch of ours."""


class ForwardSource(Protocol):
    """Turns the residual [tokens, H] f32 after the embedding into the logits [tokens, V] f32.

    Keys and values of the round's nodes go to the tree scratch, as `ull/kernels/params.h` says, and in a graph of one
    token straight to the page. A graph that only fills the KV cache `draws` nothing: it ends with the last layer.
    """

    name: str

    def launches(self, tokens: int, draws: bool) -> list[Launch]:
        """The launches of our kernels among it, for whoever has to prepare them."""

    def warm_up(self, tokens: int, draws: bool) -> None:
        """What must have happened before it can be captured."""

    def capture(self, recorder: Recorder, tokens: int, draws: bool) -> None:
        """Captures the forward of a round of up to `tokens` nodes (1 to 64)."""

    def abandon(self) -> None:
        """Never gives back what it holds of the device, not at the end either: a device that failed may not answer."""
