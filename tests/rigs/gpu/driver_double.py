"""The driver double of tests/doubles/fakecuda: a `libcuda.so.1` that runs emulated kernels, for processes that
tests start.

environment = driver_double.environment(emulation.build_library(sources, model), fault="hang=3")
subprocess.run([sys.executable, ...], env=environment)
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import emulation

FOLDER = emulation.ROOT / "tests/doubles/fakecuda"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def library_folder() -> Path:
    """A folder that holds libcuda.so.1 and nothing else, for LD_LIBRARY_PATH."""
    includes = (FOLDER, emulation.EMULATOR, emulation.KERNELS)
    sources = sorted(FOLDER.glob("*.cpp"))
    objects = emulation.compile_all([(source, FLAGS) for source in sources], includes)
    library = emulation.compiled(objects, ("-shared", "-Wl,-soname,libcuda.so.1", *FLAGS), ".so")
    folder = library.with_suffix("")
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "libcuda.so.1").symlink_to(library)
    return folder


def environment(
    kernels: Path | str | None = None, *, imports: Sequence[Path] = (), **options: object
) -> dict[str, str]:
    """This process's environment with the double in place of the driver, and without TensorRT or its double.

    `kernels`: a library of emulation.build_library(), or several, as fake.h says. `imports`: folders of more modules
    that a program needs.
    `options`: fake.h lists them (capability="8.0", fault="hang=2").
    """
    own = [*imports, *(emulation.ROOT / folder for folder in ("tests", "build", "."))]
    found = [path for path in sys.path if path != str(emulation.ROOT / "tests/doubles/tensorrt_double")]
    paths = [str(library_folder()), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    settings = {f"ULL_FAKECUDA_{name.upper()}": str(value) for name, value in options.items()}
    if kernels is not None:
        settings["ULL_FAKECUDA_KERNELS"] = str(kernels)
    settings["ULL_PATIENCE_S"] = "300"  # an emulated round beside other work takes seconds
    settings["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, own), *found]))
    return {**os.environ, **settings}


def cubin(*kernels: str, machine: int = 190) -> bytes:
    """The least that the double takes for a cubin: an ELF file (190: EM_CUDA) whose symbol table names the kernels."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in kernels)
    symbols, offset = bytes(24), 1
    for name in kernels:
        symbols += struct.pack("<IBBHQQ", offset, 0x12, 0, 1, 0, 0)  # a global function
        offset += len(name) + 1
    sections = bytes(64)
    for kind, start, size, link, entry in (
        (2, 64, len(symbols), 2, 24),  # SHT_SYMTAB, with its strings in section 2
        (3, 64 + len(symbols), len(names), 0, 0),  # SHT_STRTAB
    ):
        sections += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, start, size, link, 0, 8, entry)
    ident = b"\x7fELF" + bytes([2, 1, 1, 0x33]) + bytes(8)
    table = 64 + len(symbols) + len(names)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 0)
    return header + symbols + names + sections
