"""Checks of the GPU: its place on the bus, and what NVML says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ull.bundle.targets import GPU_ARCHITECTURES, capability_text
from ull.cores import core_list
from ull.doctor.check import Finding, Host, Topic
from ull.doctor.kernel import listed
from ull.install.machine import gpu_folders

# Bits of the clocks' event reasons that slow a GPU down: power cap, slowdowns by heat and by hardware, power brake.
_SLOWDOWNS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat", 0x80: "power brake"}


def bus(host: Host) -> Iterator[Finding]:
    """The hot cores are near the GPU, and its link is as wide and fast as it can be."""
    near = Topic("NUMA node", "each launch and each result crosses the bus between two sockets")
    link = Topic("PCIe link", "a slower link makes each launch and each result late")
    device = _device(host)
    if device is None:
        yield near.skip("there is no GPU")
        yield link.skip("there is no GPU")
        return
    node = host.text(f"{device}/numa_node")
    cores = listed(host.text(f"sys/devices/system/node/node{node}/cpulist")) if node not in (None, "-1") else ()
    far = tuple(core for core in host.cores if core not in cores)
    if not host.cores:
        yield near.skip("no hot cores are known: give --cores")
    elif not cores:
        yield near.skip("the GPU's node is not told")
    elif far:
        yield near.warn(f"cores {core_list(far)} are far from node {node}", f"--cores of {core_list(cores)}")
    else:
        yield near.ok(f"node {node}")
    pairs = [
        (host.text(f"{device}/current_link_{kind}"), host.text(f"{device}/max_link_{kind}"))
        for kind in ("speed", "width")
    ]
    if any(value is None for pair in pairs for value in pair):
        yield link.skip("it is not told")
    elif any(now != most for now, most in pairs):
        now, most = (" x".join(str(pair[index]) for pair in pairs) for index in (0, 1))
        yield link.warn(
            f"{now} of {most}", "look at it under load; if it stays, reseat the card or look at the firmware"
        )
    else:
        yield link.ok(" x".join(str(pair[0]) for pair in pairs))


def nodes(host: Host) -> Iterator[Finding]:
    """The driver's device files are there, and this user may use them."""
    topic = Topic("device nodes", "without them no engine for a GPU starts")
    if _device(host) is None:
        yield topic.skip("there is no GPU")
        return
    wanted = [f"dev/nvidia{host.gpu or 0}", "dev/nvidiactl", "dev/nvidia-uvm"]
    if missing := [path for path in wanted if not (host.root / path).exists()]:
        yield topic.critical(f"no /{missing[0]}", "nvidia-modprobe -u -c 0, or systemctl start nvidia-persistenced")
    else:
        yield topic.ok("all there")


def kernel_log(host: Host) -> Iterator[Finding]:
    """The driver has reported no fault."""
    topic = Topic("Xid messages", "the driver's reports of faults of the GPU")
    text = host.text("var/log/kern.log") or host.text("var/log/dmesg")
    if text is None:
        yield topic.skip("no log of the kernel can be read: journalctl -k | grep Xid")
        return
    found = re.findall(r"NVRM: Xid \([^)]*\): (\d+)", text)
    if found:
        yield topic.warn(f"{len(found)}, the last {found[-1]}", "journalctl -k | grep Xid; NVIDIA's catalogue has each")
    else:
        yield topic.ok("none")


def device_state(host: Host, library: Any = None) -> Iterator[Finding]:
    """What NVML says: modes, clocks, memory, and whether the device asks for a reset."""
    topic = Topic("NVML", "tells of the GPU's modes, clocks and faults")
    try:
        library = library or _nvml()
    except ModuleNotFoundError:
        yield topic.skip("needs the extra `ops`: pip install 'ull[ops]'")
        return
    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByIndex(host.gpu or 0)
    except Exception as error:
        # Without a driver there is no GPU for it; with one that does not answer there is a fault.
        missing = _device(host) is None
        yield topic.skip("there is no GPU") if missing else topic.critical(error, "nvidia-smi; reinstall the driver")
        return
    yield topic.ok(f"driver {_read(lambda: library.nvmlSystemGetDriverVersion())}")
    if host.target:
        yield _architecture(library, handle, host.target)
    for read in (_persistence, _mig, _compute_mode, _clocks, _slowdown, _ecc, _remapped, _recovery):
        yield from read(library, handle, host.gpu or 0)


def _nvml() -> Any:
    import pynvml

    return pynvml


def _persistence(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("persistence mode", "else the driver unloads the GPU's state when nobody uses it")
    value = _read(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    if value is None:
        yield topic.skip("not told")
    else:
        yield topic.ok("on") if value else topic.warn("off", f"nvidia-smi -i {number} -pm 1")


def _mig(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("MIG", "a slice has a part of the memory bandwidth")
    value = _read(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if value is None:
        yield topic.skip("the device has none")
    else:
        yield topic.critical("on", f"nvidia-smi -i {number} -mig 0") if value else topic.ok("off")


def _compute_mode(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("compute mode", "another process on the GPU makes each round wait")
    value = _read(lambda: nvml.nvmlDeviceGetComputeMode(handle))
    if value is None:
        yield topic.skip("not told")
    elif value == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        yield topic.ok("exclusive process")
    else:
        yield topic.warn("shared", f"nvidia-smi -i {number} -c EXCLUSIVE_PROCESS")


def _clocks(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("GPU clocks", "clocks that go up and down make rounds of different lengths")
    now = _read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    most = _read(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    if now is None or most is None:
        yield topic.skip("not told")
    elif now < 0.9 * most:
        yield topic.warn(f"{now} of {most} MHz", f"nvidia-smi -i {number} -lgc {most}")
    else:
        yield topic.ok(f"{now} MHz")


def _slowdown(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("GPU throttling", "the GPU runs slower than its clock")
    bits = _read(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if bits is None:
        yield topic.skip("not told")
    elif named := [name for bit, name in _SLOWDOWNS.items() if bits & bit]:
        yield topic.warn(", ".join(named), f"nvidia-smi -i {number} -q -d PERFORMANCE,POWER,TEMPERATURE")
    else:
        yield topic.ok("none")


def _ecc(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("ECC errors", "memory that gives wrong bits")
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
    count = _read(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
    if count is None:
        yield topic.skip("not told")
    else:
        remedy = f"nvidia-smi -i {number} -q -d ECC; have the card exchanged"
        yield topic.critical(f"{count} uncorrected", remedy) if count else topic.ok("none uncorrected")


def _remapped(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("row remapping", "rows of memory that wait for a reset to be replaced")
    rows = _read(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    if rows is None:
        yield topic.skip("not told")
        return
    _, _, pending, failed = rows
    if failed:
        yield topic.critical("failed", "have the card exchanged")
    elif pending:
        yield topic.critical("pending", f"stop the daemon, then nvidia-smi -i {number} --gpu-reset")
    else:
        yield topic.ok("none pending")


def _recovery(nvml: Any, handle: Any, number: int) -> Iterator[Finding]:
    topic = Topic("recovery action", "what the driver asks for before the GPU can be used again")
    field = _read(lambda: nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0])
    if field is None or field.nvmlReturn != nvml.NVML_SUCCESS:
        yield topic.skip("this driver tells none")
        return
    action = int(field.value.uiVal)
    if action == nvml.NVML_GPU_RECOVERY_ACTION_NONE:
        yield topic.ok("none")
    elif action == nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET:
        yield topic.critical("reset", f"stop the daemon, then nvidia-smi -i {number} --gpu-reset")
    else:
        yield topic.critical(f"action {action}", f"nvidia-smi -i {number} -q names it; drain, then reboot")


def _architecture(nvml: Any, handle: Any, target: str) -> Finding:
    topic = Topic("bundle's target", "code for one architecture runs on no other")
    architecture = GPU_ARCHITECTURES.get(target)
    if architecture is None:
        return topic.skip(f"a bundle for {target} needs no GPU")
    found = _read(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    if found is None:
        return topic.skip("the device tells no capability")
    if found != architecture.capability:
        value = f"{target} on a device of {capability_text(found)}"
        return topic.critical(value, "ull-build --target with the architecture of this device")
    return topic.ok(f"{target} on {capability_text(found)}")


def _read(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:  # not supported by this device or driver: NVML has an exception for each
        return None


def _device(host: Host) -> str | None:
    """The sysfs folder of the GPU, below the root."""
    found, number = gpu_folders(host.root), host.gpu or 0
    return str(found[number].relative_to(host.root)) if number < len(found) else None


CHECKS = (bus, nodes, kernel_log, device_state)
