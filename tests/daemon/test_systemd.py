"""The unit file: systemd accepts it, and what it starts is what ulld takes."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ull.daemon.main import parser
from ull.daemon.server import EXIT_ENGINE_FAILED, EXIT_RESTART

UNIT = Path(__file__).parents[2] / "systemd/ull@.service"


def settings() -> dict[str, str]:
    """The unit's [Service] section; of repeated keys the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser["Service"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    # Where ulld is installed is no concern of this machine: an executable that exists stands in for it.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/ull/bin/ulld", "/bin/true"))
    drop_ins = tmp_path / f"{UNIT.name}.d"
    drop_ins.mkdir()
    for drop_in in ("gpu.conf", "priority.conf"):
        shutil.copy(UNIT.parent / drop_in, drop_ins)
    outcome = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (outcome.returncode, outcome.stderr.strip()) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["ull@.service", "ull-gateway@.service"])
def test_it_is_shut_in(tmp_path: Path, name: str) -> None:
    unit = tmp_path / name
    unit.write_text(re.sub(r"/opt/ull/bin/[a-z-]+", "/bin/true", (UNIT.parent / name).read_text()))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", str(unit)]  # tenths
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stdout[-300:]


def test_libzmq_may_start_its_threads() -> None:
    """It sets their policy and aborts where it may not: the first run under a real systemd ended there."""
    for name in ("ull@.service", "ull-gateway@.service"):
        allowed = re.findall(r"^SystemCallFilter=([^~@].*)$", (UNIT.parent / name).read_text(), re.MULTILINE)
        assert "sched_setscheduler" in " ".join(allowed)


def test_the_drop_in_for_priorities_gives_what_the_unit_takes() -> None:
    unit, drop_in = UNIT.read_text(), (UNIT.parent / "priority.conf").read_text()
    assert "RestrictRealtime=yes" in unit and "~@privileged @resources" in unit
    assert "RestrictRealtime=no" in drop_in
    allowed = next(line for line in drop_in.splitlines() if line.startswith("SystemCallFilter="))
    assert "sched_setscheduler" in allowed and "~" not in allowed
    assert int(re.findall(r"^LimitRTPRIO=(\d+)$", drop_in, re.MULTILINE)[0]) >= 1


def test_it_starts_what_ulld_takes() -> None:
    command = settings()["ExecStart"].replace("%i", "tiny").split()
    assert command[0].endswith("/ulld") and command[-1] == "$ULLD_ARGUMENTS"
    options = parser().parse_args([*command[1:-1], "--cores", "2,3"])
    assert options.bundle == Path("/var/lib/ull/tiny.ull")
    assert options.listen == ["ipc:///run/ull-tiny/ull.sock"]
    assert settings()["RuntimeDirectory"] == "ull-%i"


def test_it_follows_the_daemon_s_contract() -> None:
    unit = settings()
    assert (unit["Type"], unit["NotifyAccess"], unit["Restart"]) == ("notify", "main", "on-failure")
    assert unit["RestartPreventExitStatus"].split() == [str(EXIT_ENGINE_FAILED)]
    assert EXIT_RESTART not in (0, EXIT_ENGINE_FAILED)  # and on-failure restarts on it
    assert unit["LimitMEMLOCK"] == "infinity"
    assert unit["LogRateLimitIntervalSec"] == "0"
    assert int(unit["WatchdogSec"]) > 2  # engine.watchdog_ms must be able to speak first
    assert int(unit["TimeoutStopSec"]) > 30  # drain_timeout_s
