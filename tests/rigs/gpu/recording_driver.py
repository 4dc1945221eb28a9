"""A driver that computes nothing: memory is NumPy's, and what would run on the device is written down."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ull.errors import GpuError
from ull.gpu.driver import DeviceInfo, Driver

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, 150 << 30, (13, 0), bytes(16))
HOST_OFFSET = 1 << 40  # from a host address to the device's view of it


@dataclass
class Launched:
    """A launch as the driver saw it; `params` is a copy."""

    kernel: str
    function: int
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    params: Any
    overlaps: bool


PROBE = "ull_chunk_probe"


class RecordingDriver(Driver):
    """`graphs` holds the launches of each executable graph, `launches` those outside of any capture.

    What the kernel PROBE leaves is `differences`, without a flaw and with one.
    """

    def __init__(self, info: DeviceInfo = H200, free_bytes: int = 140 << 30) -> None:
        self.info = info
        self.free_bytes = free_bytes
        self.graphs: dict[int, list[Launched]] = {}
        self.launches: list[Launched] = []
        self.live: dict[str, set[int]] = {}  # kind of resource -> handles that have not been given back
        self.allowed: dict[str, int] = {}
        self.fail_at: Callable[[str], bool] = lambda call: False
        self._context = 0
        self._next = 1000
        self._memory: dict[int, Any] = {}
        self._capture: list[Launched] | None = None
        self._captured: dict[int, list[Launched]] = {}
        self.preferring: set[int] = set()  # functions that prefer shared memory
        self.granted = info.multiprocessors  # to our context
        self.resident = 1  # blocks of any kernel on a multiprocessor
        self._names: dict[int, str] = {}
        self._allowed_to: dict[int, int] = {}  # shared memory, by function
        self.differences = (0, 100)

    # ---- what tests look at

    def device_bytes(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        """A view of device memory."""
        for base, memory in self._memory.items():
            if base <= address and address + nbytes <= base + len(memory):
                return np.frombuffer(memory, np.uint8)[address - base : address - base + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are in no allocation")

    # ---- the driver

    def _acquire(self, call: str, kind: str, handle: int | None = None) -> int:
        if self.fail_at(call):
            raise GpuError("gpu_failed", f"{call} failed", "CUDA_ERROR_UNKNOWN")
        self._next += 1
        handle = self._next if handle is None else handle
        self.live.setdefault(kind, set()).add(handle)
        return handle

    def _release(self, kind: str, handle: int) -> None:
        self.live[kind].remove(handle)

    def open(self) -> None:
        self._context = self._acquire("open", "context")

    def close(self) -> None:
        self._release("context", self._context)

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes, self.info.memory_bytes

    def _buffer(self, nbytes: int) -> Any:
        memory = np.full(nbytes + 512, 0xFF, np.uint8)
        start = -memory.ctypes.data % 512
        return memory[start : start + nbytes]

    def allocate(self, nbytes: int) -> int:
        memory = self._buffer(nbytes)
        address = self._acquire("allocate", "memory", memory.ctypes.data)
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        self._release("memory", address)
        del self._memory[address]

    def allocate_host(self, nbytes: int) -> tuple[int, int]:
        memory = self._buffer(nbytes)
        address = self._acquire("allocate_host", "host", memory.ctypes.data)
        self._memory[address] = memory
        return address, address + HOST_OFFSET

    def free_host(self, address: int) -> None:
        self._release("host", address)
        del self._memory[address]

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.device_bytes(target, nbytes)[:] = self.device_bytes(source, nbytes)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, self.device_bytes(source, nbytes).ctypes.data, nbytes)

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        self.device_bytes(target, nbytes)[:] = byte

    def create_stream(self) -> int:
        return self._acquire("create_stream", "stream")

    def destroy_stream(self, stream: int) -> None:
        self._release("stream", stream)

    def synchronise(self, stream: int) -> None:
        assert self._capture is None, "a capturing stream cannot be waited for"

    def create_event(self) -> int:
        return self._acquire("create_event", "event")

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int) -> None: ...

    def destroy_event(self, event: int) -> None:
        self._release("event", event)

    def load_module(self, cubin: bytes) -> int:
        return self._acquire("load_module", "module")

    def unload_module(self, module: int) -> None:
        self._release("module", module)

    def function(self, module: int, name: str) -> int:
        self._next += 1
        self._names[self._next] = name
        return self._next

    def allow_shared_bytes(self, function: int, nbytes: int) -> None:
        assert nbytes <= self.info.shared_bytes
        self.allowed[self._names[function]] = self._allowed_to[function] = nbytes

    def resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        assert shared_bytes <= self._allowed_to[function]
        return self.resident

    def granted_multiprocessors(self) -> int:
        return self.granted

    def prefer_shared_memory(self, function: int) -> None:
        self.preferring.add(function)

    def launch(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        params: ctypes.Structure,
        overlaps: bool,
    ) -> None:
        if self.fail_at("launch"):
            raise GpuError("gpu_failed", "launch failed", "CUDA_ERROR_LAUNCH_FAILED")
        kernel = self._names[function]
        assert shared_bytes <= max(48 << 10, self._allowed_to.get(function, 0)), (
            f"{kernel}: shared memory is not allowed"
        )
        copy = type(params).from_buffer_copy(params)
        if kernel == PROBE:
            self.device_bytes(copy.differences, 4).view(np.uint32)[0] += self.differences[copy.flaw]
        launched = Launched(kernel, function, grid, threads, shared_bytes, copy, overlaps)
        (self.launches if self._capture is None else self._capture).append(launched)

    def begin_capture(self, stream: int) -> None:
        assert self._capture is None
        self._capture = []

    def end_capture(self, stream: int) -> int:
        assert self._capture is not None
        handle = self._acquire("end_capture", "graph")
        self._captured[handle] = self._capture
        self._capture = None
        return handle

    def instantiate(self, graph: int) -> int:
        handle = self._acquire("instantiate", "executable")
        self.graphs[handle] = self._captured[graph]
        return handle

    def node_types(self, graph: int) -> list[str]:
        return ["KERNEL"] * len(self._captured[graph])

    def destroy_graph(self, graph: int) -> None:
        self._release("graph", graph)

    def upload(self, executable: int, stream: int) -> None: ...

    def destroy_executable(self, executable: int) -> None:
        self._release("executable", executable)
