"""Reading Hugging Face checkpoints: what is understood, and what is refused with which words."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints import CLASS_NAMES, make_config, random_tensors, write_checkpoint, write_json, write_shards
from ull.errors import CheckpointError
from ull_build.source.architecture import parse_config
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.vocabulary import read_tokenizer


def parse(architecture: str = "llama", **changes: Any):
    return parse_config(make_config(architecture, **changes), {})


@pytest.mark.parametrize("architecture", CLASS_NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("tied", "shards"), [(False, 1), (True, 3)])
def test_every_value_is_read_exactly(tmp_path: Path, architecture: str, dtype: str, tied: bool, shards: int) -> None:
    directory = write_checkpoint(tmp_path / "m", architecture, dtype=dtype, tied=tied, shards=shards)
    stored = {}
    for path in directory.glob("*.safetensors"):
        stored.update(load_file(path))
    with Checkpoint(directory) as checkpoint:
        assert set(checkpoint.tensors) == set(stored)
        assert checkpoint.is_bf16 == (dtype == "bf16")
        assert checkpoint.model.architecture == architecture
        assert checkpoint.model.tied_embeddings == tied
        for name, values in stored.items():
            read = np.concatenate(list(checkpoint.blocks(name)))
            np.testing.assert_array_equal(read, values.astype(np.float32), err_msg=name)


def test_blocks_are_whole_rows_in_multiples_of_a_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ull_build.source.checkpoint.BLOCK_ELEMENTS", 48 * 70)
    directory = write_checkpoint(tmp_path / "m")
    with Checkpoint(directory) as checkpoint:
        blocks = list(checkpoint.blocks("model.embed_tokens.weight"))
    assert [len(block) for block in blocks] == [64, 64, 64, 64, 64, 10]


def test_defaults_of_absent_keys_are_those_of_transformers() -> None:
    absent = dict.fromkeys(("rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act"), ...)
    llama = parse(head_dim=..., num_key_value_heads=..., **absent).model
    assert (llama.head_dim, llama.kv_heads, llama.rope.theta, llama.rms_epsilon) == (12, 4, 10000.0, 1e-6)
    assert not llama.tied_embeddings
    assert parse("qwen3", head_dim=...).model.head_dim == 128
    assert parse("mistral", num_attention_heads=16, num_key_value_heads=...).model.kv_heads == 8
    assert parse("mistral", sliding_window=...).model.windows == [4096, 4096]
    assert parse("llama", architectures=..., model_type="llama").model.architecture == "llama"


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("llama", {}, [0, 0]),
        ("llama", {"layer_types": ["full_attention"] * 2, "sliding_window": 64}, [0, 0]),
        ("mistral", {"sliding_window": None}, [0, 0]),
        ("mistral", {"sliding_window": 64}, [64, 64]),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 1}, [0, 0]),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [0, 64]),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, [0, 0]),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [0, 0]),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
        ("mistral", {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, [64, 0]),
        ("mistral", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, [0, 0]),
        ("mistral", {"sliding_window": None, "layer_types": ["attention"] * 2}, [0, 0]),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention"],
                "max_window_layers": 0,
            },
            [32, 0],
        ),
    ],
)
def test_sliding_windows(architecture: str, changes: dict[str, Any], windows: list[int]) -> None:
    assert parse(architecture, **changes).model.windows == windows


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_both_spellings_of_rope(changes: dict[str, Any]) -> None:
    rope = parse(**changes).model.rope
    assert (rope.theta, rope.kind, rope.factor, rope.original_context) == (5e5, "llama3", 8.0, 64)
    assert (rope.low_frequency_factor, rope.high_frequency_factor) == (1.0, 4.0)


def test_default_and_linear_rope() -> None:
    assert parse(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}).model.rope.theta == 1e6
    linear = parse(rope_scaling={"type": "linear", "factor": 2}).model.rope
    assert (linear.kind, linear.factor, linear.theta) == ("linear", 2.0, 10000.0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_rope_scaling_replaces_rope_parameters_as_in_transformers() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    read = parse(rope_theta=..., rope_parameters=parameters, rope_scaling=YARN)
    assert (read.model.rope.kind, read.model.rope.theta) == ("yarn", 10000.0)
    [note] = read.notes
    assert "rope_theta is 10000, not 1e+06; if that is not meant, put rope_theta into rope_scaling" in note
    same = parse(rope_theta=..., rope_parameters=parameters, rope_scaling=YARN | {"rope_theta": 1e6})
    assert (same.model.rope.theta, same.notes) == (1e6, ())
    for empty in ({}, None):
        read = parse(rope_theta=5e5, rope_parameters=parameters, rope_scaling=empty)
        assert (read.model.rope.kind, read.model.rope.theta, read.notes) == ("default", 1e6, ())


def test_the_original_context_is_the_models_own_unless_said() -> None:
    for kind in ("llama3", "yarn"):
        scaling = {"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        assert parse(rope_scaling=scaling).model.rope.original_context == 256
        inside = {**scaling, "original_max_position_embeddings": 64}
        assert parse(rope_scaling=inside).model.rope.original_context == 64
        assert parse(rope_scaling=inside, original_max_position_embeddings=96).model.rope.original_context == 96


def test_yarn() -> None:
    plain = parse(rope_scaling=YARN).model.rope
    assert (plain.factor, plain.original_context, plain.beta_fast, plain.beta_slow) == (4.0, 64, 32.0, 1.0)
    assert plain.truncate and plain.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    said = {"attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2, "truncate": False}
    given = parse(rope_scaling=YARN | said).model.rope
    assert (given.attention_factor, given.beta_fast, given.beta_slow, given.truncate) == (1.5, 8.0, 2.0, False)
    scaled = parse(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}).model.rope
    assert scaled.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert parse(rope_scaling=YARN | {"factor": None}).model.rope.factor == 4.0  # 256 / 64


def test_special_tokens_are_merged_from_both_configs() -> None:
    config = make_config(eos_token_id=[1, 2])
    merged = parse_config(config, {"eos_token_id": [2, 7], "bos_token_id": 9})
    assert (merged.bos, merged.eos) == (0, [1, 2, 7])
    none = parse_config(make_config(eos_token_id=None, bos_token_id=...), {"eos_token_id": 5, "bos_token_id": 9})
    assert (none.bos, none.eos) == (9, [5])


@pytest.mark.parametrize(
    ("architecture", "changes", "field", "words"),
    [
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "architectures", "GemmaForCausalLM.*LlamaForCausalLM"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures", "not supported"),
        ("llama", {"architectures": ..., "model_type": "gpt2"}, "model_type", "'gpt2' is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act", "'gelu' is not supported; supported: 'silu'"),
        ("llama", {"num_local_experts": 8}, "num_local_experts", "mixture-of-experts"),
        ("qwen3", {"num_experts": 128}, "num_experts", "mixture-of-experts"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "whole head"),
        ("llama", {"head_dim": 13}, "head_dim", "even head size"),
        ("llama", {"head_dim": ..., "num_attention_heads": 5}, "head_dim", "no multiple of 5"),
        ("llama", {"num_key_value_heads": 3}, "config.json", "not a multiple of kv_heads 3"),
        ("llama", {"hidden_size": ...}, "hidden_size", "is missing"),
        ("llama", {"hidden_size": "many"}, "hidden_size", "positive integer"),
        ("llama", {"hidden_size": 1 << 40}, "config.json", "hidden"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers", "positive integer"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps", "positive number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps", "positive number"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ("llama", {"eos_token_id": ["</s>"]}, "eos_token_id", "token id"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling.rope_type", "'dynamic'.*yarn"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type", "'longrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor", "at least 1"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling", "must be an object"),
        ("llama", {"rope_parameters": [], "rope_scaling": {"type": "linear"}}, "rope_parameters", "must be an object"),
        ("llama", {"rope_theta": None}, "rope_theta", "is null; give it a value, or remove it"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta", "is null"),
        ("llama", {"rope_scaling": {"rope_type": None}}, "rope_scaling.rope_type", "None is not supported"),
        ("llama", {"rope_scaling": YARN | {"factor": "4"}}, "rope_scaling.factor", "must be a positive number"),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 0}}, "rope_scaling.attention_factor", "positive number"),
        ("llama", {"rope_scaling": YARN | {"truncate": "no"}}, "rope_scaling.truncate", "true or false"),
        ("llama", {"rope_scaling": YARN | {"rope_theta": 1}}, "rope_scaling.rope_theta", "above 1 for yarn"),
        (
            "llama",
            {"rope_scaling": YARN, "original_max_position_embeddings": None},
            "original_max_position_embeddings",
            "is null",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "rope_scaling.low_freq_factor",
            "must be below",
        ),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "per layer"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types", "Llama does not have"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types", "'chunked_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types", "must list 2 layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types", "`use_sliding_window` switches off"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": None},
            "layer_types",
            "`sliding_window` switches off",
        ),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types", "`sliding_window` switches off"),
        ("qwen2", {"layer_types": [["full_attention"]] * 2}, "layer_types", "not supported"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers", "integer"),
    ],
)
def test_unsupported_fields_are_named(architecture: str, changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        parse(architecture, **changes)
    assert caught.value.field == field


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_config_crashes_the_parser(data: st.DataObject) -> None:
    """Whatever a field of config.json becomes, it is understood or refused by CheckpointError."""
    architecture = data.draw(st.sampled_from(list(CLASS_NAMES)))
    rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}
    spelling = data.draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    more = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention"] * 2}
    config = make_config(architecture, attention_bias=True, **{spelling: rope}, **more)
    place = data.draw(st.sampled_from([config, config, rope]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON_VALUES)
    try:
        model = parse_config(config, data.draw(st.just({}) | st.just({"eos_token_id": 2}))).model
    except CheckpointError as error:
        assert error.field
    else:
        assert len(model.windows) == model.layers


def test_context_may_only_be_lowered() -> None:
    assert parse_config(make_config(), {}, context=100).model.context == 100
    with pytest.raises(CheckpointError, match="more than the model's max_position_embeddings 256"):
        parse_config(make_config(), {}, context=257)


def refuse(directory: Path, words: str, field: str | None = None) -> None:
    """Opening and reading the whole checkpoint must fail with `words`."""
    with pytest.raises(CheckpointError, match=words) as caught, Checkpoint(directory) as checkpoint:
        for name in checkpoint.tensors:
            for _ in checkpoint.blocks(name):
                pass
    if field is not None:
        assert caught.value.field == field


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_tensor(tmp_path: Path, missing: str) -> None:
    directory = write_checkpoint(tmp_path / "m", tensors=lambda tensors: tensors.pop(missing))
    refuse(directory, f"lacks tensor '{missing}'", missing)


def test_missing_bias_and_missing_head_come_with_a_remedy(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    refuse(write_checkpoint(tmp_path / "b", "qwen2", tensors=lambda tensors: tensors.pop(bias)), "asks for this bias")
    head = "lm_head.weight"
    refuse(write_checkpoint(tmp_path / "h", tensors=lambda tensors: tensors.pop(head)), "`tie_word_embeddings` to true")


def test_extra_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    directory = write_checkpoint(tmp_path / "m", tensors=lambda tensors: tensors.update({name: np.zeros(48)}))
    refuse(directory, f"unexpected tensor '{name}'", name)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    directory = write_checkpoint(tmp_path / "m", tensors=lambda tensors: tensors.update({name: np.zeros(6)}))
    with Checkpoint(directory) as checkpoint:
        assert not checkpoint.has(name)


def test_misshapen_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    directory = write_checkpoint(tmp_path / "m", tensors=lambda tensors: tensors.update({name: np.zeros((48, 24))}))
    refuse(directory, rf"tensor '{name}' has shape \[48, 24\], config.json asks for \[24, 48\]", name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_that_are_not_finite(tmp_path: Path, value: float, dtype: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def damage(tensors: dict[str, Any]) -> None:
        tensors[name][35, 7] = value

    directory = write_checkpoint(tmp_path / "m", dtype=dtype, tensors=damage)
    refuse(directory, rf"tensor '{name}' has the value {value} at \[35, 7\]", name)


def test_tied_checkpoint_with_a_stored_head(tmp_path: Path) -> None:
    def copy(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    with Checkpoint(write_checkpoint(tmp_path / "same", tied=True, tensors=copy)) as checkpoint:
        assert checkpoint.model.tied_embeddings

    def differ(tensors: dict[str, Any]) -> None:
        copy(tensors)
        tensors["lm_head.weight"][3, 3] += 1

    refuse(write_checkpoint(tmp_path / "other", tied=True, tensors=differ), "differs from them", "lm_head.weight")


def test_unsupported_dtype(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    tensors = random_tensors(make_config())
    save_file({**tensors, "model.norm.weight": np.ones(48)}, directory / "model.safetensors")
    refuse(directory, "'model.norm.weight' is F64; supported: BF16, F16, F32")


@pytest.mark.parametrize("keep", [0, 5, 100, -1000, -1])
def test_truncated_weights(tmp_path: Path, keep: int) -> None:
    directory = write_checkpoint(tmp_path / "m")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(directory, "model.safetensors is truncated", "model.safetensors")


def damaged_header(**changes: Any) -> bytes:
    """A one-tensor safetensors file whose entry is changed."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    header = json.dumps({"tensor": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((1 << 60).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "damaged safetensors header"),
        ((2).to_bytes(8, "little") + b"{x", "damaged safetensors header"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "damaged safetensors header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (damaged_header(dtype="F31"), "unknown dtype 'F31'"),
        (damaged_header(dtype=[]), "unknown dtype"),
        (damaged_header(shape=[-2]), "damaged shape"),
        (damaged_header(shape=[True, 2]), "damaged shape"),
        (damaged_header(data_offsets=[8, 0]), "damaged shape or extent"),
        (damaged_header(shape=[3]), r"8 bytes, which is not F32 \[3\]"),
        (damaged_header(data_offsets=[4, 12]), "hole or an overlap"),
        (damaged_header() + b"more", "4 bytes after its last tensor"),
    ],
)
def test_corrupt_weights(tmp_path: Path, content: bytes, words: str) -> None:
    directory = write_checkpoint(tmp_path / "m")
    (directory / "model.safetensors").write_bytes(content)
    refuse(directory, words, "model.safetensors")


def test_shards(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", shards=3)
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    second = "model-00002-of-00003.safetensors"

    write_json(index, {"weight_map": {**places, "model.norm.weight": second, "lm_head.weight": second}})
    refuse(directory, "which lacks it")
    write_json(index, {"weight_map": {**places, "lm_head.weight": "../secret.safetensors"}})
    refuse(directory, "outside of its directory")
    write_json(index, {"weights": places})
    refuse(directory, "no `weight_map`")
    write_json(index, {"weight_map": places})
    (directory / second).unlink()
    refuse(directory, f"{second} is missing; download", second)
    index.unlink()
    refuse(directory, "several safetensors files but no model.safetensors.index.json")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", shards=2)
    path = directory / "model-00002-of-00002.safetensors"
    save_file({**load_file(path), "model.embed_tokens.weight": np.ones(3)}, path)
    refuse(directory, "is both in model-00001-of-00002.safetensors and in")


def test_directory_without_weights(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refuse(directory, r"has only pickled weights \(pytorch_model.bin\); convert them: transformers\.")
    (directory / "pytorch_model.bin").unlink()
    refuse(directory, "no model.safetensors")
    (directory / "config.json").write_text("{")
    refuse(directory, "cannot be read as JSON", "config.json")
    (directory / "config.json").unlink()
    refuse(directory, "config.json is missing", "config.json")
    refuse(tmp_path / "nowhere", "no checkpoint directory")


def test_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", vocabulary=320)
    assert read_tokenizer(directory, 320).vocabulary.count == 320
    with pytest.raises(CheckpointError, match="320 tokens, the embedding only 319 rows"):
        read_tokenizer(directory, 319)


def test_missing_and_broken_tokenizer(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    path = directory / "tokenizer.json"
    path.write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        read_tokenizer(directory, 320)
    path.unlink()
    with pytest.raises(CheckpointError, match="save_pretrained"):
        read_tokenizer(directory, 320)


def test_bf16_reader_keeps_every_bit_pattern(tmp_path: Path) -> None:
    """All finite bf16 values, subnormals and negative zero included, survive the way to float32."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = values[np.isfinite(values.astype(np.float32))]
    config = {"vocab_size": len(finite) // 64, "hidden_size": 64}
    directory = write_checkpoint(tmp_path / "m", tied=True, config=config)
    name = "model.embed_tokens.weight"
    write_shards(directory, {**load_file(directory / "model.safetensors"), name: finite.reshape(-1, 64)})
    with Checkpoint(directory) as checkpoint:
        read = np.concatenate(list(checkpoint.blocks(name)))
    assert read.tobytes() == finite.astype(np.float32).tobytes()
