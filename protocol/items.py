"""What an item is: the few facts that recapd reads from an item's bytes.

An *item* is one input or output item of the OpenAI Responses API, or one Chat Completions message:
any JSON object. Its bytes are kept as the client sent them; only what is named here is ever looked
at. A member that occurs twice counts with its last value, as in most JSON readers.
"""

import json
from enum import Enum
from typing import Any, TypeGuard

import msgspec

from recapd.protocol.errors import InvalidItem

REMINDER_TAG = "<system-reminder>"
REMINDER_END = "</system-reminder>"


class Role(Enum):
    """The part that a message plays in compaction (PROTOCOL.md §5.1)."""

    INSTRUCTION = "instruction"  # an input message of role system or developer
    REMINDER = "reminder"  # a user message whose first content part starts with the reminder tag
    USER = "user"
    OTHER = "other"  # assistant messages, calls, outputs, reasoning, unknown types


class ItemFacts(msgspec.Struct, frozen=True, gc=False):
    """What compaction and append need to know of an item.

    `calls` are the ids of the calls that the item makes, `outputs` those that it answers: one at
    most in a Responses item, several in a Chat Completions message with `tool_calls`. Server-side
    calls, which carry their result in themselves and have no `call_id`, are neither.
    """

    role: Role
    type: str
    calls: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


_NULL = msgspec.Raw(b"null")


class _Head(msgspec.Struct, gc=False):
    """The members that are looked at. What is no string counts as absent."""

    type: str | None = None
    role: str | None = None
    content: msgspec.Raw = _NULL
    id: str | None = None
    call_id: str | None = None
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = _NULL


class _OddHead(msgspec.Struct, gc=False):
    """The same as JSON text, for an item in which something stands where a string is usual."""

    type: msgspec.Raw = _NULL
    role: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL
    id: msgspec.Raw = _NULL
    call_id: msgspec.Raw = _NULL
    tool_call_id: msgspec.Raw = _NULL
    tool_calls: msgspec.Raw = _NULL


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_odd_head = msgspec.json.Decoder(_OddHead).decode
_decode_string = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder(float_hook=str).decode

# Most items of a history are one of these two.
_USER = ItemFacts(Role.USER, "message")
_MESSAGE = ItemFacts(Role.OTHER, "message")


def item_facts(item: bytes, path: str = "$") -> ItemFacts:
    """Read the facts of one item, `item` being its JSON text.

    Raises:
        InvalidItem: the bytes are not one JSON object; the error names it by `path`.
    """
    try:
        try:
            return _facts(_decode_head(item))
        except msgspec.ValidationError:
            odd = _decode_odd_head(item)
            if odd.type != _NULL and _string(odd.type) is None:
                return ItemFacts(Role.OTHER, "")  # of no type that anybody knows: no message either
            return _facts(
                _Head(
                    _string(odd.type),
                    _string(odd.role),
                    odd.content,
                    _string(odd.id),
                    _string(odd.call_id),
                    _string(odd.tool_call_id),
                    odd.tool_calls,
                )
            )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidItem(errors=[{"path": path, "expected": "a JSON object"}]) from error


def _facts(head: _Head) -> ItemFacts:
    kind = head.type or ""
    if kind == "message" or (head.type is None and head.role is not None):
        return _message_facts(head)
    if head.call_id is not None:
        if kind.endswith("_output"):
            return ItemFacts(Role.OTHER, kind, outputs=(head.call_id,))
        if kind.endswith("_call"):
            return ItemFacts(Role.OTHER, kind, calls=(head.call_id,))
    if kind == "local_shell_call_output" and head.id is not None:
        # Its only key in the public API: `id` is the call_id of the call, not an id of its own.
        return ItemFacts(Role.OTHER, kind, outputs=(head.id,))
    return ItemFacts(Role.OTHER, kind)


def _message_facts(head: _Head) -> ItemFacts:
    match head.role:
        case "system" | "developer":
            return ItemFacts(Role.INSTRUCTION, "message")
        case "user":
            content = bytes(head.content)
            if b"system-reminder" not in content and b"\\u" not in content:
                return _USER
            reminder = first_text(content).strip().startswith(REMINDER_TAG)
            return ItemFacts(Role.REMINDER, "message") if reminder else _USER
        case "tool" if head.tool_call_id is not None:
            return ItemFacts(Role.OTHER, "message", outputs=(head.tool_call_id,))
        case _ if head.tool_calls == _NULL:
            return _MESSAGE
        case _:
            return ItemFacts(Role.OTHER, "message", calls=_chat_calls(bytes(head.tool_calls)))


def _string(value: msgspec.Raw) -> str | None:
    """The string that it is; None for every other value."""
    text = bytes(value)
    return _decode_string(text) if text.startswith(b'"') else None


def _decode(text: bytes) -> Any:
    """Any JSON value. Numbers may be text in it, for nobody reads them."""
    try:
        return _decode_any(text)
    except msgspec.ValidationError:  # an integer of more digits than Python takes by default
        return json.loads(text, parse_int=str, parse_float=str)


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a decoded JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Whether a decoded JSON value is an array."""
    return isinstance(value, list)


def _chat_calls(tool_calls: bytes) -> tuple[str, ...]:
    value = _decode(tool_calls)
    if not is_array(value):
        return ()
    ids = [call.get("id") for call in value if is_object(call)]
    return tuple(call_id for call_id in ids if isinstance(call_id, str))


def first_text(content: bytes) -> str:
    """The text of a message's first content part; empty when that part is not text."""
    value = _decode(content)
    if is_array(value) and value:
        value = value[0]
        if is_object(value) and value.get("type") in ("input_text", "text"):
            value = value.get("text")
    return value if isinstance(value, str) else ""


def one_line(item: bytes) -> bytes:
    """The item without line breaks, so that it is one line in archives, exports and frames.

    A raw line break in valid JSON is white space between tokens (RFC 8259 §2 and §7), so a space
    says the same.
    """
    if b"\n" in item or b"\r" in item:
        return item.replace(b"\n", b" ").replace(b"\r", b" ")
    return item
