"""A merged adapter against PEFT's own merge_and_unload; needs PEFT beside the extra `oracle`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
import transformers

from adapters import ALL_PROJECTIONS
from checkpoints import write_checkpoint
from ull_build.source.lora import AdaptedCheckpoint

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"target_modules": ALL_PROJECTIONS}),
        ("qwen3", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        (
            "qwen2",
            {"target_modules": "all-linear", "rank_pattern": {"v_proj": 8}, "alpha_pattern": {"0.mlp.up_proj": 2}},
        ),
        ("mistral", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
        ("llama", {"target_modules": r".*(q|k)_proj", "exclude_modules": ["layers.0.self_attn.k_proj"]}),
    ],
)
def test_the_merged_weights_are_those_of_peft(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    base = write_checkpoint(tmp_path / "base", architecture, dtype="fp32")

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    torch.manual_seed(3)
    model = peft.get_peft_model(load(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    expected = model.merge_and_unload().state_dict()
    with AdaptedCheckpoint(base, tmp_path / "adapter") as checkpoint:
        for name in checkpoint.tensors:
            read = np.concatenate(list(checkpoint.blocks(name)))
            np.testing.assert_allclose(read, expected[name].numpy(), rtol=1e-6, atol=1e-6, err_msg=name)
