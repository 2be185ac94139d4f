"""Entries as plain text, one block each, for whoever summarises them.

::

    user: Why does the build fail?
    call shell(call_1): {"command":"make"}
    output(call_1): make: *** No rule to make target
      make: *** [all] Error 2
    web_search_call: gnu make no rule to make target
    assistant: The Makefile names a file that is gone.

Every line of a block after its first is indented, so no text in it can pass for another block.
Base64 appears as the label of what it holds, sealed content as `[encrypted]`. Of server-side tool
calls and of types that are not known, the name and every text is shown, save what only identifies.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from recapd.daemon.compaction.media import describe_image, describe_media, label_media
from recapd.protocol.items import is_array, is_object

HEAD_CHARACTERS_MAX = 200
"""Of a block's head. It holds a tool's name and a call's id, which come from outside."""

_SEALED = ("encrypted_content", "signature")
_SILENT = frozenset({*_SEALED, "detail", "id", "role", "status", "type"})
_IMAGES = ("input_image", "image_url", "computer_screenshot")


def _as_written(number: str) -> msgspec.Raw:
    return msgspec.Raw(number.encode())


_decode = msgspec.json.Decoder(float_hook=_as_written).decode  # 1e999 and 0.10 stay what they are
_encode = msgspec.json.Encoder().encode


def render(item: bytes) -> str:
    """The block of one item, `item` being its JSON text; several lines for calls in one message."""
    value = decode_object(item)
    blocks = list(_blocks(value))
    if not any(text for _, text in blocks) and any(value.get(name) for name in _SEALED):
        blocks = [(head, "[encrypted]") for head, _ in blocks]
    return "\n".join(_block(head, text) for head, text in blocks)


def message_text(item: bytes) -> tuple[str, str] | None:
    """Role and text of a message that has nothing else; None for every other item.

    The text parts are as they were written, with a blank line between two; media are labels.
    """
    value = decode_object(item)
    role = value.get("role")
    if value.get("type", "message") != "message" or not isinstance(role, str):
        return None
    if value.get("tool_calls") or value.get("tool_call_id") or value.get("refusal"):
        return None
    content = value.get("content")
    parts = content if is_array(content) else [content]
    return role, "\n\n".join(filter(None, map(_part_text, parts)))


def shorten(text: str, characters_max: int) -> str:
    """`text` in at most `characters_max` characters: its beginning, a mark, and its end.

    Where not even the mark fits, the mark alone. Python counts code points, so none is cut in two.
    """
    if len(text) <= characters_max:
        return text
    room = max(characters_max - len(_characters_left_out(len(text))), 0)
    tail = room // 2
    mark = _characters_left_out(len(text) - room)
    return text[: room - tail] + mark + text[len(text) - tail :]


def spaced(number: int) -> str:
    """A number with a space before every three digits: `12 345`."""
    return f"{number:,}".replace(",", " ")


def _characters_left_out(number: int) -> str:
    return f"[… {spaced(number)} characters left out …]"


def decode_object(item: bytes) -> dict[str, Any]:
    """The object that an item is; numbers other than plain integers keep their spelling."""
    value: dict[str, Any]
    try:
        value = _decode(item)
    except msgspec.ValidationError:  # an integer of more digits than Python takes by default
        value = json.loads(item, parse_int=str, parse_float=str)
    return value


def _block(head: str, text: str) -> str:
    head = " ".join(head.split())[:HEAD_CHARACTERS_MAX]
    return f"{head}: {text}".rstrip().replace("\n", "\n  ")


def _blocks(value: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Head and text of each block; what is a message is what `item_facts` takes for one."""
    kind, role, call_id = value.get("type"), value.get("role"), value.get("call_id")
    if kind == "message" or (kind is None and isinstance(role, str)):
        yield from _message_blocks(value)
    elif kind == "reasoning":
        yield "reasoning", _text(value.get("summary")) or _text(value.get("content"))
    elif not isinstance(kind, str):
        yield "item", _texts(value)
    elif isinstance(call_id, str) and kind.endswith("_output"):
        yield f"output({call_id})", _text(value["output"]) if "output" in value else _texts(value)
    elif isinstance(call_id, str) and kind.endswith("_call"):
        yield _call(value, kind.removesuffix("_call"), call_id)
    else:
        rest = {name: member for name, member in value.items() if name != "name"}
        yield f"{kind} {value.get('name') or ''}", _texts(rest)


def _message_blocks(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    role, call_id = message.get("role"), message.get("tool_call_id")
    calls = message.get("tool_calls")
    head = role if isinstance(role, str) else "message"
    if role == "tool" and isinstance(call_id, str):
        head = f"output({call_id})"
    text = "\n".join(filter(None, (_text(message.get("content")), _text(message.get("refusal")))))
    if text or not calls:
        yield head, text
    for call in calls if is_array(calls) else ():
        if is_object(call):
            # Chat Completions puts the call under its own type: function or custom.
            inner = call.get("function") or call.get("custom")
            yield _call(inner if is_object(inner) else call, "tool", call.get("id") or "")


def _call(call: dict[str, Any], name: str, call_id: Any) -> tuple[str, str]:
    text = ""
    for member in ("arguments", "input"):
        if member in call:
            text = _text_or_json(call[member])
            break
    else:
        rest = {
            member: value
            for member, value in call.items()
            if member not in _SILENT and member not in ("name", "call_id")
        }
        text = _text_or_json(rest) if rest else ""
    return f"call {call.get('name') or name}({call_id})", text


def _text(content: Any) -> str:
    """The text of a message's content or of a call's output: a string, or parts, one a line."""
    parts = content if is_array(content) else [content]
    return "\n".join(filter(None, map(_part_text, parts)))


def _part_text(part: Any) -> str:
    if part is None:
        return ""
    if not is_object(part):
        return _text_or_json(part)
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str):
            return label_media(part[name])
    if part.get("type") in _IMAGES:
        url = part.get("image_url")
        url = url.get("url") if is_object(url) else url
        return describe_image(url).label() if isinstance(url, str) else "[image]"
    return _texts(part)


def _text_or_json(value: Any) -> str:
    return label_media(value if isinstance(value, str) else _encode(value).decode())


def _texts(value: Any) -> str:
    """Each different string in `value`, however deep, one a line."""
    found: dict[str, None] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found[label_media(value)] = None
        elif is_array(value):
            waiting.extend(reversed(value))
        elif is_object(value):
            waiting.extend(_told(value))
    return "\n".join(filter(None, found))


def _told(value: dict[str, Any]) -> Iterator[Any]:
    """The members that tell something, last first."""
    for name, member in reversed(value.items()):
        if name == "file_data" and isinstance(member, str):
            media = describe_media(member)
            yield media.label() if media else "[file]"
        elif name not in _SILENT and not name.endswith("_id"):
            yield member
