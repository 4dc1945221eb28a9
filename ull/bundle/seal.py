"""The seal of a bundle: `manifest.sha256`, which holds the SHA-256 of `manifest.json`, the bundle's *digest*.

The manifest names every other file with its SHA-256, so this one value identifies the bundle. The file has the form
that sha256sum writes and reads: `cd X.ull && sha256sum --check manifest.sha256`.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from ull.access import denial
from ull.errors import BundleError

MANIFEST_FILE: Final = "manifest.json"
SEAL_FILE: Final = "manifest.sha256"
MAX_MANIFEST_BYTES: Final = 64 << 20
_MAX_SEAL_BYTES = 1024
_SEAL = re.compile(rb"([0-9a-f]{64}) [ *]manifest\.json\n")
REBUILD: Final = "rebuild it with ull-build"


def digest_of(manifest: bytes) -> str:
    """The digest of a bundle whose `manifest.json` has these bytes: 64 hexadecimal digits."""
    return hashlib.sha256(manifest).hexdigest()


def write_sealed(directory: Path, manifest: bytes) -> str:
    """Writes `manifest.json` and its seal into `directory`; returns the digest. Raises OSError."""
    digest = digest_of(manifest)
    (directory / MANIFEST_FILE).write_bytes(manifest)
    (directory / SEAL_FILE).write_text(f"{digest}  {MANIFEST_FILE}\n")
    return digest


def read_manifest_bytes(directory: Path) -> bytes:
    """The bytes of `manifest.json`. Raises BundleError, also for what is no regular file or too large."""
    path = directory / MANIFEST_FILE
    try:
        return read_regular(path, MAX_MANIFEST_BYTES)
    except PermissionError as error:
        raise BundleError(denial(path), MANIFEST_FILE) from error
    except FileNotFoundError as error:
        if directory.exists():
            raise BundleError(
                f"{directory} is not an engine bundle: it has no {MANIFEST_FILE}", MANIFEST_FILE
            ) from error
        raise BundleError(
            f"no engine bundle at {directory}; build one with `ull-build RECIPE`", str(directory)
        ) from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{directory} is not an engine bundle: {error}", MANIFEST_FILE) from error


def check_seal(directory: Path, manifest: bytes) -> str:
    """Compares `manifest` with the seal in `directory`; returns the digest. Raises BundleError where they differ."""
    path = directory / SEAL_FILE
    try:
        sealed = _SEAL.fullmatch(read_regular(path, _MAX_SEAL_BYTES))
    except FileNotFoundError as error:
        raise BundleError(f"{path} is missing; {REBUILD}", SEAL_FILE) from error
    except PermissionError as error:
        raise BundleError(denial(path), SEAL_FILE) from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{error}; {REBUILD}", SEAL_FILE) from error
    if sealed is None:
        raise BundleError(f"{path} is damaged: it must hold the SHA-256 of {MANIFEST_FILE}; {REBUILD}", SEAL_FILE)
    digest = digest_of(manifest)
    if sealed[1].decode() != digest:
        raise BundleError(
            f"{directory / MANIFEST_FILE} differs from its SHA-256 in {SEAL_FILE}: it was changed after the build; "
            f"restore it, or {REBUILD}",
            MANIFEST_FILE,
        )
    return digest


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; a pipe or a device is not waited for.

    Raises OSError, or ValueError for what is no regular file or larger.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > most:
            raise ValueError(f"{path} is far too large: {status.st_size} bytes")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(most)
    finally:
        os.close(descriptor)
