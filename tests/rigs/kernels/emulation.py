"""Kernels of `ull/kernels` on the CPU: compiled by g++ against tests/doubles/emulator, run from NumPy arrays.

    kernels = emulation.build(["qkv.cu"], {"HIDDEN": 256})
    kernels.run("ull_qkv_8", grid=(8, 1), threads=288, shared_bytes=4096, params=LinearParams(...), seed=3)

With ULL_SANITIZE=1 everything is built with ASan and UBSan; the process must then run with libasan preloaded, as
`make sanitize` arranges.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import re
import subprocess
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ull.bundle import DEVICE_INTERFACE
from ull.gpu.launch import Launch
from ull_build.code.kernels import TUNING

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "ull/kernels"
EMULATOR = ROOT / "tests/doubles/emulator"
CACHE = ROOT / ".cache/emulator"
INCLUDES = (EMULATOR, KERNELS, ROOT / "ull/native")
ON_DEVICE = os.environ.get("ULL_KERNELS", "") == "device"  # see device_kernels.py
SANITIZE = os.environ.get("ULL_SANITIZE", "") not in ("", "0")

TINY_MODEL: dict[str, int | float] = {  # what `build` takes for macros that a test leaves out: a small model
    "INTERFACE": DEVICE_INTERFACE,
    "HIDDEN": 128,
    "LAYERS": 2,
    "HEADS": 4,
    "KV_HEADS": 2,
    "HEAD_DIM": 32,
    "INTERMEDIATE": 352,
    "VOCABULARY": 4096,
    "QK_NORM": 0,
    "RMS_EPSILON": 1e-5,
    "WEIGHT_BITS": 8,
    "HEAD_BITS": 16,
    "KV_BITS": 16,
    "TAPS": 0,
    "MAY_LACK": 0,
    "BLOCK": 0,
    "WARPGROUP_TREES": 0,
    "FAST_PREFILL": 0,
    "MEDUSA_HEADS": 3,
    "MEDUSA_OWN_HEADS": 0,
    "EAGLE_TARGET_HIDDEN": 128,
    "EAGLE_TAPS": 3,
    "EAGLE_TAP_NORM": 0,
    "EAGLE_NORM_BEFORE_RESIDUAL": 0,
    "EAGLE_NORM_OUTPUT": 0,
    "EAGLE_MAPPED": 0,
    "DFLASH_TARGET_HIDDEN": 128,
    "DFLASH_TAPS": 3,
    "DFLASH_ANCHOR_PREDICTS": 0,
    "DFLASH_MAPPED": 0,
    "DFLASH_MARKOV": 0,
    "DFLASH_GATED": 0,
    "DFLASH_CONFIDENCE": 0,
    **{name.removeprefix("ULL_"): int(value) for name, value in TUNING.items()},
}

COMMON_FLAGS = (
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-DULL_EMULATOR"),
    *("-ffp-contract=off", "-fno-math-errno"),  # the kernels' arithmetic is what they write, on both sides
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-maybe-uninitialized"),
)
# A kernel is compiled for many models and runs little for each: more than -Og would take longer than it saves, but for
# whole engines.
KERNEL_LEVEL, ENGINE_LEVEL, EMULATOR_LEVEL = "-Og", "-O1", "-O2"
SANITIZE_FLAGS = ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
# Only kernels are compiled with these, and nothing is linked with them: the emulator is who gets the reports.
REPORT_FLAGS = ("-g1", "-fsanitize=thread")


class KernelError(Exception):
    """A launch failed: a deadlock, lanes that part at a warp operation, an illegal access, refused arguments."""


class _Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("params_bytes", ctypes.c_int32), ("most_threads", ctypes.c_int32)]


class _Region(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid_x", ctypes.c_int32),
        ("grid_y", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("params", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("written", ctypes.POINTER(_Region)),
        ("constants", ctypes.POINTER(_Region)),
        ("earlier", ctypes.POINTER(_Region)),
        ("host_reads", ctypes.POINTER(_Region)),
        ("written_count", ctypes.c_int32),
        ("constant_count", ctypes.c_int32),
        ("earlier_count", ctypes.c_int32),
        ("host_read_count", ctypes.c_int32),
    ]


class Prefetch(ctypes.Structure):
    """That a block asked L2 for some bytes; `waited`: behind wait_for_predecessor()."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("block", ctypes.c_int32),
        ("waited", ctypes.c_int32),
    ]


# A process may have 65,530 mappings. A library keeps up to two thousand for its next launch, and a process of tests
# loads a hundred libraries: only those that ran last keep theirs.
_MOST_KEEPING = 8
_keeping: list[ctypes.CDLL] = []


class Kernels:
    """A loaded library of emulated kernels. `path` is the library's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        kernels = ctypes.POINTER(_Kernel)()
        count = self._library.ull_emulator_kernels(ctypes.byref(kernels))
        self.params_bytes: dict[str, int] = {kernels[i].name.decode(): kernels[i].params_bytes for i in range(count)}

    def run(
        self,
        name: str,
        *,
        grid: tuple[int, int],
        threads: int,
        params: ctypes.Structure,
        shared_bytes: int = 0,
        seed: int = 0,
        predecessor_writes: Sequence[NDArray[Any]] = (),
        constants: Sequence[NDArray[Any]] = (),
        earlier: Sequence[NDArray[Any]] = (),
        host_reads: Sequence[NDArray[Any]] = (),
    ) -> None:
        """Runs one launch to its end; `seed` orders blocks and threads. KernelError says what went wrong, and where.

        `predecessor_writes`: each block reads these arrays as 0xFF bytes until it has called wait_for_predecessor().
        Kernels that report their accesses (see `build`) may load nothing before that but `constants`, such as weights,
        and, past L1, `earlier`: behind embed what begin and earlier rounds wrote (see `ull.gpu.rounds`). What they
        store in `host_reads`, if they tell the host so, they must have stored before they do.
        """
        if ctypes.sizeof(params) != self.params_bytes.get(name, ctypes.sizeof(params)):
            raise KernelError(
                f"{name} takes {self.params_bytes[name]} bytes of parameters, not {ctypes.sizeof(params)}"
            )
        lists = (predecessor_writes, constants, earlier, host_reads)
        regions = [(_Region * len(arrays))(*((pointer(array), array.nbytes) for array in arrays)) for arrays in lists]
        launch = _Launch(
            *(name.encode(), *grid, threads, shared_bytes, ctypes.addressof(params), seed),
            *(ctypes.cast(part, ctypes.POINTER(_Region)) for part in regions),
            *map(len, lists),
        )
        error = ctypes.create_string_buffer(4096)
        self._keep()
        if self._library.ull_emulator_launch(ctypes.byref(launch), error, ctypes.c_uint64(len(error))) != 0:
            raise KernelError(re.sub(r"\{\+(0x[0-9a-f]+)\}", self._source_line, error.value.decode()))

    def _keep(self) -> None:
        """Lets this library keep what it maps, and the one that has not run for longest no more."""
        if _keeping and _keeping[-1] is self._library:
            return
        if self._library in _keeping:
            _keeping.remove(self._library)
        _keeping.append(self._library)
        if len(_keeping) > _MOST_KEEPING:
            _keeping.pop(0).ull_emulator_give_back()

    def prefetches(self) -> list[Prefetch]:
        """What the last launch asked L2 for, in its order."""
        found = ctypes.POINTER(Prefetch)()
        count = self._library.ull_emulator_prefetches(ctypes.byref(found))
        return [Prefetch.from_buffer_copy(found[i]) for i in range(count)]

    def _source_line(self, place: re.Match[str]) -> str:
        """What stands at an offset in the library: the kernels' lines, the innermost first."""
        command = ["addr2line", "-i", "-s", "-e", str(self.path), hex(int(place[1], 16) - 1)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        return " < ".join(line.split(" ")[0] for line in lines if line and not line.startswith("emulated_arch.h"))


def run_launches(
    kernels: Kernels,
    launches: Iterable[Launch],
    seed: int = 0,
    predecessor_writes: Sequence[NDArray[Any]] = (),
    constants: Sequence[NDArray[Any]] = (),
    earlier: Sequence[NDArray[Any]] = (),
    host_reads: Sequence[NDArray[Any]] = (),
    after: Callable[[Launch], None] = lambda launch: None,
) -> None:
    """Runs launches one after another, the n-th with `seed` + n; `after` hears of each. See `Kernels.run`."""
    for number, launch in enumerate(launches):
        kernels.run(
            launch.kernel,
            grid=launch.grid,
            threads=launch.threads,
            shared_bytes=launch.shared_bytes,
            params=launch.params,
            seed=seed + number,
            predecessor_writes=predecessor_writes,
            constants=constants,
            earlier=earlier,
            host_reads=host_reads,
        )
        after(launch)


def build(
    sources: Sequence[str | Path],
    model: Mapping[str, int | float] | None = None,
    sanitize: bool = SANITIZE,
    reports: bool = False,
) -> Kernels:
    """Compiles `sources` (names in ull/kernels, or paths) for `model` (macros without ULL_; absent: TINY_MODEL's).

    `reports`: the kernels report their loads and stores, and races end a launch (tests/doubles/emulator/shadow.h).
    They take several times as long. Not together with `sanitize`.

    Cached in .cache/emulator by the content of everything that can be included. With ULL_KERNELS=device the kernels
    are compiled for the GPU and run there.
    """
    if ON_DEVICE:
        import device_kernels

        macros = device_kernels.macros_of({**TINY_MODEL, **(model or {})})
        return device_kernels.build(tuple(sources), macros)  # type: ignore[return-value]
    return _load(build_library(sources, model, sanitize, reports and not sanitize), sanitize)


@functools.cache
def _load(path: Path, sanitize: bool) -> Kernels:
    if sanitize and "libasan" not in Path("/proc/self/maps").read_text():
        raise RuntimeError("kernels built with sanitizers need libasan preloaded: run `make sanitize`")
    return Kernels(path)


def build_library(
    sources: Sequence[str | Path],
    model: Mapping[str, int | float] | None = None,
    sanitize: bool = SANITIZE,
    reports: bool = False,
    level: str = KERNEL_LEVEL,
) -> Path:
    macros = {**TINY_MODEL, **(model or {})}
    unknown = set(macros) - set(TINY_MODEL)
    if unknown:
        raise ValueError(f"no such model macro: {', '.join(sorted(unknown))}")
    flags = (*COMMON_FLAGS, *(SANITIZE_FLAGS if sanitize else processor_flags()))
    defines = [f"-DULL_{key}={f'{value}F' if isinstance(value, float) else value}" for key, value in macros.items()]
    more = (level, *defines, *(REPORT_FLAGS if reports else ()))
    jobs = [(source_of(source), (*flags, *more)) for source in sources]
    jobs += [(source, (*flags, EMULATOR_LEVEL)) for source in sorted(EMULATOR.glob("*.cpp"))]
    return compiled(compile_all(jobs, INCLUDES), ["-shared", "-Wl,-Bsymbolic", *flags], ".so")


def source_of(source: str | Path) -> Path:
    """The file of a kernel source: a name is looked for in the rooms of ull/kernels."""
    if isinstance(source, Path):
        return source
    found = list(KERNELS.rglob(source))
    if len(found) != 1:
        raise ValueError(f"{len(found)} files of ull/kernels are named {source}")
    return found[0]


def processor_flags() -> tuple[str, ...]:
    """-mfma makes ::fmaf one instruction; nothing is contracted, so the bits are the same without it."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    return tuple(f"-m{name}" for name in ("fma", "avx2") if f" {name} " in cpuinfo)


def compile_all(jobs: Iterable[tuple[Path, Sequence[str]]], includes: Sequence[Path]) -> list[Path]:
    """The object files of (source, flags), two compilers at a time."""
    flags = ["-c", *(f"-I{folder}" for folder in includes)]
    headers = [path for folder in includes for suffix in ("h", "cuh") for path in sorted(folder.rglob(f"*.{suffix}"))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in headers)).hexdigest()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: compiled([job[0]], [*flags, *job[1]], ".o", digest), jobs))


def compiled(inputs: Sequence[Path], flags: Sequence[str], suffix: str, also: str = "") -> Path:
    """The output of g++ for these inputs and flags, cached by their content and `also`. Safe in several processes."""
    digest = hashlib.sha256("\0".join([*flags, also]).encode())
    for path in inputs:
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    output = CACHE / f"{inputs[0].stem}-{digest.hexdigest()[:24]}{suffix}"
    if output.exists():
        return output
    CACHE.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".lock").open("w") as lock:  # whoever comes second waits for the first one's
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            _compile(inputs, flags, output, suffix)
    return output


def _compile(inputs: Sequence[Path], flags: Sequence[str], output: Path, suffix: str) -> None:
    temporary = output.with_suffix(f".{os.getpid()}{suffix}")
    language = ["-x", "c++"] if suffix == ".o" else []
    command = ["g++", *flags, *language, *map(str, inputs), "-o", str(temporary)]
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    temporary.rename(output)


def pointer(array: NDArray[Any]) -> int:
    """The array's address, for a c_void_p field. The caller keeps the array alive."""
    if not array.flags.c_contiguous:
        raise ValueError("kernels need a contiguous array")
    if ON_DEVICE:
        import device_kernels

        device_kernels.register(array)
    return array.ctypes.data


def aligned(shape: int | tuple[int, ...], dtype: DTypeLike, fill: Any = None) -> NDArray[Any]:
    """An array aligned to 128 bytes; what nobody wrote is 0xFF bytes (NaN), or `fill`.

    It ends (rounded up to 128 bytes) before an unreadable page, or an AddressSanitizer redzone: a kernel that reads or
    writes past it fails.
    """
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    size = count * dtype.itemsize
    address = _sanitized_memory(size) if SANITIZE else _guarded_memory(size)
    buffer = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(buffer, _release, address, size)
    array = np.frombuffer(buffer, dtype=dtype, count=count).reshape(shape)
    array.view(np.uint8)[...] = 0xFF
    if fill is not None:
        array[...] = fill
    return array


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def _pages(size: int) -> int:
    return -(-(-(-size // 128) * 128) // mmap.PAGESIZE) * mmap.PAGESIZE


def _guarded_memory(size: int) -> int:
    area = _libc.mmap(None, _pages(size) + mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if area in (None, ctypes.c_void_p(-1).value) or _libc.mprotect(area + _pages(size), mmap.PAGESIZE, 0) != 0:
        raise MemoryError(size)
    return area + _pages(size) - -(-size // 128) * 128


def _sanitized_memory(size: int) -> int:
    address = ctypes.c_void_p()
    if _libc.posix_memalign(ctypes.byref(address), 128, max(size, 1)) != 0 or address.value is None:
        raise MemoryError(size)
    return address.value


def _release(address: int, size: int) -> None:
    if SANITIZE:
        _libc.free(address)
    else:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE if size else address
        _libc.munmap(start, _pages(size) + mmap.PAGESIZE)
