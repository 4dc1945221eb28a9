"""The graph program: an engine's memory, weights, kernels and captured graphs, made at load and owned until it ends."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np

from ull.bundle import Bundle
from ull.errors import BundleError
from ull.gpu.arena import Arena
from ull.gpu.capture import capture_graph
from ull.gpu.checks import check_device, check_size, other_processes
from ull.gpu.driver import Driver
from ull.gpu.forward import Forward, Recorder
from ull.gpu.fused import FusedForward
from ull.gpu.launch import Launch
from ull.gpu.memory import Sizes, plan_memory, rope_table
from ull.gpu.modules import Kernels
from ull.gpu.params import ROUND_SLOTS, TREE_TOKENS, HostControl, RoundRequest, RoundResult, State
from ull.gpu.places import HostBlocks, Places
from ull.gpu.replay import Replay
from ull.gpu.rounds import Rounds
from ull.gpu.weights import Staging, WeightImage, random_fills, random_vectors, upload
from ull.layout import MEDUSA, round_up
from ull.log import Log


def load(
    bundle: Bundle,
    context: int | None = None,
    pages: int | None = None,
    log: Log | None = None,
    persistent: bool = False,
) -> Program:
    """The program of a bundle on GPU 0; `log` None says nothing but warnings. Raises as `Program` does."""
    return Program(bundle, log or Log("warning"), context, pages, persistent=persistent)


class Program:
    """Everything that the core replays. Raises GpuError, BundleError or OSError; what was acquired is released.

    `context` (tokens of one request) and `pages` (of the KV pool) default to what the bundle offers and what one such
    request needs. `persistent`: our kernels for the layers of a plain round are one instead of a chain. `driver` is for
    tests.
    """

    def __init__(
        self,
        bundle: Bundle,
        log: Log,
        context: int | None = None,
        pages: int | None = None,
        device: int = 0,
        driver: Driver | None = None,
        persistent: bool = False,
    ) -> None:
        self._exit = ExitStack()
        self._replay: Replay | None = None
        self._open_sources: dict[str, Forward] = {}
        self.resident_bytes = 0  # of device memory that graphs and TensorRT took beside the arena
        self._bundle, self._log, self._persistent = bundle, log, persistent
        manifest = bundle.manifest
        medusa = manifest.medusa
        self.sizes = Sizes(manifest.model, manifest.precision, context or manifest.model.context, pages, medusa)
        with ExitStack() as exit_stack:
            self._driver = driver or Driver(device)
            self._check()
            self._driver.open()
            exit_stack.callback(self._driver.close)
            self._load(exit_stack)
            self._exit = exit_stack.pop_all()

    @property
    def handover(self) -> dict[str, Any]:
        """What `_native.GraphExecutor` takes: handles, addresses on the host and sizes, all plain integers."""
        return {
            "graphs": dict(self._graphs),
            "prefill": self._prefill,
            "stream": self._stream,
            "context": self._driver.context,
            **self._host,
            "vocabulary": self.sizes.model.vocabulary,
            "context_tokens": self.sizes.context,
            "page_count": self.sizes.page_count,
            "medusa": self._draft,
            "medusa_heads": self.sizes.medusa.heads if self.sizes.medusa else 0,
            "medusa_bytes": self._image.bytes_of(MEDUSA),
            "weight_bytes": self._image.nbytes - self._image.bytes_of(MEDUSA) + self._plan_bytes,
            "kv_bytes": self.sizes.kv_bytes,
            "name": f"graph/{self._bundle.manifest.target}",
            "library": "libcuda.so.1",
            "reuse": self._bundle.manifest.forward.reuse,
        }

    def replay(self) -> Replay:
        """The one that replays the graphs where the core does not: rounds are counted on the device too."""
        if self._replay is None:
            self._replay = Replay(self.handover, self._driver, self._arena.address("logits"))
        return self._replay

    def abandon(self) -> None:
        """Gives nothing back, now or at the end of the process: a device that has failed may never answer."""
        for source in self._open_sources.values():
            source.abandon()
        self._exit.pop_all()

    def close(self) -> None:
        """Gives everything back. The core must have stopped replaying."""
        self._exit.close()

    def _check(self) -> None:
        """What can be told before anything is allocated."""
        info = self._driver.info
        check_device(self._bundle, info)
        self._image = WeightImage(self._bundle.tensors)
        self._plan = plan_memory(self.sizes, self._image.nbytes)
        self._plan_bytes = 0
        if (plans := self._bundle.manifest.forward.plans) is not None:
            from ull.gpu import tensorrt

            self._tensorrt = tensorrt.check_plans(plans, info)
            tensorrt.reserve(self._plan, self.sizes, plans)
            self._plan_bytes = max(plans.resident_bytes, tensorrt.plan_bytes(self._bundle))
        check_size(self._plan.nbytes + self._plan_bytes, info)
        if others := other_processes(info):
            listed = ", ".join(map(str, others))
            self._log.warning("gpu", message=f"other processes compute on {info.name}: they cost latency", pids=listed)

    def _load(self, exit_stack: ExitStack) -> None:
        driver = self._driver
        kernels = Kernels(driver, self._bundle)
        exit_stack.callback(kernels.close)
        self._stream = driver.create_stream()
        exit_stack.callback(driver.destroy_stream, self._stream)
        self._arena = Arena(driver, self._plan, self._plan_bytes)
        exit_stack.callback(self._arena.close)
        blocks = self._map_host_blocks(exit_stack)
        places = Places(self._arena.address, self._tensor, blocks)
        self._fill_memory(kernels)
        self._capture(kernels, places, exit_stack)
        info = driver.info
        self._log.info("gpu", device=info.name, driver=f"{info.driver[0]}.{info.driver[1]}", bytes=self._plan.nbytes)

    def _tensor(self, name: str) -> int | None:
        offset = self._image.offset(name)
        return None if offset is None else self._arena.address("weights") + offset

    def _map_host_blocks(self, exit_stack: ExitStack) -> HostBlocks:
        """Mapped host memory, zeroed: requests, results, control, then page table and text."""
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
        self._host = {name: host + offset for name, offset in offsets.items()}
        return HostBlocks(**{name: device + offset for name, offset in offsets.items()})

    def _fill_memory(self, kernels: Kernels) -> None:
        """Weights, rope table, the first state; the rest is zeroed, so that padding holds numbers."""
        driver, arena, bundle = self._driver, self._arena, self._bundle
        weights = self._plan.regions["weights"]
        rest = weights.offset + weights.nbytes
        driver.fill(arena.base + rest, 0, self._plan.nbytes - rest, self._stream)
        state = State(sequence=1)
        table = rope_table(self.sizes.model, self.sizes.context)
        with Staging(driver, self._stream) as staging:
            if bundle.manifest.random_weights:
                self._make_weights(kernels, staging)
            else:
                try:
                    upload(bundle.weights_path, self._image, arena.address("weights"), staging, self._report)
                except OSError as error:
                    reason = error.strerror or str(error)
                    raise BundleError(f"{bundle.weights_path} cannot be read ({reason})") from error
            staging.copy(arena.address("rope"), table)
            staging.copy(arena.address("state"), np.frombuffer(bytes(state), np.uint8))

    def _make_weights(self, kernels: Kernels, staging: Staging) -> None:
        driver, target = self._driver, self._arena.address("weights")
        self._log.info("loading", message="random weights are made up on the device", bytes=self._image.nbytes)
        fills = random_fills(self._bundle, self._image, target, driver.info.multiprocessors)
        kernels.prepare(fills)
        for fill in fills:
            function = kernels.functions[fill.kernel]
            driver.launch(function, fill.grid, fill.threads, fill.shared_bytes, self._stream, fill.params, False)
        for name, values in random_vectors(self._bundle).items():
            staging.copy(target + (self._image.offset(name) or 0), values)

    def _report(self, done: int, of_all: int) -> None:
        self._log.info("loading", weights=f"{done / 1e9:.2f} of {of_all / 1e9:.2f} GB")

    def _sources(self, places: Places, exit_stack: ExitStack) -> dict[str, Forward]:
        """The forward sources that the bundle's phases name, by name."""
        forward, sources = self._bundle.manifest.forward, dict[str, Forward]()
        if forward.uses("fused"):
            fused = FusedForward(self.sizes, places, self._driver.info.multiprocessors, self._persistent)
            if self._persistent:
                parameters = np.frombuffer(fused.layer_parameters(), np.uint8)
                with Staging(self._driver, self._stream) as staging:
                    staging.copy(self._arena.address("layer parameters"), parameters)
            sources["fused"] = fused
        if forward.uses("tensorrt"):
            from ull.gpu.tensorrt import TensorRtForward  # installed only where a bundle asks for it

            plans = TensorRtForward(
                self._tensorrt, self._bundle, self.sizes, places, self._driver, self._stream, self._log
            )
            exit_stack.callback(plans.close)
            sources["tensorrt"] = plans
        self._open_sources = sources
        return sources

    def _capture(self, kernels: Kernels, places: Places, exit_stack: ExitStack) -> None:
        """One graph per number of tokens, one that only fills the cache, and one of the Medusa heads, if there are."""
        rounds, free = Rounds(self.sizes, places, self._driver.info.multiprocessors), self._driver.memory_info()[0]
        sources, forward = self._sources(places, exit_stack), self._bundle.manifest.forward

        def captured(source: Forward, tokens: int, draws: bool) -> int:
            opening, closing = rounds.opening(tokens), rounds.closing(tokens, draws)
            kernels.prepare([*opening, *source.launches(tokens, draws), *closing])
            source.warm_up(tokens, draws)

            def record(recorder: Recorder) -> None:
                _record(recorder, opening)
                source.capture(recorder, tokens, draws)
                _record(recorder, closing)

            executable = capture_graph(self._driver, self._stream, kernels.functions, record)
            exit_stack.callback(self._driver.destroy_executable, executable)
            return executable

        decode, prefill = sources[forward.decode], sources[forward.prefill]
        self._graphs = {tokens: captured(decode, tokens, draws=True) for tokens in forward.tree_sizes}
        self._prefill = captured(prefill, TREE_TOKENS, draws=False)
        self._draft = 0
        if self.sizes.medusa is not None:
            draft = rounds.draft()
            kernels.prepare(draft)
            self._draft = capture_graph(
                self._driver, self._stream, kernels.functions, lambda recorder: _record(recorder, draft)
            )
            exit_stack.callback(self._driver.destroy_executable, self._draft)
        self._driver.synchronize(self._stream)
        self.resident_bytes = max(0, free - self._driver.memory_info()[0])


def _record(recorder: Recorder, launches: list[Launch]) -> None:
    for launch in launches:
        recorder.launch(launch)
