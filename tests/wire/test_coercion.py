"""Messages as other languages' encoders write them: what is taken for what, and what is named or refused."""

from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Meta, UnsetType

from ull import wire
from ull.coercion import ONE_FOR_LIST, Coercion
from ull.wire import Detokenize, Generate, Health, Message, Tokenize

STRUCTS = {"generate": Generate, "tokenize": Tokenize, "detokenize": Detokenize, "cancel": wire.Cancel} | {
    "health": Health,
    "info": wire.Info,
    "stats": wire.Stats,
}


def pack(kind: str, **fields: object) -> bytes:
    return msgspec.msgpack.encode({"type": kind, "id": 7, **fields})


def read(**fields: object) -> Generate:
    request = wire.decode_request(pack("generate", **fields))
    assert isinstance(request, Generate)
    return request


def refusal(payload: bytes) -> wire.WireError:
    with pytest.raises(wire.WireError) as caught:
        wire.decode_request(payload)
    return caught.value


@pytest.mark.parametrize("kind", STRUCTS)
def test_nil_stands_for_the_default_of_every_field(kind: str) -> None:
    given = {"token_ids": [1]} if kind == "detokenize" else {}
    fields = {field.name: None for field in msgspec.structs.fields(STRUCTS[kind]) if not field.required}
    request, warnings = wire.read_request(pack(kind, **(fields | given)))
    assert request == wire.decode_request(pack(kind, **given))
    assert warnings == []


def test_integral_floats_are_integers() -> None:
    request = read(
        id=7.0,
        token_ids=[1.0, 2],
        max_tokens=5.0,
        stop_ids=[3.0],
        seed=float(2**53),
        logit_bias={4.0: 1},
        temperature=1,
    )
    expected = Generate(
        id=7, token_ids=[1, 2], max_tokens=5, stop_ids=[3], seed=2**53, logit_bias={4: 1.0}, temperature=1.0
    )
    assert request == expected
    numbers = [request.id, request.max_tokens, request.seed, *(request.token_ids or []), *request.stop_ids]
    assert {type(number) for number in (*numbers, *request.logit_bias)} == {int}
    assert wire.decode_request(pack("health", request=9.0)) == Health(id=7, request=9)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"max_tokens": 5.5}, "max_tokens", "must be an integer, not 5.5"),
        ({"max_tokens": float("nan")}, "max_tokens", "must be an integer"),
        ({"max_tokens": float("inf")}, "max_tokens", "must be an integer"),
        ({"seed": 7370356818739569000.0}, "seed", "exact up to 2^53"),
        ({"token_ids": [1, 2.5]}, "token_ids", "must be an integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x', which is no integer"),
        ({"logit_bias": {"1e3": 1}}, "logit_bias", "no integer"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "no integer"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "no integer"),
        ({"logit_bias": {"7": 1, 7: 2}}, "logit_bias", "holds a key twice"),
        ({"max_tokens": "5"}, "max_tokens", "Expected `int | null`, got `str`"),
        ({"ignore_eos": 1}, "ignore_eos", "Expected `bool | null`"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages", "got `None`"),
        ({"messages": [None]}, "messages", "got `None`"),
    ],
)
def test_what_is_no_integer_is_refused_by_name(fields: dict[str, Any], field: str, says: str) -> None:
    error = refusal(pack("generate", **fields))
    assert (error.code, error.field, error.request_id) == ("bad_request", field, 7)
    assert says in error.message


def test_keys_of_integers_may_be_texts() -> None:
    assert read(prompt="x", logit_bias={"77": 5, "0": -1.5}).logit_bias == {77: 5.0, 0: -1.5}


def test_one_stop_may_stand_alone() -> None:
    request = read(prompt="x", stop="\n", stop_ids=5)
    assert (request.stop, request.stop_ids) == (["\n"], [5])
    assert refusal(pack("generate", stop=5)).field == "stop"
    assert refusal(pack("generate", token_ids=5)).field == "token_ids"


def test_unknown_fields_are_told_by_name() -> None:
    messages = [{"role": "user", "content": "x"}] * 3 + [{"role": "user", "content": "x", "foo": 1}]
    request, warnings = wire.read_request(pack("generate", max_token=2, messages=messages, stop="a"))
    assert request == Generate(id=7, messages=[Message(role="user", content="x")] * 4, stop=["a"])
    assert warnings == ["max_token", "messages[3].foo"]
    _, warnings = wire.read_request(pack("generate", messages=[{"role": "user", "content": "x", "type": "y"}]))
    assert warnings == ["messages[0].type"]
    assert wire.read_request(pack("health", foo={"deep": [1]})) == (Health(id=7), ["foo"])


def test_warnings_are_bounded() -> None:
    names = [f"{'é' * 40}{index}" for index in range(12)]
    messages = [{"role": "user", "content": "x", "foo": 1}] * 20
    _, warnings = wire.read_request(pack("generate", messages=messages, **dict.fromkeys(names, 1)))
    assert warnings == ["é" * 32] * wire.MAX_WARNINGS
    assert {len(name.encode()) for name in warnings} == {wire.MAX_WARNING_BYTES}
    _, warnings = wire.read_request(pack("generate", messages=messages, foo=1))
    assert warnings == ["foo", *(f"messages[{index}].foo" for index in range(wire.MAX_WARNINGS - 1))]


def test_a_strict_request_refuses_unknown_fields_and_names_the_nearest() -> None:
    error = refusal(pack("generate", strict=True, prompt="x", max_token=2))
    assert (error.code, error.field, error.request_id) == ("bad_request", "max_token", 7)
    assert error.message == "max_token is no field of this message; did you mean max_tokens?"
    messages = [{"role": "user", "content": "x", "contents": "y"}]
    error = refusal(pack("tokenize", strict=True, messages=messages))
    assert error.field == "messages[0].contents"
    assert error.message.endswith("did you mean messages[0].content?")
    error = refusal(pack("detokenize", strict=True, token_ids=[1], zzzzzz=1))
    assert error.message == "zzzzzz is no field of this message"
    assert read(strict=True, prompt="x", max_tokens=2.0).max_tokens == 2
    assert read(strict=None, prompt="x", max_token=2).strict is False


def test_a_message_of_thousands_of_fields_is_refused() -> None:
    error = refusal(pack("generate", **{f"x{index}": 1 for index in range(2000)}))
    assert (error.code, error.message) == ("bad_message", "a map has more than 1024 members")


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-5, 2**40) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*(field.name for field in msgspec.structs.fields(Generate) if field.name != "id"), "foo"])


@given(st.dictionaries(NAMES, JSON_LIKE, max_size=4))
def test_any_value_in_any_field_is_taken_exactly_or_refused(fields: dict[str, Any]) -> None:
    try:
        request, warnings = wire.read_request(pack("generate", **fields))
    except wire.WireError as error:
        assert error.code == "bad_request" and error.field in fields
    else:
        assert warnings == ["foo"] * ("foo" in fields)
        assert wire.decode_request(wire.encode(request)) == request  # every value is of the struct's own type


class Piece(msgspec.Struct, kw_only=True):
    size: int = 0


class Several(msgspec.Struct, tag="several", kw_only=True):
    """Unions as a message may grow them."""

    content: str | list[Piece] | None = None
    number: int | str | UnsetType = UNSET
    sizes: Annotated[list[int], Meta(extra=ONE_FOR_LIST)] | bool | None = None
    any: dict[str, Any] | None = None


def test_unions_of_several_types() -> None:
    def several(**fields: object) -> tuple[Several, list[str]]:
        return Coercion(Several, 4).decode(pack("several", **fields))

    assert several(content="x", number=5.0)[0] == Several(content="x", number=5)
    request, unknown = several(
        content=[{"size": 2.0}, {"size": None, "foo": 1}], number="5", sizes=[3.0], any={"a": 1.0}
    )
    assert request == Several(content=[Piece(size=2), Piece()], number="5", sizes=[3], any={"a": 1.0})
    assert unknown == ["id", "content[1].foo"]
    assert several(sizes=True)[0].sizes is True
