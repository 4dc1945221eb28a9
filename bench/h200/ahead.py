"""The same bundle with kernels compiled for other settings of `ull_build.code.kernels.TUNING`, and what rounds
take then.

`time_ahead` is one step of a run: it yields findings as the steps of `measure.py` do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from journal import Finding
from rounds import RoundTimer, loaded

from report import percentiles
from ull.bundle import (
    CODE_DIRECTORY,
    MANIFEST_FILE,
    SEAL_FILE,
    device_parts,
    encode_manifest,
    open_bundle,
    write_sealed,
)
from ull_build.code.kernels import compile_kernels, write_code

SETTINGS = {  # KiB of weights for each multiprocessor that L2 is asked for, and whether by every layer
    "none": {"ULL_AHEAD_KIB": "0", "ULL_AHEAD_ALL": "0"},
    "64": {"ULL_AHEAD_KIB": "64", "ULL_AHEAD_ALL": "0"},
    "128": {"ULL_AHEAD_KIB": "128", "ULL_AHEAD_ALL": "0"},
    "64, every layer": {"ULL_AHEAD_KIB": "64", "ULL_AHEAD_ALL": "1"},
}


def retuned(bundle: Path, tuning: Mapping[str, str], output: Path) -> Path:
    """`bundle`, of one model, at `output` with kernels compiled for `tuning`; all other files are links to its own.

    Made once. Raises BuildError or OSError.
    """
    if (output / SEAL_FILE).exists():
        return output
    manifest = open_bundle(bundle).manifest
    (part,) = device_parts(manifest)
    staging = output.with_suffix(".part")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(
        bundle, staging, copy_function=os.link, ignore=shutil.ignore_patterns(CODE_DIRECTORY, MANIFEST_FILE, SEAL_FILE)
    )
    macros = {**part.macros(), **tuning}
    files = compile_kernels(macros, manifest.target, frozenset(part.code.kernels()))
    code, entries = write_code(files, macros, staging, manifest.target)
    others = {name: entry for name, entry in manifest.files.items() if not name.startswith(f"{CODE_DIRECTORY}/")}
    manifest = msgspec.structs.replace(manifest, code=code, files=others | entries)
    write_sealed(staging, encode_manifest(manifest))
    return staging.rename(output)


def time_ahead(bundle: Path, rounds: int, context: int = 128) -> Iterator[Finding]:
    """Plain rounds of one model for every setting, by the chain of kernels and by the one of all layers."""
    for name, tuning in SETTINGS.items():
        opened = open_bundle(
            retuned(bundle, tuning, bundle.with_name(f"{bundle.stem}-ahead-{name.replace(', ', '-')}"))
        )
        for persistent in (False, True):
            with loaded(opened, persistent=persistent) as program:
                timer = RoundTimer(program)
                times = timer.time_rounds(1, context, rounds)
                timer.drain()
            found: dict[str, Any] = {"setting": name, "persistent": persistent, "context": context}
            yield {"ahead": found | {"period_us": percentiles(times.period / 1e3), "mean_us": times.mean_ns / 1e3}}
