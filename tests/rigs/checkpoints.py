"""Writes small random Hugging Face checkpoints for tests: any supported architecture, with NumPy and safetensors only.

    directory = write_checkpoint(tmp_path / "model", "qwen2", tied=True, dtype="fp16", shards=3)

The tokenizer is a byte-level BPE trained on the spot, with BOS (0), EOS (1), an end-of-turn token (2) and a chat
template. `config` and `tensors` change what is written, to make checkpoints that are wrong in one point.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
NUMPY_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|end|>")
BOS, EOS, END = range(3)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TRAINING_TEXT = [
    "def add(first, second):\n    return first + second\n\nfor index in range(10):\n    print(index)\n",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. The end of the story.",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n",
] * 4

Tensors = dict[str, NDArray[Any]]


@functools.cache
def tokenizer_json(vocabulary: int = 320, add_bos: bool = True) -> str:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, all 256 bytes included, as tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
        )
    return str(tokenizer.to_str())


def write_tokenizer(directory: Path, vocabulary: int = 320, add_bos: bool = True, chat: bool = True) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(tokenizer_json(vocabulary, add_bos), encoding="utf-8")
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(directory / "tokenizer_config.json", {**config, **({"chat_template": CHAT_TEMPLATE} if chat else {})})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def make_config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json; `changes` set keys, the value `...` removes one."""
    config = {
        "architectures": [CLASS_NAMES[architecture]],
        "model_type": architecture,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 330,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
        **({"sliding_window": None} if architecture == "mistral" else {}),
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random float32 weights with the Hugging Face names and shapes of a config with an explicit head_dim."""
    random = np.random.default_rng(seed)
    architecture, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tensors: Tensors = {}

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        if bias:
            tensors[f"{name}.bias"] = (0.3 * random.standard_normal(rows)).astype(np.float32)

    def norm(name: str, length: int) -> None:
        tensors[f"{name}.weight"] = (1.0 + 0.2 * random.standard_normal(length)).astype(np.float32)

    linear("model.embed_tokens", config["vocab_size"], hidden)
    attention_bias = bool(config.get("attention_bias")) and architecture in ("llama", "qwen3")
    mlp_bias = bool(config.get("mlp_bias")) and architecture == "llama"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(
                f"{prefix}.self_attn.{name}_proj", rows * head_dim, hidden, attention_bias or architecture == "qwen2"
            )
        if architecture == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, attention_bias)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        linear(f"{prefix}.mlp.gate_proj", config["intermediate_size"], hidden, mlp_bias)
        linear(f"{prefix}.mlp.up_proj", config["intermediate_size"], hidden, mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, config["intermediate_size"], mlp_bias)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings"):
        linear("lm_head", config["vocab_size"], hidden)
    return tensors


def write_checkpoint(
    directory: Path,
    architecture: str = "llama",
    *,
    tied: bool = False,
    dtype: str = "bf16",
    shards: int = 1,
    seed: int = 0,
    vocabulary: int = 320,
    add_bos: bool = True,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], None] | None = None,
) -> Path:
    """Writes a checkpoint directory and returns it.

    `dtype`: "bf16", "fp16" or "fp32"; `vocabulary`: size of the tokenizer; `config`: changes of config.json (`...`
    removes a key); `tensors`: changes the float32 weights in place before they are written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    changes = {"tie_word_embeddings": tied, "torch_dtype": TORCH_NAMES[dtype], **(config or {})}
    values = make_config(architecture, **changes)
    write_json(directory / "config.json", values)
    sizes = {**make_config(architecture), **{key: value for key, value in changes.items() if value is not ...}}
    weights = random_tensors(sizes, seed)
    if tensors is not None:
        tensors(weights)
    stored = {name: value.astype(NUMPY_DTYPES[dtype]) for name, value in weights.items()}
    write_shards(directory, stored, shards)
    write_tokenizer(directory, vocabulary, add_bos)
    return directory


def write_shards(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """Writes model.safetensors, or that many shards and their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    total = sum(value.nbytes for value in tensors.values())
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def head_tensors(
    heads: int = 2, layers: int = 1, own: bool = False, hidden: int = 48, rows: int = 330, biases: bool = True
) -> Tensors:
    """Random Medusa heads under FasterDecoding's names; `own`: each with an lm_head of `rows`."""
    random = np.random.default_rng(5)
    tensors: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = random.standard_normal((hidden, hidden)).astype(np.float32)
            if biases:
                tensors[f"{head}.{layer}.linear.bias"] = random.standard_normal(hidden).astype(np.float32)
        if own:
            tensors[f"{head}.{layers}.weight"] = random.standard_normal((rows, hidden)).astype(np.float32)
    return tensors
