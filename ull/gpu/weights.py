"""The weights on the device: an image of the bundle's weights file, uploaded or, for a benchmark bundle, made up."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Bundle, EaglePart, TensorEntry, device_parts
from ull.gpu.driver import Driver
from ull.gpu.geometry import sampling
from ull.gpu.launch import Launch
from ull.gpu.params import FillParams

CHUNK_BYTES = 32 << 20
Progress = Callable[[int, int], None]  # bytes done, of all

_REPORT_S = 2.0
_SEED = 0x756C6C  # of random weights
_FORMATS = {"F8_E4M3": 0, "F16": 1, "BF16": 2, "F32": 3}  # FillParams.format


class WeightImage:
    """Where tensors lie, relative to the first: offsets in the device's copy of the weights."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.start = min(entry.offset for entry in tensors.values())
        self.nbytes = max(entry.offset + entry.nbytes for entry in tensors.values()) - self.start
        self._tensors = tensors

    def offset(self, name: str) -> int | None:
        """Bytes from the image's start; None for a bias that the model does not have."""
        entry = self._tensors.get(name)
        return None if entry is None else entry.offset - self.start

    def bytes_of(self, prefix: str) -> int:
        """Of all tensors whose names begin so."""
        return sum(entry.nbytes for name, entry in self._tensors.items() if name.startswith(prefix))


class Staging:
    """Two page-locked buffers through which host data go to the device while the next piece is read. Closes itself."""

    def __init__(self, driver: Driver, stream: int, chunk: int = CHUNK_BYTES) -> None:
        self._driver, self._stream, self._chunk = driver, stream, chunk
        self._buffers: list[int] = []
        self._events: list[int] = []
        self._turn = 0
        with ExitStack() as exit_stack:
            for _ in range(2):
                self._buffers.append(driver.allocate_host(chunk)[0])
                exit_stack.callback(driver.free_host, self._buffers[-1])
                self._events.append(driver.create_event())
                exit_stack.callback(driver.destroy_event, self._events[-1])
            exit_stack.callback(driver.synchronise, stream)
            self._exit = exit_stack.pop_all()

    def copy(self, target: int, data: NDArray[Any], progress: Callable[[int], None] | None = None) -> None:
        """Copies a contiguous array to a device address; its bytes have been read on return."""
        source = data.reshape(-1).view(np.uint8)
        for start in range(0, len(source), self._chunk):
            piece = source[start : start + self._chunk]
            buffer, event = self._buffers[self._turn], self._events[self._turn]
            self._driver.wait(event)
            ctypes.memmove(buffer, piece.ctypes.data, len(piece))
            self._driver.copy_to_device(target + start, buffer, len(piece), self._stream)
            self._driver.record(event, self._stream)
            self._turn = 1 - self._turn
            if progress:
                progress(len(piece))

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()


def upload(path: Path, image: WeightImage, target: int, staging: Staging, progress: Progress | None = None) -> None:
    """Copies the weights file's tensors to the device address `target`. Raises OSError."""
    done, reported = 0, time.monotonic()

    def advance(nbytes: int) -> None:
        nonlocal done, reported
        done += nbytes
        now = time.monotonic()
        if progress and (now - reported > _REPORT_S or done == image.nbytes):
            reported = now
            progress(done, image.nbytes)

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # goes with the last array on it
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    staging.copy(target, np.frombuffer(mapped, np.uint8, image.nbytes, image.start), advance)


def random_fills(bundle: Bundle, image: WeightImage, target: int, multiprocessors: int) -> list[Launch]:
    """Launches that make up every matrix: even in [-1, 1], the scale of a row keeps activations near 1."""
    launches = []
    for number, (name, entry) in enumerate(bundle.tensors.items()):
        if not name.endswith(".weight"):
            continue
        params = FillParams(
            output=target + (image.offset(name) or 0),
            bytes=entry.nbytes,
            seed=_SEED + number,
            format=_FORMATS[entry.dtype],
            amplitude=1.0,
        )
        grid, threads, shared = sampling.fill(entry.nbytes, multiprocessors)
        launches.append(Launch("ull_fill", grid, threads, shared, params))
    return launches


def random_vectors(bundle: Bundle) -> dict[str, NDArray[Any]]:
    """The small tensors of a benchmark bundle: norms of 1, scales of sqrt(3 / K), which give outputs variance 1.

    The map of an EAGLE head's tokens too, which must hold tokens of the target, each once.
    """
    vectors, parts = dict[str, NDArray[Any]](), device_parts(bundle.manifest)[::-1]  # the target's begins every name
    for name, entry in bundle.tensors.items():
        stem, _, kind = name.rpartition(".")
        part = next(part for part in parts if name.startswith(part.prefix))
        if entry.dtype == "F32":
            value = math.sqrt(3.0 / part.columns(stem)) if kind == "scale" else 1.0
            vectors[name] = np.full(entry.shape, value, np.float32)
        elif kind == "d2t" and isinstance(part, EaglePart):
            known = np.arange(part.model.vocabulary) * part.target.vocabulary // part.model.vocabulary
            vectors[name] = np.pad(known.astype(np.int32), (0, entry.shape[0] - len(known)))
    return vectors
