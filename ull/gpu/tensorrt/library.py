"""Finds TensorRT's Python bindings: for the builder of engines and for the daemon that runs them.

Nothing else of ull imports `tensorrt`; whoever uses it is handed the module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any

from ull.errors import GpuError

INSTALL = "install it with `pip install ull[tensorrt]`"
OLDEST = 11  # the major version from which every network is strongly typed


def load() -> Any:
    """The module `tensorrt`. Raises GpuError (no_tensorrt, old_tensorrt)."""
    try:
        trt: Any = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise GpuError("no_tensorrt", f"this machine has no TensorRT ({error}); {INSTALL}") from error
    except (ImportError, OSError) as error:  # the bindings are there, their shared library is not
        raise GpuError("no_tensorrt", f"TensorRT cannot be loaded: {error}; {INSTALL}") from error
    version = str(getattr(trt, "__version__", ""))
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < OLDEST:
        found = f"TensorRT {version}" if version else "what is called TensorRT here"
        raise GpuError("old_tensorrt", f"{found} is too old, ull needs {OLDEST} or later; {INSTALL}")
    return trt


def wheel() -> str:
    """The package that TensorRT's installed library came in: of CUDA 12, or of another. What `pip install` takes."""
    return "tensorrt-cu12" if cuda_of_wheel() == 12 else "tensorrt"


def cuda_of_wheel() -> int | None:
    """The major version of CUDA that the installed wheels are for; None where pip did not install any."""
    for major in (12, 13, 14):
        for part in ("", "-bindings", "-libs"):
            try:
                importlib.metadata.version(f"tensorrt-cu{major}{part}")
            except importlib.metadata.PackageNotFoundError:
                continue
            return major
    return None


def make_logger(trt: Any, write: Callable[[str, str], None]) -> Any:
    """A trt.ILogger that calls write(severity, message), from any thread but never from two at once.

    `severity` is "internal_error", "error", "warning", "info" or "verbose". TensorRT keeps only a bare pointer to it:
    hold it for as long as anything that was made with it.
    """
    lock = threading.Lock()

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            with lock:
                write(severity.name.lower(), msg)

    return Logger()
