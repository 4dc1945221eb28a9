"""`ull-gateway` as a process of its own, in front of a daemon under test."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from ull.spawn import ServerProcess, python_command

pytest.importorskip("starlette", reason="needs the extra `gateway`")


class Gateway(ServerProcess):
    """A gateway that serves once the constructor returns. arguments: more of ull-gateway's."""

    def __init__(self, url: str, directory: Path, *arguments: str) -> None:
        command = [*python_command("ull.gateway"), "--connect", url, "--port", "0", "--log-format", "json"]
        super().__init__([*command, *arguments], "the gateway", directory / "gateway.log")
        self.base = self.said
        self.port = int(self.base.rsplit(":", 1)[1])

    @property
    def openai(self) -> str:
        """What OpenAI's clients take for base_url."""
        return f"{self.base}/v1"

    @property
    def memory(self) -> int:
        """Bytes of the process that are resident."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    def requests(self) -> list[dict[str, Any]]:
        """The log's lines about requests."""
        lines = [json.loads(line) for line in self.log_lines()]
        return [line for line in lines if line["event"] == "request"]

    def wait_request(self, **fields: Any) -> dict[str, Any]:
        """The first line about a request that has these fields; fails after four."""
        deadline = time.monotonic() + 240
        while True:
            for line in self.requests():
                if all(line.get(name) == value for name, value in fields.items()):
                    return line
            assert time.monotonic() < deadline, f"no request with {fields}: {self.requests()[-5:]}"
            time.sleep(0.01)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = self.stop()
        if kind is None:
            assert status == 0, self.log_path.read_text(encoding="utf-8")
            assert not [line for line in self.requests() if "error" in line]
