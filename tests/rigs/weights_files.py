"""Reads weights files, and checkpoints in FP8, which safetensors' own reader for NumPy does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull.bundle import read_tensor_file


def read_weights(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a weights file; e4m3 and bf16 as ml_dtypes' types."""
    dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    dtypes |= {"I32": np.int32}
    raw, tensors = path.read_bytes(), {}
    for name, entry in read_tensor_file(path).items():
        dtype = np.dtype(dtypes.get(entry.dtype, np.uint8))
        count = entry.nbytes // dtype.itemsize
        tensors[name] = np.frombuffer(raw, dtype, count, entry.offset).reshape(entry.shape)
    return tensors
