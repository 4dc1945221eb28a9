"""The kernel tests' other machine: with ULL_KERNELS=device, `emulation.build` compiles for the GPU and runs there.

Every array that a launch points to is copied to the device before it and back after it, so the same tests, with the
same NumPy references, prove the kernels on the chip.

A kernel is launched as the engine launches it: it may begin before its predecessor has ended. That one is a kernel
which lets it begin at once and then, much later, writes what the test says that a predecessor writes; until then there
are 0xFF bytes. So a missing griddepcontrol.wait gives wrong results here too.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from emulation import source_of
from ull.gpu import params as layout
from ull_build.code import nvrtc
from ull_build.code.kernels import INCLUDE_DIRECTORIES, compile_file, options_for
from ull_build.code.std_headers import STD_HEADERS

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache/cubins"
PREDECESSOR = ROOT / "tests/doubles/emulator/predecessor.cu"
PREDECESSOR_GRID, PREDECESSOR_THREADS = (8, 1), 256
REGIONS = 16  # that one predecessor can write
# How long it waits before it writes: until the next launch has surely come to the device and has begun there.
SPIN_NS = 200_000
BLOCKS = {  # parameter -> what it points to, where a test gives a ctypes object
    "round": layout.Round,
    "state": layout.State,
    "chunk": layout.Chunk,
    "requests": layout.RoundRequest * layout.ROUND_SLOTS,
    "results": layout.RoundResult * layout.ROUND_SLOTS,
    "control": layout.HostControl,
}
_arrays: dict[int, tuple[int, Any]] = {}  # address -> bytes, weak reference to the array
_lost: list[str] = []  # the launch after which the context answers nothing but its error


class _Region(ctypes.Structure):
    _fields_ = [("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _PredecessorParams(ctypes.Structure):
    _fields_ = [("regions", _Region * REGIONS), ("count", ctypes.c_int64), ("spin_ns", ctypes.c_uint64)]


class DeviceError(RuntimeError):
    """A driver call failed; the message names call and error."""


def register(array: NDArray[Any]) -> None:
    """Remembers where the memory of the array lies: of its owner, since the array may be a view that is gone soon."""
    while type(array.base) is type(array):
        array = array.base
    _arrays[array.ctypes.data] = (array.nbytes, weakref.ref(array))


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    if int(answer[0]) != 0:
        raise DeviceError("; ".join([f"{call}: {answer[0].name}", *_lost]))
    return answer[1] if len(answer) > 1 else None


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    _check("cuInit", driver.cuInit(0))
    device = _check("cuDeviceGet", driver.cuDeviceGet(0))
    context = _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    atexit.register(driver.cuDevicePrimaryCtxRelease, device)
    return driver


@functools.cache
def _stream() -> Any:
    """Of every launch: not the default one, whose launches wait for all other streams and all others for them."""
    driver = _driver()
    return _check("cuStreamCreate", driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


@functools.cache
def build(sources: tuple[str | Path, ...], macros: tuple[tuple[str, int | float], ...]) -> DeviceKernels:
    """Compiles `sources` with NVRTC for these macros (without ULL_), side by side, and loads them."""
    defines = {f"ULL_{key}": f"{value!r}F" if isinstance(value, float) else str(value) for key, value in macros}
    with ThreadPoolExecutor() as pool:
        return DeviceKernels(list(pool.map(lambda source: _cubin(source_of(source), defines), sources)))


def _cubin(source: Path, defines: Mapping[str, str]) -> bytes:
    """The source compiled for these macros, cached by all that goes into it. Safe in several processes."""
    inputs = (source.read_bytes(), _headers(), options_for("sm_90a"), sorted(defines.items()), nvrtc.version())
    output = CACHE / f"{source.stem}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:24]}.cubin"
    if output.exists():
        return output.read_bytes()
    CACHE.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".lock").open("w") as lock:  # whoever comes second waits for the first one's
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            temporary = output.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(compile_file(source, defines).cubin)
            temporary.rename(output)
    return output.read_bytes()


@functools.cache
def _headers() -> str:
    """Stands for the content of every header that a source may include."""
    paths = [path for folder in INCLUDE_DIRECTORIES for path in sorted(folder.rglob("*.*h")) if path.is_file()]
    return hashlib.sha256(repr([STD_HEADERS, *(path.read_bytes() for path in paths)]).encode()).hexdigest()


class DeviceKernels:
    """Loaded cubins, with the interface of `emulation.Kernels`."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self._modules = [_check("cuModuleLoadData", _driver().cuModuleLoadData(image)) for image in images]

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
        """Runs one launch to its end. `seed`, `constants`, `earlier` and `host_reads` are the emulator's."""
        driver = _driver()
        function = self._function(name)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        passed = type(params).from_buffer_copy(params)
        copies: dict[int, tuple[int, int]] = {}  # host address -> bytes, device address
        held: list[int] = []  # device addresses of what the predecessor writes
        try:
            for struct, field, value in _pointers(passed):
                base, offset, size = _extent(field, value)
                if base not in copies:
                    address = int(_check("cuMemAlloc", driver.cuMemAlloc(max(size, 1))))
                    copies[base] = (size, address)
                    _check("cuMemcpyHtoD", driver.cuMemcpyHtoD(address, base, size))
                setattr(struct, field, copies[base][1] + offset)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(passed))
            config = _config(grid, threads, shared_bytes, overlaps=True)
            before = self._hold(predecessor_writes, copies, held)
            if before.count:  # as short a time before the launch as can be
                _launch_predecessor(before)
            launch = driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0)
            _check(f"launch of {name}", launch)
            self._finish(name)
            for base, (size, address) in copies.items():
                _check("cuMemcpyDtoH", driver.cuMemcpyDtoH(base, address, size))
        finally:
            for address in (*(address for _, address in copies.values()), *held):
                driver.cuMemFree(address)

    def _hold(
        self, arrays: Sequence[NDArray[Any]], copies: Mapping[int, tuple[int, int]], held: list[int]
    ) -> _PredecessorParams:
        """Puts what is in these arrays aside on the device, and 0xFF bytes where a kernel reads them."""
        driver = _driver()
        params = _PredecessorParams(spin_ns=SPIN_NS)
        for array in arrays:
            host = array.ctypes.data
            around = [
                start for start, (size, _) in copies.items() if start <= host and host + array.nbytes <= start + size
            ]
            if not around or not array.nbytes:
                continue  # the launch has no pointer to it
            live = copies[around[0]][1] + host - around[0]
            held.append(int(_check("cuMemAlloc", driver.cuMemAlloc(array.nbytes))))
            _check("cuMemcpyHtoD", driver.cuMemcpyHtoD(held[-1], host, array.nbytes))
            _check("cuMemsetD8", driver.cuMemsetD8(live, 0xFF, array.nbytes))
            params.regions[params.count] = _Region(held[-1], live, array.nbytes)  # IndexError: REGIONS are too few
            params.count += 1
        _check("cuCtxSynchronize", driver.cuCtxSynchronize())
        return params

    def _finish(self, name: str) -> None:
        """Waits for the launch. If that breaks the context, whatever comes later fails and names this launch."""
        try:
            _check(name, _driver().cuCtxSynchronize())
        except DeviceError as error:
            _lost[:] = _lost or [f"the context was lost before, by {error}"]
            raise

    def _function(self, name: str) -> Any:
        for module in self._modules:
            status, function = _driver().cuModuleGetFunction(module, name.encode())
            if int(status) == 0:
                return function
        raise DeviceError(f"no kernel {name} in the compiled sources")


def _config(grid: tuple[int, int], threads: int, shared_bytes: int, overlaps: bool) -> Any:
    """A launch; `overlaps`: it may begin before the one ahead of it has ended (PDL)."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, _stream()
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def _predecessor() -> tuple[Any, Any]:
    """The kernel that runs before another one, and its launch."""
    driver = _driver()
    module = _check("cuModuleLoadData", driver.cuModuleLoadData(_cubin(PREDECESSOR, {})))
    function = _check("cuModuleGetFunction", driver.cuModuleGetFunction(module, b"ull_predecessor"))
    return function, _config(PREDECESSOR_GRID, PREDECESSOR_THREADS, 0, overlaps=False)


def _launch_predecessor(params: _PredecessorParams) -> None:
    function, config = _predecessor()
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    _check("launch of the predecessor", _driver().cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0))


def _pointers(params: ctypes.Structure) -> list[tuple[ctypes.Structure, str, int]]:
    """(struct, field, address) of every pointer that is not null, those of structs within it too."""
    found = []
    for field, kind, *_ in params._fields_:
        value = getattr(params, field)
        if isinstance(value, ctypes.Structure):
            found += _pointers(value)
        elif kind is ctypes.c_void_p and value:
            found.append((params, field, value))
    return found


def _extent(field: str, address: int) -> tuple[int, int, int]:
    """(start, offset, bytes) of the registered array around `address`, or of the block that the field names."""
    around = [
        (size, start)
        for start, (size, array) in _arrays.items()
        if start <= address < start + max(size, 1) and array() is not None
    ]
    if around:  # the largest: several arrays may be views of one
        size, start = max(around)
        return start, address - start, size
    if field in BLOCKS:
        return address, 0, ctypes.sizeof(BLOCKS[field])
    raise DeviceError(f"`{field}` points to memory that no emulation.pointer() has named")


def macros_of(model: Mapping[str, int | float]) -> tuple[tuple[str, int | float], ...]:
    """A key for `build`."""
    return tuple(sorted(model.items()))
