"""Trees like /sys, /proc and /dev of machines that are fit for low latency, to be made unfit one file at a time."""

from pathlib import Path

CORES = (8, 9)
GOOD = {
    "proc/cmdline": "quiet isolcpus=managed_irq,domain,8-11 nohz_full=8-11 rcu_nocbs=8-11 irqaffinity=0-7",
    "sys/devices/system/cpu/online": "0-15",
    "sys/devices/system/cpu/isolated": "8-11",
    "sys/devices/system/cpu/nohz_full": "8-11",
    "sys/devices/system/cpu/cpu8/topology/thread_siblings_list": "8",
    "sys/devices/system/cpu/cpu9/topology/thread_siblings_list": "9",
    "sys/devices/system/cpu/cpu8/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpu9/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpu8/cpuidle/state0/name": "POLL",
    "sys/devices/system/cpu/cpu8/cpuidle/state0/latency": "0",
    "sys/devices/system/cpu/cpu8/cpuidle/state0/disable": "0",
    "sys/devices/system/cpu/cpu8/cpuidle/state1/name": "C6",
    "sys/devices/system/cpu/cpu8/cpuidle/state1/latency": "190",
    "sys/devices/system/cpu/cpu8/cpuidle/state1/disable": "1",
    "proc/irq/24/smp_affinity_list": "0-7",
    "proc/irq/25/smp_affinity_list": "0-15",
    "proc/irq/25/effective_affinity_list": "3",
    "sys/devices/virtual/workqueue/cpumask": "00ff",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/ksm/run": "0",
    "proc/swaps": "Filename Type Size Used Priority",
    "proc/sys/kernel/nmi_watchdog": "0",
    "proc/sys/kernel/timer_migration": "0",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/sys/vm/stat_interval": "120",
    "proc/sys/kernel/sched_rt_runtime_us": "-1",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         unlimited            unlimited            bytes\n"
        "Max open files            1024                 65536                files"
    ),
    "proc/self/cgroup": "0::/ull.slice",
    "sys/fs/cgroup/ull.slice/cpu.max": "max 100000",
    "sys/devices/system/node/node1/cpulist": "8-15",
    "sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:17:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:17:00.0/numa_node": "1",
    "sys/bus/pci/devices/0000:17:00.0/current_link_speed": "32.0 GT/s PCIe",
    "sys/bus/pci/devices/0000:17:00.0/max_link_speed": "32.0 GT/s PCIe",
    "sys/bus/pci/devices/0000:17:00.0/current_link_width": "16",
    "sys/bus/pci/devices/0000:17:00.0/max_link_width": "16",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
    "dev/nvidia-uvm": "",
    "var/log/kern.log": "kernel: all is well",
}


def plant(root: Path, changes: dict[str, str | None] | None = None) -> Path:
    """Writes a good tree below `root` with these files in the place of its own; None: there is no such file."""
    for name, text in {**GOOD, **(changes or {})}.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    return root
