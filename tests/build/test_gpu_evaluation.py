"""The loss of a build measured on the GPU: our kernels run both sides, on the driver double."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import driver_double
from conftest import ROOT
from device_bundles import build_with_stubs, emulated_kernels, write_stubs
from ull.bundle import Precision, open_bundle
from ull_build.build import build
from ull_build.settings import Settings

PRECISION = Precision(weights="bf16")  # both sides of a comparison, so that one library of emulated kernels will do
TOKENS = 130  # windows of 130: two whole chunks and a part of one

pytestmark = pytest.mark.timeout(1800)  # compiles every kernel for the emulator


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    settings = Settings(
        ROOT / "engines/tiny", folder / "x.ull", "x", "sm_90a", PRECISION, context=TOKENS, evaluate=False
    )
    with pytest.MonkeyPatch.context() as patch:
        bundle = build_with_stubs(patch, folder / "kernels", settings)
    return emulated_kernels(bundle)


def run(folder: Path, *arguments: str, kernels: str | None = None, **options: object) -> tuple[int, str]:
    """ull-build on engines/tiny under the double: exit status and standard error."""
    environment = driver_double.environment(kernels, multiprocessors=4, **options)
    environment["ULL_TEST_KERNELS"] = str(write_stubs(folder / "stubs"))
    command = [
        sys.executable,
        str(ROOT / "tests/rigs/gpu/gpu_build.py"),
        "--model",
        str(ROOT / "engines/tiny"),
        "--output",
    ]
    command += [str(folder / "x.ull"), "--target", "sm_90a", "--evaluate-on", "gpu", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    return result.returncode, result.stderr


def test_the_gpu_measures_what_the_cpu_measures(emulated: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "engines/tiny/heldout.txt").read_text()[:3000])
    options = ["--precision", "bf16", "--context", str(TOKENS), "--eval-text", str(text), "--eval-tokens", str(TOKENS)]
    status, said = run(tmp_path, *options, kernels=emulated)
    assert status == 0, said
    on_gpu = open_bundle(tmp_path / "x.ull", verify="hashes").manifest.quality
    measured = {"context": TOKENS, "eval_text": text, "eval_tokens": TOKENS}
    settings = Settings(ROOT / "engines/tiny", tmp_path / "cpu.ull", "x", "cpu", PRECISION, **measured)
    on_cpu = build(settings).manifest.quality
    assert on_gpu is not None and on_cpu is not None
    assert (on_gpu.eval_tokens, on_gpu.window) == (TOKENS - 1, TOKENS)
    assert on_gpu.perplexity_original == pytest.approx(on_cpu.perplexity_original, rel=2e-3)
    assert on_gpu.perplexity_quantised == on_gpu.perplexity_original and on_gpu.top1_agreement == 1.0
    assert not (tmp_path / "x.ull/original").exists()


def test_without_the_right_gpu_the_build_says_so_at_once(tmp_path: Path) -> None:
    status, said = run(tmp_path, capability="8.0")
    assert status == 1 and "the loss is measured on the GPU at hand" in said and "which is not a sm_90a" in said
    status, said = run(tmp_path, devices=0)
    assert status == 1 and "the driver sees no GPU" in said
    status, said = run(tmp_path, "--kv", "fp8")
    assert status == 2 and 'FP8 pages are calibrated on the cpu: evaluate_on "cpu"' in said
    assert not (tmp_path / "x.ull").exists()
