"""EAGLE-3, DFlash and DSpark heads in the build step: every published form, every one that must be refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from checkpoints import write_checkpoint
from head_checkpoints import (
    BLOCK,
    HIDDEN,
    MASK,
    OWN,
    ROWS,
    Tensors,
    dflash_tensors,
    eagle_tensors,
    write_dflash,
    write_eagle,
)
from manifests import change_manifest
from ull.bundle import Bundle, DflashHead, EagleHead, Precision, open_bundle
from ull.commands import inspect
from ull.errors import BuildError, BundleError, CheckpointError, RecipeError
from ull_build.build import build
from ull_build.cli import main as ull_build
from ull_build.recipe import load_recipe, make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.source.drafters import SpeculationSettings
from ull_build.source.heads.head import HeadOptions
from ull_build.weights.pack_cpu import unpack_tiles

BF16 = 2.0**-8  # relative error of a rounded value, at most


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


def built(target: Path, output: Path, **speculation: Any) -> Bundle:
    settings = Settings(
        target,
        output,
        "test",
        evaluate=False,
        precision=Precision(weights="bf16"),
        speculation=SpeculationSettings(**speculation),
    )
    return open_bundle(build(settings).path)


def eagle_of(bundle: Bundle) -> EagleHead:
    assert bundle.manifest.speculation is not None and bundle.manifest.speculation.eagle is not None
    return bundle.manifest.speculation.eagle


def dflash_of(bundle: Bundle) -> DflashHead:
    assert bundle.manifest.speculation is not None and bundle.manifest.speculation.dflash is not None
    return bundle.manifest.speculation.dflash


def raw(bundle: Bundle, name: str) -> bytes:
    entry = bundle.tensors[name]
    with bundle.weights_path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.nbytes)


def bf16(bundle: Bundle, name: str) -> NDArray[np.float32]:
    bits = np.frombuffer(raw(bundle, name), "<u2").reshape(bundle.tensors[name].shape)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rows(bundle: Bundle, name: str, count: int) -> NDArray[np.float32]:
    """The first rows of a linear that is stored in tiles."""
    return (
        unpack_tiles(
            np.frombuffer(raw(bundle, f"{name}.weight"), "<u2").reshape(bundle.tensors[f"{name}.weight"].shape)
        )[:count]
        .astype(np.uint32)
        .__lshift__(np.uint32(16))
        .view(np.float32)
    )


def weights(bundle: Bundle, prefix: str) -> dict[str, bytes]:
    return {name: raw(bundle, name) for name in bundle.tensors if name.startswith(prefix)}


# Forms


def test_an_eagle_head_is_the_same_in_every_form(target: Path, tmp_path: Path) -> None:
    original = built(target, tmp_path / "a.ull", eagle=write_eagle(tmp_path / "a"))
    for form in ("prefixed", "torch", "speculators"):
        other = built(target, tmp_path / f"{form}.ull", eagle=write_eagle(tmp_path / form, form))
        assert eagle_of(other) == eagle_of(original)
        assert weights(other, "eagle.") == weights(original, "eagle.")


@pytest.mark.parametrize("small", [{}, {"markov": 8, "gated": True, "confidence": True}], ids=["dflash", "dspark"])
def test_a_dflash_head_is_the_same_in_every_form(target: Path, tmp_path: Path, small: dict[str, Any]) -> None:
    original = built(target, tmp_path / "a.ull", dflash=write_dflash(tmp_path / "a", **small))
    for form in ("deepseek", "speculators"):
        anchor = {} if small or form == "speculators" else {"sample_from_anchor": False}
        head = write_dflash(tmp_path / form, form, config=anchor, **small)
        other = built(target, tmp_path / f"{form}.ull", dflash=head)
        assert dflash_of(other) == dflash_of(original)
        assert weights(other, "dflash.") == weights(original, "dflash.")


def test_what_a_bundle_holds_of_an_eagle_head(target: Path, tmp_path: Path) -> None:
    bundle = built(target, tmp_path / "x.ull", eagle=write_eagle(tmp_path / "head", norms="each"))
    tensors = eagle_tensors(norms="each")
    head = eagle_of(bundle)
    assert (head.taps, head.tap_norm, head.mapped, head.own_embedding) == ([0, 1, 2], "each", True, False)
    assert (head.model.vocabulary, head.model.layers, head.model.context) == (OWN, 1, bundle.manifest.model.context)
    assert np.allclose(rows(bundle, "eagle.fc", HIDDEN), tensors["fc.weight"], rtol=BF16)
    qkv = np.concatenate([tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert np.allclose(rows(bundle, "eagle.layers.0.qkv", len(qkv)), qkv, rtol=BF16)
    assert np.allclose(rows(bundle, "eagle.lm_head", OWN), tensors["lm_head.weight"], rtol=BF16)
    for name, source in (("hidden_norm", "hidden_norm"), ("attn_norm", "input_layernorm")):
        stored = bf16(bundle, f"eagle.layers.0.{name}")[:HIDDEN]
        assert np.allclose(stored, tensors[f"midlayer.{source}.weight"], rtol=BF16)
    assert np.allclose(bf16(bundle, "eagle.tap_norm.2")[:HIDDEN], tensors["fc_norm.2.weight"], rtol=BF16)
    known = np.frombuffer(raw(bundle, "eagle.d2t"), "<i4")[:OWN]
    assert np.array_equal(known, np.flatnonzero(tensors["t2d"]))
    assert bundle.manifest.provenance.drafters["eagle"].files.keys() == {"config.json", "model.safetensors"}


def test_what_a_bundle_holds_of_a_dspark_head(target: Path, tmp_path: Path) -> None:
    head = write_dflash(tmp_path / "head", markov=8, confidence=True)
    bundle = built(target, tmp_path / "x.ull", dflash=head)
    tensors = dflash_tensors(markov=8, confidence=True)
    about = dflash_of(bundle)
    assert (about.taps, about.block, about.mask_token) == ([1, 2], BLOCK, MASK)
    assert (about.markov, about.markov_kind, about.anchor_predicts) == (8, "plain", True)
    assert about.confidence and about.confidence_reads_markov
    for name, source in (("embed", "markov_w1"), ("head", "markov_w2")):
        assert np.allclose(bf16(bundle, f"dflash.markov.{name}"), tensors[f"markov_head.{source}.weight"], rtol=BF16)
    confidence = np.frombuffer(raw(bundle, "dflash.confidence.weight"), "<f4")
    assert np.array_equal(confidence[: HIDDEN + 8], tensors["confidence_head.proj.weight"][0])
    assert np.frombuffer(raw(bundle, "dflash.confidence.bias"), "<f4")[0] == np.float32(0.25)
    down = rows(bundle, "dflash.layers.1.down", HIDDEN)
    assert np.allclose(down, tensors["layers.1.mlp.down_proj.weight"], rtol=BF16)


def test_copies_of_the_targets_embedding_and_lm_head_are_left_out(tmp_path: Path) -> None:
    shared: Tensors = {}
    target = write_checkpoint(tmp_path / "model", tensors=shared.update)

    def with_copies(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = shared["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = shared["lm_head.weight"]

    def with_own(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = shared["model.embed_tokens.weight"] + np.float32(1.0)
        tensors["lm_head.weight"] = shared["lm_head.weight"][::-1].copy()

    for name, change in (("copies", with_copies), ("own", with_own)):
        bundle = built(target, tmp_path / f"{name}.ull", dflash=write_dflash(tmp_path / name, tensors=change))
        head = dflash_of(bundle)
        assert head.own_embedding == head.own_lm_head == (name == "own") and not head.mapped
        for tensor in ("lm_head", "embed"):
            assert (f"dflash.{tensor}.weight" in bundle.tensors) == (name == "own")
    own = shared["model.embed_tokens.weight"] + np.float32(1.0)
    assert np.allclose(bf16(bundle, "dflash.embed.weight"), own, rtol=BF16)


# What config.json leaves open


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8 layers."""
    config = {"num_hidden_layers": 8, "rope_theta": 500000.0}
    return write_checkpoint(tmp_path_factory.mktemp("deep") / "model", config=config)


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": ...}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": None}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1, 8]}, [3, 1, 8]),
        (
            {
                "eagle_aux_hidden_state_layer_ids": ...,
                "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
            },
            [2, 4, 8],
        ),
    ],
)
def test_layers_that_an_eagle_head_reads(deep: Path, tmp_path: Path, config: dict[str, Any], taps: list[int]) -> None:
    bundle = built(deep, tmp_path / "x.ull", eagle=write_eagle(tmp_path / "head", config=config))
    assert eagle_of(bundle).taps == taps


def test_layers_that_a_dflash_head_reads(deep: Path, tmp_path: Path) -> None:
    head = write_dflash(tmp_path / "head", taps=[2, 6], inner={"target_layer_ids": ...})
    assert dflash_of(built(deep, tmp_path / "x.ull", dflash=head)).taps == [2, 6]  # spread over 1 .. 5, and one more
    options = HeadOptions(taps=(4, 7), theta=2.5e5, anchor_predicts=True)
    chosen = dflash_of(built(deep, tmp_path / "y.ull", dflash=head, dflash_options=options))
    assert (chosen.taps, chosen.model.rope.theta, chosen.anchor_predicts) == ([4, 7], 2.5e5, True)


@pytest.mark.parametrize(
    ("form", "config", "markov", "predicts"),
    [
        ("z-lab", {}, 0, False),
        ("z-lab", {}, 8, True),
        ("z-lab", {"sample_from_anchor": False}, 8, False),
        ("z-lab", {"dspark_bonus_anchor": True}, 8, False),
        ("speculators", {}, 0, False),
        ("speculators", {"sample_from_anchor": True}, 0, True),
        ("speculators", {}, 8, True),
        ("speculators", {"sample_from_anchor": False}, 8, False),
        ("deepseek", {}, 0, True),
    ],
)
def test_whether_the_first_position_predicts(
    target: Path, tmp_path: Path, form: Any, config: dict[str, Any], markov: int, predicts: bool
) -> None:
    head = write_dflash(tmp_path / "head", form, markov=markov, config=config)
    assert dflash_of(built(target, tmp_path / "x.ull", dflash=head)).anchor_predicts == predicts


def test_a_head_that_names_no_theta_has_its_own(deep: Path, tmp_path: Path) -> None:
    silent = write_eagle(tmp_path / "silent")
    assert eagle_of(built(deep, tmp_path / "a.ull", eagle=silent)).model.rope.theta == 10000.0
    options = HeadOptions(theta=500000.0)
    assert eagle_of(built(deep, tmp_path / "b.ull", eagle=silent, eagle_options=options)).model.rope.theta == 500000.0
    said = write_eagle(tmp_path / "said", config={"rope_theta": 7e5})
    assert eagle_of(built(deep, tmp_path / "c.ull", eagle=said)).model.rope.theta == 7e5


@pytest.mark.parametrize(
    ("form", "norms", "option", "expected"),
    [
        ("original", "none", None, False),  # SpecForge's, of the opposite meaning
        ("original", "none", True, True),
        ("original", "each", None, True),
        ("original", "each", False, False),
        ("speculators", "all", None, True),
        ("speculators", "none", None, True),
    ],
)
def test_norm_output_is_believed_of_eagle_3_1(
    target: Path, tmp_path: Path, form: Any, norms: Any, option: bool | None, expected: bool
) -> None:
    head = write_eagle(tmp_path / "head", form, norms=norms, config={"norm_output": True, "norm_before_residual": True})
    bundle = built(target, tmp_path / "x.ull", eagle=head, eagle_options=HeadOptions(norm_output=option))
    assert (eagle_of(bundle).norm_output, eagle_of(bundle).tap_norm) == (expected, norms)
    assert eagle_of(bundle).norm_before_residual


# Refusals


def _delete(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def _put(name: str, value: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.asarray(value)})


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            None,
            r"`eagle_config.use_aux_hidden_state` is false.*EAGLE-1",
        ),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, None, r"`architectures` say.*EAGLE-4.*supported: EAGLE-3"),
        ({"parallel_drafting": True}, None, r"`parallel_drafting` is a P-EAGLE head's"),
        ({"num_hidden_layers": 4}, None, r"`num_hidden_layers` is 4; supported.*one layer"),
        ({"vocab_size": 151936}, None, r"`vocab_size` is 151936, the target has 320 tokens.*another model"),
        ({"vocab_size": 200}, None, r"`vocab_size` is 200.*another model"),
        ({"target_hidden_size": 64}, None, r"`target_hidden_size` is 64.*hidden size is 48.*another model"),
        ({"hidden_size": 64}, None, r"hidden size 64 and no embedding of its own; the model's has 48"),
        ({"hidden_act": "gelu"}, None, r"`hidden_act` = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, None, r"`quantization_config` is not supported.*unquantised"),
        ({"layer_types": ["sliding_attention"]}, None, r"`layer_types` asks for sliding attention"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]},
            None,
            r"reads layer 9, the model has 2: `taps` lie in 0 to 2",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, None, r"reads 3 hidden states, \[0, 1\] are 2 layers.*\(taps\)"),
        ({"eagle_aux_hidden_state_layer_ids": [0, -1, 2]}, None, r"must list 1 to 8 layers"),
        (
            {"eagle_aux_hidden_state_layer_ids": ...},
            None,
            r"is missing, and fc reads 3 of the target's 2 layers.*\(taps\)",
        ),
        ({"fc_norm": True}, None, r"`fc_norm` is true, but the file lacks such norms"),
        (
            {"speculators_model_type": "dflash", "transformer_layer_config": {}},
            None,
            r"`speculators_model_type` is 'dflash'; supported: EAGLE-3",
        ),
        ({}, _delete("midlayer.hidden_norm.weight"), r"lacks tensor 'midlayer.hidden_norm.weight': an EAGLE-1"),
        ({}, _delete("fc.weight"), r"lacks tensor 'fc.weight'"),
        ({}, _delete("lm_head.weight"), r"lacks tensor 'lm_head.weight'"),
        ({}, _delete("midlayer.mlp.up_proj.weight"), r"lacks tensor 'midlayer.mlp.up_proj.weight'"),
        ({}, _delete("d2t"), r"lm_head has 96 rows, the target's tokenizer 320 tokens, and there is no d2t"),
        ({}, _put("d2t", np.full(OWN, 300)), r"d2t maps own token 30 to 330"),
        ({}, _put("d2t", -np.arange(OWN)), r"d2t maps two own tokens to one"),
        ({}, _put("d2t", np.zeros(5, np.int64)), r"'d2t' has the shape \[5\]"),
        ({}, _put("d2t", np.zeros(OWN, np.float32)), r"'d2t' must hold integers"),
        ({}, _put("fc.weight", np.zeros((HIDDEN, 100), np.float32)), r"multiple of the target's hidden size 48"),
        (
            {},
            _put("midlayer.extra.weight", np.zeros(3, np.float32)),
            r"'midlayer.extra.weight' is none of an EAGLE-3 head's",
        ),
        ({}, _put("mask_hidden", np.zeros((1, 144), np.float32)), r"P-EAGLE"),
        (
            {},
            _put("norm.weight", np.full(HIDDEN, np.nan, np.float32)),
            r"'norm.weight' holds values that are not finite",
        ),
        ({}, _put("embed_tokens.weight", np.zeros((90, HIDDEN), np.float32)), r"'embed_tokens.weight' has the shape"),
    ],
)
def test_eagle_heads_that_are_refused(
    target: Path, tmp_path: Path, config: dict[str, Any], tensors: Callable[[Tensors], object] | None, message: str
) -> None:
    head = write_eagle(tmp_path / "head", config=config, tensors=tensors)
    with pytest.raises(CheckpointError, match=message):
        built(target, tmp_path / "x.ull", eagle=head)
    assert not (tmp_path / "x.ull").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": {"projector_type": "domino"}}, r"`dflash_config.projector_type` = 'domino'.*Domino"),
        ({"inner": {"causal": True}}, r"`dflash_config.causal` = True"),
        ({"inner": {"conv_kernel_size": 3}}, r"DFlash2"),
        ({"inner": {"mask_token_id": 4000}}, r"`mask_token` 4000 is outside of the model's 330 tokens"),
        ({"inner": {"mask_token_id": ...}}, r"`mask_token_id` must be the token"),
        ({"inner": {"target_layer_ids": [0, 5]}}, r"reads layer 6, the model has 2"),
        ({"inner": {"target_layer_ids": [0]}}, r"reads 2 hidden states"),
        ({"inner": {"target_layer_ids": ...}}, r"`dflash_config.target_layer_ids` is missing.*\(taps\)"),
        ({"config": {"block_size": 64}}, r"block"),
        ({"config": {"block_size": ...}}, r"`block_size` is missing"),
        ({"config": {"num_target_layers": 36}}, r"`num_target_layers` is 36, the target has 2.*another model"),
        ({"config": {"vocab_size": 151936}}, r"`vocab_size` is 151936.*another model"),
        ({"config": {"use_sliding_window": True, "sliding_window": 64}}, r"`use_sliding_window` asks for sliding"),
        ({"config": {"partial_rotary_factor": 0.5}}, r"`partial_rotary_factor` is not supported"),
        (
            {"config": {"speculators_model_type": "peagle", "transformer_layer_config": {}}},
            r"is 'peagle'; supported: DFlash",
        ),
        ({"markov": 8, "inner": {"markov_head_type": "rnn"}}, r"`dflash_config.markov_head_type` = 'rnn'.*'vanilla'"),
        (
            {"markov": 8, "inner": {"markov_rank": 16}},
            r"`dflash_config.markov_rank` is 16, but the file's is of rank 8",
        ),
        ({"inner": {"enable_confidence_head": True}}, r"`dflash_config.enable_confidence_head` does not agree"),
        ({"tensors": _delete("layers.1.self_attn.q_norm.weight")}, r"lacks tensor 'layers.1.self_attn.q_norm.weight'"),
        ({"tensors": _put("d2t", np.zeros(OWN, np.int64))}, r"has a d2t, but no lm_head"),
        (
            {"tensors": _put("prefix_gru.weight", np.zeros(3, np.float32))},
            r"'prefix_gru.weight' is none of a DFlash head's",
        ),
    ],
)
def test_dflash_heads_that_are_refused(target: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    head = write_dflash(tmp_path / "head", **changes)
    with pytest.raises(CheckpointError, match=message):
        built(target, tmp_path / "x.ull", dflash=head)


def test_directories_without_a_head_are_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory of a head at"):
        built(target, tmp_path / "x.ull", eagle=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights of a head"):
        built(target, tmp_path / "x.ull", eagle=tmp_path / "empty")
    twice = _put("model.norm.weight", np.ones(HIDDEN, np.float32))
    both = write_eagle(tmp_path / "both", tensors=twice)
    with pytest.raises(CheckpointError, match=r"holds tensor 'norm.weight' twice"):
        built(target, tmp_path / "x.ull", eagle=both)
    bare = write_eagle(tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        built(target, tmp_path / "x.ull", eagle=bare)


# Recipes and the command line


def test_recipes_name_heads(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'model = "m"\ndrafter = "dflash"\n[eagle]\nhead = "e"\ntaps = [1, 2]\ntheta = 5e5\n[dflash]\nhead = "d"\n'
    )
    settings = settings_from_recipe(load_recipe(path, {}))
    assert settings.speculation.eagle == tmp_path / "e" and settings.speculation.dflash == tmp_path / "d"
    assert settings.speculation.eagle_options == HeadOptions(taps=(1, 2), theta=5e5)
    assert settings.recipe["eagle"] == {"head": str(tmp_path / "e"), "taps": [1, 2], "theta": 5e5, "norm_output": None}
    for values, message in [
        ({"drafter": "eagle"}, r"`drafter` is eagle, but no head is given: add \[eagle\] head, or --eagle DIR"),
        ({"drafter": "dflash"}, r"`drafter` is dflash, but no head is given"),
        ({"eagle": {"head": "e", "tap": [1]}}, r"unknown key `eagle.tap`; did you mean `eagle.taps`"),
        ({"eagle": {"head": "e", "theta": 0.0}}, r"theta"),
        ({"dflash": {"head": "d", "taps": []}}, r"taps"),
    ]:
        with pytest.raises(RecipeError, match=message):
            make_recipe({"model": "m", "name": "x", **values}, "test")


# What the drafts are worth


def constant_target(directory: Path, winner: int) -> Path:
    """A model whose every state is the same, so that it always says `winner`: layer 0 adds, layer 1 does nothing."""

    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][7]
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:] = 0.0
        tensors["model.layers.0.mlp.down_proj.weight"] *= 30.0
        tensors["model.layers.1.mlp.down_proj.weight"][:] = 0.0
        state = states(tensors)[1] * tensors["model.norm.weight"]
        tensors["lm_head.weight"] *= 0.1
        tensors["lm_head.weight"][winner] = state / np.linalg.norm(state)

    return write_checkpoint(directory, tensors=change)


def states(tensors: Tensors) -> list[NDArray[np.float32]]:
    """The states that enter layers 0 and 1 of the constant model."""
    first = tensors["model.embed_tokens.weight"][7]
    x = first / np.sqrt(np.mean(first**2)) * tensors["model.layers.0.post_attention_layernorm.weight"]
    gate = tensors["model.layers.0.mlp.gate_proj.weight"] @ x
    inner = gate / (1.0 + np.exp(-gate)) * (tensors["model.layers.0.mlp.up_proj.weight"] @ x)
    return [first, first + tensors["model.layers.0.mlp.down_proj.weight"] @ inner]


def reader_of_layer_1(directory: Path, target: Path, winner: int, **config: Any) -> Path:
    """An EAGLE head that says `winner` of the state that enters layer 1, and another token of layer 0's."""
    widened = {name: value.astype(np.float32) for name, value in load_file(target / "model.safetensors").items()}
    wrong, right = (state / np.sqrt(np.mean(state**2)) for state in states(widened))

    def change(tensors: Tensors) -> None:
        tensors["fc.weight"] = np.eye(HIDDEN, dtype=np.float32)
        tensors["midlayer.self_attn.o_proj.weight"][:] = 0.0
        tensors["midlayer.mlp.down_proj.weight"][:] = 0.0
        tensors["norm.weight"][:] = 1.0
        tensors["lm_head.weight"] = np.zeros((ROWS, HIDDEN), np.float32)
        tensors["lm_head.weight"][winner] = right - wrong
        del tensors["d2t"], tensors["t2d"]

    return write_eagle(directory, taps=[1], config=config, tensors=change)


WINNER = 40


def options(target: Path, output: Path, *more: str) -> list[str]:
    return [
        "--model",
        str(target),
        "--output",
        str(output),
        "--max-perplexity-increase",
        "9",
        "--eval-tokens",
        "600",
        *more,
    ]


def test_a_good_head_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = constant_target(tmp_path / "model", WINNER)
    head = reader_of_layer_1(tmp_path / "head", target, WINNER)
    assert ull_build(options(target, tmp_path / "x.ull", "--eagle", str(head), "--drafter", "eagle")) == 0
    assert "tokens per round" in capsys.readouterr().out
    quality = open_bundle(tmp_path / "x.ull").manifest.quality
    assert quality is not None and quality.tokens_per_round["eagle"] > 3.0
    assert inspect.main(tmp_path / "x.ull") == 0
    printed = capsys.readouterr().out
    assert "tokens per round" in printed and "eagle head" in printed


def test_a_misread_head_stops_the_build_and_the_right_reading_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = constant_target(tmp_path / "model", WINNER)
    head = reader_of_layer_1(tmp_path / "head", target, WINNER, eagle_aux_hidden_state_layer_ids=[0])
    assert ull_build(options(target, tmp_path / "x.ull", "--eagle", str(head))) == 1
    error = capsys.readouterr().err
    assert "1.00 tokens per round" in error and "with taps = [1] it gives" in error and "recipe's [eagle]" in error
    assert "--allow-weak-drafter" in error
    assert not (tmp_path / "x.ull").exists()
    assert ull_build(options(target, tmp_path / "x.ull", "--eagle", str(head), "--allow-weak-drafter")) == 0
    quality = open_bundle(tmp_path / "x.ull").manifest.quality
    assert quality is not None and quality.tokens_per_round == {"eagle": 1.0}


def test_a_head_of_another_model_is_told(target: Path, tmp_path: Path) -> None:
    head = write_dflash(tmp_path / "head", "speculators", markov=8)
    settings = Settings(
        target, tmp_path / "x.ull", "x", eval_tokens=600, max_perplexity_increase=9.0,
        speculation=SpeculationSettings(dflash=head),
    )  # fmt: skip
    with pytest.raises(
        BuildError, match=r"the DFlash head wins next to nothing.*trained for another model.*anchor_predicts"
    ):
        build(settings)


# What opening a bundle checks


@pytest.fixture(scope="module")
def with_heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("heads")
    eagle, dflash = write_eagle(directory / "eagle"), write_dflash(directory / "dflash")
    return built(target, directory / "x.ull", eagle=eagle, dflash=dflash).path


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle", {"taps": [0, 1, 3]}, r"reads layer 3, the model has 2"),
        ("eagle", {"taps": []}, r"taps"),
        ("eagle", {"taps": [0]}, r"eagle.fc.weight"),
        ("eagle", {"mapped": False}, r"96 tokens, the model 330, and no map"),
        ("eagle", {"tap_norm": "all"}, r"lacks tensor 'eagle.tap_norm'"),
        ("dflash", {"mask_token": 330}, r"`mask_token` 330"),
        ("dflash", {"block": 1}, r"block"),
        ("dflash", {"mapped": True}, r"`mapped` must be false"),
        ("dflash", {"markov_kind": "gated"}, r"no Markov term"),
        ("dflash", {"confidence": True}, r"lacks tensor 'dflash.confidence.weight'"),
    ],
)
def test_damaged_manifests_are_refused(
    with_heads: Path, tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    copy = Path(shutil.copytree(with_heads, tmp_path / "x.ull"))
    change_manifest(copy, lambda manifest: manifest["speculation"][kind].update(changes))
    with pytest.raises(BundleError, match=message):
        open_bundle(copy)


def test_a_damaged_map_is_refused(with_heads: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(with_heads, tmp_path / "x.ull"))
    bundle = open_bundle(copy)
    for value in (-1, ROWS):
        with bundle.weights_path.open("r+b") as file:
            file.seek(bundle.tensors["eagle.d2t"].offset + 12)
            file.write(int(value).to_bytes(4, "little", signed=True))
        with pytest.raises(BundleError, match=r"'eagle.d2t' is no map into the model's vocabulary"):
            open_bundle(copy)


def test_the_report_counts_what_heads_take(with_heads: Path) -> None:
    report = inspect.describe(open_bundle(with_heads))
    assert report["weight_bytes"]["eagle head"] > 0 and report["weight_bytes"]["dflash head"] > 0
    assert json.dumps(report["speculation"]["eagle"]["taps"]) == "[0, 1, 2]"
