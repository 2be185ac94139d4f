"""The changes themselves: what each does to the tables, on the thread of the only read-write connection.

`Ledger.run` makes one transaction of a batch of changes. A change that is refused (a StoreError) has written
nothing by then and costs the others nothing; any other exception undoes the whole batch. Rows of entries, events
and sessions are gathered and written once per batch, so a change that reads these tables calls `flush` first.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from recapd.storage.entry import Entry, encode_entry
from recapd.storage.errors import (
    CompactionRunning,
    Conflict,
    OperationReused,
    OperationUnknown,
    SessionClosed,
    SessionExists,
    StoreError,
    Superseded,
    UnknownSession,
)
from recapd.storage.events import event_body
from recapd.storage.store import (
    Appended,
    Durability,
    Event,
    Expect,
    NewItem,
    NewSession,
    Operation,
    Receipt,
    Replacement,
    Replayed,
    Session,
    SessionChanges,
    State,
    Status,
    Tokens,
)

POSITION_BITS: Final = 32  # of a position that count within a session: 4 thousand million entries
_CACHED_ROWS_MAX: Final = 4096  # about 2 MB
_SWEEP_ROWS: Final = 1000  # removed at once: an append behind it does not notice

# One value of JSON for a row: SQLite locks the connection for each column that is fetched, and in
# one piece a row is decoded five times faster. In the order of the fields of SessionRow; last the
# archived revisions, newest first.
SELECT_SESSION: Final = (
    "SELECT json_array(key, session_id, title, cwd, json(labels), created_at_ms, updated_at_ms,"
    " durability, state, revision, generation, base, entries, tokens_counted, tokens_estimated,"
    " next_entry_id, seq, running, json(CASE WHEN generation = 0 THEN '[]' ELSE"
    " (SELECT json_group_array(revision) FROM (SELECT revision FROM archives"
    " WHERE archives.key = sessions.key ORDER BY revision DESC)) END)) FROM sessions"
)
SELECT_OPERATION: Final = "SELECT operation_id, method, session_id, status, started_at_ms, ended_at_ms, outcome FROM operations"

_encode = msgspec.json.Encoder().encode


class SessionRow(msgspec.Struct, array_like=True):
    """A row of `sessions`, as the batch has changed it so far."""

    key: int
    session_id: str
    title: str | None
    cwd: str | None
    labels: dict[str, str]
    created_at_ms: int
    updated_at_ms: int
    durability: Durability
    state: State
    revision: int
    generation: int
    base: int
    entries: int
    tokens_counted: int
    tokens_estimated: int
    next_entry_id: int
    seq: int
    running: str | None
    archived_revisions: tuple[int, ...]

    def session(self) -> Session:
        """The row as the Store shows it."""
        return Session(
            self.session_id,
            self.title,
            self.cwd,
            self.labels,
            self.created_at_ms,
            self.updated_at_ms,
            self.durability,
            self.state,
            self.revision,
            self.generation,
            self.entries,
            Tokens(self.tokens_counted, self.tokens_estimated),
            self.archived_revisions,
            self.next_entry_id,
            self.seq,
            self.running,
        )


_decode_row = msgspec.json.Decoder(SessionRow).decode


def session_row(row: tuple[str]) -> SessionRow:
    """From a row that SELECT_SESSION gave."""
    return _decode_row(row[0])


def operation_of(row: tuple[Any, ...]) -> Operation:
    """From a row that SELECT_OPERATION gave."""
    return Operation(*row)


class CommitFailed(Exception):
    """COMMIT answered with an error, which does not say whether the transaction was made.

    If it was, the highest ordinal is `ordinal`, and these are its outcomes and events.
    """

    def __init__(
        self, error: sqlite3.Error, ordinal: int, outcomes: "list[Outcome]", events: list[Event]
    ) -> None:
        super().__init__()
        self.error = error
        self.ordinal = ordinal
        self.outcomes = outcomes
        self.events = events


Change = Callable[["Ledger"], Any]
Outcome = Any  # the change's result, or the Exception that it raised


class Ledger:
    """The state of one batch, and a cache of the session rows that batches have touched."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        now_ms: Callable[[], int],
        unlink: Callable[[str, int], None],
    ) -> None:
        self._db = connection
        self._now_ms = now_ms
        self._unlink = unlink
        self._removed_archives: list[tuple[str, int]] = []
        self._rows: dict[str, SessionRow] = {}
        self._changed: dict[int, SessionRow] = {}
        self._lines: list[tuple[int, bytes]] = []
        self._calls: list[tuple[int, int, str]] = []
        self._event_rows: list[tuple[int, int, int, str, bytes]] = []
        self.events: list[Event] = []
        self._now = 0
        self.ordinal = self._last_ordinal()
        (garbage,) = connection.execute("SELECT count(*) FROM garbage").fetchone()
        self.has_garbage = garbage > 0

    # One transaction.

    def run(self, changes: Sequence[Change]) -> tuple[list[Outcome], list[Event]]:
        """Make the changes in order, as one transaction, durable on return.

        Returns an outcome for each, and the events of all. Raises CommitFailed; or sqlite3.Error or whatever else
        a change raised, and then nothing was made.
        """
        self.events = []
        self._now = self._now_ms()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            outcomes: list[Outcome] = []
            for change in changes:
                try:
                    outcomes.append(change(self))
                except StoreError as refusal:
                    outcomes.append(refusal)
            self.flush()
        except BaseException:
            self._forget()
            if (
                self._db.in_transaction
            ):  # some errors roll back by themselves (sqlite.org/lang_transaction.html)
                self._db.execute("ROLLBACK")
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise CommitFailed(error, self.ordinal, outcomes, self.events) from error
        if len(self._rows) > _CACHED_ROWS_MAX:
            self._rows.clear()
        # Rows first, files after: a row without its file would be a loss, a file without a row is swept at start.
        for session_id, revision in self._removed_archives:
            self._unlink(session_id, revision)
        self._removed_archives.clear()
        return outcomes, self.events

    def _last_ordinal(self) -> int:
        (ordinal,) = self._db.execute("SELECT coalesce(max(ordinal), 0) FROM events").fetchone()
        return int(ordinal)

    def _forget(self) -> None:
        self._rows.clear()
        self._changed.clear()
        self._lines.clear()
        self._calls.clear()
        self._event_rows.clear()
        self._removed_archives.clear()
        self.ordinal = self._last_ordinal()

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
            db.executemany(
                "UPDATE sessions SET updated_at_ms = ?, revision = ?, generation = ?, base = ?,"
                " entries = ?, tokens_counted = ?, tokens_estimated = ?, next_entry_id = ?, seq = ?,"
                " running = ? WHERE key = ?",
                [
                    (
                        row.updated_at_ms,
                        row.revision,
                        row.generation,
                        row.base,
                        row.entries,
                        row.tokens_counted,
                        row.tokens_estimated,
                        row.next_entry_id,
                        row.seq,
                        row.running,
                        row.key,
                    )
                    for row in self._changed.values()
                ],
            )
            self._changed.clear()

    # What the changes share.

    def _row(self, session_id: str) -> SessionRow:
        row = self._rows.get(session_id)
        if row is None:
            self.flush()
            found = self._db.execute(
                f"{SELECT_SESSION} WHERE session_id = ?", (session_id,)
            ).fetchone()
            if found is None:
                raise UnknownSession
            row = self._rows[session_id] = session_row(found)
        return row

    @staticmethod
    def _check(row: SessionRow, expect: Expect) -> None:
        if expect.revision not in (None, row.revision) or expect.generation not in (
            None,
            row.generation,
        ):
            raise Conflict(row.revision, row.generation)

    def _event(
        self,
        row: SessionRow,
        method: str,
        operation_id: str | None,
        members: dict[str, object] | None = None,
    ) -> None:
        row.seq += 1
        self.ordinal += 1
        body = event_body(
            row.session_id,
            row.seq,
            row.revision,
            row.generation,
            self._now,
            operation_id,
            members or {},
        )
        self._changed[row.key] = row
        self._event_rows.append((self.ordinal, row.key, row.seq, method, body))
        self.events.append(Event(self.ordinal, row.session_id, row.seq, method, body))

    def _replay(self, receipt: Receipt | None) -> Replayed | None:
        if receipt is None:
            return None
        found = self._db.execute(
            "SELECT method, digest FROM operations WHERE operation_id = ?", (receipt.operation_id,)
        ).fetchone()
        if found is None:
            return None
        if found != (receipt.method, receipt.digest):
            raise OperationReused
        return Replayed(self._operation(receipt.operation_id))

    def _operation(self, operation_id: str) -> Operation:
        found = self._db.execute(
            f"{SELECT_OPERATION} WHERE operation_id = ?", (operation_id,)
        ).fetchone()
        if found is None:
            raise OperationUnknown
        return operation_of(found)

    def _record(
        self, receipt: Receipt | None, session_id: str, status: Status, outcome: bytes | None
    ) -> None:
        if receipt is None:
            return
        ended = None if status == "running" else self._now
        self._db.execute(
            "INSERT INTO operations (operation_id, method, digest, session_id, status, started_at_ms,"
            " ended_at_ms, outcome) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                receipt.operation_id,
                receipt.method,
                receipt.digest,
                session_id,
                status,
                self._now,
                ended,
                outcome,
            ),
        )

    def _add_lines(self, row: SessionRow, lines: Sequence[bytes]) -> None:
        position = row.key << POSITION_BITS | row.base + row.entries
        self._lines.extend(enumerate(lines, start=position))
        row.entries += len(lines)

    def _add_items(self, row: SessionRow, items: Sequence[NewItem]) -> list[tuple[int, str]]:
        """Append the items; the (entry id, call id) of outputs whose call the history does not make."""
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
        receipt: Receipt | None,
        render: Callable[[Session], bytes] | None,
    ) -> Session | Replayed:
        if replayed := self._replay(receipt):
            return replayed
        try:
            self._row(new.session_id)
        except UnknownSession:
            pass
        else:
            raise SessionExists
        tombstone = self._db.execute(
            "SELECT key, seq FROM tombstones WHERE session_id = ?", (new.session_id,)
        ).fetchone()
        seq = 0 if tombstone is None else tombstone[1]
        cursor = self._db.execute(
            "INSERT INTO sessions (session_id, title, cwd, labels, created_at_ms, updated_at_ms, durability,"
            " state, revision, generation, base, entries, tokens_counted, tokens_estimated, next_entry_id, seq)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'active', 0, 0, 0, 0, 0, 0, 1, ?)",
            (
                new.session_id,
                new.title,
                new.cwd,
                _encode(new.labels).decode(),
                self._now,
                self._now,
                new.durability,
                seq,
            ),
        )
        row = self._rows[new.session_id] = SessionRow(
            cursor.lastrowid or 0,
            new.session_id,
            new.title,
            new.cwd,
            new.labels,
            self._now,
            self._now,
            new.durability,
            "active",
            *(0, 0, 0, 0, 0, 0),
            1,
            seq,
            None,
            (),
        )
        if tombstone is not None:
            self._db.execute("UPDATE events SET key = ? WHERE key = ?", (row.key, tombstone[0]))
            self._db.execute("DELETE FROM tombstones WHERE key = ?", (tombstone[0],))
        operation_id = receipt.operation_id if receipt else None
        self._event(row, "session.created", operation_id)
        if items:
            self._add_items(row, items)
            self._appended(row, 1, operation_id)
        session = row.session()
        self._record(receipt, new.session_id, "completed", render(session) if render else None)
        return session

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        expect: Expect,
        receipt: Receipt | None,
        render: Callable[[Appended], bytes] | None,
    ) -> Appended | Replayed:
        if replayed := self._replay(receipt):
            return replayed
        row = self._row(session_id)
        self._check(row, expect)
        if row.state == "archived":
            raise SessionClosed
        first = row.next_entry_id
        unmatched = self._add_items(row, items)
        self._appended(row, first, receipt.operation_id if receipt else None)
        appended = Appended(row.session(), first, row.next_entry_id - 1, tuple(unmatched))
        if receipt is not None:
            self._record(receipt, session_id, "completed", render(appended) if render else None)
        return appended

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
        receipt: Receipt | None,
        render: Callable[[Session], bytes] | None,
    ) -> Session | Replayed:
        if replayed := self._replay(receipt):
            return replayed
        row = self._row(session_id)
        self._check(row, expect)
        for name in changes.__struct_fields__:
            value = getattr(changes, name)
            if value is not msgspec.UNSET:
                setattr(row, name, value)
        row.updated_at_ms = self._now
        self._db.execute(
            "UPDATE sessions SET title = ?, cwd = ?, labels = ?, state = ? WHERE key = ?",
            (row.title, row.cwd, _encode(row.labels).decode(), row.state, row.key),
        )
        self._event(row, "session.updated", receipt.operation_id if receipt else None)
        session = row.session()
        self._record(receipt, session_id, "completed", render(session) if render else None)
        return session

    def begin(self, session_id: str, receipt: Receipt, expect: Expect) -> Session | Replayed:
        if replayed := self._replay(receipt):
            return replayed
        row = self._row(session_id)
        self._check(row, expect)
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
        operation = self._operation(operation_id)
        if operation.status != "running":
            return operation
        row = self._row(operation.session_id)
        self._finish(row, operation_id, status, lambda: outcome, members)
        return self._operation(operation_id)

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
        self.flush()
        entries_before = row.entries
        if row.entries:
            first = row.key << POSITION_BITS | row.base
            self._discard(first, first + row.entries - 1, erase=False)
        self._db.execute(
            "INSERT INTO archives VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.key,
                archive.revision,
                archive.generation,
                archive.kind,
                archive.operation_id,
                archive.archived_at_ms,
                archive.entries,
                archive.tokens.counted,
                archive.tokens.estimated,
                archive.bytes,
                archive.sha256,
            ),
        )
        row.base += row.entries
        row.entries = 0
        row.revision += 1
        row.generation += 1
        row.archived_revisions = (archive.revision, *row.archived_revisions)
        row.next_entry_id = change.next_entry_id
        row.tokens_counted = change.tokens.counted
        row.tokens_estimated = change.tokens.estimated
        row.updated_at_ms = self._now
        self._add_lines(row, [encode_entry(entry) for entry in change.history])
        self._calls.extend((row.key, row.generation, call_id) for call_id in change.calls)
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

    def delete(
        self,
        session_id: str,
        expect: Expect,
        receipt: Receipt | None,
        render: Callable[[bool], bytes] | None,
        ended: bytes,
    ) -> bool | Replayed:
        if replayed := self._replay(receipt):
            return replayed
        try:
            row = self._row(session_id)
        except UnknownSession:
            self._record(receipt, session_id, "completed", render(False) if render else None)
            return False
        self._check(row, expect)
        self.flush()
        if row.running is not None:
            self._finish(
                row, row.running, "cancelled", lambda: ended, {"reason": "session_deleted"}
            )
        self._event(row, "session.deleted", receipt.operation_id if receipt else None)
        self.flush()
        db = self._db
        db.execute("DELETE FROM events WHERE key = ? AND seq < ?", (row.key, row.seq))
        db.execute("INSERT INTO tombstones VALUES (?, ?, ?)", (session_id, row.key, row.seq))
        db.execute("DELETE FROM calls WHERE key = ?", (row.key,))
        db.execute("DELETE FROM archives WHERE key = ?", (row.key,))
        db.execute("DELETE FROM sessions WHERE key = ?", (row.key,))
        if row.base + row.entries:
            first = row.key << POSITION_BITS
            db.execute(
                "DELETE FROM garbage WHERE first BETWEEN ? AND ?", (first, first | 0xFFFFFFFF)
            )
            self._discard(first, first + row.base + row.entries - 1, erase=True)
        del self._rows[session_id]
        self._removed_archives += [(session_id, revision) for revision in row.archived_revisions]
        self._record(receipt, session_id, "completed", render(True) if render else None)
        return True

    # Housekeeping.

    def _discard(self, first: int, last: int, *, erase: bool) -> None:
        self._db.execute("INSERT INTO garbage VALUES (?, ?, ?)", (first, last, erase))
        self.has_garbage = True

    def sweep(self) -> None:
        """Remove a few rows of replaced or deleted histories; `has_garbage` says whether there is more."""
        found = self._db.execute("SELECT first, last, erase FROM garbage LIMIT 1").fetchone()
        if found is None:
            self.has_garbage = False
            return
        first, last, erase = found
        self._db.execute(f"PRAGMA secure_delete={'ON' if erase else 'OFF'}").fetchall()
        until = min(first + _SWEEP_ROWS, last + 1)
        self._db.execute("DELETE FROM entries WHERE position >= ? AND position < ?", (first, until))
        self._db.execute("DELETE FROM garbage WHERE first = ?", (first,))
        if until <= last:
            self._discard(until, last, erase=erase)

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
            self.delete(session_id, Expect(), None, None, b"{}")
