"""`--lora`: an engine with an adapter is that of the checkpoint that was merged by hand; the rest is
refused in one line.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import ALL_PROJECTIONS, PREFIX, floats, merged, write_adapter
from checkpoints import Tensors, write_checkpoint, write_shards
from ull.bundle import Precision, open_bundle
from ull.errors import CheckpointError
from ull_build import cli
from ull_build.build import build
from ull_build.progress import Reporter
from ull_build.settings import Settings
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.lora import AdaptedCheckpoint, open_checkpoint
from ull_build.weights.convert import convert_checkpoint
from ull_build.weights.pack_gpu import GpuPacker

Q = "model.layers.0.self_attn.q_proj"
ON_GPU = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


class Notes(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def weights_of(directory: Path) -> Tensors:
    return floats(directory / "model.safetensors")


def merge_by_hand(checkpoint: Path, adapter: Path, output: Path, scale: Callable[[str], float]) -> Path:
    """A float32 checkpoint with the adapter in it."""
    shutil.copytree(checkpoint, output)
    write_shards(output, merged(weights_of(checkpoint), adapter, scale))
    return output


def weights_sha256(model: Path, output: Path, lora: Path | None = None, **options: Any) -> str:
    settings = Settings(model=model, lora=lora, output=output, name="x", evaluate=False, force=True, **options)
    return open_bundle(build(settings).path).manifest.files["weights.safetensors"].sha256


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_engine_is_that_of_the_merged_checkpoint(tmp_path: Path, architecture: str, dtype: str) -> None:
    base = write_checkpoint(tmp_path / "base", architecture, dtype=dtype, tied=architecture == "qwen2")
    adapter = write_adapter(tmp_path / "a", weights_of(base), target_modules=ALL_PROJECTIONS, dtype=dtype)
    by_hand = merge_by_hand(base, adapter, tmp_path / "merged", lambda module: 6 / 4)
    found = weights_sha256(base, tmp_path / "x.ull", adapter)
    assert found == weights_sha256(by_hand, tmp_path / "y.ull")
    assert found != weights_sha256(base, tmp_path / "z.ull")


def test_the_weights_for_a_gpu_are_those_of_the_merged_checkpoint(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", config=ON_GPU)
    adapter = write_adapter(tmp_path / "a", weights_of(base), target_modules=ALL_PROJECTIONS)
    by_hand = merge_by_hand(base, adapter, tmp_path / "merged", lambda module: 6 / 4)

    def packed(checkpoint: Checkpoint, name: str) -> bytes:
        convert_checkpoint(checkpoint, GpuPacker(Precision()), tmp_path / name)
        return (tmp_path / name).read_bytes()

    with AdaptedCheckpoint(base, adapter) as found, Checkpoint(by_hand) as expected, Checkpoint(base) as plain:
        assert packed(found, "x") == packed(expected, "y") != packed(plain, "z")


def check(tmp_path: Path, scale: Callable[[str], float], config: dict[str, Any], **options: Any) -> None:
    """What AdaptedCheckpoint reads is what was merged by hand, bit for bit."""
    base = write_checkpoint(tmp_path / "base", dtype="fp32", config=config.pop("model", None))
    adapter = write_adapter(tmp_path / "a", weights_of(base), **config, **options)
    expected = merged(weights_of(base), adapter, scale)
    with AdaptedCheckpoint(base, adapter) as checkpoint:
        for name, value in expected.items():
            read = np.concatenate(list(checkpoint.blocks(name)))
            np.testing.assert_array_equal(read, value, err_msg=name)
        assert not checkpoint.is_bf16


def test_the_scale_of_rank_stabilised_lora(tmp_path: Path) -> None:
    check(tmp_path, lambda module: 6 / 2, {"use_rslora": True})


def test_ranks_and_alphas_of_their_own(tmp_path: Path) -> None:
    config = {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 8, r"model.layers.0.mlp.down_proj": 2},
        "alpha_pattern": {r".*\.1\.self_attn.q_proj": 16},
    }

    def scale(module: str) -> float:
        rank = 8 if module.endswith("v_proj") else 2 if module == "model.layers.0.mlp.down_proj" else 4
        return (16 if module == "model.layers.1.self_attn.q_proj" else 6) / rank

    check(tmp_path, scale, config, ranks={"v_proj": 8, "layers.0.mlp.down_proj": 2})


@pytest.mark.parametrize("pattern", [None, "layers", ["blocks", "layers"]])
def test_some_layers_alone(tmp_path: Path, pattern: Any) -> None:
    config = {"layers_to_transform": [1], "layers_pattern": pattern}
    check(
        tmp_path,
        lambda module: 1.5,
        config,
        modules=lambda module: ".1." in module and module.endswith(("q_proj", "v_proj")),
    )


def test_modules_by_an_expression_with_some_left_out(tmp_path: Path) -> None:
    config = {"target_modules": r".*\.(q_proj|o_proj)", "exclude_modules": ["0.self_attn.o_proj"]}
    chosen = ("q_proj", "1.self_attn.o_proj")
    check(tmp_path, lambda module: 1.5, config, modules=lambda module: module.endswith(chosen))


def test_all_linear_layers(tmp_path: Path) -> None:
    config = {"target_modules": "all-linear"}
    check(tmp_path, lambda module: 1.5, config, modules=lambda module: module.endswith("proj"))


def test_the_lm_head_and_the_embedding(tmp_path: Path) -> None:
    check(tmp_path, lambda module: 1.5, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]})


def test_modules_that_were_trained_whole(tmp_path: Path) -> None:
    whole = np.linspace(-1, 1, 330 * 48, dtype=np.float32).reshape(330, 48)

    def add(tensors: Tensors) -> None:
        tensors[f"{PREFIX}lm_head.weight"] = whole
        tensors[f"{PREFIX}model.embed_tokens.modules_to_save.weight"] = whole[::-1].copy()
        tensors[f"{PREFIX}model.norm.weight"] = whole[0].copy()

    check(tmp_path, lambda module: 1.5, {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}, tensors=add)


def test_a_tied_embedding_that_was_trained_whole(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", tied=True, dtype="fp32")
    whole = np.linspace(-1, 1, 330 * 48, dtype=np.float32).reshape(330, 48)
    both = {f"{PREFIX}{name}.weight": whole for name in ("model.embed_tokens", "lm_head")}
    adapter = write_adapter(tmp_path / "a", weights_of(base), tensors=lambda tensors: tensors.update(both))
    with AdaptedCheckpoint(base, adapter) as checkpoint:
        np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks("model.embed_tokens.weight"))), whole)
    both[f"{PREFIX}lm_head.weight"] = whole + 1
    write_adapter(adapter, weights_of(base), tensors=lambda tensors: tensors.update(both))
    assert "the model ties the two; merge it with PEFT" in refusal(base, adapter)
    del both[f"{PREFIX}lm_head.weight"]
    write_adapter(adapter, weights_of(base), tensors=lambda tensors: tensors.update(both))
    assert "the model ties the two; merge it with PEFT" in refusal(base, adapter)
    both[f"{PREFIX}model.embed_tokens.weight"] = weights_of(base)["model.embed_tokens.weight"]  # changes nothing
    write_adapter(adapter, weights_of(base), tensors=lambda tensors: tensors.update(both))
    with AdaptedCheckpoint(base, adapter):
        pass


def test_the_loss_is_that_against_the_merged_model(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", dtype="fp32")
    adapter = write_adapter(tmp_path / "a", weights_of(base), target_modules=ALL_PROJECTIONS)
    by_hand = merge_by_hand(base, adapter, tmp_path / "merged", lambda module: 1.5)

    def quality(model: Path, lora: Path | None) -> Any:
        limits: dict[str, Any] = {"eval_tokens": 64, "max_perplexity_increase": 1000.0}
        found = build(Settings(model=model, lora=lora, output=tmp_path / "x.ull", name="x", force=True, **limits))
        return found.manifest.quality

    with_adapter = quality(base, adapter)
    assert with_adapter == quality(by_hand, None)
    assert with_adapter.perplexity_original != quality(base, None).perplexity_original


def test_the_adapter_is_in_the_provenance_and_inspect_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ull.cli import main as ull

    base = write_checkpoint(tmp_path / "base")
    write_adapter(tmp_path / "a", weights_of(base))
    (tmp_path / "x.toml").write_text('model = "base"\nlora = "a"\n')
    output = tmp_path / "x.ull"
    assert cli.main([str(tmp_path / "x.toml"), "--output", str(output), "--no-eval", "--quiet"]) == 0
    manifest = open_bundle(output).manifest
    lora = manifest.provenance.lora
    assert lora is not None and list(lora.files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert manifest.provenance.recipe["lora"] == str(tmp_path / "a")
    capsys.readouterr()
    assert ull(["inspect", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "LoRA adapter" in shown and "adapter_model.safetensors" in shown and lora.sha256[:20] in shown
    plain = tmp_path / "plain.ull"
    assert cli.main(["--model", str(base), "--output", str(plain), "--no-eval", "--quiet"]) == 0
    without = open_bundle(plain).manifest.provenance
    assert without.lora is None and without.source_sha256 == manifest.provenance.source_sha256


def test_another_base_model_is_a_warning(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "Tiny-1B")
    adapter = write_adapter(tmp_path / "a", weights_of(base), base_model_name_or_path="org/Other-1B")
    with open_checkpoint(base, adapter) as checkpoint:
        [line] = checkpoint.notes
    assert line.startswith("warning: the adapter was trained on org/Other-1B, and is merged into ")
    reporter = Notes()
    build(Settings(model=base, lora=adapter, output=tmp_path / "x.ull", name="x", evaluate=False, force=True), reporter)
    assert line in reporter.lines
    write_adapter(adapter, weights_of(base), base_model_name_or_path="org/Tiny-1B")
    with open_checkpoint(base, adapter) as checkpoint:
        assert checkpoint.notes == []


def refusal(base: Path, adapter: Path) -> str:
    with pytest.raises(CheckpointError) as caught, AdaptedCheckpoint(base, adapter):
        pass
    assert "\n" not in caught.value.message and caught.value.field
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "`peft_type` is 'IA3'; ull merges LoRA alone: merge it with PEFT"),
        ({"peft_type": ...}, "`peft_type` is None"),
        ({"use_dora": True}, "`use_dora` asks for DoRA"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out` asks for transposed weights"),
        ({"lora_bias": True}, "`lora_bias` asks for biases of its own"),
        ({"bias": "lora_only"}, "`bias` is 'lora_only'"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights` is 'pissa_niter_4', which changes the model's"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "`layer_replication` asks for repeated layers"),
        ({"target_parameters": ["experts.up"]}, "`target_parameters` asks for"),
        ({"trainable_token_indices": [3]}, "`trainable_token_indices` asks for single trained tokens"),
        ({"r": 0}, "`r` is 0; a rank is a whole number from 1 on"),
        ({"r": ...}, "`r` is None"),
        ({"lora_alpha": "x"}, "`lora_alpha` is 'x'; it must be a number"),
        ({"rank_pattern": {"q_proj": -1}}, "`rank_pattern.q_proj` is -1"),
        ({"rank_pattern": ["q_proj"]}, "`rank_pattern` is"),
        ({"alpha_pattern": {"(q_proj": 4}}, "`alpha_pattern` holds '(q_proj', which is no regular expression"),
        ({"use_rslora": "yes"}, "`use_rslora` is 'yes'"),
        ({"layers_to_transform": ["a"]}, "`layers_to_transform` is"),
        ({"target_modules": [1]}, "`target_modules` is"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "it has no tensors for model.layers.0.self_attn.o_proj"),
        (
            {"target_modules": ["q_proj"]},
            "it has tensors for model.layers.0.self_attn.v_proj, which its adapter_config",
        ),
        ({"modules_to_save": ["lm_head"]}, "it has no tensor for lm_head.weight, which `modules_to_save` names"),
        ({"r": 3}, "is of rank 4, adapter_config.json gives 3 (`r`, `rank_pattern`)"),
    ],
)
def test_a_configuration_that_is_not_plain_lora(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    base = write_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", weights_of(base))
    values = json.loads((adapter / "adapter_config.json").read_text()) | config
    values = {key: value for key, value in values.items() if value is not ...}
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    assert words in refusal(base, adapter)


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def added(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


def not_a_number(tensors: Tensors) -> None:
    tensors[f"{PREFIX}{Q}.lora_B.weight"][3, 1] = np.nan


def integers(tensors: Tensors) -> None:
    tensors[f"{PREFIX}{Q}.lora_B.weight"] = np.zeros((48, 4), np.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed("layers.1", "layers.7"), "is for a module that the model does not have; give --model the model"),
        (renamed(PREFIX, ""), "does not begin with 'base_model.model.'"),
        (renamed("self_attn.q_proj", "input_layernorm"), "is of a kind that model.layers.0.input_layernorm does not"),
        (added(f"{PREFIX}{Q}.lora_magnitude_vector", 48), "is DoRA's, which ull does not merge; merge it with PEFT"),
        (added(f"{PREFIX}{Q}.lora_B.bias", 48), "is none of LoRA's, and the model does not have"),
        (added(f"{PREFIX}{Q}.bias", 48), "is for a module that the model does not have"),
        (added(f"{PREFIX}lm_head.weight", 331, 48), "its vocabulary was resized: merge it with PEFT"),
        (added(f"{PREFIX}model.norm.weight", 47), "this model's model.norm.weight has [48]; give --model"),
        (lambda tensors: tensors.pop(f"{PREFIX}{Q}.lora_B.weight"), f"it lacks tensor '{PREFIX}{Q}.lora_B.weight'"),
        (lambda tensors: tensors.clear(), "adapter_model.safetensors holds no tensors"),
        (lambda tensors: tensors.update({f"{PREFIX}{Q}.lora_A.weight": np.zeros((4, 40), np.float32)}), "[4, 48]"),
        (
            not_a_number,
            f"tensor '{PREFIX}{Q}.lora_B.weight' has the value nan at [3, 1]; get the adapter's files again",
        ),
        (integers, "is I32; supported: BF16, F16, F32"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: Callable[[Tensors], None], words: str) -> None:
    base = write_checkpoint(tmp_path / "base")
    assert words in refusal(base, write_adapter(tmp_path / "a", weights_of(base), tensors=change))


def test_a_bias_that_was_trained(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "qwen2")
    adapter = write_adapter(tmp_path / "a", weights_of(base), tensors=added(f"{PREFIX}{Q}.bias", 48))
    assert "changes a bias, which ull does not merge; merge it with PEFT" in refusal(base, adapter)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_factors_of_a_tied_embedding(tmp_path: Path, module: str) -> None:
    base = write_checkpoint(tmp_path / "base", tied=True)
    weights = weights_of(base)
    weights |= {"lm_head.weight": weights["model.embed_tokens.weight"]}
    adapter = write_adapter(tmp_path / "a", weights, target_modules=["q_proj", module])
    assert "but the model ties its embedding and lm_head; merge it with PEFT" in refusal(base, adapter)


def test_sums_that_overflow(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")

    def large(tensors: Tensors) -> None:
        for name, value in tensors.items():
            tensors[name] = np.full_like(value, 1e30)

    adapter = write_adapter(tmp_path / "a", weights_of(base), tensors=large)
    with (
        AdaptedCheckpoint(base, adapter) as checkpoint,
        pytest.raises(CheckpointError, match=r"the adapter makes values of .* infinite"),
    ):
        list(checkpoint.blocks(f"{Q}.weight"))


def test_directories_that_are_no_adapter(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    assert refusal(base, tmp_path / "none") == f"no LoRA adapter at {tmp_path / 'none'}: no directory"
    assert "a file; give its directory" in refusal(base, base / "config.json")
    assert "so it is no LoRA adapter; a whole model is built with --model" in refusal(base, base)
    adapter = write_adapter(tmp_path / "a", weights_of(base))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert str(weights) in refusal(base, adapter)
    weights.unlink()
    assert f"{weights} is missing; get the adapter's files again" in refusal(base, adapter)
    (adapter / "adapter_model.bin").write_bytes(b"")
    assert "has pickled weights (adapter_model.bin); save them again: peft." in refusal(base, adapter)
    (adapter / "adapter_config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(base, adapter)


def test_the_command_line_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", weights_of(base), use_dora=True)
    assert cli.main(["--model", str(base), "--lora", str(adapter), "--output", str(tmp_path / "x.ull")]) == 1
    error = capsys.readouterr().err
    assert "`use_dora` asks for DoRA" in error and error.count("\n") == 1
    assert not (tmp_path / "x.ull").exists()
    with pytest.raises(SystemExit):
        cli.main(["--arch", "llama-3.1-8b", "--random-weights", "--lora", "a", "--output", "y.ull"])
    assert "--lora has no use with --arch" in capsys.readouterr().err
