"""Adds plans to a bundle that is being built: builds them on this machine's GPU, tries them, notes what was seen.

Where no phase is computed by our kernels the bundle holds none of their weights; these lie in `REFERENCE`, beside the
code, until the plans have been held against them. Plans that prove wrong are built again with less freedom; where none
are right, the bundle's forward is our own, and its manifest says why.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ull.bundle import (
    CODE_DIRECTORY,
    FUSED,
    GPU_ARCHITECTURES,
    WEIGHTS_FILE,
    FileEntry,
    Forward,
    Manifest,
    Model,
    PlanCheck,
    Plans,
    Target,
    profile_scheme,
)
from ull.gpu.tensorrt import library as tensorrt_library
from ull_build.local_gpu import LocalGpu, find_gpu, staged_bundle
from ull_build.output import file_entry
from ull_build.progress import Reporter
from ull_build.quality.measure import Evaluator
from ull_build.recipe import ForwardRecipe
from ull_build.source.checkpoint import Checkpoint
from ull_build.tensorrt import check
from ull_build.tensorrt.plans import LEVELS, REPORTS, PlanSettings, PlansFailed, Rung, build_plans
from ull_build.tensorrt.timing_cache import save_timing_cache
from ull_build.tensorrt.trial import DeviceRunner
from ull_build.tensorrt.weights import Weights, input_scales
from ull_build.weights.convert import convert_checkpoint
from ull_build.weights.pack_gpu import GpuPacker

REFERENCE = "reference"  # folder of the staging directory
MADE_UP_LIMIT = 0.5  # of made-up weights' logits: what FP8 activations alone cost them is not measured


@dataclass(frozen=True)
class Tools:
    """TensorRT, and the GPU that it builds for."""

    trt: Any
    gpu: LocalGpu
    target: Target


def find_tools(target: Target) -> Tools:
    """Raises GpuError without TensorRT or a GPU, BuildError where the GPU is not the target's."""
    return Tools(tensorrt_library.load(), find_gpu(target, "TensorRT builds plans"), target)


def timing_cache_of(output: Path) -> Path:
    """Where TensorRT's measurements for a bundle are kept: beside it."""
    return output.with_name(f"{output.name}.timing-cache")


@dataclass(frozen=True)
class Source:
    """What plans are made of. `amax`: the range of each FP8 linear's inputs."""

    model: Model
    weights: Weights
    amax: Mapping[str, float]


@dataclass(frozen=True)
class AddedPlans:
    """Plans in the staging directory, or none: what the manifest says of them, as yet untried, and their files."""

    forward: Forward
    files: dict[str, FileEntry]


Try = Callable[[AddedPlans], Manifest]


def prove_plans(
    tools: Tools,
    request: ForwardRecipe,
    source: Source,
    staging: Path,
    timing_cache: Path,
    reporter: Reporter,
    attempt: Try,
) -> Manifest:
    """Builds plans until `attempt`, which compares their logits, raises no PlansFailed: the manifest that it returns.

    Where no plans are right, `attempt` is given the forward by our own kernels, with the reasons, and the files that
    say more; where those do not run, PlansFailed. The timing cache that is kept is that of plans that proved right.
    """
    notes: list[str] = []
    for start in _starts(source.amax):
        try:
            built, added = _add_plans(tools, request, source, staging, timing_cache, reporter, start, notes)
        except PlansFailed as error:  # every rung has been tried where it was needed
            notes.append(error.message)
            break
        try:
            manifest = attempt(added)
        except PlansFailed as error:
            notes.append(f"built again, because with {_words(start)} {error.message}")
            reporter.note(notes[-1])
            continue
        save_timing_cache(built, timing_cache)
        return manifest
    if not GPU_ARCHITECTURES[tools.target].has_bulk_copies:
        raise PlansFailed(f"{notes[-1]}; our own kernels do not run on this GPU", field="forward")
    notes.append("prefill and decode by our own kernels: no TensorRT plans proved right")
    reporter.note(f"TensorRT is left out: {notes[-2]}")
    added = _without_plans(staging, notes)
    shutil.rmtree(staging / REFERENCE, ignore_errors=True)
    return attempt(added)


def _starts(amax: Mapping[str, float]) -> Iterator[Rung]:
    """Where the whole model's plans begin, should those before have had the wrong logits."""
    yield from map(Rung, LEVELS)
    if amax:
        yield Rung(LEVELS[0], frozenset(amax))


def _words(start: Rung) -> str:
    return "16-bit activations everywhere" if start.sixteen_bits else str(start)


def _add_plans(
    tools: Tools,
    request: ForwardRecipe,
    source: Source,
    staging: Path,
    timing_cache: Path,
    reporter: Reporter,
    start: Rung,
    notes: Sequence[str],
) -> tuple[bytes, AddedPlans]:
    """Builds plans into `staging`, and what TensorRT has timed. Raises PlansFailed."""
    counts, profiles = profile_scheme(request.profiles, request.decode == "tensorrt", request.attention)
    settings = PlanSettings(request.attention, counts, profiles, start, request.logits_limit)
    with DeviceRunner() as runner:
        built = build_plans(
            tools.trt, source.model, source.weights, source.amax, staging, timing_cache, reporter, settings, runner
        )
    plans = Plans(
        version=built.tensorrt,
        gpu=tools.gpu.name,
        capability=tools.gpu.capability,
        files=list(built.files.values()),
        token_counts=list(counts),
        scratch_bytes=built.device_memory,
        exact=[1],
        place_exact=False,
        attention=request.attention,
        profiles=list(profiles),
        sixteen_bits=built.sixteen_bits,
        operands=built.operands,
    )
    files = {name: file_entry(staging / name) for name in (*built.files.values(), *REPORTS)}
    return built.timing_cache, AddedPlans(
        Forward(request.prefill, request.decode, plans, [*notes, *built.notes]), files
    )


def _without_plans(staging: Path, notes: list[str]) -> AddedPlans:
    """The forward by our own kernels, the reference weights in their place, and the builder's reports."""
    for plan in (staging / REPORTS[0]).parent.glob("*.plan"):
        plan.unlink()
    files = {name: file_entry(staging / name) for name in REPORTS if (staging / name).exists()}
    if (reference := staging / REFERENCE / WEIGHTS_FILE).exists():
        reference.replace(staging / WEIGHTS_FILE)
        files[WEIGHTS_FILE] = file_entry(staging / WEIGHTS_FILE)
    return AddedPlans(Forward(notes=notes), files)


def try_plans(
    staging: Path,
    manifest: Manifest,
    tokens: Sequence[int],
    evaluator: Evaluator,
    limit: float,
    reporter: Reporter,
) -> Manifest:
    """Holds the staged plans against our kernels, where these run, and the CPU; the manifest with what was seen.

    Raises PlansFailed above the limit, GpuError or BundleError where they do not run.
    """
    plans = manifest.forward.plans
    assert plans is not None
    tokens = check.enough_of(tokens, manifest.model.context)
    reporter.note("trying the plans on the GPU")
    seen = check.observe_plans(staged_bundle(staging, manifest), tokens)
    fused = None
    if GPU_ARCHITECTURES[manifest.target].has_bulk_copies:
        fused = _fused_logits(staging, manifest, tokens)
    plain = fp8 = evaluator.logits(tokens)
    if manifest.calibration is not None:
        quantised = {name: amax for name, amax in manifest.calibration.amax.items() if name not in plans.sixteen_bits}
        fp8 = evaluator.logits(tokens, input_scales(quantised))
    made = check.check_plans(seen, check.References(plain, fp8, fused), limit)
    return _noted(manifest, seen, made)


def try_made_up(
    staging: Path, manifest: Manifest, checkpoint: Checkpoint, limit: float, reporter: Reporter
) -> Manifest:
    """`try_plans` for a bundle of random weights, which has none: plans and our kernels run those of `checkpoint`.

    Raises PlansFailed above the limit, GpuError or BundleError where they do not run.
    """
    reporter.note("trying the plans on the GPU")
    reference = staging / REFERENCE
    if not (path := reference / WEIGHTS_FILE).exists():
        reference.mkdir()
        convert_checkpoint(checkpoint, GpuPacker(manifest.precision), path)
        (reference / CODE_DIRECTORY).symlink_to(staging / CODE_DIRECTORY)
    whole = msgspec.structs.replace(
        manifest,
        random_weights=False,
        speculation=None,
        files={**manifest.files, WEIGHTS_FILE: file_entry(path)},
    )
    tokens = check.enough_of(range(check.CHECK_TOKENS), manifest.model.context)
    seen = check.observe_plans(staged_bundle(reference, whole), tokens)
    made = None
    if GPU_ARCHITECTURES[manifest.target].has_bulk_copies:
        fused = check.read_logits(check.with_forward(staged_bundle(reference, whole), FUSED), tokens)
        made = check.check_plans(seen, check.References(None, None, fused), limit)
    return _noted(manifest, seen, made)


def _fused_logits(staging: Path, manifest: Manifest, tokens: Sequence[int]) -> check.Logits:
    """Our own kernels' logits, by the weights in the bundle or by those in the reference beside it."""
    reference = staging / REFERENCE
    if not reference.exists():
        return check.read_logits(check.with_forward(staged_bundle(staging, manifest), FUSED), tokens)
    if not (reference / CODE_DIRECTORY).exists():
        (reference / CODE_DIRECTORY).symlink_to(staging / CODE_DIRECTORY)
    return check.read_logits(check.with_forward(staged_bundle(reference, manifest), FUSED), tokens)


def _noted(manifest: Manifest, seen: check.Seen, made: PlanCheck | None) -> Manifest:
    """The manifest with what has been seen of its plans."""
    plans = manifest.forward.plans
    assert plans is not None
    forward = msgspec.structs.replace(manifest.forward, plans=check.with_findings(plans, seen, made))
    return msgspec.structs.replace(manifest, forward=forward)
