"""Files that others may be reading: replaced whole, or left as they were."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace(path: Path, content: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Puts a file with `content` in the place of `path`, once it is on the disk. Raises OSError, and leaves nothing.

    owner: its user and group; None: this process's.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
