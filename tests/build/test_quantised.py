"""Checkpoints that are FP8 already: read as what they mean, kept where a bundle can hold them, else quantised again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from adapters import write_adapter
from checkpoints import Tensors, write_checkpoint, write_json, write_shards
from fp8_checkpoints import BLOCK, FP8, blocks_like_qwens, compressed_tensors, floats_of, write_fp8
from ull.bundle import Bundle, Fp8Source, Precision, open_bundle
from ull.cli import main as ull_main
from ull.errors import CheckpointError
from ull_build import cli
from ull_build.build import build
from ull_build.progress import Reporter
from ull_build.settings import Settings
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.drafters import SpeculationSettings
from ull_build.source.lora import AdaptedCheckpoint
from ull_build.tensorrt.weights import SegmentWeights
from ull_build.weights.convert import convert_checkpoint
from ull_build.weights.pack_cpu import CpuPacker, unpack_tiles
from ull_build.weights.pack_gpu import GpuPacker, unpack_blocks
from ull_build.weights.quantise import quantise_rows
from weights_files import read_weights

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
ON_GPU = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FORMS = [
    ("compressed-tensors", "channel"),
    ("compressed-tensors", "tensor"),
    ("compressed-tensors", "block"),
    ("fp8", "block"),
    ("modelopt", "tensor"),
    ("modelopt", "channel"),
    ("hf_quant_config", "tensor"),
    ("hf_quant_config", "channel"),
]


class Notes(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def built(model: Path, output: Path, reporter: Reporter | None = None, **options: Any) -> Bundle:
    settings = Settings(model=model, output=output, name="x", force=True, **{"evaluate": False, **options})
    return open_bundle(build(settings, reporter).path)


# What a checkpoint means


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(("method", "granularity"), FORMS)
def test_a_weight_is_its_codes_times_its_scales(
    tmp_path: Path, architecture: str, method: str, granularity: str
) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m", architecture), method, granularity, shards=2)
    expected = floats_of(directory)
    with Checkpoint(directory) as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        assert checkpoint.granularity == granularity and len(checkpoint.fp8_weights) == 14
        for name, values in expected.items():
            np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks(name))), values, err_msg=name)


def test_older_checkpoints_of_compressed_tensors_are_read(tmp_path: Path) -> None:
    """Their metadata stand under another name, without a method."""
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "compressed-tensors", "channel")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    about = config.pop("quantization_config")
    del about["quant_method"], about["config_groups"]["group_0"]["weights"]["strategy"]
    about |= {"sparsity_config": {"format": "dense", "ignore": []}, "transform_config": {"config_groups": {}}}
    write_json(directory / "config.json", {**config, "compression_config": about})
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.granularity == "channel" and len(checkpoint.fp8_weights) == 14


def test_blocks_of_modelopt_are_of_128_rows_and_columns(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    directory = write_checkpoint(tmp_path / "m", config=sizes)
    write_fp8(directory, "modelopt", "block", block=(128, 128))
    expected = floats_of(directory, (128, 128))
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.granularity == "block"
        for name, values in expected.items():
            np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks(name))), values, err_msg=name)


def test_a_weight_of_more_rows_than_one_block_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of scales that begin within a block of reading."""
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "fp8", "block", block=(24, 20))
    monkeypatch.setattr("ull_build.source.checkpoint.BLOCK_ELEMENTS", 1)
    expected = floats_of(directory, (24, 20))
    with Checkpoint(directory) as checkpoint:
        assert len(list(checkpoint.blocks(DOWN))) == 2
        for name, values in expected.items():
            np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks(name))), values, err_msg=name)


# Kept as it is


@pytest.mark.parametrize(("method", "granularity"), [form for form in FORMS if form[1] != "block"])
def test_one_scale_per_row_or_tensor_is_kept_bit_for_bit(tmp_path: Path, method: str, granularity: str) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), method, granularity)
    source = read_weights(directory / "model.safetensors")
    bundle = built(directory, tmp_path / "x.ull")
    tensors = read_weights(bundle.weights_path)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}"
        for fused, parts in (
            ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("o", ("self_attn.o_proj",)),
            ("down", ("mlp.down_proj",)),
        ):
            codes = unpack_tiles(tensors[f"layers.{layer}.{fused}.weight"].view(np.uint8))
            scales, start = tensors[f"layers.{layer}.{fused}.scale"], 0
            for part in parts:
                weight = source[f"{prefix}.{part}.weight"]
                scale = source[f"{prefix}.{part}.weight_scale"].astype(np.float32)
                place = slice(start, start + len(weight))
                np.testing.assert_array_equal(codes[place], weight.view(np.uint8))
                np.testing.assert_array_equal(scales[place], np.broadcast_to(scale.reshape(-1), len(weight)))
                start += len(weight)
    assert any(((values.view(np.uint8) & 0x78) == 0).any() for values in source.values() if values.dtype == FP8)
    rows = sum(len(values) for values in source.values() if values.dtype == FP8)
    name = "ModelOpt" if method != "compressed-tensors" else method
    assert bundle.manifest.provenance.fp8_source == Fp8Source(name, granularity, 14, rows, rows)


def test_a_gpu_gets_the_same_codes_and_scales(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m", config=ON_GPU), "compressed-tensors", "channel")
    source = read_weights(directory / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        convert_checkpoint(checkpoint, GpuPacker(Precision()), tmp_path / "w")
        assert checkpoint.fp8_source is not None and checkpoint.fp8_source.kept == checkpoint.fp8_source.rows
    tensors = read_weights(tmp_path / "w")
    weight, scale = source[DOWN], source[f"{DOWN}_scale"].astype(np.float32)
    np.testing.assert_array_equal(unpack_blocks(tensors["layers.1.down.weight"].view(np.uint8)), weight.view(np.uint8))
    np.testing.assert_array_equal(tensors["layers.1.down.scale"], scale[:, 0])
    # Eight rows of gate, then eight of up.
    codes = unpack_blocks(tensors["layers.0.gate_up.weight"].view(np.uint8)).reshape(-1, 2, 8, 128)
    for half, part in enumerate(("gate", "up")):
        rows = source[f"model.layers.0.mlp.{part}_proj.weight"].view(np.uint8)
        np.testing.assert_array_equal(codes[:, half].reshape(-1, 128), rows)


def test_a_plan_gets_the_same_codes_and_scales(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "modelopt", "channel")
    source = read_weights(directory / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        linear = SegmentWeights(checkpoint, Precision()).linear("layers.0.qkv")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    np.testing.assert_array_equal(linear.rows.view(np.uint8), np.concatenate([source[n].view(np.uint8) for n in names]))
    np.testing.assert_array_equal(linear.scales, np.concatenate([source[f"{n}_scale"] for n in names]))


def test_an_engine_of_kept_weights_loses_nothing(tmp_path: Path) -> None:
    """Subnormal codes too, which ull's own quantiser does not make: they are widened as what they are."""
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "compressed-tensors", "tensor")
    options = {"evaluate": True, "precision": Precision(kv="f32")}  # as the original is run with
    quality = built(directory, tmp_path / "x.ull", **options).manifest.quality
    assert quality is not None
    errors = {error.name: error.relative_error for error in quality.tensors}
    assert len(errors) == 9 and set(errors.values()) == {0.0}  # eight linears and lm_head
    assert abs(quality.perplexity_increase) < 1e-5 and quality.top1_agreement == 1.0


def test_weights_that_were_left_out_are_quantised_beside_those_that_were_not(tmp_path: Path) -> None:
    """`ignore`: of the fused q, k and v only k is not FP8."""
    directory = write_checkpoint(tmp_path / "m")
    write_fp8(directory, "compressed-tensors", "channel", keep=lambda name: "k_proj" in name or "layers.1.mlp" in name)
    source = read_weights(directory / "model.safetensors")
    bundle = built(directory, tmp_path / "x.ull")
    tensors = read_weights(bundle.weights_path)
    codes, scales = unpack_tiles(tensors["layers.0.qkv.weight"].view(np.uint8)), tensors["layers.0.qkv.scale"]
    start = 0
    for part in "qkv":
        weight = source[f"model.layers.0.self_attn.{part}_proj.weight"]
        if part == "k":
            expected = quantise_rows(weight.astype(np.float32))
        else:
            scale = source[f"model.layers.0.self_attn.{part}_proj.weight_scale"]
            expected = weight.view(np.uint8), scale.astype(np.float32)[:, 0]
        np.testing.assert_array_equal(codes[start : start + len(weight)], expected[0])
        np.testing.assert_array_equal(scales[start : start + len(weight)], expected[1])
        start += len(weight)
    found = bundle.manifest.provenance.fp8_source
    assert found is not None and (found.weights, found.kept) == (9, found.rows)


# Quantised again


def scales_of(change: Callable[[NDArray[np.float32]], None], name: str = DOWN) -> Callable[[Tensors], None]:
    """An edit of the scales [rows, columns of blocks] of a weight, float32."""

    def edit(tensors: Tensors) -> None:
        scales = tensors[f"{name}_scale_inv"].astype(np.float32)
        change(scales)
        tensors[f"{name}_scale_inv"] = scales

    return edit


def test_blocks_are_quantised_again_as_their_floats_would_be(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "fp8", "block")
    floats = write_checkpoint(tmp_path / "floats", dtype="fp32")
    write_shards(floats, floats_of(directory))
    found, expected = built(directory, tmp_path / "x.ull", evaluate=True), built(floats, tmp_path / "y.ull")
    weights = "weights.safetensors"
    assert found.manifest.files[weights].sha256 == expected.manifest.files[weights].sha256
    source, quality = found.manifest.provenance.fp8_source, found.manifest.quality
    assert source is not None and (source.method, source.granularity, source.kept) == ("fp8", "block", 0)
    assert quality is not None
    errors = {error.name: error.relative_error for error in quality.tensors}
    assert all(0.001 < error < 0.05 for name, error in errors.items() if name != "lm_head.weight")
    assert expected.manifest.provenance.fp8_source is None


def test_rows_whose_blocks_share_a_scale_are_kept(tmp_path: Path) -> None:
    def first_blocks_alike(scales: NDArray[np.float32]) -> None:
        scales[0] = scales[0].max()

    directory = write_checkpoint(tmp_path / "m")
    write_fp8(directory, "fp8", "block", edit=scales_of(first_blocks_alike))
    source = read_weights(directory / "model.safetensors")
    bundle = built(directory, tmp_path / "x.ull")
    tensors = read_weights(bundle.weights_path)
    codes = unpack_tiles(tensors["layers.1.down.weight"].view(np.uint8))
    np.testing.assert_array_equal(codes[: BLOCK[0]], source[DOWN].view(np.uint8)[: BLOCK[0]])
    assert (tensors["layers.1.down.scale"][: BLOCK[0]] == source[f"{DOWN}_scale_inv"][0, 0]).all()
    found = bundle.manifest.provenance.fp8_source
    assert found is not None and found.kept == BLOCK[0]


def test_rows_whose_scales_are_powers_of_two_apart_are_kept_where_no_code_is_lost(tmp_path: Path) -> None:
    """Their codes are for the larger scale then: other bytes, the same values."""

    def edit(tensors: Tensors) -> None:
        codes, scales = tensors[DOWN].view(np.uint8), np.ones((3, 3), np.float32)
        scales[0] = 1, 0.25, 0.5
        scales[1:] = np.float32([1.0, 0.3, 0.7])
        codes[:16] = codes[:16] & 0x87 | 0x30  # exponents that have room below
        codes[3, 40] = 0x01  # the least subnormal, a quarter of which has no code
        tensors[f"{DOWN}_scale_inv"] = scales

    directory = write_fp8(write_checkpoint(tmp_path / "m"), "fp8", "block", edit=edit)
    values = floats_of(directory)[DOWN]
    bundle = built(directory, tmp_path / "x.ull")
    tensors = read_weights(bundle.weights_path)
    codes, scales = unpack_tiles(tensors["layers.1.down.weight"]), tensors["layers.1.down.scale"]
    kept = [row for row in range(16) if row != 3]
    np.testing.assert_array_equal((codes.astype(np.float32) * scales[:, None])[kept], values[kept])
    assert (scales[kept] == 1).all() and scales[3] != 1
    found = bundle.manifest.provenance.fp8_source
    assert found is not None and found.kept == 15


@pytest.mark.parametrize("scale", [0.0, 1e-40])
def test_a_scale_too_small_for_a_bundle_is_made_anew(tmp_path: Path, scale: float) -> None:
    def edit(tensors: Tensors) -> None:
        scales = tensors[f"{Q}_scale"].astype(np.float32)
        scales[5] = scale
        tensors[f"{Q}_scale"] = scales

    directory = write_fp8(write_checkpoint(tmp_path / "m"), "compressed-tensors", "channel", edit=edit)
    values = floats_of(directory)[Q][5:6]
    bundle = built(directory, tmp_path / "x.ull")
    tensors = read_weights(bundle.weights_path)
    codes, scales = quantise_rows(values)
    assert tensors["layers.0.qkv.scale"][5] == scales[0] >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(unpack_tiles(tensors["layers.0.qkv.weight"].view(np.uint8))[5], codes[0])
    found = bundle.manifest.provenance.fp8_source
    assert found is not None and found.kept == found.rows - 1


def test_a_bf16_engine_has_the_floats_rounded(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "compressed-tensors", "channel")
    expected = floats_of(directory)[DOWN].astype(ml_dtypes.bfloat16)
    bundle = built(directory, tmp_path / "x.ull", precision=Precision(weights="bf16"))
    found = unpack_tiles(read_weights(bundle.weights_path)["layers.1.down.weight"])[: len(expected)]
    np.testing.assert_array_equal(found, expected)
    source = bundle.manifest.provenance.fp8_source
    assert source is not None
    assert source.describe("bf16") == "14 FP8 weights (compressed-tensors, channel), rounded to bf16"


def test_an_adapter_is_merged_into_the_floats_and_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "compressed-tensors", "channel")
    floats = write_checkpoint(tmp_path / "floats", dtype="fp32")
    write_shards(floats, floats_of(directory))
    adapter = write_adapter(tmp_path / "a", floats_of(directory), target_modules=["down_proj"])
    merged = {}
    for name, base in (("fp8", directory), ("floats", floats)):
        with AdaptedCheckpoint(base, adapter) as checkpoint:
            convert_checkpoint(checkpoint, CpuPacker(Precision()), tmp_path / f"{name}.safetensors")
            merged[name] = checkpoint.fp8_source
    found, expected = (read_weights(tmp_path / f"{name}.safetensors") for name in merged)
    for part in ("weight", "scale"):
        assert found[f"layers.1.down.{part}"].tobytes() == expected[f"layers.1.down.{part}"].tobytes()
    source = read_weights(directory / "model.safetensors")
    codes = unpack_tiles(found["layers.0.o.weight"].view(np.uint8))
    o_proj = source["model.layers.0.self_attn.o_proj.weight"].view(np.uint8)
    np.testing.assert_array_equal(codes[: len(o_proj)], o_proj)
    assert merged["floats"] is None and merged["fp8"] is not None
    assert merged["fp8"].kept == merged["fp8"].rows - 2 * 48


def test_a_draft_model_may_be_fp8(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    draft = write_fp8(write_checkpoint(tmp_path / "d", seed=1), "fp8", "block")
    bundle = built(model, tmp_path / "x.ull", speculation=SpeculationSettings(draft=draft))
    assert bundle.manifest.draft is not None and bundle.manifest.provenance.fp8_source is None


# What people see


def test_a_build_and_inspect_say_what_became_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = write_fp8(write_checkpoint(tmp_path / "m"), "hf_quant_config", "tensor")
    output = tmp_path / "x.ull"
    assert cli.main(["--model", str(kept), "--output", str(output), "--no-eval"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "14 weights are FP8 already (ModelOpt, tensor): in an fp8 engine rows with one scale stay as they are" in said
    )
    assert "14 scales of activations, keys and values have no use" in said
    assert "14 FP8 weights (ModelOpt, tensor), kept as they are" in said
    assert "hf_quant_config.json" in open_bundle(output).manifest.provenance.source_files
    assert ull_main(["inspect", str(output)]) == 0
    assert "14 FP8 weights (ModelOpt, tensor), kept as they are" in " ".join(capsys.readouterr().out.split())


def test_what_became_of_some_of_the_rows() -> None:
    assert Fp8Source("fp8", "block", 7, 1000, 250).describe("fp8") == (
        "7 FP8 weights (fp8, block), 25.0% of the rows kept as they are, the others quantised again"
    )
    with pytest.raises(ValueError, match="`kept` must not exceed `rows`"):
        Fp8Source("fp8", "block", 7, 10, 11)


# Refused


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, Checkpoint(directory) as checkpoint:
        for name in checkpoint.tensors:
            for _ in checkpoint.blocks(name):
                pass
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("metadata", "field", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method", "is 'gptq', 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "quant_method", "is 'awq', 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method", "is 'bitsandbytes', 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method", "is 'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method", "is 'mxfp4'"),
        ({}, "quant_method", "is None"),
        ({"quant_method": ["fp8"]}, "quant_method", r"is ['fp8']"),
        ({**blocks_like_qwens(), "fmt": "e5m2"}, "fmt", "is 'e5m2'"),
        (compressed_tensors("channel", type="int"), "config_groups.group_0.weights.type", "is 'int' of 8 bits"),
        (compressed_tensors("channel", num_bits=4), "config_groups.group_0.weights.type", "is 'float' of 4 bits"),
        (compressed_tensors("group"), "config_groups.group_0.weights.strategy", "is 'group'"),
        (compressed_tensors("channel", symmetric=False), "config_groups.group_0.weights.symmetric", "is False"),
        ({**compressed_tensors("channel"), "format": "pack-quantized"}, "format", "is 'pack-quantized'"),
        (
            {**compressed_tensors("channel"), "transform_config": {"config_groups": {"R1": {}}}},
            "transform_config",
            "which ull does not undo",
        ),
        (
            {**compressed_tensors("channel"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
            "which ull does not undo",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo", "is 'NVFP4'"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}, "quantization.quant_algo", "W4A8"),
        ({"quant_method": "modelopt"}, "quant_algo", "is None"),
    ],
)
def test_other_formats_are_refused_with_what_to_do(
    tmp_path: Path, metadata: dict[str, Any], field: str, words: str
) -> None:
    directory = write_checkpoint(tmp_path / "m", config={"quantization_config": metadata})
    error = refusal(directory)
    assert error.field == f"quantization_config.{field}" and words in str(error)
    assert "the checkpoint is already quantised; build from the original bf16, fp16 or fp32 weights" in str(error)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ([], "`quantization_config` must be an object, not []"),
        ({"quant_method": "compressed-tensors"}, "`quantization_config.config_groups` must be an object, not None"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": "FP8"}},
            "`quantization_config.config_groups.a` must be an object, not 'FP8'",
        ),
        (blocks_like_qwens((0, 128)), "`quantization_config.weight_block_size` must be two positive numbers"),
        ({**blocks_like_qwens(), "weight_block_size": 128}, "must be two positive numbers, rows and columns, not 128"),
        (
            {"quant_method": "modelopt", "quantization": 8},
            "`quantization_config.quantization` must be an object, not 8",
        ),
    ],
)
def test_damaged_metadata_is_named(tmp_path: Path, metadata: Any, words: str) -> None:
    assert words in str(refusal(write_checkpoint(tmp_path / "m", config={"quantization_config": metadata})))


def test_damaged_metadata_of_modelopt_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    path = directory / "hf_quant_config.json"
    for text, words in (
        ("{", "hf_quant_config.json cannot be read as JSON"),
        ("[]", "hf_quant_config.json must hold a JSON object"),
        ("{}", "hf_quant_config.json: `quantization` must be an object"),
        ('{"quantization": {"quant_algo": "INT8_SQ"}}', "hf_quant_config.json: `quantization.quant_algo` is 'INT8_SQ'"),
    ):
        path.write_text(text, encoding="utf-8")
        assert words in str(refusal(directory))


def test_several_sizes_of_blocks_are_refused(tmp_path: Path) -> None:
    metadata = compressed_tensors("block")
    metadata["config_groups"]["group_1"] = compressed_tensors("block", (8, 8))["config_groups"]["group_0"]
    error = refusal(write_checkpoint(tmp_path / "m", config={"quantization_config": metadata}))
    assert "blocks of several sizes" in str(error)


def without_scale(tensors: Tensors) -> None:
    del tensors[f"{Q}_scale"]


def two_scales(tensors: Tensors) -> None:
    tensors[f"{Q}_scale_inv"] = tensors[f"{Q}_scale"]


def of_no_weight(tensors: Tensors) -> None:
    tensors["model.layers.7.mlp.up_proj.weight_scale"] = np.ones(1, np.float32)


def of_floats(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].astype(ml_dtypes.bfloat16)


def negative(tensors: Tensors) -> None:
    tensors[f"{Q}_scale"][3] *= -1


def infinite(tensors: Tensors) -> None:
    tensors[f"{Q}_scale"][3] = np.inf


def too_few(tensors: Tensors) -> None:
    tensors[f"{Q}_scale"] = tensors[f"{Q}_scale"][1:]


def of_integers(tensors: Tensors) -> None:
    tensors[f"{Q}_scale"] = np.ones((48, 1), np.uint8)


def no_number(tensors: Tensors) -> None:
    tensors[Q].view(np.uint8)[2, 3] = 0xFF


def e5m2(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].astype(ml_dtypes.float8_e5m2)


def a_vector(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(FP8)


def zero_points(tensors: Tensors) -> None:
    tensors[f"{Q}_zero_point"] = np.zeros((48, 1), np.int8)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without_scale, f"tensor {Q!r} is FP8 and has no '{Q}_scale'"),
        (two_scales, f"are both scales of {Q!r}"),
        (of_no_weight, "but 'model.layers.7.mlp.up_proj.weight' is missing"),
        (of_floats, f"but {Q!r} is BF16, not FP8"),
        (negative, "but scales are positive"),
        (infinite, "has the value inf, but scales are positive"),
        (too_few, "has the shape [47, 1], a weight of [48, 48] takes one, or one for each row"),
        (of_integers, f"tensor '{Q}_scale' is U8; supported: BF16, F16, F32"),
        (no_number, f"tensor {Q!r} has the value nan at [2, 3]"),
        (e5m2, f"tensor {Q!r} is F8_E5M2: the checkpoint is already quantised"),
        (a_vector, "tensor 'model.norm.weight' is FP8 and no matrix"),
        (zero_points, f"tensor '{Q}_zero_point' is I8: the checkpoint is already quantised"),
    ],
)
def test_damaged_weights_are_named(tmp_path: Path, edit: Callable[[Tensors], None], words: str) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "compressed-tensors", "channel", edit=edit)
    assert words in str(refusal(directory))


def test_scales_of_other_blocks_are_named_with_the_shape_that_is_wanted(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "fp8", "block")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_json(directory / "config.json", {**config, "quantization_config": blocks_like_qwens((128, 128))})
    words = "takes one, or one for each row, or [1, 1] for blocks of [128, 128]"
    assert words in str(refusal(directory))


def test_fp8_without_metadata_is_refused(tmp_path: Path) -> None:
    directory = write_fp8(write_checkpoint(tmp_path / "m"), "hf_quant_config", "tensor")
    (directory / "hf_quant_config.json").unlink()
    assert "the checkpoint is already quantised" in str(refusal(directory))
