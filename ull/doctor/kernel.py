"""Checks of the kernel's settings: what may run on the hot cores, and what interrupts them."""

from __future__ import annotations

from collections.abc import Iterator

from ull.cores import core_list, parse_cores
from ull.doctor.check import Check, Finding, Host, Topic
from ull.errors import ConfigError

_NO_CORES = "no hot cores are known: give --cores, or ask a daemon that has some (--connect)"
_KERNEL_LINE = "add {} to the kernel's command line (systemd/kernel-command-line), then reboot"
_LONGEST_WAKE_UP_US = 3


def listed(text: str | None) -> tuple[int, ...]:
    """Core numbers of the kernel's form; none where it says nothing of the kind."""
    try:
        return parse_cores((text or "").replace("(null)", ""))
    except ConfigError:
        return ()


def isolation(host: Host) -> Iterator[Finding]:
    """isolcpus, nohz_full and rcu_nocbs hold the hot cores."""
    command_line = host.text("proc/cmdline")
    arguments = dict(part.partition("=")[::2] for part in (command_line or "").split())
    sources = {
        "isolated cores": ("sys/devices/system/cpu/isolated", "isolcpus", "the scheduler puts other threads there"),
        "nohz_full": ("sys/devices/system/cpu/nohz_full", "nohz_full", "the timer interrupts them 250 times a second"),
        "rcu_nocbs": (None, "rcu_nocbs", "the kernel's clean-up work runs there"),
    }
    for name, (path, argument, harm) in sources.items():
        topic = Topic(name, f"else {harm}")
        if not host.cores:
            yield topic.skip(_NO_CORES)
            continue
        text = command_line if path is None else host.text(path)
        if text is None:
            yield topic.skip(f"/{path or 'proc/cmdline'} cannot be read")
            continue
        told = arguments.get(argument) if path is None else text
        covered = host.cores if told == "all" else listed(told)
        missing = tuple(core for core in host.cores if core not in covered)
        if missing:
            flags = "managed_irq,domain," if argument == "isolcpus" else ""
            wanted = f"{argument}={flags}{core_list(host.cores)}"
            yield topic.warn(f"not cores {core_list(missing)}", _KERNEL_LINE.format(wanted))
        else:
            yield topic.ok(core_list(covered))


def siblings(host: Host) -> Iterator[Finding]:
    """No hot core shares its execution units with another that is used."""
    topic = Topic("SMT siblings", "two threads of one physical core take turns at its units")
    if not host.cores:
        yield topic.skip(_NO_CORES)
        return
    shared: set[int] = set()
    for core in host.cores:
        text = host.text(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        if text is None:
            yield topic.skip("the topology cannot be read")
            return
        shared.update(other for other in listed(text) if other != core)
    if not shared:
        yield topic.ok("none")
        return
    others = core_list(tuple(sorted(shared)))
    idle = sorted(shared - set(host.cores))
    commands = "; ".join(f"echo 0 > /sys/devices/system/cpu/cpu{core}/online" for core in idle)
    yield topic.warn(f"cores {others} are online", commands or "give cores of different physical cores (--cores)")


def frequency(host: Host) -> Iterator[Finding]:
    """The governor holds the clock up."""
    topic = Topic("governor", "a core that has slept starts at a low clock")
    governors = {
        core: host.text(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor")
        for core in host.cores or listed(host.text("sys/devices/system/cpu/online"))
    }
    known = {core: governor for core, governor in governors.items() if governor}
    if not known:
        yield topic.skip("no frequency scaling here (a virtual machine, or the firmware does it)")
    elif wrong := {governor for governor in known.values() if governor != "performance"}:
        yield topic.warn(", ".join(sorted(wrong)), "cpupower frequency-set -g performance")
    else:
        yield topic.ok("performance")


def sleep_states(host: Host) -> Iterator[Finding]:
    """Sleep states that take long to leave are off, or can be kept off."""
    topic = Topic("C-states", "a core that sleeps deeply takes up to 200 us to wake up")
    core = host.cores[0] if host.cores else 0
    slow = []
    paths = host.paths(f"sys/devices/system/cpu/cpu{core}/cpuidle/state[0-9]*")
    for path in paths:
        state = str(path.relative_to(host.root))
        latency, disabled = host.text(f"{state}/latency"), host.text(f"{state}/disable")
        if latency is not None and latency.isdecimal() and int(latency) > _LONGEST_WAKE_UP_US and disabled != "1":
            slow.append(f"{host.text(f'{state}/name')} {latency} us")
    if not paths:
        yield topic.skip("no idle states are told here (a virtual machine)")
    elif not slow:
        yield topic.ok(f"none above {_LONGEST_WAKE_UP_US} us")
    else:
        yield topic.warn(
            ", ".join(slow),
            "give ulld the right to /dev/cpu_dma_latency, which it holds while it runs with cores given, or "
            + _KERNEL_LINE.format("intel_idle.max_cstate=1 processor.max_cstate=1"),
        )


def interrupts(host: Host) -> Iterator[Finding]:
    """No interrupt is sent to a hot core, nor work of the kernel's queues."""
    topic = Topic("IRQ affinity", "an interrupt takes a core away for 2 to 50 us")
    queues = Topic("workqueue cpumask", "the kernel's deferred work runs there")
    if not host.cores:
        yield topic.skip(_NO_CORES)
        yield queues.skip(_NO_CORES)
        return
    hitting = []
    files = host.paths("proc/irq/[0-9]*/smp_affinity_list")
    for path in files:
        # Where the kernel says to which it really goes, that counts.
        effective = path.with_name("effective_affinity_list")
        text = host.text(str((effective if effective.exists() else path).relative_to(host.root)))
        if set(listed(text)) & set(host.cores):
            hitting.append(path.parent.name)
    if not files:
        yield topic.skip("/proc/irq cannot be read")
    elif hitting:
        count = f"{len(hitting)} of {len(files)} may come: {', '.join(hitting[:8])}{' ...' if len(hitting) > 8 else ''}"
        yield topic.warn(count, "systemctl enable --now ull-irqs (from `ull install --systemd`), or irqaffinity=")
    else:
        yield topic.ok("none on hot cores")
    mask = host.text("sys/devices/virtual/workqueue/cpumask")
    if mask is None:
        yield queues.skip("it cannot be read")
        return
    try:
        allowed = int(mask.replace(",", ""), 16)
    except ValueError:
        yield queues.skip(f"{mask!r:.40} is no mask")
        return
    hit = tuple(core for core in host.cores if allowed >> core & 1)
    if hit:
        rest = allowed & ~sum(1 << core for core in host.cores)
        remedy = f"echo {_mask(rest)} > /sys/devices/virtual/workqueue/cpumask"
        yield queues.warn(f"{mask} has cores {core_list(hit)}", remedy)
    else:
        yield queues.ok(mask)


def _mask(cores: int) -> str:
    """A mask as the kernel takes it: groups of eight digits."""
    digits = f"{cores:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8) if len(digits) > 8 else digits
    return ",".join(digits[at : at + 8] for at in range(0, len(digits), 8))


def memory(host: Host) -> Iterator[Finding]:
    """Huge pages, page merging and swap do not move memory under a running engine."""
    huge = Topic("transparent huge pages", "always: the kernel stops a thread to make one")
    text = host.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = (text or "").partition("[")[2].partition("]")[0]
    if not chosen:
        yield huge.skip("it cannot be read")
    elif chosen == "always":
        yield huge.warn(chosen, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    else:
        yield huge.ok(chosen)
    ksm, harm = "sys/kernel/mm/ksm/run", "it walks through memory to merge pages"
    yield from _number(host, "KSM", ksm, "0", harm, f"echo 0 > /{ksm}")
    swap = Topic("swap", "a page that was swapped out costs milliseconds when it is needed")
    lines = host.text("proc/swaps")
    if lines is None:
        yield swap.skip("/proc/swaps cannot be read")
    elif len(lines.splitlines()) > 1:
        remedy = "swapoff -a (and its line in /etc/fstab), or LimitMEMLOCK=infinity"
        yield swap.warn(f"{len(lines.splitlines()) - 1} in use", remedy)
    else:
        yield swap.ok("none")


def settings(host: Host) -> Iterator[Finding]:
    """sysctl's that keep housekeeping off."""
    for name, wanted, harm in (
        ("kernel.nmi_watchdog", "0", "it interrupts every core"),
        ("kernel.timer_migration", "0", "timers of other cores come to rest on these"),
        ("kernel.numa_balancing", "0", "it takes pages away to see who uses them"),
    ):
        yield from _number(host, name, f"proc/sys/{name.replace('.', '/')}", wanted, harm, f"sysctl -w {name}={wanted}")
    topic = Topic("vm.stat_interval", "each core is woken up so often for statistics")
    interval = host.text("proc/sys/vm/stat_interval")
    if interval is None or not interval.isdecimal():
        yield topic.skip("it cannot be read")
    elif int(interval) < 10:
        yield topic.warn(f"{interval} s", "sysctl -w vm.stat_interval=120")
    else:
        yield topic.ok(f"{interval} s")
    throttle = Topic("real-time throttling", "with priorities a spinning thread loses 50 ms each second")
    runtime = host.text("proc/sys/kernel/sched_rt_runtime_us")
    if runtime is None:
        yield throttle.skip("it cannot be read")
    elif runtime == "-1":
        yield throttle.ok("off")
    else:
        yield throttle.ok(f"{runtime} us: matters with priorities only (sysctl -w kernel.sched_rt_runtime_us=-1)")


def clock(host: Host) -> Iterator[Finding]:
    """The clock is read without a system call."""
    topic = Topic("clocksource", "another one than tsc costs a system call for each stamp, some 20 in a round")
    source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is None:
        yield topic.skip("it cannot be read")
    elif source in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"):
        yield topic.ok(source)
    else:
        yield topic.warn(source, "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource")


def _number(host: Host, name: str, path: str, wanted: str, harm: str, remedy: str) -> Iterator[Finding]:
    topic = Topic(name, harm)
    found = host.text(path)
    if found is None:
        yield topic.skip("it cannot be read")
    elif found == wanted:
        yield topic.ok(found)
    else:
        yield topic.warn(found, remedy)


CHECKS: tuple[Check, ...] = (isolation, siblings, frequency, sleep_states, interrupts, memory, settings, clock)
