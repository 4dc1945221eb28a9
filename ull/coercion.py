"""Messages as the encoders of other languages write them, read into the exact structs of `ull.wire`.

JavaScript sends nil for `undefined`, and objects whose keys are texts; where a language has one kind of number, an
encoder may write 5.0 for 5. A field that holds a list of texts or ids may hold one alone where its struct says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, UnsetType

ONE_FOR_LIST: Final = {"one_for_list": True}  # the `extra` of a list's Meta whose field may hold one item alone
_MAX_EXACT: Final = 2**53  # beyond it neighbouring integers are the same float
_MAX_MEMBERS: Final = 1024  # of one map that is searched for unknown fields
_INTEGER = re.compile("-?[0-9]{1,20}")
_Narrow = Callable[[Any], Any]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Members = Annotated[dict[str, msgspec.Raw], Meta(max_length=_MAX_MEMBERS)]
_members_decoder = msgspec.msgpack.Decoder(_Members)
_items_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Coercion(Generic[_Struct]):
    """Reads maps into `struct`, whose fields may be nil; the first `most_unknown` that it lacks are told by name."""

    def __init__(self, struct: type[_Struct], most_unknown: int) -> None:
        self._narrow = _narrow_struct(struct)
        self._most_unknown = most_unknown
        self._fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
        self._known = {*self._fields, "type"} if struct.__struct_config__.tag else set(self._fields)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_wide_struct(struct))
        self._parts = {
            name: Coercion(part, most_unknown)
            for name, field in self._fields.items()
            if (part := _struct_of_items(field.type))
        }

    def decode(self, payload: bytes | memoryview) -> tuple[_Struct, list[str]]:
        """The message, and the paths of its unknown fields, as in `messages[3].color`.

        Raises what a msgspec decoder raises; ValidationError also for a map of more than 1024 members.
        """
        try:
            wide = self._decoder.decode(payload)
        except msgspec.ValidationError as error:  # its text names the wide types
            text = str(error).replace("int | float | str", "int").replace("int | float", "int")
            raise msgspec.ValidationError(text) from error
        try:
            struct: _Struct = self._narrow(wide)
        except _NotExact as error:
            raise msgspec.ValidationError(f"{error.field} {error.reason} - at `$.{error.field}`") from error
        return struct, self._unknown_fields(payload, self._most_unknown)

    def known_fields(self, path: str) -> list[str]:
        """What may stand where `path`, an unknown field, was found; paths like it."""
        field, inner, _ = path.partition("].")
        part = self._parts.get(field.partition("[")[0]) if inner else None
        return list(self._fields) if part is None else [f"{field}].{name}" for name in part._fields]

    def _unknown_fields(self, payload: bytes | memoryview | msgspec.Raw, most: int) -> list[str]:
        try:
            members = _members_decoder.decode(payload)
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"a map has more than {_MAX_MEMBERS} members") from error
        unknown = members.keys() - self._known
        names = [name for name in members if name in unknown][:most] if unknown else []
        for field, part in self._parts.items():
            for index, item in enumerate(_items(members.get(field))):
                if len(names) == most:
                    return names
                if inner := part._unknown_fields(item, most - len(names)):
                    names += [f"{field}[{index}].{name}" for name in inner]
        return names


@functools.cache
def _wide_struct(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct that takes whatever may be narrowed to `struct`; None stands for a field's default."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(struct):
        if field.required:
            fields.append((field.name, _wide(field.type)))
        else:
            fields.append((field.name, _wide(field.type) | None, None))
    tag = struct.__struct_config__.tag
    return msgspec.defstruct(f"Wide{struct.__name__}", fields, tag=tag, kw_only=True)


def _wide(kind: Any) -> Any:
    """The type of everything that may be narrowed to `kind`."""
    if kind is int:
        return int | float
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        extra = arguments[1].extra or {}
        wide: Any = Annotated[_wide(arguments[0]), arguments[1]]
        return Union[wide, _wide(get_args(arguments[0])[0])] if extra == ONE_FOR_LIST else wide  # noqa: UP007
    if origin in (Union, UnionType):
        return Union[tuple(_wide(one) for one in arguments if one is not UnsetType)]  # noqa: UP007
    if origin is list:
        item: Any = _wide(arguments[0])
        return list[item]
    if origin is dict:
        key: Any = int | float | str if arguments[0] is int else arguments[0]
        value: Any = _wide(arguments[1])
        return dict[key, value]
    return _wide_struct(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else kind


@functools.cache
def _narrow_struct(struct: type[msgspec.Struct]) -> _Narrow:
    """What makes a `struct` of its wide form. Raises _NotExact."""
    names = [field.name for field in msgspec.structs.fields(struct)]
    narrows = {field.name: narrow for field in msgspec.structs.fields(struct) if (narrow := _narrow(field.type))}

    def narrow_struct(wide: msgspec.Struct) -> msgspec.Struct:
        values = {name: value for name in names if (value := getattr(wide, name)) is not None}
        for name, narrow in narrows.items():
            if name in values:
                try:
                    values[name] = narrow(values[name])
                except _NotExact as error:
                    raise _NotExact(error.reason, name) from None
        return struct(**values)

    return narrow_struct


def _narrow(kind: Any) -> _Narrow | None:
    """What makes a value of `kind` of one of the type _wide(kind); None where they are the same."""
    if kind is int:
        return _integer
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        narrow = _narrow(arguments[0])
        return _narrow_one_or_list(narrow) if (arguments[1].extra or {}) == ONE_FOR_LIST else narrow
    if origin in (Union, UnionType):
        return _narrow_union(arguments)
    if origin is list:
        return _narrow_list(arguments[0])
    if origin is dict:
        return _narrow_map(arguments[1]) if arguments[0] is int else None
    return _narrow_struct(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _narrow_one_or_list(narrow: _Narrow | None) -> _Narrow:
    def one_or_list(value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        return items if narrow is None else narrow(items)

    return one_or_list


def _narrow_list(kind: Any) -> _Narrow | None:
    narrow = _narrow(kind)
    if kind is int:  # of which there may be very many
        return lambda items: [_integer(item) for item in items] if float in set(map(type, items)) else items
    return None if narrow is None else lambda items: [narrow(item) for item in items]


def _narrow_map(kind: Any) -> _Narrow:
    narrow = _narrow(kind)

    def narrow_map(members: dict[int | float | str, Any]) -> dict[int, Any]:
        result = {_integer(key): value if narrow is None else narrow(value) for key, value in members.items()}
        if len(result) < len(members):
            raise _NotExact("holds a key twice, as a text and as an integer")
        return result

    return narrow_map


def _narrow_union(kinds: tuple[Any, ...]) -> _Narrow | None:
    """Which of `kinds` a value was read as decides how it is narrowed."""
    present = [kind for kind in kinds if kind not in (UnsetType, NoneType)]
    narrows = {_read_as(kind): narrow for kind in present if (narrow := _narrow(kind))}
    if len(present) == 1 or not narrows:
        return next(iter(narrows.values()), None)
    if float in present:
        narrows.pop(float, None)

    def narrow_union(value: Any) -> Any:
        narrow = narrows.get(type(value))
        return value if narrow is None else narrow(value)

    return narrow_union


def _read_as(kind: Any) -> type:
    """The type of what is read for `kind` and may need narrowing."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if kind is int:
        return float
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _wide_struct(kind)
    found: type = get_origin(kind) or kind
    return found


def _integer(value: float | str) -> int:
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value):
            raise _NotExact(f"has the key {value[:40]!r}, which is no integer")
    elif isinstance(value, float):
        if not value.is_integer():
            raise _NotExact(f"must be an integer, not {value}")
        if abs(value) > _MAX_EXACT:
            raise _NotExact(f"is {value:.0f} as a float, which is exact up to 2^53 only; send an integer (BigInt)")
    return int(value)


class _NotExact(Exception):
    """A value that the exact type does not have, and the field that holds it."""

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field


def _items(value: msgspec.Raw | None) -> list[msgspec.Raw]:
    """The undecoded items of an array; none of anything else."""
    try:
        return [] if value is None else _items_decoder.decode(value)
    except msgspec.ValidationError:
        return []


def _struct_of_items(kind: Any) -> type[msgspec.Struct] | None:
    """The struct of which `kind` is a list, if it is one."""
    arguments = get_args(kind)
    if get_origin(kind) is list:
        item = arguments[0]
        return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None
    return next((found for one in arguments if (found := _struct_of_items(one))), None)
