"""Messages as the encoders of other languages write them, read into the exact structs of `ull.wire`.

JavaScript sends nil for `undefined`, and objects whose keys are texts; where a language has one kind of number, an
encoder may write 5.0 for 5. A field that holds a list of texts or ids may hold one alone where its struct says so.
"""

from __future__ import annotations

import functools
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, UnsetType

ONE_FOR_LIST: Final = {"one_for_list": True}  # the `extra` of a list's Meta whose field may hold one item alone
_MAX_EXACT: Final = 2**53  # beyond it neighbouring integers are the same float
_MAX_MEMBERS: Final = 1024  # of one map that is searched for unknown fields
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Members = Annotated[dict[str, msgspec.Raw], Meta(max_length=_MAX_MEMBERS)]
_members_decoder = msgspec.msgpack.Decoder(_Members)
_items_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Coercion(Generic[_Struct]):
    """Reads maps into `struct`, whose fields may be nil; the first `most_unknown` that it lacks are told by name."""

    def __init__(self, struct: type[_Struct], most_unknown: int) -> None:
        self._struct = struct
        self._most_unknown = most_unknown
        self._fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
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
        return _narrow_struct(wide, self._struct, "$"), self._unknown_fields(payload, self._most_unknown)

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
        names = [name for name in members if name not in self._fields and name != "type"][:most]
        for field, part in self._parts.items():
            for index, item in enumerate(_items(members.get(field))):
                if len(names) == most:
                    return names
                names += [f"{field}[{index}].{name}" for name in part._unknown_fields(item, most - len(names))]
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


def _narrow_struct(wide: msgspec.Struct, struct: type[_Struct], path: str) -> _Struct:
    values = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(wide, field.name)
        if value is not None:
            values[field.name] = _narrow(value, field.type, f"{path}.{field.name}")
    return struct(**values)


def _narrow(value: Any, kind: Any, path: str) -> Any:
    """`value`, which is of the type _wide(kind), as one of `kind`. Raises msgspec.ValidationError."""
    if kind is int:
        return _integer(value, path) if type(value) is float else value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        alone = (arguments[1].extra or {}) == ONE_FOR_LIST and not isinstance(value, list)
        return _narrow([value] if alone else value, arguments[0], path)
    if origin in (Union, UnionType):
        return value if value is None else _narrow(value, _member_of(value, arguments), path)
    if origin is list:
        return value if arguments[0] is str else [_narrow(item, arguments[0], path) for item in value]
    if origin is dict and arguments[0] is int:
        return _narrow_map(value, arguments[1], path)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _narrow_struct(value, kind, path)
    return value


def _member_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Which type of a union `value`, which was read as the union's wide form, is to have."""
    present = [kind for kind in kinds if kind not in (UnsetType, NoneType)]
    if len(present) == 1 or (type(value) is float and float not in present):
        return present[0] if len(present) == 1 else int
    if isinstance(value, list | dict):
        return next(kind for kind in present if isinstance(value, _container(kind)))
    if isinstance(value, msgspec.Struct):
        return next(kind for kind in present if isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return type(value)


def _container(kind: Any) -> type:
    """`list` or `dict` of a type that is one, whatever its items."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    found = get_origin(kind) or kind
    return found if isinstance(found, type) else object


def _narrow_map(members: dict[int | float | str, Any], kind: Any, path: str) -> dict[int, Any]:
    narrow: dict[int, Any] = {}
    for key, value in members.items():
        number = _integer(key, path)
        if number in narrow:
            _refuse(f"holds the key {number} twice", path)
        narrow[number] = _narrow(value, kind, path)
    return narrow


def _integer(value: float | str, path: str) -> int:
    if isinstance(value, str):
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            _refuse(f"has the key {value[:40]!r}, which is no integer", path)
    elif isinstance(value, float):
        if not value.is_integer():
            _refuse(f"must be an integer, not {value}", path)
        if abs(value) > _MAX_EXACT:
            _refuse(f"is {value:.0f} as a float, which is exact up to 2^53 only; send an integer (BigInt)", path)
    return int(value)


def _refuse(reason: str, path: str) -> NoReturn:
    raise msgspec.ValidationError(f"{path.removeprefix('$.')} {reason} - at `{path}`")


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
