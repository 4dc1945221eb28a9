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
from ull_build.build import Settings, build
from ull_build.vocabulary import build_vocabulary, read_tokenizer


def make_bundle(directory: Path, checkpoint: Path) -> Bundle:
    settings = Settings(model=checkpoint, output=directory / "x.ull", name="x", evaluate=False)
    return open_bundle(build(settings).path)


def vocabulary_table(path: Path) -> tuple[list[bytes], list[int]]:
    """Parses vocab.bin as its documentation says."""
    data = path.read_bytes()
    assert data[:8] == b"ULLVOCAB"
    version, count = np.frombuffer(data, "<u4", 2, 8).tolist()
    assert version == 1
    offsets = np.frombuffer(data, "<u4", count + 1, 16).tolist()
    flags = np.frombuffer(data, np.uint8, count, 16 + 4 * (count + 1)).tolist()
    body = data[16 + 4 * (count + 1) + count :]
    return [body[start:end] for start, end in itertools.pairwise(offsets)], flags


TEXTS = ["def f(x):\n\treturn x  # ½ naïve\r\n", "мир 世界 🚀 עולם", "\x00\x7f\u00a0\u2028", " leading", ""]


def test_vocabulary_of_a_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, write_checkpoint(tmp_path / "m"))
    pieces, flags = vocabulary_table(bundle.vocabulary_path)
    assert len(pieces) == 330
    assert [index for index, flag in enumerate(flags) if flag] == [0, 1, 2, *range(320, 330)]
    assert pieces[:3] == [b"<|bos|>", b"<|eos|>", b"<|end|>"] and not any(pieces[320:])
    tokenizer = read_tokenizer(bundle.tokenizer_directory, 330)
    for text in TEXTS:
        assert b"".join(pieces[token] for token in tokenizer.encode(text)) == text.encode()
    assert tokenizer.sequence_prefix() == [BOS]


@settings(deadline=None)
@given(text=st.text())
def test_any_text_round_trips(text: str) -> None:
    description = json.loads(tokenizer_json())
    vocabulary = build_vocabulary(description)
    ids = Tokenizer.from_str(tokenizer_json()).encode(text, add_special_tokens=False).ids
    assert b"".join(vocabulary.pieces[token] for token in ids) == text.encode()


def sentencepiece(*decoders: dict[str, Any]) -> dict[str, Any]:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0x0A>": 2, "<0xE4>": 3, "é▁": 4, "<0xZZ>": 5}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "decoder": {"type": "Sequence", "decoders": list(decoders)},
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True, **added},
            {"id": 7, "content": "<tool>", "special": False, **added},
        ],
    }


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def test_sentencepiece_vocabulary() -> None:
    description = sentencepiece(REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP)
    description["model"]["vocab"].pop("<0xZZ>")
    vocabulary = build_vocabulary(description)
    assert vocabulary.pieces == [b"<unk>", b" the", b"\n", b"\xe4", "é ".encode(), b"", b"", b"<tool>"]
    assert vocabulary.special == [True, False, False, False, False, True, True, False]
    unigram = {**description, "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁the", -1.5]]}}
    assert build_vocabulary(unigram).pieces[:2] == [b"<unk>", b" the"]
    metaspace = {**description, "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}
    assert build_vocabulary(metaspace).pieces[1:3] == [b" the", b"<0x0A>"]


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({"type": "WordPiece", "prefix": "##"}, "WordPiece"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "CTC"}]}, "CTC"),
        ({"type": "Sequence", "decoders": [{**REPLACE, "content": "_"}]}, "Replace"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, "Fuse"),
        ({"type": "Sequence", "decoders": ["Fuse"]}, "Fuse"),
        (None, "null"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"{words}.* is not supported; supported: ByteLevel") as caught:
        build_vocabulary({**sentencepiece(), "decoder": decoder})
    assert caught.value.field == "decoder"


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"vocab": None}},
        {"model": {}},
        {"model": {"vocab": {}}, "added_tokens": []},
        {"model": {"vocab": {"a": "b"}}},
        {"model": {"vocab": {"a": 1 << 40}}},
        {"added_tokens": [{"id": 3}]},
        {"added_tokens": {"id": 3}},
    ],
)
def test_damaged_vocabularies(damage: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged"):
        build_vocabulary({**sentencepiece(REPLACE), **damage})


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
