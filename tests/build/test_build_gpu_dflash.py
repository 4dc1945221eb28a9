"""DFlash and DSpark heads in bundles for a GPU: how they are stored, compiled, captured and handed over."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import write_checkpoint
from device_bundles import write_stubs
from device_heads import compiled_with, dequantised, halves, of_head, refuse, rounds, touched, without, without_chunks
from head_checkpoints import BLOCK, MASK, HeadShape, Tensors, dflash_tensors, write_dflash, write_eagle
from manifests import change_manifest, read_manifest_json, write_manifest_json
from recording_driver import Launched, RecordingDriver
from ull.bundle import (
    DFLASH,
    DFLASH_CHUNK_KERNELS,
    DFLASH_CHUNKS,
    DFLASH_KERNELS,
    DFLASH_PASSES,
    Bundle,
    DflashHead,
    Precision,
    open_bundle,
)
from ull.commands import inspect
from ull.errors import BundleError, CheckpointError, RecipeError
from ull.gpu.memory import TAP_RING
from ull.gpu.program import Program
from ull.log import Log
from ull_build import cli
from ull_build.build import build
from ull_build.code import kernels
from ull_build.recipe import ForwardRecipe, make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.source.drafters import SpeculationSettings

TARGET = {"head_dim": 32, "hidden_size": 96, "num_attention_heads": 4, "vocab_size": 333}
SHAPE = HeadShape(hidden=96, intermediate=84, heads=4, kv_heads=2, head_dim=32, target_hidden=96, rows=333, tokens=320)
CONTEXT = 256
FP8 = Precision(weights="fp8", lm_head="fp8")
# What a head may say of its drafts, by a name of its kind.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "confident": {"markov": 0, "confidence": True},
    "markov": {"markov": 24},
    "gated": {"markov": 24, "gated": True, "confidence": True},
}
FORMS: dict[str, Any] = {"plain": "z-lab", "confident": "deepseek", "markov": "z-lab", "gated": "speculators"}
ASSEMBLY = ["ull_begin", "ull_dflash_taps"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model", config=TARGET)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))


def write_head(directory: Path, kind: str = "plain", **options: Any) -> Path:
    return write_dflash(directory, FORMS[kind], **{"taps": [2, 1], "shape": SHAPE, **KINDS[kind], **options})


def build_it(target: Path, head: Path, output: Path, machine: Any = "sm_90a", **options: Any) -> Bundle:
    speculation = SpeculationSettings(dflash=head)
    options = {"evaluate": False, "context": CONTEXT, "speculation": speculation} | options
    return open_bundle(build(Settings(target, output, "x", machine, **options)).path, "hashes")


@pytest.fixture(params=["plain", "gated"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bundle(target: Path, tmp_path: Path, kind: str) -> Bundle:
    return build_it(target, write_head(tmp_path / "head", kind), tmp_path / "x.ull")


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def program(bundle: Bundle, driver: RecordingDriver) -> Iterator[Program]:
    loaded = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    yield loaded
    loaded.close()
    assert not any(driver.live.values())


def dflash_of(bundle: Bundle) -> DflashHead:
    assert bundle.manifest.speculation is not None and bundle.manifest.speculation.dflash is not None
    return bundle.manifest.speculation.dflash


# What is stored


def test_the_blocks_hold_what_the_cpus_tiles_do(target: Path, tmp_path: Path) -> None:
    """Every linear, dequantised, and every norm and bias, of a head that has all that a head can have."""
    head = write_head(tmp_path / "head", "gated")
    on_gpu = build_it(target, head, tmp_path / "gpu.ull", precision=FP8)
    on_cpu = build_it(target, head, tmp_path / "cpu.ull", "cpu", precision=FP8)
    expected, found = of_head(on_cpu, DFLASH), of_head(on_gpu, DFLASH)
    linears = {"fc": 96, "markov.gate": 24}
    for layer in ("layers.0", "layers.1"):
        linears |= {f"{layer}.qkv": 8 * 32, f"{layer}.o": 96, f"{layer}.down": 96}
    for name, rows in linears.items():
        one, two = dequantised(found, name), dequantised(expected, name)
        columns = two.shape[1]
        np.testing.assert_array_equal(one[:rows, :columns], two[:rows], err_msg=name)
        assert not one[rows:].any() and not one[:, columns:].any(), name
        gate, up = (halves(dequantised(side, "layers.1.gate_up"), tile) for side, tile in ((found, 8), (expected, 32)))
        np.testing.assert_array_equal(gate[:, : SHAPE.intermediate], up[:, : SHAPE.intermediate])
    vectors = {"norm": 96, "hidden_norm": 96, "markov.gate.bias": 24, "confidence.weight": 96 + 24}
    for layer in ("layers.0", "layers.1"):
        vectors |= {f"{layer}.attn_norm": 96, f"{layer}.mlp_norm": 96, f"{layer}.q_norm": 32, f"{layer}.k_norm": 32}
    for name, length in {**vectors, "confidence.bias": 1}.items():
        np.testing.assert_array_equal(found[name][:length], expected[name][:length], err_msg=name)
        assert not found[name][length:].any(), name


def test_the_markov_term_is_a_table_and_a_linear_of_16_bits(target: Path, tmp_path: Path) -> None:
    bundle = build_it(target, write_head(tmp_path / "head", "markov"), tmp_path / "x.ull", precision=FP8)
    stored, source = of_head(bundle, DFLASH), dflash_tensors(markov=24, shape=SHAPE)
    embedding = source["markov_head.markov_w1.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        stored["markov.embed"].view(ml_dtypes.bfloat16)[: 333 * 24].reshape(-1, 24)[:333], embedding
    )
    assert bundle.tensors["dflash.markov.head.weight"].dtype == "F16"
    term = dequantised(stored, "markov.head")
    np.testing.assert_allclose(term[:333, :24], source["markov_head.markov_w2.weight"], rtol=2.0**-8, atol=1e-6)
    assert not term[333:].any() and not term[:, 24:].any()


def test_a_head_brings_what_is_its_own(target: Path, tmp_path: Path) -> None:
    """An lm_head of fewer tokens with their map, and an embedding; else the target's are read."""
    random = np.random.default_rng(2)
    lm_head, embedding = (random.standard_normal((rows, 96)).astype(np.float32) for rows in (100, 333))
    known = np.sort(random.permutation(320)[:100])

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"], tensors["embed_tokens.weight"] = lm_head, embedding
        tensors["d2t"] = (known - np.arange(100)).astype(np.int64)

    about = {"draft_vocab_size": 100}
    head = write_dflash(tmp_path / "head", "speculators", taps=[1], tensors=change, config=about, shape=SHAPE)
    bundle = build_it(target, head, tmp_path / "x.ull")
    stored, described = of_head(bundle, DFLASH), dflash_of(bundle)
    assert described.own_embedding and described.own_lm_head and described.mapped and described.code is not None
    rows = dequantised(stored, "lm_head")
    np.testing.assert_allclose(rows[:100, :96], lm_head, rtol=2.0**-3, atol=0.02)
    assert not rows[100:].any()
    np.testing.assert_array_equal(stored["d2t"][:100], known)
    np.testing.assert_array_equal(stored["embed.weight"], embedding.astype(ml_dtypes.bfloat16))
    macros = {"ULL_DFLASH_MAPPED": "1", "ULL_VOCABULARY": "100", "ULL_HEAD_BITS": "8", "ULL_DFLASH_TAPS": "1"}
    assert macros.items() <= described.code.macros.items()
    entry = bundle.tensors["dflash.d2t"]
    with (bundle.path / "weights.safetensors").open("r+b") as file:
        file.seek(entry.offset + 4 * 7)
        file.write(int(known[0]).to_bytes(4, "little"))  # another one's
    with pytest.raises(BundleError, match=r"'dflash.d2t' is no map into the model's vocabulary; rebuild") as caught:
        open_bundle(bundle.path)
    assert caught.value.field == "dflash.d2t"


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_heads_precision_is_the_weights_and_its_pages_16_bits(
    target: Path, tmp_path: Path, weights: Any, kv: Any
) -> None:
    """The target's lm_head is read as it is stored."""
    precision = Precision(weights=weights, lm_head="bf16", kv=kv)
    bundle = build_it(target, write_head(tmp_path / "head"), tmp_path / "x.ull", precision=precision)
    head = dflash_of(bundle)
    assert head.precision == Precision(weights=weights, lm_head=weights, kv="bf16")
    assert head.code is not None and head.code.macros["ULL_HEAD_BITS"] == "16"
    assert not [name for name in bundle.tensors if name.startswith(("dflash.lm_head", "dflash.layers.0.kv_scale"))]
    program = Program(bundle, Log(stream=io.StringIO()), driver=RecordingDriver(), persistent=True)
    assert program.handover["dflash"]["kv_bytes"] == 2 * 2 * 2 * SHAPE.kv_heads * SHAPE.head_dim * CONTEXT
    program.close()


# Its code


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_compiled_for_the_heads_kind(
    target: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = build_it(target, write_head(tmp_path / "head", kind), tmp_path / "x.ull")
    head, code = dflash_of(bundle), bundle.manifest.code
    assert head.code is not None and code is not None
    assert set(head.code.kernels()) >= DFLASH_PASSES | DFLASH_CHUNKS
    assert not (DFLASH_KERNELS | DFLASH_CHUNK_KERNELS) & set(code.kernels())
    assert all(file.path.startswith("code/dflash/") for file in head.code.files)
    assert (code.macros["ULL_TAPS"], code.macros["ULL_BLOCK"], code.macros["ULL_MAY_LACK"]) == ("2", "0", "0")
    assert not [name for name in code.macros if name.startswith("ULL_DFLASH")]
    options = {"markov": 0, "gated": False, "confidence": False, **KINDS[kind]}
    own = {"ULL_LAYERS": "2", "ULL_HIDDEN": "96", "ULL_VOCABULARY": "333", "ULL_WEIGHT_BITS": "8", "ULL_QK_NORM": "1"}
    own |= {"ULL_TAPS": "0", "ULL_MAY_LACK": "1", "ULL_BLOCK": "1", "ULL_KV_BITS": "16"}
    own |= {"ULL_DFLASH_TARGET_HIDDEN": "96", "ULL_DFLASH_TAPS": "2", "ULL_DFLASH_MAPPED": "0"}
    own |= {"ULL_DFLASH_MARKOV": str(options["markov"]), "ULL_DFLASH_GATED": str(int(options["gated"]))}
    chance = 0 if not options["confidence"] else 2 if options["markov"] else 1
    assert (own | {"ULL_DFLASH_CONFIDENCE": str(chance)}).items() <= head.code.macros.items()
    assert (head.taps, bundle.manifest.taps) == ([2, 1], [1, 2])
    assert inspect.main(bundle.path, verify=True) == 0
    assert "dflash head" in capsys.readouterr().out
    report = inspect.describe(bundle)
    stored = sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith(DFLASH))
    assert report["weight_bytes"]["dflash head"] == stored > 0


def test_a_gpu_without_warpgroup_products_has_no_kernels_of_chunks(target: Path, tmp_path: Path) -> None:
    head = dflash_of(build_it(target, write_head(tmp_path / "head"), tmp_path / "x.ull", "sm_100a"))
    assert head.code is not None and set(head.code.kernels()) >= DFLASH_PASSES
    assert set(head.code.kernels()) & DFLASH_CHUNKS == {"ull_begin_chunk"}


def test_a_head_whose_bundle_lacks_them_reads_without_chunks(bundle: Bundle) -> None:
    """One that an older ull has built: the graph is not there, nor memory for it."""
    older = without_chunks(bundle, "dflash")
    program = Program(older, Log(stream=io.StringIO()), driver=RecordingDriver())
    handed = program.handover["dflash"]
    assert handed["chunk"] == 0 and "chunks" not in handed and program.handover["chunk"] != 0
    assert "last_chunk" not in handed and program.handover["last_chunk"] != 0
    assert not [name for name in program._plan.regions if name.startswith("dflash.chunk")]
    program.close()


# What is captured


def passes(program: Program, driver: RecordingDriver) -> dict[str, list[Launched]]:
    """The launches of each pass, by its name."""
    dflash = program.handover["dflash"]
    graphs = {f"context {entries}": graph for entries, graph in dflash["contexts"].items()}
    graphs |= {name: dflash[name] for name in ("chunk", "block", "nodes") if dflash[name]}
    return {name: driver.graphs[graph] for name, graph in graphs.items()}


def test_a_pass_is_the_kernels_in_order(program: Program, driver: RecordingDriver, kind: str) -> None:
    captured = passes(program, driver)
    names = {name: [launch.kernel for launch in graph] for name, graph in captured.items()}
    for entries in (8, 64):
        layer = [f"ull_dflash_kv_{max(entries, 16)}", "ull_dflash_store"]
        made = [*ASSEMBLY, f"ull_dflash_fc_{entries}", f"ull_norm_{entries}", *layer, *layer]
        assert names.pop(f"context {entries}") == [*made, "ull_accept", "ull_commit"]
    layer = ["ull_dflash_chunk_kv", "ull_chunk_store"]
    of_chunk = ["ull_begin_chunk", "ull_dflash_chunk_taps", "ull_dflash_chunk_fc", "ull_chunk_norm"]
    assert names.pop("chunk") == [*of_chunk, *layer, *layer, "ull_accept"]
    layer = [f"ull_{name}_8" for name in ("qkv", "attention", "o", "gate_up", "down")]
    block = ["ull_begin", "ull_embed", *layer, *layer, "ull_head_8"]
    assert names.pop("block") == [*block, *(["ull_dflash_rank"] if kind == "plain" else []), "ull_accept"]
    if kind == "gated":
        terms = [f"ull_dflash_{name}" for name in ("nodes", "gate", "markov", "rank")]
        assert names.pop("nodes") == ["ull_begin", *terms, "ull_accept"]
    assert not names
    for graph in captured.values():  # the second reads the round as begin has left it, and so may all behind it
        assert [launch.overlaps for launch in graph][1:] == [False] + [True] * (len(graph) - 2)
    for taps in (captured["context 8"][1].params, captured["chunk"][1].params):
        assert (taps.ring_taps, list(taps.taps)[:2]) == (2, [1, 0])  # by their places in the ring
    functions = {launch.function for launch in rounds(program, driver)}
    assert not functions & {launch.function for graph in captured.values() for launch in graph}


def test_a_block_that_says_how_likely_it_is_asks_its_head(
    target: Path, tmp_path: Path, driver: RecordingDriver
) -> None:
    bundle = build_it(target, write_head(tmp_path / "head", "confident"), tmp_path / "x.ull")
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    kernels_of = [launch.kernel for launch in passes(program, driver)["block"]]
    assert kernels_of[-3:] == ["ull_dflash_nodes", "ull_dflash_rank", "ull_accept"]
    program.close()


def test_it_shares_the_ring_and_the_requests_state_with_its_target(
    program: Program, driver: RecordingDriver, kind: str
) -> None:
    """And, since it has none of its own, the embedding and the lm_head."""
    of_target = touched(program, rounds(program, driver))
    of_passes = touched(program, [launch for graph in passes(program, driver).values() for launch in graph])
    assert not [where for _, where in of_target if where.startswith(DFLASH)]
    shared = {(kernel, where) for kernel, where in of_passes if not where.startswith(DFLASH)}
    assert shared == {
        ("ull_begin", "round"),  # what has been accepted, for passes behind a round
        ("ull_begin", "state"),
        ("ull_begin_chunk", "round"),
        ("ull_begin_chunk", "state"),
        ("ull_dflash_taps", TAP_RING),
        ("ull_dflash_chunk_taps", TAP_RING),
        ("ull_embed", "embed.weight"),
        ("ull_head_8", "lm_head.weight"),
        ("ull_head_8", "lm_head.scale"),
        ("ull_dflash_rank", "state"),
        ("ull_dflash_rank", "text"),
        ("ull_dflash_rank", "text counts"),
    }
    own = {where for _, where in of_passes if where.startswith(DFLASH)}
    tensors = {name for name in program._bundle.tensors if name.startswith(DFLASH) and not name.endswith(".filler")}
    assert tensors <= own
    assert TAP_RING in {where for _, where in of_target} and DFLASH + TAP_RING not in program._plan.regions


def test_what_is_handed_over(program: Program, bundle: Bundle, kind: str) -> None:
    whole = program.handover
    dflash = whole["dflash"]
    blocks = {"requests", "results", "control", "pages", "text", "mask", "chunks"}
    sizes = {"vocabulary", "context_tokens", "page_count", "kv_bytes", "kv_pages", "weight_bytes"}
    own = {"contexts", "chunk", "block", "nodes", "block_tokens", "mask_token", "anchor_predicts"}
    assert dflash.keys() == own | {"stream", "context", "name", "library"} | blocks | sizes
    assert tuple(dflash["contexts"]) == (8, 64) and (dflash["nodes"] != 0) == (kind == "gated")
    assert (dflash["block_tokens"], dflash["mask_token"]) == (BLOCK, MASK)
    assert dflash["anchor_predicts"] == dflash_of(bundle).anchor_predicts
    assert (dflash["vocabulary"], dflash["context_tokens"]) == (333, CONTEXT)
    assert dflash["page_count"] == whole["page_count"] and dflash["kv_pages"] != whole["kv_pages"]
    assert (dflash["stream"], dflash["context"]) == (whole["stream"], whole["context"])
    assert not {dflash[name] for name in blocks} & {whole[name] for name in blocks}
    stored = sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith(DFLASH))
    assert (dflash["weight_bytes"], whole["weight_bytes"]) == (stored, bundle.weight_bytes - stored)
    assert "eagle" not in whole


@pytest.mark.parametrize(("block", "tile"), [(8, 8), (9, 16), (17, 32)])
def test_a_blocks_tile_is_the_smallest_that_holds_it(
    target: Path, tmp_path: Path, driver: RecordingDriver, block: int, tile: int
) -> None:
    head = write_head(tmp_path / "head", config={"block_size": block})
    program = Program(build_it(target, head, tmp_path / "x.ull"), Log(stream=io.StringIO()), driver=driver)
    assert f"ull_head_{tile}" in {launch.kernel for launch in passes(program, driver)["block"]}
    program.close()


def test_an_eagle_head_and_a_draft_model_may_stand_beside_it(
    target: Path, tmp_path: Path, driver: RecordingDriver
) -> None:
    """The ring then holds what either head reads, and each finds its own there."""
    draft = write_checkpoint(tmp_path / "draft", seed=1, config=TARGET | {"num_hidden_layers": 1})
    eagle = write_eagle(tmp_path / "eagle", taps=[0, 2], shape=SHAPE)
    speculation = SpeculationSettings(draft=draft, eagle=eagle, dflash=write_head(tmp_path / "head"))
    bundle = build_it(target, tmp_path / "head", tmp_path / "x.ull", speculation=speculation)
    assert bundle.manifest.taps == [0, 1, 2]
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    handover = program.handover
    parts = [handover, *(handover[name] for name in ("draft", "eagle", "dflash"))]
    assert sum(part["weight_bytes"] for part in parts) == bundle.weight_bytes
    assert len({part["kv_pages"] for part in parts}) == 4
    found = passes(program, driver)["context 8"][1].params, driver.graphs[handover["eagle"]["fill"]][1].params
    assert [(one.ring_taps, list(one.taps)[:2]) for one in found] == [(3, [2, 1]), (3, [0, 2])]
    program.close()


# What is refused

refuse_dflash = partial(refuse, kind="dflash")


def test_damaged_bundles_are_refused(bundle: Bundle, kind: str) -> None:
    path = bundle.path
    refuse_dflash(path, "target 'sm_90a' needs `code` of the DFlash head", lambda head: head.pop("code"))
    macros = {"ULL_DFLASH_TAPS": "3", "ULL_DFLASH_MARKOV": "8", "ULL_BLOCK": "0", "ULL_KV_BITS": "8"}
    for name, value in macros.items():
        words = f"the kernels of the DFlash head were compiled with {name} = {value} where"
        refuse_dflash(path, words, partial(compiled_with, name, value), f"code.macros.{name}")
    other = not dflash_of(bundle).anchor_predicts
    words = f"DFlash head were compiled with ULL_DFLASH_ANCHOR_PREDICTS = {1 - other} where {int(other)} is needed"
    refuse_dflash(path, words, lambda head: head.update(anchor_predicts=other))
    refuse_dflash(path, "lacks tensor 'dflash.embed.weight'", lambda head: head.update(own_embedding=True))
    refuse_dflash(path, "the DFlash head: head_dim 48 is not", lambda head: head["model"].update(head_dim=48))
    refuse_dflash(path, "does not lie in code/", lambda head: head["code"]["files"][0].update(path="vocab.bin"))
    for kernel in ("ull_dflash_rank", "ull_qkv_sum_16", "ull_begin"):
        refuse_dflash(path, f"lacks the kernel '{kernel}' of the DFlash head", partial(without, kernel))
    plans = {
        "version": "11.4",
        "gpu": "x",
        "capability": "9.0",
        "files": ["code/plans/a", "code/plans/b"],
        "token_counts": [1, 64],
    }
    plans |= {"scratch_bytes": 0, "exact": [1, 64], "place_exact": True}
    good = read_manifest_json(path)
    change_manifest(path, lambda manifest: manifest.update(forward={"prefill": "tensorrt", "plans": plans}))
    with pytest.raises(BundleError, match="heads read hidden states that only ull's own kernels leave"):
        open_bundle(path)
    write_manifest_json(path, good)
    change_manifest(path, lambda manifest: manifest["code"]["macros"].update(ULL_TAPS="0"))
    with pytest.raises(BundleError, match="the kernels were compiled with ULL_TAPS = 0 where 2 is needed"):
        open_bundle(path)


def test_the_cpu_takes_no_code_of_a_head(bundle: Bundle, target: Path, tmp_path: Path, kind: str) -> None:
    code = read_manifest_json(bundle.path)["speculation"]["dflash"]["code"]
    on_cpu = build_it(target, tmp_path / "head", tmp_path / "cpu.ull", "cpu")
    change_manifest(on_cpu.path, lambda manifest: manifest["speculation"]["dflash"].update(code=code))
    with pytest.raises(BundleError, match='target "cpu" takes no `code` of a head'):
        open_bundle(on_cpu.path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"head_dim": 24},
            "the DFlash head: head_dim 24 is not supported on a GPU; supported: multiples of 32 up to 128",
        ),
        ({"head_dim": 160}, "the DFlash head: head_dim 160 is not supported"),
    ],
)
def test_a_head_that_the_kernels_cannot_run_is_refused_before_anything_is_compiled(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], words: str
) -> None:
    shape = HeadShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}, **changes})
    head = write_head(tmp_path / "head", shape=shape)
    monkeypatch.setattr(kernels, "compile_file", None)
    with pytest.raises(CheckpointError, match=words) as caught:
        build_it(target, head, tmp_path / "x.ull")
    assert caught.value.field == "dflash"
    assert not (tmp_path / "x.ull").exists()


def test_a_target_whose_kernels_leave_no_taps_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ull_build.build.find_tools", lambda _: None)
    monkeypatch.setattr("ull_build.build.require_timing_cache", lambda _: None)
    plans = ForwardRecipe(prefill="tensorrt", decode="tensorrt", attention="native")
    cases: list[tuple[Any, ForwardRecipe, str]] = [
        ("sm_90a", plans, "supported: forward.decode fused, forward.prefill exact or fast"),
        ("sm_90a", ForwardRecipe(prefill="tensorrt"), "supported: forward.decode fused, forward.prefill exact or fast"),
        ("sm_89", plans, "a DFlash head is run by ull's own kernels, which do not run on sm_89; leave it out"),
    ]
    head = write_head(tmp_path / "head")
    for machine, forward, words in cases:
        with pytest.raises(CheckpointError, match=words) as caught:
            build_it(target, head, tmp_path / "x.ull", machine, forward=forward)
        assert caught.value.field == "dflash"


# What recipes say


def test_recipes_keep_a_head_that_has_a_use() -> None:
    recipe = {"model": "m", "name": "x", "target": "sm_90a", "dflash": {"head": "d"}}
    for drafter in ("auto", "dflash", "suffix"):
        settings = settings_from_recipe(make_recipe({**recipe, "drafter": drafter}, "test"))
        assert (settings.speculation.dflash, settings.speculation.default) == (Path("d"), drafter)
    plans = {"forward": {"decode": "tensorrt"}}
    with pytest.raises(RecipeError, match=r"a DFlash head reads hidden states .*--drafter suffix") as caught:
        make_recipe({**recipe, **plans, "drafter": "dflash"}, "test")
    assert caught.value.field == "dflash"
    assert settings_from_recipe(make_recipe({**recipe, **plans, "drafter": "none"}, "")).speculation.dflash is None


def test_a_recipe_with_a_head_builds_for_a_gpu(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_head(tmp_path / "head", "markov")
    recipe, output = tmp_path / "served.toml", tmp_path / "served.ull"
    text = f'model = "{target}"\ntarget = "sm_90a"\ndrafter = "dflash"\ncontext = {CONTEXT}\n[dflash]\nhead = "head"\n'
    recipe.write_text(text + "taps = [0, 2]\nanchor_predicts = true\n")
    assert cli.main([str(recipe), "--no-eval", "--output", str(output)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "DSpark head, 2 x block 4; default dflash" in printed and "compiled DFlash head: dflash.cu" in printed
    bundle = open_bundle(output)
    head, code = dflash_of(bundle), bundle.manifest.code
    assert code is not None and head.code is not None
    both = len(code.kernels()) + len(head.code.kernels())
    assert f"{both} for sm_90a" in printed
    assert inspect.main(output) == 0
    assert f"{both} in {len(code.files) + len(head.code.files)} cubins" in capsys.readouterr().out
    assert (head.taps, head.anchor_predicts, head.markov) == ([0, 2], True, 24)
