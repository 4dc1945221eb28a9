"""The read-only bandwidth of the GPU: the floor of every figure in this folder."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path

from stopwatch import Stopwatch

from ull.gpu.driver import Driver
from ull_build.code.kernels import compile_file

SOURCE = Path(__file__).parent / "read.cu"
STAGE_BYTES, STAGES = 8192, 24  # of ull_read_bulk
REPEATS = 20


class ReadParams(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("checksum", ctypes.c_uint64)]


def read_bandwidth(total_bytes: int = 8 << 30, repeats: int = REPEATS) -> dict[str, float]:
    """Bytes per second of each reading kernel, best of `repeats` over `total_bytes` that no cache holds."""
    exit_stack = ExitStack()  # closed only if all goes well: a device that has failed may never answer
    driver = Driver()
    driver.open()
    exit_stack.callback(driver.close)
    stream = driver.create_stream()
    exit_stack.callback(driver.destroy_stream, stream)
    module = driver.load_module(compile_file(SOURCE, {}).cubin)
    exit_stack.callback(driver.unload_module, module)
    data, checksum = driver.allocate(total_bytes), driver.allocate(256)
    exit_stack.callback(driver.free, data)
    exit_stack.callback(driver.free, checksum)
    driver.fill(data, 1, total_bytes, stream)
    blocks = driver.info.multiprocessors
    params = ReadParams(data, total_bytes, checksum)
    stopwatch = Stopwatch(stream)
    found = {}
    for name, kernel, grid, threads, shared_bytes in (
        ("bulk copies", "ull_read_bulk", blocks, 32, STAGES * (STAGE_BYTES + 8)),
        ("16-byte loads", "ull_read_loads", 2 * blocks, 512, 0),
    ):
        function = driver.function(module, kernel)
        driver.allow_shared_bytes(function, shared_bytes)
        times = []
        for _ in range(repeats):
            stopwatch.start()
            driver.launch(function, (grid, 1), threads, shared_bytes, stream, params, overlaps=False)
            times.append(stopwatch.stop())
        found[name] = total_bytes / (min(times) * 1e-3)
    exit_stack.close()
    return found
