"""What an item says, calls and answers, whichever API it was written for.

Known shapes: items of the Responses API (`function_call`, `custom_tool_call`, `local_shell_call`,
`shell_call`, `apply_patch_call`, `mcp_call`, …, with their outputs), messages of Chat Completions
(`tool_calls`, role `tool`), content blocks of Anthropic (`tool_use`, `tool_result`) and the
`toolCall` blocks of agents that write their own. Anything else says nothing here.
"""

from typing import Any, TypeAlias

import msgspec

from recapd.daemon.compaction.transcript import decode_object
from recapd.protocol.items import is_array, is_object


class Words(msgspec.Struct, frozen=True, gc=False):
    """What somebody wrote: one text part of a message."""

    role: str
    text: str


class Call(msgspec.Struct, frozen=True):
    """A tool call; `arguments` are an object where the model wrote one, else its text."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


class Output(msgspec.Struct, frozen=True, gc=False):
    """A call's result; `status` is what a member of its own says: a number, or `failed`, or ''."""

    call_id: str
    text: str
    status: str = ""


Event: TypeAlias = Words | Call | Output

_STATUSES = ("exit_code", "exitCode", "returncode", "return_code", "exit_status")
_STATUS_HOLDERS = frozenset({*_STATUSES, "metadata", "outcome"})
_ERRORS = ("is_error", "isError")
_CALL_BLOCKS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use", "toolCall", "tool_call"})
_TEXT_BLOCKS = frozenset({"text", "input_text", "output_text", None})
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_decode_any = msgspec.json.Decoder(float_hook=str).decode


def read(item: bytes) -> list[Event]:
    """The events of one item in their order, `item` being its JSON text; it never raises."""
    try:
        value = decode_object(item)
    except _UNREADABLE:
        return []
    if not is_object(value):
        return []
    kind, role = value.get("type"), value.get("role")
    if kind == "message" or (kind is None and isinstance(role, str)):
        return _message_events(value, role if isinstance(role, str) else "")
    return _item_events(value, kind) if isinstance(kind, str) else []


def _item_events(value: dict[str, Any], kind: str) -> list[Event]:
    call_id = _string(value.get("call_id")) or _string(value.get("id"))
    if kind.endswith("_output"):
        return [_output(call_id, value.get("output"), value)]
    if not kind.endswith("_call"):
        return []
    name = _string(value.get("name")) or kind.removesuffix("_call")
    call = Call(call_id, name, _arguments(value))
    if "output" in value or "error" in value:  # a server-side call carries its own result
        return [call, _output(call_id, value.get("output") or value.get("error"), value)]
    return [call] if "call_id" in value else [call, Output(call_id, "")]


def _message_events(message: dict[str, Any], role: str) -> list[Event]:
    content = message.get("content")
    if role in ("tool", "function"):
        return [_output(_string(message.get("tool_call_id")), content, message)]
    events: list[Event] = []
    for part in content if is_array(content) else (content,):
        if isinstance(part, str):
            events.append(Words(role, part))
        elif is_object(part) and (event := _part_event(part, role)) is not None:
            events.append(event)
    calls = message.get("tool_calls")
    for call in calls if is_array(calls) else ():
        if is_object(call):
            inner = call.get("function") or call.get("custom")
            inner = inner if is_object(inner) else call
            name, call_id = _string(inner.get("name")), _string(call.get("id"))
            events.append(Call(call_id, name, _arguments(inner)))
    return events


def _part_event(part: dict[str, Any], role: str) -> Event | None:
    kind = part.get("type")
    if kind is not None and not isinstance(kind, str):
        return None
    if kind in _TEXT_BLOCKS:
        text = _string(part.get("text"))
        return Words(role, text) if text else None
    if kind in _CALL_BLOCKS:
        return Call(_string(part.get("id")), _string(part.get("name")), _arguments(part))
    if kind is not None and kind.endswith("tool_result"):
        return _output(_string(part.get("tool_use_id")), part.get("content"), part)
    return None


def _arguments(call: dict[str, Any]) -> dict[str, Any] | str:
    for member in ("arguments", "input", "action", "operation", "args"):
        value = call.get(member)
        if is_object(value):
            return value
        if isinstance(value, str):
            return _decoded(value)
    return call


def _decoded(text: str) -> dict[str, Any] | str:
    if text.lstrip().startswith("{"):
        try:
            value = _decode_any(text)
        except _UNREADABLE:
            return text
        if is_object(value):
            return value
    return text


def _output(call_id: str, value: Any, holder: dict[str, Any]) -> Output:
    text, status = _text_and_status(value)
    if not status:
        status = _status(holder)
    if not status:
        said = holder.get("status")
        failed = said in ("failed", "error") or any([holder.get(name) is True for name in _ERRORS])
        status = "failed" if failed else ""
    return Output(call_id, text, status)


def _text_and_status(value: Any) -> tuple[str, str]:
    if isinstance(value, str):
        # Agents that write `{"output": …, "metadata": {"exit_code": 1}}` into the text.
        if value.startswith("{") and any(f'"{name}"' in value for name in _STATUSES):
            decoded = _decoded(value)
            if is_object(decoded):
                text, status = _text_and_status(decoded)
                return text or value, status
        return value, ""
    if is_object(value):
        texts = [_string(value.get(name)) for name in ("text", "output", "stdout", "stderr")]
        if "content" in value and not any(texts):
            return _text_and_status(value["content"])[0], _status(value)
        return "\n".join(filter(None, texts)), _status(value)
    if is_array(value):
        parts = [_text_and_status(part) for part in value]
        status = next((status for _, status in reversed(parts) if status), "")
        return "\n".join(text for text, _ in parts if text), status
    return "", ""


def _status(value: dict[str, Any]) -> str:
    if value.keys().isdisjoint(_STATUS_HOLDERS):
        return ""
    for holder in (value, value.get("metadata"), value.get("outcome")):
        if is_object(holder):
            for name in _STATUSES:
                status = holder.get(name)
                if isinstance(status, int) and not isinstance(status, bool):
                    return str(status)
                if isinstance(status, str) and status.lstrip("-").isdecimal():
                    return status
            if holder.get("type") == "timeout":
                return "timeout"
    return ""


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
