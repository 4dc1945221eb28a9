"""FP8 checkpoints against those who write and read them; needs compressed-tensors beside the extra `oracle`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from checkpoints import write_checkpoint
from fp8_checkpoints import compressed_tensors, write_fp8
from ull_build.source.checkpoint import Checkpoint

pytestmark = pytest.mark.oracle
BLOCK = (8, 16)  # both libraries take whole blocks only


def compare(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    """What a build reads is what the library computes with."""
    with Checkpoint(directory) as checkpoint:
        assert len(checkpoint.fp8_weights) == 14
        for name in checkpoint.tensors:
            read = np.concatenate(list(checkpoint.blocks(name)))
            np.testing.assert_array_equal(read, expected[name].float().numpy(), err_msg=name)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_a_checkpoint_of_compressed_tensors_is_read_as_it_decompresses_it(tmp_path: Path, strategy: str) -> None:
    library = pytest.importorskip("compressed_tensors")
    base = write_checkpoint(tmp_path / "base", dtype="fp32", config={"tie_word_embeddings": False})
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = library.QuantizationConfig.model_validate(compressed_tensors(strategy, BLOCK))
    library.quantization.apply_quantization_config(model, config)
    rows, columns = BLOCK
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        weight = module.weight.detach()
        largest = {
            "tensor": lambda w: w.abs().max().reshape(1),
            "channel": lambda w: w.abs().amax(1, keepdim=True),
            "block": lambda w: torch.stack(
                [torch.stack([part.abs().max() for part in row.split(columns, 1)]) for row in w.split(rows, 0)]
            ),
        }[strategy](weight)
        module.weight_scale.data.copy_(largest / 448)
    compressor = library.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    written = tmp_path / "written"
    model.save_pretrained(written)
    compressor.update_config(written)
    compressor.decompress_model(model)
    compare(written, model.state_dict())


def test_blocks_as_qwens_are_read_as_transformers_dequantises_them(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", "qwen3", dtype="fp32")
    write_fp8(directory, "fp8", "block", block=BLOCK)
    options: dict[str, Any] = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    compare(directory, model.state_dict())
