"""`ull install --systemd`: makes a service of an engine on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ull.cores import core_list, parse_cores
from ull.errors import UsageError
from ull.install.machine import Machine, read_machine
from ull.install.systemd import Service, difference, files_for, kernel_arguments, write


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--systemd", action="store_true", required=True, help="for systemd, the one that is known")
    command.add_argument("name", metavar="NAME", help="of the engine: its bundle is /var/lib/ull/NAME.ull")
    command.add_argument("--cores", metavar="LIST", help="hot cores, the engine thread's first (default: see below)")
    command.add_argument("--device", type=int, metavar="N", help="number of its GPU (default: 0 where there is one)")
    command.add_argument("--cpu", action="store_true", help="an engine for the CPU, whatever GPUs there are")
    command.add_argument("--memory-max", type=int, metavar="BYTES", help="as `ull inspect NAME.ull` prints it")
    command.add_argument("--metrics", default="127.0.0.1:9464", metavar="H:P", help='default: %(default)s; "": none')
    command.add_argument("--tcp", default="", metavar="URL", help="also serve tcp://address:port, to clients with keys")
    command.add_argument("--priority", action="store_true", help="let the daemon's threads have real-time priorities")
    command.add_argument("--prefix", type=Path, metavar="DIR", help="the virtual environment (default: this one)")
    command.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="write below DIR instead of /")
    command.add_argument("--dry-run", action="store_true", help="show what would change, and change nothing")
    command.epilog = (
        "Without --cores, isolated cores near the GPU are taken, else the last two near it; an engine for the CPU is "
        "left to the daemon's own placement."
    )


def run(options: argparse.Namespace, machine: Machine | None = None) -> int:
    """Writes the files, or shows the difference; says what is left to do."""
    machine = machine or read_machine()
    device = options.device if options.device is not None else (0 if machine.gpus else None)
    if options.cpu:
        if options.device is not None:
            raise UsageError("--cpu and --device exclude each other")
        device = None
    service = Service(
        name=options.name,
        prefix=options.prefix or Path(sys.prefix),
        cores=machine.hot_cores(device) if options.cores is None else parse_cores(options.cores),
        device=device,
        memory_max=options.memory_max,
        metrics=options.metrics,
        tcp=options.tcp,
        priority=options.priority,
    )
    files = files_for(service, machine)
    if options.dry_run:
        print((difference(files, options.root) or "nothing would change").rstrip("\n"))
        return 0
    for path in write(files, options.root):
        print(f"wrote {path}")
    _say_what_is_left(service, machine)
    return 0


def _say_what_is_left(service: Service, machine: Machine) -> None:
    print("\nThen:")
    print("  systemd-sysusers && systemd-tmpfiles --create && sysctl --system && systemctl daemon-reload")
    if service.tcp:
        print("  ull keys server /etc/ull/server.key")
        print("  ull keys new NAME --server /etc/ull/server.key --clients /etc/ull/clients")
    if service.cores:
        print("  systemctl enable --now ull-irqs")
        print(f"  kernel command line, for cores {core_list(service.cores)}: {kernel_arguments(service, machine)}")
    print(f"  cp -r {service.name}.ull /var/lib/ull/ && systemctl enable --now ull@{service.name}")
