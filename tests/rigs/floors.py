"""Import rules as tables: the rooms of a tree, lowest first, and which of the rooms below each of them uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ALL_BELOW = "*"


@dataclass(frozen=True)
class Arrow:
    """`file`, which lies in `room`, uses `name`, which lies in the room `other`."""

    file: str
    room: str
    name: str
    other: str


@dataclass(frozen=True)
class Floors:
    """`rows`: room, or several -> the rooms of rows above that its files use; ALL_BELOW: whatever they like.

    `exceptions`: (file, name) -> the reason why that file uses it against its row; names inside `name` count, too.
    """

    rows: Mapping[str, str]
    exceptions: Mapping[tuple[str, str], str]

    def rooms(self) -> set[str]:
        return {room for row in self.rows for room in row.split()}

    def problems(self, arrows: Iterable[Arrow]) -> list[str]:
        """What is used against the table, and what the table allows although nobody uses it."""
        row_of = {room: row for row in self.rows for room in row.split()}
        unused = {(row, other) for row, uses in self.rows.items() for other in uses.split() if other != ALL_BELOW}
        unneeded = set(self.exceptions)
        found = self._order()
        for arrow in sorted(set(arrows), key=lambda arrow: (arrow.file, arrow.name)):
            row = row_of.get(arrow.room)
            if row is None:
                found.append(f"{arrow.file}: its room {arrow.room} has no row")
                continue
            if arrow.other == arrow.room:
                continue
            exception = self._exception(arrow)
            unneeded.discard(exception or ("", ""))
            if exception is None and not self._allows(row, arrow.other):
                found.append(f"{arrow.file} uses {arrow.name}: {arrow.room} may not know {arrow.other}")
            if exception is None:
                unused.discard((row, arrow.other))
        found += [f"{row} uses nothing of {other}: take it out of the row" for row, other in sorted(unused)]
        return found + [f"{file} does not use {name}: take the exception out" for file, name in sorted(unneeded)]

    def _order(self) -> list[str]:
        found = []
        above: set[str] = set()
        for row, uses in self.rows.items():
            found += [f"{row}: {other} has no row above" for other in set(uses.split()) - above - {ALL_BELOW}]
            above.update(row.split())
        return found

    def _allows(self, row: str, other: str) -> bool:
        if self.rows[row] != ALL_BELOW:
            return other in self.rows[row].split()
        names = list(self.rows)
        return any(other in below.split() for below in names[: names.index(row)])

    def _exception(self, arrow: Arrow) -> tuple[str, str] | None:
        for file, name in self.exceptions:
            if file == arrow.file and (arrow.name == name or arrow.name.startswith((f"{name}.", f"{name}/"))):
                return file, name
        return None


def imported_names(source: str, package: str = "") -> list[str]:
    """What a Python source imports, anywhere in it, dotted; `package` is the one that relative imports start from.

    import_module() of a literal counts; of anything else it is "?".
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names + looked_up_names(source)


def looked_up_names(source: str) -> list[str]:
    """What a Python source asks import_module() or __import__() for: a name, or "?" where it is computed."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            asked = node.args[0] if node.args else None
            names.append(asked.value if isinstance(asked, ast.Constant) and isinstance(asked.value, str) else "?")
    return names


def python_arrows(file: str, source: str, packages: tuple[str, ...], rooms: set[str]) -> list[Arrow]:
    """The arrows of a module of `packages[0]` to rooms of its own package and, as "package.room", to those of others.

    A room is a folder, or a module beside the folders. What else is imported of a package is an attribute of its own.
    """
    parts = file.removesuffix(".py").split("/")
    arrows = []
    for name in imported_names(source, ".".join(parts[:-1])):
        first, *inside = name.split(".")
        if first in packages and inside:
            other = inside[0] if first == packages[0] else f"{first}.{inside[0]}"
            if other in rooms or len(inside) > 1:
                arrows.append(Arrow(file, parts[1], name, other))
    return arrows


def python_sources(folder: Path) -> dict[str, str]:
    """Path from the folder's parent -> text of every module below, __init__ included."""
    return {str(path.relative_to(folder.parent)): path.read_text() for path in sorted(folder.rglob("*.py"))}
