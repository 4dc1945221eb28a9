"""The peer of bench/cpu.py: llama.cpp on the same weights as Q8_0, with the same number of threads.

Run with a Python that has the extra `bench` (llama-cpp-python, gguf):

    python bench/peers/llama_cpp_peer.py CHECKPOINT GGUF THREADS PROMPT_TOKENS NEW_TOKENS REPEATS

Writes GGUF from the Hugging Face checkpoint CHECKPOINT if it does not exist, then prints one JSON object:
`decode_ns` (each single-token llama_decode, sampling not included) and `prefill_ns` (each whole prompt).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gguf
import llama_cpp
import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, what bfloat16 is)
import numpy as np
from safetensors import safe_open


def interleaved_rope_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders [heads * head_dim, hidden] from rotate-half pairs (Hugging Face) to adjacent pairs (llama.cpp)."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Writes the Llama checkpoint as GGUF: matrices Q8_0, norms float32, no tokenizer (the peer feeds token ids)."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("none")

    def matrix(name: str, weight: np.ndarray) -> None:
        packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    with safe_open(checkpoint / "model.safetensors", framework="np") as tensors:

        def load(name: str) -> np.ndarray:
            return np.asarray(tensors.get_tensor(name)).astype(np.float32)

        matrix("token_embd.weight", load("model.embed_tokens.weight"))
        writer.add_tensor("output_norm.weight", load("model.norm.weight"))
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            writer.add_tensor(f"blk.{i}.attn_norm.weight", load(layer + "input_layernorm.weight"))
            writer.add_tensor(f"blk.{i}.ffn_norm.weight", load(layer + "post_attention_layernorm.weight"))
            query, key = load(layer + "self_attn.q_proj.weight"), load(layer + "self_attn.k_proj.weight")
            matrix(f"blk.{i}.attn_q.weight", interleaved_rope_rows(query, heads))
            matrix(f"blk.{i}.attn_k.weight", interleaved_rope_rows(key, kv_heads))
            matrix(f"blk.{i}.attn_v.weight", load(layer + "self_attn.v_proj.weight"))
            matrix(f"blk.{i}.attn_output.weight", load(layer + "self_attn.o_proj.weight"))
            matrix(f"blk.{i}.ffn_gate.weight", load(layer + "mlp.gate_proj.weight"))
            matrix(f"blk.{i}.ffn_up.weight", load(layer + "mlp.up_proj.weight"))
            matrix(f"blk.{i}.ffn_down.weight", load(layer + "mlp.down_proj.weight"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(path: Path, threads: int, prompt_tokens: int, new_tokens: int, repeats: int) -> dict[str, list[int]]:
    """Times `repeats` prompts of `prompt_tokens` and the `new_tokens` single-token steps after each."""
    llama_cpp.llama_backend_init()
    model_options = llama_cpp.llama_model_default_params()
    model_options.use_extra_bufts = False  # version 0.3.36 crashes in its AMX kernels on the tiny model's shapes
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = prompt_tokens + new_tokens
    options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    generator = np.random.default_rng(0)
    decode_ns, prefill_ns = [], []

    def step(tokens: list[int]) -> int:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        started = time.perf_counter_ns()
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens)))
        logits = llama_cpp.llama_get_logits_ith(context, -1)  # waits for the result
        elapsed = time.perf_counter_ns() - started
        if status != 0 or not logits:
            raise RuntimeError(f"llama_decode failed with status {status}")
        return elapsed

    for repeat in range(repeats + 1):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        prompt = generator.integers(3, vocabulary, prompt_tokens).tolist()
        elapsed = sum(step(prompt[begin : begin + 512]) for begin in range(0, prompt_tokens, 512))
        steps = [step([int(token)]) for token in generator.integers(3, vocabulary, new_tokens)]
        if repeat > 0:  # the first is warm-up
            prefill_ns.append(elapsed)
            decode_ns.extend(steps)
    return {"decode_ns": decode_ns, "prefill_ns": prefill_ns}


if __name__ == "__main__":
    checkpoint_path, gguf_path = Path(sys.argv[1]), Path(sys.argv[2])
    if not gguf_path.exists():
        write_gguf(checkpoint_path, gguf_path)
    print(json.dumps(measure(gguf_path, *(int(argument) for argument in sys.argv[3:7]))))
