"""Bundles for a GPU: the packed weights against what the kernels' layout says, the manifest, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from checkpoints import head_tensors, write_checkpoint
from device_bundles import ROOMS, build_with_stubs, write_stubs
from manifests import read_manifest_json, write_manifest_json
from ull.bundle import (
    CHUNK_KERNELS,
    DEVICE_ALIGNMENT,
    DEVICE_INTERFACE,
    DEVICE_KERNELS,
    PAGES_KERNELS,
    Bundle,
    Precision,
    device_parts,
    open_bundle,
)
from ull.commands import inspect
from ull.commands.inspect_tables import parameter_count
from ull.errors import BuildError, BundleError, RecipeError
from ull_build import cli
from ull_build.benchmark_bundle import RandomSettings, build_random
from ull_build.build import build
from ull_build.code import kernels, nvrtc
from ull_build.quality.evaluate import Predictions
from ull_build.quality.measure import Evaluator
from ull_build.recipe import ForwardRecipe, make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.shapes import SHAPES, shape_model
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.drafters import SpeculationSettings
from ull_build.tensorrt.weights import SegmentWeights
from ull_build.weights.kv_scale import kv_scales
from ull_build.weights.pack_cpu import unpack_tiles
from ull_build.weights.pack_gpu import pack_blocks, unpack_blocks
from ull_build.weights.quantise import round_to_bf16, scale_rows, unscale_rows
from weights_files import read_weights

DIMENSIONS = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 100, "num_attention_heads": 4, "vocab_size": 333}
FILES = {"first", "second", "attention_pages", *(name for name in ROOMS if name.startswith("chunk"))}  # of stubs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose MLP and vocabulary fill no whole tile, with biases."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", "qwen2", config=DIMENSIONS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stubs(tmp_path_factory.mktemp("sources") / "kernels")


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", sources)


def built(checkpoint: Path, output: Path, **changes: Any) -> Bundle:
    precision = Precision(**{name: changes.pop(name) for name in ("weights", "lm_head", "kv") if name in changes})
    options = {"target": "sm_90a", "evaluate": False, "precision": precision, **changes}
    return open_bundle(build(Settings(checkpoint, output, "x", **options)).path)


# Pack


def test_every_element_lies_where_a_lane_expects_it() -> None:
    """By hand, from the contract: lane 4g + t holds columns 8t .. 8t + 7 of rows g and g + 8."""
    rows = np.arange(32 * 64, dtype=np.uint16).reshape(32, 64)
    small = (rows % 251).astype(np.uint8)
    wide, narrow = pack_blocks(rows), pack_blocks(small)
    assert wide.shape == (2, 2, 2, 32, 8) and narrow.shape == (2, 2, 32, 16)
    for tile, step, lane in np.ndindex(2, 2, 32):
        g, t = divmod(lane, 4)
        for j in range(2):
            k = 32 * step + 8 * t + 4 * j
            places = [(row, column) for column in (k, k + 2) for row in (g, g + 8)]
            expected = [16 * tile + row for row, column in places], [column for row, column in places]
            pairs = [rows[r, c + e] for r, c in zip(*expected, strict=True) for e in range(2)]
            assert wide[tile, step, j, lane].tolist() == pairs
            pairs = [small[r, c + e] for r, c in zip(*expected, strict=True) for e in range(2)]
            assert narrow[tile, step, lane, 8 * j : 8 * j + 8].tolist() == pairs


@settings(deadline=None)
@given(tiles=st.integers(1, 4), columns=st.integers(1, 100), dtype=st.sampled_from([np.uint8, np.uint16]))
def test_unpacking_gives_the_rows_back_and_zeros_behind_them(tiles: int, columns: int, dtype: Any) -> None:
    rows = np.random.default_rng(columns).integers(1, 250, (16 * tiles, columns)).astype(dtype)
    unpacked = unpack_blocks(pack_blocks(rows))
    np.testing.assert_array_equal(unpacked[:, :columns], rows)
    assert unpacked.shape[1] % 32 == 0 and not unpacked[:, columns:].any()


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(rows=hypothesis_numpy.arrays(np.float32, (3, 5), elements=FINITE))
def test_rows_lose_no_more_than_bf16_s_last_bit(rows: NDArray[np.float32]) -> None:
    stored, scales = scale_rows(rows)
    assert np.isfinite(stored).all()
    assert (np.frexp(scales)[0] == 0.5).all() and (scales > 0).all()  # powers of two
    error = np.abs(unscale_rows(stored, scales).astype(np.float64) - rows)
    largest = np.abs(rows).astype(np.float64).max(axis=1, keepdims=True)
    least = np.maximum(largest * 2.0**-39, 2.0**-134)  # of f16 with its scale, of bf16
    assert (error <= np.maximum(np.abs(rows).astype(np.float64) * 2.0**-8, least)).all()


@settings(deadline=None)
@given(exponents=hypothesis_numpy.arrays(np.int64, (2, 8), elements=st.integers(-32, 0)), top=st.integers(-60, 60))
def test_bf16_rows_are_kept_exactly_down_to_2_to_the_minus_32(exponents: NDArray[np.int64], top: int) -> None:
    mantissas = 1 + np.arange(16).reshape(2, 8) * 8 / 128  # eight bits
    rows = np.ldexp(mantissas, exponents + top).astype(ml_dtypes.bfloat16).astype(np.float32)
    rows[:, 0] = np.ldexp(1.9921875, top)
    stored, scales = scale_rows(rows)
    np.testing.assert_array_equal(unscale_rows(stored, scales), rows)


# The bundle


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
@pytest.mark.parametrize("lm_head", ["bf16", "fp8"])
def test_packed_weights_multiply_like_the_checkpoint(
    checkpoint: Path, tmp_path: Path, weights: str, lm_head: str
) -> None:
    """Dequantised by the layout alone, every linear equals the checkpoint's within its format."""
    bundle = built(checkpoint, tmp_path / "x.ull", weights=weights, lm_head=lm_head)
    packed, model = read_weights(bundle.weights_path), bundle.manifest.model
    original = {name: values.astype(np.float32) for name, values in load_file(checkpoint / "model.safetensors").items()}

    def dense(name: str) -> NDArray[np.float64]:
        """[padded rows, padded columns] as the tensor cores see them."""
        rows = unpack_blocks(packed[f"{name}.weight"]).astype(np.float64)
        return rows * packed[f"{name}.scale"][: len(rows), None]

    def check(got: NDArray[np.float64], want: NDArray[np.float32], stored: str) -> None:
        rows, columns = want.shape
        assert not got[rows:].any() and not got[:, columns:].any()
        bound = 2.0**-4 * np.abs(want) + 2.0**-15 * np.abs(want).max(axis=1, keepdims=True)
        np.testing.assert_array_less(np.abs(got[:rows, :columns] - want), bound + 1e-30)
        if stored == "bf16":  # the checkpoint is bf16
            np.testing.assert_array_equal(got[:rows, :columns].astype(np.float32), want)

    for layer in range(model.layers):
        prefix, name = f"model.layers.{layer}", f"layers.{layer}"
        parts = [original[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
        check(dense(f"{name}.qkv"), np.concatenate(parts), weights)
        check(dense(f"{name}.o"), original[f"{prefix}.self_attn.o_proj.weight"], weights)
        check(dense(f"{name}.down"), original[f"{prefix}.mlp.down_proj.weight"], weights)
        gate_up = dense(f"{name}.gate_up").reshape(-1, 2, 8, 96)
        for part, projection in enumerate(("gate", "up")):
            half = gate_up[:, part].reshape(-1, 96)
            check(half, original[f"{prefix}.mlp.{projection}_proj.weight"], weights)
        bias = np.concatenate([original[f"{prefix}.self_attn.{part}_proj.bias"] for part in "qkv"])
        np.testing.assert_array_equal(packed[f"{name}.qkv.bias"][: len(bias)], bias)
        assert f"{name}.o.bias" not in packed
        norm = original[f"{prefix}.input_layernorm.weight"]
        np.testing.assert_array_equal(packed[f"{name}.attn_norm"][: len(norm)], norm)
    check(dense("lm_head"), original["lm_head.weight"], lm_head)
    embedding = packed["embed.weight"].astype(np.float32)
    np.testing.assert_array_equal(embedding, original["model.embed_tokens.weight"])


def test_every_tensor_starts_at_a_cache_line(checkpoint: Path, tmp_path: Path) -> None:
    bundle = built(checkpoint, tmp_path / "x.ull")
    start = min(entry.offset for entry in bundle.tensors.values())
    for name, entry in bundle.tensors.items():
        assert (entry.offset - start) % DEVICE_ALIGNMENT == 0 or name.endswith(".filler"), name


def test_fp8_codes_are_those_of_the_cpu_bundle(checkpoint: Path, tmp_path: Path) -> None:
    """So the loss that the CPU executor measures is the loss on the GPU."""
    device = read_weights(built(checkpoint, tmp_path / "device.ull").weights_path)
    on_cpu = build(Settings(checkpoint, tmp_path / "host.ull", "x", evaluate=False))
    host = read_weights(on_cpu.path / "weights.safetensors")
    name = "layers.1.down"
    rows, columns = 96, 100
    mine = unpack_blocks(device[f"{name}.weight"].view(np.uint8))[:rows, :columns]
    np.testing.assert_array_equal(mine, unpack_tiles(host[f"{name}.weight"].view(np.uint8))[:rows])
    np.testing.assert_array_equal(device[f"{name}.scale"][:rows], host[f"{name}.scale"][:rows])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_both_targets_hold_the_same_values_of_any_checkpoint(
    tmp_path: Path, dtype: str, weights: Any, tied: bool
) -> None:
    """Every tensor, dequantised: what is not FP8 is the checkpoint rounded to bf16, on either target and in a plan."""
    heads = tmp_path / "heads.safetensors"
    save_file(head_tensors(2, 1, own=True, hidden=96, rows=333), heads)
    directory = write_checkpoint(tmp_path / "m", "qwen2", config=DIMENSIONS, dtype=dtype, tied=tied)
    bundles = {}
    for target in ("cpu", "sm_90a"):
        options = {"target": target, "weights": weights, "speculation": SpeculationSettings(medusa=heads)}
        bundles[target] = built(directory, tmp_path / f"{target}.ull", **options)
    host, device = (read_weights(bundle.weights_path) for bundle in bundles.values())
    original = {name: values.astype(np.float32) for name, values in load_file(directory / "model.safetensors").items()}

    def on_cpu(name: str, count: int) -> NDArray[np.float64]:
        rows = unpack_tiles(host[f"{name}.weight"]).astype(np.float64)
        scale = host.get(f"{name}.scale", np.ones(len(rows)))
        return (rows * scale[: len(rows), None])[:count]

    def on_device(name: str, count: int, columns: int, start: int = 0) -> NDArray[np.float64]:
        rows = unpack_blocks(device[f"{name}.weight"]).astype(np.float64)
        return (rows * device[f"{name}.scale"][: len(rows), None])[start : start + count, :columns]

    embedding = original["model.embed_tokens.weight"]
    head = embedding if tied else original["lm_head.weight"]
    for values in (embedding, head):
        assert (round_to_bf16(values) != values).any()
    np.testing.assert_array_equal(device["embed.weight"].astype(np.float32), round_to_bf16(embedding))
    if "embed.weight" in host:
        np.testing.assert_array_equal(host["embed.weight"].view(np.uint16), device["embed.weight"].view(np.uint16))
    np.testing.assert_array_equal(on_cpu("lm_head", 333), round_to_bf16(head))
    np.testing.assert_array_equal(on_device("lm_head", 333, 96), round_to_bf16(head))
    for name, rows, columns in (("qkv", 256, 96), ("o", 96, 128), ("down", 96, 100)):
        linear = f"layers.1.{name}"
        np.testing.assert_array_equal(on_cpu(linear, rows), on_device(linear, rows, columns), err_msg=name)
    gates, ups = (on_device("layers.1.gate_up", 208, 96).reshape(-1, 2, 8, 96)[:, part] for part in range(2))
    tiles = on_cpu("layers.1.gate_up", 256).reshape(-1, 2, 32, 96)
    for mine, theirs in ((gates, tiles[:, 0]), (ups, tiles[:, 1])):
        np.testing.assert_array_equal(mine.reshape(-1, 96)[:100], theirs.reshape(-1, 96)[:100])
    for number in range(2):
        for part, rows in (("0", 96), ("lm_head", 333)):
            start = number * (rows + -rows % 16)
            mine = on_device(f"medusa.{part}", rows, 96, start)
            np.testing.assert_array_equal(mine, on_cpu(f"medusa.{number}.{part}", rows), err_msg=part)
    for name in ("norm", "layers.0.attn_norm", "layers.1.mlp_norm", "layers.0.qkv.bias"):
        mine, theirs = device[name], host[name].astype(np.float32)
        kept = min(len(mine), len(theirs))
        np.testing.assert_array_equal(mine[:kept], theirs[:kept], err_msg=name)
        assert not mine[kept:].any() and not theirs[kept:].any()
    with Checkpoint(directory) as checkpoint:
        plans = SegmentWeights(checkpoint, bundles["sm_90a"].manifest.precision)
        in_plan = plans.linear("lm_head").rows[:333].astype(np.float32)  # f16 without a scale: subnormal at the end
        np.testing.assert_allclose(in_plan, round_to_bf16(head), rtol=0.0, atol=2.0**-25)
        clear = np.abs(head) >= 2.0**-14
        np.testing.assert_array_equal(in_plan[clear], round_to_bf16(head)[clear])
        np.testing.assert_array_equal(plans.norm("norm"), device["norm"][:96])
        bias = plans.linear("layers.0.qkv").bias
        assert bias is not None
        np.testing.assert_array_equal(bias, device["layers.0.qkv.bias"][: len(bias)])


@pytest.mark.parametrize(
    ("options", "prefill", "decode"),
    [
        ([], "fast", "fused"),
        (["--forward", "fused"], "exact", "fused"),
        (["--forward", "tensorrt"], "tensorrt", "tensorrt"),
        (["--prefill", "tensorrt"], "tensorrt", "fused"),
        (["--prefill", "exact"], "exact", "fused"),
    ],
)
def test_the_command_line_says_how_prompts_are_read(
    tmp_path: Path, options: list[str], prefill: str, decode: str
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model = "m"\ntarget = "sm_90a"\n[forward]\nprefill = "fast"\n')
    found = cli._recipe(cli.parser().parse_args([str(recipe), *options])).forward
    assert (found.prefill, found.decode) == (prefill, decode)


@pytest.mark.parametrize(
    ("precision", "instead"),
    [
        (Precision(kv="fp8"), 'kv = "bf16" or precision = "bf16"'),
        (Precision(weights="bf16", kv="fp8", lm_head="fp8"), 'kv = "bf16" or lm_head = "bf16"'),
        (Precision(weights="bf16"), 'precision = "bf16"'),
    ],
)
def test_a_loss_names_what_would_lose_less(tmp_path: Path, precision: Precision, instead: str) -> None:
    pytest.importorskip("ull._native")
    path = write_checkpoint(tmp_path / "model", config=DIMENSIONS)
    limits: dict[str, Any] = {"eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": -0.9}
    with pytest.raises(BuildError, match=f"the limit is -90.00%. Use {instead}, or raise max_perplexity_increase"):
        build(Settings(path, tmp_path / "x.ull", "x", precision=precision, **limits))


def test_tied_embeddings_are_stored_twice(tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "tied", tied=True, config=DIMENSIONS)
    tensors = built(tied, tmp_path / "x.ull").tensors
    assert tensors["embed.weight"].dtype == "BF16" and tensors["lm_head.weight"].dtype == "F16"


def test_the_manifest_says_how_the_kernels_were_compiled(checkpoint: Path, tmp_path: Path) -> None:
    bundle = built(checkpoint, tmp_path / "x.ull", kv="fp8")
    code = bundle.manifest.code
    assert code is not None
    assert set(code.kernels()) == DEVICE_KERNELS | PAGES_KERNELS | CHUNK_KERNELS
    assert code.toolkit == ".".join(map(str, nvrtc.version())) and "--gpu-architecture=sm_90a" in code.options
    assert code.macros["ULL_HIDDEN"] == "96" and code.macros["ULL_KV_BITS"] == "8"
    assert {file.path for file in code.files} == {f"code/{name}.cubin" for name in FILES}
    open_bundle(bundle.path, "hashes")


def test_cpu_manifests_do_not_change(checkpoint: Path, tmp_path: Path) -> None:
    """An older ull must go on to open what it could open."""
    path = build(Settings(checkpoint, tmp_path / "x.ull", "x", evaluate=False)).path
    assert not {"code", "random_weights"} & set(json.loads((path / "manifest.json").read_bytes()))


def test_inspect_shows_the_kernels(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = built(checkpoint, tmp_path / "x.ull")
    assert inspect.main(bundle.path) == 0
    said = capsys.readouterr().out
    assert f"{len(DEVICE_KERNELS | PAGES_KERNELS | CHUNK_KERNELS)} in {len(FILES)} cubins" in said
    assert "chunks of up to 512 tokens" in said


def test_prompts_may_be_read_fast(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that costs is measured; the KV cache of an answer serves no later turn."""
    options = {"eval_tokens": 64, "max_perplexity_increase": 10.0, "evaluate": True}
    exact = built(checkpoint, tmp_path / "exact.ull", **options).manifest
    bundle = built(checkpoint, tmp_path / "fast.ull", forward=ForwardRecipe(prefill="fast"), **options)
    manifest = bundle.manifest
    assert manifest.code is not None and exact.code is not None
    assert manifest.code.macros == {**exact.code.macros, "ULL_FAST_PREFILL": "1"}
    assert (manifest.forward.prefill, manifest.forward.decode, manifest.forward.reuse) == ("fast", "fused", "prompt")
    assert manifest.quality is not None and exact.quality is not None
    fast = manifest.quality.fast_prefill
    assert fast is not None and exact.quality.fast_prefill is None
    assert manifest.quality.perplexity_quantised == exact.quality.perplexity_quantised != fast.perplexity
    assert fast.perplexity_increase == fast.perplexity / manifest.quality.perplexity_original - 1
    assert inspect.main(bundle.path) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("prefill fast, decode fused", "the prompt's, for the next turn", f"perplexity {fast.perplexity:.4f}"):
        assert words in said
    worse = Predictions(np.full(63, 9, np.float32), np.zeros(63, np.int32))
    monkeypatch.setattr(Evaluator, "read_fast", lambda self, text: worse)
    message = r'with fast prefill, perplexity rises .* Use forward\.prefill = "exact", or raise max_perplexity'
    with pytest.raises(BuildError, match=message):
        built(checkpoint, tmp_path / "loss.ull", forward=ForwardRecipe(prefill="fast"), **options)


@pytest.mark.parametrize(
    ("target", "wanted", "made"),
    [
        ("sm_90a", None, "warpgroup"),
        ("sm_90a", "warp", "warp"),
        ("sm_90a", "warpgroup", "warpgroup"),
        ("sm_100a", None, "warp"),
        ("sm_100a", "warp", "warp"),
    ],
)
def test_warpgroups_multiply_for_trees_where_they_can(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Any, wanted: Any, made: str
) -> None:
    bundle = built(checkpoint, tmp_path / "x.ull", target=target, forward=ForwardRecipe(tree_products=wanted))
    assert bundle.manifest.forward.tree_products == made and bundle.manifest.code is not None
    assert bundle.manifest.code.macros["ULL_WARPGROUP_TREES"] == str(int(made == "warpgroup"))
    assert set(bundle.manifest.code.kernels()) & PAGES_KERNELS == (PAGES_KERNELS if made == "warpgroup" else set())
    assert inspect.main(bundle.path) == 0
    assert ("multiplied by warpgroups" in capsys.readouterr().out) == (made == "warpgroup")


def test_a_gpu_without_warpgroup_products_has_no_kernels_of_chunks(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = built(checkpoint, tmp_path / "x.ull", target="sm_100a")
    assert bundle.manifest.code is not None
    assert not set(bundle.manifest.code.kernels()) & CHUNK_KERNELS - {"ull_begin_chunk"}
    assert not device_parts(bundle.manifest)[0].reads_chunks
    assert inspect.main(bundle.path) == 0 and "chunks of up to" not in capsys.readouterr().out


def test_keys_with_a_large_bias_fit_into_fp8_pages(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "qwen2", config=DIMENSIONS)
    tensors = dict(load_file(path / "model.safetensors"))
    bias = tensors["model.layers.0.self_attn.k_proj.bias"].astype(np.float32)
    bias[0] = 700.0
    tensors["model.layers.0.self_attn.k_proj.bias"] = bias.astype(ml_dtypes.bfloat16)
    from safetensors.numpy import save_file

    save_file(tensors, path / "model.safetensors")
    with Checkpoint(path) as opened:
        scales = kv_scales(opened, "layers.0")
        assert scales[0] * 448 >= 1400 and scales[0] == 4.0
        assert (scales[1:] == 1.0).all() and len(scales) == 2 * opened.model.kv_heads
        assert (kv_scales(opened, "layers.1") == 1.0).all()


def test_observed_keys_and_values_fit_twice_into_fp8_pages(checkpoint: Path) -> None:
    with Checkpoint(checkpoint) as opened:
        observed = np.array([0.0, 1e-42, 3.4e38, 223.9, 224.0, 224.1, 1.75, 7.0], np.float32)[
            : 2 * opened.model.kv_heads
        ]
        scales = kv_scales(opened, "layers.0", observed)
        expected = np.array([1.0, 2.0**-126, 2.0**121, 1.0, 1.0, 2.0, 2.0**-7, 2.0**-5], np.float32)[: len(scales)]
        assert scales.tolist() == expected.tolist() and scales.dtype == np.float32


def test_scales_of_fp8_pages_come_from_what_was_observed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pytest.importorskip("ull._native")
    seen: list[dict[str, NDArray[np.float32]]] = []

    def observe(*arguments: Any) -> Any:
        result = real(*arguments)
        seen.append(result[2])
        return result

    real = native.observe
    monkeypatch.setattr(native, "observe", observe)
    options = {"kv": "fp8", "eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0}
    bundle = built(checkpoint, tmp_path / "x.ull", evaluate=True, **options)
    assert bundle.manifest.calibration is None and len(seen) == 1
    weights = read_weights(bundle.weights_path)
    for layer in range(bundle.manifest.model.layers):
        largest = seen[0][f"layers.{layer}.kv"]
        scales = weights[f"layers.{layer}.kv_scale"][: len(largest)]
        assert (np.frexp(scales)[0] == 0.5).all()  # powers of two
        assert (scales * 448 >= 2 * largest).all() and (scales * 224 < 2 * largest).all()
    unseen = built(checkpoint, tmp_path / "y.ull", kv="fp8")
    weights = read_weights(unseen.weights_path)
    assert len(seen) == 1 and (weights["layers.0.kv_scale"][: len(largest)] == 1.0).all()
    wide = built(checkpoint, tmp_path / "z.ull", evaluate=True, **(options | {"kv": "bf16"}))
    assert "layers.0.kv_scale" not in wide.tensors  # bf16 pages need none


def test_a_calibrated_bundle_for_a_gpu(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("ull._native")
    options = {"eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0, "calibrate": True}
    bundle = built(checkpoint, tmp_path / "x.ull", evaluate=True, **options)
    host = build(Settings(checkpoint, tmp_path / "host.ull", "x", **options)).manifest.calibration
    assert host is not None and bundle.manifest.calibration == host


def test_the_quality_is_measured_by_the_cpu(tmp_path: Path) -> None:
    """Of the weights, and of the pages, that the engine has: the same engine for the CPU has the same figures."""
    pytest.importorskip("ull._native")
    path = write_checkpoint(tmp_path / "model", config=DIMENSIONS)
    options = {"eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0}
    measured = []
    for kv in ("bf16", "fp8"):
        on_device = built(path, tmp_path / f"{kv}.ull", evaluate=True, kv=kv, **options)
        settings = Settings(path, tmp_path / f"host-{kv}.ull", "x", precision=Precision(kv=kv), **options)
        host = open_bundle(build(settings).path)
        quality = on_device.manifest.quality
        assert quality is not None and host.manifest.quality is not None
        assert quality.perplexity_quantised == host.manifest.quality.perplexity_quantised
        assert {item.name for item in quality.tensors} >= {"layers.0.qkv.weight", "lm_head.weight"}
        assert ("layers.0.kv_scale" in host.tensors) == (kv == "fp8")
        measured.append(quality.perplexity_quantised)
    assert measured[0] != measured[1]
    scales = [read_weights(bundle.weights_path)["layers.1.kv_scale"][:4] for bundle in (on_device, host)]
    assert scales[0].tolist() == scales[1].tolist() and len(set(scales[0].tolist())) > 1
    assert sorted(file.name for file in on_device.path.iterdir()) == [
        "code",
        "manifest.json",
        "manifest.sha256",
        "tokenizer",
        "vocab.bin",
        "weights.safetensors",
    ]


# Bad input


def edit(bundle: Path, *path: str, value: Any) -> None:
    """Changes one field of the manifest."""
    manifest = read_manifest_json(bundle)
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write_manifest_json(bundle, manifest)


@pytest.fixture(scope="module")
def pristine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        output = tmp_path_factory.mktemp("pristine") / "x.ull"
        options = {"target": "sm_90a", "evaluate": False}
        return build_with_stubs(patch, sources, Settings(checkpoint, output, "x", **options))


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "x.ull"))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("target",), "cpu", "takes no `code`"),
        (("target",), "sm_80", "target"),
        (("code",), None, "needs `code`"),
        (("code", "toolkit"), "new", "toolkit"),
        (("code", "files"), [], "files"),
        (("code", "files"), [{"path": "code/x.cubin", "kernels": ["ull_x"]}], "lacks 'code/x.cubin'"),
        (("code", "files"), [{"path": "vocab.bin", "kernels": ["ull_x"]}], "does not lie in code/"),
        (("code", "files"), [{"path": "code/first.cubin", "kernels": ["rm -rf"]}], "kernels"),
        (
            ("code", "files"),
            [{"path": "code/first.cubin", "kernels": ["ull_accept"]}],
            "lacks the kernel 'ull_attention",
        ),
        (("code", "macros", "ULL_HIDDEN"), "128", "compiled with ULL_HIDDEN = 128 where 96 is needed"),
        (
            ("code", "macros", "ULL_INTERFACE"),
            "1",
            f"compiled with ULL_INTERFACE = 1 where {DEVICE_INTERFACE} is needed; rebuild it",
        ),
        (("model", "head_dim"), 48, "head_dim 48 is not supported on a GPU; supported: multiples of 32"),
        (("model", "hidden"), 90, "hidden size 90"),
        (("precision", "kv"), "f32", "f32 KV cache"),
        (("precision", "weights"), "f32", "f32 weights"),
        (("precision", "weights"), "bf16", "compiled with ULL_WEIGHT_BITS"),
        (("forward",), {"prefill": "fast"}, "compiled with ULL_WARPGROUP_TREES = 1 where 0 is needed"),
        (("forward", "prefill"), "fast", "compiled with ULL_FAST_PREFILL = 0 where 1 is needed"),
        (("forward", "tree_products"), "block", "tree_products"),
        (("forward", "decode"), "tensorrt", "products of warpgroups are for our own kernels alone"),
        (("forward",), {"prefill": "fast", "decode": "tensorrt"}, "fast prefill goes with decode by our own kernels"),
        (("speculation",), {"medusa": {"heads": 1, "layers": 1, "version": "2"}}, "lacks the kernel 'ull_medusa"),
        (("speculation",), {"medusa": {"heads": 9, "layers": 1, "version": "2"}}, "at most 8 Medusa heads, not 9"),
    ],
)
def test_damaged_manifests_are_refused(bundle: Path, path: tuple[str, ...], value: Any, words: str) -> None:
    edit(bundle, *path, value=value)
    with pytest.raises(BundleError, match=words.replace("(", r"\(")):
        open_bundle(bundle)


def test_what_is_not_a_cubin_is_refused(bundle: Path) -> None:
    path = bundle / "code/first.cubin"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(BundleError, match="is not a cubin"):
        open_bundle(bundle)
    path.unlink()
    with pytest.raises(BundleError, match=r"first\.cubin is missing"):
        open_bundle(bundle)


def test_a_cpu_weights_file_is_refused(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    host = build(Settings(checkpoint, tmp_path / "host.ull", "x", evaluate=False)).path / "weights.safetensors"
    shutil.copyfile(host, bundle / "weights.safetensors")
    edit(bundle, "files", "weights.safetensors", "bytes", value=host.stat().st_size)
    with pytest.raises(BundleError, match=r"the manifest asks for|lacks tensor"):
        open_bundle(bundle)


LOVELACE = {  # a GPU on which our kernels of the layers do not run
    "target": "sm_89",
    "forward": {"prefill": "tensorrt", "decode": "tensorrt", "attention": "native"},
}


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        (LOVELACE | {"draft": {"model": "m"}}, "draft", "does not run on target sm_89, so .* with --drafter suffix"),
        (
            LOVELACE | {"draft": {"model": "m"}, "drafter": "draft"},
            "draft",
            "a draft model does not run on target sm_89",
        ),
        ({"medusa": {"heads": "m"}, "forward": {"decode": "tensorrt"}}, "medusa", "ull's own decode"),
        ({"kv": "f32"}, "kv", 'keeps "bf16" or "fp8"'),
        ({"target": "sm_100"}, "target", '"sm_90a" \\(an H100, H200 or GH200\\)'),
        ({"target": "sm_75"}, "target", '"sm_100a" \\(a B200 or GB200\\)'),
        ({"precision": "f32"}, "precision", 'use one of "fp8", "bf16"'),
        ({"target": "cpu", "forward": {"decode": "tensorrt"}}, "forward", "needs a GPU: --target sm_90a"),
        (
            {"forward": {"prefill": "tensorrt", "attention": "native"}},
            "forward.attention",
            "both phases must be tensorrt",
        ),
        (
            {"forward": {"prefill": "tensorrt", "decode": "tensorrt", "attention": "native"}, "kv": "fp8"},
            "kv",
            'keeps its KV cache in "bf16"',
        ),
        ({"target": "cpu", "evaluate_on": "gpu"}, "evaluate_on", 'evaluate_on "gpu" is for GPU targets'),
        ({"kv": "fp8", "evaluate_on": "gpu"}, "evaluate_on", "FP8 pages are calibrated on the cpu"),
        ({"forward": {"decode": "tensorrt"}, "evaluate_on": "gpu"}, "evaluate_on", "FP8 activations are calibrated"),
        (
            {"target": "cpu", "forward": {"prefill": "fast"}},
            "forward.prefill",
            "products that cpu has not; supported: target sm_90a, or prefill exact",
        ),
        ({"target": "sm_100a", "forward": {"prefill": "fast"}}, "forward.prefill", "products that sm_100a has not"),
        ({"precision": "bf16", "forward": {"prefill": "fast"}}, "forward.prefill", "these are bf16; .* precision fp8"),
        (
            {"forward": {"prefill": "fast", "decode": "tensorrt"}},
            "forward.prefill",
            "ull's own kernels; supported: forward.decode fused",
        ),
        (
            {"forward": {"prefill": "faster"}},
            "forward.prefill",
            'value .faster. - at `forward.prefill`; use one of "exact", "fast", "tensorrt"',
        ),
        ({"forward": {"decode": "fast"}}, "forward.decode", "Invalid enum value 'fast'"),
        (
            {"target": "sm_100a", "forward": {"tree_products": "warpgroup"}},
            "forward.tree_products",
            "sm_100a has no products of warpgroups; supported: target sm_90a, or tree_products warp",
        ),
        (
            {"target": "cpu", "forward": {"tree_products": "warpgroup"}},
            "forward.tree_products",
            "cpu has no products of warpgroups",
        ),
        (
            {"forward": {"decode": "tensorrt", "tree_products": "warpgroup"}},
            "forward.tree_products",
            "ull's own kernels alone; supported: forward fused",
        ),
        ({"forward": {"tree_products": "block"}}, "forward.tree_products", 'block. .*; use one of "warp", "warpgroup"'),
        ({"forward": {"decode": "onnx"}}, "forward.decode", "Invalid enum value 'onnx'"),
        ({"forward": {"decoding": "fused"}}, "forward.decoding", "did you mean `forward.decode`"),
    ],
)
def test_recipes_that_a_gpu_cannot_do(values: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        make_recipe({"model": "m", "name": "n", "target": "sm_90a", **values}, "recipe")
    assert caught.value.field == field


def test_what_a_gpu_cannot_draft_with_may_be_left_out() -> None:
    def speculation(**values: Any) -> SpeculationSettings:
        recipe = {"model": "m", "name": "n", "target": "sm_90a", "medusa": {"heads": "h"}, "draft": {"model": "d"}}
        return settings_from_recipe(make_recipe(recipe | values, "recipe")).speculation

    assert speculation(drafter="medusa").medusa == Path("h") and speculation(drafter="medusa").draft == Path("d")
    without = speculation(drafter="suffix", forward={"decode": "tensorrt"})
    assert without.medusa is None and without.draft == Path("d") and without.default == "suffix"
    assert speculation(drafter="none", **LOVELACE).draft is None


def test_models_that_the_kernels_cannot_do(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    with pytest.raises(RecipeError, match="head_dim 12 is not supported on a GPU; supported: multiples of 32"):
        built(path, tmp_path / "x.ull")
    assert not (tmp_path / "x.ull").exists()


def test_without_a_compiler_the_remedy_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc._library.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(BuildError, match=r"pip install ull\[gpu\]"):
        built(checkpoint, tmp_path / "x.ull")
    nvrtc._library.cache_clear()


def test_a_kernel_that_is_missing_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = write_stubs(tmp_path / "kernels", DEVICE_KERNELS - {"ull_down_16"} | PAGES_KERNELS | CHUNK_KERNELS)
    monkeypatch.setattr(kernels, "SOURCES", sources)
    with pytest.raises(BuildError, match="lack ull_down_16"):
        built(checkpoint, tmp_path / "x.ull")


# Benchmark bundles


@pytest.mark.parametrize(
    ("arch", "billions"), [("llama-3.2-1b", 1.24), ("llama-3.1-8b", 8.03), ("llama-3.3-70b", 70.55)]
)
def test_shapes_have_as_many_parameters_as_the_models(arch: str, billions: float) -> None:
    assert parameter_count(shape_model(arch)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_benchmark_bundle_has_a_shape_and_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.ull"
    arguments = ["--arch", "qwen3-8b", "--random-weights", str(output), "--layers", "2", "--context", "4096", "--quiet"]
    assert cli.main(arguments) == 0
    bundle = open_bundle(output, "hashes")
    assert bundle.manifest.random_weights and bundle.manifest.model.layers == 2
    assert bundle.manifest.model.context == 4096 and bundle.manifest.target == "sm_90a"
    assert not bundle.weights_path.exists()
    assert bundle.tensors["layers.1.down.weight"].shape == (256, 384, 32, 16)
    assert bundle.tensors["layers.1.q_norm"].shape == (128,)
    assert bundle.weight_bytes > 2 * 151936 * 4096 * 2
    assert inspect.main(output) == 0
    assert "random, made up on the device" in capsys.readouterr().out


def test_the_tokenizer_of_a_benchmark_bundle_keeps_text(tmp_path: Path) -> None:
    from ull.text.tokenizer import Tokenizer

    settings = RandomSettings("llama-3.2-1b", tmp_path / "x.ull", layers=1)
    bundle = open_bundle(build_random(settings).path)
    ids = Tokenizer(bundle.tokenizer_directory).encode("naïve\n")
    assert len(ids) == len("naïve\n".encode()) and max(ids) < 256


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--arch", "llama-3.1-8b", "x.ull"], 2, "say --random-weights too"),
        (["--arch", "llama-3.1-8b", "--random-weights"], 2, "needs the bundle to write"),
        (["--arch", "gpt-2", "--random-weights", "x.ull"], 2, "invalid choice"),
        (["--arch", "qwen3-8b", "--random-weights", "x.ull", "--layers", "37"], 2, "--layers 37 is out of range"),
        (["--arch", "qwen3-8b", "--random-weights", "x.ull", "--context", "0"], 2, "--context 0 is out of range"),
        (["--arch", "qwen3-8b", "--random-weights", "x.ull", "--target", "cpu"], 2, "use --target sm_90a"),
        (["--arch", "qwen3-8b", "--random-weights", "x.ull", "--target", "tpu"], 2, 'target "tpu" is unknown'),
        (["--random-weights", "recipe.toml"], 2, "go with --arch"),
        (["--heads", "3", "recipe.toml"], 2, "go with --arch"),
    ],
)
def test_wrong_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = cli.main(arguments)
    except SystemExit as exit_:
        found = exit_.code  # type: ignore[assignment]
    assert found == status and words in capsys.readouterr().err
    assert not (tmp_path / "x.ull").exists() and set(SHAPES) >= {"llama-3.1-8b", "llama-3.3-70b"}


def test_our_kernels_of_the_layers_do_not_run_everywhere(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="do not run on sm_89; supported: --forward tensorrt --attention native"):
        built(checkpoint, tmp_path / "x.ull", target="sm_89")


def test_only_a_bf16_checkpoint_is_held_as_it_is_by_the_gpu(tmp_path: Path) -> None:
    from ull_build.quality.on_gpu import require_bf16
    from ull_build.source.checkpoint import Checkpoint

    for dtype in ("bf16", "fp32"):
        with Checkpoint(write_checkpoint(tmp_path / dtype, dtype=dtype)) as opened:
            if dtype == "bf16":
                require_bf16(opened)
                continue
            with pytest.raises(BuildError, match="measure with evaluate_on cpu"):
                require_bf16(opened)
