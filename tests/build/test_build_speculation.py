"""Medusa heads and draft models in the build step: every form of file, and every one that must be refused."""

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from checkpoints import head_tensors, tokenizer_json, write_checkpoint, write_json
from head_checkpoints import write_dflash, write_eagle
from manifests import change_manifest, read_manifest_json, write_manifest_json
from torch_files import Call, Name, tensor_call, write_torch
from ull.bundle import Bundle, Precision, open_bundle
from ull.commands import inspect
from ull.errors import BundleError, CheckpointError, RecipeError
from ull_build.build import build
from ull_build.cli import main as ull_build
from ull_build.recipe import load_recipe, make_recipe
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings
from ull_build.source.medusa import read_medusa
from ull_build.source.torch_file import read_torch_file
from ull_build.weights.pack_cpu import unpack_tiles
from ull_build.weights.quantise import dequantise_rows, quantise_rows

HIDDEN, ROWS = 48, 330  # of checkpoints.make_config
Tensors = dict[str, NDArray[Any]]


def vllm_names(tensors: Tensors, layers: int, prefix: str) -> Tensors:
    renamed = {}
    for name, value in tensors.items():
        head, layer, *rest = name.split(".")
        own = int(layer) == layers
        renamed[prefix + (f"lm_heads.{head}.weight" if own else f"blocks.{head}.layers.{layer}.{rest[-1]}")] = value
    return renamed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


def built(target: Path, output: Path, precision: str = "fp8", **speculation: Any) -> Bundle:
    settings = Settings(
        target,
        output,
        "test",
        evaluate=False,
        precision=Precision(weights=precision),  # type: ignore[arg-type]
        speculation=SpeculationSettings(**speculation),
    )
    return open_bundle(build(settings).path)


def stored(bundle: Bundle, name: str) -> NDArray[Any]:
    entry = bundle.tensors[name]
    kind: Any = {"F8_E4M3": np.uint8, "F32": np.float32, "BF16": np.uint16}[entry.dtype]
    raw = np.fromfile(bundle.weights_path, np.uint8, entry.nbytes, offset=entry.offset)
    return raw.view(kind).reshape(entry.shape)


# Forms of Medusa files


@pytest.mark.parametrize("own", [False, True], ids=["v2", "v1"])
@pytest.mark.parametrize("form", ["pt", "safetensors", "vllm", "vllm-prefix"])
def test_every_form_of_heads_gives_the_same_bundle(target: Path, tmp_path: Path, form: str, own: bool) -> None:
    tensors = head_tensors(heads=2, layers=2, own=own)
    folder = tmp_path / "heads"
    folder.mkdir()
    if form == "pt":
        write_torch(folder / "medusa_lm_head.pt", tensors)
    else:
        names = tensors if form == "safetensors" else vllm_names(tensors, 2, "medusa_heads." * (form == "vllm-prefix"))
        save_file(names, folder / "medusa_lm_head.safetensors")
    bundle = built(target, tmp_path / "x.ull", medusa=folder, default="medusa")
    speculation = bundle.manifest.speculation
    assert speculation is not None and speculation.medusa is not None and speculation.default == "medusa"
    assert msgspec.to_builtins(speculation.medusa) == {"heads": 2, "layers": 2, "version": "1" if own else "2"}
    spec = bundle.native_spec()
    assert spec["medusa"] == msgspec.to_builtins(speculation.medusa) and spec["draft"] is None
    for head in range(2):
        sources = {f"{head}.{layer}": tensors[f"{head}.{layer}.linear.weight"] for layer in range(2)}
        if own:
            sources[f"{head}.lm_head"] = tensors[f"{head}.2.weight"]
        for place, source in sources.items():
            rows = dequantise_rows(
                unpack_tiles(stored(bundle, f"medusa.{place}.weight")), stored(bundle, f"medusa.{place}.scale")
            )
            assert np.array_equal(rows[: len(source)], dequantise_rows(*quantise_rows(source)))
            assert not rows[len(source) :].any()
        bias = stored(bundle, f"medusa.{head}.1.bias")[:HIDDEN]
        wide = (bias.astype(np.uint32) << np.uint32(16)).view(np.float32)
        assert np.allclose(wide, tensors[f"{head}.1.linear.bias"], rtol=2**-8)


@pytest.mark.parametrize("dtype", ["f4", "f2", "bf16"])
def test_torch_files_of_every_dtype(tmp_path: Path, dtype: str) -> None:
    values = np.array([[1.5, -2.0], [0.25, 1024.0]], np.float32)
    raw = (values.view(np.uint32) >> 16).astype("<u2") if dtype == "bf16" else values.astype(f"<{dtype}")
    assert np.array_equal(read_torch_file(write_torch(tmp_path / "x.pt", {"0": raw}))["0"], values)


def test_pytorch_writes_what_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    storage = torch.randn(6, 4)
    tensors = OrderedDict(a=storage[2:4].half(), b=torch.nn.Parameter(storage[1:]), c=storage.bfloat16())
    torch.save(tensors, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    assert list(found) == ["a", "b", "c"]
    assert all(np.array_equal(found[name], value.detach().float().numpy()) for name, value in tensors.items())


def test_only_the_first_heads_are_taken(target: Path, tmp_path: Path) -> None:
    save_file(head_tensors(heads=4), tmp_path / "heads.safetensors")
    bundle = built(target, tmp_path / "x.ull", medusa=tmp_path / "heads.safetensors", medusa_count=3)
    assert "medusa.2.0.weight" in bundle.tensors and "medusa.3.0.weight" not in bundle.tensors
    with pytest.raises(CheckpointError, match=r"holds 4 heads, the recipe asks for 5"):
        read_medusa(tmp_path / "heads.safetensors", 5)


# Hostile and damaged torch files


def test_a_malicious_pickle_does_not_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for module, name, argument in [
        ("os", "system", f"touch {witness}"),
        ("posix", "system", f"touch {witness}"),
        ("builtins", "eval", f"open({str(witness)!r}, 'w')"),
        ("builtins", "exec", f"open({str(witness)!r}, 'w')"),
        ("torch", "load", str(witness)),
        ("torch.storage", "_load_from_bytes", "x"),
        ("collections", "OrderedDict.fromkeys.__globals__", "x"),
    ]:
        path = write_torch(tmp_path / "evil.pt", {}, {"0.0.linear.weight": Call(Name(module, name), argument)})
        with pytest.raises(CheckpointError, match=r"is refused, nothing in it was run: it asks for"):
            read_torch_file(path)
        assert not witness.exists()


@pytest.mark.parametrize(
    "content",
    [
        {"x": tensor_call("FloatStorage", "0", (2, 2), offset=1)},  # reaches beyond its storage
        {"x": tensor_call("FloatStorage", "0", (2, 2), stride=(1, 2))},  # transposed
        {"x": tensor_call("FloatStorage", "0", (2, 2), stride=(2,))},
        {"x": tensor_call("FloatStorage", "0", (2, 2), length=1 << 40)},
        {"x": tensor_call("FloatStorage", "../../etc/passwd", (2, 2))},
        {"x": tensor_call("FloatStorage", "7", (2, 2))},  # no such member
        {"x": tensor_call("LongStorage", "0", (2, 2))},
        {"x": 3},
        {"x": {"y": tensor_call("FloatStorage", "0", (2, 2))}},
        "no dictionary",
        Call(Name("torch._utils", "_rebuild_tensor_v2")),
        {"x": Call(Name("torch._utils", "_rebuild_tensor_v2"), 1, 2, 3, 4)},
    ],
)
def test_torch_files_with_false_claims_are_refused(tmp_path: Path, content: Any) -> None:
    path = write_torch(tmp_path / "x.pt", {"x": np.ones((2, 2), np.float32)}, content)
    with pytest.raises(CheckpointError, match="is refused"):
        read_torch_file(path)


def test_damaged_torch_files_are_refused(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"x": np.ones((2, 2), np.float32)})
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"version https://git-lfs.github.com/spec/v1", pickle.dumps({})):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is no PyTorch archive"):
            read_torch_file(path)
    with pytest.raises(CheckpointError, match="big-endian"):
        read_torch_file(write_torch(path, {"x": np.ones((2, 2), np.float32)}, byteorder=b"big"))
    with pytest.raises(CheckpointError, match="is missing"):
        read_torch_file(tmp_path / "none.pt")


# Refusals of heads


def _changed(change: str) -> Tensors:
    tensors = head_tensors(2, 1, own=change.startswith("lm_head"))
    if change == "hidden":
        return head_tensors(2, 1, hidden=32)
    if change == "gap":
        del tensors["0.0.linear.weight"], tensors["0.0.linear.bias"]
    elif change == "bias shape":
        tensors["1.0.linear.bias"] = np.zeros(HIDDEN + 1, np.float32)
    elif change == "one bias":
        del tensors["1.0.linear.bias"]
    elif change == "nan":
        tensors["1.0.linear.weight"][3, 4] = np.nan
    elif change == "foreign":
        tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    elif change == "many":
        return head_tensors(13)
    elif change == "none":
        return {"0.1.weight": np.ones((ROWS, HIDDEN), np.float32)}
    elif change == "lm_head missing":
        del tensors["0.1.weight"]
    elif change == "lm_head rows":
        tensors["1.1.weight"] = np.ones((100, HIDDEN), np.float32)
    elif change == "lm_head place":
        tensors["0.3.weight"] = tensors.pop("0.1.weight")
    elif change == "lm_head columns":
        tensors["1.1.weight"] = np.ones((ROWS, HIDDEN - 1), np.float32)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hidden", r"has the shape \[32, 32\], the target's hidden size is 48"),
        ("gap", "lacks the weight of head 0, layer 0"),
        ("bias shape", "bias of head 1, layer 0"),
        ("one bias", "some layers have a bias and others do not"),
        ("nan", "'1.0.linear.weight' holds values that are not finite"),
        ("foreign", "'model.norm.weight' is none of a Medusa head's"),
        ("many", "holds 13 heads of 1 layers; at most 12"),
        ("none", "holds no Medusa heads"),
        ("lm_head missing", "lacks the lm_head of head 0"),
        ("lm_head rows", "has 100 rows, the target's tokenizer has 3"),
        ("lm_head place", "stands at place 3, after 1 layers"),
        ("lm_head columns", r"not \[vocabulary, 48\]"),
    ],
)
def test_heads_of_another_model_or_damaged_ones_are_refused(
    target: Path, tmp_path: Path, change: str, message: str
) -> None:
    save_file(_changed(change), tmp_path / "heads.safetensors")
    with pytest.raises(CheckpointError, match=message):
        built(target, tmp_path / "x.ull", medusa=tmp_path / "heads.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["heads.safetensors"]


@pytest.mark.parametrize(("rows", "kept"), [(ROWS - 8, ROWS - 8), (ROWS + 40, ROWS)])
def test_lm_heads_may_differ_in_padding_rows(target: Path, tmp_path: Path, rows: int, kept: int) -> None:
    tensors = head_tensors(1, own=True, rows=rows)
    save_file(tensors, tmp_path / "heads.safetensors")
    bundle = built(target, tmp_path / "x.ull", medusa=tmp_path / "heads.safetensors")
    tiles, scales = stored(bundle, "medusa.0.lm_head.weight"), stored(bundle, "medusa.0.lm_head.scale")
    whole = dequantise_rows(unpack_tiles(tiles), scales)
    assert len(whole) == 352 and np.abs(whole[:kept] - tensors["0.1.weight"][:kept]).max() < 0.3


@pytest.mark.parametrize(
    ("config", "own", "message"),
    [
        ({"version": "3"}, False, "version '3' of Medusa heads is not supported"),
        ({"version": "1"}, False, "says version 1, but the heads in .* have no lm_heads"),
        ({"version": "2"}, True, "says version 2, but the heads in .* have their own lm_heads"),
        ({"version": "2"}, False, None),
        ({"version": 1, "medusa_num_heads": 7}, True, None),  # a wrong number of heads is known and harmless
        ({}, True, None),
    ],
)
def test_the_version_in_config_json(tmp_path: Path, config: dict[str, Any], own: bool, message: str | None) -> None:
    save_file(head_tensors(own=own), tmp_path / "medusa_lm_head.safetensors")
    write_json(tmp_path / "config.json", {"medusa_num_layers": 1, **config})
    if message is None:
        assert len(read_medusa(tmp_path).blocks) == 2
    else:
        with pytest.raises(CheckpointError, match=message):
            read_medusa(tmp_path)


def test_missing_heads_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no Medusa heads at"):
        read_medusa(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="holds no Medusa heads"):
        read_medusa(tmp_path)


# Draft models


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_draft_model_is_stored_like_a_target(target: Path, tmp_path: Path, architecture: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 512, "vocab_size": 352}
    draft = write_checkpoint(tmp_path / "draft", architecture, tied=True, config=sizes, seed=3)
    alone = built(draft, tmp_path / "alone.ull")
    bundle = built(target, tmp_path / "x.ull", draft=draft, default="draft", max_tree=16)
    for name in alone.tensors:
        assert np.array_equal(stored(alone, name), stored(bundle, f"draft.{name}")), name
    spec, own = bundle.native_spec(context=100), alone.native_spec(context=100)
    assert spec["medusa"] is None
    assert set(spec["draft"]) == set(own) - {"path", "tensors", "medusa", "draft", "eagle", "dflash"}
    for key, value in spec["draft"].items():
        assert np.array_equal(value, own[key]), key
    assert bundle.manifest.speculation is not None and bundle.manifest.speculation.max_tree == 16


def test_what_drafts_for_fp8_pages(target: Path, tmp_path: Path) -> None:
    """A draft model has them too, heads have not; an answer is the same with each as without."""
    native = pytest.importorskip("ull._native")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 512}
    drafters: dict[str, Any] = {
        "draft": write_checkpoint(tmp_path / "draft", "qwen2", config=sizes, seed=3),
        "eagle": write_eagle(tmp_path / "eagle"),
        "dflash": write_dflash(tmp_path / "dflash"),
    }
    speculation = SpeculationSettings(**drafters)
    options: dict[str, Any] = {"eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0}
    options |= {"allow_weak_drafter": True, "speculation": speculation, "precision": Precision(kv="fp8")}
    bundle = open_bundle(build(Settings(target, tmp_path / "x.ull", "x", **options)).path)
    assert {name for name in bundle.tensors if "kv_scale" in name} == {
        *("layers.0.kv_scale", "layers.1.kv_scale", "draft.layers.0.kv_scale")
    }
    described = bundle.manifest.speculation
    assert described is not None and described.draft is not None and described.draft.precision.kv == "fp8"
    for head in (described.eagle, described.dflash):
        assert head is not None and head.precision == Precision(kv="bf16")
    rig = native.SpeculationRig(bundle.native_spec(), adaptive=False)
    prompt = np.arange(3, 90, dtype=np.int32)
    plain, *others = (rig.decode(prompt, 30, {"seed": 5, "temperature": 0.7}, name) for name in ("none", *drafters))
    for said, name in zip(others, drafters, strict=True):
        assert said["tokens"] == plain["tokens"] and {entry[0] for entry in said["rounds"][:-1]} >= {name}
    wide = native.SpeculationRig(bundle.native_spec(kv="bf16")).decode(prompt, 30, {"logprobs": 0})
    assert wide["logprobs"] != rig.decode(prompt, 30, {"logprobs": 0})["logprobs"]


def test_refused_draft_models(target: Path, tmp_path: Path) -> None:
    def refused(match: str, name: str, **options: Any) -> None:
        draft = write_checkpoint(tmp_path / name, **options)
        if name == "no-tokenizer":
            (draft / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match=match):
            built(target, tmp_path / "x.ull", draft=draft)

    refused("holds 128 tokens, the target 256", "short", config={"max_position_embeddings": 128})
    refused("has 300 embedding rows", "few", config={"vocab_size": 300}, vocabulary=290)
    refused("cannot be told", "no-tokenizer", config={"vocab_size": 400})
    refused("has another tokenizer: token", "other", vocabulary=290)
    refused("is not supported", "unsupported", config={"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        built(target, tmp_path / "x.ull", draft=tmp_path / "none")
    assert not (tmp_path / "x.ull").exists()


def test_a_draft_without_tokenizer_must_have_as_many_rows(target: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    assert built(target, tmp_path / "x.ull", draft=draft).native_spec()["draft"]["vocabulary"] == ROWS


def test_specials_of_the_tokenizers_may_differ(target: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path / "draft", config={"vocab_size": 400})
    description = json.loads(tokenizer_json(320, True))
    description["added_tokens"][2]["content"] = "<|other|>"
    description["model"]["vocab"] = {
        ("<|other|>" if name == "<|end|>" else name): token for name, token in description["model"]["vocab"].items()
    }
    write_json(draft / "tokenizer.json", description)
    assert built(target, tmp_path / "x.ull", draft=draft).native_spec()["draft"]["vocabulary"] == 400


# Manifest, recipe, command line, inspect


def test_bundles_of_before_open_and_have_no_drafters(target: Path, tmp_path: Path) -> None:
    bundle = built(target, tmp_path / "x.ull")
    manifest = read_manifest_json(bundle.path)
    drafters = dict.fromkeys(("medusa", "draft", "eagle", "dflash"))
    assert manifest.pop("speculation") == {"default": "auto", "max_tree": 64, **drafters}
    write_manifest_json(bundle.path, manifest)
    old = open_bundle(bundle.path)
    assert old.manifest.speculation is None
    assert old.native_spec()["medusa"] is None and old.native_spec()["draft"] is None
    assert inspect.main(bundle.path) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default": "medusa"}, "there are no heads"),
        ({"default": "draft"}, "there is no draft model"),
        ({"default": "best"}, "best"),
        ({"max_tree": 65}, "max_tree"),
        ({"medusa": {"heads": 13, "layers": 1, "version": "2"}}, "heads"),
        ({"medusa": {"heads": 1, "layers": 1, "version": "2"}}, "lacks tensor 'medusa.0.0.weight'"),
    ],
)
def test_false_manifests_are_refused(target: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    bundle = built(target, tmp_path / "x.ull")
    change_manifest(bundle.path, lambda manifest: manifest["speculation"].update(change))
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle.path)


def test_recipes_with_drafters(tmp_path: Path) -> None:
    recipe = tmp_path / "x.toml"
    recipe.write_text(
        'model = "m"\ndrafter = "medusa"\n[medusa]\nheads = "h.pt"\nnum = 3\n[draft]\nmodel = "d"\n'
        "[speculation]\nmax_tree = 8\n"
    )
    loaded = load_recipe(recipe, {})
    assert loaded.medusa is not None and loaded.medusa.heads == str(tmp_path / "h.pt") and loaded.medusa.num == 3
    assert loaded.draft is not None and loaded.draft.model == str(tmp_path / "d")
    assert loaded.speculation.max_tree == 8
    for values, message in [
        ({"drafter": "medusa"}, "no heads are given"),
        ({"drafter": "draft"}, "no draft model is given"),
        ({"drafter": "eagle"}, "drafter"),
        ({"medusa": {"head": "x"}}, r"unknown key `medusa.head`; did you mean `medusa.heads`"),
        ({"medusa": {"heads": "x", "num": 0}}, "num"),
        ({"speculation": {"max_tree": 0}}, "max_tree"),
        ({"draft": "x"}, "draft"),
    ]:
        with pytest.raises(RecipeError, match=message):
            make_recipe({"model": "m", "name": "n", **values}, "test")


def test_the_command_line_builds_and_inspects(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_torch(tmp_path / "medusa_lm_head.pt", head_tensors(3))
    draft = write_checkpoint(tmp_path / "draft")
    output = tmp_path / "x.ull"
    drafters = ["--medusa", str(tmp_path), "--draft", str(draft), "--drafter", "draft"]
    assert ull_build(["--model", str(target), "--output", str(output), "--no-eval", *drafters]) == 0
    assert "3 Medusa heads (version 2)" in capsys.readouterr().out
    assert inspect.main(output) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "default draft, at most 64 tokens per verification" in shown and "medusa heads" in shown
    assert "3 of 1 layer, the model's lm_head (version 2)" in shown
    report = inspect.describe(open_bundle(output))
    assert report["speculation"]["medusa"] == {"heads": 3, "layers": 1, "version": "2"}
    assert report["weight_bytes"]["medusa heads"] > 3 * HIDDEN * HIDDEN and report["weight_bytes"]["draft model"] > 0
    assert ull_build(["--model", str(target), "--output", str(output), "--drafter", "medusa", "--no-eval"]) == 2
