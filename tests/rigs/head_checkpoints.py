"""Writes small random heads for the model of checkpoints.py, in the forms in which real ones are published.

    write_eagle(tmp_path / "head", "speculators", config={"norm_before_residual": True})

The tensors are the same in every form of a kind, so that what is read from them must be too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from checkpoints import write_json
from torch_files import write_torch

Tensors = dict[str, NDArray[Any]]
EagleForm = Literal["original", "prefixed", "torch", "speculators"]
DflashForm = Literal["z-lab", "deepseek", "speculators"]

HIDDEN, INTERMEDIATE, ROWS, TOKENS = 48, 64, 330, 320  # of the target: hidden size, embedding rows, tokens
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 12
OWN = 96  # tokens of a head with a vocabulary of its own
BLOCK, MASK = 4, 5


@dataclass(frozen=True)
class HeadShape:
    """Dimensions of a head, and of the target that it drafts for."""

    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    own: int = OWN
    target_hidden: int = HIDDEN
    rows: int = ROWS
    tokens: int = TOKENS


SMALL = HeadShape()


class _Random:
    def __init__(self, seed: int, shape: HeadShape = SMALL) -> None:
        self._random = np.random.default_rng(seed)
        self._shape = shape
        self.tensors: Tensors = {}

    def linear(self, name: str, rows: int, columns: int) -> None:
        values = self._random.standard_normal((rows, columns)) / np.sqrt(columns)
        self.tensors[f"{name}.weight"] = values.astype(np.float32)

    def norm(self, name: str, length: int | None = None) -> None:
        length = length or self._shape.hidden
        self.tensors[f"{name}.weight"] = (1.0 + 0.2 * self._random.standard_normal(length)).astype(np.float32)

    def layer(self, name: str, inputs: int) -> None:
        shape, hidden = self._shape, self._shape.hidden
        self.norm(f"{name}.input_layernorm")
        for part, rows in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            self.linear(f"{name}.self_attn.{part}_proj", rows * shape.head_dim, inputs)
        self.linear(f"{name}.self_attn.o_proj", hidden, shape.heads * shape.head_dim)
        self.norm(f"{name}.post_attention_layernorm")
        self.linear(f"{name}.mlp.gate_proj", shape.intermediate, hidden)
        self.linear(f"{name}.mlp.up_proj", shape.intermediate, hidden)
        self.linear(f"{name}.mlp.down_proj", hidden, shape.intermediate)

    def map(self) -> None:
        """d2t and t2d: which tokens of the target the head knows."""
        shape = self._shape
        known = np.sort(self._random.choice(shape.tokens, shape.own, replace=False))
        self.tensors["d2t"] = (known - np.arange(shape.own)).astype(np.int64)
        self.tensors["t2d"] = np.isin(np.arange(shape.rows), known)


def eagle_tensors(
    taps: int = 3, norms: Literal["none", "each", "all"] = "none", seed: int = 3, shape: HeadShape = SMALL
) -> Tensors:
    """An EAGLE-3 head's tensors by the original's names."""
    random = _Random(seed, shape)
    random.linear("fc", shape.hidden, taps * shape.target_hidden)
    if norms == "each":
        for tap in range(taps):
            random.norm(f"fc_norm.{tap}", shape.target_hidden)
    elif norms == "all":
        random.norm("input_norm", taps * shape.target_hidden)
    random.layer("midlayer", 2 * shape.hidden)
    random.norm("midlayer.hidden_norm")
    random.norm("norm")
    random.linear("lm_head", shape.own, shape.hidden)
    random.map()
    return random.tensors


def _layer_config(kind: str, layers: int, shape: HeadShape = SMALL) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.rows,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }


def _write(directory: Path, config: dict[str, Any], changes: dict[str, Any] | None, tensors: Tensors) -> Path:
    directory.mkdir(parents=True)
    merged = {**config, **(changes or {})}
    write_json(directory / "config.json", {key: value for key, value in merged.items() if value is not ...})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_eagle(
    directory: Path,
    form: EagleForm = "original",
    *,
    taps: list[int] | None = None,
    norms: Literal["none", "each", "all"] = "none",
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], object] | None = None,
    shape: HeadShape = SMALL,
) -> Path:
    """Writes a head; `taps`: layers whose input it reads. `config` changes fields (`...`: removes), `tensors` all."""
    taps = [0, 1, 2] if taps is None else taps
    values = eagle_tensors(len(taps), norms, shape=shape)
    if form == "speculators":
        values = {name.replace("midlayer.", "layers.0."): value for name, value in values.items()}
        about = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}},
            "transformer_layer_config": _layer_config("llama", 1, shape),
            "draft_vocab_size": shape.own,
            "norm_before_residual": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": taps,
        }
    else:
        if form == "prefixed":
            values = {f"model.{name}" if "." in name else name: value for name, value in values.items()}
        about = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **_layer_config("llama", 1, shape),
            "draft_vocab_size": shape.own,
            "max_position_embeddings": 2048,
            "eagle_aux_hidden_state_layer_ids": taps,
        }
    if tensors is not None:
        tensors(values)
    _write(directory, about, config, values)
    if form == "torch":
        (directory / "model.safetensors").unlink()
        write_torch(directory / "pytorch_model.bin", values)
    return directory


def dflash_tensors(
    layers: int = 2,
    taps: int = 2,
    markov: int = 0,
    gated: bool = False,
    confidence: bool = False,
    seed: int = 4,
    shape: HeadShape = SMALL,
) -> Tensors:
    """A DFlash head's tensors by z-lab's names, with DSpark's where `markov` is a rank."""
    random, hidden = _Random(seed, shape), shape.hidden
    random.linear("fc", hidden, taps * shape.target_hidden)
    random.norm("hidden_norm")
    for layer in range(layers):
        random.layer(f"layers.{layer}", hidden)
        random.norm(f"layers.{layer}.self_attn.q_norm", shape.head_dim)
        random.norm(f"layers.{layer}.self_attn.k_norm", shape.head_dim)
    random.norm("norm")
    if markov:
        random.linear("markov_head.markov_w1", shape.rows, markov)
        random.linear("markov_head.markov_w2", shape.rows, markov)
        if gated:
            random.linear("markov_head.gate_proj", markov, hidden + markov)
            random.norm("markov_head.gate", markov)
            random.tensors["markov_head.gate_proj.bias"] = random.tensors.pop("markov_head.gate.weight")
    if confidence:
        random.linear("confidence_head.proj", 1, hidden + markov)
        random.tensors["confidence_head.proj.bias"] = np.array([0.25], np.float32)
    return random.tensors


def write_dflash(
    directory: Path,
    form: DflashForm = "z-lab",
    *,
    taps: list[int] | None = None,
    markov: int = 0,
    gated: bool = False,
    confidence: bool = False,
    config: dict[str, Any] | None = None,
    inner: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], object] | None = None,
    shape: HeadShape = SMALL,
) -> Path:
    """Writes a head as write_eagle does; `inner` changes fields of dflash_config."""
    taps = [1, 2] if taps is None else taps
    values = dflash_tensors(2, len(taps), markov, gated, confidence, shape=shape)
    dspark = {"markov_rank": markov, "markov_head_type": "gated" if gated else "vanilla"}
    dspark |= {"enable_confidence_head": confidence, "confidence_head_with_markov": confidence and markov > 0}
    outputs = [tap - 1 for tap in taps]
    about: dict[str, Any]
    if form == "speculators":
        about = {
            "architectures": ["DSparkDraftModel" if markov else "DFlashDraftModel"],
            "speculators_model_type": "dspark" if markov else "dflash",
            "transformer_layer_config": _layer_config("qwen3", 2, shape),
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "draft_vocab_size": shape.rows,
            "aux_hidden_state_layer_ids": taps,
            **(dspark if markov else {}),
        }
    elif form == "deepseek":
        about = {"architectures": ["Qwen3DSparkModel"], **_layer_config("qwen3", 2, shape), **dspark}
        about |= {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": outputs}
        names = {name: f"logit_head.{name}" if "_head." in name else name for name in values}
        values = {names[name]: value for name, value in values.items()}
    else:
        about = {"architectures": ["DFlashDraftModel"], **_layer_config("qwen3", 2, shape), "block_size": BLOCK}
        about["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": outputs}
        if markov:
            about["dflash_config"] |= {"projector_type": "dspark", **dspark}
        about["dflash_config"] = {
            key: value for key, value in {**about["dflash_config"], **(inner or {})}.items() if value is not ...
        }
    if tensors is not None:
        tensors(values)
    return _write(directory, about, config, values)
