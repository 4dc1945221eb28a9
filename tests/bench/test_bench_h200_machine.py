"""What `make h200` needs of a machine, and where it comes from: packages out of .wheels/, a native module."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from importlib.metadata import version as metadata_version
from pathlib import Path

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "bench/h200"))

import machine
import packages
import sources
import wheels as bring
from packages import Requirement

import native


def wheel(folder: Path, name: str, *requires: str, number: str = "1.0") -> Path:
    path = folder / f"{name.replace('-', '_')}-{number}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}"]
    with zipfile.ZipFile(path, "w") as archive:
        metadata = "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires)])
        stem = f"{name.replace('-', '_')}-{number}"
        archive.writestr(f"{name.replace('-', '_')}.py", f"version = {number!r}\n")
        archive.writestr(f"{stem}.dist-info/METADATA", metadata + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "absent-one", 'absent-two>=1; python_version >= "3"', 'absent-three; extra == "more"', "numpy>=1")
    wheel(folder, "absent-two", "absent-one")
    wheel(folder, "absent-three")
    wheel(folder, "numpy", number="99.0")
    wheel(folder, "pytest", number="999.0")
    return folder


def test_only_what_is_missing_or_too_old_is_installed(wheels: Path) -> None:
    offered = [packages.read_wheel(path) for path in sorted(wheels.glob("*.whl"))]

    def chosen_for(needed: dict[str, str], **options: bool) -> list[str]:
        return [one.name for one in packages.to_install(offered, needed, **options)]

    needed = {"absent_one": "absent-one>=1", "numpy": "numpy>=1.26"}
    assert chosen_for(needed) == ["absent-one", "absent-two"]
    assert chosen_for({**needed, "pytest": "pytest>=900"}) == ["absent-one", "absent-two", "pytest"]
    assert chosen_for(needed, nothing_installed=True) == ["absent-one", "absent-two", "numpy"]
    assert chosen_for({"json": "no-such-package>=3"}) == []  # its module is there, of unknown version


def test_what_pytorch_brings_is_not_carried(wheels: Path) -> None:
    bring.leave_out(wheels, {"numpy", "absent-two"})
    assert {packages.read_wheel(path).name for path in wheels.glob("*.whl")} == {"absent-one", "absent-three", "pytest"}
    needed = {packages.canonical(Requirement(text).name) for text in packages.NEEDED.values()}
    assert {"numpy", "tokenizers", "cuda-bindings"} <= needed & bring.BROUGHT


def test_wheels_are_installed_beside_the_machines_packages(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    monkeypatch.setattr(packages, "NEEDED", {"absent_one": "absent-one>=1", "numpy": "numpy>=1.26"})
    monkeypatch.setattr(packages, "WANTED", {})
    monkeypatch.setattr(sys, "argv", ["packages.py", str(wheels), str(site)])
    assert packages.main() == 0
    assert (site / "absent_two.py").exists() and not (site / "numpy.py").exists()
    monkeypatch.syspath_prepend(str(site))
    assert packages.faults(packages.NEEDED) == {}


def test_versions_that_are_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"nanobind": "2.3.1"}
    monkeypatch.setattr(packages, "version", lambda name: old.get(name) or metadata_version(name))
    assert machine.missing_packages() == ["nanobind (2.3.1 is installed, >=2.4 is needed)"]


def test_what_is_needed_is_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [*project["project"]["dependencies"], *extras["test"], *extras["gpu"], *project["build-system"]["requires"]]
    known = {packages.canonical(Requirement(text).name): str(Requirement(text).specifier) for text in asked}
    for text in (*packages.NEEDED.values(), *packages.WANTED.values()):
        name = packages.canonical(Requirement(text).name)
        assert str(Requirement(text).specifier) == known.get(name, str(Requirement(text).specifier)), name
    dependencies = {packages.canonical(Requirement(text).name) for text in project["project"]["dependencies"]}
    assert dependencies <= {packages.canonical(Requirement(text).name) for text in packages.NEEDED.values()}


CMAKE = """#!/bin/sh
echo "cmake $*" >> {log}
case $1 in --build) printf '{module}' > $2/_native.test.so ;; esac
exit {status}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one source file, and .wheels/ with a module of it."""
    for name in ("ull/native", ".wheels", "build", "bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ull/native/core.cpp").write_text("int a;\n")
    (tmp_path / ".wheels/_native.abi3.so").write_text("prebuilt")
    for module in (native, sources):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(native, "PREBUILT", tmp_path / ".wheels")
    monkeypatch.setattr(native, "NATIVE", ("ull/native",))
    monkeypatch.setattr(native, "loads", lambda: "")
    (tmp_path / ".wheels/_native.sources").write_text(native.prebuilt_stamp())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["native.py", str(tmp_path / "build"), str(tmp_path / "build.log")])
    return tmp_path


def write_cmake(tree: Path, status: int = 0) -> None:
    (tree / "bin/cmake").write_text(CMAKE.format(log=tree / "calls", module="compiled here", status=status))
    (tree / "bin/cmake").chmod(0o755)


def placed(tree: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tree / "ull").glob("*.so")}


def test_the_module_is_compiled_once_for_its_sources(tree: Path) -> None:
    write_cmake(tree)
    (tree / ".wheels/_native.sources").write_text("other sources")
    (tree / "ull/_native.other.so").write_text("of another Python")
    assert native.main() == 0 and placed(tree) == {"_native.test.so": "compiled here"}
    calls = (tree / "calls").read_text()
    assert "-DULL_WERROR=OFF" in calls and len(calls.splitlines()) == 2
    assert native.main() == 0 and (tree / "calls").read_text() == calls
    (tree / "ull/native/core.cpp").write_text("int b;\n")
    assert native.main() == 0 and len((tree / "calls").read_text().splitlines()) == 4


def test_a_module_of_the_same_sources_is_not_compiled_again(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cmake(tree, status=1)
    assert native.main() == 0 and placed(tree) == {"_native.abi3.so": "prebuilt"}
    assert "the one in .wheels/" in capsys.readouterr().out and not (tree / "calls").exists()
    (tree / "ull/native/core.cpp").write_text("int b;\n")
    assert native.main() == 1 and "holds none that will do: run `make h200-wheels`" in capsys.readouterr().out


def test_a_module_that_does_not_load_is_compiled_here(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cmake(tree)
    complaints = ["ImportError: no such glibc", ""]
    monkeypatch.setattr(native, "loads", lambda: complaints.pop(0))
    assert native.main() == 0 and placed(tree) == {"_native.test.so": "compiled here"}


def test_a_machine_without_cmake_takes_it_if_it_loads(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.main() == 0 and placed(tree) == {"_native.abi3.so": "prebuilt"}
    monkeypatch.setattr(native, "loads", lambda: "ImportError: no such glibc")
    assert native.main() == 1
