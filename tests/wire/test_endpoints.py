"""Endpoints: what they may be, when two are one, and the one that daemon and clients share without being told."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

import ull
from conftest import Spawn
from ull import wire
from ull.endpoints import check_endpoint, default_endpoint, ipc_path, local_endpoint, same_endpoint
from ull.errors import ConfigError
from ull.spawn import python_command, python_environment

USER = os.geteuid()


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6")


def test_which_are_local() -> None:
    assert local_endpoint("ipc:///a") and local_endpoint("tcp://127.9.9.9:1") and local_endpoint("tcp://[::1]:1")
    assert not local_endpoint("tcp://*:1") and not local_endpoint("tcp://example.org:1")
    assert not local_endpoint("tcp://[::]:1") and not local_endpoint("tcp://[fe80::1%eth0]:1")


def test_paths() -> None:
    assert ipc_path("ipc:///run/ull.sock") == Path("/run/ull.sock")
    assert ipc_path("ipc://@abstract") is None and ipc_path("tcp://127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("tcp://127.0.0.1:65536", "a port is 0 to 65535, not 65536"),
        ("tcp://127.0.0.1:99999", "a port is 0 to 65535, not 99999"),
        ("tcp://[::1]:99999", "a port is 0 to 65535, not 99999"),
        ("tcp://127.0.0.1:-1", "has no port"),
        ("tcp://127.0.0.1:", "has no port"),
        ("tcp://:1", "has no port"),
        ("tcp://127.0.0.1:²", "has no port"),
        ("tcp://::1:1", "stands in brackets"),
        ("tcp://[::1:1", "stands in brackets"),
        ("tcp://[127.0.0.1]:1", "no IPv6 address"),
        ("tcp://[::g]:1", "no IPv6 address"),
        ("udp://127.0.0.1:1", "neither ipc"),
        ("ipc://" + "x" * 108, "longer than 107 bytes"),
    ],
)
def test_what_is_none_is_said(endpoint: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_endpoint(endpoint)
    assert said in caught.value.message and "\n" not in caught.value.message
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        ull.Client(endpoint)
    assert caught.value.field == "url"


def test_what_is_one_is_taken() -> None:
    for endpoint in (
        *("tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:65535", "tcp://[::1]:1", "tcp://[::]:1", "tcp://eth0:1"),
        *("tcp://[fe80::1%eth0]:1", "ipc://relative", "ipc://@abstract", "ipc://" + "x" * 107),
    ):
        check_endpoint(endpoint)


def test_one_endpoint_may_be_written_in_several_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    written = [f"ipc://{tmp_path}/{path}" for path in ("real/s", "real//s", "link/s", "link/./s", "real/../link/s")]
    assert len({same_endpoint(endpoint) for endpoint in (*written, "ipc://s", "ipc://./s")}) == 1
    assert same_endpoint("tcp://localhost:07") == same_endpoint("tcp://127.0.0.1:7") == same_endpoint("tcp://lo:7")
    assert same_endpoint("tcp://[::1]:7") == same_endpoint("tcp://[0:0:0:0:0:0:0:1]:7")
    assert same_endpoint("tcp://[::1]:7") != same_endpoint("tcp://127.0.0.1:7") != same_endpoint("tcp://127.0.0.1:8")
    assert same_endpoint("tcp://127.0.0.1:0") is None and same_endpoint("tcp://127.0.0.1:*") is None
    assert same_endpoint("ipc://@s") != same_endpoint("ipc://s")


# ---- the default ---------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Stand-ins of /run/user and /tmp; $XDG_RUNTIME_DIR is not set."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").mkdir()
    yield tmp_path / "run", tmp_path / "tmp"


def test_the_runtime_directory_comes_first(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (places[0] / str(USER)).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(mine))
    assert default_endpoint(*places) == f"ipc://{mine}/ull.sock"
    for useless in ("", "relative", str(tmp_path / "none")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert default_endpoint(*places) == f"ipc://{places[0]}/{USER}/ull.sock"
    mine.chmod(0o770)  # others could put a socket there
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(mine))
    assert default_endpoint(*places) == f"ipc://{places[0]}/{USER}/ull.sock"
    assert list(places[1].iterdir()) == []


def test_without_one_a_directory_is_made_that_is_ours_alone(places: tuple[Path, Path]) -> None:
    directory = places[1] / f"ull-{USER}"
    for _ in range(2):
        assert default_endpoint(*places) == f"ipc://{directory}/ull.sock"
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_not_ours_alone_is_refused(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = places[1] / f"ull-{USER}"
    directory.mkdir(mode=0o700)
    directory.chmod(0o722)
    with pytest.raises(ConfigError, match="may be written by others \\(mode 0722"):
        default_endpoint(*places)
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is no directory"):
        default_endpoint(*places)
    directory.unlink()
    directory.write_text("")
    with pytest.raises(ConfigError, match="is no directory"):
        default_endpoint(*places)
    directory.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: USER + 1)
    (places[1] / f"ull-{USER + 1}").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=f"belongs to another user \\(uid {USER}, this is {USER + 1}\\)") as caught:
        default_endpoint(*places)
    assert "\n" not in caught.value.message


def test_daemon_and_clients_meet_without_being_told(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "xdg"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    daemon = subprocess.Popen(
        [*python_command("ull.daemon"), str(tiny_bundle), "--threads", "1"],
        env=python_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert daemon.stdout is not None
        assert f"listen=ipc://{directory}/ull.sock " in daemon.stdout.readline()
        with ull.Client() as client:
            assert client.url == f"ipc://{directory}/ull.sock"
            assert client.health().status == "ok"
        outcome = subprocess.run(
            [*python_command("ull.cli"), "health"], env=python_environment(), capture_output=True, check=False
        )
        assert outcome.returncode == 0
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0
        daemon.communicate()
    assert list(directory.iterdir()) == []


# ---- IPv6 ----------------------------------------------------------------------------------------------------------


def asked_by_zeromq(url: str) -> wire.Reply:
    """What the daemon at `url` answers to `health`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(url)
        dealer.send_multipart((wire.VERSION, wire.encode(wire.Health(id=1))))
        assert dealer.poll(30_000), f"no answer at {url}"
        return wire.decode_reply(dealer.recv_multipart()[1])


@needs_ipv6
def test_ipv6(spawn: Spawn) -> None:
    daemon = spawn(url="tcp://[::1]:0")
    assert daemon.url.startswith("tcp://[::1]:") and not daemon.url.endswith(":0")
    assert isinstance(asked_by_zeromq(daemon.url), wire.HealthReply)
    with ull.Client(daemon.url) as client:
        assert client.generate("x", max_tokens=2, ignore_eos=True).result().usage.completion_tokens == 2
    command = [*python_command("ull.cli"), "health", "--connect", daemon.url]
    assert subprocess.run(command, env=python_environment(), stdout=subprocess.DEVNULL, check=False).returncode == 0


@needs_ipv6
def test_every_ipv6_address(spawn: Spawn) -> None:
    daemon = spawn("--set", "insecure_tcp=true", url="tcp://[::]:0")
    port = daemon.url.rpartition(":")[2]
    assert daemon.url == f"tcp://[::]:{port}"
    assert isinstance(asked_by_zeromq(f"tcp://[::1]:{port}"), wire.HealthReply)


def link_local() -> str | None:
    """An address of this machine's that is only good with its zone, as fe80::1%eth0."""
    if shutil.which("ip") is None:
        return None
    listed = subprocess.run(["ip", "-6", "-o", "addr", "show", "scope", "link"], capture_output=True, text=True)
    words = listed.stdout.split()
    return f"{words[3].partition('/')[0]}%{words[1]}" if len(words) > 3 and "tentative" not in words else None


@pytest.mark.skipif(link_local() is None, reason="no link-local address")
def test_a_link_local_address_keeps_its_zone(spawn: Spawn) -> None:
    daemon = spawn("--set", "insecure_tcp=true", url=f"tcp://[{link_local()}]:0")
    assert daemon.url.startswith(f"tcp://[{link_local()}]:")
    with ull.Client(daemon.url) as client:
        assert client.health().status == "ok"
