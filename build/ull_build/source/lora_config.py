"""adapter_config.json of a LoRA adapter: which modules it changes and by how much, and what ull does not merge."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ull.errors import CheckpointError
from ull_build.source.files import read_json

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"

MERGE = "merge it with PEFT (merge_and_unload) and build the checkpoint that gives"
# Ways to begin that leave the model's own weights as they are. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) do not.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
# Keys with the values that change nothing, and what anything else is called.
_MUST_BE = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases of its own",
    "layer_replication": "repeated layers",
    "target_parameters": "parameters that belong to no linear layer",
    "trainable_token_indices": "single trained tokens",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "an adapter that acts behind certain tokens only",
    "arrow_config": "a choice between adapters",
    "use_bdlora": "block-diagonal LoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}


@dataclass(frozen=True)
class LoraConfig:
    """What adapter_config.json says. Modules are named as in the model: "model.layers.0.self_attn.q_proj"."""

    base: str | None
    rank: int
    alpha: float
    rank_stabilised: bool
    target_modules: str | tuple[str, ...]  # a regular expression, or names and ends of names
    exclude_modules: str | tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()  # trained whole

    def targets(self, module: str) -> bool:
        """True for a module that the adapter changes."""
        if _matches(self.exclude_modules, module) or self.saves(module):
            return False
        if self.target_modules == ALL_LINEAR:
            return module not in ("model.embed_tokens", "lm_head")
        if not _matches(self.target_modules, module):
            return False
        if self.layers is None or isinstance(self.target_modules, str) or module in self.target_modules:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
        return found is not None and int(found[1]) in self.layers

    def saves(self, module: str) -> bool:
        """True for a module that was trained whole, or lies in one that was: it has no factors then."""
        return any(re.match(rf"(^|.*\.){one}($|\..*)", module) for one in self.modules_to_save)

    def scaling(self, module: str) -> tuple[int, float]:
        """The module's rank, and the factor of its product."""
        rank = _of_pattern(self.rank_pattern, module, self.rank)
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return int(rank), alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_lora_config(path: Path) -> LoraConfig:
    """Raises CheckpointError naming the key, and what helps."""
    values = read_json(path)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise _wrong(path, "peft_type", f"is {kind!r}; ull merges LoRA alone: {MERGE}")
    for key, what in _MUST_BE.items():
        if values.get(key) not in (None, False, [], {}):
            raise _wrong(path, key, f"asks for {what}, which ull does not merge; {MERGE}")
    if values.get("bias", "none") != "none":
        raise _wrong(path, "bias", f"is {values['bias']!r}: trained biases are not merged; {MERGE}")
    beginning = values.get("init_lora_weights", True)
    if beginning not in _PLAIN_BEGINNINGS:
        reason = f"is {beginning!r}, which changes the model's own weights too"
        raise _wrong(path, "init_lora_weights", f"{reason}; {MERGE}")
    base = values.get("base_model_name_or_path")
    layers = values.get("layers_to_transform")
    patterns = values.get("layers_pattern")
    config = LoraConfig(
        base=base if isinstance(base, str) and base else None,
        rank=_rank(path, "r", values.get("r")),
        alpha=_alpha(path, "lora_alpha", values.get("lora_alpha")),
        rank_stabilised=_flag(path, "use_rslora", values.get("use_rslora")),
        target_modules=_modules(path, "target_modules", values.get("target_modules")),
        exclude_modules=_modules(path, "exclude_modules", values.get("exclude_modules")),
        rank_pattern={
            key: _rank(path, f"rank_pattern.{key}", value) for key, value in _table(path, values, "rank_pattern")
        },
        alpha_pattern={
            key: _alpha(path, f"alpha_pattern.{key}", value) for key, value in _table(path, values, "alpha_pattern")
        },
        layers=None if layers in (None, []) else _layers(path, layers),
        layers_pattern=()
        if not patterns
        else (patterns,)
        if isinstance(patterns, str)
        else _names(path, "layers_pattern", patterns),
        modules_to_save=_names(path, "modules_to_save", values.get("modules_to_save")),
    )
    _check_expressions(path, config)
    return config


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    """PEFT's rule: a string is an expression for the whole name, a list has names and ends of names."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in wanted)


def _of_pattern(pattern: Mapping[str, float], module: str, otherwise: float) -> float:
    """The value of the first key that is an expression for the end of the name, as PEFT has it."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _check_expressions(path: Path, config: LoraConfig) -> None:
    """Every expression must be one."""
    expressions = {
        "target_modules": [config.target_modules],
        "exclude_modules": [config.exclude_modules],
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "layers_pattern": config.layers_pattern,
        "modules_to_save": config.modules_to_save,
    }
    for key, found in expressions.items():
        for text in found:
            try:
                re.compile(text if isinstance(text, str) else "")
            except re.error as error:
                raise _wrong(path, key, f"holds {text!r}, which is no regular expression ({error})") from error


def _rank(path: Path, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(path, key, f"is {value!r}; a rank is a whole number from 1 on")
    return value


def _alpha(path: Path, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(path, key, f"is {value!r}; it must be a number")
    return float(value)


def _flag(path: Path, key: str, value: Any) -> bool:
    if value not in (None, True, False):
        raise _wrong(path, key, f"is {value!r}; it must be true or false")
    return bool(value)


def _modules(path: Path, key: str, value: Any) -> str | tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise _wrong(path, key, f"is {str(value)[:60]!r}; it must be a list of names, or one expression")


def _names(path: Path, key: str, value: Any) -> tuple[str, ...]:
    found = _modules(path, key, value)
    return (found,) if isinstance(found, str) else found


def _table(path: Path, values: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    table = values.get(key) or {}
    if not isinstance(table, dict):
        raise _wrong(path, key, f"is {str(table)[:60]!r}; it must be a table")
    return list(table.items())


def _layers(path: Path, value: Any) -> tuple[int, ...]:
    layers = value if isinstance(value, list) else [value]
    if any(type(layer) is not int or layer < 0 for layer in layers):
        raise _wrong(path, "layers_to_transform", f"is {str(value)[:60]!r}; it must be numbers of layers")
    return tuple(layers)


def _wrong(path: Path, key: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: `{key}` {reason}", field=key)
