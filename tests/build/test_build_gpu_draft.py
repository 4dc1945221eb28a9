"""Draft models in bundles for a GPU: how they are stored, compiled, captured and handed over, and what is refused."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import write_checkpoint
from device_bundles import write_stubs
from manifests import change_manifest, read_manifest_json, write_manifest_json
from recording_driver import Launched, RecordingDriver
from ull.bundle import CHUNK_KERNELS, DEVICE_KERNELS, Bundle, Precision, open_bundle
from ull.commands import inspect
from ull.errors import BundleError, CheckpointError
from ull.gpu import params
from ull.gpu.program import Program
from ull.gpu.weights import WeightImage, random_fills, random_vectors
from ull.log import Log
from ull_build import cli
from ull_build.build import build
from ull_build.code import kernels
from ull_build.recipe import ForwardRecipe
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings
from weights_files import read_weights

TARGET = {"head_dim": 32, "hidden_size": 96, "num_attention_heads": 4, "vocab_size": 333}
DRAFT = TARGET | {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
CONTEXT = 256


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a smaller model of another architecture that drafts for it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target = write_checkpoint(folder / "target", config=TARGET)
    return target, write_checkpoint(folder / "draft", "qwen3", seed=1, config=DRAFT)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))


def settings_for(checkpoints: tuple[Path, Path], output: Path, **options: Any) -> Settings:
    speculation = SpeculationSettings(draft=checkpoints[1])
    options = {"evaluate": False, "context": CONTEXT, "speculation": speculation} | options
    return Settings(checkpoints[0], output, "x", "sm_90a", **options)


@pytest.fixture
def bundle(checkpoints: tuple[Path, Path], tmp_path: Path) -> Bundle:
    return open_bundle(build(settings_for(checkpoints, tmp_path / "x.ull")).path, "hashes")


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def program(bundle: Bundle, driver: RecordingDriver) -> Iterator[Program]:
    loaded = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    yield loaded
    loaded.close()
    assert not any(driver.live.values())


def test_a_draft_model_is_stored_as_a_bundle_of_its_own_would_be(
    bundle: Bundle, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    forward = ForwardRecipe(tree_products="warp")  # as a draft model's are
    alone = Settings(
        checkpoints[1], tmp_path / "alone.ull", "x", "sm_90a", evaluate=False, context=CONTEXT, forward=forward
    )
    single = open_bundle(build(alone).path)
    expected, found = read_weights(single.weights_path), read_weights(bundle.weights_path)
    own = {name.removeprefix("draft."): value for name, value in found.items() if name.startswith("draft.")}
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(own[name].view(np.uint8), value.view(np.uint8), err_msg=name)
    draft = bundle.manifest.draft
    assert draft is not None and draft.code is not None and single.manifest.code is not None
    assert draft.code.macros == single.manifest.code.macros
    assert set(draft.code.kernels()) == DEVICE_KERNELS | CHUNK_KERNELS
    assert all(file.path.startswith("code/draft/") for file in draft.code.files)
    assert inspect.main(bundle.path) == 0


def test_its_rounds_are_those_of_a_bundle_of_its_own(
    program: Program, driver: RecordingDriver, bundle: Bundle, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """By the same kernels in the same grids, with its own memory: nothing but the stream is shared."""
    forward = ForwardRecipe(tree_products="warp")  # as a draft model's are
    alone = Settings(
        checkpoints[1], tmp_path / "alone.ull", "x", "sm_90a", evaluate=False, context=CONTEXT, forward=forward
    )
    other = RecordingDriver()
    single = Program(open_bundle(build(alone).path), Log(stream=io.StringIO()), driver=other)
    handover, expected = program.handover["draft"], single.handover
    assert "draft" not in expected and "draft" not in handover
    assert handover["graphs"].keys() == {1, 8}
    for name in ("vocabulary", "context_tokens", "page_count", "kv_bytes", "weight_bytes", "medusa_heads", "name"):
        assert handover[name] == expected[name], name
    assert (handover["stream"], handover["context"]) == (program.handover["stream"], program.handover["context"])
    assert program.handover["weight_bytes"] == bundle.weight_bytes - handover["weight_bytes"]
    target_functions = {launch.function for graph in rounds(program.handover, driver) for launch in graph}
    for mine, theirs in zip(rounds(handover, driver), rounds(expected, other, (1, 8)), strict=True):
        assert [(one.kernel, one.grid, one.threads) for one in mine] == [(o.kernel, o.grid, o.threads) for o in theirs]
        assert not target_functions & {launch.function for launch in mine}
    single.close()


def rounds(handover: dict[str, Any], driver: RecordingDriver, sizes: tuple[int, ...] = ()) -> list[list[Launched]]:
    graphs = handover["graphs"]
    return [driver.graphs[graph] for graph in (*(graphs[size] for size in sizes or graphs), handover["prefill"])]


def test_the_models_share_no_memory(program: Program, driver: RecordingDriver) -> None:
    """Regions of one are not touched by the other's rounds, nor are host blocks; both begin with round 1."""
    regions = program._plan.regions
    own = {name for name in regions if name.startswith("draft.")}
    of_chunks = {name for name in regions if name.startswith("chunk")}  # the draft model reads prompts in rounds
    assert {name.removeprefix("draft.") for name in own} | {"weights"} | of_chunks == set(regions) - own
    base = program._arena.base

    def owner(address: int) -> str:
        for name, region in regions.items():
            if base + region.offset <= address < base + region.offset + max(region.nbytes, 1):
                return name
        return "host"

    weights = {name: (program._image.offset(name) or 0) + base for name in program._bundle.tensors}
    first = min(address for name, address in weights.items() if name.startswith("draft."))
    for handover, is_draft in ((program.handover, False), (program.handover["draft"], True)):
        begin = rounds(handover, driver)[0][0].params
        assert abs(begin.requests - handover["requests"]) == abs(begin.control - handover["control"])
        for launch in (launch for graph in rounds(handover, driver) for launch in graph):
            for name, kind in launch.params._fields_:
                address = getattr(launch.params, name)
                if kind is not ctypes.c_void_p or not address:
                    continue
                where = owner(address)
                if where == "weights":
                    assert (address >= first) == is_draft, (launch.kernel, name)
                elif where != "host":
                    assert where.startswith("draft.") == is_draft, (launch.kernel, name)
    for name in ("state", "draft.state"):
        state = params.State.from_buffer_copy(driver.device_bytes(program._arena.address(name), 4096 * 3))
        assert state.sequence == 1
    blocks = [program.handover[name] for name in ("requests", "results", "control", "pages", "text")]
    assert not set(blocks) & {program.handover["draft"][name] for name in ("requests", "results", "control", "text")}


def test_damaged_bundles_are_refused(bundle: Bundle) -> None:
    good = read_manifest_json(bundle.path)

    def refused(words: str, change: Any) -> None:
        change_manifest(bundle.path, lambda manifest: change(manifest["speculation"]["draft"], manifest))
        with pytest.raises(BundleError, match=words):
            open_bundle(bundle.path)
        write_manifest_json(bundle.path, good)

    refused("needs `code` of the draft model", lambda draft, _: draft.pop("code"))
    refused(
        "the kernels of the draft model were compiled with ULL_HIDDEN",
        lambda draft, _: draft["model"].update(hidden=96),
    )
    refused("the draft model: head_dim 48 is not", lambda draft, _: draft["model"].update(head_dim=48))
    refused("does not lie in code/", lambda draft, _: draft["code"]["files"][0].update(path="vocab.bin"))
    refused("is listed twice", lambda draft, all_: draft["code"]["files"][0].update(path="code/first.cubin"))
    refused(
        "lacks the kernel 'ull_begin' of the draft model",
        lambda draft, _: [
            file["kernels"].remove("ull_begin") for file in draft["code"]["files"] if "ull_begin" in file["kernels"]
        ],
    )
    (bundle.path / "code/draft/first.cubin").unlink()
    with pytest.raises(BundleError, match=r"code/draft/first\.cubin is missing"):
        open_bundle(bundle.path)


def test_a_draft_model_that_a_gpu_cannot_run_is_refused_before_anything_is_compiled(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = write_checkpoint(tmp_path / "odd", config=TARGET | {"head_dim": 24})
    monkeypatch.setattr(kernels, "compile_file", None)
    with pytest.raises(CheckpointError, match="the draft model: head_dim 24 is not supported on a GPU") as caught:
        build(settings_for((checkpoints[0], odd), tmp_path / "y.ull"))
    assert caught.value.field == "draft"
    assert not (tmp_path / "y.ull").exists()


def test_fp8_pages_for_both(checkpoints: tuple[Path, Path], tmp_path: Path, driver: RecordingDriver) -> None:
    settings = settings_for(checkpoints, tmp_path / "x.ull", precision=Precision(kv="fp8"))
    bundle = open_bundle(build(settings).path)
    assert "draft.layers.0.kv_scale" in bundle.tensors
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver, persistent=True)
    graph = driver.graphs[program.handover["draft"]["graphs"][1]]
    assert "ull_layers_1" in [launch.kernel for launch in graph]
    program.close()


def test_a_benchmark_bundle_with_a_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--arch", "llama-3.1-8b", "--random-weights", "--layers", "1", "--output", str(tmp_path / "x.ull")]
    assert cli.main([*shape, "--context", "4096", "--draft-arch", "llama-3.2-1b", "--quiet"]) == 0
    bundle = open_bundle(tmp_path / "x.ull")
    draft = bundle.manifest.draft
    assert draft is not None and (draft.model.hidden, draft.model.layers, draft.model.context) == (2048, 16, 4096)
    fills = random_fills(bundle, WeightImage(bundle.tensors), 0, 132)
    assert len(fills) == sum(name.endswith(".weight") for name in bundle.tensors)
    assert len({fill.params.output for fill in fills}) == len({fill.params.seed for fill in fills}) == len(fills)
    vectors = random_vectors(bundle)
    for name, columns in (("layers.0.down", 14336), ("draft.layers.15.down", 8192), ("draft.layers.0.qkv", 2048)):
        np.testing.assert_allclose(vectors[f"{name}.scale"], np.sqrt(3.0 / columns), rtol=1e-6)
    assert inspect.main(bundle.path) == 0
    assert "draft model" in capsys.readouterr().out
    for arguments, words in (
        (
            ["--arch", "llama-3.1-8b", "--random-weights", "--draft", "d", "--output", "y"],
            "say --heads N or --draft-arch",
        ),
        (
            ["--model", "m", "--draft-arch", "llama-3.2-1b", "--output", "y"],
            "--draft-arch and --eagle-shape go with --arch",
        ),
    ):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert words in capsys.readouterr().err
    assert cli.main([*shape, "--draft-arch", "qwen3-8b", "--force", "--quiet"]) == 2
    assert "qwen3-8b holds 40960 tokens, the target 131072; lower --context" in capsys.readouterr().err
