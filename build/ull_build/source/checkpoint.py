"""Reads a Hugging Face checkpoint directory: config, tensors, tokenizer files.

Weights are memory-mapped and handed out as blocks of rows in float32, so that a build never holds more than one block.
Every pass over a tensor also checks that it is finite.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Model, TensorEntry, read_tensor_file
from ull.errors import CheckpointError
from ull_build.source.architecture import Architecture, parse_config
from ull_build.source.foreign import (
    quantised_tensor,
    why_no_checkpoint,
    why_no_directory,
    why_no_weights,
    why_quantised,
)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("BF16", "F16", "F32")
BLOCK_ELEMENTS = 1 << 18  # per block of rows: 1 MB in float32, so that a block and its copies stay in a core's cache

_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old versions of transformers saved


def block_rows(columns: int) -> int:
    """Rows of a block of a tensor with so many columns: a multiple of 32."""
    return max(32, BLOCK_ELEMENTS // columns // 32 * 32)


class Shard:
    """One memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries = read_tensor_file(path)
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; download the checkpoint again", field=path.name) from error
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise CheckpointError(f"{path} {error}", field=path.name) from error

    def raw(self, name: str) -> NDArray[Any]:
        """The tensor as a view of the file: uint16 bits for BF16, else its own type."""
        entry = self.entries[name]
        dtype = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}[entry.dtype]
        count = entry.nbytes // np.dtype(dtype).itemsize
        return np.frombuffer(self._map, dtype, count, entry.offset).reshape(entry.shape)

    def release(self, name: str, start: int, stop: int) -> None:
        """Lets the kernel drop the pages of bytes [start, stop) of the tensor from this process."""
        first = (self.entries[name].offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, self.entries[name].offset + stop - first)

    def close(self) -> None:
        # While an exception is on its way its frames may still hold views; the map then goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


def widened(raw: NDArray[Any]) -> NDArray[np.float32]:
    """Stored values (BF16 as uint16) as float32, in memory of their own: nothing is lost."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


class Checkpoint:
    """An opened checkpoint: `architecture`, and `tensors` by their Hugging Face names. A context manager.

    Opening checks the config and every tensor's presence, dtype and shape; the values are checked while they are read.
    Raises CheckpointError naming file, field or tensor, and the remedy.
    """

    def __init__(self, directory: Path, context: int | None = None) -> None:
        self.directory = directory
        if (reason := _why_refused(directory)) is not None:
            raise CheckpointError(reason, field=str(directory))
        config = read_json(directory / CONFIG_FILE)
        generation_path = directory / GENERATION_FILE
        generation = read_json(generation_path) if generation_path.exists() else {}
        self.architecture: Architecture = parse_config(config, generation, context)
        self.shards: list[Shard] = []
        self._shard_of: dict[str, Shard] = {}
        self._checked: set[str] = set()
        self.on_read: Callable[[str], None] | None = None  # told a shard's name whenever a tensor of it is read
        try:
            self._open_shards()
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> Model:
        return self.architecture.model

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return {name: shard.entries[name] for name, shard in self._shard_of.items()}

    @property
    def notes(self) -> list[str]:
        """What people should know of it, a line each."""
        return list(self.architecture.notes)

    @property
    def is_bf16(self) -> bool:
        """True when all weights are BF16, so that bf16 holds them without loss."""
        return all(entry.dtype == "BF16" for entry in self.tensors.values())

    def has(self, name: str) -> bool:
        return name in self._shard_of

    def blocks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The tensor in blocks of whole rows, in order, float32; multiples of 32 rows except for the last.

        A 1-D tensor is one block [length]. Raises CheckpointError for NaN or infinite values.
        """
        shard = self._shard_of[name]
        if self.on_read is not None:
            self.on_read(shard.path.name)
        raw = shard.raw(name)
        row_bytes = raw.nbytes // len(raw)
        rows = len(raw) if raw.ndim == 1 else block_rows(raw.shape[1])
        for start in range(0, len(raw), rows):
            block = raw[start : start + rows]
            yield self._floats(name, block, start)
            shard.release(name, start * row_bytes, start * row_bytes + block.nbytes)
        self._checked.add(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A 1-D tensor (norm or bias) as float32."""
        [values] = self.blocks(name)
        return values

    def _floats(self, name: str, raw: NDArray[Any], first_row: int) -> NDArray[np.float32]:
        """Widens raw values to float32, which loses nothing, and checks that they are finite."""
        values = widened(raw)
        if name not in self._checked and values.size and not np.isfinite([values.min(), values.max()]).all():
            place = np.argwhere(~np.isfinite(values))[0]
            bad = values[tuple(place)]
            place[0] += first_row
            raise CheckpointError(
                f"tensor {name!r} has the value {bad} at {place.tolist()}; download the checkpoint again",
                field=name,
            )
        return values

    @property
    def files(self) -> list[str]:
        """The names of the files that make up the model: configuration, weights and their index."""
        extra = [name for name in (GENERATION_FILE, INDEX_FILE) if (self.directory / name).exists()]
        return [CONFIG_FILE, *extra, *(shard.path.name for shard in self.shards)]

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_shards(self) -> None:
        single = self.directory / "model.safetensors"
        index = self.directory / INDEX_FILE
        if index.exists():
            self._open_index(index)
        elif single.exists():
            self._add_shard(single)
        else:
            found = sorted(path.name for path in self.directory.glob("*.safetensors"))
            if len(found) == 1:
                self._add_shard(self.directory / found[0])
                return
            if found:
                reason = f"several safetensors files but no {INDEX_FILE}; download the checkpoint again"
            else:
                others = [path.name for path in self.directory.iterdir() if path.suffix != ".safetensors"]
                raise CheckpointError(str(why_no_weights(others, str(self.directory))), field="model.safetensors")
            raise CheckpointError(f"{self.directory} has {reason}", field="model.safetensors")

    def _open_index(self, index: Path) -> None:
        """Opens the shards of an index file, which must agree with their headers."""
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index} has no `weight_map`", field=index.name)
        for name in sorted({str(name) for name in places.values()}):
            if Path(name).name != name:
                raise CheckpointError(f"{index} names a shard outside of its directory: {name!r}", field=index.name)
            self._add_shard(self.directory / name)
        for tensor, file in places.items():
            if tensor not in self._shard_of or self._shard_of[tensor].path.name != file:
                raise CheckpointError(
                    f"{index} places tensor {tensor!r} in {file}, which lacks it; download the checkpoint again",
                    field=tensor,
                )

    def _add_shard(self, path: Path) -> None:
        shard = Shard(path)
        self.shards.append(shard)
        for name, entry in shard.entries.items():
            if name.endswith(_HARMLESS_SUFFIXES):
                continue
            if name in self._shard_of:
                first = self._shard_of[name].path.name
                raise CheckpointError(f"tensor {name!r} is both in {first} and in {path.name}", field=name)
            if quantised_tensor(name, entry.dtype):
                raise CheckpointError(why_quantised(self.directory, name, entry.dtype), field=name)
            if entry.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"tensor {name!r} is {entry.dtype}; supported: {', '.join(FLOAT_DTYPES)}", field=name
                )
            self._shard_of[name] = shard

    def _check_tensors(self) -> None:
        expected = expected_shapes(self.architecture)
        for name, shape in expected.items():
            if name not in self._shard_of:
                hint = ""
                if name == "lm_head.weight":
                    hint = "; if the embeddings are tied, set `tie_word_embeddings` to true in config.json"
                elif name.endswith(".bias"):
                    hint = "; config.json asks for this bias"
                raise CheckpointError(f"the checkpoint lacks tensor {name!r} {list(shape)}{hint}", field=name)
            found = self.tensors[name].shape
            if found != shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {list(found)}, config.json asks for {list(shape)}", field=name
                )
        for name in self._shard_of:
            if name == "lm_head.weight" and self.model.tied_embeddings:
                self._check_tied()
            elif name not in expected:
                raise CheckpointError(
                    f"unexpected tensor {name!r}: {self.model.architecture} with this config.json has no such weight, "
                    "and leaving it out would change the model",
                    field=name,
                )

    def _check_tied(self) -> None:
        """A stored lm_head beside tied embeddings must equal them, or one of the two is wrong."""
        name, other = "lm_head.weight", "model.embed_tokens.weight"
        same = self.tensors[name].shape == self.tensors[other].shape and all(
            np.array_equal(one, two) for one, two in zip(self.blocks(name), self.blocks(other), strict=True)
        )
        if not same:
            raise CheckpointError(
                "config.json ties the embeddings, yet 'lm_head.weight' differs from them; "
                "set `tie_word_embeddings` to false if the head was trained on its own, or remove the tensor",
                field=name,
            )


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its Hugging Face name, with its shape."""
    model = architecture.model
    attention, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocabulary, model.hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (model.hidden,)
        for name, rows in (("q", attention), ("k", key), ("v", key)):
            linear(f"{prefix}.self_attn.{name}_proj", rows, model.hidden, architecture.qkv_bias)
        if model.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (model.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (model.head_dim,)
        linear(f"{prefix}.self_attn.o_proj", model.hidden, attention, architecture.output_bias)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (model.hidden,)
        for name in ("gate", "up"):
            linear(f"{prefix}.mlp.{name}_proj", model.intermediate, model.hidden, architecture.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", model.hidden, model.intermediate, architecture.mlp_bias)
    shapes["model.norm.weight"] = (model.hidden,)
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = (model.vocabulary, model.hidden)
    return shapes


def _why_refused(directory: Path) -> str | None:
    """Why a path cannot be a checkpoint's directory, and what helps; None for one that may be."""
    try:
        return why_no_checkpoint(directory) if directory.is_dir() else why_no_directory(directory)
    except OSError as error:
        raise unreadable(directory, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or directory that cannot be read."""
    remedy = ""
    if isinstance(error, PermissionError):
        remedy = f"; let user id {os.geteuid()} read it (chmod or chown, its directories too)"
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}{remedy}", field=path.name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the checkpoint again", field=path.name) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", field=path.name) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object", field=path.name)
    return value
