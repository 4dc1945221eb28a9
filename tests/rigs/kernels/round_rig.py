"""The host side of begin() and accept() on the emulator: writes requests, plays what runs between, reads results."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from ull.gpu import params as layout
from ull.gpu.geometry import sampling as launches

PAGES = 9
CONTEXT = 64 * PAGES
SINGLE = (0,)  # parents of a root alone


class Device:
    """The memory that a round's kernels share with the host, and what the host does with it."""

    def __init__(self, kernels: emulation.Kernels) -> None:
        self.kernels = kernels
        self.device_memory: list[NDArray[np.uint8]] = []
        self.host_memory: list[NDArray[np.uint8]] = []  # that kernels store to
        self.requested: list[NDArray[np.uint8]] = []  # what the host has written before it launches
        self.requests: Any = self._memory(layout.RoundRequest * layout.ROUND_SLOTS)
        self.results: Any = self._memory(layout.RoundResult * layout.ROUND_SLOTS)
        self.control: Any = self._memory(layout.HostControl)
        self.round: Any = self._memory(layout.Round)
        self.state: Any = self._memory(layout.State)
        self.chunk: Any = self._memory(layout.Chunk)
        self.host_chunks = aligned((layout.ROUND_SLOTS, layout.CHUNK_TOKENS), np.int32)
        self.host_pages = aligned(PAGES + PAGES % 2, np.int32)
        self.pages = aligned(PAGES, np.int32, -1)
        self.host_text = aligned(CONTEXT, np.int32)
        self.text = aligned(CONTEXT + layout.TREE_TOKENS + 1, np.int32)
        self.text_counts = aligned(4096, np.uint32)  # the vocabulary of emulation.TINY_MODEL
        self.host_mask = aligned(4096 // 32, np.uint32)
        self.mask = aligned(4096 // 32, np.uint32)
        self.counters = aligned(777, np.uint32)
        self.control.cancelled_through = 0
        ctypes.memset(ctypes.addressof(self.state), 0, ctypes.sizeof(layout.State))
        self.state.sequence = 1
        self.sequence = 0
        self.seed = 0

    def _memory(self, kind: type[Any]) -> Any:
        memory = aligned(ctypes.sizeof(kind), np.uint8)
        if kind in (layout.Round, layout.State, layout.Chunk):
            self.device_memory.append(memory)
        if kind in (layout.RoundRequest * layout.ROUND_SLOTS, layout.HostControl):
            self.requested.append(memory)
        if kind == layout.RoundResult * layout.ROUND_SLOTS:
            self.host_memory.append(memory)
        return kind.from_buffer(memory)

    def ask(
        self,
        mode: int,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = SINGLE,
        *,
        stops: Sequence[int] = (),
        biases: Sequence[tuple[int, float]] = (),
        pages: Sequence[int] = (),
        before: Callable[[], None] = lambda: None,
        chunk: bool = False,
        **fields: Any,
    ) -> Any:
        """Writes the next request, calls `before` and runs begin(), perhaps of a `chunk`; -> the round."""
        self.sequence += 1
        request = self.requests[self.sequence % layout.ROUND_SLOTS]
        ctypes.memset(ctypes.addressof(request), 0xFF, ctypes.sizeof(request))  # what a mode does not need
        request.sequence, request.mode, request.awaited = self.sequence, mode, 0
        request.max_tokens, request.setting, request.sampling.penalises = 65, 1, 0
        if mode != layout.CONTINUE:
            request.count, request.position = len(tokens), 0
            to = self.host_chunks[self.sequence % layout.ROUND_SLOTS] if chunk else request.tokens
            to[: len(tokens)] = tokens
        if mode in (layout.TAKE, layout.REDRAW) and not chunk:
            request.parents[: len(tokens)] = parents[: len(tokens)]
        request.page_count, request.stop_count = len(pages), len(stops)
        self.host_pages[: len(pages)] = pages
        request.stops[: len(stops)] = stops
        for name, value in fields.items():
            setattr(request, name, value)
        request.sampling.bias_count = len(biases)
        for i, (token, bias) in enumerate(biases):
            request.biases[i] = layout.LogitBias(token, bias)
        self.counters[...] = 5
        ctypes.memset(ctypes.addressof(self.round), 0xFF, ctypes.sizeof(layout.Round))
        ctypes.memset(ctypes.addressof(self.chunk), 0xFF, ctypes.sizeof(layout.Chunk))
        before()
        self._run("ull_begin_chunk" if chunk else "ull_begin", launches.begin(), self._begin_params())
        assert not self.counters.any()
        return self.round

    def _begin_params(self) -> layout.BeginParams:
        return layout.BeginParams(
            *map(ctypes.addressof, (self.round, self.state, self.requests, self.control)),
            *map(pointer, (self.host_pages, self.pages, self.counters, self.host_text, self.text, self.text_counts)),
            *map(pointer, (self.host_mask, self.mask)),
            *(None, None),  # it drafts for nobody
            *(pointer(self.host_chunks), ctypes.addressof(self.chunk)),
            *(self.counters.size, PAGES, CONTEXT),
        )

    def draw(self, draws: Sequence[int]) -> Any:
        """Plays the sampler, runs accept(); -> the result."""
        for node, token in enumerate(draws):
            self.round.drawn[node] = layout.EmittedToken(token, -float(node), 0, node)
        return self.accept()

    def accept(self) -> Any:
        slot = self.round.sequence % layout.ROUND_SLOTS
        ctypes.memset(ctypes.addressof(self.results[slot]), 0xFF, ctypes.sizeof(layout.RoundResult))
        addresses = map(ctypes.addressof, (self.round, self.state, self.results))
        self._run("ull_accept", launches.accept(), layout.AcceptParams(*addresses, pointer(self.text)))
        result = self.results[slot]
        assert (result.sequence, result.begin_ns) == (self.round.sequence, self.round.begin_ns)
        return result

    def _run(self, kernel: str, geometry: launches.Geometry, params: ctypes.Structure) -> None:
        grid, threads, shared = geometry
        self.seed += 1
        self.kernels.run(
            kernel,
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=self.seed,
            predecessor_writes=self.device_memory,
            constants=self.requested,
            host_reads=self.host_memory,
        )

    def take(self, tokens: Sequence[int], parents: Sequence[int], draws: Sequence[int], **fields: Any) -> Any:
        self.ask(layout.TAKE, tokens, parents, **fields)
        return self.draw(draws)

    def go_on(self, draw: int, **fields: Any) -> Any:
        """A round that continues the last one; `draw` is used if it is not skipped."""
        round_ = self.ask(layout.CONTINUE, **fields)
        return self.draw([draw] * round_.count)


def emitted(result: Any) -> list[int]:
    assert result.count >= 0
    return [result.tokens[i].token for i in range(result.count)]
