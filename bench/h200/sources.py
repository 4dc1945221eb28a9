"""What something was made from, as a digest: what was made is used again only while that is the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NATIVE = ("ull/native", "ull/kernels/params.h")
BUNDLE = ("ull/kernels", "ull/native/base", "ull", "build/ull_build")  # of random weights

_SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h", ".json", ".py", ".toml", ".txt"}


def digest(*paths: str | Path, extra: str = "") -> str:
    """Of every source file below `paths` (from the repository's root on), by path and content, and of `extra`."""
    found = hashlib.sha256(extra.encode())
    for path in sorted({file for one in paths for file in _files(ROOT / one)}):
        found.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:24]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file()]
