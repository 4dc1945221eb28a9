"""The native core for `make h200`: the module that `make h200-wheels` has made, or compiled where it will run.

python bench/h200/native.py BUILD LOG    # status 0 once ull/ holds a module of these sources; the compiler's log is LOG
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from sources import NATIVE, ROOT, digest

PREBUILT = ROOT / ".wheels"
STAMP = "_native.sources"  # beside a module: what it was made from


def stamp() -> str:
    """For a module that this Python can load."""
    return digest(*NATIVE, extra=sys.implementation.cache_tag)


def prebuilt_stamp() -> str:
    """For a module that any Python from 3.12 on can load."""
    return digest(*NATIVE, extra="abi3")


def compile_module(build: Path, log: Path) -> bool:
    """Into `build`. Warnings are no errors here: nobody has tried this compiler."""
    cmake = shutil.which("cmake")
    if cmake is None:
        log.write_text("cmake is not on this machine\n")
        return False
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DULL_WERROR=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ninja"):
        options += ["-G", "Ninja"]
    with log.open("w") as output:
        for command in (
            [cmake, "-S", str(ROOT / "ull/native"), "-B", str(build), *options],
            [cmake, "--build", str(build), "--parallel"],
        ):
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
                return False
    return True


def place(folder: Path) -> None:
    """The module of `folder` into ull/, where Python finds it; and no other."""
    (module,) = folder.glob("_native*.so")
    for old in (ROOT / "ull").glob("_native*.so"):
        if old.name != module.name:
            old.unlink()
    temporary = ROOT / "ull" / f".{module.name}"
    shutil.copy(module, temporary)
    temporary.replace(ROOT / "ull" / module.name)


def loads() -> str:
    """What this Python says when it loads the module; "" if all is well."""
    command = [sys.executable, "-c", "import ull._native"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0:
        return ""
    return result.stderr.strip().split("\n")[-1] or f"it ends with status {result.returncode}"


def is_made(folder: Path, wanted: str) -> bool:
    made = folder / STAMP
    return made.exists() and made.read_text() == wanted and any(folder.glob("_native*.so"))


def main() -> int:
    build, log = map(Path, sys.argv[1:])
    build.mkdir(parents=True, exist_ok=True)
    made = {
        "the native module was compiled before": (build, stamp()),
        "the native module is the one in .wheels/": (PREBUILT, prebuilt_stamp()),
    }
    for said, (folder, wanted) in made.items():
        if is_made(folder, wanted):
            place(folder)
            if not (complaint := loads()):
                print(said)
                return 0
            print(f"{said}, which does not load: {complaint}")
    if not compile_module(build, log):
        print(*log.read_text().split("\n")[-40:], sep="\n")
        print("the native module did not compile, and .wheels/ holds none that will do: run `make h200-wheels`")
        return 1
    (build / STAMP).write_text(stamp())
    place(build)
    if complaint := loads():
        print(f"the native module does not load: {complaint}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
