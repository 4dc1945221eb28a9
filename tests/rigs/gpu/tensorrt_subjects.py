"""What the tests of TensorRT's networks work on: the fixtures of tests/oracle, which hold what transformers computes.

Their heads are small; the networks need only that all heads together are a multiple of 32 columns wide (device_problems
asks for more, for the attention kernel's sake).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import tensorrt_rig
from oracle.cases import CASES, Case
from ull.bundle import Model, Precision, Rope
from ull.gpu.tensorrt.library import make_logger
from ull_build.progress import Reporter
from ull_build.source.checkpoint import Checkpoint
from ull_build.tensorrt.graph import Graph
from ull_build.tensorrt.network import SegmentNetwork
from ull_build.tensorrt.weights import SegmentWeights

trt = tensorrt_rig.load()
from tensorrt.evaluation import evaluate  # noqa: E402

BF16 = Precision(weights="bf16", lm_head="bf16")
FP8 = Precision(weights="fp8", lm_head="bf16")
FP8_HEAD = Precision(weights="fp8", lm_head="fp8")

MODELS = {case.name: Checkpoint(case.directory).model for case in CASES}
FITTING = [case for case in CASES if MODELS[case.name].heads * MODELS[case.name].head_dim % 32 == 0]


def silent_logger() -> Any:
    """A logger for what must not fail: an error is raised."""

    def write(severity: str, message: str) -> None:
        assert not severity.endswith("error"), message

    return make_logger(trt, write)


@dataclass(frozen=True)
class Subject:
    """A fixture: its checkpoint, what transformers computes, and the largest input of each linear."""

    case: Case
    checkpoint: Checkpoint
    expected: dict[str, np.ndarray]
    amax: dict[str, float]

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.expected["prompt"], self.expected["greedy"]])

    def networks(self, precision: Precision, amax: Mapping[str, float] | None = None) -> Segments:
        return Segments(self.checkpoint, precision, self.amax if amax is None else amax)


class Segments:
    """The networks of all segments: a tensorrt_rig.Segment."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision, amax: Mapping[str, float]) -> None:
        self.graphs = describe_all(SegmentNetwork(checkpoint.model, SegmentWeights(checkpoint, precision), amax))

    def __call__(self, segment: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return evaluate(self.graphs[segment].network, inputs)


def describe_all(network: Any) -> dict[str, Graph]:
    """Every segment of a SegmentNetwork or NativeNetwork as a network."""
    builder, graphs = trt.Builder(silent_logger()), {}
    for segment in network.segments():
        graphs[segment] = Graph(trt, builder.create_network())
        network.add(graphs[segment], segment)
    return graphs


@cache
def subject(name: str) -> Subject:
    case = next(case for case in CASES if case.name == name)
    checkpoint = Checkpoint(case.directory)
    with np.load(case.directory / "expected.npz") as arrays:
        expected = dict(arrays)
    calibration = tensorrt_rig.Reference(checkpoint, None)
    tensorrt_rig.forward(checkpoint, calibration, expected["prompt"], 64)
    return Subject(case, checkpoint, expected, calibration.largest)


def relative_error(found: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(found - reference).max() / np.abs(reference).max())


def mean_error(found: np.ndarray, reference: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - reference).mean() / np.square(reference).mean()))


class Recorder(Reporter):
    """Remembers notes and how far the bar came; `on_advance` is called from whatever thread advances it."""

    def __init__(self, on_advance: Callable[[], None] = lambda: None) -> None:
        self.notes: list[str] = []
        self.done, self.total = 0, 0
        self.threads: set[str] = set()
        self._on_advance = on_advance

    @contextmanager
    def stage(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        self.total = total

        def advance(amount: int) -> None:
            assert amount >= 0
            self.done += amount
            self.threads.add(threading.current_thread().name)
            self._on_advance()

        yield advance

    def note(self, text: str) -> None:
        self.notes.append(text)


SMALL = Model("qwen3", 64, 2, 2, 1, 32, 96, 300, 300, 128, 1e-6, False, True, Rope(10000.0), [0, 0])  # with QK norms
