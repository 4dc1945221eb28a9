"""Medusa heads in bundles for a GPU: how they are stored and captured, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import head_tensors, write_checkpoint
from device_bundles import write_stubs
from recording_driver import RecordingDriver
from ull.bundle import CHUNK_KERNELS, DEVICE_KERNELS, MEDUSA_KERNELS, PAGES_KERNELS, Bundle, Precision, open_bundle
from ull.commands import inspect
from ull.errors import CheckpointError
from ull.gpu.program import Program
from ull.log import Log
from ull_build import cli
from ull_build.build import build
from ull_build.code import kernels
from ull_build.settings import Settings
from ull_build.source.drafters import SpeculationSettings
from ull_build.weights.pack_gpu import unpack_blocks
from ull_build.weights.quantise import round_to_bf16
from weights_files import read_weights

HIDDEN, VOCABULARY = 96, 333
DIMENSIONS = {"head_dim": 32, "hidden_size": HIDDEN, "num_attention_heads": 4, "vocab_size": VOCABULARY}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", config=DIMENSIONS)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))


def built(checkpoint: Path, output: Path, heads: Path, count: int | None = None, weights: Any = "fp8") -> Bundle:
    speculation = SpeculationSettings(medusa=heads, medusa_count=count)
    precision = Precision(weights=weights)
    settings = Settings(checkpoint, output, "x", "sm_90a", precision=precision, evaluate=False, speculation=speculation)
    return open_bundle(build(settings).path)


@pytest.mark.parametrize(("own", "rows", "biases"), [(True, 340, True), (True, 325, False), (False, 0, True)])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_heads_stand_one_below_the_other(
    checkpoint: Path, tmp_path: Path, weights: str, own: bool, rows: int, biases: bool
) -> None:
    """Two of three heads, whose lm_heads may have more or fewer rows than the model's embedding."""
    original = head_tensors(3, 2, own, HIDDEN, rows, biases)
    save_file(original, tmp_path / "heads.safetensors")
    bundle = built(checkpoint, tmp_path / "x.ull", tmp_path / "heads.safetensors", 2, weights)
    manifest, packed = bundle.manifest, read_weights(bundle.weights_path)
    assert manifest.code is not None and manifest.medusa is not None and manifest.medusa.heads == 2
    assert set(manifest.code.kernels()) == DEVICE_KERNELS | PAGES_KERNELS | CHUNK_KERNELS | MEDUSA_KERNELS
    assert manifest.code.macros["ULL_MEDUSA_HEADS"] == "2"
    assert manifest.code.macros["ULL_MEDUSA_OWN_HEADS"] == str(int(own))

    def check(name: str, sources: list[Any], height: int) -> None:
        found = unpack_blocks(packed[f"{name}.weight"]).astype(np.float32)
        found *= packed[f"{name}.scale"][: len(found), None]
        assert found.shape == (height * len(sources), HIDDEN)
        for head, source in enumerate(sources):
            mine = found[head * height : (head + 1) * height]
            kept = min(VOCABULARY if name.endswith("lm_head") else HIDDEN, len(source))
            if weights == "bf16":
                np.testing.assert_array_equal(mine[:kept], round_to_bf16(source[:kept]))
            error = np.linalg.norm(mine[:kept] - source[:kept]) / np.linalg.norm(source[:kept])
            assert error < 0.04
            assert not mine[max(kept, len(source)) :].any()

    for layer in range(2):
        check(f"medusa.{layer}", [original[f"{head}.{layer}.linear.weight"] for head in range(2)], HIDDEN)
        assert (f"medusa.{layer}.bias" in packed) == biases
        if biases:
            bias = np.concatenate([original[f"{head}.{layer}.linear.bias"] for head in range(2)])
            np.testing.assert_array_equal(packed[f"medusa.{layer}.bias"][: len(bias)], round_to_bf16(bias))
    assert ("medusa.lm_head.weight" in packed) == own
    if own:
        check("medusa.lm_head", [original[f"{head}.2.weight"] for head in range(2)], -(-VOCABULARY // 16) * 16)
    open_bundle(bundle.path, "hashes")


@pytest.mark.parametrize("own", [True, False])
def test_heads_are_a_graph_of_their_own(checkpoint: Path, tmp_path: Path, own: bool) -> None:
    save_file(head_tensors(3, 2, own, HIDDEN, 340), tmp_path / "heads.safetensors")
    bundle, driver = built(checkpoint, tmp_path / "x.ull", tmp_path / "heads.safetensors"), RecordingDriver()
    program = Program(bundle, Log(stream=io.StringIO()), driver=driver)
    handover, region = program.handover, program._arena.address
    assert handover["medusa_heads"] == 3 and handover["graphs"].keys() == {1, 2, 4, 8, 16, 32, 64}
    heads = sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith("medusa."))
    assert (handover["medusa_bytes"], handover["weight_bytes"]) == (heads, bundle.weight_bytes - heads)
    graph = driver.graphs[handover["medusa"]]
    of_heads = [f"ull_medusa_{name}" for name in ("start", "block", "block", "head", "rank")]
    assert [launch.kernel for launch in graph] == ["ull_begin", *of_heads, "ull_accept"]
    assert [launch.overlaps for launch in graph] == [False] + [True] * 6
    _, start, first, second, head, rank, _ = [launch.params for launch in graph]

    def tensor(name: str) -> int:
        return region("weights") + (program._image.offset(name) or 0)

    one, other = region("medusa states"), region("next medusa states")
    assert (start.residual, start.norm_weight, start.normed) == (region("residual"), tensor("norm"), one)
    assert (first.weights, first.bias) == (tensor("medusa.0.weight"), tensor("medusa.0.bias"))
    assert second.scale == tensor("medusa.1.scale")
    states = [(launch.activations, launch.output) for launch in (first, second, head)]
    assert states == [(one, other), (other, one), (one, region("logits"))]
    assert head.weights == tensor("medusa.lm_head.weight" if own else "lm_head.weight") and head.bias is None
    assert (rank.logits, rank.text_counts) == (region("logits"), region("text counts"))
    counters = range(region("counters"), region("counters") + 4 * program.sizes.counter_count, 4)
    commit = driver.graphs[handover["graphs"][2]][-1].params
    assert {rank.counters + 4 * index for index in range(3)} <= set(counters) - {commit.counters}
    assert graph[5].grid[1] == 3
    program.close()


def test_without_heads_nothing_changes(checkpoint: Path, tmp_path: Path) -> None:
    """Bundles that were built before there were any go on to open."""
    settings = Settings(checkpoint, tmp_path / "x.ull", "x", "sm_90a", evaluate=False)
    code = open_bundle(build(settings).path).manifest.code
    assert code is not None and set(code.kernels()) == DEVICE_KERNELS | PAGES_KERNELS | CHUNK_KERNELS
    assert not [name for name in code.macros if "MEDUSA" in name]


def test_too_many_heads_are_refused_before_anything_is_compiled(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(head_tensors(9, hidden=HIDDEN), tmp_path / "heads.safetensors")
    assert built(checkpoint, tmp_path / "x.ull", tmp_path / "heads.safetensors", 8).manifest.medusa is not None
    monkeypatch.setattr(kernels, "compile_file", None)
    with pytest.raises(CheckpointError, match=r"at most 8 Medusa heads, not 9; take fewer \(medusa\.num\)") as caught:
        built(checkpoint, tmp_path / "y.ull", tmp_path / "heads.safetensors")
    assert caught.value.field == "medusa"
    assert not (tmp_path / "y.ull").exists()


def test_a_benchmark_bundle_with_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--arch", "llama-3.2-1b", "--random-weights", "--layers", "1", "--output", str(tmp_path / "x.ull")]
    assert cli.main([*shape, "--heads", "4", "--quiet"]) == 0
    bundle = open_bundle(tmp_path / "x.ull")
    assert bundle.tensors["medusa.lm_head.weight"].shape[0] == 4 * 128256 // 16
    assert bundle.tensors["medusa.0.weight"].shape[0] == 4 * 2048 // 16 and "medusa.0.bias" not in bundle.tensors
    assert inspect.main(bundle.path) == 0
    assert "4 of 1 layer, lm_heads of their own" in capsys.readouterr().out
    assert cli.main([*shape, "--heads", "9", "--force"]) == 2
    assert "at most 8 Medusa heads" in capsys.readouterr().err
    for arguments, words in ((["--heads", "0"], "--heads must be at least 1"), (["--medusa", "m"], "say --heads N")):
        with pytest.raises(SystemExit):
            cli.main([*shape, *arguments])
        assert words in capsys.readouterr().err
