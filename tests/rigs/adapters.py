"""Writes small random LoRA adapters in PEFT's form, and merges them into a checkpoint's weights by PEFT's formula."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from checkpoints import NUMPY_DTYPES, Tensors, write_json

PREFIX = "base_model.model."
ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_config(**changes: Any) -> dict[str, Any]:
    """An adapter_config.json as PEFT writes it; `changes` set keys, the value `...` removes one."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "inference_mode": True,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def write_adapter(
    directory: Path,
    weights: Tensors,
    *,
    ranks: dict[str, int] | None = None,
    modules: Callable[[str], bool] | None = None,
    dtype: str = "fp32",
    seed: int = 1,
    tensors: Callable[[Tensors], None] | None = None,
    **config: Any,
) -> Path:
    """Writes an adapter for a model with `weights` and returns its directory.

    `modules` says which modules get factors (default: those that end as `target_modules` says), `ranks` which of them
    have another rank than `r`, by the ends of their names; `tensors` changes what is written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values = adapter_config(**config)
    write_json(directory / "adapter_config.json", values)
    wanted = modules or (lambda module: module.rpartition(".")[2] in values["target_modules"])
    random, written = np.random.default_rng(seed), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or weight.ndim != 2 or not wanted(module):
            continue
        rank = next((rank for end, rank in (ranks or {}).items() if module.endswith(end)), values["r"])
        rows, columns = weight.shape
        if module == "model.embed_tokens":
            names, shapes = ("lora_embedding_A", "lora_embedding_B"), ((rank, rows), (columns, rank))
        else:
            names, shapes = ("lora_A.weight", "lora_B.weight"), ((rank, columns), (rows, rank))
        for end, shape in zip(names, shapes, strict=True):
            written[f"{PREFIX}{module}.{end}"] = (0.2 * random.standard_normal(shape)).astype(NUMPY_DTYPES[dtype])
    if tensors is not None:
        tensors(written)
    save_file(written, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def floats(path: Path) -> Tensors:
    """A safetensors file with its tensors widened to float32."""
    return {name: np.asarray(value).astype(np.float32) for name, value in load_file(path).items()}


def merged(weights: Tensors, adapter: Path, scale: Callable[[str], float]) -> dict[str, NDArray[np.float32]]:
    """`weights` + scale(module) * B @ A for every module of the adapter; its whole tensors replace the weights."""
    parts = floats(adapter / "adapter_model.safetensors")
    result = dict(weights)
    for name, value in parts.items():
        own = name.removeprefix(PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        if "lora_" not in own:
            result[own] = value
    for name, first in parts.items():
        if (match := re.fullmatch(rf"{PREFIX}(.*)\.lora_(embedding_)?A(\.weight)?", name)) is None:
            continue
        second = parts[name.replace("lora_embedding_A", "lora_embedding_B").replace("lora_A", "lora_B")]
        product = second.astype(np.float64) @ first.astype(np.float64) * scale(match[1])
        weight = f"{match[1]}.weight"
        result[weight] = result[weight] + (product.T if match[2] else product).astype(np.float32)
    return result
