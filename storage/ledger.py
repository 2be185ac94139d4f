"""The changes: what each does to the tables, on the thread of the only read-write connection.

`Ledger.run` makes one transaction of a batch of changes. A change that is refused (a StoreError)
has written nothing by then and costs the others nothing; any other exception undoes the whole
batch. Rows of entries, events and sessions are gathered and written once per batch, so a change
that reads these tables calls `flush` first.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec
from msgspec import structs

from recapd.storage.entry import Entry, encode_entry
from recapd.storage.errors import (
    CompactionRunning,
    SessionClosed,
    SessionExists,
    StorageError,
    StoreError,
    Superseded,
    UnknownSession,
)
from recapd.storage.events import event_body
from recapd.storage.rows import (
    POSITION_BITS,
    SessionRow,
    find_operation,
    find_replayed,
    find_session,
    last_ordinal,
)
from recapd.storage.store import (
    NOTHING_EXPECTED,
    AccessToken,
    Appended,
    AutoCompact,
    Event,
    Expect,
    History,
    NewItem,
    NewSession,
    Operation,
    Parent,
    Receipt,
    Replacement,
    Replayed,
    Revision,
    Session,
    SessionChanges,
    Status,
)

T = TypeVar("T")

_CACHED_ROWS_MAX: Final = 4096  # about 2 MB
_SWEEP_ROWS: Final = 1000  # removed at once: an append behind it does not notice
_SWEEP_BYTES: Final = 1 << 20  # likewise: each page of a long line is touched

_CHANGING: Final = (  # columns of `sessions` that events go with; the others only `update` changes
    *("updated_at_ms", "revision", "generation", "base", "entries", "tokens_counted"),
    *("tokens_estimated", "next_entry_id", "seq", "running"),
)
_UPDATE_SESSION: Final = f"UPDATE sessions SET {' = ?, '.join(_CHANGING)} = ? WHERE key = ?"
_changing: Final = attrgetter(*_CHANGING, "key")

_encode = msgspec.json.Encoder().encode


def _json_or_null(value: AutoCompact | Parent | None) -> str | None:
    return None if value is None else _encode(value).decode()


class CommitFailed(Exception):
    """COMMIT answered with an error, which does not say whether the transaction was made.

    If it was, the log has its events up to `ordinal` (None: it has none), these are its outcomes,
    and these archives, by session id and revision, are to be removed.
    """

    def __init__(
        self,
        error: Exception,
        outcomes: "list[Outcome]",
        ordinal: int | None,
        removed: list[tuple[str, int]],
    ) -> None:
        super().__init__(type(error).__name__)
        self.error = error
        self.outcomes = outcomes
        self.ordinal = ordinal
        self.removed = removed


Change = Callable[["Ledger"], Any]
Outcome = Any  # the change's result, or the Exception that it raised


class Ledger:
    """The state of one batch, and a cache of the session rows that batches have touched.

    `has_archive` says whether an archive's file is there; `unlink` removes the archive of a session
    id and a revision, and raises nothing.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        now_ms: Callable[[], int],
        has_archive: Callable[[str, Revision], bool],
        unlink: Callable[[str, int], None],
    ) -> None:
        self._db = connection
        self._now_ms = now_ms
        self._has_archive = has_archive
        self._unlink = unlink
        self._removed: list[tuple[str, int]] = []  # archives, once the batch is durable
        self._rows: dict[str, SessionRow] = {}
        self._changed: dict[int, SessionRow] = {}
        self._lines: list[tuple[int, bytes]] = []
        self._calls: list[tuple[int, int, str]] = []
        self._event_rows: list[tuple[int, int, int, str, bytes]] = []
        self._events: list[Event] = []
        self._now = 0
        self._ordinal: int | None = None  # of the latest event; None: to be looked up
        (garbage,) = connection.execute("SELECT count(*) FROM garbage").fetchone()
        self.has_garbage = garbage > 0

    # One transaction.

    def run(self, changes: Sequence[Change]) -> tuple[list[Outcome], list[Event]]:
        """Make the changes in order, as one transaction, durable on return.

        Returns an outcome for each, and the events of all. Raises CommitFailed; or sqlite3.Error or
        whatever else a change raised, and then nothing was made.
        """
        db = self._db
        events: list[Event] = []
        self._events = events
        self._now = self._now_ms()
        outcomes: list[Outcome] = []
        try:
            if db.in_transaction:  # a rollback failed
                db.execute("ROLLBACK")
            db.execute("BEGIN IMMEDIATE")
            for change in changes:
                try:
                    outcomes.append(change(self))
                except StoreError as refusal:
                    outcomes.append(refusal)
            self.flush()
        except BaseException:
            self._forget()
            # Some errors roll back by themselves (sqlite.org/lang_transaction.html).
            if db.in_transaction:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            raise
        removed, self._removed = self._removed, []
        try:
            db.execute("COMMIT")
        except Exception as error:  # MemoryError as well, which tells as little
            ordinal = events[-1].ordinal if events else None
            raise CommitFailed(error, outcomes, ordinal, removed) from error
        if len(self._rows) > _CACHED_ROWS_MAX:
            self._rows.clear()
        # Rows first, files after: a row without its file would be a loss, and a file without a row
        # is swept at the next start.
        for session_id, revision in removed:
            self._unlink(session_id, revision)
        return outcomes, events

    def last_ordinal(self) -> int:
        """Of the latest event; 0 when there is none."""
        if self._ordinal is None:
            self._ordinal = last_ordinal(self._db)
        return self._ordinal

    def _forget(self) -> None:
        self._rows.clear()
        self._changed.clear()
        self._lines.clear()
        self._calls.clear()
        self._event_rows.clear()
        self._removed.clear()
        self._ordinal = None

    def flush(self) -> None:
        """Write what was gathered."""
        db = self._db
        if self._lines:
            db.executemany("INSERT INTO entries (position, line) VALUES (?, ?)", self._lines)
            self._lines.clear()
        if self._calls:
            db.executemany("INSERT OR IGNORE INTO calls VALUES (?, ?, ?)", self._calls)
            self._calls.clear()
        if self._event_rows:
            db.executemany(
                "INSERT INTO events (ordinal, key, seq, method, body) VALUES (?, ?, ?, ?, ?)",
                self._event_rows,
            )
            self._event_rows.clear()
        if self._changed:
            db.executemany(_UPDATE_SESSION, map(_changing, self._changed.values()))
            self._changed.clear()

    # What the changes share.

    def _row(self, session_id: str) -> SessionRow:
        row = self._rows.get(session_id)
        if row is None:
            self.flush()
            row = self._rows[session_id] = find_session(self._db, session_id)
        return row

    def _event(
        self,
        row: SessionRow,
        method: str,
        operation_id: str | None,
        members: dict[str, object] | None = None,
    ) -> None:
        row.seq += 1
        session_id, seq = row.session_id, row.seq
        ordinal = self._ordinal = self.last_ordinal() + 1
        at = row.revision, row.generation, self._now
        body = event_body(session_id, seq, *at, operation_id, members or {})
        self._changed[row.key] = row
        self._event_rows.append((ordinal, row.key, seq, method, body))
        self._events.append(Event(ordinal, session_id, seq, method, body))

    def once(
        self,
        session_id: str,
        receipt: Receipt | None,
        render: Callable[[T], bytes] | None,
        change: "Callable[[Ledger, str | None], T]",
    ) -> T | Replayed:
        """Make a change under its operation id, unless it was made before; record its outcome."""
        if receipt is None:
            return change(self, None)
        if replayed := find_replayed(self._db, receipt):
            return replayed
        result = change(self, receipt.operation_id)
        self._record(receipt, session_id, "completed", render(result) if render else None)
        return result

    def _record(
        self, receipt: Receipt, session_id: str, status: Status, outcome: bytes | None
    ) -> None:
        ended = None if status == "running" else self._now
        self._db.execute(
            "INSERT INTO operations (operation_id, method, digest, session_id, status,"
            " started_at_ms, ended_at_ms, outcome) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*structs.astuple(receipt), session_id, status, self._now, ended, outcome),
        )

    def _add_lines(self, row: SessionRow, lines: Sequence[bytes]) -> None:
        position = row.key << POSITION_BITS | row.base + row.entries
        self._lines.extend(enumerate(lines, start=position))
        row.entries += len(lines)

    def _put_history(self, row: SessionRow, history: History) -> None:
        """Of a row that has no entries."""
        self._add_lines(row, history.lines)
        self._calls.extend((row.key, row.generation, call_id) for call_id in history.calls)
        row.next_entry_id = history.next_entry_id
        row.tokens_counted = history.tokens.counted
        row.tokens_estimated = history.tokens.estimated

    def _add_items(self, row: SessionRow, items: Sequence[NewItem]) -> list[tuple[int, str]]:
        """Append the items. Gives the outputs, as entry id and call id, that no call belongs to."""
        unmatched: list[tuple[int, str]] = []
        lines: list[bytes] = []
        for entry_id, item in enumerate(items, start=row.next_entry_id):
            lines.append(encode_entry(Entry(entry_id, self._now, item.item)))
            row.tokens_estimated += item.tokens
            for call_id in item.outputs:
                self.flush()
                known = self._db.execute(
                    "SELECT 1 FROM calls WHERE key = ? AND generation = ? AND call_id = ?",
                    (row.key, row.generation, call_id),
                ).fetchone()
                if known is None:
                    unmatched.append((entry_id, call_id))
            for call_id in item.calls:
                self._calls.append((row.key, row.generation, call_id))
        self._add_lines(row, lines)
        row.next_entry_id += len(lines)
        row.revision += 1
        row.updated_at_ms = self._now
        return unmatched

    # The changes (store.py says what each promises).

    def create(
        self,
        new: NewSession,
        items: Sequence[NewItem],
        history: History | None,
        operation_id: str | None,
    ) -> Session:
        db = self._db
        session_id, labels = new.session_id, _encode(new.labels).decode()
        auto_compact, parent = _json_or_null(new.auto_compact), _json_or_null(new.parent)
        inserted = db.execute(
            "INSERT INTO sessions (session_id, title, cwd, labels, auto_compact, created_at_ms,"
            " updated_at_ms, durability, state, revision, generation, base, entries,"
            " tokens_counted, tokens_estimated, next_entry_id, seq, parent)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'active', 0, 0, 0, 0, 0, 0, 1, 0, ?)"
            " ON CONFLICT (session_id) DO NOTHING",
            (
                *(session_id, new.title, new.cwd, labels, auto_compact),
                *(self._now, self._now, new.durability, parent),
            ),
        )
        if not inserted.rowcount:
            raise SessionExists
        key, seq = inserted.lastrowid or 0, 0
        tombstone = db.execute(
            "SELECT key, seq FROM tombstones WHERE session_id = ?", (session_id,)
        ).fetchone()
        if tombstone is not None:
            deleted_key, seq = tombstone
            db.execute("UPDATE events SET key = ? WHERE key = ?", (key, deleted_key))
            db.execute("DELETE FROM tombstones WHERE key = ?", (deleted_key,))
        names = session_id, new.title, new.cwd, new.labels, new.auto_compact
        zeros = 0, 0, 0, 0, 0, 0
        row = self._rows[session_id] = SessionRow(
            key,
            *names,
            self._now,
            self._now,
            new.durability,
            "active",
            *zeros,
            1,
            seq,
            None,
            new.parent,
            (),
        )
        if history is not None:
            self._put_history(row, history)
        self._event(row, "session.created", operation_id)
        if items:
            self._add_items(row, items)
            self._appended(row, 1, operation_id)
        return row.session()

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        expect: Expect,
        operation_id: str | None,
    ) -> Appended:
        row = self._row(session_id)
        expect.check(row.revision, row.generation)
        if row.state == "archived":
            raise SessionClosed
        first = row.next_entry_id
        unmatched = self._add_items(row, items)
        self._appended(row, first, operation_id)
        return Appended(row.session(), first, row.next_entry_id - 1, tuple(unmatched))

    def _appended(self, row: SessionRow, first: int, operation_id: str | None) -> None:
        members: dict[str, object] = {
            "first_entry_id": first,
            "last_entry_id": row.next_entry_id - 1,
        }
        self._event(row, "history.appended", operation_id, members)

    def update(
        self,
        session_id: str,
        changes: SessionChanges,
        expect: Expect,
        operation_id: str | None,
    ) -> Session:
        row = self._row(session_id)
        expect.check(row.revision, row.generation)
        for name in changes.__struct_fields__:
            value = getattr(changes, name)
            if value is not msgspec.UNSET:
                setattr(row, name, value)
        row.updated_at_ms = self._now
        self._db.execute(
            "UPDATE sessions SET title = ?, cwd = ?, labels = ?, auto_compact = ?, state = ?"
            " WHERE key = ?",
            (
                *(row.title, row.cwd, _encode(row.labels).decode()),
                *(_json_or_null(row.auto_compact), row.state, row.key),
            ),
        )
        self._event(row, "session.updated", operation_id)
        return row.session()

    def begin(self, session_id: str, receipt: Receipt, expect: Expect) -> Session | Replayed:
        if replayed := find_replayed(self._db, receipt):
            return replayed
        row = self._row(session_id)
        expect.check(row.revision, row.generation)
        if row.state == "archived":
            raise SessionClosed
        if row.running is not None:
            raise CompactionRunning(row.running)
        row.running = receipt.operation_id
        self._event(row, "compaction.started", receipt.operation_id)
        self._record(receipt, session_id, "running", None)
        return row.session()

    def end(
        self, operation_id: str, status: Status, outcome: bytes, members: dict[str, object]
    ) -> Operation:
        operation = find_operation(self._db, operation_id)
        if operation.status != "running":
            return operation
        row = self._row(operation.session_id)
        self._finish(row, operation_id, status, lambda: outcome, members)
        return find_operation(self._db, operation_id)

    def _finish(
        self,
        row: SessionRow,
        operation_id: str,
        status: Status,
        outcome: Callable[[], bytes],
        members: dict[str, object],
    ) -> None:
        row.running = None
        self._event(row, "compaction.finished", operation_id, {"status": status, **members})
        self._db.execute(
            "UPDATE operations SET status = ?, ended_at_ms = ?, outcome = ? WHERE operation_id = ?",
            (status, self._now, outcome(), operation_id),
        )

    def replace(
        self, session_id: str, change: Replacement, render: Callable[[Session], bytes]
    ) -> Session:
        row = self._row(session_id)
        archive = change.archive
        if (row.revision, row.generation) != (archive.revision, archive.generation):
            raise Superseded
        if archive.kind == "compaction" and row.running != change.operation_id:
            raise Superseded
        if not self._has_archive(session_id, archive):
            raise StorageError("the archive is gone")
        self.flush()
        entries_before = row.entries
        if row.entries:
            first = row.key << POSITION_BITS | row.base
            self._discard(first, first + row.entries - 1, erase=False)
        *head, _, size_bytes, digest = structs.astuple(archive)
        self._db.execute(
            "INSERT INTO archives VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row.key, *head, *structs.astuple(archive.tokens), size_bytes, digest),
        )
        row.base += row.entries
        row.entries = 0
        row.revision += 1
        row.generation += 1
        row.archived_revisions = (archive.revision, *row.archived_revisions)
        row.updated_at_ms = self._now
        self._put_history(row, change.history)
        members: dict[str, object] = {
            "kind": archive.kind,
            "from_generation": archive.generation,
            "to_generation": row.generation,
            "archived_revision": archive.revision,
            "entries_before": entries_before,
            "entries_after": row.entries,
            **change.event,
        }
        self._event(row, "history.replaced", change.operation_id, members)
        if row.running == change.operation_id:
            self._finish(
                row,
                change.operation_id,
                "completed",
                lambda: render(row.session()),
                change.finished,
            )
        return row.session()

    def keep(self, session_id: str) -> Session:
        return self._row(session_id).session()

    def delete(
        self, session_id: str, expect: Expect, operation_id: str | None, ended: bytes
    ) -> bool:
        try:
            row = self._row(session_id)
        except UnknownSession:
            return False
        expect.check(row.revision, row.generation)
        if row.running is not None:
            reason: dict[str, object] = {"reason": "session_deleted"}
            self._finish(row, row.running, "cancelled", lambda: ended, reason)
        self._event(row, "session.deleted", operation_id)
        self.flush()
        self._erase(True)
        db = self._db
        db.execute("DELETE FROM events WHERE key = ? AND seq < ?", (row.key, row.seq))
        db.execute("INSERT INTO tombstones VALUES (?, ?, ?)", (session_id, row.key, row.seq))
        db.execute("DELETE FROM calls WHERE key = ?", (row.key,))
        db.execute("DELETE FROM archives WHERE key = ?", (row.key,))
        db.execute("DELETE FROM sessions WHERE key = ?", (row.key,))
        if row.base + row.entries:
            first = row.key << POSITION_BITS
            last = first + row.base + row.entries - 1
            db.execute("DELETE FROM garbage WHERE first BETWEEN ? AND ?", (first, last))
            self._discard(first, last, erase=True)
        del self._rows[session_id]
        self._removed += [(session_id, revision) for revision in row.archived_revisions]
        return True

    def add_token(self, token: AccessToken) -> None:
        self._db.execute("DELETE FROM access_tokens WHERE expires_at_ms <= ?", (self._now,))
        self._db.execute(
            "INSERT INTO access_tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                token.token_id,
                token.digest,
                token.label,
                _encode(token.scopes).decode(),
                None if token.sessions is None else _encode(token.sessions).decode(),
                token.parent,
                token.created_at_ms,
                token.expires_at_ms,
            ),
        )

    def remove_tokens(self, token_ids: Sequence[str]) -> None:
        self._db.executemany(
            "DELETE FROM access_tokens WHERE token_id = ?", [(one,) for one in token_ids]
        )

    # Housekeeping.

    def discard_archive(self, session_id: str, revision: int) -> None:
        """Remove the file of an archive, unless a row names it."""
        named = self._db.execute(
            "SELECT 1 FROM archives JOIN sessions USING (key)"
            " WHERE session_id = ? AND archives.revision = ?",
            (session_id, revision),
        ).fetchone()
        if named is None:
            self._unlink(session_id, revision)

    def _erase(self, on: bool) -> None:
        """Whether what is removed from now on is overwritten."""
        self._db.execute(f"PRAGMA secure_delete={'ON' if on else 'OFF'}").fetchall()

    def _discard(self, first: int, last: int, *, erase: bool) -> None:
        self._db.execute("INSERT INTO garbage VALUES (?, ?, ?)", (first, last, erase))
        self.has_garbage = True

    def sweep(self) -> None:
        """Remove a few rows of replaced or deleted histories; `has_garbage`: there is more."""
        found = self._db.execute("SELECT first, last, erase FROM garbage LIMIT 1").fetchone()
        if found is None:
            self.has_garbage = False
            return
        first, last, erase = found
        self._erase(erase)
        until, size_bytes = last, 0
        sizes = self._db.execute(
            "SELECT position, length(line) FROM entries WHERE position BETWEEN ? AND ?"
            " ORDER BY position LIMIT ?",
            (first, last, _SWEEP_ROWS),
        ).fetchall()
        for count, (position, line_bytes) in enumerate(sizes, start=1):
            size_bytes += line_bytes
            if size_bytes > _SWEEP_BYTES or count == _SWEEP_ROWS:
                until = position
                break
        self._db.execute("DELETE FROM entries WHERE position BETWEEN ? AND ?", (first, until))
        self._db.execute("DELETE FROM garbage WHERE first = ?", (first,))
        if until < last:
            self._discard(until + 1, last, erase=erase)
        key = first >> POSITION_BITS
        self._db.execute(
            "DELETE FROM calls WHERE (key, generation, call_id) IN (SELECT key, generation, call_id"
            " FROM calls WHERE key = ? AND generation <"
            " (SELECT generation FROM sessions WHERE key = ?) LIMIT ?)",
            (key, key, _SWEEP_ROWS),
        )

    def settle(self, outcome: bytes, members: dict[str, object]) -> None:
        """At the start: end as failed every compaction that an earlier life did not end."""
        for (operation_id,) in self._db.execute(
            "SELECT operation_id FROM operations WHERE status = 'running'"
        ).fetchall():
            self.end(operation_id, "failed", outcome, members)

    def delete_transient(self) -> None:
        """Delete the sessions that are not to outlive the process, at its start and its end."""
        for (session_id,) in self._db.execute(
            "SELECT session_id FROM sessions WHERE durability = 'transient'"
        ).fetchall():
            self.delete(session_id, NOTHING_EXPECTED, None, b"{}")
