"""The real Python bindings of TensorRT (pip's tensorrt-cu13-bindings), imported without the library they belong to.

Empty libraries of the names that the bindings link against are loaded first; the dynamic loader then finds those.
`real` is the module: its enums, Dims, Weights, ILogger and IProgressMonitor work, every factory of it answers None.
"""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "stub.c"
CACHE = Path(__file__).parents[4] / ".cache/tensorrt"
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")


def load_stubs() -> None:
    """Compiles the empty libraries, once per content of stub.c, and loads them."""
    folder = CACHE / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        library = folder / f"lib{name}.so.11"
        if not library.exists():
            mine = library.with_suffix(f".{os.getpid()}")
            command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(mine), str(SOURCE)]
            subprocess.run(command, check=True)
            mine.rename(library)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


load_stubs()

import tensorrt_bindings as real  # noqa: E402

__all__ = ["real"]
