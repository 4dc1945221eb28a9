"""The networks of TensorRT engines, recorded by the double and run in NumPy, against transformers and a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorrt_rig
from oracle.cases import ROOT, Case
from tensorrt_subjects import BF16, FITTING, FP8, FP8_HEAD, MODELS, mean_error, relative_error, subject, trt
from ull.bundle import Precision, device_problems, segment_names
from ull.errors import BuildError
from ull_build.source.checkpoint import Checkpoint
from ull_build.tensorrt.weights import BF16 as BF16_TYPE
from ull_build.tensorrt.weights import F16 as F16_TYPE
from ull_build.tensorrt.weights import F32 as F32_TYPE
from ull_build.tensorrt.weights import SegmentWeights, activation_scale
from ull_build.weights.quantise import quantise_rows


def inputs_of(model: Any, segment: str, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of a segment for 64 tokens, cut to `tokens`; attention's other rows are not numbers."""
    random = np.random.default_rng(seed)
    residual = random.standard_normal((64, model.hidden)).astype(np.float32)
    attention = random.standard_normal((64, model.heads * model.head_dim)).astype(np.float32)
    inputs = {"residual": residual[:tokens]}
    if segment not in ("entry", "head"):
        inputs["attention"] = tensorrt_rig.in_attention_layout(attention[:tokens])
    return inputs


def test_the_fixtures_cover_what_the_networks_can() -> None:
    models = [MODELS[case.name] for case in FITTING]
    assert {model.architecture for model in models} == {"llama", "mistral", "qwen2", "qwen3"}
    assert {model.qk_norm for model in models} == {model.tied_embeddings for model in models} == {True, False}
    assert {1, 2, 3} == {model.layers for model in models}
    assert any(subject(case.name).case.config.get("mlp_bias") for case in FITTING)


@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
def test_bf16_agrees_with_transformers(case: Case) -> None:
    """Within the error of bf16 products: measured 0.3 to 2 percent of the logits' root mean square."""
    it = subject(case.name)
    logits = tensorrt_rig.forward(it.checkpoint, it.networks(BF16), it.tokens, 64)
    found, expected = logits[it.expected["positions"]], it.expected["logits"]
    assert mean_error(found, expected) < 0.03
    assert relative_error(found, expected) < 0.05
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.9


@pytest.mark.parametrize("precision", [BF16, FP8, FP8_HEAD], ids=["bf16", "fp8", "fp8-head"])
@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
def test_networks_agree_with_the_reference(case: Case, precision: Precision) -> None:
    """To the last bit of a product almost everywhere; a sum that falls between two codes may round either way."""
    it = subject(case.name)
    tokens = it.tokens[:128]
    amax = None if precision == BF16 else it.amax
    reference = tensorrt_rig.Reference(it.checkpoint, amax, precision.lm_head == "fp8")
    expected = tensorrt_rig.forward(it.checkpoint, reference, tokens, 64)
    logits = tensorrt_rig.forward(it.checkpoint, it.networks(precision), tokens, 64)
    assert mean_error(logits, expected) < 0.01
    assert relative_error(logits, expected) < 0.05


@pytest.mark.parametrize("name", ["llama-bias", "qwen3", "qwen2-window"])
@pytest.mark.parametrize("precision", [BF16, FP8_HEAD], ids=["bf16", "fp8"])
def test_rows_do_not_depend_on_the_number_of_tokens(name: str, precision: Precision) -> None:
    """Each segment for 1 and 8 tokens against its first rows for 64, with rubbish in attention's other rows."""
    it = subject(name)
    networks = it.networks(precision)
    for segment in segment_names(it.checkpoint.model.layers, "paged"):
        whole = networks(segment, inputs_of(it.checkpoint.model, segment, 64))
        for tokens in (1, 8):
            part = networks(segment, inputs_of(it.checkpoint.model, segment, tokens))
            for output, rows in part.items():
                assert rows.shape == (tokens, *whole[output].shape[1:])
                assert np.isfinite(rows).all()
                np.testing.assert_allclose(rows, whole[output][:tokens], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("step", [1, 8])
def test_steps_of_a_few_tokens_agree_with_transformers(step: int) -> None:
    it = subject("qwen3-window-bias")
    tokens = it.tokens[: it.expected["positions"][0] + 40]
    logits = tensorrt_rig.forward(it.checkpoint, it.networks(BF16), tokens, step)
    shown = it.expected["positions"] < len(tokens)
    assert shown.sum() >= 2
    assert mean_error(logits[it.expected["positions"][shown]], it.expected["logits"][shown]) < 0.03


def test_segments_and_their_tensors_are_as_the_runtime_expects() -> None:
    it = subject("qwen2-window")  # three layers
    model = it.checkpoint.model
    assert segment_names(model.layers, "paged") == ["entry", "layer.0", "layer.1", "exit", "head"]
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    residual, attention = ("residual", "FLOAT", (-1, 32)), ("attention", "HALF", (1, 64, 32))
    expected = {
        "entry": ([residual], [("qkv", "FLOAT", (-1, qkv))]),
        "layer.0": ([residual, attention], [("residual_out", "FLOAT", (-1, 32)), ("qkv", "FLOAT", (-1, qkv))]),
        "exit": ([residual, attention], [("residual_out", "FLOAT", (-1, 32))]),
        "head": ([residual], [("logits", "FLOAT", (-1, 288))]),
    }
    for segment, (inputs, outputs) in expected.items():
        network = it.networks(FP8).graphs[segment].network
        found = [network.get_input(index) for index in range(network.num_inputs)]
        assert [(tensor.name, tensor.dtype.name, tuple(tensor.shape)) for tensor in found] == inputs
        found = [network.get_output(index) for index in range(network.num_outputs)]
        assert [(tensor.name, tensor.dtype.name, tuple(tensor.shape)) for tensor in found] == outputs


def test_layers_are_named_by_what_they_belong_to() -> None:
    network = subject("llama-bias").networks(FP8).graphs["layer.0"].network
    names = [network.get_layer(index).name for index in range(network.num_layers)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("layers.0.", "layers.1.")) for name in names)
    assert {"layers.0.o.matmul", "layers.0.gate_up.quantize", "layers.1.qkv.matmul", "layers.0.down.bias"} <= set(names)


def test_padding_rows_of_the_head_are_zero() -> None:
    it = subject("llama-bias")  # 284 tokens
    for precision in (BF16, FP8_HEAD):
        logits = it.networks(precision)("head", inputs_of(it.checkpoint.model, "head", 8))["logits"]
        assert logits.shape == (8, 288)
        assert (logits[:, 284:] == 0).all() and (logits[:, :284] != 0).mean() > 0.99


def test_a_missing_activation_scale_is_named() -> None:
    it = subject("qwen3")
    with pytest.raises(BuildError, match=r"no activation scale for layers\.0\.gate_up"):
        it.networks(FP8, {name: amax for name, amax in it.amax.items() if name != "layers.0.gate_up"})


def test_models_that_the_attention_kernel_cannot_run_are_refused_as_ever() -> None:
    def problems(model: str) -> str:
        return "; ".join(device_problems("sm_90a", MODELS[model], FP8, "paged"))

    assert "head_dim 20" in problems("llama-head-dim-20") and not problems("llama-rope-llama3")


def test_linears_are_fused_in_the_checkpoint_s_own_row_order() -> None:
    """engines/tiny: its matrices are read in several blocks."""
    with Checkpoint(ROOT / "engines/tiny") as checkpoint:
        whole = {name: np.concatenate(list(checkpoint.blocks(name))) for name in checkpoint.tensors if "proj" in name}
        assert any(len(list(checkpoint.blocks(name))) > 1 for name in checkpoint.tensors)
        prefix = "model.layers.2"
        sources = {
            "qkv": [whole[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"],
            "gate_up": [whole[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")],
            "down": [whole[f"{prefix}.mlp.down_proj.weight"]],
        }
        for short, parts in sources.items():
            expected = np.concatenate(parts)
            exact = SegmentWeights(checkpoint, BF16).linear(f"layers.2.{short}")
            assert exact.scales is None and exact.bias is None and exact.compute == BF16_TYPE
            np.testing.assert_array_equal(exact.rows.astype(np.float32), expected)
            coded = SegmentWeights(checkpoint, FP8).linear(f"layers.2.{short}")
            assert coded.scales is not None
            stored = coded.rows.astype(np.float32) * coded.scales[:, None]
            np.testing.assert_allclose(stored, expected, rtol=1 / 16, atol=1e-4)
        head = SegmentWeights(checkpoint, BF16).linear("lm_head")
        embedding = np.concatenate(list(checkpoint.blocks("model.embed_tokens.weight")))
        np.testing.assert_array_equal(head.rows, embedding.astype(np.float16))


@pytest.mark.parametrize("compute", [BF16_TYPE, F16_TYPE, F32_TYPE], ids=["bf16", "f16", "f32"])
def test_scales_of_activations_are_rounded_up(compute: np.dtype[Any]) -> None:
    assert activation_scale(448.0, compute) == 1.0
    assert activation_scale(3.0, compute).shape == ()
    assert activation_scale(0.0, compute) == 1.0
    for amax in (0.7, 3.0, 1000.1):
        scale, exact = float(activation_scale(amax, compute)), float(np.float32(amax) / np.float32(448))
        assert exact <= scale <= exact * (1 + 2.0**-7)
        assert compute != F32_TYPE or scale == exact


def test_codes_and_scales_are_those_of_our_own_kernels() -> None:
    """Not rounded to any 16-bit type: the weights of a bundle are one set, whoever multiplies with them."""
    it = subject("llama-bias")
    linear = SegmentWeights(it.checkpoint, FP8).linear("layers.0.o")
    codes, scales = quantise_rows(np.concatenate(list(it.checkpoint.blocks("model.layers.0.self_attn.o_proj.weight"))))
    assert linear.scales is not None and linear.scales.dtype == np.float32
    np.testing.assert_array_equal(linear.scales, scales)
    np.testing.assert_array_equal(linear.rows.view(np.uint8), codes)


def layers_by_name(network: Any) -> dict[str, Any]:
    return {layer.name: layer for layer in (network.get_layer(index) for index in range(network.num_layers))}


def test_both_operands_of_an_fp8_product_have_a_scalar_scale() -> None:
    """TensorRT fuses no other; the rows' scales come behind the product, in float32."""
    graphs = subject("llama-bias").networks(FP8_HEAD).graphs
    for segment, name in (("entry", "layers.0.qkv"), ("layer.0", "layers.0.down"), ("head", "lm_head")):
        layers = layers_by_name(graphs[segment].network)
        product = layers[f"{name}.matmul"]
        for place, kind in enumerate(("input", "weight")):
            dequantize = layers[f"{name}.{kind}_dequantize"]
            assert product.get_input(place).name == dequantize.get_output(0).name
            assert tuple(dequantize.get_input(1).shape) == ()
        scaled = layers[f"{name}.scaled"]
        assert [scaled.get_input(place).dtype for place in range(2)] == [trt.float32, trt.float32]
        assert layers[f"{name}.row_scales"].get_output(0).name == scaled.get_input(1).name


@pytest.mark.parametrize("precision", [BF16, FP8_HEAD], ids=["bf16", "fp8"])
def test_logits_are_summed_in_float32(precision: Precision) -> None:
    """Operands of a product that TensorRT may not sum in f16."""
    layers = layers_by_name(subject("llama-bias").networks(precision).graphs["head"].network)
    product = layers["lm_head.matmul"]
    assert {product.get_input(place).dtype for place in range(2)} == {trt.float32}
    assert product.get_output(0).dtype == trt.float32
    stored = layers["lm_head.weight"].get_output(0).dtype
    assert stored == (trt.float16 if precision == BF16 else trt.fp8)


@pytest.mark.parametrize("name", ["layers.0.down", "lm_head"])
def test_a_linear_in_16_bits_keeps_its_weights(name: str) -> None:
    linear = SegmentWeights(subject("llama-bias").checkpoint, FP8_HEAD).linear(name)
    wide = linear.in_16_bits(name)
    assert not wide.is_fp8 and wide.compute == (F16_TYPE if name == "lm_head" else BF16_TYPE)
    assert wide.scales is linear.scales and wide.bias is linear.bias
    np.testing.assert_array_equal(wide.rows.astype(np.float32), linear.rows.astype(np.float32))
