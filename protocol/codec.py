"""Frames to requests, answers to frames: strict JSON-RPC 2.0 (PROTOCOL.md §1).

Only the envelope is decoded here; `params` and what stands in them stay the bytes of the client.
The whole frame is checked, though: UTF-8, JSON grammar, no lone surrogates, bounded nesting. So a
request that comes out can be decoded further, stored and sent again without another look.

Where a member appears twice in an envelope, each must have the right form, and the last one counts.
"""

import codecs
import math
from array import array
from collections.abc import Collection, Iterable
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from types import NoneType
from typing import Any, Literal, TypeVar

import msgspec

from recapd.protocol.errors import (
    BatchTooLarge,
    InvalidParams,
    InvalidRequest,
    ParseError,
    RpcError,
    TooDeep,
)

DEPTH_MAX = 128  # the default limit of nested arrays and objects in a frame, itself included
BATCH_MAX = 128  # the default limit of entries in a batch

NULL = b"null"
"""The id of an answer to what has no usable id (JSON-RPC 2.0, section 5)."""

_ABSENT = msgspec.Raw(b"")
_BLANKS = b" \t\r\n"

_RECURSION_MAX = 400
# msgspec recurses in C and gives up at the interpreter's recursion limit, 1000 less what is on the
# stack. Deeper frames are refused unread; up to here the id of one that is too deep is looked up.

_COUNTED_BYTES_MAX = 16 * 1024
# Counting brackets is the faster check for short frames, leaving out strings that for long ones.

_UTF8_CHUNK_BYTES = 256 * 1024
# A str takes up to four bytes for each byte of text: never make one of a whole frame.

_PATH_CHARACTERS_MAX = 256
# A path may end in the name of an unknown parameter, which is as long as its sender likes.


class Request(msgspec.Struct, frozen=True, gc=False):
    """A call that has the right form; a notification if `id` is None."""

    id: bytes | None
    """JSON text of the id as it was sent, to be given back."""

    key: bytes | None
    """The same for equal ids, however they were written; see `request_key`."""

    method: str
    params: bytes
    """JSON text of an object."""


class Invalid(msgspec.Struct, frozen=True):
    """What is to be answered with an error; if `id` is None, it is to be left unanswered."""

    id: bytes | None
    error: RpcError


class Unencodable(Exception):
    """A value has no strict JSON text. A fault of the program, never of the client."""


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    jsonrpc: Literal["2.0"]
    method: str
    id: msgspec.Raw = _ABSENT
    params: msgspec.Raw = msgspec.Raw(b"{}")


class _AnyObject(msgspec.Struct, frozen=True, gc=False):
    id: msgspec.Raw = _ABSENT


_envelope_decoder = msgspec.json.Decoder(_Envelope)
_object_decoder = msgspec.json.Decoder(_AnyObject)
_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_string_decoder = msgspec.json.Decoder(str)
_encoder = msgspec.json.Encoder()


def decode_frame(
    frame: bytes, *, depth_max: int = DEPTH_MAX, batch_max: int = BATCH_MAX
) -> Request | Invalid | list[Request | Invalid]:
    """Return what the frame asks for; a list, in order, stands for a batch of one or more entries.

    Never raises, whatever the bytes are. Each entry of a batch is judged on its own; a fault of
    the batch as a whole is one Invalid. `depth_max` can be 400 at most.
    """
    if not _is_utf8(frame):
        return Invalid(NULL, ParseError())
    depth = _depth_over(frame, depth_max)
    if depth > _RECURSION_MAX:
        return Invalid(NULL, TooDeep(limit=depth_max))
    if frame.lstrip(_BLANKS).startswith(b"["):
        return _decode_batch(frame, depth_max if depth else None, batch_max)
    return _decode_request(frame, TooDeep(limit=depth_max) if depth else None)


def _decode_batch(
    frame: bytes, depth_max: int | None, batch_max: int
) -> Invalid | list[Request | Invalid]:
    """Decode a frame that starts as an array; its depth is checked where `depth_max` is given."""
    try:
        batch = _batch_decoder(batch_max).decode(frame)
    except msgspec.DecodeError:
        return Invalid(NULL, ParseError())
    entries = [bytes(raw) for raw in msgspec.structs.astuple(batch) if raw is not _ABSENT]
    if not entries:
        return Invalid(NULL, InvalidRequest(hint="A batch has at least one entry."))
    if len(entries) > batch_max:
        return Invalid(NULL, BatchTooLarge(limit=batch_max))
    if depth_max is None:
        return [_decode_request(entry, None) for entry in entries]
    error = TooDeep(limit=depth_max)
    return [
        _decode_request(entry, error if _depth_over(entry, depth_max - 1) else None)
        for entry in entries
    ]


@lru_cache(maxsize=8)
def _batch_decoder(batch_max: int) -> msgspec.json.Decoder[msgspec.Struct]:
    """Return a decoder that keeps one entry more than allowed and only checks the grammar of more.

    A list of all entries could take thirty times the memory of the frame.
    """
    fields = [(f"entry_{index}", msgspec.Raw, _ABSENT) for index in range(batch_max + 1)]
    return msgspec.json.Decoder(msgspec.defstruct("Batch", fields, array_like=True, gc=False))


def _decode_request(frame: bytes, too_deep: TooDeep | None) -> Request | Invalid:
    try:
        envelope = _envelope_decoder.decode(frame)
    except msgspec.DecodeError:
        return _explain(frame)
    id: bytes | None = None
    key: bytes | None = None
    if envelope.id is not _ABSENT:
        id = bytes(envelope.id)
        key = request_key(id)
        if key is None:
            return _explain(frame)
    if too_deep is not None:
        return Invalid(id, too_deep)
    params = bytes(envelope.params)
    if not params.startswith(b"{"):
        return Invalid(id, InvalidParams.at("$.params", "object"))
    return Request(id, key, envelope.method, params)


def _explain(frame: bytes) -> Invalid:
    """Find out what is wrong with an envelope: the decoder stops at the first thing it dislikes."""
    try:
        _raw_decoder.decode(frame)  # the grammar alone, to the end
    except msgspec.DecodeError:
        return Invalid(NULL, ParseError())
    try:
        envelope = _object_decoder.decode(frame)
    except msgspec.ValidationError:
        return Invalid(NULL, InvalidRequest(hint="A request is an object."))
    id = bytes(envelope.id) or NULL
    if envelope.id is not _ABSENT and request_key(id) is None:
        return Invalid(NULL, InvalidRequest(hint="An id is a string or an integer."))
    hint = 'A request has "jsonrpc": "2.0" and a method, which is a string.'
    return Invalid(id, InvalidRequest(hint=hint))


def request_key(id: bytes) -> bytes | None:
    """Return a key that equal ids share, from the JSON text of an id; None if it can be no id.

    Ids are strings and integers (PROTOCOL.md §1): `"a"` equals `"\\u0061"`, but `1` is not `"1"`.
    """
    if id.isdigit():
        return id
    if id.startswith(b'"'):
        return _encoder.encode(_string_decoder.decode(id)) if b"\\" in id else id
    if id.startswith(b"-") and id[1:].isdigit():
        return id if id != b"-0" else b"0"
    return None


def _is_utf8(data: bytes) -> bool:
    """Whether the bytes are UTF-8 (msgspec does not look into the strings that it skips)."""
    if data.isascii():
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _UTF8_CHUNK_BYTES):
            decoder.decode(data[start : start + _UTF8_CHUNK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_NOT_ESCAPE_OR_STRUCTURE = bytes(set(_NOT_STRUCTURE) - set(b"\\bfnrtu/"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as signed bytes


def _depth_over(text: bytes, limit: int) -> int:
    """Return how deep arrays and objects are nested in JSON text, or 0 if not above `limit`.

    In text that is no JSON, this is at least as deep as a parser can get before it notices.
    No loop over the text runs in Python.
    """
    if len(text) <= limit:
        return 0
    if len(text) <= _COUNTED_BYTES_MAX and text.count(b"{") + text.count(b"[") <= limit:
        return 0
    if b"\\" in text:
        # Escaped quotes go, and escaped backslashes before them. The letters of other escapes
        # must stay so long, or the backslash of `\n` would move next to a closing quote.
        text = text.translate(None, _NOT_ESCAPE_OR_STRUCTURE)
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in text:  # around brackets that are part of a string
        text = b"".join(text.split(b'"')[::2])
    depth = max(accumulate(array("b", text.translate(_STEPS))), default=0)
    return depth if depth > limit else 0


def encode_result(id: bytes, result: object) -> bytes:
    """Return the frame of a success; `msgspec.Raw`, whole or inside, is passed through.

    Raises Unencodable.
    """
    body = result if isinstance(result, msgspec.Raw) else _encode(result)
    return b"".join((b'{"jsonrpc":"2.0","id":', id, b',"result":', body, b"}"))


def encode_error(id: bytes, error: RpcError) -> bytes:
    """Return the frame of an error. Raises Unencodable if its data is no JSON."""
    return b"".join((b'{"jsonrpc":"2.0","id":', id, b',"error":', _encode(error.to_wire()), b"}"))


def encode_notification(method: str, params: bytes) -> bytes:
    """Return the frame of a notification; `params` is the JSON text of an object."""
    name = _encoder.encode(method)
    return b"".join((b'{"jsonrpc":"2.0","method":', name, b',"params":', params, b"}"))


def encode_batch(answers: Iterable[bytes]) -> bytes:
    """Return the frame that holds one or more answers to a batch (JSON-RPC 2.0, section 6)."""
    return b"[%b]" % b",".join(answers)


def _encode(value: object) -> bytes:
    try:
        text = _encoder.encode(value)
        _require_json(value)  # afterwards: the encoder refuses cycles
    except (TypeError, ValueError, RecursionError) as error:
        raise Unencodable(type(error).__name__) from error
    return text


_LEAVES = frozenset({str, int, bool, NoneType, msgspec.Raw, msgspec.UnsetType})
_KEYS = frozenset({str})

_ROWS_MIN = 16
# From here on, turning rows of structs into columns costs less than looking at each row.


def _require_json(value: object) -> None:
    """Refuse what the encoder would turn into something else: NaN into null, bytes into base64.

    Where all children are plain, they are looked at in C; so are the rows of a page, by columns.
    """
    kind = type(value)
    inside: Any = value
    children: Collection[Any]
    if isinstance(value, msgspec.Struct):
        children = msgspec.structs.astuple(value)
    elif kind is dict:
        if not _KEYS.issuperset(map(type, inside)):
            raise Unencodable("a key that is no string")
        children = inside.values()
    elif kind is list or kind is tuple:
        children = inside
    elif isinstance(value, Enum):
        return _require_json(value.value)
    elif kind in _LEAVES or (kind is float and math.isfinite(inside)):
        return
    else:
        raise Unencodable(kind.__name__)
    if _LEAVES.issuperset(map(type, children)):
        return
    if len(children) >= _ROWS_MIN and len(kinds := set(map(type, children))) == 1:
        if issubclass(kinds.pop(), msgspec.Struct):
            children = list(zip(*map(msgspec.structs.astuple, children), strict=True))
    for child in children:
        if type(child) not in _LEAVES:
            _require_json(child)


T = TypeVar("T")


def decode_params(decoder: msgspec.json.Decoder[T], params: bytes) -> T:
    """Return the params of a Request as the type of `decoder`.

    Raises InvalidParams, which names the place and what was expected there, never what was sent.
    """
    try:
        return decoder.decode(params)
    except msgspec.DecodeError as error:
        path, expected = _expectation(str(error))
        raise InvalidParams.at(path[:_PATH_CHARACTERS_MAX], expected) from None


_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def _expectation(message: str) -> tuple[str, str]:
    """Translate a message of msgspec, such as "Expected `int` >= 0 - at `$.limit`"."""
    what, _, path = message.rpartition(" - at `")
    if not what:
        what, path = message, "$`"
    of_key = path.startswith("key` in `")
    path = path.removeprefix("key` in `").removesuffix("`")
    rule, _, rest = what.partition(" `")
    name, _, suffix = rest.partition("`")
    match rule:
        case "Object missing required field":
            return f"{path}.{name}", "a value: this parameter is required"
        case "Object contains unknown field":
            return f"{path}.{rest.removesuffix('`')}", "nothing: there is no such parameter"
        case "Expected":
            kinds = " or ".join(_JSON_NAMES.get(kind, kind) for kind in name.split(" | "))
            return path, ("key: " if of_key else "") + kinds + suffix.partition(", got `")[0]
        case _ if what.startswith(("Invalid enum value", "Invalid value")):
            return path, "one of the documented values"
        case _:
            return path, "a valid value"
