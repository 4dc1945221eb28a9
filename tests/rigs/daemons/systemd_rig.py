"""A real systemd as PID 1 of namespaces of its own, with our units where they belong: /etc, /run and /var/lib are new.

It takes root, unshare and a cgroup2 that can be mounted; `missing()` says what there is not.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ull.spawn import python_environment

SYSTEMD = Path("/lib/systemd/systemd")
_NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--cgroup", "--uts", "--ipc", "--net")
_STUBS = ("sysinit", "basic", "shutdown", "network", "local-fs", "multi-user", "umount", "final")
_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /sys/fs/cgroup && umount /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /var/lib
mkdir -p /var/lib/ull /etc/systemd/system /etc/ull
mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
mount -t tmpfs -o mode=755 tmpfs /etc/ull
cp -r {root}/etc/systemd/system/. /etc/systemd/system/
cp -r {root}/etc/ull/. /etc/ull/
cp -r {bundle} /var/lib/ull/{name}.ull
mount --make-rshared /
export container=lxc SYSTEMD_UNIT_PATH=/etc/systemd/system
exec {systemd} --system --unit=multi-user.target --log-target=console --log-level=info --show-status=0
"""

# What systemd has made among the control groups, and is empty now.
_CLEAN = """
mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir /run/x && mount -t cgroup2 cgroup2 /run/x
cd /run/x && find ull.slice system.slice init.scope -depth -type d -exec rmdir {} + 2> /dev/null
"""


def missing() -> str | None:
    """Why there can be no systemd here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("unshare", "nsenter", "systemctl"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if not SYSTEMD.exists():
        return f"needs {SYSTEMD}"
    probe = "mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir /run/x && mount -t cgroup2 cgroup2 /run/x"
    command = ["unshare", "--pid", "--fork", "--mount", "--cgroup", "sh", "-c", probe]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if outcome.returncode == 0 else f"namespaces are refused: {outcome.stderr.strip()[:200]}"


class Systemd:
    """Boots with the files below `root` and ull@NAME, which serves a copy of `bundle`. Its own log is in `folder`."""

    def __init__(self, root: Path, bundle: Path, name: str, folder: Path) -> None:
        self.unit = f"ull@{name}.service"
        self.log = folder / "ulld.log"
        units = root / "etc/systemd/system"
        for stub in _STUBS:
            text = "[Unit]\nDefaultDependencies=no\n"
            (units / f"{stub}.target").write_text(text)
        # No journal is here. This interpreter may lie in a home, which the units hide from their user.
        path = python_environment()["PYTHONPATH"]
        drop_in = (
            "[Service]\nUser=root\nDynamicUser=no\nProtectHome=no\nPrivateTmp=no\nPrivateUsers=no\nProtectSystem=no\n"
            f'StandardError=append:{self.log}\nEnvironment="PYTHONPATH={path}"\n'
        )
        for unit in (self.unit, self.unit.replace("ull@", "ull-gateway@")):
            (units / f"{unit}.d").mkdir(exist_ok=True)
            (units / f"{unit}.d/99-test.conf").write_text(drop_in)
        boot = _BOOT.format(root=root, bundle=bundle, name=name, systemd=SYSTEMD)
        self._output = (folder / "systemd.log").open("w")
        self._process = subprocess.Popen(
            [
                "unshare",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount",
                "--cgroup",
                "--uts",
                "--ipc",
                "--net",
                "sh",
                "-c",
                boot,
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            self.wait(lambda: self.run("systemctl", "list-units", check=False).returncode == 0, "systemd to boot")
        except (AssertionError, OSError, subprocess.SubprocessError) as error:  # no unit of ours has been touched yet
            said = (folder / "systemd.log").read_text()[-300:]
            self.__exit__()
            pytest.skip(f"systemd does not boot here: {error} {said}")

    def __enter__(self) -> "Systemd":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        subprocess.run(["unshare", "--mount", "--cgroup", "sh", "-c", _CLEAN], capture_output=True, check=False)

    def run(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """A command inside."""
        inside = ["nsenter", "--target", str(self._inner()), "--all", *command]
        outcome = subprocess.run(inside, capture_output=True, text=True, timeout=120, check=False)
        assert not check or outcome.returncode == 0, (command, outcome.stdout, outcome.stderr)
        return outcome

    def show(self) -> dict[str, str]:
        """What systemd says of the service."""
        names = "ActiveState,SubState,Result,NRestarts,StatusText,MainPID,ExecMainStatus,Slice"
        lines = self.run("systemctl", "show", self.unit, f"--property={names}").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def until(self, **wanted: str) -> dict[str, str]:
        """Waits until systemd says this of the service."""
        self.wait(lambda: wanted.items() <= self.show().items(), str(wanted))
        return self.show()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The daemon's log lines of a kind."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [event for line in lines if line.startswith("{") and (event := json.loads(line))["event"] == kind]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until `condition()` is true."""
        deadline = time.monotonic() + 90
        while not condition():
            assert self._process.poll() is None, Path(self._output.name).read_text()[-2000:]
            assert time.monotonic() < deadline, (what, self.log.read_text()[-2000:] if self.log.exists() else "")
            time.sleep(0.1)

    def _inner(self) -> int:
        """The process id out here of PID 1 in there."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else self._process.pid


def signal_inside(systemd: Systemd, number: signal.Signals) -> None:
    """Sends a signal to the daemon's main process."""
    systemd.run("kill", f"-{number.value}", systemd.show()["MainPID"])
