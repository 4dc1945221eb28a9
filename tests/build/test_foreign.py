"""What people give a build in place of a checkpoint: one line that says what it is and what helps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import write_checkpoint, write_json
from ull.errors import CheckpointError
from ull_build import cli
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.vocabulary import read_tokenizer


def refusal(directory: Path) -> str:
    """What opening the checkpoint says; one line."""
    with pytest.raises(CheckpointError) as caught, Checkpoint(directory):
        pass
    assert "\n" not in caught.value.message and caught.value.field
    return caught.value.message


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = "meta-llama/Llama-3.2-1B"
    expected = (
        f"no checkpoint directory at {model}; if it is a model of the Hugging Face Hub: "
        f"`hf download {model} --local-dir {model}` fetches it, then give {model}"
    )
    assert refusal(Path(model)) == expected
    Path("meta-llama").mkdir()
    assert refusal(Path(model)) == expected
    Path("engines").mkdir()  # a recipe's model is relative to the recipe
    assert f"`hf download {model} --local-dir engines/{model}`" in refusal(Path("engines") / model)


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/Qwen/Qwen3-8B",
        "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
        "huggingface.co/Qwen/Qwen3-8B",
        "hf://Qwen/Qwen3-8B",
    ],
)
def test_an_address_of_the_hub(text: str) -> None:
    assert refusal(Path(text)).endswith("for a model of the Hugging Face Hub give its id: Qwen/Qwen3-8B")


@pytest.mark.parametrize("text", ["nowhere", "/data/org/model", "engines/no such/model", "a/b/c/d"])
def test_a_path_that_is_no_hub_id(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd" / "a" / "b" / "c").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    assert refusal(Path(text)) == f"no checkpoint directory at {text}"


def test_the_command_line_says_it_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["--model", "one/org/model", "--output", str(tmp_path / "x.ull"), "--no-eval"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ull-build: error: no checkpoint directory at one/org/model; ") and error.count("\n") == 1


@pytest.mark.parametrize("config", [False, True])
def test_a_directory_of_gguf_files(tmp_path: Path, config: bool) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    if config:
        write_json(tmp_path / "config.json", {"model_type": "llama"})
    message = refusal(tmp_path)
    assert "holds GGUF files" in message and "weights: the model that it was made from, in safetensors" in message


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model-00001-of-00002.bin", "only pickled weights (pytorch_model.bin); convert them: transformers."),
        ("model.pth", "only pickled weights (.pth); convert them"),
        ("tf_model.h5", ", from_tf=True).save_pretrained('DIR'), the tokenizer likewise, and build DIR"),
        ("flax_model.msgpack", ", from_flax=True).save_pretrained('DIR')"),
        (
            "model.onnx",
            "only ONNX graphs; build from the original bf16, fp16 or fp32 weights, in safetensors, that they",
        ),
    ],
)
def test_weights_in_another_form(tmp_path: Path, file: str, words: str) -> None:
    directory = write_checkpoint(tmp_path / "m")
    (directory / "model.safetensors").rename(directory / file)
    assert words in refusal(directory)


def test_files_in_place_of_a_directory(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    for name in ("model.safetensors", "config.json"):
        assert f"is a file; give its directory, {directory}" in refusal(directory / name)
    (tmp_path / "a").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "b.gguf").write_bytes(b"")
    assert "is a GGUF file" in refusal(tmp_path / "a") and "is a GGUF file" in refusal(tmp_path / "b.gguf")
    (tmp_path / "model.bin").write_text("text")
    assert "is a file, not a checkpoint directory" in refusal(tmp_path / "model.bin")


def test_a_lora_adapter(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-8B"})
    save_file({"base_model.model.lora_A.weight": np.zeros((2, 2), np.float32)}, tmp_path / "adapter_model.safetensors")
    message = refusal(tmp_path)
    assert "is a LoRA adapter of Qwen/Qwen3-8B, not a whole model; give the model that it was trained on" in message
    assert message.endswith(f"as --model and this as --lora {tmp_path}")
    write_json(tmp_path / "config.json", {"model_type": "qwen3"})
    (tmp_path / "adapter_config.json").write_text("{")
    assert "is a LoRA adapter, not a whole model" in refusal(tmp_path)


def test_a_merged_model_beside_its_adapter_is_a_checkpoint(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    write_json(directory / "adapter_config.json", {})
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.model.layers == 2


def test_weights_without_a_config(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    (directory / "config.json").unlink()
    assert "has weights but no config.json, which says what model they are" in refusal(directory)
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    assert "publisher's own format (consolidated.*)" in refusal(directory)


def test_an_empty_directory_and_the_hubs_cache(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("is empty; download the checkpoint again")
    snapshot = tmp_path / "snapshots" / "0123"
    write_checkpoint(snapshot)
    assert refusal(tmp_path).endswith(f"is the Hub's cache of a model; give the snapshot in it: {snapshot}")


LINEAR = "model.layers.0.mlp.down_proj.weight"


def bare_fp8(directory: Path, tensors: dict[str, Any]) -> None:
    tensors[LINEAR] = tensors[LINEAR].astype(ml_dtypes.float8_e5m2)


def gptq(directory: Path, tensors: dict[str, Any]) -> None:
    write_json(directory / "quantize_config.json", {"bits": 4})
    rows, columns = tensors.pop(LINEAR).shape
    tensors[LINEAR.replace("weight", "g_idx")] = np.zeros(columns, np.int32)
    tensors[LINEAR.replace("weight", "qweight")] = np.zeros((columns // 8, rows), np.int32)


def awq(directory: Path, tensors: dict[str, Any]) -> None:
    rows, columns = tensors.pop(LINEAR).shape
    tensors[LINEAR.replace("weight", "qweight")] = np.zeros((columns, rows // 8), np.int32)


def mxfp4(directory: Path, tensors: dict[str, Any]) -> None:
    tensors[f"{LINEAR}_blocks"] = np.zeros((4, 16), np.uint8)


def packed(directory: Path, tensors: dict[str, Any]) -> None:
    tensors[f"{LINEAR}_packed"] = np.zeros((4, 6), np.int32)


def scaled(directory: Path, tensors: dict[str, Any]) -> None:
    tensors[f"{LINEAR}_scale"] = np.zeros(1, np.float32)


def bitsandbytes(directory: Path, tensors: dict[str, Any]) -> None:
    tensors[LINEAR] = tensors[LINEAR].astype(np.uint8)


@pytest.mark.parametrize("quantise", [bare_fp8, gptq, awq, mxfp4, packed, scaled, bitsandbytes])
def test_quantised_without_metadata(
    tmp_path: Path, quantise: Callable[[Path, dict[str, Any]], None], request: pytest.FixtureRequest
) -> None:
    directory = write_checkpoint(tmp_path / "m", dtype="fp32")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    quantise(directory, tensors)
    save_file(tensors, path)
    message = refusal(directory)
    assert "the checkpoint is already quantised; build from the original bf16, fp16 or fp32 weights, or" in message
    assert message.endswith("(see its quantize_config.json)" if quantise is gptq else "as Qwen's")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file system's refusal by a stand-in, because root may read everything."""
    directory = write_checkpoint(tmp_path / "m")
    write_json(directory / "generation_config.json", {})
    closed, opened = directory / name, Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == closed:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError) as caught, Checkpoint(directory):
        read_tokenizer(directory, 330)
    message = caught.value.message
    assert message.startswith(f"{closed} cannot be read: Permission denied; let user id ")
    assert "chmod or chown" in message and "Errno" not in message


def test_json_that_nests_too_deep(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    (directory / "config.json").write_text("[" * 100_000)
    assert "cannot be read as JSON" in refusal(directory)
    (directory / "config.json").write_text(json.dumps([]))
    assert "must hold a JSON object" in refusal(directory)
