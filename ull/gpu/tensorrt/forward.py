"""TensorRT plans as the forward source: segments between which our own attention is captured, or one whole step.

    paged:  entry, attention 0, layer.0, attention 1, ..., attention L-1, exit, head
    native: step (attention and a linear KV cache inside), head

Each plan holds its weights; `Plans` of the manifest says which they are. A captured graph has an execution context of
its own per plan, and all contexts use one scratch region of the arena, since only one of them runs at a time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from ull.bundle import AttentionKind, Bundle, Plans, cache_positions, capability_text, round_up, segment_names
from ull.errors import BundleError, GpuError
from ull.gpu.arena import ArenaPlan
from ull.gpu.driver import DeviceInfo, Driver
from ull.gpu.forward import Recorder
from ull.gpu.launch import Launch
from ull.gpu.memory import Sizes
from ull.gpu.paged_attention import PagedAttention
from ull.gpu.params import TREE_TOKENS, Round
from ull.gpu.places import Places
from ull.gpu.tensorrt.library import load, make_logger, wheel
from ull.log import Log

_REBUILD = "rebuild the bundle on this machine with ull-build"
_INT32_BYTES, _BF16_BYTES = 4, 2


@dataclass(frozen=True)
class Segment:
    """One plan: the region of the arena behind each of its inputs and outputs, by the tensor's name."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    copies: dict[str, int] = field(default_factory=dict)  # region -> offset in Round of what is copied there before


def segments(layers: int, attention: AttentionKind) -> list[Segment]:
    """The plans of a forward in order of execution. The residual changes sides where a plan writes it anew."""
    sides, names = ("residual", "residual copy"), segment_names(layers, attention)
    if attention == "native":
        kinds = [(kind, layer) for kind in ("key", "value") for layer in range(layers)]
        caches = {f"{kind}_cache.{layer}": f"{kind} cache {layer}" for kind, layer in kinds}
        written = {name.replace("cache.", "cache_out."): region for name, region in caches.items()}
        copies = {"step base": Round.base.offset, "step depths": Round.depths.offset}
        inputs = {"residual": sides[0], "base": "step base", "depths": "step depths", **caches}
        return [
            Segment(names[0], inputs, {"residual_out": sides[1], **written}, copies),
            Segment(names[1], {"residual": sides[1]}, {"logits": "logits"}),
        ]
    found = [Segment(names[0], {"residual": sides[0]}, {"qkv": "qkv"})]
    for layer in range(layers):
        before, after = sides[layer % 2], sides[(layer + 1) % 2]
        is_last = layer == layers - 1
        outputs = {"residual_out": after} if is_last else {"residual_out": after, "qkv": "qkv"}
        found.append(Segment(names[1 + layer], {"attention": "attention", "residual": before}, outputs))
    return [*found, Segment(names[-1], {"residual": sides[layers % 2]}, {"logits": "logits"})]


def tensor_forms(sizes: Sizes, segment: Segment) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and trt.DataType of each tensor of a segment; -1 is the number of tokens."""
    model = sizes.model
    cache = (1, model.kv_heads, cache_positions(model.context), model.head_dim)
    forms: dict[str, tuple[tuple[int, ...], str]] = {
        "residual": ((-1, model.hidden), "FLOAT"),
        "residual_out": ((-1, model.hidden), "FLOAT"),
        "qkv": ((-1, sizes.qkv_width), "FLOAT"),
        "attention": ((sizes.attention_width // 32, TREE_TOKENS, 32), "HALF"),
        "logits": ((-1, round_up(model.vocabulary, 16)), "FLOAT"),
        "base": ((1,), "INT32"),
        "depths": ((-1,), "INT32"),
    }
    return {name: forms.get(name, (cache, "BF16")) for name in (*segment.inputs, *segment.outputs)}


def reserve(plan: ArenaPlan, sizes: Sizes, plans: Plans) -> None:
    """Adds the regions that the plans need beside those of every round."""
    plan.reserve("residual copy", plan.regions["residual"].nbytes)
    plan.reserve("plan scratch", plans.scratch_bytes)
    if plans.attention == "native":
        model = sizes.model
        plan.reserve("step base", _INT32_BYTES)
        plan.reserve("step depths", _INT32_BYTES * TREE_TOKENS)
        for layer in range(model.layers):
            for kind in ("key", "value"):
                positions = cache_positions(model.context)
                plan.reserve(f"{kind} cache {layer}", model.kv_heads * positions * model.head_dim * _BF16_BYTES)


def plan_bytes(bundle: Bundle) -> int:
    """Device memory that the plans' weights take, as far as their files tell."""
    plans = bundle.manifest.forward.plans
    return 0 if plans is None else sum(bundle.manifest.files[name].bytes for name in plans.files)


def check_plans(plans: Plans, info: DeviceInfo) -> Any:
    """The TensorRT module, if it and the GPU are those that the plans were built with. Raises GpuError."""
    trt = load()
    if trt.__version__ != plans.version:
        raise GpuError(
            "wrong_tensorrt",
            f"the bundle's plans were built by TensorRT {plans.version}, installed is {trt.__version__}; "
            f"install {wheel()}=={plans.version}, or {_REBUILD}",
        )
    capability = capability_text(info.capability)
    if (plans.gpu, plans.capability) != (info.name, capability):
        raise GpuError(
            "wrong_gpu",
            f"the bundle's TensorRT plans were built on {plans.gpu} (compute capability {plans.capability}), this is "
            f"{info.name} ({capability}); {_REBUILD}",
        )
    return trt


class TensorRtForward:
    """The plans of a bundle, deserialised. Raises GpuError or BundleError; `close` before the arena goes."""

    name = "tensorrt"

    def __init__(
        self, trt: Any, bundle: Bundle, sizes: Sizes, places: Places, driver: Driver, stream: int, log: Log
    ) -> None:
        plans = bundle.manifest.forward.plans
        assert plans is not None
        self._trt, self._plans, self._sizes, self._layers = trt, plans, sizes, sizes.model.layers
        self._places, self._driver, self._stream = places, driver, stream
        self._attention = PagedAttention(sizes, places, driver.info.multiprocessors)
        self._segments = segments(sizes.model.layers, plans.attention)
        self._last_error = ""
        self._log = log
        self._logger = make_logger(trt, self._hear)
        self._runtime = trt.Runtime(self._logger)
        self._engines: list[Any] = []
        self._contexts: dict[tuple[int, bool], list[Any]] = {}  # one set per captured graph
        for segment, name in zip(self._segments, plans.files, strict=True):
            self._engines.append(self._deserialise(bundle, name, segment))

    def close(self) -> None:
        """Gives back what TensorRT holds, contexts first."""
        self._contexts.clear()
        self._engines.clear()
        self._runtime = None

    def abandon(self) -> None:
        """Their destructors would free device memory, which waits for the device."""
        kept = [self._runtime, *self._engines, *(item for made in self._contexts.values() for item in made)]
        for item in kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))

    def launches(self, tokens: int, draws: bool) -> list[Launch]:
        if self._plans.attention == "native":
            return []
        return [launch for layer in range(self._layers) for launch in self._attention.launches(layer, tokens)]

    def warm_up(self, tokens: int, draws: bool) -> None:
        """Makes the contexts of one graph and runs each once: TensorRT allocates and loads lazily."""
        contexts = [self._make_context(index, tokens) for index in range(len(self._engines) - (0 if draws else 1))]
        self._contexts[tokens, draws] = contexts
        for segment, context in zip(self._segments, contexts, strict=False):
            self._enqueue(segment, context, self._stream)
        self._driver.synchronise(self._stream)

    def capture(self, recorder: Recorder, tokens: int, draws: bool) -> None:
        layers = iter(range(self._layers))
        for segment, context in zip(self._segments, self._contexts[tokens, draws], strict=False):
            if "attention" in segment.inputs:
                for launch in self._attention.launches(next(layers), tokens):
                    recorder.launch(launch)
            recorder.enqueue(lambda stream, of=segment, by=context: self._enqueue(of, by, stream))  # type: ignore[misc]

    def _deserialise(self, bundle: Bundle, name: str, segment: Segment) -> Any:
        path = bundle.path / name
        engine = self._runtime.deserialize_cuda_engine(bundle.read_verified(name, _REBUILD))
        if engine is None:
            reason = self._last_error or "no reason given"
            raise BundleError(f"TensorRT refuses {path}: {reason}; {_REBUILD}", field=name)
        self._check_tensors(name, engine, segment)
        return engine

    def _check_tensors(self, name: str, engine: Any, segment: Segment) -> None:
        """The plan is of this segment and model: each input and output has the shape and type of its region."""
        trt = self._trt
        found = {}
        for index in range(engine.num_io_tensors):
            tensor = engine.get_tensor_name(index)
            is_input = engine.get_tensor_mode(tensor) == trt.TensorIOMode.INPUT
            shape, dtype = tuple(engine.get_tensor_shape(tensor)), engine.get_tensor_dtype(tensor)
            found[tensor] = (is_input, shape, dtype)
        wanted = {
            tensor: (tensor in segment.inputs, shape, getattr(trt.DataType, dtype))
            for tensor, (shape, dtype) in tensor_forms(self._sizes, segment).items()
        }
        profiles = len(self._plans.profiles or self._plans.token_counts)
        if engine.name != segment.name or found != wanted or engine.num_optimization_profiles != profiles:
            raise BundleError(f"the plan {name} is not one of segment {segment.name!r}; {_REBUILD}", field=name)

    def _make_context(self, index: int, tokens: int) -> Any:
        """A context for `tokens` tokens with every address set. Raises GpuError."""
        engine, segment = self._engines[index], self._segments[index]
        context = engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise self._failed(segment, "makes no execution context")
        profile = self._plans.profile_of(tokens)
        try:
            context.set_optimization_profile_async(profile, self._stream)
        except RuntimeError as error:
            raise self._failed(segment, f"has no profile {profile}") from error
        self._driver.synchronise(self._stream)
        context.set_device_memory(self._places.region("plan scratch"), self._plans.scratch_bytes)
        for name, region in (segment.inputs | segment.outputs).items():
            if name in segment.inputs and -1 in (shape := list(engine.get_tensor_shape(name))):
                wanted = tuple(tokens if size == -1 else size for size in shape)
                if not context.set_input_shape(name, wanted):
                    raise self._failed(segment, f"refuses the shape {wanted} of {name!r}")
            if not context.set_tensor_address(name, self._places.region(region)):
                raise self._failed(segment, f"refuses the address of {name!r}")
        return context

    def _enqueue(self, segment: Segment, context: Any, stream: int) -> None:
        start = self._places.region("round")
        for region, offset in segment.copies.items():
            nbytes = _INT32_BYTES * (TREE_TOKENS if region == "step depths" else 1)
            self._driver.copy_on_device(self._places.region(region), start + offset, nbytes, stream)
        if not context.execute_async_v3(stream):
            raise self._failed(segment, "cannot be enqueued")

    def _hear(self, severity: str, message: str) -> None:
        if severity in ("error", "internal_error"):
            self._last_error = message
            self._log.error("tensorrt", message=message)
        elif severity == "warning":
            self._log.warning("tensorrt", message=message)

    def _failed(self, segment: Segment, what: str) -> GpuError:
        reason = f": {self._last_error}" if self._last_error else ""
        return GpuError("gpu_failed", f"TensorRT's plan of segment {segment.name!r} {what}{reason}")
