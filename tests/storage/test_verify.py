"""Damage is found by `verify`, in the session that has it and in no other (PROMISES.md R4, R5)."""

import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from recapd.storage.archive import archive_path
from recapd.storage.entry import Entry
from recapd.storage.sqlite import open_store
from recapd.storage.store import Fault, NewItem, NewSession, Session, Store

Compact = Callable[..., Awaitable[Session]]
ITEM = NewItem(b'{"role":"user","content":"hello"}', 3)


async def fill(folder: Path, compact: Compact) -> None:
    """Sessions `a` and `b`, each with an archived revision 1 and the present one, 3."""
    async with open_store(folder) as store:
        for name in ("a", "b"):
            await store.create(NewSession(name), [ITEM, ITEM]).wait()
            await compact(store, name, f"of-{name}", [Entry(3, 0, b"{}")])
            await store.append(name, [ITEM]).wait()


async def faults_of(store: Store, session_id: str, *, whole: bool) -> list[Fault]:
    return (await store.verify(session_id, read=lambda _: whole)).faults


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def swap(path: Path) -> None:
    other = archive_path(path.parent.parent, "b", 1)
    kept = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(kept)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.promise("R4", "S4")
@pytest.mark.parametrize(
    ("damage", "kind", "by_structure"),
    [
        (flip, "archive_corrupt", False),
        (cut, "archive_corrupt", True),
        (lengthen, "archive_corrupt", True),
        (swap, "archive_corrupt", None),
        (Path.unlink, "archive_missing", True),
        (link, "archive_missing", True),
    ],
)
async def test_a_damaged_archive_is_found(
    folder: Path,
    compact: Compact,
    damage: Callable[[Path], None],
    kind: str,
    by_structure: bool | None,
) -> None:
    await fill(folder, compact)
    async with open_store(folder) as store:
        damage(archive_path(folder / "archives", "a", 1))
        expected = [Fault("a", 1, kind)]  # type: ignore[arg-type]
        assert await faults_of(store, "a", whole=True) == expected
        if by_structure is not None:  # two archives may have one size
            assert await faults_of(store, "a", whole=False) == (expected if by_structure else [])
            assert await faults_of(store, "b", whole=True) == []


@pytest.mark.promise("R5")
@pytest.mark.parametrize(
    ("statement", "kinds"),
    [
        (
            "DELETE FROM entries WHERE position = (SELECT max(position) FROM entries)",
            ["entries_missing"],
        ),
        ("UPDATE entries SET line = substr(line, 2)", ["entries_damaged"]),
        ("UPDATE entries SET line = CAST(replace(line, '}}', '}') AS BLOB)", ["entries_damaged"]),
        ("UPDATE entries SET line = (SELECT max(line) FROM entries)", ["entries_damaged"]),
        ("UPDATE sessions SET next_entry_id = 2", ["entries_damaged"]),
        ("DELETE FROM events WHERE seq = 2", ["events_missing"]),
        ("UPDATE sessions SET seq = seq + 1", ["events_missing"]),
        ("UPDATE sessions SET generation = 2", ["revisions_missing"]),
        ("UPDATE sessions SET revision = 1", ["revisions_missing"]),
        ("DELETE FROM archives", ["revisions_missing"]),
        ("UPDATE sessions SET entries = entries - 1", ["entries_missing"]),
    ],
)
async def test_rows_that_do_not_agree_are_found(
    folder: Path, compact: Compact, statement: str, kinds: list[str]
) -> None:
    await fill(folder, compact)
    db = sqlite3.connect(folder / "store.db")
    with db:
        assert db.execute(statement).rowcount > 0
    db.close()
    async with open_store(folder) as store:
        found = [*await faults_of(store, "a", whole=True), *await faults_of(store, "b", whole=True)]
        assert {fault.kind for fault in found} == {*kinds}


@pytest.mark.promise("R5")
async def test_a_page_that_is_no_page_is_found_and_other_sessions_go_on(
    folder: Path, compact: Compact
) -> None:
    await fill(folder, compact)
    async with open_store(folder) as store:
        await store.create(NewSession("c"), [NewItem(b"{}", 1)] * 3000).wait()
    db = sqlite3.connect(folder / "store.db")
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    (page,) = db.execute(
        "SELECT max(pageno) FROM dbstat WHERE name = 'entries' AND pagetype = 'leaf'"
    ).fetchone()
    db.close()
    with (folder / "store.db").open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(bytes(page_bytes))
    async with open_store(folder) as store:
        assert await faults_of(store, "a", whole=True) == []
        assert [fault.kind for fault in await faults_of(store, "c", whole=True)] == [
            "database_damaged"
        ]
        assert await faults_of(store, "b", whole=True) == []
