"""What a machine has: its cores, those that are isolated, and those near a GPU. Read from sysfs below `root`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ull.errors import ConfigError

MAX_CORE = 1023  # the core's number, held equal by tests/core/test_shared_numbers.py
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # the class of display controllers, GPUs among them


@dataclass(frozen=True)
class Machine:
    """`online` cores; `isolated` ones, which the scheduler leaves alone; `gpus`: the NUMA nodes of NVIDIA's devices."""

    online: tuple[int, ...]
    isolated: tuple[int, ...]
    gpus: tuple[int, ...]
    nodes: dict[int, tuple[int, ...]]  # cores by NUMA node

    def near(self, device: int) -> tuple[int, ...]:
        """The cores of the NUMA node of GPU number `device`; all where that is not known."""
        node = self.gpus[device] if device < len(self.gpus) else -1
        return self.nodes.get(node, self.online)

    def hot_cores(self, device: int | None) -> tuple[int, ...]:
        """Cores for an engine thread and an io thread: isolated ones, else the last two near the GPU.

        () without a GPU, where nothing is isolated: the daemon's own placement knows better.
        """
        near = self.online if device is None else self.near(device)
        if isolated := [core for core in near if core in self.isolated]:
            return tuple(isolated[:2])
        return tuple(near[-2:]) if device is not None and len(near) >= 4 else ()


def read_machine(root: Path = Path("/")) -> Machine:
    """This machine, or what a tree below `root` says of one. Raises ConfigError where it says nothing of cores."""
    system = root / "sys/devices/system"
    online = parse_cores(_text(system / "cpu/online"))
    if not online:
        raise ConfigError(f"{system / 'cpu/online'} names no cores: is /sys there?")
    nodes = {
        int(path.name.removeprefix("node")): parse_cores(_text(path / "cpulist"))
        for path in (system / "node").glob("node[0-9]*")
    }
    gpus = [
        int(_text(path / "numa_node") or -1)
        for path in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_DISPLAY)
    ]
    return Machine(online, parse_cores(_text(system / "cpu/isolated")), tuple(gpus), nodes)


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers of the kernel's form, such as `0-3,8`. Raises ConfigError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        last = last if dash else first
        numbers = first.isdecimal() and last.isdecimal() and len(last) <= 9
        if not numbers or not int(first) <= int(last) <= MAX_CORE:
            raise ConfigError(f"{text!r:.80} is no list of cores, 0 to {MAX_CORE}: write it as 2,3 or 2-5", "cores")
        cores.update(range(int(first), int(last) + 1))
    return tuple(sorted(cores))


def core_list(cores: tuple[int, ...]) -> str:
    """The kernel's form of core numbers."""
    parts: list[str] = []
    ordered = sorted(cores)
    for at, core in enumerate(ordered):
        if at and core == ordered[at - 1] + 1:
            parts[-1] = f"{parts[-1].partition('-')[0]}-{core}"
        else:
            parts.append(str(core))
    return ",".join(parts)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
