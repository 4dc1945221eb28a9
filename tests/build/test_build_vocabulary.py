"""tokenizer.json -> vocab.bin: the bytes of every token, for each kind of tokenizer, or a refusal by name."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints import BOS, tokenizer_json, write_checkpoint, write_json
from ull.bundle import Bundle, open_bundle
from ull.errors import CheckpointError
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.vocabulary import Vocabulary, build_vocabulary, read_tokenizer


def make_bundle(directory: Path, checkpoint: Path) -> Bundle:
    settings = Settings(model=checkpoint, output=directory / "x.ull", name="x", evaluate=False)
    return open_bundle(build(settings).path)


def vocabulary_table(path: Path) -> tuple[list[bytes], list[int], int]:
    """Parses vocab.bin as its documentation says."""
    data = path.read_bytes()
    assert data[:8] == b"ULLVOCAB"
    version, count, leading_spaces = np.frombuffer(data, "<u4", 3, 8).tolist()
    assert version == 2
    offsets = np.frombuffer(data, "<u4", count + 1, 20).tolist()
    flags = np.frombuffer(data, np.uint8, count, 20 + 4 * (count + 1)).tolist()
    body = data[20 + 4 * (count + 1) + count :]
    return [body[start:end] for start, end in itertools.pairwise(offsets)], flags, leading_spaces


TEXTS = ["def f(x):\n\treturn x  # ½ naïve\r\n", "мир 世界 🚀 עולם", "\x00\x7f\u00a0\u2028", " leading", ""]


def test_vocabulary_of_a_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, write_checkpoint(tmp_path / "m"))
    pieces, flags, leading_spaces = vocabulary_table(bundle.vocabulary_path)
    assert len(pieces) == 330 and leading_spaces == 0
    assert [index for index, flag in enumerate(flags) if flag] == [0, 1, 2, *range(320, 330)]
    assert pieces[:3] == [b"<|bos|>", b"<|eos|>", b"<|end|>"] and not any(pieces[320:])
    tokenizer = read_tokenizer(bundle.tokenizer_directory, 330)
    for text in TEXTS:
        assert b"".join(pieces[token] for token in tokenizer.encode(text)) == text.encode()
    assert tokenizer.sequence_prefix() == [BOS]


@settings(deadline=None)
@given(text=st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json())
    vocabulary = build_vocabulary(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(vocabulary.pieces[token] for token in ids) == text.encode()


def sentencepiece(decoder: Any, **changes: Any) -> dict[str, Any]:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0x0A>": 2, "<0xE4>": 3, "é▁": 4, "<0x+5>": 5, "<0xGG>": 6, "": 7}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description: dict[str, Any] = {
        "version": "1.0",
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocabulary, "merges": []},
        "decoder": decoder,
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True, **added},
            {"id": 8, "content": "<tool>", "special": False, **added},
        ],
    }
    return {**description, **changes}


def vocabulary_of(description: dict[str, Any]) -> Vocabulary:
    return build_vocabulary(Tokenizer.from_str(json.dumps(description)))


def sequence(*decoders: Any) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(decoders)}


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK = {"type": "ByteFallback"}
FUSE = {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(sentencepiece(sequence(REPLACE, FALLBACK, FUSE, STRIP)))
    texts = [b"<unk>", b" the", b"\n", b"\xe4", "é ".encode(), b"\x05", b"<0xGG>", b"", b"<tool>"]
    assert vocabulary.pieces == texts
    assert vocabulary.special == [True] + [False] * 8
    assert vocabulary.byte_tokens == {2, 3, 5}
    assert vocabulary.leading_spaces == 1
    vocabulary.write(tmp_path / "vocab.bin", 10)
    assert vocabulary_table(tmp_path / "vocab.bin") == ([*texts, b""], [1, 0, 2, 2, 0, 2, 0, 0, 0, 1], 1)


def test_vocabularies_of_other_sentencepiece_decoders() -> None:
    gemma = vocabulary_of(sentencepiece(sequence(REPLACE, FALLBACK, FUSE)))
    assert gemma.byte_tokens == {2, 3, 5} and gemma.leading_spaces == 0
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁the", -1.5]], "byte_fallback": False}
    unigram = sentencepiece(METASPACE, model=model, added_tokens=[])
    assert vocabulary_of(unigram).pieces == [b"<unk>", b" the"]
    assert vocabulary_of(unigram).leading_spaces == 0xFFFF_FFFF
    never = vocabulary_of(sentencepiece({**METASPACE, "prepend_scheme": "never"}))
    assert never.leading_spaces == 0 and never.pieces[2] == b"<0x0A>" and not never.byte_tokens
    with pytest.raises(CheckpointError, match="Metaspace with the token 'é▁'"):
        vocabulary_of(sentencepiece(METASPACE))


def test_what_a_normaliser_makes_of_added_tokens() -> None:
    """Its text is what decode() shows of it; a token marked as special is never text."""
    prepend = {"type": "Prepend", "prepend": "▁"}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    description = sentencepiece(
        sequence(REPLACE, FALLBACK, FUSE),
        normalizer=prepend,
        added_tokens=[
            {"id": 8, "content": "<tool>", "special": False, **added},
            {"id": 9, "content": "</s>", "special": True, **added},
        ],
    )
    tokenizer = Tokenizer.from_str(json.dumps(description))
    vocabulary = build_vocabulary(tokenizer)
    assert vocabulary.pieces[8].decode() == tokenizer.decode([8])
    assert vocabulary.special[9]
    assert tokenizer.decode([1, 8]) == " the" + vocabulary.pieces[8].decode()  # its decoder is what it was


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        (sequence(REPLACE, {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True}), "CTC"),
        (sequence({**REPLACE, "content": "_"}), "Replace"),
        (sequence({**REPLACE, "pattern": {"Regex": "▁"}}), "Replace"),
        (sequence(FUSE), "Fuse"),
        (sequence(), "null"),
        (None, "null"),
        (sequence(FALLBACK, METASPACE), "Metaspace.* behind ByteFallback"),
        (sequence(METASPACE, FALLBACK), "ByteFallback.* behind Metaspace"),
        (sequence(REPLACE, STRIP), "Strip.* behind Replace"),
        (sequence(REPLACE, FUSE, {**STRIP, "stop": 1}), "Strip"),
        (sequence(REPLACE, FUSE, {**STRIP, "content": "x"}), "Strip"),
        (sequence(REPLACE, FUSE, STRIP, STRIP), "Strip.* behind Strip"),
        (sequence(METASPACE, FUSE, STRIP), "Strip"),
        (sequence(FALLBACK, BYTE_LEVEL), "ByteLevel.* behind ByteFallback"),
        ({**METASPACE, "replacement": "_"}, "Metaspace"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"{words}.* is not supported; supported: ByteLevel") as caught:
        vocabulary_of(sentencepiece(decoder))
    assert caught.value.field == "decoder"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"model": {"vocab": None}}, "cannot be loaded"),
        ({"model": {}}, "cannot be loaded"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "is damaged: it has no tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 24}, "merges": []}}, "is damaged: it has the token id 16777216"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}, "cannot be loaded"),
        ({"added_tokens": [{"id": 3}]}, "cannot be loaded"),
        ({"added_tokens": {"id": 3}}, "cannot be loaded"),
        ({"decoder": sequence("Fuse")}, "cannot be loaded"),
    ],
)
def test_damaged_vocabularies(tmp_path: Path, damage: dict[str, Any], words: str) -> None:
    write_json(tmp_path / "tokenizer.json", {**sentencepiece(REPLACE), **damage})
    with pytest.raises(CheckpointError, match=f"tokenizer.json {words}"):
        read_tokenizer(tmp_path, 400)


def test_a_byte_level_tokenizer_that_loses_bytes(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m")
    description = json.loads((directory / "tokenizer.json").read_text())
    for character in ("Ð", "ð"):
        description["model"]["vocab"].pop(character)
    kept = [merge for merge in description["model"]["merges"] if not {"Ð", "ð"} & set("".join(merge))]
    description["model"]["merges"] = kept
    write_json(directory / "tokenizer.json", description)
    with pytest.raises(CheckpointError, match="does not keep text"):
        read_tokenizer(directory, 330)


def test_chat_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    write_json(checkpoint / "tokenizer_config.json", config)
    (checkpoint / "chat_template.jinja").write_text(template)
    bundle = make_bundle(tmp_path, checkpoint)
    assert bundle.manifest.tokens.chat_template
    assert (bundle.tokenizer_directory / "chat_template.jinja").read_text() == template
