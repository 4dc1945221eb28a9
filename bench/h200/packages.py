"""What `make h200` needs of Python, what of it this machine lacks, and how that comes out of .wheels/.

python bench/h200/packages.py WHEELS SITE    # installs into the folder SITE what is missing or too old, and no more
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # pip, without which nothing can be installed, has its own
    from pip._vendor.packaging.requirements import Requirement

NEEDED = {  # module -> the package that holds it; minima as in pyproject.toml
    "cuda.bindings": "cuda-bindings>=13",
    "hypothesis": "hypothesis>=6.100",
    "jinja2": "jinja2>=3.1.6",
    "llguidance": "llguidance>=1.9",
    "ml_dtypes": "ml_dtypes>=0.4",
    "msgspec": "msgspec>=0.18",
    "nanobind": "nanobind>=2.4",
    "numpy": "numpy>=1.26",
    "pytest": "pytest>=8",
    "rich": "rich>=13",
    "safetensors": "safetensors>=0.4",
    "shtab": "shtab>=1.7",
    "tokenizers": "tokenizers>=0.20",
    "uvloop": "uvloop>=0.19",
    "zmq": "pyzmq>=26",
}
WANTED = {
    "pytest_timeout": "pytest-timeout>=2.3",
    "xdist": "pytest-xdist>=3.8",
    "ninja": "ninja>=1.11",
}  # can do without
UNUSED = {"huggingface-hub"}  # tokenizers asks for it, to fetch what is never fetched here


@dataclass(frozen=True)
class Wheel:
    path: Path
    name: str  # canonical
    requires: list[Requirement]  # without extras


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_wheel(path: Path) -> Wheel:
    """What a wheel's metadata say. Raises ValueError where it has none."""
    with zipfile.ZipFile(path) as archive:
        (member,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = Parser().parsestr(archive.read(member).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    taken = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return Wheel(path, canonical(metadata["Name"]), [one for one in taken if canonical(one.name) not in UNUSED])


def fault(requirement: Requirement, module: str = "") -> str:
    """Why what is installed will not do; "" if it will. A module of unknown version is taken for good."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return "" if module and _is_found(module) else "missing"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{found} is installed, {requirement.specifier} is needed"


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of its parent
        return False


def faults(needed: dict[str, str]) -> dict[str, str]:
    """Package -> what is wrong with it here."""
    found = {module: fault(Requirement(text), module) for module, text in needed.items()}
    return {Requirement(needed[module]).name: why for module, why in found.items() if why}


def to_install(wheels: Iterable[Wheel], needed: dict[str, str], nothing_installed: bool = False) -> list[Wheel]:
    """The wheels that mend what is wrong, and what these need in turn, where that is not installed either.

    `nothing_installed`: as it would be on a bare machine.
    """
    offered = {wheel.name: wheel for wheel in wheels}
    chosen: dict[str, Wheel] = {}
    requirements = {module: Requirement(text) for module, text in needed.items()}
    open_ends = [one for module, one in requirements.items() if nothing_installed or fault(one, module)]
    while open_ends:
        requirement = open_ends.pop()
        name = canonical(requirement.name)
        if name in chosen or name not in offered or not (nothing_installed or fault(requirement)):
            continue
        chosen[name] = offered[name]
        open_ends += offered[name].requires
    return sorted(chosen.values(), key=lambda wheel: wheel.name)


def main() -> int:
    folder, site = map(Path, sys.argv[1:])
    chosen = to_install(map(read_wheel, sorted(folder.glob("*.whl"))), {**NEEDED, **WANTED})
    if not chosen:
        print("nothing that .wheels/ could mend is missing")
        return 0
    print(f"installing {', '.join(wheel.name for wheel in chosen)} into {site}")
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", *options, "--upgrade", "--target", str(site)]
    return subprocess.run([*command, *(str(wheel.path) for wheel in chosen)]).returncode


if __name__ == "__main__":
    sys.exit(main())
