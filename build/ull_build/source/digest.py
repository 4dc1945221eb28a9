"""What a bundle is built from: the SHA-256 of every file of a checkpoint, computed beside the build that reads it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ull.bundle import FromHub, Provenance, RecipeValue, SourceFiles, StoredDrafter, listing_sha256
from ull.errors import CheckpointError
from ull_build.progress import Reporter
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.drafters import Drafters
from ull_build.source.lora import AdaptedCheckpoint
from ull_build.source.vocabulary import tokenizer_files

_BLOCK = 1 << 20  # bytes
_STAGE_BYTES = 1 << 28  # fewer are not worth a stage of their own


class SourceHash:
    """The files `names` of `directory`. A context manager; leaving it ends the thread that reads them.

    A file is hashed from when `begin` names it: the build, which calls that as it begins to read the file, finds it in
    the page cache, or leaves it there. `finish` waits for all. A file that changes meanwhile is an error.
    """

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        self._directory = directory
        self._stamps = {name: self._stamp(name) for name in sorted(set(names), key=os.fsencode)}
        self._begun: dict[str, Future[str]] = {}
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1, "source-hash")
        self._progress: Callable[[int], None] | None = None
        self._hashed = 0  # bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def remaining(self) -> int:
        """Bytes that are not hashed yet."""
        return sum(size for _, size, _ in self._stamps.values()) - self._hashed

    def begin(self, name: str) -> None:
        """Hashes the file `name` after those that were named before; once."""
        if name not in self._begun:
            self._begun[name] = self._pool.submit(self._hash, name)

    def finish(self, progress: Callable[[int], None] | None = None) -> SourceFiles:
        """All files with their SHA-256; `progress` is told the bytes that are hashed from now on.

        Raises CheckpointError for a file that cannot be read or was changed.
        """
        self._progress = progress
        for name in self._stamps:
            self.begin(name)
        files = {name: self._begun[name].result() for name in self._stamps}
        self._progress = None
        for name, stamp in self._stamps.items():
            if self._stamp(name) != stamp:
                raise CheckpointError(
                    f"{self._directory / name} changed while it was read; build again when nobody writes it", field=name
                )
        return SourceFiles(listing_sha256(files), files)

    def _stamp(self, name: str) -> tuple[int, int, int]:
        """What tells a file from one that was changed: inode, size in bytes, time of the last change in ns."""
        try:
            status = (self._directory / name).stat()
        except OSError as error:
            raise self._unreadable(name, error) from error
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _hash(self, name: str) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        try:
            with (self._directory / name).open("rb", buffering=0) as file:
                while (count := file.readinto(block)) and not self._stopping.is_set():
                    digest.update(block[:count])
                    self._hashed += count
                    if (progress := self._progress) is not None:
                        progress(count)
        except OSError as error:
            raise self._unreadable(name, error) from error
        return digest.hexdigest()

    def _unreadable(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._directory / name} cannot be read ({error.strerror})", field=name)


@dataclass(frozen=True)
class Sources:
    """What the model was read from, and what drafts for it."""

    model: SourceHash
    drafters: dict[StoredDrafter, SourceHash]
    lora: SourceHash | None = None  # of the adapter that is merged into the model

    def wait(self, reporter: Reporter) -> None:
        """Waits until all is hashed, as a stage of the build where that takes long. Raises what finish raises."""
        hashes = (self.model, *self.drafters.values(), *([] if self.lora is None else [self.lora]))
        remaining = sum(one.remaining for one in hashes)
        if remaining < _STAGE_BYTES:
            return
        with reporter.stage("hash the checkpoint", remaining, "bytes") as advance:
            for one in hashes:
                one.finish(advance)

    def provenance(
        self, name: str, recipe: dict[str, RecipeValue], builder_version: str, hub: dict[FromHub, str]
    ) -> Provenance:
        """The manifest's account of them; `name` is the model's, `hub` the Hub's names. Raises what finish raises."""
        found = self.model.finish()
        return Provenance(
            source=name,
            source_sha256=found.sha256,
            source_files=found.files,
            recipe=recipe,
            builder_version=builder_version,
            drafters={kind: one.finish() for kind, one in self.drafters.items()},
            lora=None if self.lora is None else self.lora.finish(),
            hub=hub,
        )


@contextmanager
def open_sources(checkpoint: Checkpoint, drafters: Drafters) -> Iterator[Sources]:
    """Begins to hash what is read: the small files now, each file of weights when the build comes to it."""
    with ExitStack() as opened:

        def begin(directory: Path, weights: Iterable[str], others: Iterable[str]) -> SourceHash:
            found = opened.enter_context(SourceHash(directory, [*weights, *others]))
            for name in others:
                found.begin(name)
            return found

        def of_checkpoint(of: Checkpoint, tokenizer: Iterable[str]) -> SourceHash:
            weights = [shard.path.name for shard in of.shards]
            found = begin(of.directory, weights, [*(name for name in of.files if name not in weights), *tokenizer])
            of.on_read = found.begin
            return found

        hashes: dict[StoredDrafter, SourceHash] = {}
        model = of_checkpoint(checkpoint, tokenizer_files(checkpoint.directory))
        if (medusa := drafters.medusa) is not None:
            hashes["medusa"] = begin(medusa.path.parent, (), medusa.files)  # its weights have just been read
        if (draft := drafters.draft) is not None:
            compared = [name for name in tokenizer_files(draft.directory) if name == "tokenizer.json"]
            hashes["draft"] = of_checkpoint(draft, compared)
        if drafters.eagle is not None:
            hashes["eagle"] = begin(drafters.eagle.tensors.directory, (), drafters.eagle.tensors.files)
        if drafters.dflash is not None:
            hashes["dflash"] = begin(drafters.dflash.tensors.directory, (), drafters.dflash.tensors.files)
        adapter = checkpoint.adapter if isinstance(checkpoint, AdaptedCheckpoint) else None
        lora = None if adapter is None else begin(adapter.directory, (), adapter.files)  # its weights have been read
        yield Sources(model, hashes, lora)
