"""The Store over SQLite and archive files.

::

    <folder>/lock       held while the store is open
    <folder>/store.db   and SQLite's -wal and -shm beside it
    <folder>/archives/  archive.py

One task owns the only read-write connection. Changes wait in its queue; it folds what waits into
one transaction, which is one call on the connection's thread and one fsync. Readers have
connections of their own.
"""

import logging
import os
import shutil
import sqlite3
import stat
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Concatenate, Final, Literal, NamedTuple, ParamSpec, TypeVar

import aiosqlite
import anyio
import anyio.to_thread

from recapd.storage import archive as archives
from recapd.storage import queries, swap
from recapd.storage.database import (
    Busy,
    Damaged,
    call,
    check_private_file,
    checkpoint,
    connect,
    make_private_file,
    migrate,
    raw,
    refuse_newer,
    storage_error,
)
from recapd.storage.errors import (
    ArchiveCorrupt,
    ArchiveMissing,
    OutcomeUnknown,
    StorageError,
    StoreClosed,
    Superseded,
    Unsafe,
)
from recapd.storage.ledger import (
    Change,
    CommitFailed,
    Ledger,
    Outcome,
)
from recapd.storage.lock import hold, make_private_folder
from recapd.storage.pending import Pending
from recapd.storage.rows import find_operation, find_replayed, find_session, last_ordinal
from recapd.storage.store import (
    NOTHING_EXPECTED,
    AccessToken,
    Appended,
    Event,
    Expect,
    Fault,
    History,
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
    Verified,
)
from recapd.storage.verify import check_session

logger = logging.getLogger("recapd.storage")

P = ParamSpec("P")
T = TypeVar("T")

_BATCH_MAX: Final = 4096  # changes in one transaction
_READERS: Final = 2  # one long read does not hold up the others
_IDLE_S: Final = 5.0  # after this long without a change the write-ahead log is put away
_CLOSE_TIMEOUT_S: Final = 10.0
_VERIFIED_MAX: Final = 256
_SETTLED_NS: Final = 100_000_000  # a file changed twice within one tick shows one time only


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def open_store(
    folder: Path,
    *,
    now_ms: Callable[[], int] = _clock_ms,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    interrupted: bytes = b"{}",
) -> "AsyncGenerator[SqliteStore]":
    """Open the store in `folder`, made where there is none; close it at the end of the block.

    When it opens, compactions that an earlier life did not end have failed with `interrupted`
    (JSON) as their outcome, transient sessions are gone, and so are files that no row names.

    Raises:
        Locked: another process has it open.
        UnsafeFolder, Unsafe: a file or folder is not ours alone.
        NewerSchema, Damaged: it is left as it is.
        StorageError, OSError: it cannot be served.
    """
    make_folder(folder)
    with hold(folder / "lock"):
        swap.finish(folder)
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
            await store.close()


def make_folder(folder: Path) -> None:
    """Make the store's folder; its name, and those of folders made above it, are durable then."""
    made = [parent for parent in folder.parents if not parent.exists()]
    make_private_folder(folder)
    for path in (folder, *made):
        # Also when it was there: an earlier life may have died before its own syncs.
        with suppress(PermissionError):  # somebody else made it, above what is ours
            archives.sync_folder(path.parent.resolve())


class _Connections(NamedTuple):
    """What is open while a store is. `reads` are under way."""

    writer: aiosqlite.Connection
    ledger: Ledger
    archivist: aiosqlite.Connection  # a reader: an archive is written from one long snapshot
    readers: list[aiosqlite.Connection]
    reads: list[int]

    async def close(self, *, damaged: bool) -> None:
        await _close([self.writer, self.archivist, *self.readers], damaged=damaged)


async def _close(opened: Sequence[aiosqlite.Connection], *, damaged: bool) -> None:
    """Close connections, the writer of them being the first.

    The writer goes last, and SQLite brings the log into the database; first if the database is
    damaged, and then nothing touches it any more. An unclosed connection has a live thread, and the
    process would never end.
    """
    deadline = anyio.current_time() + _CLOSE_TIMEOUT_S

    async def close(connection: aiosqlite.Connection) -> None:
        with anyio.CancelScope(deadline=deadline, shield=True), suppress(sqlite3.Error):
            await connection.close()  # the log stays if that fails, and the next start reads it

    async with AsyncExitStack() as stack:  # the last one first, and all, whatever happens
        for connection in reversed(opened) if damaged else opened:
            stack.push_async_callback(close, connection)


async def _twice(attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of an attempt; a second one is made if the first finds damage.

    SQLite calls it damage as well when a page could not be read (SQLITE_IOERR_CORRUPTFS).
    """
    try:
        return await attempt()
    except sqlite3.Error as error:
        if not isinstance(storage_error(error), Damaged):
            raise
    return await attempt()


class SqliteStore(Store):
    """See the module; made by `open_store` only."""

    def __init__(self, folder: Path, now_ms: Callable[[], int]) -> None:
        self._folder = folder
        self._path = folder / "store.db"
        self._archives = folder / "archives"
        self._now_ms = now_ms
        self._store_id = ""
        self._home: tuple[int, int] | None = None  # the place of the database that was opened first
        self._listener: Listener = lambda _: None
        self._told = 0  # the ordinal of the last event that the listener was given
        self._queue: deque[tuple[Change, Pending[Any]]] = deque()
        self._work = anyio.Event()
        self._finishing = False
        self._closed = False
        self._batches = 0  # tried so far
        self._connections: _Connections | None = None
        self._opening = anyio.Lock()
        self._damaged: str | None = None  # in what
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
        """To be called once; see `open_store`."""
        try:
            make_private_file(self._path)
            for suffix in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    check_private_file(self._path.with_name(self._path.name + suffix))
            make_private_folder(self._archives)
            await _twice(lambda: refuse_newer(self._path))
            self._store_id = store_id
            self._connections = opened = await _twice(lambda: self._connect("FULL"))
            named = await _twice(lambda: call(opened.writer, self._settle, opened, interrupted))
            self._told = await call(opened.writer, opened.ledger.last_ordinal)
            self.swept = archives.sweep(self._archives, named)
        except CommitFailed as error:
            raise self._judge(error.error) from error
        except (sqlite3.Error, OSError) as error:
            raise self._judge(error) from error

    async def _connect(self, extent: Literal["FULL", "TRUNCATE"]) -> _Connections:
        """Open every connection, and bring what the log holds into the database, synced.

        Whoever wrote it may have died, or failed, before its own sync, and it is to be shown now.
        """
        opened: list[aiosqlite.Connection] = []
        if self._home is None:
            self._home = self._place()
        self._check_home()
        try:
            opened.append(await connect(self._path, writer=True))
            while len(opened) < 2 + _READERS:
                opened.append(await connect(self._path, writer=False))
            writer, archivist, *readers = opened
            ledger = await call(writer, self._begin, raw(writer), extent)
            # SQLite made -wal and -shm by now; their names last as long as the database needs them.
            archives.sync_folder(self._folder)
        except BaseException as error:
            damaged = isinstance(error, Exception) and isinstance(storage_error(error), Damaged)
            await _close(opened, damaged=damaged)
            raise
        return _Connections(writer, ledger, archivist, readers, [0] * _READERS)

    def _begin(self, db: sqlite3.Connection, extent: Literal["FULL", "TRUNCATE"]) -> Ledger:
        self._store_id = migrate(db, self._store_id)
        ledger = Ledger(db, self._now_ms, self._has_archive, self._unlink)
        if not checkpoint(db, extent, wait=True):
            raise sqlite3.OperationalError("the log is in use")
        return ledger

    async def _connected(self) -> _Connections:
        """The connections; made anew if they were given up. Raises StorageError."""
        if self._connections is not None:
            return self._connections
        async with self._opening:
            if self._closed:
                raise StoreClosed
            return self._connections or await self._reconnect()

    async def _reconnect(self) -> _Connections:
        try:
            opened = await _twice(lambda: self._connect("TRUNCATE"))
            try:
                # What was made while nobody could say so.
                reader = opened.readers[0]
                missed = await call(reader, queries.list_events_of_all, raw(reader), self._told, -1)
            except BaseException:
                await opened.close(damaged=False)
                raise
        except (sqlite3.Error, OSError, StorageError) as error:
            raise self._judge(error) from error
        self._connections = opened
        self._publish(missed)
        return opened

    async def _disconnect(self) -> None:
        async with self._opening:
            opened, self._connections = self._connections, None
            if opened is not None:
                await opened.close(damaged=self._damaged is not None)

    @staticmethod
    def _settle(opened: _Connections, interrupted: bytes) -> set[tuple[str, int]]:
        """End what an earlier life left. Returns session id and revision of each archive."""
        db = raw(opened.writer)
        unfinished = db.execute(
            "SELECT EXISTS (SELECT 1 FROM operations WHERE status = 'running')"
            " OR EXISTS (SELECT 1 FROM sessions WHERE durability = 'transient')"
        ).fetchone()
        if unfinished != (0,):
            opened.ledger.run(
                [
                    lambda ledger: ledger.settle(interrupted, {"reason": "interrupted"}),
                    lambda ledger: ledger.delete_transient(),
                ]
            )
        named = set(
            db.execute(
                "SELECT session_id, archives.revision FROM archives JOIN sessions USING (key)"
            )
        )
        if db.execute("SELECT count(*) FROM archives").fetchone() != (len(named),):
            # Their files would be swept, for want of the rows of their sessions.
            raise Damaged("archives of no session")
        return named

    def finish(self) -> None:
        """Take no more changes; `run` ends when those that wait are made."""
        self._submit(lambda ledger: ledger.delete_transient())
        self._finishing = True
        self._work.set()

    async def close(self) -> None:
        """Give up every connection, for good."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._disconnect()

    def _place(self) -> tuple[int, int]:
        """What lies at the database's name: device and inode. Raises OSError."""
        status = self._path.lstat()
        return status.st_dev, status.st_ino

    def _check_home(self) -> None:
        """Raises Unsafe, OSError where the database was moved away, and perhaps replaced."""
        if self._place() != self._home:
            raise Unsafe(f"{self._path.name} was put in another's place")

    def _has_archive(self, session_id: str, archive: Revision) -> bool:
        path = archives.archive_path(self._archives, session_id, archive.revision)
        try:
            status = path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == archive.bytes

    def _unlink(self, session_id: str, revision: int) -> None:
        # The folder is not empty yet, or the disk fails: the next start sweeps what no row names.
        # Nothing may be raised behind a commit, or it would be taken for not made.
        with suppress(OSError, MemoryError):
            path = archives.archive_path(self._archives, session_id, revision)
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            self._synced.discard(path.parent)

    # The writer's task.

    def _submit(self, change: Callable[[Ledger], T]) -> Pending[T]:
        pending: Pending[T] = Pending()
        if self._finishing:
            pending.reject(StoreClosed())
        else:
            self._queue.append((change, pending))
            self._work.set()
        return pending

    async def run(self) -> None:
        """Make the changes that wait, all that wait at once, until `finish`.

        Not to be cancelled: what was handed over is made and told, whatever happens to those who
        wait for it.
        """
        sweeping = True  # until it fails: then again behind the next change
        with anyio.CancelScope(shield=True):
            while True:
                if self._queue:
                    waiting = min(len(self._queue), _BATCH_MAX)
                    await self._make([self._queue.popleft() for _ in range(waiting)])
                    sweeping = True
                elif self._finishing:
                    return
                elif sweeping and self._connections and self._connections.ledger.has_garbage:
                    (outcome,) = await self._transact([lambda ledger: ledger.sweep()])
                    sweeping = outcome is None
                else:
                    self._work = anyio.Event()
                    await self._work.wait()

    async def put_log_away(self) -> None:
        """Bring the log into the database and cut it, once there was no change for a while."""
        seen = done = 0
        while True:
            await anyio.sleep(_IDLE_S)
            opened = self._connections
            if seen == self._batches != done and opened is not None and self._damaged is None:
                with anyio.CancelScope(shield=True), suppress(sqlite3.Error):
                    # Without waiting, which would hold up changes: if somebody reads, it is for
                    # the next time. If the disk fails, the next change will say.
                    if await call(
                        opened.writer, checkpoint, raw(opened.writer), "TRUNCATE", wait=False
                    ):
                        done = seen
            seen = self._batches

    async def _make(self, batch: Sequence[tuple[Change, Pending[Any]]]) -> None:
        outcomes = await self._transact([change for change, _ in batch])
        for (_, pending), outcome in zip(batch, outcomes, strict=True):
            _tell(pending.reject if isinstance(outcome, Exception) else pending.resolve, outcome)

    async def _transact(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make the changes, durable, and tell of their events. Returns an outcome for each."""
        failure: Exception
        self._batches += 1
        try:
            if self._damaged is not None:
                raise Damaged(self._damaged)
            opened = await self._connected()
        except StorageError as error:
            return [error] * len(changes)
        try:
            outcomes, events = await _twice(lambda: call(opened.writer, self._run, opened, changes))
        except CommitFailed as error:
            return await self._establish(error)
        except (sqlite3.Error, OSError, Damaged) as error:
            failure = self._judge(error)
        except Exception as error:
            failure = error
        else:
            self._publish(events)
            return outcomes
        if len(changes) == 1 or isinstance(failure, Damaged | Busy | Unsafe):
            return [failure] * len(changes)
        # One of them cannot be made; the others shall not pay for it.
        return [outcome for change in changes for outcome in await self._transact([change])]

    def _run(
        self, opened: _Connections, changes: Sequence[Change]
    ) -> tuple[list[Outcome], list[Event]]:
        self._check_home()  # what is written to it now would be lost
        return opened.ledger.run(changes)

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            self._told = events[-1].ordinal
            _tell(self._listener, events)

    def _judge(self, error: Exception) -> StorageError:
        judged = storage_error(error)
        if judged is not error:
            judged.__cause__ = error
        if isinstance(judged, Damaged):
            self._damaged = str(judged)
        return judged

    async def _establish(self, failed: CommitFailed) -> list[Outcome]:
        """Find out whether a transaction was made whose COMMIT answered with an error.

        What the page cache shows after a failed fsync need not be on the disk. So every connection
        is closed, the store opened anew, and all that the log holds is brought into the database,
        synced, and the log cut; only then does the event log say which it is.
        """
        try:
            await self._disconnect()
            await self._connected()
        except StorageError:
            return [OutcomeUnknown()] * len(failed.outcomes)
        if failed.ordinal is None:  # it left no trace in the event log either way
            return [OutcomeUnknown()] * len(failed.outcomes)
        if self._told < failed.ordinal:
            return [storage_error(failed.error)] * len(failed.outcomes)
        for session_id, revision in failed.removed:
            await anyio.to_thread.run_sync(self._unlink, session_id, revision)
        return failed.outcomes

    # Changes.

    def _submit_once(
        self,
        session_id: str,
        receipt: Receipt | None,
        render: Callable[[T], bytes] | None,
        change: Callable[[Ledger, str | None], T],
    ) -> Pending[T | Replayed]:
        return self._submit(lambda ledger: ledger.once(session_id, receipt, render, change))

    def create(
        self,
        new: NewSession,
        items: Sequence[NewItem] = (),
        *,
        history: History | None = None,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        def change(ledger: Ledger, operation_id: str | None) -> Session:
            return ledger.create(new, items, history, operation_id)

        return self._submit_once(new.session_id, receipt, render, change)

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Appended], bytes] | None = None,
    ) -> Pending[Appended | Replayed]:
        def change(ledger: Ledger, operation_id: str | None) -> Appended:
            return ledger.append(session_id, items, expect, operation_id)

        return self._submit_once(session_id, receipt, render, change)

    def update(
        self,
        session_id: str,
        changes: SessionChanges,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        def change(ledger: Ledger, operation_id: str | None) -> Session:
            return ledger.update(session_id, changes, expect, operation_id)

        return self._submit_once(session_id, receipt, render, change)

    def begin(
        self, session_id: str, receipt: Receipt, *, expect: Expect = NOTHING_EXPECTED
    ) -> Pending[Session | Replayed]:
        return self._submit(lambda ledger: ledger.begin(session_id, receipt, expect))

    def end(
        self, operation_id: str, status: Status, outcome: bytes, event: dict[str, object]
    ) -> Pending[Operation]:
        return self._submit(lambda ledger: ledger.end(operation_id, status, outcome, event))

    def replace(
        self,
        session_id: str,
        change: Replacement,
        *,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes],
    ) -> Pending[Session | Replayed]:
        def run(ledger: Ledger, _: str | None) -> Session:
            return ledger.replace(session_id, change, render)

        return self._submit_once(session_id, receipt, render, run)

    def keep(
        self, session_id: str, receipt: Receipt, *, render: Callable[[Session], bytes]
    ) -> Pending[Session | Replayed]:
        def change(ledger: Ledger, _: str | None) -> Session:
            return ledger.keep(session_id)

        return self._submit_once(session_id, receipt, render, change)

    def delete(
        self,
        session_id: str,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[bool], bytes] | None = None,
        ended: bytes = b"{}",
    ) -> Pending[bool | Replayed]:
        def change(ledger: Ledger, operation_id: str | None) -> bool:
            return ledger.delete(session_id, expect, operation_id, ended)

        return self._submit_once(session_id, receipt, render, change)

    def add_token(self, token: AccessToken) -> Pending[None]:
        return self._submit(lambda ledger: ledger.add_token(token))

    def remove_tokens(self, token_ids: Sequence[str]) -> Pending[None]:
        return self._submit(lambda ledger: ledger.remove_tokens(token_ids))

    # Archives.

    async def archive(self, session: Session, kind: Kind, operation_id: str) -> Revision:
        archivist = (await self._connected()).archivist
        try:
            db = raw(archivist)
            return await _twice(
                lambda: call(archivist, self._write_archive, db, session, kind, operation_id)
            )
        except (sqlite3.Error, OSError, Damaged) as error:
            raise self._judge(error) from error

    def _write_archive(
        self, db: sqlite3.Connection, session: Session, kind: Kind, operation_id: str
    ) -> Revision:
        self._check_home()
        with queries.snapshot(db):
            row = find_session(db, session.session_id)
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
            try:
                with queries.lines_of(db, row, range(row.entries)) as lines:
                    size_bytes, digest = archives.write_archive(
                        self._archives, header, lines, self._synced
                    )
            except ValueError as error:
                raise Damaged("entries are missing") from error
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
        # In the writer's turn: no row can come to name it between the look and the removal.
        await self._submit(lambda ledger: ledger.discard_archive(session_id, revision)).settled()

    # Reads.

    async def _read(
        self,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `function` on the reader that has the least to do."""
        opened = await self._connected()
        reads = opened.reads
        index = min(range(len(reads)), key=reads.__getitem__)
        reader = opened.readers[index]
        reads[index] += 1
        try:
            return await _twice(lambda: call(reader, function, raw(reader), *args, **kwargs))
        except (sqlite3.Error, OSError, Damaged) as error:
            raise self._judge(error) from error
        finally:
            reads[index] -= 1

    async def session(self, session_id: str) -> Session:
        return (await self._read(find_session, session_id)).session()

    async def sessions(self, query: Query) -> list[Session]:
        return await self._read(queries.list_sessions, query)

    async def revisions(self, session_id: str) -> list[Revision]:
        return await self._read(queries.list_revisions, session_id)

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
        span = queries.Span(start, total, limit, bytes_max, order)
        found = await self._read(queries.live_page, session_id, revision, generation, span)
        if isinstance(found, Page):
            return found
        session, archived = found
        try:
            return await anyio.to_thread.run_sync(self._archived_page, session, archived, span)
        except OSError as error:
            raise storage_error(error) from error

    def _archived_page(self, session: Session, archived: Revision, span: queries.Span) -> Page:
        session_id, revision = session.session_id, archived.revision
        total, indexes = span.of(archived.entries)
        with archives.open_archive(self._archives, session_id, revision) as file:
            self._verify(file, session_id, archived)
            if span.order == "asc":
                lines = archives.read_lines(file, revision, indexes)
            else:
                rising = archives.read_lines(file, revision, indexes[::-1])
                lines = reversed(queries.last_lines(rising, span.bytes_max))
            try:
                taken = span.take(lines, indexes, total)
            except ValueError as error:
                raise ArchiveCorrupt(revision, "content") from error
        return Page(session, revision, archived.generation, total, *taken)

    def _verify(self, file: BufferedReader, session_id: str, archived: Revision) -> None:
        """Verify the whole file, unless it was and has not been touched since."""
        status = os.fstat(file.fileno())
        mark = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if self._verified.get((session_id, archived.revision)) == mark:
            return
        archives.verify_archive(file, self._store_id, session_id, archived)
        if len(self._verified) >= _VERIFIED_MAX:
            self._verified.clear()
        if time.time_ns() - status.st_ctime_ns > _SETTLED_NS:
            self._verified[session_id, archived.revision] = mark

    async def events(self, session_id: str, *, after_seq: int, limit: int) -> list[Event]:
        return await self._read(queries.list_events, session_id, after_seq, limit)

    async def events_of_all(self, *, after_ordinal: int, limit: int) -> list[Event]:
        return await self._read(queries.list_events_of_all, after_ordinal, limit)

    async def last_ordinal(self) -> int:
        return await self._read(last_ordinal)

    async def operation(self, operation_id: str) -> Operation:
        return await self._read(find_operation, operation_id)

    async def replayed(self, receipt: Receipt) -> Replayed | None:
        return await self._read(find_replayed, receipt)

    async def tokens(self) -> list[AccessToken]:
        return await self._read(queries.list_tokens)

    async def verify(self, session_id: str, *, read: Callable[[int], bool]) -> Verified:
        try:
            present = await self.session(session_id)
            size_bytes, revisions, faults = await self._read(
                check_session, session_id, read(present.revision)
            )
        except Damaged:
            return Verified(0, 0, [Fault(session_id, None, "database_damaged")])
        for archived in revisions:
            whole = read(archived.revision)
            fault = await anyio.to_thread.run_sync(self._archive_fault, session_id, archived, whole)
            # A deletion removes the file behind the row.
            if fault is not None and archived in await self.revisions(session_id):
                faults.append(Fault(session_id, archived.revision, fault))
            size_bytes += archived.bytes if whole else 0
        return Verified(1 + len(revisions), size_bytes, faults)

    def _archive_fault(
        self, session_id: str, archived: Revision, whole: bool
    ) -> Literal["archive_missing", "archive_corrupt"] | None:
        try:
            with archives.open_archive(self._archives, session_id, archived.revision) as file:
                if whole:
                    archives.verify_archive(file, self._store_id, session_id, archived)
                elif os.fstat(file.fileno()).st_size != archived.bytes:
                    return "archive_corrupt"
        except ArchiveMissing:
            return "archive_missing"
        except ArchiveCorrupt:
            return "archive_corrupt"
        except OSError as error:
            raise storage_error(error) from error
        return None

    async def health(self) -> StoreHealth:
        def size(name: str) -> int:
            try:
                return (self._folder / name).stat().st_size
            except OSError:
                return 0

        moved, free = False, 0
        try:
            self._check_home()
            free = shutil.disk_usage(self._folder).free
        except (OSError, Unsafe):
            moved = True
        return StoreHealth(
            writable=self._connections is not None and self._damaged is None and not moved,
            damaged=self._damaged is not None,
            moved=moved,
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
