"""Tests that need the chip. `make h200` runs them; without a GPU they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [
    *(str(ROOT / "tests" / room) for room in (".", "rigs", "rigs/daemons", "rigs/gpu", "rigs/kernels")),
    str(ROOT / "bench/h200"),
]


def _has_gpu() -> bool:
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    try:
        return int(driver.cuInit(0)[0]) == 0 and int(driver.cuDeviceGetCount()[1]) > 0
    except RuntimeError:  # no libcuda
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if here and not _has_gpu():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
