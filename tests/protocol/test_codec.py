"""What a frame means and how answers look: JSON-RPC 2.0 and PROTOCOL.md §1."""

import base64
import contextlib
import enum
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recapd.protocol import errors
from recapd.protocol.codec import (
    NULL,
    Invalid,
    Request,
    Unencodable,
    decode_frame,
    decode_params,
    encode_batch,
    encode_error,
    encode_notification,
    encode_result,
    request_key,
)
from recapd.protocol.errors import InvalidParams

PING = b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping"}'


def only(frame: bytes, **limits: int) -> Request | Invalid:
    decoded = decode_frame(frame, **limits)
    assert not isinstance(decoded, list)
    return decoded


def request(frame: bytes, **limits: int) -> Request:
    decoded = only(frame, **limits)
    assert isinstance(decoded, Request), decoded
    return decoded


def reason(frame: bytes, **limits: int) -> tuple[bytes | None, str]:
    """The id and the reason of the error that answers this frame."""
    decoded = only(frame, **limits)
    assert isinstance(decoded, Invalid), decoded
    return decoded.id, decoded.error.reason


def with_params(params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":7,"method":"m","params":%b}' % params


def test_a_request_comes_out_with_the_bytes_of_its_id_and_params() -> None:
    """PROTOCOL.md §1, values: big integers, `1.0`, escapes, unknown fields, key order, spaces."""
    params = b'{"b": 1.0, "a":12345678901234567890123, "c":"\\u00e9\\/", "b":-0.0, "d":1e999}'
    decoded = request(b'\r\n { "params" :%b, "id": 7 , "method":"m","jsonrpc":"2.0"}\t' % params)
    assert decoded == Request(id=b"7", key=b"7", method="m", params=params)


@pytest.mark.parametrize(
    "id",
    [
        b"0",
        b"-1",
        b"12345678901234567890123",
        b'""',
        b'"a"',
        b'"\\u0061\\"\\n"',
        '"\U0001f600 \u2028"'.encode(),
        b'"\\ud83d\\ude00"',
        b"9" * 5000,
    ],
)
def test_an_id_is_given_back_exactly(id: bytes) -> None:
    """PROTOCOL.md §1, request id; JSON-RPC 2.0, section 5."""
    assert request(b'{"jsonrpc":"2.0","id":%b,"method":"m"}' % id).id == id
    assert reason(b'{"jsonrpc":"2.0","id":%b}' % id) == (id, "invalid_request")


@pytest.mark.parametrize(
    "id", [b"null", b"1.0", b"1e3", b"-0.0", b"true", b"false", b"[]", b"[1]", b"{}"]
)
def test_an_id_of_another_kind_is_answered_with_id_null(id: bytes) -> None:
    """PROTOCOL.md §1; vladcalin/gemstone#10: a member `id`, even null, makes no notification."""
    for rest in (b'"method":"m"', b'"method":"m","params":[]', b'"method":1'):
        frame = b'{"jsonrpc":"2.0","id":%b,%b}' % (id, rest)
        assert reason(frame) == (NULL, "invalid_request")


def test_a_request_without_id_is_a_notification() -> None:
    """JSON-RPC 2.0, section 4.1."""
    decoded = request(b'{"jsonrpc":"2.0","method":"m","params":{"a":1}}')
    assert decoded == Request(id=None, key=None, method="m", params=b'{"a":1}')


def test_absent_params_are_an_empty_object() -> None:
    """JSON-RPC 2.0, section 4: params may be omitted."""
    assert request(PING).params == b"{}"


@pytest.mark.parametrize("params", [b"[]", b"[1]", b"null", b'"a"', b"1", b"true"])
def test_params_of_another_kind_are_refused_by_name(params: bytes) -> None:
    """PROTOCOL.md §1: by name (an object); modelcontextprotocol/python-sdk#820."""
    decoded = only(with_params(params))
    assert isinstance(decoded, Invalid)
    assert decoded.id == b"7"
    assert decoded.error.to_wire()["code"] == -32602
    assert decoded.error.data["errors"] == [{"path": "$.params", "expected": "object"}]


def test_a_notification_with_bad_params_is_left_unanswered() -> None:
    """PROTOCOL.md §1: never answered, not even with an error; JSON-RPC 2.0, section 4.1."""
    frame = b'{"jsonrpc":"2.0","method":"m","params":[1]}'
    assert reason(frame) == (None, "invalid_params")


@pytest.mark.parametrize(
    ("frame", "id"),
    [
        (b"1", NULL),
        (b'"text"', NULL),
        (b"null", NULL),
        (b"{}", NULL),
        (b'{"foo":"boo"}', NULL),
        (b'{"jsonrpc":"2.0","method":1,"params":"bar"}', NULL),
        (b'{"jsonrpc":"2.0","method":null,"id":1}', b"1"),
        (b'{"jsonrpc":"2.0","id":1}', b"1"),
        (b'{"method":"m","id":1}', b"1"),
        (b'{"jsonrpc":"1.0","method":"m","id":"a"}', b'"a"'),
        (b'{"jsonrpc":"2","method":"m","id":1}', b"1"),
        (b'{"jsonrpc":2.0,"method":"m","id":1}', b"1"),
        (b'{"jsonrpc":null,"method":"m","id":1}', b"1"),
        (b'{"jsonrpc":["2.0"],"method":"m","id":1}', b"1"),
        (b'{"JSONRPC":"2.0","method":"m","id":1}', b"1"),
        (b'{"jsonrpc":"2.0","Method":"m","id":1}', b"1"),
        (b'{"jsonrpc":"2.0","result":19,"id":1}', b"1"),
        (b'{"jsonrpc":"2.0","error":{"code":1,"message":""},"id":null}', NULL),
    ],
)
def test_what_is_json_but_no_request_is_answered_with_the_id_if_there_is_one(
    frame: bytes, id: bytes
) -> None:
    """JSON-RPC 2.0, sections 4, 5 and 7."""
    assert reason(frame) == (id, "invalid_request")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b" ",
        b"{",
        b'{"jsonrpc":"2.0","method":"m","id":1',
        b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]',
        b"[1,2",
        b"[1,]",
        b"1 2",
        PING + PING,
        PING[:-1] + b",}",
        PING[:-1] + b',"x":NaN}',
        PING[:-1] + b',"x":-Infinity}',
        PING[:-1] + b',"x":01}',
        PING[:-1] + b",'x':1}",
        PING[:-1] + b',"x":"\n"}',
        PING[:-1] + b',"x":"\\x"}',
        PING[:-1] + b"}//",
        PING + b"\0",
        b'{"jsonrpc":"1.0", nonsense',
        b'{"jsonrpc":"2.0","id":null,"method":"m",,}',
        b"[%b,nonsense]" % PING,
        b"\xef\xbb\xbf" + PING,
        PING.decode().encode("utf-16"),
        PING.decode().encode("utf-16-be"),
    ],
)
def test_what_is_not_json_is_a_parse_error_with_id_null(frame: bytes) -> None:
    """JSON-RPC 2.0, section 5.1; RFC 8259; modelcontextprotocol/servers#4206."""
    assert reason(frame) == (NULL, "parse_error")


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"\x80",
        b"\xc3",
        b"\xc0\xaf",
        b"\xe2\x80",
        b"\xf5\x80\x80\x80",
        b"\xed\xa0\x80",
        b"\xed\xa0\xbd\xed\xb8\x80",
    ],
)
def test_bytes_that_are_not_utf8_are_a_parse_error_wherever_they_stand(text: bytes) -> None:
    """PROTOCOL.md §1, values; RFC 8259, section 8.1; modelcontextprotocol/python-sdk#2328."""
    for padding in (b"", b"x" * 300_000):
        for frame in (
            with_params(b'{"a":"%b%b"}' % (padding, text)),
            with_params(b'{"%b%b":1}' % (padding, text)),
            b'{"jsonrpc":"2.0","id":"%b%b","method":"m"}' % (padding, text),
            b'{"jsonrpc":"2.0","id":1,"method":"%b%b"}' % (padding, text),
            b'{"jsonrpc":"2.0","id":1,"method":"m","%b%b":1}' % (padding, text),
            b"[%b]" % with_params(b'{"a":"%b%b"}' % (padding, text)),
        ):
            assert reason(frame) == (NULL, "parse_error")


def test_characters_of_any_length_pass_wherever_they_stand() -> None:
    """PROTOCOL.md §1, values: long texts are looked at piece by piece, also inside a character."""
    for offset in range(4):
        text = "x" * offset + "aß汉\U0001f600" * 60_000
        params = json.dumps({"a": text}, ensure_ascii=False).encode()
        assert request(with_params(params)).params == params


@pytest.mark.parametrize("text", [b"\\ud83d", b"\\ude00", b"\\ud83dx", b"\\ude00\\ud83d"])
def test_half_a_surrogate_pair_is_refused(text: bytes) -> None:
    """PROTOCOL.md §1, values; anthropics/claude-code#56064."""
    for params in (b'{"a":"%b"}' % text, b'{"%b":1}' % text):
        assert reason(with_params(params)) == (NULL, "parse_error")


def test_the_last_of_equal_members_counts() -> None:
    """RFC 8259, section 4, leaves it open; the module says which."""
    frame = b'{"jsonrpc":"2.0","jsonrpc":"2.0","id":1,"id":2,"method":"a","method":"b"}'
    assert request(frame) == Request(id=b"2", key=b"2", method="b", params=b"{}")


def test_unknown_members_of_the_envelope_are_ignored() -> None:
    """JSON-RPC 2.0 does not forbid them, and extensions use them."""
    assert request(PING[:-1] + b',"trace":{"a":[1]}}') == request(PING)


# Batches


def test_each_entry_of_a_batch_is_judged_on_its_own() -> None:
    """JSON-RPC 2.0, section 7, "rpc call Batch"."""
    notification = b'{"jsonrpc":"2.0","method":"m"}'
    batch = decode_frame(b' [%b, 1,%b , {"foo":"boo"},[],[%b]]' % (PING, notification, PING))
    assert isinstance(batch, list)
    good, number, silent, object_, empty, nested = batch
    assert good == request(PING)
    assert silent == request(notification)
    for entry in (number, object_, empty, nested):
        assert isinstance(entry, Invalid)
        assert (entry.id, entry.error.reason) == (NULL, "invalid_request")


def test_three_numbers_get_three_errors() -> None:
    """JSON-RPC 2.0, section 7, "rpc call with invalid Batch"."""
    batch = decode_frame(b"[1,2,3]")
    assert isinstance(batch, list)
    assert [entry.error.reason for entry in batch if isinstance(entry, Invalid)] == [
        "invalid_request"
    ] * 3


@pytest.mark.parametrize("frame", [b"[]", b" [ ] "])
def test_an_empty_batch_is_one_invalid_request(frame: bytes) -> None:
    """JSON-RPC 2.0, section 6."""
    assert reason(frame) == (NULL, "invalid_request")


def test_a_batch_may_have_as_many_entries_as_announced_and_not_one_more() -> None:
    """PROTOCOL.md §1, limits: batch 128."""
    batch = decode_frame(b"[%b]" % b",".join([PING] * 128))
    assert batch == [request(PING)] * 128
    assert reason(b"[%b]" % b",".join([PING] * 129)) == (NULL, "batch_too_large")
    assert reason(b"[1,2]", batch_max=1) == (NULL, "batch_too_large")
    assert isinstance(decode_frame(b"[1]", batch_max=1), list)


def test_a_batch_that_is_too_large_must_be_json_all_the_same() -> None:
    """JSON-RPC 2.0, section 7: an array that is no JSON is one parse error."""
    assert reason(b"[%bx]" % (b"1," * 1000)) == (NULL, "parse_error")


# Nesting


def nested(depth: int, *, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    """Params with as many containers above each other."""
    return b'{"a":%b0%b}' % (opening * (depth - 1), closing * (depth - 1))


PADDINGS = {
    "short": b"",
    "long": b"x" * 20_000,
    "brackets": b"[[{" * 10_000,
    "closing": b"]]}" * 10_000,
    "escapes": b'\\"[\\\\\\"{\\n\\t\\/\\\\' * 2_000,
    "quotes": b'\\\\","b":"",":[":"\\\\' * 2_000,
}


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS.keys())
@pytest.mark.parametrize(
    ("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[ {"]":', b"} ]")]
)
def test_nesting_ends_at_the_announced_depth(
    opening: bytes, closing: bytes, padding: bytes
) -> None:
    """PROTOCOL.md §1, limits: depth 128, counted from the frame itself; text is not counted."""
    levels = 2 if opening.startswith(b"[ ") else 1

    def frame(depth: int) -> bytes:
        inner = nested(1 + (depth - 2) // levels, opening=opening, closing=closing)
        return with_params(b'{"p":"%b","q":"",%b' % (padding, inner[1:]))

    assert request(frame(128)).id == b"7"
    assert reason(frame(128 + levels)) == (b"7", "too_deep")
    assert reason(frame(6), depth_max=5 if levels == 1 else 4) == (b"7", "too_deep")


@pytest.mark.parametrize("depth", [500, 100_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_no_depth_exhausts_the_stack(opening: bytes, depth: int) -> None:
    """PROTOCOL.md §1: too deep to be read at all, so the id is not known."""
    assert reason(with_params(nested(depth, opening=opening))) == (NULL, "too_deep")
    assert reason(opening * depth) == (NULL, "too_deep")
    assert reason(b"[%b,%b]" % (PING, opening * depth)) == (NULL, "too_deep")


def test_a_frame_that_is_deep_and_no_json_is_a_parse_error() -> None:
    """JSON-RPC 2.0, section 5.1: its id cannot be known."""
    assert reason(with_params(nested(200))[:-1]) == (NULL, "parse_error")


def test_one_entry_that_is_too_deep_spoils_no_batch() -> None:
    """PROTOCOL.md §1, batch: one error per bad entry."""
    batch = decode_frame(b"[%b,%b,1]" % (PING, with_params(nested(200))))
    assert isinstance(batch, list)
    good, deep, number = batch
    assert good == request(PING)
    assert isinstance(deep, Invalid)
    assert (deep.id, deep.error.reason, deep.error.data) == (b"7", "too_deep", {"limit": 128})
    assert isinstance(number, Invalid)


def test_a_batch_is_one_level_of_its_own() -> None:
    """PROTOCOL.md §1, limits: depth 128 is that of the frame."""
    for depth, kind in ((126, Request), (127, Invalid)):
        batch = decode_frame(b"[%b,%b]" % (with_params(nested(depth)), with_params(nested(200))))
        assert isinstance(batch, list)
        assert isinstance(batch[0], kind)


def test_a_notification_that_is_too_deep_is_left_unanswered() -> None:
    """PROTOCOL.md §1: never answered, not even with an error."""
    frame = b'{"jsonrpc":"2.0","method":"m","params":%b}' % nested(200)
    assert reason(frame) == (None, "too_deep")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text(alphabet='"\\[]{}/n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\[]{}n'), inner),
)


def depth_of(value: object) -> int:
    match value:
        case list():
            inner = cast("list[object]", value)
        case dict():
            inner = list(cast("dict[str, object]", value).values())
        case _:
            return 0
    return 1 + max(map(depth_of, inner), default=0)


@given(JSON, st.booleans(), st.sampled_from([None, 2]), st.sampled_from([b"", b" " * 20_000]))
def test_depth_is_counted_exactly(
    value: object, ensure_ascii: bool, indent: int | None, padding: bytes
) -> None:
    """PROTOCOL.md §1, limits: whatever stands in strings, and in short and long frames alike."""
    params = json.dumps({"a": value}, ensure_ascii=ensure_ascii, indent=indent).encode()
    frame = with_params(params) + padding
    depth = depth_of(value) + 2
    assert request(frame, depth_max=depth).params == params
    assert reason(frame, depth_max=depth - 1) == (b"7", "too_deep")


# Any bytes


@given(
    st.binary()
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.lists(
        st.sampled_from(
            [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"1", b"null", PING, PING[:30]]
        )
    ).map(b"".join)
)
@example(b"[" * 129)
@example(b"]" * 1000)
def test_any_bytes_mean_a_request_or_an_error(frame: bytes) -> None:
    """PROTOCOL.md §1: any bytes on the socket get a correct answer."""
    decoded = decode_frame(frame)
    for entry in decoded if isinstance(decoded, list) else [decoded]:
        assert isinstance(entry, Request | Invalid)


@given(JSON, st.binary(min_size=1, max_size=3), st.integers(min_value=0))
def test_a_damaged_frame_is_refused_where_another_parser_refuses_it(
    value: object, damage: bytes, place: int
) -> None:
    """RFC 8259: the grammar is that of the standard library, but for its extensions."""
    frame = with_params(json.dumps({"a": value}).encode())
    place %= len(frame)
    frame = frame[:place] + damage + frame[place + len(damage) :]

    def refuse(_: str) -> float:
        raise ValueError

    try:
        text = frame.decode()
        expected: Any = json.loads(text, parse_constant=refuse)
        json.dumps(expected, ensure_ascii=False).encode()  # no lone surrogates
        assert not text.startswith("\ufeff")
    except (ValueError, AssertionError):
        assert reason(frame) == (NULL, "parse_error")
        return
    decoded = only(frame)
    if isinstance(decoded, Request):
        assert decoded.method == expected["method"]
        assert decoded.id is None or json.loads(decoded.id) == expected["id"]
        assert json.loads(decoded.params) == expected.get("params", {})
    else:
        assert decoded.error.reason in {"invalid_request", "invalid_params"}


SUITE = (
    Path(__file__).parents[3] / "shared" / "corpus" / "27-json-parsing-suite" / "files.base64.json"
)


def suite() -> list[Any]:
    """The cases of nst/JSONTestSuite, where they are at hand."""
    if not SUITE.exists():
        skip = pytest.mark.skip(reason="the JSON parsing suite is not here")
        return [pytest.param("", b"", marks=skip)]
    files: dict[str, str] = json.loads(SUITE.read_text())
    return [pytest.param(name, base64.b64decode(text), id=name) for name, text in files.items()]


@pytest.mark.parametrize(("name", "data"), suite())
def test_json_is_taken_and_what_is_no_json_is_refused(name: str, data: bytes) -> None:
    """RFC 8259, by the files of nst/JSONTestSuite (y_ valid, n_ invalid, i_ left open)."""
    inside = only(with_params(b'{"v":%b}' % data))
    kind = Path(name).name[:2]
    if kind == "y_":
        assert inside == Request(b"7", b"7", "m", b'{"v":%b}' % data)
    elif kind == "n_":
        assert isinstance(inside, Invalid)
        assert inside.error.reason in {"parse_error", "too_deep"}
    alone = decode_frame(data)
    for entry in alone if isinstance(alone, list) else [alone]:
        assert isinstance(entry, Invalid)
        if kind == "y_":
            assert entry.error.reason == "invalid_request"
        if kind == "n_":
            assert entry.error.reason in {"parse_error", "too_deep"}


# Ids


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'"a"', b'"\\u0061"'),
        (b'"\\/"', b'"/"'),
        ('"\U0001f600"'.encode(), b'"\\ud83d\\ude00"'),
        (b'"\\n"', b'"\\u000a"'),
        (b'"\x7f"', b'"\\u007f"'),
        (b"0", b"-0"),
    ],
)
def test_equal_ids_have_one_key_however_they_are_written(one: bytes, other: bytes) -> None:
    """PROTOCOL.md §1: a second request with an id still in flight is refused."""
    assert request_key(one) == request_key(other) is not None


def test_different_ids_have_different_keys() -> None:
    """JSON-RPC 2.0, section 4: a string is no number."""
    ids = [b"1", b"-1", b"10", b'"1"', b'"-1"', b'""', b'"a"', b'"A"', b'"\\\\u0061"', b'"null"']
    assert len({request_key(id) for id in ids}) == len(ids)


@given(JSON, st.booleans())
def test_what_is_no_string_or_integer_has_no_key(value: object, ensure_ascii: bool) -> None:
    """PROTOCOL.md §1, request id."""
    text = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    assert (request_key(text) is not None) == (type(value) in (str, int))


# Answers


class Page(msgspec.Struct, omit_defaults=True):
    items: list[msgspec.Raw]
    cursor: str | None = None
    note: str | msgspec.UnsetType = msgspec.UNSET
    extra: object = None


class Colour(enum.StrEnum):
    RED = "red"


RESULTS: list[tuple[object, str]] = [
    ({}, "{}"),
    (None, "null"),
    ([1, True, None, 1.5, "a"], '[1,true,null,1.5,"a"]'),
    ((1, (2,)), "[1,[2]]"),
    ({"a": {"b": [{}]}}, '{"a":{"b":[{}]}}'),
    (10**40, "1" + "0" * 40),
    ("\u2028\u2029\x7f", '"\u2028\u2029\x7f"'),
    ("\U0001f600\0", '"\U0001f600\\u0000"'),
    (Colour.RED, '"red"'),
    (Page([msgspec.Raw(b'{"x": 1.0}')]), '{"items":[{"x": 1.0}]}'),
    (msgspec.Raw(b'{"x":\t1e3}'), '{"x":\t1e3}'),
    ([Page([]) for _ in range(100)], "[" + ",".join(['{"items":[]}'] * 100) + "]"),
]


@pytest.mark.parametrize(("result", "text"), RESULTS)
def test_a_result_goes_out_as_it_is(result: object, text: str) -> None:
    """JSON-RPC 2.0, section 5; PROTOCOL.md §1, values: raw items pass byte for byte."""
    frame = encode_result(b'"a"', result)
    assert frame == b'{"jsonrpc":"2.0","id":"a","result":%b}' % text.encode()


CYCLE: list[object] = []
CYCLE.append(CYCLE)

UNENCODABLE = [
    math.nan,
    math.inf,
    -math.inf,
    b"bytes",
    bytearray(b"bytes"),
    memoryview(b"bytes"),
    object(),
    {1},
    1j,
    "\ud800",
    {1: "a"},
    {b"a": 1},
    {math.nan: 1},
    {None: 1},
    CYCLE,
]


@pytest.mark.parametrize("value", UNENCODABLE)
def test_what_has_no_json_text_is_an_error_wherever_it_stands(value: object) -> None:
    """ijl/orjson#620 wrote NaN as null; explodinglabs/jsonrpcserver#72 died of such a result."""
    for result in (
        value,
        [value],
        (0, value),
        {"a": {"b": value}},
        Page([], extra=value),
        [Page([], extra=[value]) for _ in range(100)],
        [*[Page([])] * 99, Page([], extra=Page([], extra=value))],
        [*[[]] * 99, [value]],
    ):
        with pytest.raises(Unencodable):
            encode_result(b"1", result)
    with pytest.raises(Unencodable):
        encode_error(b"1", errors.Forbidden(scope=cast("str", [value])))


@given(JSON)
def test_any_json_value_survives_as_a_result(value: object) -> None:
    """JSON-RPC 2.0, section 5: a result is any JSON value."""
    frame = encode_result(b"1", value)
    assert json.loads(frame) == {"jsonrpc": "2.0", "id": 1, "result": value}


def test_an_error_goes_out_with_its_id_and_data() -> None:
    """JSON-RPC 2.0, section 5.1; PROTOCOL.md §6."""
    error = errors.Overloaded(retry_after_ms=50)
    assert json.loads(encode_error(NULL, error)) == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {
            "code": -32001,
            "message": error.message,
            "data": {"reason": "overloaded", "retryable": True, "retry_after_ms": 50},
        },
    }


def test_a_notification_goes_out_without_id() -> None:
    """JSON-RPC 2.0, section 4.1."""
    frame = encode_notification("history.appended", b'{"seq":1}')
    assert frame == b'{"jsonrpc":"2.0","method":"history.appended","params":{"seq":1}}'
    assert request(frame).id is None


def test_the_answers_to_a_batch_go_out_as_one_array() -> None:
    """JSON-RPC 2.0, section 6."""
    answers = [encode_result(b"1", 1), encode_error(NULL, errors.ParseError())]
    assert json.loads(encode_batch(answers)) == [json.loads(answer) for answer in answers]
    assert json.loads(encode_batch(answers[:1])) == [json.loads(answers[0])]


# Params


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Params(msgspec.Struct, forbid_unknown_fields=True):
    session_id: Annotated[str, msgspec.Meta(max_length=5, pattern="^[a-z, `]*$")]
    limit: Annotated[int, msgspec.Meta(ge=0)] = 1
    ratio: float = 0.0
    order: Literal["asc", "desc"] = "asc"
    items: Annotated[list[dict[str, int]], msgspec.Meta(max_length=2)] = []
    labels: dict[Annotated[str, msgspec.Meta(max_length=2)], str | None] = {}
    inner: Inner | None = None
    auto: bool = False


params_decoder = msgspec.json.Decoder(Params)


def test_good_params_come_out_typed() -> None:
    """PROTOCOL.md §1, parameters."""
    decoded = decode_params(params_decoder, b'{"session_id":"a","inner":{"name":"n"}}')
    assert decoded == Params("a", inner=Inner("n"))


@pytest.mark.parametrize(
    ("params", "path", "expected"),
    [
        ("{}", "$.session_id", "a value: this parameter is required"),
        ('{"session_id":"a","inner":{}}', "$.inner.name", "a value: this parameter is required"),
        ('{"session_id":true}', "$.session_id", "string"),
        ('{"session_id":null}', "$.session_id", "string"),
        ('{"session_id":"secret"}', "$.session_id", "string of length <= 5"),
        ('{"session_id":"S"}', "$.session_id", "string matching regex '^[a-z, `]*$'"),
        ('{"session_id":"a","limit":-1}', "$.limit", "integer >= 0"),
        ('{"session_id":"a","limit":1.5}', "$.limit", "integer"),
        ('{"session_id":"a","ratio":"secret"}', "$.ratio", "number"),
        ('{"session_id":"a","ratio":1e999}', "$.ratio", "a valid value"),
        ('{"session_id":"a","order":"secret"}', "$.order", "one of the documented values"),
        ('{"session_id":"a","items":{}}', "$.items", "array"),
        ('{"session_id":"a","items":[{},{},{}]}', "$.items", "array of length <= 2"),
        ('{"session_id":"a","items":[{},{"secret":"secret"}]}', "$.items[1][...]", "integer"),
        ('{"session_id":"a","labels":{"a":1}}', "$.labels[...]", "string or null"),
        ('{"session_id":"a","labels":{"secret":""}}', "$.labels", "key: string of length <= 2"),
        ('{"session_id":"a","inner":"secret"}', "$.inner", "object or null"),
        ('{"session_id":"a","auto":1}', "$.auto", "boolean"),
        ('{"session_id":"a","limt":1}', "$.limt", "nothing: there is no such parameter"),
        ('{"session_id":"a","inner":{"x":1}}', "$.inner.x", "nothing: there is no such parameter"),
    ],
)
def test_a_bad_parameter_is_named_by_path_and_expectation(
    params: str, path: str, expected: str
) -> None:
    """PROTOCOL.md §6: `errors[{path, expected}]`; what was sent is never echoed."""
    with pytest.raises(InvalidParams) as caught:
        decode_params(params_decoder, params.encode())
    assert caught.value.data["errors"] == [{"path": path, "expected": expected}]
    assert "secret" not in json.dumps(caught.value.to_wire())


@pytest.mark.parametrize("name", ["x" * 1_000_000, "` - at `$.a", "key` in `$", "\n\0\u2028", ""])
def test_the_name_of_an_unknown_parameter_stays_in_the_path_and_is_bounded(name: str) -> None:
    """PROTOCOL.md §1: unknown names are -32602 with the path, and no more than that."""
    params = json.dumps({"session_id": "a", name: 1}).encode()
    with pytest.raises(InvalidParams) as caught:
        decode_params(params_decoder, params)
    (place,) = caught.value.data["errors"]
    assert place["expected"] == "nothing: there is no such parameter"
    assert len(place["path"]) <= 256


@given(JSON)
@example({"session_id": "\ud800"})
def test_any_params_are_typed_or_refused(value: object) -> None:
    """modelcontextprotocol/python-sdk#820: a client's mistake is -32602, never -32603."""
    with contextlib.suppress(InvalidParams):
        assert isinstance(decode_params(params_decoder, json.dumps(value).encode()), Params)
