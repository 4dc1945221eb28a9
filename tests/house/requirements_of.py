"""Prints what an extra of pyproject.toml needs, a line each: `python tests/house/requirements_of.py EXTRA`."""

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
