"""Man pages: each option of each program is in its page, and roff has nothing to complain of."""

import argparse
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argparse_manpage")

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "release"))

import man_pages  # noqa: E402

from ull.completion import every_action  # noqa: E402


@pytest.mark.parametrize("program", man_pages.PROGRAMS)
def test_every_option_of_a_program_is_in_its_page(program: str) -> None:
    page = man_pages.page(program).replace("\\-", "-")
    parser = importlib.import_module(man_pages.PROGRAMS[program]).parser()
    assert parser.prog == program
    for action in every_action(parser):
        for option in action.option_strings:
            assert option == "-h" or option == "--help" or f"\\fB{option}\\fR" in page, option
        if isinstance(action, argparse._SubParsersAction):
            for name in action.choices:
                assert re.search(rf"\\fI\\,{name}\\/\\fR|{program} {name}", page), name
    head = page.splitlines()
    assert head[0].startswith(f'.TH {program.upper()} "1"') and head[1] == ".SH NAME"
    assert re.fullmatch(rf"{program} \\?- \S.*", head[2])
    assert ".SH SYNOPSIS" in head and ".SH OPTIONS" in head and ".SH SEE ALSO" in head


@pytest.mark.parametrize("program", man_pages.PROGRAMS)
def test_roff_takes_a_page_without_a_warning(program: str, tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    [path] = [path for path in man_pages.write(tmp_path) if path.stem == program]
    command = ["groff", "-man", "-Tutf8", "-ww", str(path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if "break" not in line and "adjust" not in line]
    assert done.returncode == 0 and not complaints
    assert "--version" in done.stdout.replace("\u2010", "-")


def test_the_keys_of_a_recipe_are_a_list_in_the_page_of_ull_build() -> None:
    page = man_pages.page("ull-build")
    assert ".TP\n\\fBmax_perplexity_increase\\fR\nfraction by which" in page
