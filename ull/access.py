"""Why a file cannot be used, said so that whoever runs the program knows what to do about it."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path


def denial(path: Path, action: str = "read") -> str:
    """Why this process may not `action` (read, write, ...) the file or directory `path`, and the remedy; one line."""
    culprit = _barrier(path)
    what = f"{path}: permission to {action} is denied to user {user_name(os.geteuid())}"
    try:
        found = culprit.stat()
    except OSError:
        return f"{what}; chmod or chown it, or run as another user"
    which = "it" if culprit == path else str(culprit)
    return (
        f"{what}: {which} belongs to user {user_name(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}; "
        f"chmod or chown {which}, or run as another user"
    )


def _barrier(path: Path) -> Path:
    """The directory on the way to `path` that lets this user not through; `path` itself if there is none."""
    for parent in reversed(path.absolute().parents):
        if parent.is_dir() and not os.access(parent, os.X_OK, effective_ids=True):
            return parent
    return path


def user_name(number: int) -> str:
    """The name of the user with this id; the id where it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def unreadable(path: Path, error: OSError) -> str:
    """What is wrong with the file or directory `path`, which could not be read because of `error`; in one line."""
    return denial(path) if isinstance(error, PermissionError) else f"{path} cannot be read ({error.strerror or error})"
