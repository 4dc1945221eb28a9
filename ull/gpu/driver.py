"""The CUDA driver's calls that loading an engine takes, typed: handles and addresses are plain integers.

All that is untyped of cuda-python stays in here. A call that fails raises GpuError with the driver's name for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

from ull.bundle import capability_text
from ull.errors import GpuError

INSTALL = "install it with `pip install ull[gpu]`"


@dataclass(frozen=True)
class DeviceInfo:
    """What a GPU is. `driver` is the CUDA version that its driver speaks, (major, minor)."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # dynamic shared memory that a block may ask for
    memory_bytes: int
    driver: tuple[int, int]
    uuid: bytes


class Driver:
    """One device and its primary context, which `close` gives back."""

    def __init__(self, device: int = 0) -> None:
        self._api = _load_api()
        self._context = 0
        self._call("cuInit", 0)
        count = int(self._call("cuDeviceGetCount"))
        if not 0 <= device < count:
            have = "none" if count == 0 else f"{count}, numbered from 0"
            raise GpuError("no_gpu", f"there is no GPU number {device}: this machine offers {have}")
        self._device = self._call("cuDeviceGet", device)
        self.info = self._read_info()

    def open(self) -> None:
        """Makes the device's primary context current in this thread."""
        self._context = int(self._call("cuDevicePrimaryCtxRetain", self._device))
        self._call("cuCtxSetCurrent", self._handle("CUcontext", self._context))

    @property
    def context(self) -> int:
        return self._context

    def close(self) -> None:
        if self._context:
            self._context = 0
            self._give_back("cuDevicePrimaryCtxRelease", self._device)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._give_back("cuMemFree", self._handle("CUdeviceptr", address))

    def allocate_host(self, nbytes: int) -> tuple[int, int]:
        """Page-locked host memory that the device sees too: (address on the host, address on the device)."""
        flags = self._api.CU_MEMHOSTALLOC_PORTABLE | self._api.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(self._call("cuMemHostAlloc", nbytes, flags))
        return host, int(self._call("cuMemHostGetDevicePointer", host, 0))

    def free_host(self, address: int) -> None:
        self._give_back("cuMemFreeHost", address)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Asynchronous; `source` is a host address."""
        self._call("cuMemcpyHtoDAsync", self._handle("CUdeviceptr", target), source, nbytes, self._stream(stream))

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Asynchronous; `target` is a host address."""
        self._call("cuMemcpyDtoHAsync", target, self._handle("CUdeviceptr", source), nbytes, self._stream(stream))

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Asynchronous."""
        pointers = (self._handle("CUdeviceptr", address) for address in (target, source))
        self._call("cuMemcpyDtoDAsync", *pointers, nbytes, self._stream(stream))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", self._handle("CUdeviceptr", target), byte, nbytes, self._stream(stream))

    # ---- streams and events ---------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that no other waits for, of the highest priority."""
        _, greatest = self._call("cuCtxGetStreamPriorityRange")
        flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuStreamCreateWithPriority", flags, int(greatest)))

    def destroy_stream(self, stream: int) -> None:
        self._give_back("cuStreamDestroy", self._stream(stream))

    def synchronise(self, stream: int) -> None:
        self._call("cuStreamSynchronize", self._stream(stream))

    def create_event(self) -> int:
        return int(self._call("cuEventCreate", self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", self._handle("CUevent", event), self._stream(stream))

    def wait(self, event: int) -> None:
        """Blocks until what came before the event's last record is done."""
        self._call("cuEventSynchronize", self._handle("CUevent", event))

    def destroy_event(self, event: int) -> None:
        self._give_back("cuEventDestroy", self._handle("CUevent", event))

    # ---- kernels --------------------------------------------------------------------------------------------------

    def load_module(self, cubin: bytes) -> int:
        return int(self._call("cuModuleLoadData", cubin))

    def unload_module(self, module: int) -> None:
        self._give_back("cuModuleUnload", self._handle("CUmodule", module))

    def function(self, module: int, name: str) -> int:
        return int(self._call("cuModuleGetFunction", self._handle("CUmodule", module), name.encode()))

    def allow_shared_bytes(self, function: int, nbytes: int) -> None:
        """Lets a kernel's blocks have that much dynamic shared memory."""
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._handle("CUfunction", function), attribute, nbytes)

    def prefer_shared_memory(self, function: int) -> None:
        """Has a kernel's multiprocessors keep as much of their memory as can be for shared memory."""
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._call("cuFuncSetAttribute", self._handle("CUfunction", function), attribute, 100)  # percent

    def resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        """How many such blocks of a kernel a multiprocessor runs at once."""
        kernel = self._handle("CUfunction", function)
        return int(self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, threads, shared_bytes))

    def granted_multiprocessors(self) -> int:
        """The multiprocessors that our context may use: not all where MPS limits it."""
        kind = self._api.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT
        if not int(self._call("cuDeviceGetExecAffinitySupport", kind, self._device)):
            return self.info.multiprocessors
        return min(self.info.multiprocessors, int(self._call("cuCtxGetExecAffinity", kind).param.smCount.val))

    def launch(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        params: ctypes.Structure,
        overlaps: bool,
    ) -> None:
        """Launches a kernel that takes one struct; `overlaps` lets it begin before its predecessor has ended (PDL)."""
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, self._stream(stream)
        if overlaps:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = self._api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        kernel = self._handle("CUfunction", function)
        self._call("cuLaunchKernelEx", config, kernel, ctypes.addressof(arguments), 0)

    # ---- graphs ---------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream(stream), mode)

    def end_capture(self, stream: int) -> int:
        return int(self._call("cuStreamEndCapture", self._stream(stream)))

    def instantiate(self, graph: int) -> int:
        return int(self._call("cuGraphInstantiate", self._handle("CUgraph", graph), 0))

    def node_types(self, graph: int) -> list[str]:
        """The type of each node ("KERNEL", "MEMCPY", ...), those of child graphs in their place."""
        _, count = self._call("cuGraphGetNodes", self._handle("CUgraph", graph), 0)
        nodes, _ = self._call("cuGraphGetNodes", self._handle("CUgraph", graph), count)
        types: list[str] = []
        for node in nodes[:count]:
            name = str(self._call("cuGraphNodeGetType", node).name).removeprefix("CU_GRAPH_NODE_TYPE_")
            if name == "GRAPH":
                types += self.node_types(int(self._call("cuGraphChildGraphNodeGetGraph", node)))
            else:
                types.append(name)
        return types

    def destroy_graph(self, graph: int) -> None:
        self._give_back("cuGraphDestroy", self._handle("CUgraph", graph))

    def upload(self, executable: int, stream: int) -> None:
        self._call("cuGraphUpload", self._handle("CUgraphExec", executable), self._stream(stream))

    def replay(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", self._handle("CUgraphExec", executable), self._stream(stream))

    def destroy_executable(self, executable: int) -> None:
        self._give_back("cuGraphExecDestroy", self._handle("CUgraphExec", executable))

    # ---- the untyped part -----------------------------------------------------------------------------------------

    def _read_info(self) -> DeviceInfo:
        def attribute(name: str) -> int:
            key = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self._call("cuDeviceGetAttribute", key, self._device))

        version = int(self._call("cuDriverGetVersion"))
        return DeviceInfo(
            name=bytes(self._call("cuDeviceGetName", 128, self._device)).split(b"\0")[0].decode(errors="replace"),
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            memory_bytes=int(self._call("cuDeviceTotalMem", self._device)),
            driver=(version // 1000, version % 1000 // 10),
            uuid=bytes(self._call("cuDeviceGetUuid", self._device).bytes),
        )

    def _handle(self, kind: str, value: int) -> Any:
        return getattr(self._api, kind)(value)

    def _stream(self, stream: int) -> Any:
        return self._api.CUstream(stream)

    def _give_back(self, name: str, *arguments: Any) -> None:
        """Calls what releases something. Where that fails, something else has failed before, which must be heard."""
        with contextlib.suppress(GpuError):
            self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls the driver: what it returns behind its status. Raises GpuError."""
        status, *values = getattr(self._api, name)(*arguments)
        if int(status) != 0:
            raise GpuError(_code_of(status.name), f"{name} failed: {status.name}{_hint(status.name)}", status.name)
        return None if not values else values[0] if len(values) == 1 else tuple(values)


def describe_device(device: int = 0) -> dict[str, Any]:
    """A GPU as reports name it. Raises GpuError."""
    info = Driver(device).info
    return {
        "name": info.name,
        "capability": capability_text(info.capability),
        "multiprocessors": info.multiprocessors,
        "memory_bytes": info.memory_bytes,
        "driver": f"{info.driver[0]}.{info.driver[1]}",
    }


def _load_api() -> Any:
    try:
        api = importlib.import_module("cuda.bindings.driver")
        api.cuDriverGetVersion()  # finds libcuda.so.1
    except ImportError as error:
        raise GpuError("no_gpu", f"this bundle needs cuda-python, which is not installed: {INSTALL}") from error
    except (RuntimeError, OSError) as error:
        message = "this bundle needs an NVIDIA GPU, but no NVIDIA driver is installed here (libcuda.so.1 is missing)"
        raise GpuError("no_gpu", f"{message}; install the driver, or build a bundle for target cpu") from error
    return api


_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "; the driver sees no GPU (check nvidia-smi and CUDA_VISIBLE_DEVICES)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "; the driver's library and kernel module differ: reboot after its update",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "; update the NVIDIA driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "; another process may hold the memory (check nvidia-smi)",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "; the GPU's memory is damaged or needs a reset",
}
_CODES = {
    "CUDA_ERROR_NO_DEVICE": "no_gpu",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "old_driver",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "old_driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "gpu_memory",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "bad_code",
    "CUDA_ERROR_INVALID_IMAGE": "bad_code",
    "CUDA_ERROR_INVALID_SOURCE": "bad_code",
    "CUDA_ERROR_INVALID_PTX": "bad_code",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "old_driver",
    "CUDA_ERROR_NOT_FOUND": "bad_code",
}


def _code_of(name: str) -> str:
    return _CODES.get(name, "gpu_failed")


def _hint(name: str) -> str:
    return _HINTS.get(name, "")
