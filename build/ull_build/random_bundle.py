"""Benchmark bundles: a model's shape, compiled kernels, and no weights, which the device makes up at load."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ull
from ull.bundle import (
    DRAFT_CODE_DIRECTORY,
    FORMAT,
    FORMAT_VERSION,
    FUSED,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    DraftModel,
    FileEntry,
    Manifest,
    MedusaHeads,
    Model,
    Precision,
    Provenance,
    Speculation,
    Target,
    Tokens,
    device_macros,
    device_tensors,
    draft_problems,
    encode_manifest,
    medusa_problems,
    open_bundle,
)
from ull.errors import RecipeError
from ull_build.build import BuildResult, compile_for
from ull_build.kernels import write_code
from ull_build.output import check_output, file_entry, require_space, staged_output
from ull_build.progress import Reporter
from ull_build.recipe import ForwardRecipe
from ull_build.shapes import shape_model
from ull_build.tensorrt.random_weights import RandomWeights, random_ranges
from ull_build.tensorrt.staged import add_plans, find_tools, timing_cache_of, watch_plans
from ull_build.tensorrt.timing_cache import save_timing_cache
from ull_build.vocabulary import Vocabulary, build_vocabulary

_NEEDED_BYTES = 64 << 20


@dataclass(frozen=True)
class RandomSettings:
    """What to build. `layers` and `context` None are the model's own; `medusa` None: no heads.

    `draft`: the architecture of a draft model, which gets the target's context and vocabulary; None: there is none.
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
    output = check_output(settings.output, settings.force)
    precision, request = settings.precision, settings.forward
    tools = find_tools(settings.target) if request.has_plans else None
    model = shape_model(settings.arch, settings.layers, settings.context)
    medusa = settings.medusa
    for problem in () if medusa is None else medusa_problems(medusa, request.decode):
        raise RecipeError(problem, field="medusa")
    draft = None if settings.draft is None else draft_shape(settings.draft, model)
    for problem in () if draft is None else draft_problems(settings.target, draft, precision):
        raise RecipeError(problem, field="draft")
    kernels = compile_for(settings.target, model, precision, reporter, request.attention if tools else None, medusa)
    own = [] if draft is None else compile_for(settings.target, draft, precision, reporter, of="draft model")
    plan_bytes = sum(shape.nbytes for shape in device_tensors(model, precision).values()) if tools else 0
    require_space(output.parent, _NEEDED_BYTES + plan_bytes)
    with staged_output(output) as staging:
        files = _write_tokenizer(staging, model.vocabulary)
        code, code_files = write_code(kernels, device_macros(model, precision, medusa), staging, settings.target)
        drafting = None
        if draft is not None:
            macros = device_macros(draft, precision)
            draft_code, more = write_code(own, macros, staging, settings.target, DRAFT_CODE_DIRECTORY)
            drafting, code_files = DraftModel(draft, precision, draft_code), code_files | more
        added = None
        if tools is not None:
            weights, ranges = RandomWeights(model, precision), random_ranges(model, precision)
            added = add_plans(tools, request, model, weights, ranges, staging, timing_cache_of(output), reporter)
        manifest = Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            name=output.name.removesuffix(".ull"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            target=settings.target,
            ull_version=ull.__version__,
            model=model,
            precision=precision,
            tokens=Tokens(bos=None, eos=[], chat_template=False),  # nothing ends a benchmark early
            quality=None,
            provenance=Provenance(
                source=f"random weights in the shape of {settings.arch}",
                source_sha256=hashlib.sha256(msgspec.json.encode(model)).hexdigest(),
                recipe={"arch": settings.arch, "layers": settings.layers, "context": settings.context},
                builder_version=ull.__version__,
            ),
            files={**files, **code_files, **(added.files if added else {})},
            speculation=Speculation(default="none", medusa=medusa, draft=drafting),
            code=code,
            forward=added.forward if added else FUSED,
            random_weights=True,
        )
        (staging / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
        bundle = open_bundle(staging)
        if added is not None:
            manifest = watch_plans(bundle)
            save_timing_cache(added.timing_cache, timing_cache_of(output))
            (staging / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return BuildResult(output, manifest, time.monotonic() - start)


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
    pieces = build_vocabulary(json.loads(path.read_bytes())).pieces
    pieces += [f" {token:x}".encode() for token in range(len(pieces), vocabulary)]
    Vocabulary(pieces, [False] * vocabulary, vocabulary).write(staging / VOCABULARY_FILE, vocabulary)
    return {name: file_entry(staging / name) for name in (TOKENIZER_FILE, VOCABULARY_FILE)}
