"""Load generators that everybody uses, as subprocesses: each in an environment of its own, which `make doors` makes."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "engines/tiny"
TIMEOUT_S = 240
NOBODY = "http://127.0.0.1:9"  # where Hugging Face's library would ask


def tool(name: str) -> str:
    """The program's path; the module's tests skip where there is none."""
    places = os.pathsep.join([str(ROOT / ".cache/doors" / name / "bin"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"{name} is not there: `make doors` installs it", allow_module_level=True)
    return found


def run_tool(command: Sequence[str], directory: Path, **environment: str) -> str:
    """Runs it to its end in `directory`, where nothing can be downloaded; returns what it said. Fails where it does."""
    without_proxies = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    result = subprocess.run(
        command,
        cwd=directory,
        env={**without_proxies, "HF_ENDPOINT": NOBODY, "HF_HOME": str(directory / "hub"), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout
