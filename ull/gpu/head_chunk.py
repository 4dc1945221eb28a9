"""What chunks of a prompt are to heads with a cache of their own: the launches that EAGLE and DFlash heads share.

    begin, taps, fc, .., { kv, store }, .., accept

Nothing is drawn, and what is kept is keys and values alone: no queries, no attention, and nothing behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ull.bundle import DEVICE_STEP, round_up
from ull.gpu.chunk import product, store
from ull.gpu.launch import Launch
from ull.gpu.memory import CHUNK, CHUNK_QKV, CHUNK_STATES, CHUNK_TAPS, Sizes
from ull.gpu.params import CHUNK_TOKENS, ChunkLinearParams
from ull.gpu.places import Places
from ull.gpu.rounds import Rounds


@dataclass(frozen=True)
class KvWeights:
    """The last rows of a layer's qkv: device addresses of what the kernels read."""

    rows: int
    weights: int
    scale: int
    bias: int | None

    @classmethod
    def of(cls, sizes: Sizes, places: Places, layer: int, columns: int) -> KvWeights:
        """Those of keys and values of a matrix of that many columns."""
        name, queries = f"layers.{layer}.qkv", sizes.attention_width
        bits = {"fp8": 8, "bf16": 16}[sizes.precision.weights]
        weights, scale, bias = (places.tensor(f"{name}.{kind}") for kind in ("weight", "scale", "bias"))
        assert weights is not None and scale is not None
        return cls(
            sizes.qkv_width - queries,
            weights + queries * round_up(columns, DEVICE_STEP) * bits // 8,
            scale + 4 * queries,
            None if bias is None else bias + 4 * queries,
        )


class HeadChunk:
    """Builds them. `kind`: "eagle" or "dflash", as its kernels are named."""

    def __init__(self, kind: str, sizes: Sizes, places: Places, rounds: Rounds, multiprocessors: int) -> None:
        self._kind, self._sizes, self._places, self._rounds = kind, sizes, places, rounds
        self._multiprocessors = multiprocessors

    def launches(
        self, layers: Sequence[int], held: Sequence[int], between: Launch, activations: str, columns: int
    ) -> list[Launch]:
        """`layers`, `held`: see `Rounds.taps`. `between`: what makes of the hidden state of each position, which lies
        in `CHUNK_STATES`, what the head's layers take: a region with activations of that many columns.
        """
        taps = self._rounds.taps(f"ull_{self._kind}_chunk_taps", layers, held, CHUNK_TOKENS, CHUNK_TAPS, chunk=True)
        of_layers = (self._keys_and_values(layer, activations, columns) for layer in range(self._sizes.model.layers))
        return [
            self._rounds.begin(chunk=True),
            taps,
            self._fc(),
            between,
            *(launch for launches in of_layers for launch in launches),
            *self._rounds.closing(1, draws=False),  # keys and values are in the pages: nothing is committed
        ]

    def _fc(self) -> Launch:
        region, tensor = self._places.region, self._places.tensor
        params = ChunkLinearParams(
            chunk=region(CHUNK),
            weights=tensor("fc.weight"),
            scale=tensor("fc.scale"),
            bias=tensor("fc.bias"),
            activations=region(CHUNK_TAPS),
            output=region(CHUNK_STATES),
        )
        return product(f"ull_{self._kind}_chunk_fc", self._sizes.model.hidden, self._multiprocessors, params)

    def _keys_and_values(self, layer: int, activations: str, columns: int) -> list[Launch]:
        """A layer's, into the pages."""
        region, sizes = self._places.region, self._sizes
        kv = KvWeights.of(sizes, self._places, layer, columns)
        params = ChunkLinearParams(
            chunk=region(CHUNK),
            weights=kv.weights,
            scale=kv.scale,
            bias=kv.bias,
            activations=region(activations),
            output=region(CHUNK_QKV) + 4 * sizes.attention_width,  # where store finds them
        )
        rows = product(f"ull_{self._kind}_chunk_kv", kv.rows, self._multiprocessors, params)
        return [rows, store(sizes, self._places, layer)]
