"""TensorRT plans beside our kernels on the same layers: device time per round, and what the builder took.

Only a few layers of a model: TensorRT times every kernel that it considers, once for each number of tokens.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rounds import RoundTimer, loaded

from ull.bundle import FUSED, SEAL_FILE, Bundle, Forward, open_bundle
from ull.errors import GpuError
from ull.gpu.tensorrt import library as tensorrt_library
from ull_build.tensorrt.check import everything, with_forward

ARCH, LAYERS = "llama-3.1-8b", 8
BUILD_S = 300.0  # that TensorRT gets for each bundle
TREES, CONTEXTS, ROUNDS = (1, 16, 64), (128, 8192), 300


def build(folder: Path, *options: str) -> tuple[Bundle, float]:
    """A bundle of random weights, made once, and the seconds that took now."""
    path = folder / f"{ARCH}-{LAYERS}-{'-'.join(options).replace('--', '') or 'fused'}.ull"
    started = time.monotonic()
    if not (path / SEAL_FILE).exists():
        command = [sys.executable, "-m", "ull_build", "--arch", ARCH, "--random-weights", "--layers", str(LAYERS)]
        command += ["--context", "16384", "--target", "sm_90a", "--output", str(path), "--force", "--quiet", *options]
        subprocess.run(command, check=True, timeout=BUILD_S)
    return open_bundle(path), time.monotonic() - started


def measure(bundle: Bundle, trees: tuple[int, ...]) -> dict[str, float]:
    """Median milliseconds of a round, by "tree@context"."""
    with loaded(bundle) as program:
        timer = RoundTimer(program)
        medians = {
            f"{tree}@{context}": float(np.median(timer.time_rounds(tree, context, ROUNDS).period)) / 1e6
            for tree in trees
            for context in CONTEXTS
        }
        timer.drain()
    return medians


def measure_plans(folder: Path) -> dict[str, Any]:
    """Every source on the same layers. Where TensorRT is not installed, says so and measures nothing."""
    try:
        version = tensorrt_library.load().__version__
    except GpuError as error:
        return {"installed": False, "reason": error.message}
    report: dict[str, Any] = {"installed": True, "version": version, "arch": ARCH, "layers": LAYERS, "sources": {}}
    fused, seconds = build(folder)
    report["sources"]["fused"] = {"build_s": seconds, "ms": measure(with_forward(fused, FUSED), TREES)}
    for attention in ("paged", "native"):
        bundle, seconds = build(folder, "--forward", "tensorrt", "--attention", attention)
        plans = bundle.manifest.forward.plans
        assert plans is not None
        trees = TREES if attention == "paged" else (1,)
        timed = with_forward(bundle, Forward("tensorrt", "tensorrt", everything(plans)))
        report["sources"][f"tensorrt, {attention}"] = {
            "build_s": seconds,
            "exact": plans.exact,
            "place_exact": plans.place_exact,
            "ms": measure(timed, trees),
        }
    return report


def print_plans(report: dict[str, Any]) -> None:
    """One table: the median of each point, and its share of our kernels' time."""
    console = Console(width=118)
    if not report["installed"]:
        console.print(f"TensorRT plans were neither built nor measured: {report['reason']}", markup=False)
        return
    table = Table(
        title=f"TensorRT {report['version']} beside our kernels: {report['layers']} layers of {report['arch']}"
    )
    columns = ("source", "T", "context", "p50 ms", "x of fused", "exact for T =", "build s")
    for column in columns:
        table.add_column(column, justify="left" if column == "source" else "right")
    base = report["sources"]["fused"]["ms"]
    for source, found in report["sources"].items():
        for point, value in found["ms"].items():
            tree, context = point.split("@")
            exact = ", ".join(map(str, found.get("exact", [])))
            ratio = f"{value / base[point]:.2f}"
            table.add_row(source, tree, context, f"{value:.4f}", ratio, exact, f"{found['build_s']:.0f}")
    console.print(table)
