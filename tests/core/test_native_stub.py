"""ull/_native.pyi names exactly what the native module binds, arguments included."""

import ast
import re
from pathlib import Path

from ull import _native

STUB = Path(__file__).parents[2] / "ull/_native.pyi"
TREE = ast.parse(STUB.read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
CONSTANTS = {
    node.target.id for node in TREE.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}
FUNCTIONS = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}


def public(names: object) -> set[str]:
    return {name for name in dir(names) if not name.startswith("_")}


def argument_names(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]


def bound_argument_names(function: object) -> list[str]:
    """From nanobind's docstring signature, `name(self, tokens: ..., *, chunk: int = 256) -> ...`."""
    signature = (function.__doc__ or "").splitlines()[0]
    while (flat := re.sub(r"\[[^\[\]]*\]", "", signature)) != signature:  # the commas and brackets of types
        signature = flat
    inside = signature[signature.index("(") + 1 : signature.index(") ->")]
    parts = [part.split(":")[0].split("=")[0].strip() for part in inside.split(",")]
    return [part for part in parts if part not in ("", "*", "/")]


def test_the_same_names() -> None:
    assert public(_native) == CLASSES.keys() | FUNCTIONS.keys() | CONSTANTS
    for name, node in CLASSES.items():
        members = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__init__"}
        bound = public(getattr(_native, name))
        if not issubclass(getattr(_native, name), Exception):
            assert bound == members | {member for base in node.bases for member in public_of(base)}, name


def public_of(base: ast.expr) -> set[str]:
    assert isinstance(base, ast.Name)
    return {item.name for item in CLASSES[base.id].body if isinstance(item, ast.FunctionDef)} - {"__init__"}


def test_the_same_arguments() -> None:
    for name, function in FUNCTIONS.items():
        assert argument_names(function) == bound_argument_names(getattr(_native, name)), name
    checked = 0
    for name, node in CLASSES.items():
        for item in node.body:
            if not isinstance(item, ast.FunctionDef) or item.decorator_list:
                continue
            bound = bound_argument_names(getattr(getattr(_native, name), item.name))
            if any(re.fullmatch(r"arg\d*", argument) for argument in bound):
                continue  # bound without names
            assert argument_names(item) == bound, f"{name}.{item.name}"
            checked += 1
    assert checked > 10
