"""Small tokenizers of the kinds that checkpoints have, trained here: the same normalisers, pre-tokenizers, decoders
and added tokens, but a few hundred tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it?\n",
    "def add(first, second):\n\treturn first + second  # 3.14\r\n\n    for i in range(10): pass\n",
    "Grüße aus Köln, мир и дом, 世界 你好, こんにちは, עולם, 🚀🙂👩‍👩‍👧 naïve café\n",
] * 4
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sentencepiece(
    specials: list[str],
    decoder: decoders.Decoder,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> Tokenizer:
    """A SentencePiece BPE as transformers converts it: byte tokens behind the special ones, "▁" for spaces."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+|▁+"), "isolated")
    names = [*specials, *[f"<0x{byte:02X}>" for byte in range(256)]]
    latin = [text.encode("ascii", "ignore").decode() + "éüß" for text in TEXT]  # all others are spelled in bytes
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=names, show_progress=False, max_token_length=12)
    trained.train_from_iterator(latin, trainer)
    learned = trained.get_vocab(with_added_tokens=True)
    merges = [tuple(pair) for pair in _merges(trained)]
    tokenizer = Tokenizer(
        models.BPE(vocab=learned, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("  ", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|extra|>", special=True, normalized=False)])
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    specials: list[str],
    added: list[AddedToken],
    normalizer: normalizers.Normalizer | None = None,
    specials_first: bool = False,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=440,
        special_tokens=specials if specials_first else [],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.add_tokens(added)
    return tokenizer


def llama2() -> Tokenizer:
    """Llama 2, Mistral 7B: the legacy form, with a "▁" in front of every text, stripped from the whole again."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return sentencepiece(["<unk>", "<s>", "</s>"], decoder, normalizer)


def gemma() -> Tokenizer:
    """Gemma: no "▁" in front, nothing stripped."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>"], decoder, normalizers.Replace(" ", "▁"), split)


def metaspace() -> Tokenizer:
    """A vocabulary without byte tokens, whose decoder takes the spaces out of the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("▁▁▁", normalized=False), AddedToken("<tool call>", normalized=False)])
    return tokenizer


def llama3() -> Tokenizer:
    """Llama 3: tiktoken's pattern, special tokens behind the vocabulary."""
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    return byte_level(pre_tokenizers.Sequence([split, bytes_of]), specials, [AddedToken("<|python_tag|>")])


def qwen2() -> Tokenizer:
    """Qwen 2: NFC, single digits, added tokens that are text."""
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = [AddedToken("<tool_call>", normalized=False), AddedToken("né 世", normalized=False)]
    pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    return byte_level(pre_tokenizer, ["<|endoftext|>", "<|im_end|>"], added, normalizers.NFC())


def gpt2() -> Tokenizer:
    """GPT-2: the byte-level pre-tokenizer's own pattern. One added token is itself in the alphabet of bytes."""
    added = [AddedToken("Ġé"), AddedToken("ðŁ", normalized=False)]
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"], added)


def tekken() -> Tokenizer:
    """Mistral Nemo: special tokens in front of the vocabulary, another pattern."""
    split = pre_tokenizers.Split(Regex(TEKKEN_SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return byte_level(pre_tokenizers.Sequence([split, bytes_of]), specials, [], specials_first=True)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
    "llama3": llama3,
    "qwen2": qwen2,
    "gpt2": gpt2,
    "tekken": tekken,
}
