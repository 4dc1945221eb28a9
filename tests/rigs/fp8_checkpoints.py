"""Makes FP8 checkpoints of checkpoints as compressed-tensors, ModelOpt and Qwen write them, with NumPy only.

    directory = write_fp8(write_checkpoint(tmp_path / "model"), "compressed-tensors", "channel")

The linears of the layers become E4M3 codes and scales, in place; embedding, norms and lm_head stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from checkpoints import Tensors, write_json, write_shards
from weights_files import read_weights

BLOCK = (16, 32)  # rows and columns of a scale
FP8 = ml_dtypes.float8_e4m3fn


def compressed_tensors(strategy: str, shape: tuple[int, int] = BLOCK, **weights: Any) -> dict[str, Any]:
    """`quantization_config` as compressed-tensors writes it; `weights` change what it says of them."""
    block = {"block_structure": list(shape)} if strategy == "block" else {}
    about = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **block}
    scheme = {
        "targets": ["Linear"],
        "weights": {**about, "group_size": None, "observer": "minmax", **weights},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def blocks_like_qwens(block: tuple[int, int] = BLOCK) -> dict[str, Any]:
    """`quantization_config` of Qwen3's FP8 checkpoints."""
    about = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return {**about, "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}


def quantised_weight(
    weight: NDArray[np.float32], granularity: str, block: tuple[int, int] = BLOCK
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Codes [N, K] of a weight and its scales: [] for "tensor", [N, 1] for "channel", [N / rows, K / columns]."""
    rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": block}[granularity]
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    padded = np.pad(weight, [(0, down * rows - weight.shape[0]), (0, across * columns - weight.shape[1])])
    largest = np.abs(padded.reshape(down, rows, across, columns)).max(axis=(1, 3))
    scales = (largest / np.float32(448)).astype(ml_dtypes.bfloat16).astype(np.float32)  # as Qwen's are stored
    codes = (weight / spread(scales, weight.shape, rows, columns)).clip(-448, 448).astype(FP8)
    return codes, scales.reshape(()) if granularity == "tensor" else scales


def spread(scales: NDArray[np.float32], shape: tuple[int, ...], rows: int, columns: int) -> NDArray[np.float32]:
    """Scales by block as scales by value."""
    by_row = np.repeat(np.atleast_2d(scales), rows, axis=0)[: shape[0]]
    return np.repeat(by_row, columns, axis=1)[:, : shape[1]]


def write_fp8(
    directory: Path,
    method: str,
    granularity: str,
    *,
    keep: Callable[[str], bool] = lambda name: False,
    block: tuple[int, int] = BLOCK,
    shards: int = 1,
    edit: Callable[[Tensors], None] = lambda tensors: None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Turns the checkpoint in `directory` (one shard) into an FP8 one and returns it.

    `method`: "compressed-tensors", "fp8" (Qwen's), "modelopt" (in config.json) or "hf_quant_config" (ModelOpt's own
    file). `block`: of "block", rows and columns of a scale; ModelOpt's are always 128 of each. `keep`: names of weights
    that stay as they are. `edit` changes the tensors before they are written, `config` takes the place of the metadata.
    """
    tensors: Tensors = {}
    for name, stored in load_file(directory / "model.safetensors").items():
        if "_proj.weight" not in name or keep(name):
            tensors[name] = stored
            continue
        codes, scales = quantised_weight(stored.astype(np.float32), granularity, block)
        tensors[name] = codes
        if method == "fp8":
            tensors[f"{name}_scale_inv"] = scales.astype(ml_dtypes.bfloat16)
        elif method == "compressed-tensors":
            tensors[f"{name}_scale"] = scales.astype(ml_dtypes.bfloat16)
        else:
            rows, of_blocks = len(stored), (-(-len(stored) // block[0]), 1, -1, 1)
            shape: tuple[int, ...] = {"tensor": (), "channel": (rows,), "block": of_blocks}[granularity]
            tensors[f"{name}_scale"] = scales.reshape(shape)
            tensors[name.replace("weight", "input_scale")] = np.array(0.25, np.float32)
    edit(tensors)
    (directory / "model.safetensors").unlink()
    write_shards(directory, tensors, shards)
    algorithm = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[granularity]
    modelopt = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if method == "hf_quant_config":
        producer = {"name": "modelopt", "version": "0.37.0"}
        write_json(directory / "hf_quant_config.json", config or {"producer": producer, "quantization": modelopt})
        return directory
    metadata = {
        "compressed-tensors": compressed_tensors(granularity, block),
        "fp8": blocks_like_qwens(block),
        "modelopt": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]},
    }[method]
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_json(directory / "config.json", {**values, "quantization_config": config or metadata})
    return directory


def floats_of(directory: Path, block: tuple[int, int] = BLOCK) -> Tensors:
    """Every weight as float32 by its name: codes times scales, computed in float64."""
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= read_weights(path)
    found: Tensors = {}
    for name, stored in tensors.items():
        if stored.dtype != FP8:
            if not name.endswith("scale") and not name.endswith("scale_inv"):
                found[name] = stored.astype(np.float32)
            continue
        scales = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        scales = scales.astype(np.float32)
        scales = scales.squeeze((1, 3)) if scales.ndim == 4 else scales
        if scales.size == 1:
            rows, columns = stored.shape
        elif scales.size == len(stored) and scales.shape[0] == len(stored):
            scales, rows, columns = scales.reshape(-1, 1), 1, stored.shape[1]
        else:
            rows, columns = block
        whole = spread(scales, stored.shape, rows, columns).astype(np.float64)
        found[name] = (stored.astype(np.float64) * whole).astype(np.float32)
    return found
