"""NVIDIA's run-time compiler as a library: CUDA C++ source to a cubin, without a toolkit and without a GPU."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ull.errors import BuildError

INSTALL = "install it with `pip install ull[gpu]`"

_FUNCTION = re.compile(r"Function properties for (\S+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass
class FunctionUse:
    """What the assembler says about one function: bytes of stack and of spilled registers, registers per thread."""

    stack: int = 0
    spills: int = 0
    registers: int = 0
    is_kernel: bool = False


@dataclass(frozen=True)
class Compiled:
    """A cubin, the compiler's log, what each function in it uses, and the PTX that it was assembled from."""

    cubin: bytes
    log: str
    functions: dict[str, FunctionUse]
    ptx: str

    @property
    def kernels(self) -> list[str]:
        return sorted(name for name, use in self.functions.items() if use.is_kernel)


@cache
def _library() -> Any:
    """The bindings. Raises BuildError when they or the compiler are not installed."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()  # finds the library
    except ImportError as error:
        raise BuildError(f"a GPU target needs cuda-python, which is not installed: {INSTALL}", "target") from error
    except (RuntimeError, OSError) as error:  # of cuda.pathfinder, whose own classes derive from these
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BuildError(f"a GPU target needs NVRTC, which cannot be loaded ({reason}): {INSTALL}", "target") from error
    return nvrtc


def version() -> tuple[int, int]:
    """CUDA version of the compiler. Raises BuildError when there is none."""
    nvrtc = _library()
    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


def compile_source(name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> Compiled:
    """Compiles one translation unit; `headers` maps the name in #include to its text.

    Raises BuildError with the first error of the compiler's log.
    """
    nvrtc = _library()
    texts = [text.encode() for text in headers.values()]
    names = [header.encode() for header in headers]
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(texts), texts, names)
    _check(nvrtc, status, name, "")
    try:
        arguments = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        _check(nvrtc, status, name, log)
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, log, parse_log(log), ptx)


def parse_log(log: str) -> dict[str, FunctionUse]:
    """Reads the assembler's remarks (--ptxas-options=-v) by function."""
    functions: dict[str, FunctionUse] = {}
    name = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match[1]
            functions.setdefault(name, FunctionUse()).is_kernel = True
        elif match := _FUNCTION.search(line):
            name = match[1]
            functions.setdefault(name, FunctionUse())
        elif (match := _MEMORY.search(line)) and name:
            functions[name].stack = int(match[1])
            functions[name].spills = int(match[2]) + int(match[3])
        elif (match := _REGISTERS.search(line)) and name:
            functions[name].registers = int(match[1])
    return functions


def _fetch(size_of: Any, get: Any, program: Any) -> bytes:
    """One of a program's outputs; the bindings fill a bytes object in place."""
    _, size = size_of(program)
    data = bytes(int(size))
    get(program, data)
    return data


def _check(nvrtc: Any, status: Any, name: str, log: str) -> None:
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    lines = [line for line in log.splitlines() if "error" in line]
    reason = lines[0] if lines else nvrtc.nvrtcGetErrorString(status)[1].decode()
    raise BuildError(f"{name} does not compile: {reason}", field=name)
