"""The build from end to end: checkpoint -> packed weights, vocabulary, tokenizer, quality -> bundle."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import msgspec

import ull
from ull.bundle import (
    ARCHITECTURES,
    DEVICE_KERNELS,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    ROUND_KERNELS,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    AttentionKind,
    DeviceCode,
    FileEntry,
    Manifest,
    Model,
    Precision,
    Provenance,
    Quality,
    RecipeValue,
    Target,
    TensorError,
    Tokens,
    device_macros,
    device_problems,
    encode_manifest,
    native_spec,
    open_bundle,
    read_tensor_file,
)
from ull.errors import CheckpointError, RecipeError
from ull_build.checkpoint import Checkpoint
from ull_build.convert import NO_DRAFTERS, ORIGINAL_BF16, ORIGINAL_F32, Drafters, convert_checkpoint, plan_weights
from ull_build.convert_device import convert_for_device, plan_device_weights
from ull_build.drafters import SpeculationSettings, describe, open_drafters
from ull_build.evaluate import EvaluationText, Predictions, check_quality, predict, read_evaluation_text
from ull_build.kernels import CompiledFile, compile_kernels, describe_file, write_code
from ull_build.output import check_output, require_space, staged_output
from ull_build.progress import Reporter
from ull_build.recipe import Recipe
from ull_build.vocabulary import CheckpointTokenizer, copy_tokenizer_files, read_tokenizer


@dataclass(frozen=True)
class Settings:
    """What to build. `eval_text` None is the default text; `evaluate` False leaves the quality unmeasured."""

    model: Path
    output: Path
    name: str
    target: Target = "cpu"
    precision: Precision = field(default_factory=Precision)
    context: int | None = None
    evaluate: bool = True
    eval_text: Path | None = None
    eval_tokens: int = 4096
    max_perplexity_increase: float = 0.01
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    force: bool = False
    threads: int = 0  # 0: as many as this process may use
    recipe: dict[str, RecipeValue] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildResult:
    """A finished build: where it is, what it is, how long it took."""

    path: Path
    manifest: Manifest
    seconds: float


def settings_from_recipe(recipe: Recipe, *, evaluate: bool = True, force: bool = False) -> Settings:
    """The settings that a recipe asks for. A GPU leaves the recipe's heads and draft model out."""
    on_cpu = recipe.target == "cpu"
    medusa, draft = (recipe.medusa, recipe.draft) if on_cpu else (None, None)
    return Settings(
        model=Path(recipe.model),
        output=Path(recipe.output),
        name=recipe.name,
        target=cast(Target, recipe.target),
        precision=Precision(weights=recipe.precision, lm_head=recipe.lm_head, kv=recipe.kv),
        context=recipe.context,
        evaluate=evaluate,
        eval_text=None if recipe.eval_text is None else Path(recipe.eval_text),
        eval_tokens=recipe.eval_tokens,
        max_perplexity_increase=recipe.max_perplexity_increase,
        speculation=SpeculationSettings(
            default=recipe.drafter,
            max_tree=recipe.speculation.max_tree,
            medusa=None if medusa is None else Path(medusa.heads),
            medusa_count=None if medusa is None else medusa.num,
            draft=None if draft is None else Path(draft.model),
        ),
        force=force,
        recipe=msgspec.to_builtins(recipe),
    )


def build(settings: Settings, reporter: Reporter | None = None) -> BuildResult:
    """Builds the bundle at `settings.output`; nothing is left there unless it is complete.

    Raises CheckpointError, BuildError, or OSError when the disk fails.
    """
    reporter = reporter or Reporter()
    start = time.monotonic()
    output = check_output(settings.output, settings.force)
    with ExitStack() as files_open:
        checkpoint = files_open.enter_context(Checkpoint(settings.model, settings.context))
        tokenizer = read_tokenizer(settings.model, checkpoint.model.vocabulary)
        model = msgspec.structs.replace(checkpoint.model, tokenizer_vocabulary=tokenizer.vocabulary.count)
        tokens = _special_tokens(checkpoint, tokenizer)
        kernels = compile_for(settings.target, model, settings.precision, reporter)
        text = None
        if settings.evaluate:
            text = read_evaluation_text(settings.eval_text, tokenizer, settings.eval_tokens, model.context)
        drafters = files_open.enter_context(open_drafters(settings.speculation, model, tokenizer))
        require_space(output.parent, _needed_bytes(checkpoint, drafters, settings))
        with staged_output(output) as staging:
            files, errors = _write_files(checkpoint, drafters, tokenizer, settings, staging, reporter)
            code, code_files = _write_code(kernels, settings.target, model, settings.precision, staging)
            quality = None
            if text is not None:
                quality = _measure(checkpoint, model, settings, staging, text, errors, reporter)
            manifest = Manifest(
                format=FORMAT,
                format_version=FORMAT_VERSION,
                name=settings.name,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                target=settings.target,
                ull_version=ull.__version__,
                model=model,
                precision=settings.precision,
                tokens=tokens,
                quality=quality,
                provenance=Provenance(
                    source=settings.model.resolve().name,
                    source_sha256=checkpoint.source_sha256(),
                    recipe=settings.recipe,
                    builder_version=ull.__version__,
                ),
                files={**files, **code_files},
                speculation=describe(settings.speculation, drafters, model, settings.precision),
                code=code,
            )
            write_synced(staging / MANIFEST_FILE, encode_manifest(manifest))
            open_bundle(staging)  # a bundle that ull would refuse must not come into being
    return BuildResult(output, manifest, time.monotonic() - start)


def compile_for(
    target: Target, model: Model, precision: Precision, reporter: Reporter, attention: AttentionKind | None = None
) -> list[CompiledFile]:
    """The kernels of a GPU target, compiled for the model; none for the CPU. `attention`: of plans, None: no plans.

    Where our kernels can be, all are there, also beside plans, which are held against them. Raises RecipeError,
    BuildError.
    """
    if target == "cpu":
        return []
    for problem in device_problems(target, model, precision, attention):
        raise RecipeError(f'target "{target}": {problem}', field="target")
    needed = DEVICE_KERNELS if ARCHITECTURES[target].has_bulk_copies else ROUND_KERNELS
    return compile_kernels(
        device_macros(model, precision),
        target,
        needed,
        lambda compiled: reporter.note(f"compiled {describe_file(compiled)}"),
    )


def _write_code(
    kernels: list[CompiledFile], target: Target, model: Model, precision: Precision, staging: Path
) -> tuple[DeviceCode | None, dict[str, FileEntry]]:
    return write_code(kernels, device_macros(model, precision), staging, target) if kernels else (None, {})


def _special_tokens(checkpoint: Checkpoint, tokenizer: CheckpointTokenizer) -> Tokens:
    """BOS and EOS of the configuration; the tokenizer's EOS where the configuration has none."""
    architecture, rows = checkpoint.architecture, checkpoint.model.vocabulary
    eos = architecture.eos or ([] if tokenizer.eos is None else [tokenizer.eos])
    for name, identifier in (("bos_token_id", architecture.bos), *(("eos_token_id", item) for item in eos)):
        if identifier is not None and identifier >= rows:
            raise CheckpointError(f"`{name}` {identifier} is outside of the embedding's {rows} rows", field=name)
    return Tokens(bos=architecture.bos, eos=eos, chat_template=tokenizer.has_chat_template)


def _original_precision(checkpoint: Checkpoint) -> Precision:
    """A format that holds the checkpoint's weights without loss."""
    return ORIGINAL_BF16 if checkpoint.is_bf16 else ORIGINAL_F32


def _cpu_precision(precision: Precision) -> Precision:
    """What the CPU executor evaluates in place of a GPU's weights: the same FP8 codes, or bf16 for f16."""
    return msgspec.structs.replace(precision, kv="bf16")


def _needed_bytes(checkpoint: Checkpoint, drafters: Drafters, settings: Settings) -> int:
    """Disk space of a build: the bundle, and for the evaluation the original weights beside it."""
    on_cpu = settings.target == "cpu"
    plans = [
        plan_weights(checkpoint, settings.precision, drafters)
        if on_cpu
        else plan_device_weights(checkpoint, settings.precision)
    ]
    if settings.evaluate:
        plans.append(plan_weights(checkpoint, _original_precision(checkpoint)))
        if not on_cpu:
            plans.append(plan_weights(checkpoint, _cpu_precision(settings.precision)))
    rest = 64 << 20  # tokenizer, vocabulary and manifest
    return rest + sum(shape.nbytes for plan in plans for shape in plan.values())


def _write_files(
    checkpoint: Checkpoint,
    drafters: Drafters,
    tokenizer: CheckpointTokenizer,
    settings: Settings,
    staging: Path,
    reporter: Reporter,
) -> tuple[dict[str, FileEntry], list[TensorError]]:
    """Writes all but the manifest; returns the table of files and the error of each linear weight."""
    title = f"weights to {settings.precision.weights}"
    if settings.target == "cpu":
        weights, errors = _convert(checkpoint, settings.precision, staging / WEIGHTS_FILE, title, reporter, drafters)
    else:
        plan = plan_device_weights(checkpoint, settings.precision)
        with reporter.stage(title, sum(shape.nbytes for shape in plan.values()), "bytes") as advance:
            weights, errors = convert_for_device(checkpoint, settings.precision, staging / WEIGHTS_FILE, advance)
    tokenizer.vocabulary.write(staging / VOCABULARY_FILE, checkpoint.model.vocabulary)
    directory = Path(TOKENIZER_FILE).parent
    copied = copy_tokenizer_files(settings.model, staging / directory)
    names = [VOCABULARY_FILE, *(str(directory / name) for name in copied)]
    return {WEIGHTS_FILE: weights, **{name: file_entry(staging / name) for name in names}}, errors


def _convert(
    checkpoint: Checkpoint,
    precision: Precision,
    path: Path,
    title: str,
    reporter: Reporter,
    drafters: Drafters = NO_DRAFTERS,
) -> tuple[FileEntry, list[TensorError]]:
    total = sum(shape.nbytes for shape in plan_weights(checkpoint, precision, drafters).values())
    with reporter.stage(title, total, "bytes") as advance:
        return convert_checkpoint(checkpoint, precision, path, advance, drafters)


def _measure(
    checkpoint: Checkpoint,
    model: Model,
    settings: Settings,
    staging: Path,
    text: EvaluationText,
    errors: list[TensorError],
    reporter: Reporter,
) -> Quality:
    """Compares the staged weights with the original ones. Raises BuildError above the recipe's limit.

    The CPU executor runs both; weights that are packed for a GPU it gets once more, packed for itself.
    """
    original_path = staging / "original.safetensors"
    quantised_path, kv = staging / WEIGHTS_FILE, settings.precision.kv
    if settings.target != "cpu":
        precision = _cpu_precision(settings.precision)
        quantised_path, kv = staging / "evaluated.safetensors", precision.kv
        _convert(checkpoint, precision, quantised_path, "packed for the cpu", reporter)
    original_precision = _original_precision(checkpoint)
    _convert(checkpoint, original_precision, original_path, "original, for comparison", reporter)
    runs = (
        ("evaluate original", original_path, original_precision.kv),
        ("evaluate quantised", quantised_path, kv),
    )
    original, quantised = (
        _predict(title, model, path, kv, text, settings.threads, reporter) for title, path, kv in runs
    )
    original_path.unlink()
    if quantised_path.name != WEIGHTS_FILE:
        quantised_path.unlink()
    return Quality(
        eval_text=text.name,
        eval_tokens=text.predictions,
        window=text.window,
        perplexity_original=original.perplexity,
        perplexity_quantised=quantised.perplexity,
        perplexity_increase=check_quality(original, quantised, settings.max_perplexity_increase),
        top1_agreement=original.agreement(quantised),
        limit=settings.max_perplexity_increase,
        tensors=errors,
    )


def _predict(
    title: str, model: Model, path: Path, kv: str, text: EvaluationText, threads: int, reporter: Reporter
) -> Predictions:
    spec = native_spec(model, path, read_tensor_file(path), model.context, kv)
    with reporter.stage(title, len(text.tokens), "tokens") as advance:
        return predict(spec, text, threads or len(os.sched_getaffinity(0)), _steps(len(text.tokens), advance))


def _steps(total: int, advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """Turns the core's (done, of all) in its own units into advances out of `total`."""
    reported = 0

    def progress(done: int, of_all: int) -> None:
        nonlocal reported
        now = total * done // max(1, of_all)
        advance(now - reported)
        reported = now

    return progress


def file_entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
