"""A bundle of about 1 GB of random FP8 weights: large enough that decode must stream it from memory."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from report import ROOT
from serving import tiny_bundle
from ull.bundle import (
    MANIFEST_FILE,
    SEAL_FILE,
    WEIGHTS_FILE,
    encode_manifest,
    expected_tensors,
    open_bundle,
    write_sealed,
)
from ull_build.weights.writer import WeightsWriter

PIECE_BYTES = 32 << 20


def random_fp8(generator: np.random.Generator, count: int) -> np.ndarray:
    """`count` random E4M3 bytes that are neither NaN nor subnormal."""
    values = generator.integers(0, 256, count, dtype=np.uint8)
    magnitudes = values & 0x7F
    values[(magnitudes < 0x08) | (magnitudes == 0x7F)] ^= 0x40
    return values


def synthetic_bundle() -> Path:
    """Writes .cache/synthetic.ull on first use: Llama, 16 layers of hidden 2048; tokenizer of the tiny engine."""
    path = ROOT / ".cache/synthetic.ull"
    if (path / SEAL_FILE).exists():
        return path
    tiny = open_bundle(tiny_bundle())
    model = msgspec.structs.replace(
        tiny.manifest.model,
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        windows=[0] * 16,
    )
    precision = msgspec.structs.replace(tiny.manifest.precision, weights="fp8")
    staging = path.with_suffix(".partial")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(tiny.path, staging, ignore=shutil.ignore_patterns(WEIGHTS_FILE, MANIFEST_FILE, SEAL_FILE))
    plan = {name: shape for name, shape in expected_tensors(model, precision).items() if not shape.optional}
    generator = np.random.default_rng(0)
    with WeightsWriter(staging / WEIGHTS_FILE, plan) as writer:
        for name, shape in plan.items():
            count = math.prod(shape.shape)
            if shape.dtype == "F8_E4M3":
                for begin in range(0, count, PIECE_BYTES):
                    writer.write(name, random_fp8(generator, min(PIECE_BYTES, count - begin)))
            elif name.endswith(".scale"):  # random E4M3 values have a root mean square near 150
                columns = plan[name.removesuffix("scale") + "weight"].shape[1]
                writer.write(name, np.full(count, 1 / (150 * math.sqrt(columns)), np.float32))
            elif name.endswith("norm"):
                writer.write(name, np.ones(count, ml_dtypes.bfloat16).view(np.uint16))
            else:
                values = (generator.standard_normal(count, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
                writer.write(name, values.view(np.uint16))
        weights = writer.finish()
    files = {**tiny.manifest.files, WEIGHTS_FILE: weights}
    made_up = msgspec.structs.replace(
        tiny.manifest.provenance, source="random weights", source_sha256=None, source_files={}, drafters={}
    )
    manifest = msgspec.structs.replace(
        tiny.manifest,
        name="synthetic",
        model=model,
        precision=precision,
        quality=None,
        provenance=made_up,
        speculation=None,
        files=files,
    )
    write_sealed(staging, encode_manifest(manifest))
    staging.rename(path)
    return path
