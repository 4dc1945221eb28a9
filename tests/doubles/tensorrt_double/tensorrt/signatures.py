"""Checks every use of a stand-in against the class of the real bindings that it stands for.

The bindings say in their docstrings what each method takes (pybind11 writes them). A name that the real class lacks is
an AttributeError, arguments that fit no overload are a TypeError, and what is real but not played is a
NotImplementedError.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bindings import real

MODULE = "tensorrt_bindings.tensorrt."
_SIGNATURE = re.compile(r"^(?:\d+\. )?\w*\((?P<parameters>.*)\) -> .*$")


@dataclass(frozen=True)
class Parameter:
    """One parameter as the docstring writes it. One without a name of its own (arg0) cannot be a keyword."""

    name: str
    annotation: str
    optional: bool

    @property
    def positional_only(self) -> bool:
        return re.fullmatch(r"arg\d+", self.name) is not None


def split_top_level(text: str) -> Iterator[str]:
    """The parts between the commas that stand outside of all brackets."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += (character in "([<{") - (character in ")]>}")
        if character == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


@functools.cache
def overloads(doc: str) -> list[list[Parameter]]:
    """The overloads of a docstring, each without self."""
    found = []
    for line in doc.splitlines():
        match = _SIGNATURE.match(line.strip())
        if match and "*args" not in line:
            parameters = []
            for part in split_top_level(match["parameters"]):
                name, _, rest = part.partition(":")
                annotation, equals, _ = rest.partition("=")
                parameters.append(Parameter(name.strip(), annotation.strip(), bool(equals)))
            found.append(parameters[1:])
    return found


def fits(annotation: str, value: Any) -> bool:
    """Whether pybind11 would take `value` for a parameter of this type. C++ names are not looked into."""
    if annotation.startswith(MODULE):
        return _fits_class(annotation.removeprefix(MODULE), value)
    if annotation.startswith("collections.abc.Sequence["):
        inner = annotation[annotation.index("[") + 1 : -1]
        return isinstance(value, (list, tuple)) and all(fits(inner, item) for item in value)
    if annotation == "typing_extensions.Buffer":
        return isinstance(value, (bytes, bytearray, memoryview))
    if annotation == "typing.SupportsInt":
        return hasattr(value, "__index__")
    if annotation == "typing.SupportsFloat":
        return isinstance(value, (int, float))
    simple: dict[str, Any] = {"str": str, "bool": (bool, np.bool_), "tuple": tuple, "list": list, "int": int}
    return isinstance(value, simple.get(annotation, object))


def _fits_class(name: str, value: Any) -> bool:
    wanted = functools.reduce(getattr, name.split("."), real)
    if isinstance(value, StandIn):
        return issubclass(type(value)._real, wanted)
    # What the bindings convert by themselves.
    if wanted in (real.Dims, real.Permutation) and isinstance(value, (list, tuple)):
        return all(hasattr(item, "__index__") for item in value)
    if wanted is real.Weights and isinstance(value, np.ndarray):
        return True
    return isinstance(value, wanted)


def matches(parameters: Sequence[Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) > len(parameters):
        return False
    rest = dict(kwargs)
    for place, parameter in enumerate(parameters):
        if place < len(args):
            given = args[place]
        elif parameter.name in rest and not parameter.positional_only:
            given = rest.pop(parameter.name)
        elif parameter.optional:
            continue
        else:
            return False
        if not fits(parameter.annotation, given):
            return False
    return not rest


def check_call(owner: type, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError, worded as pybind11 does, unless one overload of the real method takes the arguments."""
    doc = getattr(owner, name).__doc__ or ""
    choices = overloads(doc)
    assert choices, f"{owner.__name__}.{name} has a docstring without a signature"
    if not any(matches(choice, args, kwargs) for choice in choices):
        raise TypeError(
            f"{name}(): incompatible function arguments. The following argument types are supported:\n"
            + "\n".join(f"    ({', '.join(f'{p.name}: {p.annotation}' for p in choice)})" for choice in choices)
            + f"\n\nInvoked with: {args}, {kwargs}"
        )


def check_set(owner: type, name: str, value: Any) -> None:
    """Raises AttributeError or TypeError unless the real class has that property and takes the value."""
    found = next((vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)), None)
    if not isinstance(found, property) or found.fset is None:
        raise AttributeError(f"can't set attribute {name!r} of {owner.__name__!r}")
    [parameters] = overloads(found.fset.__doc__ or "")
    if not matches(parameters, (value,), {}):
        raise TypeError(f"{name}: {value!r} is no {parameters[0].annotation}")


class StandIn:
    """Plays one class of the bindings, `real` of its definition; every access to it from outside is checked."""

    _real: type = object

    def __init_subclass__(cls, real: type | None = None) -> None:
        if real is not None:
            cls._real = real
        lacking = [name for name in vars(cls) if not name.startswith("_") and not hasattr(cls._real, name)]
        assert not lacking, f"{cls._real.__name__} has no {lacking}"

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        owner = type(self)._real
        if not hasattr(owner, name):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r}")
        if not hasattr(type(self), name):
            raise NotImplementedError(f"the double does not play {owner.__name__}.{name}")
        found = object.__getattribute__(self, name)
        return _checked(owner, name, found) if callable(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            owner = type(self)._real
            if not hasattr(owner, name):
                raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r}")
            check_set(owner, name, value)
            if not hasattr(type(self), name):
                raise NotImplementedError(f"the double does not play {owner.__name__}.{name}")
        object.__setattr__(self, name, value)


def _checked(owner: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_call(owner, name, args, kwargs)
        return function(*args, **kwargs)

    return call
