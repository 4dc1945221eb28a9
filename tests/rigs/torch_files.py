"""PyTorch files as torch.save writes them, made by hand: no PyTorch is needed, and names need not exist."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]


class Name:
    """Pickles as a reference to a global of this name, be it importable or not."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


class StorageId:
    def __init__(self, kind: str, key: str, length: int) -> None:
        self.reference = ("storage", Name("torch", kind), key, "cpu", length)


def pickled(value: Any) -> bytes:
    """A pickle as torch.save writes it, by hand: names need not exist here, so no PyTorch is needed."""
    out = io.BytesIO()
    out.write(b"\x80\x02")
    _emit(out, value)
    out.write(b".")
    return out.getvalue()


def _emit(out: io.BytesIO, value: Any) -> None:
    if isinstance(value, Name):
        out.write(f"c{value.module}\n{value.name}\n".encode())
    elif isinstance(value, Call):
        _emit(out, value.function)
        _emit(out, value.arguments)
        out.write(b"R")
    elif isinstance(value, StorageId):
        _emit(out, value.reference)
        out.write(b"Q")
    elif isinstance(value, bool):
        out.write(b"\x88" if value else b"\x89")
    elif isinstance(value, int):
        out.write(b"J" + struct.pack("<i", value) if value < 1 << 31 else b"\x8a\x08" + struct.pack("<q", value))
    elif isinstance(value, str):
        out.write(b"X" + struct.pack("<I", len(value.encode())) + value.encode())
    elif isinstance(value, tuple):
        out.write(b"(")
        for item in value:
            _emit(out, item)
        out.write(b"t")
    elif isinstance(value, dict):
        out.write(b"}(")
        for key, item in value.items():
            _emit(out, key)
            _emit(out, item)
        out.write(b"u")
    else:
        raise TypeError(type(value))


def tensor_call(kind: str, key: str, shape: tuple[int, ...], **changes: Any) -> Call:
    strides = tuple(int(np.prod(shape[place + 1 :])) for place in range(len(shape)))
    count = int(np.prod(shape))
    values = {"offset": 0, "stride": strides, "length": count} | changes
    hooks = Call(Name("collections", "OrderedDict"))
    storage = StorageId(kind, key, values["length"])
    return Call(
        Name("torch._utils", "_rebuild_tensor_v2"), storage, values["offset"], shape, values["stride"], False, hooks
    )


def write_torch(path: Path, tensors: Tensors, content: Any = None, byteorder: bytes = b"little") -> Path:
    """What torch.save(tensors, path) writes; `content` replaces the pickled value."""
    kinds = {"<f4": "FloatStorage", "<f2": "HalfStorage", "<u2": "BFloat16Storage"}
    kinds |= {"<i8": "LongStorage", "|b1": "BoolStorage"}
    entries = {
        name: tensor_call(kinds[value.dtype.str], str(place), value.shape)
        for place, (name, value) in enumerate(tensors.items())
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("heads/data.pkl", pickled(entries if content is None else content))
        archive.writestr("heads/byteorder", byteorder)
        for place, value in enumerate(tensors.values()):
            archive.writestr(f"heads/data/{place}", value.tobytes())
    return path
