"""Compiles what uses the C++ client, once for each state of the sources, and runs it."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients/cpp"
CACHE = ROOT / ".cache/clients/cpp"
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
NEEDED = "#include <msgpack.hpp>\n#include <zmq.hpp>\n"


@functools.cache
def why_not() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    command = ["g++", "-std=c++20", "-DMSGPACK_NO_BOOST", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(command, input=NEEDED, text=True, capture_output=True, timeout=120).returncode != 0:
        return "cppzmq or msgpack-cxx is missing: apt install cppzmq-dev libmsgpack-cxx-dev libzmq3-dev"
    return None


def compiled(source: Path) -> Path:
    """The program of a source file. Skips the test where the libraries are missing; fails where it does not compile."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [source, *sorted((CLIENT / "include").rglob("*.hpp"))]:
        digest.update(path.read_bytes())
    program = CACHE / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_name(f"{program.name}.{os.getpid()}")
        command = ["g++", *FLAGS, f"-I{CLIENT / 'include'}", str(source), "-lzmq", "-o", str(unfinished)]
        done = subprocess.run(command, text=True, capture_output=True, timeout=280)
        assert done.returncode == 0, done.stderr
        unfinished.rename(program)
    return program


def run(program: Path, *arguments: str) -> list[str]:
    """The lines that a program prints; it must end well."""
    done = subprocess.run([str(program), *arguments], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
