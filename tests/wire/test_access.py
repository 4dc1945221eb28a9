"""A permission that is denied is told with the file, whose it is, who asks, and what helps."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ull.access import denial
from ull.spawn import python_environment

# Where the tests run, nobody may not even start Python: it changes its user once all is imported.
AS_NOBODY = """
import os, sys
from ull.daemon import executors, main, server
if os.geteuid() == 0:
    os.chdir("/")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main.run(sys.argv[1:]))
"""
Ulld = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def home(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that everybody gets to, with a bundle that everybody may read."""
    home = Path("/tmp") / f"ull-access-{os.getpid()}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    home.chmod(0o755)
    shutil.copytree(tiny_bundle, home / "tiny.ull")
    for path in (home / "tiny.ull").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (home / "tiny.ull").chmod(0o755)
    (home / "run").mkdir()
    (home / "run").chmod(0o777)
    yield home
    subprocess.run(["chmod", "-R", "u+rwX", str(home)], check=False)
    shutil.rmtree(home)


@pytest.fixture
def ulld(home: Path) -> Ulld:
    """Runs ulld on home's bundle as somebody to whom permissions apply: nobody, where the tests are root's."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-c", AS_NOBODY, str(home / "tiny.ull"), "--listen", f"ipc://{home}/run/s"]
        return subprocess.run(
            [*command, *arguments], env=python_environment(), capture_output=True, text=True, timeout=60, check=False
        )

    return run


def check(outcome: "subprocess.CompletedProcess[str]", path: Path, action: str, culprit: str) -> None:
    complaint = next(line for line in outcome.stderr.splitlines() if line.startswith("ulld: "))
    assert outcome.returncode == 1 and "Traceback" not in outcome.stderr
    user = "nobody" if os.geteuid() == 0 else ""
    assert f"{path}: permission to {action} is denied to user {user}" in complaint
    assert f"{culprit} belongs to user " in complaint and f"chmod or chown {culprit}" in complaint


@pytest.mark.parametrize(
    "name", ["manifest.json", "manifest.sha256", "weights.safetensors", "vocab.bin", "tokenizer/tokenizer.json"]
)
def test_a_file_of_the_bundle(home: Path, ulld: Ulld, name: str) -> None:
    path = home / "tiny.ull" / name
    path.chmod(0)
    check(ulld(), path, "read", "it")


def test_a_directory_on_the_way(home: Path, ulld: Ulld) -> None:
    (home / "tiny.ull").chmod(0)
    check(ulld(), home / "tiny.ull/manifest.json", "read", str(home / "tiny.ull"))


def test_the_configuration(home: Path, ulld: Ulld) -> None:
    path = home / "ulld.toml"
    path.write_text("")
    path.chmod(0)
    check(ulld("--config", str(path)), path, "read", "it")


def test_the_socket_s_directory(home: Path, ulld: Ulld) -> None:
    (home / "run").chmod(0o555)
    check(ulld(), home / "run", "write", "it")


def test_what_cannot_be_looked_at_either(tmp_path: Path) -> None:
    assert "chmod or chown it" in denial(tmp_path / "none")
    assert f"{tmp_path}/none: permission to delete is denied to u" in denial(tmp_path / "none", "delete")
