"""Reading TensorRT's inspector, whose JSON has had several layouts, and saying what a machine lacks before a build."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorrt_subjects import SMALL
from ull.bundle import Precision
from ull.errors import BuildError
from ull.gpu.tensorrt import library as tensorrt_library
from ull_build.tensorrt.inspector import UNSEEN, unexpected_operands
from ull_build.tensorrt.preflight import Machine, Needs, estimate, remarks
from ull_build.tensorrt.weights import BF16, F8, F16, F32, Linear


def linear(dtype: Any, compute: Any) -> Linear:
    return Linear(np.zeros((2, 2), dtype), np.ones(2, np.float32) if dtype == F8 else None, None, np.dtype(compute))


LINEARS = {"layers.1.o": linear(F8, BF16), "lm_head": linear(F16, F16)}


def found(layer: dict[str, Any]) -> str | None:
    """What is said of layers.1.o, where that layer is the plan."""
    report = {"Layers": [layer], "Bindings": ["residual"]}
    return unexpected_operands(report, {"layers.1.o": LINEARS["layers.1.o"]}).get("layers.1.o")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({"Name": "layers.1.o.matmul", "Inputs": [{"Datatype": "FP8"}, {"Datatype": "FP8"}]}, None),
        ({"Name": "layers.1.o.matmul", "Inputs": [{"Datatype": "BF16"}, {"Datatype": "BF16"}]}, "BF16 x BF16"),
        ({"Name": "a+layers.1.o.matmul+b", "Inputs": [{"Format/Datatype": "Row major FP8 format"}]}, None),
        ({"Name": "__myl_Fc_3", "Metadata": "[ONNX Layer: layers.1.o.matmul]", "Inputs": [{"Datatype": "E4M3"}]}, None),
        ({"name": "layers.1.o.matmul", "inputs": [{"data_type": "bfloat16"}]}, "BF16"),
        ({"Name": "layers.1.o.matmul", "Inputs": [{"Datatype": "Half"}], "Weights": {"Type": "Half"}}, "HALF x HALF"),
        ({"Name": "layers.1.o.matmul", "Inputs": []}, "unknown"),
        ({"Name": "layers.1.o.matmul_of_another", "Inputs": [{"Datatype": "FP8"}]}, UNSEEN),
        ({"Name": "layers.11.o.matmul", "Inputs": [{"Datatype": "FP8"}]}, UNSEEN),
        ({"Name": "residual", "Inputs": [{"Name": "layers.1.o.matmul:0", "Datatype": "FP8"}]}, UNSEEN),
    ],
)
def test_operands_are_read_from_every_layout(layer: dict[str, Any], expected: str | None) -> None:
    assert found(layer) == expected


def test_one_profile_that_is_not_fused_is_enough() -> None:
    """Layers of several profiles may lie apart, under the same names."""

    def layer(kind: str) -> dict[str, Any]:
        return {"Name": "layers.1.o.matmul", "Inputs": [{"Datatype": kind}, {"Datatype": kind}]}

    report = {"Profiles": [{"Layers": [layer("FP8")]}, {"Layers": [layer("Float")]}]}
    assert unexpected_operands(report, LINEARS) == {"layers.1.o": "FLOAT x FLOAT", "lm_head": UNSEEN}


def test_a_report_that_is_no_json_names_nothing() -> None:
    assert unexpected_operands("Layer 0: \x01", LINEARS) == dict.fromkeys(LINEARS, UNSEEN)


def test_what_other_linears_should_have() -> None:
    layers = [{"Name": f"{name}.matmul", "Inputs": [{"Datatype": "BF16"}]} for name in ("a", "b", "c")]
    linears = {"a": linear(ml_dtypes.bfloat16, BF16), "b": linear(F16, F16), "c": linear(F8, F32)}
    assert unexpected_operands({"Layers": layers}, linears) == {"b": "BF16", "c": "BF16"}


# Before the build

GOOD = Machine((13, 0), "580.65.06", "11.4.0.106", 13, 140 << 30, 200 << 30, 500 << 30)
NEEDS = Needs(device=20 << 30, host=10 << 30, disk=16 << 30)


def test_each_thing_has_a_line() -> None:
    lines = remarks(GOOD, NEEDS)
    assert [line.partition(":")[0] for line in lines] == ["driver", "TensorRT", "device memory", "host memory", "disk"]
    assert "release 580.65.06, speaks CUDA 13.0" in lines[0] and "11.4.0.106, wheel for CUDA 13" in lines[1]
    assert not [line for line in lines if "TOO LITTLE" in line]


@pytest.mark.parametrize(
    ("changes", "needs", "words"),
    [
        (
            {"device_free": 1 << 30},
            NEEDS,
            "device memory: 1 GB free, the build takes about 21 GB: TOO LITTLE",
        ),
        ({"host_free": 1 << 30}, NEEDS, "host memory: 1 GB free, the build takes about 11 GB: TOO LITTLE"),
        ({"disk_free": 1 << 30}, NEEDS, "disk: 1 GB free, the build takes about 17 GB: TOO LITTLE, free some"),
        ({"host_free": None}, NEEDS, "host memory: not known here"),
        ({"wheel": None}, NEEDS, "TensorRT: 11.4.0.106, not from pip"),
        ({"wheel": 12}, NEEDS, "wheel for CUDA 12; runs here; `pip install 'ull[tensorrt]'`"),
    ],
)
def test_what_is_short_is_said_with_what_mends_it(changes: dict[str, Any], needs: Needs, words: str) -> None:
    assert [line for line in remarks(replace(GOOD, **changes), needs) if words in line]


def test_a_driver_that_the_wheel_does_not_run_on_ends_the_build() -> None:
    old = replace(GOOD, driver=(12, 4), release="550.54.15")
    with pytest.raises(BuildError, match=r"release 550\.54\.15, speaks CUDA 12\.4") as caught:
        remarks(old, NEEDS)
    for words in ("wheel for CUDA 13, which it does not run", "pip install 'ull[tensorrt-cu12]'", "r580"):
        assert words in caught.value.message
    assert remarks(replace(old, wheel=12), NEEDS)
    with pytest.raises(BuildError, match="does not run: update the driver to r580"):
        remarks(replace(old, driver=(11, 8), wheel=12), NEEDS)


def test_the_extra_that_is_named_exists() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'tensorrt-cu12 = ["tensorrt-cu12>=11"]' in text


def test_needs_grow_with_the_model() -> None:
    small, large = (estimate(replace_layers(layers), Precision()) for layers in (2, 20))
    assert large.device > small.device and large.disk > 5 * small.disk
    assert large.host == small.host  # one segment at a time


def replace_layers(layers: int) -> Any:
    import msgspec

    return msgspec.structs.replace(SMALL, layers=layers, windows=[0] * layers)


@pytest.mark.parametrize(
    ("installed", "cuda", "package"),
    [
        ({"tensorrt-cu12-bindings"}, 12, "tensorrt-cu12"),
        ({"tensorrt-cu13", "tensorrt"}, 13, "tensorrt"),
        (set(), None, "tensorrt"),
    ],
)
def test_the_wheel_is_known_by_its_packages(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], cuda: int | None, package: str
) -> None:
    """So that a daemon says which package to install in the version of its plans."""

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return "11.4"

    monkeypatch.setattr(tensorrt_library.importlib.metadata, "version", version)
    assert (tensorrt_library.cuda_of_wheel(), tensorrt_library.wheel()) == (cuda, package)
