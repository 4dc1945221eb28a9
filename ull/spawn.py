"""Servers as child processes: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ull.errors import DaemonError


def python_command(module: str) -> list[str]:
    """The command that runs `module` in a child of this interpreter; the working directory lends it no modules."""
    return [sys.executable, "-P", "-m", module]


def python_environment() -> dict[str, str]:
    """The environment in which a child finds the modules that this process would."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


class ServerProcess:
    """A server as a child process, which has printed its line READY once the constructor returns.

    name: what to call it when it does not get ready. log_path: where its standard error goes.
    Raises DaemonError with its own last words if it does not get ready in time.
    """

    def __init__(self, command: Sequence[str], name: str, log_path: Path, timeout: float = 60.0) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.said = self._wait_ready(name, timeout)  # behind READY
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    def log_lines(self) -> list[str]:
        """Everything logged so far, in whole lines."""
        text = self.log_path.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1].splitlines()

    def stop(self, timeout: float = 60.0) -> int:
        """Sends SIGTERM, waits, and returns the exit status. A server that does not stop is killed (status -9)."""
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
        """Ends the server at once, as a crash would."""
        self.process.kill()
        self.process.wait()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self, name: str, timeout: float) -> str:
        """Reads the READY line; returns what follows that word."""
        output = self.process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            line = output.readline() if selector.select(timeout) else ""
        if not line.startswith("READY "):
            said = self.log_path.read_text(encoding="utf-8").strip().splitlines()
            reason = said[-1] if said else "it said nothing"
            raise DaemonError(f"{name} did not get ready within {timeout:g} s: {reason}")
        return line.removeprefix("READY ").strip()

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()


class DaemonProcess(ServerProcess):
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
        whole = [
            *(command or python_command("ull.daemon")),
            *(str(bundle), "--listen", url or f"ipc://{home / 'ull.sock'}"),
            *arguments,
        ]
        super().__init__(whole, "the daemon", home / "ulld.log", ready_timeout)
        self.ready = dict(pair.split("=", 1) for pair in self.said.split())
        self.urls = self.ready["listen"].split(",")
        self.url = self.urls[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._temporary is not None:
            self._temporary.cleanup()
