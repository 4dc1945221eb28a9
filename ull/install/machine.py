"""What a machine has: its cores, those that are isolated, and those near a GPU. Read from sysfs below `root`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ull.cores import parse_cores
from ull.errors import ConfigError

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
    gpus = [int(_text(path / "numa_node") or -1) for path in gpu_folders(root)]
    return Machine(online, parse_cores(_text(system / "cpu/isolated")), tuple(gpus), nodes)


def gpu_folders(root: Path) -> list[Path]:
    """sysfs's folders of NVIDIA's GPUs, in the order of their numbers."""
    return [
        path
        for path in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_DISPLAY)
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
