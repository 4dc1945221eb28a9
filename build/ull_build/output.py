"""Where a bundle is written, a temporary sibling directory that is renamed when it is complete, and when."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from ull.bundle import FORMAT, FileEntry, read_manifest_bytes
from ull.errors import BuildError, BundleError
from ull_build.leftovers import create_locked, lock_folder, old_bundle, staging_folder


def check_output(output: Path, force: bool) -> Path:
    """The resolved output path. Raises BuildError when something is in the way that may not be replaced."""
    output = output.resolve()
    parent = output.parent
    if not parent.is_dir():
        raise BuildError(f"the directory {parent} does not exist; create it first", field="output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BuildError(f"the directory {parent} is not writable", field="output")
    if output.exists():
        if not is_bundle(output):
            raise BuildError(f"{output} exists and is not an engine bundle; it stays untouched", field="output")
        if not force:
            raise BuildError(f"{output} exists; replace it with --force, or choose another --output", field="output")
    return output


def is_bundle(path: Path) -> bool:
    """True for a directory whose manifest says that it is an engine bundle, be it damaged or of another version."""
    try:
        manifest = json.loads(read_manifest_bytes(path))
    except (BundleError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


@contextmanager
def staged_output(output: Path) -> Iterator[Path]:
    """A temporary sibling of `output` to build in; renamed to it at the end, removed if anything goes wrong.

    What was written is on the disk before the rename, so that a crash of the machine leaves no half bundle either. A
    bundle that is already there is replaced: renamed away, and deleted once the new one stands in its place. An
    interrupt may come between any two steps: either the old bundle or the new one is in place after it.
    """
    staging, old = staging_folder(output), old_bundle(output)
    with ExitStack() as locks:
        try:
            try:
                _close_with(locks, create_locked(staging))
            except OSError as error:
                raise BuildError(f"cannot create {staging}: {error.strerror}", field="output") from error
            yield staging
            for path in (*staging.rglob("*"), staging):
                _sync(path)
            if output.exists():
                with suppress(OSError):
                    _close_with(locks, lock_folder(output))
                output.rename(old)
            staging.rename(output)
            _sync(output.parent)
        finally:
            if old.exists() and not output.exists():
                old.rename(output)
            for leftover in (staging, old):
                shutil.rmtree(leftover, ignore_errors=True)


def _close_with(locks: ExitStack, lock: int | None) -> None:
    """Gives a lock back when `locks` ends."""
    if lock is not None:
        locks.callback(os.close, lock)


def _sync(path: Path) -> None:
    """Brings a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_time() -> str:
    """When a bundle is built: UTC, ISO 8601, whole seconds.

    SOURCE_DATE_EPOCH (seconds since 1970) in the environment stands for the clock, so that a build can be repeated byte
    for byte. Raises BuildError where it is no such number.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return datetime.fromtimestamp(int(epoch), UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError) as error:
        raise BuildError(
            f"SOURCE_DATE_EPOCH must be a whole number of seconds since 1970, not {epoch!r}", field="SOURCE_DATE_EPOCH"
        ) from error


def require_space(directory: Path, needed: int) -> None:
    """Raises BuildError when the disk under `directory` has less than `needed` bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise BuildError(
            f"the build needs {needed / 1e9:.1f} GB in {directory}, only {free / 1e9:.1f} GB are free; "
            "free some space or choose another --output",
            field="output",
        )


def file_entry(path: Path) -> FileEntry:
    """Size and hash of a finished file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileEntry(sha256=digest.hexdigest(), bytes=path.stat().st_size)
