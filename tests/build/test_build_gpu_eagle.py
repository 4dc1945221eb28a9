"""EAGLE heads in bundles for a GPU: how they are stored, compiled, captured and handed over, and what is refused."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import write_checkpoint
from device_bundles import write_stubs
from device_heads import compiled_with, dequantised, halves, of_head, refuse, rounds, touched, without, without_chunks
from head_checkpoints import HeadShape, Tensors, eagle_tensors, write_eagle
from manifests import change_manifest, read_manifest_json
from recording_driver import Launched, RecordingDriver
from ull.bundle import (
    DEVICE_KERNELS,
    EAGLE,
    EAGLE_CHUNK_KERNELS,
    EAGLE_CHUNKS,
    EAGLE_KERNELS,
    EAGLE_PASSES,
    Bundle,
    EagleHead,
    Precision,
    open_bundle,
)
from ull.commands import inspect
from ull.errors import BundleError, CheckpointError, RecipeError
from ull.gpu.memory import TAP_RING
from ull.gpu.program import Program
from ull.gpu.weights import WeightImage, random_fills, random_vectors
from ull.log import Log
from ull_build import cli
from ull_build.build import build
from ull_build.code import kernels
from ull_build.recipe import ForwardRecipe, load_recipe, make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.source.drafters import SpeculationSettings

TARGET = {"head_dim": 32, "hidden_size": 96, "num_attention_heads": 4, "vocab_size": 333}
SHAPE = HeadShape(
    hidden=96, intermediate=84, heads=4, kv_heads=2, head_dim=32, own=100, target_hidden=96, rows=333, tokens=320
)
CONTEXT = 256
FP8 = Precision(weights="fp8", lm_head="fp8")
FILL, LEVELS = 64, (16, 32, 64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model", config=TARGET)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))


def build_it(target: Path, head: Path, output: Path, machine: Any = "sm_90a", **options: Any) -> Bundle:
    speculation = SpeculationSettings(eagle=head)
    options = {"evaluate": False, "context": CONTEXT, "speculation": speculation} | options
    return open_bundle(build(Settings(target, output, "x", machine, **options)).path, "hashes")


@pytest.fixture
def bundle(target: Path, tmp_path: Path) -> Bundle:
    """Of a head that reads layers in an order of its own, one of them what leaves the last."""
    return build_it(target, write_eagle(tmp_path / "head", taps=[2, 0], shape=SHAPE), tmp_path / "x.ull")


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def program(bundle: Bundle, driver: RecordingDriver) -> Iterator[Program]:
    loaded = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    yield loaded
    loaded.close()
    assert not any(driver.live.values())


def eagle_of(bundle: Bundle) -> EagleHead:
    assert bundle.manifest.speculation is not None and bundle.manifest.speculation.eagle is not None
    return bundle.manifest.speculation.eagle


# What is stored


def biased(tensors: Tensors) -> None:
    random = np.random.default_rng(9)
    for name in ("q", "k", "v"):
        rows = len(tensors[f"midlayer.self_attn.{name}_proj.weight"])
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = random.standard_normal(rows).astype(np.float32)
    tensors["fc.bias"] = random.standard_normal(len(tensors["fc.weight"])).astype(np.float32)


def with_qk_norm(tensors: Tensors) -> None:
    for name in ("q", "k"):
        tensors[f"midlayer.self_attn.{name}_norm.weight"] = np.linspace(0.5, 1.5, SHAPE.head_dim, dtype=np.float32)


def test_the_blocks_hold_what_the_cpus_tiles_do(target: Path, tmp_path: Path) -> None:
    """Every linear, dequantised, every norm and bias, and the map, of a head that has all that a head can have."""

    def change(tensors: Tensors) -> None:
        biased(tensors)
        with_qk_norm(tensors)

    head = write_eagle(tmp_path / "head", norms="all", tensors=change, shape=SHAPE)
    on_gpu = build_it(target, head, tmp_path / "gpu.ull", precision=FP8)
    on_cpu = build_it(target, head, tmp_path / "cpu.ull", "cpu", precision=FP8)
    expected, found = of_head(on_cpu, EAGLE), of_head(on_gpu, EAGLE)
    for name, rows in (
        ("fc", 96),
        ("layers.0.qkv", 8 * 32),
        ("layers.0.o", 96),
        ("layers.0.down", 96),
        ("lm_head", 100),
    ):
        one, two = dequantised(found, name), dequantised(expected, name)
        columns = two.shape[1]
        np.testing.assert_array_equal(one[:rows, :columns], two[:rows], err_msg=name)
        assert not one[rows:].any() and not one[:, columns:].any(), name
    gate_up = halves(dequantised(found, "layers.0.gate_up"), 8), halves(dequantised(expected, "layers.0.gate_up"), 32)
    np.testing.assert_array_equal(gate_up[0][:, : SHAPE.intermediate], gate_up[1][:, : SHAPE.intermediate])
    vectors = {"tap_norm": 3 * 96, "norm": 96, "fc.bias": 96, "layers.0.qkv.bias": 8 * 32}
    vectors |= {f"layers.0.{name}": 96 for name in ("attn_norm", "hidden_norm", "mlp_norm")}
    vectors |= {"layers.0.q_norm": 32, "layers.0.k_norm": 32, "d2t": 100}
    for name, length in vectors.items():
        one, two = found[name], expected[name]
        np.testing.assert_array_equal(one[:length], two[:length].astype(one.dtype), err_msg=name)
        assert not one[length:].any(), name
    assert {name.removesuffix(".weight") for name in found if name.endswith(".weight")} == {
        *("fc", "layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "lm_head")
    }


@pytest.mark.parametrize("norms", ["none", "each", "all"])
def test_the_norms_before_fc_are_one_vector(target: Path, tmp_path: Path, norms: Any) -> None:
    bundle = build_it(target, write_eagle(tmp_path / "head", norms=norms, shape=SHAPE), tmp_path / "x.ull")
    head, stored = eagle_of(bundle), of_head(bundle, EAGLE)
    assert head.tap_norm == norms and head.code is not None
    assert head.code.macros["ULL_EAGLE_TAP_NORM"] == {"none": "0", "each": "1", "all": "2"}[norms]
    if norms == "none":
        assert "tap_norm" not in stored
        return
    source = eagle_tensors(norms=norms, shape=SHAPE)
    names = [f"fc_norm.{tap}" for tap in range(3)] if norms == "each" else ["input_norm"]
    expected = np.concatenate([source[f"{name}.weight"] for name in names])
    np.testing.assert_allclose(stored["tap_norm"][: len(expected)], expected, rtol=2.0**-8)


def test_a_head_of_another_width_brings_its_embedding(target: Path, tmp_path: Path) -> None:
    narrow = HeadShape(
        hidden=64, intermediate=80, heads=2, kv_heads=1, head_dim=32, own=100, target_hidden=96, rows=333, tokens=320
    )
    own = np.random.default_rng(2).standard_normal((333, 64)).astype(np.float32)

    def change(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = own

    head = write_eagle(tmp_path / "head", taps=[1], tensors=change, shape=narrow)
    bundle = build_it(target, head, tmp_path / "x.ull")
    stored, about = of_head(bundle, EAGLE), eagle_of(bundle)
    assert about.own_embedding and about.model.hidden == 64
    np.testing.assert_allclose(stored["embed.weight"].astype(np.float32), own, rtol=2.0**-8)
    assert stored["fc.weight"].shape == (64 // 16, 96 // 32, 32, 16)
    assert stored["layers.0.qkv.weight"].shape == (4 * 32 // 16, 2 * 64 // 32, 32, 16)
    assert about.code is not None and about.code.macros["ULL_EAGLE_TARGET_HIDDEN"] == "96"
    driver = RecordingDriver()
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    [input_] = [one for one in driver.graphs[program.handover["eagle"]["fill"]] if one.kernel == "ull_eagle_input"]
    assert input_.params.table == program._arena.address("weights") + (program._image.offset("eagle.embed.weight") or 0)
    program.close()


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_heads_precision_is_the_weights_and_its_pages_16_bits(
    target: Path, tmp_path: Path, weights: Any, kv: Any
) -> None:
    """Its lm_head too: what it proposes is verified anyway."""
    head = write_eagle(tmp_path / "head", shape=SHAPE)
    bundle = build_it(target, head, tmp_path / "x.ull", precision=Precision(weights=weights, kv=kv))
    assert eagle_of(bundle).precision == Precision(weights=weights, lm_head=weights, kv="bf16")
    assert bundle.tensors["eagle.lm_head.weight"].dtype == {"fp8": "F8_E4M3", "bf16": "F16"}[weights]
    assert "eagle.layers.0.kv_scale" not in bundle.tensors
    assert ("layers.0.kv_scale" in bundle.tensors) == (kv == "fp8")
    driver = RecordingDriver()
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver, persistent=True)
    assert program.handover["eagle"]["kv_bytes"] == 2 * 2 * SHAPE.kv_heads * SHAPE.head_dim * CONTEXT
    program.close()


# Its code


def test_the_kernels_of_both_know_each_other(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    head, code = eagle_of(bundle), bundle.manifest.code
    assert head.code is not None and code is not None
    assert set(head.code.kernels()) >= EAGLE_PASSES | EAGLE_CHUNKS
    assert all(file.path.startswith("code/eagle/") for file in head.code.files)
    assert not (EAGLE_KERNELS | EAGLE_CHUNK_KERNELS) & set(code.kernels()) and set(code.kernels()) >= DEVICE_KERNELS
    assert (code.macros["ULL_TAPS"], code.macros["ULL_LAYERS"], code.macros["ULL_MAY_LACK"]) == ("2", "2", "0")
    assert not [name for name in code.macros if name.startswith("ULL_EAGLE")]
    own = {"ULL_LAYERS": "1", "ULL_HIDDEN": "96", "ULL_VOCABULARY": "100", "ULL_WEIGHT_BITS": "8", "ULL_HEAD_BITS": "8"}
    own |= {"ULL_TAPS": "1", "ULL_MAY_LACK": "1", "ULL_KV_BITS": "16", "ULL_EAGLE_TARGET_HIDDEN": "96"}
    own |= {"ULL_EAGLE_TAPS": "2", "ULL_EAGLE_TAP_NORM": "0", "ULL_EAGLE_MAPPED": "1", "ULL_EAGLE_NORM_OUTPUT": "0"}
    assert own.items() <= head.code.macros.items()
    assert (head.taps, bundle.manifest.taps) == ([2, 0], [0, 2])
    assert inspect.main(bundle.path, verify=True) == 0
    assert "eagle head" in capsys.readouterr().out
    report = inspect.describe(bundle)
    stored = sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith("eagle."))
    assert report["weight_bytes"]["eagle head"] == stored > 0
    assert report["speculation"]["eagle"]["code"]["macros"] == head.code.macros


@pytest.mark.parametrize(
    ("about", "macro"),
    [
        ({"norm_before_residual": True}, "ULL_EAGLE_NORM_BEFORE_RESIDUAL"),
        ({"norm_output": True}, "ULL_EAGLE_NORM_OUTPUT"),
    ],
)
def test_the_kernels_are_compiled_for_the_heads_kind(
    target: Path, tmp_path: Path, about: dict[str, Any], macro: str
) -> None:
    head = write_eagle(tmp_path / "head", norms="each", config=about, shape=SHAPE)
    code = eagle_of(build_it(target, head, tmp_path / "x.ull")).code
    assert code is not None and code.macros[macro] == "1"


def test_a_gpu_without_warpgroup_products_has_no_kernels_of_chunks(target: Path, tmp_path: Path) -> None:
    head = eagle_of(build_it(target, write_eagle(tmp_path / "head", shape=SHAPE), tmp_path / "x.ull", "sm_100a"))
    assert head.code is not None and set(head.code.kernels()) >= EAGLE_PASSES
    assert set(head.code.kernels()) & EAGLE_CHUNKS == {"ull_begin_chunk"}


def test_a_head_whose_bundle_lacks_them_reads_without_chunks(bundle: Bundle) -> None:
    """One that an older ull has built: the graph is not there, nor memory for it."""
    older = without_chunks(bundle, "eagle")
    program = Program(older, Log(stream=io.StringIO()), driver=RecordingDriver())
    handed = program.handover["eagle"]
    assert handed["chunk"] == 0 and "chunks" not in handed and program.handover["chunk"] != 0
    assert "last_chunk" not in handed and program.handover["last_chunk"] != 0
    assert not [name for name in program._plan.regions if name.startswith("eagle.chunk")]
    program.close()


# What is captured


def passes(program: Program, driver: RecordingDriver) -> dict[str, list[Launched]]:
    """The launches of each pass, by its name."""
    eagle = program.handover["eagle"]
    graphs = {name: eagle[name] for name in ("fill", "chunk", "first")}
    graphs |= {f"level {entries}": graph for entries, graph in eagle["levels"].items()}
    return {name: driver.graphs[graph] for name, graph in graphs.items()}


def layer(tokens: int) -> list[str]:
    wide = tokens > 8
    qkv = [f"ull_eagle_qkv_{tokens}", *([f"ull_qkv_sum_{tokens}"] if wide else [])]
    norm = [f"ull_norm_{tokens}"] if wide else []
    rest = [f"ull_attention_{tokens}", f"ull_o_{tokens}", *norm, f"ull_gate_up_{tokens}", f"ull_down_{tokens}"]
    return qkv + rest


def head_of(tokens: int) -> list[str]:
    return [*([f"ull_norm_{tokens}"] if tokens > 8 else []), f"ull_head_{tokens}", "ull_eagle_rank", "ull_accept"]


def test_a_pass_is_the_kernels_in_order(program: Program, driver: RecordingDriver) -> None:
    captured = passes(program, driver)
    names = {name: [launch.kernel for launch in graph] for name, graph in captured.items()}
    from_taps = {
        tokens: ["ull_begin", "ull_eagle_taps", f"ull_eagle_fc_{tokens}", "ull_eagle_input"] for tokens in (8, 64)
    }
    stored = layer(FILL)[: layer(FILL).index("ull_o_64")]  # nothing behind keys and values is wanted
    assert names.pop("fill") == [*from_taps[FILL], *stored, "ull_accept", "ull_commit"]
    of_chunk = [f"ull_eagle_chunk_{name}" for name in ("taps", "fc", "input", "kv")]
    assert names.pop("chunk") == ["ull_begin_chunk", *of_chunk, "ull_chunk_store", "ull_accept"]
    assert names.pop("first") == [*from_taps[8], *layer(8), *head_of(8), "ull_commit"]
    for tokens in LEVELS:
        assert names.pop(f"level {tokens}") == ["ull_begin", "ull_eagle_input", *layer(tokens), *head_of(tokens)]
    assert not names
    for graph in captured.values():  # the second reads the round as begin has left it, and so may all behind it
        assert [launch.overlaps for launch in graph] == [False, False] + [True] * (len(graph) - 2)
    for taps in (captured["fill"][1], captured["chunk"][1]):
        assert (taps.params.ring_taps, list(taps.params.taps)[:2]) == (2, [1, 0])  # by their places in the ring
    functions = {launch.function for launch in rounds(program, driver)}
    assert not functions & {launch.function for graph in captured.values() for launch in graph}


def test_it_shares_the_ring_and_the_requests_state_with_its_target_alone(
    program: Program, driver: RecordingDriver
) -> None:
    of_target = touched(program, rounds(program, driver))
    of_passes = touched(program, [launch for graph in passes(program, driver).values() for launch in graph])
    assert not [where for _, where in of_target if where.startswith("eagle")]
    shared = {(kernel, where) for kernel, where in of_passes if not where.startswith("eagle")}
    assert shared == {
        ("ull_begin", "round"),  # what has been accepted, for a pass behind a round
        ("ull_begin", "state"),
        ("ull_begin_chunk", "round"),
        ("ull_begin_chunk", "state"),
        ("ull_eagle_taps", TAP_RING),
        ("ull_eagle_chunk_taps", TAP_RING),
        ("ull_eagle_input", "embed.weight"),
        ("ull_eagle_chunk_input", "embed.weight"),
        ("ull_eagle_rank", "state"),
        ("ull_eagle_rank", "text counts"),
    }
    assert ("ull_eagle_rank", "eagle.d2t") in of_passes
    assert TAP_RING in {where for _, where in of_target} and "eagle." + TAP_RING not in program._plan.regions


def test_what_is_handed_over(program: Program, bundle: Bundle) -> None:
    whole = program.handover
    eagle = whole["eagle"]
    blocks = {"requests", "results", "control", "pages", "text", "mask", "chunks"}
    sizes = {"vocabulary", "context_tokens", "page_count", "kv_bytes", "kv_pages", "weight_bytes"}
    assert eagle.keys() == {"fill", "chunk", "first", "levels", "stream", "context", "name", "library"} | blocks | sizes
    assert tuple(eagle["levels"]) == LEVELS
    assert (eagle["vocabulary"], eagle["context_tokens"]) == (SHAPE.own, CONTEXT)
    assert eagle["page_count"] == whole["page_count"] and eagle["kv_pages"] != whole["kv_pages"]
    assert (eagle["stream"], eagle["context"]) == (whole["stream"], whole["context"])
    assert not {eagle[name] for name in blocks} & {whole[name] for name in blocks}
    stored = sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith("eagle."))
    assert eagle["weight_bytes"] == stored > 0
    assert whole["weight_bytes"] == bundle.weight_bytes - stored
    assert "draft" not in whole


def test_a_draft_model_may_stand_beside_it(target: Path, tmp_path: Path, driver: RecordingDriver) -> None:
    draft = write_checkpoint(tmp_path / "draft", seed=1, config=TARGET | {"num_hidden_layers": 1})
    speculation = SpeculationSettings(draft=draft, eagle=write_eagle(tmp_path / "head", shape=SHAPE))
    bundle = build_it(target, tmp_path / "head", tmp_path / "x.ull", speculation=speculation)
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    handover = program.handover
    parts = (handover, handover["draft"], handover["eagle"])
    assert sum(part["weight_bytes"] for part in parts) == bundle.weight_bytes
    assert len({part["kv_pages"] for part in parts}) == 3
    program.close()


# What is refused


refuse_eagle = partial(refuse, kind="eagle")


def test_damaged_bundles_are_refused(bundle: Bundle) -> None:
    path = bundle.path
    refuse_eagle(path, "target 'sm_90a' needs `code` of the EAGLE head", lambda head: head.pop("code"))
    macros: list[tuple[str, str]] = [
        ("ULL_EAGLE_TAPS", "3"),
        ("ULL_EAGLE_MAPPED", "0"),
        ("ULL_EAGLE_TARGET_HIDDEN", "64"),
        ("ULL_MAY_LACK", "0"),
        ("ULL_KV_BITS", "8"),
    ]
    for name, value in macros:
        words = f"the kernels of the EAGLE head were compiled with {name} = {value} where"
        refuse_eagle(path, words, partial(compiled_with, name, value), f"code.macros.{name}")
    refuse_eagle(
        path, "of the EAGLE head were compiled with ULL_EAGLE_NORM_OUTPUT", lambda head: head.update(norm_output=True)
    )
    refuse_eagle(path, "lacks tensor 'eagle.tap_norm'", normed_each)
    refuse_eagle(
        path,
        "lacks tensor 'eagle.embed.weight'",
        lambda head: head.update(own_embedding=True),
    )
    refuse_eagle(path, "the EAGLE head: head_dim 48 is not", lambda head: head["model"].update(head_dim=48))
    refuse_eagle(path, r"does not lie in code/", lambda head: head["code"]["files"][0].update(path="vocab.bin"))
    refuse_eagle(path, "is listed twice", lambda head: head["code"]["files"][0].update(path="code/first.cubin"))
    for kernel in ("ull_eagle_rank", "ull_qkv_sum_16", "ull_begin"):
        refuse_eagle(path, f"lacks the kernel '{kernel}' of the EAGLE head", partial(without, kernel))
    file = path / next(file.path for file in eagle_of(bundle).code.files)  # type: ignore[union-attr]
    cubin = file.read_bytes()
    file.write_bytes(b"x" * len(cubin))
    with pytest.raises(BundleError, match="is not a cubin"):
        open_bundle(path)
    file.unlink()
    with pytest.raises(BundleError, match=rf"{file.name} is missing"):
        open_bundle(path)


def normed_each(head: dict[str, Any]) -> None:
    """A head that is said to be of another kind, and so is its code."""
    head["tap_norm"] = "each"
    compiled_with("ULL_EAGLE_TAP_NORM", "1", head)


def test_a_target_that_keeps_no_taps_for_it_is_refused(bundle: Bundle) -> None:
    """As many as the manifest's heads read, which is what the model's own kernels leave."""
    change_manifest(bundle.path, lambda manifest: manifest["code"]["macros"].update(ULL_TAPS="0"))
    with pytest.raises(BundleError, match="the kernels were compiled with ULL_TAPS = 0 where 2 is needed"):
        open_bundle(bundle.path)


def test_the_cpu_takes_no_code_of_a_head(bundle: Bundle, target: Path, tmp_path: Path) -> None:
    code = read_manifest_json(bundle.path)["speculation"]["eagle"]["code"]
    on_cpu = build_it(target, tmp_path / "head", tmp_path / "cpu.ull", "cpu")
    change_manifest(on_cpu.path, lambda manifest: manifest["speculation"]["eagle"].update(code=code))
    with pytest.raises(BundleError, match='target "cpu" takes no `code` of a head'):
        open_bundle(on_cpu.path)


def test_a_map_that_is_none_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    entry = bundle.tensors["eagle.d2t"]
    known = np.fromfile(bundle.weights_path, "<i4", SHAPE.own, offset=entry.offset)
    for value in (-1, TARGET["vocab_size"], int(known[0])):  # below, beyond, and another token's
        copy = Path(shutil.copytree(bundle.path, tmp_path / f"of {value}.ull"))
        with (copy / "weights.safetensors").open("r+b") as file:
            file.seek(entry.offset + 4 * 7)
            file.write(value.to_bytes(4, "little", signed=True))
        with pytest.raises(BundleError, match=r"'eagle.d2t' is no map into the model's vocabulary; rebuild") as caught:
            open_bundle(copy)
        assert caught.value.field == "eagle.d2t"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"head_dim": 24},
            r"the EAGLE head: head_dim 24 is not supported on a GPU; supported: multiples of 32 up to 128",
        ),
        ({"head_dim": 160}, r"the EAGLE head: head_dim 160 is not supported"),
        ({"hidden": 80}, r"the EAGLE head: hidden size 80 is not supported on a GPU; supported: multiples of 32"),
    ],
)
def test_a_head_that_the_kernels_cannot_run_is_refused_before_anything_is_compiled(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], words: str
) -> None:
    def own(tensors: Tensors) -> None:
        if changes.get("hidden"):
            tensors["embed_tokens.weight"] = np.ones((333, changes["hidden"]), np.float32)

    shape = HeadShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}, **changes})
    head = write_eagle(tmp_path / "head", tensors=own, shape=shape)
    monkeypatch.setattr(kernels, "compile_file", None)
    with pytest.raises(CheckpointError, match=words) as caught:
        build_it(target, head, tmp_path / "x.ull")
    assert caught.value.field == "eagle"
    assert not (tmp_path / "x.ull").exists()


# What recipes and the command line say

PLANS = {"forward": {"prefill": "tensorrt", "decode": "tensorrt"}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (PLANS, "an EAGLE head reads hidden states that only ull's own kernels leave"),
        ({"forward": {"prefill": "tensorrt"}}, "an EAGLE head reads hidden states that only ull's own kernels leave"),
        ({"forward": {"decode": "tensorrt"}}, "an EAGLE head reads hidden states that only ull's own kernels leave"),
        (
            {"target": "sm_89", "forward": {**PLANS["forward"], "attention": "native"}},
            "an EAGLE head reads hidden states that only ull's own kernels leave",
        ),
    ],
)
def test_a_head_that_has_no_use_is_refused_or_left_out(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    recipe = {"model": "m", "name": "x", "target": "sm_90a", "eagle": {"head": "e"}, **values}
    for drafter in ("auto", "eagle"):
        with pytest.raises(RecipeError, match=rf"{reason}.*remove it, or .*--drafter suffix \(or none\)") as caught:
            make_recipe({**recipe, "drafter": drafter}, "test")
        assert caught.value.field == "eagle"
    for drafter in ("suffix", "none"):
        assert settings_from_recipe(make_recipe({**recipe, "drafter": drafter}, "test")).speculation.eagle is None


@pytest.mark.parametrize("machine", ["cpu", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("drafter", ["auto", "eagle", "suffix"])
def test_a_head_that_has_a_use_is_kept_whatever_the_default(machine: str, drafter: str) -> None:
    """A request may ask for it."""
    values = {"model": "m", "name": "x", "target": machine, "eagle": {"head": "e"}, "drafter": drafter}
    settings = settings_from_recipe(make_recipe(values, "test"))
    assert settings.speculation.eagle == Path("e") and settings.speculation.default == drafter


def test_settings_that_no_recipe_gave_are_refused_too(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_eagle(tmp_path / "head", shape=SHAPE)
    monkeypatch.setattr("ull_build.build.find_tools", lambda _: None)
    monkeypatch.setattr("ull_build.build.require_timing_cache", lambda _: None)
    plans = ForwardRecipe(prefill="tensorrt", decode="tensorrt", attention="native")
    cases: list[tuple[Any, ForwardRecipe, str]] = [
        ("sm_90a", plans, "supported: forward.decode fused, forward.prefill exact or fast"),
        ("sm_90a", ForwardRecipe(prefill="tensorrt"), "supported: forward.decode fused, forward.prefill exact or fast"),
        ("sm_89", plans, "an EAGLE head is run by ull's own kernels, which do not run on sm_89; leave it out"),
    ]
    for machine, forward, words in cases:
        with pytest.raises(CheckpointError, match=words) as caught:
            build_it(target, head, tmp_path / "x.ull", machine, forward=forward)
        assert caught.value.field == "eagle"


def test_a_recipe_with_a_head_builds_for_a_gpu(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_eagle(tmp_path / "head", shape=SHAPE)
    recipe = tmp_path / "served.toml"
    recipe.write_text(
        f'model = "{target}"\ntarget = "sm_90a"\ndrafter = "eagle"\ncontext = {CONTEXT}\n'
        '[eagle]\nhead = "head"\ntaps = [1, 0, 2]\ntheta = 5e5\n'
    )
    assert settings_from_recipe(load_recipe(recipe, {})).speculation.eagle == tmp_path / "head"
    output = tmp_path / "served.ull"
    assert cli.main([str(recipe), "--no-eval", "--output", str(output)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "EAGLE-3 head on layers 1, 0, 2; default eagle" in printed
    assert "compiled EAGLE head: eagle.cu" in printed
    assert "not checked how much of what eagle propose" in printed
    bundle = open_bundle(output)
    head = eagle_of(bundle)
    assert (head.taps, head.model.rope.theta) == ([1, 0, 2], 5e5)
    assert bundle.manifest.speculation is not None and bundle.manifest.speculation.default == "eagle"
    assert bundle.manifest.provenance.drafters["eagle"].files.keys() == {"config.json", "model.safetensors"}
    assert inspect.main(output) == 0


def test_the_loss_is_measured_beside_a_head(target: Path, tmp_path: Path) -> None:
    """By the CPU executor, which knows the target alone."""
    head = write_eagle(tmp_path / "head", shape=SHAPE)
    bundle = build_it(target, head, tmp_path / "x.ull", evaluate=True, eval_tokens=200, max_perplexity_increase=9.0)
    quality = bundle.manifest.quality
    assert quality is not None and quality.tokens_per_round == {}
    assert {"eagle.fc.weight", "eagle.lm_head.weight"} <= {item.name for item in quality.tensors}


# Benchmark bundles


def arch(output: Path, *options: str, name: str = "llama-3.1-8b", context: int = 2048) -> list[str]:
    shape = ("--arch", name, "--random-weights", "--output", str(output), "--context", str(context), "--quiet")
    return [*shape, "--eagle-shape", *options]


def test_a_benchmark_bundle_with_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arch(tmp_path / "x.ull")) == 0
    bundle = open_bundle(tmp_path / "x.ull")
    head, model = eagle_of(bundle), bundle.manifest.model
    assert (head.taps, head.mapped, head.own_embedding, head.tap_norm) == ([2, 16, 29], True, False, "none")
    assert (head.model.hidden, head.model.intermediate, head.model.heads) == (4096, 14336, 32)
    assert (head.model.layers, head.model.vocabulary, head.model.context) == (1, 32000, 2048)
    assert head.precision == Precision(weights="fp8", lm_head="fp8")
    fills = random_fills(bundle, WeightImage(bundle.tensors), 0, 132)
    assert len(fills) == sum(name.endswith(".weight") for name in bundle.tensors)
    vectors = random_vectors(bundle)
    for name, columns in (("fc", 3 * 4096), ("layers.0.qkv", 2 * 4096), ("layers.0.down", 14336), ("lm_head", 4096)):
        np.testing.assert_allclose(vectors[f"eagle.{name}.scale"], math.sqrt(3.0 / columns), rtol=1e-6)
    np.testing.assert_allclose(vectors["layers.0.qkv.scale"], math.sqrt(3.0 / 4096), rtol=1e-6)
    made_up = {fill.params.output for fill in fills} | {WeightImage(bundle.tensors).offset(name) for name in vectors}
    fillers = {name for name in bundle.tensors if name.endswith(".filler")}
    assert len(made_up) == len(bundle.tensors) - len(fillers)  # nothing is left as the memory was found
    known = vectors["eagle.d2t"]
    assert known.dtype == np.int32 and known.nbytes == bundle.tensors["eagle.d2t"].nbytes
    assert len(np.unique(known[:32000])) == 32000 and known.min() == 0 and known.max() < model.vocabulary
    assert known.max() > model.vocabulary - 8  # spread over all of them
    assert inspect.main(bundle.path) == 0
    assert "eagle head" in capsys.readouterr().out
    beside = arch(tmp_path / "y.ull", "--precision", "bf16", "--heads", "2", "--draft-arch", "llama-3.2-1b")
    assert cli.main(beside) == 0
    other = eagle_of(open_bundle(tmp_path / "y.ull"))
    assert (other.precision.weights, other.precision.lm_head) == ("bf16", "bf16")


def test_the_device_gets_a_made_up_head(tmp_path: Path, driver: RecordingDriver) -> None:
    assert cli.main(arch(tmp_path / "x.ull", "--layers", "2", name="llama-3.2-1b", context=64)) == 0
    bundle = open_bundle(tmp_path / "x.ull")
    assert eagle_of(bundle).taps == [0, 1, 2]
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    entry, place = bundle.tensors["eagle.d2t"], program._image.offset("eagle.d2t")
    written = driver.device_bytes(program._arena.address("weights") + (place or 0), entry.nbytes).view("<i4")
    np.testing.assert_array_equal(written[:32000], random_vectors(bundle)["eagle.d2t"][:32000])
    [rank] = [one for one in passes(program, driver)["first"] if one.kernel == "ull_eagle_rank"]
    assert rank.params.names == program._arena.address("weights") + (place or 0)
    program.close()


def test_shapes_of_heads_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.ull"
    for options, words in [
        (["--layers", "1"], "an EAGLE-3 head reads three states of the model: --layers 2 or more"),
        (["--forward", "tensorrt"], "supported: forward.decode fused, forward.prefill exact or fast"),
        (
            ["--target", "sm_89", "--forward", "tensorrt", "--attention", "native"],
            "an EAGLE head is run by ull's own kernels, which do not run on sm_89; leave it out",
        ),
    ]:
        assert cli.main(arch(output, *options)) == 2
        assert words in capsys.readouterr().err
    assert not output.exists()
    for arguments, words in [
        (["--model", "m", "--eagle-shape", "--output", "y"], "--eagle-shape go with --arch"),
        (arch(output, "--eagle", "e"), "say --eagle-shape for a made-up EAGLE-3 head"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert words in capsys.readouterr().err
