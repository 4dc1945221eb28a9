"""Reads Medusa heads in the forms that exist: `medusa_lm_head.pt` or `.safetensors`, and vLLM's names.

Which heads there are is read off the tensors; config.json is known to be wrong about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ull.bundle import MAX_MEDUSA_HEADS, MAX_MEDUSA_LAYERS, MedusaHeads, Model
from ull.errors import CheckpointError
from ull_build.source.files import CONFIG_FILE, FLOAT_DTYPES, Shard, read_json
from ull_build.source.torch_file import read_torch_file

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
_PREFIX = "medusa_heads."  # vLLM's, optional
_BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
_OWN_HEAD = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.(\d+)\.weight")

Array = NDArray[np.float32]


@dataclass(frozen=True)
class MedusaWeights:
    """`blocks[i][j]` is (W [hidden, hidden], bias [hidden] or None) of layer j of head i.

    `lm_heads[i]` [rows, hidden] for version 1; empty for version 2.
    """

    path: Path
    blocks: list[list[tuple[Array, Array | None]]]
    lm_heads: list[Array]

    @property
    def description(self) -> MedusaHeads:
        version: Literal["1", "2"] = "1" if self.lm_heads else "2"
        return MedusaHeads(heads=len(self.blocks), layers=len(self.blocks[0]), version=version)

    @property
    def files(self) -> list[str]:
        """The names of the files that say what the heads are, in the directory of `path`."""
        return [self.path.name, *([CONFIG_FILE] if (self.path.parent / CONFIG_FILE).exists() else [])]

    @property
    def biased(self) -> bool:
        """Whether the layers have biases: all of them, or none."""
        return self.blocks[0][0][1] is not None


def read_medusa(path: Path, count: int | None = None) -> MedusaWeights:
    """Reads the heads at `path`, a file or a directory; `count` takes only the first heads.

    Raises CheckpointError naming the file, the tensor and the remedy.
    """
    file = _find(path)
    tensors = {name.removeprefix(_PREFIX): values for name, values in _read_file(file).items()}
    weights: dict[tuple[int, int], Array] = {}
    biases: dict[tuple[int, int], Array] = {}
    own: dict[int, Array] = {}
    placed: dict[int, int] = {}  # head -> the layer index that its own lm_head's name claims
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file}: tensor {name!r} holds values that are not finite", field=name)
        if block := _BLOCK.fullmatch(name):
            place = (int(block[1] or block[3]), int(block[2] or block[4]))
            (weights if block[5] == "weight" else biases)[place] = values
        elif head := _OWN_HEAD.fullmatch(name):
            index = int(head[1] if head[1] is not None else head[2])
            if index in own:
                raise CheckpointError(f"{file} holds two lm_heads for head {index}", field=name)
            own[index] = values
            if head[3] is not None:
                placed[index] = int(head[3])
        else:
            raise CheckpointError(f"{file}: tensor {name!r} is none of a Medusa head's", field=name)
    found = _assemble(file, weights, biases, own, placed)
    _check_version(file, found)
    if count is None:
        return found
    if count > len(found.blocks):
        raise CheckpointError(f"{file} holds {len(found.blocks)} heads, the recipe asks for {count}", field="num")
    return MedusaWeights(file, found.blocks[:count], found.lm_heads[:count])


def check_medusa(heads: MedusaWeights, model: Model) -> None:
    """Refuses heads that were made for another model. Raises CheckpointError naming the tensor."""
    hidden = model.hidden
    for index, layers in enumerate(heads.blocks):
        for layer, (weight, bias) in enumerate(layers):
            name = f"head {index}, layer {layer}"
            if weight.shape != (hidden, hidden):
                raise CheckpointError(
                    f"{heads.path}: {name} has the shape {list(weight.shape)}, the target's hidden size is {hidden}; "
                    "these heads belong to another model",
                    field="medusa",
                )
            if bias is not None and bias.shape != (hidden,):
                raise CheckpointError(
                    f"{heads.path}: the bias of {name} has the shape {list(bias.shape)}, not [{hidden}]", field="medusa"
                )
    for index, own in enumerate(heads.lm_heads):
        if own.ndim != 2 or own.shape[1] != hidden:
            raise CheckpointError(
                f"{heads.path}: the lm_head of head {index} has the shape {list(own.shape)}, "
                f"not [vocabulary, {hidden}]",
                field="medusa",
            )
        if len(own) < model.tokenizer_vocabulary:  # rows beyond the tokenizer's are padding and may differ
            raise CheckpointError(
                f"{heads.path}: the lm_head of head {index} has {len(own)} rows, the target's tokenizer has "
                f"{model.tokenizer_vocabulary} tokens; these heads belong to another model",
                field="medusa",
            )


def _find(path: Path) -> Path:
    """The file itself, or the one that a directory holds."""
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"no Medusa heads at {path}", field="medusa")
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} holds no Medusa heads ({', '.join(FILES)})", field="medusa")


def _read_file(file: Path) -> dict[str, Array]:
    if file.suffix != ".safetensors":
        return read_torch_file(file)
    shard = Shard(file)
    try:
        tensors = {}
        for name, entry in shard.entries.items():
            if entry.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is {entry.dtype}; supported: {', '.join(FLOAT_DTYPES)}", field=name
                )
            raw = shard.raw(name)
            wide = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32) if entry.dtype == "BF16" else raw
            tensors[name] = wide.astype(np.float32)
            del raw, wide
        return tensors
    finally:
        shard.close()


def _assemble(
    file: Path,
    weights: dict[tuple[int, int], Array],
    biases: dict[tuple[int, int], Array],
    own: dict[int, Array],
    placed: dict[int, int],
) -> MedusaWeights:
    """Heads 0.. with layers 0.., each complete and alike."""
    if not weights:
        raise CheckpointError(f"{file} holds no Medusa heads", field="medusa")
    heads, layers = (1 + max(place[axis] for place in weights) for axis in (0, 1))
    if heads > MAX_MEDUSA_HEADS or layers > MAX_MEDUSA_LAYERS:
        raise CheckpointError(
            f"{file} holds {heads} heads of {layers} layers; at most {MAX_MEDUSA_HEADS} of {MAX_MEDUSA_LAYERS} are "
            "supported",
            field="medusa",
        )
    for head in range(heads):
        for layer in range(layers):
            if (head, layer) not in weights:
                raise CheckpointError(f"{file} lacks the weight of head {head}, layer {layer}", field="medusa")
        if own and head not in own:
            raise CheckpointError(f"{file} lacks the lm_head of head {head}, others have one", field="medusa")
        if placed.get(head, layers) != layers:
            raise CheckpointError(
                f"{file}: the lm_head of head {head} stands at place {placed[head]}, after {layers} layers",
                field="medusa",
            )
    for place in biases:
        if place not in weights:
            raise CheckpointError(f"{file} holds a bias without a weight, head {place[0]}", field="medusa")
    if biases and len(biases) != len(weights):
        raise CheckpointError(f"{file}: some layers have a bias and others do not", field="medusa")
    if any(head >= heads for head in own):
        raise CheckpointError(f"{file} holds an lm_head for a head that it lacks", field="medusa")
    blocks = [[(weights[head, layer], biases.get((head, layer))) for layer in range(layers)] for head in range(heads)]
    return MedusaWeights(file, blocks, [own[head] for head in sorted(own)])


def _check_version(file: Path, heads: MedusaWeights) -> None:
    """The version that config.json claims: only 1 and 2 exist, and 1 means that every head has its own lm_head."""
    config = file.parent / CONFIG_FILE
    if not config.exists():
        return
    values = read_json(config)
    if not any(name.startswith("medusa") for name in values):
        return  # the target's own config.json
    version = values.get("version")
    if version not in (None, "1", "2", 1, 2):
        raise CheckpointError(
            f"{config}: version {version!r} of Medusa heads is not supported; supported: 1, 2", field="version"
        )
    if version is not None and str(version) != heads.description.version:
        found = "have their own lm_heads" if heads.lm_heads else "have no lm_heads of their own"
        raise CheckpointError(
            f"{config} says version {version}, but the heads in {file.name} {found}, which is version "
            f"{heads.description.version}; the file is incomplete, or correct config.json",
            field="version",
        )
