"""Manifests that tests change: read, changed and sealed again, as if they had been built like that."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ull.bundle import MANIFEST_FILE, TOKEN_COUNTS, Plans, write_sealed

BUILT = {
    "version": "11.4.0.106",
    "gpu": "NVIDIA H200",
    "capability": "9.0",
    "files": [f"code/plans/{name}.plan" for name in ("entry", "exit", "head")],
    "token_counts": list(TOKEN_COUNTS),
    "scratch_bytes": 1 << 20,
    "exact": [1, 2, 4],
    "place_exact": True,
}


def read_manifest_json(bundle: Path) -> dict[str, Any]:
    """The manifest as plain data."""
    value: dict[str, Any] = json.loads((bundle / MANIFEST_FILE).read_bytes())
    return value


def write_manifest_json(bundle: Path, value: Any) -> str:
    """Writes `value` as the bundle's manifest and seals it; returns the digest."""
    return write_sealed(bundle, json.dumps(value, indent=2).encode())


def change_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Lets `change` edit the manifest, and seals the result; returns the digest."""
    value = read_manifest_json(bundle)
    change(value)
    return write_manifest_json(bundle, value)


def with_template(bundle: Path, directory: Path, template: str) -> Path:
    """A copy of `bundle` whose tokenizer has another template, as if an older build had taken it."""
    copy = directory / "other.ull"
    shutil.copytree(bundle, copy)
    name = "tokenizer/chat_template.jinja"
    (copy / name).write_text(template)
    entry = {"bytes": len(template), "sha256": hashlib.sha256(template.encode()).hexdigest()}
    change_manifest(copy, lambda manifest: manifest["files"].update({name: entry}))
    return copy


def plans(**changes: Any) -> Plans:
    return msgspec.convert({**BUILT, **changes}, Plans)
