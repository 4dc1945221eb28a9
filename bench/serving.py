"""What the benchmarks measure: the tiny bundle, and a daemon that serves a bundle on a private ipc socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ull
from report import ROOT
from ull.bundle import SEAL_FILE
from ull.spawn import DaemonProcess, ServerProcess, python_command


def tiny_bundle() -> Path:
    """engines/tiny.toml compiled into .cache/tiny.ull; built again whenever the recipe or any weights are newer."""
    bundle = ROOT / ".cache/tiny.ull"
    sources = [ROOT / "engines/tiny.toml", *(ROOT / "engines/tiny").rglob("*.safetensors")]
    seal = bundle / SEAL_FILE
    if not seal.exists() or seal.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        bundle.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "ull_build", sources[0], "--output", bundle, "--force", "--quiet"]
        subprocess.run(command, check=True)
    return bundle


def serve(bundle: Path, **settings: object) -> DaemonProcess:
    """A daemon on `bundle`; settings are configuration keys with `__` for the dot, e.g. engine__threads=1."""
    arguments = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    return DaemonProcess(bundle, arguments=arguments)


def scripted(bundle: Path, script: dict[str, Any], **options: Any) -> DaemonProcess:
    """A daemon whose model is a script: keyword arguments of `_native.ScriptedExecutor`; options: DaemonProcess's."""
    os.environ["ULL_TEST_SCRIPT"] = json.dumps(script)
    command = [sys.executable, str(ROOT / "tests/rigs/daemons/scripted_daemon.py")]
    return DaemonProcess(bundle, command=command, **options)


@contextmanager
def gateway(url: str) -> Iterator[tuple[str, int]]:
    """`ull-gateway` in front of the daemon at `url`, with a log of warnings alone; yields its host and port."""
    command = [*python_command("ull.gateway"), "--connect", url, "--port", "0", "--log-level", "warning"]
    with (
        tempfile.TemporaryDirectory(prefix="ull-") as home,
        ServerProcess(command, "the gateway", Path(home) / "gateway.log") as process,
    ):
        host, _, port = process.said.removeprefix("http://").rpartition(":")
        yield host, int(port)


@contextmanager
def told(bundle: Path, executor: dict[str, Any], **options: Any) -> Iterator[ull.Client]:
    """A client of a daemon whose executor gets these arguments too; `options` are DaemonProcess's."""
    os.environ["ULL_BENCH_EXECUTOR"] = json.dumps(executor)
    command = [sys.executable, str(ROOT / "bench/comparison_daemon.py")]
    with DaemonProcess(bundle, command=command, **options) as daemon, ull.Client(daemon.url) as client:
        yield client
