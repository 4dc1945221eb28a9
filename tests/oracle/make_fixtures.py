"""Writes the oracle's fixtures: `python -m tests.oracle.make_fixtures [CASE ...]` (extra `oracle`).

Each case becomes a random checkpoint in the form transformers saves it, and `expected.npz` with what transformers
(eager attention, float32, deterministic) computes from those files:
    seed int32, prompt int32 [P], greedy int32 [64] (end tokens ignored), positions int32 [N], logits float32
    [N, vocabulary] at these positions of prompt + greedy, margin float32 (smallest top-1 minus top-2 logit over the
    greedy tokens, relative to max |logit|).
Weights come from NumPy's generator, so that they do not depend on the machine or the version of torch.
"""

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .cases import BEGIN, CASES, CHAT, CONFIGS, END, END_OF_TURN, GREEDY_TOKENS, TOKENIZER, TOLERANCE, Case
from .chat import write_chat, write_tokenizer
from .configs import write_configs

# Searching a prompt: rounds of candidates that share all but their last tokens; then the next seed's model.
SEEDS = 8
SEARCH_ROUNDS = 16
CANDIDATES = 512
SUFFIX = 8
SEARCHED_MARGIN = 11.5 * TOLERANCE  # above the ten times that `write_case` requires: the search estimates the scale
DISTINCT_TOKENS = 20  # of the 64 greedy ones; random models like to fall into short cycles
SPACING = 24  # positions between stored rows of logits, beside the last 8 of the prompt and the very last
# The smallest accepted effect of a case's option on the logits, relative to max |logit|.
LEAST_EFFECT = 0.02


def random_parameter(name: str, shape: tuple[int, ...], tied: bool, seed: int) -> np.ndarray:
    """A float32 parameter whose scale keeps attention sharp, logits spread and no norm or bias trivial."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = generator.standard_normal(shape)
    if "norm" in name:
        return generator.uniform(0.5, 1.7, shape).astype(np.float32)
    if name.endswith(".bias"):
        return (0.25 * normal).astype(np.float32)
    if "embed_tokens" in name and not tied:
        return normal.astype(np.float32)
    # A tied embedding is kept small: its own token would win every time if it dominated the residual.
    gain = {"q_proj": 1.5, "k_proj": 1.5, "embed_tokens": 0.7, "lm_head": 3.0}
    if "embed_tokens" in name or "lm_head" in name:
        # A few loud rows: with fewer rivals the best token stands out more clearly.
        normal[np.arange(shape[0]) % 6 != 0] *= 0.5
    factor = next((value for part, value in gain.items() if part in name), 1.0)
    return (factor * normal / np.sqrt(shape[-1])).astype(np.float32)


def stored_form(values: np.ndarray, case: Case) -> torch.Tensor:
    """`values` in the case's storage dtype; exact in bf16 and in fp16 at once where the case asks for it."""
    tensor = torch.from_numpy(values)
    if case.exact_in_bf16:
        tensor = tensor.to(torch.bfloat16).float()
        # Below 2^-16 a bf16 mantissa no longer fits fp16's subnormals.
        tensor[tensor.abs() < 2.0**-16] = 0.0
    stored = tensor.to(getattr(torch, case.dtype))
    if case.exact_in_bf16:
        assert torch.equal(stored.float(), tensor), case.name
    return stored


def classic_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The same configuration with the keys of config.json files written before transformers 5."""
    classic = {key: value for key, value in config.items() if key != "rope_parameters"}
    parameters = dict(config["rope_parameters"])
    classic["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    # The oldest files say "type" for linear scaling; llama3 scaling always said "rope_type".
    key = "type" if kind == "linear" else "rope_type"
    classic["rope_scaling"] = None if kind == "default" else {key: kind, **parameters}
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config["model_type"]]
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        **classic,
        "torch_dtype": dtype,
        "transformers_version": "4.45.0",
        "use_cache": True,
    }


def write_checkpoint(case: Case, directory: Path, seed: int) -> None:
    """Creates the random model of `case` and saves it the way transformers does."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    config = {key: value for key, value in case.config.items() if key != "model_type"}
    # transformers completes these dictionaries in place.
    config["rope_parameters"] = dict(config["rope_parameters"])
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(case.config["model_type"], **config)
    ).to(getattr(torch, case.dtype))
    tied = case.config["tie_word_embeddings"]
    for name, parameter in model.named_parameters():
        parameter.data = stored_form(random_parameter(name, tuple(parameter.shape), tied, seed), case)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BEGIN, eos_token_id=case.eos if len(case.eos) > 1 else case.eos[0]
    )
    shard = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
    model.save_pretrained(directory, **shard)
    if case.classic:
        text = json.dumps(classic_config(case.config, case.dtype), indent=2)
        (directory / "config.json").write_text(text + "\n")


def load(directory: Path, **overrides: Any) -> Any:
    """The checkpoint as transformers reads it, in float32 with eager attention; `overrides` change its config."""
    config = transformers.AutoConfig.from_pretrained(directory)
    if overrides:
        keys = without_derived(config.to_dict()) | overrides
        config = transformers.AutoConfig.for_model(config.model_type, **keys)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def without_derived(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without the keys that are derived from the others, so that overriding the others takes effect."""
    return {key: value for key, value in config.items() if key not in {"layer_types", "model_type"}}


@torch.no_grad()
def greedy_tokens(model: Any, prompts: np.ndarray, count: int) -> np.ndarray:
    """Greedy continuations with the KV cache, end tokens ignored: int32 [B, P] -> int32 [B, count]."""
    ids = torch.from_numpy(prompts.astype(np.int64))
    cache = transformers.DynamicCache(config=model.config)
    chosen = []
    for _ in range(count):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        chosen.append(ids)
    return torch.cat(chosen, 1).numpy().astype(np.int32)


@torch.no_grad()
def all_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits at every position in one pass without a cache: int32 [B, T] -> float32 [B, T, vocabulary]."""
    return model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()


def greedy_margins(logits: np.ndarray) -> np.ndarray:
    """Smallest top-1 minus top-2 over the positions that predict greedy tokens, relative to max |logit|: [B]."""
    deciding = logits[:, -GREEDY_TOKENS - 1 : -1]
    top = np.partition(deciding, -2, axis=-1)[..., -2:]
    return (top[..., 1] - top[..., 0]).min(-1) / np.abs(logits).max((-1, -2))


@torch.no_grad()
def survivors(model: Any, prompt: np.ndarray, variants: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """(margin, prompt) of the prompts [P] whose 64 greedy tokens are all decided clearly.

    The candidates share `prompt` [P - SUFFIX] and end in one of `variants` [B, SUFFIX]; each is dropped at its first
    close decision, which most meet within ten tokens.
    """
    cache = transformers.DynamicCache(config=model.config)
    shared = model(torch.from_numpy(prompt[None].astype(np.int64)), past_key_values=cache, use_cache=True).logits
    scale = float(shared.abs().max())
    cache.batch_repeat_interleave(len(variants))
    ids = torch.from_numpy(variants.astype(np.int64))
    alive = torch.arange(len(variants))
    margins = torch.full((len(variants),), torch.inf)
    chosen = torch.empty((len(variants), 0), dtype=torch.int64)
    for _ in range(GREEDY_TOKENS):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        top = logits.topk(2)
        margins = torch.minimum(margins, (top.values[:, 0] - top.values[:, 1]) / scale)
        keep = (margins >= SEARCHED_MARGIN).nonzero()[:, 0]
        if not len(keep):
            return []
        cache.batch_select_indices(keep)
        ids = top.indices[keep, :1]
        alive, margins, chosen = alive[keep], margins[keep], torch.cat([chosen[keep], ids], 1)
    return [
        (float(margin), np.concatenate([prompt, variants[index]]))
        for index, margin, tokens in zip(alive.tolist(), margins, chosen, strict=True)
        if len(tokens.unique()) >= DISTINCT_TOKENS
    ]


def choose_prompt(model: Any, case: Case, seed: int) -> np.ndarray | None:
    """A random prompt whose greedy continuation no rounding can change, int32 [P]; None if the search finds none."""
    generator = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    vocabulary = case.config["vocab_size"]
    for _ in range(SEARCH_ROUNDS):
        shared = generator.integers(0, vocabulary, case.prompt_tokens - SUFFIX, dtype=np.int32)
        variants = generator.integers(0, vocabulary, (CANDIDATES, SUFFIX), dtype=np.int32)
        found = survivors(model, shared, variants)
        if found:
            return max(found, key=lambda candidate: candidate[0])[1]
    return None


def expectation(model: Any, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of `expected.npz` for one prompt, int32 [P]."""
    greedy = greedy_tokens(model, prompt[None], GREEDY_TOKENS)[0]
    tokens = np.concatenate([prompt, greedy])
    logits = all_logits(model, tokens[None])
    # Computed without a cache, the tokens must be the ones chosen with it.
    predicted = logits[0, len(prompt) - 1 : -1].argmax(-1)
    if not np.array_equal(predicted, greedy):
        raise RuntimeError("transformers disagrees with itself about the greedy tokens: the margin is too small")
    total = len(tokens)
    last_of_prompt = range(len(prompt) - 8, len(prompt))
    positions = np.array(sorted({*range(0, total, SPACING), *last_of_prompt, total - 1}), np.int32)
    return {
        "prompt": prompt,
        "greedy": greedy,
        "positions": positions,
        "logits": logits[0, positions],
        "margin": greedy_margins(logits)[0],
    }


def check_effect(case: Case, directory: Path, expected: dict[str, np.ndarray]) -> float:
    """How much the logits change when the case's option is ignored, relative to max |logit|; 0.0 without one."""
    if not case.without:
        return 0.0
    tokens = np.concatenate([expected["prompt"], expected["greedy"]])
    changed = all_logits(load(directory, **case.without), tokens[None])[0, expected["positions"]]
    effect = float(np.abs(changed - expected["logits"]).max() / np.abs(expected["logits"]).max())
    if effect < LEAST_EFFECT:
        raise RuntimeError(f"{case.name}: the option changes the logits by {effect:.4f} only")
    return effect


def write_case(case: Case, directory: Path) -> str:
    """Writes the fixture of `case` into `directory`; returns a line about it."""
    for seed in range(SEEDS):
        write_checkpoint(case, directory, seed)
        model = load(directory)
        prompt = choose_prompt(model, case, seed)
        if prompt is not None:
            break
    else:
        raise RuntimeError(f"{case.name}: no seed and prompt have clear greedy decisions")
    expected = {"seed": np.int32(seed), **expectation(model, prompt)}
    if expected["margin"] < 10 * TOLERANCE:
        raise RuntimeError(f"{case.name}: greedy margin {expected['margin']:.4f} is too small")
    effect = check_effect(case, directory, expected)
    np.savez_compressed(directory / "expected.npz", **expected)
    size = sum(path.stat().st_size for path in directory.iterdir())
    return (
        f"{case.name:28} {size / 1000:6.1f} kB  seed {seed}  margin {expected['margin']:.4f}  "
        f"distinct {len(set(expected['greedy'].tolist())):2}  max |logit| {np.abs(expected['logits']).max():5.1f}"
        + (f"  effect {effect:.3f}" if case.without else "")
    )


def deterministic() -> None:
    """Makes torch reproducible: one thread, deterministic algorithms."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these cases, `chat`, `configs`; all without any")
    names = parser.parse_args().cases or ["chat", "configs", *(case.name for case in CASES)]
    deterministic()
    if "chat" in names:
        write_tokenizer(TOKENIZER, [BEGIN, END, END_OF_TURN])
        write_chat(CHAT)
    if "configs" in names:
        write_configs(CONFIGS)
    for case in CASES:
        if case.name in names:
            print(write_case(case, case.directory), flush=True)


if __name__ == "__main__":
    main()
