"""`ull-build`: the command line of the build step.

Exit codes: 0 built, 1 the build failed (one line on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

from rich.console import Console
from rich.table import Table

import ull
from ull.bundle import Manifest, MedusaHeads, Precision, PrefillSource, Source, Target, device_parts
from ull.completion import add_completion
from ull.errors import RecipeError, UllError
from ull_build.benchmark_bundle import RandomSettings, build_random
from ull_build.build import BuildResult, build
from ull_build.progress import format_amount, make_reporter
from ull_build.recipe import TARGETS, ForwardRecipe, Recipe, describe_keys, load_recipe, make_recipe
from ull_build.settings import settings_from_recipe
from ull_build.shapes import SHAPES

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `ull-build`; returns the exit code."""
    command = parser()
    options = command.parse_args(arguments)
    _check_usage(command, options)
    try:
        with _interruptible():
            reporter = make_reporter(options.quiet)
            if options.arch is not None:
                result = build_random(_random_settings(options), reporter)
            else:
                recipe = _recipe(options)
                settings = settings_from_recipe(recipe, evaluate=not options.no_eval, force=options.force)
                result = build(settings, reporter)
    except UllError as error:
        # One line, whatever the message quotes.
        _complain(f"error: {' '.join(error.message.split())}")
        return EXIT_USAGE if isinstance(error, RecipeError) else EXIT_FAILED
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        _complain(f"error: {error.strerror or error}{place}")
        return EXIT_FAILED
    except MemoryError as error:
        _complain(f"error: out of memory{f' ({error})' if str(error) else ''}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        _complain("interrupted; no half bundle is left")
        return EXIT_INTERRUPTED
    if not options.quiet:
        print_summary(result)
    return 0


def _complain(text: str) -> None:
    """One line on stderr, which may have gone with its terminal."""
    with suppress(OSError):
        print(f"ull-build: {text}", file=sys.stderr, flush=True)


def _check_usage(command: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What argparse cannot say: which options go together."""
    if options.arch is not None:
        if not options.random_weights:
            command.error("--arch names a shape without weights: say --random-weights too")
        if options.model is not None:
            command.error("--arch and --model exclude each other")
        if options.medusa is not None or options.draft is not None:
            command.error("--medusa and --draft have no use with --arch: say --heads N or --draft-arch NAME")
        if options.eagle is not None or options.dflash is not None:
            command.error("--eagle and --dflash have no use with --arch: say --eagle-shape for a made-up EAGLE-3 head")
        if options.heads is not None and options.heads < 1:
            command.error("--heads must be at least 1")
        if options.lora is not None:
            command.error("--lora has no use with --arch: made-up weights have no adapters")
        measured = ("eval_text", "eval_tokens", "evaluate_on", "calibration_text", "calibration_tokens")
        if given := [name for name in measured if getattr(options, name) is not None]:
            command.error(f"--{given[0].replace('_', '-')} has no use with --arch: made-up weights are not measured")
        if (options.recipe is None) == (options.output is None):
            command.error("--arch needs the bundle to write: --output X.ull")
        return
    made_up = ("layers", "heads", "draft_arch", "eagle_shape")
    if options.random_weights or any(getattr(options, name) is not None for name in made_up):
        command.error("--random-weights, --layers, --heads, --draft-arch and --eagle-shape go with --arch")
    if (options.recipe is None) == (options.model is None):
        command.error("give either a RECIPE or --model DIR")
    if options.recipe is None and options.output is None:
        command.error("--model needs --output")


def _random_settings(options: argparse.Namespace) -> RandomSettings:
    """What --arch asks for; the recipe's place on the command line holds the output. Raises RecipeError."""
    target = options.target or "sm_90a"
    if target not in TARGETS:
        raise RecipeError(f'target "{target}" is unknown; use {", ".join(TARGETS)}', field="target")
    return RandomSettings(
        arch=options.arch,
        output=Path(options.output) if options.output is not None else options.recipe,
        target=cast(Target, target),
        precision=Precision(
            weights=options.precision or "fp8",
            lm_head=options.lm_head or "bf16",
            kv=options.kv or "bf16",
            lm_head_scan=bool(options.lm_head_scan),
        ),
        layers=options.layers,
        context=options.context,
        forward=_forward(options),
        medusa=None if options.heads is None else MedusaHeads(heads=options.heads, layers=1, version="1"),
        draft=options.draft_arch,
        eagle=bool(options.eagle_shape),
        force=options.force,
    )


_PREFILL: dict[Source, PrefillSource] = {"fused": "exact", "tensorrt": "tensorrt"}  # of --forward


def _forward(options: argparse.Namespace) -> ForwardRecipe:
    source: Source = options.forward or "fused"
    prefill: PrefillSource = options.prefill or _PREFILL[source]
    if options.attention == "native" and source != "tensorrt":
        raise RecipeError("--attention native goes with --forward tensorrt", field="attention")
    if options.profiles is not None and source != "tensorrt":
        raise RecipeError("--profiles goes with --forward tensorrt", field="profiles")
    return ForwardRecipe(
        prefill=prefill,
        decode=source,
        attention=options.attention or "paged",
        profiles=options.profiles or "two",
        tree_products=options.tree_products,
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """The signals that end a session unwind the build as KeyboardInterrupt, once: a second one must not disturb the
    cleaning up. A hangup that is ignored, as under nohup, stays so.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in handlers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    keys = "\n".join(f"  {key:<24} {meaning}{_default(default)}" for key, default, meaning in describe_keys())
    program = argparse.ArgumentParser(
        prog="ull-build",
        description="Compiles a Hugging Face checkpoint into an engine bundle for ull.",
        epilog=f"keys of a recipe (TOML):\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = program.add_argument
    add("recipe", nargs="?", type=Path, metavar="RECIPE", help="a recipe, e.g. engines/tiny.toml")
    add("--model", metavar="DIR", help="a Hugging Face checkpoint's directory or id (ORG/NAME), instead of a recipe")
    add("--lora", metavar="DIR", help="a LoRA adapter in PEFT's form, merged into the model")
    add("--output", metavar="X.ull", help="the bundle to write (default: NAME.ull here)")
    add("--target", metavar="TARGET", help='what the bundle runs on (default "cpu")')
    add("--precision", choices=("fp8", "bf16"), help="format of the linear weights (default fp8)")
    add("--lm-head", choices=("bf16", "fp8"), help="format of the output head (default bf16)")
    scan = "on a GPU: an FP8 copy of the lm_head too, from which tokens are found with fewer bytes read"
    add("--lm-head-scan", action="store_const", const=True, help=scan)
    add("--kv", choices=("bf16", "fp8", "f32"), help="format of the KV cache (default bf16)")
    add("--context", type=int, metavar="TOKENS", help="tokens a session may hold (default: the model's)")
    add("--eval-text", metavar="FILE", help="text on which the loss is measured (default: one that comes with ull)")
    add("--eval-tokens", type=int, metavar="N", help="tokens of it to use at most (default 4096)")
    add("--calibration-text", metavar="FILE", help="text on which FP8 ranges are measured (default: another such)")
    add("--calibration-tokens", type=int, metavar="N", help="tokens of it to use at most (default 2048)")
    add("--evaluate-on", choices=("cpu", "gpu"), help="where the loss is measured (default cpu)")
    add("--max-perplexity-increase", type=float, metavar="F", help="fraction that fails the build (default 0.01)")
    add("--medusa", metavar="PATH", help="Medusa heads: medusa_lm_head.pt or .safetensors, or their directory")
    add("--draft", metavar="DIR", help="a smaller checkpoint with the same tokenizer, as draft model")
    add("--eagle", metavar="DIR", help="an EAGLE-3 head, in the original's or speculators' form")
    add("--dflash", metavar="DIR", help="a DFlash or DSpark head, in z-lab's, SpecForge's or speculators' form")
    drafters = ("none", "suffix", "medusa", "eagle", "dflash", "draft", "auto")
    add("--drafter", choices=drafters, help='what drafts for requests that do not say (default "auto")')
    weak = "take a head too that drafts fewer than 1.3 tokens per round on the calibration text"
    add("--allow-weak-drafter", action="store_const", const=True, help=weak)
    add("--forward", choices=("fused", "tensorrt"), help="who computes the layers, on a GPU (default fused)")
    reads = "how prompts are read, where not by --forward: exact has the bits of decode, fast FP8 activations"
    add("--prefill", choices=("exact", "fast", "tensorrt"), help=reads)
    add("--attention", choices=("paged", "native"), help="with --forward tensorrt: whose attention (default paged)")
    add("--profiles", choices=("two", "seven"), help="with --forward tensorrt: choices of kernels (default two)")
    multiplies = "who multiplies for 16 and more tokens, with the same bits (default warpgroup, where it can be)"
    add("--tree-products", choices=("warp", "warpgroup"), help=multiplies)
    shapes = ", ".join(SHAPES)
    add("--arch", choices=tuple(SHAPES), metavar="NAME", help=f"a benchmark bundle in this shape, no weights: {shapes}")
    add("--random-weights", action="store_true", help="with --arch: the GPU makes the weights up when it loads")
    add("--layers", type=int, metavar="N", help="with --arch: only that many layers")
    add("--heads", type=int, metavar="N", help="with --arch: that many Medusa heads, each with its own lm_head")
    add("--draft-arch", choices=tuple(SHAPES), metavar="NAME", help="with --arch: a draft model in that shape")
    shaped = "with --arch: an EAGLE-3 head of that width, of 32,000 tokens"
    add("--eagle-shape", action="store_const", const=True, help=shaped)
    add("--no-eval", action="store_true", help="do not measure the loss (the manifest's quality is null)")
    add("--force", action="store_true", help="replace an existing bundle")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--version", action="version", version=f"ull-build {ull.__version__}")
    add_completion(program)
    return program


def _default(text: str) -> str:
    return "" if text in ("", "None") else f" ({text})" if text == "required" else f" (default {text})"


# Tables that one option each stands for, with the key that it gives.
_TABLE_KEYS = {"medusa": "heads", "draft": "model", "eagle": "head", "dflash": "head"}
_TABLES = (*_TABLE_KEYS, "forward")


def _recipe(options: argparse.Namespace) -> Recipe:
    """The recipe, with what the command line says on top."""
    names = [name for name in Recipe.__struct_fields__ if hasattr(options, name) and name not in _TABLES]
    overrides: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    overrides |= {
        name: {key: value} for name, key in _TABLE_KEYS.items() if (value := getattr(options, name)) is not None
    }
    forward: dict[str, Any] = {"prefill": options.prefill or _PREFILL.get(options.forward), "decode": options.forward}
    forward |= {name: getattr(options, name) for name in ("attention", "profiles", "tree_products")}
    if any(value is not None for value in forward.values()):
        overrides["forward"] = {key: value for key, value in forward.items() if value is not None}
    if options.recipe is None:
        return make_recipe(overrides, "command line")
    return load_recipe(options.recipe, overrides)


def describe_speculation(manifest: Manifest) -> str:
    """What drafts for the engine, in one line."""
    speculation = manifest.speculation
    if speculation is None:
        return "none"
    parts = ["suffix"]
    if (medusa := speculation.medusa) is not None:
        parts.append(f"{medusa.heads} Medusa heads (version {medusa.version})")
    if (draft := speculation.draft) is not None:
        parts.append(f"draft model, {draft.model.layers} x hidden {draft.model.hidden}")
    if (eagle := speculation.eagle) is not None:
        parts.append(f"EAGLE-3 head on layers {', '.join(map(str, eagle.taps))}")
    if (dflash := speculation.dflash) is not None:
        parts.append(f"{'DSpark' if dflash.markov else 'DFlash'} head, {dflash.model.layers} x block {dflash.block}")
    return f"{', '.join(parts)}; default {speculation.default}"


def print_summary(result: BuildResult) -> None:
    """The table at the end of a build."""
    manifest = result.manifest
    table = Table(title=f"{manifest.name} -> {result.path}", title_justify="left", show_header=False)
    size = sum(entry.bytes for entry in manifest.files.values())
    table.add_row("size", format_amount(size, "bytes"))
    table.add_row("precision", f"{manifest.precision.weights}, lm_head {manifest.precision.lm_head}")
    if (fp8_source := manifest.provenance.fp8_source) is not None:
        table.add_row("source's weights", fp8_source.describe(manifest.precision.weights))
    table.add_row("drafters", describe_speculation(manifest))
    if parts := device_parts(manifest):
        table.add_row("kernels", f"{sum(len(part.code.kernels()) for part in parts)} for {manifest.target}")
    if manifest.random_weights:
        table.add_row("weights", "random, made up on the device at load")
    elif manifest.quality is None:
        table.add_row("quality", "not measured (--no-eval)")
    else:
        quality = manifest.quality
        table.add_row("perplexity, original", f"{quality.perplexity_original:.4f}")
        change = f"{quality.perplexity_quantised:.4f} ({quality.perplexity_increase:+.3%}, limit {quality.limit:.2%})"
        table.add_row("perplexity, built", change)
        table.add_row("top-1 agreement", f"{quality.top1_agreement:.2%} of {quality.eval_tokens} tokens")
        if (calibration := manifest.calibration) is not None:
            change = f"{calibration.perplexity:.4f} ({calibration.perplexity_increase:+.3%}, by {calibration.method})"
            table.add_row("with FP8 activations", change)
        if (fast := quality.fast_prefill) is not None:
            table.add_row("with fast prefill", f"{fast.perplexity:.4f} ({fast.perplexity_increase:+.3%})")
        if quality.tokens_per_round:
            rates = ", ".join(f"{name} {rate:.2f}" for name, rate in quality.tokens_per_round.items())
            table.add_row("tokens per round", rates)
        worst = max(quality.tensors, key=lambda item: item.relative_error)
        error = f"{worst.relative_error:.3%} ({worst.name})" if worst.relative_error else "none"
        table.add_row("largest tensor error", error)
    if (activations := manifest.activations) is not None:
        share = f"at most {activations.largest_share:.2%} of f16's range ({activations.largest_at})"
        table.add_row("activations", share + (f", {len(activations.scaled)} MLPs scaled" if activations.scaled else ""))
    if (plans := manifest.forward.plans) is not None:
        table.add_row("plans", f"{len(plans.files)}, TensorRT {plans.version}, {plans.attention} attention")
        exact = ", ".join(map(str, plans.exact))
        table.add_row("exact rounds", f"of {exact} tokens" if plans.exact != [1] else "of 1 token: no speculation")
        if plans.check is not None:
            errors = {"the cpu executor's": plans.check.cpu_error, "our kernels'": plans.check.fused_error}
            off = ", ".join(f"{error:.2%} off {whose}" for whose, error in errors.items() if error is not None)
            table.add_row("plans' logits", f"{off} (limit {plans.check.limit:.0%})")
        if plans.operands:
            table.add_row("not as described", f"{len(plans.operands)} linears (`ull inspect` names them)")
        if plans.sixteen_bits:
            table.add_row("16-bit activations", ", ".join(plans.sixteen_bits))
    for number, note in enumerate(manifest.forward.notes):
        table.add_row("note" if number == 0 else "", note)
    table.add_row("time", f"{result.seconds:.1f} s")
    Console(highlight=False).print(table)
