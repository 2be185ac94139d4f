"""Reading histories: pages, cursors, archived revisions and their files (PROTOCOL.md §2, §3)."""

import base64
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.daemon.conftest import Daemon, Message, Peer, user

from recapd.protocol.errors import (
    ArchiveCorrupt,
    ArchiveMissing,
    CursorInvalid,
    InvalidParams,
    NotFound,
    RevisionNotFound,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


async def fill(peer: Peer, session_id: str, count: int) -> list[Message]:
    items = [user(f"{number} " + "x" * (number % 40)) for number in range(count)]
    await peer.call("session.create", session_id=session_id, items=items)
    return items


# Pages.


@pytest.mark.parametrize("limit", [1, 7, 20, 1000])
@pytest.mark.parametrize("revision", [None, 1])
async def test_pages_give_each_entry_once_in_either_order(
    peer: Peer, limit: int, revision: int | None
) -> None:
    """PROTOCOL.md §3, `session.get`: for the present history and for an archived one."""
    items = await fill(peer, "a", 20)
    if revision is not None:
        await peer.call("session.compact", session_id="a")
    rising = await peer.entries("a", limit=limit, revision=revision)
    falling = await peer.entries("a", limit=limit, revision=revision, order="desc")
    assert [entry["item"] for entry in rising] == items
    assert [entry["id"] for entry in rising] == list(range(1, 21))
    assert falling == rising[::-1]


@pytest.mark.parametrize("max_bytes", [1, 150, 400, 1 << 20])
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_ends_before_max_bytes_and_has_one_entry_at_least(
    peer: Peer, max_bytes: int, order: str
) -> None:
    """PROTOCOL.md §3: at `limit` or `max_bytes`, whichever comes first."""
    items = await fill(peer, "a", 12)
    found: list[Any] = []
    cursor = None
    while True:
        page = await peer.call(
            "session.get", session_id="a", max_bytes=max_bytes, order=order, cursor=cursor, limit=5
        )
        size = len(json.dumps(page["entries"], separators=(",", ":")))
        assert page["entries"]
        assert len(page["entries"]) == 1 or size <= max_bytes + 2
        assert len(page["entries"]) <= 5
        found += [entry["item"] for entry in page["entries"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == (items if order == "asc" else items[::-1])


async def test_a_page_has_two_hundred_entries_where_nothing_is_said(peer: Peer) -> None:
    """PROTOCOL.md §3: default limit 200, default max_bytes 1 MiB."""
    await fill(peer, "a", 250)
    page = await peer.call("session.get", session_id="a")
    assert len(page["entries"]) == 200
    await peer.call("session.create", session_id="b", items=[user("x" * 300_000)] * 5)
    page = await peer.call("session.get", session_id="b")
    assert len(page["entries"]) == 3


async def test_an_empty_history_is_an_empty_page(peer: Peer) -> None:
    await peer.call("session.create", session_id="a")
    for order in ("asc", "desc"):
        page = await peer.call("session.get", session_id="a", order=order)
        assert (page["entries"], page["next_cursor"], page["revision"]) == ([], None, 0)


async def test_info_has_no_entries(peer: Peer) -> None:
    """PROTOCOL.md §3, `view`."""
    await fill(peer, "a", 3)
    info = await peer.call("session.get", session_id="a", view="info")
    assert "entries" not in info
    assert (info["revision"], info["session"]["entries"], info["next_cursor"]) == (1, 3, None)
    with pytest.raises(RevisionNotFound):
        await peer.call("session.get", session_id="a", view="info", revision=5)
    with pytest.raises(NotFound):
        await peer.call("session.get", session_id="nobody", view="info")


# Cursors.


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_cursor_stays_with_its_history_while_the_session_changes(
    peer: Peer, order: str
) -> None:
    """PROTOCOL.md §3: "a cursor pins its revision: a page never mixes two"."""
    items = await fill(peer, "a", 9)
    expected = items if order == "asc" else items[::-1]
    found: list[Any] = []
    cursor = None
    for turn in range(9):
        page = await peer.call("session.get", session_id="a", limit=1, order=order, cursor=cursor)
        found += [entry["item"] for entry in page["entries"]]
        assert page["revision"] == 1
        cursor = page["next_cursor"]
        if turn % 2:
            await peer.call("session.append", session_id="a", items=[user("later")])
        if turn in (3, 6):
            await peer.call("session.compact", session_id="a")
    assert (found, cursor) == (expected, None)


async def test_a_cursor_of_an_archived_revision_goes_on_there(peer: Peer) -> None:
    """PROTOCOL.md §3, with and without naming the revision again."""
    items = await fill(peer, "a", 4)
    await peer.call("session.compact", session_id="a")
    for again in ({}, {"revision": 1}):
        page = await peer.call("session.get", session_id="a", revision=1, limit=3)
        rest = await peer.call(
            "session.get", session_id="a", cursor=page["next_cursor"], limit=3, **again
        )
        assert [e["item"] for e in page["entries"] + rest["entries"]] == items
        assert (page["revision"], rest["revision"]) == (1, 1)


async def test_a_cursor_of_another_request_is_invalid(peer: Peer) -> None:
    """PROTOCOL.md §6, `cursor_invalid`: another session, order or revision, or made again since."""
    await fill(peer, "a", 4)
    await fill(peer, "b", 4)
    page = await peer.call("session.get", session_id="a", limit=1)
    cursor = page["next_cursor"]
    for params in (
        {"session_id": "b"},
        {"session_id": "a", "order": "desc"},
        {"session_id": "a", "revision": 3},
    ):
        with pytest.raises(CursorInvalid):
            await peer.call("session.get", cursor=cursor, **params)
    await peer.call("session.delete", session_id="a")
    with pytest.raises(NotFound):
        await peer.call("session.get", session_id="a", cursor=cursor)
    await fill(peer, "a", 4)
    with pytest.raises(CursorInvalid):
        await peer.call("session.get", session_id="a", cursor=cursor)


def forged(cursor: str, **members: object) -> str:
    position = json.loads(base64.urlsafe_b64decode(cursor))
    assert members.keys() <= position.keys()
    return base64.urlsafe_b64encode(json.dumps(position | members).encode()).decode()


HUGE = [2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -1]


@pytest.mark.parametrize("number", HUGE)
async def test_a_forged_cursor_gets_an_answer(peer: Peer, number: int) -> None:
    """DESIGN.md promise 12: never a hang, never -32603 for what a client sent."""
    await fill(peer, "a", 5)
    await fill(peer, "b", 5)
    listed = (await peer.call("session.list", limit=1))["next_cursor"]
    read = (await peer.call("session.get", session_id="a", limit=1))["next_cursor"]
    params: Message = {"session_id": "a"}
    cursors: list[tuple[str, Message, str]] = [
        ("session.list", {}, forged(listed, value=number)),
        *(
            ("session.get", params, forged(read, **{name: number}))
            for name in ("revision", "generation", "total", "index")
        ),
    ]
    for form in ("jsonl", "json", "markdown"):
        params = {"session_id": "a", "format": form}
        exported = (await peer.call("session.export", max_bytes=1, **params))["next_cursor"]
        cursors += (
            ("session.export", params, forged(exported, **{name: number}))
            for name in ("generation", "total", "history", "piece", "offset", "bytes", "revision")
        )
    for method, params, cursor in cursors:
        answer = await peer.answer(await peer.ask(method, cursor=cursor, **params))
        if "error" in answer:
            assert answer["error"]["data"]["reason"] in ("cursor_invalid", "revision_not_found")


# Archived revisions.


async def test_revisions_tell_what_is_archived_newest_first(peer: Peer, folder: Path) -> None:
    """PROTOCOL.md §2, "Revision": `sha256` is what `sha256sum` prints for the archive file."""
    await fill(peer, "a", 3)
    results: list[Any] = []
    for turn in range(3):
        compact = await peer.call("session.compact", session_id="a", operation_id=f"op-{turn}")
        results.append(compact)
        await peer.call("session.append", session_id="a", items=[user("x")])
    revisions = (await peer.call("session.revisions", session_id="a"))["revisions"]
    session = (await peer.call("session.get", session_id="a", view="info"))["session"]
    assert [one["revision"] for one in revisions] == session["archived_revisions"] == [5, 3, 1]
    files = {
        hashlib.sha256(path.read_bytes()).hexdigest(): path
        for path in (folder / "data" / "archives").rglob("*.zst")
    }
    for revision, result in zip(revisions, reversed(results), strict=True):
        assert revision["kind"] == "compaction"
        assert revision["operation_id"] == result["operation_id"]
        assert revision["revision"] == result["archived_revision"]
        assert revision["tokens"] == result["tokens_before"]
        assert {name: revision[name] for name in ("sha256", "bytes", "entries")} == result[
            "archive"
        ]
        assert files[revision["sha256"]].stat().st_size == revision["bytes"]
        assert files[revision["sha256"]].stat().st_mode & 0o777 == 0o600
        printed = await anyio.run_process(["sha256sum", str(files[revision["sha256"]])])
        assert printed.stdout.startswith(revision["sha256"].encode())
    with pytest.raises(NotFound):
        await peer.call("session.revisions", session_id="nobody")


async def test_an_archive_can_be_read_without_recapd(peer: Peer, folder: Path) -> None:
    """DESIGN.md §1, "Archive file": header, one line an entry with the exact bytes, trailer."""
    item = rb'{"role":"user","content":"\u00e9","n":1.0}'
    await peer.call("session.create", session_id="a")
    await peer.send(
        b'{"jsonrpc":"2.0","id":1,"method":"session.append","params":{"session_id":"a","items":[%b]}}\n'
        % item
    )
    await peer.answer(1)
    await peer.call("session.compact", session_id="a", operation_id="op")
    (path,) = (folder / "data" / "archives").rglob("*.zst")
    text = zstd.decompress(path.read_bytes())
    header, entry, trailer = text.splitlines()
    assert item in entry
    assert json.loads(header)["session_id"] == "a"
    assert json.loads(header)["operation_id"] == "op"
    ending = json.loads(trailer)
    assert ending == {
        "entries": 1,
        "sha256": hashlib.sha256(text[: -len(trailer) - 1]).hexdigest(),
    }


async def test_every_archived_revision_has_the_bytes_it_was_given(peer: Peer) -> None:
    """DESIGN.md promise 6, 7: over many compactions; ids are never used again."""
    kept: dict[int, list[Message]] = {}
    await fill(peer, "a", 3)
    for turn in range(6):
        session = (await peer.call("session.get", session_id="a"))["session"]
        kept[session["revision"]] = await peer.entries("a")
        await peer.call("session.compact", session_id="a")
        await peer.call("session.append", session_id="a", items=[user(f"turn {turn}")])
    for revision, entries in kept.items():
        assert await peer.entries("a", revision=revision, limit=2) == entries
    ids = [entry["id"] for entries in kept.values() for entry in entries]
    items = {entry["id"]: entry for entries in kept.values() for entry in entries}
    for entries in kept.values():
        assert [items[entry["id"]] for entry in entries] == entries
    assert max(ids) == 3 + 2 * 5


async def test_a_revision_that_is_not_there_is_not_found(peer: Peer) -> None:
    """PROTOCOL.md §6: never current history instead."""
    await fill(peer, "a", 3)
    await peer.call("session.append", session_id="a", items=[user("y")])
    await peer.call("session.compact", session_id="a")
    for revision in (0, 1, 4, 2**53):
        with pytest.raises(RevisionNotFound) as caught:
            await peer.call("session.get", session_id="a", revision=revision)
        assert (caught.value.code, caught.value.data) == (1009, {"revision": revision})
        with pytest.raises(RevisionNotFound):
            await peer.call("session.export", session_id="a", revision=revision)
    assert len(await peer.items("a", revision=2)) == 4
    assert len(await peer.items("a", revision=3)) == 1


def remove(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def exchange(path: Path) -> None:
    (other,) = (one for one in path.parent.parent.rglob("*.zst") if one.parent != path.parent)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove, ArchiveMissing),
        (remove_folder, ArchiveMissing),
        (replace_by_folder, ArchiveMissing),
        (replace_by_link, ArchiveMissing),
        (replace_by_pipe, ArchiveMissing),
        (flip_a_bit, ArchiveCorrupt),
        (cut, ArchiveCorrupt),
        (empty, ArchiveCorrupt),
        (lengthen, ArchiveCorrupt),
        (exchange, ArchiveCorrupt),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
async def test_a_damaged_archive_is_an_error_and_the_session_goes_on(
    start: Start,
    folder: Path,
    damage: Callable[[Path], None],
    expected: type[ArchiveMissing | ArchiveCorrupt],
    restart: bool,
) -> None:
    """DESIGN.md promise 5; PROMISES.md R4; BUGLOG B22: also when it was served intact before."""

    async def fails(peer: Peer) -> None:
        for method, params in (
            ("session.get", {"revision": 1}),
            ("session.get", {"revision": 1, "order": "desc", "limit": 1}),
            ("session.export", {"revision": 1}),
            ("session.export", {"revision": "all"}),
            ("session.restore", {"revision": 1}),
            ("session.fork", {"revision": 1}),
        ):
            with pytest.raises(expected) as caught:
                await peer.call(method, session_id="a", **params)
            assert (caught.value.code, caught.value.data["revision"]) == (1009, 1)
            assert caught.value.hint

    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("first")])
        await peer.call("session.create", session_id="b", items=[user("other")])
        compact = await peer.call("session.compact", session_id="a")
        await peer.call("session.compact", session_id="b")
        assert await peer.items("a", revision=1) == [user("first")]
        (path,) = (
            one
            for one in (folder / "data" / "archives").rglob("*.zst")
            if hashlib.sha256(one.read_bytes()).hexdigest() == compact["archive"]["sha256"]
        )
        damage(path)
        if not restart:
            await fails(peer)
    async with start() as daemon, daemon.connect() as peer:
        await fails(peer)
        await peer.call("session.append", session_id="a", items=[user("more")])
        assert len(await peer.items("a")) == 2
        again = await peer.call("session.compact", session_id="a")
        assert again["session"]["archived_revisions"] == [3, 1]
        assert len(await peer.items("a", revision=3)) == 2
        assert await peer.items("b", revision=1) == [user("other")]
        await fails(peer)
        assert len((await peer.call("session.revisions", session_id="a"))["revisions"]) == 2
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        assert (await peer.call("session.delete", session_id="a"))["deleted"] is True


# Verification.


async def test_what_is_stored_is_verified_while_it_is_served(peer: Peer, folder: Path) -> None:
    """PROMISES.md R7; PROTOCOL.md §3, `session.verify`."""
    for name in "abc":
        await peer.call("session.create", session_id=name, items=[user("x")])
        await peer.call("session.compact", session_id=name)
    all_of_it = await peer.call("session.verify")
    assert (all_of_it["checked"], all_of_it["faults"], all_of_it["faults_total"]) == (6, [], 0)
    one = await peer.call("session.verify", session_id="a")
    assert one["checked"] == 2
    assert 0 < one["bytes"] < all_of_it["bytes"]
    structure = await peer.call("session.verify", read_data=False)
    assert (structure["checked"], structure["bytes"]) == (6, 0)
    for path in (folder / "data" / "archives").rglob("*.zst"):
        path.unlink()
    damaged = await peer.call("session.verify", read_data=False)
    assert damaged["faults"] == [
        {"session_id": name, "revision": 1, "kind": "archive_missing"} for name in "abc"
    ]
    with pytest.raises(NotFound):
        await peer.call("session.verify", session_id="nobody")
    with pytest.raises(InvalidParams):
        await peer.call("session.verify", share={"part": 3, "of": 2})


@pytest.mark.promise("R7")
@pytest.mark.parametrize("of", [1, 2, 7])
async def test_shares_together_read_everything_once(peer: Peer, of: int) -> None:
    for number in range(5):
        name = f"s{number}"
        await peer.call("session.create", session_id=name, items=[user("x" * number)])
        await peer.call("session.compact", session_id=name)
        await peer.call("session.rewind", session_id=name, after_entry_id=0)
    shares = [
        (await peer.call("session.verify", share={"part": part, "of": of}))["bytes"]
        for part in range(1, of + 1)
    ]
    assert sum(shares) == (await peer.call("session.verify"))["bytes"]
    assert of == 1 or len(set(shares)) > 1
