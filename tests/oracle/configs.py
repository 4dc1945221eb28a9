"""What transformers makes of the spellings that config.json files have: rotary embeddings and sliding windows.

`configs.json` holds `base`, the keys that all of them share, and `entries`, a list of
    { name, config: further keys, inverse_frequencies [head_dim / 2], attention_factor,
      seen: keys that the last of `LENGTH` tokens attends to, by layer }
    or { name, config, error: the class of the exception }.
The configuration is read by `AutoConfig.from_pretrained`, and a model of random weights runs with it.
"""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from .cases import BASE

LENGTH, WINDOW = 12, 5  # tokens
LAYERS = 2
TINY = BASE | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": LAYERS}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ORIGINAL = {"original_max_position_embeddings": 48}

# Either object of a config.json, by name.
OBJECTS: dict[str, Any] = {
    "null": None,
    "empty": {},
    "default": {"rope_type": "default"},
    "default-theta": {"rope_type": "default", "rope_theta": 1e6},
    "only-theta": {"rope_theta": 50000},
    "linear": {"type": "linear", "factor": 2},
    "llama3": LLAMA3 | ORIGINAL,
    "yarn": YARN,
    "yarn-theta": YARN | {"rope_theta": 1e6},
}
# Those that are spelled alone, in either place.
ALONE: dict[str, Any] = OBJECTS | {
    "linear-theta": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5},
    "linear-of-two-types": {"rope_type": "linear", "type": "llama3", "factor": 2.5},
    "linear-without-factor": {"rope_type": "linear"},
    "linear-null-factor": {"rope_type": "linear", "factor": None},
    "linear-text-factor": {"rope_type": "linear", "factor": "2"},
    "linear-partial-1": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
    "linear-partial-half": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "linear-unknown-key": {"rope_type": "linear", "factor": 2.0, "comment": "none"},
    "null-type": {"rope_type": None},
    "null-old-type": {"type": None, "factor": 2.0},
    "null-theta": {"rope_type": "default", "rope_theta": None},
    "unknown-type": {"rope_type": "su", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "text": "linear",
    "list": ["linear", 2.0],
    "nested": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    "llama3-theta": LLAMA3 | ORIGINAL | {"rope_theta": 5e5},
    "llama3-without-original": LLAMA3,
    "llama3-null-original": LLAMA3 | {"original_max_position_embeddings": None},
    "llama3-old-type": {"type": "llama3", **LLAMA3, **ORIGINAL},
    "llama3-without-low": {key: value for key, value in (LLAMA3 | ORIGINAL).items() if key != "low_freq_factor"},
    "yarn-old-type": {"type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn-without-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-null-factor": YARN | {"factor": None},
    "yarn-without-factor": {key: value for key, value in YARN.items() if key != "factor"},
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn-mscale-alone": YARN | {"mscale": 0.7, "mscale_all_dim": 0},
    "yarn-betas": YARN | {"beta_fast": 8, "beta_slow": 0.5},
    "yarn-null-betas": YARN | {"beta_fast": None, "beta_slow": 0},
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 4.0},
    "yarn-null-truncate": YARN | {"truncate": None},
    "yarn-same-pair": YARN | {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
    "yarn-large-factor": YARN | {"factor": 32.0, "beta_fast": 16.0},
}
BESIDE: dict[str, dict[str, Any]] = {
    "": {},
    "+theta": {"rope_theta": 5e5},
    "+null-theta": {"rope_theta": None},
    "+original": {"original_max_position_embeddings": 96},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "window": {"sliding_window": WINDOW},
    "null-window": {"sliding_window": None},
    "used": {"sliding_window": WINDOW, "use_sliding_window": True},
    "used-late": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "used-null": {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
    "unused": {"sliding_window": WINDOW, "use_sliding_window": False, "max_window_layers": 0},
}
LAYER_TYPES: dict[str, Any] = {
    "": None,
    "+null": {"layer_types": None},
    "+full": {"layer_types": ["full_attention"] * 2},
    "+sliding": {"layer_types": ["sliding_attention"] * 2},
    "+mixed": {"layer_types": ["sliding_attention", "full_attention"]},
    "+old-name": {"layer_types": ["attention", "attention"]},
    "+unknown": {"layer_types": ["full_attention", "chunky_attention"]},
    "+short": {"layer_types": ["full_attention"]},
}


def spellings() -> dict[str, dict[str, Any]]:
    """Every config.json of the family by its name: the keys over `TINY`."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, architecture: str, **keys: Any) -> None:
        found[name] = {"model_type": architecture, **keys}

    for key, (name, value), (beside, more) in itertools.product(
        ("rope_scaling", "rope_parameters"), ALONE.items(), BESIDE.items()
    ):
        add(f"llama {key} {name} {beside}".strip(), "llama", **{key: value}, **more)
    for (one, scaling), (other, parameters), theta in itertools.product(
        OBJECTS.items(), OBJECTS.items(), ("", "+theta")
    ):
        name = f"llama rope_scaling {one} rope_parameters {other} {theta}".strip()
        add(name, "llama", rope_scaling=scaling, rope_parameters=parameters, **BESIDE[theta])
    for architecture, (name, value) in itertools.product(ARCHITECTURES[1:], ALONE.items()):
        head = {"head_dim": 16} if architecture == "qwen3" else {}
        add(f"{architecture} rope_scaling {name}", architecture, rope_scaling=value, rope_theta=5e5, **head)
    for architecture, (window, keys), (types, more) in itertools.product(
        ARCHITECTURES, WINDOWS.items(), LAYER_TYPES.items()
    ):
        add(f"{architecture} {window} {types}".strip(), architecture, head_dim=16, **keys, **(more or {}))
    return found


def write_configs(path: Path) -> None:
    """Writes configs.json, one entry to a line."""
    with tempfile.TemporaryDirectory() as temporary:
        entries = [
            {"name": name, "config": config, **transformers_view(config, Path(temporary))}
            for name, config in spellings().items()
        ]
    lines = ",\n".join(json.dumps(entry, sort_keys=True) for entry in entries)
    path.write_text(f'{{"base": {json.dumps(TINY)},\n"entries": [\n{lines}\n]}}\n')


@torch.no_grad()
def transformers_view(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """All of one entry but `name` and `config`."""
    (directory / "config.json").write_text(json.dumps(TINY | config))
    try:
        read = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager", dtype=torch.float32)
        tokens = torch.arange(LENGTH)[None]
        result = model.eval()(tokens, use_cache=False, output_attentions=True)
    except Exception as error:  # whatever it is, such a checkpoint does not run
        return {"error": type(error).__name__}
    rotary = model.model.rotary_emb
    return {
        "inverse_frequencies": [float(f"{value:.9g}") for value in rotary.inv_freq.tolist()],
        "attention_factor": rotary.attention_scaling,
        "seen": [int((layer[0, 0, -1] > 0).sum()) for layer in result.attentions],
    }
