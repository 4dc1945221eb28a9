"""The bundle's cubins on the device: kernels by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ull.bundle import Bundle, DeviceCode
from ull.errors import GpuError
from ull.gpu.driver import Driver
from ull.gpu.launch import Launch

_FREE_SHARED_BYTES = 48 << 10  # that a kernel gets without being allowed more


class Kernels:
    """The kernels of one of a bundle's models, loaded.

    Raises BundleError for a changed cubin, GpuError for one the driver refuses.
    """

    def __init__(self, driver: Driver, bundle: Bundle, code: DeviceCode) -> None:
        self._driver = driver
        self._modules: list[int] = []
        self._functions: dict[str, int] = {}
        self._shared_bytes: dict[str, int] = {}
        try:
            for file in code.files:
                module = self._load(bundle, file.path)
                for kernel in file.kernels:
                    self._functions[kernel] = self._find(module, kernel, file.path)
        except BaseException:
            self.close()
            raise

    @property
    def functions(self) -> Mapping[str, int]:
        return self._functions

    def prepare(self, launches: Iterable[Launch]) -> None:
        """Allows each kernel the most shared memory that any of these launches asks for.

        Raises GpuError where the device has not that much, or cannot run all blocks at once that wait for each other.
        """
        for launch in launches:
            if launch.shared_bytes > max(_FREE_SHARED_BYTES, self._shared_bytes.get(launch.kernel, 0)):
                limit = self._driver.info.shared_bytes
                if launch.shared_bytes > limit:
                    raise GpuError(
                        "wrong_gpu",
                        f"{launch.kernel} needs {launch.shared_bytes} bytes of shared memory per block, "
                        f"{self._driver.info.name} has {limit}",
                    )
                self._driver.allow_shared_bytes(self._functions[launch.kernel], launch.shared_bytes)
                self._shared_bytes[launch.kernel] = launch.shared_bytes
            if launch.meets:
                self._check_room(launch)

    def close(self) -> None:
        while self._modules:
            self._driver.unload_module(self._modules.pop())

    def _check_room(self, launch: Launch) -> None:
        """A block that has no multiprocessor would be waited for without end."""
        each = self._driver.resident_blocks(self._functions[launch.kernel], launch.threads, launch.shared_bytes)
        granted, blocks = self._driver.granted_multiprocessors(), launch.grid[0] * launch.grid[1]
        if each < 1 or blocks > granted:
            raise GpuError(
                "wrong_gpu",
                f"the {blocks} blocks of {launch.kernel} wait for each other and must run at once, but the driver "
                f"gives this process {granted} multiprocessors with room for {each} of them each; "
                "lift the MPS thread limit, or set engine.persistent = false",
            )

    def _load(self, bundle: Bundle, name: str) -> int:
        path = bundle.path / name
        cubin = bundle.read_verified(name, "rebuild it with ull-build")
        try:
            module = self._driver.load_module(cubin)
        except GpuError as error:
            raise GpuError(error.code, f"{path} cannot be loaded: {error.message}{_REMEDY}", error.field) from error
        self._modules.append(module)
        return module

    def _find(self, module: int, kernel: str, file: str) -> int:
        try:
            function = self._driver.function(module, kernel)
            # All the same: a multiprocessor that has to be divided anew for the next kernel must come to rest first.
            self._driver.prefer_shared_memory(function)
            return function
        except GpuError as error:
            message = f"{file} does not hold the kernel {kernel!r} ({error.message}){_REMEDY}"
            raise GpuError(error.code, message, error.field) from error


_REMEDY = "; rebuild the bundle with ull-build, or update the NVIDIA driver"
