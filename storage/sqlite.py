"""The Store over SQLite and archive files.

::

    <folder>/lock       held while the store is open
    <folder>/store.db   and SQLite's -wal and -shm beside it
    <folder>/archives/  archive.py

One task owns the only read-write connection. Changes wait in its queue; it folds what waits into one transaction,
which is one call on the connection's thread and one fsync. Readers have connections of their own.
"""

import logging
import shutil
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import aiosqlite
import anyio
import anyio.to_thread

from recapd.storage import archive as archives
from recapd.storage.database import (
    Damaged,
    call,
    check_owned,
    connect,
    create_file,
    migrate,
    raw,
    storage_error,
)
from recapd.storage.errors import (
    OperationUnknown,
    OutcomeUnknown,
    RevisionUnknown,
    StorageError,
    StoreClosed,
    Superseded,
    UnknownSession,
)
from recapd.storage.ledger import (
    POSITION_BITS,
    SELECT_OPERATION,
    SELECT_SESSION,
    Change,
    CommitFailed,
    Ledger,
    Outcome,
    SessionRow,
    operation_of,
    session_row,
)
from recapd.storage.lock import hold, make_private_folder
from recapd.storage.pending import Pending
from recapd.storage.store import (
    NOTHING_EXPECTED,
    Appended,
    Event,
    Expect,
    Kind,
    Listener,
    NewItem,
    NewSession,
    Operation,
    Order,
    Page,
    Query,
    Receipt,
    Replacement,
    Replayed,
    Revision,
    Session,
    SessionChanges,
    Status,
    Store,
    StoreHealth,
    Tokens,
)

logger = logging.getLogger("recapd.storage")

P = ParamSpec("P")
T = TypeVar("T")

_BATCH_MAX: Final = 4096  # changes in one transaction
_READERS: Final = 2  # one long read does not hold up the others
_IDLE_S: Final = 5.0  # after this long without a change the write-ahead log is put away
_CLOSE_TIMEOUT_S: Final = 10.0
_VERIFIED_MAX: Final = 256

_REVISION_COLUMNS: Final = (
    "revision, generation, kind, operation_id, archived_at_ms, entries, tokens_counted, tokens_estimated,"
    " bytes, sha256"
)


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def open_store(
    folder: Path,
    *,
    now_ms: Callable[[], int] = _clock_ms,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    interrupted: bytes = b"{}",
) -> "AsyncIterator[SqliteStore]":
    """Open the store in `folder`, made where there is none; close it at the end of the block.

    When it opens, compactions that an earlier life did not end have failed with `interrupted` (JSON) as their
    outcome, transient sessions are gone, and so are files that no row names.

    Raises:
        Locked: another process has it open.
        UnsafeFolder, Unsafe: a file or folder is not ours alone.
        NewerSchema, Damaged, StorageError: it cannot be served.
    """
    make_private_folder(folder)
    with hold(folder / "lock"):
        store = SqliteStore(folder, now_ms)
        try:
            await store.open(new_id(), interrupted)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.run)
                tasks.start_soon(store.put_log_away)
                try:
                    yield store
                finally:
                    store.finish()
                    tasks.cancel_scope.cancel()
        finally:
            # An unclosed connection has a live thread, and the process would never end.
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_TIMEOUT_S):
                await store.close()


class SqliteStore(Store):
    """See the module; made by `open_store` only."""

    def __init__(self, folder: Path, now_ms: Callable[[], int]) -> None:
        self._folder = folder
        self._path = folder / "store.db"
        self._archives = folder / "archives"
        self._now_ms = now_ms
        self._store_id = ""
        self._listener: Listener = lambda _: None
        self._queue: deque[tuple[Change, Pending[Any]]] = deque()
        self._work = anyio.Event()
        self._finishing = False
        self._batches = 0
        self._writer: aiosqlite.Connection | None = None
        self._ledger: Ledger | None = None
        self._readers: list[aiosqlite.Connection] = []
        self._reads: list[int] = []  # under way, on each reader
        self._archivist: aiosqlite.Connection | None = None
        self._archivist_is_made = anyio.Lock()
        self._damaged: StorageError | None = None
        self._synced: set[Path] = set()  # folders of archives whose names are durable
        self._verified: dict[tuple[str, int], tuple[int, ...]] = {}
        self.swept = 0  # files that the start removed

    @property
    def store_id(self) -> str:
        return self._store_id

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    # Opening and closing.

    async def open(self, store_id: str, interrupted: bytes) -> None:
        try:
            check_owned(self._path)
            create_file(self._path)
            make_private_folder(self._archives)
            # Also when they were there: an earlier life may have died before its own syncs.
            archives.sync_folder(self._folder.parent)
            archives.sync_folder(self._folder)
            await self._connect(store_id)
            named = await self._settle(interrupted)
            self.swept = archives.sweep(self._archives, named)
        except (sqlite3.Error, OSError) as error:
            raise storage_error(error) from error

    async def _connect(self, store_id: str) -> None:
        self._writer = writer = await connect(self._path, writer=True)
        self._store_id, self._ledger = await call(writer, self._begin, raw(writer), store_id)
        # SQLite made -wal and -shm by now; their names last as long as the database needs them.
        archives.sync_folder(self._folder)
        self._readers = [await connect(self._path, writer=False) for _ in range(_READERS)]
        self._reads = [0] * _READERS

    def _begin(self, db: sqlite3.Connection, store_id: str) -> tuple[str, Ledger]:
        migrate(db, store_id)
        (store_id,) = db.execute("SELECT store_id FROM store").fetchone()
        return store_id, Ledger(db, self._now_ms, self._unlink)

    async def _settle(self, interrupted: bytes) -> set[tuple[str, int]]:
        assert self._writer is not None
        assert self._ledger is not None
        db = raw(self._writer)
        ledger = self._ledger

        def settle() -> set[tuple[str, int]]:
            unfinished = db.execute(
                "SELECT EXISTS (SELECT 1 FROM operations WHERE status = 'running')"
                " OR EXISTS (SELECT 1 FROM sessions WHERE durability = 'transient')"
            ).fetchone()
            if unfinished != (0,):
                ledger.run(
                    [
                        lambda ledger: ledger.settle(interrupted, {"reason": "interrupted"}),
                        lambda ledger: ledger.delete_transient(),
                    ]
                )
            return set(
                db.execute(
                    "SELECT session_id, archives.revision FROM archives JOIN sessions USING (key)"
                )
            )

        return await call(self._writer, settle)

    def finish(self) -> None:
        """Take no more changes; `run` ends when those that wait are made."""
        self._submit(lambda ledger: ledger.delete_transient())
        self._finishing = True
        self._work.set()

    async def close(self) -> None:
        connections = [
            *self._readers,
            self._archivist,
            self._writer,
        ]  # the writer last: it checkpoints
        self._readers, self._archivist, self._writer, self._ledger = [], None, None, None
        for connection in connections:
            if connection is not None:
                try:
                    await connection.close()
                except sqlite3.Error:
                    pass  # the log stays, and the next start reads it

    def _unlink(self, session_id: str, revision: int) -> None:
        path = archives.archive_path(self._archives, session_id, revision)
        try:
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            self._synced.discard(path.parent)
        except OSError:
            pass  # the folder is not empty yet, or the disk fails: the next start sweeps what no row names

    # The writer's task.

    def _submit(self, change: Change) -> Pending[Any]:
        pending: Pending[Any] = Pending()
        if self._finishing:
            pending.reject(StoreClosed())
        else:
            self._queue.append((change, pending))
            self._work.set()
        return pending

    async def run(self) -> None:
        """Make the changes that wait, all that wait at once, until `finish`.

        Not to be cancelled: what was handed over is made and told, whatever happens to those who wait for it.
        """
        with anyio.CancelScope(shield=True):
            while True:
                if self._queue:
                    waiting = min(len(self._queue), _BATCH_MAX)
                    await self._make([self._queue.popleft() for _ in range(waiting)])
                elif self._finishing:
                    return
                elif self._ledger is not None and self._ledger.has_garbage:
                    await self._make([(lambda ledger: ledger.sweep(), Pending())])
                else:
                    self._work = anyio.Event()
                    await self._work.wait()

    async def put_log_away(self) -> None:
        """Bring the log into the database and cut it, once there was no change for a while."""
        seen = done = 0
        while True:
            await anyio.sleep(_IDLE_S)
            if seen == self._batches != done and self._writer is not None:
                done = seen
                with anyio.CancelScope(shield=True):
                    try:
                        await call(self._writer, _checkpoint, raw(self._writer))
                    except sqlite3.Error:
                        pass  # a reader is in its way, or the disk fails: the next change will say
            seen = self._batches

    async def _make(self, batch: Sequence[tuple[Change, Pending[Any]]]) -> None:
        self._batches += 1
        outcomes, events = await self._transact([change for change, _ in batch])
        if events:
            _tell(self._listener, events)
        for (_, pending), outcome in zip(batch, outcomes, strict=True):
            _tell(pending.reject if isinstance(outcome, Exception) else pending.resolve, outcome)

    async def _transact(self, changes: list[Change]) -> tuple[list[Outcome], list[Event]]:
        failure: Exception
        try:
            if self._damaged is not None:
                raise self._damaged
            if self._writer is None or self._ledger is None:
                await self._connect(self._store_id)
            assert self._writer is not None
            assert self._ledger is not None
            return await call(self._writer, self._ledger.run, changes)
        except CommitFailed as error:
            return await self._establish(error)
        except (sqlite3.Error, OSError) as error:
            failure = self._judge(error)
        except Exception as error:
            failure = error
        if len(changes) == 1 or self._damaged is not None:
            return [failure] * len(changes), []
        # One of them cannot be made; the others shall not pay for it.
        outcomes: list[Outcome] = []
        events: list[Event] = []
        for change in changes:
            some_outcomes, some_events = await self._transact([change])
            outcomes += some_outcomes
            events += some_events
        return outcomes, events

    def _judge(self, error: sqlite3.Error | OSError) -> StorageError:
        judged = storage_error(error)
        judged.__cause__ = error
        if isinstance(judged, Damaged):
            self._damaged = judged
        return judged

    async def _establish(self, failed: CommitFailed) -> tuple[list[Outcome], list[Event]]:
        """Find out whether a transaction was made whose COMMIT answered with an error.

        What the page cache shows after a failed fsync need not be on the disk. So every connection is closed,
        the store opened anew, and all that the log holds is brought into the database and synced there; only
        then does the event log say which it is.
        """
        await self.close()
        try:
            await self._connect(self._store_id)
            assert self._writer is not None
            assert self._ledger is not None
            await call(self._writer, _checkpoint, raw(self._writer))
            made = self._ledger.ordinal >= failed.ordinal
            if not failed.events:
                raise OutcomeUnknown  # it left no trace in the log either way
        except OutcomeUnknown as error:
            return [error] * len(failed.outcomes), []
        except (sqlite3.Error, OSError):
            await self.close()
            return [OutcomeUnknown()] * len(failed.outcomes), []
        if made:
            return failed.outcomes, failed.events
        return [self._judge(failed.error)] * len(failed.outcomes), []

    # Changes.

    def create(
        self,
        new: NewSession,
        items: Sequence[NewItem] = (),
        *,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        return self._submit(lambda ledger: ledger.create(new, items, receipt, render))

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Appended], bytes] | None = None,
    ) -> Pending[Appended | Replayed]:
        return self._submit(
            lambda ledger: ledger.append(session_id, items, expect, receipt, render)
        )

    def update(
        self,
        session_id: str,
        changes: SessionChanges,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        return self._submit(
            lambda ledger: ledger.update(session_id, changes, expect, receipt, render)
        )

    def begin(
        self, session_id: str, receipt: Receipt, *, expect: Expect = NOTHING_EXPECTED
    ) -> Pending[Session | Replayed]:
        return self._submit(lambda ledger: ledger.begin(session_id, receipt, expect))

    def end(
        self, operation_id: str, status: Status, outcome: bytes, event: dict[str, object]
    ) -> Pending[Operation]:
        return self._submit(lambda ledger: ledger.end(operation_id, status, outcome, event))

    def replace(
        self, session_id: str, change: Replacement, *, render: Callable[[Session], bytes]
    ) -> Pending[Session]:
        return self._submit(lambda ledger: ledger.replace(session_id, change, render))

    def delete(
        self,
        session_id: str,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[bool], bytes] | None = None,
        ended: bytes = b"{}",
    ) -> Pending[bool | Replayed]:
        return self._submit(
            lambda ledger: ledger.delete(session_id, expect, receipt, render, ended)
        )

    # Archives.

    async def archive(self, session: Session, kind: Kind, operation_id: str) -> Revision:
        try:
            async with self._archivist_is_made:  # two at once would make two, and lose one
                if self._archivist is None:
                    self._archivist = await connect(self._path, writer=False)
            archivist = self._archivist
            return await call(
                archivist,
                self._write_archive,
                raw(archivist),
                session,
                kind,
                operation_id,
            )
        except (sqlite3.Error, OSError) as error:
            raise self._judge(error) from error

    def _write_archive(
        self, db: sqlite3.Connection, session: Session, kind: Kind, operation_id: str
    ) -> Revision:
        with _snapshot(db) as row_of:
            row = row_of(session.session_id)
            if row.revision != session.revision:
                raise Superseded
            header = archives.Header(
                self._store_id,
                row.session_id,
                row.revision,
                row.generation,
                kind,
                operation_id,
                row.entries,
            )
            first = row.key << POSITION_BITS | row.base
            lines = db.execute(
                "SELECT line FROM entries WHERE position BETWEEN ? AND ? ORDER BY position",
                (first, first + row.entries - 1),
            )
            size_bytes, digest = archives.write_archive(
                self._archives, header, (line for (line,) in lines), self._synced
            )
        return Revision(
            row.revision,
            row.generation,
            kind,
            operation_id,
            self._now_ms(),
            row.entries,
            Tokens(row.tokens_counted, row.tokens_estimated),
            size_bytes,
            digest,
        )

    async def discard_archive(self, session_id: str, revision: int) -> None:
        def is_named(db: sqlite3.Connection) -> bool:
            found = db.execute(
                "SELECT 1 FROM archives JOIN sessions USING (key)"
                " WHERE session_id = ? AND archives.revision = ?",
                (session_id, revision),
            )
            return found.fetchone() is not None

        if not await self._read(is_named):
            await anyio.to_thread.run_sync(self._unlink, session_id, revision)

    # Reads.

    async def _read(
        self,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `function` on the reader that has the least to do."""
        try:
            if not self._readers:
                raise StoreClosed
            index = min(range(len(self._readers)), key=self._reads.__getitem__)
            reader = self._readers[index]
            reads = self._reads
            reads[index] += 1
            try:
                return await call(reader, function, raw(reader), *args, **kwargs)
            finally:
                reads[index] -= 1
        except (sqlite3.Error, OSError) as error:
            raise self._judge(error) from error

    async def session(self, session_id: str) -> Session:
        return (await self._read(_find, session_id)).session()

    async def sessions(self, query: Query) -> list[Session]:
        return await self._read(_list, query)

    async def revisions(self, session_id: str) -> list[Revision]:
        return await self._read(_revisions, session_id)

    async def page(
        self,
        session_id: str,
        *,
        revision: int | None = None,
        generation: int | None = None,
        start: int | None = None,
        total: int | None = None,
        limit: int,
        bytes_max: int,
        order: Order = "asc",
    ) -> Page:
        span = _Span(start, total, limit, bytes_max, order)
        found = await self._read(_live_page, session_id, revision, generation, span)
        if isinstance(found, Page):
            return found
        session, archived = found
        try:
            return await anyio.to_thread.run_sync(self._archived_page, session, archived, span)
        except OSError as error:
            raise storage_error(error) from error

    def _archived_page(self, session: Session, archived: Revision, span: "_Span") -> Page:
        session_id, revision = session.session_id, archived.revision
        self._verify(session_id, archived)
        total = min(archived.entries, span.total if span.total is not None else archived.entries)
        indexes = span.indexes(total)
        first = min(indexes[0], indexes[-1]) if indexes else total
        lines: Iterator[bytes] = archives.read_lines(self._archives, session_id, revision, first)
        if span.order == "desc":
            wanted = [line for line, _ in zip(lines, indexes, strict=False)]
            lines = reversed(wanted)
        return span.fill(session, revision, archived.generation, total, indexes, lines)

    def _verify(self, session_id: str, archived: Revision) -> None:
        """Verify the whole file, unless it was and has not been touched since."""
        path = archives.archive_path(self._archives, session_id, archived.revision)
        try:
            status = path.lstat()
        except OSError:
            status = os.stat_result((0,) * 10)
        mark = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if self._verified.get((session_id, archived.revision)) == mark:
            return
        archives.verify_archive(self._archives, self._store_id, session_id, archived)
        if len(self._verified) >= _VERIFIED_MAX:
            self._verified.clear()
        self._verified[session_id, archived.revision] = mark

    async def events(self, session_id: str, *, after_seq: int, limit: int) -> list[Event]:
        return await self._read(_events, session_id, after_seq, limit)

    async def events_of_all(self, *, after_ordinal: int, limit: int) -> list[Event]:
        return await self._read(_events_of_all, after_ordinal, limit)

    async def last_ordinal(self) -> int:
        return await self._read(_last_ordinal)

    async def operation(self, operation_id: str) -> Operation:
        return await self._read(_operation, operation_id)

    async def health(self) -> StoreHealth:
        def size(name: str) -> int:
            try:
                return (self._folder / name).stat().st_size
            except OSError:
                return 0

        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise storage_error(error) from error
        return StoreHealth(
            writable=self._writer is not None and self._damaged is None,
            damaged=self._damaged is not None,
            database_bytes=size("store.db"),
            log_bytes=size("store.db-wal"),
            disk_free_bytes=free,
            waiting_changes=len(self._queue),
        )


def _tell(listener: Callable[[Any], None], what: object) -> None:
    """A listener that fails is nobody else's business, least of all the store's."""
    try:
        listener(what)
    except Exception as error:
        logger.error("a listener failed: %s", type(error).__name__)


class _Span:
    """Which entries of a history a page may hold."""

    __slots__ = ("bytes_max", "limit", "order", "start", "total")

    def __init__(
        self, start: int | None, total: int | None, limit: int, bytes_max: int, order: Order
    ) -> None:
        self.start = start
        self.total = total
        self.limit = limit
        self.bytes_max = bytes_max
        self.order: Order = order

    def indexes(self, total: int) -> range:
        """The indexes in the page's order, of a history of `total` entries."""
        if self.order == "asc":
            start = self.start if self.start is not None else 0
            return range(start, min(total, start + self.limit))
        start = min(self.start if self.start is not None else total - 1, total - 1)
        return range(start, max(-1, start - self.limit), -1)

    def fill(
        self,
        session: Session,
        revision: int,
        generation: int,
        total: int,
        indexes: range,
        lines: Iterator[bytes],
    ) -> Page:
        """Take lines, which belong to `indexes`, until `bytes_max` would be passed."""
        entries: list[bytes] = []
        next_index: int | None = None
        room = self.bytes_max
        for index, line in zip(indexes, lines, strict=False):
            room -= len(line) + 1
            if room < 0 and entries:
                next_index = index
                break
            entries.append(line)
        else:
            if indexes and 0 <= indexes.stop < total:
                next_index = indexes.stop
        return Page(session, revision, generation, total, entries, next_index)


class _snapshot:
    """A read transaction: everything within sees one state. Gives a function that finds session rows."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> Callable[[str], SessionRow]:
        self._db.execute("BEGIN")
        return lambda session_id: _find(self._db, session_id)

    def __exit__(self, *_: object) -> None:
        self._db.execute("ROLLBACK")


def _checkpoint(db: sqlite3.Connection) -> None:
    busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise sqlite3.OperationalError("the log is in use")


def _find(db: sqlite3.Connection, session_id: str) -> SessionRow:
    row = db.execute(f"{SELECT_SESSION} WHERE session_id = ?", (session_id,)).fetchone()
    if row is None:
        raise UnknownSession
    return session_row(row)


_SORT_COLUMNS: Final = {
    "updated_at": "updated_at_ms",
    "created_at": "created_at_ms",
    "session_id": "session_id",
}


def _list(db: sqlite3.Connection, query: Query) -> list[Session]:
    column = _SORT_COLUMNS[query.sort]
    conditions: list[str] = []
    values: list[object] = []

    def where(condition: str, *some: object) -> None:
        conditions.append(condition)
        values.extend(some)

    if query.state is not None:
        where("state = ?", query.state)
    if query.cwd is not None:
        where("cwd = ?", query.cwd)
    for name, value in query.labels.items():
        where("EXISTS (SELECT 1 FROM json_each(labels) WHERE key = ? AND value = ?)", name, value)
    if query.title_contains is not None:
        where("instr(lower(title), lower(?)) > 0", query.title_contains)
    if query.updated_after_ms is not None:
        where("updated_at_ms > ?", query.updated_after_ms)
    if query.updated_before_ms is not None:
        where("updated_at_ms < ?", query.updated_before_ms)
    if query.after is not None:
        comparison = "<" if query.order == "desc" else ">"
        where(f"({column}, session_id) {comparison} (?, ?)", *query.after)
    direction = "DESC" if query.order == "desc" else "ASC"
    clause = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = db.execute(
        f"{SELECT_SESSION}{clause} ORDER BY {column} {direction}, session_id {direction} LIMIT ?",
        (*values, query.limit),
    )
    return [session_row(row).session() for row in rows]


def _revision_of(row: tuple[Any, ...]) -> Revision:
    return Revision(*row[:6], Tokens(row[6], row[7]), *row[8:])


def _revisions(db: sqlite3.Connection, session_id: str) -> list[Revision]:
    with _snapshot(db) as row_of:
        rows = db.execute(
            f"SELECT {_REVISION_COLUMNS} FROM archives WHERE key = ? ORDER BY revision DESC",
            (row_of(session_id).key,),
        ).fetchall()
    return [_revision_of(row) for row in rows]


def _live_page(
    db: sqlite3.Connection,
    session_id: str,
    revision: int | None,
    generation: int | None,
    span: _Span,
) -> Page | tuple[Session, Revision]:
    """A page of the present history; or the archived revision that is asked for."""
    with _snapshot(db) as row_of:
        row = row_of(session_id)
        if revision not in (None, row.revision) or generation not in (None, row.generation):
            found = db.execute(
                f"SELECT {_REVISION_COLUMNS} FROM archives WHERE key = ? AND (revision = ? OR generation = ?)",
                (row.key, revision, generation),
            ).fetchone()
            if found is None:
                raise RevisionUnknown(revision)
            return row.session(), _revision_of(found)
        total = min(row.entries, span.total if span.total is not None else row.entries)
        indexes = span.indexes(total)
        base = row.key << POSITION_BITS | row.base
        if span.order == "asc":
            lines = db.execute(
                "SELECT line FROM entries WHERE position >= ? AND position < ? ORDER BY position",
                (base + indexes.start, base + indexes.stop),
            )
        else:
            lines = db.execute(
                "SELECT line FROM entries WHERE position > ? AND position <= ? ORDER BY position DESC",
                (base + indexes.stop, base + indexes.start),
            )
        return span.fill(
            row.session(),
            row.revision,
            row.generation,
            total,
            indexes,
            (line for (line,) in lines),
        )


def _events(db: sqlite3.Connection, session_id: str, after_seq: int, limit: int) -> list[Event]:
    rows = db.execute(
        "SELECT ordinal, seq, method, body FROM events WHERE seq > ? AND key ="
        " coalesce((SELECT key FROM sessions WHERE session_id = ?),"
        " (SELECT key FROM tombstones WHERE session_id = ?)) ORDER BY seq LIMIT ?",
        (after_seq, session_id, session_id, limit),
    )
    return [Event(ordinal, session_id, *rest) for ordinal, *rest in rows]


def _events_of_all(db: sqlite3.Connection, after_ordinal: int, limit: int) -> list[Event]:
    rows = db.execute(
        "SELECT ordinal, coalesce("
        " (SELECT session_id FROM sessions WHERE sessions.key = events.key),"
        " (SELECT session_id FROM tombstones WHERE tombstones.key = events.key)),"
        " seq, method, body FROM events WHERE ordinal > ? ORDER BY ordinal LIMIT ?",
        (after_ordinal, limit),
    )
    return [Event(*row) for row in rows]


def _last_ordinal(db: sqlite3.Connection) -> int:
    (ordinal,) = db.execute("SELECT coalesce(max(ordinal), 0) FROM events").fetchone()
    return int(ordinal)


def _operation(db: sqlite3.Connection, operation_id: str) -> Operation:
    found = db.execute(f"{SELECT_OPERATION} WHERE operation_id = ?", (operation_id,)).fetchone()
    if found is None:
        raise OperationUnknown
    return operation_of(found)
