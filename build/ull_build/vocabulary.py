"""tokenizer.json -> vocab.bin, the table by which the native core turns token ids into bytes without Python.

    magic "ULLVOCAB", u32 version, u32 count, u32 offsets[count + 1], u8 flags[count], bytes        (little endian)

Bit 0 of a flag marks a special token, which is never rendered as text. Ids without a token (padding rows of the
embedding) are empty and special.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ull.bundle import VOCABULARY_MAGIC, VOCABULARY_VERSION
from ull.chat_template import NAMED_TEMPLATES, find_templates
from ull.errors import CheckpointError, TokenizerError
from ull_build.checkpoint import read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
SPECIAL = 1
SUPPORTED = "supported: ByteLevel, and Replace '▁' / ByteFallback / Fuse / Strip / Metaspace as SentencePiece uses them"
_SPACE = "\u2581"  # SentencePiece's visible space

# What the byte-level check encodes: several scripts, an emoji, indentation, digits, line ends.
_SAMPLE = 'def naïve(x):\n\treturn "Grüße, мир, 世界, עולם \U0001f680"  # 3.14 …\r\n\n    for  i in  range(10): pass\n'


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]` is the token's bytes, `special[id]` whether it is never text; `count` is the highest id + 1."""

    pieces: list[bytes]
    special: list[bool]
    count: int

    def write(self, path: Path, rows: int) -> None:
        """Writes vocab.bin with one entry per row of the embedding."""
        padding = rows - self.count
        offsets = np.cumsum([0, *map(len, self.pieces), *[0] * padding]).astype("<u4")
        flags = np.array([*self.special, *[True] * padding], dtype=np.uint8) * SPECIAL
        head = VOCABULARY_MAGIC + np.array([VOCABULARY_VERSION, rows], "<u4").tobytes()
        path.write_bytes(head + offsets.tobytes() + flags.tobytes() + b"".join(self.pieces))


@dataclass(frozen=True)
class CheckpointTokenizer:
    """A checkpoint's tokenizer as the build needs it."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    has_chat_template: bool
    eos: int | None  # tokenizer_config.json's eos_token, used when the model's configuration names none

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without the tokens that the template of a sequence adds."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def sequence_prefix(self) -> list[int]:
        """The ids that the tokenizer puts in front of every sequence: nothing, or BOS."""
        plain = self.encode("a")
        ids: list[int] = self.tokenizer.encode("a", add_special_tokens=True).ids
        starts = [place for place in range(len(ids)) if ids[place : place + len(plain)] == plain]
        return ids[: starts[0]] if starts else []


def read_tokenizer(directory: Path, embedding_rows: int) -> CheckpointTokenizer:
    """Reads and checks the tokenizer of a checkpoint.

    Raises CheckpointError when it is missing, damaged, larger than the embedding or of an unsupported kind.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        hint = "; convert it with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers"
        raise CheckpointError(f"{path} is missing{hint}", field=path.name)
    description = read_json(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{path} cannot be loaded: {error}", field=path.name) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = build_vocabulary(description)
    if vocabulary.count > embedding_rows:
        raise CheckpointError(
            f"the tokenizer has {vocabulary.count} tokens, the embedding only {embedding_rows} rows; "
            "this tokenizer belongs to another checkpoint, or the embedding was not resized",
            field="tokenizer.json",
        )
    _check_round_trip(tokenizer, vocabulary, byte_level="ByteLevel" in _decoders(description))
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    try:
        templates = find_templates(directory, config)
    except TokenizerError as error:
        raise CheckpointError(f"{directory}: {error.message}", field=error.field) from error
    eos = config.get("eos_token")
    eos_text = eos.get("content") if isinstance(eos, dict) else eos
    return CheckpointTokenizer(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        has_chat_template=bool(templates),
        eos=tokenizer.token_to_id(eos_text) if isinstance(eos_text, str) else None,
    )


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copies the files of a tokenizer; returns their names."""
    target.mkdir()
    named = sorted((source / NAMED_TEMPLATES).glob("*.jinja"))
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    names += [f"{NAMED_TEMPLATES}/{path.name}" for path in named]
    if named:
        (target / NAMED_TEMPLATES).mkdir()
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def build_vocabulary(description: dict[str, Any]) -> Vocabulary:
    """The bytes of every id, from the parsed tokenizer.json. Raises CheckpointError for other kinds of decoders."""
    decoders = _decoders(description)
    try:
        entries = _entries(description)
        tokens = {identifier: _to_bytes(text, decoders) for text, identifier in entries}
        added = description.get("added_tokens") or []
        specials = {item["id"] for item in added if item["special"]}
        tokens.update({item["id"]: item["content"].encode() for item in added})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"tokenizer.json is damaged: {error!r}", field="tokenizer.json") from error
    if not tokens or any(type(identifier) is not int or identifier < 0 for identifier in tokens):
        raise CheckpointError("tokenizer.json is damaged: it has no tokens or bad ids", field="tokenizer.json")
    count = max(tokens) + 1
    if count > 1 << 28:
        raise CheckpointError(f"tokenizer.json is damaged: it has the token id {count - 1}", field="tokenizer.json")
    return Vocabulary(
        pieces=[tokens.get(identifier, b"") for identifier in range(count)],
        special=[identifier in specials or identifier not in tokens for identifier in range(count)],
        count=count,
    )


def _entries(description: dict[str, Any]) -> list[tuple[str, int]]:
    """Token text and id of the model's vocabulary: a map (BPE), or a list of [text, score] (Unigram)."""
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, list):
        return [(text, identifier) for identifier, (text, _) in enumerate(vocabulary)]
    return list(vocabulary.items())


def _decoders(description: dict[str, Any]) -> set[str]:
    """The kinds of decoders at work. Raises CheckpointError naming one that vocab.bin cannot express."""
    kinds: set[str] = set()
    for item in _parts(description.get("decoder")):
        part: dict[str, Any] = item if isinstance(item, dict) else {"type": item}
        kind = part.get("type")
        if kind == "Replace":
            expressible = part.get("pattern") == {"String": _SPACE} and part.get("content") == " "
        elif kind == "Metaspace":
            expressible = part.get("replacement") == _SPACE
        else:
            expressible = kind in ("ByteLevel", "ByteFallback", "Fuse", "Strip")
        if not expressible or not isinstance(kind, str):
            raise CheckpointError(
                f"tokenizer.json: decoder {json.dumps(part, ensure_ascii=False)} is not supported; {SUPPORTED}",
                field="decoder",
            )
        kinds.add(kind)
    if not kinds & {"ByteLevel", "Replace", "Metaspace"}:
        raise CheckpointError(f"tokenizer.json: decoder {sorted(kinds)} is not supported; {SUPPORTED}", field="decoder")
    return kinds


def _parts(decoder: Any) -> list[Any]:
    """The members of a sequence of decoders, or the one there is."""
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence" and isinstance(decoder.get("decoders"), list):
        return list(decoder["decoders"])
    return [decoder]


def _to_bytes(text: str, decoders: set[str]) -> bytes:
    """The bytes that a token of the model's vocabulary stands for."""
    if "ByteLevel" in decoders:
        codes = [_BYTE_OF.get(character) for character in text]
        known = [code for code in codes if code is not None]
        return bytes(known) if len(known) == len(codes) else text.encode()
    if "ByteFallback" in decoders and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace(_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of bytes to characters, reversed: printable Latin-1 stands for itself, the rest follows 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [code for code in range(256) if code not in printable]
    return {chr(code): code for code in printable} | {chr(256 + place): code for place, code in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _check_round_trip(tokenizer: Tokenizer, vocabulary: Vocabulary, byte_level: bool) -> None:
    """Encodes a sample and joins the bytes of its tokens: they must be the sample's (after normalisation).

    SentencePiece-like tokenizers may put a space in front and may lack characters, so only byte-level ones must agree.
    """
    if not byte_level:
        return
    normalizer = tokenizer.normalizer
    text = normalizer.normalize_str(_SAMPLE) if normalizer is not None else _SAMPLE
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(vocabulary.pieces[identifier] for identifier in ids)
    if joined.lstrip(b" ") != text.encode():
        raise CheckpointError(
            "tokenizer.json does not keep text: its tokens' bytes differ from the text that was encoded "
            f"({joined[:40]!r}...); a byte-level vocabulary with all 256 bytes is needed",
            field="tokenizer.json",
        )
