"""The text of a stream against the tokenizer's own decode, for the kinds of tokenizers that checkpoints have."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from checkpoints import tokenizer_json
from native_rig import Rig
from tokenizer_kinds import KINDS, TEXT
from ull import _native
from ull_build.source.vocabulary import Vocabulary, build_vocabulary

NAMES = [*KINDS, "tiny"]
TRUSTED_RUN = 64  # bytes: a valid run of byte tokens is held no longer
REPLACEMENT = "\ufffd"


@functools.cache
def make_tokenizer(name: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = Tokenizer.from_str(tokenizer_json()) if name == "tiny" else KINDS[name]()
    return tokenizer, build_vocabulary(tokenizer)


def write_vocabulary(folder: Path, name: str) -> str:
    """vocab.bin with rows of padding."""
    path = folder / f"{name}.bin"
    vocabulary = make_tokenizer(name)[1]
    vocabulary.write(path, vocabulary.count + 5)
    return str(path)


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


class Streams:
    """Random lists of ids of one tokenizer: uniform, of byte tokens mostly, and real text with ids changed."""

    def __init__(self, name: str, seed: int) -> None:
        self.tokenizer, self.vocabulary = make_tokenizer(name)
        self._random = random.Random(seed)
        self._special = [token for token, special in enumerate(self.vocabulary.special) if special] + [1 << 20]
        parts = [token for token, piece in enumerate(self.vocabulary.pieces) if piece and is_part(piece)]
        self._parts = sorted({*parts, *self.vocabulary.byte_tokens}) or list(range(self.vocabulary.count))
        self._texts = ["".join(self._random.sample("".join(TEXT), 40)) for _ in range(20)] + TEXT[:3]

    def next(self) -> list[int]:
        ids = self._random.choice([self._uniform, self._bytes, self._characters, self._mutated])()
        for _ in range(self._random.choice([0, 0, 1, 3])):
            ids.insert(self._random.randint(0, len(ids)), self._random.choice(self._special))
        return ids

    def rounds(self, ids: list[int]) -> list[list[int]]:
        cuts = sorted(self._random.choices(range(len(ids) + 1), k=self._random.choice([0, 3, len(ids)])))
        return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]

    def _uniform(self) -> list[int]:
        return [self._random.randrange(self.vocabulary.count + 5) for _ in range(self._random.randint(0, 40))]

    def _bytes(self) -> list[int]:
        ids = [self._random.choice(self._parts) for _ in range(self._random.randint(1, 12))]
        return ids if self._random.random() < 0.3 else self._uniform()[:4] + ids + self._uniform()[:4]

    def _characters(self) -> list[int]:
        """Characters from byte tokens or parts, cut short now and then."""
        text = "".join(self._random.choices("aé€😀\n ▁中", k=self._random.randint(1, 8)))
        alone = {self.vocabulary.pieces[token]: token for token in self._parts}
        ids = [alone[piece] for byte in text.encode() if (piece := bytes([byte])) in alone]
        return self._uniform()[:3] + ids[: self._random.randint(0, len(ids))] + self._uniform()[:3]

    def _mutated(self) -> list[int]:
        ids = list(self.tokenizer.encode(self._random.choice(self._texts), add_special_tokens=False).ids)[:80]
        for _ in range(self._random.choice([0, 1, 4])):
            ids[self._random.randrange(len(ids))] = self._random.choice(self._parts)
        return ids

    def longest_run(self, ids: list[int]) -> int:
        kept = [token for token in ids if token < self.vocabulary.count and not self.vocabulary.special[token]]
        groups = itertools.groupby(kept, self.vocabulary.byte_tokens.__contains__)
        return max((len(list(group)) for is_run, group in groups if is_run), default=0)


def is_part(piece: bytes) -> bool:
    """Whether a piece is not whole characters."""
    return REPLACEMENT in piece.decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_random_streams_are_what_decode_gives(tmp_path: Path, name: str) -> None:
    path = write_vocabulary(tmp_path, name)
    vocabulary = _native.Vocabulary(path)
    streams = Streams(name, seed=1)
    assert vocabulary.size == streams.vocabulary.count + 5
    compared = broken = 0
    for number in range(3000):
        ids = streams.next()
        if streams.longest_run(ids) >= TRUSTED_RUN:
            continue
        expected = decode(streams.tokenizer, ids)
        assert vocabulary.text(ids) == expected, ids
        compared += 1
        broken += REPLACEMENT in expected
        if number % 3 == 0:
            detokenizer = _native.Detokenizer(path)
            shown = ""
            for tokens in streams.rounds(ids):
                shown += detokenizer.feed(tokens)
                assert expected.startswith(shown), ids  # nothing is ever taken back
            assert shown + detokenizer.finish() == expected, ids
    assert compared > 2900
    assert broken > (500 if name != "metaspace" else -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_completion_goes_on_behind_its_prompt(tmp_path: Path, name: str) -> None:
    path = write_vocabulary(tmp_path, name)
    tokenizer, vocabulary = make_tokenizer(name)
    checked = 0
    for text in TEXT[:3]:
        ids = tokenizer.encode(f" {text}", add_special_tokens=False).ids[:60]
        for cut in range(len(ids) + 1):
            prompt, completion = ids[:cut], ids[cut:]
            in_a_run = vocabulary.byte_tokens.issuperset([*prompt[-1:], *completion[:1]])
            before = decode(tokenizer, prompt)
            if (prompt and completion and in_a_run) or before.endswith(REPLACEMENT):
                continue
            stream = _native.Detokenizer(path, prompt=[1 << 20, *prompt])
            assert before + stream.feed(completion) + stream.finish() == decode(tokenizer, ids)
            checked += 1
    assert checked > 60


def test_the_space_in_front_is_lost_only_where_a_text_begins(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path, "llama2")
    tokenizer, _ = make_tokenizer("llama2")
    begin = tokenizer.token_to_id("<s>")
    fox = tokenizer.encode("fox", add_special_tokens=False).ids  # the normaliser puts a space in front
    assert _native.Vocabulary(path).text([begin, *fox]) == "fox"
    for prompt, expected in [([], "fox"), ([begin], "fox"), ([begin, *fox], " fox")]:
        stream = _native.Detokenizer(path, prompt=prompt)
        assert stream.feed(fox) + stream.finish() == expected


def text_until(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that ends first, of those the longest; None if there is none."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else None


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(tmp_path: Path, name: str) -> None:
    path = write_vocabulary(tmp_path, name)
    streams = Streams(name, seed=2)
    draw = random.Random(3)
    ended = 0
    for _ in range(400):
        ids = streams.next()[:40]
        characters = decode(streams.tokenizer, ids).replace(REPLACEMENT, "") + "\nz"
        stops = [characters[at : at + draw.randint(1, 4)] for at in draw.choices(range(len(characters)), k=2)]
        detokenizer = _native.Detokenizer(path, stops)
        shown = ""
        for count in range(1, len(ids) + 1):
            shown += detokenizer.feed([ids[count - 1]])
            expected = text_until(decode(streams.tokenizer, ids[:count]), stops)
            assert detokenizer.stopped == (expected is not None), (ids[:count], stops)
            if expected is not None:
                assert shown == expected, (ids[:count], stops)
                ended += 1
                break
        else:
            assert shown + detokenizer.finish() == decode(streams.tokenizer, ids)
    assert ended > 100


def test_a_long_run_is_released_and_then_decided_by_characters(tmp_path: Path) -> None:
    vocabulary = _native.Vocabulary(write_vocabulary(tmp_path, "llama2"))
    tokenizer, _ = make_tokenizer("llama2")

    def run(data: bytes) -> list[int]:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]

    euros = "€" * 21  # 63 bytes
    assert vocabulary.text(run(euros.encode() + b"\xff")) == decode(tokenizer, run(euros.encode() + b"\xff"))
    assert vocabulary.text(run(euros.encode() + b"a\xff")) == euros + "a" + REPLACEMENT
    assert vocabulary.text(run(euros.encode() + b"a\xe2\x82b\xc3\xa9")) == euros + "a" + REPLACEMENT * 5
    valid = "мир 世界 🚀\n" * 20
    assert vocabulary.text(run(valid.encode())) == decode(tokenizer, run(valid.encode())) == valid
    stream = _native.Detokenizer(write_vocabulary(tmp_path, "llama2"))
    held = 0
    for token in run(valid.encode()):
        held = held + 1 - len(stream.feed([token]).encode())
        assert held < TRUSTED_RUN + 3


def test_engine_and_io_thread_agree_on_runs_of_byte_tokens(tmp_path: Path) -> None:
    path = Path(write_vocabulary(tmp_path, "llama2"))
    tokenizer, vocabulary = make_tokenizer("llama2")
    begin = tokenizer.token_to_id("<s>")
    ids = tokenizer.encode("fox 🚀", add_special_tokens=False).ids
    line_end = len(ids)
    ids += [tokenizer.token_to_id("<0x0A>"), *ids[:2]]
    text = decode(tokenizer, ids)
    rocket = ids.index(tokenizer.token_to_id("<0xF0>"))
    script = {"tokens": [begin, *ids], "vocabulary": vocabulary.count + 5}  # the token at each position
    with Rig(tmp_path, script, vocabulary=path) as rig:
        client = rig.client(b"client")
        stopped, whole, cut, behind = {"stop": [b"\n"]}, {}, {"max_tokens": rocket + 2}, {"max_tokens": len(ids) - 1}
        prompts = [[begin], [begin], [begin], [begin, ids[0]]]
        texts, counts = [], []
        for request_id, params in enumerate([stopped, whole, cut, behind]):
            rig.engine.submit(
                client.identity,
                request_id,
                np.array(prompts[request_id], np.int32),
                {"max_tokens": len(ids)} | params,
            )
            frames, done = client.finish(request_id)
            texts.append("".join(frame["text"] for frame in frames))
            counts.append((done["finish_reason"], done["usage"]["completion_tokens"]))
    assert texts == ["fox 🚀", text, "fox " + REPLACEMENT * 2, text.removeprefix(decode(tokenizer, ids[:1]))]
    assert counts == [("stop", line_end + 1), ("length", len(ids)), ("length", rocket + 2), ("length", len(ids) - 1)]


def test_ids_that_no_token_has_are_no_text(tmp_path: Path) -> None:
    vocabulary = _native.Vocabulary(write_vocabulary(tmp_path, "tiny"))
    assert vocabulary.text([-1, 1 << 30, 2**31 - 1, -(2**31)]) == ""
    assert vocabulary.text([]) == ""
    with pytest.raises(TypeError):
        vocabulary.text([1 << 31])
    with pytest.raises(RuntimeError, match=r"gone\.bin: cannot be opened"):
        _native.Vocabulary(str(tmp_path / "gone.bin"))
