"""Checkpoints whose linear weights are FP8 already: what their metadata says of it, and what their rows are.

A weight is an E4M3 code times its scale. compressed-tensors and ModelOpt call that `weight_scale`, Qwen and DeepSeek
`weight_scale_inv`, which despite its name is multiplied too. A scale is for the whole tensor, for a row (an output
channel), or for a block of rows and columns. A bundle has one for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ull.errors import CheckpointError
from ull_build.source.config_fields import Fields, short
from ull_build.source.files import read_json
from ull_build.source.foreign import QUANTISED

MODELOPT_FILE = "hf_quant_config.json"
SCALE_BYTES = 4

Granularity = Literal["tensor", "channel", "block"]

_KEYS = ("quantization_config", "compression_config")  # of config.json; the second is older
_SCALES = (".weight_scale", ".weight_scale_inv")
# Of activations, and of keys and values: nothing that a weight is made of.
_UNUSED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
# What ModelOpt calls its FP8 formats, with the rows and columns of a block.
_MODELOPT: Mapping[str, tuple[int, int] | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": (128, 128),
}
_FLOAT_FORMATS = (None, "float-quantized", "naive-quantized", "mixed-precision")  # of compressed-tensors
_STRATEGIES = (None, "tensor", "channel", "block")
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # code -> value
_LEAST_SCALE = np.finfo(np.float32).tiny  # as in `quantise_rows`


@dataclass(frozen=True)
class Quantisation:
    """What the metadata of an FP8 checkpoint says: `method` made it; `block` are the rows and columns of a scale.

    `file` holds the metadata. `block` is None where no weight has a scale by block.
    """

    method: str
    file: str
    block: tuple[int, int] | None = None


def read_quantisation(config: dict[str, Any], directory: Path) -> Quantisation | None:
    """What `config` (config.json), or else ModelOpt's own file, says; None for weights that are not quantised.

    Raises CheckpointError for weights in another format than FP8, with what helps.
    """
    for key in _KEYS:
        if config.get(key) is not None:
            return _from_config(_object(Fields(config), key), key)
    path = directory / MODELOPT_FILE
    if not path.exists():
        return None
    fields = Fields(read_json(path), file=MODELOPT_FILE)
    return Quantisation("ModelOpt", MODELOPT_FILE, _modelopt_block(_object(fields, "quantization")))


def is_scale(name: str) -> bool:
    """Whether a tensor of an FP8 checkpoint is a weight's scale."""
    return name.endswith(_SCALES)


def is_unused(name: str) -> bool:
    """Whether a tensor of an FP8 checkpoint is a scale that a bundle has no use for."""
    return name.endswith(_UNUSED)


def weight_of(scale: str) -> str:
    """The name of the weight that a scale is for."""
    return f"{scale.rpartition('.')[0]}.weight"


class Fp8Scales:
    """The scales of an FP8 weight [N, K], which turn its codes into floats, and into rows as a bundle stores them.

    `scales`: float32 of any of the shapes [] and [1], [N] and [N, 1], [N / rows, K / columns] or the same with ones
    between, rounded up, where `block` is (rows, columns). Raises CheckpointError for other shapes, and for scales that
    are negative or not finite. `name` is theirs.
    """

    def __init__(
        self, name: str, scales: NDArray[np.float32], shape: tuple[int, ...], block: tuple[int, int] | None
    ) -> None:
        self._columns = shape[1]
        self.granularity, self._block_rows, self._block_columns = _grid(name, scales.shape, shape, block)
        grid = -(-shape[0] // self._block_rows), -(-shape[1] // self._block_columns)
        self._scales = scales.reshape(grid)
        wrong = ~np.isfinite(self._scales) | (self._scales < 0)
        if wrong.any():
            value = self._scales[wrong][0]
            raise CheckpointError(
                f"tensor {name!r} has the value {value}, but scales are positive; download the checkpoint again", name
            )

    def floats(self, codes: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
        """The values of rows of codes, of which the first is row `start`: code times scale, rounded to float32."""
        values: NDArray[np.float32] = _VALUES[codes] * self._spread(self._scales[self._rows(start, len(codes))])
        return values

    def stored(self, codes: NDArray[np.uint8], start: int) -> NDArray[np.uint8]:
        """Rows of codes as a bundle stores FP8, uint8 [n, K + 4]: codes, then the row's scale as a float32's bytes.

        Where all of a row has one scale they are the checkpoint's own. Where it has several, the codes are for the
        largest, if every value is the same with it. The scale 0 marks a row that one scale cannot hold.
        """
        by_block = self._scales[self._rows(start, len(codes))]
        scales = by_block.max(axis=1)
        several = by_block.min(axis=1) != scales
        if several.any():
            codes = codes.copy()
            codes[several], held = self._with_largest(codes[several], by_block[several], scales[several])
            scales[several] = np.where(held, scales[several], np.float32(0))
        scales[scales < _LEAST_SCALE] = 0
        return np.concatenate([codes, scales.astype("<f4")[:, None].view(np.uint8)], axis=1)

    def _with_largest(
        self, codes: NDArray[np.uint8], by_block: NDArray[np.float32], scales: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Codes of the same rows for each row's largest scale, and whether they are the same values."""
        # A code has 4 bits, a scale 24: their products are exact in float64.
        values = _VALUES[codes].astype(np.float64) * self._spread(by_block)
        largest = scales[:, None].astype(np.float64)
        with np.errstate(invalid="ignore"):  # NaN is told by who reads the floats
            coded = (values / np.where(largest > 0, largest, 1)).astype(ml_dtypes.float8_e4m3fn)
        held: NDArray[np.bool_] = (coded.astype(np.float64) * largest == values).all(axis=1)
        return coded.view(np.uint8), held

    def _rows(self, start: int, count: int) -> NDArray[np.intp]:
        """For each of so many rows, the row of `_scales` that is for it."""
        return np.arange(start, start + count) // self._block_rows

    def _spread(self, by_block: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scales of rows by column, [n, K] or, where a row has one scale, [n, 1]."""
        if by_block.shape[1] == 1:
            return by_block
        return np.repeat(by_block, self._block_columns, axis=1)[:, : self._columns]


def not_stored(rows: int, columns: int) -> NDArray[np.uint8]:
    """What `Fp8Scales.stored` gives for rows that it cannot hold: rows that are to be quantised."""
    return np.zeros((rows, columns + SCALE_BYTES), np.uint8)


def split_stored(stored: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The codes [n, K] and the scales [n] of rows in that form; a scale of 0: the row is to be quantised."""
    scales = np.ascontiguousarray(stored[:, -SCALE_BYTES:]).view("<f4")[:, 0]
    return np.ascontiguousarray(stored[:, :-SCALE_BYTES]), scales.astype(np.float32)


def _grid(
    name: str, found: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[Granularity, int, int]:
    """What scales of the shape `found` are for in a weight of `shape`, with the rows and columns of each."""
    rows, columns = shape
    if found in ((), (1,), (1, 1)):
        return "tensor", rows, columns
    if found in ((rows,), (rows, 1)):
        return "channel", 1, columns
    wanted = "one, or one for each row"
    if block is not None:
        down, across = -(-rows // block[0]), -(-columns // block[1])
        if found in ((down, across), (down, 1, across, 1)):
            return "block", *block
        wanted += f", or {[down, across]} for blocks of {list(block)}"
    raise CheckpointError(
        f"tensor {name!r} has the shape {list(found)}, a weight of {list(shape)} takes {wanted}; "
        "download the checkpoint again",
        field=name,
    )


def _from_config(fields: Fields, key: str) -> Quantisation:
    """What `quantization_config` says, or the like under an older name, `key`."""
    method = fields.values.get("quant_method", "compressed-tensors" if key == _KEYS[1] else None)
    if method == "compressed-tensors":
        return Quantisation(method, fields.file, _compressed_block(fields))
    if isinstance(method, str) and method.startswith("modelopt"):
        nested = fields.values.get("quantization")
        return Quantisation(
            "ModelOpt", fields.file, _modelopt_block(fields if nested is None else _object(fields, "quantization"))
        )
    if method == "fp8":
        if (form := fields.values.get("fmt", "e4m3")) != "e4m3":
            raise _refused(fields, "fmt", f"is {short(form)}")
        return Quantisation("fp8", fields.file, _block(fields, "weight_block_size"))
    bits = fields.values.get("bits") or ("4" if fields.values.get("load_in_4bit") else None)
    raise _refused(fields, "quant_method", f"is {short(method)}" + (f", {bits} bits" if bits else ""))


def _compressed_block(fields: Fields) -> tuple[int, int] | None:
    """The blocks of a checkpoint of compressed-tensors, all of whose weights are FP8 or are not quantised."""
    for name, harmless in (("sparsity_config", {"format": "dense"}), ("transform_config", {"config_groups": {}})):
        value = fields.values.get(name)
        if value and not (isinstance(value, dict) and harmless.items() <= value.items()):
            raise _refused(fields, name, f"is {short(value)}, which ull does not undo")
    groups = _object(fields, "config_groups")
    blocks = set()
    for group in groups.values:
        scheme = _object(groups, group)
        if scheme.values.get("weights") is None:
            continue
        weights = _object(scheme, "weights")
        kind, bits = weights.values.get("type", "int"), weights.values.get("num_bits", 8)
        strategy, symmetric = weights.values.get("strategy"), weights.values.get("symmetric", True)
        if (kind, bits) != ("float", 8):
            raise _refused(weights, "type", f"is {short(kind)} of {short(bits)} bits")
        if strategy not in _STRATEGIES:
            raise _refused(weights, "strategy", f"is {short(strategy)}")
        if symmetric is not True:
            raise _refused(weights, "symmetric", f"is {short(symmetric)}")
        for holder in (fields, scheme):
            if (form := holder.values.get("format")) not in _FLOAT_FORMATS:
                raise _refused(holder, "format", f"is {short(form)}")
        if strategy == "block":
            blocks.add(_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise _refused(fields, "config_groups", f"has blocks of several sizes, {sorted(map(str, blocks))}")
    return blocks.pop() if blocks else None


def _modelopt_block(fields: Fields) -> tuple[int, int] | None:
    algorithm = fields.values.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in _MODELOPT:
        raise _refused(fields, "quant_algo", f"is {short(algorithm)}")
    return _MODELOPT[algorithm.upper()]


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where there is none."""
    value = fields.values.get(name)
    if value is None:
        return None
    parts: Any = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(part) for part in parts)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise fields.fail(name, f"must be two positive numbers, rows and columns, not {short(value)}")
    return rows, columns


def _object(fields: Fields, name: str) -> Fields:
    """An object in `fields`. Raises CheckpointError where it is another thing, or missing."""
    value = fields.values.get(name)
    if not isinstance(value, dict):
        raise fields.fail(name, f"must be an object, not {short(value)}")
    return Fields(value, f"{fields.prefix}{name}.", fields.file)


def _refused(fields: Fields, name: str, what: str) -> CheckpointError:
    return fields.fail(name, f"{what}: {QUANTISED}")
