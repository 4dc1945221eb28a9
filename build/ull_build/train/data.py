"""The training data: what the quantised target itself writes after prompts cut from the texts.

Speculation pays where a drafter guesses the *target's* next tokens, so the drafters learn from its outputs and not from
the texts. The native executor writes them: the very weights and arithmetic that will verify the drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ull.bundle import Bundle, native_spec
from ull.errors import BuildError
from ull_build.progress import Reporter
from ull_build.source.vocabulary import CheckpointTokenizer

MIN_PROMPT = 16  # tokens of text in a prompt, at least
_SEED_STRIDE = 1 << 20  # sequences of one plan never share a seed with those of another


@dataclass(frozen=True)
class Plan:
    """How much to generate and how. Sequence i takes temperature i modulo their number; 0 is greedy."""

    sequences: int = 4000
    prompt_tokens: int = 192  # at most; each prompt's length is drawn between MIN_PROMPT and this
    response_tokens: int = 160  # at most; an end-of-sequence token ends a response
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Sequences:
    """Generated sequences, one after the other.

    `tokens` [total] int32, `starts` [n + 1] int64 where each begins, `prompts` [n] int32 the length of its prompt,
    `temperatures` [n] float32, `seeds` [n] uint64: token at position p of sequence i was drawn with (seeds[i], p).
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    prompts: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    seeds: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def responses(self) -> int:
        """Tokens that the target wrote."""
        return len(self.tokens) - int(self.prompts.sum())

    def sequence(self, place: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[place] : self.starts[place + 1]]

    def save(self, path: Path, mark: str) -> None:
        """Writes the sequences; `mark` says what they were made from (see `fingerprint`)."""
        with path.open("wb") as file:
            np.savez_compressed(file, mark=np.array(mark), **{name: getattr(self, name) for name in _FIELDS})


@dataclass(frozen=True)
class Material:
    """What a training is given: the target, the texts as token ids, and what the target wrote.

    `prefix` are the ids that the tokenizer puts first; `unseen` continues texts that are in no training."""

    bundle: Bundle
    documents: list[list[int]]
    prefix: list[int]
    outputs: Sequences
    unseen: Sequences

    def rows(self) -> list[NDArray[np.int32]]:
        """The texts as the target reads them, each with its prefix and its end."""
        end = self.bundle.manifest.tokens.eos[:1]
        return [np.array([*self.prefix, *ids, *end], np.int32) for ids in self.documents]


_FIELDS = ("tokens", "starts", "prompts", "temperatures", "seeds")


def fingerprint(bundle: Bundle, plan: Plan, documents: Sequence[Sequence[int]]) -> str:
    """Names target, texts and plan, so that stored sequences are not taken for those of another run."""
    digest = hashlib.sha256(repr(plan).encode())
    digest.update(bundle.manifest.files["weights.safetensors"].sha256.encode())
    for document in documents:
        digest.update(np.array(document, np.int32).tobytes())
    return digest.hexdigest()


def load_sequences(path: Path, mark: str) -> Sequences:
    """Reads what `Sequences.save` wrote. Raises BuildError when it is damaged or was made from something else."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            values = {name: stored[name] for name in (*_FIELDS, "mark")}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise BuildError(f"{path} cannot be read as generated sequences: {error}; delete it", field="data") from error
    if str(values.pop("mark")) != mark:
        raise BuildError(
            f"{path} was generated from another target, text or plan; delete it or name another file", field="data"
        )
    return Sequences(**values)


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The UTF-8 texts of files, and of all files below directories, in sorted order.

    Raises BuildError for a path that is missing or no text.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(item for item in path.rglob("*") if item.is_file())
        else:
            files.append(path)
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(f"text {file} cannot be read as UTF-8: {error}", field="text") from error
    return [text for text in texts if text.strip()]


def encode_documents(texts: Sequence[str], tokenizer: CheckpointTokenizer) -> list[list[int]]:
    """Token ids of each text that is long enough to cut a prompt from. Raises BuildError when none is."""
    documents = [ids for ids in map(tokenizer.encode, texts) if len(ids) >= MIN_PROMPT]
    if not documents:
        raise BuildError(f"the texts hold no document of {MIN_PROMPT} tokens; give longer ones", field="text")
    return documents


def cut_prompts(
    documents: Sequence[Sequence[int]], prefix: Sequence[int], plan: Plan, context: int
) -> Iterator[NDArray[np.int32]]:
    """`plan.sequences` prompts: the tokenizer's prefix and a random stretch of a document, chosen by its length.

    One prompt in four starts at its document's beginning, as prompts of users do. Raises BuildError when the model's
    context cannot hold a prompt and a response.
    """
    longest = min(plan.prompt_tokens, context - plan.response_tokens - len(prefix))
    if longest < MIN_PROMPT:
        raise BuildError(
            f"prompts of {MIN_PROMPT} tokens and responses of {plan.response_tokens} do not fit into the target's "
            f"context of {context} tokens; ask for shorter responses",
            field="response_tokens",
        )
    random = np.random.default_rng(plan.seed)
    lengths = np.array([len(document) for document in documents], np.float64)
    chosen = random.choice(len(documents), plan.sequences, p=lengths / lengths.sum())
    for index, place in enumerate(chosen):
        document = documents[place]
        length = int(random.integers(MIN_PROMPT, longest + 1))
        start = 0 if index % 4 == 3 else int(random.integers(0, max(1, len(document) - length)))
        yield np.array([*prefix, *document[start : start + length]], np.int32)


def generate(
    bundle: Bundle,
    documents: Sequence[Sequence[int]],
    prefix: Sequence[int],
    plan: Plan,
    threads: int,
    reporter: Reporter,
    title: str = "generate",
) -> Sequences:
    """Lets the target of `bundle` continue prompts cut from `documents`. Raises BuildError."""
    model = bundle.manifest.model
    spec = native_spec(model, bundle.weights_path, bundle.tensors, model.context, bundle.manifest.precision.kv)
    try:
        from ull import _native

        target = _native.CpuModel(spec, threads=threads)
    except ImportError as error:
        raise BuildError("the native core is not built; install ull before training") from error
    except (ValueError, RuntimeError) as error:
        raise BuildError(f"the target cannot be run: {error}", field="target") from error
    ends = set(bundle.manifest.tokens.eos)
    rows: list[NDArray[np.int32]] = []
    prompts: list[int] = []
    seeds: list[int] = []
    with reporter.stage(title, plan.sequences * plan.response_tokens, "tokens") as advance:
        for index, prompt in enumerate(cut_prompts(documents, prefix, plan, model.context)):
            seeds.append(plan.seed * _SEED_STRIDE + index)
            sampling = {"temperature": plan.temperatures[index % len(plan.temperatures)], "seed": seeds[-1]}
            rows.append(_continue(_native, target, prompt, sampling, plan.response_tokens, ends))
            prompts.append(len(prompt))
            advance(len(rows[-1]) - len(prompt))
    cycle = np.array(plan.temperatures, np.float32)
    return Sequences(
        tokens=np.concatenate(rows),
        starts=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        prompts=np.array(prompts, np.int32),
        temperatures=cycle[np.arange(len(rows)) % len(cycle)],
        seeds=np.array(seeds, np.uint64),
    )


def _continue(
    native: Any, target: Any, prompt: NDArray[np.int32], sampling: dict[str, Any], count: int, ends: set[int]
) -> NDArray[np.int32]:
    """The prompt and up to `count` tokens after it; the token at position p is drawn by the one rule at p."""
    tokens = prompt.tolist()
    if len(prompt) > 1:
        target.prefill(prompt[:-1])
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        tokens.append(native.sample(target.decode(tokens[-1], position), position + 1, sampling))
        if tokens[-1] in ends:
            break
    return np.array(tokens, np.int32)
