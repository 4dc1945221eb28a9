"""The native text assembly against a reference in three lines of Python."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native_rig import write_vocabulary
from ull import _native

# Bytes that make and break characters, and letters that stop strings are made of.
BYTES = st.sampled_from(
    [b"a", b"b", b"c", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\x98", b"\x80"]
)
STREAM = st.one_of(
    st.text(alphabet="abcé€😀", max_size=40).map(str.encode),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(BYTES, max_size=60).map(b"".join),
    st.binary(max_size=60),
)
STOPS = st.lists(st.text(alphabet="abcé€", min_size=1, max_size=5), max_size=16)


def reference(stream: bytes, stops: list[str]) -> tuple[str, bool]:
    """The text up to the stop string that ends first (of those, the longest), and whether there is one."""
    found = [(at + len(stop.encode()), at) for stop in stops if (at := stream.find(stop.encode())) >= 0]
    end = min(found)[1] if found else len(stream)
    return stream[:end].decode("utf-8", errors="replace"), bool(found)


@settings(max_examples=400, deadline=None)
@given(stream=STREAM, stops=STOPS, data=st.data())
def test_any_tokenisation_gives_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, stream: bytes, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20).map(sorted))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    vocabulary = write_vocabulary(tmp_path_factory.getbasetemp() / "vocab.bin", pieces)
    expected, stopped = reference(stream, stops)
    detokenizer = _native.Detokenizer(str(vocabulary), stops)
    shown = ""
    for token in range(len(pieces)):
        shown += detokenizer.feed([token])
        assert expected.startswith(shown)  # never shows what it must take back
    shown += detokenizer.finish()
    assert shown == expected
    assert detokenizer.stopped == stopped


def test_special_and_foreign_tokens_have_no_text(tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.bin", [b"hi", b"<eos>", b" there"], special=[1])
    detokenizer = _native.Detokenizer(str(vocabulary))
    assert detokenizer.feed([0, 1, 2, 3, -1, 2**31 - 1]) + detokenizer.finish() == "hi there"


@pytest.mark.parametrize("stops", [[""], ["x" * 257], ["é" * 129], ["x"] * 17])
def test_stop_strings_out_of_bounds_are_refused(tmp_path: Path, stops: list[str]) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.bin", [b"a"])
    with pytest.raises(ValueError, match="stop: at most 16 strings, each of 1 to 256 bytes"):
        _native.Detokenizer(str(vocabulary), stops)


def test_a_broken_vocabulary_is_named(tmp_path: Path) -> None:
    good = write_vocabulary(tmp_path / "vocab.bin", [b"a", b"bc"]).read_bytes()
    for size in range(len(good)):
        (tmp_path / "vocab.bin").write_bytes(good[:size])
        with pytest.raises(RuntimeError, match=r"vocab\.bin: .*; rebuild the bundle with ull-build"):
            _native.Detokenizer(str(tmp_path / "vocab.bin"))
