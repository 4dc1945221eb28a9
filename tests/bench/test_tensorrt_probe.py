"""The probes of `make h200-tensorrt` on the doubles: as far as they go without TensorRT and a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import driver_double
from conftest import ROOT

SCHEMES = ("row product", "per-row DQ", "per tensor", "16 bits")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    command = [
        sys.executable,
        str(ROOT / "tests/rigs/gpu/tensorrt_program.py"),
        "probe",
        str(tmp_path_factory.mktemp("probe")),
    ]
    environment = driver_double.environment(multiprocessors=4) | {"ULL_TEST_TENSORRT": "profile-bits,f16-sums"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return [next(iter(json.loads(line).items())) for line in result.stdout.splitlines()]


def of_kind(findings: list[tuple[str, dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    return [found for name, found in findings if name == kind]


def test_each_scheme_has_the_operands_that_tensorrt_gives_it(findings: Any) -> None:
    """Scalar scales make an FP8 product, whatever is multiplied behind it; a scale per row does not."""
    found = [item for item in of_kind(findings, "linears") if item["linear"] == "layers.0.o"]
    assert [(item["scheme"], item["level"]) for item in found] == [(s, level) for s in SCHEMES for level in (3, 1, 0)]
    expected = {"row product": "FP8", "per-row DQ": "BF16", "per tensor": "FP8", "16 bits": "BF16"}
    for item in found:
        assert item["operands"] == [[expected[item["scheme"]]] * 2]
        for point in item["points"]:
            assert point["error"] < (0.01 if item["scheme"] == "16 bits" else 0.08) and point["nodes"] == 1
        assert item["plan_bytes"] > item["weight_bytes"] == 48 * 64 * (2 if item["scheme"] == "16 bits" else 1)


def test_sums_in_f16_show_in_the_head(findings: Any) -> None:
    found = [item for item in of_kind(findings, "linears") if item["linear"] == "lm_head"]
    errors = {item["scheme"]: max(point["error"] for point in item["points"]) for item in found}
    assert errors["f16 product"] > 1.5 * errors["f32 product"] > 0.0


def test_profiles_are_compared(findings: Any) -> None:
    two, seven = of_kind(findings, "profiles")
    assert (two["scheme"], seven["scheme"]) == ("two", "seven")
    assert two["exact"][:5] == [1, 2, 4, 8, 16] and 64 not in two["exact"]
    assert len(seven["us"]) == 7 and seven["exact"] != [1, 2, 4, 8, 16, 32, 64]
    assert seven["plan_bytes"] > 2 * two["plan_bytes"]
    assert two["operands"] == seven["operands"] == {}


def test_replays_give_the_eager_bits(findings: Any) -> None:
    [found] = of_kind(findings, "capture")
    assert (found["plans"], found["replays"], found["same_bits"]) == (4, 20, 20)
    assert sum(found["nodes"].values()) == 4


def test_a_machine_without_tensorrt_is_told_and_ends_the_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/h200/measure_plans.py"), "--json", str(tmp_path / "report.json")]
    result = subprocess.run(command, env=driver_double.environment(), capture_output=True, text=True, timeout=280)
    report = json.loads((tmp_path / "report.json").read_text())
    assert result.returncode == 1 and len(report["failures"]) == 1
    assert "this machine has no TensorRT" in report["failures"][0] and "pip install" in report["failures"][0]
    assert report["linears"] == [] and report["cut"] == []
