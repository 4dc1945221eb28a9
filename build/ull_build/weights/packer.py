"""What a target says about the weights that it stores: the contract between the loop over a checkpoint and packers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ull.bundle import DflashHead, EagleHead, MedusaHeads, Model, TensorShape
from ull_build.source.checkpoint import Checkpoint


@dataclass(frozen=True)
class PackedRows:
    """Rows [N, K] of a linear in stored form.

    `scales` and `bounds` [N] are what each row has besides, stored as tensors of their own; None: none. `restored`
    [N, K] is what the stored form stands for, against which the error is taken; None: it is exact, or never shows.
    """

    weights: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    bounds: NDArray[np.float32] | None = None
    restored: NDArray[np.float32] | None = None


class Packer(Protocol):
    """How a target stores the tensors of a model."""

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: a linear is made of whole ones."""

    @property
    def gate_rows(self) -> int:
        """So many rows of gate are followed by as many of up."""

    def tensors(self, model: Model) -> dict[str, TensorShape]:
        """The tensors of a model without what drafts for it, in the order of the file."""

    def medusa_tensors(self, model: Model, heads: MedusaHeads) -> dict[str, TensorShape]:
        """The tensors of its Medusa heads, in the order of the file."""

    def head_tensors(self, model: Model, head: EagleHead | DflashHead) -> dict[str, TensorShape]:
        """The tensors of a head that reads its hidden states, without their prefix, in the order of the file."""

    def for_draft(self) -> Packer:
        """The packer of a draft model, or a head, that stands in the same file."""

    def rows(
        self, stem: str, rows: NDArray[np.float32], dtype: str, stored: NDArray[np.uint8] | None = None
    ) -> PackedRows:
        """Whole tiles of the linear `stem`, which is stored as `dtype`; `stored`: see `complete_rows`."""

    def vector(self, name: str, values: NDArray[np.float32], shape: TensorShape) -> NDArray[Any]:
        """A vector in stored form, with zeros up to its stored length."""

    def own_values(self, checkpoint: Checkpoint, name: str) -> NDArray[np.float32] | None:
        """The values of a vector that only this target has; None for one of the checkpoint's."""
