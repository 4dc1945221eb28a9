"""Checks of what this process, and so a daemon of this user, may have."""

from __future__ import annotations

from collections.abc import Iterator

from ull.doctor.check import Check, Finding, Host, Topic

_LEAST_DESCRIPTORS = 4096


def locked_memory(host: Host) -> Iterator[Finding]:
    """Memory may be locked."""
    topic = Topic("locked memory", "what is not locked may be paged out")
    soft = _limit(host, "Max locked memory")
    if soft is None:
        yield topic.skip("it cannot be read")
    elif soft != "unlimited":
        yield topic.warn(f"{int(soft) >> 10} KiB", "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`")
    else:
        yield topic.ok(soft)


def descriptors(host: Host) -> Iterator[Finding]:
    """There are descriptors for clients."""
    topic = Topic("file descriptors", "a daemon needs 48, and one for each client")
    found = _limit(host, "Max open files", hard=True)
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
    found = _group_file(host, "cpu.max", "cpu", "cpu.cfs_quota_us")
    if found is None:
        yield topic.skip("no control group tells one")
    elif found.split()[0] in ("max", "-1"):
        yield topic.ok("none")
    else:
        yield topic.critical(found, "CPUQuota= in the unit, empty; or start the container without --cpus")


def _group_file(host: Host, name: str, controller: str, old: str) -> str | None:
    for line in (host.text("proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and (found := host.text(f"sys/fs/cgroup{path}/{name}")) is not None:
            return found
        if controller in controllers.split(",") and (found := host.text(f"sys/fs/cgroup/{controller}{path}/{old}")):
            return found
    return None


def _limit(host: Host, name: str, hard: bool = False) -> str | None:
    for line in (host.text("proc/self/limits") or "").splitlines():
        if line.startswith(name):
            values = line[len(name) :].split()
            return values[1 if hard else 0] if len(values) >= 2 else None
    return None


CHECKS: tuple[Check, ...] = (locked_memory, descriptors, control_group)
