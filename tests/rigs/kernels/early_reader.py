"""A kernel that reads what its predecessor writes, before or behind its wait (emulator/predecessor.cu)."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation import aligned, pointer

COUNT = 300


class ReaderParams(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("early", ctypes.c_int32),
    ]


def read(kernels: Any, early: bool) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What `ull_reader` should have read of an array that its predecessor writes, and what it has read."""
    source, output = aligned((COUNT, 4), np.uint32), aligned(COUNT, np.uint32)
    source[...] = np.arange(source.size).reshape(source.shape) + 7
    kernels.run(
        "ull_reader",
        grid=(-(-COUNT // 256), 1),
        threads=256,
        params=ReaderParams(pointer(source), pointer(output), COUNT, early),
        predecessor_writes=[source],
    )
    return source[:, 0].copy(), output
