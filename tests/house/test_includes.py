"""Which way includes point in C++ and CUDA: every room knows rooms below it, and only those that it needs."""

import re
from pathlib import Path

from floors import Arrow, Floors

ROOT = Path(__file__).parents[2]
NATIVE_FOLDER, KERNELS_FOLDER = ROOT / "ull/native", ROOT / "ull/kernels"
SHARED_WITH_KERNELS = "kernels/params.h"

# Room: the rooms it uses. Those that play an executor, {cpu graph testing}, and the engine meet in module/ alone.
NATIVE = Floors(
    {
        "base kernels": "",
        "sync": "base",
        "kv": "base",
        "executor": "base kv",
        "draft": "base executor kv",
        "engine": "base executor kv sync",
        "grammar": "engine executor",
        "cpu/kernels": "base",
        "cpu": "base cpu/kernels draft executor kv",
        "cpu/offline": "base cpu",
        "graph": "base draft executor kernels",
        "protocol": "",
        "io": "base engine protocol sync",
        "testing": "base cpu draft executor",
        "module": "*",
    },
    {},
)
# Headers beside the rooms are "shared". Of the core, kernels see base/.
KERNELS = Floors(
    {
        "base": "",
        "shared": "base",
        "sampling": "base shared",
        "linear": "shared",
        "attention": "linear shared",
        "chunk": "attention linear shared",
        "round": "attention base sampling shared",
        "head_scan": "linear round sampling",
        "dflash": "attention chunk linear sampling shared",
        "eagle": "chunk linear sampling",
        "medusa": "linear sampling shared",
        "persistent": "attention linear",
    },
    {
        ("arch.cuh", "emulated_arch.h"): "in its place, where the tests' emulator compiles it",
    },
)


def include_arrows(folder: Path) -> list[Arrow]:
    """What the sources below `folder` include with quotes: paths from a root, or names of headers beside the rooms."""
    return [
        Arrow(str(path.relative_to(folder)), room_of(str(path.relative_to(folder))), included, room_of(included))
        for path in sources(folder)
        for included in re.findall(r'#include "([^"]+)"', path.read_text())
    ]


def room_of(name: str) -> str:
    if name == "emulated_arch.h":
        return "tests"
    return name.rpartition("/")[0] or "shared"


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"})


def test_native_includes_point_down() -> None:
    assert not (problems := NATIVE.problems(include_arrows(NATIVE_FOLDER))), "\n".join(problems)


def test_kernels_includes_point_down() -> None:
    assert not (problems := KERNELS.problems(include_arrows(KERNELS_FOLDER))), "\n".join(problems)


def test_what_is_included_exists() -> None:
    """A path from a root: neither a name beside the includer nor one that leads out of its folder."""
    native = {arrow.name for arrow in include_arrows(NATIVE_FOLDER)}
    kernels = {arrow.name for arrow in include_arrows(KERNELS_FOLDER)} - {"emulated_arch.h"}
    assert not [name for name in native - {SHARED_WITH_KERNELS} if not (NATIVE_FOLDER / name).is_file()]
    assert not [
        name for name in kernels if not any((root / name).is_file() for root in (KERNELS_FOLDER, NATIVE_FOLDER))
    ]


def test_of_the_kernels_the_core_sees_their_parameters() -> None:
    seen = {arrow.name for arrow in include_arrows(NATIVE_FOLDER) if arrow.other == "kernels"}
    assert seen == {SHARED_WITH_KERNELS}


def test_python_is_included_in_the_module_alone_and_cuda_nowhere() -> None:
    for path in sources(NATIVE_FOLDER):
        system = re.findall(r"#include <([^>]+)>", path.read_text())
        python = [name for name in system if name.startswith(("Python", "nanobind"))]
        assert not python or path.parent.name == "module", (path.name, python)
        assert not [name for name in system if "cuda" in name.lower()], path.name
