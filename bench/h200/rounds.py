"""Times a loaded engine's graphs by the device's own timestamps: no daemon, no core, no drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from stopwatch import Stopwatch

from ull.bundle import Bundle
from ull.gpu.params import CHUNK_TOKENS, ROUND_SLOTS
from ull.gpu.program import Program, load
from ull.gpu.replay import PATIENCE_S, Replay
from ull.gpu.rounds import FULL, PLAIN


@contextmanager
def loaded(bundle: Bundle, persistent: bool = False) -> Iterator[Program]:
    """The bundle's program, given back unless something failed: a device that has failed may never answer."""
    program = load(bundle, persistent=persistent)
    try:
        yield program
    except BaseException:
        program.abandon()
        raise
    program.close()


def made_up(tokens: int) -> list[int]:
    """A text of so many tokens, which means nothing."""
    return [(7 * index + 11) % 1000 for index in range(tokens)]


def parts_of(replay: Replay, tokens: int, widest: int, behind: int = 0) -> list[range]:
    """How a prompt of so many tokens from position `behind` on is read: each part's positions."""
    return [range(behind + part.start, behind + part.stop) for part in replay.parts(tokens, widest)]


@dataclass(frozen=True)
class Times:
    """Device times of consecutive rounds, in nanoseconds."""

    period: np.ndarray  # [n - 1] from one round's first kernel to the next one's
    gap: np.ndarray  # [n - 1] from one round's last kernel to the next one's first
    busy: np.ndarray  # [n] from a round's first kernel to its last
    mean_ns: float  # elapsed between two CUDA events around all rounds, per round

    @property
    def timer_step_ns(self) -> int | None:
        """The smallest difference between two of these times that are not equal: among many, the timer's resolution.

        None where all are equal, as few are of a timer that ticks coarsely.
        """
        steps = np.diff(np.unique(np.concatenate([self.period, self.gap, self.busy])))
        return int(steps.min()) if len(steps) else None


@dataclass(frozen=True)
class Prompts:
    """What prompts took, in milliseconds, each [n]."""

    device: np.ndarray  # between CUDA events before the first pass and behind the last one
    host: np.ndarray  # from the first launch until the last pass's answer was seen


class RoundTimer:
    """Rounds of one size at one place, back to back. Raises GpuError."""

    def __init__(self, program: Program) -> None:
        self._replay = program.replay()
        self._results = self._replay.results
        self._singles = program.handover["singles"]
        self._wide = program.handover.get("wide", {"from": 0, "graphs": {}})
        self._stopwatch = Stopwatch(program.handover["stream"])

    def drain(self) -> None:
        self._replay.drain()

    def may_be_wide(self, tree: int, position: int) -> bool:
        """Whether a round of `tree` tokens may take the attention for a long cache there."""
        return tree in self._wide["graphs"] and position >= self._wide["from"]

    def time_rounds(self, tree: int, position: int, rounds: int, warm_up: int = 10, wide: bool = False) -> Times:
        """`rounds` rounds of a chain of `tree` tokens at the same position, with up to two under way.

        Of one token it is the round of a request that filters nothing and asks for no logprobs, if there is a graph.
        `wide`: with the attention for a long cache.
        """
        tokens = made_up(tree)
        sampler = PLAIN if tree == 1 and PLAIN in self._singles else FULL
        for _ in range(warm_up):
            self._replay.wait(self._replay.launch(tokens, position, sampler=sampler, wide=wide))
        self._replay.drain()
        begin, end, pending = [], [], []
        self._stopwatch.start()
        for _ in range(rounds):
            pending.append(self._replay.launch(tokens, position, sampler=sampler, wide=wide))
            if len(pending) > 2:
                self._note(pending.pop(0), begin, end)
        elapsed_ms = self._stopwatch.stop()
        self._replay.drain()
        for sequence in pending:
            self._note(sequence, begin, end)
        begins, ends = np.array(begin, dtype=np.int64), np.array(end, dtype=np.int64)
        return Times(np.diff(begins), begins[1:] - ends[:-1], ends - begins, elapsed_ms * 1e6 / rounds)

    def time_prompt(
        self,
        tokens: int,
        prompts: int,
        warm_up: int = 1,
        widest: int = CHUNK_TOKENS,
        draws: bool = False,
        behind: int = 0,
    ) -> Prompts:
        """`prompts` prompts of so many tokens from position `behind` on, queued as the core queues them, one by one.

        `widest`: the most tokens that are read at once; TREE_TOKENS is without chunks. `draws`: the last chunk draws.
        """
        text = made_up(behind + tokens)
        parts = parts_of(self._replay, tokens, widest, behind)
        device, host = [], []
        for index in range(warm_up + prompts):
            pending: list[int] = []
            began = time.perf_counter()
            self._stopwatch.start()
            for part in parts:
                if len(pending) == ROUND_SLOTS:
                    self._replay.wait(pending.pop(0))
                pending.append(self._replay.launch_part(text, part, draws and part.stop == len(text)))
            for sequence in pending:
                self._replay.wait(sequence)
            seen = time.perf_counter()
            elapsed_ms = self._stopwatch.stop()
            if index >= warm_up:
                device.append(elapsed_ms)
                host.append((seen - began) * 1e3)
        return Prompts(np.array(device), np.array(host))

    def time_medusa(self, position: int, runs: int, warm_up: int = 10) -> np.ndarray:
        """Device times of `runs` runs of the Medusa heads, each behind a plain round, in nanoseconds."""
        times = []
        for index in range(warm_up + runs):
            self._replay.wait(self._replay.launch([11], position))
            result = self._replay.wait(self._replay.medusa(position + 1, temperature=0.8))
            if index >= warm_up:
                times.append(result.end_ns - result.begin_ns)
        return np.array(times, dtype=np.int64)

    def _note(self, sequence: int, begin: list[int], end: list[int]) -> None:
        """Takes a round's timestamps. `end_ns` follows the tokens, so the round after the next must not have begun."""
        result = self._replay.wait(sequence)
        slot = self._results[sequence % len(self._results)]
        deadline = time.monotonic() + PATIENCE_S
        while slot.end_ns < result.begin_ns and time.monotonic() < deadline:
            pass
        begin.append(result.begin_ns)
        end.append(slot.end_ns)
