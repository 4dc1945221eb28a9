"""`ull-gateway` as a process of its own, in front of a daemon under test."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from ull.spawn import python_command, python_environment

pytest.importorskip("starlette", reason="needs the extra `gateway`")


class Gateway:
    """A gateway that serves once the constructor returns. arguments: more of ull-gateway's."""

    def __init__(self, url: str, directory: Path, *arguments: str, ready_timeout: float = 60.0) -> None:
        self.log_path = directory / "gateway.log"
        with self.log_path.open("ab") as log:
            command = [*python_command("ull.gateway"), "--connect", url, "--port", "0", "--log-format", "json"]
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(ready_timeout) else ""
        if not line.startswith("READY "):
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the gateway did not get ready: {self.log_path.read_text()}")
        self.base = line.split()[1]
        self.port = int(self.base.rsplit(":", 1)[1])

    @property
    def openai(self) -> str:
        """What OpenAI's clients take for base_url."""
        return f"{self.base}/v1"

    @property
    def memory(self) -> int:
        """Bytes of the process that are resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    def requests(self) -> list[dict[str, Any]]:
        """The log's lines about requests."""
        lines = [json.loads(line) for line in self.log_path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["event"] == "request"]

    def wait_request(self, **fields: Any) -> dict[str, Any]:
        """The first line about a request that has these fields; fails after 20 seconds."""
        deadline = time.monotonic() + 20
        while True:
            for line in self.requests():
                if all(line.get(name) == value for name, value in fields.items()):
                    return line
            assert time.monotonic() < deadline, f"no request with {fields}: {self.requests()[-5:]}"
            time.sleep(0.01)

    def stop(self) -> int:
        """Ends it as systemd would; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def __enter__(self) -> Gateway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = self.stop()
        if kind is None:
            assert status == 0, self.log_path.read_text(encoding="utf-8")
            assert not [line for line in self.requests() if "error" in line]
