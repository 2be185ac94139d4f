"""Sessions: made, changed, appended to, listed, removed (PROTOCOL.md §2, §3)."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.conftest import Daemon, Message, Peer, user

from recapd.protocol.errors import (
    AlreadyExists,
    CursorInvalid,
    InvalidItem,
    InvalidParams,
    NotFound,
    SessionArchived,
)

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


# session.create


async def test_a_new_session_is_at_revision_and_generation_zero(peer: Peer) -> None:
    """PROTOCOL.md §2, "Session": every member, as it is at first."""
    created = await peer.call(
        "session.create", title="a talk", cwd="/somewhere", labels={"project": "x"}
    )
    session = created["session"]
    assert created["session_id"] == session["session_id"]
    assert session == {
        "session_id": session["session_id"],
        "title": "a talk",
        "cwd": "/somewhere",
        "labels": {"project": "x"},
        "created_at": session["created_at"],
        "updated_at": session["created_at"],
        "revision": 0,
        "generation": 0,
        "entries": 0,
        "tokens": {"count": 0, "method": "o200k_base", "exact": True},
        "archived_revisions": [],
        "durability": "durable",
        "state": "active",
        "parent": None,
        "busy": False,
        "auto_compact": None,
    }
    assert abs(datetime.now(UTC) - datetime.fromisoformat(session["created_at"])) < timedelta(
        minutes=1
    )
    assert session["created_at"].endswith("Z")


async def test_first_items_come_with_the_session(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.create`: one change, so revision 1."""
    created = await peer.call("session.create", session_id="a", items=[user("x"), user("y")])
    assert (created["session"]["revision"], created["session"]["entries"]) == (1, 2)
    assert await peer.items("a") == [user("x"), user("y")]


async def test_an_id_that_is_taken_is_refused(peer: Peer) -> None:
    """PROTOCOL.md §6, `already_exists`."""
    await peer.call("session.create", session_id="a", title="first")
    with pytest.raises(AlreadyExists) as caught:
        await peer.call("session.create", session_id="a", title="second", items=[user("x")])
    assert caught.value.code == 1005
    read = await peer.call("session.get", session_id="a")
    assert (read["session"]["title"], read["entries"]) == ("first", [])


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "session_id",
    ["a", "A.b_c:d-9", "x" * 128, ".", "..", "-", "con"],
)
async def test_an_id_may_be_of_the_documented_letters(
    peer: Peer, folder: Path, session_id: str
) -> None:
    """PROTOCOL.md §3, `session.create`: never used as a path (BUGLOG B43)."""
    before = files_in(folder)
    await peer.call("session.create", session_id=session_id, items=[user("x")])
    await peer.call("session.compact", session_id=session_id)
    assert await peer.items(session_id, revision=1) == [user("x")]
    new = files_in(folder) - before
    assert all(path.parts[:2] == ("data", "archives") for path in new if "store" not in path.name)
    assert len(new) <= 4


@pytest.mark.parametrize(
    "session_id",
    ["", "../../x", "/etc/x", "a/b", "~", "a b", "a\n", "a\0b", "é", "x" * 129, "x" * 5000],
)
@pytest.mark.parametrize("method", ["session.create", "session.get", "session.delete"])
async def test_an_id_of_other_letters_is_invalid(peer: Peer, method: str, session_id: str) -> None:
    """BUGLOG B43."""
    with pytest.raises(InvalidParams) as caught:
        await peer.call(method, session_id=session_id)
    assert caught.value.data["errors"][0]["path"] == "$.session_id"


async def test_a_transient_session_ends_with_its_daemon(start: Start) -> None:
    """PROTOCOL.md §3, `durability`; a durable one does not."""
    async with start() as daemon, daemon.connect() as peer:
        for name, durability in (("kept", "durable"), ("gone", "transient")):
            create = await peer.call(
                "session.create", session_id=name, durability=durability, items=[user("x")]
            )
            assert create["session"]["durability"] == durability
            await peer.call("session.compact", session_id=name)
    async with start() as daemon, daemon.connect() as peer:
        listed = (await peer.call("session.list"))["sessions"]
        assert [session["session_id"] for session in listed] == ["kept"]
        with pytest.raises(NotFound):
            await peer.call("session.get", session_id="gone")


# session.append


async def test_an_append_is_one_revision_and_tells_the_new_ids(peer: Peer) -> None:
    """PROTOCOL.md §2: "one append call is one"; ids rise by allocation."""
    await peer.call("session.create", session_id="a")
    first = await peer.call("session.append", session_id="a", items=[user("x"), user("y")])
    second = await peer.call("session.append", session_id="a", items=[user("z")])
    assert (first["entry_ids"], second["entry_ids"]) == ([1, 2], [3])
    assert (first["session"]["revision"], second["session"]["revision"]) == (1, 2)
    assert second["session"]["generation"] == 0
    assert second["session"]["entries"] == 3
    assert second["session"]["tokens"]["count"] > first["session"]["tokens"]["count"] > 0
    assert (first["warnings"], second["warnings"]) == ([], [])
    entries = await peer.entries("a")
    assert [entry["id"] for entry in entries] == [1, 2, 3]
    assert all(set(entry) == {"id", "at", "item"} for entry in entries)


async def test_an_output_without_its_call_is_named_and_kept(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.append`."""
    await peer.call("session.create", session_id="a")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    outputs = [
        {"type": "function_call_output", "call_id": call_id, "output": "done"}
        for call_id in ("c1", "c2")
    ]
    appended = await peer.call("session.append", session_id="a", items=[call, *outputs])
    assert appended["warnings"] == [
        {"reason": "output_without_call", "entry_id": 3, "call_id": "c2"}
    ]
    assert await peer.items("a") == [call, *outputs]
    later = await peer.call("session.append", session_id="a", items=[outputs[0]])
    assert later["warnings"] == []
    tool = {"role": "tool", "tool_call_id": "t1", "content": "done"}
    chat = {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "type": "function"}]}
    assert (await peer.call("session.append", session_id="a", items=[tool]))["warnings"]
    pair = await peer.call("session.append", session_id="a", items=[chat, tool])
    assert pair["warnings"] == []


async def test_items_with_the_same_id_are_kept_each(peer: Peer) -> None:
    """BUGLOG B36: stored twice, never an overwrite; an `operation_id` makes it once."""
    await peer.call("session.create", session_id="a")
    items = [{"id": f"msg_{number}", **user("x")} for number in range(10)]
    await peer.call("session.append", session_id="a", items=items)
    await peer.call("session.append", session_id="a", items=items)
    await peer.call("session.append", session_id="a", items=[{"id": "msg_0", **user("other")}])
    assert await peer.items("a") == [*items, *items, {"id": "msg_0", **user("other")}]


@pytest.mark.parametrize("bad", [3, "x", None, True, [], [{}], 1.5])
async def test_an_item_that_is_no_object_is_named_and_nothing_is_appended(
    peer: Peer, bad: object
) -> None:
    """PROTOCOL.md §6, `invalid_item`; all or nothing."""
    await peer.call("session.create", session_id="a")
    with pytest.raises(InvalidItem) as caught:
        await peer.call("session.append", session_id="a", items=[user("x"), bad])
    assert caught.value.code == 1012
    assert [fault["path"] for fault in caught.value.data["errors"]] == ["$.items[1]"]
    with pytest.raises(InvalidItem):
        await peer.call("session.create", session_id="b", items=[bad])
    assert await peer.items("a") == []
    with pytest.raises(NotFound):
        await peer.call("session.get", session_id="b")


async def test_special_tokens_are_ordinary_text(peer: Peer) -> None:
    """BUGLOG B67: in messages, tool arguments, titles, labels and the summary."""
    special = "<|endoftext|><|im_start|><|fim_prefix|><|endofprompt|><|return|>"
    await peer.call("session.create", session_id="a", title=special, labels={special: special})
    items = [
        user(special),
        {"type": "function_call", "call_id": special, "name": special, "arguments": special},
        {"type": "function_call_output", "call_id": special, "output": special},
    ]
    await peer.call("session.append", session_id="a", items=items)
    assert await peer.items("a") == items
    done = await peer.call("session.compact", session_id="a", summary=special)
    assert done["tokens_after"] == {**done["tokens_after"], "exact": True}
    (entry,) = await peer.entries("a")
    assert special in entry["item"]["content"][0]["text"]
    assert await peer.items("a", revision=1) == items


async def test_naughty_strings_are_stored_and_returned_equal(peer: Peer, corpus: Path) -> None:
    """BUGLOG B35: as text, tool name, session title and metadata; all others still work."""
    strings: list[str] = json.loads((corpus / "28-naughty-strings" / "blns.json").read_bytes())
    assert len(strings) > 500
    messages: list[Message] = []
    for number, text in enumerate(strings):
        messages.append(
            {
                "session_id": f"s{number:03}",
                "title": text[:1000],
                "cwd": text[:4000],
                "labels": {text[:128] or "empty": text[:1000]},
                "items": [user(text), {"type": "function_call", "call_id": "c", "name": text}],
            }
        )
    for start in range(0, len(messages), 100):
        await peer.say(
            [
                {"jsonrpc": "2.0", "id": m["session_id"], "method": "session.create", "params": m}
                for m in messages[start : start + 100]
            ]
        )
        for answer in await peer.message():
            assert "result" in answer, answer
    listed: list[Any] = []
    cursor: str | None = None
    while True:
        page = await peer.call(
            "session.list", sort="session_id", order="asc", limit=100, cursor=cursor
        )
        listed += page["sessions"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    for message, session in zip(messages, listed, strict=True):
        assert {name: session[name] for name in ("session_id", "title", "cwd", "labels")} == {
            name: message[name] for name in ("session_id", "title", "cwd", "labels")
        }
        assert await peer.items(message["session_id"]) == message["items"]
        found = await peer.call(
            "session.list",
            filter={"title_contains": message["title"], "labels": message["labels"]},
        )
        assert message["session_id"] in [one["session_id"] for one in found["sessions"]]
    for message in messages[::10]:
        for form in ("jsonl", "json", "markdown"):
            await peer.call("session.export", session_id=message["session_id"], format=form)


# session.update


async def test_an_update_changes_what_it_names_and_null_clears(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.update`: absent keeps; neither revision nor generation rise."""
    await peer.call(
        "session.create", session_id="a", title="t", cwd="/c", labels={"x": "1"}, items=[user("x")]
    )
    changes: list[tuple[Message, Message]] = [
        ({}, {"title": "t", "cwd": "/c", "labels": {"x": "1"}, "state": "active"}),
        ({"title": "u"}, {"title": "u", "cwd": "/c", "labels": {"x": "1"}, "state": "active"}),
        ({"cwd": None}, {"title": "u", "cwd": None, "labels": {"x": "1"}, "state": "active"}),
        ({"labels": {"y": "2"}}, {"title": "u", "labels": {"y": "2"}, "state": "active"}),
        ({"labels": None, "title": None}, {"title": None, "labels": {}, "state": "active"}),
        ({"state": "archived"}, {"title": None, "state": "archived"}),
        ({"state": "active"}, {"title": None, "state": "active"}),
    ]
    for params, expected in changes:
        session = (await peer.call("session.update", session_id="a", **params))["session"]
        assert {**session, **expected} == session
        assert (session["revision"], session["generation"]) == (1, 0)
        read = await peer.call("session.get", session_id="a", view="info")
        assert read["session"] == session


async def test_an_archived_session_takes_no_history(peer: Peer) -> None:
    """PROTOCOL.md §6, `session_archived`; reading goes on, and it can be made active again."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.call("session.update", session_id="a", state="archived")
    for method, params in (
        ("session.append", {"items": [user("y")]}),
        ("session.compact", {}),
        ("session.restore", {"revision": 1}),
        ("session.rewind", {"after_entry_id": 0}),
    ):
        with pytest.raises(SessionArchived) as caught:
            await peer.call(method, session_id="a", **params)
        assert caught.value.code == 1006
    assert await peer.items("a") == [user("x")]
    await peer.call("session.update", session_id="a", state="active")
    await peer.call("session.append", session_id="a", items=[user("y")])


# session.delete


async def test_a_deleted_session_is_gone_with_its_archives(peer: Peer, folder: Path) -> None:
    """PROTOCOL.md §3, `session.delete`: a second call answers `false`."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.call("session.compact", session_id="a")
    archives = folder / "data" / "archives"
    assert len(list(archives.rglob("*.zst"))) == 1
    assert await peer.call("session.delete", session_id="a") == {"deleted": True}
    assert await peer.call("session.delete", session_id="a") == {"deleted": False}
    assert list(archives.iterdir()) == []
    for method, params in (
        ("session.get", {}),
        ("session.get", {"revision": 1}),
        ("session.revisions", {}),
        ("session.append", {"items": [user("y")]}),
        ("session.update", {"title": "t"}),
        ("session.compact", {}),
        ("session.export", {}),
        ("session.subscribe", {}),
    ):
        with pytest.raises(NotFound) as caught:
            await peer.call(method, session_id="a", **params)
        assert (caught.value.code, caught.value.data) == (1001, {"what": "session"})
    assert (await peer.call("session.list"))["sessions"] == []


async def test_a_session_that_never_was_and_a_deleted_one_are_the_same_bytes(peer: Peer) -> None:
    """PROTOCOL.md §6, `not_found`."""
    await peer.call("session.create", session_id="was")
    await peer.call("session.delete", session_id="was")
    answers = [
        await peer.answer(await peer.ask("session.get", session_id=name))
        for name in ("was", "never")
    ]
    assert answers[0]["error"] == answers[1]["error"]


async def test_a_new_session_of_an_old_id_has_nothing_of_the_old_one(peer: Peer) -> None:
    """DESIGN.md promise 7: its events go on counting, its entries and revisions are its own."""
    await peer.call("session.create", session_id="a", items=[user("old")], title="old")
    await peer.call("session.compact", session_id="a")
    last = (await peer.call("session.events", session_id="a", since=0))["next_seq"]
    await peer.call("session.delete", session_id="a")
    await peer.call("session.create", session_id="a")
    await peer.call("session.append", session_id="a", items=[user("new")])
    read = await peer.call("session.get", session_id="a")
    assert [entry["item"] for entry in read["entries"]] == [user("new")]
    assert (read["session"]["title"], read["session"]["archived_revisions"]) == (None, [])
    assert (await peer.call("session.revisions", session_id="a"))["revisions"] == []
    events = (await peer.call("session.events", session_id="a", since=last))["events"]
    assert [event["method"] for event in events] == [
        "session.deleted",
        "session.created",
        "history.appended",
    ]
    assert [event["seq"] for event in events] == [last + 1, last + 2, last + 3]


# session.list


async def ids(peer: Peer, **params: Any) -> list[str]:
    """The ids of all sessions of a list, by pages."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = await peer.call("session.list", cursor=cursor, **params)
        assert len(page["sessions"]) <= params.get("limit", 100)
        found += [session["session_id"] for session in page["sessions"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def test_a_list_is_sorted_and_paged_by_its_keys(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.list`: keyset pages, also where many were made at one moment."""
    names = [f"s{number:02}" for number in (5, 3, 9, 1, 7, 0, 8, 2, 6, 4)]
    for name in names:
        await peer.call("session.create", session_id=name)
    for name in reversed(names):
        await peer.call("session.update", session_id=name, title=name)
    for limit in (1, 3, 10, 100):
        assert await ids(peer, limit=limit, sort="session_id", order="asc") == sorted(names)
        assert await ids(peer, limit=limit, sort="session_id") == sorted(names, reverse=True)
        for sort in ("created_at", "updated_at"):
            rising = await ids(peer, limit=limit, sort=sort, order="asc")
            assert await ids(peer, limit=limit, sort=sort) == rising[::-1]
            sessions = (await peer.call("session.list", sort=sort, order="asc"))["sessions"]
            assert [(one[sort], one["session_id"]) for one in sessions] == sorted(
                (one[sort], one["session_id"]) for one in sessions
            )
            assert sorted(rising) == sorted(names)
    assert await ids(peer) == await ids(peer, sort="updated_at", order="desc")


async def test_a_list_can_be_filtered(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.list`: all conditions must hold."""
    await peer.call("session.create", session_id="a", title="Fix the Login", cwd="/one")
    await peer.call(
        "session.create", session_id="b", title="100% _done_", labels={"team": "x", "kind": "bug"}
    )
    await peer.call("session.create", session_id="c", cwd="/one", labels={"team": "x"})
    await peer.call("session.update", session_id="c", state="archived")
    for wanted, expected in (
        ({}, "abc"),
        ({"state": "active"}, "ab"),
        ({"state": "archived"}, "c"),
        ({"cwd": "/one"}, "ac"),
        ({"cwd": "/One"}, ""),
        ({"cwd": "/one", "state": "active"}, "a"),
        ({"labels": {"team": "x"}}, "bc"),
        ({"labels": {"team": "x", "kind": "bug"}}, "b"),
        ({"labels": {"team": "y"}}, ""),
        ({"title_contains": "login"}, "a"),
        ({"title_contains": "%"}, "b"),
        ({"title_contains": "_DONE"}, "b"),
        ({"title_contains": "nothing"}, ""),
        ({"title_contains": ""}, "ab"),
    ):
        found = await ids(peer, filter=wanted, sort="session_id", order="asc", limit=1)
        assert "".join(found) == expected, wanted


async def test_times_are_compared_as_instants(peer: Peer) -> None:
    """BUGLOG B38: with `Z`, with an offset, with fractions; both bounds are exclusive."""
    session = (await peer.call("session.create", session_id="a"))["session"]
    at = datetime.fromisoformat(session["updated_at"])

    def written(instant: datetime) -> list[str]:
        return [
            instant.isoformat().replace("+00:00", "Z"),
            instant.astimezone(timezone(timedelta(hours=2))).isoformat(),
            instant.astimezone(timezone(-timedelta(hours=11, minutes=30))).isoformat(),
        ]

    tick = timedelta(microseconds=100)
    for instant, after, before in (
        (at - timedelta(days=1), True, False),
        (at - tick, True, False),
        (at, False, False),
        (at + tick, False, True),
        (at + timedelta(days=1), False, True),
    ):
        for text in written(instant):
            assert bool(await ids(peer, filter={"updated_after": text})) is after, text
            assert bool(await ids(peer, filter={"updated_before": text})) is before, text


@pytest.mark.parametrize(
    "time",
    [
        *("2026-12-01", "2026-12-01 10:00", "2026-12-01T10:00:00", "yesterday", "", 1796101169),
        *("2026-13-01T10:00:00Z", "2026-12-01T25:00:00Z", "2026-12-01T10:00:00+25:00"),
    ],
)
async def test_a_bad_time_is_an_error(peer: Peer, time: object) -> None:
    """BUGLOG B38: without a zone it is no instant."""
    with pytest.raises(InvalidParams) as caught:
        await peer.call("session.list", filter={"updated_after": time})
    assert caught.value.data["errors"][0]["path"] == "$.filter.updated_after"


async def test_reading_does_not_touch_a_session(start: Start) -> None:
    """BUGLOG B37: same entries, same order, same times, also after a restart."""
    async with start() as daemon, daemon.connect() as peer:
        for name in "abc":
            await peer.call("session.create", session_id=name, items=[user("x")])
            await peer.call("session.compact", session_id=name)
        before = await peer.call("session.list")
        for name in "ab":
            await peer.call("session.get", session_id=name)
            await peer.call("session.get", session_id=name, revision=1)
            await peer.call("session.export", session_id=name, revision="all")
            await peer.call("session.revisions", session_id=name)
            await peer.call("session.subscribe", session_id=name, since="start")
            await peer.call("session.events", session_id=name, since=0)
        assert await peer.call("session.list") == before
    async with start() as daemon, daemon.connect() as peer:
        assert await peer.call("session.list") == before


@pytest.mark.parametrize("cursor", ["", "x", "AAAA", "é", "e30=", "bnVsbA==", "W10=", "=" * 99])
async def test_a_cursor_that_nobody_gave_is_invalid(peer: Peer, cursor: str) -> None:
    """PROTOCOL.md §6, `cursor_invalid`."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    for method, params in (
        ("session.list", {}),
        ("session.get", {"session_id": "a"}),
        ("session.export", {"session_id": "a"}),
    ):
        with pytest.raises(CursorInvalid) as caught:
            await peer.call(method, cursor=cursor, **params)
        assert caught.value.code == 1010


async def test_a_cursor_of_another_list_is_invalid(peer: Peer) -> None:
    """PROTOCOL.md §6, `cursor_invalid`: for another order, and for another method."""
    for name in "ab":
        await peer.call("session.create", session_id=name, items=[user("x"), user("y")])
    listed = (await peer.call("session.list", limit=1))["next_cursor"]
    read = (await peer.call("session.get", session_id="a", limit=1))["next_cursor"]
    exported = (await peer.call("session.export", session_id="a", max_bytes=1))["next_cursor"]
    for method, params in (
        ("session.list", {"cursor": listed, "sort": "session_id"}),
        ("session.list", {"cursor": listed, "order": "asc"}),
        ("session.list", {"cursor": read}),
        ("session.list", {"cursor": exported}),
        ("session.get", {"cursor": listed, "session_id": "a"}),
        ("session.get", {"cursor": exported, "session_id": "a"}),
        ("session.export", {"cursor": listed, "session_id": "a"}),
        ("session.export", {"cursor": read, "session_id": "a"}),
    ):
        with pytest.raises(CursorInvalid):
            await peer.call(method, **params)
