"""What killed builds left: told from the work of live ones, cleared, or put back."""

import fcntl
import os
from pathlib import Path

import pytest

from ull_build import leftovers
from ull_build.leftovers import clear_leftovers, create_locked, lock_folder, old_bundle, staging_folder


def clear(directory: Path) -> list[str]:
    """Clears and returns the notes."""
    notes: list[str] = []
    clear_leftovers(directory, notes.append)
    return notes


def make(folder: Path, text: str = "half") -> Path:
    folder.mkdir()
    (folder / "weights.safetensors").write_text(text)
    return folder


def test_abandoned_folders_go_and_are_named_in_one_line(tmp_path: Path) -> None:
    first = make(staging_folder(tmp_path / "x.ull"))
    second = make(staging_folder(tmp_path / "y[1].ull"))
    [note] = clear(tmp_path)
    assert first.name in note and second.name in note and "8 bytes" in note and "\n" not in note
    assert list(tmp_path.iterdir()) == []
    assert clear(tmp_path) == []


def test_the_folder_of_a_live_build_stays(tmp_path: Path) -> None:
    """Even with the id of a process that is gone: the lock counts."""
    folder = tmp_path / ".x.ull.building-4194305-0123abcd"
    lock = create_locked(folder)
    assert lock is not None
    assert clear(tmp_path) == [] and folder.is_dir()
    os.close(lock)
    assert len(clear(tmp_path)) == 1 and not folder.exists()


def test_an_old_bundle_without_a_successor_is_put_back(tmp_path: Path) -> None:
    old = make(old_bundle(tmp_path / "x.ull"), "old")
    make(staging_folder(tmp_path / "x.ull"))
    back, removed = clear(tmp_path)
    assert back.startswith(f"put {tmp_path / 'x.ull'} back") and removed.startswith("removed")
    assert not old.exists() and (tmp_path / "x.ull" / "weights.safetensors").read_text() == "old"


def test_an_old_bundle_with_a_successor_goes(tmp_path: Path) -> None:
    old = make(old_bundle(tmp_path / "x.ull"), "old")
    make(tmp_path / "x.ull", "new")
    [note] = clear(tmp_path)
    assert old.name in note
    assert (tmp_path / "x.ull" / "weights.safetensors").read_text() == "new"


def test_what_no_build_made_stays(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "elsewhere")
    (tmp_path / ".x.ull.building-1-0123abcd").symlink_to(elsewhere)
    (tmp_path / ".y.ull.building-1-0123abcd").write_text("a file")
    for name in ("x.ull.building-1-0123abcd", ".x.ull.building-1", ".x.ull.building-one-0123abcd", ".x.ull.old"):
        make(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    assert clear(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
    assert clear(tmp_path / "nowhere") == []


def test_without_locks_nothing_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: nobody knows whether the build lives."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    folder = staging_folder(tmp_path / "x.ull")
    assert create_locked(folder) is None and folder.is_dir()
    assert clear(tmp_path) == [] and folder.is_dir()


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(leftovers.shutil, "rmtree", refuse)
    folder = make(staging_folder(tmp_path / "x.ull"))
    [note] = clear(tmp_path)
    assert str(folder) in note and "cannot be removed (Permission denied)" in note


def test_a_folder_cleared_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = staging_folder(tmp_path / "x.ull")
    attempts: list[int | None] = []

    def race(path: Path) -> int | None:
        lock = lock_folder(path)
        if not attempts:
            path.rmdir()  # another build held it for abandoned
        attempts.append(lock)
        return lock

    monkeypatch.setattr(leftovers, "lock_folder", race)
    lock = create_locked(folder)
    assert len(attempts) == 2 and lock is not None and folder.is_dir()
    with pytest.raises(BlockingIOError):
        lock_folder(folder)
    os.close(lock)
