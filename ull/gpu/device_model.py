"""One of a bundle's models on the device: the memory that its rounds touch, its kernels, its captured graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ull.bundle.layout import round_up
from ull.bundle.open import Bundle, DevicePart
from ull.gpu.arena import Arena, ArenaPlan
from ull.gpu.capture import capture_graph
from ull.gpu.driver import Driver
from ull.gpu.forward import ForwardSource, Recorder
from ull.gpu.fused import FusedForward
from ull.gpu.launch import Launch
from ull.gpu.memory import Sizes, reserve_model, rope_table
from ull.gpu.modules import Kernels
from ull.gpu.params import ROUND_SLOTS, TREE_TOKENS, HostControl, RoundRequest, RoundResult, State
from ull.gpu.places import HostBlocks, Places
from ull.gpu.rounds import BURST_ROUNDS, FULL, PLAIN, SCAN, Rounds
from ull.gpu.weights import Staging, WeightImage


class DeviceModel:
    """Made in steps: `reserve`, `load_kernels`, `place`, `fill` and `capture`. Each raises GpuError or BundleError.

    `context` and `pages` as `ull.gpu.program.Program` takes them. What is acquired, the caller's exit stacks give back.
    """

    def __init__(self, part: DevicePart, context: int, pages: int | None) -> None:
        self.part = part
        self.sizes = Sizes(part.model, part.precision, context, pages, part.medusa)
        self.host: dict[str, int] = {}  # addresses of the mapped blocks on the host
        self._graphs: dict[int, int] = {}
        self._singles: dict[str, int] = {}  # rounds of one token with a sampler that does less, by its name
        self._bursts: dict[str, int] = {}  # several of those in one graph
        self._prefill = self._heads = 0

    def reserve(self, plan: ArenaPlan) -> None:
        """Adds the regions of the arena that its rounds touch."""
        reserve_model(plan, self.sizes, self.part.prefix)

    def load_kernels(self, driver: Driver, bundle: Bundle, exit_stack: ExitStack) -> None:
        """Loads its cubins."""
        self._driver = driver
        self.kernels = Kernels(driver, bundle, self.part.code)
        exit_stack.callback(self.kernels.close)

    def place(self, arena: Arena, image: WeightImage, exit_stack: ExitStack) -> None:
        """Says where everything lies, and maps the host blocks: requests, results, control, page table, text."""
        prefix = self.part.prefix
        weights = arena.address("weights")

        def tensor(name: str) -> int | None:
            offset = image.offset(prefix + name)
            return None if offset is None else weights + offset

        blocks = self._map_host_blocks(exit_stack)
        self.places = Places(lambda name: arena.address(prefix + name), tensor, blocks)

    def fill(self, staging: Staging, persistent: bool) -> None:
        """Rope table and first state; for a `persistent` kernel the parameters of the layers' steps too."""
        region = self.places.region
        staging.copy(region("rope"), rope_table(self.sizes.model, self.sizes.context))
        staging.copy(region("state"), np.frombuffer(bytes(State(sequence=1)), np.uint8))
        if persistent:
            parameters = np.frombuffer(self.fused(persistent).layer_parameters(), np.uint8)
            staging.copy(region("layer parameters"), parameters)

    def fused(self, persistent: bool, scans: bool = False) -> FusedForward:
        """Our kernels as a forward of this model."""
        return FusedForward(self.sizes, self.places, self._driver.info.multiprocessors, persistent, scans)

    def capture(self, sources: Mapping[str, ForwardSource], stream: int, exit_stack: ExitStack) -> None:
        """One graph per number of tokens, one that only fills the cache, and one of the Medusa heads, if there are.

        `sources`: by name; "scan" is "fused" with the lm_head's FP8 copy in place of the lm_head. Where they are our
        kernels, also the graphs of those rounds of one token whose request filters nothing: one round, and several
        behind one another.
        """
        rounds, forward = Rounds(self.sizes, self.places, self._driver.info.multiprocessors), self.part.forward

        def captured(
            source: ForwardSource | None, tokens: int, draws: bool, launches: Sequence[Iterable[Launch]], count: int = 1
        ) -> int:
            opening, closing = map(list, launches)
            between = source.launches(tokens, draws) if source else []
            self.kernels.prepare([*opening, *between, *closing])
            if source:
                source.warm_up(tokens, draws)

            def record(recorder: Recorder) -> None:
                for _ in range(count):
                    for launch in opening:
                        recorder.launch(launch)
                    if source:
                        source.capture(recorder, tokens, draws)
                    for launch in closing:
                        recorder.launch(launch)

            executable = capture_graph(self._driver, stream, self.kernels.functions, record)
            exit_stack.callback(self._driver.destroy_executable, executable)
            return executable

        def round_of(source: ForwardSource, tokens: int, draws: bool, sampler: str = FULL, count: int = 1) -> int:
            launches = (rounds.opening(tokens), rounds.closing(tokens, draws, sampler))
            return captured(source, tokens, draws, launches, count)

        self._graphs = {
            tokens: round_of(sources[forward.decode], tokens, draws=True) for tokens in self.part.tree_sizes
        }
        samplers = {PLAIN: "fused", SCAN: "scan"} if forward.decode == "fused" else {}
        for sampler, name in samplers.items():
            if name not in sources:
                continue
            self._singles[sampler] = round_of(sources[name], 1, True, sampler)
            if not self.part.prefix:  # a draft model's rounds are launched one by one
                self._bursts[sampler] = round_of(sources[name], 1, True, sampler, BURST_ROUNDS)
        self._prefill = round_of(sources[forward.prefill], TREE_TOKENS, draws=False)
        if self.sizes.medusa is not None:
            self._heads = captured(None, 0, False, (rounds.medusa(), ()))

    @property
    def handover(self) -> dict[str, Any]:
        """What the core learns about this model: handles, addresses on the host and sizes, all plain integers."""
        return {
            "graphs": dict(self._graphs),
            "singles": dict(self._singles),
            "bursts": dict(self._bursts),
            "burst_rounds": BURST_ROUNDS if self._bursts else 0,
            "prefill": self._prefill,
            **self.host,
            "vocabulary": self.sizes.model.vocabulary,
            "context_tokens": self.sizes.context,
            "page_count": self.sizes.page_count,
            "medusa": self._heads,
            "medusa_heads": self.sizes.medusa.heads if self.sizes.medusa else 0,
            "kv_bytes": self.sizes.kv_bytes,
            "kv_pages": self.places.region("KV pages"),
        }

    def _map_host_blocks(self, exit_stack: ExitStack) -> HostBlocks:
        """Zeroed."""
        requests = ROUND_SLOTS * ctypes.sizeof(RoundRequest)
        results = ROUND_SLOTS * ctypes.sizeof(RoundResult)
        control = ctypes.sizeof(HostControl)
        offsets = {"requests": 0, "results": requests, "control": requests + results}
        offsets["pages"] = offsets["control"] + control
        offsets["text"] = offsets["pages"] + round_up(4 * self.sizes.table_pages, 64)
        nbytes = offsets["text"] + round_up(4 * self.sizes.context, 64)
        host, device = self._driver.allocate_host(nbytes)
        exit_stack.callback(self._driver.free_host, host)
        ctypes.memset(host, 0, nbytes)
        self.host = {name: host + offset for name, offset in offsets.items()}
        return HostBlocks(**{name: device + offset for name, offset in offsets.items()})
