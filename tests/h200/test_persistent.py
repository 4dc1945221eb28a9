"""One kernel for all layers of a plain round on the chip, against the chain. Apart: it might wait for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ull.client.sync import Client
from ull.spawn import DaemonProcess

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ("def main() -> None:\n    ", "one two three one two three one two")
TOKENS = 200


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.ull"
    command = [sys.executable, "-m", "ull_build", str(ROOT / "engines/tiny-suffix.toml"), "--target", "sm_90a"]
    subprocess.run([*command, "--output", str(path), "--quiet", "--no-eval"], check=True)
    return path


def answers(bundle: Path, persistent: str) -> list[list[int]]:
    daemon = DaemonProcess(bundle, arguments=["--set", f"engine.persistent={persistent}"], ready_timeout=60.0)
    try:
        with Client(daemon.url) as client:
            return [
                list(
                    client.generate(
                        prompt,
                        max_tokens=TOKENS,
                        seed=11,
                        ignore_eos=True,
                        temperature=temperature,
                        speculate=speculate,
                    )
                    .result()
                    .token_ids
                )
                for prompt in PROMPTS
                for temperature in (0.0, 0.8)
                for speculate in ("none", "suffix")
            ]
    finally:
        daemon.kill()


def test_one_kernel_for_all_layers_changes_nothing(bundle: Path) -> None:
    assert answers(bundle, "true") == answers(bundle, "false")
