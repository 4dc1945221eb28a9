"""The timing cache: what TensorRT measured of each layer, kept beside the bundle so that the next build is quick.

It also pins: a build that finds every layer in the cache takes the tactics that were chosen before; but for segments
that are built at optimisation level 0, which ignores the cache. The editable kind of cache lets a tactic that turns out
wrong be replaced by hand, as TensorRT's sampleEditableTimingCache does: the keys and the tactics that were timed are in
the bundle's tactics.log.gz.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ull.errors import BuildError


def open_timing_cache(config: Any, path: Path, note: Callable[[str], None]) -> Any:
    """The trt.ITimingCache of a file, attached to `config`; an empty one if there is none, or it is of no use."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    cache = config.create_timing_cache(data)
    if cache is None or not attach(config, cache):
        if data:
            note(f"the timing cache {path} is damaged, or of another GPU or TensorRT; it is replaced")
        cache = config.create_timing_cache(b"")
        if cache is None or not attach(config, cache):
            raise BuildError("TensorRT cannot create a timing cache")
    return cache


def attach(config: Any, cache: Any) -> bool:
    """Whether the cache is of this device and version, and `config` uses it from now on."""
    return bool(config.set_timing_cache(cache, False))


def require_timing_cache(path: Path) -> None:
    """Raises BuildError where the file is there and cannot be read."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise BuildError(f"the timing cache {path} cannot be read ({error.strerror}); move it away") from error


def save_timing_cache(data: bytes, path: Path) -> None:
    """Replaces the file in one step. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
