"""TensorRT plans from ull-build to a client, on doubles of TensorRT (evaluated in NumPy) and of the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import driver_double
from conftest import ROOT
from device_bundles import build_with_stubs, emulated_kernels, write_stubs
from ull.bundle import Bundle, open_bundle
from ull.client import Client
from ull.spawn import DaemonProcess
from ull_build.build import Settings

CONTEXT = 512
TOKENS = 10
PROMPTS = ("def add(first, second):\n    return", "x = 1\nx = 1\nx = 1\nx = 1\nx =")
PROGRAM = [sys.executable, str(ROOT / "tests/tensorrt_program.py")]

pytestmark = pytest.mark.timeout(900)  # the first test compiles every kernel for the emulator


class Workshop:
    """Builds bundles of engines/tiny with plans, and serves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stubs = write_stubs(folder / "stubs")
        with pytest.MonkeyPatch.context() as patch:
            settings = Settings(ROOT / "engines/tiny", folder / "plain.ull", "tiny", "sm_90a", evaluate=False)
            plain = build_with_stubs(patch, folder / "kernels", settings)
        self.emulated = emulated_kernels(plain)

    def environment(self, **options: object) -> dict[str, str]:
        double = driver_double.environment(self.emulated, multiprocessors=4, **options)
        paths = [str(ROOT / "tests"), str(ROOT / "build"), str(ROOT), *sys.path]
        return {**double, "ULL_TEST_KERNELS": str(self.stubs), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def build(self, name: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        command = [*PROGRAM, "build", str(ROOT / "engines/tiny-ngram.toml"), "--target", "sm_90a"]
        command += ["--context", str(CONTEXT), "--eval-tokens", "512", "--output", str(self.folder / name), *arguments]
        return subprocess.run(command, env=self.environment(**options), capture_output=True, text=True, timeout=600)

    def bundle(self, name: str, *arguments: str) -> Bundle:
        path = self.folder / name
        if not path.exists():
            result = self.build(name, *arguments)
            assert result.returncode == 0, result.stderr
        return open_bundle(path, verify="hashes")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("plans"))


@pytest.fixture
def serve(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """serve(bundle): ulld on it."""
    daemons: list[DaemonProcess] = []

    def begin(bundle: Bundle, *arguments: str, **options: object) -> DaemonProcess:
        for name, value in workshop.environment(**options).items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        arguments = ("--set", "engine.watchdog_ms=120000", *arguments)
        daemons.append(
            DaemonProcess(bundle.path, arguments=arguments, ready_timeout=600.0, command=[*PROGRAM, "serve"])
        )
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.kill()


def complete(client: Client, prompt: str, **options: Any) -> list[int]:
    result = client.generate(prompt, **{"max_tokens": TOKENS, "seed": 7, "ignore_eos": True} | options).result()
    assert result.finish_reason == "length", result.error
    return list(result.token_ids)


def test_a_build_says_what_it_has_seen(workshop: Workshop) -> None:
    """Calibration and its loss, the plans, the comparison of their logits, and no linear weights of ours."""
    bundle = workshop.bundle("tensorrt.ull", "--forward", "tensorrt")
    manifest = bundle.manifest
    assert manifest.quality is not None and manifest.calibration is not None
    assert set(manifest.calibration.losses) == {"max", "percentile"}
    assert abs(manifest.calibration.perplexity_increase) < manifest.quality.limit
    forward, model = manifest.forward, manifest.model
    plans = forward.plans
    assert (forward.prefill, forward.decode) == ("tensorrt", "tensorrt") and plans is not None
    names = ["entry", *(f"layer.{layer}" for layer in range(model.layers - 1)), "exit", "head"]
    assert plans.files == [f"code/plans/{name}.plan" for name in names]
    assert (plans.gpu, plans.capability, plans.scratch_bytes > 0) == ("NVIDIA H200", "9.0", True)
    assert plans.check is not None and plans.check.fused_error is not None
    assert 0.0 < plans.check.cpu_error < plans.check.limit and plans.check.cpu_top1 > 0.8
    assert not [name for name in bundle.tensors if "qkv" in name or "norm" in name]
    assert {"code/plans/build.log", "code/plans/inspector.json"} <= set(manifest.files)
    assert not (bundle.path / "reference").exists()
    assert bundle.path.with_name("tensorrt.ull.timing-cache").exists()


def test_a_client_gets_the_plans_tokens(workshop: Workshop, serve: Any) -> None:
    """Plain, sampled, by n-gram, cold and as a next turn: the same request gives the same tokens."""
    bundle = workshop.bundle("tensorrt.ull", "--forward", "tensorrt")
    daemon = serve(bundle)
    with Client(daemon.url) as client:
        for prompt in PROMPTS:
            plain = complete(client, prompt, speculate="none")
            assert complete(client, prompt, speculate="ngram") == plain
            sampled = complete(client, prompt, temperature=0.8, top_k=40)
            assert complete(client, prompt, temperature=0.8, top_k=40, speculate="ngram") == sampled
    assert daemon.stop() == 0
    assert not [line for line in daemon.log_lines() if "Traceback" in line or "error" in line]
