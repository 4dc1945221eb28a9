"""bench/h200/ahead.py without a GPU: a bundle whose kernels alone are compiled anew."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from device_bundles import write_stubs
from ull.bundle import Precision, open_bundle
from ull_build.benchmark_bundle import RandomSettings, build_random
from ull_build.code import kernels

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "bench"), str(ROOT / "bench/h200")]

import ahead  # noqa: E402
import numpy as np  # noqa: E402
from ahead import SETTINGS, retuned  # noqa: E402
from journal import Report, Run  # noqa: E402
from measure import Measurement  # noqa: E402
from rich.console import Console  # noqa: E402
from rounds import Times  # noqa: E402
from tables import print_ahead  # noqa: E402


def test_only_the_kernels_are_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))
    settings = RandomSettings("llama-3.2-1b", tmp_path / "plain.ull", precision=Precision(), layers=1, context=128)
    plain = open_bundle(build_random(settings).path)
    assert plain.manifest.code is not None
    assert plain.manifest.code.macros.items() >= kernels.TUNING.items()
    for name, tuning in SETTINGS.items():
        other = open_bundle(retuned(plain.path, tuning, tmp_path / f"{name}.ull"))
        code = other.manifest.code
        assert code is not None
        assert code.macros == {**plain.manifest.code.macros, **tuning}
        assert set(code.kernels()) == set(plain.manifest.code.kernels())
        assert {*other.manifest.files} == {*plain.manifest.files}
        for file in code.files:
            other.read_verified(file.path, "")
    assert SETTINGS["64"] == kernels.TUNING


class PlayedTimer:
    """Rounds of 2 ms, and of 3 where all layers are one kernel."""

    def __init__(self, program: tuple[str, bool]) -> None:
        self._ns = 3_000_000 if program[1] else 2_000_000

    def time_rounds(self, tree: int, context: int, rounds: int) -> Times:
        assert (tree, context) == (1, 128)
        period = np.full(rounds, self._ns)
        return Times(period, period, period, float(self._ns))

    def drain(self) -> None:
        pass


def test_every_setting_is_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And measured again it takes the place of what was there."""
    opened: list[str] = []

    def open_retuned(bundle: Path, tuning: dict[str, str], output: Path) -> str:
        opened.append(output.name)
        return output.name

    monkeypatch.setattr(ahead, "retuned", open_retuned)
    monkeypatch.setattr(ahead, "open_bundle", lambda name: name)
    monkeypatch.setattr(ahead, "loaded", lambda name, persistent: contextlib.nullcontext((name, persistent)))
    monkeypatch.setattr(ahead, "RoundTimer", PlayedTimer)
    measurement = Measurement(Run(Report(tmp_path / "report.json"), 60, ["true"]), ["llama-3.1-8b"], {"ahead"})
    for _ in range(2):
        for finding in ahead.time_ahead(tmp_path / "llama-3.1-8b.ull", rounds=5):
            measurement._take("llama-3.1-8b", finding)
    found = measurement.found["shapes"][0]["ahead"]
    assert [(one["setting"], one["persistent"]) for one in found] == [
        (name, persistent) for name in SETTINGS for persistent in (False, True)
    ]
    assert {one["period_us"]["p50"] for one in found if one["persistent"]} == {3000.0}
    assert len(set(opened)) == len(SETTINGS)
    console = Console(width=118)
    with console.capture() as said:
        print_ahead(console, measurement.found["shapes"])
    assert said.get().count("2.0000") == 3 * len(SETTINGS) and "64, every layer" in said.get()
