"""Work of this process as a kernel on the driver double: what a library enqueues that the double does not have."""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Callable
from typing import Any

from driver_double import cubin


class _Params(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("argument", ctypes.c_int64))


class HostCalls:
    """enqueue(stream, work): `work` runs in the stream's turn, at every replay if the stream is capturing."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []  # never forgotten: graphs may replay it at any time
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._call)
        self._function: Any = None
        self.failures: list[BaseException] = []

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        from cuda.bindings import driver

        if self._function is None:
            _, self._module = driver.cuModuleLoadData(cubin("fakecuda_call"))
            _, self._function = driver.cuModuleGetFunction(self._module, b"fakecuda_call")
        self._work.append(work)
        params = _Params(ctypes.cast(self._callback, ctypes.c_void_p).value, len(self._work) - 1)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        (status,) = driver.cuLaunchKernel(
            self._function, 1, 1, 1, 1, 1, 1, 0, driver.CUstream(stream), ctypes.addressof(arguments), 0
        )
        assert status == driver.CUresult.CUDA_SUCCESS, status

    def is_capturing(self, stream: int) -> bool:
        from cuda.bindings import driver

        status, found = driver.cuStreamIsCapturing(driver.CUstream(stream))
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return bool(found != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def _call(self, index: int) -> None:
        try:
            self._work[index]()
        except BaseException as error:  # the caller is C code: the test sees it here, and the reader on stderr
            self.failures.append(error)
            traceback.print_exc(file=sys.stderr)
