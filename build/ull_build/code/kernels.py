"""Compiles `ull/kernels/*.cu` for a model: one cubin per source file, every dimension a macro."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ull
from ull.bundle import CODE_DIRECTORY, DEVICE_KERNELS, GPU_ARCHITECTURES, CodeFile, DeviceCode, FileEntry, Target
from ull.errors import BuildError
from ull_build.code import nvrtc
from ull_build.code.std_headers import STD_HEADERS

SOURCES = Path(ull.__file__).parent / "kernels"
INCLUDE_DIRECTORIES = (SOURCES, Path(ull.__file__).parent / "native")
OPTIONS = (
    "--std=c++20",
    "--fmad=false",  # contraction is written out, so that the emulator and the chip agree
    "--device-as-default-execution-space",  # lambdas too, which NVRTC 13.0 would take for the host's
    "--generate-line-info",
    "--no-cache",  # beside a driver NVRTC keeps what it compiled, but not the assembler's remarks, which are read below
    "--ptxas-options=-v",
)
TUNING = {  # macros that change no bit of a result; bench/h200/ahead.py compares settings
    "ULL_AHEAD_KIB": "64",  # of weights for each multiprocessor that L2 is asked for: ull/kernels/linear/ahead.cuh
    "ULL_AHEAD_ALL": "0",  # 1: by every linear layer, not only by those that wait for short steps
}

_PART_OF = {  # rooms and files of sources that only some forwards need, by a kernel of theirs
    "attention": "ull_attention_8",
    "attention_pages": "ull_attention_pages",
    **{f"chunk_{name}": f"ull_chunk_{name}" for name in ("attention", "embed", "norm", "probe", "quantise", "store")},
    "chunk_linear": "ull_chunk_qkv",
    "dflash": "ull_dflash_taps",
    "dflash_chunk": "ull_dflash_chunk_kv",
    "eagle": "ull_eagle_taps",
    "eagle_chunk": "ull_eagle_chunk_kv",
    "head_scan": "ull_head_scan_1",
    "linear": "ull_o_8",
    "medusa": "ull_medusa_start",
    "persistent": "ull_layers_1",
}
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class CompiledFile:
    """The cubin of one source file."""

    source: Path
    compiled: nvrtc.Compiled


def all_sources() -> list[Path]:
    """Every translation unit, in the order of their names. Raises BuildError when ull was installed without them."""
    sources = sorted(SOURCES.rglob("*.cu"), key=lambda source: source.stem)
    if not sources:
        raise BuildError(f"{SOURCES} holds no kernel sources; reinstall ull", field="target")
    return sources


def kernel_sources(needed: frozenset[str] = DEVICE_KERNELS) -> list[Path]:
    """The translation units that the needed kernels are in. Raises BuildError as `all_sources` does."""
    unneeded = {part for part, kernel in _PART_OF.items() if kernel not in needed}
    return [source for source in all_sources() if unneeded.isdisjoint((source.parent.name, source.stem))]


def options_for(target: Target) -> list[str]:
    """NVRTC's options, but for the model's macros."""
    return [f"--gpu-architecture={target}", *OPTIONS]


def compile_file(source: Path, macros: Mapping[str, str], target: Target = "sm_90a") -> nvrtc.Compiled:
    """Compiles one source file, which where our kernels are tuned must need neither stack nor spilled registers.

    `macros`: the model's, and those of `TUNING` that shall be different.

    Raises BuildError naming the kernel that does, or the compiler's first error.
    """
    text = source.read_text(encoding="utf-8")
    headers = {**STD_HEADERS, **_headers(text, source.parent)}
    defines = [f"--define-macro={name}={value}" for name, value in {**TUNING, **macros}.items()]
    compiled = nvrtc.compile_source(source.name, text, headers, [*options_for(target), *defines])
    for name, use in compiled.functions.items():
        if GPU_ARCHITECTURES[target].has_bulk_copies and (use.stack or use.spills):
            raise BuildError(
                f"{source.name}: {name} needs {use.stack} bytes of stack and spills {use.spills} bytes of registers "
                "with this model's dimensions, which would cost far more than it should; this is a bug of ull",
                field=name,
            )
    if not compiled.kernels:
        raise BuildError(f"{source.name} holds no kernel", field=source.name)
    return compiled


def compile_kernels(
    macros: Mapping[str, str],
    target: Target = "sm_90a",
    needed: frozenset[str] = DEVICE_KERNELS,
    progress: Callable[[CompiledFile], None] | None = None,
    threads: int = 0,
) -> list[CompiledFile]:
    """Compiles every source file with a needed kernel; `progress` hears of each one that is done.

    Raises BuildError for the first one that fails, and when a kernel that a round needs is in none of them.
    """
    nvrtc.version()  # says what is missing before anything starts
    sources = kernel_sources(needed)
    pool = ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)))
    try:
        compiled = []
        results = pool.map(lambda source: compile_file(source, macros, target), sources)
        for source, result in zip(sources, results, strict=True):
            compiled.append(CompiledFile(source, result))
            if progress:
                progress(compiled[-1])
    finally:
        pool.shutdown(cancel_futures=True)
    check_complete(compiled, needed)
    return compiled


def check_complete(files: Iterable[CompiledFile], needed: frozenset[str] = DEVICE_KERNELS) -> None:
    """Every kernel of a round is there, once. Raises BuildError."""
    names = [name for file in files for name in file.compiled.kernels]
    missing = sorted(needed - set(names))
    if missing:
        raise BuildError(f"the kernel sources lack {', '.join(missing)}; reinstall ull", field="target")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BuildError(f"several kernel sources define {', '.join(twice)}; reinstall ull", field="target")


def write_code(
    files: list[CompiledFile],
    macros: Mapping[str, str],
    directory: Path,
    target: Target = "sm_90a",
    folder: str = CODE_DIRECTORY,
) -> tuple[DeviceCode, dict[str, FileEntry]]:
    """Writes the cubins under `directory`/`folder`; returns the manifest's account of them and its table of files."""
    (directory / folder).mkdir()
    entries: dict[str, FileEntry] = {}
    code_files = []
    for file in files:
        name = f"{folder}/{file.source.stem}.cubin"
        cubin = file.compiled.cubin
        (directory / name).write_bytes(cubin)
        entries[name] = FileEntry(sha256=hashlib.sha256(cubin).hexdigest(), bytes=len(cubin))
        code_files.append(CodeFile(path=name, kernels=file.compiled.kernels))
    major, minor = nvrtc.version()
    code = DeviceCode(
        compiler="NVRTC",
        toolkit=f"{major}.{minor}",
        options=options_for(target),
        macros={**TUNING, **macros},
        files=code_files,
    )
    return code, entries


def describe_file(file: CompiledFile) -> str:
    """One line about a compiled file."""
    registers = max(use.registers for use in file.compiled.functions.values())
    count = len(file.compiled.kernels)
    return f"{file.source.name}: {count} kernel{'s' if count > 1 else ''}, at most {registers} registers"


def _headers(text: str, directory: Path) -> dict[str, str]:
    """Every header of ours that `text` includes, directly or through others, by the name it is included by."""
    headers: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name in headers:
                continue
            path = next((base / name for base in (directory, *INCLUDE_DIRECTORIES) if (base / name).is_file()), None)
            if path is not None:  # else only the emulator's branch includes it, or the compiler says that it is missing
                headers[name] = path.read_text(encoding="utf-8")
                waiting.append(headers[name])
    return headers
