"""The digest of a bundle: what it covers, who checks it, who reports it, and manifests that are no regular files."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, Spawn
from manifests import change_manifest, read_manifest_json
from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.commands import inspect
from ull.errors import BundleError
from ull.spawn import python_command, python_environment
from ull_build.output import is_bundle


def refuse(bundle: Path, words: str, field: str = "manifest.json") -> None:
    with pytest.raises(BundleError, match=words) as caught:
        open_bundle(bundle)
    assert caught.value.field == field
    assert "\n" not in caught.value.message


def ulld(bundle: Path) -> subprocess.CompletedProcess[str]:
    """Runs ulld, which is to refuse the bundle, to its end."""
    command = [*python_command("ull.daemon"), str(bundle), "--listen", f"ipc://{bundle}.sock"]
    return subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=60, check=False)


# What the digest is


def test_sha256sum_gives_and_checks_the_digest(pristine: Path) -> None:
    digest = open_bundle(pristine).digest
    given = subprocess.run(["sha256sum", "manifest.json"], cwd=pristine, capture_output=True, text=True, check=True)
    assert given.stdout.split()[0] == digest
    checked = subprocess.run(
        ["sha256sum", "--check", "manifest.sha256"], cwd=pristine, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "manifest.json: OK\n")


def test_the_digest_covers_every_file(pristine: Path) -> None:
    """Nothing in a bundle is beside the manifest's list, and its seal covers that."""
    files = {str(path.relative_to(pristine)) for path in pristine.rglob("*") if path.is_file()}
    assert files == {*open_bundle(pristine).manifest.files, "manifest.json", "manifest.sha256"}


# Who checks it


def double_theta(manifest: dict[str, Any]) -> None:
    manifest["model"]["rope"]["theta"] *= 2


def test_a_changed_manifest_is_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest_json(bundle)
    double_theta(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    words = "manifest.json differs from its SHA-256 in manifest.sha256: it was changed after the build; restore it, or"
    refuse(bundle, words)
    for options in ({}, {"verify": True}):
        assert inspect.main(bundle, **options) == 1
        assert words in capsys.readouterr().err
    done = ulld(bundle)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_manifest_that_was_sealed_again_has_another_digest(bundle: Path, pristine: Path) -> None:
    digest = change_manifest(bundle, double_theta)
    assert open_bundle(bundle).digest == digest != open_bundle(pristine).digest


@pytest.mark.parametrize("place", [0, 1, 400, -3])
def test_any_flipped_bit_of_the_manifest_is_refused(bundle: Path, place: int) -> None:
    path = bundle / "manifest.json"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    refuse(bundle, "manifest.json differs from its SHA-256 in manifest.sha256")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "manifest.sha256 is damaged: it must hold the SHA-256 of manifest.json; rebuild it"),
        (b"0" * 64, "is damaged"),
        (b"0" * 64 + b"  manifest.json", "is damaged"),
        (b"0" * 64 + b"  weights.safetensors\n", "is damaged"),
        (b"\xff" * 80, "is damaged"),
        (b"x" * 5000, "far too large: 5000 bytes"),
    ],
    ids=["empty", "no name", "no line end", "other name", "no text", "large"],
)
def test_damaged_seals_are_refused(bundle: Path, content: bytes, words: str) -> None:
    (bundle / "manifest.sha256").write_bytes(content)
    refuse(bundle, words, "manifest.sha256")


def test_a_seal_of_another_manifest_is_refused(bundle: Path) -> None:
    (bundle / "manifest.sha256").write_bytes(b"0" * 64 + b"  manifest.json\n")
    refuse(bundle, "manifest.json differs from its SHA-256")


def test_a_bundle_without_a_seal_is_refused(bundle: Path) -> None:
    (bundle / "manifest.sha256").unlink()
    refuse(bundle, "manifest.sha256 is missing; rebuild it with ull-build", "manifest.sha256")


def test_the_seal_of_sha256sum_itself_will_do(bundle: Path) -> None:
    """Of text mode and of binary mode."""
    digest = open_bundle(bundle).digest
    for option in ("--text", "--binary"):
        made = subprocess.run(["sha256sum", option, "manifest.json"], cwd=bundle, capture_output=True, check=True)
        (bundle / "manifest.sha256").write_bytes(made.stdout)
        assert open_bundle(bundle).digest == digest


def test_a_tokenizer_file_that_nobody_lists_is_refused(bundle: Path) -> None:
    """It would be read: a chat template of its own file comes before the one of tokenizer_config.json."""
    (bundle / "tokenizer" / "chat_template.jinja").write_text("{{ 'other answers' }}")
    refuse(bundle, "chat_template.jinja is not in the manifest, and would be read; remove it", "tokenizer")
    (bundle / "notes.txt").write_text("this one is read by nobody")
    (bundle / "tokenizer" / "chat_template.jinja").unlink()
    open_bundle(bundle)
    named = bundle / "tokenizer" / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("{{ 'other answers' }}")
    refuse(bundle, "tool_use.jinja is not in the manifest, and would be read; remove it", "tokenizer")


# What is no regular file

IRREGULAR: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "vocab.bin", "tokenizer/tokenizer.json"])
def test_no_irregular_file_is_waited_for(bundle: Path, name: str, make: Callable[[Path], Any]) -> None:
    (bundle / name).unlink()
    make(bundle / name)
    refuse(bundle, "not a regular file|Too many levels of symbolic links", name)


def test_a_socket_is_no_manifest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / "manifest.json").unlink()
    monkeypatch.chdir(bundle)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("manifest.json")
        refuse(bundle, "not an engine bundle: .*No such device or address")


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_the_daemon_refuses_such_manifests_in_one_line(bundle: Path, make: Callable[[Path], Any]) -> None:
    (bundle / "manifest.json").unlink()
    make(bundle / "manifest.json")
    done = ulld(bundle)
    assert done.returncode == 1 and "is not an engine bundle" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_the_build_does_not_wait_for_them_either(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "manifest.json")
    assert not is_bundle(tmp_path)


def test_huge_manifests_are_not_read(bundle: Path) -> None:
    os.truncate(bundle / "manifest.json", 1 << 40)
    refuse(bundle, "manifest.json is far too large: 1099511627776 bytes")


def test_a_link_to_a_regular_file_is_as_good_as_the_file(bundle: Path, pristine: Path) -> None:
    for name in ("manifest.json", "manifest.sha256", "weights.safetensors"):
        (bundle / name).unlink()
        (bundle / name).symlink_to(pristine / name)
    assert open_bundle(bundle, verify="hashes").digest == open_bundle(pristine).digest


@pytest.mark.skipif(os.getuid() == 0, reason="root may read anything")
@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256"])
def test_what_may_not_be_read_is_said_to_be_so(bundle: Path, name: str) -> None:
    (bundle / name).chmod(0)
    refuse(bundle, f"{name}: permission to read is denied to user .*; chmod or chown it, or run as another user", name)


# Who reports it


def test_info_log_and_done_name_the_bundle(tiny_bundle: Path, shared_daemon: Daemon) -> None:
    opened = open_bundle(tiny_bundle)
    with Client(shared_daemon.url) as client:
        result = client.generate("def main():\n", max_tokens=2).result()
        engine = client.info().engine
    source = opened.manifest.provenance.source_sha256
    assert source is not None
    assert result.bundle == opened.digest
    assert (engine["digest"], engine["source_sha256"], engine["verified"]) == (opened.digest, source, "sizes")
    assert engine["drafter_sha256"] == {
        name: found.sha256 for name, found in opened.manifest.provenance.drafters.items()
    }
    [ready] = shared_daemon.events("ready")
    assert (ready["bundle"], ready["source_sha256"], ready["verified"]) == (opened.digest, source, "sizes")
    assert {event["bundle"] for event in shared_daemon.wait_events("request", 1)} == {opened.digest[:16]}


def test_a_daemon_that_has_compared_every_byte_says_so(spawn: Spawn) -> None:
    daemon = spawn("--set", "verify=hashes", script={})
    with Client(daemon.url) as client:
        assert client.info().engine["verified"] == "hashes"


def test_inspect_prints_both(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_bundle(tiny_bundle)
    provenance = opened.manifest.provenance
    assert inspect.main(tiny_bundle) == 0
    printed = capsys.readouterr().out
    assert opened.digest in printed and str(provenance.source_sha256) in printed
    assert all(source.sha256 in printed for source in provenance.drafters.values())
