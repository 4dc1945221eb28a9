"""The file that keeps past outputs over a restart: what the suffix drafter knows at its start.

A header, then token ids, the oldest first, -1 between two outputs. It is written whole beside its place, then renamed.
A file that cannot be used is left out with a warning: it decides how fast tokens come, never which.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ull import _native
from ull.bundle import Bundle
from ull.daemon.config import MAX_PAST_OUTPUTS
from ull.errors import DaemonError
from ull.files import replace
from ull.log import Log

SAVE_EVERY_S = 60.0
MAGIC = b"ULLPAST1"
_HEADER = struct.Struct("<8s32sII")  # magic, vocabulary_digest(), tokens, CRC-32 of these


class PastOutputsFile:
    """Where `past` is kept. `digest` and `vocabulary`: of the ids, see vocabulary_digest() and how many there are."""

    def __init__(self, path: Path, past: _native.PastOutputs, digest: bytes, vocabulary: int, log: Log) -> None:
        self._path = path
        self._past = past
        self._digest = digest
        self._vocabulary = vocabulary
        self._log = log
        self._saved = 0  # of `past.appended`
        self._told = ""  # the last warning: a full disk stays full for a while

    def load(self) -> None:
        """Adds what the file holds to `past`, before the engine starts. Warns of a file that cannot be used.

        Raises DaemonError where there can be no such file.
        """
        if self._path.is_dir() or not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise DaemonError(
                f"speculation.past_outputs_file: {self._path} must be a file in a directory that may be written to",
                "speculation.past_outputs_file",
            )
        try:
            size = self._path.stat().st_size
            if size > _HEADER.size + 4 * MAX_PAST_OUTPUTS:
                raise ValueError(f"it has {size} bytes, more than were ever written")
            self._past.append(_tokens(self._path.read_bytes(), self._digest, self._vocabulary))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._warn("is not used", error)
        self._saved = self._past.appended

    def save(self) -> None:
        """Writes what has been added since, if anything has. May wait for the disk. Warns of a failure."""
        appended = self._past.appended
        if appended == self._saved:
            return
        tokens = self._past.copy().astype("<i4").tobytes()
        header = _HEADER.pack(MAGIC, self._digest, len(tokens) // 4, zlib.crc32(tokens))
        try:
            replace(self._path, header + tokens)
        except OSError as error:
            self._warn("cannot be written", error)
            return
        self._saved = appended
        self._told = ""

    async def keep_saving(self) -> None:
        """Saves from time to time, on another thread, until it is cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await asyncio.to_thread(self.save)

    def _warn(self, what: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"speculation.past_outputs_file {self._path} {what}: {reason}"
        if message != self._told:
            self._log.warning("past_outputs", message=message)
        self._told = message


def vocabulary_digest(bundle: Bundle) -> bytes:
    """SHA-256 of what the token ids of `bundle` stand for."""
    return hashlib.sha256(bundle.vocabulary_path.read_bytes()).digest()


def _tokens(content: bytes, digest: bytes, vocabulary: int) -> NDArray[np.int32]:
    """The tokens of a file. Raises ValueError with what is wrong with it."""
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise ValueError("it is no file of past outputs")
    _, of, count, checksum = _HEADER.unpack_from(content)
    body = content[_HEADER.size :]
    if len(body) != 4 * count or zlib.crc32(body) != checksum:
        raise ValueError("it is damaged")
    if of != digest:
        raise ValueError("it is of another vocabulary")
    tokens = np.frombuffer(body, "<i4").astype(np.int32)
    if count and (tokens.min() < -1 or tokens.max() >= vocabulary):
        raise ValueError("it holds ids outside the vocabulary")
    return tokens
