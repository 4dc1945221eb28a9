"""The clients in other languages, compiled or installed once for each state of their sources, as commands to run."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache/clients"
CPP, NODE = ROOT / "clients/cpp", ROOT / "clients/node"
DRIVERS = ROOT / "tests/clients"
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
NEEDED = "#include <msgpack.hpp>\n#include <zmq.hpp>\n"


@functools.cache
def why_no_cpp() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    command = ["g++", "-std=c++20", "-DMSGPACK_NO_BOOST", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(command, input=NEEDED, text=True, capture_output=True, timeout=120).returncode != 0:
        return "cppzmq or msgpack-cxx is missing: apt install cppzmq-dev libmsgpack-cxx-dev libzmq3-dev"
    return None


def compiled(source: Path) -> Path:
    """The program of a source file. Skips the test where the libraries are missing; fails where it does not compile."""
    if (reason := why_no_cpp()) is not None:
        pytest.skip(reason)
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [source, *sorted((CPP / "include").rglob("*.hpp"))]:
        digest.update(path.read_bytes())
    program = CACHE / "cpp" / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_name(f"{program.name}.{os.getpid()}")
        command = ["g++", *FLAGS, f"-I{CPP / 'include'}", str(source), "-lzmq", "-o", str(unfinished)]
        done = subprocess.run(command, text=True, capture_output=True, timeout=280)
        assert done.returncode == 0, done.stderr
        unfinished.rename(program)
    return program


@functools.cache
def _node_package() -> Path | str:
    """A copy of the Node package with what it depends on, or why there is none."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "there is no node, or no npm"
    version = subprocess.run(["node", "--version"], text=True, capture_output=True, timeout=60).stdout
    if int(version.removeprefix("v").split(".")[0]) < 20:
        return f"node is {version.strip()}, and the client needs 20"
    lock = NODE / "package-lock.json"
    package = CACHE / f"node-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if not (package / "node_modules/.package-lock.json").exists():
        package.mkdir(parents=True, exist_ok=True)
        for path in (NODE / "package.json", lock):
            shutil.copy(path, package)
        # The packages bring what they need compiled: nothing of theirs is run.
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=package, text=True, capture_output=True, timeout=280)
        if done.returncode != 0:
            shutil.rmtree(package)
            return f"npm cannot install: {done.stderr.strip().splitlines()[-1:]}"
    return package


def node_package() -> Path:
    """A copy of the Node package as it is now, with the tests' driver beside it. Skips the test where there is none."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes run tests too
        package = _node_package()
        if isinstance(package, str):
            pytest.skip(package)
        for name in ("src", "examples", "index.d.ts", "package.json"):
            _renew(NODE / name, package / name)
        _renew(DRIVERS / "driver.mjs", package / "driver.mjs")
    return package


def _renew(source: Path, copy: Path) -> None:
    """Copies what has changed, a file at a time and whole: a program beside it may be reading."""
    if source.is_dir():
        copy.mkdir(exist_ok=True)
        for path in source.iterdir():
            _renew(path, copy / path.name)
    elif not copy.exists() or copy.read_bytes() != source.read_bytes():
        unfinished = copy.with_name(f".{copy.name}.new")
        shutil.copy(source, unfinished)
        unfinished.rename(copy)


def driver(language: str) -> list[str]:
    """The command that runs a scenario of the client in "cpp" or "node"."""
    if language == "cpp":
        return [str(compiled(DRIVERS / "driver.cpp"))]
    return ["node", str(node_package() / "driver.mjs")]


def run(command: list[str], *arguments: str) -> list[str]:
    """The lines that a program prints; it must end well."""
    done = subprocess.run([*command, *arguments], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
