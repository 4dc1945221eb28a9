"""The checker of the import rules, on made-up sources: what it must find, and what it must let pass."""

import pytest

from floors import Arrow, Floors, looked_up_names, python_arrows

ROWS = {"errors log": "", "wire": "errors", "client": "errors wire", "cli": "*"}
NEEDED = [
    Arrow("ull/wire.py", "wire", "ull.errors", "errors"),
    Arrow("ull/client/sync.py", "client", "ull.errors", "errors"),
    Arrow("ull/client/sync.py", "client", "ull.wire", "wire"),
]
UPWARDS = Arrow("ull/wire.py", "wire", "ull.client.sync.Client", "client")


def test_what_the_rows_say_passes() -> None:
    inside = Arrow("ull/client/sync.py", "client", "ull.client.link", "client")
    everything = Arrow("ull/cli.py", "cli", "ull.log", "log")
    assert Floors(ROWS, {}).problems([*NEEDED, inside, everything]) == []


@pytest.mark.parametrize(
    ("arrow", "said"),
    [
        (UPWARDS, "wire may not know client"),
        (Arrow("ull/client/sync.py", "client", "ull.log", "log"), "client may not know log"),
        (Arrow("ull/log.py", "log", "ull.errors", "errors"), "log may not know errors"),
        (Arrow("ull/gpu/driver.py", "gpu", "ull.errors", "errors"), "its room gpu has no row"),
        (Arrow("ull/cli.py", "cli", "ull_build.build", "ull_build.build"), "cli may not know ull_build.build"),
    ],
)
def test_an_arrow_against_the_rows_is_found(arrow: Arrow, said: str) -> None:
    (problem,) = Floors(ROWS, {}).problems([*NEEDED, arrow])
    assert said in problem


def test_an_exception_holds_for_its_file_and_name() -> None:
    floors = Floors(ROWS, {("ull/wire.py", "ull.client.sync"): "why"})
    assert floors.problems([*NEEDED, UPWARDS]) == []
    other = Arrow("ull/wire.py", "wire", "ull.client.synchronous", "client")
    assert len(floors.problems([*NEEDED, UPWARDS, other])) == 1


def test_what_nobody_uses_any_more_is_found() -> None:
    (row,) = Floors(ROWS, {}).problems(NEEDED[:-1])
    assert row == "client uses nothing of wire: take it out of the row"
    (exception,) = Floors(ROWS, {("ull/wire.py", "ull.client"): "why"}).problems(NEEDED)
    assert "take the exception out" in exception


def test_rows_that_know_each_other_are_found() -> None:
    rows = {"wire": "client", "client": "wire"}
    arrows = [NEEDED[2], UPWARDS]
    assert Floors(rows, {}).problems(arrows) == ["wire: client has no row above"]


@pytest.mark.parametrize(
    "source",
    [
        "import ull.wire",
        "from ull.wire import Done",
        "from ull import wire",
        "from ..wire import Done",
        "from .. import wire",
        "def late():\n    from ull.wire import Done",
        "import importlib\nimportlib.import_module('ull.wire')",
        "from importlib import import_module\nimport_module('ull.wire')",
    ],
)
def test_every_way_to_import_is_an_arrow(source: str) -> None:
    arrows = python_arrows("ull/gpu/driver.py", source, ("ull", "ull_build"), {"wire", "gpu"})
    assert {(arrow.room, arrow.other) for arrow in arrows} == {("gpu", "wire")}


def test_the_other_package_s_rooms_bear_its_name() -> None:
    source = "from ull_build.weights import cpu\nfrom ull import __version__\nimport ull\nimport numpy.linalg"
    arrows = python_arrows("ull/__init__.py", source, ("ull", "ull_build"), {"wire"})
    assert [(arrow.room, arrow.other) for arrow in arrows] == [("__init__", "ull_build.weights")]


def test_a_computed_name_is_a_question_mark() -> None:
    assert looked_up_names("import_module(home)\n__import__('ull')\nimport_module(name='x')") == ["?", "ull", "?"]
