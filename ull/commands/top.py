"""`ull top`: a live view of a running daemon."""

from __future__ import annotations

import argparse
import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live

from ull import wire
from ull.client import Client
from ull.commands.connection import client_of
from ull.errors import ConfigError, Forbidden, UllError, UsageError
from ull.top.figures import History, Interval, Look
from ull.top.view import frame

if TYPE_CHECKING:
    from ull.metrics.gpu import Gpu

_PATIENCE_S = 1.0  # for an answer


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's own options."""
    command.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two looks (default: 1)")
    command.add_argument("--once", action="store_true", help="two looks, one frame, and the end")


def run(options: argparse.Namespace) -> int:
    """Looks until it is told to end. Raises UllError where the daemon cannot be reached at the beginning."""
    if not 0.05 <= options.interval <= 3600:
        raise UsageError(f"--interval must be 0.05 to 3600 seconds, not {options.interval:g}")
    console = Console()
    watch = _Watch(options)
    watch.look()
    if watch.last is None:
        raise watch.trouble or UsageError("the daemon does not answer")
    if options.once or not sys.stdout.isatty():
        time.sleep(options.interval)
        watch.look()
        console.print(watch.frame())
        return 0
    with _keys() as pressed, Live(watch.frame(), console=console, screen=True, auto_refresh=False) as live:
        while not pressed(options.interval):
            watch.look()
            live.update(watch.frame(), refresh=True)
    return 0


class _Watch:
    """A daemon that is looked at again and again, and its successors."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._client: Client | None = None
        self._url = ""
        self.last: Look | None = None
        self.trouble: UllError | None = None
        self._before: Look | None = None
        self._info: wire.InfoReply | None = None
        self._gpu: Gpu | None = None
        self._history = History()

    def look(self) -> None:
        """Asks the daemon."""
        try:
            if self._client is None:
                self._client = client_of(self._options, connect_timeout=_PATIENCE_S, query_timeout=_PATIENCE_S)
                self._url = self._client.url
                self._info = self._client.info()
                self._gpu = gpu_of(self._info)
            stats, health = self._client.stats(histograms=True), self._client.health()
            self.last = Look(time.monotonic(), stats, health)
        except (ConfigError, Forbidden):
            raise
        except UllError as error:
            self.trouble, self.last = error, None
            self._drop()
            return
        if self._before is not None:
            self._history.add(Interval.between(self._before, self.last))
        self._before = self.last

    def frame(self) -> Group:
        """What is to be shown."""
        return frame(self._url, self.last, self._history, self._info, _figures(self._gpu))

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(UllError, OSError):
                client.close()


def gpu_of(info: wire.InfoReply) -> Gpu | None:
    """The GPU of an engine that has one, if it is of this machine and the extra `ops` is there."""
    device = info.executor.get("device")
    if device is None:
        return None
    try:
        from ull.metrics.gpu import Gpu
    except ModuleNotFoundError:
        return None
    return Gpu(device)


def _figures(gpu: Gpu | None) -> dict[str, str]:
    """What NVML says of it; {} where it says nothing."""
    if gpu is None:
        return {}
    values = {family.name: family.samples[0].value for family in gpu.families()}
    shown = {
        "ull_gpu_sm_clock_hertz": ("SM", 1e6, "MHz"),
        "ull_gpu_power_watts": ("power", 1, "W"),
        "ull_gpu_temperature_celsius": ("at", 1, "C"),
        "ull_gpu_memory_used_bytes": ("memory", 2**30, "GiB"),
    }
    return {label: f"{values[name] / size:.0f} {unit}" for name, (label, size, unit) in shown.items() if name in values}


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields what waits so long, and says whether q was pressed. The terminal is as before afterwards."""
    if not sys.stdin.isatty():
        yield _waited
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _waited(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pressed(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False
