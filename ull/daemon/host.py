"""The process and its machine: which cores, which memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ull.errors import DaemonError

_BACKGROUND_NICE = 10
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_NAMED_S = 10.0  # for threads to begin
_AUTO_THREADS = 8  # more gain little on the models that the cpu executor is for
_M_MMAP_THRESHOLD = -3  # malloc.h
_THREADS_BYTES = 64 << 20  # of stacks: libzmq's, the io thread's, those that tokenize


def lock_memory() -> str | None:
    """Keeps every page of this process in memory from its first use on; returns why not, or None.

    On fault, not at once: reserved thread stacks and arenas would otherwise cost hundreds of megabytes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) == 0:
        return None
    limit = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard // 1024} KiB"
    return (
        f"mlockall: {os.strerror(ctypes.get_errno())} (memlock limit {limit}); raise it with `ulimit -l unlimited` or "
        "LimitMEMLOCK=infinity"
    )


def return_large_blocks() -> None:
    """Has the C library give every freed block of a megabyte or more back to the system at once.

    By itself it keeps blocks of up to 32 MiB once one was freed: what large messages took would never come back.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def move_threads(cores: Collection[int]) -> None:
    """Moves every thread of this process, and so all that these start later, to `cores`."""
    for task in Path("/proc/self/task").iterdir():  # libraries may have started some of their own
        with contextlib.suppress(ProcessLookupError):  # one that has just ended
            os.sched_setaffinity(int(task.name), cores)


def pin(threads: dict[str, Sequence[int]]) -> None:
    """Pins threads of this process: `threads` says on which cores those of each name run, one each."""
    for name, cores in threads.items():
        for thread, core in zip(_named_threads({name: len(cores)}) if cores else (), cores, strict=False):
            os.sched_setaffinity(thread, {core})


def prioritise(threads: dict[str, int], priority: int, key: str) -> None:
    """Gives threads of this process the real-time priority `priority` (SCHED_RR): `threads` says how many of each name.

    Waits for those that have yet to give themselves their name. Raises DaemonError naming the configuration's `key`
    where it is not permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_RTPRIO)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_RTPRIO, (hard, hard))
    for thread in _named_threads(threads):
        try:
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(priority))
        except PermissionError:
            raise DaemonError(
                f"{key} = {priority} is not permitted (rtprio limit {hard}): raise it with `ulimit -r {priority}` or "
                f"systemd/priority.conf, or set {key} = 0",
                key,
            ) from None


@contextlib.contextmanager
def quick_wake_ups(path: Path = Path("/dev/cpu_dma_latency")) -> Iterator[str | None]:
    """Keeps the processors out of sleep states that take long to leave. Yields why it cannot, or None."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        yield f"{path}: {error.strerror}"
        return
    try:
        os.write(descriptor, struct.pack("=i", 0))  # microseconds; it holds for as long as the descriptor is open
        yield None
    finally:
        os.close(descriptor)


def stand_back() -> None:
    """Lets every other thread go before this one where they share a core: for work that can wait for others' tokens."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICE)


def auto_threads() -> int:
    """Computing threads if none are configured: all available cores but one, which io and Python keep."""
    return max(1, min(_AUTO_THREADS, len(os.sched_getaffinity(0)) - 1))


def check_address_space(wanted: int = _THREADS_BYTES) -> None:
    """Raises DaemonError unless `wanted` bytes can be mapped: libzmq aborts if its threads get no stacks."""
    try:
        mmap.mmap(-1, wanted).close()
    except OSError as error:
        raise DaemonError(
            f"no room for {wanted >> 20} MiB of threads' stacks ({error.strerror}); raise `ulimit -v` (LimitAS=) or "
            "`ulimit -l` (LimitMEMLOCK=)"
        ) from None


def resident_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _named_threads(counts: dict[str, int]) -> list[int]:
    """The threads of this process with these names, once there are `counts` of them. Raises DaemonError if too few."""
    deadline = time.monotonic() + _NAMED_S
    while True:
        found: dict[str, list[int]] = {name: [] for name in counts}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # one that has just ended
                found.get((task / "comm").read_text().strip(), []).append(int(task.name))
        if all(len(found[name]) >= count for name, count in counts.items()):
            return [thread for threads in found.values() for thread in threads]
        if time.monotonic() > deadline:
            raise DaemonError(f"not all of the threads {', '.join(counts)} have begun within {_NAMED_S:g} s")
        time.sleep(0.001)
