"""tokenizer.json -> vocab.bin, the table by which the native core turns token ids into text without Python.

    magic "ULLVOCAB", u32 version, u32 count, u32 leading_spaces, u32 offsets[count + 1], u8 flags[count], bytes
                                                                                                      (little endian)

Bit 0 of a flag marks a special token, which is never rendered as text. Ids without a token (padding rows of the
embedding) are empty and special. Bit 1 marks a byte token of a SentencePiece vocabulary, like <0xE2>. `leading_spaces`
is how many spaces a text loses at its beginning at most; 0xFFFFFFFF: all those of its first token.

The rule: the text of a list of ids is `Tokenizer.decode(ids, skip_special_tokens=True)` of the tokenizers library.

- Byte-level vocabularies (decoder ByteLevel): the tokens' bytes are joined; each maximal invalid subpart is a U+FFFD.
- SentencePiece vocabularies (decoders Replace, ByteFallback, Fuse, Strip; or Metaspace): a run of byte tokens is text
  if all of it is valid UTF-8, else every byte of it is a U+FFFD. Special tokens do not end a run.
- A completion goes on behind its prompt: its text is decode(prompt + completion) without decode(prompt), so it keeps
  the leading space unless no token of the prompt has text. Its first run of bytes is judged without the prompt's.

Where the core differs from decode() on purpose: a run that has been valid for 64 bytes is released and from then on
decided character by character, because a stream cannot wait for its end; a token that tokenizer.json marks as special
is never text (tokenizers 0.23 shows those that its normaliser changes); `clean_up_tokenization_spaces` of transformers
is not applied, because it changes the text. All other decoders are refused by name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders

from ull.bundle import VOCABULARY_MAGIC, VOCABULARY_VERSION
from ull.errors import CheckpointError, TokenizerError
from ull.text.chat_template import NAMED_TEMPLATES, find_templates
from ull_build.source.files import read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
SPECIAL = 1
BYTE_TOKEN = 2
SUPPORTED = (
    "supported: ByteLevel, or those of SentencePiece in this order: Replace '▁' or Metaspace, ByteFallback, Fuse, "
    "Strip ' ' at the start"
)
_FIRST_TOKENS_SPACES = 0xFFFF_FFFF
_MOST_TOKENS = 1 << 24
_SPACE = "\u2581"  # SentencePiece's visible space

# What the byte-level check encodes: several scripts, an emoji, indentation, digits, line ends.
_SAMPLE = 'def naïve(x):\n\treturn "Grüße, мир, 世界, עולם \U0001f680"  # 3.14 …\r\n\n    for  i in  range(10): pass\n'


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]` is the token's bytes, `special[id]` whether it is never text; `count` is the highest id + 1.

    `byte_tokens` are the ids whose one byte is part of a run, `leading_spaces` is vocab.bin's.
    """

    pieces: list[bytes]
    special: list[bool]
    count: int
    byte_tokens: frozenset[int] = frozenset()
    leading_spaces: int = 0

    def write(self, path: Path, rows: int) -> None:
        """Writes vocab.bin with one entry per row of the embedding."""
        padding = rows - self.count
        offsets = np.cumsum([0, *map(len, self.pieces), *[0] * padding]).astype("<u4")
        flags = np.array([*self.special, *[True] * padding], dtype=np.uint8) * SPECIAL
        flags[list(self.byte_tokens)] |= BYTE_TOKEN
        head = VOCABULARY_MAGIC + np.array([VOCABULARY_VERSION, rows, self.leading_spaces], "<u4").tobytes()
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
    tokenizer = load_tokenizer(path)
    vocabulary = build_vocabulary(tokenizer)
    if vocabulary.count > embedding_rows:
        raise CheckpointError(
            f"the tokenizer has {vocabulary.count} tokens, the embedding only {embedding_rows} rows; "
            "this tokenizer belongs to another checkpoint, or the embedding was not resized",
            field="tokenizer.json",
        )
    _check_round_trip(tokenizer, vocabulary, byte_level=read_decoder(tokenizer).byte_level)
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


def tokenizer_files(directory: Path) -> list[str]:
    """The names of the tokenizer's files that a checkpoint has."""
    named = sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
    names = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    return names + [f"{NAMED_TEMPLATES}/{path.name}" for path in named]


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copies the files of a tokenizer; returns their names."""
    target.mkdir()
    names = tokenizer_files(source)
    if any(name.startswith(NAMED_TEMPLATES) for name in names):
        (target / NAMED_TEMPLATES).mkdir()
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises CheckpointError."""
    read_json(path)  # says in plain words what is wrong with a file that is no JSON
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{path} cannot be loaded: {error}", field=path.name) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class Decoder:
    """What a tokenizer's decoders do to its tokens; `leading_spaces` is vocab.bin's."""

    byte_level: bool = False
    replaces_space: bool = False
    byte_fallback: bool = False
    leading_spaces: int = 0

    def token_bytes(self, text: str) -> bytes:
        """The bytes that a token of this text stands for, away from the beginning of a text."""
        if self.byte_level:
            codes = [_BYTE_OF.get(character) for character in text]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else text.encode()
        byte = self.fallback_byte(text)
        return bytes([byte]) if byte is not None else self._spaced(text).encode()

    def fallback_byte(self, text: str) -> int | None:
        """The byte that a token like <0xE2> stands for; None for all others."""
        match = _FALLBACK.fullmatch(self._spaced(text)) if self.byte_fallback else None
        return int(match[1], 16) if match else None

    def _spaced(self, text: str) -> str:
        return text.replace(_SPACE, " ") if self.replaces_space else text


def build_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """What every id of a tokenizer stands for. Raises CheckpointError for decoders that vocab.bin cannot express."""
    decoder = read_decoder(tokenizer)
    texts, special = _token_texts(tokenizer)
    if not texts or max(texts) >= _MOST_TOKENS:
        reason = f"it has the token id {max(texts)}" if texts else "it has no tokens"
        raise CheckpointError(f"tokenizer.json is damaged: {reason}", field="tokenizer.json")
    if decoder.leading_spaces == _FIRST_TOKENS_SPACES:
        _check_first_tokens(text for token, text in texts.items() if token not in special)
    count = max(texts) + 1
    return Vocabulary(
        pieces=[decoder.token_bytes(texts[token]) if token in texts else b"" for token in range(count)],
        special=[token in special or token not in texts for token in range(count)],
        count=count,
        byte_tokens=frozenset(token for token, text in texts.items() if decoder.fallback_byte(text) is not None),
        leading_spaces=decoder.leading_spaces,
    )


def _token_texts(tokenizer: Tokenizer) -> tuple[dict[int, str], set[int]]:
    """The text of every id as the tokenizer's decoders get to see it, and the ids that are special.

    The library is asked for each: what it makes of added tokens depends on its normaliser.
    """
    named = set(tokenizer.get_vocab(with_added_tokens=True).values())
    ids = sorted(token for token in named | set(range(len(named))) if tokenizer.id_to_token(token) is not None)
    decoder = tokenizer.decoder
    tokenizer.decoder = decoders.Fuse()  # joins tokens as they are
    try:
        alone = [[token] for token in ids]
        texts = tokenizer.decode_batch(alone, skip_special_tokens=False)
        kept = tokenizer.decode_batch(alone, skip_special_tokens=True)
    finally:
        tokenizer.decoder = decoder
    special = {token for token, text, rest in zip(ids, texts, kept, strict=True) if text != rest}
    special |= {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return dict(zip(ids, texts, strict=True)), special


def _check_first_tokens(texts: Iterable[str]) -> None:
    """Metaspace takes each "▁" out of a text's first token: vocab.bin only knows of the spaces in front of it."""
    for text in texts:
        if text.replace(_SPACE, "") != text.replace(_SPACE, " ").lstrip(" "):
            raise CheckpointError(
                f"tokenizer.json: decoder Metaspace with the token {text!r}, which has a '▁' behind its first "
                f"character or a space in front, is not supported; {SUPPORTED}",
                field="decoder",
            )


def read_decoder(tokenizer: Tokenizer) -> Decoder:
    """What the tokenizer's decoders do. Raises CheckpointError naming the first that vocab.bin cannot express."""
    description: dict[str, Any] = {"type": "Sequence", "decoders": []}
    if tokenizer.decoder is not None:
        description = json.loads(tokenizer.decoder.__getstate__())
    parts: list[dict[str, Any]] = description["decoders"] if description["type"] == "Sequence" else [description]
    if not parts:
        raise CheckpointError(f"tokenizer.json: decoder null is not supported; {SUPPORTED}", field="decoder")
    decoder, done = Decoder(), ""
    for part in parts:
        following = _following(decoder, done, part)
        if following is None:
            shown = json.dumps(part, ensure_ascii=False) + (f" behind {done}" if done else "")
            raise CheckpointError(f"tokenizer.json: decoder {shown} is not supported; {SUPPORTED}", field="decoder")
        decoder, done = following, part["type"]
    if not (decoder.byte_level or decoder.replaces_space):
        shown = json.dumps(parts, ensure_ascii=False)
        raise CheckpointError(f"tokenizer.json: decoder {shown} is not supported; {SUPPORTED}", field="decoder")
    return decoder


def _following(decoder: Decoder, done: str, part: dict[str, Any]) -> Decoder | None:
    """`decoder`, whose last part is of the kind `done`, with one more part; None if vocab.bin cannot express it."""
    match part:
        case {"type": "ByteLevel"} if not done:
            return replace(decoder, byte_level=True)
        case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "} if not done:
            return replace(decoder, replaces_space=True)
        case {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"} if not done:
            return replace(decoder, replaces_space=True)
        case {"type": "Metaspace", "replacement": "\u2581"} if not done:
            return replace(decoder, replaces_space=True, leading_spaces=_FIRST_TOKENS_SPACES)
        case {"type": "ByteFallback"} if done in ("", "Replace", "Metaspace") and decoder.leading_spaces == 0:
            return replace(decoder, byte_fallback=True)
        case {"type": "Fuse"} if done != "Strip":
            return decoder
        case {"type": "Strip", "content": " ", "start": start, "stop": 0} if done in ("Fuse", "ByteLevel"):
            strips = decoder.leading_spaces == 0 and start < _FIRST_TOKENS_SPACES
            return replace(decoder, leading_spaces=start) if strips else None
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of bytes to characters, reversed: printable Latin-1 stands for itself, the rest follows 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [code for code in range(256) if code not in printable]
    return {chr(code): code for code in printable} | {chr(256 + place): code for place, code in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_FALLBACK = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")  # what Rust's u8::from_str_radix takes


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
