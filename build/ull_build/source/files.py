"""The files of a checkpoint: JSON objects, and memory-mapped safetensors."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import read_tensor_file
from ull.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"

_NUMPY = {"F8_E4M3": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}


class Shard:
    """One memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries = read_tensor_file(path)
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; download the checkpoint again", field=path.name) from error
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise CheckpointError(f"{path} {error}", field=path.name) from error

    def raw(self, name: str) -> NDArray[Any]:
        """The tensor as a view of the file: uint16 bits for BF16, uint8 codes for F8_E4M3, else its own type."""
        entry = self.entries[name]
        dtype = _NUMPY[entry.dtype]
        count = entry.nbytes // np.dtype(dtype).itemsize
        return np.frombuffer(self._map, dtype, count, entry.offset).reshape(entry.shape)

    def release(self, name: str, start: int, stop: int) -> None:
        """Lets the kernel drop the pages of bytes [start, stop) of the tensor from this process."""
        first = (self.entries[name].offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, self.entries[name].offset + stop - first)

    def close(self) -> None:
        # While an exception is on its way its frames may still hold views; the map then goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


def widened(raw: NDArray[Any]) -> NDArray[np.float32]:
    """Stored values (BF16 as uint16) as float32, in memory of their own: nothing is lost."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or directory that cannot be read."""
    remedy = ""
    if isinstance(error, PermissionError):
        remedy = f"; let user id {os.geteuid()} read it (chmod or chown, its directories too)"
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}{remedy}", field=path.name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the checkpoint again", field=path.name) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", field=path.name) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object", field=path.name)
    return value
