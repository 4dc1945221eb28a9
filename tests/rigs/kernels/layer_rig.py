"""A model's layers on the emulated kernels, by the launches that the engine would capture: the chain, or one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import emulation
from emulation import aligned, pointer
from ull.bundle import Model, Precision, Rope, TensorShape, device_macros, device_tensors
from ull.gpu.arena import ArenaPlan
from ull.gpu.fused import FusedForward
from ull.gpu.geometry.linear import LINE_WORDS
from ull.gpu.launch import Launch
from ull.gpu.memory import TAP_RING, TAP_ROWS, Sizes, plan_memory, rope_table
from ull.gpu.params import TREE_TOKENS, Round
from ull.gpu.places import HostBlocks, Places

SOURCES = [f"{name}.cu" for name in ("attention", "down", "gate_up", "head", "layers", "output", "qkv")]
COMPARED = ("residual", "qkv", "attention", "mlp", "KV pages", "logits")
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def model_of(**changes: Any) -> Model:
    """A small Llama, but for `changes`."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "hidden": 128,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "intermediate": 352,
        "vocabulary": 112,
        "tokenizer_vocabulary": 64,
        "context": 1024,
        "rms_epsilon": 1e-5,
        "tied_embeddings": True,
        "qk_norm": False,
        "rope": Rope(theta=10000.0),
    }
    fields |= changes
    return Model(**{"windows": [0] * fields["layers"]} | fields)


def numbers_of(macros: dict[str, str]) -> dict[str, int | float]:
    """What `emulation.build` takes for a bundle's macros."""
    named = {name.removeprefix("ULL_"): value for name, value in macros.items()}
    return {key: float(value.rstrip("F")) if key == "RMS_EPSILON" else int(value) for key, value in named.items()}


def random_tensors(
    shapes: dict[str, TensorShape], rng: np.random.Generator, biases: bool = False
) -> dict[str, NDArray[Any]]:
    """Weights for every tensor but the embedding, in stored form."""
    return {
        name: _random(rng, name, DTYPES[shape.dtype], shape.shape)
        for name, shape in shapes.items()
        if not name.startswith("embed.") and (biases or not name.endswith(".bias"))
    }


def _random(rng: np.random.Generator, name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    array = aligned(shape, dtype)
    size = int(np.prod(shape))
    if name.endswith("kv_scale"):
        values = 2.0 ** rng.integers(-4, -2, size)
    elif name.endswith("scale"):
        values = rng.uniform(0.05, 0.15, size)
    elif "norm" in name:
        values = rng.uniform(0.5, 1.5, size)
    else:
        values = rng.standard_normal(size)
    array.reshape(-1)[...] = values.astype(dtype)
    return array


class Layers:
    """Weights and a KV cache of random numbers; `run` plays one round whose first token stands at `position`.

    `tuning`: macros of `ull_build.code.kernels.TUNING` that are not as in `emulation.TINY_MODEL`. `taps`: layers whose
    residual is kept.
    """

    def __init__(
        self,
        model: Model,
        precision: Precision,
        biases: bool = False,
        reports: bool = False,
        tuning: Mapping[str, int] | None = None,
        sources: Sequence[str | Path] = SOURCES,
        taps: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.sizes = Sizes(model, precision, model.context, taps=taps)
        macros = numbers_of(device_macros(model, precision, taps=len(taps))) | dict(tuning or {})
        self.kernels = emulation.build(sources, macros, reports=reports)
        self._rng = np.random.default_rng(11)
        self.prefetched: list[
            tuple[str, list[emulation.Prefetch]]
        ] = []  # what each kernel of the last run asked L2 for
        self.tensors = random_tensors(device_tensors(model, precision), self._rng, biases)
        plan: ArenaPlan = plan_memory(self.sizes, 0)
        self._bytes = {name: region.nbytes for name, region in plan.regions.items()}
        stored = ml_dtypes.bfloat16 if precision.kv == "bf16" else ml_dtypes.float8_e4m3fn
        self._pages = self._rng.standard_normal(self._bytes["KV pages"] // np.dtype(stored).itemsize).astype(stored)
        self._residual = self._rng.standard_normal((TREE_TOKENS, model.hidden)).astype(np.float32)
        self.memory: dict[str, NDArray[Any]] = {}  # of the last run, by region

    def run(
        self,
        position: int,
        multiprocessors: int,
        persistent: bool,
        seed: int = 0,
        count: int = 1,
        draws: bool = True,
        tokens: int = 1,
        scans: bool = False,
        after: Callable[[Launch], None] = lambda launch: None,
    ) -> dict[str, bytes]:
        """What the round leaves in `COMPARED` and "arrivals".

        `count` tokens, a chain, by the kernels for `tokens`. `seed` orders threads and blocks. No `draws`: no head;
        `scans`: its FP8 copy. `after` hears of each launch.
        """
        self.memory = memory = {name: aligned(nbytes, np.uint8, 0) for name, nbytes in self._bytes.items()}
        for name in (TAP_ROWS, TAP_RING):
            if name in memory:
                memory[name][...] = 0xFF
        round_ = Round.from_buffer(memory["round"])
        round_.count, round_.base, round_.draws = count, position, 1
        for node in range(count):
            round_.depths[node] = node
            round_.path[node][: node + 1] = list(range(node + 1))
        memory["KV pages"][...] = self._pages.view(np.uint8)
        residual = memory["residual"].view(np.float32).reshape(TREE_TOKENS, -1)
        residual[:count, : self.model.hidden] = self._residual[:count]
        memory["rope"].view(np.float32)[...] = rope_table(self.model, self.model.context).reshape(-1)
        pages = memory["page table"].view(np.int32)
        pages[: self.sizes.table_pages] = np.random.default_rng(3).permutation(self.sizes.page_count)
        places = Places(
            lambda name: pointer(memory[name]),
            lambda name: pointer(self.tensors[name]) if name in self.tensors else None,
            HostBlocks(0, 0, 0, 0, 0, 0),
        )
        forward = FusedForward(self.sizes, places, multiprocessors, persistent, scans)
        memory["layer parameters"][...] = np.frombuffer(forward.layer_parameters(), np.uint8)
        # The pages are of earlier rounds, and begin has ended before the first of these launches: what those wrote may
        # be read before the wait, also by bulk copies.
        written = [memory[name] for name in ("residual", "qkv", "attention", "mlp", "normed", "partial sums")]
        earlier = [memory[name] for name in ("round", "page table", "KV pages")]
        constants = [*self.tensors.values(), *(memory[name] for name in ("layer parameters", "rope"))]
        self.prefetched.clear()

        def hear(launch: Launch) -> None:
            self.prefetched.append((launch.kernel, self.kernels.prefetches()))
            after(launch)

        emulation.run_launches(
            self.kernels,
            forward.launches(tokens, draws),
            seed * 1000,
            written,
            constants,
            earlier,
            after=hear,
        )
        result = {name: memory[name].tobytes() for name in COMPARED}
        counters = memory["counters"].view(np.uint32)
        result["arrivals"] = counters[self.sizes.layers_counter :].tobytes()
        assert tokens > 1 or not counters[: self.sizes.layers_counter].any()
        return result


def arrivals(result: dict[str, bytes]) -> NDArray[np.uint32]:
    """The counters of the kernel of all layers. The rest of their lines must not have been touched."""
    words = np.frombuffer(result["arrivals"], np.uint32)
    lines = words[: len(words) // LINE_WORDS * LINE_WORDS].reshape(-1, LINE_WORDS)
    assert not lines[:, 1:].any() and not words[lines.size :].any()
    return lines[:, 0]
