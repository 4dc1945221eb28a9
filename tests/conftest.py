"""Fixtures that several test files share: the tiny engine's bundle, and daemons that end with their test."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
if str(ROOT / "build") not in sys.path:
    sys.path.append(str(ROOT / "build"))  # for a checkout that is not installed

from ull.spawn import DaemonProcess  # noqa: E402

# Where only the GPU's tests are run, these may be missing.
with contextlib.suppress(ImportError):
    from ull.client import aio, sync

    for module in (sync, aio):  # a daemon beside two other tests may take its time; tests of time limits say their own
        module.CONNECT_TIMEOUT_S, module.QUERY_TIMEOUT_S = 10.0, 60.0
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("ull", deadline=None)  # of one example: a busy machine may take its time
    settings.load_profile("ull")
# A shell starts its background jobs with one of these ignored, nohup a command with the other.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a chip nothing takes as long as on the emulator: `make h200` says how long a test may take there."""
    if os.environ.get("ULL_KERNELS") == "device":
        for item in items:
            item.own_markers = [marker for marker in item.own_markers if marker.name != "timeout"]


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """engines/tiny.toml, built without its evaluation."""
    from ull_build.build import build
    from ull_build.recipe import load_recipe
    from ull_build.settings import settings_from_recipe

    output = tmp_path_factory.mktemp("engines") / "tiny.ull"
    recipe = load_recipe(ROOT / "engines/tiny.toml", {"output": str(output)})
    return build(settings_from_recipe(recipe, evaluate=False)).path


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a random Llama, never changed by a test."""
    from checkpoints import write_checkpoint
    from ull_build.build import build
    from ull_build.settings import Settings

    directory = tmp_path_factory.mktemp("bundle")
    checkpoint = write_checkpoint(directory / "model")
    return build(Settings(model=checkpoint, output=directory / "x.ull", name="x", evaluate=False)).path


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the bundle to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "x.ull"))


class Daemon(DaemonProcess):
    """A daemon under test, whose log is JSON."""

    def __init__(self, bundle: Path, **options: Any) -> None:
        options["arguments"] = ["--set", "log.format=json", "--threads", "1", *options.get("arguments", ())]
        super().__init__(bundle, **options)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The log's lines of these kinds ("request", "refused", "ready", ...), in order.

        Beside them the native core may complain, of a thread that the machine has kept waiting.
        """
        events = [json.loads(line) for line in self.log_lines() if not line.startswith("ulld: ")]
        return [event for event in events if event["event"] in kinds]

    def wait_events(self, kind: str, count: int) -> list[dict[str, Any]]:
        """The lines of one kind once there are at least `count`; fails after a minute."""
        deadline = time.monotonic() + 60
        while len(self.events(kind)) < count:
            assert time.monotonic() < deadline, f"{count} x {kind} never logged: {self.log_lines()}"
            time.sleep(0.005)
        return self.events(kind)

    def check_log(self) -> None:
        """One line per accepted request, and no complaint of the daemon about itself."""
        assert not [event for event in self.events("internal", "engine") if event["level"] == "error"]
        clients = [event for event in self.events("request") if event["level"] != "debug"]  # else the daemon's own
        keys = [(event["client"], event["id"]) for event in clients]
        stopped = self.events("stopped")
        if stopped:
            assert (stopped[-1]["accepted"], stopped[-1]["unfinished"]) == (len(keys), 0)


Spawn = Callable[..., Daemon]


@pytest.fixture
def spawn(tiny_bundle: Path, tmp_path: Path) -> Iterator[Spawn]:
    """Starts daemons: spawn(*arguments, url=..., script={...}). A script replaces the model by a scripted executor.

    At the end of the test each must stop cleanly, with one log line per accepted request.
    """
    daemons: list[Daemon] = []

    def start(*arguments: str, script: dict[str, Any] | None = None, **options: Any) -> Daemon:
        home = tmp_path / f"daemon{len(daemons)}"
        home.mkdir()
        if script is not None:
            os.environ["ULL_TEST_SCRIPT"] = json.dumps(script)
            options["command"] = [sys.executable, str(ROOT / "tests/rigs/daemons/scripted_daemon.py")]
        daemons.append(Daemon(options.pop("bundle", tiny_bundle), directory=home, arguments=arguments, **options))
        return daemons[-1]

    yield start
    for daemon in daemons:
        if daemon.process.returncode is None:
            assert daemon.stop() == 0
            daemon.check_log()


@pytest.fixture
def unhurried(spawn: Spawn) -> Daemon:
    """A daemon that takes 20 ms for a token: who ends an answer of hundreds of them before its time always can."""
    return spawn(script={"tokens": [65], "round_ns": 20_000_000, "context": 9000})


@pytest.fixture(scope="module")
def shared_daemon(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon on the tiny engine for all tests of a module that leave it as they found it."""
    with Daemon(tiny_bundle, directory=tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        assert daemon.stop() == 0
        daemon.check_log()


@pytest.fixture(scope="module")
def gateway(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`ull-gateway` in front of the shared daemon."""
    from gateways import Gateway

    with Gateway(shared_daemon.url, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def drafting(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`ull-gateway` in front of a daemon that drafts in every round, whatever it brings."""
    from gateways import Gateway

    home = tmp_path_factory.mktemp("drafting")
    settings = ["--set=speculation.adaptive=false", "--set=speculation.default=eagle"]
    with Daemon(tiny_bundle, directory=home, arguments=settings) as daemon, Gateway(daemon.url, home) as gateway:
        yield gateway
