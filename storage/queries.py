"""What readers ask the database: each function reads one state of it, on a reader's thread."""

import json
import sqlite3
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Final

import msgspec

from recapd.storage.database import Damaged
from recapd.storage.errors import RevisionUnknown
from recapd.storage.rows import (
    POSITION_BITS,
    SELECT_REVISION,
    SELECT_SESSION,
    SessionRow,
    find_session,
    revision_of,
    session_row,
)
from recapd.storage.store import AccessToken, Event, Order, Page, Query, Revision, Session


class Span:
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

    def of(self, entries: int) -> tuple[int, range]:
        """How many of a history's entries count, and the indexes of a page, in its order."""
        total = entries if self.total is None else min(entries, self.total)
        if self.order == "asc":
            start = 0 if self.start is None else self.start
            return total, range(start, min(total, start + self.limit))
        start = total - 1 if self.start is None else min(self.start, total - 1)
        return total, range(start, max(-1, start - self.limit), -1)

    def take(
        self, lines: Iterable[bytes], indexes: range, total: int
    ) -> tuple[list[bytes], int | None]:
        """Take lines, which belong to `indexes`, until `bytes_max` would be passed.

        Returns them and the index of the next one. Raises ValueError when there are too few.
        """
        entries: list[bytes] = []
        room = self.bytes_max
        for index, line in zip(indexes, lines, strict=True):
            room -= len(line) + 1
            if room < 0 and entries:
                return entries, index
            entries.append(line)
        more = bool(indexes) and 0 <= indexes.stop < total
        return entries, indexes.stop if more else None


def last_lines(lines: Iterable[bytes], bytes_max: int) -> deque[bytes]:
    """The last lines that fit, and at least one more where there is one: so a page knows of it."""
    kept: deque[bytes] = deque()
    size_bytes = 0
    for line in lines:
        kept.append(line)
        size_bytes += len(line) + 1
        while len(kept) > 2 and size_bytes - len(kept[0]) - 1 > bytes_max:
            size_bytes -= len(kept.popleft()) + 1
    return kept


@contextmanager
def snapshot(db: sqlite3.Connection) -> Generator[None]:
    """A read transaction: everything within sees one state."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        if db.in_transaction:  # some errors end it (sqlite.org/lang_transaction.html)
            db.execute("ROLLBACK")


_SORT_COLUMNS: Final = {
    "updated_at": "updated_at_ms",
    "created_at": "created_at_ms",
    "session_id": "session_id",
}


def list_sessions(db: sqlite3.Connection, query: Query) -> list[Session]:
    """Sessions in order; what it costs does not depend on their histories."""
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
    if query.only is not None:
        where("session_id IN (SELECT value FROM json_each(?))", json.dumps(query.only))
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


@contextmanager
def lines_of(db: sqlite3.Connection, row: SessionRow, indexes: range) -> Generator[Iterator[bytes]]:
    """The lines of the present history at `indexes`, in their order; they raise Damaged."""
    rising = indexes if indexes.step > 0 else indexes[::-1]
    first = row.key << POSITION_BITS | row.base
    rows = db.execute(
        "SELECT line FROM entries WHERE position >= ? AND position < ?"
        f" ORDER BY position {'ASC' if rising is indexes else 'DESC'}",
        (first + rising.start, first + rising.stop),
    )
    with closing(rows):  # or it would keep its snapshot as long as somebody keeps an exception
        yield (_bytes(line) for (line,) in rows)


def _bytes(line: object) -> bytes:
    if not isinstance(line, bytes):  # the table is STRICT: nobody wrote it
        raise Damaged("an entry is not what was written")
    return line


def list_revisions(db: sqlite3.Connection, session_id: str) -> list[Revision]:
    """The archived revisions, newest first. Raises UnknownSession."""
    with snapshot(db):
        return revisions_of(db, find_session(db, session_id))


def revisions_of(db: sqlite3.Connection, row: SessionRow) -> list[Revision]:
    """The archived revisions of a session, newest first."""
    rows = db.execute(f"{SELECT_REVISION} WHERE key = ? ORDER BY revision DESC", (row.key,))
    return [revision_of(archive) for archive in rows]


def live_page(
    db: sqlite3.Connection,
    session_id: str,
    revision: int | None,
    generation: int | None,
    span: Span,
) -> Page | tuple[Session, Revision]:
    """A page of the present history; or the archived revision that is asked for.

    Raises UnknownSession, RevisionUnknown, Damaged.
    """
    with snapshot(db):
        row = find_session(db, session_id)
        if revision not in (None, row.revision) or generation not in (None, row.generation):
            found = db.execute(
                f"{SELECT_REVISION} WHERE key = ? AND (revision = ? OR generation = ?)",
                (row.key, revision, generation),
            ).fetchone()
            if found is None:
                raise RevisionUnknown(revision)
            return row.session(), revision_of(found)
        total, indexes = span.of(row.entries)
        try:
            with lines_of(db, row, indexes) as lines:
                taken = span.take(lines, indexes, total)
        except ValueError as error:
            raise Damaged("entries are missing") from error
        return Page(row.session(), row.revision, row.generation, total, *taken)


def list_events(db: sqlite3.Connection, session_id: str, after_seq: int, limit: int) -> list[Event]:
    rows = db.execute(
        "SELECT ordinal, seq, method, body FROM events WHERE seq > ? AND key ="
        " coalesce((SELECT key FROM sessions WHERE session_id = ?),"
        " (SELECT key FROM tombstones WHERE session_id = ?)) ORDER BY seq LIMIT ?",
        (after_seq, session_id, session_id, limit),
    )
    return [_event(ordinal, session_id, *rest) for ordinal, *rest in rows]


def list_events_of_all(db: sqlite3.Connection, after_ordinal: int, limit: int) -> list[Event]:
    rows = db.execute(
        "SELECT ordinal, coalesce("
        " (SELECT session_id FROM sessions WHERE sessions.key = events.key),"
        " (SELECT session_id FROM tombstones WHERE tombstones.key = events.key)),"
        " seq, method, body FROM events WHERE ordinal > ? ORDER BY ordinal LIMIT ?",
        (after_ordinal, limit),
    )
    return [_event(*row) for row in rows]


def _event(ordinal: object, session_id: object, seq: object, method: object, body: object) -> Event:
    match ordinal, session_id, seq, method, body:
        case int(), str(), int(), str(), bytes():
            return Event(ordinal, session_id, seq, method, body)
        case _:  # the table is STRICT: nobody wrote it
            raise Damaged("an event is not what was written")


def list_tokens(db: sqlite3.Connection) -> list[AccessToken]:
    rows = db.execute(
        "SELECT token_id, digest, label, scopes, sessions, parent, created_at_ms, expires_at_ms"
        " FROM access_tokens ORDER BY created_at_ms, token_id"
    )
    return [_token(*row) for row in rows]


def _token(*row: object) -> AccessToken:
    match row:
        case (
            str(token_id),
            bytes(digest),
            str(label),
            str(scopes),
            str() | None as sessions,
            str() | None as parent,
            int(created_at_ms),
            int() | None as expires_at_ms,
        ):
            return AccessToken(
                token_id,
                digest,
                label,
                _names(scopes),
                None if sessions is None else _names(sessions),
                parent,
                created_at_ms,
                expires_at_ms,
            )
        case _:  # the table is STRICT: nobody wrote it
            raise Damaged("a token is not what was written")


def _names(text: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise Damaged("a token is not what was written") from error
