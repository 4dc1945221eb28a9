"""Writes a safetensors file as a stream: the header first, then tensors in order, hashing every byte on its way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import ALIGNMENT, FILLER, FileEntry, TensorShape


class WeightsWriter:
    """Writes tensors of a known `plan` (name -> dtype and shape), in its order, each in one or more pieces.

    The header is padded with spaces so that the data start at a multiple of 64; the plan holds filler tensors where
    they are needed to make every other tensor start at one. A context manager; `finish` returns size and SHA-256.
    """

    def __init__(self, path: Path, plan: dict[str, TensorShape]) -> None:
        self._pending = list(plan.items())[::-1]
        self._name = ""
        self._remaining = 0
        self._bytes = 0
        self._hash = hashlib.sha256()
        self._file = path.open("wb")
        self._emit(_header(plan))

    def write(self, name: str, piece: NDArray[Any]) -> None:
        """Appends a piece of tensor `name`. Raises ValueError when it is out of order or too long."""
        if self._remaining == 0:
            self._name, shape = self._pending.pop()
            self._remaining = shape.nbytes
        if name != self._name or piece.nbytes > self._remaining:
            raise ValueError(f"{piece.nbytes} bytes of {name!r}, but {self._remaining} of {self._name!r} are due")
        self._remaining -= piece.nbytes
        self._emit(np.ascontiguousarray(piece).data.cast("B"))

    def finish(self) -> FileEntry:
        """Writes out what is buffered. Raises ValueError when tensors are incomplete."""
        if self._remaining or self._pending:
            raise ValueError(f"tensor {self._name!r} lacks {self._remaining} bytes, {len(self._pending)} are missing")
        self._file.flush()
        return FileEntry(sha256=self._hash.hexdigest(), bytes=self._bytes)

    def _emit(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _header(plan: dict[str, TensorShape]) -> bytes:
    """The 8-byte length and the JSON header, padded to ALIGNMENT."""
    offset = 0
    header = {}
    for name, shape in plan.items():
        if offset % ALIGNMENT and not name.endswith(FILLER):
            raise ValueError(f"tensor {name!r} would start at {offset}, no multiple of {ALIGNMENT}")
        header[name] = {
            "dtype": shape.dtype,
            "shape": list(shape.shape),
            "data_offsets": [offset, offset + shape.nbytes],
        }
        offset += shape.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
