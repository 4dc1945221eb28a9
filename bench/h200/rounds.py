"""Replays a loaded engine's graphs one by one and reads the device's own timestamps: no daemon, no core, no drafter."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from stopwatch import Stopwatch, check

from ull.gpu.params import (
    CONTINUE,
    OK,
    PREFILL,
    ROUND_SLOTS,
    TAKE,
    TREE_TOKENS,
    RoundRequest,
    RoundResult,
)

PATIENCE_S = 20.0  # a round that takes longer has hung


class RoundError(RuntimeError):
    """A round failed, hung, or answered what it must not."""


@dataclass(frozen=True)
class Times:
    """Device times of consecutive rounds, in nanoseconds."""

    period: np.ndarray  # [n - 1] from one round's first kernel to the next one's
    gap: np.ndarray  # [n - 1] from one round's last kernel to the next one's first
    busy: np.ndarray  # [n] from a round's first kernel to its last
    mean_ns: float  # elapsed between two CUDA events around all rounds, per round


class RoundDriver:
    """Asks for rounds through the mapped host blocks of `handover` (see `ull.gpu.program`)."""

    def __init__(self, handover: Mapping[str, Any]) -> None:
        self._handover = handover
        self._requests = (RoundRequest * ROUND_SLOTS).from_address(handover["requests"])
        self._results = (RoundResult * ROUND_SLOTS).from_address(handover["results"])
        pages = int(handover["page_count"])
        table = (ctypes.c_int32 * pages).from_address(handover["pages"])
        table[:] = range(pages)
        self._page_count = pages
        self._stream = driver.CUstream(handover["stream"])
        self._sequence = 0
        self._setting = 0
        self._sampling: tuple[Any, ...] | None = None
        check(driver.cuCtxSetCurrent(driver.CUcontext(handover["context"])))
        self._stopwatch = Stopwatch(handover["stream"])

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
    ) -> int:
        """Launches a round and returns its sequence number. `parents` default to a chain."""
        self._sequence += 1
        request = self._requests[self._sequence % ROUND_SLOTS]
        count = len(tokens)
        sampling = (temperature, seed, top_logprobs)
        if sampling != self._sampling:
            self._sampling = sampling
            self._setting += 1
        request.sequence, request.mode, request.count = self._sequence, mode, count
        request.position, request.max_tokens, request.setting = position, max_tokens, self._setting
        request.page_count, request.stop_count = self._page_count, 0
        request.tokens[:count] = tokens
        request.parents[:count] = parents if parents is not None else [max(0, node - 1) for node in range(count)]
        request.sampling.temperature, request.sampling.top_p = temperature, 1.0
        request.sampling.seed, request.sampling.top_logprobs = seed, top_logprobs
        if mode == PREFILL:
            graph = self._handover["prefill"]
        else:
            graph = self._handover["graphs"][min(size for size in self._handover["graphs"] if size >= count)]
        check(driver.cuGraphLaunch(driver.CUgraphExec(graph), self._stream))
        return self._sequence

    def wait(self, sequence: int) -> RoundResult:
        """The result of a round, copied. Raises RoundError if it does not come or is not one of a round that ran."""
        result = self._results[sequence % ROUND_SLOTS]
        deadline = time.monotonic() + PATIENCE_S
        while result.sequence != sequence:
            if time.monotonic() > deadline:
                state = driver.cuStreamQuery(self._stream)[0].name
                raise RoundError(f"round {sequence} did not answer within {PATIENCE_S:.0f} s (stream: {state})")
        copy = RoundResult.from_buffer_copy(result)
        if copy.status != OK:
            raise RoundError(f"round {sequence} answered status {copy.status}")
        return copy

    def drain(self) -> None:
        """Waits until the device has nothing left to do."""
        check(driver.cuStreamSynchronize(self._stream))

    def prefill(self, tokens: Sequence[int]) -> None:
        """Puts tokens at positions 0, 1, ... into the cache."""
        for start in range(0, len(tokens), TREE_TOKENS):
            self.wait(self.launch(tokens[start : start + TREE_TOKENS], start, PREFILL))

    def decode(self, token: int, position: int, count: int, **sampling: Any) -> list[RoundResult]:
        """`count` plain rounds, each launched before the last one is read."""
        launched = [self.launch([token], position, TAKE, **sampling)]
        results = []
        for index in range(count):
            if index + 1 < count:
                launched.append(self.launch([0], position + index + 1, CONTINUE, **sampling))
            results.append(self.wait(launched[index]))
        return results

    def time_rounds(self, tree: int, position: int, rounds: int, warm_up: int = 10) -> Times:
        """`rounds` rounds of a chain of `tree` tokens at the same position, with up to two under way."""
        tokens = [(7 * index + 11) % 1000 for index in range(tree)]
        for _ in range(warm_up):
            self.wait(self.launch(tokens, position))
        self.drain()
        begin, end, pending = [], [], []
        self._stopwatch.start()
        for _ in range(rounds):
            pending.append(self.launch(tokens, position))
            if len(pending) > 2:
                self._note(pending.pop(0), begin, end)
        elapsed_ms = self._stopwatch.stop()
        self.drain()
        for sequence in pending:
            self._note(sequence, begin, end)
        begins, ends = np.array(begin, dtype=np.int64), np.array(end, dtype=np.int64)
        return Times(np.diff(begins), begins[1:] - ends[:-1], ends - begins, elapsed_ms * 1e6 / rounds)

    def _note(self, sequence: int, begin: list[int], end: list[int]) -> None:
        """Takes a round's timestamps. `end_ns` follows the tokens, so the round after the next must not have begun."""
        result = self.wait(sequence)
        slot = self._results[sequence % ROUND_SLOTS]
        deadline = time.monotonic() + PATIENCE_S
        while slot.end_ns < result.begin_ns and time.monotonic() < deadline:
            pass
        begin.append(result.begin_ns)
        end.append(slot.end_ns)
