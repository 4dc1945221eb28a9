"""Reads a Hugging Face checkpoint directory: config, tensors, tokenizer files.

Weights are memory-mapped and handed out as blocks of rows in float32, so that a build never holds more than one block.
Every pass over a tensor also checks that it is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Fp8Source, Model, TensorEntry
from ull.errors import CheckpointError
from ull_build.source.architecture import Architecture, parse_config
from ull_build.source.files import (
    CONFIG_FILE,
    FLOAT_DTYPES,
    FP8_DTYPE,
    GENERATION_FILE,
    INDEX_FILE,
    Shard,
    read_json,
    unreadable,
    widened,
)
from ull_build.source.foreign import (
    quantised_tensor,
    why_no_checkpoint,
    why_no_directory,
    why_no_weights,
    why_quantised,
)
from ull_build.source.quantised import (
    Fp8Scales,
    Quantisation,
    is_scale,
    is_unused,
    not_stored,
    read_quantisation,
    split_stored,
    weight_of,
)

BLOCK_ELEMENTS = 1 << 18  # per block of rows: 1 MB in float32, so that a block and its copies stay in a core's cache

AGAIN = "download the checkpoint again"

_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old versions of transformers saved


def block_rows(columns: int) -> int:
    """Rows of a block of a tensor with so many columns: a multiple of 32."""
    return max(32, BLOCK_ELEMENTS // columns // 32 * 32)


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
        self.quantisation: Quantisation | None = read_quantisation(config, directory)
        generation_path = directory / GENERATION_FILE
        generation = read_json(generation_path) if generation_path.exists() else {}
        self.architecture: Architecture = parse_config(config, generation, context)
        self.shards: list[Shard] = []
        self._shard_of: dict[str, Shard] = {}
        self._checked: set[str] = set()
        self._scales: dict[str, Fp8Scales] = {}  # of FP8 weights, by the weight's name
        self._scale_of: dict[str, tuple[Shard, str]] = {}  # likewise
        self._unused_scales = 0
        self.kept_rows: dict[str, int] = {}  # of FP8 weights that were read with `fp8_rows`
        self.on_read: Callable[[str], None] | None = None  # told a shard's name whenever a tensor of it is read
        try:
            self._open_shards()
            self._check_tensors()
            self._read_scales()
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
        notes = list(self.architecture.notes)
        if self.quantisation is not None and self._scales:
            notes.append(
                f"{len(self._scales)} weights are FP8 already ({self.quantisation.method}, {self.granularity}): in an "
                "fp8 engine rows with one scale stay as they are, others are quantised again"
            )
        if self._unused_scales:
            notes.append(
                f"{self._unused_scales} scales of activations, keys and values have no use: ull computes in 16 bits, "
                "and where FP8 holds other things than weights it measures their range"
            )
        return notes

    @property
    def fp8_source(self) -> Fp8Source | None:
        """What was FP8 already, and how much of it has been kept so far; None where nothing was."""
        if self.quantisation is None or not self._scales:
            return None
        rows = sum(entry.shape[0] for entry in self.fp8_weights.values())
        kept = sum(self.kept_rows.values())
        return Fp8Source(self.quantisation.method, self.granularity, len(self._scales), rows, kept)

    @property
    def granularity(self) -> str:
        """What its FP8 weights have a scale for: "tensor", "channel" or "block", or several of them."""
        return "+".join(sorted({scales.granularity for scales in self._scales.values()}))

    @property
    def fp8_weights(self) -> dict[str, TensorEntry]:
        """The weights that are FP8 already, by name."""
        return {name: self._shard_of[name].entries[name] for name in self._scales}

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

    def fp8_rows(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """A matrix in blocks like those of `blocks`, as far as it is FP8 that a bundle can hold as it is.

        See `Fp8Scales.stored`; `split_stored` takes them apart. Whoever reads them reads `blocks` first, which checks
        the values.
        """
        raw = self._shard_of[name].raw(name)
        rows, kept, scales = block_rows(raw.shape[1]), 0, self._scales.get(name)
        for start in range(0, len(raw), rows):
            block = raw[start : start + rows]
            if scales is None:
                yield not_stored(*block.shape)
                continue
            stored = scales.stored(block, start)
            kept += int(np.count_nonzero(split_stored(stored)[1]))
            self.kept_rows[name] = kept
            yield stored

    def vector(self, name: str) -> NDArray[np.float32]:
        """A 1-D tensor (norm or bias) as float32."""
        [values] = self.blocks(name)
        return values

    def _floats(self, name: str, raw: NDArray[Any], first_row: int) -> NDArray[np.float32]:
        """Widens raw values to float32, which loses nothing, and checks that they are finite."""
        scales = self._scales.get(name)
        values = widened(raw) if scales is None else scales.floats(raw, first_row)
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
        if self.quantisation is not None and self.quantisation.file != CONFIG_FILE:
            extra.append(self.quantisation.file)
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
        held = {shard.path.name: shard.entries.keys() for shard in self.shards}
        for tensor, file in places.items():
            if tensor not in held[file]:
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
            if self.quantisation is not None and is_unused(name):
                self._unused_scales += 1
                continue
            if self.quantisation is not None and is_scale(name):
                self._place_scale(name, shard)
                continue
            if name in self._shard_of:
                first = self._shard_of[name].path.name
                raise CheckpointError(f"tensor {name!r} is both in {first} and in {path.name}", field=name)
            if self.quantisation is None or entry.dtype != FP8_DTYPE:
                self._check_dtype(name, entry.dtype)
            self._shard_of[name] = shard

    def _check_dtype(self, name: str, dtype: str) -> None:
        if quantised_tensor(name, dtype):
            raise CheckpointError(why_quantised(self.directory, name, dtype), field=name)
        if dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"tensor {name!r} is {dtype}; supported: {', '.join(FLOAT_DTYPES)}", field=name)

    def _place_scale(self, name: str, shard: Shard) -> None:
        weight = weight_of(name)
        if weight in self._scale_of:
            first = self._scale_of[weight][1]
            raise CheckpointError(f"tensors {first!r} and {name!r} are both scales of {weight!r}", field=name)
        if (dtype := shard.entries[name].dtype) not in FLOAT_DTYPES:
            raise CheckpointError(f"tensor {name!r} is {dtype}; supported: {', '.join(FLOAT_DTYPES)}", field=name)
        self._scale_of[weight] = shard, name

    def _read_scales(self) -> None:
        """Reads the scales of FP8 weights: every one has its own, and nothing else has one."""
        block = None if self.quantisation is None else self.quantisation.block
        for name, entry in self.tensors.items():
            if entry.dtype != FP8_DTYPE:
                continue
            if len(entry.shape) != 2:
                raise CheckpointError(f"tensor {name!r} is FP8 and no matrix; {AGAIN}", field=name)
            if name not in self._scale_of:
                wanted = f"{name}_scale"
                raise CheckpointError(f"tensor {name!r} is FP8 and has no {wanted!r}; {AGAIN}", field=name)
            shard, scale = self._scale_of[name]
            self._scales[name] = Fp8Scales(scale, widened(shard.raw(scale)), entry.shape, block)
        for name, (_, scale) in self._scale_of.items():
            if name not in self._scales:
                what = f"is {self.tensors[name].dtype}, not FP8" if name in self._shard_of else "is missing"
                raise CheckpointError(f"tensor {scale!r} is there, but {name!r} {what}; {AGAIN}", field=scale)

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
