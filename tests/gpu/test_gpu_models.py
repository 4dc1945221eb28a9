"""Models of other kinds than engines/tiny on the driver double: their daemons say what the CPU executor says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import driver_double
from device_bundles import build_with_stubs, emulated_kernels
from double_daemons import daemons
from other_models import MODELS, accepted_drafts, likelihoods, said_by, settings_of
from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.spawn import DaemonProcess
from ull_build.build import build

pytestmark = pytest.mark.timeout(1800)  # every kernel is compiled for the emulator


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_says_what_the_cpu_executor_says(tmp_path: Path, kind: str) -> None:
    on_cpu = build(settings_of(kind, tmp_path, "cpu")).path
    assert open_bundle(on_cpu).manifest.model.windows == [0, 100]
    with DaemonProcess(on_cpu) as daemon, Client(daemon.url) as client:
        expected, likely = said_by(client), likelihoods(client)
    with pytest.MonkeyPatch.context() as patch:
        bundle = build_with_stubs(patch, tmp_path / "kernels", settings_of(kind, tmp_path, "sm_90a"))
    environment = driver_double.environment(emulated_kernels(bundle), multiprocessors=4, launch_ms=0)
    with daemons() as serve:
        daemon = serve(bundle, environment, "--set", "engine.watchdog_ms=120000", "--set", "speculation.adaptive=false")
        with Client(daemon.url) as client:
            assert said_by(client) == expected
            assert accepted_drafts(client) > 0
            off = np.abs(likelihoods(client) - likely)
            assert np.max(off) < 0.1 and np.median(off) < 0.02  # pages of the other format: 0.37 and 0.07
        assert daemon.stop() == 0
