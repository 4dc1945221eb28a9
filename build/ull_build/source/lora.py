"""A LoRA adapter in PEFT's form (adapter_config.json, adapter_model.safetensors), merged while a checkpoint is read.

A linear layer's weight W [rows, columns] becomes W + scale * B @ A, with A [rank, columns] and B [rows, rank]; scale is
lora_alpha / rank, or lora_alpha / sqrt(rank) with `use_rslora` (Hu et al. 2021, Kalajdzievski 2023). The product is
computed in float64 and rounded to float32 once, so that it does not depend on how many rows are asked for at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ull.errors import CheckpointError
from ull_build.source.checkpoint import Checkpoint, expected_shapes
from ull_build.source.files import FLOAT_DTYPES, Shard, widened
from ull_build.source.lora_config import CONFIG_FILE, MERGE, LoraConfig, read_lora_config

WEIGHTS_FILE = "adapter_model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."  # what PEFT puts before the model's own names
_SAVED = ".modules_to_save"  # older versions of PEFT leave it in the names of whole modules
# The two factors of a linear layer and of the embedding, whose A and B are those of its transpose.
_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDED = (".lora_embedding_A", ".lora_embedding_B")
_AGAIN = "get the adapter's files again"


@dataclass(frozen=True)
class Update:
    """What a weight [rows, columns] gains: scale * left [rows, rank] @ right [rank, columns]."""

    left: NDArray[np.float32]
    right: NDArray[np.float32]
    scale: float

    def product(self) -> Callable[[int, int], NDArray[np.float32]]:
        """A function of rows [start, stop) of it, float32."""
        right = self.right.astype(np.float64) * self.scale

        def rows(start: int, stop: int) -> NDArray[np.float32]:
            return (self.left[start:stop].astype(np.float64) @ right).astype(np.float32)

        return rows


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: by the checkpoint's names of tensors, what is added and what takes the tensor's place."""

    directory: Path
    base: str | None  # the model that it was trained on, as its configuration names it
    updates: dict[str, Update]
    replaced: dict[str, NDArray[np.float32]]

    @property
    def files(self) -> list[str]:
        return [CONFIG_FILE, WEIGHTS_FILE]


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with a LoRA adapter merged into it, block by block as it is read.

    Raises CheckpointError like Checkpoint, and for an adapter that is not this model's, not plain LoRA, or damaged.
    """

    def __init__(self, directory: Path, adapter: Path, context: int | None = None, called: str | None = None) -> None:
        self.called = called or str(directory.resolve())  # for people
        self.adapter: Adapter | None = None  # until the checkpoint itself has been checked
        super().__init__(directory, context)
        try:
            self.adapter = read_adapter(adapter, self)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> list[str]:
        """The checkpoint's, and a warning where the adapter names another model as its base."""
        base = None if self.adapter is None else self.adapter.base
        if base is None or base == self.called or Path(base).name == Path(self.called).name:
            return super().notes
        warning = f"warning: the adapter was trained on {base}, and is merged into {self.called}"
        return [*super().notes, f"{warning}; the shapes agree, whether the weights do cannot be told"]

    @property
    def is_bf16(self) -> bool:
        """False: a sum is rarely a BF16 number, even where both parts are."""
        return False

    def fp8_rows(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """As Checkpoint.fp8_rows; what the adapter changes is to be quantised again."""
        adapter = self.adapter
        changed = adapter is not None and (name in adapter.updates or name in adapter.replaced)
        for rows in super().fp8_rows(name):
            if changed:
                rows = np.zeros_like(rows)
                if name in self.kept_rows:
                    self.kept_rows[name] = 0
            yield rows

    def blocks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The merged tensor in blocks, like Checkpoint's. Raises CheckpointError for a sum that is not finite too."""
        adapter = self.adapter
        update = None if adapter is None else adapter.updates.get(name)
        whole = None if adapter is None else adapter.replaced.get(name)
        rows = None if update is None else update.product()
        start = 0
        for block in super().blocks(name):
            stop = start + len(block)
            if whole is not None:
                block = whole[start:stop]
            if rows is not None:
                with np.errstate(over="ignore", invalid="ignore"):  # told in a line of our own
                    block = block + rows(start, stop)
                if not np.isfinite(block).all():
                    raise CheckpointError(f"the adapter makes values of {name!r} infinite; {_AGAIN}", field=name)
            yield block
            start = stop


def open_checkpoint(
    directory: Path, adapter: Path | None, context: int | None = None, called: str | None = None
) -> Checkpoint:
    """The checkpoint in `directory`, with the adapter merged where there is one; `called` is its name for people."""
    return Checkpoint(directory, context) if adapter is None else AdaptedCheckpoint(directory, adapter, context, called)


def read_adapter(directory: Path, checkpoint: Checkpoint) -> Adapter:
    """The adapter in `directory` for a checkpoint, checked. Raises CheckpointError naming the key or tensor."""
    if not directory.is_dir():
        kind = "a file; give its directory" if directory.exists() else "no directory"
        raise CheckpointError(f"no LoRA adapter at {directory}: {kind}", field="lora")
    config_path, path = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not config_path.exists():
        hint = "a whole model is built with --model" if (directory / "config.json").exists() else _AGAIN
        raise CheckpointError(f"{directory} has no {CONFIG_FILE}, so it is no LoRA adapter; {hint}", field="lora")
    config = read_lora_config(config_path)
    if not path.exists():
        if (directory / _PICKLED).exists():
            again = f"peft.AutoPeftModelForCausalLM.from_pretrained('{directory}').save_pretrained('ADAPTER')"
            raise CheckpointError(f"{directory} has pickled weights ({_PICKLED}); save them again: {again}", "lora")
        raise CheckpointError(f"{path} is missing; {_AGAIN}", field=WEIGHTS_FILE)
    shard = Shard(path)
    try:
        return _Reading(directory, config, shard, checkpoint).adapter()
    finally:
        shard.close()


class _Reading:
    """The pass over an adapter's tensors."""

    def __init__(self, directory: Path, config: LoraConfig, shard: Shard, checkpoint: Checkpoint) -> None:
        self._directory, self._config, self._shard = directory, config, shard
        self._shapes = expected_shapes(checkpoint.architecture)
        self._tied = checkpoint.model.tied_embeddings
        self._checkpoint = checkpoint

    def adapter(self) -> Adapter:
        factors: dict[str, dict[str, str]] = {}  # module -> suffix -> the tensor's own name
        whole: dict[str, str] = {}  # the checkpoint's name of a tensor -> the adapter's
        for name in self._shard.entries:
            self._sort(name, factors, whole)
        if not factors and not whole:
            raise self._wrong(WEIGHTS_FILE, f"{WEIGHTS_FILE} holds no tensors; {_AGAIN}")
        for target in self._shapes:
            module = target.rpartition(".")[0]
            # Of tied ends PEFT may write one; `_replaced` sees to those.
            if self._config.saves(module) and target not in whole and not (self._tied and module == EMBEDDING):
                reason = f"it has no tensor for {target}, which `modules_to_save` names; {_AGAIN}"
                raise self._wrong("modules_to_save", reason)
        self._check_modules(set(factors))
        updates = {f"{module}.weight": self._update(module, parts) for module, parts in factors.items()}
        return Adapter(self._directory, self._config.base, updates, self._replaced(whole))

    def _sort(self, name: str, factors: dict[str, dict[str, str]], whole: dict[str, str]) -> None:
        """Puts a tensor where it belongs, or says why there is no place for it."""
        if not name.startswith(_PREFIX):
            raise self._wrong(name, f"tensor {name!r} does not begin with {_PREFIX!r}, as PEFT's do; {MERGE}")
        own = name.removeprefix(_PREFIX)
        if "lora_magnitude_vector" in own:
            raise self._wrong(name, f"tensor {name!r} is DoRA's, which ull does not merge; {MERGE}")
        suffix = next((end for end in (*_LINEAR, *_EMBEDDED) if own.endswith(end)), None)
        if suffix is not None:
            module = own.removesuffix(suffix)
            if f"{module}.weight" not in self._shapes and not (module == HEAD and self._tied):
                raise self._wrong(
                    name, f"tensor {name!r} is for a module that the model does not have; {self._bases()}"
                )
            if (module == EMBEDDING) != (suffix in _EMBEDDED) or len(self._shapes.get(f"{module}.weight", (0, 0))) != 2:
                raise self._wrong(name, f"tensor {name!r} is of a kind that {module} does not have; {MERGE}")
            factors.setdefault(module, {})[suffix] = name
            return
        target = own.replace(f"{_SAVED}.", ".").replace(".base_layer.", ".")
        if target not in self._shapes and not (target == f"{HEAD}.weight" and self._tied):
            what = "is none of LoRA's, and" if "lora_" in own else "is for a module that"
            raise self._wrong(name, f"tensor {name!r} {what} the model does not have; {self._bases()}")
        if target.endswith(".bias"):
            raise self._wrong(name, f"tensor {name!r} changes a bias, which ull does not merge; {MERGE}")
        if target in whole:
            raise self._wrong(name, f"tensors {whole[target]!r} and {name!r} are both for {target}; {_AGAIN}")
        whole[target] = name

    def _check_modules(self, found: set[str]) -> None:
        """Compares the modules that have tensors with those that the configuration asks for."""
        asked = {
            name.removesuffix(".weight")
            for name, shape in self._shapes.items()
            if len(shape) == 2 and self._config.targets(name.removesuffix(".weight"))
        }
        if self._tied and self._config.targets(HEAD):
            asked.add(HEAD)
        for module in sorted(found - asked):
            raise self._wrong(
                "target_modules", f"it has tensors for {module}, which its {CONFIG_FILE} does not name; {_AGAIN}"
            )
        for module in sorted(asked - found):
            reason = f"it has no tensors for {module}, which `target_modules` names; {_AGAIN}"
            raise self._wrong("target_modules", reason)
        if self._tied and (tied := sorted(found & {EMBEDDING, HEAD})):
            reason = f"`target_modules` names {tied[0]}, but the model ties its embedding and lm_head; {MERGE}"
            raise self._wrong("target_modules", reason)

    def _update(self, module: str, parts: dict[str, str]) -> Update:
        suffixes = _EMBEDDED if module == EMBEDDING else _LINEAR
        for suffix in suffixes:
            if suffix not in parts:
                raise self._wrong(module, f"it lacks tensor {_PREFIX + module + suffix!r}; {_AGAIN}")
        name_a, name_b = (parts[suffix] for suffix in suffixes)
        rows, columns = self._shapes[f"{module}.weight"]
        rank, scale = self._config.scaling(module)
        # The embedding is looked up, not multiplied: its columns are the outputs.
        inputs, outputs = (rows, columns) if module == EMBEDDING else (columns, rows)
        for name, shape, at in ((name_a, (rank, inputs), 0), (name_b, (outputs, rank), 1)):
            found = self._shard.entries[name].shape
            if found == shape:
                continue
            if len(found) == 2 and found[1 - at] == shape[1 - at]:
                reason = f"tensor {name!r} is of rank {found[at]}, {CONFIG_FILE} gives {rank} (`r`, `rank_pattern`)"
                raise self._wrong(name, f"{reason}; {_AGAIN}")
            reason = f"tensor {name!r} has the shape {list(found)}, this model's {module} asks for {list(shape)}"
            raise self._wrong(name, f"{reason}; {self._bases()}")
        first, second = self._floats(name_a), self._floats(name_b)
        if module == EMBEDDING:
            return Update(np.ascontiguousarray(first.T), np.ascontiguousarray(second.T), scale)
        return Update(second, first, scale)

    def _replaced(self, whole: dict[str, str]) -> dict[str, NDArray[np.float32]]:
        """Whole tensors that the adapter brings, by the checkpoint's names."""
        replaced: dict[str, NDArray[np.float32]] = {}
        for target, name in whole.items():
            shape = self._shapes[f"{EMBEDDING}.weight" if target == f"{HEAD}.weight" else target]
            found = self._shard.entries[name].shape
            if found != shape:
                grown = target in (f"{EMBEDDING}.weight", f"{HEAD}.weight") and found[1:] == shape[1:]
                remedy = f"its vocabulary was resized: {MERGE}" if grown else self._bases()
                reason = f"tensor {name!r} has the shape {list(found)}, this model's {target} has {list(shape)}"
                raise self._wrong(name, f"{reason}; {remedy}")
            replaced[target] = self._floats(name)
        ends = [f"{EMBEDDING}.weight", f"{HEAD}.weight"]
        if self._tied and any(end in replaced for end in ends):
            first = replaced.get(ends[0])
            second = replaced.pop(ends[1], None)
            # One of the two alone says nothing about the other, except where it changes nothing.
            stored = np.concatenate(list(self._checkpoint.blocks(ends[0])))
            if not all(
                np.array_equal(stored if one is None else one, first if first is not None else stored)
                for one in (first, second)
            ):
                reason = "it brings an embedding or lm_head of its own (`modules_to_save`), and the model ties the two"
                raise self._wrong("modules_to_save", f"{reason}; {MERGE}")
        return replaced

    def _floats(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32, in memory of its own; finite."""
        dtype = self._shard.entries[name].dtype
        if dtype not in FLOAT_DTYPES:
            raise self._wrong(name, f"tensor {name!r} is {dtype}; supported: {', '.join(FLOAT_DTYPES)}; {MERGE}")
        values = widened(self._shard.raw(name))
        if not np.isfinite(values).all():
            place = np.argwhere(~np.isfinite(values))[0].tolist()
            raise self._wrong(name, f"tensor {name!r} has the value {values[tuple(place)]} at {place}; {_AGAIN}")
        return values

    def _bases(self) -> str:
        of = f", {self._config.base}" if self._config.base else ""
        return f"give --model the model that it was trained on{of}"

    def _wrong(self, field: str, reason: str) -> CheckpointError:
        return CheckpointError(f"the adapter {self._directory}: {reason}", field=field)
