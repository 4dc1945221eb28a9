"""Benchmark bundles: a model's shape, compiled kernels, and no weights, which the device makes up at load."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ull
from ull.bundle import (
    FORMAT,
    FORMAT_VERSION,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    DraftModel,
    EagleHead,
    FileEntry,
    Manifest,
    MedusaHeads,
    Model,
    Precision,
    Provenance,
    Rope,
    Speculation,
    Target,
    Tokens,
    device_head_precision,
    device_head_problems,
    device_tensors,
    draft_problems,
    encode_manifest,
    medusa_problems,
    open_bundle,
    tap_problems,
    write_sealed,
)
from ull.errors import RecipeError
from ull_build.build import BuildResult, compile_drafters, compile_for, write_all_code
from ull_build.leftovers import clear_leftovers
from ull_build.output import build_time, check_output, file_entry, require_space, staged_output
from ull_build.progress import Reporter
from ull_build.recipe import ForwardRecipe
from ull_build.shapes import shape_model
from ull_build.source.drafters import with_code
from ull_build.source.vocabulary import Vocabulary, build_vocabulary
from ull_build.tensorrt.preflight import preflight
from ull_build.tensorrt.random_weights import RandomCheckpoint, random_ranges
from ull_build.tensorrt.staged import (
    MADE_UP_LIMIT,
    REFERENCE,
    AddedPlans,
    Source,
    Tools,
    find_tools,
    prove_plans,
    timing_cache_of,
    try_made_up,
)
from ull_build.tensorrt.weights import SegmentWeights

_NEEDED_BYTES = 64 << 20
_EAGLE_TOKENS = 32000  # of the published EAGLE-3 heads of Llama 3


@dataclass(frozen=True)
class RandomSettings:
    """What to build. `layers` and `context` None are the model's own; `medusa` None: no heads.

    `draft`: the architecture of a draft model, which gets the target's context and vocabulary; None: there is none.
    `eagle`: an EAGLE-3 head of the target's width, see `eagle_shape`.
    """

    arch: str
    output: Path
    target: Target = "sm_90a"
    precision: Precision = field(default_factory=Precision)
    layers: int | None = None
    context: int | None = None
    forward: ForwardRecipe = field(default_factory=ForwardRecipe)
    medusa: MedusaHeads | None = None
    draft: str | None = None
    eagle: bool = False
    force: bool = False


def build_random(settings: RandomSettings, reporter: Reporter | None = None) -> BuildResult:
    """Builds the bundle at `settings.output`; nothing is left there unless it is complete.

    Raises RecipeError, BuildError, or OSError when the disk fails.
    """
    reporter = reporter or Reporter()
    start = time.monotonic()
    if settings.target == "cpu":
        raise RecipeError("random weights are made up on a GPU; use --target sm_90a", field="target")
    if settings.precision.lm_head_scan:
        raise RecipeError("--lm-head-scan needs an lm_head to copy, and random weights have none", field="lm_head_scan")
    clear_leftovers(settings.output.resolve().parent, reporter.note)
    output = check_output(settings.output, settings.force)
    precision, request, created = settings.precision, settings.forward, build_time()
    model = shape_model(settings.arch, settings.layers, settings.context)
    for key, problem in request.problems(settings.target, precision.weights):
        raise RecipeError(problem, field=key)
    own = request.own(settings.target)
    speculation = _drafters(settings, model)
    tools = find_tools(settings.target) if request.has_plans else None
    if tools is not None:
        preflight(tools.trt, model, precision, output.parent, reporter)
    kernels = compile_for(
        settings.target,
        model,
        precision,
        reporter,
        request.attention if tools else None,
        speculation.medusa,
        len(speculation.taps),
        forward=own,
    )
    drafter_kernels = compile_drafters(settings.target, speculation, model, precision, reporter)
    # Plans, and until they have been tried the weights of our own kernels.
    plan_bytes = 2 * sum(shape.nbytes for shape in device_tensors(model, precision).values()) if tools else 0
    require_space(output.parent, _NEEDED_BYTES + plan_bytes)
    with staged_output(output) as staging:
        files = _write_tokenizer(staging, model.vocabulary)
        code, code_files = write_all_code(
            kernels, drafter_kernels, speculation, model, precision, settings.target, staging, own
        )

        def describe(added: AddedPlans) -> Manifest:
            return Manifest(
                format=FORMAT,
                format_version=FORMAT_VERSION,
                name=output.name.removesuffix(".ull"),
                created=created,
                target=settings.target,
                ull_version=ull.__version__,
                model=model,
                precision=precision,
                tokens=Tokens(bos=None, eos=[], chat_template=False),  # nothing ends a benchmark early
                quality=None,
                provenance=Provenance(
                    source=f"random weights in the shape of {settings.arch}",
                    source_sha256=None,
                    source_files={},
                    recipe={"arch": settings.arch, "layers": settings.layers, "context": settings.context},
                    builder_version=ull.__version__,
                ),
                files={**files, **code_files, **added.files},
                speculation=with_code(speculation, code.drafters),
                code=code.target,
                forward=added.forward,
                random_weights=True,
            )

        if tools is None:
            manifest = describe(AddedPlans(own, {}))
        else:
            manifest = _add_plans(tools, settings, model, staging, timing_cache_of(output), reporter, describe)
        write_sealed(staging, encode_manifest(manifest))
        open_bundle(staging)  # a bundle that ull would refuse must not come into being
    return BuildResult(output, manifest, time.monotonic() - start)


def _add_plans(
    tools: Tools,
    settings: RandomSettings,
    model: Model,
    staging: Path,
    timing_cache: Path,
    reporter: Reporter,
    describe: Callable[[AddedPlans], Manifest],
) -> Manifest:
    """Adds plans of made-up weights, which are held against our own kernels with the same ones."""
    precision, checkpoint = settings.precision, RandomCheckpoint(model)

    def attempt(added: AddedPlans) -> Manifest:
        if added.forward.plans is None:
            (staging / WEIGHTS_FILE).unlink(missing_ok=True)  # the reference: the device makes its own up
            return describe(replace(added, files={k: v for k, v in added.files.items() if k != WEIGHTS_FILE}))
        return try_made_up(staging, describe(added), checkpoint, MADE_UP_LIMIT, reporter)

    source = Source(model, SegmentWeights(checkpoint, precision), random_ranges(model, precision))
    try:
        return prove_plans(tools, settings.forward, source, staging, timing_cache, reporter, attempt)
    finally:
        shutil.rmtree(staging / REFERENCE, ignore_errors=True)


def _drafters(settings: RandomSettings, model: Model) -> Speculation:
    """What drafts for `model`, without code. Raises RecipeError for what the target cannot do."""
    precision, request, medusa = settings.precision, settings.forward, settings.medusa
    for problem in () if medusa is None else medusa_problems(medusa, request.decode):
        raise RecipeError(problem, field="medusa")
    draft = None if settings.draft is None else draft_shape(settings.draft, model)
    for problem in () if draft is None else draft_problems(settings.target, draft, precision):
        raise RecipeError(problem, field="draft")
    eagle = eagle_shape(model, device_head_precision(precision)) if settings.eagle else None
    if eagle is not None:
        problems = device_head_problems(settings.target, eagle)
        for problem in (*problems, *tap_problems(eagle.taps, settings.target, request.prefill, request.decode)):
            raise RecipeError(problem, field="eagle")
    drafting = None if draft is None else DraftModel(draft, precision)
    return Speculation(default="none", medusa=medusa, draft=drafting, eagle=eagle)


def eagle_shape(target: Model, precision: Precision) -> EagleHead:
    """An EAGLE-3 head for `target` in the shape of the published ones. Raises RecipeError.

    One layer of the target's dimensions without QK norms, three taps, 32,000 tokens of its own mapped to the target's.
    """
    depth = target.layers
    if depth < 2:
        raise RecipeError("an EAGLE-3 head reads three states of the model: --layers 2 or more", field="eagle")
    taps = [2, depth // 2, depth - 3] if depth > 6 else [0, depth // 2, depth]  # the convention, where it names three
    own = msgspec.structs.replace(
        target,
        architecture="llama",
        layers=1,
        vocabulary=min(_EAGLE_TOKENS, target.vocabulary),
        tokenizer_vocabulary=min(_EAGLE_TOKENS, target.tokenizer_vocabulary),
        tied_embeddings=False,
        qk_norm=False,
        rope=Rope(theta=target.rope.theta),
        windows=[0],
    )
    return EagleHead(own, precision, taps, mapped=True)


def draft_shape(arch: str, target: Model) -> Model:
    """The shape of a draft model for `target`. Raises RecipeError."""
    model = shape_model(arch)
    if model.context < target.context:
        raise RecipeError(
            f"{arch} holds {model.context} tokens, the target {target.context}; lower --context", field="draft"
        )
    sizes = {"vocabulary": target.vocabulary, "tokenizer_vocabulary": target.tokenizer_vocabulary}
    return msgspec.structs.replace(model, context=target.context, **sizes)


def _write_tokenizer(staging: Path, vocabulary: int) -> dict[str, FileEntry]:
    """A tokenizer of single bytes, and a text for every id of the model, so that streams carry as much as real ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = staging / TOKENIZER_FILE
    path.parent.mkdir()
    tokenizer.save(str(path))
    pieces = build_vocabulary(tokenizer).pieces
    pieces += [f" {token:x}".encode() for token in range(len(pieces), vocabulary)]
    Vocabulary(pieces, [False] * vocabulary, vocabulary).write(staging / VOCABULARY_FILE, vocabulary)
    return {name: file_entry(staging / name) for name in (TOKENIZER_FILE, VOCABULARY_FILE)}
