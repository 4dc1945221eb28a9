"""An answer cut by characters: its text is exactly these, and what was not cut through keeps its ids."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from checkpoints import tokenizer_json
from tokenizer_kinds import KINDS, TEXT
from ull import _native
from ull.errors import RequestError
from ull.text.cut import TextOf, cut
from ull.text.tokenizer import Tokenizer
from ull_build.source.vocabulary import build_vocabulary

ANSWER = "".join(TEXT[:3]) + "  two spaces, naïve 🚀🙂 and isn't\n\n\nend"


def rig(directory: Path, name: str) -> tuple[Tokenizer, TextOf]:
    json = tokenizer_json() if name == "tiny" else KINDS[name]().to_str()
    (directory / "tokenizer.json").write_text(json)
    vocabulary = build_vocabulary(HuggingFaceTokenizer.from_str(json))
    vocabulary.write(directory / "vocab.bin", vocabulary.count)
    return Tokenizer(directory), _native.Vocabulary(str(directory / "vocab.bin")).text


@pytest.mark.parametrize("prompt_text", ["", "Say something:", " " * 40], ids=["alone", "behind text", "behind spaces"])
@pytest.mark.parametrize("name", [*KINDS, "tiny"])
def test_every_cut_is_exact(tmp_path: Path, name: str, prompt_text: str) -> None:
    tokenizer, text_of = rig(tmp_path, name)
    prompt = tokenizer.encode(prompt_text, add_special_tokens=False)
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    text = text_of(answer, prompt)
    short = 0
    for characters in range(len(text) + 1):
        ids = cut(prompt, answer, characters, text_of, tokenizer.encode_rest)
        found = text_of(ids, prompt)
        assert text.startswith(found)
        short = max(short, characters - len(found))
        kept = next(
            (place for place, pair in enumerate(zip(ids, answer, strict=False)) if pair[0] != pair[1]), len(ids)
        )
        assert len(text_of(answer[: kept + 1], prompt)) > characters or kept == len(ids)
    assert short <= (12 if name == "metaspace" else 0)  # which cannot spell every character alone
    assert cut(prompt, answer, len(text), text_of, tokenizer.encode_rest) == answer
    with pytest.raises(RequestError, match=f"at most the {len(text)} of the answer's text") as caught:
        cut(prompt, answer, len(text) + 1, text_of, tokenizer.encode_rest)
    assert (caught.value.code, caught.value.field) == ("bad_request", "characters")


def test_tokens_without_text_stay_with_what_is_before_them(tmp_path: Path) -> None:
    tokenizer, text_of = rig(tmp_path, "tiny")
    eos = 1
    answer = [*tokenizer.encode("one", add_special_tokens=False), eos]
    assert cut([], answer, 3, text_of, tokenizer.encode_rest) == answer
    assert text_of(cut([], answer, 2, text_of, tokenizer.encode_rest), []) == "on"
    assert cut([], [], 0, text_of, tokenizer.encode_rest) == []


def test_a_character_that_is_cut_through_by_its_bytes_is_left_out() -> None:
    """Tokens of single bytes: the text of a part has U+FFFD at its end, which is no beginning of the whole."""

    def text_of(ids: Sequence[int], prompt: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    answer = list("aé🚀b".encode())
    for characters in range(5):
        ids = cut([], answer, characters, text_of, lambda text: [])
        assert bytes(ids).decode() == "aé🚀b"[:characters]
