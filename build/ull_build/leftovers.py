"""What builds that were killed leave beside a bundle, and how a later build tells it from the work of a live one.

A build writes into `.NAME.building-PID-MARK`, and moves a bundle that it replaces to `.NAME.old-PID-MARK` for a moment.
It holds a lock (flock) on both folders for as long as it lives, so the kernel knows which of them are abandoned.
Process ids would not say: they are used again, and mean nothing on another machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.filesize import decimal

_FOLDER = re.compile(r"\.(?P<name>.+)\.(?P<kind>building|old)-[0-9]+-[0-9a-f]{8}")


def staging_folder(output: Path) -> Path:
    """Where the bundle for `output` is built."""
    return _sibling(output, "building")


def old_bundle(output: Path) -> Path:
    """Where the bundle at `output` stands while another takes its place."""
    return _sibling(output, "old")


def create_locked(folder: Path) -> int | None:
    """Creates a folder and locks it as `lock_folder` does. Raises OSError."""
    while True:
        folder.mkdir(exist_ok=True)
        # Before the lock is there, a build that clears up may take the folder for abandoned.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = lock_folder(folder)
            if lock is None or _is_folder(folder, lock):
                return lock
            os.close(lock)
        time.sleep(0.01)


def lock_folder(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None where the file system has no locks.

    Raises BlockingIOError when another process holds it, OSError when the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def clear_leftovers(directory: Path, note: Callable[[str], None]) -> None:
    """Removes what killed builds left in `directory`, and says so in one line; what is locked or foreign stays.

    A bundle that was moved away and has no successor is put back.
    """
    removed: list[str] = []
    freed = 0
    for folder in _abandoned(directory):
        match = _FOLDER.fullmatch(folder.name)
        assert match is not None
        try:
            lock = lock_folder(folder)
        except OSError:  # locked by a live build, gone meanwhile, or somebody else's
            continue
        if lock is None:
            continue
        try:
            bundle = directory / match["name"]
            if match["kind"] == "old" and not os.path.lexists(bundle):
                folder.rename(bundle)
                note(f"put {bundle} back, which a build that was killed had moved away")
                continue
            size = _size(folder)
            shutil.rmtree(folder)
            removed.append(folder.name)
            freed += size
        except OSError as error:
            note(f"{folder} is left of a build that was killed, and cannot be removed ({error.strerror}); remove it")
        finally:
            os.close(lock)
    if removed:
        note(f"removed what killed builds left in {directory} ({decimal(freed)}): {', '.join(removed)}")


def _abandoned(directory: Path) -> list[Path]:
    """Folders with a build's names. An old bundle comes first, so that it is there when its successor goes."""
    try:
        found = [path for path in directory.iterdir() if _FOLDER.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=lambda path: (".building-" in path.name, path.name))


def _sibling(output: Path, kind: str) -> Path:
    return output.with_name(f".{output.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _is_folder(path: Path, descriptor: int) -> bool:
    """True while `path` names what `descriptor` has open."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, as far as they can be seen."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
