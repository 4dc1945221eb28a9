"""The process and its machine: which cores, which memory, which libzmq."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Collection
from pathlib import Path

import zmq

from ull.errors import DaemonError

_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
_AUTO_THREADS = 8  # more gain little on the models that the cpu executor is for


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


def keep_off(hot: Collection[int]) -> None:
    """Moves this thread, and every thread started from it later, off the `hot` cores if others are left.

    Raises DaemonError if a hot core is not one this process may use.
    """
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(hot) - allowed):
        raise DaemonError(f"core {missing[0]} is not available here; available: {_ranges(allowed)}", "cores")
    if rest := allowed - set(hot):
        os.sched_setaffinity(0, rest)


def auto_threads() -> int:
    """Computing threads if none are configured: all available cores but one, which io and Python keep."""
    return max(1, min(_AUTO_THREADS, len(os.sched_getaffinity(0)) - 1))


def loaded_libzmq() -> str:
    """The path of the libzmq that pyzmq has loaded; the native io thread uses the same one.

    Raises DaemonError if there is none, as with a statically linked pyzmq.
    """
    zmq.Context()  # loads it
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libzmq" in path.rpartition("/")[2]:
            return "/" + path
    raise DaemonError("pyzmq has loaded no shared libzmq; install pyzmq from its wheel")


def resident_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _ranges(cores: Collection[int]) -> str:
    """Core numbers as the kernel writes them, e.g. 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
