"""bench/h200/ahead.py without a GPU: a bundle whose kernels alone are compiled anew."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from device_bundles import write_stubs
from ull.bundle import Precision, open_bundle
from ull_build import kernels
from ull_build.random_bundle import RandomSettings, build_random

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT / "bench/h200")]

from ahead import SETTINGS, retuned  # noqa: E402


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
