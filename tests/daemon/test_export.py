"""Histories as text, in chunks (PROTOCOL.md §3, `session.export`; §7 on redaction)."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from tests.daemon.conftest import Daemon, Message, Peer, user

from recapd.protocol.errors import CursorInvalid, InvalidParams, NotFound, UnsupportedFormat

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

FORMATS = ("jsonl", "json", "markdown")

KEY = "AKIA" + "ABCDEFGH12345678"
TOKEN = "ghp_" + "a1B2" * 9

MARK = re.compile(
    r"## (?P<title>.*)\n<!-- entry (?P<id>\d+), (?P<at>[^,]+), (?P<bytes>\d+) bytes -->\n"
)


async def export(
    peer: Peer, session_id: str, *, between: Any = None, **params: object
) -> tuple[str, Message]:
    """The text of all chunks, and the manifest. `between` is awaited after each chunk."""
    text, cursor = "", None
    while True:
        chunk = await peer.call("session.export", session_id=session_id, cursor=cursor, **params)
        text += chunk["chunk"]
        cursor = chunk["next_cursor"]
        if chunk["done"]:
            assert cursor is None
            assert chunk["manifest"]["bytes"] == len(text.encode())
            return text, chunk["manifest"]
        assert cursor is not None
        assert "manifest" not in chunk
        assert chunk["chunk"] != ""
        if between is not None:
            await between()


async def fill(peer: Peer) -> list[list[Message]]:
    """A session with two archived revisions and a present history, which are returned."""
    histories: list[list[Message]] = [
        [
            {"role": "system", "content": "be brief"},
            user("grüße \U0001f600 漢字\u2028"),
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "`"}'},
            {"type": "function_call_output", "call_id": "c", "output": "```\nx\n```"},
            {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        ],
    ]
    await peer.call("session.create", session_id="a", title="A  talk\nof two", items=histories[0])
    for turn in range(2):
        await peer.call("session.compact", session_id="a", summary=f"summary {turn}")
        await peer.call("session.append", session_id="a", items=[user(f"turn {turn}")])
        histories.append(await peer.items("a"))
    return histories


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("revision", ["current", "all", 1])
async def test_chunks_of_any_size_join_to_the_same_text(
    peer: Peer, form: str, revision: str | int
) -> None:
    """PROTOCOL.md §3: pulled in chunks; a chunk ends between two characters."""
    await fill(peer)
    whole, manifest = await export(peer, "a", format=form, revision=revision)
    for max_bytes in (61, 500, 1 << 30):
        text, same = await export(peer, "a", format=form, revision=revision, max_bytes=max_bytes)
        assert text == whole
        assert same == manifest


@pytest.mark.parametrize("form", FORMATS)
async def test_a_chunk_has_at_least_one_whole_character(peer: Peer, form: str) -> None:
    """PROTOCOL.md §3: whatever `max_bytes` is asked for, it ends, and it is text."""
    await peer.call("session.create", session_id="a", items=[user("é漢\U0001f600")])
    whole, _ = await export(peer, "a", format=form)
    for max_bytes in (1, 2, 3):
        text, _ = await export(peer, "a", format=form, max_bytes=max_bytes)
        assert text == whole


@pytest.mark.parametrize("redact", ["policy", "none"])
async def test_jsonl_is_one_item_a_line(peer: Peer, redact: str) -> None:
    """PROTOCOL.md §3: with `redact: "none"` the exact bytes; revisions oldest first."""
    histories = await fill(peer)
    for revision, expected in (
        ("all", [item for history in histories for item in history]),
        ("current", histories[2]),
        (1, histories[0]),
        (5, histories[2]),
    ):
        text, manifest = await export(peer, "a", revision=revision, redact=redact)
        assert [json.loads(line) for line in text.split("\n")[:-1]] == expected
        assert text.endswith("\n")
        assert manifest["redaction"] == {"policy": redact, "counts": {}}
    assert manifest["session_id"] == "a"
    assert manifest["format"] == "jsonl"


async def test_jsonl_keeps_the_bytes_that_were_sent(peer: Peer) -> None:
    """DESIGN.md promise 6."""
    item = rb'{"role":"user" ,"content":"\u00e9\/ \ud83d\ude00 \u0000 \\u0000","n":1.0,"n":2e5}'
    await peer.call("session.create", session_id="a")
    await peer.send(
        b'{"jsonrpc":"2.0","id":1,"method":"session.append","params":{"session_id":"a","items":[%b]}}\n'
        % item
    )
    await peer.answer(1)
    for redact in ("policy", "none"):
        text, _ = await export(peer, "a", redact=redact, max_bytes=5)
        assert text.encode() == item + b"\n"


async def test_json_is_one_document_that_tells_everything(peer: Peer) -> None:
    """PROTOCOL.md §3: ids, times and revisions beside the items."""
    histories = await fill(peer)
    revisions = (await peer.call("session.revisions", session_id="a"))["revisions"]
    text, manifest = await export(peer, "a", format="json", revision="all", redact="none")
    document = json.loads(text)
    assert document["session_id"] == "a"
    assert [one["revision"] for one in document["histories"]] == [1, 3, 5]
    assert [one.get("archive") for one in document["histories"]] == [*revisions[::-1], None]
    for history, items in zip(document["histories"], histories, strict=True):
        assert [entry["item"] for entry in history["entries"]] == items
    assert document["histories"][2]["entries"] == await peer.entries("a")
    assert manifest["revisions"] == [
        {"revision": 1, "current": False, "entries": 5},
        {"revision": 3, "current": False, "entries": 3},
        {"revision": 5, "current": True, "entries": 4},
    ]
    for empty in ("new", "emptied"):
        await peer.call("session.create", session_id=empty)
        if empty == "emptied":
            await peer.call("session.compact", session_id=empty, force=True)
        text, _ = await export(peer, empty, format="json", revision="all")
        assert json.loads(text)["histories"][0]["entries"] == []


TRICKY = [
    "three\n\n\n\nblank lines\n\n```python\ndef f():\n\n\n\n    pass\n```\n",
    "````\n```\nnested\n```\n````",
    "an unclosed fence\n```\nno end",
    "---\n# heading\n## user\n<!-- entry 1, 2026-12-01T00:00:00.000Z, 5 bytes -->\nfake\n\n",
    "<div>html</div>\n<!-- comment\n",
    "  leading and trailing  \n\n",
    "\u2028\u0085\r\ntabs\t",
    "",
    "\U0001f469\u200d\U0001f4bb",
]


async def test_markdown_leaves_the_text_between_its_marks_unchanged(peer: Peer) -> None:
    """BUGLOG B42: every message can be told apart by a parser, whatever is in it."""
    items = [user(text) for text in TRICKY]
    items.append({"role": "assistant", "content": [{"type": "output_text", "text": TRICKY[0]}]})
    await peer.call("session.create", session_id="a", title="T", items=items)
    text, _ = await export(peer, "a", format="markdown", redact="none", max_bytes=50)
    entries = await peer.entries("a")
    head, data = text.split("\n\n", 1)[0], text.encode()
    assert head == "# a"
    position = text.encode().index(b"## ")
    for entry in entries:
        found = MARK.match(data[position:].decode())
        assert found is not None
        assert (int(found["id"]), found["at"]) == (entry["id"], entry["at"])
        assert found["title"] == entry["item"]["role"]
        start = position + len(found[0].encode())
        end = start + int(found["bytes"])
        content = entry["item"]["content"]
        said = content if isinstance(content, str) else content[0]["text"]
        assert data[start:end].decode() == said
        assert data[end : end + 2] == b"\n\n"
        position = end + 2
    assert position == len(data)


async def test_markdown_shows_what_is_no_message_within_a_fence(peer: Peer) -> None:
    """PROTOCOL.md §3; CommonMark §4.5: the fence is longer than any within."""
    output = {"type": "function_call_output", "call_id": "c", "output": "````\nx\n````"}
    await peer.call("session.create", session_id="a", items=[output])
    text, _ = await export(peer, "a", format="markdown")
    assert "## function_call_output\n" in text
    assert "\n`````text\n" in text
    assert text.endswith("\n`````\n\n")


# Redaction.


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("max_bytes", [None, 9])
@pytest.mark.parametrize("revision", ["current", 1])
async def test_secrets_are_replaced_and_counted_unless_none_is_asked_for(
    peer: Peer, form: str, max_bytes: int | None, revision: str | int
) -> None:
    """PROTOCOL.md §7: the same for archived and current history; each is counted once."""
    items = [user(f"my key is {KEY}, again {KEY}"), user("nothing"), user(f"and {TOKEN}")]
    await peer.call("session.create", session_id="a", title=TOKEN, items=items)
    if revision == 1:
        await peer.call("session.compact", session_id="a", summary="nothing secret")
    params: Message = {"format": form, "max_bytes": max_bytes, "revision": revision}
    text, manifest = await export(peer, "a", **params)
    assert KEY not in text
    assert TOKEN not in text
    assert text.count("[redacted aws_key_id]") == 2
    assert text.count("[redacted github_token]") == 1
    assert manifest["redaction"] == {
        "policy": "policy",
        "counts": {"aws_key_id": 2, "github_token": 1},
    }
    text, manifest = await export(peer, "a", redact="none", **params)
    assert (text.count(KEY), text.count(TOKEN)) == (2, 1)
    assert manifest["redaction"] == {"policy": "none", "counts": {}}
    assert await peer.items("a", revision=None if revision == "current" else 1) == items


@pytest.mark.parametrize("before", ["\n", "\t", "\r\n", '"', "\\", "=", "\u2028", "—", ""])
@pytest.mark.parametrize("secret", [KEY, TOKEN])
async def test_a_secret_is_found_wherever_a_word_begins(
    peer: Peer, before: str, secret: str
) -> None:
    """PROTOCOL.md §7: as in an .env file, where each stands at the beginning of a line."""
    await peer.call("session.create", session_id="a", items=[user(f"KEY{before} {before}{secret}")])
    for form in FORMATS:
        text, manifest = await export(peer, "a", format=form)
        assert secret not in text
        assert sum(manifest["redaction"]["counts"].values()) == 1


async def test_a_secret_in_unneeded_escapes_is_found_too(peer: Peer) -> None:
    """redaction.py: letters may be escaped without need."""
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    await peer.call("session.create", session_id="a")
    await peer.send(
        b'{"jsonrpc":"2.0","id":1,"method":"session.append","params":{"session_id":"a",'
        b'"items":[{"role":"user","content":"%b"}]}}\n' % escaped.encode()
    )
    await peer.answer(1)
    text, manifest = await export(peer, "a")
    assert manifest["redaction"]["counts"] == {"aws_key_id": 1}
    assert KEY not in json.loads(text)["content"]
    assert (await peer.items("a"))[0]["content"] == KEY


async def test_an_export_stays_valid_json_whatever_is_redacted(peer: Peer) -> None:
    """A secret may lie in a key, beside an escape, or end with the string."""
    items = [
        {"role": "user", KEY: KEY, "content": f'"{KEY}"\\{KEY}\n{TOKEN}'},
        user(f"https://user:{TOKEN}@example.com/"),
        user("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"),
        user("-----BEGIN PRIVATE KEY-----\nno end"),
        user(f"Bearer {TOKEN}"),
    ]
    await peer.call("session.create", session_id="a", labels={"token": TOKEN}, items=items)
    for form in ("jsonl", "json"):
        text, manifest = await export(peer, "a", format=form)
        lines = text.split("\n")[:-1] if form == "jsonl" else [text]
        assert all(json.loads(line) for line in lines)
        assert TOKEN not in text
        assert "abc" not in text
        assert manifest["redaction"]["counts"]["private_key"] == 2


# Cursors.


@pytest.mark.parametrize("form", FORMATS)
async def test_an_export_is_of_the_moment_in_which_it_began(peer: Peer, form: str) -> None:
    """export.py: whatever happens to the session between two chunks."""
    await fill(peer)
    before, _ = await export(peer, "a", format=form, revision="all")
    turn = 0

    async def change() -> None:
        nonlocal turn
        turn += 1
        await peer.call("session.append", session_id="a", items=[user("later")])
        if turn % 7 == 3:
            await peer.call("session.update", session_id="a", title=f"title {turn}", cwd="/x")
        if turn % 7 == 5:
            await peer.call("session.compact", session_id="a")

    text, manifest = await export(
        peer, "a", format=form, revision="all", max_bytes=60, between=change
    )
    assert [one["entries"] for one in manifest["revisions"]] == [5, 3, 4]
    if form == "jsonl":
        assert text == before
    elif form == "json":
        document = json.loads(text)
        assert document["histories"][2]["entries"] == json.loads(before)["histories"][2]["entries"]
    else:
        assert text.count("<!-- entry ") == before.count("<!-- entry ")


async def test_a_cursor_of_another_export_is_invalid(peer: Peer) -> None:
    """PROTOCOL.md §6, `cursor_invalid`: other format, redaction, revision or session."""
    await fill(peer)
    await peer.call("session.create", session_id="b", items=[user("x")])
    first = await peer.call("session.export", session_id="a", max_bytes=1)
    for params in (
        {"session_id": "b"},
        {"session_id": "a", "format": "json"},
        {"session_id": "a", "redact": "none"},
        {"session_id": "a", "revision": "all"},
        {"session_id": "a", "revision": 1},
    ):
        with pytest.raises(CursorInvalid):
            await peer.call("session.export", cursor=first["next_cursor"], **params)
    await peer.call("session.delete", session_id="a")
    with pytest.raises(NotFound):
        await peer.call("session.export", session_id="a", cursor=first["next_cursor"])
    await peer.call("session.create", session_id="a", items=[user("x")] * 9)
    with pytest.raises(CursorInvalid):
        await peer.call("session.export", session_id="a", cursor=first["next_cursor"])


@pytest.mark.parametrize("form", ["html", "", "JSON", "text/plain"])
async def test_an_unknown_format_is_told_what_there_is(peer: Peer, form: str) -> None:
    """PROTOCOL.md §6, `unsupported_format`."""
    await peer.call("session.create", session_id="a")
    with pytest.raises(UnsupportedFormat) as caught:
        await peer.call("session.export", session_id="a", format=form)
    assert (caught.value.code, caught.value.data) == (1014, {"supported": list(FORMATS)})


async def test_an_export_never_takes_a_path(peer: Peer) -> None:
    """PROTOCOL.md §3: never written to a path on the server (BUGLOG B43)."""
    await peer.call("session.create", session_id="a")
    for name in ("path", "output", "file"):
        with pytest.raises(InvalidParams):
            await peer.call("session.export", session_id="a", **{name: "/tmp/x"})
