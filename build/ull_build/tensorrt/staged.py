"""Adds plans to a bundle that is being built: builds them on this machine's GPU, tries them, notes what was seen.

Where no phase is computed by our kernels the bundle holds none of their weights; these lie in `REFERENCE`, beside the
code, until the plans have been held against them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ull.bundle import (
    ARCHITECTURES,
    CODE_DIRECTORY,
    FUSED,
    MAX_TREE,
    TOKEN_COUNTS,
    Bundle,
    FileEntry,
    Forward,
    Manifest,
    Model,
    PlanCheck,
    Plans,
    Target,
)
from ull.gpu import tensorrt_library
from ull_build.local_gpu import LocalGpu, find_gpu, staged_bundle
from ull_build.output import file_entry
from ull_build.progress import Reporter
from ull_build.quality import Evaluator
from ull_build.recipe import ForwardRecipe
from ull_build.tensorrt import check
from ull_build.tensorrt.plans import build_plans
from ull_build.tensorrt.weights import Weights, input_scales

REFERENCE = "reference"  # folder of the staging directory


@dataclass(frozen=True)
class Tools:
    """TensorRT, and the GPU that it builds for."""

    trt: Any
    gpu: LocalGpu


def find_tools(target: Target) -> Tools:
    """Raises GpuError without TensorRT or a GPU, BuildError where the GPU is not the target's."""
    return Tools(tensorrt_library.load(), find_gpu(target, "TensorRT builds plans"))


def timing_cache_of(output: Path) -> Path:
    """Where TensorRT's measurements for a bundle are kept: beside it."""
    return output.with_name(f"{output.name}.timing-cache")


@dataclass(frozen=True)
class AddedPlans:
    """Plans in the staging directory: what the manifest says of them, as yet untried, their files, what was timed."""

    forward: Forward
    files: dict[str, FileEntry]
    timing_cache: bytes


def add_plans(
    tools: Tools,
    request: ForwardRecipe,
    model: Model,
    weights: Weights,
    amax: Mapping[str, float],
    staging: Path,
    timing_cache: Path,
    reporter: Reporter,
) -> AddedPlans:
    """Builds plans into `staging`. `amax`: the range of each FP8 linear's inputs. Raises BuildError."""
    counts = TOKEN_COUNTS if request.decode == "tensorrt" else (1, MAX_TREE)  # a prefill is always the widest round
    built = build_plans(tools.trt, model, weights, amax, staging, timing_cache, reporter, request.attention, counts)
    plans = Plans(
        version=built.tensorrt,
        gpu=tools.gpu.name,
        capability=tools.gpu.capability,
        files=list(built.files.values()),
        token_counts=list(built.tokens),
        scratch_bytes=built.device_memory,
        exact=[1],
        place_exact=False,
        attention=request.attention,
    )
    files = {name: file_entry(staging / name) for name in (*built.files.values(), *built.reports)}
    return AddedPlans(Forward(request.prefill, request.decode, plans), files, built.timing_cache)


def try_plans(
    staging: Path,
    manifest: Manifest,
    tokens: Sequence[int],
    evaluator: Evaluator,
    limit: float,
    reporter: Reporter,
) -> Manifest:
    """Holds the staged plans against our kernels, where these run, and the CPU; the manifest with what was seen.

    Removes the reference weights. Raises BuildError above the limit, GpuError or BundleError where they do not run.
    """
    tokens = check.enough_of(tokens, manifest.model.context)
    reporter.note("trying the plans on the GPU")
    reference = staging / REFERENCE
    try:
        seen = check.observe_plans(staged_bundle(staging, manifest), tokens)
        fused = None
        if ARCHITECTURES[manifest.target].has_bulk_copies:
            weights = reference if reference.exists() else staging
            if weights is reference:
                (reference / CODE_DIRECTORY).symlink_to(staging / CODE_DIRECTORY)
            fused = check.read_logits(check.with_forward(staged_bundle(weights, manifest), FUSED), tokens)
        plain = fp8 = evaluator.logits(tokens)
        if manifest.calibration is not None:
            fp8 = evaluator.logits(tokens, input_scales(manifest.calibration.amax))
        made = check.check_plans(seen, check.References(plain, fp8, fused), limit)
    finally:
        shutil.rmtree(reference, ignore_errors=True)
    return _noted(manifest, seen, made)


def watch_plans(bundle: Bundle) -> Manifest:
    """What `try_plans` notes, of a complete bundle of made-up weights, whose logits have nothing to be held against.

    Raises GpuError or BundleError where the plans do not run.
    """
    tokens = check.enough_of(range(check.CHECK_TOKENS), bundle.manifest.model.context)
    return _noted(bundle.manifest, check.observe_plans(bundle, tokens), None)


def _noted(manifest: Manifest, seen: check.Seen, made: PlanCheck | None) -> Manifest:
    """The manifest with what has been seen of its plans."""
    plans = manifest.forward.plans
    assert plans is not None
    forward = msgspec.structs.replace(manifest.forward, plans=check.settled(plans, seen, made))
    return msgspec.structs.replace(manifest, forward=forward)
