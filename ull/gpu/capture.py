"""Captures rounds into CUDA graphs that the core replays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from ull.errors import GpuError
from ull.gpu.driver import Driver
from ull.gpu.forward import Recorder
from ull.gpu.launch import Launch

REPLAYABLE = {"KERNEL", "MEMCPY", "MEMSET", "EMPTY"}  # what may also stand in the body of a conditional node
OVERLAPPING = (9, 0)  # the first compute capability with programmatic dependent launch


class StreamRecorder:
    """Launches kernels on a capturing stream; each that `overlaps` may begin before the kernel of ours before it ends."""

    def __init__(self, driver: Driver, stream: int, functions: Mapping[str, int]) -> None:
        self._driver, self._functions = driver, functions
        self._stream = stream
        self._overlaps = False
        self._may_overlap = driver.info.capability >= OVERLAPPING

    def launch(self, launch: Launch) -> None:
        """The first kernel of a graph has no predecessor to overlap with: the graph before it must have ended."""
        function = self._functions[launch.kernel]
        overlaps = self._overlaps and launch.overlaps
        self._driver.launch(
            function, launch.grid, launch.threads, launch.shared_bytes, self._stream, launch.params, overlaps
        )
        self._overlaps = self._may_overlap

    def enqueue(self, work: Callable[[int], None]) -> None:
        """What others capture has ended before the next kernel of ours begins."""
        work(self._stream)
        self._overlaps = False


def capture_graph(driver: Driver, stream: int, functions: Mapping[str, int], record: Callable[[Recorder], None]) -> int:
    """Captures what `record` launches, instantiates and uploads it; returns the executable graph (CUgraphExec).

    Raises GpuError, also for a node that would make the host or another stream part of a round.
    """
    driver.begin_capture(stream)
    try:
        record(StreamRecorder(driver, stream, functions))
    except BaseException:
        with contextlib.suppress(GpuError):  # a stream must not stay in capture; what went wrong first is the reason
            driver.destroy_graph(driver.end_capture(stream))
        raise
    graph = driver.end_capture(stream)
    try:
        if foreign := set(driver.node_types(graph)) - REPLAYABLE:
            names = ", ".join(sorted(foreign))
            raise GpuError("gpu_failed", f"the captured round holds nodes that a round must not have: {names}")
        executable = driver.instantiate(graph)
    finally:
        driver.destroy_graph(graph)
    driver.upload(executable, stream)
    return executable
