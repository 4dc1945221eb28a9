"""The kernel tests' other machine: with ULL_KERNELS=device, `emulation.build` compiles for the GPU and runs there.

Every array that a launch points to is copied to the device before it and back after it, so the same tests, with the
same NumPy references, prove the kernels on the chip.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ull.gpu import params as layout
from ull_build.kernels import compile_file

KERNELS = Path(__file__).parent.parent / "ull/kernels"
BLOCKS = {  # parameter -> what it points to, where a test gives a ctypes object
    "round": layout.Round,
    "state": layout.State,
    "requests": layout.RoundRequest * layout.ROUND_SLOTS,
    "results": layout.RoundResult * layout.ROUND_SLOTS,
    "control": layout.HostControl,
}
_arrays: dict[int, tuple[int, Any]] = {}  # address -> bytes, weak reference to the array


class DeviceError(RuntimeError):
    """A driver call failed; the message names call and error."""


def register(array: NDArray[Any]) -> None:
    """Remembers how many bytes lie at the array's address."""
    _arrays[array.ctypes.data] = (array.nbytes, weakref.ref(array))


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    if int(answer[0]) != 0:
        raise DeviceError(f"{call}: {answer[0].name}")
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
def build(sources: tuple[str | Path, ...], macros: tuple[tuple[str, int | float], ...]) -> DeviceKernels:
    """Compiles `sources` with NVRTC for these macros (without ULL_) and loads them."""
    defines = {f"ULL_{key}": f"{value!r}F" if isinstance(value, float) else str(value) for key, value in macros}
    return DeviceKernels([compile_file(KERNELS / source, defines).cubin for source in sources])


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
    ) -> None:
        """Runs one launch to its end. `seed` and `predecessor_writes` are the emulator's."""
        driver = _driver()
        function = self._function(name)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        passed = type(params).from_buffer_copy(params)
        copies: dict[int, tuple[int, int]] = {}  # host address -> bytes, device address
        try:
            for field, value in _pointers(params):
                base, offset, size = _extent(field, value)
                if base not in copies:
                    address = int(_check("cuMemAlloc", driver.cuMemAlloc(max(size, 1))))
                    copies[base] = (size, address)
                    _check("cuMemcpyHtoD", driver.cuMemcpyHtoD(address, base, size))
                setattr(passed, field, copies[base][1] + offset)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(passed))
            launch = driver.cuLaunchKernel(
                function, *grid, 1, threads, 1, 1, shared_bytes, 0, ctypes.addressof(arguments), 0
            )
            _check(f"launch of {name}", launch)
            _check(f"{name}", driver.cuCtxSynchronize())
            for base, (size, address) in copies.items():
                _check("cuMemcpyDtoH", driver.cuMemcpyDtoH(base, address, size))
        finally:
            for _, address in copies.values():
                driver.cuMemFree(address)

    def _function(self, name: str) -> Any:
        for module in self._modules:
            status, function = _driver().cuModuleGetFunction(module, name.encode())
            if int(status) == 0:
                return function
        raise DeviceError(f"no kernel {name} in the compiled sources")


def _pointers(params: ctypes.Structure) -> list[tuple[str, int]]:
    """(field, address) of every pointer that is not null."""
    fields = [(name, getattr(params, name)) for name, kind, *_ in params._fields_ if kind is ctypes.c_void_p]
    return [(name, value) for name, value in fields if value]


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
