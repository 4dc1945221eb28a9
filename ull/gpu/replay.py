"""Replays a loaded program's graphs one by one, without the core: for the build's checks and for benchmarks."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import round_up
from ull.errors import GpuError
from ull.gpu.driver import Driver
from ull.gpu.params import (
    CHUNK_TOKENS,
    CONTINUE,
    MEDUSA,
    OK,
    PREFILL,
    REDRAW,
    ROUND_SLOTS,
    TAKE,
    TREE_TOKENS,
    RoundRequest,
    RoundResult,
)
from ull.gpu.rounds import FULL

# A round that takes longer has hung. Under a tool that watches every access a round takes a hundred times as long.
PATIENCE_S = float(os.environ.get("ULL_PATIENCE_S", "20"))


class Replay:
    """Asks for rounds through the mapped host blocks of `handover` (see `ull.gpu.program`), of one session.

    `logits` is the device's [64, V rounded up to 16] f32. Raises GpuError for a round that fails or hangs.
    """

    def __init__(self, handover: Mapping[str, Any], driver: Driver, logits: int) -> None:
        self._handover, self._driver, self._logits = handover, driver, logits
        self._requests = (RoundRequest * ROUND_SLOTS).from_address(handover["requests"])
        self.results = (RoundResult * ROUND_SLOTS).from_address(handover["results"])
        self._chunks: Any = []
        self._all_chunks = bool(handover["chunk"]) and handover["chunk"] == handover["prefill"]
        if handover["chunk"]:
            self._chunks = ((ctypes.c_int32 * CHUNK_TOKENS) * ROUND_SLOTS).from_address(handover["chunks"])
        self._page_count = int(handover["page_count"])
        (ctypes.c_int32 * self._page_count).from_address(handover["pages"])[:] = list(range(self._page_count))
        self._stream = int(handover["stream"])
        self._sequence = 0
        self._setting = 0
        self._sampling: tuple[Any, ...] | None = None

    @property
    def context_tokens(self) -> int:
        return int(self._handover["context_tokens"])

    def launch(
        self,
        tokens: Sequence[int],
        position: int,
        mode: int = TAKE,
        parents: Sequence[int] | None = None,
        max_tokens: int = TREE_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = -1,
        size: int | None = None,
        forced: int = 0,
        sampler: str = FULL,
        wide: bool = False,
    ) -> int:
        """Launches a round and returns its sequence number. `parents` default to a chain.

        The first `forced` of a round's tokens, fewer than all, are accepted whatever is drawn behind them.

        `size` names the round's graph, which for a prefill fills the cache and leaves logits; default: the smallest
        that holds the tokens, or the prefill's own. CHUNK_TOKENS is that of a chunk, for a prefill of up to so many
        tokens, or for a round of them of which all but the last are forced. `sampler`: of a round of one token. `wide`:
        the graph for a long cache; KeyError where there is none.
        """
        self._sequence += 1
        request = self._requests[self._sequence % ROUND_SLOTS]
        count = len(tokens)
        sampling = (temperature, seed, top_logprobs)
        if sampling != self._sampling:
            self._sampling = sampling
            self._setting += 1
        request.sequence, request.mode, request.count = self._sequence, mode, count
        request.position, request.max_tokens, request.setting = position, max_tokens, self._setting
        request.page_count, request.stop_count, request.forced = self._page_count, 0, forced
        if size == CHUNK_TOKENS:
            self._chunks[self._sequence % ROUND_SLOTS][:count] = list(tokens)
        else:
            request.tokens[:count] = tokens
            request.parents[:count] = parents if parents is not None else [max(0, node - 1) for node in range(count)]
        request.sampling.temperature, request.sampling.top_p = temperature, 1.0
        request.sampling.seed, request.sampling.top_logprobs = seed, top_logprobs
        self._driver.replay(self._graph(count, mode, size, sampler, wide), self._stream)
        return self._sequence

    def medusa(self, position: int, **sampling: Any) -> int:
        """Launches the Medusa heads behind the last round, whose newest token stands at `position`."""
        return self.launch([0] * int(self._handover["medusa_heads"]), position, MEDUSA, **sampling)

    def redraw(self, node: int, position: int, allowed: Sequence[int], **sampling: Any) -> int:
        """Launches a draw behind a node of the last round, which stands at `position`, among the tokens `allowed`."""
        words = -(-int(self._handover["vocabulary"]) // 32)
        mask = (ctypes.c_uint32 * words).from_address(self._handover["mask"])
        mask[:] = [0] * words
        for token in allowed:
            mask[token // 32] |= 1 << token % 32
        return self.launch([-1], position, REDRAW, [node], **sampling)

    def score(self, tokens: Sequence[int], nodes: Sequence[int]) -> int:
        """Launches what says how likely each of up to TREE_TOKENS tokens is behind a node of the last round."""
        return self.launch(tokens, 0, REDRAW, nodes, size=TREE_TOKENS)

    def wait(self, sequence: int) -> RoundResult:
        """The result of a round, copied."""
        result = self.results[sequence % ROUND_SLOTS]
        deadline = time.monotonic() + PATIENCE_S
        while result.sequence != sequence:
            if time.monotonic() > deadline:
                raise GpuError("gpu_failed", f"round {sequence} did not answer within {PATIENCE_S:.0f} s")
        copy = RoundResult.from_buffer_copy(result)
        if copy.status != OK:
            raise GpuError("gpu_failed", f"round {sequence} answered status {copy.status}")
        return copy

    def drain(self) -> None:
        """Waits until the device has nothing left to do."""
        self._driver.synchronise(self._stream)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Puts tokens at positions 0, 1, ... into the cache, as the core does: in chunks where there are more than 64.

        Where the engine has no graph for chunks, 64 at a time; where it reads prompts fast, always in chunks.
        """
        for part in self.parts(len(tokens)):
            self.wait(self.launch_part(tokens, part))

    def parts(self, tokens: int, widest: int = CHUNK_TOKENS) -> Iterator[range]:
        """How a prompt of so many tokens is read: each part's positions, by one graph of at most `widest` tokens."""
        start, chunks = 0, bool(self._handover["chunk"]) and widest == CHUNK_TOKENS
        while start < tokens:
            most = CHUNK_TOKENS if chunks and tokens - start > TREE_TOKENS else TREE_TOKENS
            yield range(start, min(start + most, tokens))
            start += most

    def launch_part(self, tokens: Sequence[int], part: range, draws: bool = False) -> int:
        """Launches what reads these positions of a prompt, and returns its sequence number.

        `draws`: a chunk, and what follows its last token is drawn.
        """
        if draws:
            return self._launch_last(tokens[part.start : part.stop], part.start)
        size = CHUNK_TOKENS if self._all_chunks or len(part) > TREE_TOKENS else None
        return self.launch(tokens[part.start : part.stop], part.start, PREFILL, size=size)

    def decode(self, token: int, position: int, count: int, **sampling: Any) -> list[RoundResult]:
        """`count` plain rounds, each launched before the last one is read."""
        return self._decode(self.launch([token], position, TAKE, **sampling), position, count, **sampling)

    def answer(self, tokens: Sequence[int], start: int, count: int, **sampling: Any) -> list[RoundResult]:
        """The end of a prompt, from position `start` on, as a chunk that draws, and `count` - 1 plain rounds behind it.

        At most CHUNK_TOKENS tokens, of an engine whose "last_chunk" is not 0.
        """
        first = self._launch_last(tokens, start, **sampling)
        return self._decode(first, start + len(tokens) - 1, count, **sampling)

    def _launch_last(self, tokens: Sequence[int], start: int, **sampling: Any) -> int:
        """Launches a prompt's last chunk, which draws what follows."""
        return self.launch(tokens, start, TAKE, size=CHUNK_TOKENS, forced=len(tokens) - 1, max_tokens=1, **sampling)

    def _decode(self, first: int, position: int, count: int, **sampling: Any) -> list[RoundResult]:
        """The round `first`, whose last token stands at `position`, and `count` - 1 that continue it."""
        launched = [first]
        results = []
        for index in range(count):
            if index + 1 < count:
                launched.append(self.launch([0], position + index + 1, CONTINUE, **sampling))
            results.append(self.wait(launched[index]))
        return results

    def logits(
        self, tokens: Sequence[int], start: int = 0, size: int = TREE_TOKENS, in_chunks: bool = False
    ) -> NDArray[np.float32]:
        """Puts tokens at positions `start`, ... into the cache by rounds of `size`; their logits, [tokens, V].

        `in_chunks`: what a round has left is read once more as a chunk before the next one.
        """
        vocabulary = int(self._handover["vocabulary"])
        out = np.empty((len(tokens), round_up(vocabulary, 16)), np.float32)
        for first in range(0, len(tokens), size):
            chunk = tokens[first : first + size]
            self.wait(self.launch(chunk, start + first, PREFILL, size=size))
            rows = out[first : first + len(chunk)]
            self._driver.copy_to_host(rows.ctypes.data, self._logits, rows.nbytes, self._stream)
            self.drain()
            if in_chunks:
                self.wait(self.launch(chunk, start + first, PREFILL, size=CHUNK_TOKENS))
        return out[:, :vocabulary]

    def _graph(self, count: int, mode: int, size: int | None, sampler: str, wide: bool) -> int:
        held = self._handover["wide"] if wide else self._handover
        if sampler != FULL:
            return int(held["singles"][sampler])
        if mode == MEDUSA:
            return int(self._handover["medusa"])
        if mode == REDRAW:
            return int(self._handover["redraws"][size or 1])
        if size == CHUNK_TOKENS:
            return int(self._handover["chunk" if mode == PREFILL else "last_chunk"])
        if size is None and mode == PREFILL:
            return int(self._handover["prefill"])
        graphs = held["graphs"]
        return int(graphs[size or min(tokens for tokens in graphs if tokens >= count)])
