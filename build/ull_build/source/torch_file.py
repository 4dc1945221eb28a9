"""Reads tensors from a PyTorch file (`torch.save`) without PyTorch, and without running anything that is in it.

Such a file is a zip archive: a pickle that names tensors, and one member per storage. A pickle is a program; this
reader lets it call nothing but what rebuilds a dictionary of tensors, and those calls only describe, they do not act.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.errors import CheckpointError

MAX_PICKLE_BYTES = 64 << 20  # a list of tensors; far above any real one


@dataclass(frozen=True)
class StorageKind:
    """A dtype of storages: `code` is NumPy's, "<u2" standing for the bits of bfloat16."""

    code: str
    is_bf16: bool = False


@dataclass(frozen=True)
class Storage:
    kind: StorageKind
    key: str
    length: int  # elements


@dataclass(frozen=True)
class StoredTensor:
    """A view of a storage; `offset` and `stride` in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_STORAGES = {
    "FloatStorage": StorageKind("<f4"),
    "HalfStorage": StorageKind("<f2"),
    "BFloat16Storage": StorageKind("<u2", is_bf16=True),
}
_INTEGER_STORAGES = {
    "IntStorage": StorageKind("<i4"),
    "LongStorage": StorageKind("<i8"),
    "BoolStorage": StorageKind("|b1"),
}


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """Stands for torch._utils._rebuild_tensor_v2; the rest of its arguments (gradients, hooks) has no meaning here."""
    sizes = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or any(type(size) is not int or not 0 <= size < 1 << 48 for size in sizes):
        raise pickle.UnpicklingError("a tensor is described wrongly")
    return StoredTensor(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    """Stands for torch._utils._rebuild_parameter."""
    return tensor


_CALLABLE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): kind for name, kind in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Knows the names of `_CALLABLE`, with `integers` those of `_INTEGER_STORAGES`, and no others."""

    def __init__(self, file: io.BytesIO, integers: bool) -> None:
        super().__init__(file)
        known = {("torch", name): kind for name, kind in _INTEGER_STORAGES.items()} if integers else {}
        self._known: dict[tuple[str, str], Any] = {**_CALLABLE, **known}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of tensors needs") from None

    def persistent_load(self, reference: Any) -> Storage:
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise pickle.UnpicklingError("a storage is described wrongly")
        _, kind, key, _, length = reference
        if not isinstance(kind, StorageKind) or not isinstance(key, str) or not key.isdecimal():
            raise pickle.UnpicklingError("a storage is described wrongly")
        if type(length) is not int or not 0 <= length < 1 << 48:
            raise pickle.UnpicklingError("a storage is described wrongly")
        return Storage(kind, key, length)


def read_torch_file(path: Path, integers: bool = False) -> dict[str, NDArray[Any]]:
    """The tensors of a PyTorch file by name, as float32; with `integers` those of whole numbers too, as they are.

    Raises CheckpointError for a file that is damaged, in the old format, or asks for anything but tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, integers)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", field=path.name) from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is no PyTorch archive: truncated, a Git LFS pointer, or saved by PyTorch before 1.6; download it "
            "again, or convert it to safetensors",
            field=path.name,
        ) from error
    except (
        pickle.UnpicklingError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, OSError,
        NotImplementedError, RecursionError, UnicodeDecodeError, MemoryError, OverflowError,
    ) as error:  # fmt: skip
        # A pickle that is no pickle can raise any of these.
        raise CheckpointError(
            f"{path} is refused, nothing in it was run: {error}; use a file that holds tensors and nothing else",
            field=path.name,
        ) from error


def _read_archive(archive: zipfile.ZipFile, integers: bool) -> dict[str, NDArray[Any]]:
    names = set(archive.namelist())
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it holds no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("it was written on a big-endian machine")
    if archive.getinfo(pickles[0]).file_size > MAX_PICKLE_BYTES:
        raise ValueError("its data.pkl is far too large")
    content = _Unpickler(io.BytesIO(archive.read(pickles[0])), integers).load()
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds no dictionary of tensors but {type(content).__name__}")
    tensors = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise ValueError(f"its entry {str(name)[:80]!r} is no tensor of a supported dtype")
        tensors[name] = _tensor(archive, root, name, value)
    return tensors


def _tensor(archive: zipfile.ZipFile, root: str, name: str, value: StoredTensor) -> NDArray[Any]:
    """Checks the extent of one tensor before its storage is read."""
    kind = value.storage.kind
    item = np.dtype(kind.code).itemsize
    member = f"{root}data/{value.storage.key}"
    if archive.getinfo(member).file_size != value.storage.length * item:
        raise ValueError(f"the storage of tensor {name!r} has the wrong size")
    steps, step = [], 1
    for size in reversed(value.shape):
        steps.append(step)
        step *= size
    contiguous = all(
        have == want or size == 1 for have, want, size in zip(value.stride, reversed(steps), value.shape, strict=True)
    )
    if not contiguous or value.offset + math.prod(value.shape) > value.storage.length:
        raise ValueError(f"tensor {name!r} is not stored row by row inside its storage")
    raw = np.frombuffer(archive.read(member), kind.code, math.prod(value.shape), value.offset * item)
    if kind in _INTEGER_STORAGES.values():
        return raw.reshape(value.shape)
    values = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32) if kind.is_bf16 else raw.astype(np.float32)
    return values.reshape(value.shape)
