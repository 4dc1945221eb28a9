"""The FP8 copy of an lm_head in a bundle: its tensors, what `ull inspect` says of it, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import write_checkpoint
from device_bundles import write_stubs
from ull.bundle import CHUNK_KERNELS, DEVICE_KERNELS, HEAD_SCAN_KERNELS, PAGES_KERNELS, Precision, open_bundle
from ull.commands import inspect
from ull.errors import RecipeError
from ull_build import cli
from ull_build.build import build
from ull_build.code import kernels
from ull_build.recipe import make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.weights.head_scan import scan_rows
from ull_build.weights.pack_gpu import unpack_blocks
from weights_files import read_weights

DIMENSIONS = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 100, "num_attention_heads": 4, "vocab_size": 333}
GPU = {"model": "m", "name": "n", "output": "x.ull", "target": "sm_90a", "lm_head_scan": True}
NATIVE = {"prefill": "tensorrt", "decode": "tensorrt", "attention": "native"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary fills no whole tile."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", "llama", config=DIMENSIONS)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))


def built(checkpoint: Path, output: Path, scans: bool) -> Path:
    precision = Precision(lm_head_scan=scans)
    return build(Settings(checkpoint, output, "x", target="sm_90a", evaluate=False, precision=precision)).path


def test_the_copy_stands_behind_the_lm_head(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    plain, scanning = (built(checkpoint, tmp_path / f"{scans}.ull", scans) for scans in (False, True))
    before, after = (read_weights(path / "weights.safetensors") for path in (plain, scanning))
    assert after.keys() - before.keys() == {f"lm_head_scan.{kind}" for kind in ("weight", "scale", "bound")}
    assert all(np.array_equal(before[name].view(np.uint8), after[name].view(np.uint8)) for name in before)
    original = load_file(checkpoint / "model.safetensors")
    rows = original.get("lm_head.weight", original["model.embed_tokens.weight"]).astype(np.float32)
    codes, scales, bounds = scan_rows(rows)
    count = len(rows)
    assert np.array_equal(unpack_blocks(after["lm_head_scan.weight"].view(np.uint8))[:count], codes)
    assert np.array_equal(after["lm_head_scan.scale"][:count], scales)
    assert np.array_equal(after["lm_head_scan.bound"][:count], bounds)
    manifest = open_bundle(scanning).manifest
    assert manifest.code is not None
    assert set(manifest.code.kernels()) == DEVICE_KERNELS | PAGES_KERNELS | CHUNK_KERNELS | HEAD_SCAN_KERNELS
    assert inspect.main(scanning) == 0
    assert "an FP8 copy" in (said := capsys.readouterr().out) and "lm_head's FP8 copy" in said
    assert inspect.main(plain) == 0 and "FP8 copy" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "cpu"}, "do not run on cpu; leave it out"),
        ({"target": "sm_89", "forward": NATIVE}, "do not run on sm_89; leave it out"),
        ({"forward": {"decode": "tensorrt"}}, "supported: forward.decode fused"),
        ({"lm_head": "fp8"}, "this one is fp8: leave it out"),
    ],
)
def test_where_it_is_of_no_use_it_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    recipe = make_recipe({**GPU, "model": str(checkpoint), "output": str(tmp_path / "x.ull"), **changes}, "recipe")
    with pytest.raises(RecipeError, match=words) as caught:
        build(settings_from_recipe(recipe, evaluate=False))
    assert caught.value.field == "lm_head_scan" and not (tmp_path / "x.ull").exists()


def test_the_command_line_takes_it_and_refuses_it_without_weights(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    output = str(tmp_path / "x.ull")
    arguments = ["--model", str(checkpoint), "--output", output, "--target", "sm_90a", "--no-eval", "--quiet"]
    assert cli.main([*arguments, "--lm-head-scan"]) == 0
    assert open_bundle(Path(output)).manifest.precision.lm_head_scan
    assert cli.main(["--arch", "qwen3-8b", "--random-weights", str(tmp_path / "y.ull"), "--lm-head-scan"]) == 2
    assert "needs an lm_head to copy" in capsys.readouterr().err
