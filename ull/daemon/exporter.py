"""The process that tells monitors of this daemon's figures (`ull.metrics`): started with it, and again if it ends."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
from typing import Any

from ull.errors import DaemonError
from ull.log import Log
from ull.spawn import python_command, python_environment

_START_S = 30.0
_PAUSE_S = 2.0  # before it is started again


class Exporter:
    """Serves `options` (`ull.metrics.server.ExporterOptions`, as JSON) from a process of its own until `close`.

    Raises DaemonError where it cannot listen.
    """

    def __init__(self, options: dict[str, Any], log: Log) -> None:
        self._options = options
        self._log = log
        self._closing = threading.Event()
        self._process, self.url = self._start()
        # What port 0 has become stays: monitors know it.
        self.address = self._options["listen"] = self.url.removeprefix("http://").removesuffix("/metrics")
        self._thread = threading.Thread(target=self._watch, name="ull-exporter", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The present process's id."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process."""
        self._closing.set()
        _end(self._process)
        self._thread.join()

    def _start(self) -> tuple[subprocess.Popen[bytes], str]:
        process = subprocess.Popen(
            python_command("ull.metrics"),
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            os.write(process.stdin.fileno(), json.dumps(self._options).encode() + b"\n")
            ready, _, _ = select.select([process.stdout], [], [], _START_S)
            said = process.stdout.readline().decode(errors="replace").strip() if ready else "it does not get ready"
        except OSError as error:
            said = str(error)
        if not said.startswith("READY "):
            _end(process)
            raise DaemonError(said or "metrics.listen: the process that serves it has ended", "metrics.listen")
        return process, said.removeprefix("READY ")

    def _watch(self) -> None:
        while not self._closing.is_set():
            status = self._process.wait()
            if self._closing.is_set():
                return
            _end(self._process)
            self._log.warning(
                "metrics", message="the process that serves metrics has ended; starting it again", status=status
            )
            while not self._closing.wait(_PAUSE_S):
                try:
                    self._process, _ = self._start()
                    break
                except (DaemonError, OSError) as error:
                    self._log.warning("metrics", message=f"it cannot be started: {error}")
        _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
