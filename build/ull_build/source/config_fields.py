"""Typed access to the fields of a checkpoint's config.json; every complaint names the field."""

from __future__ import annotations

import sys
from typing import Any

from ull.errors import CheckpointError


class Fields:
    """A JSON object by the names of its fields; `prefix` stands before them in messages, which begin with `file`."""

    def __init__(self, values: dict[str, Any], prefix: str = "", file: str = "config.json") -> None:
        self.values = values
        self.prefix = prefix
        self.file = file

    def fail(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: `{self.prefix}{name}` {message}", field=self.prefix + name)

    def is_null(self, name: str) -> bool:
        """Present and null, which differs from absent (the default applies)."""
        return name in self.values and self.values[name] is None

    def _absent(self, name: str) -> CheckpointError:
        null = "is null; give it a value, or remove it for the default"
        return self.fail(name, null if self.is_null(name) else "is missing")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self._absent(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise self.fail(name, f"must be a positive integer, not {short(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self._absent(name)
        if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
            raise self.fail(name, f"must be a positive number, not {short(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.fail(name, f"must be true or false, not {short(value)}")
        return value

    def token_ids(self, name: str) -> list[int]:
        """An int, a list of ints, or nothing."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(item) is not int or item < 0 for item in ids):
            raise self.fail(name, f"must be a token id or a list of them, not {short(value)}")
        return ids


def short(value: Any) -> str:
    """A value of config.json as a message quotes it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
