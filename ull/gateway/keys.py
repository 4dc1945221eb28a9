"""API keys: who may ask. A file has a line for each, a name and the SHA-256 of the key: the keys themselves nowhere.

Keys are drawn with 256 bits, so that their plain hash cannot be reversed by trying.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from pathlib import Path

from ull.access import unreadable
from ull.errors import ConfigError

_LINE = re.compile(r"([A-Za-z0-9._@-]{1,64})\s+([0-9a-f]{64})")
_LOOK_AGAIN_S = 1.0


def new_key(name: str) -> tuple[str, str]:
    """A key for `name`, and the line that lets it in. Raises ConfigError: the name cannot stand in the file."""
    key = f"ull-{secrets.token_urlsafe(32)}"
    line = f"{name} {_digest(key)}"
    if _LINE.fullmatch(line) is None:
        raise ConfigError(f"{name!r} is no name of a key: 1 to 64 letters, digits and ._@-", "new-key")
    return key, line


class Keys:
    """The keys of a file, which is read again when it has changed: a line that is taken out lets nobody in any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, str] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._load()

    def owner(self, key: str) -> str | None:
        """The name whose key this is; None if it is nobody's."""
        if time.monotonic() - self._looked > _LOOK_AGAIN_S:
            self._load()
        return self._names.get(_digest(key))  # of the hash: how long it takes says nothing about the key

    def _load(self) -> None:
        """Reads the file if it has changed. Raises ConfigError; once there are keys they stay where it is damaged."""
        self._looked = time.monotonic()
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            names = _read(self._path)
        except OSError as error:
            if self._stamp is None:
                raise ConfigError(unreadable(self._path, error), "api-keys") from error
            return
        except ConfigError:
            if self._stamp is None:
                raise
            return
        self._names, self._stamp = names, stamp


def _read(path: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            wanted = "a name and the SHA-256 of its key; `ull-gateway --new-key NAME` writes one"
            raise ConfigError(f"{path}, line {number}: must be {wanted}", "api-keys")
        names[match[2]] = match[1]
    return names


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
