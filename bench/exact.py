"""What an answer in a given form costs: grammars beside free text on a model of fixed speed, labels beside rounds.

The grammars run over a vocabulary of 128k tokens, on a scripted executor whose round takes 2 ms: it "wants" to write an
answer that the schema allows (as a model that knows the task does), or every tenth token another one. Requests with and
without the grammar take turns on one engine. A request that asks for log-probabilities has no forced tokens: each of
its tokens is a round, so that what the grammar adds to a round shows. Labels run on the tiny engine.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import zmq

import ull
from report import ROOT, Check, arguments, finish, percentiles
from schemas import EXAMPLES, Example, random_schema
from serving import serve, tiny_bundle
from ull import _native, wire
from ull.daemon.grammars import library_path, source_of
from ull.libzmq import loaded_libzmq
from ull_build.source.vocabulary import Vocabulary, build_vocabulary, load_tokenizer

TITLE = "exact answers"
ROUND_NS = 2_000_000
LARGE = 128_256  # tokens of the vocabulary
EOS = 1
PROMPT = [300, 301, 302]
RUNS = 4  # of each schema, with and without its grammar
SWERVE = 10  # of so many tokens one is not what the schema allows
LABELS = 20
LABEL_RUNS = 200
FAMILY = [
    f"{verb}{what}"
    for verb in ("read", "write", "open", "close")
    for what in ("", " file", " line", " all files", " the data")
]
WARM = 500  # tokens of the prompt before the labels
SCHEMAS = 1000
DRAFTERS = ("none", "suffix", "medusa", "eagle", "dflash", "draft", "auto")
Samples = dict[str, dict[str, float]]


def large_vocabulary(folder: Path) -> tuple[Path, dict[bytes, int]]:
    """vocab.bin of the tiny engine's tokens and of made-up words, and the ids of its texts."""
    tiny = build_vocabulary(load_tokenizer(ROOT / "engines/tiny/tokenizer.json"))
    pieces, special = list(tiny.pieces), list(tiny.special)
    words = [piece for piece in pieces if piece.isalpha()]
    known = set(pieces)
    chance = random.Random(5)
    while len(pieces) < LARGE:
        piece = chance.choice((b"", b" ")) + chance.choice(words) + chance.choice(words)
        if piece not in known:
            known.add(piece)
            pieces.append(piece)
            special.append(False)
    path = folder / "vocab.bin"
    Vocabulary(pieces, special, len(pieces)).write(path, len(pieces))
    return path, {piece: token for token, piece in enumerate(pieces) if piece and not special[token]}


def tokens_of(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """The longest tokens, one after the other: as forced texts are tokenized."""
    longest = max(map(len, ids))
    tokens = []
    while text:
        size = next(size for size in range(min(longest, len(text)), 0, -1) if text[:size] in ids)
        tokens.append(ids[text[:size]])
        text = text[size:]
    return tokens


def compiled(grammars: _native.Grammars, example: Example) -> _native.CompiledGrammar:
    """The grammar of a request for an example's schema."""
    source = source_of(wire.Generate(id=0, json_schema=example.schema), 1 << 20)
    assert source is not None
    return grammars.compile(source.kind, source.text)


class Bench:
    """An engine on a scripted executor, and the least of a control plane: `generate` says what the engine is given."""

    def __init__(self, vocabulary: Path, script: list[int], socket: Path) -> None:
        executor = _native.ScriptedExecutor(
            script, vocabulary=LARGE, context=4096, pages=80, round_ns=ROUND_NS, forced_tokens=63
        )
        self._engine = _native.Engine(executor, str(vocabulary), queue_depth=1, prefix_cache=False)
        self._engine.start()
        self._context = zmq.Context()
        url = f"ipc://{socket}"
        self._io = _native.Io(self._engine, zmq_context=self._context.underlying, libzmq=loaded_libzmq(), listen=[url])
        self._io.start()
        self._params: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._submit_all)
        self._thread.start()
        self._client = ull.Client(url)

    def _submit_all(self) -> None:
        with self._context.socket(zmq.PAIR) as control:
            control.connect("inproc://ull-control")
            while not self._over.is_set():
                if not control.poll(20):
                    continue
                kind, *rest = control.recv_multipart()
                request = wire.decode_request(rest[1]) if kind == b"R" else None
                if isinstance(request, wire.Generate):
                    ids = np.array(request.token_ids, np.int32)
                    self._engine.submit(rest[0], request.id, ids, {"seed": 0, **self._params})

    def generate(self, **params: Any) -> ull.Result:
        """One request's result; `params` are the engine's."""
        self._params = params
        return self._client.generate(PROMPT).result()

    def close(self) -> None:
        self._client.close()
        self._over.set()
        self._thread.join()
        self._engine.stop()
        self._io.stop()
        self._context.destroy(0)


@contextlib.contextmanager
def bench_of(vocabulary: Path, script: list[int], folder: Path) -> Iterator[Bench]:
    bench = Bench(vocabulary, script, folder / f"{time.monotonic_ns()}.sock")
    try:
        yield bench
    finally:
        bench.close()


def gap_us(result: ull.Result) -> float:
    """Microseconds from token to token, by the engine's own clock."""
    times = result.timeline
    return (times.last_token_ns - times.first_token_ns) / 1e3 / (result.usage.completion_tokens - 1)


def structured(samples: Samples) -> list[Check]:
    """What a grammar adds to the time between two tokens, and what it saves of an answer's."""
    free, bound, swerving, answers = [], [], [], []
    masks = tokens = 0
    with tempfile.TemporaryDirectory(prefix="ull-bench-") as name:
        folder = Path(name)
        vocabulary, ids = large_vocabulary(folder)
        grammars = _native.Grammars(library_path(), str(vocabulary), [EOS])
        for example in EXAMPLES:
            answer = tokens_of(json.dumps(example.answer, ensure_ascii=False).encode(), ids)
            grammar = compiled(grammars, example)
            wanted = [*PROMPT, *answer, EOS]
            swerve = [
                ids[b" the"] if place >= len(PROMPT) and (place - len(PROMPT)) % SWERVE == SWERVE - 1 else token
                for place, token in enumerate(wanted)
            ]
            limits = {"max_tokens": len(answer), "logprobs": 0}
            with bench_of(vocabulary, wanted, folder) as bench:
                for _ in range(RUNS):
                    free.append(gap_us(bench.generate(**limits)))
                    bound.append(gap_us(bench.generate(grammar=grammar, **limits)))
                    plain = bench.generate(max_tokens=len(answer))
                    forced = bench.generate(grammar=grammar, max_tokens=len(answer))
                    assert forced.token_ids == plain.token_ids == answer, example
                    answers.append(seconds(forced) / seconds(plain))
            with bench_of(vocabulary, swerve, folder) as bench:
                for _ in range(RUNS):
                    result = bench.generate(grammar=grammar, **limits)
                    assert result.grammar is not None
                    swerving.append(gap_us(result))
                    masks += result.grammar.masks
                    tokens += result.usage.completion_tokens
    samples |= {
        "token to token, free (us)": percentiles(free),
        "token to token, schema (us)": percentiles(bound),
        "token to token, schema, one winner in ten refused (us)": percentiles(swerving),
        "answer with forced tokens, of the free one's time": percentiles(answers),
    }
    base = float(np.median(free))
    return [
        Check("structured decoding, added to ITL", 100 * (float(np.median(bound)) / base - 1), "%", 5, 1),
        Check("the same, one winner in ten refused", 100 * (float(np.median(swerving)) / base - 1), "%", 5, 1),
        Check("masks per 100 tokens of those", 100 * masks / tokens, ""),
        Check("an answer with forced tokens, of a free one", float(np.median(answers)), "x"),
    ]


def seconds(result: ull.Result) -> float:
    """From the engine's start to the last token."""
    return (result.timeline.last_token_ns - result.timeline.started_ns) / 1e9


def step_costs(samples: Samples) -> list[Check]:
    """What one call of a matcher takes on the vocabulary of 128k, over random answers to the thirty schemas."""
    times: dict[str, list[float]] = {"take": [], "forced": [], "mask": []}
    chance = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="ull-bench-") as name:
        vocabulary, _ = large_vocabulary(Path(name))
        grammars = _native.Grammars(library_path(), str(vocabulary), [EOS])
        for example in EXAMPLES * RUNS:
            matcher = compiled(grammars, example).matcher()
            for _ in range(100):
                if matcher.complete:
                    break
                forced = timed(times["forced"], lambda matcher=matcher: matcher.forced(64))
                mask = timed(times["mask"], lambda matcher=matcher: matcher.mask(LARGE))
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                token = forced[0] if forced else int(chance.choice(allowed))
                assert timed(times["take"], lambda matcher=matcher, token=token: matcher.take(token))
    samples |= {f"{name} (us)": percentiles(values) for name, values in times.items()}
    worst = float(np.percentile(times["mask"], 99)) / 1e3
    return [Check("a mask, p99", worst, "ms", 1.0, 0.2)]


def timed(into: list[float], action: Any) -> Any:
    """What `action` returns; its microseconds go into the list."""
    started = time.perf_counter_ns()
    value = action()
    into.append((time.perf_counter_ns() - started) / 1e3)
    return value


def labels(samples: Samples) -> list[Check]:
    """Twenty labels on a warm prompt, beside as many plain rounds as their tree has levels: a family, and any words."""
    chance = random.Random(9)
    checks = []
    with serve(tiny_bundle()) as daemon, ull.Client(daemon.url) as client:

        def size(name: str) -> int:
            return len(client.tokenize(name, add_special_tokens=False))

        words = [client.detokenize(chance.choices(range(300, 1500), k=1 + place % 4)) for place in range(200)]
        unlike = [name for name in dict.fromkeys(words) if 1 <= size(name) <= 4][:LABELS]
        for kind, choices in (("that share beginnings", FAMILY), ("of unlike words", unlike)):
            levels = max(map(size, choices))
            assert len(choices) == LABELS and levels <= 4
            prompt = chance.choices(range(300, 1500), k=WARM)
            client.prewarm(prompt)
            scored, rounds, nodes = [], [], 0
            for _ in range(LABEL_RUNS):
                result = client.generate(prompt, choices=choices).result()
                nodes = result.usage.scored_tokens
                scored.append((result.timeline.first_token_ns - result.timeline.started_ns) / 1e3)
                rounds.append(gap_us(client.generate(prompt, max_tokens=8, ignore_eos=True, speculate="none").result()))
            samples |= {
                f"labels {kind} (us)": percentiles(scored),
                f"plain rounds beside labels {kind} (us)": percentiles(rounds),
            }
            ratio = float(np.median(scored)) / (float(np.median(rounds)) * levels)
            checks.append(
                Check(f"20 labels {kind}, {nodes} nodes, of one round per level ({levels})", ratio, "x", 2.0, 1.2)
            )
    return checks


def validity(schemas: int) -> list[Check]:
    """Answers to random schemas, with every drafter: each is the same as the others', and is what its schema says."""
    chance = random.Random(11)
    valid = same = answers = 0
    with serve(tiny_bundle()) as daemon, ull.Client(daemon.url) as client:
        for number in range(schemas):
            schema = random_schema(chance)
            options = {"temperature": 1.0, "seed": number, "top_p": 0.95} if number % 2 else {}
            texts = []
            for drafter in DRAFTERS:
                result = client.generate(
                    f"Record {number}:", json_schema=schema, max_tokens=900, speculate=drafter, **options
                ).result()
                texts.append(result.text)
                answers += 1
                with contextlib.suppress(ValueError, jsonschema.ValidationError):
                    jsonschema.validate(json.loads(result.text), schema)
                    valid += 1
            same += sum(text == texts[0] for text in texts)
    return [
        Check("answers to random schemas", answers, ""),
        Check("of them not valid", answers - valid, "", must=0),
        Check("of them other than without a drafter", answers - same, "", must=0),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--schemas", type=int, default=SCHEMAS, help="random schemas (default: %(default)s)")
    options = parser.parse_args()
    samples: Samples = {}
    checks = [*structured(samples), *step_costs(samples), *labels(samples), *validity(options.schemas)]
    finish(TITLE, samples, checks, options.json)


if __name__ == "__main__":
    main()
