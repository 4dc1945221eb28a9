"""`ull-train`: the command line of the trainers. PyTorch is imported when a training starts, not before.

Exit codes as `ull-build`: 0 trained, 1 failed (one line on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ull
from ull.bundle import Bundle, open_bundle
from ull.bundle.manifest import MAX_DFLASH_BLOCK
from ull.completion import add_completion
from ull.errors import BuildError, UllError
from ull_build.build import build
from ull_build.progress import Reporter, make_reporter
from ull_build.settings import Settings as BuildSettings
from ull_build.source.drafters import SpeculationSettings
from ull_build.source.vocabulary import CheckpointTokenizer, read_tokenizer
from ull_build.train.data import (
    Material,
    Plan,
    Sequences,
    encode_documents,
    fingerprint,
    generate,
    load_sequences,
    read_texts,
)

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_HELD_OUT = 0.02  # of the documents, when no --heldout text is given
_HELD_OUT_SEQUENCES = 90


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `ull-train`; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        _run(options, make_reporter(options.quiet))
    except UllError as error:
        print(f"ull-train: error: {' '.join(error.message.split())}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"ull-train: error: {error.strerror or error}{place}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("ull-train: interrupted; the last weights that were written stay", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _run(options: argparse.Namespace, reporter: Reporter) -> None:
    """The texts and the target's outputs on them, then the training of what was asked for."""
    if importlib.util.find_spec("torch") is None:
        raise BuildError('training needs PyTorch; install it with `pip install "ull[train]"`', field="torch")
    with _opened_target(options, reporter) as bundle:
        tokenizer = read_tokenizer(bundle.tokenizer_directory, bundle.manifest.model.vocabulary)
        training, held_out = _documents(options, tokenizer)
        options.output.mkdir(parents=True, exist_ok=True)
        lengths = (options.prompt_tokens, options.response_tokens)
        plan = Plan(options.sequences, *lengths, options.temperatures, options.seed)
        # Held-out prompts are the next plan's, so that they share no seed with the training data.
        check = Plan(_HELD_OUT_SEQUENCES, *lengths, plan.temperatures, plan.seed + 1)
        prefix = tokenizer.sequence_prefix()
        outputs = _outputs(options, bundle, training, prefix, plan, reporter)
        unseen = generate(bundle, held_out, prefix, check, _threads(options), reporter, "generate held-out")
        # Late: nothing but a training needs PyTorch.
        from ull_build.train.run import RUNS

        material = Material(bundle, training, prefix, outputs, unseen)
        lines = RUNS[options.kind](options, material, reporter)
    for line in lines:
        reporter.note(line)


@contextmanager
def _opened_target(options: argparse.Namespace, reporter: Reporter) -> Iterator[Bundle]:
    """The quantised target: a bundle, or a checkpoint that is made into one for as long as it is needed."""
    if options.bundle is not None:
        yield open_bundle(options.bundle)
        return
    with tempfile.TemporaryDirectory(prefix="ull-train-") as folder:
        settings = BuildSettings(
            model=options.target,
            output=Path(folder) / "target.ull",
            name="target",
            context=options.context,
            evaluate=False,
            speculation=SpeculationSettings(default="none"),
        )
        yield open_bundle(build(settings, reporter).path)


def _documents(options: argparse.Namespace, tokenizer: CheckpointTokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the training documents and of the held-out ones, which are never trained on."""
    documents = encode_documents(read_texts(options.text), tokenizer)
    if options.heldout:
        return documents, encode_documents(read_texts(options.heldout), tokenizer)
    count = max(1, int(len(documents) * _HELD_OUT))
    if len(documents) <= count:
        raise BuildError(
            "one document is not enough to hold some text back; give --heldout FILE or more texts", field="heldout"
        )
    return documents[:-count], documents[-count:]


def _outputs(
    options: argparse.Namespace,
    bundle: Bundle,
    documents: list[list[int]],
    prefix: list[int],
    plan: Plan,
    reporter: Reporter,
) -> Sequences:
    """The target's own outputs: read from --data where they exist, else generated and stored there."""
    mark = fingerprint(bundle, plan, documents)
    if options.data is not None and options.data.exists():
        return load_sequences(options.data, mark)
    outputs = generate(bundle, documents, prefix, plan, _threads(options), reporter)
    if options.data is not None:
        outputs.save(options.data, mark)
    return outputs


def _threads(options: argparse.Namespace) -> int:
    return int(options.threads) or len(os.sched_getaffinity(0))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    program = argparse.ArgumentParser(
        prog="ull-train",
        description="Trains drafters for a target on the target's own outputs. The output is what ull-build takes as "
        "--medusa, --draft, --eagle and --dflash.",
    )
    program.add_argument("--version", action="version", version=f"ull-train {ull.__version__}")
    kinds = program.add_subparsers(dest="kind", required=True, metavar="{medusa,draft,eagle3,dflash}")
    medusa = kinds.add_parser("medusa", help="Medusa heads (version 2) on the frozen target")
    draft = kinds.add_parser("draft", help="a smaller model with the target's tokenizer")
    eagle = kinds.add_parser("eagle3", help="an EAGLE-3 head: one layer that reads the target's hidden states")
    dflash = kinds.add_parser("dflash", help="a DFlash head with DSpark's additions: a block of drafts in one pass")
    for kind in (medusa, draft, eagle, dflash):
        _add_common(kind)
    add = medusa.add_argument
    add("--heads", type=_positive, default=4, metavar="N", help="heads; head i guesses i + 2 tokens ahead (default 4)")
    add("--layers", type=_positive, default=1, metavar="N", help="residual blocks per head (default 1)")
    add("--steps", type=_positive, default=2000, metavar="N", help="optimizer steps (default 2000)")
    add("--rate", type=_rate, default=1e-3, metavar="F", help="learning rate of AdamW (default 1e-3)")
    add = draft.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="config.json of the draft model")
    add("--steps", type=_positive, default=4000, metavar="N", help="optimizer steps (default 4000)")
    add("--rate", type=_rate, default=4e-3, metavar="F", help="learning rate of AdamW, for vectors (default 4e-3)")
    add("--matrix-rate", type=_rate, default=5e-3, metavar="F", help="learning rate of Muon (default 5e-3)")
    for kind in (eagle, dflash):
        _add_head(kind)
    add = eagle.add_argument
    add("--depths", type=_positive, default=5, metavar="N", help="drafts of a chain in training (default 5)")
    add("--vocabulary", type=_positive, metavar="N", help="the head's: the most frequent tokens (default: all)")
    add = dflash.add_argument
    add("--layers", type=_positive, default=2, metavar="N", help="layers of the head (default 2)")
    add("--block", type=_block, default=8, metavar="N", help="tokens that a pass drafts (default 8)")
    add("--rank", type=_positive, default=64, metavar="N", help="of the Markov term (default 64)")
    add("--mask-token", type=int, metavar="ID", help="stands where nothing is known yet (default: one never written)")
    add_completion(program)
    return program


def _add_head(kind: argparse.ArgumentParser) -> None:
    """What heads that read the target's hidden states have in common."""
    add = kind.add_argument
    add(
        "--taps",
        type=_layers,
        metavar="I,I,...",
        help="the target's hidden states as they enter these layers; their number: as they leave the last (default: "
        "three, evenly up to there)",
    )
    add("--intermediate", type=_positive, metavar="N", help="width of the feed-forward (default: the target's)")
    add("--steps", type=_positive, default=4000, metavar="N", help="optimizer steps (default 4000)")
    add(
        "--rate",
        type=_rate,
        default=1e-3,
        metavar="F",
        help="learning rate of AdamW, for vectors and tables (1e-3)",
    )
    add("--matrix-rate", type=_rate, default=5e-3, metavar="F", help="learning rate of Muon (default 5e-3)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", type=Path, metavar="DIR", help="the target's checkpoint; quantised to FP8 first")
    target.add_argument("--bundle", type=Path, metavar="X.ull", help="the target as a bundle, as it will be served")
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="PATH", help="UTF-8 texts, or directories of them")
    add("--heldout", type=Path, nargs="+", metavar="PATH", help="texts to measure on (default: 2%% of the documents)")
    add("--output", type=Path, required=True, metavar="DIR", help="where the weights go")
    add("--data", type=Path, metavar="FILE.npz", help="keeps the target's outputs; read instead when it exists")
    add("--initial", type=Path, metavar="DIR", help="goes on from the weights there")
    add("--context", type=_positive, metavar="TOKENS", help="of the quantised --target (default: the model's)")
    add("--sequences", type=_positive, default=4000, metavar="N", help="outputs to generate (default 4000)")
    add("--prompt-tokens", type=_positive, default=192, metavar="N", help="of a prompt, at most (default 192)")
    add("--response-tokens", type=_positive, default=160, metavar="N", help="of an output, at most (default 160)")
    add(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.8, 1.0),
        metavar="T,T,...",
        help="of the outputs in turn; 0 is greedy (default 0,0.8,1)",
    )
    add("--minutes", type=_rate, metavar="F", help="end the training after this time (default: after --steps)")
    add("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads (default: as many as allowed)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, outputs and order (default 0)")
    add("--quiet", action="store_true", help="print nothing but errors")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _layers(text: str) -> tuple[int, ...]:
    values = tuple(int(item) for item in text.split(","))
    if list(values) != sorted(set(values)) or values[0] < 0:
        raise argparse.ArgumentTypeError(f"must be layers in ascending order, not {text}")
    return values


def _block(text: str) -> int:
    value = int(text)
    if not 2 <= value <= MAX_DFLASH_BLOCK:
        raise argparse.ArgumentTypeError(f"must be from 2 to {MAX_DFLASH_BLOCK}, not {text}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def _temperatures(text: str) -> tuple[float, ...]:
    values = tuple(float(item) for item in text.split(","))
    if not all(0 <= value <= 10 for value in values):
        raise argparse.ArgumentTypeError(f"must be from 0 to 10, not {text}")
    return values


if __name__ == "__main__":
    sys.exit(main())
