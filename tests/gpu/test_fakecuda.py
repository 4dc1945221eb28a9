"""The driver double, driven through cuda-python as the engine does. Each `scenario_*` runs in a process of its own."""

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driver_double
import emulation
from driver_double import cubin
from probe import Probe

DOUBLES = Path(__file__).parents[1] / "doubles"
SUCCESS = "CUDA_SUCCESS"


@pytest.fixture(scope="module")
def kernels() -> Path:
    return emulation.build_library([DOUBLES / "emulator/barriers.cu", DOUBLES / "fakecuda/rounds.cu"])


def run(scenario: str, *arguments: object, **options: Any) -> str:
    """Runs `scenario` under the double; its output. Fails with its traceback."""
    program = f"import test_fakecuda as t; t.{scenario}(*{arguments!r})"
    environment = driver_double.environment(**options)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def api() -> Any:
    from cuda.bindings import driver

    return driver


def call(name: str, *arguments: Any) -> Any:
    status, *values = getattr(api(), name)(*arguments)
    assert status.name == SUCCESS, (name, status)
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def status(name: str, *arguments: Any) -> str:
    return getattr(api(), name)(*arguments)[0].name


def start() -> Any:
    """A context and a stream."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    return call("cuStreamCreate", api().CUstream_flags.CU_STREAM_NON_BLOCKING)


def device_array(values: np.ndarray) -> Any:
    address = call("cuMemAlloc", values.nbytes)
    call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)
    return address


def read_back(address: Any, like: np.ndarray) -> np.ndarray:
    result = np.empty_like(like)
    call("cuMemcpyDtoH", result.ctypes.data, address, result.nbytes)
    return result


def launch(
    function: Any, stream: Any, params: ctypes.Structure, grid: int = 1, threads: int = 32, shared: int = 0
) -> str:
    """With the attribute that lets it overlap with its predecessor."""
    config, attribute = api().CUlaunchConfig(), api().CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    attribute.id = api().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    return status("cuLaunchKernelEx", config, function, ctypes.addressof(arguments), 0)


# ---- the device ---------------------------------------------------------------------------------------------------


def scenario_device() -> None:
    call("cuInit", 0)
    attributes = api().CUdevice_attribute
    device = call("cuDeviceGet", 0)
    print(
        json.dumps(
            {
                "name": call("cuDeviceGetName", 64, device).split(b"\0")[0].decode(),
                "driver": call("cuDriverGetVersion"),
                "memory": call("cuDeviceTotalMem", device),
                "capability": [
                    call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                    call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
                ],
                "multiprocessors": call(
                    "cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device
                ),
                "shared": call(
                    "cuDeviceGetAttribute",
                    attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                    device,
                ),
            }
        )
    )


def test_the_device_is_an_h200_unless_told_otherwise() -> None:
    assert json.loads(run("scenario_device")) == {
        "name": "NVIDIA H200",
        "driver": 13000,
        "memory": 150_754_820_096,
        "capability": [9, 0],
        "multiprocessors": 132,
        "shared": 232448,
    }
    options = {"name": "NVIDIA A100 MIG 1g.5gb", "capability": "8.0", "driver": 12040, "multiprocessors": 14}
    other = json.loads(run("scenario_device", memory=5 << 30, **options))
    assert other == {**options, "memory": 5 << 30, "capability": [8, 0], "shared": 232448}


def scenario_no_device() -> None:
    assert status("cuInit", 0) == "CUDA_ERROR_NO_DEVICE"
    assert status("cuDeviceGetCount") == "CUDA_ERROR_NOT_INITIALIZED"


def test_no_device() -> None:
    run("scenario_no_device", devices=0)


def scenario_order_of_calls() -> None:
    assert status("cuMemAlloc", 16) == "CUDA_ERROR_NOT_INITIALIZED"
    call("cuInit", 0)
    assert status("cuMemAlloc", 16) == "CUDA_ERROR_INVALID_CONTEXT"
    start()
    call("cuMemAlloc", 16)
    assert call("cuGetErrorName", api().CUresult.CUDA_ERROR_ILLEGAL_ADDRESS) == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(RuntimeError, match="cuCtxCreate"):
        api().cuCtxCreate(None, 0, 0)  # what the double lacks is not found


def test_calls_out_of_order() -> None:
    run("scenario_order_of_calls")


# ---- memory -------------------------------------------------------------------------------------------------------


def scenario_memory() -> None:
    stream = start()
    free, total = call("cuMemGetInfo")
    assert (free, total) == (600_000, 1_000_000)
    values = np.arange(1000, dtype=np.int32)
    address = device_array(values)
    assert int(address) % 256 == 0
    assert call("cuMemGetInfo")[0] == free - values.nbytes
    assert np.array_equal(read_back(address, values), values)

    past = api().CUdeviceptr(int(address) + 4)
    assert status("cuMemcpyHtoD", past, values.ctypes.data, values.nbytes) == "CUDA_ERROR_INVALID_VALUE"
    assert status("cuMemcpyDtoH", values.ctypes.data, past, values.nbytes) == "CUDA_ERROR_INVALID_VALUE"
    assert status("cuMemsetD8", past, 0, values.nbytes) == "CUDA_ERROR_INVALID_VALUE"
    assert status("cuMemFree", past) == "CUDA_ERROR_INVALID_VALUE"
    assert status("cuMemAlloc", 700_000) == "CUDA_ERROR_OUT_OF_MEMORY"

    call("cuMemsetD8Async", address, 7, 16, stream)
    call("cuMemsetD32Async", past, 9, 1, stream)
    call("cuStreamSynchronize", stream)
    assert read_back(address, values)[:5].tolist() == [0x07070707, 9, 0x07070707, 0x07070707, 4]

    # Pageable memory may change as soon as the call has returned; pinned memory is read when its turn comes.
    host = call("cuMemHostAlloc", 4000, api().CU_MEMHOSTALLOC_DEVICEMAP)
    assert int(call("cuMemHostGetDevicePointer", host, 0)) == int(host)
    pinned = np.frombuffer((ctypes.c_int32 * 1000).from_address(int(host)), dtype=np.int32)
    pinned[:] = values
    call("cuMemcpyHtoDAsync", address, pinned.ctypes.data, 4000, stream)
    source = values + 1
    call("cuMemcpyHtoDAsync", address, source.ctypes.data, 4000, stream)
    source[:] = -1
    call("cuMemcpyDtoHAsync", pinned.ctypes.data, address, 4000, stream)
    call("cuStreamSynchronize", stream)
    assert np.array_equal(pinned, values + 1)
    call("cuMemFreeHost", host)
    call("cuMemFree", address)
    assert call("cuMemGetInfo")[0] == free


def test_memory() -> None:
    run("scenario_memory", memory=1_000_000, free=600_000)


def scenario_allocation_fault() -> None:
    start()
    call("cuMemAlloc", 16)
    assert status("cuMemAlloc", 16) == "CUDA_ERROR_OUT_OF_MEMORY"
    call("cuMemAlloc", 16)


def test_allocation_fault() -> None:
    run("scenario_allocation_fault", fault="alloc=2")


# ---- modules ------------------------------------------------------------------------------------------------------


def scenario_modules() -> None:
    start()
    assert status("cuModuleLoadData", b"not an ELF file" + bytes(100)) == "CUDA_ERROR_INVALID_IMAGE"
    assert status("cuModuleLoadData", cubin("rotate", machine=62)) == "CUDA_ERROR_INVALID_IMAGE"
    module = call("cuModuleLoadData", cubin("rotate", "absent"))
    function = call("cuModuleGetFunction", module, b"rotate")
    assert status("cuModuleGetFunction", module, b"reverse") == "CUDA_ERROR_NOT_FOUND"  # not in the image
    assert status("cuModuleGetFunction", module, b"absent") == "CUDA_ERROR_NOT_FOUND"  # not in the library
    stream, probe = start(), Probe()
    assert launch(function, stream, probe, shared=100_000) == "CUDA_ERROR_INVALID_VALUE"
    attribute = api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert status("cuFuncSetAttribute", function, attribute, 300_000) == "CUDA_ERROR_INVALID_VALUE"
    call("cuFuncSetAttribute", function, attribute, 100_000)
    assert launch(function, stream, probe, threads=2048) == "CUDA_ERROR_INVALID_VALUE"
    assert launch(api().CUfunction(12345), stream, probe) == "CUDA_ERROR_INVALID_HANDLE"
    call("cuModuleUnload", module)
    assert status("cuModuleGetFunction", module, b"rotate") == "CUDA_ERROR_INVALID_HANDLE"


def test_modules(kernels: Path) -> None:
    run("scenario_modules", kernels=kernels)


def scenario_image_fault() -> None:
    start()
    assert status("cuModuleLoadData", cubin("rotate")) == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    call("cuModuleLoadData", cubin("rotate"))


def test_image_fault(kernels: Path) -> None:
    run("scenario_image_fault", kernels=kernels, fault="module=1")


# ---- launches, capture, graphs ------------------------------------------------------------------------------------


def rotation(stream: Any, count: int = 1) -> tuple[Any, np.ndarray, Any, Any]:
    """A graph that rotates 64 numbers `count` times: (executable, the numbers, their address, the result's)."""
    module = call("cuModuleLoadData", cubin("rotate"))
    function = call("cuModuleGetFunction", module, b"rotate")
    values = np.arange(64, dtype=np.int32)
    arrays = [device_array(values), device_array(np.zeros_like(values))]
    call("cuStreamBeginCapture", stream, api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    for i in range(count):
        probe = Probe(int(arrays[i % 2]), int(arrays[(i + 1) % 2]), 0, 0)
        assert launch(function, stream, probe, threads=64, shared=256) == SUCCESS
        probe.input = probe.output = 0  # captured by value
    graph = call("cuStreamEndCapture", stream)
    nodes, node_count = call("cuGraphGetNodes", graph, count)
    assert node_count == count
    assert [call("cuGraphNodeGetType", node).name for node in nodes] == ["CU_GRAPH_NODE_TYPE_KERNEL"] * count
    executable = call("cuGraphInstantiate", graph, 0)
    call("cuGraphDestroy", graph)
    assert np.array_equal(read_back(arrays[1], values), np.zeros_like(values)), "captured, not run"
    return executable, values, arrays[0], arrays[count % 2]


def scenario_graph() -> None:
    stream = start()
    executable, values, _, result = rotation(stream, count=3)
    call("cuGraphUpload", executable, stream)
    for _ in range(5):
        call("cuGraphLaunch", executable, stream)
    event = call("cuEventCreate", 0)
    call("cuEventRecord", event, stream)
    call("cuEventSynchronize", event)
    # a -> b -> a -> b: each replay leaves `a` two steps further, and the last one `b` three.
    assert np.array_equal(read_back(result, values), np.roll(values, 4 * 2 + 3))
    call("cuGraphExecDestroy", executable)
    assert status("cuGraphLaunch", executable, stream) == "CUDA_ERROR_INVALID_HANDLE"
    call("cuStreamDestroy", stream)
    assert status("cuStreamQuery", stream) == "CUDA_ERROR_INVALID_HANDLE"


def test_graphs_run_what_was_captured(kernels: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run("scenario_graph", kernels=kernels, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    captured = {"event": "capture", "kernel": "rotate", "grid": [1, 1], "threads": 64, "shared_bytes": 256}
    assert lines == [{**captured, "overlaps": True}] * 3 + [{"event": "instantiate", "nodes": 3}]


def scenario_foreign_nodes() -> None:
    """A host function, and a graph within a graph: what ull.gpu.capture has to see through."""
    from ull.errors import GpuError
    from ull.gpu.capture import capture_graph
    from ull.gpu.driver import Driver

    driver = Driver()
    driver.open()
    stream = driver.create_stream()
    memory = driver.allocate(8)
    called: list[None] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: called.append(None))
    address = ctypes.cast(note, ctypes.c_void_p).value

    def captured(work: Any) -> Any:
        driver.begin_capture(stream)
        work(stream)
        return driver.end_capture(stream)

    inner = captured(lambda stream: driver.fill(memory, 1, 8, stream))
    inner_executable = driver.instantiate(inner)
    outer = captured(lambda stream: [call("cuGraphLaunch", api().CUgraphExec(inner_executable), stream)])
    assert driver.node_types(outer) == ["MEMSET"]
    host = captured(lambda stream: call("cuLaunchHostFunc", stream, api().CUhostFn(address), 0))
    assert driver.node_types(host) == ["HOST"]
    executable = driver.instantiate(host)
    call("cuGraphLaunch", api().CUgraphExec(executable), stream)
    driver.synchronise(stream)
    assert called == [None]

    def nested(recorder: Any) -> None:
        recorder.enqueue(lambda stream: call("cuGraphLaunch", api().CUgraphExec(executable), stream))

    with pytest.raises(GpuError, match="holds nodes that a round must not have: HOST"):
        capture_graph(driver, stream, {}, nested)
    capture_graph(driver, stream, {}, lambda recorder: recorder.enqueue(lambda at: driver.fill(memory, 2, 8, at)))


def test_nodes_of_others_are_seen_through_child_graphs() -> None:
    run("scenario_foreign_nodes")


def scenario_host_calls() -> None:
    from host_call import HostCalls

    stream, calls, seen = start(), HostCalls(), list[str]()
    calls.enqueue(int(stream), lambda: seen.append("now"))
    call("cuStreamSynchronize", stream)
    call("cuStreamBeginCapture", stream, api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    calls.enqueue(int(stream), lambda: seen.append("replayed"))
    graph = call("cuStreamEndCapture", stream)
    (node,), _ = call("cuGraphGetNodes", graph, 1)
    assert call("cuGraphNodeGetType", node).name == "CU_GRAPH_NODE_TYPE_KERNEL"
    executable = call("cuGraphInstantiate", graph, 0)
    for _ in range(2):
        call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    assert seen == ["now", "replayed", "replayed"] and not calls.failures


def test_work_of_the_process_is_captured_as_a_kernel() -> None:
    run("scenario_host_calls")


def scenario_capture_is_broken() -> None:
    stream = start()
    call("cuStreamBeginCapture", stream, api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    assert status("cuStreamSynchronize", stream) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert status("cuStreamEndCapture", stream) == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert status("cuStreamEndCapture", stream) == "CUDA_ERROR_ILLEGAL_STATE"


def test_waiting_breaks_a_capture() -> None:
    run("scenario_capture_is_broken")


def mapped_counter() -> tuple[Any, Any]:
    """(address, the 64-bit number there) in mapped host memory."""
    address = call("cuMemHostAlloc", 8, api().CU_MEMHOSTALLOC_DEVICEMAP)
    counter = ctypes.c_uint64.from_address(int(address))
    counter.value = 0
    return address, counter


def scenario_host_sees_the_device_write() -> None:
    """Without any call, while the stream runs: what the engine's host side does for every token."""
    stream = start()
    address, counter = mapped_counter()
    module = call("cuModuleLoadData", cubin("announce"))
    function = call("cuModuleGetFunction", module, b"announce")
    for i in range(1, 50):
        assert launch(function, stream, Probe(0, int(address), i, 0)) == SUCCESS
        while counter.value != i:
            pass
    call("cuStreamSynchronize", stream)
    assert status("cuStreamQuery", stream) == SUCCESS


def test_the_host_sees_what_the_device_writes(kernels: Path) -> None:
    run("scenario_host_sees_the_device_write", kernels=kernels)


# ---- faults -------------------------------------------------------------------------------------------------------


def scenario_failed_launch() -> None:
    stream = start()
    executable, values, _, result = rotation(stream)
    call("cuGraphLaunch", executable, stream)
    assert status("cuGraphLaunch", executable, stream) == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    assert np.array_equal(read_back(result, values), np.roll(values, 1))


def scenario_hang() -> None:
    stream = start()
    executable, _, _, _ = rotation(stream)
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    call("cuGraphLaunch", executable, stream)
    time.sleep(0.2)
    assert status("cuStreamQuery", stream) == "CUDA_ERROR_NOT_READY"


def scenario_sticky_error(name: str) -> None:
    stream = start()
    executable, _, address, _ = rotation(stream)
    call("cuGraphLaunch", executable, stream)
    deadline = time.monotonic() + 20
    while (now := status("cuStreamQuery", stream)) != name and time.monotonic() < deadline:
        assert now in (SUCCESS, "CUDA_ERROR_NOT_READY")
    for call_name, *arguments in [
        ("cuStreamSynchronize", stream),
        ("cuMemAlloc", 16),
        ("cuMemFree", address),
        ("cuGraphLaunch", executable, stream),
    ]:
        assert status(call_name, *arguments) == name


@pytest.mark.parametrize(("scenario", "fault"), [("scenario_failed_launch", "launch=2"), ("scenario_hang", "hang=2")])
def test_faults_of_a_launch(kernels: Path, tmp_path: Path, scenario: str, fault: str) -> None:
    log = tmp_path / "log"
    run(scenario, kernels=kernels, fault=fault, log=log)
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "fault"


@pytest.mark.parametrize(
    ("fault", "name"),
    [("sticky=1", "CUDA_ERROR_ILLEGAL_ADDRESS"), ("sticky=1:214", "CUDA_ERROR_ECC_UNCORRECTABLE")],
)
def test_sticky_errors(kernels: Path, fault: str, name: str) -> None:
    run("scenario_sticky_error", name, kernels=kernels, fault=fault)


def scenario_kernel_fails() -> None:
    stream = start()
    module = call("cuModuleLoadData", cubin("rotate"))
    function = call("cuModuleGetFunction", module, b"rotate")
    assert launch(function, stream, Probe(0, 0, 0, 0), threads=64, shared=256) == SUCCESS
    assert status("cuStreamSynchronize", stream) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert status("cuMemAlloc", 16) == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_kernel_that_fails_ends_the_context(kernels: Path) -> None:
    output = run("scenario_kernel_fails", kernels=kernels)
    assert "fakecuda: rotate, block (0, 0), thread" in output and "illegal memory access at" in output


def scenario_faults_while_it_runs(control: str) -> None:
    stream = start()
    executable, _, _, _ = rotation(stream)
    for _ in range(3):
        call("cuGraphLaunch", executable, stream)
    Path(control).write_text("launch=2:719\n")
    call("cuGraphLaunch", executable, stream)
    assert status("cuGraphLaunch", executable, stream) == "CUDA_ERROR_LAUNCH_FAILED"
    call("cuGraphLaunch", executable, stream)


def test_faults_by_a_control_file(kernels: Path, tmp_path: Path) -> None:
    control = tmp_path / "control"
    run("scenario_faults_while_it_runs", str(control), kernels=kernels, control=control)


def scenario_corruption() -> None:
    from ull.gpu.params import AcceptParams, Round

    stream = start()
    module = call("cuModuleLoadData", cubin("ull_accept"))
    function = call("cuModuleGetFunction", module, b"ull_accept")
    state = Round()
    for drawn in state.drawn:
        drawn.token = 5
    block = np.frombuffer(state, dtype=np.uint8)
    address, counter = device_array(block), mapped_counter()
    for expected in (5, -7):
        assert launch(function, stream, AcceptParams(int(address), 0, int(counter[0]))) == SUCCESS
        call("cuStreamSynchronize", stream)
        assert ctypes.c_int64(counter[1].value).value == expected


def test_corrupted_results(kernels: Path) -> None:
    run("scenario_corruption", kernels=kernels, fault="corrupt=2")


def scenario_granted() -> None:
    from ull.gpu.driver import Driver

    driver = Driver()
    driver.open()
    print(driver.info.multiprocessors, driver.granted_multiprocessors())
    driver.close()


@pytest.mark.parametrize(("granted", "told"), [(0, "132 132"), (66, "132 66"), (200, "132 132")])
def test_a_context_may_be_granted_fewer_multiprocessors(granted: int, told: str) -> None:
    assert told in run("scenario_granted", granted=granted)
