"""A driver whose device memory is this process's own, for what runs contexts of the double of TensorRT."""

from __future__ import annotations

import ctypes

import numpy as np

ALIGNMENT = 256


class HostDriver:
    """The part of ull.gpu.driver.Driver that DeviceRunner uses; `open_buffers` are what was not given back."""

    def __init__(self, device: int = 0) -> None:
        self.open_buffers: dict[int, np.ndarray] = {}

    def open(self) -> None: ...

    def close(self) -> None:
        assert not self.open_buffers, "memory was not given back"

    def create_stream(self) -> int:
        return 5

    def destroy_stream(self, stream: int) -> None: ...

    def synchronise(self, stream: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % ALIGNMENT
        self.open_buffers[address] = raw
        return address

    def free(self, address: int) -> None:
        del self.open_buffers[address]

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    copy_to_host = copy_to_device
