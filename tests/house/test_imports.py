"""Which way imports point in Python: every room knows rooms below it, and only those that it needs."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from floors import Floors, imported_names, looked_up_names, python_arrows, python_sources

ROOT = Path(__file__).parents[2]
TRAINING_ONLY = {"torch", "transformers"}
# Of ull_build.train: those that need PyTorch.
TRAINERS = ("dflash", "draft", "eagle", "heads", "loop", "medusa", "model", "run")

# Room: the rooms it uses. Nothing in ull knows the build.
ULL = Floors(
    {
        "_native access coercion completion errors files log machine socket_reader words": "",
        "cores endpoints libzmq spawn": "errors",
        "bounded_child": "spawn",
        "curve": "access errors",
        "install": "access cores errors files",
        "wire": "coercion errors",
        "bundle": "access errors wire",
        "journal": "access errors machine wire",
        "gpu": "bundle errors log wire",
        "text": "access bounded_child errors wire",
        "client": "access curve endpoints errors libzmq socket_reader wire",
        "voice": "client errors text",
        "metrics": "client curve endpoints errors wire",
        "trace": "client errors wire",
        "top": "wire",
        "doctor": "_native bundle client cores errors install trace",
        "gateway": "access client completion endpoints errors log metrics text voice wire",
        "daemon": "_native access bounded_child bundle completion cores curve endpoints errors files gpu journal "
        "libzmq log machine socket_reader spawn text wire words",
        "commands": "_native bounded_child bundle client cores curve daemon doctor errors files install journal log "
        "machine metrics spawn text top trace wire",
        "cli": "commands completion daemon",
        "__main__": "cli",
        "__init__": "client errors",
    },
    {
        ("ull/client/dealer.py", "ull._native"): "pyzmq drops a frame where a handler raises",
        ("ull/daemon/rehearsal.py", "ull.client"): "a daemon rehearses as a client of its own",
    },
)
BUILD = Floors(
    {
        "ull._native ull.bundle ull.completion ull.errors ull.gpu ull.log ull.spawn ull.text ull.wire ull.words": "",
        "leftovers progress": "",
        "shapes": "ull.bundle ull.errors",
        "output": "leftovers ull.bundle ull.errors",
        "local_gpu": "ull.bundle ull.errors ull.gpu ull.log",
        "source": "progress ull.bundle ull.errors ull.spawn ull.text ull.wire",
        "recipe": "source ull.bundle ull.errors ull.wire ull.words",
        "weights": "progress source ull.bundle",
        "settings": "recipe source ull.bundle",
        "code": "ull.bundle ull.errors",
        "quality": "code local_gpu progress source ull._native ull.bundle ull.errors weights",
        "tensorrt": "local_gpu output progress quality recipe source ull.bundle ull.errors ull.gpu ull.wire weights",
        "build": "*",
        "benchmark_bundle": "*",
        "cli": "benchmark_bundle build progress recipe settings shapes ull.bundle ull.completion ull.errors",
        "__main__": "cli",
        "train": "build progress settings source ull._native ull.bundle ull.completion ull.errors weights",
    },
    {},
)
# What is looked up by a name that is computed.
LOOKED_UP = dict.fromkeys(("ull/__init__.py", "ull/client/__init__.py"), "the public names are loaded on first use")

SOURCES = python_sources(ROOT / "ull")
BUILD_SOURCES = python_sources(ROOT / "build/ull_build")


def test_ull_imports_point_down() -> None:
    rooms = ULL.rooms()
    arrows = [a for file, text in SOURCES.items() for a in python_arrows(file, text, ("ull", "ull_build"), rooms)]
    assert not (problems := ULL.problems(arrows)), "\n".join(problems)


def test_ull_build_imports_point_down() -> None:
    rooms = BUILD.rooms()
    arrows = [a for file, text in BUILD_SOURCES.items() for a in python_arrows(file, text, ("ull_build", "ull"), rooms)]
    assert not (problems := BUILD.problems(arrows)), "\n".join(problems)


def test_nothing_of_ours_is_looked_up_by_name() -> None:
    """import_module() would pass both the type checker and the floors by."""
    found = {file: looked_up_names(text) for file, text in {**SOURCES, **BUILD_SOURCES}.items()}
    assert {file for file, names in found.items() if "?" in names} == set(LOOKED_UP)
    ours = [
        (file, name) for file, names in found.items() for name in names if name.split(".")[0] in ("ull", "ull_build")
    ]
    assert not ours


def test_ull_itself_loads_no_room() -> None:
    """Everybody imports it on the way to a room; what it imports under TYPE_CHECKING is for type checkers."""
    at_run_time = [
        node for node in ast.parse(SOURCES["ull/__init__.py"]).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not [name for node in at_run_time for name in imported_names(ast.unparse(node)) if name.startswith("ull")]


def imports_of_training(folder: Path) -> set[str]:
    """The files below `folder` that import what only training and the comparison with transformers need."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if TRAINING_ONLY & {name.split(".")[0] for name in imported_names(path.read_text())}
    }


@pytest.mark.parametrize("folder", ["ull", "bench"])
def test_no_pytorch_in(folder: str) -> None:
    assert not imports_of_training(ROOT / folder)


def test_of_the_build_only_the_trainers_import_pytorch() -> None:
    assert imports_of_training(ROOT / "build/ull_build") == {f"train/{name}.py" for name in TRAINERS}


def test_ull_train_asks_for_pytorch_only_when_it_trains() -> None:
    """The command line, the data and the figures can be imported without PyTorch."""
    trainers = {f"ull_build.train.{name}" for name in TRAINERS}
    for path in (ROOT / "build/ull_build/train").glob("*.py"):
        at_once = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for node in at_once for name in imported_names(ast.unparse(node))]
        assert path.stem in TRAINERS or not {".".join(name.split(".")[:3]) for name in names} & trainers, path.name


def test_no_test_module_imports_another() -> None:
    """What several share lies in tests/rigs."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    modules = {path.stem for path in paths if path.stem.startswith("test_")}
    crossing = {
        (str(path.relative_to(ROOT)), name)
        for path in paths
        for name in imported_names(path.read_text())
        if modules & set(name.split("."))
    }
    assert not crossing


def test_each_test_module_has_a_name_of_its_own() -> None:
    """Folders of tests are no packages, so that pytest could not tell two of one name apart."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    shared = [name for name, count in Counter(path.name for path in paths).items() if count > 1]
    assert shared == []
