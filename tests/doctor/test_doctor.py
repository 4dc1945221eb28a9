"""Each check of `ull doctor` on a machine that is fit, on one that is not, and on one that tells nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Daemon, Spawn
from host_trees import CORES, GOOD, plant
from ull import _native, cli
from ull.doctor import gpu, kernel, limits, trials
from ull.doctor.check import Finding, Host, Verdict

PAGE = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
CPU = "sys/devices/system/cpu"
PCI = "sys/bus/pci/devices/0000:17:00.0"
ON_FILES = (*kernel.CHECKS, *limits.CHECKS, gpu.bus, gpu.nodes, gpu.kernel_log)


def findings(host: Host) -> dict[str, Finding]:
    return {finding.name: finding for check in ON_FILES for finding in check(host)}


def test_a_fit_machine_has_nothing_to_mend(tmp_path: Path) -> None:
    found = findings(Host(plant(tmp_path), CORES, 0))
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}, found


BAD: list[tuple[str, dict[str, str | None], Verdict, str]] = [
    ("isolated cores", {f"{CPU}/isolated": "8"}, Verdict.WARNING, "isolcpus=managed_irq,domain,8-9"),
    ("isolated cores", {f"{CPU}/isolated": ""}, Verdict.WARNING, "isolcpus"),
    ("nohz_full", {f"{CPU}/nohz_full": "(null)"}, Verdict.WARNING, "nohz_full=8-9"),
    ("rcu_nocbs", {"proc/cmdline": "quiet"}, Verdict.WARNING, "rcu_nocbs=8-9"),
    ("SMT siblings", {f"{CPU}/cpu9/topology/thread_siblings_list": "9,25"}, Verdict.WARNING, "cpu25/online"),
    ("governor", {f"{CPU}/cpu9/cpufreq/scaling_governor": "powersave"}, Verdict.WARNING, "cpupower"),
    ("C-states", {f"{CPU}/cpu8/cpuidle/state1/disable": "0"}, Verdict.WARNING, "cpu_dma_latency"),
    ("IRQ affinity", {"proc/irq/24/smp_affinity_list": "0-15"}, Verdict.WARNING, "ull-irqs"),
    ("IRQ affinity", {"proc/irq/25/effective_affinity_list": "9"}, Verdict.WARNING, "ull-irqs"),
    ("workqueue cpumask", {"sys/devices/virtual/workqueue/cpumask": "ffff"}, Verdict.WARNING, "echo fcff"),
    (
        "transparent huge pages",
        {"sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never"},
        Verdict.WARNING,
        "echo madvise",
    ),
    ("KSM", {"sys/kernel/mm/ksm/run": "1"}, Verdict.WARNING, "echo 0"),
    ("swap", {"proc/swaps": "Filename\n/swap file 1 0 -2"}, Verdict.WARNING, "swapoff"),
    ("kernel.nmi_watchdog", {"proc/sys/kernel/nmi_watchdog": "1"}, Verdict.WARNING, "sysctl -w kernel.nmi_watchdog=0"),
    ("kernel.timer_migration", {"proc/sys/kernel/timer_migration": "1"}, Verdict.WARNING, "sysctl"),
    ("kernel.numa_balancing", {"proc/sys/kernel/numa_balancing": "1"}, Verdict.WARNING, "sysctl"),
    ("vm.stat_interval", {"proc/sys/vm/stat_interval": "1"}, Verdict.WARNING, "sysctl -w vm.stat_interval=120"),
    (
        "clocksource",
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"},
        Verdict.WARNING,
        "echo tsc",
    ),
    (
        "locked memory",
        {
            "proc/self/limits": GOOD["proc/self/limits"].replace(
                "unlimited            bytes", "8388608              bytes"
            )
        },
        Verdict.WARNING,
        "LimitMEMLOCK",
    ),
    (
        "file descriptors",
        {"proc/self/limits": GOOD["proc/self/limits"].replace("65536", "1024 ")},
        Verdict.WARNING,
        "LimitNOFILE",
    ),
    (
        "file descriptors",
        {"proc/self/limits": GOOD["proc/self/limits"].replace("65536", "32   ")},
        Verdict.CRITICAL,
        "LimitNOFILE",
    ),
    ("CPU quota", {"sys/fs/cgroup/ull.slice/cpu.max": "200000 100000"}, Verdict.CRITICAL, "CPUQuota"),
    (
        "CPU quota",
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/1",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "50000",
        },
        Verdict.CRITICAL,
        "CPUQuota",
    ),
    (
        "CPU quota",  # of a group above
        {
            "proc/self/cgroup": "0::/a.slice/b.service",
            "sys/fs/cgroup/a.slice/cpu.max": "50000 100000",
            "sys/fs/cgroup/a.slice/b.service/cpu.max": "max 100000",
        },
        Verdict.CRITICAL,
        "CPUQuota",
    ),
    (
        "workqueue cpumask",  # in groups of eight digits, as the kernel takes it
        {"sys/devices/virtual/workqueue/cpumask": "ff,ffffffff"},
        Verdict.WARNING,
        "echo 000000ff,fffffcff",
    ),
    ("NUMA node", {f"{PCI}/numa_node": "0", "sys/devices/system/node/node0/cpulist": "0-7"}, Verdict.WARNING, "0-7"),
    ("PCIe link", {f"{PCI}/current_link_width": "8"}, Verdict.WARNING, "reseat"),
    ("device nodes", {"dev/nvidia-uvm": None}, Verdict.CRITICAL, "nvidia-modprobe"),
    (
        "Xid messages",
        {"var/log/kern.log": "NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus"},
        Verdict.WARNING,
        "Xid",
    ),
]


@pytest.mark.parametrize(
    "name, changes, verdict, remedy", BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_unfit_machine(
    tmp_path: Path, name: str, changes: dict[str, str | None], verdict: Verdict, remedy: str
) -> None:
    found = findings(Host(plant(tmp_path, changes), CORES, 0))
    assert (found[name].verdict, remedy in found[name].remedy) == (verdict, True), found[name]
    others = {
        finding.verdict for finding in found.values() if finding.name not in (name, "isolated cores", "rcu_nocbs")
    }
    assert others <= {Verdict.OK}


def test_every_check_of_files_has_been_seen_bad(tmp_path: Path) -> None:
    names = set(findings(Host(plant(tmp_path), CORES, 0)))
    assert names - {name for name, *_ in BAD} == {"real-time throttling"}  # which is told, and no more


def test_a_machine_that_tells_nothing_is_skipped(tmp_path: Path) -> None:
    for host in (Host(tmp_path, CORES), Host(tmp_path)):
        assert {finding.verdict for finding in findings(host).values()} == {Verdict.SKIPPED}


def field(value: int, result: int = 0) -> SimpleNamespace:
    """A value of NVML's."""
    return SimpleNamespace(nvmlReturn=result, value=SimpleNamespace(uiVal=value))


class Nvml:
    """In the place of pynvml. answers: by function, what it returns; an exception is raised."""

    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    NVML_CLOCK_SM = NVML_AGGREGATE_ECC = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_SUCCESS = NVML_GPU_RECOVERY_ACTION_NONE = 0
    NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 274

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetComputeMode": 3,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetFieldValues": [field(0)],
            "nvmlDeviceGetCudaComputeCapability": [9, 0],
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.mark.parametrize(
    "answers, name, verdict",
    [
        ({}, "NVML", Verdict.OK),
        ({"nvmlDeviceGetPersistenceMode": 0}, "persistence mode", Verdict.WARNING),
        ({"nvmlDeviceGetMigMode": (1, 1)}, "MIG", Verdict.CRITICAL),
        ({"nvmlDeviceGetMigMode": RuntimeError("not supported")}, "MIG", Verdict.SKIPPED),
        ({"nvmlDeviceGetComputeMode": 0}, "compute mode", Verdict.WARNING),
        ({"nvmlDeviceGetClockInfo": 345}, "GPU clocks", Verdict.WARNING),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x40}, "GPU throttling", Verdict.WARNING),
        ({"nvmlDeviceGetTotalEccErrors": 2}, "ECC errors", Verdict.CRITICAL),
        ({"nvmlDeviceGetRemappedRows": (1, 0, 1, 0)}, "row remapping", Verdict.CRITICAL),
        ({"nvmlDeviceGetRemappedRows": (0, 0, 0, 1)}, "row remapping", Verdict.CRITICAL),
        ({"nvmlDeviceGetFieldValues": [field(1)]}, "recovery action", Verdict.CRITICAL),
        ({"nvmlDeviceGetFieldValues": [field(3)]}, "recovery action", Verdict.CRITICAL),
        ({"nvmlDeviceGetFieldValues": [field(0, 3)]}, "recovery action", Verdict.SKIPPED),
        ({"nvmlDeviceGetCudaComputeCapability": [8, 9]}, "bundle's target", Verdict.CRITICAL),
        ({"nvmlInit": RuntimeError("driver not loaded")}, "NVML", Verdict.CRITICAL),
    ],
)
def test_what_nvml_says(tmp_path: Path, answers: dict[str, Any], name: str, verdict: Verdict) -> None:
    found = {each.name: each for each in gpu.device_state(Host(plant(tmp_path), CORES, 0, "sm_90a"), Nvml(**answers))}
    assert found[name].verdict == verdict
    assert {each.verdict for each in found.values() if each.name != name} <= {Verdict.OK}
    assert (verdict < Verdict.WARNING) or found[name].remedy


def test_the_page_has_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(plant(tmp_path), CORES, 0, "sm_90a")
    names = set(findings(host)) | {each.name for each in gpu.device_state(host, Nvml())}
    assert set(re.findall(r"^\| ([^|`]+?) \|", PAGE, re.MULTILINE)) - {"Check", "---"} == names | {"noise", "self-test"}


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_the_exit_status_is_the_worst_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = plant(tmp_path / "good", {f"{PCI}/vendor": "0x8086"})
    assert doctor(capsys, "--root", str(good))[0] == 0
    bad = plant(tmp_path / "bad", {f"{PCI}/vendor": "0x8086", "sys/kernel/mm/ksm/run": "1"})
    status, said = doctor(capsys, "--root", str(bad))
    assert (status, said.count("mend:")) == (1, 1)
    worse = plant(tmp_path / "worse", {f"{PCI}/vendor": "0x8086", "sys/fs/cgroup/ull.slice/cpu.max": "1 100000"})
    status, said = doctor(capsys, "--root", str(worse), "--json")
    report = json.loads(said)
    assert (status, report["verdict"], report["schema"], report["cores"]) == (2, "critical", 1, [8, 9, 10, 11])
    assert {"name", "verdict", "value", "why", "remedy"} == set(report["findings"][0])


def test_noise_is_measured_and_counted() -> None:
    core = min(os.sched_getaffinity(0))
    (finding,) = trials.noise([core], 0.2)
    assert finding.value.startswith("longest gap")
    found = _native.measure_noise(core, 50_000_000, [1, 10**12])
    assert found["observed_ns"] >= 50_000_000
    assert found["gaps"] == found["by_size"][0] == found["reads"] > 1000
    assert found["shortest_ns"] <= found["longest_ns"]
    (skipped,) = trials.noise([1023], 0.1)
    assert skipped.verdict == Verdict.SKIPPED


@pytest.fixture
def even(spawn: Spawn) -> Iterator[Daemon]:
    yield spawn(script={"tokens": [65], "round_ns": 300_000, "context": 9000, "pages": 200})


def test_the_self_test_measures_rounds(even: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = doctor(capsys, "--connect", even.url, "--selftest", "--json")
    finding = next(each for each in json.loads(said)["findings"] if each["name"] == "self-test")
    assert finding["verdict"] in ("ok", "warning")  # this machine may be anything but quiet
    usual = int(re.findall(r"p50 (\d+) us", finding["value"])[0])
    assert usual >= 300
    assert status in (1, 2)


def test_a_daemon_that_is_not_there_is_critical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ull.client.sync.CONNECT_TIMEOUT_S", 0.05)
    status, said = doctor(capsys, "--connect", f"ipc://{tmp_path}/none", "--selftest")
    assert (status, "self-test" in said) == (2, True)
    assert cli.main(["doctor", "--noise", "0"]) == 1
    assert "--noise" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, changes",
    [
        ("workqueue cpumask", {"sys/devices/virtual/workqueue/cpumask": "zz"}),
        ("CPU quota", {"sys/fs/cgroup/ull.slice/cpu.max": ""}),
        ("file descriptors", {"proc/self/limits": "Max open files   many   more   files"}),
        ("locked memory", {"proc/self/limits": "Max locked memory   much   more   bytes"}),
    ],
)
def test_what_is_not_understood_is_skipped(tmp_path: Path, name: str, changes: dict[str, str | None]) -> None:
    assert findings(Host(plant(tmp_path, changes), CORES, 0))[name].verdict == Verdict.SKIPPED


def test_all_cores_are_all(tmp_path: Path) -> None:
    host = Host(plant(tmp_path, {"proc/cmdline": "rcu_nocbs=all"}), CORES, 0)
    assert findings(host)["rcu_nocbs"].verdict == Verdict.OK


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--cores", "0-99999999999"], "0 to 1023"),
        (["--cores", "1023"], "no core 1023"),
        (["--cores", "x"], "no list of cores"),
        (["--device", "-1"], "--device"),
    ],
)
def test_wrong_use_of_the_doctor_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--root", str(plant(tmp_path)), *arguments]) == 1
    told = capsys.readouterr().err
    assert (told.count("\n"), said in told) == (1, True)


def test_an_interrupt_ends_the_listening() -> None:
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "ull", "doctor", "--cores", str(core), "--noise", "3000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not any("ull-noise" in path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/comm")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
