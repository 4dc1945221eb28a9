"""TensorRT plans of the tiny engine on the chip, from ull-build to a client. Skipped without TensorRT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.spawn import DaemonProcess

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ("def main() -> None:\n    ", "one two three one two three one two")

pytest.importorskip("tensorrt", reason="TensorRT is not installed: plans were not tried")


@pytest.mark.parametrize("options", [("--attention", "paged"), ("--attention", "native")], ids=["paged", "native"])
def test_plans_from_the_build_to_a_client(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The build compares logits; here the same request gives the same tokens, whatever drafts and is cached."""
    path = tmp_path / "tiny.ull"
    command = [sys.executable, "-m", "ull_build", str(ROOT / "engines/tiny-suffix.toml"), "--target", "sm_90a"]
    subprocess.run([*command, "--forward", "tensorrt", *options, "--output", str(path), "--quiet"], check=True)
    forward = open_bundle(path).manifest.forward
    plans = forward.plans
    assert plans is not None and plans.check is not None and plans.check.cpu_top1 > 0.8
    drafters = ("none",) if forward.tree_sizes == [1] else ("none", "suffix")
    with DaemonProcess(path, ready_timeout=180.0) as daemon, Client(daemon.url) as client:
        for prompt in PROMPTS:
            answers = [
                list(client.generate(prompt, max_tokens=32, ignore_eos=True, speculate=drafter).result().token_ids)
                for drafter in (*drafters, "none")
            ]
            assert all(answer == answers[0] for answer in answers)
