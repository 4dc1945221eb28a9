"""Two layers of 8B width on the chip against PyTorch in float32 on the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ull.bundle import open_bundle

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = Path(__file__).parent.parent.parent / "engines/tiny"
PROMPT = 150  # tokens: more than two chunks of prefill, and more than two pages
STEPS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    directory = tmp_path_factory.mktemp("wide")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((TINY / name).read_bytes())
    generator = torch.Generator(device="cuda").manual_seed(7)

    def random(*shape: int, scale: float) -> Any:
        values = torch.randn(*shape, generator=generator, device="cuda") * scale
        return values.to(torch.bfloat16).cpu()

    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    attention, keys = (
        CONFIG["num_attention_heads"] * CONFIG["head_dim"],
        CONFIG["num_key_value_heads"] * CONFIG["head_dim"],
    )
    tensors = {
        "model.embed_tokens.weight": random(CONFIG["vocab_size"], hidden, scale=1.0),
        "lm_head.weight": random(CONFIG["vocab_size"], hidden, scale=3 / hidden**0.5),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (attention, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, attention),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random(*shape, scale=shape[1] ** -0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    safetensors.save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[tuple[str, Any]]:
    from ull.gpu.program import load

    bundle = checkpoint.parent / f"wide-{request.param}.ull"
    command = [sys.executable, "-m", "ull_build", "--model", str(checkpoint), "--target", "sm_90a"]
    options = ["--precision", request.param, "--no-eval", "--drafter", "none", "--output", str(bundle), "--quiet"]
    subprocess.run([*command, *options], check=True)
    program = load(open_bundle(bundle))
    yield request.param, program
    program.close()


def reference_logprobs(checkpoint: Path, tokens: list[int]) -> np.ndarray:
    """log-softmax after every token, [n, V], in float32 without TF32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").cuda()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device="cuda")).logits[0]
        return torch.log_softmax(logits, dim=-1).cpu().numpy()


# The bf16 engine differs from float32 by its 16-bit activations alone, the FP8 one by its weights too.
LIMITS = {"bf16": (0.03, 0.0), "fp8": (0.5, 0.6)}  # mean absolute logprob error at most; share of equal top-1 at least


def test_logprobs_match_pytorch(engine: tuple[str, Any], checkpoint: Path) -> None:
    precision, program = engine
    rounds = program.replay()
    prompt = [int(token) for token in np.random.default_rng(3).integers(2, 4000, PROMPT)]
    rounds.prefill(prompt[:-1])
    results = rounds.decode(prompt[-1], PROMPT - 1, STEPS, top_logprobs=20)
    emitted = [result.tokens[0].token for result in results]
    expected = reference_logprobs(checkpoint, prompt + emitted[:-1])[PROMPT - 1 :]
    errors, same = [], 0
    for step, result in enumerate(results):
        first = result.tokens[0]
        same += int(expected[step].argmax()) == first.token
        top = [(entry.token, entry.logprob) for entry in first.top[: first.top_count]]
        errors += [abs(expected[step][token] - logprob) for token, logprob in top]
    worst, agreement = LIMITS[precision]
    assert np.mean(errors) <= worst
    assert same / STEPS >= (agreement or 0.9)


def test_trees_and_plain_rounds_give_the_same_bits(engine: tuple[str, Any]) -> None:
    """Every tree size verifies a chain of the true tokens: all are accepted, with the same logprobs."""
    _, program = engine
    rounds = program.replay()
    prompt = [int(token) for token in np.random.default_rng(5).integers(2, 4000, 70)]
    rounds.prefill(prompt[:-1])
    plain = [
        (result.tokens[0].token, result.tokens[0].logprob)
        for result in rounds.decode(prompt[-1], 69, 64, top_logprobs=0)
    ]
    for size in (2, 4, 8, 16, 32, 64):
        chain = [prompt[-1], *(token for token, _ in plain[: size - 1])]
        result = rounds.wait(rounds.launch(chain, 69, top_logprobs=0))
        assert [(result.tokens[i].token, result.tokens[i].logprob) for i in range(result.count)] == plain[:size]
