"""A short pass of the fuzzers of Python's readers; the core's run with the native tests, `make fuzz` for long."""

import subprocess
import sys
from pathlib import Path

import pytest

import fuzz_python
from fuzz_python import Target

CORPUS = Path(__file__).parent / "corpus"
EXECUTIONS = 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


OUTSIDE = ["requests", "replies", "configuration", "client list", "key file"]
BUNDLE = ["manifest", "tensors"]


def test_every_target_is_fuzzed_here(tmp_path: Path, tiny_bundle: Path) -> None:
    assert [target.name for target in fuzz_python.targets(tmp_path, tiny_bundle)] == OUTSIDE + BUNDLE


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_comes_from_outside_is_read_or_refused(folder: Path, name: str) -> None:
    (target,) = [each for each in fuzz_python.targets(folder, None) if each.name == name]
    for data in target.corpus:
        assert target.read(data) is not None  # what the mutations begin with is right
    fuzz_python.run(target, EXECUTIONS, 1)


@pytest.mark.parametrize("name", BUNDLE)
def test_a_bundle_s_files_are_read_or_refused(folder: Path, tiny_bundle: Path, name: str) -> None:
    (target,) = [each for each in fuzz_python.targets(folder, tiny_bundle) if each.name == name]
    fuzz_python.run(target, EXECUTIONS, 1)


def test_a_fuzzer_says_what_it_has_found(capsys: pytest.CaptureFixture[str]) -> None:
    def read(data: bytes) -> None:
        assert b"\xff" not in data

    with pytest.raises(AssertionError):
        fuzz_python.run(Target("x", read, [b"abc"]), 10_000, 1)
    assert "ff" in capsys.readouterr().err


def test_the_corpus_is_what_its_program_writes(tmp_path: Path) -> None:
    program = [sys.executable, str(CORPUS.parent / "corpus.py"), str(tmp_path)]
    subprocess.run(program, check=True, timeout=60)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {path.relative_to(CORPUS): path.read_bytes() for path in CORPUS.rglob("*") if path.is_file()}
    found = {path for path in kept if path.name.startswith("found-")}
    assert written == {path: data for path, data in kept.items() if path not in found}
    assert sum(map(len, kept.values())) < 300_000
