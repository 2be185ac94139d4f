"""What an item is: the few facts that recapd reads from an item's bytes.

An *item* is one input or output item of the OpenAI Responses API, or one Chat Completions message:
any JSON object. Its bytes are kept as the client sent them; only what is named here is ever looked
at. A member that occurs twice counts with its last value, as in most JSON readers.
"""

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


class _Head(msgspec.Struct):
    type: Any = None
    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"null")
    id: Any = None
    call_id: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


# Numbers out of range (1e999 is valid JSON) are kept as text: nobody reads them.
_decode_head = msgspec.json.Decoder(_Head, float_hook=str).decode
_decode_any = msgspec.json.Decoder(float_hook=str).decode


def item_facts(item: bytes, path: str = "$") -> ItemFacts:
    """Read the facts of one item, `item` being its JSON text.

    Raises:
        InvalidItem: the bytes are not one JSON object; the error names it by `path`.
    """
    try:
        head = _decode_head(item)
        kind = head.type if isinstance(head.type, str) else ""
        if kind == "message" or (head.type is None and isinstance(head.role, str)):
            return _message_facts(head)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidItem(errors=[{"path": "$", "expected": "a JSON object"}]) from error
    if isinstance(head.call_id, str):
        if kind.endswith("_output"):
            return ItemFacts(Role.OTHER, kind, outputs=(head.call_id,))
        if kind.endswith("_call"):
            return ItemFacts(Role.OTHER, kind, calls=(head.call_id,))
    if kind == "local_shell_call_output" and isinstance(head.id, str):
        # Its only key in the public API: `id` is the call_id of the call, not an id of its own.
        return ItemFacts(Role.OTHER, kind, outputs=(head.id,))
    return ItemFacts(Role.OTHER, kind)


def _message_facts(head: _Head) -> ItemFacts:
    match head.role:
        case "system" | "developer":
            return ItemFacts(Role.INSTRUCTION, "message")
        case "user":
            reminder = first_text(head.content).strip().startswith(REMINDER_TAG)
            return ItemFacts(Role.REMINDER if reminder else Role.USER, "message")
        case "tool" if isinstance(head.tool_call_id, str):
            return ItemFacts(Role.OTHER, "message", outputs=(head.tool_call_id,))
        case _:
            return ItemFacts(Role.OTHER, "message", calls=_chat_calls(head.tool_calls))


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a decoded JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Whether a decoded JSON value is an array."""
    return isinstance(value, list)


def _chat_calls(tool_calls: Any) -> tuple[str, ...]:
    if not is_array(tool_calls):
        return ()
    ids = [call.get("id") for call in tool_calls if is_object(call)]
    return tuple(call_id for call_id in ids if isinstance(call_id, str))


def first_text(content: bytes) -> str:
    """The text of a message's first content part; empty when that part is not text."""
    value = _decode_any(content)
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
