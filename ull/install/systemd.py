"""The files of a service: where each belongs, with what in it, and how that differs from what is there."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import ull
from ull.access import unreadable
from ull.cores import core_list
from ull.errors import ConfigError
from ull.files import replace
from ull.install.machine import Machine

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PLACES = {
    "ull@.service": "etc/systemd/system/ull@.service",
    "ull-gateway@.service": "etc/systemd/system/ull-gateway@.service",
    "ull.slice": "etc/systemd/system/ull.slice",
    "ull.sysusers": "etc/sysusers.d/ull.conf",
    "ull.tmpfiles": "etc/tmpfiles.d/ull.conf",
    "ull.sysctl": "etc/sysctl.d/90-ull.conf",
}


@dataclass(frozen=True)
class Service:
    """One engine as a service.

    name: of the unit's instance, and of its bundle in /var/lib/ull. prefix: the virtual environment that has ulld.
    cores: hot ones, the engine thread's first; () leaves them to the daemon. device: of its GPU; None: it needs none.
    memory_max: bytes; None: no limit. metrics: host:port, "": none. tcp: an endpoint that is
    served too, with CURVE; "": none. priority: whether its threads may have real-time priorities.
    """

    name: str
    prefix: Path = Path("/opt/ull")
    cores: tuple[int, ...] = ()
    device: int | None = None
    memory_max: int | None = None
    metrics: str = "127.0.0.1:9464"
    tcp: str = ""
    priority: bool = False


def files_for(service: Service, machine: Machine) -> dict[str, str]:
    """What belongs where, by path below the root. Raises ConfigError for what cannot be meant."""
    if _NAME.fullmatch(service.name) is None:
        raise ConfigError(f"{service.name!r} is no name of an engine: 1 to 64 letters, digits and ._-", "name")
    if missing := [core for core in service.cores if core not in machine.online]:
        raise ConfigError(f"this machine has no core {missing[0]}: it has {core_list(machine.online)}", "cores")
    shipped = _shipped()
    files = {place: (shipped / name).read_text() for name, place in _PLACES.items()}
    for unit in ("ull@.service", "ull-gateway@.service"):
        place = _PLACES[unit]
        files[place] = files[place].replace("/opt/ull/bin/", f"{service.prefix}/bin/")
    drop_ins = f"etc/systemd/system/ull@{service.name}.service.d"
    files[f"{drop_ins}/10-machine.conf"] = _drop_in(service, machine)
    if service.device is not None:
        files[f"{drop_ins}/20-gpu.conf"] = (shipped / "gpu.conf").read_text()
    if service.priority:
        files[f"{drop_ins}/30-priority.conf"] = (shipped / "priority.conf").read_text()
    files[f"etc/ull/{service.name}.toml"] = _configuration(service)
    housekeeping = tuple(core for core in machine.online if core not in service.cores)
    if service.cores and housekeeping:
        unit = (shipped / "ull-irqs.service").read_text().replace("@HOUSEKEEPING@", core_list(housekeeping))
        files["etc/systemd/system/ull-irqs.service"] = unit
    return files


def kernel_arguments(service: Service, machine: Machine) -> str:
    """What the kernel's command line should have, for these cores; "" without any."""
    others = tuple(core for core in machine.online if core not in service.cores)
    if not service.cores or not others:
        return ""
    hot, example = core_list(service.cores), (_shipped() / "kernel-command-line").read_text().splitlines()[-1]
    return example.replace("0-7", core_list(others)).replace("8-11", hot)


def difference(files: dict[str, str], root: Path) -> str:
    """A unified diff from what lies below `root` to `files`; "" where nothing would change."""
    parts: list[str] = []
    for place, wanted in sorted(files.items()):
        found = _found(root / place)
        parts += difflib.unified_diff(
            (found or "").splitlines(keepends=True),
            wanted.splitlines(keepends=True),
            "/dev/null" if found is None else str(root / place),
            str(root / place),
        )
    return "".join(parts)


def write(files: dict[str, str], root: Path, keep: str = "etc/ull/") -> list[Path]:
    """Writes what differs, each file whole or not at all; returns the paths written.

    What lies in `keep` is an operator's once it is there: it is left alone. Raises ConfigError.
    """
    written = []
    for place, wanted in sorted(files.items()):
        path, found = root / place, _found(root / place)
        if found == wanted or (found is not None and place.startswith(keep)):
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, wanted.encode(), mode=0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): run it as root, or give --root") from error
        written.append(path)
    return written


def _drop_in(service: Service, machine: Machine) -> str:
    arguments = [f"--config /etc/ull/{service.name}.toml"]
    lines = [
        "# Of this machine, by `ull install --systemd`. What you change belongs into a drop-in beside it.",
        "[Service]",
    ]
    if service.cores:
        arguments.append(f"--cores {','.join(map(str, service.cores))}")
        # Isolated cores are nobody's unless they are named; the daemon keeps all but its pinned threads off them.
        lines.append(f"CPUAffinity={core_list(machine.online)}")
    if service.tcp:
        arguments.append(f"--listen {service.tcp} --set access.server_key=%d/server.key")
        lines.append("LoadCredential=server.key:/etc/ull/server.key")
    if service.memory_max is not None:
        lines.append(f"MemoryMax={service.memory_max}")
    lines.append(f'Environment="ULLD_ARGUMENTS={" ".join(arguments)}"')
    return "\n".join(lines) + "\n"


def _configuration(service: Service) -> str:
    lines = ["# What differs from the defaults, which `ull config --defaults` prints with their meanings."]
    if service.metrics:
        lines += ["", "[metrics]", f'listen = "{service.metrics}"']
    if service.device is not None:
        lines += ["", "[engine]", f"device = {service.device}", 'idle = "spin"', "", "[io]", 'idle = "spin"']
    if service.tcp:
        lines += ["", "[access]", 'clients = "/etc/ull/clients"']
    return "\n".join(lines) + "\n"


def _shipped() -> Path:
    """The folder of units: in a wheel beside the modules, in a checkout at its root."""
    beside = Path(ull.__file__).parent / "systemd"
    return beside if beside.is_dir() else Path(ull.__file__).parents[1] / "systemd"


def _found(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(unreadable(path, error)) from error
