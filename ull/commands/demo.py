"""`ull demo`: from a trained checkpoint to streamed tokens and latency figures, in one command (`make demo`)."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from ull import __version__
from ull.bundle import open_bundle
from ull.client import Client
from ull.client.benchmark import Load, measure
from ull.commands.bench import print_table
from ull.commands.generate import print_text
from ull.errors import BundleError, DaemonError
from ull.spawn import DaemonProcess, python_command, python_environment

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""'
MEASURED_REQUESTS = 20
MAX_TOKENS = 96
_SOURCE_SUFFIXES = {".json", ".jinja", ".safetensors", ".txt"}  # of the files that a bundle depends on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull demo`."""
    parser.add_argument("--recipe", type=Path, default=Path("engines/tiny.toml"), metavar="FILE", help="what to build")
    parser.add_argument("--output", type=Path, default=Path(".cache/tiny.ull"), metavar="X.ull", help="where to")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to complete")


def run(options: argparse.Namespace) -> int:
    """Runs `ull demo`."""
    recipe, bundle = options.recipe, options.output
    if not recipe.exists():
        raise DaemonError(f"there is no {recipe}; run the demo from the root of ull's repository")
    _step(f"engine: {bundle}")
    if reason := _outdated(bundle, recipe):
        print(f"building it with ull-build ({reason})", flush=True)
        bundle.parent.mkdir(parents=True, exist_ok=True)
        command = [*python_command("ull_build"), str(recipe), "--output", str(bundle), "--force"]
        if subprocess.run(command, env=python_environment(), check=False).returncode != 0:
            raise DaemonError("the build failed; its reason stands above")
    else:
        print("up to date")
    with DaemonProcess(bundle) as daemon:
        _step(f"daemon: ulld {bundle} --listen {daemon.url}")
        print(f"ready: {daemon.ready['executor']}, context {daemon.ready['context']} tokens")
        with Client(daemon.url) as client:
            _step("completion, as it streams")
            print(options.prompt, end="", flush=True)
            print_text(client.generate(options.prompt, max_tokens=MAX_TOKENS))
            _step(f"latency of {MEASURED_REQUESTS} requests, seen by the client")
            load = Load(prompt=options.prompt, max_tokens=MAX_TOKENS, requests=MEASURED_REQUESTS)
            print_table(measure(client, load).summary(), f"{daemon.ready['name']}, {daemon.ready['executor']}")
        _step("shutdown")
        status = daemon.stop()
        print(daemon.log_lines()[-1])
        print(f"ulld exited with status {status}")
    return status


def _outdated(bundle: Path, recipe: Path) -> str | None:
    """Why the bundle has to be built, or None. Times decide: a retrained checkpoint may have the same header."""
    try:
        manifest = open_bundle(bundle).manifest
    except BundleError:
        return "it does not exist yet" if not bundle.exists() else "what is there is not usable"
    if manifest.provenance.builder_version != __version__:
        return f"it was built by ull {manifest.provenance.builder_version}"
    built = (bundle / "manifest.json").stat().st_mtime
    sources = [recipe, *(path for path in recipe.with_suffix("").rglob("*") if path.suffix in _SOURCE_SUFFIXES)]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    return f"{newest} is newer" if newest.stat().st_mtime > built else None


def _step(title: str) -> None:
    print(f"\n== {title}   [{time.strftime('%H:%M:%S')}]", flush=True)
