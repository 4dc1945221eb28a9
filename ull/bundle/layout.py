"""The layout of weights: which tensors a bundle holds, their shapes and bytes, and the safetensors header that says so.

The executor reads linear weights in row tiles of 32: `[tiles, K, 32]`, so that one vector load takes the same column of
32 output rows. `ull_build.weights.pack_cpu` fills this layout, `ull.bundle.open` checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from ull.bundle.manifest import MedusaHeads, Model, Precision, Speculation, embedding_is_shared

TILE_ROWS = 32
ALIGNMENT = 64  # bytes: one cache line, and one AVX-512 register
DRAFT = "draft."  # prefix of the draft model's tensors
MEDUSA = "medusa."  # prefix of the Medusa heads' tensors
FILLER = ".filler"  # suffix of tensors of zeros that only align the next one
MAX_HEADER_BYTES = 100_000_000  # the same bound as the safetensors library

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
STORED_AS = {"fp8": "F8_E4M3", "bf16": "BF16", "f32": "F32"}  # precision -> safetensors dtype


@dataclass(frozen=True)
class TensorShape:
    """What a tensor of a bundle must look like; `optional` ones (biases) may be absent."""

    dtype: str
    shape: tuple[int, ...]
    optional: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a safetensors file: `offset` from the start of the file, in bytes."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` >= `value`."""
    return -(-value // unit) * unit


def qkv_rows(model: Model) -> int:
    """Rows of the fused query, key and value projection."""
    return (model.heads + 2 * model.kv_heads) * model.head_dim


def tile_count(rows: int) -> int:
    """Row tiles that hold `rows` rows."""
    return -(-rows // TILE_ROWS)


def padded_length(length: int, item_bytes: int) -> int:
    """The least length >= `length` of a vector whose bytes are a multiple of ALIGNMENT."""
    return round_up(length, ALIGNMENT // item_bytes)


class _Plan:
    """Collects the tensors of one model in file order.

    A matrix of odd dimensions may end between two multiples of ALIGNMENT; since safetensors allows no holes, a filler
    tensor NAME + FILLER follows it.
    """

    def __init__(self, precision: Precision) -> None:
        self.small = "F32" if precision.weights == "f32" else "BF16"
        self.tensors: dict[str, TensorShape] = {}

    def vector(self, name: str, length: int) -> None:
        self.tensors[name] = TensorShape(self.small, (padded_length(length, ITEM_BYTES[self.small]),))

    def matrix(self, name: str, stored: str, shape: tuple[int, ...]) -> None:
        self.tensors[name] = TensorShape(STORED_AS[stored], shape)
        if filler := -self.tensors[name].nbytes % ALIGNMENT:
            self.tensors[name + FILLER] = TensorShape("U8", (filler,))

    def linear(self, name: str, tiles: int, columns: int, stored: str, bias: bool = True) -> None:
        self.matrix(f"{name}.weight", stored, (tiles, columns, TILE_ROWS))
        if stored == "fp8":
            self.tensors[f"{name}.scale"] = TensorShape("F32", (tiles * TILE_ROWS,))
        if bias:
            self.tensors[f"{name}.bias"] = TensorShape(self.small, (tiles * TILE_ROWS,), optional=True)


def expected_tensors(
    model: Model, precision: Precision, speculation: Speculation | None = None
) -> dict[str, TensorShape]:
    """Every tensor of a bundle with its stored shape: the model's in order of use, then what drafts for it."""
    tensors = _model_tensors(model, precision)
    if speculation and speculation.medusa:
        tensors |= medusa_tensors(model, precision, speculation.medusa)
    if speculation and speculation.draft:
        draft = _model_tensors(speculation.draft.model, speculation.draft.precision)
        tensors |= {DRAFT + name: shape for name, shape in draft.items()}
    return tensors


def medusa_tensors(model: Model, precision: Precision, medusa: MedusaHeads) -> dict[str, TensorShape]:
    """The tensors of the heads; lm_heads of their own are stored like the other linears, not like the model's."""
    plan = _Plan(precision)
    for head in range(medusa.heads):
        for layer in range(medusa.layers):
            plan.linear(f"{MEDUSA}{head}.{layer}", tile_count(model.hidden), model.hidden, precision.weights)
        if medusa.version == "1":
            name = f"{MEDUSA}{head}.lm_head"
            plan.linear(name, tile_count(model.vocabulary), model.hidden, precision.weights, bias=False)
    return plan.tensors


def _model_tensors(model: Model, precision: Precision) -> dict[str, TensorShape]:
    plan = _Plan(precision)
    vector, linear = plan.vector, plan.linear
    if not embedding_is_shared(model, precision):
        plan.matrix("embed.weight", precision.embedding, (model.vocabulary, model.hidden))
    attention = model.heads * model.head_dim
    for layer in range(model.layers):
        prefix = f"layers.{layer}"
        vector(f"{prefix}.attn_norm", model.hidden)
        linear(f"{prefix}.qkv", tile_count(qkv_rows(model)), model.hidden, precision.weights)
        if model.qk_norm:
            vector(f"{prefix}.q_norm", model.head_dim)
            vector(f"{prefix}.k_norm", model.head_dim)
        linear(f"{prefix}.o", tile_count(model.hidden), attention, precision.weights)
        vector(f"{prefix}.mlp_norm", model.hidden)
        linear(f"{prefix}.gate_up", 2 * tile_count(model.intermediate), model.hidden, precision.weights)
        linear(f"{prefix}.down", tile_count(model.hidden), model.intermediate, precision.weights)
    vector("norm", model.hidden)
    linear("lm_head", tile_count(model.vocabulary), model.hidden, precision.lm_head, bias=False)
    return plan.tensors


def read_tensor_file(path: Path) -> dict[str, TensorEntry]:
    """Reads and checks the header of a safetensors file.

    Raises ValueError saying what is wrong (truncated, no header, overlapping or misdeclared tensors), OSError as usual.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"is truncated: {size} bytes, not even a safetensors header")
        length = int.from_bytes(start, "little")
        if start + file.read(32) == b"version https://git-lfs.github.com/spec/":
            raise ValueError("is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        if length > MAX_HEADER_BYTES:
            raise ValueError("is not a safetensors file (its header claims more than 100 MB)")
        if 8 + length > size:
            raise ValueError(f"is truncated: the header needs {8 + length} bytes, the file has {size}")
        file.seek(8)
        header = file.read(length)
    try:
        declared = msgspec.json.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"has a damaged safetensors header ({error})") from error
    if not isinstance(declared, dict):
        raise ValueError("has a damaged safetensors header (not a JSON object)")
    entries = {name: _entry(name, item, 8 + length) for name, item in declared.items() if name != "__metadata__"}
    _check_extents(entries, 8 + length, size)
    return entries


def _entry(name: str, item: Any, data_start: int) -> TensorEntry:
    """Checks one tensor of a safetensors header."""
    dtype = item.get("dtype") if isinstance(item, dict) else None
    shape = item.get("shape") if isinstance(item, dict) else None
    extent = item.get("data_offsets") if isinstance(item, dict) else None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"declares tensor {name!r} with the unknown dtype {dtype!r}")
    if not _is_size_list(shape) or not _is_size_list(extent) or len(extent) != 2 or extent[0] > extent[1]:
        raise ValueError(f"declares tensor {name!r} with a damaged shape or extent")
    if extent[1] - extent[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"declares tensor {name!r} with {extent[1] - extent[0]} bytes, which is not {dtype} {shape}")
    return TensorEntry(data_start + extent[0], extent[1] - extent[0], dtype, tuple(shape))


def _is_size_list(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_extents(entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must fill the file from the header's end to its own, without overlap or hole."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise ValueError(f"has a hole or an overlap before tensor {name!r}")
        end += entry.nbytes
    if end > size:
        raise ValueError(f"is truncated: its tensors need {end} bytes, the file has {size}")
    if end < size:
        raise ValueError(f"has {size - end} bytes after its last tensor")
