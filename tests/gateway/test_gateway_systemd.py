"""The gateway's unit file: systemd accepts it, and what it starts is what ull-gateway takes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT
from ull.gateway.main import parser

UNIT = ROOT / "systemd/ull-gateway@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_gateway_s_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/ull/bin/ull-gateway", "/bin/true"))
    outcome = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (outcome.returncode, outcome.stderr.strip()) == (0, "")


def test_it_starts_what_the_gateway_takes() -> None:
    line = next(line for line in UNIT.read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart="))
    command = line.removeprefix("ExecStart=").replace("%i", "tiny").split()
    assert command[0].endswith("/ull-gateway")
    assert command[-1] == "$ULL_GATEWAY_ARGUMENTS"
    assert parser().parse_args(command[1:-1]).connect == "ipc:///run/ull-tiny/ull.sock"
