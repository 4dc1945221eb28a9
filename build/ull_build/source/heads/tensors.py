"""The tensors of a head's directory: safetensors, whole or in shards, or a pytorch_model.bin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ull.errors import CheckpointError
from ull_build.source.checkpoint import block_rows
from ull_build.source.files import CONFIG_FILE, FLOAT_DTYPES, INDEX_FILE, Shard, read_json
from ull_build.source.torch_file import read_torch_file

TORCH_FILE = "pytorch_model.bin"
_WHOLE = "model.safetensors"
_INTEGER_DTYPES = ("I32", "I64")
# What some forms put before every name, and what the older DSpark heads put before those of their small heads.
_PREFIXES = ("model.", "logit_head.")
# Saved beside a head, of no use for drafting: which of the target's tokens the head knows, what its training was
# measured against, and tables that are computed from config.json.
_LEFT_OUT = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_LEFT_OUT_SUFFIX = ".inv_freq"


class HeadTensors:
    """The tensors of the head in `directory` by name, without the prefixes that some forms have. A context manager.

    The values are read, and checked to be finite, when they are asked for. Raises CheckpointError naming the file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._shards: list[Shard] = []
        self._places: dict[str, tuple[Shard | None, str]] = {}  # None: of the torch file
        self._arrays: dict[str, NDArray[Any]] = {}
        self._files: list[str] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return list(self._places)

    @property
    def files(self) -> list[str]:
        """The names of the files that say what the head is."""
        return [CONFIG_FILE, *self._files]

    def has(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        shard, original = self._places[name]
        return shard.entries[original].shape if shard is not None else self._arrays[original].shape

    def blocks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The tensor in blocks of whole rows, in order, float32. Raises CheckpointError for NaN or infinite values."""
        raw = self._raw(name)
        rows = len(raw) if raw.ndim == 1 else block_rows(raw.shape[1])
        for start in range(0, len(raw), rows):
            block = raw[start : start + rows]
            wide = (block.astype(np.uint32) << np.uint32(16)).view(np.float32) if block.dtype == np.uint16 else block
            values = wide.astype(np.float32)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{self.directory}: tensor {name!r} holds values that are not finite", field=name)
            yield values

    def vector(self, name: str) -> NDArray[np.float32]:
        """A 1-D tensor, or one of a single row, as float32."""
        return np.concatenate(list(self.blocks(name))).reshape(-1)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A tensor of integers."""
        raw = self._raw(name)
        if raw.dtype.kind != "i":
            raise CheckpointError(f"{self.directory}: tensor {name!r} must hold integers, not {raw.dtype}", field=name)
        return raw.astype(np.int64)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raw(self, name: str) -> NDArray[Any]:
        shard, original = self._places[name]
        return self._arrays[original] if shard is None else shard.raw(original)

    def _open(self) -> None:
        directory = self.directory
        if not directory.is_dir():
            raise CheckpointError(f"no directory of a head at {directory}", field=str(directory))
        if (directory / INDEX_FILE).exists():
            places = read_json(directory / INDEX_FILE).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise CheckpointError(f"{directory / INDEX_FILE} has no `weight_map`", field=INDEX_FILE)
            names = sorted({str(name) for name in places.values()})
            if any(Path(name).name != name for name in names):
                raise CheckpointError(
                    f"{directory / INDEX_FILE} names a file outside of its directory", field=INDEX_FILE
                )
            self._files.append(INDEX_FILE)
            self._open_shards(names)
        elif (directory / _WHOLE).exists():
            self._open_shards([_WHOLE])
        elif (directory / TORCH_FILE).exists():
            self._files.append(TORCH_FILE)
            self._arrays = read_torch_file(directory / TORCH_FILE, integers=True)
            for name in self._arrays:
                self._place(name, None)
        else:
            raise CheckpointError(
                f"{directory} holds no weights of a head ({_WHOLE}, {TORCH_FILE}); download it again",
                field=str(directory),
            )

    def _open_shards(self, names: list[str]) -> None:
        for file in names:
            shard = Shard(self.directory / file)
            self._shards.append(shard)
            self._files.append(file)
            for name in shard.entries:
                self._place(name, shard)

    def _place(self, original: str, shard: Shard | None) -> None:
        name = original
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name in _LEFT_OUT or name.endswith(_LEFT_OUT_SUFFIX):
            return
        if name in self._places:
            raise CheckpointError(f"{self.directory} holds tensor {name!r} twice", field=name)
        if shard is not None and shard.entries[original].dtype not in (*FLOAT_DTYPES, *_INTEGER_DTYPES):
            dtype = shard.entries[original].dtype
            raise CheckpointError(
                f"{self.directory}: tensor {name!r} is {dtype}; supported: {', '.join(FLOAT_DTYPES)}: take the head's "
                "unquantised weights",
                field=name,
            )
        self._places[name] = shard, original
