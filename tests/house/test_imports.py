"""The import rules of the house (CONTRIBUTING.md), in Python and in C++."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module may import from its own layer's earlier rows and from every row below. Lower number = lower layer.
PYTHON_LAYERS = {
    "access": 0,
    "endpoints": 1,
    "errors": 0,
    "log": 0,
    "ownership": 1,
    "reader": 0,
    "refusals": 1,
    "config": 1,
    "unreachable": 2,
    "host": 1,
    "seal": 1,
    "sockets": 1,
    "spawn": 1,
    "manifest": 1,
    "placement": 2,
    "rope": 2,
    "plans": 1,
    "targets": 1,
    "layout": 1,
    "device_layout": 1,
    "_native": 2,
    "process": 2,
    "bundle": 2,
    "coercion": 1,
    "wire": 2,
    "inspect": 3,
    "chat_template": 1,
    "template_process": 2,
    "control_tokens": 1,
    "tokenizer": 3,
    "metrics": 3,
    "streams": 3,
    "admission": 4,
    "answers": 4,
    "gpu": 4,
    "executors": 5,
    "dealer": 4,
    "local": 4,
    "priority": 4,
    "link": 4,
    "client": 5,
    "control": 5,
    "aio": 6,
    "benchmark": 6,
    "rehearsal": 6,
    "daemon": 6,
    "launch": 7,
    "ulld": 8,
    "commands": 7,
    "cli": 8,
}
NATIVE_LAYERS = {"base": 0, "sync": 1, "kv": 2, "exec": 3, "spec": 3, "engine": 4, "io": 5, "module": 6}
SHARED_WITH_KERNELS = "kernels/params.h"
TRAINING_ONLY = {"torch", "transformers"}


def imported_modules(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, at module level) of everything that `path` imports."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        top_level = node in tree.body
        if isinstance(node, ast.Import):
            found += [(alias.name, top_level) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, top_level))
            found += [(f"{node.module}.{alias.name}", top_level) for alias in node.names]
    return found


def python_layer(path: Path) -> int:
    room = path.relative_to(ROOT / "ull").parts[0].removesuffix(".py")
    return PYTHON_LAYERS.get(room, -1)


@pytest.mark.parametrize("path", sorted((ROOT / "ull").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_imports_point_down(path: Path) -> None:
    if path.name == "__init__.py":
        return
    layer = python_layer(path)
    assert layer >= 0, f"{path.name} has no layer: add it to PYTHON_LAYERS and to CONTRIBUTING.md"
    for name, top_level in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "ull" and len(parts) > 1 and parts[1] in PYTHON_LAYERS:
            assert PYTHON_LAYERS[parts[1]] <= layer, f"{path.name} imports {name}, a higher layer"
        assert parts[0] not in TRAINING_ONLY, f"{path.name} imports {name}: only tests and training may"
        if parts[0] == "ull_build":
            assert not top_level, f"{path.name} imports ull_build at module level: ull never depends on the build step"
            assert parts[0] != "ull_build" or PYTHON_LAYERS["commands"] <= layer


@pytest.mark.parametrize("path", sorted((ROOT / "build/ull_build").rglob("*.py")), ids=lambda p: p.name)
def test_build_step_uses_only_the_format_layer(path: Path) -> None:
    for name, _ in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "ull" and len(parts) > 1:
            allowed = {
                "bundle",
                "chat_template",
                "config",
                "errors",
                "kernels",
                "log",
                "tokenizer",
                "_native",
                "__version__",
            }
            if path.parent.name == "tensorrt":  # plans are built and tried on the GPU
                allowed.add("gpu")
            assert parts[1] in allowed, (path.name, name)
        if path.parent.name != "train":
            assert parts[0] not in TRAINING_ONLY, f"{path.name} imports {name}: the build needs no PyTorch"


def test_ull_train_asks_for_pytorch_only_when_it_trains() -> None:
    """Of the trainer, the command line, the data and the figures can be imported without PyTorch."""
    folder = ROOT / "build/ull_build/train"
    needs_torch = {"model", "loop", "draft", "medusa", "run"}
    for path in folder.glob("*.py"):
        for name, top_level in imported_modules(path):
            if path.stem not in needs_torch and top_level:
                assert name.split(".")[0] not in TRAINING_ONLY, (path.name, name)
                assert name not in {f"ull_build.train.{module}" for module in needs_torch}, (path.name, name)
    for path in (ROOT / "build/ull_build").glob("*.py"):
        assert not [name for name, _ in imported_modules(path) if name.startswith("ull_build.train")], path.name


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.name)
def test_benchmarks_see_only_public_tools(path: Path) -> None:
    assert not TRAINING_ONLY & {name.split(".")[0] for name, _ in imported_modules(path)}


NATIVE_FILES = sorted(
    path for path in (ROOT / "ull/native").rglob("*") if path.suffix in {".h", ".cpp"} and "tests" not in path.parts
)


@pytest.mark.parametrize("path", NATIVE_FILES, ids=lambda p: str(p.relative_to(ROOT / "ull/native")))
def test_native_includes_point_down(path: Path) -> None:
    room = path.relative_to(ROOT / "ull/native").parts[0]
    text = path.read_text()
    for include in re.findall(r'#include "([^"]+)"', text):
        other = include.split("/")[0]
        if other in NATIVE_LAYERS and "/" in include:
            assert NATIVE_LAYERS[other] <= NATIVE_LAYERS[room], f"{path.name} includes {include}, a higher layer"
        if "kernels" in include.split("/")[:-1]:
            assert include == SHARED_WITH_KERNELS, f"{path.name} includes {include}: of the kernels only the parameters"
    system = set(re.findall(r"#include <([^>]+)>", text))
    if room != "module":
        assert not [name for name in system if name.startswith(("Python", "nanobind"))], "Python only in module/"
    assert not [name for name in system if "cuda" in name.lower()], "no CUDA header in native/"
