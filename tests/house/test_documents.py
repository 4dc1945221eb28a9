"""Every path of the repository that a document, a comment or a tool's settings name leads somewhere, and every link."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Names of before stay as they were.
LEFT_ALONE = {"CHANGELOG.md"}
TOP = ("bench", "build/ull_build", "docs", "engines", "systemd", "tests", "ull")
# A path begins at a folder of the root. What has a blank for a name (*, %, $, <, {, a backslash) is none.
PATH = re.compile(rf"(?<![\w./<{{}}*$%@-])(?:{'|'.join(TOP)})/[^\s\"'`,;:()\[\]#|]+")
BLANKS = set("*%$<>{}\\+=?!&")
MADE_UP = {"engines/NAME.toml", "engines/no", "ull/native/core.cpp", "ull/_native.other.so"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
DOCUMENTS = {".md"}
TOOLS = {"Makefile", "pyproject.toml", "run", "CMakeLists.txt"}
SOURCES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".sh", ".service", ".conf", ".toml"}


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


def named_paths(text: str) -> list[str]:
    found = [match.group().rstrip(".") for match in PATH.finditer(text)]
    return [path for path in found if not BLANKS & set(path) and path not in MADE_UP]


def leads_somewhere(path: str) -> bool:
    """A file or folder of the repository, or a header as C++ includes it; the Makefile's lists leave out tests/ and a
    module's ending."""
    names = (path.rstrip("/"), f"{path}.py", f"tests/{path}.py", f"clients/cpp/include/{path}")
    return any((ROOT / name).exists() for name in names)


def anchors(document: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```", "", document, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def documents() -> list[str]:
    return [name for name in tracked() if Path(name).suffix in DOCUMENTS and name not in LEFT_ALONE]


def test_paths_in_documents_lead_somewhere() -> None:
    wrong = [
        (name, path)
        for name in documents()
        for path in named_paths((ROOT / name).read_text())
        if not leads_somewhere(path)
    ]
    assert not wrong


def test_paths_in_sources_lead_somewhere() -> None:
    """In comments and docstrings, and where a source opens a file."""
    wrong = [
        (name, path)
        for name in tracked()
        if Path(name).name in TOOLS or Path(name).suffix in SOURCES
        if not name.startswith("engines/")  # recipes name checkpoints that a user puts there
        if name != "tests/house/test_documents.py"
        for path in named_paths((ROOT / name).read_text())
        if not leads_somewhere(path)
    ]
    assert not wrong


def test_links_lead_somewhere() -> None:
    wrong = []
    for name in documents():
        for target in LINK.findall((ROOT / name).read_text()):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            aim = (ROOT / name).parent / path if path else ROOT / name
            if not aim.exists() or (anchor and anchor not in anchors(aim.read_text())):
                wrong.append((name, target))
    assert not wrong


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("see `ull/client/sync.py`.", ["ull/client/sync.py"]),
        ("in tests/kernels/, and (docs/wire.md)", ["tests/kernels/", "docs/wire.md"]),
        ("a/tests/x, .cache/ull/y, https://x.org/docs/z.md, ull/{a,b}, bench/*.py, tests/x_*.py", []),
        ("ull/native/io: the io thread; systemd/ull@.service", ["ull/native/io", "systemd/ull@.service"]),
    ],
)
def test_what_is_a_path(text: str, paths: list[str]) -> None:
    assert named_paths(text) == paths


def test_anchors_are_those_of_headings() -> None:
    assert anchors("# A b-c\n```\n# no\n```\n## `ull bench`, twice: 1.5") == {"a-b-c", "ull-bench-twice-15"}
