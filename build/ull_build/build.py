"""The build from end to end: checkpoint -> packed weights, vocabulary, tokenizer, quality -> bundle."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import ull
from ull.bundle import (
    CHUNK_KERNELS,
    DEVICE_KERNELS,
    DFLASH,
    DFLASH_CHUNKS,
    DFLASH_CODE_DIRECTORY,
    DFLASH_PASSES,
    DRAFT,
    DRAFT_CODE_DIRECTORY,
    EAGLE,
    EAGLE_CHUNKS,
    EAGLE_CODE_DIRECTORY,
    EAGLE_PASSES,
    FORMAT,
    FORMAT_VERSION,
    FUSED,
    GPU_ARCHITECTURES,
    ROUND_KERNELS,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    ActivationRange,
    AttentionKind,
    Calibration,
    DeviceCode,
    FileEntry,
    Forward,
    FromHub,
    Manifest,
    MedusaHeads,
    Model,
    Precision,
    Provenance,
    Quality,
    Speculation,
    Target,
    TensorError,
    Tokens,
    device_dflash_macros,
    device_eagle_macros,
    device_head_problems,
    device_macros,
    device_problems,
    draft_problems,
    encode_manifest,
    head_scan_problems,
    medusa_problems,
    open_bundle,
    optional_kernels,
    quantised_inputs,
    tap_problems,
    write_sealed,
)
from ull.errors import BuildError, CheckpointError, RecipeError
from ull_build.code.kernels import CompiledFile, compile_kernels, describe_file, write_code
from ull_build.leftovers import clear_leftovers
from ull_build.local_gpu import find_gpu
from ull_build.output import build_time, check_output, file_entry, require_space, staged_output
from ull_build.progress import Reporter
from ull_build.quality.activation_range import check_activations
from ull_build.quality.drafting import DraftedBundle, check_drafters
from ull_build.quality.evaluate import CALIBRATION, EvaluationText, Observation, read_text
from ull_build.quality.measure import Evaluator, evaluation_bytes, measure_quality
from ull_build.quality.on_gpu import ORIGINAL, DeviceEvaluator, require_bf16
from ull_build.settings import Settings
from ull_build.source.chat import check_chat_templates
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.digest import Sources, open_sources
from ull_build.source.drafters import Drafters, describe, open_drafters, with_code
from ull_build.source.hub import fetch
from ull_build.source.lora import open_checkpoint
from ull_build.source.vocabulary import CheckpointTokenizer, copy_tokenizer_files, read_tokenizer
from ull_build.tensorrt.calibrate import calibrate
from ull_build.tensorrt.preflight import preflight
from ull_build.tensorrt.staged import (
    REFERENCE,
    AddedPlans,
    Source,
    Tools,
    find_tools,
    prove_plans,
    timing_cache_of,
    try_plans,
)
from ull_build.tensorrt.timing_cache import require_timing_cache
from ull_build.tensorrt.weights import SegmentWeights
from ull_build.weights.convert import convert_checkpoint, convert_stage, plan_weights
from ull_build.weights.pack_cpu import CpuPacker
from ull_build.weights.pack_gpu import GpuPacker


@dataclass(frozen=True)
class BuildResult:
    """A finished build: where it is, what it is, how long it took."""

    path: Path
    manifest: Manifest
    seconds: float


@dataclass(frozen=True)
class _Texts:
    """What the build runs over; None: it does not."""

    evaluation: EvaluationText | None
    calibration: EvaluationText | None
    trial: EvaluationText | None  # that plans are tried on


@dataclass(frozen=True)
class _Inputs:
    """What a bundle is made of, opened and checked before anything is written."""

    settings: Settings
    hub: dict[FromHub, str]  # what came from there
    output: Path
    created: str
    checkpoint: Checkpoint
    sources: Sources
    tokenizer: CheckpointTokenizer
    model: Model
    tokens: Tokens
    kernels: list[CompiledFile]
    drafter_kernels: dict[str, list[CompiledFile]]  # by prefix
    texts: _Texts
    drafters: Drafters
    speculation: Speculation  # the manifest's account of them, without code
    tools: Tools | None  # for plans


def build(settings: Settings, reporter: Reporter | None = None) -> BuildResult:
    """Builds the bundle at `settings.output`; nothing is left there unless it is complete.

    Raises CheckpointError, BuildError, OSError when the disk fails, or GpuError where plans are asked for.
    """
    reporter = reporter or Reporter()
    start = time.monotonic()
    clear_leftovers(settings.output.resolve().parent, reporter.note)
    output = check_output(settings.output, settings.force)
    settings, hub = _fetched(settings, reporter)
    with ExitStack() as files_open:
        inputs = _open_inputs(settings, hub, output, files_open, reporter)
        require_space(output.parent, _needed_bytes(inputs.checkpoint, inputs.drafters, settings))
        with staged_output(output) as staging:
            manifest = _fill(staging, inputs, reporter)
            write_sealed(staging, encode_manifest(manifest))
            open_bundle(staging)  # a bundle that ull would refuse must not come into being
    return BuildResult(output, manifest, time.monotonic() - start)


def _fetched(settings: Settings, reporter: Reporter) -> tuple[Settings, dict[FromHub, str]]:
    """The settings with the paths of what was fetched from the Hub, and what that is. Raises CheckpointError."""
    hub: dict[FromHub, str] = {}
    for kind, wanted in settings.from_hub.items():
        snapshot = fetch(kind, wanted, reporter)
        hub[kind] = snapshot.name
        path: dict[str, Any] = {kind: snapshot.directory}
        if kind not in ("model", "lora"):
            path = {"speculation": dataclasses.replace(settings.speculation, **path)}
        settings = dataclasses.replace(settings, **path)
    return settings, hub


def _open_inputs(
    settings: Settings, hub: dict[FromHub, str], output: Path, files_open: ExitStack, reporter: Reporter
) -> _Inputs:
    """Everything that can be refused is, before the kernels are compiled."""
    prefill, decode = settings.forward.prefill, settings.forward.decode
    for key, problem in settings.forward.problems(settings.target, settings.precision.weights):
        raise RecipeError(problem, field=key)
    for problem in head_scan_problems(settings.target, settings.precision, settings.forward.decode):
        raise RecipeError(problem, field="lm_head_scan")
    created, tools = build_time(), None
    called = None if "model" not in hub else settings.from_hub["model"].repository
    for note in settings.notes:
        reporter.note(note)
    if settings.forward.has_plans:
        tools = find_tools(settings.target)
        require_timing_cache(timing_cache_of(output))
    if settings.evaluates_on_gpu:
        find_gpu(settings.target, "the loss is measured")
    checkpoint = files_open.enter_context(open_checkpoint(settings.model, settings.lora, settings.context, called))
    for note in checkpoint.notes:
        reporter.note(note)
    tokenizer = read_tokenizer(settings.model, checkpoint.model.vocabulary)
    check_chat_templates(settings.model, reporter)
    model = msgspec.structs.replace(checkpoint.model, tokenizer_vocabulary=tokenizer.vocabulary.count)
    if tools is not None:
        preflight(tools.trt, model, settings.precision, output.parent, reporter)
    if settings.evaluates_on_gpu:
        require_bf16(checkpoint)
    drafters = files_open.enter_context(open_drafters(settings.speculation, checkpoint, model, tokenizer))
    for note in drafters.notes:
        reporter.note(note)
    medusa, draft = drafters.heads, drafters.draft
    if medusa is not None and not settings.on_cpu:
        for problem in medusa_problems(medusa, settings.forward.decode):
            raise CheckpointError(problem, field="medusa")
    if draft is not None and not settings.on_cpu:
        for problem in draft_problems(settings.target, draft.model, settings.precision):
            raise CheckpointError(problem, field="draft")
    described = describe(settings.speculation, drafters, model, settings.precision, settings.target)
    for field, head in (("eagle", described.eagle), ("dflash", described.dflash)):
        if head is None or settings.on_cpu:
            continue
        problems = [
            *device_head_problems(settings.target, head),
            *tap_problems(described.taps, settings.target, prefill, decode),
        ]
        for problem in problems:
            raise CheckpointError(problem, field=field)
    attention = settings.forward.attention if settings.forward.has_plans else None
    texts = _read_texts(settings, tokenizer, model)
    return _Inputs(
        settings=settings,
        hub=hub,
        output=output,
        created=created,
        checkpoint=checkpoint,
        sources=files_open.enter_context(open_sources(checkpoint, drafters)),
        tokenizer=tokenizer,
        model=model,
        tokens=_special_tokens(checkpoint, tokenizer),
        kernels=compile_for(
            settings.target,
            model,
            settings.precision,
            reporter,
            attention,
            medusa,
            len(described.taps),
            forward=settings.forward.own(settings.target),
        ),
        drafter_kernels=compile_drafters(settings.target, described, model, settings.precision, reporter),
        texts=texts,
        drafters=drafters,
        speculation=described,
        tools=tools,
    )


def _fill(staging: Path, inputs: _Inputs, reporter: Reporter) -> Manifest:
    """Writes everything but the manifest, and measures it."""
    settings, checkpoint, texts = inputs.settings, inputs.checkpoint, inputs.texts
    code, files = write_all_code(
        inputs.kernels,
        inputs.drafter_kernels,
        inputs.speculation,
        inputs.model,
        settings.precision,
        settings.target,
        staging,
        settings.forward.own(settings.target),
    )
    weights = staging / WEIGHTS_FILE if settings.on_cpu else None
    with Evaluator(
        checkpoint, inputs.model, settings.precision, staging, weights, settings.threads, reporter
    ) as evaluator:
        observation = None if texts.calibration is None else evaluator.observe(texts.calibration)
        if observation is None and settings.precision.kv == "fp8":
            why = "they are 1, or more where a bias asks for it; a build without --no-eval measures them"
            reporter.note(f"the scales of FP8 pages are not measured: {why}")
        activations = _check_activations(texts, observation, settings, reporter)
        written, errors = _write_files(inputs, observation, activations, staging, reporter)
        files |= written
        inputs.sources.wait(reporter)
        if settings.evaluates_on_gpu:
            staged = _describe(inputs, files, code, None)
            return _describe(inputs, files, code, _measure_on_gpu(inputs, staged, errors, staging, reporter))
        quality, calibration = _measure(evaluator, texts, observation, errors, settings, inputs.model)
        quality = _add_drafting(inputs, quality, staging, reporter)
        if inputs.tools is None:
            manifest = _describe(inputs, files, code, quality, calibration)
        else:
            tools = inputs.tools
            manifest = _add_plans(staging, inputs, tools, evaluator, files, code, quality, calibration, reporter)
        return msgspec.structs.replace(manifest, activations=activations)


def _add_drafting(inputs: _Inputs, quality: Quality | None, staging: Path, reporter: Reporter) -> Quality | None:
    """The quality with what the drafters win. Raises BuildError for a head that wins next to nothing."""
    settings = inputs.settings
    threads = settings.threads or len(os.sched_getaffinity(0))
    bundle = DraftedBundle(inputs.model, settings.precision, staging / WEIGHTS_FILE, inputs.speculation, threads)
    if not bundle.drafters:
        return quality
    if quality is None or not settings.on_cpu:
        why = "the loss is not measured (--no-eval)" if quality is None else f"the target is {settings.target}"
        reporter.note(f"not checked how much of what {' and '.join(bundle.drafters)} propose is accepted: {why}")
        return quality
    path, most = settings.calibration_text, settings.calibration_tokens
    text = read_text(path, inputs.tokenizer, most, inputs.model.context, CALIBRATION)
    rates = check_drafters(bundle, text, settings.allow_weak_drafter, reporter)
    return msgspec.structs.replace(quality, tokens_per_round=rates)


def _check_activations(
    texts: _Texts, observation: Observation | None, settings: Settings, reporter: Reporter
) -> ActivationRange | None:
    """How the target holds what was observed; None where nothing has to be checked, or can be. Raises BuildError."""
    if settings.on_cpu:
        return None
    if observation is None or texts.calibration is None:
        how = "--evaluate-on cpu" if settings.evaluate else "a build without --no-eval"
        reporter.note(f"not checked whether f16 holds the activations on a GPU; {how} checks it")
        return None
    return check_activations(observation, texts.calibration, reporter)


def _add_plans(
    staging: Path,
    inputs: _Inputs,
    tools: Tools,
    evaluator: Evaluator,
    files: dict[str, FileEntry],
    code: Code,
    quality: Quality | None,
    calibration: Calibration | None,
    reporter: Reporter,
) -> Manifest:
    """Adds plans that compute what they should, or our own kernels' forward where there are none."""
    settings, texts = inputs.settings, inputs.texts
    assert texts.trial is not None
    tokens, limit = texts.trial.first_window, settings.forward.logits_limit
    amax = {} if calibration is None else calibration.amax
    source = Source(inputs.model, SegmentWeights(inputs.checkpoint, settings.precision), amax)

    def attempt(added: AddedPlans) -> Manifest:
        has_plans = added.forward.plans is not None
        described = calibration if has_plans else None  # our own kernels quantise no activations
        manifest = _describe(inputs, files | added.files, code, quality, described, added.forward)
        return try_plans(staging, manifest, tokens, evaluator, limit, reporter) if has_plans else manifest

    cache = timing_cache_of(inputs.output)
    manifest = prove_plans(tools, settings.forward, source, staging, cache, reporter, attempt)
    shutil.rmtree(staging / REFERENCE, ignore_errors=True)
    if settings.notes:
        forward = msgspec.structs.replace(manifest.forward, notes=[*settings.notes, *manifest.forward.notes])
        manifest = msgspec.structs.replace(manifest, forward=forward)
    return manifest


def _measure_on_gpu(
    inputs: _Inputs, staged: Manifest, errors: list[TensorError], staging: Path, reporter: Reporter
) -> Quality:
    """What the written weights lose, both sides run by our kernels. Raises BuildError, GpuError."""
    settings, text = inputs.settings, inputs.texts.evaluation
    assert text is not None

    def compiled(precision: Precision) -> list[CompiledFile]:
        return compile_for(settings.target, inputs.model, precision, reporter)

    evaluator = DeviceEvaluator(inputs.checkpoint, staged, staging, compiled, reporter)
    try:
        original = evaluator.original(text)
        limit, fast = settings.max_perplexity_increase, settings.forward.reads_fast
        return measure_quality(evaluator, text, original, errors, limit, settings.precision, fast)
    finally:
        shutil.rmtree(staging / "original", ignore_errors=True)


def _describe(
    inputs: _Inputs,
    files: dict[str, FileEntry],
    code: Code,
    quality: Quality | None,
    calibration: Calibration | None = None,
    forward: Forward | None = None,
) -> Manifest:
    """`forward`: with plans; None: our own kernels'."""
    settings = inputs.settings
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        name=settings.name,
        created=inputs.created,
        target=settings.target,
        ull_version=ull.__version__,
        model=inputs.model,
        precision=settings.precision,
        tokens=inputs.tokens,
        quality=quality,
        provenance=_provenance(inputs),
        files=files,
        speculation=with_code(inputs.speculation, code.drafters),
        code=code.target,
        calibration=calibration,
        forward=forward or settings.forward.own(settings.target),
    )


def _provenance(inputs: _Inputs) -> Provenance:
    settings, hub = inputs.settings, inputs.hub
    name = settings.model.resolve().name if "model" not in hub else settings.from_hub["model"].repository
    provenance = inputs.sources.provenance(name, settings.recipe, ull.__version__, hub)
    return msgspec.structs.replace(provenance, fp8_source=inputs.checkpoint.fp8_source)


def compile_for(
    target: Target,
    model: Model,
    precision: Precision,
    reporter: Reporter,
    attention: AttentionKind | None = None,
    medusa: MedusaHeads | None = None,
    taps: int = 0,
    of: str = "",
    forward: Forward = FUSED,
) -> list[CompiledFile]:
    """The kernels of a GPU target, compiled for the model; none for the CPU. `attention`: of plans, None: no plans.

    `taps`, `forward`: see `device_macros`.

    Where our kernels can be, all are there, also beside plans, which are held against them. Raises RecipeError,
    BuildError.
    """
    if target == "cpu":
        return []
    for problem in device_problems(target, model, precision, attention):
        raise RecipeError(f'target "{target}": {problem}', field="target")
    architecture = GPU_ARCHITECTURES[target]
    needed = DEVICE_KERNELS if architecture.has_bulk_copies else ROUND_KERNELS
    if architecture.has_warpgroup_products:
        needed |= CHUNK_KERNELS
    return compile_kernels(
        device_macros(model, precision, medusa, taps, forward),
        target,
        needed | optional_kernels(forward, medusa, precision.lm_head_scan),
        lambda compiled: reporter.note(f"compiled {of + ': ' if of else ''}{describe_file(compiled)}"),
    )


def compile_drafters(
    target: Target, speculation: Speculation, model: Model, precision: Precision, reporter: Reporter
) -> dict[str, list[CompiledFile]]:
    """The kernels of what drafts for `model`, of that precision, with layers of its own, by prefix; none for the CPU.

    Raises as compile_for.
    """
    compiled: dict[str, list[CompiledFile]] = {}
    if target == "cpu":
        return compiled
    if (draft := speculation.draft) is not None:
        compiled[DRAFT] = compile_for(target, draft.model, draft.precision, reporter, of="draft model")
    if speculation.eagle is not None:
        macros = device_eagle_macros(speculation.eagle, model.hidden)
        compiled[EAGLE] = _compile_head(target, macros, EAGLE_PASSES, EAGLE_CHUNKS, "EAGLE", reporter)
    if speculation.dflash is not None:
        macros = device_dflash_macros(speculation.dflash, model.hidden, precision)
        compiled[DFLASH] = _compile_head(target, macros, DFLASH_PASSES, DFLASH_CHUNKS, "DFlash", reporter)
    return compiled


def _compile_head(
    target: Target,
    macros: Mapping[str, str],
    passes: frozenset[str],
    chunks: frozenset[str],
    kind: str,
    reporter: Reporter,
) -> list[CompiledFile]:
    needed = passes | chunks if GPU_ARCHITECTURES[target].has_warpgroup_products else passes
    return compile_kernels(
        macros, target, needed, lambda compiled: reporter.note(f"compiled {kind} head: {describe_file(compiled)}")
    )


@dataclass(frozen=True)
class Code:
    """The manifest's accounts of the kernels: the model's, and those of what drafts for it, by prefix."""

    target: DeviceCode | None
    drafters: dict[str, DeviceCode]


def write_all_code(
    kernels: list[CompiledFile],
    drafter_kernels: Mapping[str, list[CompiledFile]],
    speculation: Speculation,
    model: Model,
    precision: Precision,
    target: Target,
    staging: Path,
    forward: Forward = FUSED,
) -> tuple[Code, dict[str, FileEntry]]:
    """Writes what compile_for made for `model` and compile_drafters for `speculation`, and their table of files."""
    if not kernels:
        return Code(None, {}), {}
    macros = device_macros(model, precision, speculation.medusa, len(speculation.taps), forward)
    code, files = write_code(kernels, macros, staging, target)
    own: dict[str, DeviceCode] = {}
    for prefix, compiled in drafter_kernels.items():
        if prefix == DRAFT:
            assert speculation.draft is not None
            macros = device_macros(speculation.draft.model, speculation.draft.precision)
            folder = DRAFT_CODE_DIRECTORY
        elif prefix == EAGLE:
            assert speculation.eagle is not None
            macros, folder = device_eagle_macros(speculation.eagle, model.hidden), EAGLE_CODE_DIRECTORY
        else:
            assert speculation.dflash is not None
            macros = device_dflash_macros(speculation.dflash, model.hidden, precision)
            folder = DFLASH_CODE_DIRECTORY
        own[prefix], more = write_code(compiled, macros, staging, target, folder)
        files |= more
    return Code(code, own), files


def _special_tokens(checkpoint: Checkpoint, tokenizer: CheckpointTokenizer) -> Tokens:
    """BOS and EOS of the configuration; the tokenizer's EOS where the configuration has none."""
    architecture, rows = checkpoint.architecture, checkpoint.model.vocabulary
    eos = architecture.eos or ([] if tokenizer.eos is None else [tokenizer.eos])
    for name, identifier in (("bos_token_id", architecture.bos), *(("eos_token_id", item) for item in eos)):
        if identifier is not None and identifier >= rows:
            raise CheckpointError(f"`{name}` {identifier} is outside of the embedding's {rows} rows", field=name)
    return Tokens(bos=architecture.bos, eos=eos, chat_template=tokenizer.has_chat_template)


def _read_texts(settings: Settings, tokenizer: CheckpointTokenizer, model: Model) -> _Texts:
    """Raises BuildError for a text that cannot be read, and where a calibration must not be measured."""
    calibrates = bool(_fp8_inputs(settings, model))
    if calibrates and not settings.evaluate:
        raise BuildError(
            "the ranges of FP8 activations have to be measured: leave out --no-eval, or use precision bf16",
            field="precision",
        )
    evaluation = calibration = None
    if settings.evaluate:
        evaluation = read_text(settings.eval_text, tokenizer, settings.eval_tokens, model.context)
    has_ranges = not settings.on_cpu or settings.precision.kv == "fp8"
    observes = settings.evaluate and has_ranges and not settings.evaluates_on_gpu
    if calibrates or observes or settings.forward.has_plans:
        path, most = settings.calibration_text, settings.calibration_tokens
        calibration = read_text(path, tokenizer, most, model.context, CALIBRATION)
    trial = calibration if settings.forward.has_plans else None
    return _Texts(evaluation, calibration if calibrates or observes else None, trial)


def _fp8_inputs(settings: Settings, model: Model) -> list[str]:
    """The linears whose inputs are FP8."""
    return quantised_inputs(model, settings.precision) if settings.calibrate else []


def _needed_bytes(checkpoint: Checkpoint, drafters: Drafters, settings: Settings) -> int:
    """Disk space of a build: the bundle, and what the evaluation puts beside it."""
    packer = CpuPacker(settings.precision) if settings.on_cpu else GpuPacker(settings.precision)
    plan = plan_weights(checkpoint, packer, drafters)
    copies = 2 if settings.forward.has_plans else 1  # plans hold the weights once more
    rest = 64 << 20  # tokenizer, vocabulary and manifest
    if settings.evaluates_on_gpu:
        rest += sum(shape.nbytes for shape in plan_weights(checkpoint, GpuPacker(ORIGINAL)).values())
    elif settings.evaluate or settings.forward.has_plans:  # plans are tried against the CPU executor
        rest += evaluation_bytes(checkpoint, settings.precision, settings.on_cpu)
    return rest + copies * sum(shape.nbytes for shape in plan.values())


def _write_files(
    inputs: _Inputs,
    observation: Observation | None,
    activations: ActivationRange | None,
    staging: Path,
    reporter: Reporter,
) -> tuple[dict[str, FileEntry], list[TensorError]]:
    """Writes weights, vocabulary and tokenizer; the table of files and the error of each linear weight."""
    settings, checkpoint = inputs.settings, inputs.checkpoint
    title, path = f"weights to {settings.precision.weights}", staging / WEIGHTS_FILE
    if settings.on_cpu:
        packer = CpuPacker(settings.precision, None if observation is None else observation.keys_values)
        weights, errors = convert_stage(title, reporter, checkpoint, packer, path, inputs.drafters)
    else:
        scaled = {} if activations is None else activations.scaled
        weights, errors = _write_device_weights(title, inputs, observation, scaled, staging, reporter)
    inputs.tokenizer.vocabulary.write(staging / VOCABULARY_FILE, checkpoint.model.vocabulary)
    directory = Path(TOKENIZER_FILE).parent
    copied = copy_tokenizer_files(settings.model, staging / directory)
    names = [VOCABULARY_FILE, *(str(directory / name) for name in copied)]
    return {WEIGHTS_FILE: weights, **{name: file_entry(staging / name) for name in names}}, errors


def _write_device_weights(
    title: str,
    inputs: _Inputs,
    observation: Observation | None,
    scaled: Mapping[str, int],
    staging: Path,
    reporter: Reporter,
) -> tuple[FileEntry, list[TensorError]]:
    """Writes the bundle's weights; those of layers that only plans will hold go to the reference beside it."""
    checkpoint, drafters, precision = inputs.checkpoint, inputs.drafters, inputs.settings.precision
    keys_values = None if observation is None else observation.keys_values
    packer, path = GpuPacker(precision, keys_values=keys_values, scaled=scaled), staging / WEIGHTS_FILE
    full = path if inputs.settings.forward.keeps_weights else staging / REFERENCE / WEIGHTS_FILE
    full.parent.mkdir(exist_ok=True)
    weights, errors = convert_stage(title, reporter, checkpoint, packer, full, drafters)
    if full is not path:
        unfused = GpuPacker(precision, fused=False, keys_values=keys_values)
        weights, _ = convert_checkpoint(checkpoint, unfused, path, drafters=drafters)
    return weights, errors


def _measure(
    evaluator: Evaluator,
    texts: _Texts,
    observation: Observation | None,
    errors: list[TensorError],
    settings: Settings,
    model: Model,
) -> tuple[Quality | None, Calibration | None]:
    """What the written weights lose, and what FP8 activations lose on top. Raises BuildError above the limit."""
    if texts.evaluation is None:
        return None, None
    limit = settings.max_perplexity_increase
    original = evaluator.original(texts.evaluation)
    precision, fast = settings.precision, settings.forward.reads_fast
    quality = measure_quality(evaluator, texts.evaluation, original, errors, limit, precision, fast)
    linears = _fp8_inputs(settings, model)
    if not linears or observation is None or texts.calibration is None:
        return quality, None
    calibration = calibrate(evaluator, linears, observation, texts.calibration, texts.evaluation, original, limit)
    return quality, calibration
