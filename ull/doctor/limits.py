"""Checks of what this process, and so a daemon of this user, may have."""

from __future__ import annotations

from collections.abc import Iterator

from ull.doctor.check import Check, Finding, Host, Topic

_LEAST_DESCRIPTORS = 4096


def locked_memory(host: Host) -> Iterator[Finding]:
    """Memory may be locked."""
    topic = Topic("locked memory", "what is not locked may be paged out")
    most = _limit(host, "Max locked memory")  # the hard one: a daemon raises its own
    if most is None:
        yield topic.skip("it cannot be read")
    elif most != "unlimited":
        yield topic.warn(f"{int(most) >> 10} KiB", "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`")
    else:
        yield topic.ok(most)


def descriptors(host: Host) -> Iterator[Finding]:
    """There are descriptors for clients."""
    topic = Topic("file descriptors", "a daemon needs 48, and one for each client")
    found = _limit(host, "Max open files")
    if found is None:
        yield topic.skip("it cannot be read")
    elif found != "unlimited" and int(found) < _LEAST_DESCRIPTORS:
        verdict = topic.critical if int(found) < 64 else topic.warn
        yield verdict(found, "LimitNOFILE=65536 in the unit, or `ulimit -n`")
    else:
        yield topic.ok(found)


def control_group(host: Host) -> Iterator[Finding]:
    """No quota stops the daemon in the middle of a round."""
    topic = Topic("CPU quota", "beyond a quota all threads stop for up to 100 ms")
    quotas = list(_quotas(host))
    limited = [quota for quota in quotas if quota.split()[0] not in ("max", "-1")]
    if limited:
        yield topic.critical(limited[0], "CPUQuota= in the unit, empty; or start the container without --cpus")
    elif quotas:
        yield topic.ok("none")
    else:
        yield topic.skip("no control group tells one")


def _quotas(host: Host) -> Iterator[str]:
    """What each group tells that this process is in, its own and those above it."""
    for line in (host.text("proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            root, name = "sys/fs/cgroup", "cpu.max"
        elif "cpu" in controllers.split(","):
            root, name = "sys/fs/cgroup/cpu", "cpu.cfs_quota_us"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            if found := host.text("/".join([root, *parts[:depth], name])):
                yield found


def _limit(host: Host, name: str) -> str | None:
    """A hard limit of this process: a number or "unlimited"; None where it is not told."""
    for line in (host.text("proc/self/limits") or "").splitlines():
        if line.startswith(name):
            values = line[len(name) :].split()
            return values[1] if len(values) >= 2 and (values[1] == "unlimited" or values[1].isdecimal()) else None
    return None


CHECKS: tuple[Check, ...] = (locked_memory, descriptors, control_group)
