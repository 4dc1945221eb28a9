"""What the suffix drafter remembers, over a restart: the file, its checks, and who gets one."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Spawn
from ull import _native
from ull.client.sync import Client
from ull.daemon.config import parse_config
from ull.daemon.past_outputs import MAGIC, PastOutputsFile
from ull.errors import ConfigError, DaemonError

DIGEST = b"v" * 32
TOKENS = [5, 6, 7, -1, 5, 6, 9]


class Warnings:
    """A log that keeps what it was warned of."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def warning(self, event: str, **fields: Any) -> None:
        assert event == "past_outputs"
        self.messages.append(fields["message"])


def remembering(tokens: list[int], room: int = 100) -> _native.PastOutputs:
    past = _native.PastOutputs(room)
    past.append(np.array(tokens, np.int32))
    return past


def file_of(
    path: Path, past: _native.PastOutputs, log: Warnings, digest: bytes = DIGEST, vocabulary: int = 10
) -> PastOutputsFile:
    return PastOutputsFile(path, past, digest, vocabulary, log)  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file with TOKENS."""
    path = tmp_path / "past"
    file_of(path, remembering(TOKENS), Warnings()).save()
    return path


def test_what_was_saved_is_loaded(written: Path) -> None:
    log = Warnings()
    past = _native.PastOutputs(100)
    file_of(written, past, log).load()
    assert past.copy().tolist() == TOKENS
    assert log.messages == []
    assert written.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in written.parent.iterdir()] == ["past"]


def test_a_smaller_memory_takes_the_newest(written: Path) -> None:
    past = _native.PastOutputs(3)
    file_of(written, past, Warnings()).load()
    assert past.copy().tolist() == TOKENS[-3:]


def test_only_what_has_changed_is_written(written: Path) -> None:
    past = _native.PastOutputs(100)
    file = file_of(written, past, Warnings())
    file.load()
    before = written.stat().st_ino
    file.save()
    assert written.stat().st_ino == before
    past.append(np.array([1], np.int32))
    file.save()
    assert written.stat().st_ino != before


def resealed(content: bytes, tokens: list[int]) -> bytes:
    """The content with other tokens, and a checksum that fits."""
    body = np.array(tokens, "<i4").tobytes()
    return content[:40] + len(tokens).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1], "it is damaged"),
        (lambda content: content + b"\0\0\0\0", "it is damaged"),
        (lambda content: content[:-4] + b"\1\0\0\0", "it is damaged"),
        (lambda content: b"", "no file of past outputs"),
        (lambda content: content[:20], "no file of past outputs"),
        (lambda content: b"X" + content[1:], "no file of past outputs"),
        (lambda content: MAGIC + b"w" * 32 + content[40:], "another vocabulary"),
        (lambda content: resealed(content, [3, 10]), "ids outside the vocabulary"),
        (lambda content: resealed(content, [-2]), "ids outside the vocabulary"),
    ],
)
def test_a_file_that_cannot_be_used_is_left_out_with_a_warning(written: Path, change: Any, said: str) -> None:
    written.write_bytes(change(written.read_bytes()))
    log, past = Warnings(), _native.PastOutputs(100)
    file_of(written, past, log).load()
    assert past.copy().tolist() == []
    assert len(log.messages) == 1
    assert said in log.messages[0]
    assert str(written) in log.messages[0]


def test_a_file_without_a_place_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "past"):
        with pytest.raises(DaemonError, match=r"past_outputs_file: .* must be a file in a directory that may be"):
            file_of(path, _native.PastOutputs(10), Warnings()).load()


def test_a_disk_that_fails_is_told_of_once(tmp_path: Path) -> None:
    log, past = Warnings(), remembering(TOKENS)
    file = file_of(tmp_path / "gone" / "past", past, log)
    file.save()
    file.save()
    assert len(log.messages) == 1
    assert "cannot be written" in log.messages[0]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 65536),
        ("[speculation]\npast_outputs = 0", 0),
        ("[speculation]\npast_outputs = 7", 7),
        ("[journal]\npath = '/j'", 0),
        ("[journal]\npath = '/j'\n[speculation]\npast_outputs = 7", 7),
    ],
)
def test_a_journal_turns_them_off_unless_they_are_asked_for(text: str, tokens: int) -> None:
    assert parse_config(text).past_outputs == tokens


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("past_outputs = 0", "it is 0"),
        ("[journal]\npath = '/j'", "with a journal it is 0 unless it is set"),
    ],
)
def test_a_file_for_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"past_outputs_file needs speculation.past_outputs: {said}"):
        parse_config(f"[speculation]\npast_outputs_file = '/p'\n{text}")


def test_a_daemon_knows_after_a_restart_what_it_said_before(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "past"
    options = [
        *("--set", f"speculation.past_outputs_file={path}", "--set", "speculation.adaptive=false"),
        *("--set", "engine.threads=1"),
    ]
    rounds = []
    for _ in range(2):
        daemon = spawn(*options)
        with Client(daemon.url) as client:
            result = client.generate(
                "import ", max_tokens=60, temperature=1.0, seed=1, speculate="suffix", ignore_eos=True
            ).result()
            client.generate("def ", max_tokens=3, speculate="suffix").result()  # the first has ended
        assert daemon.stop() == 0
        rounds.append((result.token_ids, result.speculation.rounds))
    assert path.stat().st_size > 4 * 50
    (first, slow), (second, fast) = rounds
    assert first == second
    assert 2 * fast < slow
