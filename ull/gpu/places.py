"""Where things lie on the device, for whoever builds launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ull.gpu.params import LinearParams


@dataclass(frozen=True)
class HostBlocks:
    """Device addresses of the mapped host blocks."""

    requests: int  # RoundRequest[ROUND_SLOTS]
    results: int  # RoundResult[ROUND_SLOTS]
    control: int  # HostControl
    pages: int  # int32 [table pages]
    text: int  # int32 [context]
    mask: int  # uint32 [vocabulary rounded up to MASK_TOKENS / 32]
    chunks: int = 0  # int32 [ROUND_SLOTS][CHUNK_TOKENS]; 0: prompts are not read in chunks


@dataclass(frozen=True)
class Places:
    """Where things lie on the device. `region` knows the arena's names, `tensor` the weights'; absent ones are None."""

    region: Callable[[str], int]
    tensor: Callable[[str], int | None]
    host: HostBlocks

    def linear(self, weights: str, activations: str, output: str) -> LinearParams:
        """Of a kernel that reads one region and writes another, by the tensors of that stem."""
        return LinearParams(
            round=self.region("round"),
            weights=self.tensor(f"{weights}.weight"),
            scale=self.tensor(f"{weights}.scale"),
            bias=self.tensor(f"{weights}.bias"),
            activations=self.region(activations),
            output=self.region(output),
        )
