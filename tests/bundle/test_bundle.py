"""Opening bundles: every damage is a BundleError that names file or field; frequencies and the native description."""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints import write_json
from manifests import read_manifest_json, write_manifest_json
from ull.bundle import Bundle, Manifest, Precision, expected_tensors, open_bundle, read_tensor_file, write_sealed
from ull.commands import inspect
from ull.errors import BundleError, ConfigError


def edit(bundle: Path, *path: str, value: Any) -> None:
    """Sets (or with `...` removes) one field of the manifest."""
    manifest = read_manifest_json(bundle)
    place = manifest
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    write_manifest_json(bundle, manifest)


def accept_file(bundle: Path, name: str) -> None:
    """Makes the manifest agree with the size of a changed file."""
    edit(bundle, "files", name, "bytes", value=(bundle / name).stat().st_size)


def refuse(bundle: Path, words: str, field: str | None = None, **options: Any) -> None:
    with pytest.raises(BundleError, match=words) as caught:
        open_bundle(bundle, **options)
    if field is not None:
        assert caught.value.field == field


def test_opens(pristine: Path) -> None:
    opened = open_bundle(pristine, verify="hashes")
    assert isinstance(opened, Bundle)
    assert opened.manifest.model.vocabulary == 330
    assert opened.manifest.model.tokenizer_vocabulary == 320
    assert opened.weight_bytes == sum(entry.nbytes for entry in opened.tensors.values())
    assert opened.vocabulary_path.is_file() and opened.tokenizer_directory.is_dir()


def test_missing_and_foreign_directories(tmp_path: Path, bundle: Path) -> None:
    refuse(tmp_path / "nowhere.ull", "no engine bundle at .*nowhere.ull; build one")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "not an engine bundle: it has no manifest.json")
    (tmp_path / "file.ull").write_text("text")
    refuse(tmp_path / "file.ull", "not an engine bundle")
    for content in ({"name": "browser extension", "manifest_version": 3}, ["list"], {"format": "other"}):
        write_json(bundle / "manifest.json", content)
        refuse(bundle, "not an engine bundle: its manifest's format is not 'ull-engine'", "format")


def test_other_formats(bundle: Path) -> None:
    edit(bundle, "format_version", value=4)
    refuse(bundle, "bundle format 4, this ull reads 3; upgrade ull", "format_version")
    edit(bundle, "format_version", value=2)
    refuse(bundle, "bundle format 2, this ull reads 3; rebuild it", "format_version")
    edit(bundle, "format_version", value=1)
    (bundle / "manifest.sha256").unlink()  # formats of before had none
    refuse(bundle, "bundle format 1, this ull reads 3; rebuild it", "format_version")
    edit(bundle, "format_version", value="3")
    refuse(bundle, "is damaged", "format_version")


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_truncated_manifest(bundle: Path, keep: int) -> None:
    path = bundle / "manifest.json"
    write_sealed(bundle, path.read_bytes()[:keep])
    refuse(bundle, "manifest.json is damaged.*rebuild it")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "hidden"), 0, "model.hidden"),
        (("model", "hidden"), "48", "model.hidden"),
        (("model", "hidden"), 1 << 40, "model.hidden"),
        (("model", "layers"), ..., "layers"),
        (("model", "heads"), 3, "not a multiple of kv_heads"),
        (("model", "head_dim"), 11, "must be even"),
        (("model", "windows"), [0], "1 `windows` for 2 layers"),
        (("model", "windows"), [0, -1], "windows"),
        (("model", "tokenizer_vocabulary"), 331, "larger than the embedding"),
        (("model", "rms_epsilon"), 2.0, "below 1"),
        (("model", "architecture"), "gpt2", "architecture"),
        (("model", "surprise"), 1, "surprise"),
        (("model", "rope", "theta"), -1.0, "theta"),
        (("model", "rope", "kind"), "su", "kind"),
        (("model", "rope", "kind"), "yarn", "yarn"),
        (("model", "rope", "beta_fast"), 2.0, "no yarn fields"),
        (("model", "rope", "truncate"), False, "no yarn fields"),
        (("model", "rope", "original_context"), 64, "original_context"),
        (("model", "rope", "kind"), "linear", "factor"),
        (("model", "rope", "factor"), 2.0, "factor"),
        (("model", "rope", "low_frequency_factor"), 2.0, "no llama3 fields"),
        (("precision", "kv"), "fp4", "precision.kv"),
        (("precision", "kv"), "fp8", "layers.0.kv_scale"),
        (("tokens", "eos"), [330], "330 is outside of the vocabulary"),
        (("tokens", "bos"), 5000, "5000 is outside of the vocabulary"),
        (("target",), "sm_90a", "target"),
        (("name",), "", "name"),
        (("quality",), {"eval_text": "x"}, "quality"),
        (("provenance", "source_sha256"), "abc", "source_sha256"),
        (("provenance", "source_sha256"), "0" * 64, "`source_sha256` is not that of `source_files`"),
        (("provenance", "source_sha256"), None, "`source_sha256` is not that of `source_files`"),
        (("files", "manifest.sha256"), {"sha256": "0" * 64, "bytes": 1}, "does not lie inside"),
        (("files", "weights.safetensors"), ..., "lacks 'weights.safetensors'"),
        (("files", "tokenizer/tokenizer.json"), ..., "lacks 'tokenizer/tokenizer.json'"),
        (("files", "../other"), {"sha256": "0" * 64, "bytes": 1}, "does not lie inside"),
        (("files", "/etc/passwd"), {"sha256": "0" * 64, "bytes": 1}, "does not lie inside"),
        (("files", "vocab.bin", "bytes"), -1, "bytes"),
        (("files", "x" * 5000), {"sha256": "0" * 64, "bytes": 1}, "cannot be read"),
    ],
)
def test_damaged_fields_are_named(bundle: Path, path: tuple[str, ...], value: Any, words: str) -> None:
    edit(bundle, *path, value=value)
    refuse(bundle, words)


def test_tied_embeddings_share_the_precision_of_the_head(bundle: Path) -> None:
    edit(bundle, "model", "tied_embeddings", value=True)
    edit(bundle, "precision", "embedding", value="f32")
    refuse(bundle, "must equal `precision.lm_head`")


def test_missing_truncated_and_changed_files(bundle: Path) -> None:
    weights = bundle / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    refuse(bundle, "weights.safetensors is truncated: .* bytes, expected", "weights.safetensors")
    weights.write_bytes(content + b"x")
    refuse(bundle, "has the wrong size", "weights.safetensors")
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    open_bundle(bundle)
    refuse(bundle, "weights.safetensors differs from its SHA-256", "weights.safetensors", verify="hashes")
    weights.unlink()
    refuse(bundle, "weights.safetensors is missing; rebuild", "weights.safetensors")


def test_dimensions_must_fit_the_tensors(bundle: Path) -> None:
    edit(bundle, "model", "intermediate", value=112)
    refuse(bundle, r"tensor 'layers.0.gate_up.weight' is F8_E4M3 \[6, 48, 32\], the manifest asks for .*\[8, 48, 32\]")
    edit(bundle, "model", "intermediate", value=80)
    edit(bundle, "precision", "weights", value="bf16")
    refuse(bundle, "the manifest asks for BF16")
    edit(bundle, "precision", "weights", value="fp8")
    edit(bundle, "model", "qk_norm", value=True)
    refuse(bundle, "lacks tensor 'layers.0.q_norm'", "layers.0.q_norm")


def test_weights_of_another_kind(bundle: Path) -> None:
    path = bundle / "weights.safetensors"
    save_file({"weight": np.ones(16, np.float32)}, path)
    accept_file(bundle, "weights.safetensors")
    refuse(bundle, "lacks tensor 'embed.weight'")
    path.write_bytes(b"not weights at all")
    accept_file(bundle, "weights.safetensors")
    refuse(bundle, "not a safetensors file")


def test_unexpected_tensor(bundle: Path) -> None:
    path = bundle / "weights.safetensors"
    header_length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_length])
    header["layers.0.surprise"] = header.pop("norm")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + header_length :])
    accept_file(bundle, "weights.safetensors")
    refuse(bundle, "lacks tensor 'norm'")
    header["norm.bias"] = header.pop("layers.0.surprise")
    extra = {**header, "norm": {**header["norm.bias"]}, "norm.bias": {"dtype": "U8", "shape": [0]}}
    end = extra["norm"]["data_offsets"][0]
    extra["norm.bias"]["data_offsets"] = [end, end]
    text = json.dumps(extra).encode()
    data = path.read_bytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])
    accept_file(bundle, "weights.safetensors")
    refuse(bundle, "unexpected tensor 'norm.bias'", "norm.bias")


@pytest.mark.parametrize(
    ("position", "content", "words"),
    [
        (0, b"NOTVOCAB", "not a vocabulary table"),
        (8, (1).to_bytes(4, "little"), "has version 1, expected 2; rebuild"),
        (12, (329).to_bytes(4, "little"), "holds 329 tokens, the model has 330"),
        (20, (1).to_bytes(4, "little"), "damaged offsets"),
        (24, (1 << 31).to_bytes(4, "little"), "damaged offsets"),
    ],
)
def test_damaged_vocabulary(bundle: Path, position: int, content: bytes, words: str) -> None:
    path = bundle / "vocab.bin"
    data = path.read_bytes()
    path.write_bytes(data[:position] + content + data[position + len(content) :])
    refuse(bundle, words, "vocab.bin")


@pytest.mark.parametrize("keep", [0, 7, 12, 100, -1])
def test_truncated_vocabulary(bundle: Path, keep: int) -> None:
    path = bundle / "vocab.bin"
    path.write_bytes(path.read_bytes()[:keep])
    accept_file(bundle, "vocab.bin")
    refuse(bundle, "vocab.bin", "vocab.bin")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside of a JSON document."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, child in children for place in places(child, (*path, key))]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_of_a_manifest_crashes(bundle: Path, pristine: Path, data: st.DataObject) -> None:
    """Whatever a field becomes, the bundle opens (and then describes itself to the core) or is refused politely."""
    manifest = read_manifest_json(pristine)
    changed = copy.deepcopy(manifest)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(changed)))
        place = changed
        for key in path:
            place = place[key]
        if data.draw(st.booleans()):
            place[last] = data.draw(JSON_VALUES)
        else:
            del place[last]
    write_manifest_json(bundle, changed)
    try:
        opened = open_bundle(bundle)
    except BundleError as error:
        assert str(bundle) in str(error)
    else:
        assert opened.native_spec()["inv_freq"].shape == (opened.manifest.model.head_dim // 2,)
        assert np.isfinite(opened.native_spec()["inv_freq"]).all()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), length=st.integers(0, 300))
def test_no_bytes_crash_the_header_reader(tmp_path: Path, content: bytes, length: int) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + content)
    try:
        read_tensor_file(path)
    except ValueError as error:
        assert str(error)


def test_native_spec(pristine: Path) -> None:
    opened = open_bundle(pristine)
    spec = opened.native_spec()
    assert (spec["context"], spec["kv_dtype"], spec["windows"]) == (256, "bf16", [0, 0])
    offset, nbytes, dtype, shape = spec["tensors"]["layers.0.qkv.weight"]
    assert (dtype, shape, nbytes, offset % 64) == ("F8_E4M3", (3, 48, 32), 3 * 48 * 32, 0)
    assert opened.native_spec(context=64, kv="f32")["context"] == 64
    for options in ({"context": 257}, {"context": 0}, {"kv": "fp8"}):
        with pytest.raises(ConfigError):
            opened.native_spec(**options)


@pytest.mark.parametrize("precision", [Precision(), Precision("fp8", "fp8"), Precision("f32", "f32", "f32", "f32")])
@pytest.mark.parametrize("changes", [{}, {"intermediate": 61, "hidden": 31, "vocabulary": 333}])
def test_every_tensor_starts_on_a_cache_line(pristine: Path, precision: Precision, changes: dict[str, int]) -> None:
    """Odd dimensions get filler tensors, which the native core does not see."""
    model = msgspec.structs.replace(open_bundle(pristine).manifest.model, **changes)
    offset = 0
    for name, shape in expected_tensors(model, precision).items():
        assert name.endswith(".filler") or offset % 64 == 0, name
        offset += shape.nbytes
    assert offset % 64 == 0


def test_inspect_prints_what_is_inside(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(pristine) == 0
    printed = capsys.readouterr().out
    for words in ("llama", "4 heads, 2 KV heads, head size 12", "weights fp8", "not measured", "vocab.bin", "lm_head"):
        assert words in printed


def test_inspect_json(pristine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(pristine, as_json=True, verify=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["error"] is None
    assert report["parameters"] == sum(
        values.size for values in load_file(pristine.parent / "model" / "model.safetensors").values()
    )
    assert report["weight_bytes"]["total"] == open_bundle(pristine).weight_bytes
    assert set(report["verified"].values()) == {"ok"}
    assert next(iter(report["verified"])) == "manifest.json"
    assert report["digest"] == open_bundle(pristine).digest
    keys = set(Manifest.__struct_fields__)
    assert msgspec.convert({key: report[key] for key in keys}, Manifest) == open_bundle(pristine).manifest


def test_inspect_verify_says_which_file_differs(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    (bundle / "tokenizer" / "tokenizer_config.json").unlink()
    assert inspect.main(bundle, verify=True) == 1
    error = capsys.readouterr().err
    assert "tokenizer/tokenizer.json differs from its SHA-256" in error
    assert "tokenizer/tokenizer_config.json is missing" in error
    assert "weights.safetensors" not in error
    assert error.count("\n") == 1


def test_inspect_of_what_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(tmp_path / "nowhere.ull") == 1
    assert "no engine bundle" in capsys.readouterr().err
    assert inspect.main(tmp_path / "nowhere.ull", as_json=True) == 1
    assert "no engine bundle" in json.loads(capsys.readouterr().out)["error"]
