"""One of a bundle's models on the device, in stages: planned, then placed in memory, then captured as graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import DevicePart, DflashHead, DflashPart, EaglePart, round_up
from ull.errors import GpuError
from ull.gpu.arena import Arena, ArenaPlan
from ull.gpu.capture import capture_graph
from ull.gpu.chunk import Chunks, products_agree
from ull.gpu.dflash import BLOCK_TILES, CONTEXT_ENTRIES, DflashPasses
from ull.gpu.driver import Driver
from ull.gpu.eagle import LEVEL_TILES, EaglePasses
from ull.gpu.forward import ForwardSource, Recorder
from ull.gpu.fused import FusedForward
from ull.gpu.geometry import attention
from ull.gpu.launch import Launch
from ull.gpu.memory import DflashShape, EagleShape, Sizes, reserve_model, rope_table
from ull.gpu.modules import Kernels
from ull.gpu.params import CHUNK_TOKENS, ROUND_SLOTS, TREE_TOKENS, HostControl, RoundRequest, RoundResult, State
from ull.gpu.places import HostBlocks, Places
from ull.gpu.rounds import BURST_ROUNDS, FULL, PLAIN, REDRAWS, SCAN, Rounds
from ull.gpu.weights import WeightImage


@dataclass(frozen=True)
class PlannedModel:
    """A model whose regions of the arena are reserved: `plan` makes it.

    Each stage makes the next one. What they acquire, the caller's exit stack gives back; each raises GpuError.
    """

    part: DevicePart
    sizes: Sizes

    @classmethod
    def plan(cls, part: DevicePart, context: int, pages: int | None, plan: ArenaPlan) -> PlannedModel:
        """Adds the regions that its rounds touch; `context` and `pages` as `ull.gpu.program.Program` takes them."""
        eagle = EagleShape(len(part.head.taps), part.target.hidden) if isinstance(part, EaglePart) else None
        dflash = None
        if isinstance(part, DflashPart):
            head, gated = part.head, part.head.markov > 0 and part.head.markov_kind == "gated"
            dflash = DflashShape(len(head.taps), part.target.hidden, head.markov, gated)
        sizes = Sizes(
            part.model,
            part.precision,
            context,
            pages,
            part.medusa,
            part.taps,
            eagle,
            dflash,
            part.reads_chunks,
            part.forward.prefill == "fast",
            part.forward.tree_products == "warpgroup",
        )
        reserve_model(plan, sizes, part.prefix)
        return cls(part, sizes)

    def place(
        self, driver: Driver, kernels: Kernels, arena: Arena, image: WeightImage, exit_stack: ExitStack
    ) -> PlacedModel:
        """Says where everything lies, and maps what host and device share: requests, results and all of HostBlocks."""
        prefix = self.part.prefix
        weights = arena.address("weights")

        def tensor(name: str) -> int | None:
            offset = image.offset(prefix + name)
            return None if offset is None else weights + offset

        host, blocks = self._map_host_blocks(driver, exit_stack)
        places = Places(lambda name: arena.address(prefix + name), tensor, blocks)
        return PlacedModel(self.part, self.sizes, driver, kernels, places, host)

    def _map_host_blocks(self, driver: Driver, exit_stack: ExitStack) -> tuple[dict[str, int], HostBlocks]:
        """Zeroed. Their addresses on the host, by name, and on the device."""
        requests = ROUND_SLOTS * ctypes.sizeof(RoundRequest)
        results = ROUND_SLOTS * ctypes.sizeof(RoundResult)
        control = ctypes.sizeof(HostControl)
        offsets = {"requests": 0, "results": requests, "control": requests + results}
        offsets["pages"] = offsets["control"] + control
        offsets["text"] = offsets["pages"] + round_up(4 * self.sizes.table_pages, 64)
        offsets["mask"] = offsets["text"] + round_up(4 * self.sizes.context, 64)
        nbytes = offsets["mask"] + round_up(self.sizes.mask_bytes, 64)
        if self.sizes.chunks:
            offsets["chunks"] = nbytes
            nbytes += 4 * ROUND_SLOTS * CHUNK_TOKENS
        host, device = driver.allocate_host(nbytes)
        exit_stack.callback(driver.free_host, host)
        ctypes.memset(host, 0, nbytes)
        on_host = {name: host + offset for name, offset in offsets.items()}
        return on_host, HostBlocks(**{name: device + offset for name, offset in offsets.items()})


@dataclass(frozen=True)
class PlacedModel:
    """A model that has its kernels, and its places in memory."""

    part: DevicePart
    sizes: Sizes
    driver: Driver
    kernels: Kernels
    places: Places
    host: dict[str, int]  # addresses of the mapped blocks on the host

    @property
    def handover(self) -> dict[str, int]:
        """What the core learns of every model and head: the mapped blocks, and sizes."""
        sizes = self.sizes
        return {
            **self.host,
            "vocabulary": sizes.model.vocabulary,
            "context_tokens": sizes.context,
            "page_count": sizes.page_count,
            "kv_bytes": sizes.kv_bytes,
            "kv_pages": self.places.region("KV pages"),
        }

    def first_contents(self, persistent: bool) -> Iterator[tuple[int, NDArray[Any]]]:
        """Rope table and first state; for a `persistent` kernel the parameters of the layers' steps too.

        Each with the device address that it belongs at.
        """
        region = self.places.region
        yield region("rope"), rope_table(self.sizes.model, self.sizes.context)
        yield region("state"), np.frombuffer(bytes(State(sequence=1)), np.uint8)
        if persistent:
            yield region("layer parameters"), np.frombuffer(self.fused(persistent).layer_parameters(), np.uint8)

    def fused(self, persistent: bool, scans: bool = False, wide: bool = False) -> FusedForward:
        """Our kernels as a forward of this model."""
        return FusedForward(self.sizes, self.places, self.driver.info.multiprocessors, persistent, scans, wide)

    def may_be_wide(self, tokens: int) -> bool:
        """Whether rounds of so many tokens may have the attention for a long cache."""
        sizes, model, tile = self.sizes, self.sizes.model, attention.tile_of(tokens)
        heads = model.heads, model.kv_heads, model.head_dim
        return attention.may_be_wide(*heads, sizes.kv_bits, sizes.context, tile, self.driver.info.multiprocessors)

    def capture_eagle(self, target: PlacedModel, stream: int, exit_stack: ExitStack) -> CapturedEagle:
        """The graphs of an EAGLE head's passes behind the model `target`. Raises ValueError for any other part."""
        if not isinstance(self.part, EaglePart):
            raise ValueError("an EAGLE head's passes are captured of an EAGLE head")
        multiprocessors = self.driver.info.multiprocessors
        passes = EaglePasses(self.part.head, self.sizes, self.places, target.sizes, target.places, multiprocessors)
        captures = _Captures(self, stream, exit_stack)
        levels = {tokens: captures.capture_all(passes.level(tokens)) for tokens in LEVEL_TILES}
        fill, first = captures.capture_all(passes.fill()), captures.capture_all(passes.first())
        chunk = captures.capture_all(passes.chunk()) if self.sizes.chunks else 0
        return CapturedEagle(self, fill, chunk, first, levels)

    def capture_dflash(self, target: PlacedModel, stream: int, exit_stack: ExitStack) -> CapturedDflash:
        """The graphs of a DFlash head's passes behind the model `target`. Raises ValueError for any other part."""
        if not isinstance(self.part, DflashPart):
            raise ValueError("a DFlash head's passes are captured of a DFlash head")
        head, multiprocessors = self.part.head, self.driver.info.multiprocessors
        passes = DflashPasses(head, self.sizes, self.places, target.sizes, target.places, multiprocessors)
        captures = _Captures(self, stream, exit_stack)
        contexts = {entries: captures.capture_all(passes.context(entries)) for entries in CONTEXT_ENTRIES}
        chunk = captures.capture_all(passes.chunk()) if self.sizes.chunks else 0
        tile = next(tile for tile in BLOCK_TILES if head.block <= tile)
        block = captures.capture_all(passes.block(tile))
        nodes = captures.capture_all(passes.nodes()) if head.markov else 0
        return CapturedDflash(self, head, contexts, chunk, block, nodes)

    def capture(self, sources: Mapping[str, ForwardSource], stream: int, exit_stack: ExitStack) -> CapturedModel:
        """One graph per number of tokens, one that only fills the cache, and one of the Medusa heads, if there are.

        `sources`: by name; "scan" is "fused" with the lm_head's FP8 copy in place of the lm_head, "wide" and "wide
        scan" are these with the attention for a long cache. Where they are our kernels, also the graphs of those rounds
        of one token whose request filters nothing: one round, and several behind one another.
        """
        captures, forward = _Captures(self, stream, exit_stack), self.part.forward
        together, exact_chunks = forward.tree_products == "warpgroup", self.sizes.chunks and forward.prefill != "fast"
        agree = (together or exact_chunks) and products_agree(self.driver, self.kernels, stream)
        if together and not agree:
            raise GpuError(
                "wrong_gpu",
                f"on {self.driver.info.name} the matrix products of warpgroups do not have the bits of a warp's, so "
                "trees would say otherwise than plain decoding; build the engine with --tree-products warp",
            )
        decode = sources[forward.decode]
        rounds = {tokens: captures.round(decode, tokens, draws=True) for tokens in self.part.tree_sizes}
        by_sampler = {PLAIN: "fused", SCAN: "scan"} if forward.decode == "fused" else {}
        singles, bursts = self._singles(captures, sources, by_sampler)
        wide = self._wide(captures, sources) if "wide" in sources else None
        if forward.prefill == "fast":  # whatever its length, so that a prompt's bits do not depend on how it is cut
            prefill = chunk = captures.chunk()
        else:
            prefill = captures.round(sources[forward.prefill_by], TREE_TOKENS, draws=False)
            chunk = captures.chunk() if exact_chunks and agree else 0
        # Nobody waits for a draft model's token. Where rounds have other bits than this chunk, they read no prompt.
        may_draw = chunk != 0 and (forward.reuse == "all" or chunk == prefill) and not self.part.prefix
        last_chunk = captures.chunk(draws=True) if may_draw else 0
        medusa = captures.heads() if self.sizes.medusa is not None else 0
        redraws = {} if self.part.prefix else {draws: captures.redraw(draws) for draws in REDRAWS}
        return CapturedModel(self, rounds, singles, bursts, prefill, chunk, last_chunk, medusa, redraws, wide)

    def _wide(self, captures: _Captures, sources: Mapping[str, ForwardSource]) -> WideRounds:
        begins = attention.wide_from(self.sizes.model.kv_heads, self.driver.info.multiprocessors)
        sizes = [tokens for tokens in self.part.tree_sizes if self.may_be_wide(tokens)]
        rounds = {tokens: captures.round(sources["wide"], tokens, draws=True) for tokens in sizes}
        return WideRounds(begins, rounds, *self._singles(captures, sources, {PLAIN: "wide", SCAN: "wide scan"}))

    def _singles(
        self, captures: _Captures, sources: Mapping[str, ForwardSource], by_sampler: Mapping[str, str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Rounds of one token with samplers that do less, and bursts of them, of those `sources` that there are."""
        singles, bursts = dict[str, int](), dict[str, int]()
        for sampler, name in by_sampler.items():
            if name not in sources:
                continue
            singles[sampler] = captures.round(sources[name], 1, True, sampler)
            if not self.part.prefix:  # a draft model's rounds are launched one by one
                bursts[sampler] = captures.round(sources[name], 1, True, sampler, BURST_ROUNDS)
        return singles, bursts


class _Captures:
    """Captures a model's graphs, one after the other; `exit_stack` destroys them."""

    def __init__(self, model: PlacedModel, stream: int, exit_stack: ExitStack) -> None:
        self._driver, self._kernels = model.driver, model.kernels
        where = model.sizes, model.places, model.driver.info.multiprocessors
        self._rounds, self._chunks = Rounds(*where), Chunks(*where)
        self._stream, self._exit = stream, exit_stack

    def round(self, source: ForwardSource, tokens: int, draws: bool, sampler: str = FULL, count: int = 1) -> int:
        """`count` rounds of up to `tokens` nodes (CUgraphExec)."""
        opening, closing = self._rounds.opening(tokens), self._rounds.closing(tokens, draws, sampler)
        self._kernels.prepare([*opening, *source.launches(tokens, draws), *closing])
        source.warm_up(tokens, draws)

        def record(recorder: Recorder) -> None:
            for _ in range(count):
                for launch in opening:
                    recorder.launch(launch)
                source.capture(recorder, tokens, draws)
                for launch in closing:
                    recorder.launch(launch)

        return self._capture(record)

    def chunk(self, draws: bool = False) -> int:
        """A chunk of a prompt, which perhaps `draws` what follows (CUgraphExec)."""
        return self.capture_all(self._chunks.launches(draws))

    def heads(self) -> int:
        """The Medusa heads behind a round (CUgraphExec)."""
        return self.capture_all(self._rounds.medusa())

    def redraw(self, draws: int) -> int:
        """Up to `draws` draws from the logits of the round before (CUgraphExec)."""
        return self.capture_all(self._rounds.redraw(draws))

    def capture_all(self, launches: list[Launch]) -> int:
        """These launches, one behind another (CUgraphExec)."""
        self._kernels.prepare(launches)

        def record(recorder: Recorder) -> None:
            for launch in launches:
                recorder.launch(launch)

        return self._capture(record)

    def _capture(self, record: Callable[[Recorder], None]) -> int:
        executable = capture_graph(self._driver, self._stream, self._kernels.functions, record)
        self._exit.callback(self._driver.destroy_executable, executable)
        return executable


@dataclass(frozen=True)
class WideRounds:
    """Rounds with the attention for a long cache; as `CapturedModel` has them without it, and with the same bits."""

    begins: int  # positions before a round from which it divides the work in another way
    rounds: dict[int, int]
    singles: dict[str, int]
    bursts: dict[str, int]

    @property
    def handover(self) -> dict[str, Any]:
        return {"from": self.begins, "graphs": self.rounds, "singles": self.singles, "bursts": self.bursts}


@dataclass(frozen=True)
class CapturedModel:
    """A model that the core can replay: its graphs, each a CUgraphExec."""

    placed: PlacedModel
    rounds: dict[int, int]  # by the number of their nodes
    singles: dict[str, int]  # rounds of one token with a sampler that does less, by its name
    bursts: dict[str, int]  # several of those in one graph
    prefill: int
    chunk: int  # 0: prompts are read by `prefill` alone
    last_chunk: int  # one that draws what follows; 0: rounds do
    medusa: int  # 0: there are no heads
    redraws: dict[int, int]  # what draws again, by the most draws; a draft model's tokens nobody refuses: none
    wide: WideRounds | None  # None: no context is so long

    @property
    def sizes(self) -> Sizes:
        return self.placed.sizes

    @property
    def handover(self) -> dict[str, Any]:
        """What the core learns about this model: handles, addresses on the host and sizes, all plain integers."""
        return {
            "graphs": dict(self.rounds),
            "singles": dict(self.singles),
            "bursts": dict(self.bursts),
            "burst_rounds": BURST_ROUNDS if self.bursts else 0,
            "prefill": self.prefill,
            "chunk": self.chunk,
            "last_chunk": self.last_chunk,
            "redraws": dict(self.redraws),
            "medusa": self.medusa,
            "medusa_heads": self.sizes.medusa.heads if self.sizes.medusa else 0,
            **({"wide": self.wide.handover} if self.wide else {}),
            **self.placed.handover,
        }


@dataclass(frozen=True)
class CapturedEagle:
    """An EAGLE head that the core can replay: the graphs of its passes, each a CUgraphExec."""

    placed: PlacedModel
    fill: int
    chunk: int  # 0: prompts are read by `fill` alone
    first: int
    levels: dict[int, int]  # by the most entries

    @property
    def sizes(self) -> Sizes:
        return self.placed.sizes

    @property
    def handover(self) -> dict[str, Any]:
        """What the core learns about this head, as `CapturedModel.handover`."""
        return {
            "fill": self.fill,
            "chunk": self.chunk,
            "first": self.first,
            "levels": dict(self.levels),
            **self.placed.handover,
        }


@dataclass(frozen=True)
class CapturedDflash:
    """A DFlash head that the core can replay: the graphs of its passes, each a CUgraphExec."""

    placed: PlacedModel
    head: DflashHead
    contexts: dict[int, int]  # by the most positions
    chunk: int  # 0: prompts are read by `contexts` alone
    block: int
    nodes: int  # 0: there is no Markov term

    @property
    def handover(self) -> dict[str, Any]:
        """What the core learns about this head, as `CapturedModel.handover`."""
        return {
            "contexts": dict(self.contexts),
            "chunk": self.chunk,
            "block": self.block,
            "nodes": self.nodes,
            "block_tokens": self.head.block,
            "mask_token": self.head.mask_token,
            "anchor_predicts": self.head.anchor_predicts,
            **self.placed.handover,
        }
