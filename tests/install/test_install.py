"""`ull install --systemd`: which cores it takes on which machine, what it writes, what it leaves alone."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ull import cli
from ull.cores import core_list, parse_cores
from ull.daemon.config import parse_config
from ull.errors import ConfigError
from ull.install.machine import read_machine
from ull.install.systemd import Service, files_for, kernel_arguments


def tree(
    root: Path, cores: str, isolated: str = "", gpu_node: int | None = None, nodes: dict[int, str] | None = None
) -> Path:
    """What sysfs says of a machine."""
    files = {"sys/devices/system/cpu/online": cores, "sys/devices/system/cpu/isolated": isolated}
    for node, list_ in (nodes or {}).items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = list_
    devices = {"0000:00:1f.0": ("0x8086", "0x060100", 0)}
    if gpu_node is not None:
        devices["0000:17:00.0"] = ("0x10de", "0x030200", gpu_node)
        devices["0000:17:00.1"] = ("0x10de", "0x068000", 0)  # a bridge of the same maker
    for name, (vendor, kind, node) in devices.items():
        for key, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            files[f"sys/bus/pci/devices/{name}/{key}"] = str(value)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    "isolated, expected",
    [("", (14, 15)), ("10-13", (10, 11)), ("2-3", (14, 15)), ("3,12", (12,))],
    ids=["none", "near", "far", "one near"],
)
def test_hot_cores_are_isolated_ones_near_the_gpu(tmp_path: Path, isolated: str, expected: tuple[int, ...]) -> None:
    machine = read_machine(tree(tmp_path, "0-15", isolated, 1, {0: "0-7", 1: "8-15"}))
    assert (machine.gpus, machine.near(0)) == ((1,), tuple(range(8, 16)))
    assert machine.hot_cores(0) == expected


def test_without_a_gpu_the_daemon_places_itself(tmp_path: Path) -> None:
    assert read_machine(tree(tmp_path, "0-15")).hot_cores(None) == ()
    assert read_machine(tree(tmp_path, "0-15", "14-15")).hot_cores(None) == (14, 15)
    with pytest.raises(ConfigError, match="names no cores"):
        read_machine(tmp_path / "nothing")


def test_lists_of_cores() -> None:
    for text, cores in {"": (), "3": (3,), "0-2,8": (0, 1, 2, 8), "5,4": (4, 5)}.items():
        assert parse_cores(text) == cores
    assert core_list((0, 1, 2, 8, 10, 11)) == "0-2,8,10-11"
    for wrong in ("x", "3-1", "1-", "-2", "1;2", "1024", "0-99999999999"):
        with pytest.raises(ConfigError):
            parse_cores(wrong)


def test_the_files_of_an_h200_server(tmp_path: Path) -> None:
    machine = read_machine(tree(tmp_path, "0-15", "8-11", 1, {0: "0-7", 1: "8-15"}))
    service = Service("llama", cores=(8, 9), device=0, memory_max=9 << 30, tcp="tcp://0.0.0.0:5555", priority=True)
    files = files_for(service, machine)
    drop_in = files["etc/systemd/system/ull@llama.service.d/10-machine.conf"]
    for line in ("CPUAffinity=0-15", f"MemoryMax={9 << 30}", "LoadCredential=server.key:/etc/ull/server.key"):
        assert line in drop_in.splitlines()
    assert "--cores 8,9 --listen tcp://0.0.0.0:5555 --set access.server_key=%d/server.key" in drop_in
    assert "char-nvidia" in files["etc/systemd/system/ull@llama.service.d/20-gpu.conf"]
    assert "LimitRTPRIO" in files["etc/systemd/system/ull@llama.service.d/30-priority.conf"]
    assert "echo 0-7,10-15 >" in files["etc/systemd/system/ull-irqs.service"]
    configuration = parse_config(files["etc/ull/llama.toml"], {"access.server_key": "x"})
    assert (configuration.engine.device, configuration.engine.idle, configuration.io.idle) == (0, "spin", "spin")
    assert configuration.metrics.listen == "127.0.0.1:9464"
    arguments = kernel_arguments(service, machine)
    assert "isolcpus=managed_irq,domain,8-9" in arguments
    assert "irqaffinity=0-7,10-15" in arguments


@pytest.mark.parametrize("wrong, said", [({"name": "a/b"}, "no name"), ({"name": "x", "cores": (99,)}, "no core 99")])
def test_what_cannot_be_meant(tmp_path: Path, wrong: dict[str, object], said: str) -> None:
    machine = read_machine(tree(tmp_path, "0-3"))
    with pytest.raises(ConfigError, match=said):
        files_for(Service(**wrong), machine)  # type: ignore[arg-type]


def test_a_dry_run_shows_the_difference_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    install = ["install", "--systemd", "tiny", "--cpu", "--root", str(root)]
    assert cli.main([*install, "--dry-run"]) == 0
    assert "+ExecReload=/bin/kill -HUP $MAINPID" in capsys.readouterr().out
    assert not root.exists()
    assert cli.main(install) == 0
    assert "systemctl enable --now ull@tiny" in capsys.readouterr().out
    assert cli.main([*install, "--dry-run"]) == 0
    assert capsys.readouterr().out == "nothing would change\n"
    mine = root / "etc/ull/tiny.toml"
    mine.write_text("# mine")
    unit = root / "etc/systemd/system/ull@.service"
    unit.write_text("old")
    assert cli.main(install) == 0
    assert (mine.read_text(), "ExecStart" in unit.read_text()) == ("# mine", True)
    assert cli.main([*install, "--device", "0"]) == 1
    assert "exclude each other" in capsys.readouterr().err
    assert cli.main([*install, "--cores", "1023"]) == 1
    assert "no core 1023" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["install", "--systemd", "x", "--cpu", "--root", str(tmp_path / "file")]) == 1
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_all_of_it(tmp_path: Path) -> None:
    machine = read_machine(tree(tmp_path / "machine", "0-15", "8-11", 1, {0: "0-7", 1: "8-15"}))
    service = Service("x", cores=(8, 9), device=0, tcp="tcp://127.0.0.1:5555", priority=True)
    units = []
    for place, text in files_for(service, machine).items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("/opt/ull/bin/ulld", "/bin/true").replace("/opt/ull/bin/ull-gateway", "/bin/true"))
        if path.suffix in (".service", ".slice"):
            units.append(str(path))
    command = ["systemd-analyze", "verify", *units]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (outcome.returncode, outcome.stderr.strip()) == (0, "")


def test_the_configuration_it_writes_is_toml(tmp_path: Path) -> None:
    machine = read_machine(tree(tmp_path, "0-3"))
    for service in (Service("a"), Service("a", metrics=""), Service("a", tcp="tcp://127.0.0.1:1")):
        tomllib.loads(files_for(service, machine)["etc/ull/a.toml"])
