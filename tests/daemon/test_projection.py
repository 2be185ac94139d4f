"""What leaves the daemon, and for whom (PROTOCOL.md §7; DESIGN.md promise 10)."""

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.daemon.conftest import Daemon, Message, Peer

from recapd.daemon.projection import Projection
from recapd.protocol.items import is_array, is_object
from recapd.storage.entry import Entry, Reminder, decode_entry, encode_entry

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

HIDDEN: Final = "canary-that-must-not-be-seen"
SHOWN: Final = "text of a message"
KEY: Final = "sk-" + "Abcdefghij0123456789" * 2

ITEMS: Final[list[Message]] = [
    {"role": "system", "content": SHOWN},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SHOWN}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "m1",
        "content": [
            {"type": "output_text", "text": SHOWN, "annotations": [{"title": HIDDEN}]},
            {"type": "refusal", "refusal": SHOWN},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": f"data:image/png;base64,{HIDDEN}"},
            {"type": "input_file", "filename": HIDDEN, "file_data": HIDDEN},
            {"type": "something_new", "text": HIDDEN},
            [HIDDEN],
            {"type": "text", "text": {"odd": HIDDEN}},
        ],
    },
    {"role": "user", "content": {"text": HIDDEN}, HIDDEN: HIDDEN},
    {"type": "reasoning", "id": "r", "summary": [{"text": HIDDEN}], "encrypted_content": HIDDEN},
    {"type": "function_call", "call_id": "c", "name": "shell", "arguments": f'"{HIDDEN}"'},
    {"type": "function_call_output", "call_id": "c", "output": HIDDEN, "more": HIDDEN},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "text", "text": HIDDEN}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "apply", "input": HIDDEN},
    {"type": "custom_tool_call_output", "call_id": "d", "output": HIDDEN},
    {"type": "local_shell_call", "call_id": "e", "action": {"command": [HIDDEN]}},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": HIDDEN}},
    {"type": "code_interpreter_call", "id": "x", "code": HIDDEN, "outputs": [{"logs": HIDDEN}]},
    {"type": "mcp_call", "id": "y", "name": "read", "arguments": HIDDEN, "output": HIDDEN},
    {"type": "image_generation_call", "id": "z", "result": HIDDEN},
    {"type": "compaction", "encrypted_content": HIDDEN},
    {"type": "vendor thing", "a": {"b": HIDDEN}, "name": HIDDEN},
    {"type": 7, "role": "user", "content": HIDDEN},
    {"content": HIDDEN},
    {
        "role": "assistant",
        "content": SHOWN,
        "reasoning_content": HIDDEN,
        "tool_calls": [
            {"id": "f", "type": "function", "function": {"name": "ls", "arguments": HIDDEN}},
            {"id": "g", "type": "custom", "custom": {"name": "sh", "input": HIDDEN}},
            HIDDEN,
        ],
    },
    {"role": "tool", "tool_call_id": "f", "content": HIDDEN},
    {"role": "tool", "tool_call_id": "g", "content": [{"type": "text", "text": HIDDEN}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": HIDDEN, "signature": HIDDEN},
            {"type": "text", "text": SHOWN},
            {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": HIDDEN}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": HIDDEN}]},
    {"role": "user", "content": f"my key is {KEY}"},
    {"role": "user", "name": f"{HIDDEN} with spaces", "content": None},
]


def read(item: Message, *, reminder: Reminder | None = None) -> tuple[Message, dict[str, int]]:
    """The item as somebody sees it who has `session.read` only, and the counts."""
    line = encode_entry(Entry(3, 4000, json.dumps(item).encode(), reminder))
    projection = Projection(full=False, redact=True)
    shown = decode_entry(projection.line(line))
    assert (shown.entry_id, shown.at_ms, shown.reminder) == (3, 4000, reminder)
    return json.loads(shown.item), dict(projection.counts)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_object(value) or is_array(value):
        for member in value.values() if is_object(value) else value:
            yield from texts(member)


@pytest.mark.promise("S7")
@pytest.mark.parametrize("item", ITEMS, ids=lambda item: json.dumps(item)[:60])
def test_only_texts_of_messages_are_read(item: Message) -> None:
    shown, counts = read(item)
    text = json.dumps(shown)
    assert HIDDEN not in text
    assert KEY not in text
    assert text.count(SHOWN) == json.dumps(item).count(SHOWN)
    if HIDDEN in json.dumps(item) and "annotations" not in json.dumps(item):
        assert sum(counts.values()) >= 1 or item.get("name") is not None
    kept = ("type",) if "unknown" in counts else ("type", "role", "id", "call_id", "tool_call_id")
    for name in kept:
        if isinstance(item.get(name), str) and " " not in item[name]:
            assert shown.get(name) == item[name]


def test_a_placeholder_says_what_and_how_much_stood_there() -> None:
    """The forms that the reference shows."""
    output = {"type": "function_call_output", "call_id": "c", "output": "12345"}
    assert read(output) == (output | {"output": "[tool_output: 7 bytes]"}, {"tool_output": 1})
    call = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
    assert read(call) == (call | {"arguments": "[tool_call: 4 bytes]"}, {"tool_call": 1})
    assert read({"type": "vendor_thing", "a": 1}) == (
        {"type": "vendor_thing", "hidden": "[unknown: 32 bytes]"},
        {"unknown": 1},
    )
    image = {"type": "input_image", "image_url": "data:"}
    assert read({"role": "user", "content": [image]}) == (
        {"role": "user", "content": [{"type": "input_image", "hidden": "[media: 42 bytes]"}]},
        {"media": 1},
    )


def test_a_summary_quotes_tools_and_is_hidden() -> None:
    """A reminder that somebody else wrote is the text of a message."""
    item = {"role": "user", "content": f"<system-reminder>{HIDDEN}</system-reminder>"}
    shown, counts = read(item, reminder=Reminder(1, "o", 1))
    assert (shown["role"], counts) == ("user", {"summary": 1})
    assert HIDDEN not in json.dumps(shown)
    assert read(item) == (item, {})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    "type role id call_id tool_call_id name status content output arguments text tool_calls"
    " function refusal reasoning summary".split()
)
KINDS = st.sampled_from([str(item.get("type", "message")) for item in ITEMS])


@given(st.dictionaries(MEMBERS, JSON, max_size=6), KINDS)
def test_anything_can_be_shown_and_nothing_is_added(members: Message, kind: str) -> None:
    """Every text that is shown stood there, or is a placeholder."""
    item = members | {"type": kind}
    shown, _ = read(item)
    allowed = {*texts(item)}
    for text in texts(shown):
        assert text in allowed or (text.startswith("[") and text.endswith(" bytes]")), text
    again, _ = read(shown)
    assert again.keys() <= shown.keys()


@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_who_may_see_everything_gets_the_very_bytes(item: Message) -> None:
    line = encode_entry(Entry(1, 0, json.dumps(item, indent=None).encode()))
    assert Projection(full=True, redact=False).line(line) is line


# Over the wire: current and archived by the same function.


@asynccontextmanager
async def reader(daemon: Daemon, peer: Peer, *scopes: str) -> AsyncGenerator[Peer]:
    made = await peer.call("token.create", label="a reader", scopes=scopes)
    async with daemon.connect() as weaker:
        await weaker.call("protocol.initialize", token=made["token"])
        yield weaker


async def exported(peer: Peer, form: str, **params: object) -> tuple[str, Message]:
    text, cursor = "", None
    while True:
        params |= {"session_id": "a", "format": form, "cursor": cursor}
        answer = await peer.call("session.export", **params)
        text += answer["chunk"]
        cursor = answer["next_cursor"]
        if cursor is None:
            return text, answer["manifest"]["redaction"]


def corpus_items(project_root: Path) -> list[Message]:
    """Some of each kind, where the corpus is there."""
    found: list[Message] = []
    for path in sorted((project_root.parent / "shared" / "corpus").glob("1[3-7]-*/*.items.json")):
        found += json.loads(path.read_bytes())
    return [
        item
        for item in found
        if len(json.dumps(item)) < 50_000 and item.get("role") not in ("system", "developer")
    ]


@pytest.mark.promise("S7")
@pytest.mark.parametrize("scopes", [["session.read"], ["history.full"]])
async def test_a_history_looks_the_same_when_it_is_archived(
    daemon: Daemon, peer: Peer, scopes: list[str], project_root: Path
) -> None:
    """Promise 10: by pages of any size, in every form, for each principal."""
    items = ITEMS + corpus_items(project_root)
    await peer.call("session.create", session_id="a", items=items)
    async with reader(daemon, peer, *scopes) as weaker:

        async def look() -> list[Any]:
            seen: list[Any] = [
                await weaker.entries("a", revision=1, **params)
                for params in ({}, {"limit": 7}, {"max_bytes": 1}, {"order": "desc", "limit": 7})
            ]
            return seen + [
                await exported(weaker, form, revision=1, max_bytes=max_bytes)
                for form in ("jsonl", "json", "markdown")
                for max_bytes in (None, 900)
            ]

        looks = [await look()]
        await peer.call("session.rewind", session_id="a", after_entry_id=1)
        looks.append(await look())
        for seen in looks:  # where an export says that it is of an archive
            for index in (6, 7):
                seen[index] = json.loads(seen[index][0])["histories"][0]["entries"]
            for index in (8, 9):
                seen[index] = seen[index][0].partition("##")[2]
        assert looks[0] == looks[1]
        shown = json.dumps(looks)
        if scopes == ["session.read"]:
            assert HIDDEN not in shown
            assert KEY not in shown
            assert looks[0][0] == looks[0][1] == looks[0][2] == looks[0][3][::-1]
            page = await weaker.call("session.get", session_id="a", revision=1)
            assert page["redaction"]["policy"] == "policy"
            assert page["redaction"]["counts"]["openai_key"] == 1
            assert page["redaction"]["counts"]["tool_output"] > 3
        else:
            assert [entry["item"] for entry in looks[0][0]] == items
            page = await weaker.call("session.get", session_id="a", revision=1)
            assert page["redaction"] == {"policy": "none", "counts": {}}
    assert await peer.items("a", revision=1) == items


@pytest.mark.promise("S7")
async def test_a_compaction_makes_no_text_of_what_is_hidden(daemon: Daemon, peer: Peer) -> None:
    """Whoever may compact could otherwise read what tools gave, in the summary of it."""
    items = [{"role": "user", "content": SHOWN}, *ITEMS[6:8]] * 5
    await peer.call("session.create", session_id="a", items=items)
    await peer.call("session.compact", session_id="a", force=True)
    assert HIDDEN in json.dumps(await peer.items("a"))
    async with reader(daemon, peer, "session.read", "session.compact") as weaker:
        page = await weaker.call("session.get", session_id="a")
        assert page["redaction"]["counts"] == {"summary": 1}
        seen = [page] + [await exported(weaker, form) for form in ("jsonl", "json", "markdown")]
        assert HIDDEN not in json.dumps(seen)


async def test_a_cursor_is_for_who_may_see_as_much(daemon: Daemon, peer: Peer) -> None:
    await peer.call("session.create", session_id="a", items=ITEMS)
    answer = await peer.call("session.export", session_id="a", format="jsonl", max_bytes=5)
    async with reader(daemon, peer, "session.read") as weaker:
        id = await weaker.ask(
            "session.export", session_id="a", format="jsonl", cursor=answer["next_cursor"]
        )
        assert (await weaker.answer(id))["error"]["data"]["reason"] == "cursor_invalid"


async def test_who_may_compact_and_not_read_gets_no_transcript(start: Start) -> None:
    """`dry_run` shows the request to a model, word for word."""
    config = {"chat": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "window_tokens": 50_000}}
    async with start(summarizers=config) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=ITEMS)
        ask = {"session_id": "a", "summarizer": "chat", "dry_run": True}
        plan = (await peer.call("session.compact", **ask))["plan"]
        assert HIDDEN in json.dumps(plan["request"])
        async with reader(daemon, peer, "session.read", "session.compact") as weaker:
            assert (await weaker.call("session.compact", **ask))["plan"] == plan | {"request": None}
