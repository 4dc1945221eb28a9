"""TensorRT plans from ull-build to a client, on doubles of TensorRT (evaluated in NumPy) and of the driver."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import driver_double
from conftest import ROOT
from device_bundles import build_with_stubs, emulated_kernels, write_stubs
from double_daemons import TOKENS, complete, daemons
from manifests import change_manifest
from ull.bundle import Bundle, open_bundle
from ull.client.sync import Client
from ull.spawn import DaemonProcess
from ull_build.recipe import ForwardRecipe
from ull_build.settings import Settings

CONTEXT = 192
PROMPTS = ("def add(first, second):\n    return", "x = 1\nx = 1\nx = 1\nx = 1\nx =")
PROGRAM = [sys.executable, str(ROOT / "tests/rigs/gpu/tensorrt_program.py")]

pytestmark = pytest.mark.timeout(1800)  # the first test compiles every kernel for the emulator


class Workshop:
    """Builds bundles of engines/tiny with plans, and serves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stubs = write_stubs(folder / "stubs")
        with pytest.MonkeyPatch.context() as patch:
            forward = ForwardRecipe(tree_products="warp")  # as beside plans
            options: dict[str, Any] = {"target": "sm_90a", "evaluate": False, "forward": forward}
            settings = Settings(ROOT / "engines/tiny", folder / "plain.ull", "tiny", **options)
            plain = build_with_stubs(patch, folder / "kernels", settings)
        self.emulated = emulated_kernels(plain)

    def environment(self, **options: object) -> dict[str, str]:
        double = driver_double.environment(self.emulated, multiprocessors=4, launch_ms=1000, **options)
        return {**double, "ULL_TEST_KERNELS": str(self.stubs)}

    def recipe(self, more: str) -> Path:
        """A recipe of engines/tiny with tables of its own."""
        path = self.folder / "recipe.toml"
        path.write_text(f'model = "{ROOT / "engines/tiny"}"\ndrafter = "suffix"\n{more}')
        return path

    def build(
        self, output: str, *arguments: str, recipe: Path = ROOT / "engines/tiny-suffix.toml", **options: object
    ) -> subprocess.CompletedProcess[str]:
        command = [*PROGRAM, "build", str(recipe), "--target", "sm_90a"]
        command += ["--context", str(CONTEXT), "--eval-tokens", "512", "--output", str(self.folder / output)]
        command += arguments
        return subprocess.run(command, env=self.environment(**options), capture_output=True, text=True, timeout=1200)

    def bundle(self, output: str, *arguments: str, **options: Any) -> Bundle:
        path = self.folder / output
        if not path.exists():
            result = self.build(output, *arguments, **options)
            assert result.returncode == 0, result.stderr
        return open_bundle(path, verify="hashes")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("plans"))


@pytest.fixture
def serve(workshop: Workshop) -> Iterator[Any]:
    """serve(bundle): ulld on it."""
    with daemons() as start:

        def begin(bundle: Bundle, *arguments: str, **options: object) -> DaemonProcess:
            arguments = ("--set", "engine.watchdog_ms=120000", *arguments)
            return start(bundle.path, workshop.environment(**options), *arguments, command=[*PROGRAM, "serve"])

        yield begin


def turn(client: Client, tokens: list[int]) -> tuple[list[int], list[float], int]:
    """A request's tokens, their logprobs, and how much of its prompt was cached."""
    stream = client.generate(tokens, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    logprobs = [entry.logprob for token in stream for entry in token.logprobs or ()]
    result = stream.result()
    return list(result.token_ids), logprobs, result.usage.cached_tokens


def test_a_build_says_what_it_has_seen(workshop: Workshop) -> None:
    """Calibration and its loss, the plans, the comparison of their logits, and no linear weights of ours."""
    bundle = workshop.bundle("tensorrt.ull", "--forward", "tensorrt")
    manifest = bundle.manifest
    assert manifest.quality is not None and manifest.calibration is not None
    assert set(manifest.calibration.losses) == {"max", "percentile"}
    assert manifest.calibration.perplexity_increase <= manifest.quality.limit
    forward, model = manifest.forward, manifest.model
    plans = forward.plans
    assert (forward.prefill, forward.decode) == ("tensorrt", "tensorrt") and plans is not None
    names = ["entry", *(f"layer.{layer}" for layer in range(model.layers - 1)), "exit", "head"]
    assert plans.files == [f"code/plans/{name}.plan" for name in names]
    assert (plans.gpu, plans.capability, plans.scratch_bytes > 0) == ("NVIDIA H200", "9.0", True)
    assert plans.check is not None and plans.check.fused_error is not None
    assert 0.0 < plans.check.cpu_error < plans.check.limit and plans.check.cpu_top1 > 0.8
    assert not [name for name in bundle.tensors if "qkv" in name or "norm" in name]
    reports = {f"code/plans/{name}" for name in ("build.log", "tactics.log.gz", "inspector.json")}
    assert reports <= set(manifest.files)
    assert plans.profiles == [(1, 16, 16), (64, 64, 64)]
    assert (plans.operands, plans.sixteen_bits, forward.notes) == ({}, [], [])
    assert not (bundle.path / "reference").exists()
    assert bundle.path.with_name("tensorrt.ull.timing-cache").exists()


def test_a_client_gets_the_plans_tokens(workshop: Workshop, serve: Any) -> None:
    """Plain, sampled, by n-gram, cold and as a next turn: the same request gives the same bits."""
    bundle = workshop.bundle("tensorrt.ull", "--forward", "tensorrt")
    forward = bundle.manifest.forward
    assert (forward.tree_sizes, forward.reuse) == ([1, 2, 4, 8, 16, 64], "all")  # as NumPy sums, whatever the size
    daemon = serve(bundle)
    first = list(range(300, 390))
    with Client(daemon.url) as client:
        for prompt in PROMPTS:
            plain = complete(client, prompt, speculate="none")
            assert complete(client, prompt, speculate="suffix") == plain
            sampled = complete(client, prompt, temperature=0.8, top_k=40)
            assert complete(client, prompt, temperature=0.8, top_k=40, speculate="suffix") == sampled
        second = [*first, *turn(client, first)[0], 500, 501]
        tokens, logprobs, cached = turn(client, second)
        assert cached >= len(first)  # the answer's keys and values too
    assert daemon.stop() == 0
    assert not [line for line in daemon.log_lines() if "Traceback" in line or "error" in line]
    with Client(serve(bundle).url) as client:
        assert turn(client, second) == (tokens, logprobs, 0)


def test_caching_keeps_to_what_the_prefill_wrote(workshop: Workshop, serve: Any) -> None:
    """Prefill by plans, decode by our kernels: a next turn's logprobs do not depend on the first one's cache."""
    bundle = workshop.bundle("mixed.ull", recipe=workshop.recipe('[forward]\nprefill = "tensorrt"\n'))
    assert (bundle.manifest.forward.prefill, bundle.manifest.forward.decode) == ("tensorrt", "fused")
    first = list(range(300, 390))
    with Client(serve(bundle).url) as client:
        answer, _, _ = turn(client, first)
        second = [*first, *answer, 500, 501]
        tokens, logprobs, cached = turn(client, second)
    assert 0 < cached < len(first)
    with Client(serve(bundle).url) as client:
        assert turn(client, second) == (tokens, logprobs, 0)


ADA = {"name": "NVIDIA L40S", "capability": "8.9", "memory": 48 << 30}  # has none of our kernels of the layers


@pytest.mark.parametrize(("target", "gpu"), [("sm_90a", {}), ("sm_89", ADA)], ids=["sm_90a", "sm_89"])
def test_native_attention_serves_every_request_cold(
    workshop: Workshop, serve: Any, target: str, gpu: dict[str, Any]
) -> None:
    """TensorRT's own KV cache belongs to one request: its tokens are those of the paged plans, nothing is kept."""
    options = ("--forward", "tensorrt", "--attention", "native", "--target", target)
    bundle = workshop.bundle(f"native-{target}.ull", *options, **gpu)
    plans = bundle.manifest.forward.plans
    assert plans is not None and plans.files == ["code/plans/step.plan", "code/plans/head.plan"]
    assert plans.check is not None and plans.check.cpu_error < plans.check.limit
    assert (plans.check.fused_error is None) == (target == "sm_89")
    code = bundle.manifest.code
    assert code is not None and f"--gpu-architecture={target}" in code.options
    daemon = serve(bundle, **gpu)
    with Client(daemon.url) as client:
        answers = [complete(client, prompt, speculate="none") for prompt in PROMPTS]
        assert [complete(client, prompt) for prompt in PROMPTS] == answers
        tokens, _, cached = turn(client, list(range(300, 390)))
        assert (len(tokens), cached) == (TOKENS, 0)
        assert turn(client, list(range(300, 390)))[2] == 0
    assert daemon.stop() == 0
    if target == "sm_90a":
        with Client(serve(workshop.bundle("tensorrt.ull", "--forward", "tensorrt")).url) as client:
            assert [complete(client, prompt) for prompt in PROMPTS] == answers


def refused(workshop: Workshop, bundle: Path, **options: object) -> str:
    """What ulld says when it does not take a bundle."""
    command = [*PROGRAM, "serve", str(bundle), "--listen", f"ipc://{workshop.folder}/none.sock"]
    environment = workshop.environment(**options)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 1 and "READY" not in result.stdout
    return result.stderr


@pytest.fixture
def copy(workshop: Workshop, tmp_path: Path) -> Path:
    bundle = workshop.bundle("tensorrt.ull", "--forward", "tensorrt")
    return Path(shutil.copytree(bundle.path, tmp_path / "x.ull"))


def replace_plan(bundle: Path, name: str, data: bytes) -> None:
    """Another plan, of which the manifest knows."""
    (bundle / name).write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    change_manifest(bundle, lambda manifest: manifest["files"].update({name: entry}))


def test_plans_of_another_version_gpu_or_place_are_refused(workshop: Workshop, copy: Path) -> None:
    said = refused(workshop, copy, name="NVIDIA H100 80GB HBM3")
    assert "plans were built on NVIDIA H200" in said and "this is NVIDIA H100 80GB HBM3" in said
    entry = copy / "code/plans/entry.plan"
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "entry.plan differs from its SHA-256" in refused(workshop, copy)
    replace_plan(copy, "code/plans/entry.plan", whole[: len(whole) // 2])
    assert "TensorRT refuses" in refused(workshop, copy)
    replace_plan(copy, "code/plans/entry.plan", (copy / "code/plans/exit.plan").read_bytes())
    assert "entry.plan is not one of segment 'entry'" in refused(workshop, copy)
    replace_plan(copy, "code/plans/entry.plan", whole)
    swapped = ["code/plans/layer.1.plan", "code/plans/layer.0.plan"]
    change_manifest(copy, lambda manifest: manifest["forward"]["plans"]["files"].__setitem__(slice(1, 3), swapped))
    assert "layer.1.plan is not one of segment 'layer.0'" in refused(workshop, copy)
    assert refused(workshop, copy, memory=10_000_000).count("in all; use a larger GPU") == 1
    change_manifest(copy, lambda manifest: manifest["forward"]["plans"].update(version="11.0.0.1"))
    assert "built by TensorRT 11.0.0.1" in (said := refused(workshop, copy)) and "tensorrt==11.0.0.1" in said


def test_a_build_without_what_it_needs_says_so(workshop: Workshop) -> None:
    """No TensorRT, another GPU, ranges that must be measured: before any work, and nothing is left."""
    arguments = [str(ROOT / "engines/tiny-suffix.toml"), "--target", "sm_90a", "--forward", "tensorrt"]
    command = [sys.executable, "-m", "ull_build", *arguments, "--output", str(workshop.folder / "none.ull")]
    result = subprocess.run(command, env=workshop.environment(), capture_output=True, text=True, timeout=1200)
    assert result.returncode == 1 and "pip install ull[tensorrt]" in result.stderr
    result = workshop.build("none.ull", "--forward", "tensorrt", capability="10.0")
    assert result.returncode == 1 and "which is not a sm_90a: build on an H100, H200 or GH200" in result.stderr
    result = workshop.build("none.ull", "--forward", "tensorrt", "--no-eval")
    assert result.returncode == 1 and "have to be measured: leave out --no-eval" in result.stderr
    assert not list(workshop.folder.glob("*none*"))


def test_plans_that_agree_on_nothing_serve_every_request_alone(
    workshop: Workshop, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of tokens and each place has bits of its own: no trees, nothing kept, and the same tokens again."""
    monkeypatch.setenv("ULL_TEST_TENSORRT", "profile-bits,place-bits")
    bundle = workshop.bundle("seven.ull", "--forward", "tensorrt", "--profiles", "seven")
    forward = bundle.manifest.forward
    assert forward.plans is not None and len(forward.plans.profiles) == 7
    assert (forward.plans.exact, forward.plans.place_exact) == ([1], False)
    assert (forward.tree_sizes, forward.reuse) == ([1], "nothing")
    daemon = serve(bundle)
    first = list(range(300, 390))
    with Client(daemon.url) as client:
        answers = [complete(client, prompt) for prompt in PROMPTS]
        assert [complete(client, prompt) for prompt in PROMPTS] == answers
        second = [*first, *turn(client, first)[0], 500, 501]
        tokens, logprobs, cached = turn(client, second)
        assert cached == 0
    assert daemon.stop() == 0
    with Client(serve(bundle).url) as client:
        assert turn(client, second) == (tokens, logprobs, 0)


def inspected(bundle: Path) -> str:
    """What `ull inspect` prints, on one line."""
    command = [sys.executable, "-m", "ull.cli", "inspect", str(bundle)]
    environment = {**os.environ, "COLUMNS": "400"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return " ".join(result.stdout.split())


def test_a_segment_that_goes_wrong_is_built_with_less_freedom(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by a lower level, one with a linear in 16 bits; what the recipe asks for in vain is said too."""
    monkeypatch.setenv("ULL_TEST_TENSORRT", "unstable=layer.1@3+layer.2/layers.2.down")
    heads = ROOT / "engines/tiny/medusa"
    recipe = workshop.recipe(f'[forward]\nprefill = "tensorrt"\ndecode = "tensorrt"\n[medusa]\nheads = "{heads}"\n')
    result = workshop.build("rungs.ull", recipe=recipe)
    assert result.returncode == 0, result.stderr
    bundle = open_bundle(workshop.folder / "rungs.ull", verify="hashes")
    forward = bundle.manifest.forward
    assert forward.plans is not None and forward.plans.sixteen_bits == ["layers.2.down"]
    assert forward.plans.check is not None and forward.plans.operands == {}
    left_out, level, linear = forward.notes
    assert "Medusa heads are left out" in left_out
    assert level.startswith("layer.1: built with optimisation level 1, because at first its outputs were ")
    assert "off NumPy's (limit 25%): an unstable kernel" in level
    assert linear.startswith("layer.2: built with 16-bit activations for layers.2.down, because at first ")
    printed = " ".join(result.stdout.split())
    assert all(note in printed for note in forward.notes)
    shown = inspected(bundle.path)
    assert all(note in shown for note in forward.notes) and "16-bit activations │ layers.2.down" in shown
    for line in ("driver: release", "TensorRT: 11.", "device memory: ", "host memory: ", "disk: "):
        assert printed.count(line) == 1


def test_where_no_plan_is_right_the_engine_is_ours(
    workshop: Workshop, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever TensorRT is allowed: the bundle comes into being, says why it is not what was asked for, and serves."""
    monkeypatch.setenv("ULL_TEST_TENSORRT", "unstable=layer.1")
    result = workshop.build("unstable.ull", "--forward", "tensorrt")
    assert result.returncode == 0, result.stderr
    bundle = open_bundle(workshop.folder / "unstable.ull", verify="hashes")
    forward = bundle.manifest.forward
    assert (forward.prefill, forward.decode, forward.plans) == ("exact", "fused", None)
    why, what = forward.notes
    assert "could not build layer.1: its outputs were" in why and "by our own kernels" in what
    assert "TensorRT is left out" in result.stdout and why in inspected(bundle.path)
    assert [name for name in bundle.tensors if "qkv" in name] and bundle.manifest.calibration is None
    assert {"code/plans/build.log", "code/plans/tactics.log.gz"} <= set(bundle.manifest.files)
    assert not [name for name in bundle.manifest.files if name.endswith(".plan")]
    # Nor a timing cache that would choose the same again.
    assert sorted(path.name for path in workshop.folder.glob("*unstable*")) == ["unstable.ull"]
    with Client(serve(bundle).url) as client:
        assert len(complete(client, PROMPTS[0])) == TOKENS


def test_the_benchmark_measures_every_source(workshop: Workshop) -> None:
    """On a bundle that holds both our kernels' weights and plans, in place of a benchmark's own."""
    bundle = workshop.bundle("mixed.ull", recipe=workshop.recipe('[forward]\nprefill = "tensorrt"\n'))
    command = [*PROGRAM, "measure", str(bundle.path)]
    result = subprocess.run(command, env=workshop.environment(), capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["installed"] and set(report["sources"]) == {"fused", "tensorrt, paged", "tensorrt, native"}
    assert set(report["sources"]["tensorrt, paged"]["ms"]) == {"1@8", "16@8"}
    assert "beside our kernels" in result.stdout
