"""Builds the wheels for CPython 3.11 to 3.14 and proves them: `python release/wheels.py FOLDER [PYTHON ...]`.

There are two: one for 3.11, and one for the stable ABI of 3.12, which later versions take too. They are built by the
interpreters given, else by those that are found here, and each one found installs and uses the wheel that is its own.
What is not here is named. Needs a package index. Status 1 where a wheel is missing or does not work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import wheel_works

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 14))
STABLE = (3, 12)  # what nanobind's stable ABI needs
TOOLS = ("cmake>=3.24", "nanobind>=2.4", "ninja>=1.11", "scikit-build-core>=0.10")
MAN = ROOT / ".cache/man"


def version_of(python: str) -> tuple[int, int] | None:
    """The version of an interpreter; None where it does not run."""
    code = "import sys, venv; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], text=True, capture_output=True, timeout=60)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    major, minor = map(int, done.stdout.split())
    return major, minor


def find_interpreters(given: list[str]) -> dict[tuple[int, int], str]:
    """An interpreter of each version that is here."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = list(given)
    if not given:
        for major, minor in VERSIONS:
            name = f"python{major}.{minor}"
            candidates += [name, *(str(path) for path in sorted(pyenv.glob(f"{major}.{minor}.*/bin/{name}")))]
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        python = shutil.which(candidate)
        version = None if python is None else version_of(python)
        if python is not None and version in VERSIONS:
            found.setdefault(version, python)
        elif given:
            raise SystemExit(f"{candidate} is no CPython of 3.11 to 3.14")
    return found


def build(python: str, folder: Path, stable: bool) -> Path:
    """Builds a wheel with an interpreter, in an environment of its own, and returns it."""
    environment = ROOT / ".cache/wheels" / ("stable" if stable else "own")
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/python"), "-m", "pip"]
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", *quiet, *TOOLS], check=True)
    settings = [f"cmake.define.ULL_MAN_PAGES={MAN}"]
    if stable:
        settings += ["cmake.define.ULL_STABLE_ABI=ON", f"wheel.py-api=cp{STABLE[0]}{STABLE[1]}"]
    options = [word for setting in settings for word in ("-C", setting)]
    made = folder / ("stable" if stable else "own")
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run(
        [*pip, "wheel", *quiet, "--no-deps", "--no-build-isolation", *options, "--wheel-dir", str(made), str(ROOT)],
        check=True,
        env={**os.environ, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"},
    )
    [wheel] = made.glob("*.whl")
    moved = wheel.replace(folder / wheel.name)
    made.rmdir()
    return moved


def main(folder: Path, given: list[str]) -> int:
    """Returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    found = find_interpreters(given)
    newer = [version for version in found if version >= STABLE]
    wheels = {}
    if (3, 11) in found:
        wheels["3.11"] = build(found[3, 11], folder, stable=False)
    if newer:
        wheels["3.12 and later"] = build(found[min(newer)], folder, stable=True)
    for wheel in wheels.values():
        subprocess.run([sys.executable, str(ROOT / "tests/house/wheel_contents.py"), str(wheel)], check=True)
    for version in VERSIONS:
        if version not in found:
            print(f"Python {version[0]}.{version[1]} is not here: not tried")
            continue
        wheel_works.main(wheels["3.11" if version < STABLE else "3.12 and later"], found[version])
    missing = [name for name in ("3.11", "3.12 and later") if name not in wheels]
    for name in missing:
        print(f"no wheel for Python {name}: no such interpreter is here", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
