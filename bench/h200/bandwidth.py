"""The read-only bandwidth of the GPU: the floor of every figure in this folder."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from ull_build.kernels import compile_file

SOURCE = Path(__file__).parent / "read.cu"
STAGE_BYTES, STAGES = 8192, 24  # of ull_read_bulk
REPEATS = 20


class ReadParams(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("checksum", ctypes.c_uint64)]


def _check(answer: tuple[Any, ...]) -> Any:
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {answer[0].name}")
    return answer[1] if len(answer) > 1 else None


def read_bandwidth(total_bytes: int = 8 << 30) -> dict[str, float]:
    """Bytes per second of each reading kernel, best of REPEATS over `total_bytes` that no cache holds."""
    image = compile_file(SOURCE, {}).cubin
    module = _check(driver.cuModuleLoadData(image))
    data = _check(driver.cuMemAlloc(total_bytes))
    checksum = _check(driver.cuMemAlloc(256))
    _check(driver.cuMemsetD32(data, 0x01020304, total_bytes // 4))
    multiprocessors = _check(
        driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0)
    )
    shared = STAGE_BYTES * STAGES + 8 * STAGES
    launches = {
        "bulk copies": ("ull_read_bulk", multiprocessors, 32, shared),
        "16-byte loads": ("ull_read_loads", 2 * multiprocessors, 512, 0),
    }
    events = [_check(driver.cuEventCreate(0)) for _ in range(2)]
    found = {}
    for name, (kernel, grid, threads, shared_bytes) in launches.items():
        function = _check(driver.cuModuleGetFunction(module, kernel.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        params = ReadParams(int(data), total_bytes, int(checksum))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        least = float("inf")
        for _ in range(REPEATS):
            _check(driver.cuEventRecord(events[0], 0))
            _check(
                driver.cuLaunchKernel(
                    function, grid, 1, 1, threads, 1, 1, shared_bytes, 0, ctypes.addressof(pointers), 0
                )
            )
            _check(driver.cuEventRecord(events[1], 0))
            _check(driver.cuEventSynchronize(events[1]))
            least = min(least, _check(driver.cuEventElapsedTime(*events)))
        found[name] = total_bytes / (least * 1e-3)
    _check(driver.cuMemFree(data))
    _check(driver.cuMemFree(checksum))
    _check(driver.cuModuleUnload(module))
    return found
