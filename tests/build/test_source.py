"""`source_sha256`: every byte that a build reads counts, and sha256sum gives the same value."""

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from checkpoints import head_tensors, write_checkpoint, write_json
from ull.bundle import Bundle, listing_sha256, open_bundle
from ull.errors import BuildError, CheckpointError
from ull_build.build import build
from ull_build.recipe import make_recipe
from ull_build.settings import Settings, settings_from_recipe
from ull_build.source import digest as source
from ull_build.source.digest import SourceHash
from ull_build.source.drafters import SpeculationSettings


def built(checkpoint: Path, output: Path, **options: Any) -> Bundle:
    settings = Settings(model=checkpoint, output=output, name="x", evaluate=False, force=True, **options)
    return open_bundle(build(settings).path)


def sha256sum(directory: Path, *names: str) -> str:
    """What the shell says, as the documentation has it."""
    command = f"LC_ALL=C sha256sum {' '.join(names)} | sha256sum"
    done = subprocess.run(["sh", "-c", command], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x80
    path.write_bytes(data)


def test_sha256sum_gives_the_same_value(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", shards=3)
    write_json(checkpoint / "generation_config.json", {"eos_token_id": 1})
    (checkpoint / "README.md").write_text("read by nobody")
    found = built(checkpoint, tmp_path / "x.ull").manifest.provenance
    names = [
        "config.json",
        "generation_config.json",
        *(f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)),
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list(found.source_files) == names
    assert found.source_sha256 == sha256sum(checkpoint, *names)


def test_the_listing_is_in_the_order_of_bytes(tmp_path: Path) -> None:
    names = ["a", "B", "a.b", "a-b", "\u00e9", "\U0001f680", "\ufffd"]
    for name in names:
        (tmp_path / name).write_text(name)
    with SourceHash(tmp_path, names) as hashes:
        found = hashes.finish()
    assert list(found.files) == sorted(names, key=str.encode)
    assert found.sha256 == sha256sum(tmp_path, *found.files)
    assert listing_sha256(dict(reversed(found.files.items()))) == found.sha256


def test_every_byte_of_the_checkpoint_counts(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", shards=2)
    kept = tmp_path / "kept"
    shutil.copytree(checkpoint, kept)
    first = built(checkpoint, tmp_path / "x.ull").manifest.provenance
    assert built(kept, tmp_path / "x.ull").manifest.provenance.source_sha256 == first.source_sha256
    for name in first.source_files:
        path = checkpoint / name
        if path.suffix == ".safetensors":
            flip(path, path.stat().st_size // 2 | 1)  # the sign of a weight, far behind the header
        else:
            path.write_bytes(path.read_bytes() + b"\n")
        found = built(checkpoint, tmp_path / "x.ull").manifest.provenance
        assert found.source_sha256 != first.source_sha256, name
        assert [other for other in found.source_files if found.source_files[other] != first.source_files[other]] == [
            name
        ]
        shutil.copyfile(kept / name, path)


def test_what_drafts_has_hashes_of_its_own(tmp_path: Path) -> None:
    checkpoint, draft = write_checkpoint(tmp_path / "model"), write_checkpoint(tmp_path / "draft")
    (tmp_path / "heads").mkdir()
    heads = tmp_path / "heads" / "medusa_lm_head.safetensors"
    save_file(head_tensors(), heads)
    speculation = SpeculationSettings(medusa=heads.parent, draft=draft)
    first = built(checkpoint, tmp_path / "x.ull", speculation=speculation).manifest.provenance
    assert first.drafters["medusa"].sha256 == sha256sum(heads.parent, heads.name)
    assert list(first.drafters["draft"].files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert first.drafters["draft"].sha256 == sha256sum(draft, "config.json", "model.safetensors", "tokenizer.json")
    flip(draft / "model.safetensors", (draft / "model.safetensors").stat().st_size - 1)
    again = built(checkpoint, tmp_path / "x.ull", speculation=speculation).manifest.provenance
    assert again.source_sha256 == first.source_sha256
    assert again.drafters["medusa"] == first.drafters["medusa"]
    assert again.drafters["draft"].sha256 != first.drafters["draft"].sha256


def test_a_file_is_hashed_when_the_build_comes_to_it(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 1000)
    with SourceHash(tmp_path, "abc") as hashes:
        assert hashes.remaining == 3000
        hashes.begin("b")
        hashes.begin("b")
        told: list[int] = []
        hashes.finish(told.append)
        assert hashes.remaining == 0
        assert sum(told) in (2000, 3000)  # b may have been hashed before
        assert hashes.finish().files.keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    "change", [lambda path: path.write_bytes(b"other"), lambda path: flip(path, 0)], ids=["size", "content"]
)
def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1000))
    with SourceHash(tmp_path, ["weights"]) as hashes:
        hashes.begin("weights")
        change(path)
        with pytest.raises(CheckpointError, match="weights changed while it was read; build again") as caught:
            hashes.finish()
    assert caught.value.field == "weights"


def test_a_file_that_vanishes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(1000))
    with SourceHash(tmp_path, ["weights"]) as hashes:
        (tmp_path / "weights").unlink()
        with pytest.raises(CheckpointError, match=r"weights cannot be read \(No such file"):
            hashes.finish()
    with pytest.raises(CheckpointError, match=r"weights cannot be read \(No such file"):
        SourceHash(tmp_path, ["weights"])


def test_a_build_that_fails_does_not_wait_for_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops a build ends the thread after the block at hand."""
    monkeypatch.setattr(source, "_BLOCK", 1)
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 22))
    with SourceHash(tmp_path, ["weights"]) as hashes:
        hashes.begin("weights")
    assert hashes.remaining > 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("source-hash")]


def test_the_same_build_has_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that two builds of the same recipe may differ in is the date."""
    checkpoint = write_checkpoint(tmp_path / "model")

    def digest(output: str) -> str:
        values = {"model": str(checkpoint), "output": str(tmp_path / output), "max_perplexity_increase": 1.0}
        recipe = make_recipe({**values, "name": "x"}, "test")
        return open_bundle(build(settings_from_recipe(recipe)).path).digest

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first = digest("a.ull")
    assert digest("b.ull") == first
    assert open_bundle(tmp_path / "a.ull").manifest.created == "2023-11-14T22:13:20+00:00"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000001")
    assert digest("c.ull") != first


@pytest.mark.parametrize("epoch", ["yesterday", "1e9", "99999999999999", "-99999999999999"])
def test_a_date_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    with pytest.raises(BuildError, match="SOURCE_DATE_EPOCH must be a whole number of seconds since 1970"):
        built(write_checkpoint(tmp_path / "model"), tmp_path / "x.ull")
