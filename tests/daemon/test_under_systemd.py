"""The installed unit under a real systemd: start, ready, watchdog, restart, reload and drain."""

import signal
import sys
from pathlib import Path

import pytest

from systemd_rig import Systemd, missing, signal_inside
from ull import cli

_ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def install(root: Path, *arguments: str) -> None:
    assert (
        cli.main(["install", "--systemd", "tiny", "--cpu", "--root", str(root), "--prefix", sys.prefix, *arguments])
        == 0
    )
    configuration = root / "etc/ull/tiny.toml"
    configuration.write_text(configuration.read_text() + '\n[log]\nformat = "json"\n')


def test_a_service_lives_as_operations_says(tiny_bundle: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    install(root, "--tcp", "tcp://127.0.0.1:5555")
    server, clients, key = (str(root / f"etc/ull/{name}") for name in ("server.key", "clients", "alice.key"))
    assert cli.main(["keys", "server", server]) == 0
    assert cli.main(["keys", "new", "alice", "--server", server, "--clients", clients, "--out", key]) == 0
    with Systemd(root, tiny_bundle, "tiny", tmp_path) as systemd:
        systemd.run("systemctl", "start", systemd.unit)  # returns once it is READY
        state = systemd.show()
        assert (state["ActiveState"], state["SubState"], state["Slice"]) == ("active", "running", "ull.slice")
        assert state["StatusText"].startswith("serving name=tiny listen=ipc:///run/ull-tiny/ull.sock")
        systemd.wait(lambda: len(systemd.events("ready")) == 1, "the line of the log that says so")

        generate = [sys.executable, "-m", "ull", "generate", "--max-tokens", "4", "def", "--connect"]
        answer = systemd.run(*generate, "ipc:///run/ull-tiny/ull.sock").stdout
        assert answer.strip()
        assert systemd.run(*generate, "tcp://127.0.0.1:5555", "--key", "/etc/ull/alice.key").stdout == answer
        figures = systemd.run(sys.executable, "-c", _ASK, "http://127.0.0.1:9464/metrics").stdout
        assert "ull_requests_accepted_total 2.0" in figures
        assert [event["peer"].partition(":")[0] for event in systemd.events("request")] == ["user", "key"]

        systemd.run("systemctl", "start", "ull-gateway@tiny")
        ask = [sys.executable, "-c", _ASK, "http://127.0.0.1:8000/health"]
        systemd.wait(lambda: '"status":"ok"' in systemd.run(*ask, check=False).stdout, "the gateway")

        systemd.run("systemctl", "reload", systemd.unit)
        systemd.until(ActiveState="active")
        systemd.wait(lambda: bool(systemd.events("reload")), "the reload")

        upgrade = [sys.executable, "-m", "ull", "upgrade", "--connect", "ipc:///run/ull-tiny/ull.sock"]

        def replace() -> None:
            """Another process is the service, and nothing else has changed."""
            before, ready = systemd.show(), len(systemd.events("ready"))
            assert " has handed over to " in systemd.run(*upgrade).stdout
            systemd.wait(lambda: len(systemd.events("ready")) > ready, "the successor")
            after = systemd.show()
            assert after["MainPID"] not in (before["MainPID"], "0")
            assert {**after, "StatusText": "", "MainPID": ""} == {**before, "StatusText": "", "MainPID": ""}
            assert after["StatusText"].startswith("serving name=tiny listen=ipc:///run/ull-tiny/ull.sock")
            assert systemd.run(*generate, "ipc:///run/ull-tiny/ull.sock").stdout == answer
            assert systemd.run(*generate, "tcp://127.0.0.1:5555", "--key", "/etc/ull/alice.key").stdout == answer
            figures = systemd.run(sys.executable, "-c", _ASK, "http://127.0.0.1:9464/metrics").stdout
            assert "ull_requests_accepted_total 2.0" in figures
            assert '"status":"ok"' in systemd.run(*ask).stdout  # the gateway has not lost its daemon

        replace()
        replace()
        signal_inside(systemd, signal.SIGKILL)  # a crash
        systemd.until(ActiveState="active", SubState="running", NRestarts="1")
        replace()
        signal_inside(systemd, signal.SIGSTOP)  # nothing gives a sign of life: the watchdog ends it
        systemd.until(ActiveState="active", SubState="running", NRestarts="2")
        systemd.wait(lambda: len(systemd.events("ready")) == 6, "the sixth start")

        systemd.run("systemctl", "stop", systemd.unit)
        state = systemd.show()
        assert (state["ActiveState"], state["Result"], state["ExecMainStatus"]) == ("inactive", "success", "0")
        assert [event["unfinished"] for event in systemd.events("stopped")] == [0]


def test_a_service_that_cannot_start_gives_up(tiny_bundle: Path, tmp_path: Path) -> None:
    install(tmp_path / "root")
    (tmp_path / "root/etc/ull/tiny.toml").write_text("nonsense = 1")
    with Systemd(tmp_path / "root", tiny_bundle, "tiny", tmp_path) as systemd:
        assert systemd.run("systemctl", "start", systemd.unit, check=False).returncode != 0
        systemd.until(ActiveState="failed")
        assert systemd.log.read_text().count("unknown key nonsense") == 5  # as often as it may within a minute
