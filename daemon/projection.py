"""What of a history leaves the daemon: one function for what is present and what is archived, for
pages and exports, whoever asks (PROTOCOL.md §7).

Whoever has `history.full` gets back what was written. Whoever has only `session.read` gets the text
of messages, and in place of everything else a *placeholder* that says what stood there and how many
bytes of JSON it was::

    {"type":"function_call","call_id":"c1","name":"shell","arguments":"[tool_call: 24 bytes]"}
    {"type":"function_call_output","call_id":"c1","output":"[tool_output: 5120 bytes]"}
    {"type":"reasoning","id":"r1","summary":"[reasoning: 80 bytes]"}
    {"role":"user","content":[{"type":"input_image","hidden":"[media: 90210 bytes]"}]}
    {"type":"vendor_thing","hidden":"[unknown: 77 bytes]"}

What stays beside text is named here, and all else is left out: a member that nobody has thought of
is not shown. Summaries that recapd made itself are hidden as well (`summary`), for they quote what
tools were given and gave. Secrets of known shapes are replaced in the text that is left.
"""

import re
from collections import Counter
from typing import Any, Final

from msgspec import structs

from recapd.daemon.redaction import Redactor, decode_item, encode_item
from recapd.protocol.items import is_array, is_object
from recapd.storage.entry import Entry, decode_entry, encode_entry

_NAMES: Final = ("type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "name", "status")
"""Members that say which item it is. They stay where they look like a name."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "refusal"})
"""Types of the parts of a message that are text, in a member `text` or `refusal`."""

_MEDIA: Final = frozenset(
    {"input_image", "image", "image_url", "input_file", "file", "document", "input_audio", "audio"}
)
_THINKING: Final = frozenset({"reasoning", "thinking", "redacted_thinking"})
_CALLS: Final = frozenset({"tool_use", "server_tool_use", "tool_search_call"})
_OUTPUTS: Final = frozenset({"tool_result", "web_search_tool_result"})

_BODIES: Final = (
    *("arguments", "input", "action", "code", "queries", "output", "outputs", "result", "results"),
    *("content", "summary", "encrypted_content", "thinking", "signature", "error", "tools"),
)
"""Members of calls, outputs and reasoning that hold what was said."""


class Projection:
    """For one answer. `counts` says how much of each kind was replaced or hidden.

    `full`: everything is shown; `redact`: secrets are replaced.
    """

    def __init__(self, *, full: bool, redact: bool, counts: dict[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self._full = full
        self._redact = redact

    @property
    def changes_nothing(self) -> bool:
        return self._full and not self._redact

    def line(self, line: bytes) -> bytes:
        """An entry's line as it is shown."""
        return line if self.changes_nothing else encode_entry(self.entry(line))

    def entry(self, line: bytes) -> Entry:
        """What an entry's line says, as it is shown."""
        entry = decode_entry(line)
        item = entry.item
        if not self._full:
            item = self._summary(item) if entry.reminder is not None else self._item(item)
        if self._redact:
            redactor = Redactor(self.counts)
            item = redactor.item(item)
            self.counts = redactor.counts
        return entry if item is entry.item else structs.replace(entry, item=item)

    # Items.

    def _item(self, text: bytes) -> bytes:
        item = decode_item(text)
        kind = item.get("type")
        if kind == "message" or (kind is None and isinstance(item.get("role"), str)):
            return encode_item(self._message(item))
        return encode_item(self._other(item, len(text)))

    def _message(self, item: dict[str, Any]) -> dict[str, Any]:
        shown = _names(item)
        if "content" in item:
            content = item["content"]
            if item.get("role") in ("tool", "function") or "tool_call_id" in item:
                shown["content"] = self._hidden("tool_output", content)
            elif is_array(content):
                shown["content"] = [self._part(part) for part in content]
            elif isinstance(content, str) or content is None:
                shown["content"] = content
            else:
                shown["content"] = self._hidden("unknown", content)
        calls = item.get("tool_calls")
        if is_array(calls):
            shown["tool_calls"] = [self._chat_call(call) for call in calls]
        for name in ("reasoning", "reasoning_content", "thinking"):
            if name in item:
                shown[name] = self._hidden("reasoning", item[name])
        if isinstance(item.get("refusal"), str):
            shown["refusal"] = item["refusal"]
        return shown

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return part
        if not is_object(part):
            return self._hidden("unknown", part)
        kind = part.get("type")
        if isinstance(kind, str) and kind in _TEXTS:
            texts = {name: part[name] for name in ("text", "refusal") if name in part}
            if all(isinstance(text, str) for text in texts.values()):
                return {"type": kind, **texts}
        return self._other(part, len(encode_item(part)))

    def _other(self, item: dict[str, Any], size_bytes: int) -> dict[str, Any]:
        """An item or a part that is no text."""
        kind = _kind(item.get("type"))
        if kind in ("media", "unknown"):
            self.counts[kind] += 1
            hidden = {"hidden": f"[{kind}: {size_bytes} bytes]"}
            return {"type": item["type"], **hidden} if _is_name(item.get("type")) else hidden
        bodies = {name: self._hidden(kind, item[name]) for name in _BODIES if name in item}
        return _names(item) | bodies

    def _chat_call(self, call: Any) -> Any:
        if not is_object(call):
            return self._hidden("tool_call", call)
        shown = _names(call)
        for name in ("function", "custom"):
            function = call.get(name)
            if is_object(function):
                bodies = {
                    body: self._hidden("tool_call", function[body])
                    for body in _BODIES
                    if body in function
                }
                shown[name] = _names(function) | bodies
        return shown

    def _summary(self, text: bytes) -> bytes:
        item = decode_item(text)
        return encode_item(_names(item) | {"content": self._hidden("summary", item.get("content"))})

    def _hidden(self, kind: str, value: Any) -> str:
        self.counts[kind] += 1
        return f"[{kind}: {len(encode_item(value))} bytes]"


def _kind(name: Any) -> str:
    """What an item or part of this type holds."""
    if not isinstance(name, str):
        return "unknown"
    if name in _MEDIA:
        return "media"
    if name in _THINKING:
        return "reasoning"
    if name.endswith("_call") or name in _CALLS:
        return "tool_call"
    if name.endswith("_output") or name in _OUTPUTS:
        return "tool_output"
    return "unknown"


def _names(item: dict[str, Any]) -> dict[str, Any]:
    return {name: item[name] for name in _NAMES if name in item and _is_name(item[name])}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None
