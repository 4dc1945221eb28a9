"""Which words a key of a configuration or a recipe takes: for messages about one that it does not."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct


def words_of(struct: type[Struct], key: str) -> list[str]:
    """The words that `key` takes, in the order of its type; none where it takes something else, or is unknown.

    A dot leads from the key of a section, which may be optional, into it.
    """
    kinds: list[Any] = [struct]
    for part in key.split("."):
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Struct)]
        kinds = [member for section in sections for member in _members(get_type_hints(section).get(part))]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
