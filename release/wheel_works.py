"""Installs a wheel into an empty environment and uses it there: `python release/wheel_works.py WHEEL [PYTHON]`.

It builds the tiny engine, serves it, asks for a completion and stops it, by the commands that the wheel brings, in a
folder that is not the source's. Needs a package index for what the wheel depends on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("ull", "ulld", "ull-gateway", "ull-build", "ull-train")
RECIPE = ROOT / "engines/tiny.toml"
START_S = 120.0


class Environment:
    """An environment with the wheel and nothing else."""

    def __init__(self, folder: Path, wheel: Path, python: str) -> None:
        self._folder = folder
        self.bin = folder / "venv/bin"
        names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self._variables = {name: value for name, value in os.environ.items() if name not in names}
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), timeout=900)

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [str(self.bin / program), *arguments]
        return subprocess.Popen(
            command, cwd=self._folder, env=self._variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, program: str, *arguments: str, status: int = 0, timeout: float = 300.0) -> str:
        """What a command prints, to both streams. Raises SystemExit where it ends with another status."""
        process = self.start(program, *arguments)
        out, err = process.communicate(timeout=timeout)
        if process.returncode != status:
            raise SystemExit(f"{program} {' '.join(arguments)} ended with {process.returncode}:\n{out}{err}")
        return out + err


def check(said: str, words: str) -> None:
    if words not in said:
        raise SystemExit(f"expected {words!r} in what was printed:\n{said}")


def prove(environment: Environment, folder: Path) -> None:
    """Uses what was installed. Raises SystemExit naming what does not work."""
    version = environment.run("python", "-c", "import ull; print(ull.__version__, ull.__file__)").split()
    check(version[1], str(environment.bin.parent))
    for program in PROGRAMS:
        check(environment.run(program, "--help"), f"usage: {program}")
        check(environment.run(program, "--version"), f"{program} {version[0]}")
        check(environment.run(program, "--print-completion", "bash"), "complete -o")
        page = environment.bin.parent / f"share/man/man1/{program}.1"
        check(page.read_text(encoding="utf-8") if page.exists() else f"no {page}", ".SH SYNOPSIS")
    check(environment.run("python", "-m", "ull", "--version"), f"ull {version[0]}")
    check(environment.run("ull-gateway", "--port", "0", status=1), "pip install 'ull[gateway]'")
    environment.run("ull-build", str(RECIPE), "--output", "tiny.ull", "--quiet", timeout=900)
    check(environment.run("ull", "inspect", "tiny.ull"), "perplexity")
    url = f"ipc://{folder}/ull.sock"
    daemon = environment.start("ulld", "tiny.ull", "--listen", url, "--threads", "1")
    try:
        _wait(environment, daemon, url)
        said = environment.run("ull", "generate", "--connect", url, "--max-tokens", "8", "def add(a, b):\n")
        if not said.strip():
            raise SystemExit("ull generate printed nothing")
        daemon.send_signal(signal.SIGTERM)
        _, log = daemon.communicate(timeout=60)
        if daemon.returncode != 0:
            raise SystemExit(f"ulld ended with {daemon.returncode}:\n{log}")
    finally:
        daemon.kill()


def _wait(environment: Environment, daemon: subprocess.Popen[str], url: str) -> None:
    """Until the daemon answers."""
    deadline = time.monotonic() + START_S
    while daemon.poll() is None and time.monotonic() < deadline:
        process = environment.start("ull", "health", "--connect", url)
        process.communicate(timeout=60)
        if process.returncode == 0:
            return
        time.sleep(0.2)
    daemon.kill()
    raise SystemExit(f"ulld does not serve:\n{daemon.communicate()[1]}")


def main(wheel: Path, python: str = sys.executable) -> None:
    """Proves a wheel; raises SystemExit where it does not work."""
    with tempfile.TemporaryDirectory(prefix="ull-wheel-") as name:
        folder = Path(name)
        prove(Environment(folder, wheel.resolve(), python), folder)
    print(f"{wheel.name} works in an empty environment of {python}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
