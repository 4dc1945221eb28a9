"""The launches of a DFlash head's passes, in order, with every pointer.

    begin, taps, fc, norm, L x { kv, store }, accept, commit
    begin, taps, fc, norm, L x { kv, store }, accept
    begin, embed, L x { qkv, attention, o, gate_up, down }, head[, nodes][, rank], accept
    begin, nodes[, gate], markov, rank, accept

The first makes the context of up to 64 positions whose taps the ring holds, the second that of a chunk of a prompt. The
third is a block from the root on, whose entries' keys and values are not kept; it ranks what they say of each depth,
unless a Markov term has to be added first. That is the last one's, for nodes of a draft tree, which read the block's
logits and residual: nothing but another block may overwrite these.
"""

from __future__ import annotations

from collections.abc import Callable

from ull.bundle import DEVICE_TILE_ROWS, DflashHead
from ull.gpu.fused import FusedForward, Linears
from ull.gpu.geometry import chunk, linear, sampling
from ull.gpu.head_chunk import HeadChunk, KvWeights
from ull.gpu.launch import Launch
from ull.gpu.memory import (
    CHUNK,
    CHUNK_NORMED,
    CHUNK_STATES,
    DFLASH_FACTORS,
    DFLASH_GATE_INPUT,
    DFLASH_LOGITS,
    DFLASH_NODES,
    DFLASH_STATES,
    DFLASH_TAPS,
    Sizes,
)
from ull.gpu.params import (
    TREE_TOKENS,
    ChunkNormParams,
    DflashNodesParams,
    DflashRankParams,
    DflashStoreParams,
    LinearParams,
)
from ull.gpu.places import Places
from ull.gpu.rounds import Rounds

CONTEXT_ENTRIES = (8, TREE_TOKENS)  # of the two passes that make context
BLOCK_TILES = (8, 16, 32)  # the largest holds MAX_DFLASH_BLOCK


def _with_targets(head: DflashHead, own: Places, target: Places) -> Callable[[str], int | None]:
    """Where a tensor lies: embedding and lm_head are the target's unless the head has its own."""
    others = {"embed.": not head.own_embedding, "lm_head.": not head.own_lm_head}
    prefixes = tuple(prefix for prefix, is_targets in others.items() if is_targets)
    return lambda name: (target if name.startswith(prefixes) else own).tensor(name)


class DflashPasses:
    """Builds the passes of a head. `sizes` and `places` are its own, `target_sizes` and `target` the model's."""

    def __init__(
        self,
        head: DflashHead,
        sizes: Sizes,
        places: Places,
        target_sizes: Sizes,
        target: Places,
        multiprocessors: int,
    ) -> None:
        self._gated = head.markov > 0 and head.markov_kind == "gated"
        self._head, self._sizes, self._multiprocessors = head, sizes, multiprocessors
        self._target_sizes, self._target = target_sizes, target
        self._places = Places(places.region, _with_targets(head, places, target), places.host)
        self._rounds = Rounds(sizes, self._places, multiprocessors, target)
        self._forward = FusedForward(sizes, self._places, multiprocessors)

    def context(self, entries: int) -> list[Launch]:
        """Up to `entries`, one of `CONTEXT_ENTRIES`, from taps."""
        model = self._sizes.model
        linears = Linears(self._places, model.hidden, entries)
        fc = linear.eagle_fc(model.hidden, entries, self._multiprocessors)
        norm = linears.norm("hidden_norm", None, None)
        norm.params.residual = self._places.region(DFLASH_STATES)
        return [
            self._rounds.begin(),
            self._rounds.taps("ull_dflash_taps", self._head.taps, self._target_sizes.taps, entries, DFLASH_TAPS),
            linears.plain("dflash_fc", "fc", fc, DFLASH_TAPS, DFLASH_STATES),
            norm,
            *(launch for layer in range(model.layers) for launch in self._keys_and_values(layer, entries)),
            *self._rounds.closing(entries, False),
        ]

    def chunk(self) -> list[Launch]:
        """Context of up to `CHUNK_TOKENS` positions."""
        region, hidden = self._places.region, self._sizes.model.hidden
        params = ChunkNormParams(
            chunk=region(CHUNK),
            residual=region(CHUNK_STATES),
            norm_weight=self._places.tensor("hidden_norm"),
            normed=region(CHUNK_NORMED),
        )
        norm = Launch("ull_chunk_norm", *chunk.norm(hidden), params)
        shared = HeadChunk("dflash", self._sizes, self._places, self._rounds, self._multiprocessors)
        held = self._target_sizes.taps
        return shared.launches(self._head.taps, held, norm, CHUNK_NORMED, hidden)

    def block(self, tokens: int) -> list[Launch]:
        """Up to `tokens` entries, one of `BLOCK_TILES`."""
        head = self._head
        says_chance = head.confidence and not head.confidence_reads_markov
        return [
            *self._rounds.opening(tokens),
            *self._forward.launches(tokens, True),
            *([self._nodes(tokens, True)] if says_chance else []),
            *([] if head.markov else [self._rank("logits", tokens)]),
            self._rounds.closing(1, False)[0],
        ]

    def nodes(self) -> list[Launch]:
        """Up to `DFLASH_NODES` nodes, whose children are ranked by the last block; of a head with a Markov term."""
        return [
            self._rounds.begin(),
            self._nodes(DFLASH_NODES, False),
            *([self._gate()] if self._gated else []),
            self._markov(),
            self._rank(DFLASH_LOGITS, DFLASH_NODES),
            self._rounds.closing(1, False)[0],
        ]

    def _keys_and_values(self, layer: int, entries: int) -> list[Launch]:
        region, tensor, sizes = self._places.region, self._places.tensor, self._sizes
        model, name = sizes.model, f"layers.{layer}"
        rows = KvWeights.of(sizes, self._places, layer, model.hidden)
        linears = LinearParams(
            round=region("round"),
            weights=rows.weights,
            activations=region("normed"),
            partial=region("partial sums"),
        )
        store = DflashStoreParams(
            round=region("round"),
            partial=region("partial sums"),
            scale=rows.scale,
            bias=rows.bias,
            k_norm=tensor(f"{name}.k_norm"),
            rope=region("rope"),
            kv_scale=tensor(f"{name}.kv_scale"),
            tree_keys=region("tree keys") + layer * sizes.tree_bytes,
            tree_values=region("tree values") + layer * sizes.tree_bytes,
        )
        tile = max(entries, DEVICE_TILE_ROWS)
        kv = linear.dflash_kv(rows.rows, tile, self._multiprocessors)
        return [
            Launch(f"ull_dflash_kv_{tile}", *kv, linears),
            Launch("ull_dflash_store", *linear.dflash_store(model.kv_heads, model.head_dim, entries), store),
        ]

    def _nodes(self, rows: int, overlaps: bool) -> Launch:
        region, tensor, head = self._places.region, self._places.tensor, self._head
        params = DflashNodesParams(
            round=region("round"),
            residual=region("residual"),
            norm_weight=tensor("norm"),
            embedding=tensor("markov.embed"),
            confidence=tensor("confidence.weight"),
            confidence_bias=tensor("confidence.bias"),
            factors=region(DFLASH_FACTORS) if head.markov else None,
            gate_input=region(DFLASH_GATE_INPUT) if self._gated else None,
        )
        return Launch("ull_dflash_nodes", *linear.dflash_nodes(rows), params, overlaps=overlaps)

    def _gate(self) -> Launch:
        params = self._places.linear("markov.gate", DFLASH_GATE_INPUT, DFLASH_FACTORS)
        return Launch("ull_dflash_gate", *linear.dflash_markov(self._head.markov, self._multiprocessors), params)

    def _markov(self) -> Launch:
        params = self._places.linear("markov.head", DFLASH_FACTORS, DFLASH_LOGITS)
        params.residual = self._places.region("logits")
        geometry = linear.dflash_markov(self._sizes.model.vocabulary, self._multiprocessors)
        return Launch("ull_dflash_markov", *geometry, params)

    def _rank(self, logits: str, rows: int) -> Launch:
        region, sizes = self._places.region, self._sizes
        params = DflashRankParams(
            round=region("round"),
            state=self._target.region("state"),
            logits=region(logits),
            names=self._places.tensor("d2t"),
            text=self._target.region("text"),
            scratch=region("sampler"),
            text_counts=self._target.region("text counts"),
            counters=region("counters") + 4 * sizes.dflash_counter,
        )
        geometry = sampling.dflash_rank(sizes.model.vocabulary, rows, self._multiprocessors)
        return Launch("ull_dflash_rank", *geometry, params)
