"""What `make h200` may lack on a machine that reaches no package registry, into .wheels/: packages and a native module.

python bench/h200/wheels.py [PYTHON] [--bare]    # a Python 3.12 with its headers; default: python3.12

Everything is tried before it counts: a bare Python 3.12 must find all that it needs in there, and load the module. Then
what PyTorch for CUDA 13 and transformers bring is left out, since a lent machine takes no more; --bare: it stays.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packages import NEEDED, WANTED, read_wheel, to_install
from sources import ROOT

from native import PREBUILT, STAMP, prebuilt_stamp

ALL = {**NEEDED, **WANTED}
BROUGHT = {  # by PyTorch for CUDA 13 and transformers
    "cuda-bindings",
    "cuda-pathfinder",
    "jinja2",
    "markupsafe",
    "numpy",
    "packaging",
    "safetensors",
    "tokenizers",
}
MOST_BYTES = 64 << 20  # that a lent machine takes, with the working tree
WORK = ROOT / ".cache/h200-wheels"
OLDEST_GLIBC = (2, 35)  # Ubuntu 22.04's
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 26, 24, 17, 12, 5)), "manylinux2014_x86_64")
FETCH = ("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:")
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")


def fetch(folder: Path) -> None:
    """Every package that is needed, with what it needs in turn, for Python 3.12 on Linux; what is never used goes."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([sys.executable, *FETCH, *TARGET, *platforms, "--dest", str(folder), *ALL.values()], check=True)
    wheels = [read_wheel(path) for path in sorted(folder.glob("*.whl"))]
    kept = {wheel.path for wheel in to_install(wheels, ALL, nothing_installed=True)}
    for wheel in wheels:
        if wheel.path not in kept:
            wheel.path.unlink()


def bare_python(python: str, folder: Path) -> Path:
    """A Python 3.12 with nothing in it but what .wheels/ offers. Raises RuntimeError where something is missing."""
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    found = folder / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([str(found), *install, *map(str, sorted(PREBUILT.glob("*.whl")))], check=True)
    modules = ", ".join(name for name in ALL if name != "ninja")  # a program
    result = subprocess.run([str(found), "-c", f"import {modules}"], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"with the wheels alone: {result.stderr.strip().splitlines()[-1]}")
    return found


def compile_module(python: Path, build: Path) -> None:
    """The native core for every Python from 3.12 on, with the C++ library in it."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DULL_STABLE_ABI=ON", f"-DPython_EXECUTABLE={python}"]
    tools = Path(sys.executable).parent  # cmake and ninja of the virtual environment
    cmake, ninja = tools / "cmake", tools / "ninja"
    configure = [str(cmake), "-S", str(ROOT / "ull/native"), "-B", str(build), "-G", "Ninja", *options]
    subprocess.run([*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([str(cmake), "--build", str(build)], check=True)
    (module,) = build.glob("_native*.so")
    subprocess.run(["strip", "--strip-unneeded", "-o", str(PREBUILT / module.name), str(module)], check=True)
    (PREBUILT / STAMP).write_text(prebuilt_stamp())


def needed_versions(module: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each library's symbols that a module asks for: GLIBC, GLIBCXX, ..."""
    listing = subprocess.run(["objdump", "-T", str(module)], check=True, capture_output=True, text=True).stdout
    found: dict[str, tuple[int, ...]] = {}
    for library, text in re.findall(r"\((GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\)", listing):
        version = tuple(map(int, text.split(".")))
        found[library] = max(found.get(library, (0,)), version)
    return found


def check_module(python: Path) -> str:
    """Loads it where nothing else of ull is; what it asks for. Raises RuntimeError for a module that will not do."""
    (module,) = PREBUILT.glob("_native*.so")
    found = needed_versions(module)
    if found.get("GLIBC", (0,)) > OLDEST_GLIBC or "GLIBCXX" in found:
        raise RuntimeError(f"{module.name} asks for {found}; glibc {OLDEST_GLIBC} and no libstdc++ may be asked for")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "ull"
        shutil.copytree(ROOT / "ull", package, ignore=shutil.ignore_patterns("*.so", "native", "__pycache__"))
        shutil.copy(module, package)
        command = [str(python), "-c", "import ull._native as n; print(n.__file__)"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if result.returncode != 0 or not result.stdout.startswith(folder):
            raise RuntimeError(f"{module.name} does not load: {(result.stderr or result.stdout).strip()}")
    return f"{module.name}: glibc {'.'.join(map(str, found['GLIBC']))} or newer, Python 3.12 or newer"


def leave_out(folder: Path, names: set[str]) -> None:
    """Takes the wheels of these packages away."""
    for path in folder.glob("*.whl"):
        if read_wheel(path).name in names:
            path.unlink()


def tree_bytes() -> int:
    """Of the files that git knows of."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    return sum((ROOT / name).lstat().st_size for name in listed.decode().split("\0") if name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="?", default="python3.12")
    parser.add_argument("--bare", action="store_true", help="for a machine without PyTorch and transformers")
    options = parser.parse_args()
    python = options.python
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    fetch(PREBUILT)
    print(f"{len(list(PREBUILT.glob('*.whl')))} wheels for Python 3.12")
    probe = [python, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 12))"]
    if shutil.which(python) is None or subprocess.run(probe).returncode != 0:
        print(f"{python} is no Python 3.12: no native module was made; name one by PYTHON312=...", file=sys.stderr)
        return 1
    bare = bare_python(python, WORK / "python")
    compile_module(bare, WORK / "native")
    print(check_module(bare))
    if not options.bare:
        leave_out(PREBUILT, BROUGHT)
    nbytes, beside = sum(path.stat().st_size for path in PREBUILT.iterdir()), tree_bytes()
    print(f".wheels/ holds {nbytes / 2**20:.1f} MiB, the working tree {beside / 2**20:.1f} MiB")
    if nbytes + beside > MOST_BYTES:
        print(f"that is more than {MOST_BYTES >> 20} MiB: a lent machine would not take it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
