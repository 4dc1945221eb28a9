"""The launches around a round's forward, in order, with every pointer: pure lists, testable without a driver.

    begin, embed, forward, sample*, accept, commit

A prefill leaves out the sampler.
"""

from __future__ import annotations

from ull.gpu.launch import Launch
from ull.gpu.launches import attention, sampling
from ull.gpu.memory import Sizes
from ull.gpu.params import AcceptParams, BeginParams, CommitParams, EmbedParams, SampleParams
from ull.gpu.places import Places


class Rounds:
    """Builds the launches around a forward: what starts a round, and what ends it."""

    def __init__(self, sizes: Sizes, places: Places, multiprocessors: int) -> None:
        self._sizes, self._places, self._multiprocessors = sizes, places, multiprocessors

    def opening(self, tokens: int) -> list[Launch]:
        """begin and embed."""
        region, host, sizes = self._places.region, self._places.host, self._sizes
        begin = BeginParams(
            round=region("round"),
            state=region("state"),
            requests=host.requests,
            control=host.control,
            host_pages=host.pages,
            pages=region("page table"),
            counters=region("counters"),
            counter_count=sizes.counter_count,
            page_capacity=sizes.table_pages,
        )
        embed = EmbedParams(
            round=region("round"), table=self._places.tensor("embed.weight"), residual=region("residual")
        )
        return [
            Launch("ull_begin", *sampling.begin(), begin),
            Launch("ull_embed", *sampling.embed(sizes.model.hidden, tokens), embed),
        ]

    def closing(self, tokens: int, draws: bool) -> list[Launch]:
        """The sampler, if the round `draws`; accept and commit."""
        return [*(self._sampler(tokens) if draws else ()), *self._ending()]

    def _sampler(self, tokens: int) -> list[Launch]:
        region, vocabulary = self._places.region, self._sizes.model.vocabulary
        params = SampleParams(
            round=region("round"),
            state=region("state"),
            logits=region("logits"),
            scratch=region("sampler"),
        )
        launches = []
        for kernel in sampling.SAMPLING:
            geometry = sampling.sample(kernel, vocabulary, tokens, self._multiprocessors)
            launches.append(Launch(kernel, *geometry, params))
        return launches

    def _ending(self) -> list[Launch]:
        region, sizes, host = self._places.region, self._sizes, self._places.host
        accept = AcceptParams(round=region("round"), state=region("state"), results=host.results)
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
        return [
            Launch("ull_accept", *sampling.accept(), accept),
            Launch("ull_commit", *attention.commit(sizes.model.kv_heads, sizes.model.layers), commit),
        ]
