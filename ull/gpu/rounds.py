"""The launches around a round's forward, in order, with every pointer: pure lists, testable without a driver.

    begin, embed, forward, sample*, accept[, commit]
    begin, embed, forward, plain
    begin, embed, forward, bounds, rescore
    begin, start, block*, head, rank, accept
    begin, sample*, accept

A prefill leaves out the sampler, and a round of one token the commit: its attention writes to the page itself. The
second is a round of one token whose request filters nothing, the third the same with an FP8 scan in place of the
lm_head; the fourth runs the Medusa heads on what the last round left behind, the last draws again from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ull.bundle import HEAD_SCAN, MEDUSA, head_rows
from ull.gpu.geometry import attention, head_scan, linear, sampling
from ull.gpu.launch import Launch
from ull.gpu.memory import CHUNK, MEDUSA_STATES, TAP_RING, TAP_ROWS, Sizes
from ull.gpu.params import (
    MOST_TAPS,
    TREE_TOKENS,
    AcceptParams,
    BeginParams,
    ChunkTapsParams,
    CommitParams,
    EmbedParams,
    HeadScanParams,
    MedusaRankParams,
    MedusaStartParams,
    PlainParams,
    SampleParams,
    TapsParams,
)
from ull.gpu.places import Places

FULL, PLAIN, SCAN = "full", "plain", "scan"  # what a round's sampler can do, by the core's names
REDRAWS = (1, TREE_TOKENS)  # graphs that draw again: one draw under a mask, and so many wanted tokens
BURST_ROUNDS = 2  # of one token in one graph. A stop leaves at most these to be skipped, and then they cost the most


class Rounds:
    """Builds the launches around a forward: what starts a round, and what ends it.

    `target`: of a head, the model that it drafts for.
    """

    def __init__(self, sizes: Sizes, places: Places, multiprocessors: int, target: Places | None = None) -> None:
        self._sizes, self._places, self._multiprocessors = sizes, places, multiprocessors
        self._target = target

    def opening(self, tokens: int) -> list[Launch]:
        """begin and embed, which does not begin before begin has ended.

        That is what lets kernels behind embed read before they wait. embed's blocks start when begin has ended, and
        those of every kernel behind it after embed's have started. begin in turn has waited: the kernel before it,
        wherever that was captured, has ended, and so have all before that one, since each waits before it ends. So what
        begin, an earlier round of this graph or an earlier graph wrote is there when any block behind embed starts.
        """
        embed = EmbedParams(
            round=self._places.region("round"),
            table=self._places.tensor("embed.weight"),
            residual=self._places.region("residual"),
        )
        geometry = sampling.embed(self._sizes.model.hidden, tokens)
        return [self.begin(), Launch("ull_embed", *geometry, embed, overlaps=False)]

    def begin(self, chunk: bool = False) -> Launch:
        """What finds the round's request, or a `chunk`'s."""
        region, host, sizes = self._places.region, self._places.host, self._sizes
        begin = BeginParams(
            round=region("round"),
            state=region("state"),
            requests=host.requests,
            control=host.control,
            host_pages=host.pages,
            pages=region("page table"),
            counters=region("counters"),
            host_text=host.text,
            text=region("text"),
            text_counts=region("text counts"),
            host_mask=host.mask,
            mask=region("mask"),
            target=self._target and self._target.region("round"),
            target_state=self._target and self._target.region("state"),
            host_chunks=host.chunks if chunk else None,
            chunk=region(CHUNK) if chunk else None,
            counter_count=sizes.counter_count,
            page_capacity=sizes.table_pages,
            text_capacity=sizes.context,
        )
        return Launch("ull_begin_chunk" if chunk else "ull_begin", *sampling.begin(), begin)

    def taps(
        self, kernel: str, layers: Sequence[int], held: Sequence[int], entries: int, output: str, chunk: bool = False
    ) -> Launch:
        """A head's input: the target's taps of `layers`, out of `held`, which its ring has of a position.

        `chunk`: of a chunk's positions.
        """
        assert self._target is not None
        region, read = self._places.region, [held.index(layer) for layer in layers]
        kind, what = (ChunkTapsParams, region(CHUNK)) if chunk else (TapsParams, region("round"))
        params = kind(
            what,
            ring=self._target.region(TAP_RING),
            norm_weight=self._places.tensor("tap_norm"),
            output=region(output),
            ring_taps=len(held),
            taps=(*read, *[0] * (MOST_TAPS - len(read))),
        )
        # It reads the round as begin has left it, as embed does, and so do all behind it.
        return Launch(kernel, *linear.eagle_row(entries), params, overlaps=False)

    def closing(self, tokens: int, draws: bool, sampler: str = FULL) -> list[Launch]:
        """The sampler, if the round `draws`; accept; and for more than one token the commit.

        `PLAIN` and `SCAN` are for one.
        """
        if draws and sampler == PLAIN:
            return [self._plain()]
        if draws and sampler == SCAN:
            return self._rescore()
        sampled = self._sampler(tokens) if draws else []
        return [*sampled, self._accept(), *([self._commit()] if tokens > 1 else [])]

    def _plain(self) -> Launch:
        sizes, multiprocessors = self._sizes, self._multiprocessors
        (parts, _), _, _ = linear.head(sizes.model.vocabulary, 1, multiprocessors)
        params = PlainParams(
            sample=self._sample_params(),
            accept=self._accept_params(),
            counters=self._places.region("counters") + 4 * sizes.plain_counter,
            parts=parts,
        )
        return Launch(sampling.PLAIN, *sampling.plain(sizes.model.vocabulary, multiprocessors), params)

    def _rescore(self) -> list[Launch]:
        """What draws from the logits of the lm_head's FP8 copy, and accepts."""
        region, tensor, model = self._places.region, self._places.tensor, self._sizes.model
        params = HeadScanParams(
            round=region("round"),
            state=region("state"),
            weights=tensor("lm_head.weight"),
            scale=tensor("lm_head.scale"),
            bound=tensor(f"{HEAD_SCAN}.bound"),
            residual=region("residual"),
            norm_weight=tensor("norm"),
            logits=region("logits"),
            normed=region("normed"),
            scratch=region("sampler"),
            accept=self._accept_params(),
        )
        bounds = head_scan.bounds(model.vocabulary, self._multiprocessors)
        rescore = head_scan.rescore(model.hidden, model.vocabulary, self._multiprocessors)
        return [Launch("ull_head_bounds", *bounds, params), Launch("ull_head_rescore", *rescore, params)]

    def _sample_params(self) -> SampleParams:
        region = self._places.region
        return SampleParams(
            round=region("round"),
            state=region("state"),
            logits=region("logits"),
            scratch=region("sampler"),
            text_counts=region("text counts"),
            mask=region("mask"),
        )

    def _sampler(self, tokens: int) -> list[Launch]:
        vocabulary, params = self._sizes.model.vocabulary, self._sample_params()
        launches = []
        for kernel in sampling.SAMPLING:
            geometry = sampling.sample(kernel, vocabulary, tokens, self._multiprocessors)
            launches.append(Launch(kernel, *geometry, params))
        return launches

    def _commit(self) -> Launch:
        region, sizes, host = self._places.region, self._sizes, self._places.host
        commit = CommitParams(
            round=region("round"),
            pages=region("page table"),
            page_pool=region("KV pages"),
            tree_keys=region("tree keys"),
            tree_values=region("tree values"),
            results=host.results,
            counters=region("counters") + 4 * sizes.commit_counter,
            page_bytes=sizes.page_bytes,
        )
        if sizes.taps and sizes.eagle is None:
            commit.tapped, commit.tap_ring = region(TAP_ROWS), region(TAP_RING)
        return Launch("ull_commit", *attention.commit(sizes.model.kv_heads, sizes.model.layers), commit)

    def _accept_params(self) -> AcceptParams:
        region = self._places.region
        return AcceptParams(
            round=region("round"), state=region("state"), results=self._places.host.results, text=region("text")
        )

    def _accept(self) -> Launch:
        return Launch("ull_accept", *sampling.accept(), self._accept_params())

    def redraw(self, draws: int) -> list[Launch]:
        """Up to `draws` draws from the logits that the last round has left."""
        return [self.begin(), *self._sampler(draws), self._accept()]

    def medusa(self) -> list[Launch]:
        """What the Medusa heads say of the tokens that follow the last round's; ValueError without heads."""
        sizes, region = self._sizes, self._places.region
        if sizes.medusa is None:
            raise ValueError("the bundle holds no Medusa heads")
        start = MedusaStartParams(
            round=region("round"),
            state=region("state"),
            residual=region("residual"),
            norm_weight=self._places.tensor("norm"),
            normed=region(MEDUSA_STATES[0]),
        )
        rank = MedusaRankParams(
            round=region("round"),
            state=region("state"),
            logits=region("logits"),
            scratch=region("sampler"),
            text_counts=region("text counts"),
            counters=region("counters") + 4 * sizes.medusa_counter,
        )
        heads, model = sizes.medusa.heads, sizes.model
        own = sizes.medusa.version == "1"
        lm_head = f"{MEDUSA}lm_head" if own else "lm_head"
        rows = heads * head_rows(model) if own else model.vocabulary
        block = linear.medusa_block(model.hidden, heads, self._multiprocessors)
        head = linear.medusa_head(rows, self._multiprocessors)
        states = [MEDUSA_STATES[layer % 2] for layer in range(sizes.medusa.layers + 1)]
        return [
            self.begin(),
            Launch("ull_medusa_start", *linear.medusa_start(), start),
            *(
                Launch(
                    "ull_medusa_block",
                    *block,
                    self._places.linear(f"{MEDUSA}{layer}", states[layer], states[layer + 1]),
                )
                for layer in range(sizes.medusa.layers)
            ),
            Launch("ull_medusa_head", *head, self._places.linear(lm_head, states[-1], "logits")),
            Launch("ull_medusa_rank", *sampling.medusa_rank(model.vocabulary, heads, self._multiprocessors), rank),
            self._accept(),
        ]
