"""Names what people give a build in place of a Hugging Face checkpoint, and what helps: one line each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ORIGINAL = "build from the original bf16, fp16 or fp32 weights"
QUANTISED = (
    f"the checkpoint is already quantised; {ORIGINAL}, or from FP8 ones of compressed-tensors, of ModelOpt, or in "
    "blocks as Qwen's"
)

# Weights in forms that a build does not read: what ends a file's name, and what the form is called.
_OTHER_FORMS = {
    ".bin": "pickled weights (pytorch_model.bin)",
    ".pt": "pickled weights (.pt)",
    ".pth": "pickled weights (.pth)",
    ".h5": "TensorFlow's weights (tf_model.h5)",
    ".msgpack": "Flax's weights (flax_model.msgpack)",
    ".onnx": "ONNX graphs",
}
_BASE_TAGS = ("base_model:quantized:", "base_model:finetune:", "base_model:adapter:", "base_model:")  # of the Hub
_ADAPTER = "adapter_config.json"
_INDEX = "*.safetensors.index.json"
# Where quantisers say what they did when config.json does not: ModelOpt, AutoGPTQ, AutoAWQ.
_QUANTISERS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_QUANTISED_DTYPES = ("F8_", "F6_", "F4", "U8", "I8", "U4", "I4")  # how they begin
_QUANTISED_SUFFIXES = (
    *(".qweight", ".qzeros", ".g_idx"),  # GPTQ, AWQ
    *(".weight_packed", ".weight_shape", ".weight_zero_point"),  # compressed-tensors
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale"),  # FP8, NVFP4
    *("_blocks", "_scales"),  # MXFP4
    *(".absmax", ".quant_map", ".SCB"),  # bitsandbytes
)
_HUB_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_URL = re.compile(r"(?:(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)|hf:)/+([^/]+)/([^/]+)(?:/.*)?")


def why_no_directory(path: Path) -> str:
    """What to do about a `path` that is no directory."""
    if path.is_file():
        return _why_file(path)
    missing = f"no checkpoint directory at {path}"
    if (url := _HUB_URL.fullmatch(str(path))) is not None:
        return f"{missing}; for a model of the Hugging Face Hub give its id: {'/'.join(url.groups())}"
    words = path.parts[-2:]
    may_be_hub = len(words) == 2 and not path.is_absolute() and all(_HUB_WORD.fullmatch(word) for word in words)
    if may_be_hub and (len(path.parts) == 2 or not path.parent.exists()):
        return f"{missing}; if it is a model of the Hugging Face Hub: {_download('/'.join(words), str(path))}"
    return missing


def why_no_checkpoint(directory: Path) -> str | None:
    """What to do about a directory that is something else than a checkpoint; None for what may be one."""
    if (directory / _ADAPTER).exists() and not _has_weights(directory):
        return _why_adapter(directory)
    if any(directory.glob("*.gguf")) and not any(directory.glob("*.safetensors")):
        return why_no_weights((path.name for path in directory.iterdir()), str(directory))
    if (directory / "config.json").exists():
        return None
    snapshots = sorted(path for path in directory.glob("snapshots/*") if (path / "config.json").exists())
    if snapshots:
        return f"{directory} is the Hub's cache of a model; give the snapshot in it: {snapshots[-1]}"
    if any(directory.glob("consolidated.*")):
        return (
            f"{directory} has the weights in their publisher's own format (consolidated.*); "
            "download the files of the Hugging Face format too, config.json and *.safetensors"
        )
    if any(directory.glob("*.safetensors")):
        return (
            f"{directory} has weights but no config.json, which says what model they are; "
            "download it from where the weights came from (with tokenizer.json)"
        )
    return None if any(directory.iterdir()) else f"{directory} is empty; download the checkpoint again"


def why_no_weights(names: Iterable[str], place: str, tags: Sequence[str] = ()) -> str | None:
    """What to do about a model whose files, `names`, hold no safetensors; None where they do.

    `place` is where they are; `tags` are the Hub's, which may say what the weights were made from.
    """
    names = [name for name in names if "/" not in name]
    if any(name.endswith(".safetensors") and name != "adapter_model.safetensors" for name in names):
        return None
    found = [tag.removeprefix(start) for start in _BASE_TAGS for tag in tags if tag.startswith(start)]
    base = found[0] if found else None
    if _ADAPTER in names:
        of = f" of {base}" if base else ""
        model = base or "MODEL"
        return f"{place} is a LoRA adapter{of}, not a whole model; give --model {model} --lora {place}"
    if any(name.endswith(".gguf") for name in names):
        instead = f"--model {base}" if base else "the model that it was made from, in safetensors (--model ORG/NAME)"
        return f"{place} holds GGUF files, whose weights are quantised for llama.cpp; {ORIGINAL}: {instead}"
    form = next((form for end, form in _OTHER_FORMS.items() if any(name.endswith(end) for name in names)), None)
    if form is None:
        return f"{place} has no model.safetensors, and no weights in another form; get the whole checkpoint"
    return f"{place} has only {form}; {_convert(place, form)}"


def _convert(place: str, form: str) -> str:
    """How weights in another form become safetensors."""
    if form == _OTHER_FORMS[".onnx"]:
        return f"{ORIGINAL}, in safetensors, that they were exported from"
    of = next(
        (f", from_{name}=True" for name, end in (("tf", ".h5"), ("flax", ".msgpack")) if form == _OTHER_FORMS[end]), ""
    )
    loaded = f"transformers.AutoModelForCausalLM.from_pretrained('{place}'{of})"
    return f"convert them: {loaded}.save_pretrained('DIR'), the tokenizer likewise, and build DIR"


def quantised_tensor(name: str, dtype: str) -> bool:
    """True for a tensor that only quantised checkpoints have."""
    return dtype.startswith(_QUANTISED_DTYPES) or name.endswith(_QUANTISED_SUFFIXES)


def why_quantised(directory: Path, name: str, dtype: str) -> str:
    """What to do about the quantised tensor `name`; says where the quantiser left its name."""
    found = [file for file in _QUANTISERS if (directory / file).exists()]
    by = f" (see its {found[0]})" if found else ""
    return f"tensor {name!r} is {dtype}: {QUANTISED}{by}"


def _why_file(path: Path) -> str:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        made_from = "the model that it was made from, in safetensors (--model ORG/NAME)"
        return f"{path} is a GGUF file, whose weights are quantised for llama.cpp; {ORIGINAL}: {made_from}"
    if path.suffix == ".safetensors" or path.name == "config.json":
        return f"{path} is a file; give its directory, {path.parent}, with config.json and tokenizer.json in it"
    return f"{path} is a file, not a checkpoint directory with config.json, tokenizer.json and *.safetensors"


def _why_adapter(directory: Path) -> str:
    base = _value(directory / _ADAPTER, "base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    return (
        f"{directory} is a LoRA adapter{of}, not a whole model; give the model that it was trained on as --model and "
        f"this as --lora {directory}"
    )


def _has_weights(directory: Path) -> bool:
    """True where there are weights beside an adapter's."""
    return (directory / "model.safetensors").exists() or any(directory.glob(_INDEX))


def _download(model: str, folder: str) -> str:
    return f"`hf download {model} --local-dir {folder}` fetches it, then give {folder}"


def _value(path: Path, key: str) -> Any:
    """One key of a JSON file that need not be whole; None without it."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values.get(key) if isinstance(values, dict) else None
