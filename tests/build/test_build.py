"""The build step: quantise, pack, write, and what the bundle holds in the end."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from checkpoints import BOS, EOS, make_config, write_checkpoint, write_json, write_shards
from ull.bundle import Bundle, Precision, TensorShape, open_bundle, read_tensor_file
from ull.errors import CheckpointError
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.convert import convert_checkpoint
from ull_build.weights.fuse import alternate_tiles, whole_tiles
from ull_build.weights.pack_cpu import ORIGINAL_BF16, ORIGINAL_F32, CpuPacker, pack_tiles, unpack_tiles
from ull_build.weights.quantise import dequantise_rows, quantise_rows, to_bf16
from ull_build.weights.writer import WeightsWriter

FP8 = Precision()
ROWS = hypothesis_numpy.arrays(
    np.float32,
    hypothesis_numpy.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


# Quantise


@settings(deadline=None)
@given(rows=ROWS)
def test_quantised_rows_are_near_and_never_nan_or_subnormal(rows: NDArray[np.float32]) -> None:
    codes, scales = quantise_rows(rows)
    magnitudes = codes & 0x7F
    assert codes.shape == rows.shape and scales.shape == rows.shape[:1]
    assert (magnitudes < 0x7F).all()
    assert ((magnitudes == 0) | (magnitudes >= 8)).all()
    assert (np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)).all()
    stored = dequantise_rows(codes, scales).astype(np.float64)
    # Half of the last of 3 mantissa bits for normals, half of the least normal below; and float32's own rounding.
    bound = np.maximum(np.abs(rows) * 2.0**-4, scales[:, None].astype(np.float64) * 2.0**-7) * (1 + 1e-6)
    assert (np.abs(stored - rows) <= bound).all()


def test_rounding_is_to_nearest_even_as_in_ml_dtypes() -> None:
    values = np.concatenate([np.arange(2.0**-6, 448, 0.013), np.arange(0, 448.5, 0.5)]).astype(np.float32)
    values = values[(values == 0) | ((values >= 2.0**-6) & (values <= 448))]
    row = np.concatenate([values, -values])[None, :]
    codes, scales = quantise_rows(row)
    assert scales.tolist() == [1.0]
    np.testing.assert_array_equal(dequantise_rows(codes, scales), row.astype(ml_dtypes.float8_e4m3fn).astype(float))


@pytest.mark.parametrize(
    ("value", "stored"),
    [(2.0**-7, 0.0), (np.nextafter(np.float32(2.0**-7), np.float32(1)), 2.0**-6), (0.0155, 2.0**-6), (-0.0, 0.0)],
)
def test_subnormals_go_to_the_nearer_neighbour(value: float, stored: float) -> None:
    codes, scales = quantise_rows(np.array([[448.0, value, -value]], np.float32))
    assert dequantise_rows(codes, scales).tolist() == [[448.0, stored, -stored]]


def test_zero_and_extreme_rows() -> None:
    largest = np.finfo(np.float32).max
    rows = np.array([[0, 0], [largest, -largest], [1e-45, 0], [-3, 1.5]], np.float32)
    codes, scales = quantise_rows(rows)
    assert scales[0] == 1.0 and codes[0].tolist() == [0, 0]
    stored = dequantise_rows(codes, scales)
    np.testing.assert_allclose(stored[[1, 3]], rows[[1, 3]], rtol=1e-6)
    assert stored[2].tolist() == [0, 0]


def test_bf16_saturates() -> None:
    largest = np.finfo(np.float32).max
    stored = to_bf16(np.array([largest, -largest, 1.0], np.float32)).view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isfinite(stored).all() and stored[2] == 1.0


# Pack


@pytest.mark.parametrize(("dtype", "interleaved"), [(np.uint8, True), (np.uint16, True), (np.float32, False)])
def test_every_element_lies_where_the_layout_says(dtype: Any, interleaved: bool) -> None:
    tiles, columns = 3, 5
    rows = np.arange(tiles * 32 * columns).reshape(-1, columns).astype(dtype)
    packed = pack_tiles(rows)
    assert packed.shape == (tiles, columns, 32)
    for position in range(32):
        row = position // 2 + 16 * (position % 2) if interleaved else position
        np.testing.assert_array_equal(packed[:, :, position], rows.reshape(tiles, 32, columns)[:, row, :])
    np.testing.assert_array_equal(unpack_tiles(packed), rows)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_whole_tiles_keep_order_and_pad_the_end(lengths: list[int]) -> None:
    total = sum(lengths)
    stream = np.arange(1, 2 * total + 1).reshape(-1, 2)
    blocks = np.split(stream, np.cumsum(lengths)[:-1])
    tiles = list(whole_tiles(blocks, 32))
    assert all(len(tile) % 32 == 0 for tile in tiles)
    joined = np.concatenate(tiles)
    assert len(joined) == -(-total // 32) * 32
    np.testing.assert_array_equal(joined[:total], stream)
    assert not joined[total:].any()


def test_alternate_tiles() -> None:
    gate, up = np.arange(40)[:, None] + 1, np.arange(40)[:, None] + 101
    joined = np.concatenate(list(alternate_tiles([gate], [up], 32))).reshape(4, 32)
    assert joined[:, 0].tolist() == [1, 101, 33, 133]
    assert joined[2, 7] == 40 and not joined[2, 8:].any()


# Write


def test_weights_file_is_standard_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    first, second = np.arange(32, dtype=np.float32), np.arange(64, dtype=np.uint16)
    plan = {"b": TensorShape("F32", (2, 16)), "a": TensorShape("BF16", (64,))}
    with WeightsWriter(path, plan) as writer:
        writer.write("b", first[:8])
        writer.write("b", first[8:])
        writer.write("a", second)
        entry = writer.finish()
    data = path.read_bytes()
    assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (8 + int.from_bytes(data[:8], "little")) % 64 == 0
    loaded = load_file(path)
    np.testing.assert_array_equal(loaded["b"], first.reshape(2, 16))
    np.testing.assert_array_equal(loaded["a"].view(np.uint16), second)


def test_writer_refuses_wrong_order_and_incomplete_tensors(tmp_path: Path) -> None:
    plan = {"a": TensorShape("F32", (16,)), "b": TensorShape("F32", (16,))}
    piece = np.zeros(16, np.float32)
    with WeightsWriter(tmp_path / "w", plan) as writer:
        with pytest.raises(ValueError, match="'a' are due"):
            writer.write("b", piece)
        writer.write("a", piece[:8])
        with pytest.raises(ValueError, match="32 of 'a'"):
            writer.write("a", piece)
        with pytest.raises(ValueError, match="lacks 32 bytes, 1 are missing"):
            writer.finish()
    with pytest.raises(ValueError, match="no multiple of 64"):
        WeightsWriter(tmp_path / "w", {"a": TensorShape("F32", (3,)), "b": TensorShape("F32", (16,))})


# The bundle


def make(directory: Path, checkpoint: Path, precision: Precision = FP8, **options: Any) -> Bundle:
    """Builds without evaluation and opens with all hashes checked."""
    made = build(
        Settings(model=checkpoint, output=directory / "x.ull", name="x", precision=precision, evaluate=False, **options)
    )
    return open_bundle(made.path, verify="hashes")


def stored_tensor(bundle: Bundle, name: str) -> NDArray[Any]:
    """A tensor of the weights file, FP8 and BF16 widened to float32."""
    entry = bundle.tensors[name]
    dtype = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
    data = bundle.weights_path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    return np.frombuffer(data, dtype[entry.dtype]).reshape(entry.shape)


def linear_rows(bundle: Bundle, name: str) -> NDArray[np.float32]:
    """A linear's rows as the executor understands them, padding included: float32 [32 * tiles, K]."""
    rows = unpack_tiles(stored_tensor(bundle, f"{name}.weight")).astype(np.float32)
    scale = f"{name}.scale"
    return rows * stored_tensor(bundle, scale)[:, None] if scale in bundle.tensors else rows


def halves(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """gate and up from alternating tiles."""
    tiles = values.reshape(-1, 2, 32, *values.shape[1:])
    return tiles[:, 0].reshape(-1, *values.shape[1:]), tiles[:, 1].reshape(-1, *values.shape[1:])


ODD = {"hidden_size": 45, "intermediate_size": 61, "head_dim": 10, "vocab_size": 327}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", ODD),
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 20, "num_key_value_heads": 1}),
    ],
)
@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        (FP8, "bf16", 2.0**-4),
        (Precision("fp8", "fp8"), "fp16", 2.0**-4),
        (ORIGINAL_BF16, "bf16", 0.0),
        (ORIGINAL_F32, "fp32", 0.0),
        (ORIGINAL_F32, "fp16", 0.0),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_bundle_holds_the_checkpoint(
    tmp_path: Path,
    architecture: str,
    config: dict[str, Any],
    precision: Precision,
    dtype: str,
    tolerance: float,
    tied: bool,
) -> None:
    directory = write_checkpoint(tmp_path / "m", architecture, config=config, dtype=dtype, tied=tied, shards=2)
    source: dict[str, NDArray[np.float32]] = {}
    for path in directory.glob("*.safetensors"):
        source.update({name: values.astype(np.float32) for name, values in load_file(path).items()})
    bundle = make(tmp_path, directory, precision)
    loss = {"F32": 0.0, "BF16": 0.0 if dtype == "bf16" else 2.0**-8}[bundle.tensors["norm"].dtype]

    def check(rows: NDArray[np.float32], *names: str, within: float = tolerance) -> None:
        wanted = np.concatenate([source[name] for name in names])
        bound = within * np.abs(wanted) + (2.0**-7 / 448 * np.abs(wanted).max(-1, keepdims=True) if within else 0)
        assert (np.abs(rows[: len(wanted)] - wanted) <= bound * (1 + 1e-6)).all(), names
        assert not rows[len(wanted) :].any(), f"padding of {names}"

    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head_tolerance = {"fp8": 2.0**-4, "bf16": loss, "f32": 0.0}[precision.lm_head]
    check(linear_rows(bundle, "lm_head"), head, within=head_tolerance)
    assert ("embed.weight" in bundle.tensors) == (not tied or precision.lm_head == "fp8")
    if "embed.weight" in bundle.tensors:
        check(stored_tensor(bundle, "embed.weight").astype(np.float32), "model.embed_tokens.weight", within=loss)
    check(stored_tensor(bundle, "norm").astype(np.float32), "model.norm.weight", within=loss)
    for layer in range(2):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        vectors = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if architecture == "qwen3":
            vectors |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
        for name, other in vectors.items():
            vector = stored_tensor(bundle, f"{ours}.{name}").astype(np.float32)
            check(vector, f"{theirs}.{other}.weight", within=loss)
        attention = [f"{theirs}.self_attn.{name}_proj" for name in "qkv"]
        check(linear_rows(bundle, f"{ours}.qkv"), *(f"{name}.weight" for name in attention))
        check(linear_rows(bundle, f"{ours}.o"), f"{theirs}.self_attn.o_proj.weight")
        for rows, name in zip(halves(linear_rows(bundle, f"{ours}.gate_up")), ("gate", "up"), strict=True):
            check(rows, f"{theirs}.mlp.{name}_proj.weight")
        check(linear_rows(bundle, f"{ours}.down"), f"{theirs}.mlp.down_proj.weight")
        has_bias = {name for name in ("qkv", "o", "gate_up", "down") if f"{ours}.{name}.bias" in bundle.tensors}
        everywhere = {"qkv", "o", "gate_up", "down"} if config.get("mlp_bias") else set()
        assert has_bias == ({"qkv"} if architecture == "qwen2" else everywhere)
        if "qkv" in has_bias:
            bias = stored_tensor(bundle, f"{ours}.qkv.bias").astype(np.float32)
            check(bias, *(f"{name}.bias" for name in attention), within=loss)
        if "gate_up" in has_bias:
            biases = halves(stored_tensor(bundle, f"{ours}.gate_up.bias").astype(np.float32))
            for rows, name in zip(biases, ("gate", "up"), strict=True):
                check(rows, f"{theirs}.mlp.{name}_proj.bias", within=loss)


def test_equal_input_gives_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run to run, and whatever the size of the blocks that a tensor is read in."""
    checkpoint = write_checkpoint(tmp_path / "m", config={"intermediate_size": 200})
    hashes = []
    for run, block in enumerate((1 << 20, 1 << 20, 1)):
        monkeypatch.setattr("ull_build.source.checkpoint.BLOCK_ELEMENTS", block)
        (tmp_path / str(run)).mkdir()
        bundle = make(tmp_path / str(run), checkpoint)
        hashes.append(bundle.manifest.files["weights.safetensors"].sha256)
    assert len(set(hashes)) == 1


def test_weights_open_with_the_safetensors_library(tmp_path: Path) -> None:
    bundle = make(tmp_path, write_checkpoint(tmp_path / "m"), ORIGINAL_BF16)
    with safe_open(bundle.weights_path, "np") as file:
        assert set(file.keys()) == set(bundle.tensors)
        assert file.get_tensor("layers.0.qkv.weight").shape == (3, 48, 32)


def test_manifest(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model-7", config={"eos_token_id": None})
    write_json(checkpoint / "generation_config.json", {"eos_token_id": [2, 1], "temperature": 0.6})
    manifest = make(tmp_path, checkpoint, context=100, recipe={"name": "x"}).manifest
    assert (manifest.tokens.bos, manifest.tokens.eos, manifest.tokens.chat_template) == (BOS, [1, 2], True)
    assert manifest.model.context == 100
    assert manifest.quality is None
    assert manifest.provenance.source == "model-7"
    assert manifest.provenance.recipe == {"name": "x"}
    names = {"weights.safetensors", "vocab.bin", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert set(manifest.files) == names


def test_eos_falls_back_to_the_tokenizer(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m", config={"eos_token_id": None, "bos_token_id": None})
    tokens = make(tmp_path, checkpoint).manifest.tokens
    assert (tokens.bos, tokens.eos) == (None, [EOS])


def test_special_tokens_outside_of_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m", config={"eos_token_id": [1, 400]})
    with pytest.raises(CheckpointError, match="`eos_token_id` 400 is outside of the embedding's 330 rows"):
        make(tmp_path, checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


MEASURE = """
import sys
from pathlib import Path
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.checkpoint import Checkpoint
from ull_build.weights.convert import convert_checkpoint
from ull_build.weights.pack_cpu import ORIGINAL_F32, CpuPacker

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

source, output = map(Path, sys.argv[1:])
before = peak()
build(Settings(model=source, output=output, name="x", evaluate=False))
with Checkpoint(source) as checkpoint:
    convert_checkpoint(checkpoint, CpuPacker(ORIGINAL_F32), output.with_suffix(".f32"))
print(peak() - before)
"""


def write_large_checkpoint(directory: Path) -> Path:
    """About 200 MB of bf16 weights, whose biggest tensor is the 66 MB embedding."""
    directory.mkdir()
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "head_dim": 64, "num_attention_heads": 32}
    config = make_config("llama", **sizes, num_hidden_layers=1, vocab_size=16000, tie_word_embeddings=True)
    write_json(directory / "config.json", config)
    small = write_checkpoint(directory / "small", tied=True, config={"num_hidden_layers": 1})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).rename(directory / name)
    replace = {48: 2048, 80: 5632, 330: 16000, 24: 128}
    random = np.random.default_rng(0)
    tensors = {}
    for name, values in load_file(small / "model.safetensors").items():
        shape = [replace[size] for size in values.shape]
        # Random signs and mantissas with one exponent: ordinary weights, drawn fast.
        bits = random.integers(0, 1 << 16, shape, dtype=np.uint16) & np.uint16(0x807F) | np.uint16(0x3C00)
        tensors[name] = bits.view(ml_dtypes.bfloat16)
    write_shards(directory, tensors)
    return directory


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_checkpoint(tmp_path_factory.mktemp("large") / "m")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_stays_below_the_biggest_tensor(tmp_path: Path, large_checkpoint: Path) -> None:
    """The issue allows twice the biggest tensor plus the output's; reading in blocks needs less than half of one."""
    arguments = [sys.executable, "-c", MEASURE, str(large_checkpoint), str(tmp_path / "x.ull")]
    used = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    biggest = max(entry.nbytes for entry in read_tensor_file(large_checkpoint / "model.safetensors").values())
    assert biggest == 16000 * 2048 * 2
    assert used < biggest


def test_relative_errors_are_those_of_the_packed_tensors(tmp_path: Path) -> None:
    """`convert_checkpoint` reports per linear weight what a comparison of the files gives."""
    checkpoint_directory = write_checkpoint(tmp_path / "m")
    bundle = make(tmp_path, checkpoint_directory)
    (tmp_path / "f32").mkdir()
    original = make(tmp_path / "f32", checkpoint_directory, ORIGINAL_F32)
    with Checkpoint(checkpoint_directory) as checkpoint:
        _, errors = convert_checkpoint(checkpoint, CpuPacker(FP8), tmp_path / "again")
    assert [item.name for item in errors] == [name for name in bundle.tensors if name.endswith(".weight")][1:]
    for item in errors:
        stem = item.name.removesuffix(".weight")
        exact, stored = linear_rows(original, stem), linear_rows(bundle, stem)
        wanted = np.linalg.norm(stored - exact) / np.linalg.norm(exact)
        assert item.relative_error == pytest.approx(wanted, rel=1e-4, abs=1e-12)
        assert (item.relative_error == 0.0) == (stem == "lm_head")
        assert item.relative_error < 0.03
    assert msgspec.to_builtins(errors[0]).keys() == {"name", "relative_error"}
