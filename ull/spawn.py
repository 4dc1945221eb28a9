"""A daemon as a child process: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ull.errors import DaemonError


def python_command(module: str) -> list[str]:
    """The command that runs `module` in a child of this interpreter; the working directory lends it no modules."""
    return [sys.executable, "-P", "-m", module]


def python_environment() -> dict[str, str]:
    """The environment in which a child finds the modules that this process would."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


class DaemonProcess:
    """`ulld` on `bundle`, ready to serve once the constructor returns.

    url: where it listens; an ipc socket in `directory` unless given. arguments: more of ulld's.
    command: what to run instead of ulld, with the same arguments.
    Its log is in `log_path`. Raises DaemonError with the daemon's own words if it does not get ready in time.
    """

    def __init__(
        self,
        bundle: Path,
        *,
        directory: Path | None = None,
        url: str | None = None,
        arguments: Sequence[str] = (),
        ready_timeout: float = 60.0,
        command: Sequence[str] | None = None,
    ) -> None:
        self._temporary = None if directory is not None else tempfile.TemporaryDirectory(prefix="ull-")
        home = directory if directory is not None else Path(self._temporary.name if self._temporary else ".")
        self.log_path = home / "ulld.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(command or python_command("ull.daemon")),
                    *(str(bundle), "--listen", url or f"ipc://{home / 'ull.sock'}"),
                    *arguments,
                ],
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.ready = self._wait_ready(ready_timeout)
        except BaseException:
            self.kill()
            raise
        self.urls = self.ready["listen"].split(",")
        self.url = self.urls[0]

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self.process.pid

    def log_lines(self) -> list[str]:
        """Everything logged so far, in whole lines."""
        text = self.log_path.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1].splitlines()

    def stop(self, timeout: float = 60.0) -> int:
        """Sends SIGTERM, waits, and returns the exit status. A daemon that does not stop is killed (status -9)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        self._close()
        return status

    def kill(self) -> None:
        """Ends the daemon at once, as a crash would."""
        self.process.kill()
        self.process.wait()
        self._close()

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _wait_ready(self, timeout: float) -> dict[str, str]:
        """Reads the READY line; returns its key=value pairs."""
        output = self.process.stdout
        assert output is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            readable = selector.select(max(0.0, deadline - time.monotonic()))
        line = output.readline() if readable else ""
        if not line.startswith("READY "):
            said = self.log_path.read_text(encoding="utf-8").strip().splitlines()
            reason = said[-1] if said else "it said nothing"
            raise DaemonError(f"the daemon did not get ready within {timeout:g} s: {reason}")
        return dict(pair.split("=", 1) for pair in line.split()[1:])

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
