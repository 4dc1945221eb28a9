"""The launches of an EAGLE-3 head's passes, in order, with every pointer.

    begin, taps, fc, input, qkv, attention, accept, commit
    begin, taps, fc, input, kv, store, accept
    begin, taps, fc, input, qkv, attention, o, gate_up, down, head, rank, accept, commit
    begin, input, qkv, attention, o, gate_up, down, head, rank, accept

A fill reads up to 64 entries whose taps the ring holds, and a chunk's graph those of a chunk of a prompt: what is kept
of them is keys and values, which of a layer alone need nothing that comes behind its qkv. (Of a fill, attention is what
stores them.) A proposal begins with a first pass of up to 8 of those, behind the last of which the candidates of depth
1 are ranked. Each level repeats these entries and what it has drafted so far, and ranks what follows its newest
entries: so an entry keeps its number, and nothing but the residual that left the layer, row by row, is carried from one
pass to the next.
"""

from __future__ import annotations

from ull.bundle import EagleHead
from ull.gpu.fused import FusedForward
from ull.gpu.geometry import linear, sampling
from ull.gpu.head_chunk import HeadChunk
from ull.gpu.launch import Launch
from ull.gpu.memory import (
    CHUNK,
    CHUNK_INPUT,
    CHUNK_STATES,
    EAGLE_INPUT,
    EAGLE_STATES,
    EAGLE_TAPS,
    EAGLE_WIDTH,
    TAP_ROWS,
    Sizes,
)
from ull.gpu.params import CHUNK_TOKENS, TREE_TOKENS, ChunkEagleInputParams, EagleInputParams, EagleRankParams
from ull.gpu.places import Places
from ull.gpu.rounds import Rounds

FIRST_ENTRIES = 8  # most entries of a first pass, and of the levels behind it those that are not drafted
LEVEL_TILES = (16, 32, TREE_TOKENS)


class EagleForward(FusedForward):
    """The head's layer: like any other, but for what its qkv reads."""

    def layer(self, tokens: int) -> list[Launch]:
        """From the layer's input to the residual."""
        return self._layer(0, tokens)

    def keys_and_values(self, tokens: int) -> list[Launch]:
        """From the layer's input to its keys and values, which attention stores."""
        return self._attended(0, tokens)

    def fc(self, tokens: int) -> Launch:
        """Hidden states of entries that have taps; `tokens` 8 or 64."""
        geometry = linear.eagle_fc(self._sizes.model.hidden, tokens, self._multiprocessors)
        return self._linears(tokens).plain("eagle_fc", "fc", geometry, EAGLE_TAPS, EAGLE_STATES)

    def _qkv(self, layer: int, tokens: int) -> list[Launch]:
        linears = self._linears(tokens)
        geometry = linear.alone(linear.qkv(self._sizes.qkv_width, linears.tile, self._multiprocessors))
        return [linears.plain("eagle_qkv", f"layers.{layer}.qkv", geometry, EAGLE_INPUT, "qkv")]


class EaglePasses:
    """Builds the passes of a head. `sizes` and `places` are its own, `target_sizes` and `target` the model's."""

    def __init__(
        self,
        head: EagleHead,
        sizes: Sizes,
        places: Places,
        target_sizes: Sizes,
        target: Places,
        multiprocessors: int,
    ) -> None:
        self._head, self._sizes, self._places, self._multiprocessors = head, sizes, places, multiprocessors
        self._target_sizes, self._target = target_sizes, target
        self._rounds = Rounds(sizes, places, multiprocessors, target)
        self._forward = EagleForward(sizes, places, multiprocessors)

    def fill(self) -> list[Launch]:
        """Up to 64 entries from taps."""
        return [
            *self._from_taps(TREE_TOKENS),
            *self._forward.keys_and_values(TREE_TOKENS),
            *self._rounds.closing(TREE_TOKENS, False),
        ]

    def chunk(self) -> list[Launch]:
        """Up to `CHUNK_TOKENS` entries from taps."""
        region, tensor = self._places.region, self._places.tensor
        params = ChunkEagleInputParams(
            chunk=region(CHUNK),
            table=self._embedding(),
            states=region(CHUNK_STATES),
            embedding_norm=tensor("layers.0.attn_norm"),
            hidden_norm=tensor("layers.0.hidden_norm"),
            input=region(CHUNK_INPUT),
        )
        of_entries = Launch("ull_eagle_chunk_input", *linear.eagle_row(CHUNK_TOKENS), params)
        shared = HeadChunk("eagle", self._sizes, self._places, self._rounds, self._multiprocessors)
        held = self._target_sizes.taps
        return shared.launches(self._head.taps, held, of_entries, CHUNK_INPUT, 2 * self._sizes.model.hidden)

    def first(self) -> list[Launch]:
        """The entries that begin a proposal, of which the last is ranked."""
        tokens = FIRST_ENTRIES
        layer = [*self._forward.layer(tokens), *self._forward.logits(tokens)]
        return [*self._from_taps(tokens), *layer, self._rank(), *self._rounds.closing(tokens, False)]

    def level(self, tokens: int) -> list[Launch]:
        """All entries of a proposal so far, up to one of `LEVEL_TILES`, of which the newest are ranked."""
        layer = [*self._forward.layer(tokens), *self._forward.logits(tokens)]
        return [
            self._rounds.begin(),
            self._input(tokens, False),
            *layer,
            self._rank(),
            self._rounds.closing(1, False)[0],
        ]

    def _from_taps(self, tokens: int) -> list[Launch]:
        taps = self._rounds.taps("ull_eagle_taps", self._head.taps, self._target_sizes.taps, tokens, EAGLE_TAPS)
        return [self._rounds.begin(), taps, self._forward.fc(tokens), self._input(tokens, True)]

    def _embedding(self) -> int | None:
        return (self._places if self._head.own_embedding else self._target).tensor("embed.weight")

    def _input(self, tokens: int, overlaps: bool) -> Launch:
        region, tensor = self._places.region, self._places.tensor
        params = EagleInputParams(
            round=region("round"),
            table=self._embedding(),
            states=region(EAGLE_STATES),
            outputs=region(TAP_ROWS),
            embedding_norm=tensor("layers.0.attn_norm"),
            hidden_norm=tensor("layers.0.hidden_norm"),
            output_norm=tensor("norm"),
            input=region(EAGLE_INPUT),
            residual=region("residual"),
        )
        return Launch("ull_eagle_input", *linear.eagle_row(tokens), params, overlaps=overlaps)

    def _rank(self) -> Launch:
        region, sizes = self._places.region, self._sizes
        params = EagleRankParams(
            round=region("round"),
            state=self._target.region("state"),
            logits=region("logits"),
            names=self._places.tensor("d2t"),
            scratch=region("sampler"),
            text_counts=self._target.region("text counts"),
            counters=region("counters") + 4 * sizes.eagle_counter,
        )
        geometry = sampling.eagle_rank(sizes.model.vocabulary, EAGLE_WIDTH, self._multiprocessors)
        return Launch("ull_eagle_rank", *geometry, params)
