"""What the Store over SQLite does beyond the contract: groups, faults, crashes, cleaning up."""

import asyncio
import errno
import gc
import hashlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec import structs

from recapd.storage.archive import archive_path
from recapd.storage.database import Damaged
from recapd.storage.entry import Entry, encode_entry
from recapd.storage.errors import (
    ArchiveCorrupt,
    ArchiveMissing,
    OutcomeUnknown,
    SessionExists,
    StorageError,
    StorageFull,
    StoreClosed,
    UnknownSession,
)
from recapd.storage.lock import Locked, UnsafeFolder
from recapd.storage.sqlite import SqliteStore, open_store
from recapd.storage.store import (
    Appended,
    Event,
    History,
    NewItem,
    NewSession,
    Order,
    Query,
    Receipt,
    Replacement,
    Replayed,
    Session,
    Store,
    Tokens,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)
RECEIPT = Receipt("o", "session.append", b"digest")
REMINDER = Entry(1000, 7, b'{"role":"user","content":"summary"}')

Make = Callable[[], sqlite3.Cursor]
Hook = Callable[[sqlite3.Connection, Make], sqlite3.Cursor]
Interfere = Callable[[str, Hook | None], None]
Compact = Callable[..., Awaitable[Session]]
Crash = Callable[[Path], Path]


def database_error(code: int = sqlite3.SQLITE_IOERR) -> sqlite3.Error:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    error.sqlite_errorname = "NAME"
    return error


def failing(error: Exception | None = None, *, after: bool = False, times: int = 1) -> Hook:
    """Lets a statement fail a number of times, before or after it was made."""
    left = times

    def hook(_: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        nonlocal left
        if left == 0:
            return make()
        left -= 1
        if after:
            make()
        raise error or database_error()

    return hook


async def entries(store: Store, session_id: str, revision: int | None = None) -> list[bytes]:
    """The whole history."""
    page = await store.page(session_id, revision=revision, limit=100_000, bytes_max=1 << 30)
    assert page.next_index is None
    return page.entries


def listen(store: Store) -> list[Event]:
    heard: list[Event] = []
    store.listen(heard.extend)
    return heard


async def assert_told_once(store: Store, heard: list[Event], *, since: int = 0) -> None:
    """Promise 4: every event of the log exactly once, in order, without gaps."""
    assert heard == await store.events_of_all(after_ordinal=since, limit=10_000)
    ordinals = [event.ordinal for event in heard]
    assert ordinals == list(range(since + 1, since + 1 + len(heard)))


# Groups.


async def test_changes_that_are_handed_over_at_once_share_one_commit(
    folder: Path, statements: list[str]
) -> None:
    """DESIGN.md §1: one transaction and one fsync for what waits."""
    async with open_store(folder) as store:
        for created in [store.create(NewSession(f"s{number}")) for number in range(50)]:
            await created.wait()
        statements.clear()
        for appended in [store.append(f"s{number % 50}", [ITEM]) for number in range(100)]:
            await appended.wait()
        assert statements.count("BEGIN IMMEDIATE") == statements.count("COMMIT") == 1
        assert sum("INTO entries" in statement for statement in statements) == 1
        for number in range(50):
            assert (await store.session(f"s{number}")).entries == 2


@pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError(), sqlite3.InterfaceError()])
async def test_a_change_that_fails_costs_its_neighbours_nothing(
    folder: Path, error: Exception
) -> None:
    """DESIGN.md §1: each actor is told of its own part; promise 2: all or nothing."""

    def render(_: Appended) -> bytes:
        raise error

    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s")).wait()
        earlier = store.append("s", [ITEM])
        bad = store.append("s", [ITEM], receipt=RECEIPT, render=render)
        refused = store.create(NewSession("s"))
        new = store.create(NewSession("t"), [ITEM])
        later = store.append("s", [ITEM, ITEM], receipt=structs.replace(RECEIPT, operation_id="p"))
        first, second = await earlier.wait(), await later.wait()
        with pytest.raises(StorageError if isinstance(error, sqlite3.Error) else type(error)):
            await bad.wait()
        with pytest.raises(SessionExists):
            await refused.wait()
        assert isinstance(await new.wait(), Session)
        assert isinstance(first, Appended)
        assert isinstance(second, Appended)
        assert (first.first_entry_id, second.first_entry_id, second.last_entry_id) == (1, 2, 3)
        assert second.session == await store.session("s")
        await assert_told_once(store, heard)


async def test_a_rollback_that_fails_does_not_end_the_service(
    folder: Path, interfere: Interfere
) -> None:
    """PROMISES.md F1: any one failing call, and a daemon that works again afterwards."""

    def render(_: Appended) -> bytes:
        raise ZeroDivisionError

    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s")).wait()
        interfere("ROLLBACK", failing())
        with pytest.raises(ZeroDivisionError):
            await store.append("s", [ITEM], receipt=RECEIPT, render=render).wait()
        await store.append("s", [ITEM]).wait()
        assert len(await entries(store, "s")) == 1
        await assert_told_once(store, heard)


# A COMMIT that answers with an error.


@pytest.mark.parametrize("error", [database_error(), MemoryError()])
async def test_what_was_committed_in_spite_of_an_error_is_told_as_done(
    folder: Path, interfere: Interfere, error: Exception
) -> None:
    """PROMISES.md A.4 and D6: an error from COMMIT does not mean "not committed"."""
    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s")).wait()
        interfere("COMMIT", failing(error, after=True))
        pending, other = store.append("s", [ITEM]), store.create(NewSession("t"))
        appended, created = await pending.wait(), await other.wait()
        assert isinstance(appended, Appended)
        assert appended.session == await store.session("s")
        assert created == await store.session("t")
        await store.append("s", [ITEM]).wait()
        assert len(await entries(store, "s")) == 2
        await assert_told_once(store, heard)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (database_error(), StorageError),
        (database_error(sqlite3.SQLITE_FULL), StorageFull),
        (MemoryError(), StorageError),
    ],
)
async def test_what_was_not_committed_is_told_as_failed(
    folder: Path, interfere: Interfere, error: Exception, kind: type[StorageError]
) -> None:
    """Promise 13: a clear error, the session as it was, and service afterwards."""
    async with open_store(folder) as store:
        heard = listen(store)
        session = await store.create(NewSession("s")).wait()
        interfere("COMMIT", failing(error))
        pending, other = store.append("s", [ITEM]), store.create(NewSession("t"))
        for outcome in (pending.wait, other.wait):
            with pytest.raises(kind) as failure:
                await outcome()
            assert type(failure.value) is kind
        assert await store.session("s") == session
        with pytest.raises(UnknownSession):
            await store.session("t")
        appended = await store.append("s", [ITEM]).wait()
        assert isinstance(appended, Appended)
        assert appended.first_entry_id == 1
        await assert_told_once(store, heard)


@pytest.mark.promise("D7")
@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("first", ["a change", "a read"])
async def test_an_outcome_that_cannot_be_established_is_unknown_until_the_disk_works_again(
    folder: Path, interfere: Interfere, made: bool, first: str
) -> None:
    """PROMISES.md D7: never `failed`; asking under the same operation id tells, at most once."""
    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s")).wait()
        interfere("COMMIT", failing(after=made))
        interfere("PRAGMA wal_checkpoint(TRUNCATE)", failing(times=4))
        pending = [store.append("s", [ITEM], receipt=RECEIPT), store.append("s", [ITEM])]
        for one in pending:
            with pytest.raises(OutcomeUnknown):
                await one.wait()
        for _ in range(2):
            with pytest.raises(StorageError):
                await store.append("s", [ITEM]).wait()
        assert not (await store.health()).writable
        with pytest.raises(StorageError) as failure:
            await store.session("s")
        assert not isinstance(failure.value, StoreClosed)
        # The disk works again.
        if first == "a read":
            assert (await store.session("s")).entries == (2 if made else 0)
        again = await store.append("s", [ITEM], receipt=RECEIPT).wait()
        assert isinstance(again, Replayed if made else Appended)
        assert (await store.health()).writable
        assert len(await entries(store, "s")) == (2 if made else 1)
        await assert_told_once(store, heard)


@pytest.mark.promise("D6")
async def test_nothing_is_written_behind_what_a_failed_sync_may_have_lost(
    folder: Path, interfere: Interfere, statements: list[str]
) -> None:
    """PROMISES.md A.5: the page cache may show what the disk lacks, so the log is emptied first."""
    async with open_store(folder) as store:
        await store.create(NewSession("s")).wait()
        interfere("COMMIT", failing(after=True))
        interfere("PRAGMA wal_checkpoint(TRUNCATE)", failing())
        with pytest.raises(OutcomeUnknown):
            await store.append("s", [ITEM]).wait()
        statements.clear()
        await store.append("s", [ITEM]).wait()
        first = statements.index("PRAGMA wal_checkpoint(TRUNCATE)")
        assert first < statements.index("BEGIN IMMEDIATE")


async def test_reads_wait_while_an_outcome_is_being_established(
    folder: Path, interfere: Interfere
) -> None:
    """Promise 13: reads go on; they are not told that the store is closed."""
    reopening, proceed = anyio.Event(), threading.Event()
    token = anyio.lowlevel.current_token()

    def wait(_: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        anyio.from_thread.run_sync(reopening.set, token=token)
        assert proceed.wait(5)
        return make()

    seen: list[Session] = []
    with anyio.fail_after(10):
        async with open_store(folder) as store, anyio.create_task_group() as tasks:
            await store.create(NewSession("s")).wait()
            interfere("COMMIT", failing(after=True))
            interfere("PRAGMA wal_checkpoint(TRUNCATE)", wait)
            pending = store.append("s", [ITEM])
            await reopening.wait()

            async def read() -> None:
                seen.append(await store.session("s"))

            tasks.start_soon(read)
            await anyio.lowlevel.checkpoint()
            proceed.set()
            await pending.wait()
    assert [session.entries for session in seen] == [1]


async def test_a_change_without_an_event_whose_commit_failed_is_unknown_and_can_be_repeated(
    folder: Path, interfere: Interfere
) -> None:
    """PROMISES.md D7: it left no trace that would tell."""
    receipt = Receipt("o", "session.delete", b"digest")
    async with open_store(folder) as store:
        interfere("COMMIT", failing(after=True))
        with pytest.raises(OutcomeUnknown):
            await store.delete("s", receipt=receipt, render=lambda _: b"false").wait()
        again = await store.delete("s", receipt=receipt, render=lambda _: b"false").wait()
        assert again == Replayed(await store.operation("o"))


async def test_archives_go_with_a_session_whose_deletion_answered_with_an_error(
    folder: Path, interfere: Interfere, compact: Compact
) -> None:
    """PROTOCOL.md §3, session.delete: entries, events and archives."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "o")
        interfere("COMMIT", failing(after=True))
        assert await store.delete("s").wait()
        assert os.listdir(folder / "archives") == []


async def test_an_archive_that_cannot_be_removed_does_not_undo_the_deletion(
    folder: Path, compact: Compact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMISES.md, design rule 3: the commit first, the unlink after; the next start sweeps."""
    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "o")

        def fail(*_: object, **__: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fail)
            deleted, created = store.delete("s"), store.create(NewSession("t"))
            assert await deleted.wait() is True
            await created.wait()
        assert [event.method for event in heard[-2:]] == ["session.deleted", "session.created"]
        with pytest.raises(UnknownSession):
            await store.session("s")
    async with open_store(folder) as store:
        assert store.swept == 1


# A full disk.


@pytest.mark.promise("F2")
async def test_a_full_disk_refuses_what_does_not_fit_and_serves_on(
    folder: Path, interfere: Interfere, compact: Compact
) -> None:
    """Promise 13 and PROMISES.md F2: nothing acknowledged is lost, and it goes on by itself."""
    pages_max = 0

    def limit(connection: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        connection.execute(f"PRAGMA max_page_count={pages_max or 1 << 30}").fetchall()
        return make()

    large = NewItem(b'"%b"' % (b"x" * 100_000), 1)
    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s"), [ITEM]).wait()
        interfere("BEGIN IMMEDIATE", limit)
        session = await store.session("s")
        begun = await store.begin("s", structs.replace(RECEIPT, operation_id="c")).wait()
        assert isinstance(begun, Session)
        archive = await store.archive(begun, "compaction", "c")
        pages_max = 1  # SQLite takes the present size for less than that
        pending = [store.append("s", [item]) for item in (large, ITEM, large)]
        for one, fits in zip(pending, (False, True, False), strict=True):
            if fits:
                await one.wait()
            else:
                with pytest.raises(StorageFull):
                    await one.wait()
        with pytest.raises(StorageFull):
            await store.create(NewSession("t"), [large]).wait()
        assert len(await entries(store, "s")) == session.entries + 1
        await store.end("c", "failed", b"{}", {}).wait()
        await store.discard_archive("s", archive.revision)
        pages_max = 0
        await store.append("s", [large]).wait()
        await compact(store, "s", "o", [REMINDER])
        assert await entries(store, "s") == [encode_entry(REMINDER)]
        await assert_told_once(store, heard)


async def test_a_full_disk_leaves_a_compaction_undone_and_to_be_repeated(
    folder: Path, interfere: Interfere, compact: Compact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §5.6: any failure leaves everything as it was."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM] * 3).wait()
        before = await entries(store, "s")

        def fail(*_: object) -> int:
            raise OSError(28, "No space left on device")

        begun = await store.begin("s", structs.replace(RECEIPT, operation_id="c")).wait()
        assert isinstance(begun, Session)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            with pytest.raises(StorageFull):
                await store.archive(begun, "compaction", "c")
        assert await entries(store, "s") == before
        assert list((folder / "archives").rglob("*.*")) == []
        archive = await store.archive(begun, "compaction", "c")
        change = Replacement(
            "c", archive, History([encode_entry(REMINDER)], [], 1001, Tokens()), {}
        )
        await store.replace("s", change, render=lambda _: b"{}").wait()
        assert await entries(store, "s", 1) == before


# A crash, and the next start.


async def test_a_compaction_that_was_cut_short_has_failed_at_the_next_start_once(
    folder: Path, crash: Crash
) -> None:
    """PROTOCOL.md §4: exactly one `finished` for each `started`, also across a crash."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        begun = await store.begin("s", structs.replace(RECEIPT, operation_id="c")).wait()
        assert isinstance(begun, Session)
        await store.archive(begun, "compaction", "c")
        crashed = crash(folder)
    interrupted = b'{"reason":"interrupted"}'
    for _ in range(2):
        async with open_store(crashed, interrupted=interrupted, now_ms=lambda: 99) as store:
            operation = await store.operation("c")
            assert (operation.status, operation.ended_at_ms) == ("failed", 99)
            assert operation.outcome == interrupted
            session = await store.session("s")
            assert session == structs.replace(begun, running=None, seq=begun.seq + 1)
            events = await store.events("s", after_seq=0, limit=100)
            assert [event.method for event in events[-2:]] == [
                "compaction.started",
                "compaction.finished",
            ]
            assert b'"status":"failed","reason":"interrupted"' in events[-1].body
            assert os.listdir(crashed / "archives") == []
            assert await store.last_ordinal() == len(events)


async def test_what_a_killed_daemon_left_in_the_log_is_synced_before_it_is_shown(
    folder: Path, crash: Crash, tmp_path: Path
) -> None:
    """PROMISES.md D1: what anybody has seen, every later start finds; it may have died before
    its own fsync.
    """
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM] * 5).wait()
        crashed = crash(folder)
    assert (crashed / "store.db-wal").stat().st_size > 0
    async with open_store(crashed) as store:
        shutil.copy(crashed / "store.db", tmp_path / "alone.db")
        assert len(await entries(store, "s")) == 5
    db = sqlite3.connect(tmp_path / "alone.db")
    assert db.execute("SELECT count(*) FROM entries").fetchone() == (5,)
    db.close()


async def test_everything_is_there_again_at_the_next_start(
    folder: Path, crash: Crash, compact: Compact
) -> None:
    """Promises 1 and 7, after a stop and after a kill."""

    async def look(store: SqliteStore) -> dict[str, object]:
        return {
            "store": store.store_id,
            "session": await store.session("s"),
            "entries": await entries(store, "s"),
            "archived": [await entries(store, "s", revision) for revision in (1, 3)],
            "revisions": await store.revisions("s"),
            "events": await store.events_of_all(after_ordinal=0, limit=100),
            "operations": [await store.operation(name) for name in ("a", "b")],
        }

    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM] * 5).wait()
        await compact(store, "s", "a", [REMINDER])
        await store.append("s", [ITEM]).wait()
        await compact(store, "s", "b", [REMINDER])
        await store.append("s", [ITEM]).wait()
        before = await look(store)
        crashed = crash(folder)
    for path in (folder, crashed):
        async with open_store(path) as store:
            assert await look(store) == before
            appended = await store.append("s", [ITEM]).wait()
            assert isinstance(appended, Appended)
            assert appended.first_entry_id == 1002 + 1


async def test_transient_sessions_do_not_outlive_their_process(
    folder: Path, crash: Crash, compact: Compact
) -> None:
    """PROTOCOL.md §3, durability: gone at the end, or at the next start, with their archives."""
    async with open_store(folder) as store:
        heard = listen(store)
        for session_id, durability in (("kept", "durable"), ("gone", "transient")):
            new = structs.replace(NewSession(session_id), durability=durability)
            await store.create(new, [ITEM]).wait()
            await compact(store, session_id, f"c-{session_id}")
        begin = structs.replace(RECEIPT, operation_id="running")
        await store.begin("gone", begin).wait()
        crashed = crash(folder)
    assert heard[-1].method == "session.deleted"
    kept = [archive_path(Path("archives"), "kept", 1)]
    for path in (folder, crashed):
        async with open_store(path) as store:
            assert [session.session_id for session in await store.sessions(Query())] == ["kept"]
            with pytest.raises(UnknownSession):
                await store.session("gone")
            assert len(await entries(store, "kept", 1)) == 1
            assert [one.relative_to(path) for one in (path / "archives").rglob("*.zst")] == kept
            # Settled before it was deleted, or ended by the deletion.
            assert (await store.operation("running")).status in ("failed", "cancelled")
            (last,) = await store.events("gone", after_seq=0, limit=100)
            assert last.method == "session.deleted"


@pytest.mark.promise("R3")
async def test_a_start_sweeps_what_no_row_names_and_keeps_what_one_does(
    folder: Path, compact: Compact
) -> None:
    """PROMISES.md R3."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "a")
        assert store.swept == 0
    named = archive_path(folder / "archives", "s", 1)
    for stray in (".1.00ff.tmp", "2.jsonl.zst", "x"):
        shutil.copy(named, named.with_name(stray))
    shutil.copytree(named.parent, folder / "archives" / "another")
    async with open_store(folder) as store:
        assert store.swept == 3 + 4
        assert len(await entries(store, "s", 1)) == 1
    assert [path for path in (folder / "archives").rglob("*") if path.is_file()] == [named]


async def test_a_settling_commit_that_fails_stops_the_start_with_a_clear_error(
    folder: Path, crash: Crash, interfere: Interfere
) -> None:
    """PROMISES.md F1: and the next start settles it."""
    async with open_store(folder) as store:
        await store.create(NewSession("s")).wait()
        await store.begin("s", structs.replace(RECEIPT, operation_id="c")).wait()
        crashed = crash(folder)
    interfere("COMMIT", failing())
    with pytest.raises(StorageError):
        async with open_store(crashed):
            pass
    async with open_store(crashed) as store:
        assert (await store.operation("c")).status == "failed"


# Archives.


@pytest.mark.parametrize("what", ["removed", "cut short", "a link"])
async def test_a_history_whose_archive_is_gone_is_not_replaced(
    folder: Path, tmp_path: Path, what: str
) -> None:
    """Promise 3: no state in which the replacement is visible and its archive is not there."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        begun = await store.begin("s", structs.replace(RECEIPT, operation_id="c")).wait()
        assert isinstance(begun, Session)
        archive = await store.archive(begun, "compaction", "c")
        path = archive_path(folder / "archives", "s", 1)
        match what:
            case "removed":
                path.unlink()
            case "cut short":
                path.write_bytes(path.read_bytes()[:-1])
            case _:
                path.rename(tmp_path / "elsewhere")
                path.symlink_to(tmp_path / "elsewhere")
        change = Replacement(
            "c", archive, History([encode_entry(REMINDER)], [], 1001, Tokens()), {}
        )
        replaced = store.replace("s", change, render=lambda _: b"{}")
        neighbour = store.create(NewSession("t"))
        with pytest.raises(StorageError):
            await replaced.wait()
        await neighbour.wait()
        assert await store.session("s") == begun
        # It is archived again, and then it can be.
        change = structs.replace(change, archive=await store.archive(begun, "compaction", "c"))
        await store.replace("s", change, render=lambda _: b"{}").wait()
        assert len(await entries(store, "s", 1)) == 1


@pytest.mark.promise("R4")
async def test_a_damaged_archive_is_an_error_that_names_it_and_the_session_goes_on(
    folder: Path, compact: Compact
) -> None:
    """Promise 5 and PROMISES.md R4; also when it was read before it was damaged."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM] * 3).wait()
        await compact(store, "s", "a")
        path = archive_path(folder / "archives", "s", 1)
        data = path.read_bytes()
        for index in range(0, len(data), 5):
            assert len(await entries(store, "s", 1)) == 3
            path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
            with pytest.raises(ArchiveCorrupt) as corrupt:
                await entries(store, "s", 1)
            assert (corrupt.value.revision, corrupt.value.fault) == (1, "sha256")
            path.write_bytes(data)
        path.unlink()
        with pytest.raises(ArchiveMissing) as missing:
            await entries(store, "s", 1)
        assert missing.value.revision == 1
        await store.append("s", [ITEM]).wait()
        assert len(await entries(store, "s")) == 1
        assert not (await store.health()).damaged


@pytest.mark.parametrize(("settled_ns", "verified"), [(1 << 60, [1, 2, 3, 4]), (-1, [1, 1, 2, 2])])
async def test_an_archive_is_verified_at_the_first_read_and_when_it_may_have_been_touched(
    folder: Path,
    compact: Compact,
    monkeypatch: pytest.MonkeyPatch,
    settled_ns: int,
    verified: list[int],
) -> None:
    """STYLE.md rule 12. Its times tell of a touch, but not of a second one within the same tick."""
    monkeypatch.setattr("recapd.storage.sqlite._SETTLED_NS", settled_ns)
    count = 0
    real = hashlib.file_digest

    def digest(*args: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args)

    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "a")
        monkeypatch.setattr(hashlib, "file_digest", digest)
        seen: list[int] = []
        for touch in (False, False, True, False):
            if touch:
                os.utime(archive_path(folder / "archives", "s", 1), ns=(1, 1))
            assert len(await entries(store, "s", 1)) == 1
            seen.append(count)
        assert seen == verified


async def test_an_archive_that_fails_its_disk_is_not_called_missing(
    folder: Path, compact: Compact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 13: the disk fails; a copy from a backup would help nobody."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "a")
        real = os.open

        def fail(path: str | Path, *args: int, **kwargs: int) -> int:
            if str(path).endswith(".zst"):
                raise OSError(24, "Too many open files")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(StorageError, match="Too many open files"):
            await entries(store, "s", 1)


async def test_discarding_an_archive_does_not_fail(folder: Path, interfere: Interfere) -> None:
    """What failed before is what is told; the file goes at the next start."""
    async with open_store(folder) as store:
        session = await store.create(NewSession("s"), [ITEM]).wait()
        assert isinstance(session, Session)
        await store.archive(session, "rewind", "a")
        interfere("SELECT 1 FROM archives", failing())
        await store.discard_archive("s", 1)
        assert archive_path(folder / "archives", "s", 1).exists()
    async with open_store(folder) as store:
        assert store.swept == 1


# Rows of histories that were replaced.


def ask(folder: Path, sql: str) -> tuple[object, ...]:
    """One row of the database, as another process would see it."""
    db = sqlite3.connect(f"file:{folder / 'store.db'}?mode=ro", uri=True)
    row: tuple[object, ...] = db.execute(sql).fetchone()
    db.close()
    return row


async def until_swept(store: Store, folder: Path) -> None:
    """Wait until the writer has nothing left to sweep: it goes on behind each change."""
    with anyio.fail_after(20):
        while ask(folder, "SELECT count(*) FROM garbage") != (0,):
            await store.delete("nobody").wait()


async def test_the_disk_of_replaced_histories_is_used_again(folder: Path, compact: Compact) -> None:
    """DESIGN.md §3, growth: linear in what was appended, never in appended x compactions."""
    item = NewItem(b'{"role":"user","content":"%b"}' % (b"x" * 1000), 250)
    sizes: list[int] = []
    async with open_store(folder) as store:
        await store.create(NewSession("s")).wait()
        for number in range(100):
            await store.append("s", [item] * 20).wait()
            await compact(store, "s", f"c{number}", [REMINDER])
            if number in (49, 99):
                await until_swept(store, folder)
                (size_bytes,) = ask(folder, "SELECT page_count * 4096 FROM pragma_page_count")
                assert isinstance(size_bytes, int)
                sizes.append(size_bytes)
        assert len(await store.revisions("s")) == 100
        assert len(await entries(store, "s")) == 1
    half, whole = sizes
    assert whole < 2.2 * half
    assert whole < 100 * 20 * 1000 / 4  # what was appended is in archives now, and only there


async def test_a_replaced_history_leaves_no_rows(folder: Path) -> None:
    """DESIGN.md §3, growth: neither entries nor the calls that it made."""
    item = NewItem(b"{}", 1, calls=("a", "b"))
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [item] * 1500).wait()
        session = await store.session("s")
        archive = await store.archive(session, "rewind", "o")
        change = Replacement(
            "o", archive, History([encode_entry(REMINDER)], ["c"], 2000, Tokens()), {}
        )
        await store.replace("s", change, render=lambda _: b"{}").wait()
        await until_swept(store, folder)
        assert ask(folder, "SELECT count(*) FROM entries") == (1,)
        assert ask(folder, "SELECT group_concat(call_id) FROM calls") == ("c",)
        output = NewItem(b"{}", 1, outputs=("a", "c"))
        appended = await store.append("s", [output]).wait()
        assert isinstance(appended, Appended)
        assert appended.unmatched == ((2000, "a"),)


async def test_the_text_of_a_deleted_session_is_overwritten(folder: Path) -> None:
    """PROTOCOL.md §3, session.delete: removed is not only unlinked from a tree of pages."""
    secret = b"correct horse battery staple"
    async with open_store(folder) as store:
        await store.create(
            NewSession("s", title=secret.decode()), [NewItem(b'"%b"' % secret, 1)] * 9
        ).wait()
        await store.create(NewSession("t"), [ITEM]).wait()
        await store.delete("s").wait()
        await until_swept(store, folder)
    assert secret not in (folder / "store.db").read_bytes()


@pytest.mark.parametrize(
    ("count", "size_bytes", "slices"), [(2500, 10, 3), (1000, 10, 1), (10, 600_000, 5)]
)
async def test_rows_are_swept_in_slices_and_changes_go_in_between(
    folder: Path,
    compact: Compact,
    interfere: Interfere,
    statements: list[str],
    count: int,
    size_bytes: int,
    slices: int,
) -> None:
    """DESIGN.md §3: appends to other sessions hardly notice, however long the entries are."""
    token = anyio.lowlevel.current_token()
    pending: list[object] = []

    def hand_over() -> None:
        pending.append(store.append("t", [ITEM]))

    def sweep(_: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        anyio.from_thread.run_sync(hand_over, token=token)
        return make()

    async with open_store(folder) as store:
        await store.create(NewSession("t")).wait()
        item = NewItem(b'"%b"' % (b"x" * size_bytes), 1)
        await store.create(NewSession("s"), [item] * count).wait()
        interfere("DELETE FROM entries", sweep)
        statements.clear()
        await compact(store, "s", "o", [REMINDER])
        await until_swept(store, folder)
        assert len(await entries(store, "t")) == slices
    kinds = [
        statement[:6]
        for statement in statements
        if statement.startswith(("DELETE FROM entries", "INSERT INTO entries"))
    ]
    assert kinds == ["INSERT", *["DELETE", "INSERT"] * slices]  # first that of the new history


async def test_a_sweep_that_fails_is_not_tried_again_until_there_is_a_change(
    folder: Path, compact: Compact, interfere: Interfere, statements: list[str]
) -> None:
    """Promise 13: a full disk is waited for, not hammered."""
    look = "SELECT first, last, erase FROM garbage"
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        interfere(look, failing(times=1000))
        await compact(store, "s", "o", [REMINDER])
        for _ in range(20):
            await store.session("s")
        tried = sum(statement.startswith(look) for statement in statements)
        assert tried <= 1
        await store.append("s", [ITEM]).wait()
        await store.session("s")
        assert sum(statement.startswith(look) for statement in statements) <= 2
        interfere(look, None)
        await store.append("s", [ITEM]).wait()
        await until_swept(store, folder)


async def test_a_database_that_is_found_damaged_while_sweeping_does_not_stop_the_loop(
    folder: Path, compact: Compact, interfere: Interfere
) -> None:
    """DESIGN.md §3: the event loop goes on, and the damage is told."""
    damage = failing(database_error(sqlite3.SQLITE_CORRUPT), times=2)
    swept = anyio.Event()
    token = anyio.lowlevel.current_token()

    def sweep(connection: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        anyio.from_thread.run_sync(swept.set, token=token)
        return damage(connection, make)

    with anyio.fail_after(5):
        async with open_store(folder) as store:
            await store.create(NewSession("s"), [ITEM]).wait()
            interfere("SELECT first, last, erase FROM garbage", sweep)
            await compact(store, "s", "o", [REMINDER])
            await swept.wait()
            while not (await store.health()).damaged:
                await anyio.lowlevel.checkpoint()
            assert not (await store.health()).writable
            with pytest.raises(Damaged):
                await store.append("s", [ITEM]).wait()
            assert (await store.health()).damaged
            assert len(await entries(store, "s")) >= 1


async def test_damage_that_is_seen_once_was_a_page_that_could_not_be_read(
    folder: Path, interfere: Interfere
) -> None:
    """Promise 13: SQLite says the same of a read that failed; service goes on behind it."""
    async with open_store(folder) as store:
        heard = listen(store)
        await store.create(NewSession("s"), [ITEM]).wait()
        for statement in ("SELECT json_array", "SELECT line", "INSERT INTO entries"):
            interfere(statement, failing(database_error(sqlite3.SQLITE_CORRUPT)))
            assert len(await entries(store, "s")) == 1
        await store.append("s", [ITEM]).wait()
        interfere("SELECT line", failing(database_error(sqlite3.SQLITE_CORRUPT)))
        await store.archive(await store.session("s"), "rewind", "o")
        assert (await store.health()).writable
        assert len(await entries(store, "s")) == 2
        await assert_told_once(store, heard)
    for statement in ("PRAGMA user_version", "PRAGMA journal_mode", "SELECT store_id", "SELECT EX"):
        interfere(statement, failing(database_error(sqlite3.SQLITE_CORRUPT)))
        async with open_store(folder) as store:
            assert len(await entries(store, "s")) == 2


@pytest.mark.parametrize("what", ["removed", "replaced"])
async def test_nothing_is_acknowledged_when_the_database_is_not_in_its_place_any_more(
    folder: Path, what: str
) -> None:
    """Promise 1: it would be lost with the file; as when a backup is put back under a daemon."""
    async with open_store(folder) as store:
        session = await store.create(NewSession("s"), [ITEM]).wait()
        shutil.copy(folder / "store.db", folder / "backup")
        (folder / "store.db").unlink()
        if what == "replaced":
            (folder / "backup").rename(folder / "store.db")
        for pending in [store.append("s", [ITEM]) for _ in range(3)]:
            with pytest.raises(StorageError):
                await pending.wait()
        assert await store.session("s") == session


# Reading.


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize(
    ("limit", "bytes_max"), [(7, 1 << 20), (1000, 1 << 20), (200, 4000), (99, 1)]
)
async def test_pages_in_either_order_make_up_the_history(
    folder: Path, compact: Compact, order: Order, archived: bool, limit: int, bytes_max: int
) -> None:
    """PROTOCOL.md §3, session.get: a page ends at `limit` or `max_bytes`, but has one entry."""
    count = 1000 if bytes_max > 1 else 50
    items = [NewItem(b'"%b"' % (b"x" * (number * 37 % 300)), 1) for number in range(count)]
    async with open_store(folder) as store:
        await store.create(NewSession("s"), items).wait()
        whole = await entries(store, "s")
        if archived:
            await compact(store, "s", "o", [REMINDER])
        seen: list[bytes] = []
        start: int | None = None
        while True:
            page = await store.page(
                "s", revision=1, start=start, limit=limit, bytes_max=bytes_max, order=order
            )
            assert 1 <= len(page.entries) <= limit
            if len(page.entries) > 1:
                assert sum(len(line) + 1 for line in page.entries) <= bytes_max
            seen += page.entries
            if page.next_index is None:
                break
            assert page.next_index == (len(seen) if order == "asc" else count - 1 - len(seen))
            start = page.next_index
        assert seen == (whole if order == "asc" else whole[::-1])


async def test_a_long_read_does_not_hold_up_another(folder: Path, interfere: Interfere) -> None:
    """PROMISES.md F7: a second reader serves meanwhile, and so does the writer."""
    reading, proceed = anyio.Event(), threading.Event()
    token = anyio.lowlevel.current_token()

    def wait(_: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        anyio.from_thread.run_sync(reading.set, token=token)
        assert proceed.wait(5)
        return make()

    with anyio.fail_after(10):
        async with open_store(folder) as store:
            await store.create(NewSession("s"), [ITEM] * 3).wait()
            pages: list[list[bytes]] = []

            async def read() -> None:
                pages.append(await entries(store, "s"))

            interfere("SELECT line FROM entries", wait)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await reading.wait()
                for _ in range(10):
                    await store.session("s")
                await store.append("s", [ITEM]).wait()
                assert (await store.session("s")).entries == 4
                assert pages == []
                proceed.set()
    assert [len(page) for page in pages] == [3]  # of the state that it had begun to read


@pytest.mark.parametrize(
    "text", ["a\0b", "\\u0000", "\u2028", "'; DROP TABLE sessions --", "ü😀", '"', ""]
)
async def test_any_text_comes_back(folder: Path, text: str) -> None:
    """BUGLOG B35 and B45: NUL, the six characters that look like it, and what breaks others."""
    new = NewSession("s", title=text, cwd=text, labels={"a": text, text: "b"})
    async with open_store(folder) as store:
        await store.create(new).wait()
        await store.create(NewSession("t")).wait()
        session = await store.session("s")
        assert (session.title, session.cwd, session.labels) == (text, text, new.labels)
        assert [one.session_id for one in await store.sessions(Query(cwd=text))] == ["s"]


async def test_a_failed_archive_lets_go_of_what_it_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long somebody keeps the error: later archives are of later histories."""

    def fail(archives: Path, header: object, lines: Iterator[bytes], synced: object) -> None:
        del archives, header, synced
        next(lines)
        raise OSError(errno.ENOSPC, "")

    async with open_store(folder) as store:
        session = await store.create(NewSession("s"), [ITEM, ITEM]).wait()
        assert isinstance(session, Session)
        with monkeypatch.context() as patch:
            patch.setattr("recapd.storage.archive.write_archive", fail)
            with pytest.raises(StorageFull) as kept:
                await store.archive(session, "rewind", "first")
        assert (await store.archive(session, "rewind", "second")).revision == 1
        await store.append("s", [ITEM]).wait()
        assert (await store.archive(await store.session("s"), "rewind", "third")).revision == 2
        assert kept.value.__cause__ is not None


async def test_archives_can_be_made_at_once(folder: Path) -> None:
    """Compactions of different sessions are independent."""
    async with open_store(folder) as store:
        sessions: list[Session] = []
        for number in range(5):
            session = await store.create(NewSession(f"s{number}"), [ITEM]).wait()
            assert isinstance(session, Session)
            sessions.append(session)
        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(store.archive, session, "rewind", "o")
        assert len(list((folder / "archives").rglob("*.zst"))) == 5


# The log.


async def test_the_log_is_cut_once_nothing_happens(
    folder: Path, interfere: Interfere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGLOG B64: it shrinks when idle; and is let be when there was no change since."""
    monkeypatch.setattr("recapd.storage.sqlite._IDLE_S", 0.001)
    cuts = 0
    cut = anyio.Event()
    token = anyio.lowlevel.current_token()

    def note() -> None:
        nonlocal cuts
        cuts += 1
        cut.set()

    def checkpoint(_: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        cursor = make()
        anyio.from_thread.run_sync(note, token=token)
        return cursor

    with anyio.fail_after(10):
        async with open_store(folder) as store:
            interfere("PRAGMA wal_checkpoint(TRUNCATE)", checkpoint)
            for number in range(3):
                cut = anyio.Event()
                await store.create(NewSession(f"s{number}")).wait()
                await cut.wait()
                assert (await store.health()).log_bytes == 0
            assert cuts <= 2 * 3  # an idle time may end between a change and its answer


async def test_the_log_is_cut_when_the_last_reader_lets_go_and_no_change_waits_for_that(
    folder: Path, interfere: Interfere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGLOG B64 and PROMISES.md F7: an old snapshot elsewhere holds nobody up."""
    monkeypatch.setattr("recapd.storage.sqlite._IDLE_S", 0.001)
    tried = anyio.Event()
    token = anyio.lowlevel.current_token()

    def checkpoint(_: sqlite3.Connection, make: Make) -> sqlite3.Cursor:
        cursor = make()
        anyio.from_thread.run_sync(tried.set, token=token)
        return cursor

    with anyio.fail_after(5):  # less than SQLite would wait for the reader
        async with open_store(folder) as store:
            await store.create(NewSession("s")).wait()
            reader = sqlite3.connect(folder / "store.db", isolation_level=None)
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sessions").fetchall()
            interfere("PRAGMA wal_checkpoint(TRUNCATE)", checkpoint)
            for _ in range(3):
                tried = anyio.Event()
                await store.append("s", [ITEM]).wait()
                await tried.wait()
            assert (await store.health()).log_bytes > 0
            reader.close()
            while (await store.health()).log_bytes > 0:
                tried = anyio.Event()
                await tried.wait()


# Opening and closing.


async def test_a_store_is_opened_once(folder: Path) -> None:
    """Promise 10: the second one says so, and has changed nothing."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        for _ in range(2):
            with pytest.raises(Locked):
                async with open_store(folder):
                    pass
        await store.append("s", [ITEM]).wait()
    async with open_store(folder) as store:
        assert len(await entries(store, "s")) == 2


@pytest.mark.promise("S4")
@pytest.mark.parametrize("place", ["", "archives"])
async def test_a_link_in_place_of_a_folder_is_refused(
    folder: Path, tmp_path: Path, place: str
) -> None:
    """PROMISES.md S4."""
    async with open_store(folder):
        pass
    path = folder / place
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolder):
        async with open_store(folder):
            pass


async def test_the_folders_above_may_be_links(tmp_path: Path) -> None:
    """Where the owner keeps his data is his business."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    async with open_store(tmp_path / "home" / "store") as store:
        await store.create(NewSession("s")).wait()
    assert (tmp_path / "disk" / "store" / "store.db").exists()


@pytest.mark.promise("D4")
async def test_the_names_of_all_new_folders_are_durable_before_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMISES.md D4."""
    synced: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    async with open_store(tmp_path / "a" / "b" / "store"):
        expected = [tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "store"]
        assert synced >= {str(path) for path in expected}


@pytest.mark.filterwarnings("ignore:unclosed database")  # see below
@pytest.mark.parametrize("how", ["scope", "task"])
async def test_an_opening_that_is_cancelled_at_any_point_leaves_nothing(
    folder: Path, how: str
) -> None:
    """BUGLOG B63: a database's thread that lives on keeps the process alive."""

    async def open_and_wait() -> None:
        async with open_store(folder):
            await anyio.sleep_forever()

    with anyio.fail_after(30):
        for turns in range(40):
            if how == "scope":
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(open_and_wait)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
            else:
                task = asyncio.get_running_loop().create_task(open_and_wait())
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
        async with open_store(folder) as store:
            await store.create(NewSession("s")).wait()
    # asyncio's own cancel reaches aiosqlite where a scope's does not: then it is the collector that
    # closes what its thread had just opened.
    for thread in threading.enumerate():
        if "connection_worker" in thread.name:
            thread.join(timeout=5)
    gc.collect()


@pytest.mark.parametrize("statement", ["PRAGMA journal_mode", "PRAGMA query_only", "SELECT count"])
async def test_an_opening_that_fails_leaves_nothing(
    folder: Path, interfere: Interfere, statement: str
) -> None:
    """PROMISES.md, design rule 7: closed on every path, a failed start included."""
    interfere(statement, failing(times=1000))
    for _ in range(3):
        with pytest.raises(StorageError):
            async with open_store(folder):
                pass
    interfere(statement, None)
    async with open_store(folder) as store:
        await store.create(NewSession("s")).wait()


async def test_a_closed_store_reads_nothing(folder: Path) -> None:
    """errors.py: StoreClosed."""
    async with open_store(folder) as store:
        session = await store.create(NewSession("s")).wait()
        assert isinstance(session, Session)
    with pytest.raises(StoreClosed):
        await store.session("s")
    with pytest.raises(StoreClosed):
        await store.archive(session, "rewind", "o")


async def test_the_block_may_end_before_anything_else_ran(folder: Path) -> None:
    """Promise 14: what was handed over by then is made."""
    async with open_store(folder) as store:
        pending = store.create(NewSession("s"))
    assert pending.done
    async with open_store(folder) as store:
        assert (await store.session("s")).session_id == "s"
