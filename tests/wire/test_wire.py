"""The wire's bytes: golden encodings of every message, and what hostile bytes turn into."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ull import wire
from ull.errors import Busy, Draining, RequestError
from ull.wire import (
    Ack,
    Cancel,
    Choice,
    CloseSession,
    Commit,
    Done,
    Error,
    Failure,
    Fork,
    Generate,
    GrammarUse,
    Health,
    HealthReply,
    Info,
    InfoReply,
    Message,
    OpenSession,
    PromptLogprobs,
    Rollback,
    SessionReply,
    SetLog,
    Speculation,
    Stats,
    StatsReply,
    Timeline,
    Token,
    TokenLogprob,
    Trace,
    TraceReply,
    Truncate,
    Usage,
)

# Frozen: a change here breaks every client in the field.
GOLDEN_REQUESTS = [
    (Generate(id=7, prompt="Hi"), "de0003a474797065a867656e6572617465a2696407a670726f6d7074a24869"),
    (
        Generate(id=1, messages=[Message(role="user", content="x")], max_tokens=2, seed=2**64 - 1),
        "de0005a474797065a867656e6572617465a2696401a86d657373616765739182a4726f6c65a475736572a7636f6e74656e74a178"
        "aa6d61785f746f6b656e7302a473656564cfffffffffffffffff",
    ),
    (
        Generate(id=2, token_ids=[1, 300], stop=["a"], logit_bias={5: -1.5}, logprobs=0, ignore_eos=True, timeout_ms=9),
        "de0008a474797065a867656e6572617465a2696402a9746f6b656e5f6964739201cd012ca473746f7091a161aa6c6f6769745f62696173"
        "8105cbbff8000000000000a86c6f6770726f627300aa69676e6f72655f656f73c3aa74696d656f75745f6d7309",
    ),
    (
        Generate(id=3, prompt="x", speculate="medusa", max_tree=64),
        "de0005a474797065a867656e6572617465a2696403a670726f6d7074a178a973706563756c617465a66d6564757361a86d61785f747265"
        "6540",
    ),
    (
        Generate(id=4, prompt="x", presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.5),
        "de0006a474797065a867656e6572617465a2696404a670726f6d7074a178b070726573656e63655f70656e616c7479cb3fe000000000"
        "0000b16672657175656e63795f70656e616c7479cbbff0000000000000b272657065746974696f6e5f70656e616c7479cb3ff8000000"
        "000000",
    ),
    (
        Generate(id=5, session=1, max_tokens=0, deadline_ms=7, priority="realtime", hold=True),
        "de0007a474797065a867656e6572617465a2696405a773657373696f6e01aa6d61785f746f6b656e7300ab646561646c696e655f6d7307"
        "a87072696f72697479a87265616c74696d65a4686f6c64c3",
    ),
    (
        Generate(id=6, prompt="x", choices=["a", "é"]),
        "de0004a474797065a867656e6572617465a2696406a670726f6d7074a178a763686f6963657392a161a2c3a9",
    ),
    (
        Generate(id=6, prompt="x", json_schema={"type": "object", "x": [1, None]}),
        "de0004a474797065a867656e6572617465a2696406a670726f6d7074a178ab6a736f6e5f736368656d6182a474797065a66f626a6563"
        "74a1789201c0",
    ),
    (
        Generate(id=6, prompt="x", json_schema=False),
        "de0004a474797065a867656e6572617465a2696406a670726f6d7074a178ab6a736f6e5f736368656d61c2",
    ),
    (
        Generate(id=6, prompt="x", regex="a+"),
        "de0004a474797065a867656e6572617465a2696406a670726f6d7074a178a57265676578a2612b",
    ),
    (
        Generate(id=6, prompt="x", lark="start: A", json_object=True),
        "de0005a474797065a867656e6572617465a2696406a670726f6d7074a178a46c61726ba873746172743a2041ab6a736f6e5f6f626a65"
        "6374c3",
    ),
    (
        Generate(id=6, prompt="x", max_tokens=0, prompt_logprobs=True),
        "de0005a474797065a867656e6572617465a2696406a670726f6d7074a178aa6d61785f746f6b656e7300af70726f6d70745f6c6f67707"
        "26f6273c3",
    ),
    (
        Generate(id=6, prompt="x", prompt_logprobs=True, prompt_top_logprobs=5),
        "de0005a474797065a867656e6572617465a2696406a670726f6d7074a178af70726f6d70745f6c6f6770726f6273c3b370726f6d7074"
        "5f746f705f6c6f6770726f627305",
    ),
    (
        OpenSession(id=7, session=2**64 - 1, pin=True),
        "84a474797065ac6f70656e5f73657373696f6ea2696407a773657373696f6ecfffffffffffffffffa370696ec3",
    ),
    (OpenSession(id=7, session=1), "83a474797065ac6f70656e5f73657373696f6ea2696407a773657373696f6e01"),
    (Fork(id=8, session=1, to=2), "84a474797065a4666f726ba2696408a773657373696f6e01a2746f02"),
    (Rollback(id=9, session=1, tokens=5), "84a474797065a8726f6c6c6261636ba2696409a773657373696f6e01a6746f6b656e7305"),
    (
        Truncate(id=10, session=1, characters=40),
        "84a474797065a87472756e63617465a269640aa773657373696f6e01aa6368617261637465727328",
    ),
    (Truncate(id=10, session=1, tokens=3), "84a474797065a87472756e63617465a269640aa773657373696f6e01a6746f6b656e7303"),
    (CloseSession(id=11, session=1), "83a474797065ad636c6f73655f73657373696f6ea269640ba773657373696f6e01"),
    (Commit(id=12, request=5), "83a474797065a6636f6d6d6974a269640ca77265717565737405"),
    (Cancel(id=3), "82a474797065a663616e63656ca2696403"),
    (Health(id=4), "82a474797065a66865616c7468a2696404"),
    (Info(id=5), "82a474797065a4696e666fa2696405"),
    (Stats(id=6), "82a474797065a57374617473a2696406"),
    (Stats(id=6, histograms=True), "83a474797065a57374617473a2696406aa686973746f6772616d73c3"),
    (Trace(id=7, steps=5), "85a474797065a57472616365a2696407a5737465707305a66672616d657300a8726571756573747300"),
    (
        SetLog(id=7, level="debug"),
        "84a474797065a77365745f6c6f67a2696407a56c6576656ca56465627567a770726f6d707473c0",
    ),
]
USAGE = Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=1)
GOLDEN_REPLIES = [
    (
        Token(id=1, index=0, ids=[5], text="é", time_ns=10),
        "86a474797065a5746f6b656ea2696401a5696e64657800a36964739105a474657874a2c3a9a774696d655f6e730a",
    ),
    (
        Token(
            id=1, index=2, ids=[5], text="", time_ns=1, logprobs=[TokenLogprob(token=5, logprob=-0.5, top=[(5, -0.5)])]
        ),
        "87a474797065a5746f6b656ea2696401a5696e64657802a36964739105a474657874a0a774696d655f6e7301a86c6f6770726f6273"
        "9183a5746f6b656e05a76c6f6770726f62cbbfe0000000000000a3746f70919205cbbfe0000000000000",
    ),
    (
        PromptLogprobs(id=1, index=1, logprobs=[-0.5, -1.5]),
        "84a474797065af70726f6d70745f6c6f6770726f6273a2696401a5696e64657801a86c6f6770726f627392cbbfe0000000000000cbbff8"
        "000000000000",
    ),
    (
        PromptLogprobs(id=1, index=1, logprobs=[-0.5, -1.5], top=[[(5, -0.5), (6, -1.0)], [(7, -0.25), (8, -1.0)]]),
        "85a474797065af70726f6d70745f6c6f6770726f6273a2696401a5696e64657801a86c6f6770726f627392cbbfe0000000000000cbbf"
        "f8000000000000a3746f7092929205cbbfe00000000000009206cbbff0000000000000929207cbbfd00000000000009208cbbff00000"
        "00000000",
    ),
    (
        Done(id=1, finish_reason="stop", usage=USAGE, timeline=Timeline(received_ns=1, done_ns=7), seed=9),
        "8aa474797065a4646f6e65a2696401ad66696e6973685f726561736f6ea473746f70a5757361676584ad70726f6d70745f746f6b656e73"
        "03ad6361636865645f746f6b656e7302b1636f6d706c6574696f6e5f746f6b656e7301b2726f6c6c65645f6261636b5f746f6b656e7300"
        "a874696d656c696e6589ab72656365697665645f6e7301ab61646d69747465645f6e7300aa737461727465645f6e7300ac70726566696c"
        "6c65645f6e7300ae66697273745f746f6b656e5f6e7300ad6c6173745f746f6b656e5f6e7300a7646f6e655f6e7307b165787065637465"
        "645f66697273745f6e7300b065787065637465645f646f6e655f6e7300a47365656409a662756e646c65a0a56572726f72c0ab73706563"
        "756c6174696f6e86a6726f756e647300ae647261667465645f746f6b656e7300af61636365707465645f746f6b656e7300b0746f6b656e"
        "735f7065725f726f756e64cb0000000000000000aa62795f6472616674657280b161636365707465645f62795f646570746890a8776172"
        "6e696e677390",
    ),
    (
        Done(
            id=1,
            finish_reason="stop",
            usage=USAGE,
            timeline=Timeline(),
            seed=9,
            bundle="0123456789abcdef" * 4,
            speculation=Speculation(
                rounds=2,
                drafted_tokens=7,
                accepted_tokens=3,
                tokens_per_round=2.5,
                by_drafter={"none": 1, "medusa": 1},
                accepted_by_depth=[1, 1, 1],
            ),
            warnings=["max_token", "messages[1].foo"],
        ),
        "8aa474797065a4646f6e65a2696401ad66696e6973685f726561736f6ea473746f70a5757361676584ad70726f6d70745f746f6b656e73"
        "03ad6361636865645f746f6b656e7302b1636f6d706c6574696f6e5f746f6b656e7301b2726f6c6c65645f6261636b5f746f6b656e7300"
        "a874696d656c696e6589ab72656365697665645f6e7300ab61646d69747465645f6e7300aa737461727465645f6e7300ac70726566696c"
        "6c65645f6e7300ae66697273745f746f6b656e5f6e7300ad6c6173745f746f6b656e5f6e7300a7646f6e655f6e7300b165787065637465"
        "645f66697273745f6e7300b065787065637465645f646f6e655f6e7300a47365656409a662756e646c65d9403031323334353637383961"
        "6263646566303132333435363738396162636465663031323334353637383961626364656630313233343536373839616263646566a565"
        "72726f72c0ab73706563756c6174696f6e86a6726f756e647302ae647261667465645f746f6b656e7307af61636365707465645f746f6b"
        "656e7303b0746f6b656e735f7065725f726f756e64cb4004000000000000aa62795f6472616674657282a46e6f6e6501a66d6564757361"
        "01b161636365707465645f62795f646570746893010101a87761726e696e677392a96d61785f746f6b656eaf6d657373616765735b315d"
        "2e666f6f",
    ),
    (
        Done(
            id=1,
            finish_reason="stop",
            usage=Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=1, scored_tokens=5, choice_tokens=[1, 2]),
            timeline=Timeline(),
            seed=9,
            choice=Choice(index=1, logprobs=[-1.5, -0.5], probabilities=[0.25, 0.75], margin=0.5),
            grammar=GrammarUse(masks=2, forced_tokens=7),
        ),
        "8ca474797065a4646f6e65a2696401ad66696e6973685f726561736f6ea473746f70a5757361676586ad70726f6d70745f746f6b656e"
        "7303ad6361636865645f746f6b656e7302b1636f6d706c6574696f6e5f746f6b656e7301b2726f6c6c65645f6261636b5f746f6b656e"
        "7300ad73636f7265645f746f6b656e7305ad63686f6963655f746f6b656e73920102a874696d656c696e6589ab72656365697665645f"
        "6e7300ab61646d69747465645f6e7300aa737461727465645f6e7300ac70726566696c6c65645f6e7300ae66697273745f746f6b656e"
        "5f6e7300ad6c6173745f746f6b656e5f6e7300a7646f6e655f6e7300b165787065637465645f66697273745f6e7300b0657870656374"
        "65645f646f6e655f6e7300a47365656409a662756e646c65a0a56572726f72c0ab73706563756c6174696f6e86a6726f756e647300ae"
        "647261667465645f746f6b656e7300af61636365707465645f746f6b656e7300b0746f6b656e735f7065725f726f756e64cb00000000"
        "00000000aa62795f6472616674657280b161636365707465645f62795f646570746890a87761726e696e677390a663686f69636584a5"
        "696e64657801a86c6f6770726f627392cbbff8000000000000cbbfe0000000000000ad70726f626162696c697469657392cb3fd00000"
        "00000000cb3fe8000000000000a66d617267696ecb3fe0000000000000a76772616d6d617282a56d61736b7302ad666f726365645f74"
        "6f6b656e7307",
    ),
    (
        Done(id=1, finish_reason="cancelled", usage=USAGE, timeline=Timeline(), seed=9, choice=None),
        "8ba474797065a4646f6e65a2696401ad66696e6973685f726561736f6ea963616e63656c6c6564a5757361676584ad70726f6d70745f"
        "746f6b656e7303ad6361636865645f746f6b656e7302b1636f6d706c6574696f6e5f746f6b656e7301b2726f6c6c65645f6261636b5f"
        "746f6b656e7300a874696d656c696e6589ab72656365697665645f6e7300ab61646d69747465645f6e7300aa737461727465645f6e73"
        "00ac70726566696c6c65645f6e7300ae66697273745f746f6b656e5f6e7300ad6c6173745f746f6b656e5f6e7300a7646f6e655f6e73"
        "00b165787065637465645f66697273745f6e7300b065787065637465645f646f6e655f6e7300a47365656409a662756e646c65a0a565"
        "72726f72c0ab73706563756c6174696f6e86a6726f756e647300ae647261667465645f746f6b656e7300af61636365707465645f746f"
        "6b656e7300b0746f6b656e735f7065725f726f756e64cb0000000000000000aa62795f6472616674657280b161636365707465645f62"
        "795f646570746890a87761726e696e677390a663686f696365c0",
    ),
    (
        Error(id=3, code="busy", message="m", field=None, retry_after_ms=9, queue_length=4, expected_ms=0.5),
        "88a474797065a56572726f72a2696403a4636f6465a462757379a76d657373616765a16da56669656c64c0ae72657472795f6166746572"
        "5f6d7309ac71756575655f6c656e67746804ab65787065637465645f6d73cb3fe0000000000000",
    ),
    (SessionReply(id=1, session=2, tokens=3), "84a474797065a773657373696f6ea2696401a773657373696f6e02a6746f6b656e7303"),
    (
        Error(id=None, code="bad_frame", message="m", field=None),
        "88a474797065a56572726f72a26964c0a4636f6465a96261645f6672616d65a76d657373616765a16da56669656c64c0ae72657472795f"
        "61667465725f6d73c0ac71756575655f6c656e677468c0ab65787065637465645f6d73c0",
    ),
    (Ack(id=1, known=True), "83a474797065a361636ba2696401a56b6e6f776ec3"),
    (
        HealthReply(id=1, status="ok", uptime_ns=2, queue_length=3),
        "85a474797065a66865616c7468a2696401a6737461747573a26f6ba9757074696d655f6e7302ac71756575655f6c656e67746803",
    ),
    (
        InfoReply(id=1, engine={"a": 1}, executor={}, limits={}),
        "85a474797065a4696e666fa2696401a6656e67696e6581a16101a86578656375746f7280a66c696d69747380",
    ),
    (
        TraceReply(
            id=1,
            steps=b"ab",
            next_step=3,
            frames=b"",
            next_frame=0,
            requests=[],
            next_request=0,
            more=False,
            connection=7,
        ),
        "8aa474797065a57472616365a2696401a57374657073c4026162a96e6578745f7374657003a66672616d6573c400aa6e6578745f6672616d65"
        "00a8726571756573747390ac6e6578745f7265717565737400a46d6f7265c2aa636f6e6e656374696f6e07",
    ),
    (
        StatsReply(id=1, requests={}, latency={}, engine={}, io={}),
        "8ba474797065a57374617473a2696401a8726571756573747380a76c6174656e637980a6656e67696e6580a2696f80ab73706563756c61"
        "74696f6e80a36c6f6780a76a6f75726e616c80a77468726561647380aa686973746f6772616d7380",
    ),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN_REQUESTS, ids=lambda value: type(value).__name__)
def test_golden_requests(message: wire.Request, golden: str) -> None:
    assert wire.encode(message).hex() == golden
    assert wire.decode_request(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(("message", "golden"), GOLDEN_REPLIES, ids=lambda value: type(value).__name__)
def test_golden_replies(message: wire.Reply, golden: str) -> None:
    assert wire.encode(message).hex() == golden
    assert wire.decode_reply(bytes.fromhex(golden)) == message


def test_a_done_frame_without_speculation_is_understood() -> None:
    plain = {"type": "done", "id": 1, "finish_reason": "stop", "seed": 9, "timeline": {}}
    usage = {"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 1}
    reply = wire.decode_reply(pack({**plain, "usage": usage}))
    assert reply == Done(id=1, finish_reason="stop", usage=USAGE, timeline=Timeline(), seed=9)


def test_frames_begin_with_the_version() -> None:
    assert wire.encode_frames(Health(id=1)) == [b"ull1", wire.encode(Health(id=1))]


def test_unknown_fields_are_ignored() -> None:
    payload = msgspec.msgpack.encode({"future": [1, {"x": 2}], "type": "health", "id": 3})
    assert wire.decode_request(payload) == Health(id=3)
    reply = msgspec.msgpack.encode({"type": "ack", "id": 3, "known": False, "future": 1})
    assert wire.decode_reply(reply) == Ack(id=3, known=False)


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


# payload -> (code, field, id that could be read)
BAD_REQUESTS = {
    "empty": (b"", "bad_message", None, None),
    "not a map": (pack([1, 2]), "bad_message", None, None),
    "a number": (pack(5), "bad_message", None, None),
    "reserved byte": (b"\xc1", "bad_message", None, None),
    "truncated": (wire.encode(Generate(id=7, prompt="Hi"))[:-1], "bad_message", None, None),
    "trailing": (wire.encode(Cancel(id=7)) + b"\x00", "bad_message", None, None),
    "no type": (pack({"id": 7}), "bad_message", "type", 7),
    "type is a number": (pack({"type": 1, "id": 7}), "bad_message", "type", None),
    "unknown type": (pack({"type": "sing", "id": 7}), "unknown_type", "type", 7),
    "unknown type without id": (pack({"type": "sing"}), "unknown_type", "type", None),
    "no id": (pack({"type": "health"}), "bad_request", "id", None),
    "negative id": (pack({"type": "health", "id": -1}), "bad_request", "id", None),
    "id is text": (pack({"type": "health", "id": "7"}), "bad_request", "id", None),
    "id is a fraction": (pack({"type": "health", "id": 7.5}), "bad_request", "id", None),
    "id is a big list": (pack({"type": "health", "id": [0] * 100_000}), "bad_request", "id", None),
    "wrong type": (pack({"type": "generate", "id": 7, "max_tokens": "many"}), "bad_request", "max_tokens", 7),
    "wrong item type": (pack({"type": "generate", "id": 7, "token_ids": [1, "x"]}), "bad_request", "token_ids", 7),
    "wrong key type": (pack({"type": "generate", "id": 7, "logit_bias": {"x": 1.0}}), "bad_request", "logit_bias", 7),
    "message without role": (
        pack({"type": "generate", "id": 7, "messages": [{"content": "x"}]}),
        "bad_request",
        "messages",
        7,
    ),
    "a drafter by number": (pack({"type": "generate", "id": 7, "speculate": 1}), "bad_request", "speculate", 7),
    "a tree of text": (pack({"type": "generate", "id": 7, "max_tree": "big"}), "bad_request", "max_tree", 7),
    "too many stops": (pack({"type": "generate", "id": 7, "stop": [""] * 100_000}), "bad_request", "stop", 7),
    "a field is missing": (pack({"type": "rollback", "id": 7, "tokens": 1}), "bad_request", "session", 7),
    "not UTF-8": (b"\x83\xa4type\xa8generate\xa2id\x07\xa6prompt\xa2\xff\xfe", "bad_message", None, 7),
    "deep nesting": (b"\x83\xa4type\xa6health\xa2id\x07\xa1x" + b"\x91" * 200_000 + b"\xc0", "bad_message", None, None),
    "deep nesting as a whole": (b"\x91" * 200_000 + b"\xc0", "bad_message", None, None),
    "deep nesting in a field": (
        b"\x83\xa4type\xa8generate\xa2id\x07\xa8messages" + b"\x91" * 64 + b"\xc0",
        "bad_request",
        "messages",
        7,
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests(name: str) -> None:
    payload, code, field, request_id = BAD_REQUESTS[name]
    with pytest.raises(wire.WireError) as caught:
        wire.decode_request(payload)
    assert (caught.value.code, caught.value.field, caught.value.request_id) == (code, field, request_id)
    assert caught.value.message


def test_sixty_four_levels_in_an_unknown_field_do_no_harm() -> None:
    payload = b"\x83\xa4type\xa6health\xa2id\x07\xa1x" + b"\x91" * 64 + b"\xc0"
    assert wire.decode_request(payload) == Health(id=7)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else(payload: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_reply):
        try:
            decode(payload)
        except wire.WireError as error:
            assert error.code in {"bad_message", "bad_request", "unknown_type"}


@given(st.sampled_from([golden for _, golden in GOLDEN_REQUESTS]), st.integers(min_value=0), st.integers(0, 255))
def test_flipped_bytes_raise_nothing_else(golden: str, place: int, value: int) -> None:
    payload = bytearray.fromhex(golden)
    payload[place % len(payload)] = value
    try:
        wire.decode_request(bytes(payload))
    except wire.WireError as error:
        assert error.message


def test_lone_surrogates_cannot_be_sent() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        wire.encode(Generate(id=1, prompt="\ud800"))


def test_oversized_numbers_cannot_be_sent() -> None:
    with pytest.raises(RequestError, match="64 bits"):
        wire.encode(Generate(id=1, prompt="x", seed=2**64))


def test_errors_become_their_exceptions() -> None:
    assert type(wire.error_of(Error(id=1, code="busy", message="full"))) is Busy
    assert type(wire.error_of(Error(id=1, code="draining", message="bye"))) is Draining
    other = wire.error_of(Error(id=1, code="too_long", message="by 3", field="prompt"))
    assert (type(other), other.code, other.message, other.field) == (RequestError, "too_long", "by 3", "prompt")


def test_the_record_of_an_ended_request() -> None:
    record = wire.Ended(
        identity=b"\x00abc",
        id=4,
        finish_reason="error",
        usage=USAGE,
        timeline=Timeline(received_ns=1),
        seed=2**64 - 1,
        error=Failure(code="internal", message="m"),
        speculation=Speculation(rounds=1, tokens_per_round=1.0, by_drafter={"none": 1}),
        delivered=False,
        client="gone",
    )
    assert wire.decode_ended(msgspec.msgpack.encode(record)) == record
    with pytest.raises(wire.WireError):
        wire.decode_ended(msgspec.msgpack.encode({"id": 1}))
