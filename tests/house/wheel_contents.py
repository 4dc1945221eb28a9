"""Asserts what a wheel must and must not contain: `python tests/house/wheel_contents.py WHEEL`, see `make wheel`."""

import re
import sys
import zipfile

PROGRAMS = ("ull", "ulld", "ull-gateway", "ull-build", "ull-train")
MUST = [
    r"ull/__init__\.py",
    r"ull/_native\..*\.so",
    r"ull/_native\.pyi",
    r"ull/py\.typed",
    r"ull/client/sync\.py",
    r"ull/daemon/server\.py",
    r"ull/cli\.py",
    r"ull_build/__init__\.py",
    r"ull_build/__main__\.py",
    r"ull_build/cli\.py",
    r"ull_build/data/calibration\.txt",
    r"ull_build/data/eval\.txt",
    r"ull_build/tensorrt/plans\.py",
    r"ull/gpu/program\.py",
    r"ull/kernels/linear/qkv\.cu",
    r"ull/kernels/arch\.cuh",
    r"ull/kernels/params\.h",
    r"ull/native/base/philox\.h",
    r"ull/systemd/ull@\.service",
    r"ull/systemd/ull\.sysctl",
    r"ull-.*\.dist-info/licenses/LICENSE",
    *(rf"ull-.*\.data/data/share/man/man1/{name}\.1" for name in PROGRAMS),
]
MUST_NOT = [
    r".*\.cpp",
    r"ull/native/(?!base/[^/]*\.h$).*",  # of the core, only the headers that the kernels include
    r"tests?/.*",
    r"release/.*",
    r"clients/.*",
    r"bench/.*",
    r"engines/.*",
    r".*__pycache__.*",
]


def problems(names: list[str]) -> list[str]:
    """What is missing from, or foreign in, a wheel with these file names."""
    missing = [f"missing: {pattern}" for pattern in MUST if not any(re.fullmatch(pattern, name) for name in names)]
    foreign = [f"foreign: {name}" for name in names if any(re.fullmatch(pattern, name) for pattern in MUST_NOT)]
    return missing + foreign


if __name__ == "__main__":
    found = problems(zipfile.ZipFile(sys.argv[1]).namelist())
    print("\n".join(found) or f"{sys.argv[1]}: contents as they should be")
    sys.exit(1 if found else 0)
