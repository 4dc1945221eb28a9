"""Models of other kinds than engines/tiny on the chip, from ulld to a client, against the CPU executor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from other_models import MODELS, accepted_drafts, likelihoods, said_by, settings_of
from ull.client.sync import Client
from ull.spawn import DaemonProcess
from ull_build.build import build


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_says_on_the_chip_what_the_cpu_executor_says(tmp_path: Path, kind: str) -> None:
    """16-bit activations and another order of sums: a near tie may fall the other way, but rarely."""
    said, likely = [], []
    for target in ("cpu", "sm_90a"):
        bundle = build(settings_of(kind, tmp_path, target)).path
        with (
            DaemonProcess(bundle, ready_timeout=180.0, arguments=("--set", "speculation.adaptive=false")) as daemon,
            Client(daemon.url) as client,
        ):
            said.append(said_by(client))
            likely.append(likelihoods(client))
            assert accepted_drafts(client) > 0
    assert sum(one == other for one, other in zip(*said, strict=True)) >= len(said[0]) - 1
    off = np.abs(likely[1] - likely[0])
    assert np.max(off) < 0.2 and np.median(off) < 0.02
