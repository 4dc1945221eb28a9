"""A safetensors file: what its tensors may be, where they lie, and the header that says so, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

MAX_HEADER_BYTES = 100_000_000  # the same bound as the safetensors library

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class TensorShape:
    """What a tensor of a bundle must look like; `optional` ones (biases) may be absent."""

    dtype: str
    shape: tuple[int, ...]
    optional: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a safetensors file: `offset` from the start of the file, in bytes."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def read_tensor_file(path: Path) -> dict[str, TensorEntry]:
    """Reads and checks the header of a safetensors file.

    Raises ValueError saying what is wrong (truncated, no header, overlapping or misdeclared tensors), OSError as usual.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"is truncated: {size} bytes, not even a safetensors header")
        length = int.from_bytes(start, "little")
        if start + file.read(32) == b"version https://git-lfs.github.com/spec/":
            raise ValueError("is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        if length > MAX_HEADER_BYTES:
            raise ValueError("is not a safetensors file (its header claims more than 100 MB)")
        if 8 + length > size:
            raise ValueError(f"is truncated: the header needs {8 + length} bytes, the file has {size}")
        file.seek(8)
        header = file.read(length)
    try:
        declared = msgspec.json.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"has a damaged safetensors header ({error})") from error
    if not isinstance(declared, dict):
        raise ValueError("has a damaged safetensors header (not a JSON object)")
    entries = {name: _entry(name, item, 8 + length) for name, item in declared.items() if name != "__metadata__"}
    _check_extents(entries, 8 + length, size)
    return entries


def _entry(name: str, item: Any, data_start: int) -> TensorEntry:
    """Checks one tensor of a safetensors header."""
    dtype = item.get("dtype") if isinstance(item, dict) else None
    shape = item.get("shape") if isinstance(item, dict) else None
    extent = item.get("data_offsets") if isinstance(item, dict) else None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"declares tensor {name!r} with the unknown dtype {dtype!r}")
    if not _is_size_list(shape) or not _is_size_list(extent) or len(extent) != 2 or extent[0] > extent[1]:
        raise ValueError(f"declares tensor {name!r} with a damaged shape or extent")
    if extent[1] - extent[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"declares tensor {name!r} with {extent[1] - extent[0]} bytes, which is not {dtype} {shape}")
    return TensorEntry(data_start + extent[0], extent[1] - extent[0], dtype, tuple(shape))


def _is_size_list(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_extents(entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must fill the file from the header's end to its own, without overlap or hole."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise ValueError(f"has a hole or an overlap before tensor {name!r}")
        end += entry.nbytes
    if end > size:
        raise ValueError(f"is truncated: its tensors need {end} bytes, the file has {size}")
    if end < size:
        raise ValueError(f"has {size - end} bytes after its last tensor")
