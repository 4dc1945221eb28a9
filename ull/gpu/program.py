"""The graph program: an engine's memory, weights, kernels and captured graphs, made at load and owned until it ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ull.bundle import DRAFT, MEDUSA, Bundle, DflashPart, EaglePart, device_parts
from ull.errors import BundleError
from ull.gpu.arena import Arena, ArenaPlan
from ull.gpu.checks import check_device, check_size, other_processes
from ull.gpu.device_model import CapturedDflash, CapturedEagle, CapturedModel, PlacedModel, PlannedModel
from ull.gpu.driver import Driver
from ull.gpu.forward import ForwardSource
from ull.gpu.memory import Sizes
from ull.gpu.modules import Kernels
from ull.gpu.replay import Replay
from ull.gpu.weights import Staging, WeightImage, random_fills, random_vectors, upload
from ull.log import Log

UNLIKE = (  # after the name of a GPU
    "the matrix products of warpgroups do not have the bits of a warp's: prompts are read 64 tokens at a time instead "
    "of 512, which takes longer"
)


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
        self._open_sources: dict[str, ForwardSource] = {}
        self.resident_bytes = 0  # of device memory that graphs and TensorRT took beside the arena
        self._bundle, self._log, self._persistent = bundle, log, persistent
        with ExitStack() as exit_stack:
            self._driver = driver or Driver(device)
            planned = self._check(context or bundle.manifest.model.context, pages)
            self._driver.open()
            exit_stack.callback(self._driver.close)
            self._models, self._heads = self._load(planned, exit_stack)
            self._exit = exit_stack.pop_all()

    @property
    def sizes(self) -> Sizes:
        """Of the model that is served."""
        return self._models[""].sizes

    @property
    def handover(self) -> dict[str, Any]:
        """What `_native.GraphExecutor` takes: handles, addresses on the host and sizes, all plain integers.

        "draft" is the same of the draft model, "eagle" and "dflash" what is to be known of such a head; where there is
        none, it is missing.
        """
        bytes_of = self._image.bytes_of
        medusa, draft = bytes_of(MEDUSA), bytes_of(DRAFT)
        heads = {name: bytes_of(f"{name}.") for name in self._heads}
        shared = {
            "stream": self._stream,
            "context": self._driver.context,
            "name": f"graph/{self._bundle.manifest.target}",
            "library": "libcuda.so.1",
        }
        handover = {
            **self._models[""].handover,
            **shared,
            "medusa_bytes": medusa,
            "weight_bytes": self._image.nbytes - medusa - draft - sum(heads.values()) + self._plan_bytes,
            "reuse": self._bundle.manifest.forward.reuse,
        }
        if DRAFT in self._models:
            own = self._models[DRAFT].handover
            handover["draft"] = {**own, **shared, "medusa_bytes": 0, "weight_bytes": draft}
        for name, head in self._heads.items():
            handover[name] = {**head.handover, **shared, "weight_bytes": heads[name]}
        return handover

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

    def _check(self, context: int, pages: int | None) -> list[PlannedModel]:
        """What can be told before anything is allocated."""
        info = self._driver.info
        check_device(self._bundle, info)
        self._image = WeightImage(self._bundle.tensors)
        self._plan = ArenaPlan()
        self._plan.reserve("weights", self._image.nbytes)
        models = [PlannedModel.plan(part, context, pages, self._plan) for part in device_parts(self._bundle.manifest)]
        self._plan_bytes = 0
        if (plans := self._bundle.manifest.forward.plans) is not None:
            from ull.gpu.tensorrt import forward as tensorrt

            self._tensorrt = tensorrt.check_plans(plans, info)
            tensorrt.reserve(self._plan, models[0].sizes, plans)
            self._plan_bytes = max(plans.resident_bytes, tensorrt.plan_bytes(self._bundle))
        check_size(self._plan.nbytes + self._plan_bytes, info)
        if others := other_processes(info):
            listed = ", ".join(map(str, others))
            self._log.warning("gpu", message=f"other processes compute on {info.name}: they cost latency", pids=listed)
        return models

    def _load(
        self, planned: list[PlannedModel], exit_stack: ExitStack
    ) -> tuple[dict[str, CapturedModel], dict[str, CapturedEagle | CapturedDflash]]:
        """The models by prefix, and the heads with a cache of their own by the drafter's name."""
        driver, kernels = self._driver, list[Kernels]()
        for model in planned:
            kernels.append(Kernels(driver, self._bundle, model.part.code))
            exit_stack.callback(kernels[-1].close)
        self._stream = driver.create_stream()
        exit_stack.callback(driver.destroy_stream, self._stream)
        self._arena = Arena(driver, self._plan, self._plan_bytes)
        exit_stack.callback(self._arena.close)
        placed = [
            model.place(driver, own, self._arena, self._image, exit_stack)
            for model, own in zip(planned, kernels, strict=True)
        ]
        self._fill_memory(placed)
        captured = self._capture(placed, exit_stack)
        info = driver.info
        self._log.info("gpu", device=info.name, driver=f"{info.driver[0]}.{info.driver[1]}", bytes=self._plan.nbytes)
        return captured

    def _fill_memory(self, models: list[PlacedModel]) -> None:
        """Weights, and what each model begins with; the rest is zeroed, so that padding holds numbers."""
        driver, arena, bundle = self._driver, self._arena, self._bundle
        weights = self._plan.regions["weights"]
        rest = weights.offset + weights.nbytes
        driver.fill(arena.base + rest, 0, self._plan.nbytes - rest, self._stream)
        with Staging(driver, self._stream) as staging:
            if bundle.manifest.random_weights:
                self._make_weights(models[0].kernels, staging)
            else:
                try:
                    upload(bundle.weights_path, self._image, arena.address("weights"), staging, self._report)
                except OSError as error:
                    reason = error.strerror or str(error)
                    raise BundleError(f"{bundle.weights_path} cannot be read ({reason})") from error
            for model in models:
                persistent = self._persistent and model.part.forward.uses("fused")
                for address, values in model.first_contents(persistent):
                    staging.copy(address, values)

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

    def _sources(self, model: PlacedModel, exit_stack: ExitStack) -> dict[str, ForwardSource]:
        """The forward sources that the model's phases name, by name."""
        forward, sources = model.part.forward, dict[str, ForwardSource]()
        if forward.uses("fused"):
            sources["fused"] = model.fused(self._persistent)
            scans = model.part.precision.lm_head_scan
            if scans:
                sources["scan"] = model.fused(self._persistent, scans=True)
            # A draft model's are not measured behind a long cache; and of all layers' one kernel there is one grid.
            if forward.decode == "fused" and not (model.part.prefix or self._persistent) and model.may_be_wide(1):
                sources["wide"] = model.fused(False, wide=True)
                if scans:
                    sources["wide scan"] = model.fused(False, scans=True, wide=True)
        if forward.uses("tensorrt"):
            from ull.gpu.tensorrt.forward import TensorRtForward  # installed only where a bundle asks for it

            plans = TensorRtForward(
                self._tensorrt, self._bundle, model.sizes, model.places, self._driver, self._stream, self._log
            )
            exit_stack.callback(plans.close)
            sources["tensorrt"] = plans
        return sources

    def _capture(
        self, placed: list[PlacedModel], exit_stack: ExitStack
    ) -> tuple[dict[str, CapturedModel], dict[str, CapturedEagle | CapturedDflash]]:
        free, models = self._driver.memory_info()[0], dict[str, CapturedModel]()
        heads = dict[str, CapturedEagle | CapturedDflash]()
        for model in placed:
            if isinstance(model.part, EaglePart):
                heads["eagle"] = model.capture_eagle(placed[0], self._stream, exit_stack)
                continue
            if isinstance(model.part, DflashPart):
                heads["dflash"] = model.capture_dflash(placed[0], self._stream, exit_stack)
                continue
            sources = self._sources(model, exit_stack)
            self._open_sources |= {model.part.prefix + name: source for name, source in sources.items()}
            models[model.part.prefix] = captured = model.capture(sources, self._stream, exit_stack)
            if model.sizes.chunks and not captured.chunk:
                self._log.warning("gpu", message=f"on {self._driver.info.name} {UNLIKE}")
        self._driver.synchronise(self._stream)
        self.resident_bytes = max(0, free - self._driver.memory_info()[0])
        return models, heads
