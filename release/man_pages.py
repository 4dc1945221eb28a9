"""Writes the man pages of every program, from the parsers that `--help` prints.

python release/man_pages.py FOLDER
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

from argparse_manpage.manpage import Manpage

from ull import __version__

PROGRAMS = {
    "ull": "ull.cli",
    "ulld": "ull.daemon.main",
    "ull-gateway": "ull.gateway.main",
    "ull-build": "ull_build.cli",
    "ull-train": "ull_build.train.cli",
}
SEE_ALSO = "docs/ of ull's source: clients.md, operations.md, building.md, gateway.md"


def page(program: str) -> str:
    """The man page of a program, as roff."""
    os.environ["COLUMNS"] = "80"  # what a usage line is wrapped for
    parser: argparse.ArgumentParser = importlib.import_module(PROGRAMS[program]).parser()
    manual = Manpage(parser)
    manual.manual, manual.source = "ull", f"ull {__version__}"
    summary = " ".join((parser.description or "").split())
    first = summary.split(". ")[0].rstrip(".")
    name = f".SH NAME\n{_plain(program)} \\- {_plain(first)}"
    text = re.sub(r"^\.SH NAME\n.*$", lambda _: name, str(manual), count=1, flags=re.MULTILINE)
    text = re.sub(r"^\.SH\n(.+)$", r".SH \1", text, flags=re.MULTILINE)
    # Tables of an epilog: a word and what it means, two spaces in.
    text = re.sub(r"^ {2}(\S+) +(\S.*)$", r".TP\n\\fB\1\\fR\n\2", text, flags=re.MULTILINE)
    others = ", ".join(f"\\fB{_plain(other)}\\fR(1)" for other in PROGRAMS if other != program)
    return f"{text.rstrip()}\n.SH SEE ALSO\n{others}; {_plain(SEE_ALSO)}\n"


def _plain(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def write(folder: Path) -> list[Path]:
    """Writes PROGRAM.1 of each program."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{program}.1" for program in PROGRAMS]
    for path in paths:
        path.write_text(page(path.stem), encoding="utf-8")
    return paths


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(path)
